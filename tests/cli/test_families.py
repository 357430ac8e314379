#!/usr/bin/env python3
"""Families that `eval` and --calibrate compute beside Llama's (tests/data/families): the logits of
transformers, calibrating to less divergence than a search gives, and what a GPU does not compute."""
import array
import json
import math
import os
import random
import struct
import subprocess
import unittest

from output_case import OutputCase, isa_list
from qconv_case import ROOT
import family_weights
import make_checkpoint as mk

with open(os.path.join(ROOT, "tests", "data", "families", "models.json"), encoding="utf-8") as _f:
    MODELS = json.load(_f)
IDS = MODELS.pop("ids")
SMALL = {"gemma3": "*_proj.weight", "roberta": "*layer.*.*.weight", "xlm-roberta": "*layer.*.*.weight",
         "distilbert": "*layer.*.*lin*.weight", "gpt_neox": "*layers.*.*.*.weight",
         "gpt_neox-serial": "*layers.*.*.*.weight"}
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert")
TOOL = os.environ.get("LOGITS_TOOL", os.path.join(ROOT, "build", "logits_tool"))


def images_of(model):
    out = {}
    for n, image in enumerate(model["images"]):
        dtype, (tokens, hidden), raw = family_weights.tensor(f"states.{n}", image["states"], 0)
        cut = image["seen"] * hidden * 2
        out[f"states.{n}"] = (dtype, [image["seen"], hidden], raw[:cut])
        if cut < len(raw):
            out[f"padding.{n}"] = (dtype, [tokens - image["seen"], hidden], raw[cut:])
    return out


class FamilyCase(OutputCase):
    def make(self, kind, **config):
        model = MODELS[kind]
        around = 0 if kind.startswith("gemma") else 1
        mk.write_checkpoint(self.path(kind), {
            name: family_weights.tensor(name, shape, around) for name, shape in model["tensors"].items()},
            config=model["config"] | config)
        return kind

    def make_images(self, kind):
        """Also the states of the images of its sequences, in images.safetensors."""
        self.make(kind)
        mk.write_safetensors(self.path("images.safetensors"), images_of(MODELS[kind]))
        return MODELS[kind]

    def numbers(self, *args):
        return json.loads(self.ok("eval", "--json", "-q", *args, "--text", "t.ids"))


