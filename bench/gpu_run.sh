#!/usr/bin/env bash
# Everything that needs a GPU, in two calls of at most 9 minutes, each useful by itself; of at most 4
# where QC_RUN_BUILD names a finished build:
#
#   first     build, each kernel alone, the kernels against cuBLAS and the roof, the gpu
#             tests, what the GPU gives at best, races, profiles
#   second    conversions on the GPU against the CPU, loading, validate, groups, bitsandbytes beside
#             qconv, sanitizers
#
# For a bare machine with nvcc, CMake, a C compiler and Python 3; it needs no internet.
#
#   bench/gpu_run.sh [--debs DIR] first|second [RESULTS]
#   bench/gpu_run.sh --fetch DIR       on a machine with internet: fill DIR for --debs
#
# RESULTS is $OUT where that is set, else gpu-results/ and the word. --debs DIR (or QC_RUN_DEBS):
# Debian packages of the libraries, unpacked beside the build where the machine has none, and perhaps
# a wheel of bitsandbytes. What a call leaves, and what else may be set: bench/gpu_steps.py.
#
# Exit code: 0 everything ran and passed, 1 something failed, 2 wrong words, 77 there is no GPU: every
# step is named and left out, 130 interrupted.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

packages=(libzstd-dev libzstd1 libxxhash-dev libxxhash0 libcmocka-dev
    libopenblas0-pthread libgfortran5 libquadmath0 libcmocka0 pkg-config pkgconf pkgconf-bin libpkgconf3 ninja-build)

usage() {
    echo "usage: $0 [--debs DIR] first|second [RESULTS]" >&2
    echo "       $0 --fetch DIR" >&2
    exit 2
}

fetch() {
    mkdir -p "$1"
    cd "$1"
    # As root, apt would fetch as a user who may not write here, and warn.
    apt-get -q -o APT::Sandbox::User=root download "${packages[@]}"
    echo "gpu_run: ${#packages[@]} packages, $(du -ch -- *.deb | tail -n1 | cut -f1), in $1"
}

# Unpack the packages of a folder into another one, and tell the build and our own programs, and
# nobody else, where that is.
unpack() {
    local deb pc lib link to root=$2
    rm -rf "$root"
    mkdir -p "$root"
    for deb in "$1"/*.deb; do
        [ -f "$deb" ] || { echo "gpu_run: there are no .deb files in $1" >&2 && exit 2; }
        dpkg -x "$deb" "$root"
    done
    # Some packages still put a library into /lib; all of them are to be found in one folder.
    if [ -d "$root/lib" ]; then
        mkdir -p "$root/usr/lib"
        cp -a "$root/lib/." "$root/usr/lib"
    fi
    find "$root/usr" -type l -lname '/*' | while read -r link; do
        to=$(readlink "$link")
        case "$to" in /lib/*) to=/usr$to ;; esac
        [ ! -e "$root$to" ] || ln -sfn "$root$to" "$link"
    done
    lib=$(echo "$root"/usr/lib/*-linux-gnu)
    for pc in "$lib"/pkgconfig/*.pc; do
        [ -f "$pc" ] || continue  # libraries without what building needs
        sed -i -E "s|^prefix=.*|prefix=$root/usr|; s|^libdir=.*|libdir=$lib|
            s|^includedir=.*|includedir=$root/usr/include|; s|-I/usr|-I$root/usr|g; s|-L/usr[^ ]*|-L$lib|g" "$pc"
    done
    if [ -e "$root/usr/bin/pkgconf" ]; then
        # pkg-config needs one of these libraries itself.
        rm -f "$root/usr/bin/pkg-config"
        printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s/usr/bin/pkgconf "$@"\n' "$lib" "$root" >"$root/usr/bin/pkg-config"
        chmod +x "$root/usr/bin/pkg-config"
    fi
    export PKG_CONFIG_PATH=$lib/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
    export CMAKE_PREFIX_PATH=$root/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
    export PATH=$PATH:$root/usr/bin
    export QC_RUN_LIBRARIES=$lib
    [ ! -e "$lib/openblas-pthread/libopenblas.so.0" ] ||
        export QCONV_OPENBLAS=$lib/openblas-pthread/libopenblas.so.0
}

have() {
    command -v pkg-config >/dev/null &&
        pkg-config --exists 'libzstd >= 1.4.8' 'libxxhash >= 0.8.1' cmocka
}

QC_RUN_DEBS=${QC_RUN_DEBS-}
word=
results=
while [ $# -gt 0 ]; do
    case "$1" in
    --fetch) [ $# -eq 2 ] || usage && fetch "$2" && exit ;;
    --debs) [ $# -ge 2 ] || usage && QC_RUN_DEBS=$2 && shift ;;
    first | second) [ -z "$word" ] || usage && word=$1 ;;
    -*) usage ;;
    *) [ -n "$word" ] && [ -z "$results" ] || usage && results=$1 ;;
    esac
    shift
done
[ -n "$word" ] || usage
QC_RUN_WORK=${QC_RUN_WORK:-$here/../build-gpu}
mkdir -p "$QC_RUN_WORK"
QC_RUN_WORK=$(cd "$QC_RUN_WORK" && pwd)
export QC_RUN_WORK QC_RUN_DEBS
if [ -n "$QC_RUN_DEBS" ] && ! have; then
    unpack "$QC_RUN_DEBS" "$QC_RUN_WORK/debs"
fi
export QC_RUN_SPENT=$SECONDS
exec python3 -B "$here/gpu_steps.py" "$word" "${results:-${OUT:-gpu-results/$word}}"
