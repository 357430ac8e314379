#!/usr/bin/env python3
"""`qconv validate`: its numbers against plain Python, every form of OUT and MODEL, its limits, and the
baseline of the bundled model. The GPU part runs over the CPU shim, where times mean nothing."""
import json
import math
import os
import random
import re
import signal
import struct
import subprocess
import time
import unittest

from output_case import OutputCase, PLAIN, isa_list, tree
import make_checkpoint as mk
import numbers_oracle as oracle
import qconv_case
from test_documented import members, page, section
from test_forms import fp8, mxfp4

SHIM = os.environ.get("QCONV_SHIM", os.path.join(qconv_case.ROOT, "build", "qconv_shim"))
FAKE_CUBLAS = os.environ.get("FAKE_CUBLAS", "")
BUNDLED = os.path.join(qconv_case.ROOT, "tests", "data", "kjv-llama", "model")
BASELINE = os.path.join(qconv_case.ROOT, "bench", "baselines", "kjv-llama-nf4.json")
Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
ROWS = 16
MASK = (1 << 64) - 1


# ---- the oracle: docs/validate.md in Python ----

class SplitMix:
    def __init__(self, state):
        self.state = state

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        return z ^ z >> 31

    def uniform(self):
        return ((self.next() >> 11) + 0.5) * 2.0 ** -53


def normal_rows(seed, cols, dtype):
    rows = []
    for r in range(ROWS):
        rng = SplitMix(SplitMix(SplitMix(seed).next() ^ cols).next() ^ r)
        row = []
        while len(row) < cols:
            radius = math.sqrt(-2.0 * math.log(rng.uniform()))
            angle = 6.283185307179586 * rng.uniform()
            row += [radius * math.cos(angle), radius * math.sin(angle)]
        rows.append(mk.decode(dtype, mk.encode(dtype, [oracle.f32(v) for v in row[:cols]])))
    return rows


def norm(values):
    return math.sqrt(sum(v * v for v in values))


def dots(weights, rows, cols, x):
    return [sum(a * b for a, b in zip(weights[n * cols:(n + 1) * cols], v))
            for v in x for n in range(rows)]


def expected(original, quantized, rows, cols, dtype, x):
    """Floats of both weights -> the four numbers, without the kernel's rounding in float."""
    errors = [abs(a - b) for a, b in zip(original, quantized)]
    at = errors.index(max(errors))
    exact = dots(quantized, rows, cols, x)
    z = mk.decode(dtype, mk.encode(dtype, dots(original, rows, cols, x)))
    y = mk.decode(dtype, mk.encode(dtype, exact))
    return {"weight_error": norm(errors) / norm(original), "largest_error": max(errors),
            "largest_at": list(divmod(at, cols)),
            "output_error": norm([a - b for a, b in zip(y, z)]) / norm(z),
            "kernel_error": norm([a - b for a, b in zip(y, exact)]) / norm(exact)}


class ValidateCase(OutputCase):
    scale = "absmax"

    def setUp(self):
        super().setUp()
        self.rng = random.Random(11)

    def weight(self, dtype, shape, scale=0.05):
        return dtype, shape, mk.encode(dtype, [self.rng.gauss(0, scale)
                                               for _ in range(mk.numel(shape))])

    def put(self, tensors, name="x.safetensors"):
        mk.write_safetensors(self.path(name), tensors)
        return name

    def validate(self, out, model, *args, **more):
        return json.loads(self.ok("validate", out, "--against", model, "--json", *args, **more))

    def failing(self, out, model, *args):
        """-> the JSON of a run that ends with 4, its last line"""
        r = self.run_qconv("validate", out, "--against", model, "--json", *args)
        self.assertEqual(r.returncode, 4, r.stderr)
        return json.loads(r.stdout), r.stderr.decode()

    def layer(self, result, name):
        return next(l for l in result["layers"] if l["name"] == name)

    def close(self, layer, want):
        self.assertAlmostEqual(layer["weight_error"], want["weight_error"],
                               delta=1e-9 * want["weight_error"])
        self.assertAlmostEqual(layer["sqnr_db"], -20 * math.log10(want["weight_error"]), 6)
        self.assertAlmostEqual(layer["largest_error"], want["largest_error"], 12)
        self.assertEqual(layer["largest_at"], want["largest_at"])
        self.assertAlmostEqual(layer["output_error"], want["output_error"],
                               delta=2e-3 * want["output_error"])
        self.assertAlmostEqual(layer["kernel_error"], want["kernel_error"],
                               delta=0.05 * want["kernel_error"])


