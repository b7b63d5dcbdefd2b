#!/usr/bin/env python3
"""How close decode comes to the memory's limit: bytes that a token touches, by the bandwidth of a plain read beside it.

    decode_limit.py PROGRAM KERNELS_BENCH MODEL [-r ROUNDS] [-n TOKENS] [-d DEPTH] [--flags FLAGS]

The model must fit in memory whole. Each round measures the plain read of `cargo bench --bench kernels` (KERNELS_BENCH is the
program that it builds), then `bench -n TOKENS`, warm, so that every expert is in memory, then the plain read again. Touched
are all weights but embeddings, and of routed experts the share that a token chooses; the context is not counted. A layer's
time is the token's.
"""
import argparse
import json
import re
import statistics
import subprocess
import sys


def call(*arguments):
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout


def touched(program, model):
    """Bytes a token reads of memory, and how many of them are routed experts'."""
    kinds = json.loads(call(program, "census", model, "--json"))["kinds"]
    config = json.load(open(f"{model}/config.json", encoding="utf-8"))
    routed = sum(kind["bytes"] for kind in kinds if kind["part"] == "routed experts")
    chosen = routed * config["num_experts_per_tok"] / config["n_routed_experts"]
    always = sum(kind["bytes"] for kind in kinds if kind["part"] not in ("routed experts", "embeddings"))
    return always + chosen, chosen


def plain_read(kernels):
    printed = call(kernels, "--bench", "avx512", "int8", "integer", "2048x6144", "b1", "t2")
    return float(re.search(r"plain read, 2 threads: ([0-9.]+) GB/s", printed).group(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("kernels")
    parser.add_argument("model")
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("-d", type=int, default=0)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--flags", default="")
    options = parser.parse_args()

    total, chosen = touched(options.program, options.model)
    print(f"a token touches {total / 1e6:.0f} MB, {chosen / 1e6:.0f} MB of them routed experts\n")
    print("| plain read before, after, GB/s | ms a token at that | measured, ms | ratio |\n|---|---|---|---|")
    ratios = []
    for _ in range(options.rounds):
        before = plain_read(options.kernels)
        report = json.loads(call(options.program, "bench", "-m", options.model, "-p", "0", "-n", str(options.n), "-d", str(options.d), "-r", "1",
                                 "-o", "json", "-q", *options.flags.split()))
        after = plain_read(options.kernels)
        rate = report["tests"][0]["samples_tok_s"][0]
        limit = 1e3 * total / ((before + after) / 2 * 1e9)
        ratios.append(1e3 / rate / limit)
        print(f"| {before:.1f}, {after:.1f} | {limit:.2f} | {1e3 / rate:.2f} | {ratios[-1]:.3f} |", flush=True)
    print(f"\nmedian ratio {statistics.median(ratios):.3f}")


main()
