#!/usr/bin/env python3
"""Pairs two records of `millstream bench -o json`: what a change, another setting or another machine is worth.

    compare.py BEFORE.json AFTER.json

Prints a Markdown table of the tests that both have: medians, their ratio, and the range of ratios that the samples allow
(least after over most before to the reverse). Says where the two differ in model, machine, settings or tokens, and which
tests were cold in one and warm in the other: those are never paired. Exit code 1 where there is nothing to pair, and where
routers chose other experts for a test: then the two did not do the same work and no ratio means anything.
"""
import json
import sys


def differences(before, after):
    """Lines that name what else than the program differs."""
    for part in ("machine", "model", "settings"):
        keys = dict.fromkeys([*before[part], *after[part]])
        for key in keys:
            a, b = before[part].get(key), after[part].get(key)
            if a != b:
                yield f"{part}.{key}: {json.dumps(a)} -> {json.dumps(b)}"
    for key in ("version", "tokens"):
        if before[key] != after[key]:
            yield f"{key}: {before[key]} -> {after[key]}"


def read(path):
    """A record, its tests by name and whether they were cold."""
    with open(path, encoding="utf-8") as file:
        record = json.load(file)
    record["tests"] = {(test["name"], test["cold"]): test for test in record["tests"]}
    return record


def unpaired(before, after):
    """Lines that name the tests that only one record has, or that are cold in one and warm in the other."""
    for name, cold in dict.fromkeys([*before["tests"], *after["tests"]]):
        mine, other = ([(name, c) in record["tests"] for record in (before, after)] for c in (cold, not cold))
        if all(mine):
            continue
        if mine == other[::-1]:
            if mine[0]:
                yield f"not compared: {name} is {state(cold)} before and {state(not cold)} after"
        else:
            yield f"only {'before' if mine[0] else 'after'}: {name}, {state(cold)}"


def state(cold):
    return "cold" if cold else "warm"


def main(paths):
    if "-h" in paths or "--help" in paths:
        print(__doc__.strip())
        return 0
    if len(paths) != 2 or any(path.startswith("-") for path in paths):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    records = []
    for path in paths:
        try:
            records.append(read(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"error: {path} is no record of `millstream bench -o json`: {error}", file=sys.stderr)
            return 1
    before, after = records
    both = [key for key in before["tests"] if key in after["tests"]]
    if not both:
        for line in unpaired(before, after):
            print(line)
        print("error: the two have no test in common", file=sys.stderr)
        return 1
    print("| test | before | after | ratio | of samples |\n|---|---:|---:|---:|---:|")
    unlike = []
    for key in both:
        a, b = before["tests"][key], after["tests"][key]
        least, most = (f(b["samples_tok_s"]) / g(a["samples_tok_s"]) for f, g in ((min, max), (max, min)))
        name = key[0] + (", cold" if key[1] else "")
        print(f"| {name} | {a['median']:.2f} | {b['median']:.2f} | {b['median'] / a['median']:.3f} | {least:.2f}..{most:.2f} |")
        if a["routing"] != b["routing"]:
            unlike.append(name)
    print()
    for line in [*differences(before, after), *unpaired(before, after)]:
        print(line)
    for name in unlike:
        print(f"error: {name}: routers chose other experts, so the two did other work", file=sys.stderr)
    return 1 if unlike else 0


sys.exit(main(sys.argv[1:]))
