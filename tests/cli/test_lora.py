#!/usr/bin/env python3
"""`--lora`: what is merged equals a plain product in double, bit for bit; each refusal; the same bytes
by any way; dead runs go on with the same adapter only. That peft merges the same:
tests/interop/test_interop_lora.py."""
import json
import math
import os
import random
import shutil
import signal
import struct
import unittest

from fault_case import FaultCase
from output_case import PLAIN, STAGING, OutputCase, tree_digest
from qconv_case import SANITIZED
import make_checkpoint as mk

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
EMBED, HEAD = "model.embed_tokens", "lm_head"
P = "base_model.model."
SHAPES = {Q: [48, 64], DOWN: [64, 96], EMBED: [40, 64], HEAD: [40, 64]}
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "base_model_name_or_path": "elsewhere/model"}


def narrow(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def tensor(rng, shape, dtype="F32"):
    return dtype, shape, mk.encode(dtype, [narrow(rng.gauss(0, 0.1)) for _ in range(mk.numel(shape))])


def write_adapter(path, tensors, **config):
    os.makedirs(path, exist_ok=True)
    mk.write_safetensors(os.path.join(path, "adapter_model.safetensors"), tensors)
    mk.write_json(os.path.join(path, "adapter_config.json"), {**CONFIG, **config})
    return path


def pair(rng, module, rank=3, dtype="F32", turned=False, shapes=SHAPES):
    """lora_A and lora_B of a module."""
    rows, cols = shapes[module]
    out, inner = (cols, rows) if turned else (rows, cols)
    a, b = ("lora_embedding_A", "lora_embedding_B") if module == EMBED else ("lora_A.weight", "lora_B.weight")
    return {P + module + "." + a: tensor(rng, [rank, inner], dtype),
            P + module + "." + b: tensor(rng, [out, rank], dtype)}


def merged(weight, shape, a, b, scale, turned=False, magnitude=None, base=None):
    """weight + scale * B A as lists of doubles; with DoRA's magnitudes, whose lengths are those of `base`."""
    (_, (rank, inner), _), (_, (out, _), _) = a, b
    av, bv = mk.decode(a[0], a[2]), mk.decode(b[0], b[2])
    rows, cols = shape
    delta = []
    for r in range(rows):
        for c in range(cols):
            o, i = (c, r) if turned else (r, c)
            total = 0.0
            for k in range(rank):
                total += bv[o * rank + k] * av[k * inner + i]
            delta.append(total * scale)
    result = [w + d for w, d in zip(weight, delta)]
    if magnitude:
        squares = [0.0] * out
        for at, (w, d) in enumerate(zip(base or weight, delta)):
            squares[at % cols if turned else at // cols] += (w + d) * (w + d)
        factor = [m / math.sqrt(s) for m, s in zip(mk.decode(magnitude[0], magnitude[2]), squares)]
        result = [v * factor[at % cols if turned else at // cols] for at, v in enumerate(result)]
    return result


class LoraCase(OutputCase):
    def setUp(self):
        super().setUp()
        self.rng = random.Random(5)

    def base(self, dtype="BF16", name="m", extra=None, **more):
        self.tensors = {m + ".weight": tensor(self.rng, s, dtype) for m, s in SHAPES.items()}
        self.tensors[Q + ".bias"] = tensor(self.rng, [48], dtype)
        self.tensors["model.norm.weight"] = tensor(self.rng, [64], dtype)
        self.tensors.update(extra or {})
        return self.model(self.tensors, name=name, **more)

    def adapter(self, tensors, name="a", **config):
        return write_adapter(self.path(name), tensors, **config)

    def values(self, name):
        dtype, _, data = self.tensors[name]
        return mk.decode(dtype, data)

    def merge(self, module, tensors, scale=5 / 3):
        """What becomes of a module's weight with the adapter's tensors."""
        return merged(self.values(module + ".weight"), SHAPES[module], tensors[P + module + ".lora_A.weight"],
                      tensors[P + module + ".lora_B.weight"], scale)

    def unpacked(self, name):
        self.ok("unpack", "-q", name, name + "-plain")
        return self.path(name + "-plain")

    def assert_values(self, out, name, want, dtype):
        got = out[name]
        self.assertEqual(got[0], dtype, name)
        self.assertTrue(got[2] == mk.encode(dtype, [narrow(v) for v in want]), name)


class Merge(LoraCase):
    def test_plain(self):
        """Each dtype of model and adapter; only what is changed changes."""
        for dtype, of in (("F32", "F32"), ("BF16", "F32"), ("F16", "BF16"), ("BF16", "F16")):
            name = "m" + dtype + of
            self.base(dtype, name)
            t = {**pair(self.rng, Q, dtype=of), **pair(self.rng, DOWN, dtype=of)}
            self.adapter(t, "a" + name)
            out = self.convert("--to", "keep", "--lora", "a" + name, name, "o" + name)
            for module in (Q, DOWN):
                want = self.merge(module, t)
                self.assert_values(out, module + ".weight", want, dtype)
            for other in (EMBED + ".weight", HEAD + ".weight", Q + ".bias", "model.norm.weight"):
                self.assertEqual(out[other], (dtype, *self.tensors[other][1:]))

    def test_cast_is_of_the_merged_weight(self):
        """Not of one that was rounded to the model's own dtype before."""
        self.base("F16")
        t = pair(self.rng, Q)
        self.adapter(t)
        out = self.convert("--to", "bf16", "--lora", "a", "m", "o")
        want = self.merge(Q, t)
        self.assert_values(out, Q + ".weight", want, "BF16")

    def test_scales(self):
        """rank, alpha and their patterns, the root, and the scale of the option."""
        self.base("F32")
        t = {**pair(self.rng, Q, 3), **pair(self.rng, DOWN, 2), **pair(self.rng, HEAD, 4)}
        patterns = {"rank_pattern": {r"layers\.\d+\.mlp.down_proj": 2, "head": 9, "lm_head": 4},
                    "alpha_pattern": {"self_attn.q_proj": 7, "^lm_head": 1.5, "q_proj": 100}}
        for root, given in ((False, 1.0), (True, 1.0), (True, -0.25), (False, 0.0)):
            self.adapter(t, use_rslora=root, **patterns)
            out = self.convert("--force", "--to", "keep", "--lora", "a" if given == 1 else "a:%g" % given, "m", "o")
            for module, rank, alpha in ((Q, 3, 7), (DOWN, 2, 5), (HEAD, 4, 1.5)):
                scale = alpha / (math.sqrt(rank) if root else rank) * given
                want = self.merge(module, t, scale)
                self.assert_values(out, module + ".weight", want, "F32")

    def test_embedding(self):
        self.base("F32")
        t = pair(self.rng, EMBED, turned=True)
        self.adapter(t)
        out = self.convert("--to", "keep", "--lora", "a", "m", "o")
        want = merged(self.values(EMBED + ".weight"), SHAPES[EMBED], t[P + EMBED + ".lora_embedding_A"],
                      t[P + EMBED + ".lora_embedding_B"], 5 / 3, turned=True)
        self.assert_values(out, EMBED + ".weight", want, "F32")

    def test_fan_in_fan_out(self):
        """GPT-2's weights are [in, out], and are turned when they are quantized."""
        shapes = {"transformer.h.0.attn.c_attn": [64, 192], "transformer.h.0.attn.c_proj": [64, 64]}
        self.tensors = {n + ".weight": tensor(self.rng, s) for n, s in shapes.items()}
        self.model(self.tensors, config={"model_type": "gpt2"})
        t = {}
        for n in shapes:
            t.update(pair(self.rng, n, turned=True, shapes=shapes))
        self.adapter(t, fan_in_fan_out=True)
        out = self.convert("--to", "keep", "--lora", "a", "m", "o")
        for n, s in shapes.items():
            want = merged(self.values(n + ".weight"), s, t[P + n + ".lora_A.weight"], t[P + n + ".lora_B.weight"],
                          5 / 3, turned=True)
            self.assert_values(out, n + ".weight", want, "F32")
        self.ok("-q", "--to", "nf4", "--lora", "a", "m", "q")
        self.ok("-q", "--to", "nf4", "o", "q2")
        self.assertEqual({n: v for n, v in mk.read_checkpoint(self.unpacked("q")).items()},
                         {n: v for n, v in mk.read_checkpoint(self.unpacked("q2")).items()})
        self.adapter(t)
        self.fails(3, "-q", "--to", "keep", "--lora", "a", "m", "w", has=["[64, 192]", "fan_in_fan_out is true"])

    def test_dora(self):
        self.base("F32")
        t = {**pair(self.rng, Q), **pair(self.rng, EMBED, turned=True)}
        t[P + Q + ".lora_magnitude_vector"] = tensor(self.rng, [48])
        t[P + EMBED + ".lora_magnitude_vector"] = tensor(self.rng, [64])
        self.adapter(t, use_dora=True)
        other = pair(self.rng, Q)
        self.adapter(other, "b")
        out = self.convert("--to", "keep", "--lora", "a", "--lora", "b:2", "--lora", "a:0.5", "m", "o")
        a, b, mag = (t[P + Q + "." + n] for n in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"))
        base = self.values(Q + ".weight")
        want = merged(base, SHAPES[Q], a, b, 5 / 3, magnitude=mag)
        want = merged(want, SHAPES[Q], other[P + Q + ".lora_A.weight"], other[P + Q + ".lora_B.weight"], 5 / 3 * 2)
        # Lengths are those of the model's own weight, as in peft.
        want = merged(want, SHAPES[Q], a, b, 5 / 3 * 0.5, magnitude=mag, base=base)
        self.assert_values(out, Q + ".weight", want, "F32")
        a, b, mag = (t[P + EMBED + "." + n]
                     for n in ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"))
        base = self.values(EMBED + ".weight")
        want = merged(base, SHAPES[EMBED], a, b, 5 / 3, turned=True, magnitude=mag)
        want = merged(want, SHAPES[EMBED], a, b, 5 / 3 * 0.5, turned=True, magnitude=mag, base=base)
        self.assert_values(out, EMBED + ".weight", want, "F32")

    def test_whole_tensors_and_biases(self):
        self.base("BF16")
        t = {P + HEAD + ".weight": tensor(self.rng, SHAPES[HEAD]),
             P + "model.norm.weight": tensor(self.rng, [64], "F16"), **pair(self.rng, Q),
             P + Q + ".lora_B.bias": tensor(self.rng, [48]),
             P + DOWN + ".base_layer.weight": tensor(self.rng, SHAPES[DOWN]), **pair(self.rng, DOWN)}
        self.adapter(t, modules_to_save=[HEAD, "norm"], lora_bias=True)
        out = self.convert("--to", "keep", "--lora", "a:0.5", "m", "o")
        for n in (HEAD + ".weight", "model.norm.weight"):
            self.assert_values(out, n, mk.decode(*t[P + n][::2]), "BF16")
        bias = [w + b * (5 / 3 * 0.5) for w, b in zip(self.values(Q + ".bias"),
                                                    mk.decode("F32", t[P + Q + ".lora_B.bias"][2]))]
        self.assert_values(out, Q + ".bias", bias, "BF16")
        want = merged(mk.decode("F32", t[P + DOWN + ".base_layer.weight"][2]), SHAPES[DOWN],
                      t[P + DOWN + ".lora_A.weight"], t[P + DOWN + ".lora_B.weight"], 5 / 3 * 0.5)
        self.assert_values(out, DOWN + ".weight", want, "BF16")
        said = json.loads(self.ok("--json", "-q", "--force", "--to", "keep", "--lora", "a:0.5", "m", "o"))
        self.assertEqual(said["adapters"], [{"path": "a", "scale": 0.5, "weights": 2, "biases": 1, "replaced": 3}])
        self.assertIn("merged    a, times 0.5, into 2 weights and 1 bias; 3 tensors replaced\n",
                      self.ok("--force", "--to", "keep", "--lora", "a:0.5", "m", "o"))

    def test_fp8(self):
        """Added after decoding."""
        codes = bytes(self.rng.randrange(0, 120) for _ in range(48 * 64))
        self.base(extra={Q + ".weight": ("F8_E4M3", [48, 64], codes),
                         Q + ".weight_scale": tensor(self.rng, [])})
        self.ok("-q", *PLAIN, "--to", "bf16", "m", "plain")
        t = pair(self.rng, Q)
        self.adapter(t)
        out = self.convert("--to", "bf16", "--lora", "a", "m", "o")
        scale = mk.decode("F32", self.tensors[Q + ".weight_scale"][2])[0]
        table = [(-1 if c & 128 else 1) * ((8 + c % 8) * 2.0 ** (c // 8 % 16 - 10) if c & 120 else c % 8 * 2.0 ** -9)
                 for c in range(256)]
        base = [narrow(table[c] * scale) for c in codes]
        self.assert_values(mk_read(self, "plain"), Q + ".weight", base, "BF16")
        want = merged(base, SHAPES[Q], t[P + Q + ".lora_A.weight"], t[P + Q + ".lora_B.weight"], 5 / 3)
        self.assert_values(out, Q + ".weight", want, "BF16")
        self.fails(3, "-q", "--to", "keep", "--lora", "a", "m", "k", has="no adapter can be merged")
        t[P + Q + ".lora_magnitude_vector"] = tensor(self.rng, [48])
        self.adapter(t, use_dora=True)
        self.fails(3, "-q", "--to", "bf16", "--lora", "a", "m", "k", has="F8_E4M3")


class Names(LoraCase):
    """Adapters and models whose names differ by what a version of transformers, or who saved them, puts around."""

    def setUp(self):
        super().setUp()
        self.base("F32", extra={"visual.blocks.0.attn.qkv.weight": tensor(self.rng, [48, 64])})
        self.want = pair(self.rng, Q)
        self.adapter(self.want)
        self.plain = self.convert("--to", "keep", "--lora", "a", "m", "o")

    def renamed_model(self, name, rename):
        return self.model({rename(n): t for n, t in self.tensors.items()}, name=name)

    def test_wrappers(self):
        """The same values, whichever way the language model and the tower are wrapped on either side."""
        ways = {"m": lambda n: n,
                "v4": lambda n: n if n.startswith("visual") else "language_model." + n,
                "v5": lambda n: n.replace("model.", "model.language_model.").replace("visual", "model.visual"),
                "bare": lambda n: n.replace("model.", "")}
        tower = "visual.blocks.0.attn.qkv"
        t = {**self.want, **pair(self.rng, tower, shapes={tower: [48, 64]})}
        for way, rename in ways.items():
            self.renamed_model(way + "-m", rename)
            self.adapter({P + rename(n[len(P):]): x for n, x in t.items()}, way + "-a")
        want = self.convert("--to", "keep", "--lora", "m-a", "m-m", "w")
        for model, rename in ways.items():
            for adapter in ways:
                out = self.convert("--force", "--to", "keep", "--lora", adapter + "-a", model + "-m", "w")
                self.assertEqual({n: out[rename(n)] for n in want}, want, (model, adapter))

    def test_two_places(self):
        self.model({**self.tensors, "text_model." + Q[6:] + ".weight": self.tensors[Q + ".weight"]}, name="two")
        self.adapter({n.replace("model.layers", "model.language_model.layers"): x for n, x in self.want.items()}, "b")
        self.fails(3, "-q", "--to", "keep", "--lora", "b", "two", "o2", has="and no name is quite its own")
        self.assert_nothing("o2")
        self.convert("--to", "keep", "--lora", "a", "two", "o3")  # this name is
        self.adapter({**self.want, **{n.replace("model.layers", "layers"): x for n, x in self.want.items()}}, "b")
        self.fails(3, "-q", "--to", "keep", "--lora", "b", "m", "o2", has="are both '%s.weight' of m" % Q)

    def test_own_name_of_the_adapter(self):
        """lora_A.default.weight, as in the state of a whole PeftModel, with what the model has by itself."""
        t = {n.replace(".weight", ".other.weight"): x for n, x in self.want.items()}
        t[P + HEAD + ".original_module.weight"] = tensor(self.rng, SHAPES[HEAD])
        self.adapter(t, "named")
        self.assertEqual(self.convert("--to", "keep", "--lora", "named", "m", "n"), self.plain)
        self.adapter({**self.want, **t}, "twice")
        self.fails(3, "-q", "--to", "keep", "--lora", "twice", "m", "n2", has="are the same thing twice")
        self.adapter({n.replace(".lora_A.", ".lora_A.x.y."): x for n, x in self.want.items()}, "deep")
        self.fails(3, "-q", "--to", "keep", "--lora", "deep", "m", "n2", has="does not know what such a tensor does")


class Tied(LoraCase):
    """Embeddings and head that are one tensor; that peft merges so: tests/interop/test_interop_lora.py."""

    def tied(self, prefix="", **config):
        self.base("F32", extra={"audio_tower.embed_tokens.weight": tensor(self.rng, [8, 8])})
        del self.tensors[HEAD + ".weight"]
        self.model({prefix + n: t for n, t in self.tensors.items()},
                   config={"model_type": "llama", "tie_word_embeddings": True, **config})

    def test_replaced(self):
        new = {n: tensor(self.rng, SHAPES[n]) for n in (EMBED, HEAD)}
        for prefix, config in (("", {}), ("language_model.", {"text_config": {"tie_word_embeddings": True}})):
            self.tied(prefix, **config)
            for which in ([EMBED], [HEAD], [EMBED, HEAD]):
                self.adapter({P + n + ".weight": new[n] for n in which}, modules_to_save=["embed_tokens", "lm_head"])
                said = self.warned(*PLAIN, "--force", "--to", "keep", "--lora", "a", "m", "o")
                self.assertIn("tie_word_embeddings is false", said)
                out, flags = mk_read(self, "o"), self.json_of("o", "config.json")
                for n in new:
                    self.assertEqual(out[prefix + n + ".weight"], new[n] if n in which else self.tensors[EMBED + ".weight"])
                self.assertFalse(flags["tie_word_embeddings"] or flags.get("text_config", {}).get("tie_word_embeddings"))
                self.ok("verify", "-q", "o", "--against", "m", "--lora", "a")
            self.ok("-q", *PLAIN, "--force", "--to", "nf4", "--lora", "a", "m", "o")
            self.assertIn(prefix + "lm_head.weight", mk_read(self, "o"))
            self.ok("verify", "-q", "o", "--against", "m", "--lora", "a")

    def test_kept_tied(self):
        """What is added to one is added to both, with a warning; ensure_weight_tying replaces both."""
        embed, head = pair(self.rng, EMBED, turned=True), pair(self.rng, HEAD)
        both = {**embed, **head, P + EMBED + ".base_layer.weight": tensor(self.rng, SHAPES[EMBED])}
        add = dict(a=embed[P + EMBED + ".lora_embedding_A"], b=embed[P + EMBED + ".lora_embedding_B"])
        for in_file in (False, True):
            self.tied()
            if in_file:
                self.model({**self.tensors, HEAD + ".weight": self.tensors[EMBED + ".weight"]},
                           config={"model_type": "llama", "tie_word_embeddings": True})
            base = mk.decode("F32", both[P + EMBED + ".base_layer.weight"][2])
            want = merged(base, SHAPES[EMBED], **add, scale=5 / 3, turned=True)
            want = merged(want, SHAPES[HEAD], head[P + HEAD + ".lora_A.weight"], head[P + HEAD + ".lora_B.weight"], 5 / 3)
            self.adapter(both)
            self.assertIn("both change, as when peft merges",
                          self.warned(*PLAIN, "--force", "--to", "keep", "--lora", "a", "m", "o"))
            out = mk_read(self, "o")
            self.assert_values(out, EMBED + ".weight", want, "F32")
            self.assertNotIn(HEAD + ".weight", out)
            self.assertTrue(self.json_of("o", "config.json")["tie_word_embeddings"])
        new = tensor(self.rng, SHAPES[EMBED])
        self.adapter({P + n + ".weight": new for n in (EMBED, HEAD)}, modules_to_save=["embed_tokens"],
                     ensure_weight_tying=True)
        out = self.convert("--force", "--to", "keep", "--lora", "a", "m", "o")
        self.assertEqual((out[EMBED + ".weight"], HEAD + ".weight" in out), (new, False))

    def test_shared(self):
        self.model({"shared.weight": tensor(self.rng, [40, 64])},
                   config={"model_type": "t5", "tie_word_embeddings": True})
        self.adapter({P + "shared.weight": tensor(self.rng, [40, 64])}, modules_to_save=["shared"])
        self.fails(3, "-q", "--to", "keep", "--lora", "a", "m", "o", has="unties nothing but an output head")


class Effect(LoraCase):
    """Adapters that change nothing, and members of the configuration that nobody knows."""

    def test_warnings(self):
        self.base()
        good = pair(self.rng, Q)
        zero = {n: ("F32", s, bytes(4 * mk.numel(s))) if "lora_B" in n else x for n, x in good.items() for s in [x[1]]}
        other = {n: ("F32", x[1], bytes(len(x[2]))) if "lora_A" in n else x for n, x in good.items()}
        bias = {**zero, P + Q + ".bias": tensor(self.rng, [48])}
        for tensors, config, said in (
                (zero, {}, "every product of its matrices is zero"), (other, {}, "every product"),
                ({**zero, **pair(self.rng, DOWN)}, {}, None), (good, {"lora_alpha": 0}, "lora_alpha is 0"),
                (good, {"new_of_2027": {"kind": 1}, "lora": 1}, "adapter_config.json has 'new_of_2027', 'lora', which"),
                (good, {"new_of_2027": None, "lora_dropout": 0.1, "eva_config": {"rho": 2}, "": []}, None),
                (bias, {"bias": "lora_only"}, None)):
            self.adapter(tensors, **config)
            args = [*PLAIN, "--force", "--to", "nf4", "--lora", "a", "m", "o"]
            found = self.warned(*args)
            self.assertEqual("warning: a: " + (said or "") in found, said is not None, found)


def mk_read(case, name):
    return mk.read_checkpoint(case.path(name))


class Ways(LoraCase):
    """However it is made, the bytes are those of a model that was merged before."""

    def setUp(self):
        super().setUp()
        shapes = {Q: [512, 768], DOWN: [768, 1024], HEAD: [256, 768]}
        self.tensors = {n + ".weight": ("F32", s, mk.random_bytes("F32", s, self.rng)) for n, s in shapes.items()}
        self.model(self.tensors)
        t = {}
        for i, n in enumerate((Q, DOWN)):
            for name, (d, s, _) in pair(self.rng, n, 5 + i, shapes=shapes).items():
                t[name] = d, s, mk.random_bytes(d, s, self.rng)
        self.adapter(t, r=5, rank_pattern={"down_proj": 6}, lora_alpha=100)
        self.ok("-q", *PLAIN, "--to", "keep", "--lora", "a", "m", "merged")

    def test_quantized(self):
        for to in (["nf4"], ["nf4", "--scale", "absmax"], ["int8"], ["int8", "--block-size", "64"], ["int4"], ["int5"], ["fp16"],
                   ["auto", "--vram", "1GB"]):
            self.ok("-q", *PLAIN, "--force", "--to", *to, "--lora", "a", "m", "o")
            self.ok("-q", *PLAIN, "--force", "--to", *to, "merged", "w")
            self.assertTrue(mk_read(self, "o") == mk_read(self, "w"), to)
            self.ok("verify", "-q", "o", "--against", "m", "--lora", "a")
            os.rename(self.path("o", "qconv.json"), self.path("kept"))  # without it nothing says what was merged
            self.ok("verify", "-q", "o", "--against", "merged")
            os.rename(self.path("kept"), self.path("o", "qconv.json"))

    def test_parts(self):
        args = ["-q", "--to", "nf4", "--max-shard-size", "300KB", "--lora", "a"]
        self.ok(*args, "m", "o")
        for part in ("2/2", "1/2"):
            self.ok(*args, "--part", part, "m", "p")
        self.assert_same("o", "p")

    def test_in_the_folder_of_the_model(self):
        """The adapter that is merged is not copied: a loader would add it a second time."""
        want = self.convert("--to", "nf4", "--lora", "a", "m", "o")
        names = sorted(os.listdir(self.path("o")))
        shutil.copytree(self.path("a"), self.path("m", "sub", "a"))
        self.write("m/sub/other.txt", "x")
        self.assertNotIn("copied as it is", self.warned(*PLAIN, "--to", "nf4", "--lora", "m/sub/a", "m", "p"))
        self.assertEqual((os.listdir(self.path("p", "sub")), sorted(os.listdir(self.path("p")))),
                         (["other.txt"], sorted([*names, "sub"])))
        for name in os.listdir(self.path("a")):
            shutil.copy(self.path("a", name), self.path("m"))
        self.assertEqual(self.convert("--to", "nf4", "--lora", "m", "m", "q"), want)
        self.assertIn("a", os.listdir(self.path("q", "sub")))  # the other one is copied, with a warning
        self.assertFalse([n for n in os.listdir(self.path("q")) if n.startswith("adapter_")])

    def test_colon(self):
        """An adapter in a folder with a colon in its name."""
        os.rename(self.path("a"), self.path("a:2"))
        self.assertEqual(self.convert("--to", "keep", "--lora", "a:2", "m", "o"), mk_read(self, "merged"))
        self.fails(3, "-q", "--to", "keep", "--lora", "a:3", "m", "o2", has="a: ")

    def test_plan(self):
        a = json.loads(self.ok("plan", "--json", "m", "--vram", "1GB"))
        b = json.loads(self.ok("plan", "--json", "m", "--vram", "1GB", "--lora", "a"))
        self.assertEqual(a, {**b, "convert": b["convert"].replace("--lora a ", "")})
        self.fails(3, "plan", "m", "--vram", "1GB", "--lora", "none", has="none: expected the folder")


class Manifest(LoraCase):
    def setUp(self):
        super().setUp()
        self.base()
        self.adapter(pair(self.rng, Q))
        self.adapter(pair(self.rng, Q), "b")
        self.ok("-q", "--to", "nf4", "--lora", "a", "--lora", "b:0.5", "m", "o")

    def test_what_it_says(self):
        m = self.json_of("o", "qconv.json")
        self.assertEqual(m["version"], 4)
        self.assertEqual([(a["name"], a["scale"]) for a in m["adapters"]], [("a", 1), ("b", 0.5)])
        self.assertEqual(m["adapters"][0]["bytes"], os.path.getsize(self.path("a", "adapter_model.safetensors")))
        self.assertIn("adapter   b, ", self.ok("inspect", "o"))
        self.assertEqual(json.loads(self.ok("inspect", "--json", "o"))["manifest"]["adapters"], m["adapters"])
        self.ok("-q", "--to", "nf4", "m", "plain")
        self.assertNotIn("adapters", self.json_of("plain", "qconv.json"))

    def test_verify(self):
        both = ["--lora", "a", "--lora", "b:0.5"]
        for command in ("verify", "validate"):
            self.ok(command, "-q", "o", "--against", "m", *both)
            self.usage(command, "o", "--against", "m", has="2 adapters merged, and --lora gives 0; the next one is 'a'",
                       command=command)
            self.usage(command, "o", "--against", "m", *both, "--lora", "b", has="leave out 'b'",
                       command=command)
            self.usage(command, "o", "--against", "m", "--lora", "a", "--lora", "b", has="scale 0.5, and --lora gives 1",
                       command=command)
            self.fails(4, command, "o", "--against", "m", "--lora", "b", "--lora", "b:0.5",
                       has="b is not the adapter 'a' that o has merged: its file of weights")
        self.usage("verify", "o", *both, has="--lora needs --against", command="verify")
        self.ok("-q", "--to", "nf4", "m", "plain")
        self.usage("verify", "plain", "--against", "m", "--lora", "a", has="0 adapters merged", command="verify")

    def test_a_changed_code_is_found(self):
        self.ok("unpack", "-q", "o", "p")
        self.change_byte(self.path("p", "model.safetensors"), -40, 255)
        self.assertEqual(self.run_qconv("verify", "-q", "p", "--against", "m", "--lora", "a", "--lora", "b:0.5").returncode,
                         4)


class Refusals(LoraCase):
    def refused(self, has, code=3, tensors=None, name="bad", **config):
        self.adapter(tensors or self.good, name, **config)
        self.fails(code, "-q", "--to", "nf4", "--lora", name, "m", "o", has=has)
        self.assert_nothing("o")

    def setUp(self):
        super().setUp()
        self.base()
        self.good = pair(self.rng, Q)

    def test_options(self):
        for value in ("a:x", "a:", ":2", "a:inf", "a:0x1", "a:1e999", "a:2 ", ""):
            self.usage("--to", "nf4", "--lora", value, "m", "o", has="--lora: expected ADAPTER or ADAPTER:SCALE")
        self.fails(3, "-q", "--to", "nf4", "--lora", "nowhere", "m", "o", has="nowhere: expected the folder of an "
                   "adapter, with adapter_config.json and adapter_model.safetensors, but it does not exist")
        self.write("file", "x")
        self.fails(3, "-q", "--to", "nf4", "--lora", "file", "m", "o", has="file: expected the folder")
        self.fails(3, "-q", "--to", "nf4", "--lora", "m", "m", "o", has="m: there is no adapter_config.json")
        os.mkdir(self.path("e"))
        mk.write_json(self.path("e", "adapter_config.json"), CONFIG)
        self.fails(3, "-q", "--to", "nf4", "--lora", "e", "m", "o", has="e: there is no adapter_model.safetensors")
        self.write("e/adapter_model.bin", "PK\3\4")
        for args in (["--to", "nf4", "--lora", "e", "m", "o"], ["--to", "nf4", "e", "o"], ["inspect", "e"]):
            self.fails(3, "-q", *args, has="e has no .safetensors file, but what torch.save wrote: 'adapter_model.bin'; "
                       "'python -m qconv from-torch e OUT' writes safetensors from it")

    def test_configs(self):
        for config, has in (
                ({"peft_type": "IA3"}, 'peft_type is "IA3"'), ({"r": 0}, "r is 0"), ({"r": "3"}, "r is of kind"),
                ({"modules_to_save": "lm_head"}, "modules_to_save is of kind string"),
                ({"modules_to_save": [1]}, "modules_to_save is of kind"), ({"lora_alpha": None}, "lora_alpha is of kind"), ({"use_dora": 1}, "use_dora is of kind"),
                ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
                ({"target_parameters": ["experts"]}, "target_parameters is set"),
                ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
                ({"use_qalora": True}, "use_qalora is set"),
                ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
                ({"rank_pattern": {"q(?=x)": 3}}, "rank_pattern: 'q(?=x)' is a pattern"),
                ({"alpha_pattern": {"(x": 3}}, "alpha_pattern: '(x' is a pattern"),
                ({"alpha_pattern": {"(x{9}){9}": 3}}, "is a pattern"), ({"alpha_pattern": {"q": -1}}, "q is -1"),
                ({"rank_pattern": []}, "rank_pattern is of kind array"),
                ({"r": 4}, "has rank 3, but adapter_config.json says 4"),
                ({"rank_pattern": {"q_proj": 2}}, "has rank 3, but adapter_config.json says 2"),
                ({"use_dora": True}, "has no magnitude vector, but use_dora is true")):
            self.refused(["bad", has], **config)
        self.adapter(self.good, "bad")
        self.write("bad/adapter_config.json", "{")
        self.fails(3, "-q", "--to", "nf4", "--lora", "bad", "m", "o", has="bad/adapter_config.json: ")

    def test_tensors(self):
        a, b = sorted(self.good)
        elsewhere = P + "model.layers.9.self_attn.q_proj.lora_"
        good = self.good
        for tensors, has in (
                ({a: good[a]}, "module '%s' has no lora_B, only '%s'" % (Q, a)),
                ({b: good[b]}, "has no lora_A, only"),
                ({**good, a: tensor(self.rng, [2, 64])}, "lora_A is [2, 64] and lora_B is [48, 3]"),
                ({**good, a: tensor(self.rng, [3, 63])}, "changes a weight of [48, 63], but '%s.weight' of m is "
                                                         "[48, 64]" % Q),
                ({**good, b: tensor(self.rng, [47, 3])}, "changes a weight of [47, 64]"),
                ({**good, a: tensor(self.rng, [3, 64, 1, 1])}, "has 4 dimensions"),
                ({**good, a: ("I32", [3, 64], bytes(768))}, "is I32; expected F32, F16 or BF16"),
                ({**good, elsewhere + "A.weight": good[a], elsewhere + "B.weight": good[b]},
                 "'%sA.weight' belongs to 'model.layers.9.self_attn.q_proj.weight', which m does not have" % elsewhere),
                ({**good, P + "other.weight": tensor(self.rng, [3])}, "belongs to 'other.weight', which m does not"),
                ({**good, P + HEAD + ".weight": tensor(self.rng, [41, 64])}, "is [41, 64], and 'lm_head.weight' of m "
                                                                             "is [40, 64]"),
                ({**good, P + HEAD + ".weight": ("I8", [40, 64], bytes(2560))}, "is I8"),
                ({**good, P + Q + ".lora_C.weight": good[a]}, "does not know what such a tensor does"),
                ({**good, P + Q + ".lora_magnitude_vector": tensor(self.rng, [48])}, "but use_dora is false"),
                ({**good, P + Q + ".lora_B.bias": tensor(self.rng, [47])}, "is [47]; expected 48 elements"),
                ({**good, P + DOWN + ".lora_B.bias": tensor(self.rng, [64])}, "has no lora_A, only")):
            self.refused(["bad", has], tensors=tensors)
        self.refused("expected 48 elements", tensors={**good, P + Q + ".lora_magnitude_vector": tensor(self.rng, [64])},
                     use_dora=True)
        down = pair(self.rng, DOWN)
        self.refused("belongs to '%s.bias'" % DOWN, tensors={**down, P + DOWN + ".lora_B.bias": tensor(self.rng, [64])})

    def test_values(self):
        a, b = sorted(self.good)
        for x in (math.inf, math.nan):
            values = mk.decode("F32", self.good[a][2])
            values[7] = x
            self.refused("bad: tensor '%s': element 7 is not finite" % a,
                         tensors={**self.good, a: ("F32", [3, 64], mk.encode("F32", values))})
        huge = {a: ("F32", [3, 64], mk.encode("F32", [3e38] * 192)), b: ("F32", [48, 3], mk.encode("F32", [9.0] * 144))}
        self.refused("the merged weight at row 0, column 0 is not finite", tensors=huge)
        # A row of zeros has no direction that a magnitude could stretch.
        zero = {Q + ".weight": ("BF16", [48, 64], bytes(6144))}
        mk.write_checkpoint(self.path("m"), {**self.tensors, **zero}, config={"model_type": "llama"})
        t = {a: self.good[a], b: ("F32", [48, 3], bytes(576)), P + Q + ".lora_magnitude_vector": tensor(self.rng, [48])}
        self.refused("is not finite", tensors=t, use_dora=True)

    def test_two_that_replace(self):
        self.adapter({P + HEAD + ".weight": tensor(self.rng, SHAPES[HEAD]), **self.good}, "a")
        self.fails(3, "-q", "--to", "nf4", "--lora", "a", "--lora", "a", "m", "o",
                   has="would take the place of 'lm_head.weight', which a changes as well")

    def test_quantized_base(self):
        self.ok("-q", "--to", "nf4", "m", "q")
        self.adapter(self.good, "a")
        self.fails(3, "-q", "--to", "bf16", "--lora", "a", "q", "o", has=["is U8", "--to bf16 first"])


class Resume(FaultCase):
    """A run that was killed goes on with the same adapter, and refuses another."""

    def test_killed(self):
        rng = random.Random(2)
        tensors = {"model.layers.%d.mlp.down_proj" % i: [96, 1024] for i in range(8)}
        mk.write_checkpoint(self.path("m"), {n + ".weight": ("BF16", s, mk.random_bytes("BF16", s, rng))
                                             for n, s in tensors.items()}, config={"model_type": "llama"})
        for name in "ab":
            t = {}
            for n in tensors:
                t.update(pair(rng, n, shapes=tensors))
            write_adapter(self.path(name), t)
        command = ["-q", "--to", "nf4", "--max-shard-size", "60KB", "--threads", "2"]
        r = self.counted(*command, "--lora", "a", "m", "o")
        self.assertEqual(r.returncode, 0, r.stderr)
        changes, want = self.counts()["change"], tree_digest(self.path("o"))
        shutil.rmtree(self.path("o"))
        continued = 0
        for moment in range(changes // 4, changes, max(1, changes // 8)):
            r = self.faulty(*command, "--lora", "a", "m", "o", signal="%d:9" % moment)
            self.assertEqual(r.returncode, -signal.SIGKILL, r.stderr)
            staged = os.path.isdir(self.path("o", STAGING))
            if staged and os.path.exists(self.path("o", STAGING, "journal-00001-of-00001")):
                for other in (["--lora", "b"], ["--lora", "a:0.5"], [], ["--lora", "a", "--lora", "b"]):
                    self.fails(2, *command, *other, "m", "o", has=["cannot continue", "--lora"])
                continued += 1
            os.rename(self.path("a"), self.path("moved"))  # the same one from elsewhere
            r = self.faulty(*command, "--lora", "moved/", "m", "o")
            os.rename(self.path("moved"), self.path("a"))
            self.assertEqual((r.returncode, r.stderr), (0, b""), moment)
            shutil.rmtree(self.path("o"))
        self.assertGreater(continued, 2)
        self.assertTrue(want)


if __name__ == "__main__":
    unittest.main()