class Numbers(ValidateCase):
    def quantized(self, tensor, scheme, block):
        dtype, shape, body = tensor
        values = oracle.floats(dtype, body)
        if scheme == "nf4":
            codes, scales = oracle.nf4(values, block)
            return oracle.nf4_values(codes, scales, block, len(values), "F32")
        if block:
            codes, scales = oracle.int8_blocks(values, block)
            return oracle.int8_block_values(struct.unpack("%db" % len(codes), codes), scales,
                                            block, "F32")
        codes, scb = oracle.int8_rows(values, shape[1])
        return oracle.int8_row_values(struct.unpack("%db" % len(codes), codes), scb, shape[1],
                                      "F32")

    def test_forms(self):
        """Schemes, types, odd shapes."""
        forms = [("nf4", 64, "BF16", [31, 37]), ("nf4", 32, "F16", [64, 96]),
                 ("int8", 0, "F16", [17, 129]), ("int8", 64, "BF16", [33, 65]),
                 ("nf4", 64, "F32", [5, 200]),
                 # Whole groups of 64 and whole blocks: the products of integers.
                 ("nf4", 64, "BF16", [40, 128]), ("nf4", 64, "F16", [24, 192]),
                 ("int8", 0, "F16", [24, 256]), ("int8", 64, "F16", [24, 128])]
        for scheme, block, dtype, shape in forms:
            t = self.weight(dtype, shape)
            self.model({Q: t})
            size = ["--block-size", str(block), "--no-double-quant"] if block else []
            self.ok("-q", "--force", "--to", scheme, *size, "m", "o")
            x_dtype = "BF16" if dtype == "BF16" else "F16"
            got = self.validate("o", "m", "--seed", "5")
            layer = self.layer(got, Q)
            want = expected(oracle.floats(dtype, t[2]), self.quantized(t, scheme, block), *shape,
                            x_dtype, normal_rows(5, shape[1], x_dtype))
            self.close(layer, want)
            self.assertEqual(layer["dtype"], x_dtype)
            self.assertEqual(layer["shape"], shape)
            self.assertEqual(layer["block_size"], block or None)
            kernel = "floats" if shape[1] % 64 else "integers"
            self.assertEqual([(t["m"], t["kernel"]) for t in layer["times"]],
                             [(m, kernel) for m in (1, 4, 16)])
            self.assertIn("were left out (", got["left_out"])

    def test_double_quantized(self):
        """Scales as a reader gets them: the same as of the checkpoint that unpacks to them."""
        t = self.weight("BF16", [70, 130])
        self.model({Q: t})
        out = self.convert("--to", "nf4", "m", "o")
        back = self.convert("--to", "bf16", "o", "b")[Q]
        layer = self.layer(self.validate("o", "m"), Q)
        want = norm([a - b for a, b in zip(oracle.floats("BF16", t[2]), mk.decode("BF16", back[2]))])
        want /= norm(oracle.floats("BF16", t[2]))
        self.assertAlmostEqual(layer["weight_error"], want, delta=1e-2 * want)
        self.assertEqual(layer["bits_per_weight"],
                         8.0 * sum(len(out[Q + s][2]) for s in ("", ".absmax", ".nested_absmax"))
                         / 9100)

    def test_conv1d(self):
        name = "h.0.mlp.c_fc.weight"
        for shape in ([40, 24], [32, 32]):
            t = self.weight("F16", shape)  # [in, out]
            self.model({name: t}, config={"model_type": "gpt2"})
            self.ok("-q", "--force", "--to", "nf4", "--no-double-quant", "m", "o")
            cols, rows = shape
            values = oracle.floats("F16", t[2])
            turned = [values[c * rows + r] for r in range(rows) for c in range(cols)]
            codes, scales = oracle.nf4(turned, 64)
            quantized = oracle.nf4_values(codes, scales, 64, len(turned), "F32")
            want = expected(turned, quantized, rows, cols, "F16", normal_rows(1, cols, "F16"))
            want["largest_at"].reverse()  # as the tensor lies in MODEL
            self.close(self.layer(self.validate("o", "m"), name), want)

    def test_does_not_depend_on(self):
        """Threads, instruction set, compression, shards of MODEL."""
        tensors = {Q: self.weight("BF16", [130, 100]), UP: self.weight("BF16", [60, 130]),
                   GATE: self.weight("F16", [61, 33])}
        self.model(tensors)
        self.model(tensors, name="sharded", shard_bytes=9000)
        self.ok("-q", "--to", "nf4", "m", "packed")
        self.ok("-q", "unpack", "packed", "plain")
        self.ok("-q", "--to", "keep", "m", "zst")
        want = self.measured("packed", "m")[0]
        self.assertEqual(len(want), 3)
        for out, model in (("plain", "m"), ("packed", "sharded"), ("packed", "zst")):
            self.assertEqual(self.measured(out, model)[0], want, (out, model))
        for threads in ("1", "3", "7"):
            self.assertEqual(self.measured("packed", "m", "--threads", threads)[0], want)
        for isa in isa_list():
            self.assertEqual(self.measured("packed", "m", env={"QCONV_ISA": isa}), (want, isa))

    def measured(self, *args, **more):
        """-> the layers without times, the instruction set"""
        got = self.validate(*args, **more)
        return [{k: v for k, v in l.items() if k != "times"} for l in got["layers"]], got["isa"]

    def test_times(self):
        """Of up to 16 rows. What they say of speed nobody tests."""
        self.model({Q: self.weight("BF16", [64, 128]), UP: self.weight("BF16", [96, 65])})
        self.ok("-q", "--to", "nf4", "m", "o")
        got = self.validate("o", "m", "--m", "3,16,17")
        self.assertIsNone(got["read_bytes_per_second"])  # so small a model comes from caches
        for name, kernel in ((Q, "integers"), (UP, "floats")):
            layer = self.layer(got, name)
            self.assertEqual([(t["m"], t["kernel"]) for t in layer["times"]],
                             [(3, kernel), (16, kernel)])
            for t in layer["times"]:
                self.assertGreater(t["seconds"], 0)
                self.assertEqual((t["fp16_seconds"], t["speedup"], t["roof"]), (None, None, None))
                self.assertEqual((t["output_error"], t["kernel_error"]),
                                 (layer["output_error"], layer["kernel_error"]))
        self.assertEqual(self.validate("o", "m", "--m", "17")["layers"][0]["times"], [])
        for threads, words in (("1", "1 CPU thread"), ("2", "2 CPU threads")):
            self.assertRegex(self.ok("validate", "o", "--against", "m", "--m", "1,4", "--threads", threads),
                             r"\nproducts of these layers, one after the other on %s, .*\n"
                             r" +M=1 +M=4\nmilliseconds( +[0-9.]+(e[-+]\d+)?){2}\n\n" % words)
        self.assertNotIn("products of", self.ok("validate", "o", "--against", "m", "--m", "17"))


