"""OUT as a folder: what may be replaced, what goes along, what config.json becomes."""
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import unittest

from output_case import AT_CALL, OutputCase, PLAIN, STAGING, at_call, tree
from qconv_case import QCONV, SANITIZED
import make_checkpoint as mk

Q = "model.layers.%d.self_attn.q_proj.weight"


def tiny(seed=1, layers=2):
    rng = random.Random(seed)
    t = {Q % i: ("F32", [16, 16], mk.random_bytes("F32", [16, 16], rng)) for i in range(layers)}
    t["lm_head.weight"] = ("F32", [8, 16], mk.random_bytes("F32", [8, 16], rng))
    return t


class Config(OutputCase):
    """Only what must change does; the rest keeps its bytes, order, numbers and spaces."""

    replaces = True
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
             "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float32",
             "bnb_4bit_quant_storage": "uint8"})
        plain = self.without(self.converted(self.TEXT % "", "--to", "nf4", "--no-double-quant",
                                            "--compute-dtype", "float16"))[1]
        self.assertFalse(plain["bnb_4bit_use_double_quant"])
        self.assertEqual(plain["bnb_4bit_compute_dtype"], "float16")
        for said, dtype in (("", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")):
            self.model({Q % 0: ("F32", [64, 64], mk.random_bytes("F32", [64, 64], random.Random(5)))},
                       {"model_type": "llama", **({"dtype": said} if said else {})})
            self.ok("-q", "--to", "nf4", *PLAIN, "--force", "m", "f32")
            self.assertEqual(self.json_of("f32", "config.json")["quantization_config"]["bnb_4bit_compute_dtype"],
                             dtype)
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

    def test_fused_groups(self):
        """A rule that names some members of what engines load as one counts for all of them, in
        the weights and on the list, and says so; --split-fused takes it literally."""
        rng = random.Random(5)
        names = [Q % 1, (Q % 1).replace("q_proj", "k_proj"), (Q % 1).replace("q_proj", "v_proj")]
        other = (Q % 1).replace("q_proj", "o_proj")
        self.model({n: ("BF16", [64, 64], mk.random_bytes("BF16", [64, 64], rng))
                    for n in [*names, other]})
        listed = ["model.layers.1.self_attn." + m for m in ("k_proj", "q_proj", "qkv_proj", "v_proj")]
        warning = ("--keep '*q_proj*' names q_proj of 'model.layers.1.self_attn' without k_proj and "
                   "v_proj, but vLLM loads them as one (qkv_proj), so all of them are kept; "
                   "--split-fused keeps to the names\n")
        self.write("r.json", '{"rules": [{"keep": "*q_proj*"}]}')
        for rules in (["--keep", "*q_proj*"], ["--recipe", "r.json"]):
            said = self.run_qconv("--to", "nf4", "--force", "--compress", "none", *rules, "m", "o")
            self.assertEqual(said.returncode, 0, said.stderr)
            self.assertIn(warning, said.stderr.decode())
            out = mk.read_checkpoint(self.path("o"))
            self.assertEqual([out[n][0] for n in names], ["BF16"] * 3)
            q = self.quantization("o")
            self.assertEqual([n for n in q["llm_int8_skip_modules"] if "layers" in n], listed)
        said = self.run_qconv("--to", "nf4", "--force", "--compress", "none", "--split-fused",
                              "--keep", "*q_proj*", "m", "o")
        self.assertNotIn("without", said.stderr.decode())
        out = mk.read_checkpoint(self.path("o"))
        self.assertEqual([out[n][0] for n in names], ["BF16", "U8", "U8"])
        # What is quantized already stays whole, too, when the rest is turned back.
        said = self.run_qconv("--to", "nf4", "--force", "m", "o")
        said = self.run_qconv("--to", "bf16", "--compress", "none", "--keep", "*q_proj*", "o", "b")
        self.assertIn(warning, said.stderr.decode())
        self.assertEqual([mk.read_checkpoint(self.path("b"))[n][0] for n in names], ["U8"] * 3)

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
    replaces = True
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
        self.fails(1, "--to", "nf4", "m", "f/o", has="f could not be made: File exists")
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
        for first, second in [(["--to", "nf4", "--max-shard-size", "800B"], ["--to", "int8"]),
                              (["--to", "int8", *PLAIN], ["--to", "nf4"]),
                              (["--to", "nf4"], ["--to", "nf4", *PLAIN])]:
            for a, b in [("n", "m"), ("m", "n")]:
                self.ok("-q", *first, a, "o")
                self.ok("-q", "--force", *second, b, "o")
                self.ok("-q", *second, b, "fresh")
                self.assert_same("fresh", "o", (first, second, a))
                shutil.rmtree(self.path("o"))
                shutil.rmtree(self.path("fresh"))

    def test_weights_of_others_stay(self):
        """Another checkpoint, whatever its format; with --force, too, and as an output is
        replaced."""
        stale = ["model.safetensors", "model-00001-of-00002.safetensors",
                 "model-00007-of-00009.safetensors.zst", "model.safetensors.index.json",
                 "pytorch_model.bin", "adapter_model.safetensors", "x.gguf"]
        for name in stale:
            os.mkdir(self.path("o"))
            for n in (name, "config.json", "tokenizer.json"):
                self.write("o/" + n, "old")
            before = tree(self.path("o"))
            for more in [[], ["--force"], ["--dry-run"], ["--force", "--dry-run"],
                         ["--force", "--restart"], ["--force", "--part", "1/2"]]:
                self.usage("--to", "nf4", *more, "m", "o", has=[name, "neither deletes"])
                self.assertEqual(tree(self.path("o")), before)
            self.ok("-q", "--to", "nf4", *PLAIN, "m", "other")
            self.usage("unpack", "--force", "other", "o", has=name, command="unpack")
            self.assertEqual(tree(self.path("o")), before)
            shutil.rmtree(self.path("o"))
        self.ok("-q", "--to", "nf4", "--max-shard-size", "1B", "m", "o")
        self.write("o/model-00001-of-00002.safetensors", "old")
        before = tree(self.path("o"))
        for more in [[], ["--dry-run"]]:
            self.usage("--to", "int8", "--force", *more, "m", "o",
                       has=["(model-00001-of-00002.safetensors)", "neither deletes"])
            self.assertEqual(tree(self.path("o")), before)

    def test_a_checkpoint_over_an_output(self):
        """Somebody copied another model into OUT: a shard of another size is not qconv's."""
        self.ok("-q", "--to", "nf4", *PLAIN, "m", "o")
        self.write("o/model.safetensors", "an original")
        self.usage("--to", "int8", "--force", "m", "o", has=["model.safetensors", "neither"])
        self.assertEqual(tree(self.path("o"))["model.safetensors"], b"an original")

    def test_what_force_replaces_is_named(self):
        os.mkdir(self.path("o"))
        for name in ["config.json", "mine.txt"]:
            self.write("o/" + name, "old")
        before = tree(self.path("o"))
        self.usage("--to", "nf4", "m", "o", has="not empty")
        r = self.run_qconv("--to", "nf4", "--force", "--dry-run", "m", "o")
        self.assertIn(b"--force would replace files in o that qconv did not write there: config.json\n",
                      r.stderr)
        self.assertEqual(tree(self.path("o")), before)
        r = self.run_qconv("--to", "nf4", "--force", "m", "o")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn(b"--force replaces files in o that qconv did not write there: config.json\n",
                      r.stderr)
        self.assertEqual(tree(self.path("o"))["mine.txt"], b"old")
        self.ok("-q", "verify", "o")
        # An own output: a file of somebody else's that is in the way, and what goes.
        self.write("m/new.txt", "new")
        self.write("o/new.txt", "mine")
        r = self.run_qconv("--to", "nf4", *PLAIN, "--force", "--dry-run", "m", "o")
        self.assertEqual(r.returncode, 0, r.stderr)
        for text in [b"would replace a finished output", b"would replace files in o that qconv did not "
                     b"write there: new.txt\n", b"would be deleted: model.safetensors.zst\n"]:
            self.assertIn(text, r.stderr)

    def test_unpacked_in_place(self):
        """zstd -d leaves plain shards beside the compressed ones: they are of this output."""
        self.ok("-q", "--to", "nf4", "m", "o")
        self.ok("-q", "--to", "nf4", *PLAIN, "m", "plain")
        shutil.copy(self.path("plain", "model.safetensors"), self.path("o"))
        self.ok("-q", "--to", "int8", "--force", "m", "o")
        self.ok("-q", "--to", "int8", "m", "fresh")
        self.assert_same("fresh", "o")

    def test_damaged_manifest(self):
        """Nobody knows what is whose."""
        self.ok("-q", "--to", "nf4", "--max-shard-size", "1B", "m", "o")
        self.write("o/qconv.json", "{}")
        before = tree(self.path("o"))
        self.usage("--to", "nf4", "m", "o", has=["qconv.json is damaged", "--force"])
        self.usage("--to", "nf4", "--force", "m", "o", has=["no manifest of qconv lists"])
        self.assertEqual(tree(self.path("o")), before)

    def test_manifest_cannot_reach_out(self):
        """A manifest that names files outside its folder does not get them removed."""
        self.ok("-q", "--to", "nf4", "m", "o")
        self.write("victim", "precious")
        with open(self.path("o", "qconv.json")) as f:
            text = f.read()
        self.write("o/qconv.json", text.replace('"config.json"', '"../victim"'))
        self.usage("--to", "nf4", "--force", "m", "o", has="model.safetensors.zst")
        self.assertEqual(tree(self.dir)["victim"], b"precious")


class Finished(OutputCase):
    """A finished output is replaced only by who says so; the same command has nothing to do."""

    def setUp(self):
        super().setUp()
        self.model(tiny())
        self.write("m/tokenizer.json", "{}")
        self.ok("-q", "--to", "nf4", "m", "o")
        self.before = tree(self.path("o"))

    def stays(self, *has, args=(), model="m"):
        for more in ([], ["--dry-run"], ["--restart"]):
            self.usage("--to", "nf4", *args, *more, model, "o",
                       has=["o holds a finished output (--to nf4", "--force replaces it", *has])
            self.assertEqual(tree(self.path("o")), self.before)

    def test_other_options(self):
        self.stays("--to was 'nf4' and is 'int8' now", args=["--to", "int8"])
        self.stays("--block-size was 64 and is 32 now", args=["--block-size", "32"])
        self.stays("--no-double-quant was not given", args=["--no-double-quant"])
        self.stays("--scale was", args=["--scale", "absmax"])
        self.stays("--rest was", args=["--rest", "fp16"])
        self.stays("--compress was 'zstd' and is 'none' now", args=PLAIN)
        self.stays("'zstd:1' and is 'zstd:3' now", args=["--compress", "zstd:3"])
        self.stays("--max-shard-size was", args=["--max-shard-size", "500B"])
        self.stays("rule 1 was 'nothing' and is 'keep *layers.0*' now", args=["--keep", "*layers.0*"])

    def test_another_model(self):
        self.model(tiny(layers=3), name="larger")
        self.stays("another model", "model.safetensors", model="larger")
        self.model(tiny(seed=2), name="tuned")
        self.write("tuned/tokenizer.json", "{}")
        for more in ([], ["--restart"]):
            self.usage("--to", "nf4", *more, "tuned", "o", has=["whose weights are not these"])
            self.assertEqual(tree(self.path("o")), self.before)
        self.ok("-q", "--to", "nf4", "--force", "tuned", "o")
        self.ok("-q", "--to", "nf4", "tuned", "fresh")
        self.assert_same("fresh", "o")

    def test_other_side_files(self):
        self.write("m/tokenizer.json", "{ }")
        self.stays("'tokenizer.json' is not that of this source")
        self.write("m/tokenizer.json", "{}")
        self.write("m/more.txt", "")
        self.stays("2 files beside the weights and this one 3")

    def test_complete_already(self):
        when = os.stat(self.path("o", "model.safetensors.zst")).st_mtime_ns
        for more in ([], ["--threads", "1"]):
            self.assertEqual(self.ok("--to", "nf4", *more, "m", "o"),
                             "o is complete already; --force makes it anew\n")
        self.assertTrue(json.loads(self.ok("--json", "--to", "nf4", "m", "o"))["complete_before"])
        r = self.run_qconv("--to", "nf4", "--dry-run", "m", "o")
        self.assertEqual(r.returncode, 0)
        self.assertIn(b"nothing to do", r.stderr)
        self.assertEqual(tree(self.path("o")), self.before)
        self.assertEqual(os.stat(self.path("o", "model.safetensors.zst")).st_mtime_ns, when)
        for more in ("--restart", "--force"):
            self.ok("-q", "--to", "nf4", more, "m", "o")
            now = os.stat(self.path("o", "model.safetensors.zst")).st_mtime_ns
            self.assertNotEqual(now, when)
            when = now
            self.assertEqual(tree(self.path("o")), self.before)

    def test_incomplete(self):
        os.remove(self.path("o", "model.safetensors.zst"))
        self.before = tree(self.path("o"))
        self.stays("'model.safetensors.zst' is missing")
        self.ok("-q", "--to", "nf4", "--force", "m", "o")
        self.ok("-q", "verify", "o")

    def test_unpack(self):
        self.ok("-q", "unpack", "o", "u")
        before = tree(self.path("u"))
        r = self.run_qconv("unpack", "o", "u")
        self.assertEqual((r.returncode, r.stdout), (0, b""))
        self.assertIn(b"u is complete already", r.stderr)
        self.assertEqual(self.ok("--to", "nf4", *PLAIN, "m", "u"),
                         "u is complete already; --force makes it anew\n")
        self.ok("-q", "--to", "int8", "m", "p")
        self.usage("unpack", "p", "u", has=["--to was 'nf4' and is 'int8' now", "--force"],
                   command="unpack")
        self.assertEqual(tree(self.path("u")), before)
        self.ok("-q", "unpack", "--force", "p", "u")
        self.ok("-q", "--to", "int8", *PLAIN, "m", "fresh")
        self.assert_same("fresh", "u")


class InTheWay(OutputCase):
    """What has the name of a file that will be written is noticed before the work."""

    def setUp(self):
        super().setUp()
        self.model(tiny())
        os.makedirs(self.path("m/docs/deep"))
        self.write("m/docs/deep/a.txt", "a")

    def test_folders_and_pipes(self):
        for name in ["model.safetensors.zst", "config.json", "docs/deep/a.txt"]:
            self.ok("-q", "--to", "nf4", "m", "o")
            if os.path.lexists(self.path("o", name)):
                os.remove(self.path("o", name))
            os.mkdir(self.path("o", name))
            before = tree(self.path("o"))
            for dry in ([], ["--dry-run"]):
                self.usage("--to", "int8", "--force", *dry, "m", "o",
                           has="o/" + name + " is a folder where the output has a file")
                self.assertEqual(tree(self.path("o")), before)
            shutil.rmtree(self.path("o"))
        os.makedirs(self.path("o", "qconv.json"))
        self.usage("--to", "nf4", "--force", "m", "o", has="o/qconv.json is a folder")
        os.rmdir(self.path("o", "qconv.json"))
        os.mkfifo(self.path("o", "config.json"))
        self.usage("--to", "nf4", "--force", "m", "o", has="is a pipe or device")

    def test_a_file_where_a_folder_is_needed(self):
        os.mkdir(self.path("o"))
        self.write("o/docs", "a file")
        for dry in ([], ["--dry-run"]):
            self.usage("--to", "nf4", "--force", *dry, "m", "o",
                       has=["o/docs is a file where the output has a folder"])
        self.assertEqual(tree(self.path("o")), {"docs": b"a file"})

    def test_unpack(self):
        self.ok("-q", "--to", "nf4", "m", "o")
        os.makedirs(self.path("u/model.safetensors"))
        self.usage("unpack", "--force", "o", "u", has="is a folder where the output has a file",
                   command="unpack")
        self.assertEqual(tree(self.path("u")), {"model.safetensors": None})


@unittest.skipUnless(os.geteuid() == 0, "a file system is mounted for it")
class Room(OutputCase):
    """A disk that is too small is told before anything is written."""

    def small(self, size):
        os.mkdir(self.path("o"))
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=%d" % size, "none", self.path("o")],
                          stderr=subprocess.DEVNULL).returncode:
            self.skipTest("file systems cannot be mounted here")
        self.addCleanup(subprocess.run, ["umount", "-l", self.path("o")])

    def setUp(self):
        super().setUp()
        rng = random.Random(5)
        self.model({Q % i: ("BF16", [1024, 1024], mk.random_bytes("BF16", [1024, 1024], rng))
                    for i in range(4)})

    def test_nothing_free(self):
        """Not one byte, not even for the journal: the same sentence."""
        self.small(1 << 16)
        with open(self.path("o", "full"), "wb", buffering=0) as f, self.assertRaises(OSError):
            while True:
                f.write(bytes(4096))
        for out in ("o/x", "o/y"):
            self.fails(1, "--to", "int8", *PLAIN, "m", out, has=["needs", "0 B free", "are missing"])

    def test_too_small(self):
        self.small(1 << 20)
        for more in (["--to", "int8", *PLAIN], ["--to", "bf16"], ["--to", "bf16", *PLAIN]):
            self.fails(1, *more, "m", "o", has=["needs", "free", "are missing"])
            self.assertEqual(os.listdir(self.path("o")), [])
            r = self.run_qconv(*more, "--dry-run", "m", "o")
            self.assertEqual(r.returncode, 1)
            self.assertIn(b"are missing", r.stderr)
            self.assertIn(b"dry run: m -> o", r.stdout)
        self.ok("-q", "--to", "int8", *PLAIN, "m", "p")
        self.fails(1, "unpack", "p", "o", has=["needs", "free", "are missing"])
        self.assertEqual(os.listdir(self.path("o")), [])

    def test_perhaps(self):
        """Compressed it may fit: a warning, and if not, what was done stays."""
        self.small(3 << 20)
        r = self.run_qconv("--to", "int8", "m", "o")
        self.assertEqual(r.returncode, 1, r.stderr)
        self.assertIn(b"if compression is not enough, the conversion stops when the disk is full", r.stderr)
        self.assertIn(b"the disk is full", r.stderr)
        self.assertIn(b"the same command continues", r.stderr)

    def test_weights_that_compress(self):
        """A sample of the source says how much: these may well fit, and do."""
        self.model({Q % i: ("BF16", [1024, 1024], bytes(2 << 20)) for i in range(4)}, name="zeros")
        self.small(1 << 20)
        self.ok("-q", "--to", "int8", "zeros", "o")
        self.ok("-q", "verify", "o")

    @unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
    def test_going_on(self):
        """What an interrupted run has on the disk needs no room once more."""
        self.small(5 << 20)
        r = self.run_qconv("-q", "--threads", "1", "--to", "int8", *PLAIN, "m", "o",
                           env=at_call("rename:1", run="kill -9 $PPID"))
        self.assertNotEqual(r.returncode, 0)
        self.assertGreater(os.path.getsize(self.path("o", STAGING, "model.safetensors")), 1 << 21)
        self.ok("-q", "--to", "int8", *PLAIN, "m", "o")
        self.ok("-q", "verify", "o")


class TwoRuns(OutputCase):
    def test_a_held_lock_refuses(self):
        self.model(tiny())
        self.ok("-q", "--to", "nf4", "m", "o")
        before = tree(self.path("o"))
        os.mkdir(self.path("o", STAGING))
        with open(self.path("o", STAGING, "lock"), "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            self.usage("--to", "int8", "m", "o", has="another qconv is writing to o now")
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
