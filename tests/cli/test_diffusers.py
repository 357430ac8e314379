"""diffusers: names of files, variants, what its classes hold in 32 bit, and a pipeline, which is no model."""
import json
import os
import random
import shutil
import unittest

from output_case import OutputCase, PLAIN, tree
import make_checkpoint as mk

STEM = "diffusion_pytorch_model"
INDEX = STEM + ".safetensors.index.json"


class DiffusersCase(OutputCase):
    def tensors(self, names, rows=64, cols=64, dtype="BF16", seed=1):
        rng = random.Random(seed)
        out = {}
        for name in names:
            shape = [rows, cols] if name.endswith(".weight") else [rows]
            out[name] = (dtype, shape, mk.random_bytes(dtype, shape, rng))
        return out

    def save(self, folder, tensors, stem=STEM, cls="FluxTransformer2DModel", variant="", shards=1,
             config=True):
        """A part as diffusers saves it, in files of its own names."""
        os.makedirs(self.path(folder), exist_ok=True)
        if config:
            own = {"_class_name": cls, "_diffusers_version": "0.42.1"} if stem == STEM else \
                {"model_type": cls, "architectures": [cls]}
            self.write(folder + "/config.json", json.dumps(own, indent=2) + "\n")
        names = sorted(tensors)
        dot = "." + variant if variant else ""
        if shards == 1:
            mk.write_safetensors(self.path(folder, stem + dot + ".safetensors"), tensors)
            return
        index = {}
        for i in range(shards):
            file = "%s%s-%05d-of-%05d.safetensors" % (stem, dot, i + 1, shards)
            own = names[i::shards]
            mk.write_safetensors(self.path(folder, file), {n: tensors[n] for n in own})
            index.update({n: file for n in own})
        self.write("%s/%s.safetensors.index%s.json" % (folder, stem, dot),
                   json.dumps({"metadata": {}, "weight_map": index}))

    def skipped(self, out):
        with open(self.path(out, "config.json")) as f:
            return json.load(f)["quantization_config"]["llm_int8_skip_modules"]

    def read(self, *names):
        with open(self.path(*names), "rb") as f:
            return f.read()

    def config(self, out):
        return json.loads(self.read(out, "config.json"))


class Names(DiffusersCase):
    LAYERS = ["blocks.%d.to_q.weight" % i for i in range(4)]

    def test_next_step_is_diffusers(self):
        self.save("m", self.tensors(self.LAYERS))
        text = self.ok("--to", "nf4", "m", "o")
        self.assertIn("  loads in  diffusers with bitsandbytes\n", text)
        self.assertIn("from diffusers import FluxTransformer2DModel\n", text)
        self.assertNotIn("transformers", text)
        loads = json.loads(self.ok("--json", "--to", "nf4", "m", "p"))["loads"]
        self.assertEqual((loads["diffusers"], loads["transformers"]), (True, []))

    def test_one_file(self):
        self.save("m", self.tensors(self.LAYERS))
        self.ok("-q", "--to", "nf4", *PLAIN, "m", "o")
        self.assertEqual(sorted(os.listdir(self.path("o"))),
                         ["config.json", STEM + ".safetensors", "qconv.json"])
        self.ok("-q", "--to", "nf4", "m", "z")
        self.assertIn(STEM + ".safetensors.zst", os.listdir(self.path("z")))
        self.ok("verify", "z")
        self.ok("-q", "unpack", "z", "u")
        self.assertEqual(tree(self.path("u")), tree(self.path("o")))
        self.ok("-q", "--to", "bf16", "z", "back")
        self.assertIn(STEM + ".safetensors.zst", os.listdir(self.path("back")))

    def test_several_files(self):
        """Of the source and of the output."""
        self.save("m", self.tensors(self.LAYERS), shards=2)
        self.ok("-q", "--to", "nf4", "--max-shard-size", "8KB", *PLAIN, "m", "o")
        names = sorted(os.listdir(self.path("o")))
        self.assertEqual(names, ["config.json", STEM + "-00001-of-00002.safetensors",
                                 STEM + "-00002-of-00002.safetensors", INDEX, "qconv.json"])
        with open(self.path("o", INDEX)) as f:
            self.assertLessEqual(set(json.load(f)["weight_map"].values()), set(names))
        self.ok("verify", "o")
        self.ok("inspect", "o")
        os.unlink(self.path("o", INDEX))
        self.assertIn(INDEX, self.run_qconv("verify", "o").stderr.decode())

    def test_other_models_keep_their_names(self):
        self.save("m", self.tensors(self.LAYERS), stem="model", cls="t5")
        self.ok("-q", "--to", "nf4", *PLAIN, "m", "o")
        self.assertIn("model.safetensors", os.listdir(self.path("o")))


