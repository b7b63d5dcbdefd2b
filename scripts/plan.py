#!/usr/bin/env python3
"""Holds `millstream plan` against `millstream run`: a Markdown table of what was predicted and what was measured.

    plan.py PROGRAM MODEL BUDGET [BUDGET ...] [-n TOKENS] [-p TOKENS] [-c CONTEXT] [-r ROUNDS] [--flags FLAGS]
            [--history FILE] [--sampled]

For each budget `plan` and `run` take turns, so that both see the same minute of the drive, as often as there are rounds;
what the table has is the median of each. `run` is done once more with `-n 1`, whose counters are taken off, so that all
figures are of the tokens after the prompt, and starts with an empty cache each time; `plan` is asked about that very answer.
FLAGS, in one argument, are given to both, such as "--dense-bits 4 --io-bits 8". With `--history` both are told what 80
tokens chose that were sampled after another prompt, by way of FILE, which is made where it is not there; without, of
nothing. `--sampled` draws tokens in the place of taking the likeliest, for a model whose likeliest run in circles.

The ratio is predicted by measured; bold is off by more than a quarter.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

OTHER_PROMPT = "7 9 300 22 81 14 250 33"


def prompt(options):
    return " ".join(str(token) for token in range(100, 100 + options.prompt_tokens))


def call(program, *arguments):
    done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join([program, *arguments])} failed:\n{done.stderr}")
    return done.stdout


def run(options, ram, usage, tokens, stats):
    choice = ["--temp", "1", "--seed", "3"] if options.sampled else ["--temp", "0"]
    common = ["run", "-m", options.model, "--ids", "-p", prompt(options), "-c", str(options.context), "--ram", ram]
    call(options.program, *common, *options.flags.split(), "-n", str(tokens), *choice, "--ignore-eos", "--usage", usage,
         "--stats-json", stats)
    with open(stats, encoding="utf-8") as file:
        return json.load(file)


def recorded(options):
    """The history that each run is given a copy of, so that none adds to it."""
    if not os.path.exists(options.history):
        call(options.program, "run", "-m", options.model, "--ids", "-p", OTHER_PROMPT, "-n", "80", "--temp", "1", "--seed", "5",
             "--ignore-eos", "-c", str(options.context), "--ram", options.budgets[-1], *options.flags.split(), "--usage",
             options.history)
    with open(options.history, "rb") as file:
        return file.read()


def turn(options, ram, history, scratch):
    """Figures of one turn, by name: what was predicted and what was measured, or one of both."""
    usage, stats = "off", os.path.join(scratch, "stats.json")

    def renewed():
        nonlocal usage
        if history is not None:
            usage = os.path.join(scratch, "copy")
            with open(usage, "wb") as file:
                file.write(history)
        return usage

    plan = json.loads(call(options.program, "plan", "-m", options.model, "--ram", ram, "-c", str(options.context),
                           "--prompt-tokens", str(options.prompt_tokens), "-n", str(options.n), *options.flags.split(),
                           "--usage", renewed(), "--json"))
    whole = run(options, ram, renewed(), options.n, stats)
    prompted = run(options, ram, renewed(), 1, stats)
    overlap, steps = whole["overlap"], options.n - 1

    def after(part, name):
        return whole[part][name] - prompted[part][name]

    asked = after("experts", "requested")
    read = after("experts", "missed") + after("experts", "hit_prefetched")
    rate = after("io", "bytes") / max(after("io", "busy_s"), 1e-9) / 1e9
    return {
        "slabs": (plan["slots"], plan["experts"]),
        "found": (100 * plan["expected_hit_rate"], 100 * (1 - read / asked)),
        "GB/s": (plan["disk"]["gb_s"] or 0, rate),
        "drive": (1e3 * plan["disk_s"], 1e3 * overlap["disk_busy_s"] / steps),
        "arithmetic": (1e3 * plan["compute_s"], 1e3 * overlap["compute_busy_s"] / steps),
        "tok/s": (plan["predicted_tok_s"], whole["decode_tok_s"]),
    }


def compared(options, ram, history, scratch):
    """One line of the table."""
    turns = [turn(options, ram, history, scratch) for _ in range(options.rounds)]

    def median(name):
        return [statistics.median(turn[name][side] for turn in turns) for side in (0, 1)]

    slabs, found, rate, drive, arithmetic, tok_s = map(median, turns[0])
    ratio = tok_s[0] / tok_s[1]
    cells = [
        ram,
        f"{slabs[0]} of {slabs[1]}",
        "none" if history is None else "history",
        f"{found[0]:.0f}, {found[1]:.0f} %",
        f"{rate[0]:.2f}, {rate[1]:.2f}",
        f"{drive[0]:.1f}, {drive[1]:.1f}",
        f"{arithmetic[0]:.2f}, {arithmetic[1]:.2f}",
        f"{tok_s[0]:.4g}",
        f"{tok_s[1]:.4g}",
        f"{ratio:.2f}" if 0.75 <= ratio <= 1.25 else f"**{ratio:.2f}**",
    ]
    if options.rounds > 1:
        cells.append(", ".join(f"{turn['tok/s'][0] / turn['tok/s'][1]:.2f}" for turn in turns))
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("budgets", nargs="+")
    parser.add_argument("-n", type=int, default=64, help="tokens of the answer")
    parser.add_argument("-p", "--prompt-tokens", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("-r", "--rounds", type=int, default=1, help="turns of each budget")
    parser.add_argument("--flags", default="", help="flags of both commands")
    parser.add_argument("-c", "--context", type=int, default=512)
    parser.add_argument("--history", metavar="FILE")
    parser.add_argument("--sampled", action="store_true")
    options = parser.parse_args()
    names = ["`--ram`", "slabs", "usage", "found in memory", "GB/s", "drive, ms a token", "arithmetic, ms",
             "predicted tok/s", "measured", "ratio"] + (["of each turn"] if options.rounds > 1 else [])
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        history = recorded(options) if options.history else None
        for ram in options.budgets:
            print(compared(options, ram, history, scratch), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
