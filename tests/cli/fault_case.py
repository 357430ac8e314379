"""Base of the tests that make disks fail: a model, forms of converting it, and the library
tests/tools/fault_disk.c ($FAULT_DISK) before the program."""
import json
import os
import random
import shutil
import struct
import subprocess
import tempfile

from output_case import PLAIN, STAGING, OutputCase, tree_digest
from qconv_case import QCONV, ROOT
import make_checkpoint as mk

LIBRARY = os.environ.get("FAULT_DISK", os.path.join(ROOT, "build", "tests", "libfault_disk.so"))
KINDS = ["read", "write", "sync", "rename", "remove", "make", "open", "resize", "close", "range",
         "change"]
KJV = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")

# Every way the bytes take: scheme, scales, compressed or not, cut at devices.
FORMS = {
    "nf4": ["--to", "nf4", "--max-shard-size", "4MB"],
    "nf4-plain": ["--to", "nf4", *PLAIN, "--max-shard-size", "4MB"],
    "int8-rows": ["--to", "int8", "--max-shard-size", "8MB"],
    "int8-rows-plain": ["--to", "int8", *PLAIN],
    "int8-blocks": ["--to", "int8", "--block-size", "64", "--max-shard-size", "8MB"],
    "int8-blocks-plain": ["--to", "int8", "--block-size", "64", *PLAIN],
    "int5-plain": ["--to", "int5", "--block-size", "channel", *PLAIN],
    "absmax": ["--to", "nf4", "--scale", "absmax", "--max-shard-size", "4MB"],
    "vram": ["--to", "nf4", "--vram", "3x2GB", "--context", "256", "--max-shard-size", "300KB"],
    "vram-plain": ["--to", "nf4", "--vram", "3x2GB", "--context", "256", *PLAIN],
}


def tile(shape, rng):
    """Many weights quickly: one random block over and over."""
    block = mk.random_bytes("BF16", [64, 509], rng)
    need = mk.numel(shape) * 2
    return (block * (need // len(block) + 1))[:need]


def weights(big):
    """Weights of one frame and, if big, one of several; embeddings that are copied."""
    rng = random.Random(11)
    t = {"model.embed_tokens.weight": ("BF16", [4096, 512], None)}
    for i in range(7):
        layer = "model.layers.%d." % i
        t[layer + "self_attn.q_proj.weight"] = ("BF16", [512, 512], None)
        t[layer + "mlp.up_proj.weight"] = ("BF16", [1024, 512], None)
        t[layer + "input_layernorm.weight"] = ("BF16", [512], None)
    if big:
        t["model.layers.7.mlp.up_proj.weight"] = ("BF16", [4352, 4096], None)
    t["lm_head.weight"] = ("BF16", [4096, 512], None)
    return {n: (d, s, tile(s, rng)) for n, (d, s, _) in t.items()}


class FaultCase(OutputCase):
    """The model is made once for a class: self.where/m (and /big), never written to."""

    BIG = False

    @classmethod
    def setUpClass(cls):
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        cls.where = tempfile.mkdtemp(prefix="qconv-fault-", dir=base)
        cls.addClassCleanup(shutil.rmtree, cls.where)
        cls.source = os.path.join(cls.where, "m")
        mk.write_checkpoint(cls.source, weights(cls.BIG), config={"model_type": "llama"},
                            shard_bytes=9 << 20)
        with open(os.path.join(cls.source, "tokenizer.json"), "w", encoding="utf-8") as f:
            f.write("{}")
        cls.whole = {}

    def setUp(self):
        super().setUp()
        os.mkdir(self.path("attic"))

    def model_of(self, form):
        return KJV if form.startswith("vram") else self.source

    def command(self, form, threads=2):
        return [*FORMS[form], "--threads", str(threads), self.model_of(form), "o"]

    def wanted(self, form):
        """(digests of an uninterrupted run, its calls by kind)."""
        if form not in self.whole:
            calls = self.counted(*self.command(form))
            self.assertEqual(calls.returncode, 0, calls.stderr)
            self.whole[form] = tree_digest(self.path("o")), self.counts()
            shutil.rmtree(self.path("o"))
        return self.whole[form]

    def fault_env(self, dirs=None, **settings):
        """An environment with the library and QC_FAULT_* as in settings."""
        env = dict(os.environ)
        env.update({"QC_FAULT_" + k.upper(): str(v) for k, v in settings.items()})
        env.update(LD_PRELOAD=LIBRARY, QC_FAULT_DIRS=dirs or self.dir,
                   QC_FAULT_COUNTS=self.path("counts"))
        if "power" in settings or settings.get("fail", "").startswith(("syncloss", "range")):
            env["QC_FAULT_ATTIC"] = self.path("attic")
        # A sanitizer's library wants to be the first.
        env["ASAN_OPTIONS"] = env.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
        return env

    def faulty(self, *args, dirs=None, timeout=120, program=None, **settings):
        r = subprocess.run([*(program or [QCONV]), *args], cwd=self.dir,
                           env=self.fault_env(dirs, **settings), stdin=subprocess.DEVNULL,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout)
        self.assertNotEqual(r.returncode, 99, r.stderr)
        for name in os.listdir(self.path("attic")):
            os.unlink(self.path("attic", name))
        return r

    def counted(self, *args, **more):
        return self.faulty("-q", *args, **more)

    def counts(self):
        with open(self.path("counts"), "rb") as f:
            return dict(zip(KINDS, struct.unpack("<%dQ" % len(KINDS), f.read())))

    def moments(self, form, count, seed):
        """Numbers of changes of the disk, spread over a run, each at random in its part."""
        total = self.wanted(form)[1]["change"]
        rng = random.Random(seed)
        if count >= total:
            return list(range(1, total + 1))
        return [1 + int(total * (i + rng.random()) / count) for i in range(count)]

    def assert_no_whole_output(self, note):
        """What a dead run left is whole or does not pass for it."""
        if os.path.exists(self.path("o", "qconv.json")):
            self.assertEqual(self.run_qconv("-q", "verify", "o").returncode, 0, note)
        else:
            names = os.listdir(self.path("o")) if os.path.isdir(self.path("o")) else []
            if STAGING not in names:
                self.assertEqual(names, [], note)


class SourceReads:
    """Which tensors of a checkpoint a run read, from QC_FAULT_READS."""

    def __init__(self, model):
        self.ranges = {}
        self.names = set()
        for name in sorted(os.listdir(model)):
            if not name.endswith(".safetensors"):
                continue
            path = os.path.join(model, name)
            with open(path, "rb") as f:
                n = struct.unpack("<Q", f.read(8))[0]
                head = json.loads(f.read(n))
            head.pop("__metadata__", None)
            self.names |= set(head)
            self.ranges[os.stat(path).st_ino] = sorted(
                (8 + n + t["data_offsets"][0], 8 + n + t["data_offsets"][1], tensor)
                for tensor, t in head.items())

    def tensors(self, log):
        found = set()
        if not os.path.exists(log):
            return found
        with open(log, encoding="ascii") as f:
            for line in f:
                inode, offset, length = map(int, line.split())
                for begin, end, name in self.ranges.get(inode, ()):
                    # Reads of a header begin before its tensors.
                    if begin <= offset < end and offset + length <= end:
                        found.add(name)
        return found
