"""OUT as a folder: what may be replaced, what goes along, what config.json becomes."""
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import time
import unittest

from output_case import OutputCase, PLAIN, STAGING, tree
from qconv_case import QCONV
import make_checkpoint as mk

Q = "model.layers.%d.self_attn.q_proj.weight"


def tiny(seed=1, layers=2):
    rng = random.Random(seed)
    t = {Q % i: ("F32", [16, 16], mk.random_bytes("F32", [16, 16], rng)) for i in range(layers)}
    t["lm_head.weight"] = ("F32", [8, 16], mk.random_bytes("F32", [8, 16], rng))
    return t


class Config(OutputCase):
    """Only what must change does; the rest keeps its bytes, order, numbers and spaces."""

    TEXT = ('{\n\t"zeta" : 1.0e-05,"model_type":"llama",\n   "rope_theta": 1000000.00,\n'
            '  "nan": NaN, "big": 12345678901234567890, "text": "\\u00e9\u00e9 \\"quantization_'
            'config\\"",\n  "torch_dtype": "float32"%s,\n "inner": {"quantization_config": 3, "torch_dtype": 5}\n}\n\n')

    def converted(self, text, *form):
        self.model(tiny())
        with open(self.path("m", "config.json"), "w", encoding="utf-8") as f:
            f.write(text)
        self.ok("-q", *form, "m", "o")
        with open(self.path("o", "config.json"), encoding="utf-8", newline="") as f:
            return f.read()

    def without(self, text):
        """The text with the one quantization_config of the top level cut out."""
        decoder = json.JSONDecoder()
        m = [m for m in re.finditer(r'"quantization_config"\s*:\s*', text)
             if text[m.end()] == "{"]
        self.assertEqual(len(m), 1, text)
        value, end = decoder.raw_decode(text, m[0].end())
        return text[:m[0].start()], value, text[end:]

    def test_added(self):
        source = self.TEXT % ""
        for form in [["--to", "nf4"], ["--to", "int8"], ["--to", "int8", "--block-size", "64"]]:
            text = self.converted(source, *form)
            before, value, after = self.without(text)
            self.assertEqual(before.rstrip().rstrip(",").rstrip(), source.rstrip()[:-1].rstrip())
            self.assertEqual(after.split(), ["}"])
            self.assertEqual(value["quant_method"],
                             "qconv" if "--block-size" in form else "bitsandbytes")

    def test_replaced_in_place(self):
        source = self.TEXT % ',\n  "quantization_config":  {"quant_method": "old", "a": [1, {}]} '
        text = self.converted(source, "--to", "nf4")
        before, value, after = self.without(text)
        cut_before, _, cut_after = self.without(source)
        self.assertEqual((before, after), (cut_before, cut_after))
        self.assertTrue(value["load_in_4bit"])

    def test_values(self):
        nf4 = self.without(self.converted(self.TEXT % "", "--to", "nf4"))[1]
        self.assertEqual(
            {k: nf4[k] for k in ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type",
                                 "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype",
                                 "bnb_4bit_quant_storage")},
            {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
             "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
             "bnb_4bit_quant_storage": "uint8"})
        plain = self.without(self.converted(self.TEXT % "", "--to", "nf4", "--no-double-quant",
                                            "--compute-dtype", "float16"))[1]
        self.assertFalse(plain["bnb_4bit_use_double_quant"])
        self.assertEqual(plain["bnb_4bit_compute_dtype"], "float16")
        int8 = self.without(self.converted(self.TEXT % "", "--to", "int8"))[1]
        self.assertEqual((int8["load_in_4bit"], int8["load_in_8bit"]), (False, True))
        self.assertEqual(list(nf4), sorted(nf4))

    def test_skip_modules(self):
        value = self.without(self.converted(self.TEXT % "", "--to", "nf4"))[1]
        self.assertEqual(value["llm_int8_skip_modules"], ["classifier", "lm_head", "qa_outputs", "score"])
        value = self.without(self.converted(self.TEXT % "", "--to", "int8", "--keep", Q % 1))[1]
        self.assertEqual(value["llm_int8_skip_modules"],
                         ["classifier", "lm_head", "model.layers.1.self_attn.q_proj",
                          "qa_outputs", "score"])
        value = self.without(self.converted(self.TEXT % "", "--to", "int8", "--block-size", "64",
                                            "--keep", Q % 1))[1]
        self.assertEqual(value["modules_to_not_convert"],
                         ["classifier", "lm_head", "model.layers.1.self_attn.q_proj",
                          "qa_outputs", "score"])

    def test_dtype_follows_a_cast(self):
        """torch_dtype names what the floating tensors are now; an inner one is somebody else's."""
        for form, name in [(["--to", "bf16"], "bfloat16"), (["--to", "fp16"], "float16")]:
            text = self.converted(self.TEXT % "", *form)
            self.assertEqual(text, (self.TEXT % "").replace('"float32"', '"%s"' % name, 1))
        text = self.converted(self.TEXT % "", "--to", "nf4", "--rest", "fp16")
        self.assertIn('"torch_dtype": "float16",', text)
        self.assertIn('"torch_dtype": 5}', text)

    def test_without_config(self):
        self.model(tiny())
        os.remove(self.path("m", "config.json"))
        self.ok("-q", "--to", "nf4", "--quantize", "*_proj.weight", "m", "o")
        self.assertEqual(sorted(os.listdir(self.path("o"))),
                         ["model.safetensors.zst", "qconv.json"])
        self.ok("-q", "verify", "o")


