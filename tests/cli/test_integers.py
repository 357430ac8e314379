"""Weights in integers with scales, as compressed-tensors, GPTQ and AWQ store them. The layouts come
from what those libraries document, in plain Python; values are (code - zero point) * scale."""
import json
import os
import random
import shutil
import signal
import struct
import unittest

from output_case import AT_CALL, OutputCase, PLAIN, at_call, tree
from qconv_case import SANITIZED
from test_auto import ROOM
from test_forms import Forms
import make_checkpoint as mk
import moments
import numbers_oracle as oracle

L = "model.layers.0."
M = L + "self_attn.q_proj."
Q = M + "weight"
CT = "compressed-tensors"
GOLDEN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "golden", "widths")


def words(codes, bits):
    """Codes into 32-bit words, low bits first; the last word is filled with zeros. No code lies in two words."""
    per = 32 // bits
    return [sum(c << bits * i for i, c in enumerate(codes[at:at + per]))
            for at in range(0, len(codes), per)]


def dense_words(codes, bits):
    """The same without gaps, as compressed-tensors packs since 0.18."""
    stream = sum(c << bits * i for i, c in enumerate(codes))
    return [stream >> 32 * i & 0xFFFFFFFF for i in range(-(-len(codes) * bits // 32))]


def i32(values):
    return b"".join(struct.pack("<I", v & 0xFFFFFFFF) for v in values)


def turned(rows):
    return [list(column) for column in zip(*rows)]


def flat(rows):
    return [v for row in rows for v in row]


class Weight:
    """A weight [out, in]: codes from 0 on, zero points and scales of its groups."""

    def __init__(self, rng, out, cols, bits, groups, dtype="F16", single=False, symmetric=False,
                 shuffled=False):
        self.shape, self.bits, self.groups, self.dtype = [out, cols], bits, groups, dtype
        self.codes = [[rng.randrange(1 << bits) for _ in range(cols)] for _ in range(out)]
        self.zeros = [[1 << bits - 1 if symmetric else rng.randrange(1, 1 << bits)
                       for _ in range(groups)] for _ in range(out)]
        self.scale_data = mk.encode(dtype, [rng.uniform(1e-3, 3e-3) for _ in range(out * groups)])
        scales = mk.decode(dtype, self.scale_data)
        self.scales = [scales[r * groups:(r + 1) * groups] for r in range(out)]
        if single:
            self.zeros = [self.zeros[0]] * out
            self.scales = [self.scales[0]] * out
        size = -(-cols // groups)
        self.group_of = [k // size for k in range(cols)]
        if shuffled:
            rng.shuffle(self.group_of)

    def values(self):
        return [oracle.f32((self.codes[r][k] - self.zeros[r][g]) * self.scales[r][g])
                for r in range(self.shape[0]) for k, g in enumerate(self.group_of)]

    def g_idx(self):
        return "I32", [self.shape[1]], i32(self.group_of)


def scale_of(w, single):
    if single:
        return w.dtype, [1], mk.encode(w.dtype, w.scales[0])
    return w.dtype, [w.shape[0], w.groups], mk.encode(w.dtype, flat(w.scales))


def int_quantized(w, module=M, single=False, symmetric=False, shuffled=False):
    t = {module + "weight": ("I8", w.shape, bytes(c ^ 128 for c in flat(w.codes))),
         module + "weight_scale": scale_of(w, single)}
    if not symmetric:
        shape = [1] if single else [w.shape[0], w.groups]
        zeros = w.zeros[0] if single else flat(w.zeros)
        t[module + "weight_zero_point"] = ("I8", shape, bytes(z ^ 128 for z in zeros))
    if shuffled:
        t[module + "weight_g_idx"] = w.g_idx()
    return t


def pack_quantized(w, module=M, single=False, symmetric=False, shuffled=False, words=words):
    packed = [words(row, w.bits) for row in w.codes]
    t = {module + "weight_packed": ("I32", [w.shape[0], len(packed[0])], i32(flat(packed))),
         module + "weight_shape": ("I64", [2], struct.pack("<2q", *w.shape)),
         module + "weight_scale": scale_of(w, single)}
    if not symmetric and single:
        middle = 1 << w.bits - 1
        t[module + "weight_zero_point"] = ("I8", [1], struct.pack("b", w.zeros[0][0] - middle))
    elif not symmetric:
        zeros = turned([words(column, w.bits) for column in turned(w.zeros)])
        t[module + "weight_zero_point"] = ("I32", [len(zeros), w.groups], i32(flat(zeros)))
    if shuffled:
        t[module + "weight_g_idx"] = w.g_idx()
    return t


def gptq(w, module=M, less=1, shuffled=True):
    """less: version 1 stores a zero point less one."""
    codes = turned([words(row, w.bits) for row in w.codes])
    zeros = [words([z - less for z in group], w.bits) for group in turned(w.zeros)]
    t = {module + "qweight": ("I32", [len(codes), w.shape[0]], i32(flat(codes))),
         module + "qzeros": ("I32", [w.groups, len(zeros[0])], i32(flat(zeros))),
         module + "scales": (w.dtype, [w.groups, w.shape[0]],
                             mk.encode(w.dtype, flat(turned(w.scales))))}
    if shuffled:
        t[module + "g_idx"] = w.g_idx()
    return t


def awq_words(row):
    """AutoAWQ's order: nibble i of a word holds column 0, 2, 4, 6, 1, 3, 5, 7 of its eight."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return [sum(row[at + order[i]] << 4 * i for i in range(8)) for at in range(0, len(row), 8)]


def awq(w, module=M):
    codes = [awq_words(row) for row in turned(w.codes)]
    zeros = [awq_words(row) for row in turned(w.zeros)]
    return {module + "qweight": ("I32", [w.shape[1], w.shape[0] // 8], i32(flat(codes))),
            module + "qzeros": ("I32", [w.groups, w.shape[0] // 8], i32(flat(zeros))),
            module + "scales": (w.dtype, [w.groups, w.shape[0]],
                                mk.encode(w.dtype, flat(turned(w.scales))))}


def ct_config(fmt, bits, strategy, group=None, symmetric=True, actorder=None, **more):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
               "group_size": group, "dynamic": False, "actorder": actorder}
    return {"quant_method": CT, "format": fmt, "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": None}}, **more}


class Integers(Forms):
    replaces = True

    def model_of(self, tensors, quantization, dtype="bfloat16"):
        config = {"model_type": "llama", "torch_dtype": dtype}
        if quantization:
            config["quantization_config"] = quantization
        self.model({"model.norm.weight": ("BF16", [64], bytes(128)), **tensors}, config)

    def check_all(self, w, tensors, quantization):
        """What becomes of it under every target, and that verify and inspect know it."""
        self.model_of(tensors, quantization)
        for to, dtype in (("bf16", "BF16"), ("fp16", "F16")):
            out = self.convert("--to", to, "m", to)
            self.assertEqual(out[Q], (dtype, w.shape, mk.encode(dtype, w.values())))
            self.assertEqual(sorted(out), [Q, "model.norm.weight"])
            self.assertNotIn("quantization_config", self.json_of(to, "config.json"))
        for to in ("nf4", "int8"):
            out = self.convert("--to", to, "m", to)
            self.check_blocks_of(out, Q, w.values(), w.shape, to)
            self.assertEqual(self.quantization(to)["quant_method"], "bitsandbytes")
        for to in ("bf16", "nf4", "int8"):
            self.assertTrue(json.loads(self.ok("verify", "--json", to))["ok"])
            report = json.loads(self.ok("verify", "--json", to, "--against", "m"))
            self.assertTrue(report["ok"], report)
            self.assertEqual(report["source_digests"], 2, report)
            os.remove(self.path(to, "qconv.json"))
            self.assertTrue(json.loads(self.ok("verify", "--json", to, "--against", "m"))["ok"])
        facts = json.loads(self.ok("inspect", "--json", "m"))
        self.assertEqual(facts["totals"]["weights"], 64 + mk.numel(w.shape))
        for to in ("bf16", "fp16", "nf4", "int8"):
            shutil.rmtree(self.path(to))

    def check_refused(self, good, cases, targets=("bf16", "int8")):
        """(tensors that take the place of good ones, configuration, what the line has)"""
        for number, (bad, config, says) in enumerate(cases):
            with self.subTest(number=number, says=says):
                tensors = {**good, **{M + n: t for n, t in bad.items()}}
                self.model_of({n: t for n, t in tensors.items() if t}, config)
                for to in targets:
                    self.fails(3, "--to", to, "m", "o", has=says)
                    self.assert_nothing("o")

    def check_bf16(self, w, tensors, quantization):
        self.model_of(tensors, quantization)
        out = self.convert("--to", "bf16", "m", "o")
        self.assertEqual(out[Q], ("BF16", w.shape, mk.encode("BF16", w.values())))
        self.assertTrue(json.loads(self.ok("verify", "--json", "o", "--against", "m"))["ok"])
        shutil.rmtree(self.path("o"))


class Targets(Integers):
    def test_every_target(self):
        largest = Weight(self.rng, 96, 128, 4, 4, shuffled=True)
        largest.zeros[5][2] = 16  # the largest code in a file of GPTQ
        for w, form, more, config in (
                (Weight(self.rng, 96, 128, 8, 1, "BF16", symmetric=True), int_quantized, {"symmetric": True},
                 ct_config("int-quantized", 8, "channel")),
                (Weight(self.rng, 96, 128, 4, 4, "BF16", symmetric=True), pack_quantized, {"symmetric": True},
                 ct_config("pack-quantized", 4, "group", 32)),
                (Weight(self.rng, 96, 128, 4, 4), gptq, {"shuffled": False}, Gptq.config(self)),
                (largest, gptq, {}, Gptq.config(self, desc_act=True)),
                (Weight(self.rng, 96, 128, 4, 4), awq, {}, Awq.CONFIG)):
            with self.subTest(form=form.__name__, config=config):
                self.check_all(w, form(w, **more), config)


class CompressedTensors(Integers):
    def test_forms(self):
        """Both formats, all strategies, 4 and 8 bit, zero points and act-order, rows that do not
        fill their words."""
        for form, bits, (strategy, groups), symmetric, shuffled, cols in (
                (form, bits, strategy, symmetric, shuffled, cols)
                for form in (int_quantized, pack_quantized) for bits in (4, 8)
                for strategy in (("tensor", 1), ("channel", 1), ("group", 3))
                for symmetric in (True, False) for shuffled in (False, True) for cols in (63, 96)
                if (bits == 8 or form is pack_quantized) and (strategy[1] == 3 or not shuffled)):
            with self.subTest(form=form.__name__, bits=bits, strategy=strategy,
                              symmetric=symmetric, shuffled=shuffled, cols=cols):
                single = strategy == "tensor"
                dtype = self.rng.choice(("F32", "F16", "BF16"))
                w = Weight(self.rng, 37, cols, bits, groups, dtype, single, symmetric, shuffled)
                group = cols // groups if groups > 1 else None
                config = ct_config(form.__name__.replace("_", "-"), bits, strategy, group,
                                   symmetric, "group" if shuffled else None)
                self.check_bf16(w, form(w, single=single, symmetric=symmetric, shuffled=shuffled),
                                config)

    def test_widths(self):
        """2 to 7 bits, as compressed-tensors packs them since 0.18 and as it did before, with and without zero points
        along the rows. Where the number of words fits both, the version in config.json says which."""
        for bits in range(2, 8):
            for packing, version in ((dense_words, "0.20.1"), (dense_words, None), (words, "0.17.0"), (words, None)):
                for strategy, groups, cols in (("channel", 1, 101), ("group", 3, 96), ("channel", 1, 2 * (32 // bits))):
                    if version is None and cols < 96 and packing is words:
                        continue  # nobody can tell
                    symmetric = self.rng.random() < 0.4
                    w = Weight(self.rng, 37, cols, bits, groups, "BF16", symmetric=symmetric)
                    config = ct_config("pack-quantized", bits, strategy, cols // groups if groups > 1 else None, symmetric,
                                       **({"version": version} if version else {}))
                    with self.subTest(bits=bits, packing=packing.__name__, version=version, cols=cols,
                                      symmetric=symmetric):
                        self.check_bf16(w, pack_quantized(w, symmetric=symmetric, words=packing), config)

    def test_widths_under_every_target(self):
        for bits, packing, groups in ((5, dense_words, 4), (3, words, 4), (6, dense_words, 1)):
            w = Weight(self.rng, 96, 128, bits, groups, "BF16", symmetric=True)
            config = ct_config("pack-quantized", bits, "group" if groups > 1 else "channel", 32 if groups > 1 else None,
                               version="0.20.1" if packing is dense_words else "0.15.0")
            with self.subTest(bits=bits):
                self.check_all(w, pack_quantized(w, symmetric=True, words=packing), config)
                facts = json.loads(self.ok("inspect", "--json", "m"))
                t = next(t for t in facts["tensors"] if t["name"] == M + "weight_packed")
                self.assertEqual((t["bits"], t["logical_shape"]), (bits, w.shape))

    def test_golden(self):
        """Files of compressed-tensors itself, before and after it packed densely (golden/gen_widths.py)."""
        for version in ("0.17.0", "0.20.1"):
            path = os.path.join(GOLDEN, version)
            with open(path + ".json", encoding="utf-8") as f:
                config = json.load(f)
            for said in (version, None) if version == "0.20.1" else (version,):
                if said is None:
                    del config["version"]  # dense is what is meant then
                self.model({}, {"model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": config})
                shutil.copy(path + ".safetensors", self.path("m", "model.safetensors"))
                out = self.convert("--to", "bf16", "m", "o")
                self.assertEqual(out, mk.read_safetensors(path + ".values.safetensors")[0], (version, said))

    def test_columns_in_order(self):
        """A g_idx of -1 says so."""
        w = Weight(self.rng, 16, 64, 4, 2, symmetric=True)
        tensors = pack_quantized(w, symmetric=True)
        tensors[M + "weight_g_idx"] = ("I32", [64], i32([-1] * 64))
        self.check_bf16(w, tensors, ct_config("pack-quantized", 4, "group", 32))

    def test_mixed(self):
        """Two widths in one file, and what belongs to activations."""
        w4 = Weight(self.rng, 32, 64, 4, 2, symmetric=True)
        w8 = Weight(self.rng, 32, 64, 8, 1, symmetric=True)
        config = ct_config("mixed-precision", 4, "group", 32)
        config["config_groups"]["group_1"] = ct_config("pack-quantized", 8, "channel")[
            "config_groups"]["group_0"]
        other = L + "self_attn.k_proj."
        self.model_of({**pack_quantized(w4, symmetric=True),
                       **pack_quantized(w8, other, symmetric=True),
                       M + "input_scale": ("F32", [1], bytes(4))}, config)
        out = self.convert("--to", "bf16", "m", "o")
        self.assertEqual(out[Q][2], mk.encode("BF16", w4.values()))
        self.assertEqual(out[other + "weight"][2], mk.encode("BF16", w8.values()))
        self.assertEqual(len(out), 3)

    def test_without_a_configuration(self):
        w = Weight(self.rng, 32, 64, 4, 2, symmetric=True)
        self.check_bf16(w, pack_quantized(w, symmetric=True), None)

    def test_contradictions(self):
        w = Weight(self.rng, 32, 64, 4, 2, symmetric=True)
        good, at = pack_quantized(w, symmetric=True), M + "weight_packed"
        fit = ct_config("pack-quantized", 4, "group", 32)
        loose = ct_config("pack-quantized", 4, "group", 32, actorder="group")
        turn = {"config_groups": {"R1": {"type": "hadamard"}}}

        def config(**args):
            c = ct_config("pack-quantized", 4, "group", 32)
            c["config_groups"]["group_0"]["weights"].update(args)
            return c

        where = "config.json: quantization_config: "
        cases = [
            ({}, config(group_size=-2), [where + "group_size is -2"]),
            ({}, config(group_size="32"), [where + "group_size is of kind string"]),
            ({}, config(num_bits="4"), [where + "num_bits is of kind string"]),
            ({}, config(num_bits=3), [at, "num_bits 3", "num_bits 4"]),
            ({}, config(strategy=5), [where + "strategy is of kind number"]),
            ({}, config(strategy="block"), [where, "strategy 'block'", "tensor, channel or group"]),
            ({}, config(symmetric="yes"), [where + "symmetric is of kind string"]),
            ({}, config(actorder="sideways"), [where + "actorder is 'sideways'"]),
            ({}, config(type="float"), [at, "no weights of the type int"]),
            ({}, {**fit, "config_groups": [1]}, [at, "config_groups"]),
            ({}, {**fit, "format": "marlin-24"}, [at, "'marlin-24'", "pack-quantized"]),
            ({}, {**fit, "format": "int-quantized"}, [at, "'int-quantized'", "pack-quantized"]),
            ({"weight_shape": ("I64", [2], struct.pack("<2q", -32, 64))}, fit, [at, "[-32, 64]"]),
            ({"weight_shape": ("I64", [2], struct.pack("<2q", 32, 1 << 62))}, fit, [at, str(1 << 62)]),
            ({"weight_packed": ("I32", [2, 16, 8], bytes(1024))}, fit, [at, "not read"]),
            ({"weight_scale": ("F64", [32, 2], bytes(512))}, fit, [at, "not read"]),
            ({"weight_scale": ("F16", [32, 0], b"")}, fit, ["weight_scale", "[32, 0]"]),
            ({"weight_scale": None}, fit, [at, "without a weight_scale"]),
            ({}, ct_config("pack-quantized", 8, "group", 32), [at, "num_bits 8", "num_bits 4"]),
            ({}, ct_config("pack-quantized", 4, "group", 16), [at, "group_size 16",
                                                               "group_size 32"]),
            ({}, ct_config("pack-quantized", 4, "channel"), [at, "channel", "group_size 32"]),
            ({}, ct_config("pack-quantized", 4, "group", 32, False), [at, "zero points"]),
            ({}, loose, [at, "actorder", "weight_g_idx"]),
            ({}, ct_config("pack-quantized", 4, "token"), ["strategy 'token'", "channel or group"]),
            ({}, {"quant_method": CT, "config_groups": {}}, [at, "config_groups"]),
            ({}, {**fit, "transform_config": turn}, ["transform_config"]),
            ({"weight_shape": ("I64", [2], struct.pack("<2q", 32, 99))}, fit, [at, "[32, 99]"]),
            ({"weight_shape": ("I64", [2], struct.pack("<2q", 33, 64))}, fit, [at, "[33, 64]"]),
            ({"weight_shape": ("I32", [2], bytes(8))}, fit, ["weight_shape", "I64"]),
            ({"weight_scale": ("F16", [32, 3], bytes(192))}, fit, ["weight_scale", "[32, 3]"]),
            ({"weight_scale": ("F16", [31, 2], bytes(124))}, fit, ["weight_scale", "[31, 2]"]),
            ({"weight_zero_point": ("I8", [32, 1], bytes(32))}, fit, ["weight_zero_point", "64"]),
            ({"weight_g_idx": ("I32", [63], bytes(252))}, loose, ["weight_g_idx", "I32 [64]"]),
            ({"weight_g_idx": ("I32", [64], i32([2] * 64))}, loose,
             ["weight_g_idx", "column 0 is in group 2", "0 to 1"]),
            ({"weight_g_idx": ("I32", [64], i32([0] * 33 + [1] * 31))}, loose,
             ["weight_g_idx", "group 0 has 33 columns", "32"]),
            ({"weight": ("BF16", [32, 64], bytes(4096))}, fit, [Q, "same weight, plain and packed"]),
        ]
        self.check_refused(good, cases)

    def test_bad_scales(self):
        """Of all four forms; the scale of row 5, group 1 lies at `at`."""
        for bits, says in ((0, "is 0"), (0x7C00, "not finite"), (0x7E00, "not finite"), (0xFC00, "not finite")):
            for form, code_bits, more, name, at, config in (
                    (int_quantized, 8, {"symmetric": True}, "weight_scale", 11, None),
                    (pack_quantized, 8, {"symmetric": True}, "weight_scale", 11, None),
                    (gptq, 4, {}, "scales", 32 + 5, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
                    (awq, 4, {}, "scales", 32 + 5, {"quant_method": "awq", "bits": 4, "group_size": 32})):
                good = form(Weight(self.rng, 32, 64, code_bits, 2, symmetric=bool(more)), **more)
                dtype, shape, data = good[M + name]
                data = data[:2 * at] + struct.pack("<H", bits) + data[2 * (at + 1):]
                self.check_refused(good, [({name: (dtype, shape, data)}, config,
                                           [M + name, "row 5, group 1", says, "--keep"])])

    def test_too_large(self):
        w = Weight(self.rng, 8, 64, 8, 1, "F32", symmetric=True)
        w.codes[3][9] = 255
        tensors = int_quantized(w, symmetric=True)
        tensors[M + "weight_scale"] = ("F32", [8, 1], mk.encode("F32", [1.0] * 3 + [3e38] + [1.0] * 4))
        self.model_of(tensors, None)
        self.fails(3, "--to", "bf16", "m", "o", has=[Q, "row 3, column", "not finite"])
        self.assert_nothing("o")

    def test_kept(self):
        """A weight that --keep covers stays as it is, with all that belongs to it."""
        w = Weight(self.rng, 32, 64, 4, 2)
        k = Weight(self.rng, 32, 64, 4, 2)
        other = L + "self_attn.o_proj."
        kept = pack_quantized(w)
        self.model_of({**kept, **pack_quantized(k, other)},
                      ct_config("pack-quantized", 4, "group", 32, False))
        for glob in ("*.q_proj.weight", "*.q_proj.weight_packed"):
            out = self.convert("--to", "bf16", "--keep", glob, "m", "o")
            self.assertEqual({n: out[n] for n in kept}, kept)
            self.assertEqual(out[other + "weight"][2], mk.encode("BF16", k.values()))
            config = self.quantization("o")
            self.assertEqual(config["quant_method"], CT)
            self.assertIn(other[:-1], config["ignore"])
            shutil.rmtree(self.path("o"))
        self.convert("--to", "nf4", "--keep", "*.q_proj.weight", "m", "o")
        config = self.quantization("o")
        self.assertEqual((config["quant_method"], config["quant_type"]),
                         ("qconv", "nf4+pack-quantized"))
        again = self.convert("--to", "bf16", "o", "back")
        self.assertEqual(again[Q], ("BF16", w.shape, mk.encode("BF16", w.values())))

    def test_kept_groups(self):
        """Engines hold queries, keys and values as one, packed or not."""
        w = [Weight(self.rng, 32, 64, 4, 2) for _ in range(4)]
        for form, config in ((pack_quantized, ct_config("pack-quantized", 4, "group", 32, False)),
                             (gptq, {"quant_method": "gptq", "bits": 4}),
                             (awq, {"quant_method": "awq", "bits": 4})):
            packed = [form(x, L + "self_attn.%s_proj." % n) for x, n in zip(w, "qkvo")]
            self.model_of({n: t for p in packed for n, t in p.items()}, config)
            for to in ("nf4", "bf16"):
                out = self.convert("--to", to, "--keep", "*.k_proj.weight", "m", "o")
                for p in packed[:3]:
                    self.assertEqual({n: out[n] for n in p}, p)
                self.assertNotIn(sorted(packed[3])[-1], out)
                out = self.convert("--to", to, "--split-fused", "--keep", "*.k_proj.weight", "m",
                                   "o")
                self.assertEqual({n: out[n] for n in packed[1]}, packed[1])
                self.assertNotIn(sorted(packed[0])[-1], out)
            shutil.rmtree(self.path("o"))

    def test_head(self):
        """A packed head is not quantized by default: it is written in the model's dtype."""
        w = Weight(self.rng, 128, 64, 4, 2, symmetric=True)
        self.model_of({"model.embed_tokens.weight": ("BF16", [128, 64], bytes(16384)),
                       **pack_quantized(w, "lm_head.", symmetric=True),
                       **pack_quantized(w, symmetric=True)},
                      ct_config("pack-quantized", 4, "group", 32), "float16")
        out = self.convert("--to", "nf4", "m", "o")
        self.assertEqual(out["lm_head.weight"], ("F16", w.shape, mk.encode("F16", w.values())))


class Gptq(Integers):
    def config(self, bits=4, group=32, **more):
        return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False,
                "sym": False, **more}

    def test_forms(self):
        for bits in (4, 8):
            for groups, group in ((1, -1), (4, 16), (1, 128)):
                for less, version in ((1, None), (1, "gptq"), (0, "gptq_v2")):
                    w = Weight(self.rng, 40, 64, bits, groups, shuffled=groups > 1)
                    more = {"checkpoint_format": version} if version else {}
                    self.check_bf16(w, gptq(w, less=less),
                                    self.config(bits, group, desc_act=True, **more))

    def test_a_last_group_that_is_short(self):
        w = Weight(self.rng, 16, 40, 4, 3)
        w.group_of = [k // 16 for k in range(40)]
        self.check_bf16(w, gptq(w, shuffled=False), self.config(group=16))

    def test_stripes(self):
        """More rows and columns than are read at once, by several threads, in small shards."""
        rng = random.Random(7)
        w = Weight(rng, 1, 2064, 4, 16)
        rows = 560
        for name in ("codes", "zeros", "scales"):
            base = getattr(w, name)[0]
            setattr(w, name, [base[i:] + base[:i] for i in range(rows)])
        w.shape[0] = rows
        values = mk.encode("BF16", w.values())
        for form, config in ((gptq, self.config(group=129)),
                             (awq, {"quant_method": "awq", "bits": 4, "group_size": 129}),
                             (pack_quantized, None)):
            self.model_of(form(w), config)
            for threads in ("1", "3"):
                out = self.convert("--to", "bf16", "--threads", threads, "m", "o")
                self.assertTrue(out[Q][2] == values, (form, threads))
                self.ok("verify", "-q", "o", "--against", "m")
                shutil.rmtree(self.path("o"))

    def test_contradictions(self):
        w = Weight(self.rng, 32, 64, 4, 2)
        good, at = gptq(w, shuffled=False), M + "qweight"
        zeros = ("I32", [2, 3], bytes(24))
        cases = [
            ({}, self.config(bits=8), [at, "8 bits", "4"]),
            ({}, self.config(group=16), [M + "scales", "groups of 16", "need 4", "found 2"]),
            ({}, self.config(group=-1), [M + "scales", "groups of 64", "need 1", "found 2"]),
            ({}, self.config(desc_act=True), [at, "desc_act", "no g_idx"]),
            ({"g_idx": ("I32", [60], bytes(240))}, self.config(), [M + "g_idx", "I32 [64]"]),
            ({"g_idx": ("I32", [64], i32([0] * 63 + [-1]))}, self.config(),
             [M + "g_idx", "column 63 is in group -1"]),
            ({"qzeros": zeros}, self.config(), [M + "qzeros", "[2, 4]", "[2, 3]"]),
            ({"qzeros": ("I32", [3, 4], bytes(48))}, self.config(), [M + "qzeros", "[2, 4]"]),
            ({"scales": ("F16", [2, 16], bytes(64))}, self.config(), [at, "gptq", "16 columns"]),
            ({}, {"quant_method": "awq", "bits": 4, "group_size": 32}, [at, "awq", "4 columns"]),
        ]
        self.check_refused(good, cases)

    def test_kept(self):
        """Beside NF4 it is a form of qconv's own, which is read back."""
        k = Weight(self.rng, 32, 64, 4, 2)
        for form, method, version in ((gptq, "gptq", "gptq"), (gptq, "gptq", "gptq_v2"),
                                      (gptq, "gptq", None), (awq, "awq", None)):
            w = Weight(self.rng, 32, 64, 4, 2)
            other, less = L + "self_attn.o_proj.", {"less": 0} if version == "gptq_v2" else {}
            kept, config = form(w, **less), {"quant_method": method, "bits": 4}
            if version:
                config["checkpoint_format"] = version
            self.model_of({**kept, **form(k, other, **less)}, config)
            self.assertIn("quantizing the weights in integers too, or --to bf16",
                          self.warned("--to", "nf4", "--keep", "*.q_proj.*", "m", "o"))
            config = self.quantization("o")
            self.assertEqual((config["quant_method"], config["quant_type"]),
                             ("qconv", "nf4+" + method))
            again = self.convert("--to", "bf16", "o", "back")
            self.assertEqual(again[Q], ("BF16", w.shape, mk.encode("BF16", w.values())))
            self.assertEqual(len(again), 3)
            for name in ("o", "back"):
                shutil.rmtree(self.path(name))

    def test_not_read(self):
        """Other widths and layouts are refused as before, and --to keep passes them through."""
        w = Weight(self.rng, 32, 64, 4, 2)
        good = gptq(w, shuffled=False)
        narrow = {**good, M + "qzeros": ("I32", [2, 3], bytes(24)),
                  M + "qweight": ("I32", [6, 32], bytes(768))}
        for tensors, config in ((good, None), (narrow, self.config(bits=3)),
                                (good, self.config(checkpoint_format="marlin")),
                                (good, self.config(is_marlin_format=True)),
                                (good, {"quant_method": "auto-round", "bits": 4}),
                                (awq(w), {"quant_method": "awq", "version": "gemv"})):
            self.model_of(tensors, config)
            for to in ("bf16", "nf4"):
                self.fails(3, "--to", to, "m", "o", has=[M, "packed by", "form that qconv does not read"])
            kept = self.convert("--to", "keep", "m", "kept")
            self.assertEqual({n: kept[n] for n in tensors}, tensors)
            shutil.rmtree(self.path("kept"))

    def test_conv1d(self):
        """GPT-2's Conv1D is [in, out] for its loader: decoded, it would have to be turned."""
        w = Weight(self.rng, 96, 64, 4, 2)
        module = "h.0.attn.c_attn."
        self.model({**gptq(w, module, shuffled=False),
                    "wte.weight": ("BF16", [64, 64], bytes(8192))},
                   {"model_type": "gpt2", "torch_dtype": "bfloat16",
                    "quantization_config": self.config()})
        for to in ("bf16", "fp16", "auto"):
            more = ["--vram", "1GB"] if to == "auto" else []
            self.fails(3, "--to", to, *more, "m", "o", has=[module + "qweight", "Conv1D"])
            self.assert_nothing("o")
        out = self.convert("--to", "nf4", "m", "o")
        self.check_blocks_of(out, module + "weight", w.values(), w.shape, "nf4")


class Awq(Integers):
    CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm",
              "zero_point": True}

    def test_without_a_configuration(self):
        w = Weight(self.rng, 48, 128, 4, 1)
        self.check_bf16(w, awq(w), None)

    def test_contradictions(self):
        w = Weight(self.rng, 32, 64, 4, 2)
        good = awq(w)
        cases = [
            ({}, {**self.CONFIG, "group_size": 64}, [M + "scales", "need 1", "found 2"]),
            ({}, {**self.CONFIG, "bits": 8}, [M + "qweight", "8 bits"]),
            ({"qzeros": ("I32", [2, 5], bytes(40))}, self.CONFIG, [M + "qzeros", "[2, 4]"]),
            ({"scales": ("F16", [2, 40], bytes(160))}, self.CONFIG, [M + "qweight", "5 columns"]),
            ({}, {"quant_method": "gptq", "bits": 4}, [M + "qweight", "gptq", "32 columns"]),
        ]
        self.check_refused(good, cases)


class Models(OutputCase):
    """A language model whose layers are in integers, and the same with its values in float32."""
    scale = "absmax"
    SHAPES = {"self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64],
              "self_attn.v_proj": [32, 64], "self_attn.o_proj": [64, 64],
              "mlp.gate_proj": [128, 64], "mlp.up_proj": [128, 64], "mlp.down_proj": [64, 128]}
    CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
              "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 64, "tie_word_embeddings": False,
              "torch_dtype": "bfloat16"}
    FORMS = {"gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
             "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32}),
             "pack": (pack_quantized, ct_config("pack-quantized", 4, "group", 32, False)),
             "int": (int_quantized, None)}

    def models(self, kind, **more):
        rng = random.Random(8)
        form, quantization = self.FORMS[kind]
        packed, plain = {}, {}

        def add(name, shape, values):
            packed[name] = plain[name] = "F32", shape, mk.encode("F32", values)

        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            add(name, [96, 64], [rng.gauss(0, 1) for _ in range(96 * 64)])
        add("model.norm.weight", [64], [1.0] * 64)
        for layer in ("model.layers.0.", "model.layers.1."):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                add(layer + norm + ".weight", [64], [1.0] * 64)
            for name, (rows, cols) in self.SHAPES.items():
                w = Weight(rng, rows, cols, 8 if kind == "int" else 4, cols // 32)
                packed.update(form(w, layer + name + "."))
                plain[layer + name + ".weight"] = "F32", w.shape, mk.encode("F32", w.values())
        both = {"quantization_config": quantization} if quantization else {}
        self.model(packed, {**self.CONFIG, **both}, "packed", **more)
        self.model(plain, self.CONFIG, "plain")

    @unittest.skipIf(SANITIZED, "long, and unit_error_feedback has it")
    def test_calibrated(self):
        for kind in ("gptq", "pack"):
            self.models(kind)
            moments.of_model(self.path("plain"), self.path("m.safetensors"), two=True)
            made = []
            for model in ("packed", "plain"):
                self.ok("--to", "nf4", *PLAIN, "-q", "--force", "--compute-dtype", "float32",
                        "--hessians", "m.safetensors", model, "o")
                self.ok("verify", "o", "--against", model, "-q")
                made.append({n: t for n, t in mk.read_checkpoint(self.path("o")).items()
                             if ".layers." in n and "quant_state" not in n})
            self.assertEqual(*made)

    def test_plan(self):
        """Sizes are exact, and a weight has as many parameters as when it is decoded."""
        for kind in self.FORMS:
            self.models(kind)
            for to in ("nf4", "bf16"):
                plans = [json.loads(self.ok("plan", "--json", "--to", to, "--vram", "2GB", m))
                         for m in ("packed", "plain")]
                self.assertEqual(plans[0]["parameters"], plans[1]["parameters"])
                self.ok("-q", *PLAIN, "--force", "--to", to, "packed", "o")
                out = mk.read_checkpoint(self.path("o"))
                self.assertEqual(plans[0]["weight_bytes"], sum(len(t[2]) for t in out.values()))

    def test_auto(self):
        """Where 16 bit is chosen, integers are decoded to the model's dtype."""
        for kind in ("awq", "pack"):
            self.models(kind)
            for vram, schemes in (("2GB", {"BF16"}), ("200KB", {"BF16", "U8"})):
                self.ok("-q", *PLAIN, "--force", "--to", "auto", "--schemes", "nf4,16bit",
                        "--vram", vram, *ROOM, "packed", "o")
                out = mk.read_checkpoint(self.path("o"))
                found = {t[0] for n, t in out.items() if n.endswith("_proj.weight")}
                self.assertEqual(found, schemes, vram)
                self.ok("verify", "-q", "o", "--against", "packed")

    def test_validate(self):
        self.models("gptq")
        self.ok("-q", "--to", "nf4", "packed", "o")
        report = json.loads(self.ok("validate", "--json", "--device", "cpu", "o", "--against",
                                    "packed"))
        self.assertEqual(len(report["layers"]), 14)

    def test_shards(self):
        """A weight's tensors lie in several files."""
        for kind in self.FORMS:
            shutil.rmtree(self.path("packed"), ignore_errors=True)
            self.models(kind)
            for to in ("bf16", "nf4"):
                self.ok("-q", *PLAIN, "--force", "--to", to, "packed", "want-" + to)
            shutil.rmtree(self.path("packed"))
            self.models(kind, shard_bytes=12000)
            for to in ("bf16", "nf4"):
                self.ok("-q", *PLAIN, "--force", "--to", to, "packed", "o")
                self.assertEqual(mk.read_checkpoint(self.path("o")),
                                 mk.read_checkpoint(self.path("want-" + to)), (kind, to))

    @unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
    def test_continued(self):
        for kind in ("gptq", "pack"):
            shutil.rmtree(self.path("packed"), ignore_errors=True)
            self.models(kind, shard_bytes=12000)
            self.ok("-q", "--to", "nf4", "packed", "want")
            for call in ("write:5", "write:20"):
                form = ["-q", "--to", "nf4", "--threads", "1", "packed", "o"]
                r = self.run_qconv(*form, env=at_call(call, "/model", "kill -9 $PPID"))
                self.assertEqual(r.returncode, -signal.SIGKILL, r.stderr)
                self.ok(*form)
                self.assertEqual(tree(self.path("o")), tree(self.path("want")))
                shutil.rmtree(self.path("o"))
            shutil.rmtree(self.path("want"))

    def test_compressed_source(self):
        for kind in self.FORMS:
            self.models(kind)
            self.ok("-q", "--force", "--to", "keep", "packed", "m")
            for to in ("bf16", "int8"):
                self.ok("-q", *PLAIN, "--force", "--to", to, "packed", "want")
                self.ok("-q", *PLAIN, "--force", "--to", to, "m", "o")
                self.assertEqual(mk.read_checkpoint(self.path("o")),
                                 mk.read_checkpoint(self.path("want")))


if __name__ == "__main__":
    unittest.main()
