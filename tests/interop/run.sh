#!/bin/sh
# The interoperability stage: qconv against transformers and bitsandbytes from PyPI, on the CPU.
#
# usage: tests/interop/run.sh [BUILD_DIR [ENVIRONMENT_DIR]]
#        tests/interop/run.sh --prepare [ENVIRONMENT_DIR]    only fills the environment
#
# BUILD_DIR (default build) holds the programs named below. ENVIRONMENT_DIR (default build-interop, or
# $QCONV_INTEROP_ENV) gets the Python packages; it is filled once and then reused. With
# QCONV_INTEROP_VLLM=1 it gets vLLM as well, 3 GB (vllm_environment.sh); without it those checks are skipped.
# Needs Debian 12's python3 with python3-venv, a C compiler, zstd, and the network the first time.
# Exit: 0 passed; 1 a check failed; 77 the environment could not be made (with the reason).
# QCONV_INTEROP_REQUIRED=1 turns 77 into 1.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
prepare=0
[ "${1:-}" != --prepare ] || prepare=1
[ $prepare = 1 ] || build=$(cd "${1:-$root/build}" && pwd)
environment=${2:-${QCONV_INTEROP_ENV:-$root/build-interop}}

skip() {
    echo "interop: SKIPPED: $1" >&2
    [ "${QCONV_INTEROP_REQUIRED:-0}" = 1 ] && exit 1
    exit 77
}

for program in qconv tensor_tool; do
    [ $prepare = 1 ] || [ -x "$build/$program" ] || { echo "interop: $build/$program is not built" >&2; exit 1; }
done

python=${PYTHON:-/usr/bin/python3}
[ -x "$python" ] || python=$(command -v python3) || skip "no python3"
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    [ "$(id -u)" = 0 ] && apt-get update -qq >/dev/null 2>&1 &&
        apt-get install -y -qq --no-install-recommends python3-venv >/dev/null 2>&1 ||
        skip "python3-venv is missing and could not be installed"
fi

# Python keeps here what it compiles of the packages, as it comes to them: pip would compile all of it.
mkdir -p "$environment/bytecode"
PYTHONPYCACHEPREFIX=$(cd "$environment/bytecode" && pwd)
export PYTHONPYCACHEPREFIX

# One folder per requirements file, made anew when the file changes; the stamp holds its digest.
started=$(date +%s)
stamp() {
    cat "$here/$1" "$here/stub_cuda.py" | sha256sum | cut -d' ' -f1
}
current() {
    [ -f "$2/.qconv-stamp" ] && [ "$(cat "$2/.qconv-stamp")" = "$(stamp "$1")" ]
}
if ! current requirements.txt "$environment/venv"; then
    rm -rf "$environment/venv"
    "$python" -m venv "$environment/venv" || skip "the virtual environment could not be made"
    "$environment/venv/bin/pip" install -q --disable-pip-version-check --no-deps --no-compile \
        -r "$here/requirements.txt" || skip "packages could not be installed (no network?)"
    "$environment/venv/bin/python" "$here/stub_cuda.py" >"$environment/stubs.log"
    CUDA_VISIBLE_DEVICES= "$environment/venv/bin/python" -c 'import torch; torch.ones(2).sum()' ||
        skip "torch cannot be imported"
    stamp requirements.txt >"$environment/venv/.qconv-stamp"
fi
for name in transformers4 transformers5 bitsandbytes49 training diffusers wheel; do
    if ! current "requirements-$name.txt" "$environment/$name"; then
        rm -rf "$environment/$name"
        DS_BUILD_OPS=0 CUDA_VISIBLE_DEVICES= \
            "$environment/venv/bin/pip" install -q --disable-pip-version-check --no-deps --no-compile \
            --no-build-isolation --use-pep517 --target "$environment/$name" -r "$here/requirements-$name.txt" ||
            skip "packages could not be installed (no network?)"
        stamp "requirements-$name.txt" >"$environment/$name/.qconv-stamp"
    fi
done
if [ "${QCONV_INTEROP_VLLM:-0}" = 1 ]; then
    "$here/vllm_environment.sh" "${QCONV_VLLM_ENV:-$environment/vllm}" ||
        skip "vLLM's environment could not be made (no network?)"
fi
echo "interop: environment ready in $(($(date +%s) - started)) s"
[ $prepare = 0 ] || exit 0

exec "$environment/venv/bin/python" "$here/stage.py" --build "$build" \
    --environment "$environment"
