#!/usr/bin/env python3
"""The kernels build on their own, without pkg-config, zstd or xxHash, and a C program that
is linked with them by hand starts where there is no GPU. Wants cmake, and CUDACXX or nvcc in the
path; docs/building.md has the same lines.

  kernels_alone.py [CMAKE_CUDA_ARCHITECTURES [FOLDER]]     default: 90-real, the quickest

The build is made in FOLDER, and what was compiled stays there, so that a build of everything in the
same folder with the same flags need not do it again; else in a folder that is removed.
"""
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = r"""
#include "kernels/cuda_device.h"
#include <stdio.h>

int main(void)
{
    int count = -1;
    char why[256] = "";
    qc_cuda_device_count(&count, why, sizeof why);
    printf("%s\n%d %s\n", qc_cuda_build(), count, why);
    return 0;
}
"""


def run(command, **more):
    r = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    if r.returncode != 0:
        sys.exit("%s failed:\n%s" % (" ".join(command), r.stdout[-4000:]))
    return r.stdout


def fact(folder, name):
    with open(os.path.join(folder, "CMakeCache.txt")) as f:
        for line in f:
            if line.startswith(name + ":"):
                return line.strip().split("=", 1)[1]
    sys.exit("%s is not in CMakeCache.txt" % name)


def main(argv):
    code = argv[1] if len(argv) > 1 else "90-real"
    if len(argv) > 2:
        build(code, os.path.abspath(argv[2]), ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"])
        # It says that there is no pkg-config, and that this is all there is to build.
        os.remove(os.path.join(argv[2], "CMakeCache.txt"))
        return
    with tempfile.TemporaryDirectory(prefix="qconv-kernels-") as folder:
        build(code, folder, [])


def build(code, folder, more):
    # pkg-config that finds nothing.
    environment = dict(os.environ, PKG_CONFIG="false", CUDAARCHS=code)
    run(["cmake", "-S", ROOT, "-B", folder, "-DQCONV_KERNELS_ONLY=ON"] + more, env=environment)
    run(["cmake", "--build", folder, "-j2"], env=environment)
    source = os.path.join(folder, "starts.c")
    with open(source, "w") as f:
        f.write(PROGRAM)
    program = os.path.join(folder, "starts")
    run([os.environ.get("CC", "cc"), "-I" + ROOT, source, "-o", program]
        + [os.path.join(folder, p) for p in ("kernels/libqconv_kernels.a",
                                             "quant/libqconv_quant.a", "base/libqconv_base.a")]
        + [fact(folder, "CUDA_cudart_static_LIBRARY"),
           "-lstdc++", "-lpthread", "-ldl", "-lrt", "-lm"])
    built, devices = run([program], env=dict(os.environ, CUDA_VISIBLE_DEVICES="")).splitlines()
    print(built)
    if not built.startswith("CUDA ") or code.split("-")[0] not in built:
        sys.exit("%s is not what was asked for (%s)" % (built, code))
    count, why = devices.split(" ", 1)
    if count != "0" or len(why) < 5:
        sys.exit("without a GPU it said: " + devices)
    print("without a GPU: " + why)


if __name__ == "__main__":
    main(sys.argv)