class SideFiles(OutputCase):
    TAKEN = ["tokenizer.json", "LICENSE", "sub/deep/vocab.txt", "sub/code.py", "empty", "a b\u00e9.txt"]
    LEFT = ["pytorch_model.bin", "original/consolidated.00.pth", "original/params.json",
            "metal/model.bin", "model.gguf", "x.onnx", "tf_model.h5", "flax.msgpack",
            "pytorch_model.bin.index.json", ".git/config", ".hidden", "other.safetensors"]

    def test_copied(self):
        self.model(tiny(), shard_bytes=600)
        for name in self.TAKEN + self.LEFT:
            os.makedirs(os.path.dirname(self.path("m", name)), exist_ok=True)
            with open(self.path("m", name), "wb") as f:
                f.write(b"" if name == "empty" else name.encode() * 3)
        for form in [["--to", "nf4"], ["--to", "int8", *PLAIN], ["unpack"]]:
            self.ok("-q", *form, "m" if form[0] != "unpack" else "o", "u" if form[0] == "unpack" else "o")
            out = tree(self.path("o"))
            for name in self.TAKEN:
                self.assertEqual(out[name], b"" if name == "empty" else name.encode() * 3)
            for name in self.LEFT:
                self.assertNotIn(name, out)
            files = {n for n, b in out.items() if b is not None and "safetensors" not in n}
            self.assertEqual(files, set(self.TAKEN) | {"config.json", "qconv.json"})
            self.ok("-q", "verify", "o")

    def test_link_to_a_file_is_copied(self):
        """The hub's cache is made of links."""
        self.model(tiny())
        os.makedirs(self.path("hub/snapshots"))
        os.mkdir(self.path("hub/blobs"))
        snapshot = self.path("hub/snapshots/r")
        shutil.move(self.path("m"), snapshot)
        for name in ["config.json", "model.safetensors"]:
            shutil.move(os.path.join(snapshot, name), self.path("hub/blobs", name))
            os.symlink("../../blobs/" + name, os.path.join(snapshot, name))
        self.write("hub/blobs/t", "tokens")
        os.symlink("../../blobs/t", os.path.join(snapshot, "tokenizer.json"))
        self.ok("-q", "--to", "nf4", "hub/snapshots/r", "o")
        self.assertEqual(tree(self.path("o"))["tokenizer.json"], b"tokens")
        self.assertFalse(os.path.islink(self.path("o", "tokenizer.json")))

    def test_large_side_file(self):
        """Larger than the buffer it is copied through."""
        self.model(tiny())
        body = random.Random(2).randbytes((1 << 20) * 2 + 17)
        with open(self.path("m", "big.dat"), "wb") as f:
            f.write(body)
        self.ok("-q", "--to", "nf4", "m", "o")
        self.assertTrue(tree(self.path("o"))["big.dat"] == body)
        self.ok("-q", "verify", "o")


