#!/usr/bin/env bash
# From a fresh clone on Debian or Ubuntu:
#   ./bootstrap.sh run    install what is missing, build build/qconv, convert the bundled model
#   ./bootstrap.sh test   install what is missing, build what the default tests need, run them
#   ./bootstrap.sh packages   install what is missing for both, and nothing else
# All may be run again at any time, in any order; the second time there is little left to do.
#
# Kernels for GPUs are built where a GPU and a CUDA toolkit are, for that GPU alone. QCONV_CUDA=ON in
# the environment builds them without a GPU, then for all, and QCONV_CUDA=OFF nowhere. QCONV_CMAKE holds
# more options for CMake, for example QCONV_CMAKE="-DCMAKE_CUDA_ARCHITECTURES=80-real".
set -euo pipefail
cd "$(dirname "$0")"

BUILD_PACKAGES=(gcc libc6-dev cmake ninja-build pkg-config libzstd-dev libxxhash-dev)
TEST_PACKAGES=(g++ libcmocka-dev libopenblas0-pthread python3 python3-numpy zstd dpkg-dev file)

say() { printf '%s\n' "$*" >&2; }

usage() {
    say "usage: ./bootstrap.sh run|test|packages"
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

gpu_is_here() {
    [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU'
}

# configure ON|OFF: with the tests or without, and only when there is something new to configure. What
# was configured with tests keeps them.
configure() {
    local tests=$1 cache=build/CMakeCache.txt options=()
    grep -qs '^QCONV_TESTS:BOOL=ON' "$cache" && tests=ON
    options=("-DQCONV_TESTS=$tests" "-DQCONV_BENCH=$tests")
    [ -z "${QCONV_CUDA:-}" ] || options+=("-DQCONV_CUDA=$QCONV_CUDA")
    if [ "${QCONV_CUDA:-}" = ON ] && gpu_is_here; then
        options+=(-DCMAKE_CUDA_ARCHITECTURES=native)
    fi
    # shellcheck disable=SC2206 # one option a word
    options+=(${QCONV_CMAKE:-})
    local wanted=build/bootstrap.options
    if [ ! -f build/build.ninja ] || [ CMakePresets.json -nt build/build.ninja ] ||
        [ "${options[*]}" != "$(cat "$wanted" 2>/dev/null)" ]; then
        cmake --preset release "${options[@]}" >build.log 2>&1 || { cat build.log >&2; exit 1; }
        printf '%s\n' "${options[*]}" >"$wanted"
        sed -n -e 's/^-- \(.*CUDA kernels.*\)/bootstrap: \1/' \
            -e 's/(-DQCONV_CUDA=ON builds them/(QCONV_CUDA=ON .\/bootstrap.sh run builds them/' \
            -e '/^bootstrap:/p' build.log >&2
        rm -f build.log
    fi
}

run() {
    local model=tests/data/kjv-llama/model out=out/kjv-llama-nf4
    need "${BUILD_PACKAGES[@]}"
    configure OFF
    say "bootstrap: building build/qconv, which takes minutes on few cores"
    cmake --build build --target qconv -- --quiet
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
    configure ON
    cmake --build build --target default_tests -- --quiet
    ctest --test-dir build --output-on-failure -j "$(nproc)" \
        -LE 'slow|mutants|endurance|interop|gpu|fresh'
}

[ $# -eq 1 ] || usage
case "$1" in
run) run ;;
test) run_tests ;;
packages) need "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}" ;;
*) usage ;;
esac
