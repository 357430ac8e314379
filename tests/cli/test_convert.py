"""qconv convert: the same bytes whatever runs it, layout of shards and frames, the plain form."""
import json
import os
import random
import struct
import subprocess
import shutil
import unittest

from output_case import OutputCase, PLAIN, isa_list, seek_table, tree
from qconv_case import ROOT, SANITIZED
import make_checkpoint as mk

P = "model.layers.%d."
ZSTD = shutil.which("zstd")


def mixed_model(seed, layers=2, hidden=96, inner=200):
    """A Llama whose weights have every float dtype, odd sizes, and some that are not weights."""
    rng = random.Random(seed)
    dtypes = ["F32", "BF16", "F16", "F64"]
    shapes = {"self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [33, hidden],
              "mlp.up_proj": [inner, hidden], "mlp.down_proj": [hidden, inner]}
    t = {"model.embed_tokens.weight": ("BF16", [50, hidden])}
    for i in range(layers):
        t[P % i + "input_layernorm.weight"] = ("F32", [hidden])
        for j, (name, shape) in enumerate(shapes.items()):
            t[P % i + name + ".weight"] = (dtypes[(i + j) % 4], shape)
        t[P % i + "self_attn.q_proj.bias"] = ("F16", [hidden])
    t["model.norm.weight"] = ("F64", [hidden])
    t["lm_head.weight"] = ("F32", [50, hidden])
    t["position_ids"] = ("I64", [1, 7])
    return {n: (d, s, mk.random_bytes(d, s, rng)) for n, (d, s) in t.items()}


class SameBytes(OutputCase):
    """Threads and instruction sets are nobody's business but the clock's."""

    replaces = True
    FORMS = [["--to", "nf4"], ["--to", "nf4", "--no-double-quant", "--block-size", "32"],
             ["--to", "nf4", "--rest", "bf16", "--block-size", "4096"], ["--to", "int8"],
             ["--to", "int8", "--rest", "fp16"], ["--to", "int8", "--block-size", "128"],
             ["--to", "int8", "--block-size", "32", "--no-double-quant"], ["--to", "bf16"],
             ["--to", "fp16"], ["--to", "nf4", "--compress", "zstd:7"],
             ["--to", "nf4", "--scale", "refit"], ["--to", "int8", "--scale", "refit"],
             ["--to", "int8", "--block-size", "128", "--no-double-quant", "--scale", "refit"],
             ["--to", "nf4", "--scale", "absmax"], ["--to", "int4", "--block-size", "32"],
             ["--to", "int4", "--block-size", "channel"]]

    def check(self, model, forms, more=()):
        isas = isa_list()
        self.assertIn("scalar", isas)
        for form in forms:
            self.ok("-q", *form, *more, "--threads", "1", model, "o",
                    env={"QCONV_ISA": "scalar"})
            runs = [(t, isas[-1]) for t in (2, 3, 7)] + [(1, isa) for isa in isas[1:]]
            if SANITIZED:  # prop_quant_isa has the instruction sets
                runs = runs[2:3]
            for threads, isa in runs:
                self.ok("-q", *form, *more, "--threads", str(threads), model, "p",
                        env={"QCONV_ISA": isa})
                self.assert_same("o", "p", (form, threads, isa))

    def test_small_tensors(self):
        self.model(mixed_model(1))
        self.check("m", self.FORMS, ["--max-shard-size", "60KB"])

    def test_plain_files(self):
        self.model(mixed_model(2))
        self.check("m", self.FORMS[:1] + self.FORMS[3:4], PLAIN)

    def test_dequantized(self):
        self.model(mixed_model(3))
        for i, form in enumerate(self.FORMS[:7]):
            self.ok("-q", *form, "m", "q%d" % i)
            self.check("q%d" % i, [["--to", ["bf16", "fp16"][i % 2]]])

    def test_tensors_of_several_frames(self):
        self.model(big_model())
        self.check("m", [["--to", "nf4"], ["--to", "int8"], ["--to", "int8", "--block-size", "64"],
                         ["--to", "bf16"]])


