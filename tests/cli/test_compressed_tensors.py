"""--format compressed-tensors: every byte of its tensors against plain Python, config.json, what is
kept, what is refused, and that it is read back."""
import json
import math
import os
import random
import shutil
import struct
import unittest

from output_case import OutputCase, PLAIN, write_sealed, xxh3_128
from test_integers import Weight, awq, dense_words, gptq, i32, int_quantized, pack_quantized
import make_checkpoint as mk
import numbers_oracle as oracle

L = "model.layers.0."
M = L + "self_attn.q_proj."
Q, K, O, DOWN = (L + n + ".weight" for n in ("self_attn.q_proj", "self_attn.k_proj",
                                             "self_attn.o_proj", "mlp.down_proj"))
SCALE_DTYPE = {"F64": "F32", "F32": "F32", "F16": "F16", "BF16": "BF16"}


def integers(values, group, bits, dtype):
    """Codes and scales: one IEEE division, one rounding to the scale's dtype, one product."""
    half = 1 << bits - 1
    low, high, span = (-127, 127, 127.0) if bits == 8 else (-half, half - 1, half - 0.5)
    codes, scales = [], []
    for block in oracle.blocks(values, group):
        scale = oracle.round_to(dtype, oracle.f32(max(map(abs, block)) / span))
        scale = scale or (2.0 ** -24 if dtype == "F16" else 2.0 ** -126)
        inverse = oracle.f32(1.0 / scale)
        codes += [round(min(max(oracle.f32(x * inverse), low), high)) for x in block]
        scales.append(scale)
    return codes, scales


def packed(codes, shape, bits):
    rows = oracle.blocks([c + (1 << bits - 1) for c in codes], shape[1])
    rows = [dense_words(row, bits) for row in rows]
    return "I32", [shape[0], len(rows[0])], i32([w for row in rows for w in row])


