#!/usr/bin/env python3
"""Holds `millstream plan` against `millstream run`: a Markdown table of what was predicted and what was measured.

    plan.py PROGRAM MODEL BUDGET [BUDGET ...] [-n TOKENS] [-c CONTEXT] [--history FILE] [--sampled]

For each budget `plan` and `run` take turns, so that both see the same minute of the drive. `run` is done once more with
`-n 1`, whose counters are taken off, so that all figures are of the tokens after the prompt, and starts with an empty
cache each time. With `--history` both are told what 80 tokens chose that were sampled after another prompt, by way of
FILE, which is made where it is not there; without, of nothing. `--sampled` draws tokens in the place of taking the likeliest, for a model whose likeliest run in circles.

The ratio is predicted by measured; bold is off by more than a quarter.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

PROMPT = " ".join(str(token) for token in range(100, 116))
OTHER_PROMPT = "7 9 300 22 81 14 250 33"


def call(program, *arguments):
    done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join([program, *arguments])} failed:\n{done.stderr}")
    return done.stdout


def run(options, ram, usage, tokens, stats):
    choice = ["--temp", "1", "--seed", "3"] if options.sampled else ["--temp", "0"]
    common = ["run", "-m", options.model, "--ids", "-p", PROMPT, "-c", str(options.context), "--ram", ram]
    call(options.program, *common, "-n", str(tokens), *choice, "--ignore-eos", "--usage", usage, "--stats-json", stats)
    with open(stats, encoding="utf-8") as file:
        return json.load(file)


def recorded(options):
    """The history that each run is given a copy of, so that none adds to it."""
    if not os.path.exists(options.history):
        call(options.program, "run", "-m", options.model, "--ids", "-p", OTHER_PROMPT, "-n", "80", "--temp", "1", "--seed", "5",
             "--ignore-eos", "-c", str(options.context), "--ram", options.budgets[-1], "--usage", options.history)
    with open(options.history, "rb") as file:
        return file.read()


def compared(options, ram, history, scratch):
    """One line of the table."""
    usage, stats = "off", os.path.join(scratch, "stats.json")

    def renewed():
        nonlocal usage
        if history is not None:
            usage = os.path.join(scratch, "copy")
            with open(usage, "wb") as file:
                file.write(history)
        return usage

    plan = json.loads(call(options.program, "plan", "-m", options.model, "--ram", ram, "-c", str(options.context),
                           "--prompt-tokens", str(len(PROMPT.split())), "--usage", renewed(), "--json"))
    whole = run(options, ram, renewed(), options.n, stats)
    prompt = run(options, ram, renewed(), 1, stats)
    overlap, steps = whole["overlap"], options.n - 1

    def after(part, name):
        return whole[part][name] - prompt[part][name]

    asked = after("experts", "requested")
    read = after("experts", "missed") + after("experts", "hit_prefetched")
    rate = after("io", "bytes") / max(after("io", "busy_s"), 1e-9) / 1e9
    ratio = plan["predicted_tok_s"] / whole["decode_tok_s"]
    cells = [
        ram,
        f"{plan['slots']} of {plan['experts']}",
        "none" if history is None else "history",
        f"{100 * plan['expected_hit_rate']:.0f}, {100 * (1 - read / asked):.0f} %",
        f"{plan['disk']['gb_s'] or 0:.2f}, {rate:.2f}",
        f"{1e3 * plan['disk_s']:.1f}, {1e3 * overlap['disk_busy_s'] / steps:.1f}",
        f"{1e3 * plan['compute_s']:.2f}, {1e3 * overlap['compute_busy_s'] / steps:.2f}",
        f"{plan['predicted_tok_s']:.4g}",
        f"{whole['decode_tok_s']:.4g}",
        f"{ratio:.2f}" if 0.75 <= ratio <= 1.25 else f"**{ratio:.2f}**",
    ]
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("budgets", nargs="+")
    parser.add_argument("-n", type=int, default=64, help="tokens of the answer")
    parser.add_argument("-c", "--context", type=int, default=512)
    parser.add_argument("--history", metavar="FILE")
    parser.add_argument("--sampled", action="store_true")
    options = parser.parse_args()
    names = ["`--ram`", "slabs", "usage", "found in memory", "GB/s", "drive, ms a token", "arithmetic, ms",
             "predicted tok/s", "measured", "ratio"]
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        history = recorded(options) if options.history else None
        for ram in options.budgets:
            print(compared(options, ram, history, scratch), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
