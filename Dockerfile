# qconv as a command, and as a Python package in /opt/qconv.
#
#   docker build -t qconv .
#   docker run --rm -v "$PWD:/data" -w /data qconv --to nf4 model out
#
# With kernels for GPUs, on CUDA's runtime (run it with --gpus all; no GPU has run them yet):
#
#   docker build -t qconv-cuda --build-arg CUDA=ON --build-arg BUILD_ON=nvidia/cuda:12.8.1-devel-ubuntu24.04 \
#       --build-arg RUN_ON=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .
#
# tests/fresh/fresh.py runs what stands here in a minimal Debian.
ARG BUILD_ON=debian:bookworm-slim
ARG RUN_ON=debian:bookworm-slim

FROM ${BUILD_ON} AS build
ARG CUDA=OFF
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev cmake ninja-build pkg-config \
        libzstd-dev libxxhash-dev python3-pip python3-venv
COPY . /source
RUN python3 -m venv /tools && \
    /tools/bin/pip wheel --no-deps -w /dist --config-settings=cmake.define.QCONV_CUDA=${CUDA} /source

FROM ${RUN_ON}
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv libopenblas0-pthread && \
    rm -rf /var/lib/apt/lists/*
COPY --from=build /dist /dist
RUN python3 -m venv /opt/qconv && /opt/qconv/bin/pip install --no-index /dist/*.whl && rm -r /dist
ENV PATH=/opt/qconv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENTRYPOINT ["qconv"]
