#!/usr/bin/env bash
# Counts the instructions of kernels that valgrind can run (scalar and AVX2; it knows no AVX-512), compares them with
# bench/instructions.txt and fails where one differs by more than 2 %. `--write` renews that file; `--wanted` compares
# nothing, and fails where nothing would be compared.
set -euo pipefail
cd "$(dirname "$0")/.."

counts=bench/instructions.txt
# Flags for another processor count otherwise.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS
compiler=$(rustc --version)
if [[ ${1:-} != --write && $(head -n 1 "$counts") != "$compiler" ]]; then
    echo "skipped: $counts is of $(head -n 1 "$counts"), this is $compiler; renew it by scripts/callgrind.sh --write"
    [[ ${1:-} != --wanted ]]
    exit
fi
# Whether it is worth installing valgrind.
if [[ ${1:-} == --wanted ]]; then
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
CARGO_INCREMENTAL=0 \
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="valgrind -q --tool=callgrind --callgrind-out-file=$found/out" \
    cargo test --quiet --release --bench instructions

shopt -s nullglob
dumps=("$found"/out.*)
if [[ ${#dumps[@]} -eq 0 ]]; then
    echo "valgrind counted nothing: the program ran without it" >&2
    exit 1
fi
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