def big_model():
    """A weight whose int8 codes take three frames and whose NF4 codes two; repeated values, so that
    it is quickly made."""
    rng = random.Random(4)
    shape = [3000, 6000]
    line = mk.random_bytes("BF16", [1, 50021], rng)
    body = (line * (2 * mk.numel(shape) // len(line) + 1))[:2 * mk.numel(shape)]
    return {"model.embed_tokens.weight": ("F32", [64, 48], mk.random_bytes("F32", [64, 48], rng)),
            P % 0 + "mlp.up_proj.weight": ("BF16", shape, body),
            P % 0 + "self_attn.q_proj.weight": ("F32", [48, 48],
                                                mk.random_bytes("F32", [48, 48], rng))}


class Compressed(OutputCase):
    replaces = True

    def check_plain(self, form):
        """unpack, zstd -d and --compress none are the same."""
        self.ok("-q", *form, "m", "o")
        self.ok("-q", *form, *PLAIN, "m", "plain")
        self.ok("-q", "unpack", "o", "unpacked")
        self.assert_same("plain", "unpacked", form)
        self.ok("-q", "unpack", "plain", "again")
        self.assert_same("plain", "again", form)
        self.ok("-q", "verify", "plain")
        zst = [n for n in os.listdir(self.path("o")) if n.endswith(".zst")]
        self.assertEqual([n[:-4] for n in sorted(zst)],
                         sorted(n for n in os.listdir(self.path("plain"))
                                if n.endswith(".safetensors")))
        for name in zst if ZSTD else []:
            r = subprocess.run([ZSTD, "-dcq", self.path("o", name)], stdout=subprocess.PIPE)
            self.assertEqual(r.returncode, 0)
            with open(self.path("plain", name[:-4]), "rb") as f:
                self.assertTrue(f.read() == r.stdout, (form, name))

    def test_plain_is_unpacked(self):
        self.model(mixed_model(5))
        for form in [["--to", "nf4"], ["--to", "int8", "--max-shard-size", "30KB"],
                     ["--to", "nf4", "--no-double-quant", "--compress", "zstd:3"],
                     ["--to", "int8", "--block-size", "64"], ["--to", "fp16"]]:
            self.check_plain(form)
            for name in ["o", "plain", "unpacked", "again"]:
                shutil.rmtree(self.path(name))

    def test_bundled_model(self):
        shutil.copytree(os.path.join(ROOT, "tests", "data", "kjv-llama", "model"), self.path("m"))
        self.check_plain(["--to", "nf4"])

    def frames_of(self, out):
        """Check every shard's frames against its plain twin; returns {tensor: [frames]}."""
        self.ok("-q", "unpack", out, "u")
        found = {}
        for name in sorted(os.listdir(self.path(out))):
            if not name.endswith(".zst"):
                continue
            frames, _ = seek_table(self.path(out, name))
            with open(self.path("u", name[:-4]), "rb") as f:
                size = struct.unpack("<Q", f.read(8))[0]
                head = json.loads(f.read(size))
            head.pop("__metadata__")
            places = sorted((v["data_offsets"], k) for k, v in head.items())
            at = 0
            for (b, e), tensor in [([-8 - size, 0], "header")] + places:
                mine = []
                while sum(f[2] for f in mine) < e - b:
                    mine.append(frames[at])
                    at += 1
                # Exactly: a frame that crosses the border would make the sum too large.
                self.assertEqual(sum(f[2] for f in mine), e - b, tensor)
                found[tensor] = mine
            self.assertEqual(at, len(frames))
        shutil.rmtree(self.path("u"))
        return found

    def check_sizes(self, frames, tensor, align):
        """A tensor of 16 MiB and more: frames of 4 to 16 MiB, the last one may be shorter."""
        sizes = [f[2] for f in frames[tensor]]
        self.assertGreater(sum(sizes), 16 << 20)
        self.assertGreater(len(sizes), 1)
        for size in sizes[:-1]:
            self.assertTrue(4 << 20 <= size <= 16 << 20, sizes)
            self.assertEqual(size, sizes[0])
            self.assertEqual(size % align, 0)
        self.assertLessEqual(sizes[-1], 16 << 20)

    def test_frames(self):
        self.model(big_model())
        up = P % 0 + "mlp.up_proj.weight"
        for form, align in [(["--to", "int8"], 6000), (["--to", "int8", "--block-size", "4096"], 4096),
                            (["--to", "bf16"], 2)]:
            self.ok("-q", *form, "m", "o")
            self.check_sizes(self.frames_of("o"), up, align)
        self.ok("-q", "--to", "nf4", "--max-shard-size", "5MB", "m", "o")
        frames = self.frames_of("o")
        self.assertEqual(len(frames[up]), 2)
        for tensor, mine in frames.items():
            self.assertLessEqual(max(f[2] for f in mine), 16 << 20, tensor)

    def test_incompressible_is_stored(self):
        rng = random.Random(6)
        noise = rng.randbytes(3 << 20)
        zeros = bytes(1 << 20)
        self.model({"noise": ("U8", [len(noise)], noise), "zeros": ("U8", [len(zeros)], zeros),
                    "a.weight": ("F32", [2, 2], bytes(16))}, config={"model_type": "other"})
        self.ok("-q", "--to", "bf16", "m", "o")
        frames = self.frames_of("o")
        (at, stored, content), = frames["noise"]
        self.assertLessEqual(content, stored)
        self.assertLess(stored, content + 200)
        with open(self.path("o", "model.safetensors.zst"), "rb") as f:
            body = f.read()[at:at + stored]
        self.assertEqual(body[:4], b"\x28\xb5\x2f\xfd")
        # Raw blocks: the bytes themselves, 128 KiB at a time.
        self.assertIn(noise[:1 << 16], body)
        self.assertIn(noise[-(1 << 16):], body)
        self.assertLess(frames["zeros"][0][1], 1000)


class Shards(OutputCase):
    replaces = True
    SIBLINGS = [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state."]

    def group(self, name):
        """The weight that a tensor goes with."""
        for s in self.SIBLINGS:
            if s in name:
                return name[:name.index(s)]
        for s in ["SCB", "weight_format"]:
            if name.endswith("." + s):
                return name[:-len(s)] + "weight"
        return name

    def test_sizes(self):
        tensors = mixed_model(7, layers=3)
        self.model(tensors)
        for form in [["--to", "nf4"], ["--to", "int8"], ["--to", "int8", "--block-size", "64"]]:
            whole = None
            for limit in [5000, 20000, 33333, 100000, 10 ** 9]:
                found = self.check(form, limit)
                whole = whole or found
                self.assertEqual(found, whole, (form, limit))

    def check(self, form, limit):
        self.ok("-q", *form, *PLAIN, "--max-shard-size", "%dB" % limit, "m", "o")
        files = sorted(n for n in os.listdir(self.path("o")) if n.endswith(".safetensors"))
        count = len(files)
        index = self.path("o", "model.safetensors.index.json")
        if limit == 10 ** 9:
            self.assertEqual(files, ["model.safetensors"])
            self.assertFalse(os.path.exists(index))
            return mk.read_checkpoint(self.path("o"))
        self.assertEqual(files, ["model-%05d-of-%05d.safetensors" % (i + 1, count)
                                 for i in range(count)])
        with open(index) as f:
            told = json.load(f)
        total, at, found = 0, {}, {}
        for name in files:
            part, metadata = mk.read_safetensors(self.path("o", name))
            self.assertEqual(metadata, {"format": "pt"})
            size = sum(len(t[2]) for t in part.values())
            total += size
            groups = {self.group(t) for t in part}
            self.assertTrue(size <= limit or len(groups) == 1, (form, limit, name, size))
            for t in part:
                self.assertNotIn(t, found)
                at[t] = name
            found.update(part)
        self.assertEqual(told, {"metadata": {"total_size": total}, "weight_map": at})
        for t in at:
            self.assertEqual(at[t], at[self.group(t)], "siblings part")
        # As full as they can be: no shard and the next one's first group fit together.
        sizes = {}
        for t, (_, _, body) in found.items():
            sizes[self.group(t)] = sizes.get(self.group(t), 0) + len(body)
        for a, b in zip(files, files[1:]):
            used = sum(len(found[t][2]) for t in at if at[t] == a)
            self.assertGreater(used + max(sizes[t] for t in at if at[t] == b and t in sizes), limit)
        return found

    def test_layers_stay_together(self):
        """Embeddings first, layer 2 before layer 10, the head last."""
        t = {"lm_head.weight": ("F32", [8, 8], None), "model.norm.weight": ("F32", [8], None),
             "model.embed_tokens.weight": ("F32", [8, 8], None)}
        for i in [10, 2, 0, 1]:
            t[P % i + "self_attn.q_proj.weight"] = ("F32", [8, 8], None)
        self.model(t)
        self.ok("-q", "--to", "int8", "--max-shard-size", "1B", "m", "o")
        with open(self.path("o", "model.safetensors.index.json")) as f:
            at = json.load(f)["weight_map"]
        order = sorted((n for n in at if n in t), key=lambda n: at[n])
        self.assertEqual(order, ["model.embed_tokens.weight"] +
                         [P % i + "self_attn.q_proj.weight" for i in (0, 1, 2, 10)] +
                         ["lm_head.weight", "model.norm.weight"])

    def test_inputs_sharded_or_not(self):
        """How the source is cut does not show in the output but in what is said of the source."""
        tensors = mixed_model(8)
        self.model(tensors)
        self.model(tensors, name="n", shard_bytes=30000)
        a, b = self.convert("--to", "nf4", "m", "o"), self.convert("--to", "nf4", "n", "p")
        self.assertEqual(a, b)
        one, two = tree(self.path("o")), tree(self.path("p"))
        one.pop("qconv.json"), two.pop("qconv.json")
        self.assertEqual(one, two)


if __name__ == "__main__":
    unittest.main()
