#!/usr/bin/env python3
"""Pairs two records of `millstream bench -o json`: what a change, another setting or another machine is worth.

    compare.py BEFORE.json AFTER.json

Prints a Markdown table of the tests that both have: medians, their ratio, and the range of ratios that the samples allow
(least after over most before to the reverse). Says where the two differ in model, machine, settings or tokens. Exit code
1 where routers chose other experts for a test: then the two did not do the same work and no ratio means anything.
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


def main():
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    records = []
    for path in sys.argv[1:]:
        try:
            with open(path, encoding="utf-8") as file:
                record = json.load(file)
            record["tests"] = {(test["name"], test["cold"]): test for test in record["tests"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"error: {path} is no record of `millstream bench -o json`: {error}", file=sys.stderr)
            return 1
        records.append(record)
    before, after = records
    both = [key for key in before["tests"] if key in after["tests"]]
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
    for line in differences(before, after):
        print(line)
    for key in [*before["tests"], *after["tests"]]:
        if key not in both:
            print(f"only in one: {key[0]}")
    for name in unlike:
        print(f"error: {name}: routers chose other experts, so the two did other work", file=sys.stderr)
    return 1 if unlike else 0


sys.exit(main())
