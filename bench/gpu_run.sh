#!/usr/bin/env bash
# Everything that needs a GPU, in one command and 8 minutes: build, hardware, the gpu tests, ceilings,
# bench, a conversion of a synthetic 8B-shaped model on the GPU against the CPU, eval and calibrating on both,
# validate, plan, compute-sanitizer's four tools. For a bare machine with nvcc, CMake, a C compiler
# and Python 3; no internet.
#
#   bench/gpu_run.sh [--debs DIR] [RESULTS]    run; RESULTS, else $OUT, else gpu-results
#   bench/gpu_run.sh --fetch DIR               on a machine with internet: the packages for --debs
#
# --debs DIR (or QC_RUN_DEBS): Debian packages of the libraries, unpacked beside the build where the
# machine has none. What else may be set, and what comes out: bench/gpu_steps.py.
#
# Exit code: 0 everything ran and passed, 1 something failed, 77 there is no GPU: every step is named
# and left out.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

packages=(libzstd-dev libzstd1 libxxhash-dev libxxhash0 libcjson-dev libcjson1 libcmocka-dev
    libpcre2-dev libpcre2-8-0 libpcre2-16-0 libpcre2-32-0 libpcre2-posix3 libutf8proc-dev libutf8proc2
    libopenblas0-pthread libgfortran5 libquadmath0 libcmocka0 pkg-config pkgconf pkgconf-bin libpkgconf3 ninja-build)

usage() {
    echo "usage: $0 [--debs DIR] [RESULTS] | --fetch DIR" >&2
    exit 2
}

fetch() {
    mkdir -p "$1"
    cd "$1"
    # As root, apt would fetch as a user who may not write here, and warn.
    apt-get -q -o APT::Sandbox::User=root download "${packages[@]}"
    echo "gpu_run: ${#packages[@]} packages, $(du -ch -- *.deb | tail -n1 | cut -f1), in $1"
}

# The packages of a folder into a folder of their own, and everybody told where that is.
unpack() {
    local deb pc root=$2
    mkdir -p "$root"
    for deb in "$1"/*.deb; do
        [ -f "$deb" ] || { echo "gpu_run: no .deb files in $1" >&2 && exit 2; }
        dpkg -x "$deb" "$root"
    done
    local lib
    lib=$(echo "$root"/usr/lib/*-linux-gnu)
    for pc in "$lib"/pkgconfig/*.pc; do
        sed -i -E "s|^prefix=.*|prefix=$root/usr|; s|^libdir=.*|libdir=$lib|
            s|^includedir=.*|includedir=$root/usr/include|; s|-I/usr|-I$root/usr|g; s|-L/usr[^ ]*|-L$lib|g" "$pc"
    done
    export PKG_CONFIG_PATH=$lib/pkgconfig:${PKG_CONFIG_PATH-}
    export LD_LIBRARY_PATH=$lib:${LD_LIBRARY_PATH-}
    export CMAKE_PREFIX_PATH=$root/usr:${CMAKE_PREFIX_PATH-}
    export PATH=$PATH:$root/usr/bin
    [ ! -e "$lib/openblas-pthread/libopenblas.so.0" ] ||
        export QCONV_OPENBLAS=$lib/openblas-pthread/libopenblas.so.0
}

have() {
    command -v pkg-config >/dev/null &&
        pkg-config --exists 'libzstd >= 1.4.8' 'libxxhash >= 0.8.1' 'libcjson >= 1.7.15' \
            'libpcre2-8 >= 10.36' 'libutf8proc >= 2.5' cmocka
}

debs=${QC_RUN_DEBS-}
results=
while [ $# -gt 0 ]; do
    case "$1" in
    --fetch) [ $# -eq 2 ] || usage && fetch "$2" && exit ;;
    --debs) [ $# -ge 2 ] || usage && debs=$2 && shift ;;
    -*) usage ;;
    *) [ -z "$results" ] || usage && results=$1 ;;
    esac
    shift
done
results=${results:-${OUT:-gpu-results}}
if [ -z "${QC_RUN_WORK-}" ]; then
    QC_RUN_WORK=$(mktemp -d "${TMPDIR:-/tmp}/qconv-gpu-run.XXXXXX")
    trap 'rm -rf "$QC_RUN_WORK"' EXIT
fi
export QC_RUN_WORK
if [ -n "$debs" ] && ! have; then
    unpack "$debs" "$QC_RUN_WORK/debs"
fi
python3 -B "$here/gpu_steps.py" "$results"