class Sources(ValidateCase):
    """What MODEL and OUT may be."""

    def test_fp8_and_mxfp4(self):
        tensors, values = fp8(self.rng, Q, [96, 160], [128, 128])
        stack = "model.layers.0.mlp.experts.gate_up_proj"
        experts, _ = mxfp4(self.rng, stack, 2, 32, 64)
        tensors.update(experts)
        self.model(tensors, config={"model_type": "gpt_oss", "num_local_experts": 2})
        self.ok("-q", "--to", "nf4", "--requantize", "m", "o")
        got = self.validate("o", "m")
        self.assertEqual([l["name"] for l in got["layers"]], [stack, Q])
        self.assertEqual(self.layer(got, stack)["shape"], [2, 32, 64])
        self.assertEqual(self.layer(got, stack)["source"], stack + "_blocks")
        for l in got["layers"]:
            self.assertTrue(0.01 < l["weight_error"] < 0.3, l)
        codes, scales = oracle.nf4(values, 64)
        rough = oracle.nf4_values(codes, scales, 64, len(values), "F32")
        want = norm([a - b for a, b in zip(values, rough)]) / norm(values)
        self.assertAlmostEqual(self.layer(got, Q)["weight_error"], want, delta=2e-2 * want)

    def test_fused_experts(self):
        name = "model.layers.0.mlp.experts."
        self.model({name + "gate_up_proj": self.weight("BF16", [2, 128, 64]),
                    name + "down_proj": self.weight("BF16", [2, 64, 64])},
                   config={"model_type": "qwen3_moe", "num_experts": 2})
        self.ok("-q", "--to", "nf4", "m", "o")
        got = self.validate("o", "m")
        self.assertEqual([l["name"] for l in got["layers"]],
                         [name + "%d.%s_proj.weight" % (e, p)
                          for e in (0, 1) for p in ("down", "gate", "up")])
        for l in got["layers"]:
            self.assertTrue(0.07 < l["output_error"] < 0.13, l)

    def test_bitsandbytes(self):
        """Without a manifest, as another tool saved it."""
        t = self.weight("BF16", [64, 64])
        table = mk.decode("F32", self.table())
        tensors, _ = oracle.bnb_nf4(Q, [64, 64], oracle.floats("BF16", t[2]), 64, table)
        self.model({Q: t})
        self.model(tensors, name="bnb")
        layer = self.layer(self.validate("bnb", "m"), Q)
        self.assertTrue(0.08 < layer["weight_error"] < 0.11, layer)

    def table(self):
        self.model({Q: self.weight("F32", [64, 64])}, name="t")
        return self.convert("--to", "nf4", "t", "tq")[Q + ".nested_quant_map"][2]

    def test_what_cannot_be_compared_is_listed(self):
        self.model({Q: self.weight("BF16", [64, 64]), UP: self.weight("BF16", [64, 64])})
        self.ok("-q", "--to", "nf4", "m", "o")
        self.model({Q: self.weight("BF16", [64, 64])}, name="part")
        got = self.validate("o", "part")
        self.assertEqual([l["name"] for l in got["layers"]], [Q])
        self.assertEqual(got["not_compared"],
                         [{"name": UP, "why": "its source is not in the model"}])
        text = self.ok("validate", "o", "--against", "part")
        self.assertIn("not compared: %s: its source is not in the model\n" % UP, text)
        self.assertIn("1 of 2 quantized layers were measured", text)

    def test_refused(self):
        self.model({Q: self.weight("BF16", [64, 64])})
        self.ok("-q", "--to", "nf4", "m", "o")
        self.fails(3, "validate", "m", "--against", "m", has="no weight in it is quantized")
        self.fails(3, "validate", "o", "--against", "o", has=[Q, "quantized in the model as well"])
        self.model({Q: self.weight("BF16", [64, 32])}, name="other")
        self.fails(4, "validate", "o", "--against", "other",
                   has=[Q, "[64, 64]", "[64, 32]", "one was not made from the other"])
        self.fails(1, "validate", "o", "--against", "m", "--save-baseline", "no/b.json", has="--save-baseline")
        self.fails(5, "validate", "o", "--against", "m", "--device", "cuda:63", has="cuda:63")

    def test_not_finite(self):
        body = bytearray(self.weight("BF16", [64, 64])[2])
        self.model({Q: ("BF16", [64, 64], bytes(body))})
        self.ok("-q", "--to", "nf4", "m", "o")
        body[10:12] = b"\xc0\x7f"
        self.model({Q: ("BF16", [64, 64], bytes(body))}, name="nan")
        got, line = self.failing("o", "nan")
        self.assertIsNone(got["layers"][0]["weight_error"])
        self.assertIn(Q + "': its weight error is not finite", line)
        r = self.run_qconv("validate", "o", "--against", "nan")
        self.assertIn(Q + ": not finite", r.stdout.decode())
        self.assertNotRegex(r.stdout.decode(), r"nan( dB|%)|nan\s")
        self.assertGreaterEqual(r.stdout.decode().count("not finite"), 4)

    def test_exact(self):
        self.model({Q: ("BF16", [64, 64], bytes(64 * 64 * 2))})
        self.ok("-q", "--to", "nf4", "m", "o")
        layer = self.validate("o", "m", "--max-error", "0.000001")["layers"][0]
        self.assertEqual((layer["weight_error"], layer["sqnr_db"], layer["output_error"]),
                         (0, None, 0))
        self.assertIn("exact", self.ok("validate", "o", "--against", "m"))