class Logits(FamilyCase):
    def logits(self, kind, env, *options, ids=IDS):
        self.write("t.ids", "".join(" ".join(map(str, row)) + "\n" for row in ids))
        subprocess.run([TOOL, *options, self.path(kind), self.path("t.ids"), self.path("logits")], check=True,
                       env=os.environ | env, stderr=subprocess.DEVNULL)
        with open(self.path("logits"), "rb") as f:
            return f.read()

    def check(self, kind):
        self.make(kind)
        runs = {self.logits(kind, {"QCONV_ISA": isa}) for isa in isa_list()}
        self.assertEqual(len(runs), 1, "the bits depend on the instruction set")
        self.compare(runs.pop(), [dict(ids=row, logits=want) for row, want in zip(IDS, MODELS[kind]["logits"])])

    def compare(self, raw, sequences):
        all_logits, at = array.array("f", raw), 0
        for s in sequences:
            at, want = at + len(s["ids"]), s["logits"]
            got = all_logits[(at - 1) * len(want):at * len(want)]
            self.assertLess(math.dist(got, want) / math.hypot(*want), 1e-5, s["ids"])

    def test_with_images(self):
        """Sequences of a model that sees images: with padding behind it and an image token, with the token in
        front of all, and without one."""
        model = self.make_images("mllama")
        files = ["--images", self.path("images.safetensors")]
        runs = {self.logits("mllama", {"QCONV_ISA": isa}, "--threads", str(1 + n % 3), *files,
                            ids=[image["ids"] for image in model["images"]])
                for n, isa in enumerate(isa_list() * 3)}
        self.assertEqual(len(runs), 1, "the bits depend on the instruction set or on threads")
        self.compare(runs.pop(), model["images"])
        for n, image in enumerate(model["images"]):  # alone, and as the only image of a file
            mk.write_safetensors(self.path("one.safetensors"), {
                name.replace(f".{n}", ""): t for name, t in images_of(model).items() if name.endswith(f".{n}")})
            self.compare(self.logits("mllama", {}, "--images", self.path("one.safetensors"), ids=[image["ids"]]),
                         [image])

    def test_names_in_memory(self):
        """Models that see images have other names in the memory of transformers, and some files have these."""
        for kind in ("gemma3", "mllama"):
            published = self.logits(self.make(kind), {})
            tensors = {}
            for name, tensor in mk.read_checkpoint(self.path(kind)).items():
                name = name.replace("language_model.model.", "model.language_model.")
                tensors[name.replace("language_model.lm_head", "lm_head")] = tensor
            self.assertIn("model.language_model.norm.weight", tensors)
            mk.write_checkpoint(self.path(kind), tensors, config=MODELS[kind]["config"])
            self.assertEqual(self.logits(kind, {}), published, kind)


    def test_gpt2_as_published(self):
        """Its names begin with nothing, and there are buffers. A window has at most as many tokens as positions."""
        want = self.logits(self.make("gpt2"), {})
        tensors = {name.removeprefix("transformer."): tensor
                   for name, tensor in mk.read_checkpoint(self.path("gpt2")).items()}
        tensors["h.0.attn.bias"] = ("F32", [1, 1, 64, 64], bytes(4 * 64 * 64))
        mk.write_checkpoint(self.path("gpt2"), tensors, config=MODELS["gpt2"]["config"])
        self.assertEqual(self.logits("gpt2", {}), want)
        self.write("t.ids", "1 2 3 4 5 " * 20)
        self.assertEqual(self.numbers("gpt2")["context"], 64)
        r = self.run_qconv("eval", "gpt2", "--text", "t.ids", "--context", "65")
        self.assertEqual((r.returncode, r.stderr.decode().splitlines()[-1]), (
            3, "qconv: gpt2: a window of 65 tokens is longer than the 64 positions that the model has learned"))

    def test_conv1d(self):
        """A quantized Conv1D lies [out, in], one with 16 bits [in, out]; they compute the same, also side by
        side in one model."""
        self.make("gpt2")
        self.write("t.ids", "3 17 5 22 9 1 14 20 11 7 2 19 16 8 23 4 12 6\n")
        name = "transformer.h.0.attn.c_proj.weight"
        for form in ("nf4", "int8"):
            mixed = self.convert("--to", form, "--compress", "none", "--keep", name, "gpt2", form)
            self.assertEqual(mixed[name], mk.read_checkpoint(self.path("gpt2"))[name])
            back = self.convert("--to", "bf16", "--compress", "none", form, f"{form}-back")
            self.assertEqual(back["transformer.h.0.attn.c_attn.weight"][1], [16, 48])
            self.assertLess(self.numbers(form, "--against", f"{form}-back")["kl_mean"], 1e-4, form)
            self.assertLess(self.numbers(form, "--against", "gpt2")["kl_mean"], 0.1, form)


    def test_bert_as_published(self):
        """Its names begin with "bert.", the norms are called gamma and beta, and there are heads."""
        want = self.logits(self.make("bert"), {})
        tensors = {"cls.predictions.bias": ("F32", [24], bytes(96))}
        for name, tensor in mk.read_checkpoint(self.path("bert")).items():
            name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors["bert." + name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
        mk.write_checkpoint(self.path("bert"), tensors,
                            config=MODELS["bert"]["config"] | {"architectures": ["BertForPreTraining"]})
        self.assertEqual(self.logits("bert", {}), want)


class Calibrated(FamilyCase):
    def setUp(self):
        super().setUp()
        rng = random.Random(4)
        self.write("t.ids", "".join(" ".join(str(rng.randrange(24)) for _ in range(40)) + "\n"
                                    for _ in range(60)))

    def check(self, kind):
        self.make(kind)
        nf4 = ["--to", "nf4", "--compress", "none"]
        if kind in SMALL:  # It has no table of roles, and general rules keep what is so small.
            nf4 += ["--quantize", SMALL[kind]]
        said = self.run_qconv(*nf4, "-v", "--calibrate", "t.ids", "--threads", "1", kind,
                              "one").stderr.decode()
        self.assertIn("calibrating ", said)
        if kind == "mllama":  # Layer 1 looks at an image; and there is a projector.
            self.assertIn("8 weights are quantized without calibration, as the forward pass has no inputs for "
                          "them: 'language_model.model.layers.1.cross_attn.k_proj.weight'", said)
        elif kind == "bert":  # The forward pass ends in front of the pooler.
            self.assertIn("1 weight is quantized without calibration, as the forward pass has no inputs for them: "
                          "'pooler.dense.weight'", said)
        else:
            self.assertNotIn("without calibration", said)
        self.convert(*nf4, "--scale", "search", kind, "search")
        three = self.convert(*nf4, "--calibrate", "t.ids", "--threads", "3", kind, "three")
        self.assertEqual(mk.read_checkpoint(self.path("one")), three)
        number = "distance_mean" if kind in ENCODERS else "kl_mean"
        apart = {out: self.numbers(out, "--against", kind)[number] for out in ("one", "search")}
        self.assertLess(apart["one"], 0.9 * apart["search"])
        self.ok("verify", "one", "--against", kind)

    def test_moments_of_conv1d(self):
        """Moments that say nothing leave about as much error as a search."""
        self.make("gpt2")
        module = "transformer.h.0.mlp.c_proj"  # [20, 16] in the file
        moments = struct.pack("<400d", *(float(i % 21 == 0) for i in range(400)))
        mk.write_checkpoint(self.path("moments"), {
            module + ".second_moment": ("F64", [20, 20], moments),
            module + ".tokens": ("I64", [1], struct.pack("<q", 5000))}, config={})
        nf4 = ["--to", "nf4", "--compress", "none", "gpt2"]
        self.ok(*nf4, "given", "--hessians", "moments/model.safetensors")
        self.ok(*nf4, "search", "--scale", "search")
        kl = [self.numbers(out, "--against", "gpt2")["kl_mean"] for out in ("given", "search")]
        self.assertNotEqual(kl[0], kl[1])
        self.assertLess(kl[0], 1.5 * kl[1])


class Encoders(FamilyCase):
    STATES = ("distance_mean", "distance_99", "distance_max", "cosine_mean", "cosine_99", "cosine_max")

    def setUp(self):
        super().setUp()
        self.make("bert")
        self.write("t.ids", "".join(" ".join(map(str, row)) + "\n" for row in IDS))
        self.convert("--to", "nf4", "bert", "out")

    def states(self, folder):
        """Hidden states of each line."""
        subprocess.run([TOOL, self.path(folder), self.path("t.ids"), self.path("states")], check=True,
                       stderr=subprocess.DEVNULL)
        with open(self.path("states"), "rb") as f:
            rows = array.array("f", f.read())
        out, at = [], 0
        for row in IDS:
            out.append([rows[(at + i) * 16:(at + i + 1) * 16] for i in range(len(row))])
            at += len(row)
        return out

    def test_numbers(self):
        """Both distances, by their formulas."""
        distances, cosines = [], []
        for ours, theirs in zip(self.states("out"), self.states("bert")):
            a, b = (sum(map(list, x), []) for x in (ours, theirs))
            distances.append(math.dist(a, b) / math.hypot(*b))
            means = [[math.fsum(c) / len(x) for c in zip(*x)] for x in (ours, theirs)]
            product = math.fsum(x * y for x, y in zip(*means))
            cosines.append(1 - product / math.hypot(*means[0]) / math.hypot(*means[1]))
        got = self.numbers("out", "--against", "bert")
        for name, all_of in (("distance", distances), ("cosine", cosines)):
            self.assertAlmostEqual(got[name + "_mean"], math.fsum(all_of) / 2, places=6)
            self.assertAlmostEqual(got[name + "_max"], max(all_of), places=6)
            self.assertAlmostEqual(got[name + "_99"], min(all_of) + 0.99 * (max(all_of) - min(all_of)), places=6)
        self.assertGreater(got["distance_mean"], 0.01)
        self.assertEqual((got["model_type"], got["windows"], got["tokens"], got["predicted"]), ("bert", 2, 23, 0))
        others = ("perplexity", "base_perplexity", "kl_mean", "top1", "probability_rms", "perplexity_error")
        self.assertEqual({got[name] for name in others}, {None})
        self.assertEqual(self.numbers("bert", "--against", "bert")["distance_max"], 0)
        self.make("gpt2")
        language = self.numbers("gpt2", "--against", "gpt2")
        self.assertEqual({language[name] for name in self.STATES}, {None})

    def test_said(self):
        said = self.ok("eval", "out", "--against", "bert", "--text", "t.ids")
        self.assertRegex(said, r"^out \(bert\) against bert over t.ids\n"
                               r"  23 tokens \(ids\), 2 windows of at most 64; cpu, [\d.]+ s\n\n"
                               r"  distance of hidden states, mean +0\.\d+\n")
        self.assertEqual(said.count("\n"), 9, said)
        self.assertNotIn("perplexity", said)

    def test_limits(self):
        args = ["eval", "out", "--against", "bert", "--text", "t.ids", "-q"]
        self.ok(*args, "--max-distance", "0.9")
        r = self.run_qconv(*args, "--max-distance", "0.001")
        self.assertEqual(r.returncode, 4)
        self.assertRegex(r.stderr.decode(), r"^qconv: out: the mean distance of hidden states to bert is 0\.\d+, "
                                            r"above --max-distance 0\.001, over t\.ids\n$")
        self.fails(2, *args, "--max-kl", "0.1",
                   has=["--max-kl: out is an encoder (bert), which predicts nothing; --max-distance is its limit"])
        self.make("gpt2")
        self.fails(2, "eval", "gpt2", "--against", "gpt2", "--text", "t.ids", "--max-distance", "1",
                   has=["--max-distance is for encoders, and gpt2 is a gpt2; --max-kl is its limit"])
        self.fails(2, "eval", "out", "--text", "t.ids", "--max-distance", "1",
                   has=["--max-distance needs --against"])

    def test_refused(self):
        self.fails(2, "eval", "out", "--text", "t.ids",
                   has=["out is an encoder (bert), which predicts nothing: give --against MODEL"])
        self.make("gpt2")
        self.fails(3, "eval", "gpt2", "--against", "bert", "--text", "t.ids",
                   has=["bert is an encoder, and gpt2 is none, so they cannot be compared"])
        self.write("r.json", self.ok("eval", "out", "--against", "bert", "--text", "t.ids", "--json"))
        self.fails(3, "report", "out", "--html", "r.html", "--eval", "r.json",
                   has=["r.json: it has the distances of an encoder"])
        self.fails(3, "report", "out", "--html", "r.html", "--against", "bert", "--text", "t.ids",
                   has=["out is an encoder (bert), and a report shows what --text says of a language model"])


class Refused(FamilyCase):
    def test_a_matrix_of_another_shape(self):
        """The message names the matrix that holds q, k and v, with the rows of all three."""
        self.make("phi3")
        tensors = dict(mk.read_checkpoint(self.path("phi3")))
        name = "model.layers.1.self_attn.qkv_proj.weight"
        tensors[name] = ("BF16", [16, 16], bytes(512))
        mk.write_checkpoint(self.path("m"), tensors, config=MODELS["phi3"]["config"])
        self.write("t.ids", "1 2 3\n")
        self.fails(3, "eval", "m", "--text", "t.ids",
                   has=[f"m: tensor '{name}' is [16, 16], and config.json makes it [32, 16]"])

    @unittest.skipUnless(os.environ.get("QCONV_SHIM"), "the build has no kernels on the CPU")
    def test_on_a_gpu(self):
        """Asked for, it is refused. Where qconv would take one by itself, it takes the CPU and says so."""
        def run(*args):
            r = subprocess.run([os.environ["QCONV_SHIM"], *args], cwd=self.path(), text=True,
                               capture_output=True)
            return r.returncode, r.stdout + r.stderr

        self.make("gemma2")
        self.write("t.ids", "1 2 3 4 5 6\n")
        self.assertEqual(run("eval", "gemma2", "--text", "t.ids", "--device", "cuda"), (
            3, "qconv: gemma2: models of model_type 'gemma2' are not computed on a GPU; --device cpu "
               "computes them\n"))
        code, said = run("--to", "nf4", "--calibrate", "t.ids", "--device", "cuda", "gemma2", "out")
        self.assertEqual(code, 3)
        self.assertIn("calibrating on a GPU: models of model_type 'gemma2' are computed on the CPU only; "
                      "--device cpu calibrates without one", said)
        self.write("t.ids", "1 2 3 4 5 6\n" + " " * 80_000_000)  # As much work as is worth a GPU.
        code, said = run("eval", "gemma2", "--against", "gemma2", "--text", "t.ids")
        self.assertEqual((code, said.count("evaluating on the CPU, because models of model_type 'gemma2' "
                                           "are not computed on a GPU\n")), (0, 1), said)
        self.assertIn("5 predicted; cpu", said)


for _kind in MODELS:
    _name = "test_" + _kind.replace("-", "_")
    setattr(Logits, _name, lambda self, kind=_kind: self.check(kind))
    setattr(Calibrated, _name, lambda self, kind=_kind: self.check(kind))


if __name__ == "__main__":
    unittest.main()
