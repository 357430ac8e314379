#!/usr/bin/env python3
"""`qconv --hessians FILE`: that threads and interruptions change nothing, what is left alone, what is refused, and
what it says before it starts."""
import atexit
import hashlib
import json
import math
import os
import random
import re
import shutil
import struct
import tempfile
import unittest

import qconv_case
from qconv_case import QconvCase
from test_forms import fp8, mk
import moments

MODEL = os.path.join(qconv_case.ROOT, "tests", "data", "kjv-llama", "model")
FOLDER = tempfile.mkdtemp(prefix="qconv-moments-")
atexit.register(shutil.rmtree, FOLDER)
WHOLE = ("--hessians", moments.of_model(MODEL, os.path.join(FOLDER, "m.safetensors"), two=True))


class Calibrate(QconvCase):
    def digest(self, out):
        with open(self.path(out, "model.safetensors"), "rb") as f:
            return hashlib.sha256(f.read()).hexdigest()

    def convert(self, out, *args, **more):
        self.ok("--to", "nf4", "--compress", "none", "-q", *args, MODEL, out, timeout=300, **more)
        return self.digest(out)

    def told(self, *args):
        r = self.run_qconv("--to", "nf4", *args, timeout=300)
        self.assertEqual(r.returncode, 0, r.stderr)
        return r.stderr.decode()

    def interrupt(self, *args):
        """In the middle of a layer, and of weights with the same inputs."""
        self.interrupt_at(b"layers.1.self_attn.q_proj.weight: relative error", [qconv_case.QCONV, "-vv", *args])

    def test_threads_and_interruptions_change_nothing(self):
        want = self.convert("whole", *WHOLE, "--threads", "3")
        self.assertEqual(self.convert("one", *WHOLE, "--threads", "1"), want)
        self.interrupt("--to", "nf4", "--compress", "none", *WHOLE, MODEL, "out")
        r = self.run_qconv("--to", "nf4", "--compress", "none", "-v", *WHOLE, MODEL, "out", timeout=300)
        self.assertEqual(r.returncode, 0, r.stderr)
        left = re.search(rb"calibrating (\d+) remaining weights?", r.stderr)
        self.assertTrue(left and 0 < int(left[1]) <= 20, r.stderr)
        self.assertEqual(self.digest("out"), want)

    def moments(self, name, modules, outputs=()):
        """A file of moments: name -> (n, tokens), or the name of another module; of outputs
        name -> (shape, tokens), the identity, or a third number times that."""
        header, data = {}, b""
        for module, what in modules.items():
            parts = [(".same_as", "U8", [len(what)], what.encode())] if isinstance(what, str) else \
                [(".second_moment", "F64", [what[0]] * 2, struct.pack(
                    "<%dd" % what[0] ** 2, *((1.0 + i % 7 if i == j else 0.9 / (1 + abs(i - j)))
                                             for i in range(what[0]) for j in range(what[0])))),
                 (".tokens", "I64", [1], struct.pack("<q", what[1]))]
            if module in outputs:
                shape, tokens, *times = outputs[module]
                count = math.prod(shape)
                parts += [(".output_moment", "F32", shape, struct.pack(
                    "<%df" % count, *((times or [1.0])[0] * (i % shape[-1] ** 2 % (shape[-1] + 1) == 0)
                                      for i in range(count)))),
                          (".output_tokens", "I64", [1], struct.pack("<q", tokens))]
            for end, dtype, shape, raw in parts:
                header[module + end] = {"dtype": dtype, "shape": shape,
                                        "data_offsets": [len(data), len(data) + len(raw)]}
                data += raw
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(self.path(name), "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text + data)

    def test_moments_of_a_file(self):
        q, k = ("model.layers.0.self_attn.%s_proj" % c for c in "qk")
        few = "model.layers.1.self_attn.q_proj"
        self.moments("m.safetensors", {q: (192, 5000), k: q, few: (192, 47)})
        said = self.told("-vv", "--hessians", "m.safetensors", MODEL, "out")
        made = re.findall(r"(\S+)\.weight: relative error of its outputs ([\d.e-]+) rounded, "
                          r"([\d.e-]+) calibrated", said)
        self.assertEqual(sorted(m[0] for m in made), sorted([q, k]), said)
        for _, rounded, calibrated in made:
            self.assertLess(float(calibrated), float(rounded))
        self.assertRegex(said, "1 weight is quantized without calibration, .*%s" % re.escape(few))
        self.ok("verify", "out", "--against", MODEL, "-q")
        with open(self.path("out", "qconv.json"), encoding="utf-8") as f:
            manifest = json.load(f)
        self.assertEqual(manifest["options"]["calibrate"]["hessians"], "m.safetensors")
        self.moments("wrong.safetensors", {q: (64, 5000)})
        r = self.run_qconv("--to", "nf4", "--hessians", "wrong.safetensors", MODEL, "bad")
        self.assertEqual(r.returncode, 3, r.stderr)
        self.assertIn(b"192", r.stderr)
        self.assertFalse(os.path.exists(self.path("bad")))

    def test_moments_that_do_not_fit(self):
        """One sentence each, exit code 3, before anything is computed or written."""
        q, k = ("model.layers.0.self_attn.%s_proj" % c for c in "qk")
        inputs = {q: (192, 5000), k: q}
        two = ["--sided", "two"]
        for modules, outputs, more, has in (
                ({**inputs, "model.layers.9.self_attn.q_proj": q, "x": q}, {}, [],
                 "2 of 4 modules belong to no weight of this model, 'model.layers.9.self_attn.q_proj' among them: "
                 "expected moments that were captured from it"),
                (inputs, {q: ([64, 64], 5000)}, [], "expected second moments of 192 outputs for '%s.weight', found "
                 "1 block of 64" % q),
                (inputs, {q: ([256, 256], 5000)}, [], "of 192 outputs for '%s.weight', found 1 block of 256" % q),
                (inputs, {q: ([2, 64, 64], 5000)}, [], "of 192 outputs for '%s.weight', found 2 blocks of 64" % q),
                (inputs, {q: ([4, 64, 64], 5000)}, [], "of 192 outputs for '%s.weight', found 4 blocks of 64" % q),
                (inputs, {}, two, "--sided two needs second moments of the outputs of every weight, but they are "
                 "missing for 2 weights, '%s.weight' among them; --sided one does without" % k),
                (inputs, {q: ([192, 192], 5000)}, two, "missing for 1 weight, '%s.weight' among them" % k),
                (inputs, {q: ([192, 192], 5000), k: ([64, 64], 15)}, two,
                 "of fewer tokens than a quarter of the outputs for 1 weight, '%s.weight'" % k)):
            with self.subTest(has=has):
                self.moments("m.safetensors", modules, outputs)
                for dry in ([], ["--dry-run"]):
                    r = self.run_qconv("--to", "nf4", "--hessians", "m.safetensors", *more, *dry, MODEL, "bad")
                    self.assertEqual(r.returncode, 3, r.stderr)
                    self.assertIn("m.safetensors: ", r.stderr.decode())
                    self.assertIn(has, r.stderr.decode())
                    self.assertEqual(r.stderr.decode().count("\n"), 1, r.stderr)
                    self.assertFalse(os.path.exists(self.path("bad")))

    def test_sides(self):
        """Two where the file has the moments of outputs for a weight, and none with --sided one."""
        q, k = ("model.layers.0.self_attn.%s_proj" % c for c in "qk")
        self.moments("m.safetensors", {q: (192, 5000), k: q}, {q: ([3, 80, 80], 5000), k: ([64, 64], 15)})
        args = "--to", "nf4", "--hessians", "m.safetensors"
        for more, sided in (([], "two"), (["--sided", "one"], "one")):
            r = self.run_qconv(*args, *more, "--dry-run", "--json", MODEL)
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertEqual(json.loads(r.stdout)["calibration"]["sided"], sided)
            self.assertEqual("the outputs of 1 weight count alike, as their second moments are of fewer tokens than "
                             "a quarter of them: '%s.weight'" % k in r.stderr.decode(), sided == "two")
        self.convert("one", *args[2:], "--sided", "one")
        self.moments("m.safetensors", {q: (192, 5000), k: q})
        self.convert("without", *args[2:])
        self.assertEqual(self.digest("one"), self.digest("without"))

    def test_auto_is_weighed_by_both_moments(self):
        """What moves the answer most gets the bytes; without moments of a weight none is weighed by them."""
        shapes = {"self_attn.q_proj": (192, 192), "self_attn.k_proj": (64, 192), "self_attn.v_proj": (64, 192),
                  "self_attn.o_proj": (192, 192), "mlp.gate_proj": (440, 192), "mlp.up_proj": (440, 192),
                  "mlp.down_proj": (192, 440)}
        of = {"model.layers.%d.%s" % (i, n): s for i in range(4) for n, s in shapes.items()}
        heavy = "model.layers.2.mlp.down_proj"
        inputs = {n: (cols, 5000) for n, (_, cols) in of.items()}
        outputs = {n: ([rows, rows], 5000, 1.0 if n == heavy else 1e-6) for n, (rows, _) in of.items()}
        room = ("--margin", "1", "--cuda-context", "1KB", "--context", "16", "--vram", "1300KB")

        def auto(*more):
            r = self.run_qconv("--to", "auto", *room, "--hessians", "m.safetensors", "--explain", "--dry-run", "--json",
                               *more, MODEL)
            self.assertEqual(r.returncode, 0, r.stderr)
            return json.loads(r.stdout)["auto"], r.stderr.decode()

        self.moments("m.safetensors", inputs, outputs)
        made, said = auto()
        self.assertIn("weighing the schemes of 28 weights", said)
        self.assertEqual(made["weighed_by"], "moments")
        groups = {"model.layers.%s.%s" % tuple(g["name"].split()[1:]): g for g in made["groups"]}
        costs = {n: g["divergences"] for n, g in groups.items()}
        self.assertIn(groups[heavy]["scheme"], ("int8", "16bit"))
        for c in costs.values():
            self.assertGreater(c["nf4"], c["int8"])
            self.assertEqual(c["16bit"], 0)
        # Twice the gradients are four times the divergence.
        self.moments("m.safetensors", inputs, {n: (s, t, 4 * x) for n, (s, t, x) in outputs.items()})
        again = auto("--threads", "1")[0]
        self.assertEqual([g["scheme"] for g in again["groups"]], [g["scheme"] for g in made["groups"]])
        for g in again["groups"]:
            n = "model.layers.%s.%s" % tuple(g["name"].split()[1:])
            for scheme, cost in g["divergences"].items():
                self.assertAlmostEqual(cost, 4 * costs[n][scheme], delta=1e-5 * cost)
        self.assertAlmostEqual(again["predicted_error"], 4 * made["predicted_error"], delta=1e-5 * again["predicted_error"])
        alone, said = auto("--sided", "one")
        self.assertEqual(alone["weighed_by"], "importance")
        self.assertNotIn("divergences", alone["groups"][0])
        self.assertNotIn("weighing", said)
        out = [self.convert("t%d" % t, "--to", "auto", *room, "--hessians", "m.safetensors", "--threads", str(t))
               for t in (1, 3)]
        self.assertEqual(out[0], out[1])
        del outputs[heavy]
        self.moments("m.safetensors", inputs, outputs)
        less, said = auto()
        self.assertEqual(less["weighed_by"], "importance")
        self.assertIn("because 1 weight has no second moments of inputs and outputs", said)
        self.assertEqual(less["predicted_error"], alone["predicted_error"])

    def test_fp8_source(self):
        """Weights that are codes in MODEL are calibrated as what they stand for."""
        rng = random.Random(5)
        shapes = {"self_attn.q_proj": [128, 128], "self_attn.k_proj": [64, 128],
                  "self_attn.v_proj": [64, 128], "self_attn.o_proj": [128, 128],
                  "mlp.gate_proj": [256, 128], "mlp.up_proj": [256, 128],
                  "mlp.down_proj": [128, 256]}
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128,
                  "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 64, "tie_word_embeddings": False,
                  "quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                                          "weight_block_size": [64, 32]}}
        tensors, plain = {}, {}

        def add(name, shape, values):
            both = "F32", shape, mk.encode("F32", values)
            tensors[name] = plain[name] = both

        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            add(name, [96, 128], [rng.gauss(0, 1) for _ in range(96 * 128)])
        for name in ("model.norm", "model.layers.0.input_layernorm",
                     "model.layers.0.post_attention_layernorm"):
            add(name + ".weight", [128], [1.0] * 128)
        for name, shape in shapes.items():
            name = "model.layers.0." + name + ".weight"
            coded, values = fp8(rng, name, shape, [64, 32])
            tensors.update(coded)
            plain[name] = "F32", shape, mk.encode("F32", values)
        mk.write_checkpoint(self.path("fp8"), tensors, config=config)
        del config["quantization_config"]
        mk.write_checkpoint(self.path("plain"), plain, config=config)
        moments.of_model(self.path("plain"), self.path("m.safetensors"), two=True)
        made = []
        for model in ("fp8", "plain"):
            out = model + "-nf4"
            self.ok("--to", "nf4", "--compress", "none", "-q", "--compute-dtype", "float32",
                    "--hessians", "m.safetensors", model, out)
            self.ok("verify", out, "--against", model, "-q")
            made.append({n: t for n, t in mk.read_checkpoint(self.path(out)).items()
                         if ".layers." in n and "quant_state" not in n})
        self.assertEqual(made[0], made[1])

    def test_kept_weights_are_left(self):
        said = self.told("-vv", "--keep", "*.layers.1.*", "--keep", "*.o_proj.*", *WHOLE, MODEL, "out")
        made = re.findall(r"(\S+\.weight): relative error of its outputs", said)
        self.assertEqual(len(made), 18, said)
        self.assertFalse([n for n in made if ".layers.1." in n or ".o_proj." in n], made)
        self.assertIn("calibrating 18 weights with", said)

    def test_says_what_lies_ahead(self):
        said = self.told("--dry-run", *WHOLE, MODEL, "out")
        self.assertRegex(said, r"calibrating 28 weights with the second moments given: this takes about .* here .*, up to "
                               r"[\d.]+ MB of memory, and [\d.]+ KB of disk")
        self.assertFalse(os.path.exists(self.path("out")))


if __name__ == "__main__":
    unittest.main()
