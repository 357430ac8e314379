#!/usr/bin/env bash
# How long the README's two commands take in a fresh clone of what is committed: by the clock, and of
# processor time, which counts where other work runs beside them. Packages are installed before the
# clock starts, no compiler cache is used, and nothing is known of an earlier build.
#
#   bench/first_minute.sh [FILE]    writes bench/results/first_minute.json, or FILE
#   QCONV=build/qconv python3 -B tests/cli/test_readme.py --update    puts the times into README.md
set -euo pipefail
cd "$(dirname "$0")/.."
file=$(realpath -m "${1:-bench/results/first_minute.json}")
commit=$(git rev-parse --short HEAD)
folder=$(mktemp -d "${TMPDIR:-/tmp}/qconv-first-minute-XXXXXX")
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder" # some tests run the program as another user

unset CMAKE_C_COMPILER_LAUNCHER CMAKE_CXX_COMPILER_LAUNCHER CMAKE_CUDA_COMPILER_LAUNCHER
unset QCONV_CMAKE QCONV_CUDA
export CCACHE_DISABLE=1
git clone -q . "$folder/qconv"
cd "$folder/qconv"
./bootstrap.sh packages

# timed COMMAND: prints its object of the JSON.
timed() {
    local TIMEFORMAT='%R %U %S' load seconds
    read -r load _ </proc/loadavg
    seconds=$({ time "$@" >"$folder/log" 2>&1; } 2>&1) || { tail -n 40 "$folder/log" >&2; return 1; }
    awk -v command="$*" -v load="$load" '{
        printf "{\"command\": \"%s\", \"seconds\": %.1f, \"processor_seconds\": %.1f, \"load_before\": %s}",
            command, $1, $2 + $3, load }' <<<"$seconds"
}
run=$(timed ./bootstrap.sh run)
test=$(timed ./bootstrap.sh test)
cat >"$file" <<EOF
{
 "bench": "first_minute",
 "command": "bench/first_minute.sh",
 "commit": "$commit",
 "processor": "$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)",
 "cores": $(nproc),
 "run": $run,
 "test": $test
}
EOF
cat "$file"