class Sample(ValidateCase):
    def test_spread(self):
        names = ["model.layers.%d.self_attn.q_proj.weight" % i for i in range(11)]
        self.model({n: self.weight("BF16", [32, 32]) for n in names})
        self.ok("-q", "--to", "nf4", "m", "o")
        for n in (1, 2, 3, 5, 10, 11, 12):
            got = self.validate("o", "m", "--sample", str(n))
            count = min(n, 11)
            want = [names[(2 * j + 1) * 11 // (2 * count)] for j in range(count)]
            self.assertEqual([l["name"] for l in got["layers"]], want)
            self.assertEqual((got["sample"], got["measured_layers"], got["quantized_layers"]),
                             (n, count, 11))


class Activations(ValidateCase):
    def setUp(self):
        super().setUp()
        self.model({Q: self.weight("BF16", [40, 64]), UP: self.weight("F16", [32, 64]),
                    GATE: self.weight("BF16", [32, 96])})
        self.ok("-q", "--to", "nf4", "--no-double-quant", "m", "o")

    def test_names(self):
        by_layer = self.weight("F32", [2, 40, 64], 1.0)
        by_module = self.weight("BF16", [5, 64], 1.0)
        x = self.put({Q: by_layer, UP[:-len(".weight")]: by_module,
                      "96": self.weight("F16", [16, 96], 2.0)})
        got = self.validate("o", "m", "--activations", x)
        self.assertEqual((len(got["layers"]), got["activations"]), (3, x))
        body = mk.read_checkpoint(self.path("m"))[Q][2]
        original = oracle.floats("BF16", body)
        codes, scales = oracle.nf4(original, 64)
        all_rows = oracle.floats("F32", by_layer[2])
        rows = [mk.decode("BF16", mk.encode("BF16", all_rows[64 * i:64 * i + 64]))
                for i in [r * 80 // 16 for r in range(16)]]
        self.close(self.layer(got, Q),
                   expected(original, oracle.nf4_values(codes, scales, 64, 40 * 64, "F32"), 40, 64,
                            "BF16", rows))

    def test_missing(self):
        x = self.put({"64": self.weight("F32", [20, 64])})
        got = self.validate("o", "m", "--activations", x)
        self.assertEqual(sorted(l["name"] for l in got["layers"]), sorted([Q, UP]))
        self.assertEqual([n["name"] for n in got["not_compared"]], [GATE])
        x = self.put({"65": self.weight("F32", [20, 65])})
        self.fails(3, "validate", "o", "--against", "m", "--activations", x, has="no activations")

    def test_the_model_is_no_activations(self):
        """Its tensors have the right names and widths: weights would be multiplied with weights."""
        for path in ("m", "./m", self.path("m")):
            self.fails(2, "validate", "o", "--against", "m", "--activations", path,
                       has=["--activations", "--against"])

    def test_no_numbers(self):
        for value, code, word in ((float("nan"), 3, "not finite"), (1e6, 3, "too large for F16")):
            x = self.put({UP: ("F32", [1, 64], mk.encode("F32", [value] * 64))})
            self.fails(code, "validate", "o", "--against", "m", "--activations", x, has=[UP, word])


class Verdict(ValidateCase):
    def setUp(self):
        super().setUp()
        self.tensors = {Q: self.weight("BF16", [64, 128]), UP: self.weight("BF16", [96, 64]),
                        GATE: self.weight("BF16", [96, 64])}
        self.model(self.tensors)
        self.ok("-q", "--to", "nf4", "m", "o")

    def test_max_error(self):
        got = self.validate("o", "m", "--max-error", "0.2")
        self.assertTrue(got["ok"] and got["max_error"] == 0.2)
        middle = sorted(l["output_error"] for l in got["layers"])[1]
        got, line = self.failing("o", "m", "--max-error", "%.9f" % (middle + 1e-9))
        worst = got["worst"]["name"]
        self.assertEqual([f["name"] for f in got["failed"]], [worst])
        self.assertFalse(got["ok"])
        self.assertIn("'%s': output error" % worst, line)
        self.assertIn("is above --max-error", self.layer(got, worst)["failure"])
        r = self.run_qconv("validate", "o", "--against", "m", "--max-error", "0.01")
        self.assertEqual(r.returncode, 4)
        self.assertEqual(r.stdout.decode().count("FAILED "), 3)
        for name in self.tensors:
            self.assertIn(name, r.stderr.decode())

    def test_baseline(self):
        self.validate("o", "m", "--save-baseline", "b.json")
        got = self.validate("o", "m", "--baseline", "b.json")
        self.assertEqual((got["ok"], got["baseline"], got["tolerance"]), (True, "b.json", 0.001))
        with open(self.path("b.json")) as f:
            base = json.load(f)
        self.assertEqual({l["name"] for l in base["layers"]}, set(self.tensors))
        for l in base["layers"]:
            if l["name"] == UP:
                l["output_error"] *= 0.98
        self.write("worse.json", json.dumps(base))
        got, line = self.failing("o", "m", "--baseline", "worse.json")
        self.assertEqual([f["name"] for f in got["failed"]], [UP])
        self.assertIn("output error", line)
        self.assertTrue(self.validate("o", "m", "--baseline", "worse.json", "--tolerance",
                                      "0.03")["ok"])

    def test_baseline_names_what_is_gone(self):
        self.validate("o", "m", "--save-baseline", "b.json")
        self.ok("-q", "--to", "nf4", "--split-fused", "--keep", UP, "m", "less")
        got, line = self.failing("less", "m", "--baseline", "b.json")
        self.assertEqual(got["failed"],
                         [{"name": UP, "why": "is in the baseline, but is not quantized here"}])
        self.assertIn(UP, line)
        # A sample only speaks of what it looked at.
        self.validate("o", "m", "--sample", "1", "--baseline", "b.json")

    def test_baseline_refused(self):
        """Other activations are known from the start: nothing of a large model is read first."""
        self.validate("o", "m", "--save-baseline", "b.json")
        with open(self.path("m", "model.safetensors"), "r+b") as f:
            f.seek(-2, os.SEEK_END)
            f.write(b"\xff\xff")  # NaN: measuring would end with 4
        self.fails(3, "validate", "o", "--against", "m", "--baseline", "b.json", "--seed", "2",
                   has="other activations")
        for text in ("", "{}", '{"qconv_baseline": 2}', '{"qconv_baseline": 1, "seed": 1}',
                     '{"qconv_baseline":1,"activations":"normal","seed":1,"rows":16,"layers":'
                     '[{"name":"a","weight_error":-1.0,"output_error":0.0}]}',
                     '{"qconv_baseline":1,"activations":"normal","seed":1,"rows":16,"layers":'
                     '[{"name":"a","weight_error":1.0,"output_error":0.0},'
                     '{"name":"a","weight_error":1.0,"output_error":0.0}]}'):
            self.write("bad.json", text)
            self.fails(3, "validate", "o", "--against", "m", "--baseline", "bad.json",
                       has="--baseline: bad.json")
        self.fails(1, "validate", "o", "--against", "m", "--baseline", "none.json",
                   has="none.json")

    def test_baseline_of_nothing_that_is_measured(self):
        """A test that compares nothing does not pass."""
        self.validate("o", "m", "--save-baseline", "all.json")
        got = self.validate("o", "m", "--sample", "1", "--save-baseline", "one.json")
        self.assertEqual((got["baseline"], got["baseline_layers"]), (None, None))
        one = got["layers"][0]["name"]
        got = self.validate("o", "m", "--baseline", "one.json")
        self.assertEqual((got["measured_layers"], got["baseline_layers"]), (3, 1))
        text = self.ok("validate", "o", "--against", "m", "--baseline", "one.json")
        self.assertIn("baseline one.json: 1 of 3 measured layers are in it", text)
        with open(self.path("all.json")) as f:
            base = json.load(f)
        base["layers"] = [l for l in base["layers"] if l["name"] != one]
        self.write("others.json", json.dumps(base))
        base["layers"] = []
        self.write("empty.json", json.dumps(base))
        for args in (["--sample", "1", "--baseline", "others.json"], ["--baseline", "empty.json"]):
            self.fails(3, "validate", "o", "--against", "m", *args, has=[args[-1], "none of them"])

    def test_nothing_that_is_read_is_replaced(self):
        x = self.put({"64": self.weight("F32", [20, 64]), "128": self.weight("F32", [20, 128])})
        self.validate("o", "m", "--save-baseline", "b.json")
        os.symlink("m", self.path("link"))
        os.link(self.path("m", "model.safetensors"), self.path("other-name"))
        before = tree(self.path("."))
        weights = [n for n in os.listdir(self.path("o")) if n.startswith("model.safetensors")]
        option = "--save-baseline"
        for path in ("m/model.safetensors", "m/config.json", "o/" + weights[0], "o/qconv.json",
                     "link/model.safetensors", "other-name", x):
            self.fails(2, "validate", "o", "--against", "m", "--activations", x, option, path,
                       has=[option, path, "only read"])
        self.fails(2, "validate", "o", "--against", "m", "--baseline", "b.json", option,
                   "./b.json", has=[option, "--baseline"])
        self.fails(2, "plan", "m", "--vram", "24GB", "--device-map", "m/config.json",
                   has=["--device-map", "only read"])
        self.assertEqual(tree(self.path(".")), before)
        # What an earlier run left is.
        self.validate("o", "m", "--save-baseline", "b.json")

    def test_interrupted(self):
        """130, and no baseline."""
        rows = bytes(range(0, 64)) * 2
        self.model({Q: ("BF16", [8192, 4096], rows * (8192 * 4096 * 2 // len(rows)))}, name="wide")
        self.ok("-q", "--to", "int8", "wide", "w")
        p = subprocess.Popen([qconv_case.QCONV, "validate", "w", "--against", "wide", "--json",
                              "--threads", "1", "--save-baseline", "i.json"],
                             cwd=self.dir, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=dict(os.environ, QCONV_ISA="scalar"))
        time.sleep(0.5)
        p.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = p.communicate()
        self.assertLess(time.monotonic() - began, 2.0)
        self.assertEqual((p.returncode, out, err), (130, b"", b"qconv: interrupted\n"))
        self.assertFalse([n for n in os.listdir(self.path(".")) if n.startswith("i.")])

    def test_swapped_pair(self):
        plain = self.convert("--to", "nf4", "m", "p")
        swapped = {}
        for name, t in plain.items():
            other = name.replace("up_proj", "GATE").replace("gate_proj", "up_proj")
            swapped[other.replace("GATE", "gate_proj")] = t
        self.model(swapped, name="s")
        got, line = self.failing("s", "m", "--max-error", "0.2")
        self.assertEqual(sorted(f["name"] for f in got["failed"]), sorted([UP, GATE]))
        for name in (UP, GATE):
            self.assertIn(name, line)
            self.assertGreater(self.layer(got, name)["output_error"], 1.0)


class Bundled(ValidateCase):
    """The accuracy regression test of qconv itself, and that it would notice."""

    scale = None  # what is converted by default is what must not get worse

    def setUp(self):
        super().setUp()
        self.ok("-q", *PLAIN, "--to", "nf4", BUNDLED, "o")

    def test_baseline(self):
        got = self.validate("o", BUNDLED, "--baseline", BASELINE)
        self.assertTrue(got["ok"])
        self.assertEqual(got["measured_layers"], 28)
        for l in got["layers"]:
            self.assertLess(l["kernel_error"], 2.0 ** -8)

    def test_another_method_is_noticed(self):
        self.ok("-q", *PLAIN, "--to", "nf4", "--scale", "absmax", BUNDLED, "absmax")
        got, _ = self.failing("absmax", BUNDLED, "--baseline", BASELINE)
        self.assertEqual(len(got["failed"]), 28)

    def test_damage_is_noticed(self):
        """Scales of one layer 1% larger; hashed anew, so that nothing but the numbers is wrong."""
        layer = "model.layers.2.mlp.gate_proj.weight"
        tensors = mk.read_checkpoint(self.path("o"))
        nested = mk.decode("F32", tensors[layer + ".nested_absmax"][2])
        tensors[layer + ".nested_absmax"] = (
            "F32", [len(nested)], mk.encode("F32", [v * 1.01 for v in nested]))
        state_name = layer + ".quant_state.bitsandbytes__nf4"
        state = oracle.state_of(tensors[state_name])
        state["nested_offset"] *= 1.01
        body = json.dumps(state).encode()
        tensors[state_name] = ("U8", [len(body)], body)
        with open(os.path.join(BUNDLED, "config.json")) as f:
            self.model(tensors, config=json.load(f), name="d")
        self.ok("-q", "--to", "keep", "d", "damaged")
        self.ok("verify", "-q", "damaged")
        got, line = self.failing("damaged", BUNDLED, "--baseline", BASELINE)
        self.assertEqual([f["name"] for f in got["failed"]], [layer])
        self.assertIn("'%s'" % layer, line)
        self.assertIn("above the baseline's", line)


@unittest.skipUnless(os.path.exists(SHIM) and FAKE_CUBLAS, "no qconv_shim")
class Gpu(ValidateCase):
    ENV = {"QC_SHIM_DEVICES": "sm_80:2:2MiB", "QCONV_LIBCUBLAS": FAKE_CUBLAS}

    def gpu_text(self, *args, env=None):
        saved, qconv_case.QCONV = qconv_case.QCONV, SHIM
        try:
            return self.ok("validate", "o", "--against", "m", "--device", "cuda", *args,
                           env={**self.ENV, **(env or {})}, timeout=250)
        finally:
            qconv_case.QCONV = saved

    def gpu(self, *args, **more):
        return json.loads(self.gpu_text("--json", *args, **more))

    def test_like_the_cpu(self):
        self.model({Q: self.weight("BF16", [160, 192])})
        self.ok("-q", "--to", "nf4", "m", "o")
        cpu = self.layer(self.validate("o", "m", "--device", "cpu", "--save-baseline", "b.json"), Q)
        got = self.gpu("--m", "1,20", "--baseline", "b.json")
        gpu = self.layer(got, Q)
        self.assertIsNone(got["left_out"])
        self.assertRegex(got["device"], r"cuda:0 \(CPU shim")
        self.assertEqual((gpu["device"], gpu["note"]), ("cuda:0", None))
        for key in ("weight_error", "sqnr_db", "largest_error", "largest_at", "shape"):
            self.assertEqual(gpu[key], cpu[key])
        self.assertAlmostEqual(gpu["output_error"], cpu["output_error"],
                               delta=1e-3 * cpu["output_error"])
        self.assertAlmostEqual(gpu["kernel_error"], cpu["kernel_error"],
                               delta=0.1 * cpu["kernel_error"])
        self.assertEqual([(t["m"], t["kernel"]) for t in gpu["times"]],
                         [(1, "mma-16816"), (20, "mma-16816")])
        self.documented(got)
        for t in gpu["times"]:
            self.assertTrue(0.05 < t["output_error"] < 0.15 and t["kernel_error"] < 2 ** -8, t)
            self.assertAlmostEqual(t["speedup"], t["fp16_seconds"] / t["seconds"])
            self.assertGreater(t["roof"], 0)

    def documented(self, got):
        """Every member is in docs/validate.md, and nothing else is promised there."""
        text = section(page("validate.md"), "`qconv validate --json`")
        printed = members(got, set()) | {"why"}
        self.assertEqual(sorted(printed - set(re.findall(r"`([^`]+)`", text))), [])
        for row in re.findall(r"^\| (`.*?) \|", text, re.M):
            for name in re.findall(r"`(\w+)`", row):
                self.assertIn(name, printed)

    def test_too_large_for_the_gpu(self):
        big = self.weight("F16", [700, 800])
        self.model({Q: big})
        self.ok("-q", "--to", "int8", "m", "o")
        layer = self.layer(self.gpu("--m", "1"), Q)
        self.assertEqual((layer["device"], layer["times"]), ("cpu", []))
        self.assertRegex(layer["note"], r"^measured on the CPU, without times: it needs \d+ MB of GPU")
        self.assertEqual(layer["output_error"],
                         self.layer(self.validate("o", "m", "--device", "cpu"), Q)["output_error"])

    def test_without_cublas(self):
        self.model({Q: self.weight("F16", [128, 160])})
        self.ok("-q", "--to", "int8", "m", "o")
        got = self.gpu("--m", "2", env={"QCONV_LIBCUBLAS": self.path("none.so")})
        self.assertRegex(got["left_out"], "the times of fp16 were left out")
        time = self.layer(got, Q)["times"][0]
        self.assertEqual((time["fp16_seconds"], time["speedup"]), (None, None))
        self.assertGreater(time["seconds"], 0)
        self.assertLess(time["output_error"], 0.02)

    def test_integers(self):
        """Dequantized and multiplied, which the kernel's name says; without cuBLAS the CPU measures."""
        self.model({Q: self.weight("BF16", [160, 192])})
        room = {"QC_SHIM_DEVICES": "sm_80:2:5000KiB"}  # cuBLAS has a workspace
        for to in (["int4", "--block-size", "32"], ["int8", "--activation-bits", "16"]):
            self.ok("-q", "--force", "--format", "compressed-tensors", "--to", *to, "m", "o")
            cpu = self.validate("o", "m", "--device", "cpu")["layers"][0]
            gpu = self.gpu("--m", "1", env=room)["layers"][0]
            self.assertEqual((gpu["device"], gpu["note"]), ("cuda:0", None))
            self.assertEqual(gpu["weight_error"], cpu["weight_error"])
            self.assertAlmostEqual(gpu["output_error"], cpu["output_error"],
                                   delta=0.03 * cpu["output_error"])
            self.assertLess(gpu["kernel_error"], 2 ** -8)
            self.assertEqual([(t["m"], t["kernel"]) for t in gpu["times"]],
                             [(1, "dequant-gemm")])
        without = self.gpu("--m", "1", env={**room, "QCONV_LIBCUBLAS": self.path("none.so")})["layers"][0]
        self.assertEqual((without["device"], without["times"]), ("cpu", []))
        self.assertRegex(without["note"], "^measured on the CPU, without times: w8a16 is multiplied by "
                                          "cuBLAS once it is dequantized")
        self.assertEqual(without["output_error"], cpu["output_error"])

    def test_volta_has_no_bf16(self):
        self.model({Q: self.weight("BF16", [128, 160])})
        self.ok("-q", "--to", "nf4", "m", "o")
        got = self.gpu_text("--m", "16", env={"QC_SHIM_DEVICES": "sm_70:2:2MiB"})
        self.assertRegex(got, r"(?m)^speed-up over fp16.*\nlayer +M=16\n%s +\d+\.\d\dx$" % Q)
        error = re.search(r"(?m)^%s .* ([0-9.]+)%%$" % Q, got).group(1)
        self.assertLess(float(error), 0.1)  # the kernel's, in F16; in BF16 it is 0.16


if __name__ == "__main__":
    unittest.main()
