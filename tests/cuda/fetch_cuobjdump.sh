#!/usr/bin/env bash
# cuobjdump and nvdisasm of CUDA 13 to a folder, from NVIDIA's wheels (5 MB).
#   fetch_cuobjdump.sh FOLDER
set -euo pipefail
folder=$1
[ -x "$folder/cuobjdump" ] && exit
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m pip download -q --no-deps -d "$scratch" --only-binary=:all: \
    nvidia-cuda-cuobjdump==13.2.86 nvidia-cuda-nvdisasm==13.2.86
mkdir -p "$folder"
for wheel in "$scratch"/*.whl; do
    python3 -m zipfile -e "$wheel" "$scratch/unpacked"
done
find "$scratch/unpacked" -path '*/bin/*' -type f -exec install -m 755 -t "$folder" {} +
[ -x "$folder/cuobjdump" ] && [ -x "$folder/nvdisasm" ]