class Variants(DiffusersCase):
    """The full weights beside those of a variant: read and copied is one of them, and said which."""

    W = ["a.to_q.weight"]

    def convert(self, model, *more):
        r = self.run_qconv("--to", "nf4", *PLAIN, *more, model, "o")
        self.assertEqual(r.returncode, 0, r.stderr)
        names = sorted(os.listdir(self.path("o")))
        sources = json.loads(self.read("o", "qconv.json"))["sources"]
        shutil.rmtree(self.path("o"))
        return r.stderr.decode(), names, [s["name"] for s in sources]

    def test_full_is_read(self):
        for stem in (STEM, "model"):
            self.save(stem, self.tensors(self.W), stem=stem)
            self.save(stem, self.tensors(self.W, dtype="F16", seed=2), stem=stem, variant="fp16")
            words, names, sources = self.convert(stem)
            self.assertIn("'%s.fp16.safetensors'" % stem, words)
            self.assertIn("'%s.safetensors' is read" % stem, words)
            self.assertEqual((names, sources), (["config.json", stem + ".safetensors", "qconv.json"],
                                                [stem + ".safetensors"]))
            # The other one is to be had by its name, under the full one's in OUT.
            words, names, sources = self.convert(stem + "/%s.fp16.safetensors" % stem)
            self.assertIn("'config.json' beside", words)
            self.assertEqual((names, sources), (["config.json", stem + ".safetensors", "qconv.json"],
                                                [stem + ".fp16.safetensors"]))

    def test_sharded(self):
        w = self.tensors(["a.to_q.weight", "b.to_q.weight"])
        self.save("m", w, shards=2)
        self.save("m", w, shards=2, variant="fp16")
        words, names, sources = self.convert("m")
        self.assertIn("fp16-00001", words)
        self.assertEqual(sources, ["%s-0000%d-of-00002.safetensors" % (STEM, i) for i in (1, 2)])
        self.assertEqual(names, ["config.json", STEM + ".safetensors", "qconv.json"])
        words, names, sources = self.convert("m/%s.safetensors.index.fp16.json" % STEM)
        self.assertEqual(sources, ["%s.fp16-0000%d-of-00002.safetensors" % (STEM, i) for i in (1, 2)])
        self.assertEqual(names, ["config.json", STEM + ".safetensors", "qconv.json"])

    def test_only_a_variant(self):
        w = self.tensors(["a.to_q.weight", "b.to_q.weight"])
        for shards in (1, 2):
            self.save("m%d" % shards, w, shards=shards, variant="fp16")
            words, names, _ = self.convert("m%d" % shards)
            self.assertNotIn("variant", words)
            self.assertEqual(names, ["config.json", STEM + ".safetensors", "qconv.json"])

    def test_two_variants_and_no_full_one(self):
        for variant in ("fp16", "non_ema"):
            self.save("m", self.tensors(self.W), variant=variant)
        self.fails(3, "--to", "nf4", "m", "o", has=["2 variants", "fp16", "non_ema", "as MODEL"])


