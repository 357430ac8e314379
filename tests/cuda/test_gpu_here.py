"""What QCONV_CUDA=AUTO compiles kernels for: cmake/qconv_gpu_here.cmake, asked with a stand-in for nvidia-smi."""
import os
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CMAKE = os.environ.get("CMAKE", "cmake")
CUDA_11_8 = "sm_35\nsm_70\nsm_75\nsm_80\nsm_86\nsm_89\nsm_90\n"
CUDA_13 = "sm_75\nsm_80\nsm_86\nsm_89\nsm_90\nsm_100\nsm_120\n"
ASK = """cmake_minimum_required(VERSION 3.22)
include("%s/cmake/qconv_gpu_here.cmake")
qconv_gpu_here(gpus)
qconv_gpu_code(code "${gpus}" "$ENV{CODES}")
message("${gpus}|${code}")
"""


class GpuHere(unittest.TestCase):
    def asked(self, smi, codes=CUDA_13):
        """'capabilities|architectures' where nvidia-smi is this script, or missing."""
        with tempfile.TemporaryDirectory() as folder:
            if smi:
                program = os.path.join(folder, "nvidia-smi")
                with open(program, "w", encoding="utf-8") as f:
                    f.write("#!/bin/sh\n" + smi)
                os.chmod(program, 0o755)
            script = os.path.join(folder, "ask.cmake")
            with open(script, "w", encoding="utf-8") as f:
                f.write(ASK % ROOT)
            path = os.pathsep.join([folder] + [d for d in os.environ["PATH"].split(os.pathsep)
                                               if not os.path.exists(os.path.join(d, "nvidia-smi"))])
            r = subprocess.run([CMAKE, "-P", script], env=dict(os.environ, PATH=path, CODES=codes),
                               stderr=subprocess.PIPE, check=True)
            return r.stderr.decode().strip()

    def test_capabilities(self):
        for said, codes, want in [("9.0", CUDA_13, "90|90-real"),
                                  ("8.0\\n9.0\\n8.0", CUDA_13, "80;90|80-real;90-real"),
                                  ("12.0\\n8.6", CUDA_13, "86;120|86-real;120-real"),
                                  ("7.0", CUDA_11_8, "70|70-real"),
                                  ("7.0", CUDA_13, "70|"),  # CUDA 13 dropped it
                                  ("3.5", CUDA_11_8, "35|"),  # older than any that qconv runs on
                                  ("12.0", CUDA_11_8, "120|90-virtual"),  # newer than nvcc
                                  ("12.0\\n10.3", CUDA_11_8, "103;120|90-virtual")]:
            self.assertEqual(self.asked("printf '%s\\n'" % said, codes), want)

    def test_a_gpu_that_does_not_tell(self):
        old = 'case "$*" in -L) echo "GPU 0: Tesla V100";; *) echo "not a valid field"; exit 2;; esac\n'
        self.assertEqual(self.asked(old), "unknown|")

    @unittest.skipIf(os.path.exists("/dev/nvidia0"), "here is a GPU")
    def test_none(self):
        for smi in ("", "echo 'No devices were found'; exit 6\n", "exit 9\n"):
            self.assertEqual(self.asked(smi), "|")


if __name__ == "__main__":
    unittest.main()
