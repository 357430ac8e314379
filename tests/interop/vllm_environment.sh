#!/bin/sh
# Makes the environment in which test_interop_vllm.py and test_interop_compressed.py run vLLM's workers on the CPU.
#
# usage: tests/interop/vllm_environment.sh [ENVIRONMENT_DIR]
#
# ENVIRONMENT_DIR (default build-interop/vllm, or $QCONV_VLLM_ENV) takes 3 GB and two minutes, once; it is
# kept until requirements-vllm.txt changes. tests/interop/run.sh makes it where QCONV_INTEROP_VLLM=1, finds it
# where it is, and skips vLLM's checks where it is not. Needs Debian 12's python3 with python3-venv, a C
# compiler, and the network.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
environment=${1:-${QCONV_VLLM_ENV:-$here/../../build-interop/vllm}}
stamp=$(cat "$here/requirements-vllm.txt" "$here/stub_cuda.py" | sha256sum | cut -d' ' -f1)

if [ -f "$environment/.qconv-stamp" ] && [ "$(cat "$environment/.qconv-stamp")" = "$stamp" ]; then
    exit 0
fi
rm -rf "$environment"
mkdir -p "$(dirname "$environment")"
"${PYTHON:-/usr/bin/python3}" -m venv "$environment"
"$environment/bin/pip" install -q --disable-pip-version-check --no-deps --no-compile -r "$here/requirements-vllm.txt"
"$environment/bin/python" "$here/stub_cuda.py" >"$environment/stubs.log"
# With $PYTHONPYCACHEPREFIX set, what this compiles serves the workers.
CUDA_VISIBLE_DEVICES='' "$environment/bin/python" -c 'import vllm.entrypoints.llm, vllm.v1.worker.cpu_worker' || {
    echo "vllm_environment.sh: vllm cannot be imported in $environment" >&2
    exit 1
}
echo "$stamp" >"$environment/.qconv-stamp"