class CompressedTensors(OutputCase):
    replaces = True

    def setUp(self):
        super().setUp()
        self.rng = random.Random(7)

    def weight(self, dtype, shape):
        values = [self.rng.gauss(0, 0.02) for _ in range(mk.numel(shape))]
        values[5:40:7] = [0.0, -0.0, 1.0, -3.5, 2.0 ** -20]
        values[64:128] = [0.0] * 64
        return dtype, shape, mk.encode(dtype, values)

    def check(self, source, out, bits, group, is_packed=True):
        dtype, shape, data = source
        scale_dtype = SCALE_DTYPE[dtype]
        group = group or shape[1]
        codes, scales = integers(oracle.floats(dtype, data), group, bits, scale_dtype)
        want = {Q + "_scale": (scale_dtype, [shape[0], shape[1] // group],
                               mk.encode(scale_dtype, scales))}
        if is_packed:
            want[Q + "_packed"] = packed(codes, shape, bits)
            want[Q + "_shape"] = "I64", [2], struct.pack("<2q", *shape)
        else:
            want[Q] = "I8", shape, struct.pack("%db" % len(codes), *codes)
        self.assertEqual(out, want)
        values = [oracle.f32(c * scales[i // group]) for i, c in enumerate(codes)]
        for to, back in (("bf16", "BF16"), ("fp16", "F16")):
            self.assertEqual(self.convert("--to", to, "o", "back"),
                             {Q: (back, shape, mk.encode(back, values))})

    def test_numbers(self):
        for form, bits, groups in ((("int4",), 4, (128, 64, 32, "channel")), (("int8",), 8, (0, "channel")),
                                   (("int8", "--activation-bits", "16"), 8, (0, 64))):
            for dtype in SCALE_DTYPE:
                for group in groups:
                    source = self.weight(dtype, [5, 256])
                    self.model({Q: source})
                    size = ["--block-size", str(group)] if group not in (0, 128) else []
                    out = self.convert("--to", *form, "--format", "compressed-tensors", *size,
                                       "--scale", "absmax", "m", "o")
                    self.check(source, out, bits, 0 if group == "channel" else group,
                               bits == 4 or len(form) > 1)
                    self.assertTrue(json.loads(self.ok("verify", "--json", "o"))["ok"])

    def test_widths(self):
        """All the others, also in rows whose last word has bits that no code uses, and in more than one piece."""
        for bits in (2, 3, 5, 6, 7):
            for group, cols in ((32, 96), (64, 192), (128, 256), ("channel", 256), ("channel", 101), ("channel", 2051)):
                source = self.weight(self.rng.choice(list(SCALE_DTYPE)), [5, cols])
                self.model({Q: source})
                out = self.convert("--to", "int%d" % bits, "--block-size", str(group), "--scale", "absmax", "m", "o")
                with self.subTest(bits=bits, group=group, cols=cols):
                    self.check(source, out, bits, 0 if group == "channel" else group)
                    for scale in ("absmax", "search"):
                        out = self.convert("--to", "int%d" % bits, "--block-size", str(group), "--scale", scale, "m", "o")
                        data, size = out[Q + "_packed"][2], out[Q + "_packed"][1][1] * 4
                        for row in oracle.blocks(data, size):  # no code uses the last bits of a row
                            self.assertEqual(int.from_bytes(row, "little") >> cols * bits, 0)
                        self.assertTrue(json.loads(self.ok("verify", "--json", "o", "--against", "m"))["ok"])

    def test_pieces(self):
        """Rows with gaps in many frames, and on one thread or two."""
        self.model({Q: self.weight("BF16", [3000, 231])})
        outs = []
        for threads in ("1", "2"):
            outs.append(self.convert("--to", "int5", "--block-size", "channel", "--threads", threads, "m", "o"))
            self.assertTrue(json.loads(self.ok("verify", "--json", "o", "--against", "m"))["ok"])
            shutil.rmtree(self.path("o"))
        self.assertEqual(outs[0], outs[1])
        self.assertEqual(outs[0][Q + "_packed"][1], [3000, -(-231 * 5 // 32)])

    def test_searched(self):
        """The default: what is read back has the error that the manifest says, less than absmax's,
        in every form."""
        source = self.weight("BF16", [24, 384])
        self.model({Q: source})
        x = oracle.floats(*source[::2])
        for form in (["int4"], ["int4", "--block-size", "32"], ["int4", "--block-size", "channel"], ["int8"],
                     ["int2"], ["int3", "--block-size", "channel"], ["int5"], ["int6", "--block-size", "64"],
                     ["int7", "--block-size", "channel"],
                     ["int8", "--activation-bits", "16"],
                     ["int8", "--activation-bits", "16", "--block-size", "128"]):
            errors = {}
            for scale in ("search", "absmax"):
                self.convert("--to", *form, "--format", "compressed-tensors", "--scale", scale, "m", "o")
                y = mk.decode("BF16", self.convert("--to", "bf16", "o", "back")[Q][2])
                errors[scale] = sum((a - b) ** 2 for a, b in zip(x, y)) / sum(a * a for a in x)
                told = [t for t in self.json_of("o", "qconv.json")["tensors"] if "rel_mse" in t][0]["rel_mse"]
                self.assertAlmostEqual(errors[scale] / told, 1, delta=0.1 if form[0] in ("int7", "int8") else 0.02)
            self.assertLess(errors["search"], errors["absmax"], form)

    def test_config(self):
        self.model({Q: self.weight("BF16", [4, 128]), DOWN: self.weight("BF16", [4, 100]),
                    "lm_head.weight": self.weight("BF16", [8, 64])})
        self.convert("--to", "int4", "m", "o")
        got = self.quantization("o")
        self.assertTrue(self.ok("--to", "int4", "--compress", "none", "m", "plain").endswith(
            "With vLLM:\n    vllm serve plain\n"))
        self.assertEqual(got["quant_method"], "compressed-tensors")
        self.assertEqual((got["format"], got["quantization_status"]), ("pack-quantized", "compressed"))
        self.assertEqual(got["config_groups"], {"group_0": {
            "format": "pack-quantized", "input_activations": None, "output_activations": None,
            "targets": ["Linear"], "weights": {
                "dynamic": False, "group_size": 128, "num_bits": 4, "strategy": "group",
                "symmetric": True, "type": "int"}}})
        for module in ("lm_head", DOWN[:-len(".weight")]):
            self.assertIn(module, got["ignore"])
        self.assertNotIn(Q[:-len(".weight")], got["ignore"])
        self.convert("--to", "int4", "--block-size", "channel", "m", "o")
        self.assertEqual(self.quantization("o")["format"], "pack-quantized")
        self.assertEqual(self.quantization("o")["config_groups"]["group_0"]["weights"], {
            "dynamic": False, "num_bits": 4, "strategy": "channel", "symmetric": True, "type": "int"})
        self.convert("--to", "int8", "--format", "compressed-tensors", "m", "o")
        got = self.quantization("o")
        self.assertEqual(got["format"], "int-quantized")
        self.assertEqual(got["config_groups"]["group_0"]["input_activations"], {
            "dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "int"})
        self.assertEqual(got["config_groups"]["group_0"]["weights"]["strategy"], "channel")

    def test_auto(self):
        """A mixture: each weight has its group in config.json, no fused group is split, and it is
        read back."""
        tensors = {"model.norm.weight": ("BF16", [256], mk.encode("BF16", [1.0] * 256))}
        for layer in range(2):
            for name, shape in (("self_attn.q_proj", [256, 256]), ("self_attn.k_proj", [128, 256]),
                                ("self_attn.v_proj", [128, 256]), ("self_attn.o_proj", [256, 256]),
                                ("mlp.gate_proj", [512, 256]), ("mlp.up_proj", [512, 256]),
                                ("mlp.down_proj", [256, 512])):
                tensors["model.layers.%d.%s.weight" % (layer, name)] = self.weight("BF16", shape)
        self.model(tensors, {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4,
                             "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 64,
                             "intermediate_size": 512})
        out = self.convert("--to", "auto", "--format", "compressed-tensors", "--vram", "1.5MB", "--incomplete",
                           "--cuda-context", "0", "--context", "8", "m", "o")
        report = json.loads(self.ok("inspect", "--json", "o"))
        config = self.quantization("o")
        form = {}
        for group in config["config_groups"].values():
            for module in group["targets"]:
                self.assertNotIn(module, form)
                form[module] = group["weights"]["num_bits"], group["weights"].get("group_size")
        self.assertGreater(len(set(form.values())), 1, config)
        for module, (bits, group) in form.items():
            weight = tensors[module + ".weight"]
            self.assertEqual(out[module + ".weight_packed"][1][1], weight[1][1] * bits // 32)
            self.assertEqual(out[module + ".weight_scale"][1][1],
                             weight[1][1] // group if group else 1)
        for layer in range(2):
            for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                          ("mlp.gate_proj", "mlp.up_proj")):
                self.assertEqual(len({form.get("model.layers.%d.%s" % (layer, n)) for n in names}), 1)
        back = self.convert("--to", "bf16", "--incomplete", "o", "back")
        for name, (dtype, shape, data) in tensors.items():
            x, y = mk.decode(dtype, data), mk.decode("BF16", back[name][2])
            self.assertEqual(back[name][1], shape)
            self.assertLess(sum((a - b) ** 2 for a, b in zip(x, y)), 0.02 * sum(a * a for a in x))
        self.assertTrue(json.loads(self.ok("verify", "--json", "o"))["ok"])
        self.assertEqual(report["manifest"]["to"], "auto")
        self.usage("--to", "auto", "--format", "compressed-tensors", "--incomplete", "--vram", "8GB", "--schemes",
                   "nf4", "m", "p", has="some of int2, int3, int4, int4-32, int5, int6, int7, int8 and 16bit")

    def test_kept(self):
        """Rows that are not whole groups or words stay as they are, and say why."""
        self.model({Q: self.weight("F16", [8, 128]), K: self.weight("F16", [4, 96]),
                    DOWN: self.weight("F16", [4, 33])})
        out = self.convert("--to", "int4", "m", "o")
        self.assertEqual(sorted(out), sorted([Q + "_packed", Q + "_scale", Q + "_shape", K, DOWN]))
        out = self.convert("--to", "int8", "--format", "compressed-tensors", "--activation-bits", "16", "m", "o")
        self.assertIn(K + "_packed", out)
        self.assertIn(DOWN, out)
        self.assertIn("has rows of no whole groups", self.ok("--to", "int4", "m", "--dry-run"))
        self.usage("--to", "int4", "--quantize", K, "m", "p", has="has rows of no whole groups")
        self.assert_nothing("p")
        out = self.convert("--to", "int4", "--block-size", "channel", "m", "o")
        self.assertIn(K + "_packed", out)
        self.assertIn(DOWN, out)
        self.assertIn("has rows of no whole words",
                      self.ok("--to", "int4", "--block-size", "channel", "m", "--dry-run"))
        self.assertIn(DOWN + "_packed", self.convert("--to", "int5", "--block-size", "channel", "m", "o"))

    def test_channel_is_read_back(self):
        """Rows of any length keep their scheme when they are read, and the plan says what is made."""
        for cols, bits in ((96, 4), (128, 4), (256, 4), (5008, 4), (101, 3), (440, 5), (128, 6)):
            to = "int%d" % bits
            self.model({Q: self.weight("BF16", [8, cols])})
            self.convert("--to", to, "--block-size", "channel", "m", "o")
            plan = json.loads(self.ok("plan", "--json", "--vram", "1GB", "--to", to, "--block-size", "channel", "m"))
            self.assertEqual(plan["weight_bytes"], sum(
                len(data) for _, _, data in mk.read_checkpoint(self.path("o")).values()))
            self.assertEqual(list(plan["schemes"]), ["w%da16-channel" % bits])
            self.assertTrue(json.loads(self.ok("verify", "--json", "o", "--against", "m"))["ok"])
            if cols % 128 == 0:
                self.replaces = False
                line = self.usage("--to", to, "m", "o", has="holds a finished output")
                self.assertIn("--block-size was 0 and is 128", line)
                self.replaces = True

    def test_beside_fp8(self):
        """A weight that stays in FP8 lies beside no integers."""
        self.model({Q: self.weight("BF16", [4, 128]), DOWN: ("F8_E4M3", [128, 128], bytes(128 * 128)),
                    DOWN + "_scale_inv": ("F32", [1, 1], mk.encode("F32", [1.0]))})
        line = self.fails(3, "--to", "int4", "--keep", DOWN, "m", "o", has="w4a16+fp8")
        self.assertIn("compressed-tensors holds nothing else", line)
        self.assert_nothing("o")

    def test_none_fits(self):
        self.model({Q: self.weight("F16", [4, 96])})
        self.fails(3, "--to", "int4", "m", "o", has="--block-size 32")
        self.convert("--to", "int4", "--block-size", "32", "m", "o")

    def test_usage(self):
        """Beside what test_usage.py has of options that go together."""
        self.model({Q: self.weight("F16", [4, 128])})
        for args, says in (
                (["--to", "int4", "--block-size", "row"], "expected a whole number from 32 to 4096"),
                (["--to", "nf4", "--block-size", "channel"], "needs --format compressed-tensors; "),
                (["--to", "int8", "--block-size", "channel"], "has a scale for each row without it"),
                (["--to", "bf16", "--format", "compressed-tensors"], "quantizes nothing")):
            self.usage(*args, "m", "o", has=says)


class Commands(OutputCase):
    """What every command makes of each form: of the output as it is, unpacked, and of the same file
    as another tool's, without a manifest."""

    CT = ["--format", "compressed-tensors"]
    FORMS = {  # scheme, bits, block size, format, options
        "int4": ("w4a16", 4, 128, "pack-quantized", ["--to", "int4"]),
        "int4-32": ("w4a16", 4, 32, "pack-quantized", ["--to", "int4", "--block-size", "32"]),
        "int5": ("w5a16", 5, 64, "pack-quantized", ["--to", "int5", "--block-size", "64"]),
        "int3": ("w3a16-channel", 3, None, "pack-quantized", ["--to", "int3", "--block-size", "channel"]),
        "w8a8": ("w8a8", 8, None, "int-quantized", ["--to", "int8", *CT]),
        "w8a16": ("w8a16-channel", 8, None, "pack-quantized",
                  ["--to", "int8", *CT, "--activation-bits", "16"]),
        "w8a16-64": ("w8a16", 8, 64, "pack-quantized",
                     ["--to", "int8", *CT, "--activation-bits", "16", "--block-size", "64"]),
    }
    SHAPES = {Q: [64, 128], K: [32, 128], DOWN: [128, 256]}
    replaces = True

    def setUp(self):
        super().setUp()
        rng = random.Random(11)
        self.source = {n: ("BF16", s, mk.random_bytes("BF16", s, rng)) for n, s in
                       self.SHAPES.items()}
        self.source["model.norm.weight"] = "BF16", [128], mk.encode("BF16", [1.0] * 128)
        self.model(self.source)

    def outputs(self, options, *more):
        """Names of folders: the output, compressed and not, unpacked, and as a stranger's."""
        self.ok("-q", *options, *more, "m", "z")
        self.ok("-q", *options, *more, *PLAIN, "m", "p")
        shutil.rmtree(self.path("u"), ignore_errors=True)
        self.ok("-q", "unpack", "z", "u")
        for name in ("z", "p", "u"):
            yield name
        os.remove(self.path("u", "qconv.json"))
        yield "u"
        yield "u/model.safetensors"

    def asked(self, *args):
        return json.loads(self.ok(*args, "--json"))

    def test_inspect(self):
        for scheme, bits, block, fmt, options in self.FORMS.values():
            name = Q if fmt == "int-quantized" else Q + "_packed"
            for out in self.outputs(options):
                report = self.asked("inspect", out)
                t = next(t for t in report["tensors"] if t["name"] == name)
                self.assertEqual([t[k] for k in ("scheme", "bits", "block_size", "format")],
                                 [scheme, bits, block, fmt], (out, t))
                self.assertEqual((t["logical_shape"], t["logical_dtype"]), ([64, 128], "BF16"))
                self.assertFalse(t["zero_points"] or t["act_order"] or t["static_activations"])
                sums = report["totals"]["by_scheme"]
                self.assertEqual(set(sums), {"plain", scheme})
                self.assertEqual(sums[scheme]["weights"], 128 * 64 + 128 * 32 + 128 * 256)
                text = self.ok("inspect", out)
                self.assertRegex(text, "  %s%s(  |\n)" % (scheme, " b%d" % block if block else ""))
                self.assertNotIn("double quantization", text)

    def test_verify(self):
        for scheme, _, block, _, options in self.FORMS.values():
            for scale in ("absmax", "search"):
                for out in self.outputs(options, "--scale", scale):
                    if not os.path.isdir(self.path(out)):
                        continue
                    answer = self.asked("verify", out, "--against", "m")
                    self.assertTrue(answer["ok"], answer)
                    self.assertEqual(answer["quantized"], 3)
                    for r in answer["rows"]:
                        if r["kind"] == "quantized":
                            self.assertEqual((r["scheme"], r["block_size"]), (scheme, block))
                            self.assertLessEqual(r["ratio"], 1.0 if scale == "absmax" else 1.03)
                    if os.path.exists(self.path(out, "qconv.json")):
                        self.assertTrue(self.asked("verify", out)["ok"])

    def test_validate(self):
        """The numbers are those of the weights that --to bf16 gives."""
        for scheme, _, block, _, options in self.FORMS.values():
            first = None
            for out in self.outputs(options):
                report = self.asked("validate", out, "--against", "m", "--device", "cpu")
                self.assertEqual((report["measured_layers"], report["not_compared"]), (3, []), out)
                rows = [{k: v for k, v in r.items() if k not in ("source", "times")}
                        for r in report["layers"]]
                self.assertEqual({(r["scheme"], r["block_size"]) for r in rows}, {(scheme, block)})
                self.assertTrue(all(r["kernel_error"] < 0.004 for r in rows), rows)
                first = first or rows
                self.assertEqual(rows, first, out)
            decoded = self.decoded("p")
            for row in first:
                name = row["name"].replace("_packed", "")
                x, y = mk.decode("BF16", self.source[name][2]), decoded[name]
                error = (sum((a - b) ** 2 for a, b in zip(x, y)) / sum(a * a for a in x)) ** 0.5
                self.assertAlmostEqual(row["weight_error"] / error, 1, delta=1e-5)

    def codes(self, out):
        """The codes of each weight."""
        found = {}
        for name, (dtype, _, data) in mk.read_checkpoint(self.path(out)).items():
            if dtype == "I8":
                found[name] = struct.unpack("%db" % len(data), data)
            elif name.endswith("_packed"):
                weight = name[:-len("_packed")]
                n = mk.numel(self.SHAPES[weight])
                bits, stream = len(data) * 8 // n, int.from_bytes(data, "little")
                found[weight] = [(stream >> bits * i & (1 << bits) - 1) - (1 << bits - 1) for i in range(n)]
        return found

    def decoded(self, out):
        tensors = mk.read_checkpoint(self.path(out))
        values = {}
        for name, codes in self.codes(out).items():
            scales = mk.decode(*tensors[name + "_scale"][::2])
            group = len(codes) // len(scales)
            values[name] = [c * scales[i // group] for i, c in enumerate(codes)]
        return values


class Planted(OutputCase):
    """verify --against finds faults in outputs of every form whose digests are right."""

    replaces = True
    KEPT = "model.norm.weight"

    def setUp(self):
        super().setUp()
        rng = random.Random(12)
        self.source = {n: ("BF16", s, mk.random_bytes("BF16", s, rng)) for n, s in
                       {Q: [64, 128], DOWN: [128, 256], O: [64, 128]}.items()}
        self.source[self.KEPT] = "BF16", [128], mk.encode("BF16", [1.0] * 128)
        self.model(self.source)

    def seal(self, tensors):
        """Writes o anew with these tensors, and a manifest whose digests and places are theirs."""
        path = self.path("o", "model.safetensors")
        mk.write_safetensors(path, tensors)
        with open(path, "rb") as f:
            data = f.read()
        size = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:size])
        m = json.loads(self.manifest)
        m["shards"][0].update(content_bytes=len(data), header_bytes=size,
                              header_xxh3_128=xxh3_128(data[:size]))
        m["tensors"] = [t for t in m["tensors"] if t["name"] in tensors]
        for t in m["tensors"]:
            begin, end = header[t["name"]]["data_offsets"]
            t.update(begin=begin, end=end, piece_bytes=max(end - begin, 1),
                     shape=header[t["name"]]["shape"],
                     xxh3_128=xxh3_128(data[size + begin:size + end]))
        m["tensors"].sort(key=lambda t: t["begin"])
        write_sealed(self.path("o", "qconv.json"), m)

    def scaled(self, scale, change):
        dtype, shape, data = scale
        values = mk.decode(dtype, data)
        values[3] = change(values[3])
        return dtype, shape, mk.encode(dtype, values)

    def faults(self, good):
        """(the tensors with a fault, exit code, what the line has)"""
        codes = Q + "_packed" if Q + "_packed" in good else Q
        scale = Q + "_scale"
        dtype, shape, data = good[codes]

        def with_bytes(change):
            body = bytearray(data)
            change(body)
            return {codes: (dtype, shape, bytes(body))}

        def swap(body):
            body[:] = bytes(b >> 4 | (b & 15) << 4 for b in body)

        # Another code than the nearest one is a fault unless the weight lies half way between them. Every eighth code
        # begins with a byte.
        weights = mk.decode("BF16", self.source[Q][2])
        scales = mk.decode(*good[scale][::2])
        most = (1 << self.bits) - 1
        at = next(i for i in range(104, len(weights), 8)
                  if data[i * self.bits // 8] & most < most - 1 and data[i * self.bits // 8] != 127 and
                  abs(weights[i] / scales[i * len(scales) // len(weights)] % 1 - 0.5) > 0.2)

        def one_more(body):
            body[at * self.bits // 8] += 1

        yield {scale: self.scaled(good[scale], lambda s: s * 1.1)}, 4, ["codes are not"]
        yield {scale: self.scaled(good[scale], lambda s: 0.0)}, 4, ["codes are not"]
        yield {scale: self.scaled(good[scale], lambda s: math.nan)}, 4, ["is not finite"]
        yield {scale: self.scaled(good[scale], lambda s: math.inf)}, 4, ["is not finite"]
        yield {scale: None}, 4, ["no weight_scale"]
        yield with_bytes(one_more), 4, ["1 of its 8192 codes are not", "row "]
        yield ({n: good[n.replace("q_proj", "o_proj")] for n in (codes, scale)}, 4,
               ["other values", "'%s' of MODEL fits instead" % O])
        if codes != Q:
            if self.bits == 4:
                yield with_bytes(swap), 4, ["other values"]
            for rows, cols in ((65, 128), (64, 136), (128, 64)):
                yield ({Q + "_shape": ("I64", [2], struct.pack("<2q", rows, cols))}, 3,
                       ["weight_shape says [%d, %d]" % (rows, cols)])
            short = {Q + "_shape": ("I64", [2], struct.pack("<2q", 64, 127))}
            if good[scale][1][1] == 1:
                # A shorter row of these widths takes as many words, so that only MODEL shows the fault.
                yield short, 4, ["it is [64, 127]" if self.bits % 4 == 0 else "[64, 127]"]
            else:
                yield short, 3, ["weight_scale", "divide the weight's 127 columns"]

    def test_found(self):
        for _, self.bits, _, _, options in Commands.FORMS.values():
            for scale in ("absmax", "search"):
                good = self.convert(*options, "--scale", scale, "m", "o")
                with open(self.path("o", "qconv.json"), encoding="utf-8") as f:
                    self.manifest = f.read()
                self.seal(good)
                self.ok("verify", "-q", "o", "--against", "m")
                for number, (bad, code, says) in enumerate(self.faults(good)):
                    with self.subTest(options=options, scale=scale, number=number, says=says):
                        self.seal({n: t for n, t in {**good, **bad}.items() if t})
                        if code == 4:
                            if says[0] in ("no weight_scale", "it is [64, 127]"):  # which needs no MODEL
                                self.fails(4, "verify", "-q", "o", has="the quantized weights: tensor '")
                            else:
                                self.ok("verify", "-q", "o")
                        self.fails(code, "verify", "-q", "o", "--against", "m",
                                   has=[Q[:-len("weight")], *says])
                        os.rename(self.path("o", "qconv.json"), self.path("sealed"))
                        self.fails(code, "verify", "-q", "o", "--against", "m",
                                   has=[Q[:-len("weight")], *says])
                        os.rename(self.path("sealed"), self.path("o", "qconv.json"))
                shutil.rmtree(self.path("o"))


class Others(OutputCase):
    """What verify and validate make of integers that other tools made of a model."""

    replaces = True

    def others(self, tensors, w, config=None):
        """m: the weights; o: what another tool made of them."""
        norm = {"model.norm.weight": ("BF16", [64], bytes(128))}
        self.model({Q: ("F32", w.shape, mk.encode("F32", w.values())), **norm}, name="m")
        self.model({**tensors, **norm}, {"model_type": "llama", "torch_dtype": "float32",
                                         "quantization_config": config} if config else None,
                   name="o")

    def test_compared(self):
        """A scale per row in 4 bits, which no --to makes, is compared like the others."""
        for bits, groups, form, name in ((4, 1, pack_quantized, "w4a16-channel"),
                                         (4, 2, pack_quantized, "w4a16"),
                                         (8, 1, pack_quantized, "w8a16-channel"),
                                         (8, 1, int_quantized, "w8a8")):
            w = Weight(random.Random(3), 64, 128, bits, groups, "F32", symmetric=True)
            for row in w.codes:
                row[:] = [max(c, 1) for c in row] if bits == 8 else row  # -128 is no code of ours
            self.others(form(w, M, symmetric=True), w)
            answer = json.loads(self.ok("verify", "--json", "o", "--against", "m"))
            row = next(r for r in answer["rows"] if r["kind"] == "quantized")
            self.assertEqual((row["scheme"], row["block_size"], row["error"]),
                             (name, 64 if groups > 1 else None, 0))
            layer, = json.loads(self.ok("validate", "--json", "o", "--against", "m"))["layers"]
            self.assertEqual((layer["scheme"], layer["weight_error"]), (name, 0))
            # Its scales show to what it cast the model first.
            wide = Weight(random.Random(4), 64, 128, bits, groups, "BF16", symmetric=True)
            rng = random.Random(9)
            x = [rng.gauss(0, 0.02) for _ in range(64 * 128)]
            codes, scales = integers(mk.decode("BF16", mk.encode("BF16", x)), 128 // groups, bits,
                                     "BF16")
            wide.codes = oracle.blocks([c + (1 << bits - 1) for c in codes], 128)
            wide.scales = oracle.blocks(scales, groups)
            wide.scale_data = mk.encode("BF16", scales)
            self.others(form(wide, M, symmetric=True), wide)
            self.model({Q: ("F32", wide.shape, mk.encode("F32", x)),
                        "model.norm.weight": ("BF16", [64], bytes(128))}, name="m")
            answer = json.loads(self.ok("verify", "--json", "o", "--against", "m"))
            self.assertEqual(next(r for r in answer["rows"] if r["kind"] == "quantized")["ratio"], 1)

    def test_not_compared(self):
        for w, form, more, config, says in (
                (Weight(random.Random(3), 64, 128, 4, 2), pack_quantized, {}, None,
                 "w4a16 with zero points"),
                (Weight(random.Random(3), 64, 128, 4, 2, symmetric=True, shuffled=True),
                 pack_quantized, {"symmetric": True, "shuffled": True}, None,
                 "w4a16 with act-order"),
                (Weight(random.Random(3), 64, 128, 8, 1, single=True, symmetric=True), int_quantized,
                 {"symmetric": True, "single": True}, None, "w8a8 with one scale"),
                (Weight(random.Random(3), 64, 63, 4, 3, symmetric=True), pack_quantized,
                 {"symmetric": True}, None, "w4a16 in rows that do not fill whole words"),
                (Weight(random.Random(3), 64, 128, 4, 2), gptq, {},
                 {"quant_method": "gptq", "bits": 4}, "gptq with act-order"),
                (Weight(random.Random(3), 64, 128, 4, 2), awq, {},
                 {"quant_method": "awq", "bits": 4}, "awq with zero points")):
            self.others(form(w, M, **more), w, config)
            self.fails(3, "verify", "-q", "o", "--against", "m",
                       has=[M, says, "qconv eval --against"])
            self.fails(3, "validate", "o", "--against", "m", has="without zero points or act-order")
            self.ok("inspect", "o")


if __name__ == "__main__":
    unittest.main()
