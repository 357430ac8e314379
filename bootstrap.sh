#!/usr/bin/env bash
# From a fresh clone on Debian or Ubuntu:
#   ./bootstrap.sh run    install what is missing, build build/qconv, convert the bundled model
#   ./bootstrap.sh test   install what is missing, build, run the tests
# Both may be run again at any time; the second time there is little left to do.
# QCONV_CMAKE holds options for CMake, for example QCONV_CMAKE="-DQCONV_CUDA=OFF".
set -euo pipefail
cd "$(dirname "$0")"

BUILD_PACKAGES=(gcc libc6-dev cmake ninja-build pkg-config libzstd-dev libxxhash-dev
    libpcre2-dev libutf8proc-dev)
TEST_PACKAGES=(g++ libcmocka-dev libopenblas0-pthread python3 zstd dpkg-dev file)

say() { printf '%s\n' "$*" >&2; }

usage() {
    say "usage: ./bootstrap.sh run|test"
    exit 2
}

# Install the packages among "$@" that are missing; with sudo only if that is needed.
need() {
    local missing=() package sudo=()
    for package in "$@"; do
        dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
            missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    if ! command -v apt-get >/dev/null; then
        say "bootstrap: these packages are missing and there is no apt-get: ${missing[*]}"
        exit 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || {
            say "bootstrap: run as root or install sudo; these packages are missing: ${missing[*]}"
            exit 1
        }
        sudo=(sudo)
    fi
    say "bootstrap: installing ${missing[*]}"
    local log
    log=$(mktemp)
    if ! { "${sudo[@]}" apt-get update -q &&
        DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -q -y \
            --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        say "bootstrap: the packages could not be installed"
        rm -f "$log"
        exit 1
    fi
    rm -f "$log"
}

# Configure only when there is something new to configure; build what changed.
build() {
    if [ ! -f build/build.ninja ] || [ CMakePresets.json -nt build/build.ninja ]; then
        # shellcheck disable=SC2086 # one option a word
        cmake --preset release ${QCONV_CMAKE:-} >build.log 2>&1 || { cat build.log >&2; exit 1; }
        sed -n 's/^-- \(.*CUDA kernels.*\)/bootstrap: \1/p' build.log >&2
        rm -f build.log
    fi
    cmake --build build -- --quiet
}

run() {
    local model=tests/data/kjv-llama/model out=out/kjv-llama-nf4
    need "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}"
    build
    say "bootstrap: converting the bundled model: build/qconv --to nf4 $model $out"
    build/qconv --to nf4 "$model" "$out"
    build/qconv verify "$out"
    local before after
    before=$(du -sb "$model" | cut -f1)
    after=$(du -sb "$out" | cut -f1)
    say "bootstrap: the result is in $out: $after bytes, before $before" \
        "($((100 - 100 * after / before))% saved); open it with" \
        "'build/qconv inspect $out', unpack it with 'build/qconv unpack $out DIR'"
}

run_tests() {
    need "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}"
    build
    ctest --test-dir build --output-on-failure -j "$(nproc)" -LE 'slow|endurance|interop|gpu|fresh'
}

[ $# -eq 1 ] || usage
case "$1" in
run) run ;;
test) run_tests ;;
*) usage ;;
esac