class Out(OutputCase):
    def setUp(self):
        super().setUp()
        self.model(tiny())
        self.source = tree(self.path("m"))

    def refused(self, *args, has):
        before = tree(self.dir)
        self.usage(*args, has=has)
        self.assertEqual(tree(self.dir), before)

    def test_foreign_folder(self):
        os.mkdir(self.path("o"))
        self.ok("-q", "--to", "nf4", "m", "o")
        shutil.rmtree(self.path("o"))
        os.mkdir(self.path("o"))
        self.write("o/mine.txt", "mine")
        self.refused("--to", "nf4", "m", "o", has="--force")
        self.refused("--to", "nf4", "--dry-run", "m", "o", has="--force")
        self.ok("-q", "--to", "nf4", "--force", "m", "o")
        self.assertEqual(tree(self.path("o"))["mine.txt"], b"mine")
        self.ok("-q", "verify", "o")

    def test_a_file(self):
        self.write("f", "a file")
        self.refused("--to", "nf4", "m", "f", has="file")
        self.refused("--to", "nf4", "--force", "m", "f", has="file")
        self.fails(1, "--to", "nf4", "m", "f/o", has="f: ")
        self.assertEqual(tree(self.dir)["f"], b"a file")

    def test_the_source(self):
        """Under whatever name: it is not written to, and nothing is made inside it."""
        os.symlink("m", self.path("link"))
        os.mkdir(self.path("d"))
        os.symlink("../m", self.path("d", "far"))
        for force in [[], ["--force"]]:
            for out in ["m", "m/", "m//", "./m", "d/../m", "link", "link/", "d/far",
                        self.path("m"), "m/o", "m/o/p/q", "link/o", "d/far/o/", "m/./o", "m/../m"]:
                self.refused("--to", "nf4", *force, "m", out, has="source")
            self.refused("--to", "nf4", *force, "link", "m", has="source")
            self.refused("--to", "nf4", *force, "m/", "m", has="source")
            self.refused("--to", "nf4", *force, "link/", "link/o", has="source")
        self.refused("--to", "nf4", "--dry-run", "m", "m/o", has="source")
        # A sibling whose name begins alike is another folder.
        self.ok("-q", "--to", "nf4", "m", "m2")
        self.ok("-q", "--to", "nf4", "m/", "m3//")
        self.ok("-q", "verify", "m3/")

    def test_a_source_file_inside_out(self):
        """MODEL may be a file: the folder that holds it is no OUT, not even with --force."""
        self.refused("--to", "nf4", "--force", "m/model.safetensors", "m", has="source")
        self.ok("-q", "--to", "nf4", "m", "o")
        self.refused("--to", "bf16", "o/model.safetensors.zst", "o", has="source")
        self.refused("--to", "bf16", "--force", "o/model.safetensors.zst", "o/", has="source")
        self.ok("-q", "verify", "o")

    def test_unpack_onto_itself(self):
        self.ok("-q", "--to", "nf4", "m", "o")
        for out in ["o", "o/", "o/p", "./o/../o"]:
            before = tree(self.dir)
            self.usage("unpack", "o", out, has="source", command="unpack")
            self.assertEqual(tree(self.dir), before)

    def test_replaced(self):
        """Another model, other options: afterwards OUT is as if it had been empty."""
        self.model(tiny(2, layers=9), name="n", shard_bytes=3000)
        for name in ["sub/one.txt", "two.txt", "both.txt"]:
            os.makedirs(os.path.dirname(self.path("n", name)), exist_ok=True)
            self.write("n/" + name, name)
        self.write("m/both.txt", "of m")
        self.write("m/three.txt", "of m")
        for first, second in [(["--to", "nf4", "--max-shard-size", "800"], ["--to", "int8"]),
                              (["--to", "int8", *PLAIN], ["--to", "nf4"]),
                              (["--to", "nf4"], ["--to", "nf4", *PLAIN])]:
            for a, b in [("n", "m"), ("m", "n")]:
                self.ok("-q", *first, a, "o")
                self.ok("-q", *second, b, "o")
                self.ok("-q", *second, b, "fresh")
                self.assert_same("fresh", "o", (first, second, a))
                shutil.rmtree(self.path("o"))
                shutil.rmtree(self.path("fresh"))

    def test_replaced_keeps_what_is_not_ours(self):
        self.ok("-q", "--to", "nf4", "m", "o")
        self.write("o/notes.md", "mine")
        self.ok("-q", "--to", "int8", "m", "o")
        self.assertEqual(tree(self.path("o"))["notes.md"], b"mine")

    def test_force_removes_stale_weights(self):
        """Weights of no manifest that a loader would take for part of the model."""
        os.mkdir(self.path("o"))
        stale = ["model.safetensors", "model-00001-of-00002.safetensors",
                 "model-00007-of-00009.safetensors.zst", "model.safetensors.index.json"]
        for name in stale + ["tokenizer.json", "adapter.safetensors"]:
            self.write("o/" + name, "old")
        self.ok("-q", "--to", "nf4", "--force", "m", "o")
        self.assertEqual(sorted(os.listdir(self.path("o"))),
                         ["adapter.safetensors", "config.json", "model.safetensors.zst",
                          "qconv.json", "tokenizer.json"])
        self.ok("-q", "verify", "o")

    def test_damaged_manifest_is_replaced(self):
        self.ok("-q", "--to", "nf4", "--max-shard-size", "1", "m", "o")
        self.write("o/qconv.json", "{}")
        self.ok("-q", "--to", "nf4", "m", "o")
        self.ok("-q", "--to", "nf4", "m", "fresh")
        self.assert_same("fresh", "o")

    def test_manifest_cannot_reach_out(self):
        """A manifest that names files outside its folder does not get them removed."""
        self.ok("-q", "--to", "nf4", "m", "o")
        self.write("victim", "precious")
        with open(self.path("o", "qconv.json")) as f:
            text = f.read()
        self.write("o/qconv.json", text.replace('"config.json"', '"../victim"'))
        self.ok("-q", "--to", "nf4", "m", "o")
        self.assertEqual(tree(self.dir)["victim"], b"precious")

    def test_parents_are_made(self):
        self.ok("-q", "--to", "nf4", "m", "a/b/c")
        self.ok("-q", "verify", "a/b/c")

    def test_odd_names(self):
        for out in ["sp ace", "\u00e9t\u00e9", "-o", "new\nline"]:
            self.ok("-q", "--to", "nf4", "m", "--", out) if out[0] == "-" else self.ok(
                "-q", "--to", "nf4", "m", out)
            self.ok("-q", "verify", "./" + out)


