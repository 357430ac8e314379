#!/usr/bin/env python3
"""Families that `eval` and --calibrate compute beside Llama's (tests/data/families): the logits of
transformers, calibrating to less divergence than a search gives, and what a GPU does not compute."""
import array
import json
import math
import os
import random
import re
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


    def tool(self, kind, env, *options, ids=IDS):
        """What logits_tool prints and writes."""
        self.write("t.ids", "".join(" ".join(map(str, row)) + "\n" for row in ids))
        done = subprocess.run([TOOL, *options, self.path(kind), self.path("t.ids"), self.path("made")], check=True,
                              env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with open(self.path("made"), "rb") as f:
            return done.stdout.decode(), f.read()


class Logits(FamilyCase):
    def logits(self, *args, **kwargs):
        return self.tool(*args, **kwargs)[1]

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


class Moments(FamilyCase):
    """Second moments of the gradients of linear layers' outputs, as PyTorch has them."""

    def moments(self, kind, *options):
        """{name behind the layer's prefix: rows of the matrix}, and the floats in their order."""
        names, raw = self.tool(kind, {}, *options, "--moments", "4096")
        numbers, at, out = array.array("f", raw), 0, {}
        for name, n in (line.split() for line in names.splitlines()):
            out[name[re.search(r"\d", name).start():]] = [numbers[at + i * int(n):at + (i + 1) * int(n)]
                                                         for i in range(int(n))]
            at += int(n)**2
        self.assertEqual(at, len(numbers))
        return out

    def check(self, kind):
        self.make(kind)
        made, wanted = self.moments(kind), MODELS[kind]["moments"]
        self.assertEqual(len(made), len(wanted))
        self.assertEqual(made, self.moments(kind, "--threads", "3"))
        for name, (trace, product) in wanted.items():
            g = made[name[re.search(r"\d", name).start():]]
            v = family_weights.values(name + ".projection", [len(g)], 0)
            self.assertAlmostEqual(sum(row[i] for i, row in enumerate(g)) / trace, 1, 4, name)
            got = sum(a * math.fsum(x * y for x, y in zip(row, v)) for a, row in zip(v, g))
            self.assertLess(abs(got - product), 1e-4 * trace, name)


for _kind in MODELS:
    if "moments" in MODELS[_kind]:
        setattr(Moments, "test_" + _kind.replace("-", "_"), lambda self, kind=_kind: self.check(kind))


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
        if kind == "mllama":  # Layers 1 and 3 look at an image; and there is a projector.
            self.assertIn("15 weights are quantized without calibration, as the forward pass has no inputs for them "
                          "(--image-states gives those of layers that look at images): "
                          "'language_model.model.layers.1.cross_attn.k_proj.weight'", said)
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
        rows = array.array("f", self.tool(folder, {})[1])
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


class Images(FamilyCase):
    """--image-states of eval and of convert --calibrate."""

    def setUp(self):
        super().setUp()
        self.model = self.make_images("mllama")

    def write_ids(self, *sequences):
        self.write("t.ids", "".join(" ".join(map(str, row)) + "\n" for row in sequences))

    def test_eval(self):
        """The image's token is read and not predicted, batches do not matter, and the file with all is the
        same as files with one."""
        rows = [image["ids"] for image in self.model["images"]]
        self.write_ids(*rows)
        all_ = self.numbers("mllama", "--image-states", "images.safetensors")
        self.assertEqual((all_["windows"], all_["predicted"]), (3, sum(map(len, rows)) - 3 - 1))
        one, three = (self.ok("eval", "mllama", "--text", "t.ids", "--image-states", "images.safetensors",
                              "--threads", str(n)).split("perplexity")[1] for n in (1, 3))
        self.assertEqual(one, three)
        total = 0
        for n, row in enumerate(rows):
            self.write_ids(row)
            mk.write_safetensors(self.path("one.safetensors"), {
                name.replace(f".{n}", ""): t for name, t in images_of(self.model).items() if name.endswith(f".{n}")})
            r = self.numbers("mllama", "--image-states", "one.safetensors")
            total += math.log(r["perplexity"]) * r["predicted"]
        self.assertAlmostEqual(total / all_["predicted"], math.log(all_["perplexity"]), 12)
        self.convert("--to", "nf4", "--compress", "none", "mllama", "out")
        both = self.numbers("out", "--against", "mllama", "--image-states", "one.safetensors")
        self.assertEqual(both["base_perplexity"], r["perplexity"])
        self.assertGreater(both["kl_mean"], 0)
        said = self.run_qconv("eval", "mllama", "--text", "t.ids", "--image-states", "one.safetensors", "-v").stderr
        self.assertRegex(said, rb"this takes up to [0-9.]+ KB of memory, of which 2\.66 KB are for the states of images")
        self.assertNotIn(b"images", self.run_qconv("eval", "mllama", "--text", "t.ids", "-v").stderr)

    def test_windows_of_a_sequence(self):
        """All windows of a sequence see its image."""
        row = self.model["images"][2]["ids"]
        self.write_ids(row, row + row)
        mk.write_safetensors(self.path("images.safetensors"), {
            "states": images_of(self.model)["states.2"], "states.0": images_of(self.model)["states.1"]})
        two = self.numbers("mllama", "--image-states", "images.safetensors", "--context", "4")
        mk.write_safetensors(self.path("images.safetensors"), {
            "states.0": images_of(self.model)["states.1"], "states.1": images_of(self.model)["states.2"],
            "states.2": images_of(self.model)["states.2"]})
        self.write_ids(row, row, row)
        three = self.numbers("mllama", "--image-states", "images.safetensors")
        self.assertEqual((two["windows"], two["perplexity"]), (3, three["perplexity"]))

    def test_calibrated(self):
        """Layers that look at images are calibrated as well, with less error in their outputs."""
        rng = random.Random(4)
        self.write_ids(*([1, 24] + [rng.randrange(24) for _ in range(40)] for _ in range(60)))
        mk.write_safetensors(self.path("images.safetensors"), {
            f"states.{n}": family_weights.tensor(f"states.{n}", [20, 16], 0) for n in range(60)})
        nf4 = ["--to", "nf4", "--compress", "none"]
        images = ["--image-states", "images.safetensors"]
        said = self.run_qconv(*nf4, "-v", "--calibrate", "t.ids", *images, "--threads", "1", "mllama",
                              "one").stderr.decode()
        self.assertIn("calibrating 35 weights with 2,520 tokens", said)
        self.assertIn("1 weight is quantized without calibration, as the forward pass has no inputs for them: "
                      "'multi_modal_projector.weight'", said)
        three = self.convert(*nf4, "--calibrate", "t.ids", *images, "--threads", "3", "mllama", "three")
        self.assertEqual(mk.read_checkpoint(self.path("one")), three)
        self.convert(*nf4, "--scale", "search", "mllama", "search")
        kl = {out: self.numbers(out, "--against", "mllama", *images)["kl_mean"] for out in ("one", "search")}
        self.assertLess(kl["one"], 0.9 * kl["search"])
        manifest = self.json_of("one", "qconv.json")
        self.assertEqual(manifest["options"]["calibrate"]["image_states"], "images.safetensors")
        cross = {t["name"].split("layers.1.")[1]: t["calibrated"] for t in manifest["tensors"]
                 if "layers.1." in t["name"] and "calibrated" in t}
        self.assertEqual(set(cross), {f"cross_attn.{m}_proj.weight" for m in "qkvo"} |
                         {f"mlp.{m}_proj.weight" for m in ("gate", "up", "down")})
        for name, error in cross.items():
            self.assertLess(error["calibrated"], error["rounded"], name)
        self.assertLess(sum(e["calibrated"] for e in cross.values()), 0.8 * sum(e["rounded"] for e in cross.values()))
        # The same command does nothing; other states are another conversion.
        again = self.run_qconv(*nf4, "--calibrate", "t.ids", *images, "mllama", "one")
        self.assertIn(b"already", again.stdout + again.stderr)
        mk.write_safetensors(self.path("images.safetensors"), {
            "states": family_weights.tensor("others", [20, 16], 0)})
        self.fails(2, *nf4, "--calibrate", "t.ids", *images, "mllama", "one")

    def refused(self, code, tensors, text, ids=((1, 24, 3),)):
        self.write_ids(*ids)
        mk.write_safetensors(self.path("i.safetensors"), tensors)
        for command in (["eval", "--text", "t.ids", "mllama"],
                        ["--to", "nf4", "--calibrate", "t.ids", "mllama", "out"]):
            self.fails(code, *command, "--image-states", "i.safetensors", has=[text])
            self.assertFalse(os.path.exists(self.path("out")))

    def test_refused(self):
        def states(rows, cols, dtype="F32", value=0.5):
            return (dtype, [rows, cols], mk.encode(dtype, [value] * (rows * cols)))

        good = states(4, 16)
        self.refused(3, {"states": states(4, 15)}, "i.safetensors: the states of images are 15 wide; expected 16, the "
                     "hidden_size of mllama (they come from behind its multi_modal_projector)")
        self.refused(3, {"states.0": good, "states.1": states(4, 15)},
                     "i.safetensors: the states in 'states.1' are 15 wide, and those in 'states.0' 16")
        bad = bytearray(good[2])
        bad[4 * 35:4 * 36] = mk.encode("F32", [math.nan])
        self.refused(3, {"states": ("F32", [4, 16], bytes(bad))},
                     "i.safetensors: tensor 'states': element [2, 3] is not finite")
        self.refused(3, {"states.1": good}, "i.safetensors: there is neither 'states.0' for sequence 0 of the text (the "
                     "first is 0), nor 'states' for all")
        self.refused(3, {"states": good}, "window 1 has 2 image tokens (24), and one image a sequence is computed",
                     ids=([1, 24, 3], [24, 2, 24]))
        self.refused(3, {"states": good, "state": good},
                     "i.safetensors: tensor 'state' is no states of images; expected names such as states, states.0")
        self.refused(3, {"states": good, "states.01": good}, "tensor 'states.01' is no states of images")
        self.refused(3, {"padding.0": good, "states": good},
                     "i.safetensors: there is 'padding.0', and no 'states.0' that it pads")
        self.refused(3, {"padding": good}, "i.safetensors: there are no states of images; expected a tensor 'states'")
        self.refused(3, {"states": ("I32", [4, 16], bytes(256))},
                     "i.safetensors: tensor 'states' is I32; expected F32, F16 or BF16")
        self.refused(3, {"states": ("F32", [4, 4, 4], bytes(256))},
                     "i.safetensors: tensor 'states' has 3 dimensions; expected 2, [tokens, hidden]")
        self.refused(3, {"states": good}, "vocabulary of 32", ids=([1, 32],))
        self.write_ids([24, 24])
        self.fails(3, "eval", "mllama", "--text", "t.ids", has=["token id 24 is not in the vocabulary of 24"])
        self.make("granite")
        self.write_ids([1, 2, 3])
        self.fails(3, "eval", "granite", "--text", "t.ids", "--image-states", "i.safetensors", has=[
            "granite: config.json: a granite has no layers that see the states of images; leave out --image-states"])
        self.fails(3, "eval", "mllama", "--text", "t.ids", "--image-states", "mllama",
                   has=["mllama is a folder; expected a safetensors file"])
        self.fails(2, "--to", "nf4", "mllama", "out", "--image-states", "i.safetensors", has=["--calibrate"])


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


for _kind in MODELS:
    _name = "test_" + _kind.replace("-", "_")
    setattr(Logits, _name, lambda self, kind=_kind: self.check(kind))
    setattr(Calibrated, _name, lambda self, kind=_kind: self.check(kind))


if __name__ == "__main__":
    unittest.main()
