"""Peak memory while checkpoints of gigabytes go through: below 512 MiB, whatever the command.

Values are a hole in a sparse file, or random ones if $BENCH_CHECKPOINT names the program that writes
such a checkpoint. And what a tensor costs: bytes for each one written, whatever its size."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from output_case import OutputCase, PLAIN
from qconv_case import QCONV, SANITIZED
import make_checkpoint as mk

LIMIT_BYTES = 512 << 20
# To convert, for each tensor written (names, shapes, plan, digests): 198 were measured, and on another
# machine 211 to 220, where an older build that had 198 had 209.
TENSOR_BYTES = 230
MAKER = os.environ.get("BENCH_CHECKPOINT", "")


class OnDisk(OutputCase):
    """What lies in memory-backed folders is memory too, though not the program's."""

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="qconv-memory-")
        self.addCleanup(shutil.rmtree, self.dir)


class Memory(OnDisk):
    def measured(self, *args):
        begin = time.monotonic()
        p = subprocess.Popen([QCONV, "-q", *args], cwd=self.dir, stderr=subprocess.PIPE)
        text = p.stderr.read()
        p.stderr.close()
        _, status, usage = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(p.returncode, 0, text)
        peak = usage.ru_maxrss * 1024
        print("%s: %.0f MiB, %.1f s" % (" ".join(args), peak / (1 << 20), time.monotonic() - begin),
              file=sys.stderr)
        self.assertLess(peak, LIMIT_BYTES, args)

    def all_commands(self):
        self.measured("--to", "nf4", "m", "z")
        self.measured("verify", "z")
        self.measured("unpack", "z", "u")
        self.measured("verify", "u")
        shutil.rmtree(self.path("u"))
        self.measured("--to", "bf16", "z", "b")
        shutil.rmtree(self.path("b"))
        shutil.rmtree(self.path("z"))
        self.measured("--to", "int8", *PLAIN, "m", "p")
        self.measured("verify", "p")
        shutil.rmtree(self.path("p"))

    def test_many_layers(self):
        layer = "model.layers.%d."
        t = {"model.embed_tokens.weight": ("BF16", [128256, 2048], None)}
        for i in range(8):
            for name, shape in [("self_attn.q_proj", [2048, 2048]), ("mlp.up_proj", [8192, 2048]),
                                ("mlp.gate_proj", [8192, 2048]), ("mlp.down_proj", [2048, 8192])]:
                t[layer % i + name + ".weight"] = ("BF16", shape, None)
        self.model(t, shard_bytes=10 ** 9)
        self.all_commands()
        # Buffers are made for each thread, in these commands; the others are these in another order.
        self.measured("--to", "nf4", "--threads", "8", "m", "z")
        self.measured("verify", "--threads", "8", "z")
        self.measured("unpack", "--threads", "8", "z", "u")

    def test_one_huge_weight(self):
        """Its scales are what grows: 0.6 thousand million weights."""
        self.model({"model.layers.0.self_attn.q_proj.weight": ("BF16", [49152, 12288], None)})
        self.all_commands()

    def test_a_full_shard_of_int8_blocks(self):
        """All codes of a shard lie before the state of its first weight. Plain scales take four times
        as much as nested ones, which test_one_huge_weight has."""
        self.model({"model.layers.%d.mlp.up_proj.weight" % i: ("BF16", [8192, 16384], None)
                    for i in range(32)})
        self.measured("--to", "int8", "--block-size", "32", "--no-double-quant", "m", "z")

    def test_random_values(self):
        if not os.path.exists(MAKER):
            self.skipTest("BENCH_CHECKPOINT names no program")
        subprocess.run([MAKER, "--layers", "3", self.path("m")], check=True,
                       stdout=subprocess.DEVNULL)
        self.all_commands()


class ManyTensors(OnDisk):
    """Small weights have the names and frames of large ones, but not their buffers."""

    def peak(self, *args):
        """Its VmHWM, looked at while it runs: wait4's maximum has what this process was when it
        forked."""
        p = subprocess.Popen([QCONV, "-q", *args], cwd=self.dir, stderr=subprocess.PIPE)
        peak = 0
        with open("/proc/%d/status" % p.pid) as status:
            while p.poll() is None:
                status.seek(0)
                m = re.search(r"VmHWM:\s*(\d+) kB", status.read())
                peak = max(peak, int(m.group(1)) << 10 if m else 0)
                time.sleep(0.001)
        text = p.stderr.read()
        p.stderr.close()
        self.assertEqual(p.returncode, 0, text)
        return peak

    def converted(self, model):
        """(tensors read, tensors written, bytes at most)"""
        name = model.split("-")[0]
        tensors = sum(1 for _ in mk.model_rows(mk.load_model(model)))
        mk.write_model(self.path(name), mk.load_model(model), scale=64, seed=1, shard_bytes=5000000)
        peak = self.peak("--to", "nf4", "--threads", "2", "--max-shard-size", "2MB", name, "o")
        with open(self.path("o", "qconv.json")) as f:
            written = sum('"scheme": "' in line for line in f)
        shutil.rmtree(self.path("o"))
        return tensors, written, peak

    @unittest.skipIf(SANITIZED, "memory is the sanitizer's")
    def test_a_tensor_costs_little(self):
        few, few_written, few_peak = self.converted("Llama-3.3-70B-Instruct")
        many, many_written, many_peak = self.converted("DeepSeek-V2.5")
        self.assertEqual((few, many), (723, 29102))
        each = (many_peak - few_peak) / (many_written - few_written)
        print("%d tensors written: %.1f MiB; %d: %.1f MiB; %.0f bytes each" % (
            few_written, few_peak / (1 << 20), many_written, many_peak / (1 << 20), each),
            file=sys.stderr)
        self.assertLess(each, TENSOR_BYTES)


if __name__ == "__main__":
    unittest.main()