class TwoRuns(OutputCase):
    def test_a_held_lock_refuses(self):
        self.model(tiny())
        self.ok("-q", "--to", "nf4", "m", "o")
        before = tree(self.path("o"))
        os.mkdir(self.path("o", STAGING))
        with open(self.path("o", STAGING, "lock"), "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            self.usage("--to", "int8", "m", "o", has="another qconv is writing there")
            self.usage("--to", "int8", "--force", "m", "o", has="another qconv")
            self.assertEqual(sorted(os.listdir(self.path("o", STAGING))), ["lock"])
        # Whoever held it is gone: what is left there is nobody's.
        self.write("o/%s/model.safetensors" % STAGING, "half")
        os.makedirs(self.path("o", STAGING, "a", "b"))
        self.write("o/%s/a/b/c" % STAGING, "half")
        self.ok("-q", "--to", "nf4", "m", "o")
        self.assertEqual(tree(self.path("o")), before)

    def test_together(self):
        """Ten starts at once into one OUT: those that do not refuse come one after the other, and
        what is there in the end is whole."""
        self.model({Q % i: ("BF16", [512, 512], None) for i in range(4)})
        self.ok("-q", "--to", "nf4", "m", "whole")
        done = refused = 0
        for round_number in range(4):
            runs = [subprocess.Popen([QCONV, "-q", "--to", "nf4", "m", "o"], cwd=self.dir,
                                     stderr=subprocess.PIPE) for _ in range(10)]
            codes = []
            for r in runs:
                text = r.communicate(timeout=60)[1]
                codes.append(r.returncode)
                self.assertIn(r.returncode, (0, 2), text)
                if r.returncode:
                    self.assertIn(b"another qconv", text)
            self.assertIn(0, codes)
            done += codes.count(0)
            refused += codes.count(2)
            self.assert_same("whole", "o", round_number)
            shutil.rmtree(self.path("o"))
        self.assertEqual(done + refused, 40)


if __name__ == "__main__":
    unittest.main()