class Float(DiffusersCase):
    """What a class holds in 32 bit is neither quantized nor cast: its loader does not, either."""

    NAMES = ["condition_embedder.time_embedder.linear_1.weight", "blocks.0.attn1.to_q.weight",
             "blocks.0.norm2.bias", "condition_embedder.time_proj.weight"]

    def dtypes(self, out):
        return {n: t[0] for n, t in mk.read_safetensors(self.path(out, STEM + ".safetensors"))[0].items()}

    def test_wan(self):
        self.save("m", self.tensors(self.NAMES, dtype="F32"), cls="WanTransformer3DModel")
        self.ok("-q", "--to", "nf4", *PLAIN, "--rest", "bf16", "m", "o")
        got = self.dtypes("o")
        self.assertEqual([got[n] for n in self.NAMES], ["F32", "U8", "F32", "U8"])
        self.assertIn("condition_embedder.time_embedder.linear_1", self.skipped("o"))
        self.ok("-q", "--to", "bf16", *PLAIN, "m", "b")
        got = self.dtypes("b")
        self.assertEqual([got[n] for n in self.NAMES], ["F32", "BF16", "F32", "BF16"])
        self.usage("--to", "nf4", "--quantize", "*time_embedder*", "m", "p", has="32 bit")

    def test_other_classes(self):
        self.save("m", self.tensors(self.NAMES), cls="LTXVideoTransformer3DModel")
        self.ok("-q", "--to", "nf4", *PLAIN, "m", "o")
        self.assertEqual(self.dtypes("o")[self.NAMES[0]], "U8")

    def test_namesakes(self):
        """On diffusers' list "proj_out" stands for every "x.proj_out"; so the small one at the top
        is quantized like them, and an own rule that would not load is refused."""
        tensors = self.tensors(["blocks.0.proj_out.weight"])
        tensors.update(self.tensors(["proj_out.weight"], rows=16))
        self.save("m", tensors)
        self.ok("-q", "--to", "nf4", *PLAIN, "m", "o")
        self.assertEqual(self.dtypes("o")["proj_out.weight"], "U8")
        self.assertNotIn("proj_out", self.skipped("o"))
        self.usage("--to", "nf4", "--keep", "proj_out.*", "m", "p",
                   has=["'proj_out.weight'", "'blocks.0.proj_out.weight'"])
        # Without such a namesake the small one stays.
        del tensors["blocks.0.proj_out.weight"]
        tensors.update(self.tensors(["blocks.0.to_q.weight"]))
        self.save("n", tensors)
        self.ok("-q", "--to", "nf4", *PLAIN, "n", "q")
        self.assertIn("proj_out", self.skipped("q"))


class Pipeline(DiffusersCase):
    def test_refused(self):
        """A folder of several models is not one; the Python package walks its parts (test_pipeline.py)."""
        for part, files in (("transformer", 2), ("vae", 1)):
            self.save("m/" + part, self.tensors(["blocks.%d.to_q.weight" % i for i in range(2)]), shards=files)
        os.mkdir(self.path("m/scheduler"))
        self.write("m/scheduler/scheduler_config.json", "{}")
        self.write("m/model_index.json", "{}")
        told = "m is a diffusers pipeline (model_index.json) and not one model; give the folder of one of its parts: " \
               "'transformer', 'vae' (convert, verify and unpack of the Python package walk them all)"
        for args in (["--to", "nf4", "m", "o"], ["--to", "nf4", "--dry-run", "m"], ["plan", "--vram", "24GB", "m"],
                     ["inspect", "m"], ["verify", "m"], ["unpack", "m", "o"], ["validate", "m", "--against", "m"]):
            self.assertEqual(self.fails(3, *args), "qconv: %s\n" % told)
        self.assert_nothing("o")
        self.ok("-q", "--to", "nf4", "m/transformer", "o/transformer")
        self.ok("verify", "o/transformer")


if __name__ == "__main__":
    unittest.main()
