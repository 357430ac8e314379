"""Source forms of weights: FP8 with its scales, MXFP4, fused experts, multi-token prediction, and
checkpoints that other tools packed. Values come from the specifications, in plain Python."""
import json
import random
import shutil
import struct
import unittest

from output_case import OutputCase, PLAIN, tree
from qconv_case import SANITIZED
import make_checkpoint as mk
import numbers_oracle as oracle

SEED = 20251121
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
L = "model.layers.0."
Q = L + "self_attn.q_proj.weight"
E = L + "mlp.experts."


def small_float(code, man_bits, bias):
    exponent, mantissa = (code & 0x7F) >> man_bits, code & ((1 << man_bits) - 1)
    v = (mantissa * 2.0 ** (1 - bias - man_bits) if exponent == 0 else
         (1 + mantissa / 2.0 ** man_bits) * 2.0 ** (exponent - bias))
    return -v if code & 0x80 else v


def f8(dtype, code):
    return small_float(code, 3, 7) if dtype == "F8_E4M3" else small_float(code, 2, 15)


def finite_codes(rng, dtype, n):
    top = 0x7E if dtype == "F8_E4M3" else 0x7B
    return bytes(rng.randint(0, top) | rng.choice((0, 0x80)) for _ in range(n))


def fp8_values(dtype, codes, shape, scales, tile):
    """Flat list of floats: code times the scale of its tile, rounded to float."""
    across = -(-shape[1] // tile[1])
    out = []
    for i, c in enumerate(codes):
        r, k = divmod(i, shape[1])
        out.append(oracle.f32(f8(dtype, c) * scales[r // tile[0] * across + k // tile[1]]))
    return out


def fp8(rng, name, shape, tile, dtype="F8_E4M3", scale_dtype="F32"):
    """A block-scaled weight: its tensors, its values."""
    counts = [-(-shape[0] // tile[0]), -(-shape[1] // tile[1])]
    codes = finite_codes(rng, dtype, mk.numel(shape))
    data = mk.encode(scale_dtype, [rng.uniform(1e-4, 3e-4) for _ in range(mk.numel(counts))])
    values = fp8_values(dtype, codes, shape, mk.decode(scale_dtype, data), tile)
    return {name: (dtype, shape, codes), name + "_scale_inv": (scale_dtype, counts, data)}, values


def mxfp4(rng, name, experts, rows, cols):
    """-> tensors, values [experts, out, in] flat"""
    groups = cols // 32
    blocks = rng.randbytes(experts * rows * groups * 16)
    scales = bytes(rng.randint(112, 124) for _ in range(experts * rows * groups))
    values = []
    for g, s in enumerate(scales):
        for b in blocks[16 * g:16 * g + 16]:
            for nibble in (b & 15, b >> 4):
                v = FP4[nibble & 7] * 2.0 ** (s - 127)
                values.append(-v if nibble & 8 else v)
    return {name + "_blocks": ("U8", [experts, rows, groups, 16], blocks),
            name + "_scales": ("U8", [experts, rows, groups], scales)}, values


def transposed(values, experts, rows, cols):
    n = rows * cols
    return [values[e * n + r * cols + c]
            for e in range(experts) for c in range(cols) for r in range(rows)]


DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1,
            "n_routed_experts": 2, "torch_dtype": "bfloat16",
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                                    "weight_block_size": [128, 128]}}


class Forms(OutputCase):
    scale = "absmax"

    def setUp(self):
        super().setUp()
        self.rng = random.Random(SEED)

    def source_digests(self, out):
        """Source tensor -> digest, from the manifest. Of one piece, if tensors are small."""
        tensors = self.json_of(out, "qconv.json")["tensors"]
        return {t["source"]["name"]: t["source"]["xxh3_128"] for t in tensors if "source" in t}

    def check_source_digests(self, *outs):
        """Whatever became of a tensor, its digest is over the stored bytes."""
        kept = self.source_digests("kept")
        for out in outs:
            for name, digest in self.source_digests(out).items():
                self.assertEqual(digest, kept[name], (out, name))

    def check_blocks_of(self, out, name, values, shape, to):
        """Codes of a weight that was quantized from `values`."""
        if to == "nf4":
            codes, scales = oracle.nf4(values, 64)
            self.assertEqual(out[name], ("U8", [len(codes), 1], codes), name)
            state = oracle.state_of(out[name + ".quant_state.bitsandbytes__nf4"])
            self.assertEqual((state["shape"], state["dtype"]), (shape, "bfloat16"))
            self.assertEqual(len(out[name + ".absmax"][2]), len(scales))
            return
        codes, scb = oracle.int8_rows(values, shape[-1])
        stem = name[:-6] if name.endswith("weight") else name + "."
        self.assertEqual(out[name], ("I8", shape if len(shape) == 2 else [len(codes), 1], codes),
                         name)
        self.assertEqual(out[stem + "SCB"], ("F32", shape[:-1], mk.encode("F32", scb)))
        self.assertEqual(out[stem + "weight_format"], ("U8", [], b"\0"))


class Fp8(Forms):
    replaces = True
    SHAPE = [136, 272]  # partial blocks on both sides

    def model_of(self, tensors, config=DEEPSEEK):
        rest = {"model.norm.weight": ("BF16", [64], bytes(128)),
                L + "mlp.gate.e_score_correction_bias": ("F32", [2], bytes(8))}
        return self.model({**tensors, **rest}, config)

    def check(self, tensors, values, config=DEEPSEEK):
        self.model_of(tensors, config)
        for to in ("nf4", "int8"):
            out = self.convert("--to", to, "m", to)
            self.assertEqual(json.loads(self.ok("verify", "--json", to))["ok"], True)
            self.assertFalse([n for n in out if "scale" in n])
            self.check_blocks_of(out, Q, values, self.SHAPE, to)
            self.assertEqual(self.quantization(to)["quant_method"], "bitsandbytes")
        whole = json.loads(self.ok("inspect", "--json", "m"))["totals"]["tensor_bytes"]
        for to in ("nf4", "bf16"):
            report = json.loads(self.ok("--json", "--force", "--to", to, "m", "report"))
            self.assertEqual(report["bytes_in"], whole)
            self.assertEqual(sum(s["bytes_in"] for s in report["schemes"].values()), whole)
        codes, scales = oracle.nf4(values, 64)
        self.convert("--to", "nf4", "--no-double-quant", "m", "plain")
        self.check_manifest("plain", values, oracle.nf4_values(codes, scales, 64, len(values),
                                                               "F32"))
        codes, scb = oracle.int8_rows(values, self.SHAPE[1])
        self.check_manifest("int8", values, oracle.int8_row_values(
            struct.unpack("%db" % len(codes), codes), scb, self.SHAPE[1], "F32"))
        for to, dtype in (("bf16", "BF16"), ("fp16", "F16")):
            out = self.convert("--to", to, "m", to)
            self.assertEqual(out[Q], (dtype, self.SHAPE, mk.encode(dtype, values)))
            self.assertFalse([n for n in out if "scale" in n])
            self.assertNotIn("quantization_config", self.json_of(to, "config.json"))
        self.convert("--to", "keep", "m", "kept")
        self.check_source_digests("nf4", "int8", "bf16", "fp16")

    def check_manifest(self, out, values, back):
        """The errors in the manifest are those against the decoded weight."""
        t = [t for t in self.json_of(out, "qconv.json")["tensors"] if t["name"] == Q][0]
        self.assertTrue(t["source"]["dtype"].startswith("F8_"), t["source"])
        errors = [abs(a - b) for a, b in zip(values, back)]
        self.assertEqual(t["max_err"], max(errors))
        self.assertEqual(t["max_err_index"], errors.index(max(errors)))
        mse = sum(e * e for e in errors) / sum(v * v for v in values)
        self.assertAlmostEqual(t["rel_mse"], mse, delta=1e-3 * mse)

    def test_blocks(self):
        tensors, values = fp8(self.rng, Q, self.SHAPE, [128, 128])
        self.check(tensors, values)

    def test_other_blocks_types_and_dtypes(self):
        config = json.loads(json.dumps(DEEPSEEK))
        config["quantization_config"]["weight_block_size"] = [64, 32]
        tensors, values = fp8(self.rng, Q, self.SHAPE, [64, 32], "F8_E5M2", "BF16")
        self.check(tensors, values, config)

    def test_one_scale_and_one_per_row(self):
        rows, cols = self.SHAPE
        for shape, n in (([1], 1), ([], 1), ([rows, 1], rows), ([rows], rows)):
            data = mk.encode("F32", [self.rng.uniform(1e-4, 3e-4) for _ in range(n)])
            codes = finite_codes(self.rng, "F8_E4M3", mk.numel(self.SHAPE))
            values = fp8_values("F8_E4M3", codes, self.SHAPE, mk.decode("F32", data),
                                [rows if n == 1 else 1, cols])
            config = {"model_type": "llama",
                      "quantization_config": {"quant_method": "compressed-tensors"}}
            self.check({Q: ("F8_E4M3", self.SHAPE, codes), Q + "_scale": ("F32", shape, data),
                        L + "self_attn.q_proj.input_scale": ("F32", [1], bytes(4))},
                       values, config)

    def test_blocks_of_compressed_tensors(self):
        """weight_scale [ceil(out/b), ceil(in/c)], b and c as config.json has them."""
        for block in ([128, 128], [64, 32]):
            tensors, values = fp8(self.rng, Q, self.SHAPE, block)
            tensors = {n.replace("_scale_inv", "_scale"): t for n, t in tensors.items()}
            weights = {"num_bits": 8, "type": "float", "strategy": "block"}
            if block != [128, 128]:
                weights["block_structure"] = block
            self.check(tensors, values, {"model_type": "llama", "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}})

    def test_plain_cast(self):
        codes = finite_codes(self.rng, "F8_E5M2", mk.numel(self.SHAPE))
        values = [f8("F8_E5M2", c) for c in codes]
        self.model({Q: ("F8_E5M2", self.SHAPE, codes)})
        out = self.convert("--to", "bf16", "m", "o")
        self.assertEqual(out[Q][2], mk.encode("BF16", values))

    def test_many_steps(self):
        """Several steps; some threads; compressed."""
        shape = [700, 1300]
        tensors, values = fp8(self.rng, Q, shape, [128, 128])
        self.model_of(tensors)
        out = self.convert("--to", "nf4", "m", "o")
        self.assertEqual(out[Q][2], oracle.nf4(values, 64)[0])
        self.ok("-q", "--to", "nf4", "--threads", "3", "m", "z")
        self.ok("-q", "unpack", "z", "u")
        self.assertEqual(mk.read_checkpoint(self.path("u")), out)

    def test_keep(self):
        """--keep holds weight and scales together, bit for bit; the others are converted."""
        one, _ = fp8(self.rng, Q, self.SHAPE, [128, 128])
        other = Q.replace("q_proj", "o_proj")
        two, _ = fp8(self.rng, other, self.SHAPE, [128, 128])
        self.model_of({**one, **two})
        for to in ("nf4", "int8", "bf16"):
            out = self.convert("--to", to, "--keep", "*q_proj.weight", "m", to)
            for name, t in one.items():
                self.assertEqual(out[name], t, (to, name))
            self.assertNotIn(other + "_scale_inv", out)
            self.assertNotEqual(out[other][0], "F8_E4M3")
        self.assertEqual(self.quantization("bf16"), {
            **DEEPSEEK["quantization_config"],
            "modules_to_not_convert": ["classifier", "lm_head", other[:-len(".weight")],
                                       "qa_outputs", "score"]})
        for to in ("nf4", "int8"):
            q = self.quantization(to)
            self.assertEqual((q["quant_method"], q["quant_type"]), ("qconv", to + "+fp8"))
            self.assertEqual(q["weight_block_size"], [128, 128])
            self.assertIn(L + "self_attn.q_proj", q["modules_to_not_convert"])
            back = self.convert("--to", "bf16", to, to + "-back")
            self.assertEqual(back[Q], self.convert("--to", "bf16", "m", to + "-all")[Q])
            self.assertEqual(back[other][:2], ("BF16", self.SHAPE))

    def test_not_finite(self):
        tensors, _ = fp8(self.rng, Q, self.SHAPE, [128, 128])
        codes = bytearray(tensors[Q][2])
        codes[135 * 272 + 271] = 0xFF
        tensors[Q] = (tensors[Q][0], self.SHAPE, bytes(codes))
        self.model_of(tensors)
        for to in ("nf4", "int8", "bf16"):
            self.fails(3, "-q", "--to", to, "m", "o", has=[Q, "row 135, column 271", "--keep"])
            self.assert_nothing("o")

    def test_scales_that_do_not_fit(self):
        tensors, _ = fp8(self.rng, Q, self.SHAPE, [128, 128])
        cases = [(("F32", [2, 2], bytes(16)), "need scales [2, 3]"),
                 (("F32", [6], bytes(24)), "need scales [2, 3]"),
                 (("I32", [2, 3], bytes(24)), "F32, BF16, F16 or F8_E8M0")]
        for scales, says in cases:
            self.model_of({**tensors, Q + "_scale_inv": scales})
            self.fails(3, "--to", "nf4", "m", "o", has=[Q + "_scale_inv", says])
        codes = tensors[Q]
        self.model_of({Q: codes, Q + "_scale": ("F32", [136, 4], bytes(2176))})
        self.fails(3, "--to", "nf4", "m", "o", has=[Q + "_scale", "one for each"])
        self.model({Q: codes, L + "self_attn.q_proj.other_scale": ("F32", [1], bytes(4))})
        self.fails(3, "--to", "nf4", "m", "o", has=[Q, "no weight_scale_inv or weight_scale"])


class Mtp(Forms):
    def tensors(self):
        t, _ = fp8(self.rng, Q, [128, 128], [128, 128])
        m, _ = fp8(self.rng, "model.layers.1.eh_proj.weight", [128, 256], [128, 128])
        m.update({"model.layers.1.embed_tokens.weight": ("BF16", [32, 128], bytes(8192)),
                  "model.layers.1.enorm.weight": ("BF16", [128], bytes(256)),
                  "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", [2], bytes(8))})
        t["model.embed_tokens.weight"] = ("BF16", [32, 128], bytes(8192))
        return t, m

    def test_dropped(self):
        t, m = self.tensors()
        self.model({**t, **m}, DEEPSEEK)
        self.model(t, DEEPSEEK, name="without")
        for to in ("nf4", "int8", "bf16", "keep"):
            out = self.convert("--to", to, "--drop-mtp", "m", "d-" + to)
            self.assertEqual(out, self.convert("--to", to, "without", "w-" + to), to)
            self.assertEqual(self.json_of("d-" + to, "config.json")["num_nextn_predict_layers"], 0)
            self.assertTrue(json.loads(self.ok("verify", "--json", "d-" + to))["ok"])
        self.fails(2, "--to", "nf4", "--drop-mtp", "without", "o", has="--drop-mtp")

    def test_dropped_by_name(self):
        """Qwen3.5's mtp, beside a text_config, and ERNIE's mtp_block; "mtpx" is a word of another meaning."""
        linear = ("BF16", [64, 64], mk.random_bytes("BF16", [64, 64], self.rng))
        more = {n: linear for n in ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.mtp_block.0.q_proj.weight")}
        t = {"model.language_model.layers.0.mlp.up_proj.weight": linear, "mtpx.up_proj.weight": linear}
        text = {"num_hidden_layers": 1, "mtp_num_hidden_layers": 1, "hidden_size": 64}
        self.model({**t, **more}, {"model_type": "qwen3_5", "text_config": text})
        self.model(t, {"model_type": "qwen3_5", "text_config": text}, name="without")
        out = self.convert("--to", "nf4", "--drop-mtp", "m", "d")
        self.assertEqual(out, self.convert("--to", "nf4", "without", "w"))
        self.assertEqual(self.json_of("d", "config.json")["text_config"], {**text, "mtp_num_hidden_layers": 0})
        said = json.loads(self.ok("verify", "d", "--against", "m", "--json"))
        self.assertEqual({t["name"] for t in said["missing"]}, set(more))
        self.assertEqual(len(self.convert("--to", "bf16", "m", "b")), 5)


class Parts(Forms):
    """The table of docs/models.md: vision and audio towers, projectors, draft models."""
    PARTS = {
        "qwen3_5": ("model.visual.blocks.0.attn.qkv model.visual.merger.linear_fc1 mtp.fc mtp.layers.0.mlp.up_proj",
                    "model.visual.pos_embed model.visual.patch_embed.proj/5 mtp.norm/1"),
        "gemma3": ("model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
                   "model.vision_tower.vision_model.embeddings.patch_embedding/4 "
                   "model.vision_tower.vision_model.embeddings.position_embedding"),
        "llama4": ("vision_model.patch_embedding.linear vision_model.model.layers.0.self_attn.q_proj "
                   "multi_modal_projector.linear_1", "language_model.model.layers.0.feed_forward.router"),
        "mistral3": ("vision_tower.transformer.layers.0.attention.q_proj "
                     "multi_modal_projector.patch_merger.merging_layer", "vision_tower.patch_conv/4"),
        "whisper": ("model.encoder.layers.0.self_attn.q_proj model.decoder.layers.0.encoder_attn.q_proj",
                    "model.encoder.conv1/3 model.encoder.embed_positions"),
        "qwen2_5_omni": ("thinker.audio_tower.layers.0.self_attn.q_proj thinker.audio_tower.proj",
                         "thinker.audio_tower.conv1/3"),
        "llama": ("medusa_heads.0.0.linear fc midlayer.mlp.up_proj", "medusa_heads.0.1 lm_head d2t/1"),
    }

    def test_table(self):
        for kind, (quantized, kept) in self.PARTS.items():
            want, t = {}, {}
            for names, scheme in ((quantized, "nf4"), (kept, "keep")):
                for name, _, dims in (n.partition("/") for n in names.split()):
                    rows = 96 if scheme == "keep" else 64  # 96: as many as the vocabulary has
                    shape = [rows, 64] if not dims else [64] + [4] * (int(dims) - 1)
                    t[name + ".weight"] = ("BF16", shape, mk.random_bytes("BF16", shape, self.rng))
                    want[name + ".weight"] = scheme
            self.model(t, {"model_type": kind, "vocab_size": 96 if kind == "llama" else 100})
            self.ok("-q", "--to", "nf4", *PLAIN, "--force", "m", "o")
            self.assertEqual({t["name"]: t["scheme"] for t in self.json_of("o", "qconv.json")["tensors"] if t["name"] in want},
                             want, kind)


class Mxfp4(Forms):
    replaces = True
    CONFIG = {"model_type": "gpt_oss", "num_local_experts": 3,
              "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    UP, DOWN = E + "gate_up_proj", E + "down_proj"

    def make(self, config=None, experts=3):
        up, up_values = mxfp4(self.rng, self.UP, experts, 96, 64)
        down, down_values = mxfp4(self.rng, self.DOWN, experts, 64, 96)
        self.source = {**up, **down,
                       Q: ("BF16", [64, 64], mk.random_bytes("BF16", [64, 64], self.rng)),
                       self.UP + "_bias": ("BF16", [experts, 96], bytes(2 * experts * 96))}
        self.values = {self.UP: (up_values, [experts, 96, 64]),
                       self.DOWN: (down_values, [experts, 64, 96])}
        self.model(self.source, config or self.CONFIG)

    def test_passed_through(self):
        self.make()
        for to in ("nf4", "int8", "keep"):
            out = self.convert("--to", to, "m", to)
            for name, t in self.source.items():
                if name != Q:
                    self.assertEqual(out[name], t)

    def test_beside_quantized_ones(self):
        """Codes without the weight's shape stop loaders; qconv reads rows from the scales."""
        self.make()
        values = mk.decode("BF16", self.source[Q][2])
        codes, scb = oracle.int8_rows(values, 64)
        self.assertIn("int8+mxfp4", self.warned("--to", "int8", *PLAIN, "m", "o"))
        out = mk.read_checkpoint(self.path("o"))
        self.assertEqual(out[Q], ("I8", [4096, 1], codes))
        q = self.quantization("o")
        self.assertEqual((q["quant_method"], q["quant_type"]), ("qconv", "int8+mxfp4"))
        back = self.convert("--to", "bf16", "o", "b")
        want = oracle.int8_row_values(struct.unpack("4096b", codes), scb, 64, "BF16")
        self.assertEqual(back[Q], ("BF16", [64, 64], mk.encode("BF16", want)))
        self.assertEqual(back[self.UP], self.convert("--to", "bf16", "m", "all")[self.UP])
        shown = {t["name"]: t for t in json.loads(self.ok("inspect", "--json", "o"))["tensors"]}
        self.assertEqual((shown[Q]["scheme"], shown[Q]["logical_shape"]), ("int8", [64, 64]))

    def test_experts_that_stay_packed(self):
        """Decoded experts are named as plain; half a module cannot be."""
        self.make()
        two = {n.replace("layers.0", "layers.1"): t for n, t in self.source.items()}
        self.model({**self.source, **two}, self.CONFIG)
        for keep, want in (("*layers.0*", [self.UP.replace("0", "1")[:-len(".gate_up_proj")]]),
                           ("*gate_up*", None)):
            out = self.convert("--to", "bf16", "--keep", keep, "m", "o")
            self.assertIn(self.UP + "_blocks", out)
            self.assertNotIn(self.DOWN.replace("0", "1") + "_blocks", out)
            q = self.quantization("o")
            self.assertEqual(q["modules_to_not_convert"], ["lm_head"] + (want or []))

    def test_requantized(self):
        self.make()
        for to in ("nf4", "int8"):
            out = self.convert("--to", to, "--requantize", "m", to)
            self.assertFalse([n for n in out if n.endswith("_blocks") or n.endswith("_scales")])
            for name, (values, shape) in self.values.items():
                self.check_blocks_of(out, name, values, shape, to)
            q = self.quantization(to)
            self.assertEqual((q["quant_method"], q["quant_type"]), ("qconv", to))
            self.assertTrue(json.loads(self.ok("verify", "--json", to))["ok"])
            self.ok("-q", "--to", to, "--requantize", "m", to + "-z")
            self.ok("-q", "unpack", to + "-z", to + "-u")
            self.assertEqual(mk.read_checkpoint(self.path(to + "-u")), out)
        self.convert("--to", "keep", "m", "kept")
        self.convert("--to", "bf16", "m", "bf16")
        self.check_source_digests("nf4", "int8", "bf16")

    def test_bf16(self):
        """As transformers has them in 16 bit: [experts, in, out]."""
        self.make()
        for to, dtype in (("bf16", "BF16"), ("fp16", "F16")):
            out = self.convert("--to", to, "m", to)
            for name, (values, shape) in self.values.items():
                e, rows, cols = shape
                want = mk.encode(dtype, transposed(values, e, rows, cols))
                self.assertEqual(out[name], (dtype, [e, cols, rows], want))
            self.assertNotIn("quantization_config", self.json_of(to, "config.json"))

    def test_round_trip(self):
        """Requantized and back: the layout of transformers again, the values of the codes."""
        self.make()
        for form, values_of in (
                (["--to", "nf4", "--no-double-quant"], self.nf4_back),
                (["--to", "int8"], self.int8_back),
                (["--to", "int8", "--block-size", "32", "--no-double-quant"], self.block_back)):
            self.convert(*form, "--requantize", "m", "q")
            out = self.convert("--to", "bf16", "q", "b")
            for name, (values, shape) in self.values.items():
                e, rows, cols = shape
                want = transposed(values_of(values, cols), e, rows, cols)
                self.assertEqual(out[name], ("BF16", [e, cols, rows], mk.encode("BF16", want)),
                                 (form, name))
            for folder in ("q", "b"):
                shutil.rmtree(self.path(folder))

    def test_round_trip_of_long_rows(self):
        """Steps of whole rows that begin inside a block: 77 rows of 1696."""
        t, values = mxfp4(self.rng, self.DOWN, 1, 200, 1696)
        self.model(t, self.CONFIG)
        self.convert("--to", "nf4", "--no-double-quant", "--requantize", "m", "q")
        out = self.convert("--to", "bf16", "q", "b")
        want = transposed(self.nf4_back(values, 1696), 1, 200, 1696)
        self.assertTrue(out[self.DOWN][2] == mk.encode("BF16", want))

    def nf4_back(self, values, cols):
        codes, scales = oracle.nf4(values, 64)
        return oracle.nf4_values(codes, scales, 64, len(values), "BF16")

    def int8_back(self, values, cols):
        codes, scb = oracle.int8_rows(values, cols)
        return oracle.int8_row_values(struct.unpack("%db" % len(codes), codes), scb, cols, "BF16")

    def block_back(self, values, cols):
        codes, scales = oracle.int8_blocks(values, 32)
        return oracle.int8_block_values(struct.unpack("%db" % len(codes), codes), scales, 32,
                                        "BF16")

    @unittest.skipIf(SANITIZED, "long, and test_round_trip_of_long_rows has such frames")
    def test_large(self):
        """Frames that begin inside an expert and inside a row; any number of threads."""
        t, values = mxfp4(self.rng, self.UP, 2, 1400, 1600)
        self.model(t, self.CONFIG)
        out = self.convert("--to", "bf16", "--threads", "3", "m", "o")
        want = mk.encode("BF16", transposed(values, 2, 1400, 1600))
        self.assertTrue(out[self.UP][2] == want)
        out = self.convert("--to", "nf4", "--requantize", "m", "q")
        self.assertTrue(out[self.UP][2] == oracle.nf4(values, 64)[0])
        self.ok("-q", "--to", "bf16", "--threads", "1", "m", "z")
        self.ok("-q", "unpack", "z", "u")
        self.assertTrue(mk.read_checkpoint(self.path("u"))[self.UP][2] == want)
        with open(self.path("z", "qconv.json")) as a, open(self.path("o", "qconv.json")) as b:
            self.assertEqual([t["source"] for t in json.load(a)["tensors"]],
                             [t["source"] for t in json.load(b)["tensors"]])

    def test_a_wrong_config(self):
        """A fork of gpt-oss-20b says gptq: the tensors decide."""
        self.make({"model_type": "gpt_oss", "quantization_config": {"quant_method": "gptq"}})
        out = self.convert("--to", "nf4", "m", "o")
        self.assertEqual(out[self.UP + "_blocks"], self.source[self.UP + "_blocks"])
        out = self.convert("--to", "nf4", "--requantize", "m", "r")
        self.check_blocks_of(out, self.UP, *self.values[self.UP], "nf4")

    def test_refused(self):
        self.make()
        scales = bytearray(self.source[self.UP + "_scales"][2])
        scales[1 * 96 * 2 + 5 * 2 + 1] = 255  # expert 1, row 5, second block
        bad = {**self.source, self.UP + "_scales": ("U8", [3, 96, 2], bytes(scales))}
        self.model(bad, self.CONFIG)
        for args in (["--to", "int8", "--requantize"], ["--to", "bf16"]):
            self.fails(3, *args, "m", "o",
                       has=[self.UP + "_blocks", "expert 1 at row 5, column 32"])
        self.convert("--to", "nf4", "m", "passed")
        short = {**self.source, self.UP + "_scales": ("U8", [3, 96, 1], bytes(288))}
        self.model(short, self.CONFIG)
        self.fails(3, "--to", "nf4", "m", "o", has=[self.UP + "_scales", "[3, 96, 2]"])
        self.make()
        self.fails(3, "--to", "nf4", "--requantize", "--block-size", "4096", "m", "o",
                   has=["whole blocks of 4096", "--block-size"])


class Fused(Forms):
    """As transformers 5 may save them; the output equals that of the released form."""

    replaces = True

    def layers(self, path, gate, up, down, experts=3, inner=64, hidden=96, layers=(0, 1)):
        released, fused = {}, {}
        for layer in layers:
            ups, downs = b"", b""
            for e in range(experts):
                m = {n: mk.random_bytes("BF16", s, self.rng)
                     for n, s in ((gate, [inner, hidden]), (up, [inner, hidden]),
                                  (down, [hidden, inner]))}
                for n, body in m.items():
                    shape = [hidden, inner] if n == down else [inner, hidden]
                    released["model.layers.%d.%s.%d.%s.weight" % (layer, path, e, n)] = (
                        "BF16", shape, body)
                ups += m[gate] + m[up]
                downs += m[down]
            stem = "model.layers.%d.mlp." % layer
            fused[stem + "experts.gate_up_proj"] = ("BF16", [experts, 2 * inner, hidden], ups)
            fused[stem + "experts.down_proj"] = ("BF16", [experts, hidden, inner], downs)
            router = ("BF16", [experts, hidden], mk.random_bytes("BF16", [experts, hidden],
                                                                 self.rng))
            fused[stem + "gate.weight"] = router
            name = "block_sparse_moe.gate" if path.startswith("block") else "mlp.gate"
            released["model.layers.%d.%s.weight" % (layer, name)] = router
        rest = {"model.embed_tokens.weight": ("BF16", [64, hidden], bytes(128 * hidden))}
        return {**released, **rest}, {**fused, **rest}

    def test_equal_to_the_released_form(self):
        names = [("mixtral", "block_sparse_moe.experts", "w1", "w3", "w2")]
        names += [(t, "mlp.experts", "gate_proj", "up_proj", "down_proj")
                  for t in ("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")]
        for kind, *parts in names:
            released, fused = self.layers(*parts)
            config = {"model_type": kind, "num_experts": 3, "n_routed_experts": 3}
            self.model(released, config, name="r-" + kind)
            self.model(fused, config, name="f-" + kind, shard_bytes=60000)
            for form in (["--to", "nf4"], ["--to", "int8"], ["--to", "int8", "--block-size", "64"],
                         ["--to", "nf4", "--scale", "search"]):
                a, b = "%s-%s-a" % (kind, form[1]), "%s-%s-b" % (kind, form[1])
                self.ok("-q", "--force", *form, "r-" + kind, a)
                self.ok("-q", "--force", *form, "f-" + kind, b)
                one, two = tree(self.path(a)), tree(self.path(b))
                self.assertEqual(sorted(one), sorted(two))
                for name in one:
                    if name != "qconv.json":  # which names the source's files
                        self.assertTrue(one[name] == two[name], (kind, form, name))
                self.assertTrue(json.loads(self.ok("verify", "--json", b))["ok"])
            # A cast has no need to take them apart.
            out = self.convert("--to", "fp16", "f-" + kind, kind + "-cast")
            self.assertEqual(sorted(out), sorted(fused))

    def test_fp8(self):
        """Codes and scales stacked alike: the same bytes as from the released form."""
        path, inner, hidden, experts = L + "mlp.experts.", 128, 160, 2
        released, fused = {}, {}
        up, up_scale, down, down_scale = b"", b"", b"", b""
        for e in range(experts):
            m = {}
            for n, shape in (("gate_proj", [inner, hidden]), ("up_proj", [inner, hidden]),
                             ("down_proj", [hidden, inner])):
                m.update(fp8(self.rng, "%s%d.%s.weight" % (path, e, n), shape, [128, 128])[0])
            released.update(m)
            body = {n.split(".", 6)[6]: t[2] for n, t in m.items()}
            up += body["gate_proj.weight"] + body["up_proj.weight"]
            up_scale += body["gate_proj.weight_scale_inv"] + body["up_proj.weight_scale_inv"]
            down += body["down_proj.weight"]
            down_scale += body["down_proj.weight_scale_inv"]
        fused[path + "gate_up_proj"] = ("F8_E4M3", [experts, 2 * inner, hidden], up)
        fused[path + "gate_up_proj_scale_inv"] = ("F32", [experts, 2, 2], up_scale)
        fused[path + "down_proj"] = ("F8_E4M3", [experts, hidden, inner], down)
        fused[path + "down_proj_scale_inv"] = ("F32", [experts, 2, 1], down_scale)
        rest = {L + "self_attn.o_proj.weight": ("BF16", [64, 64], bytes(8192))}
        self.model({**released, **rest}, DEEPSEEK, name="r")
        self.model({**fused, **rest}, DEEPSEEK, name="f")
        for form in (["nf4"], ["int8"], ["bf16"], ["fp16"]):
            a = self.convert("--to", *form, "r", "a")
            b = self.convert("--to", *form, "f", "b")
            self.assertEqual(sorted(a), sorted(b))
            for name in a:
                self.assertTrue(a[name] == b[name], (form, name))
            self.assertEqual(*(tree(self.path(out))["config.json"] for out in "ab"))
        # What is not known stays, with a warning, and claims nothing of a loader.
        self.model({**fused, **rest}, {**DEEPSEEK, "model_type": "llama4_text"}, name="u")
        for to in ("nf4", "bf16"):
            said = self.warned("--to", to, "--force", *PLAIN, "u", "o")
            self.assertIn("2 stacks of experts", said)
            self.assertIn("with %d weights" % (experts * 3 * inner * hidden), said)
            method = self.quantization("o")["quant_method"]
            self.assertEqual(method, "qconv" if to == "nf4" else "fp8")
        one, _ = fp8(self.rng, Q, [128, 128], [128, 128])
        self.model({**fused, **one}, {**DEEPSEEK, "model_type": "llama4_text"}, name="v")
        self.convert("--to", "bf16", "v", "o")
        q = self.quantization("o")
        self.assertEqual(q["quant_method"], "fp8")
        self.assertIn(Q[:-len(".weight")], q["modules_to_not_convert"])

    def test_stacks_that_stay(self):
        """Layouts that are not known, stacks that are not called experts (granitemoe's, and dbrx's, which have two
        dimensions), and a known family's as [experts, in, out]. A convolution of one dimension is no stack."""
        moe, ffn = "model.layers.0.block_sparse_moe.", "transformer.blocks.0.ffn.experts.mlp."
        fused = {E + "gate_up_proj": [3, 128, 96], E + "down_proj": [3, 96, 64]}
        for kind, stacks in (
                ("llama4_text", fused), ("gpt_oss", fused),
                ("granitemoe", {moe + n + "_linear.weight": [3, 64, 96] for n in ("input", "output")}),
                ("dbrx", {ffn + n: [192, 96] for n in ("w1", "v1", "w2")}),
                ("qwen3_moe", {E + "gate_up_proj": [3, 96, 128], E + "down_proj": [3, 64, 96]})):
            tensors = {n: ("BF16", shape, mk.random_bytes("BF16", shape, self.rng)) for n, shape in stacks.items()}
            rest = {Q: ("BF16", [64, 64], bytes(8192)), "model.conv.weight": ("BF16", [64, 64, 4], bytes(32768))}
            self.model({**tensors, **rest}, {"model_type": kind, "num_local_experts": 3, "num_experts": 3}, name=kind)
            r = self.run_qconv("--to", "nf4", *PLAIN, kind, kind + "-o")
            said = r.stderr.decode()
            self.assertIn(r.returncode, (0, 4), said)  # most of a model that stays is a failed check
            self.assertIn("%d stacks of experts" % len(stacks), said)
            self.assertIn("with %d weights" % sum(map(mk.numel, stacks.values())), said)
            out = mk.read_checkpoint(self.path(kind + "-o"))
            self.assertEqual({n: out[n] for n in tensors}, tensors)

    def test_both_forms(self):
        released, fused = self.layers("mlp.experts", "gate_proj", "up_proj", "down_proj")
        self.model({**released, **fused}, {"model_type": "qwen3_moe", "num_experts": 3})
        self.fails(3, "--to", "nf4", "m", "o", has=["by itself and within a fused tensor"])


class Packed(Forms):
    """Quantized before: re-sharded, or refused with a sentence."""
    M = L + "self_attn.q_proj."

    def test_resharded(self):
        self.model({Q: ("BF16", [96, 128], mk.random_bytes("BF16", [96, 128], self.rng)),
                    Q.replace("q_", "k_"): ("BF16", [96, 128], bytes(96 * 256)),
                    "model.norm.weight": ("F32", [128], bytes(512))})
        for form in ("nf4", "int8"):
            out = self.convert("--to", form, "m", form)
            again = self.convert("--to", "keep", "--max-shard-size", "9KB", form, form + "-again")
            self.assertEqual(again, out)
            self.assertEqual(*(tree(self.path(out))["config.json"] for out in (form, form + "-again")))
            index = self.json_of(form + "-again", "model.safetensors.index.json")
            self.assertEqual(sorted(index["weight_map"]), sorted(out))
            self.assertGreater(len(set(index["weight_map"].values())), 1)
            self.assertEqual(index["metadata"]["total_size"],
                             sum(len(t[2]) for t in out.values()))

    def test_a_method_that_nothing_bears_out(self):
        """quant_method alone refuses nothing: neither plain weights nor a buffer of integers."""
        tensors = {Q: ("BF16", [64, 64], mk.random_bytes("BF16", [64, 64], self.rng)),
                   "embeddings.position_ids": ("I64", [1, 8], bytes(64))}
        self.model(tensors, {"model_type": "llama",
                             "quantization_config": {"quant_method": "gptq"}})
        out = self.convert("--to", "nf4", "m", "o")
        self.assertEqual(out[Q][0], "U8")
        self.assertEqual(out["embeddings.position_ids"], tensors["embeddings.position_ids"])

    def test_refused(self):
        i32, f16, u8 = ("I32", [8, 64], bytes(2048)), ("F16", [1, 64], bytes(128)), None
        u8 = ("U8", [64, 32], bytes(2048))
        forms = [
            ("gptq", "GPTQ", {"qweight": i32, "scales": f16, "g_idx": ("I32", [64], bytes(256))}),
            ("awq", "AWQ", {"qweight": ("I16", [16, 64], bytes(2048)), "scales": f16}),
            ("compressed-tensors", "compressed-tensors",
             {"weight_packed": i32, "scale_packed": f16, "meta": ("I16", [4, 4], bytes(32))}),
            ("exl2", "ExLlamaV2", {"q_weight": i32, "q_scale": i32}),
            ("exl3", "ExLlamaV3", {"trellis": ("I16", [4, 4, 32], bytes(1024)), "suh": f16}),
            ("hqq", "HQQ", {"W_q": u8, "meta": f16}),
            ("aqlm", "AQLM", {"codes": ("I8", [8, 8, 1], bytes(64)), "codebooks":
                              ("F16", [1, 4, 1, 8], bytes(64))}),
            ("quip", "QuIP#", {"Qidxs": ("I16", [8, 8], bytes(128))}),
            ("modelopt", "ModelOpt", {"weight": u8, "weight_scale": ("F8_E4M3", [64, 4], bytes(256))}),
            ("vptq", "VPTQ", {"indices": ("I16", [8, 8, 2], bytes(256)), "centroids.weight": f16}),
            ("spqr", "SpQR", {"dense_weights": ("I64", [8, 8], bytes(512))}),
            ("eetq", "EETQ", {"weight": ("I8", [64, 64], bytes(4096)), "weight_scales": f16}),
            ("higgs", "HIGGS", {"weight": ("I16", [8, 8], bytes(128)), "tables2": f16}),
            ("metal", "MLX", {"weight": ("U32", [64, 8], bytes(2048)), "scales": f16, "biases": f16}),
            ("quanto", "quanto", {"weight._data": ("I8", [64, 64], bytes(4096)),
                                  "weight._scale": f16}),
            ("torchao", "torchao", {"_weight_qdata": ("I8", [64, 64], bytes(4096)),
                                    "_weight_scale": f16}),
            # What these have they share with others: config.json says whose it is.
            ("torchao", "torchao", {"weight": ("I8", [64, 64], bytes(4096)), "weight_scale": f16}),
            ("bitnet", "BitNet", {"weight": u8, "weight_scale": ("BF16", [1], bytes(2))}),
            ("auto-round", "AutoRound", {"qweight": i32, "scales": f16, "qzeros": i32}),
            ("fp_quant", "FP-Quant", {"qweight": u8, "scales": u8}),
        ]
        only_by_config = [n for n, (_, _, tensors) in enumerate(forms) if n >= len(forms) - 4]
        for number, (method, tool, tensors) in enumerate(forms):
            named = {self.M + n: t for n, t in tensors.items()}
            for config in ({"quant_method": method}, None):
                if config is None and number in only_by_config:
                    continue
                conf = {"model_type": "llama"}
                if config:
                    conf["quantization_config"] = config
                self.model(named, conf)
                for to in ("nf4", "int8", "bf16"):
                    says = "GPTQ or AWQ" if method == "awq" and config is None else tool
                    line = self.fails(3, "--to", to, "m", "o", has=["packed by " + says, "--keep"])
                    self.assertIn(self.M, line)
                    self.assert_nothing("o")
            self.assertEqual(self.convert("--to", "keep", "m", "kept"), named)
            shutil.rmtree(self.path("kept"))


if __name__ == "__main__":
    unittest.main()
