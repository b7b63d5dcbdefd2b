#!/usr/bin/env bash
# Counts the instructions of every kernel that valgrind can run (scalar and AVX2; it knows no AVX-512) and compares them with
# bench/instructions.txt. `--write` renews that file. Fails where a count differs by more than 2 %.
set -euo pipefail
cd "$(dirname "$0")/.."

counts=bench/instructions.txt
compiler=$(rustc --version)
if [[ ${1:-} != --write && $(head -n 1 "$counts") != "$compiler" ]]; then
    echo "skipped: $counts is of $(head -n 1 "$counts"), this is $compiler; renew it by scripts/callgrind.sh --write"
    exit 0
fi
if ! command -v valgrind >/dev/null; then
    echo "skipped: no valgrind here"
    exit 0
fi
if ! grep -qw avx2 /proc/cpuinfo || ! grep -qw f16c /proc/cpuinfo; then
    echo "skipped: this CPU has no AVX2"
    exit 0
fi

found=$(mktemp -d)
trap 'rm -rf "$found"' EXIT
# Units of an incremental build are inlined into each other otherwise than those of a plain one.
CARGO_PROFILE_RELEASE_INCREMENTAL=false \
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="valgrind -q --tool=callgrind --callgrind-out-file=$found/out" \
    cargo test --quiet --release --bench instructions

# Each dump names what was counted and gives the sum.
awk '/^desc: Trigger: Client Request: / { sub(/^desc: Trigger: Client Request: /, ""); name = $0 }
     /^summary: / && name != "" { print $2, name; name = "" }' $(ls -v "$found"/out.*) >"$found/counts"
if [[ ${1:-} == --write ]]; then
    { echo "$compiler"; cat "$found/counts"; } >"$counts"
    echo "wrote $(wc -l <"$found/counts") counts to $counts"
    exit 0
fi
awk 'FNR == 1 { file++ }
     { name = $0; sub(/^[0-9]+ /, "", name) }
     file == 1 && FNR > 1 { want[name] = $1 }
     file == 2 {
         got[name] = 1
         if (!(name in want)) { print "not in the file: " name; bad = 1 }
         else if ($1 > want[name] * 1.02 || $1 < want[name] / 1.02) {
             printf "%s: %d instructions instead of %d\n", name, $1, want[name]; bad = 1
         }
     }
     END {
         for (name in want) if (!(name in got)) { print "not counted: " name; bad = 1 }
         if (bad) print "renew what is meant to differ: scripts/callgrind.sh --write"
         exit bad
     }' "$counts" "$found/counts"
echo "$(wc -l <"$found/counts") kernels take as many instructions as recorded"
