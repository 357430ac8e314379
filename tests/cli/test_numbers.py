"""The numbers in an output, against a second implementation in plain Python; odd shapes; what is
refused because of a value."""
import array
import json
import random
import struct
import unittest

from output_case import OutputCase
import make_checkpoint as mk
import numbers_oracle as oracle

Q = "model.layers.0.self_attn.q_proj.weight"
FLOATS = ["F64", "F32", "F16", "BF16"]
SHAPES = [[1, 1], [1, 7], [7, 1], [3, 5], [13, 17], [31, 37], [64, 64], [2, 129]]
OTHER = "model.layers.1.self_attn.q_proj.weight"
STATE = ".quant_state.bitsandbytes__nf4"
NAN = struct.unpack("<f", b"\0\0\xc0\x7f")[0]
INF = float("inf")


def weights(dtype, shape, seed):
    """Random, and harder than random: zeros, a block of zeros, outliers."""
    rng = random.Random(seed)
    values = [rng.gauss(0, 0.02) for _ in range(mk.numel(shape))]
    for i in range(0, len(values), 11):
        values[i] = rng.choice([0.0, -0.0, 1.0, -3.5, 2.0 ** -20])
    if len(values) > 300:
        values[64:192] = [0.0] * 128
    return (dtype, shape, mk.encode(dtype, values))


class Quantized(OutputCase):
    """One weight, one form: every byte of its tensors."""

    replaces = True
    scale = "absmax"

    def one(self, tensor, *form):
        self.model({Q: tensor})
        return self.convert(*form, "m", "o")

    def check_blocks(self, tensor, out, size, nested, quantize, state_name, kind):
        dtype, shape, body = tensor
        want, scales = quantize(oracle.floats(dtype, body), size)
        self.assertEqual(out[Q][2], want)
        if nested:
            self.assertEqual(out[Q + ".absmax"][:2], ("U8", [len(scales)]))
            state = oracle.state_of(out[Q + state_name])
            table = mk.decode("F32", out[Q + ".nested_quant_map"][2])
            scales = oracle.check_nested(
                self, scales, out[Q + ".absmax"][2],
                mk.decode("F32", out[Q + ".nested_absmax"][2]), state["nested_offset"], table)
            self.assertEqual(state["nested_blocksize"], 256)
            self.assertEqual(state["nested_dtype"], "float32")
        else:
            self.assertEqual(out[Q + ".absmax"],
                             ("F32", [len(scales)], mk.encode("F32", scales)))
            state = oracle.state_of(out[Q + state_name])
            self.assertNotIn("nested_offset", state)
        names = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        self.assertEqual({k: state[k] for k in ("quant_type", "blocksize", "dtype", "shape")},
                         {"quant_type": kind, "blocksize": size, "dtype": names[dtype],
                          "shape": shape})
        return scales

    def test_nf4(self):
        for i, shape in enumerate(SHAPES + [[160, 130]]):
            tensor = weights(FLOATS[i % 4], shape, i)
            size = [64, 32, 4096][i % 3] if i < len(SHAPES) else 64
            nested = i % 2 == 0
            more = ["--block-size", str(size)] + ([] if nested else ["--no-double-quant"])
            out = self.one(tensor, "--to", "nf4", *more)
            self.assertEqual(out[Q][:2], ("U8", [-(-mk.numel(shape) // 2), 1]))
            self.assertEqual(out[Q + ".quant_map"],
                             ("F32", [16], mk.encode("F32", oracle.NF4_CODE)))
            scales = self.check_blocks(tensor, out, size, nested, oracle.nf4, STATE, "nf4")
            for to, dtype in [("bf16", "BF16"), ("fp16", "F16")]:
                back = self.convert("--to", to, "o", "back")
                values = oracle.nf4_values(out[Q][2], scales, size, mk.numel(shape), dtype)
                self.assertEqual(back, {Q: (dtype, shape, mk.encode(dtype, values))}, (shape, to))

    def test_int8_rows(self):
        for i, shape in enumerate(SHAPES):
            tensor = weights(FLOATS[i % 4], shape, 20 + i)
            out = self.one(tensor, "--to", "int8")
            codes, scb = oracle.int8_rows(oracle.floats(tensor[0], tensor[2]), shape[1])
            name = Q[:-len("weight")]
            self.assertEqual(out, {Q: ("I8", shape, codes),
                                   name + "SCB": ("F32", shape[:1], mk.encode("F32", scb)),
                                   name + "weight_format": ("U8", [], b"\0")}, shape)
            back = self.convert("--to", "bf16", "o", "back")
            values = oracle.int8_row_values(struct.unpack("%db" % len(codes), codes), scb,
                                            shape[1], "BF16")
            self.assertEqual(back, {Q: ("BF16", shape, mk.encode("BF16", values))}, shape)

    def test_int8_blocks(self):
        for i, shape in enumerate(SHAPES):
            tensor = weights(FLOATS[i % 4], shape, 40 + i)
            nested = i % 2 == 1
            more = [] if nested else ["--no-double-quant"]
            out = self.one(tensor, "--to", "int8", "--block-size", "32", *more)
            self.assertEqual(out[Q][:2], ("I8", [shape[0] * shape[1], 1]))
            scales = self.check_blocks(tensor, out, 32, nested, oracle.int8_blocks,
                                       ".quant_state.qconv__int8", "int8")
            back = self.convert("--to", "fp16", "o", "back")
            codes = struct.unpack("%db" % mk.numel(shape), out[Q][2])
            values = oracle.int8_block_values(codes, scales, 32, "F16")
            self.assertEqual(back, {Q: ("F16", shape, mk.encode("F16", values))}, shape)


class Inputs(OutputCase):
    replaces = True
    scale = "absmax"

    def test_bitsandbytes_nf4(self):
        """A checkpoint as bitsandbytes writes it, made by the oracle, back to bf16."""
        table = [oracle.f32(x) for x in oracle.dynamic_map()]
        for nested in (True, False):
            shape = [24, 96]
            values = oracle.floats("BF16", weights("BF16", shape, 70)[2])
            stored, want = oracle.bnb_nf4(Q, shape, values, 64, table, nested)
            stored["model.norm.weight"] = norm = ("BF16", [4], b"\x80\x3f" * 4)
            self.model(stored, config={"model_type": "llama", "quantization_config": {
                "quant_method": "bitsandbytes", "load_in_4bit": True}})
            out = self.convert("--to", "bf16", "m", "o")
            self.assertEqual(out, {Q: ("BF16", shape, mk.encode("BF16", want)),
                                   "model.norm.weight": norm})
            # Quantizing what is quantized already is refused, in words.
            self.fails(3, "--to", "nf4", "m", "q", has="quantized")
            self.assert_nothing("q")
            self.assertEqual(self.json_of("o", "config.json"), {"model_type": "llama"})

    def test_bitsandbytes_int8(self):
        shape = [12, 40]
        codes, scb = oracle.int8_rows(oracle.floats("F16", weights("F16", shape, 71)[2]), 40)
        self.model({Q: ("I8", shape, codes), Q[:-6] + "SCB": ("F32", [12], mk.encode("F32", scb)),
                    Q[:-6] + "weight_format": ("U8", [], b"\0")},
                   config={"model_type": "llama", "quantization_config": {
                       "quant_method": "bitsandbytes", "load_in_8bit": True}})
        values = oracle.int8_row_values(mk.decode("I8", codes), scb, 40, "F16")
        self.assertEqual(self.convert("--to", "fp16", "m", "o"),
                         {Q: ("F16", shape, mk.encode("F16", values))})

    def test_decoding_some_grows_the_skip_list(self):
        """What is no longer quantized is named in the source's own quantization_config."""
        other = Q.replace("q_proj", "o_proj")
        self.model({Q: weights("BF16", [64, 64], 76), other: weights("BF16", [64, 64], 77),
                    "lm_head.weight": weights("BF16", [8, 64], 78)},
                   config={"model_type": "llama", "vocab_size": 8})
        for form, key in ((["nf4"], "llm_int8_skip_modules"), (["int8"], "llm_int8_skip_modules"),
                          (["int8", "--block-size", "64"], "modules_to_not_convert")):
            self.convert("--to", *form, "m", "q")
            before, whole = self.config_of("q")
            self.assertEqual(before[key], ["classifier", "lm_head", "qa_outputs", "score"])
            out = self.convert("--to", "bf16", "--keep", "*q_proj*", "q", "o")
            self.assertEqual((out[Q][0], out[other][0]), ("U8" if form == ["nf4"] else "I8",
                                                          "BF16"))
            after, now = self.config_of("o")
            self.assertEqual(after, {**before, key: sorted(before[key] + [other[:-len(".weight")]])})
            self.assertEqual(now, whole)
            # All kept: nothing changes. None kept: nothing is left to say.
            self.convert("--to", "bf16", "--keep", "*_proj*", "q", "k")
            self.assertEqual(self.config_of("k"), (before, whole))
            self.convert("--to", "bf16", "q", "n")
            self.assertEqual(self.config_of("n"), (None, whole))

    def test_a_skip_list_that_was_not_there(self):
        """An explicit list replaces a loader's defaults, so it names the head as well."""
        shape, other = [64, 64], Q.replace("q_proj", "o_proj")
        table = [oracle.f32(x) for x in oracle.dynamic_map()]
        values = oracle.floats("BF16", weights("BF16", shape, 79)[2])
        t = {}
        for name in (Q, other):
            t.update(oracle.bnb_nf4(name, shape, values, 64, table)[0])
        for listed, want in ((None, ["classifier", "lm_head", other[:-7], "qa_outputs",
                                    "score"]), (["a*b"], ["a*b", other[:-7]])):
            q = {"quant_method": "bitsandbytes", "load_in_4bit": True, "x": 1.0,
                 "llm_int8_skip_modules": listed}
            self.model(t, config={"model_type": "llama", "quantization_config": q, "z": 1e-05})
            self.convert("--to", "bf16", "--keep", Q, "m", "o")
            self.assertEqual(self.config_of("o")[0], {**q, "llm_int8_skip_modules": want})
            with open(self.path("o", "config.json")) as f:
                self.assertIn("1e-05", f.read())

    def config_of(self, folder):
        whole = self.json_of(folder, "config.json")
        return whole.pop("quantization_config", None), whole

    def test_passthrough_is_bit_exact(self):
        """What is not a weight keeps its bits, whatever its dtype, NaN included."""
        rng = random.Random(73)
        t = {Q: weights("F32", [8, 8], 2)}
        for i, dtype in enumerate(mk.DTYPES):
            shape = [[6, 4], [2, 3, 4], [64]][i % 3]
            t["buffers.x%d" % i] = (dtype, shape, rng.randbytes(mk.tensor_bytes(dtype, shape)))
        t["model.norm.weight"] = ("F32", [3], struct.pack("<3I", 0x7FC00001, 0xFF800000, 1))
        self.model(t)
        for form in [["--to", "nf4"], ["--to", "int8"]]:
            out = self.convert(*form, "m", "o")
            for name in t:
                if name != Q:
                    self.assertEqual(out[name], t[name], (form, name))

    def test_empty_and_scalar(self):
        t = {Q: weights("F32", [8, 8], 3),
             "model.layers.1.self_attn.q_proj.weight": ("BF16", [0, 64], b""),
             "model.layers.1.self_attn.k_proj.weight": ("BF16", [64, 0], b""),
             "model.embed_tokens.weight": ("F16", [0], b""),
             "a.scalar": ("F32", [], struct.pack("<f", 1.5)), "a.count": ("I64", [], bytes(8))}
        self.model(t)
        for form in [["--to", "nf4"], ["--to", "int8"], ["--to", "int8", "--block-size", "32"],
                     ["--to", "bf16"]]:
            self.ok("-q", *form, "m", "z")
            self.ok("verify", "z")
            out = self.convert(*form, "m", "o")
            for name in t:
                if mk.numel(t[name][1]) == 0 or name == "a.count":
                    self.assertEqual(out[name][1:], t[name][1:], (form, name))
            self.assertEqual(out["a.scalar"][1], [])
            self.ok("-q", "--to", "bf16", "z", "back")

    def test_unaligned_data(self):
        """A header whose length is no multiple of 8: data at odd addresses."""
        body = weights("F32", [16, 33], 74)[2]
        self.model({"x": ("U8", [1], b"x")})
        for pad in range(1, 8):
            head = json.dumps({"x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
                               Q: {"dtype": "F32", "shape": [16, 33],
                                   "data_offsets": [3, 3 + len(body)]}}).encode() + b" " * pad
            with open(self.path("m", "model.safetensors"), "wb") as f:
                f.write(struct.pack("<Q", len(head)) + head + b"abc" + body)
            out = self.convert("--to", "nf4", "m", "o")
            self.assertEqual(out[Q][2], oracle.nf4(oracle.floats("F32", body), 64)[0])
            self.assertEqual(out["x"][2], b"abc")

    def test_conv1d_is_transposed(self):
        """GPT-2 stores [in, out]; written is [out, in], quantized along the rows of that."""
        name = "h.0.attn.c_attn.weight"
        for i, (rows, cols) in enumerate([(24, 72), (5, 3), (1, 9), (200, 600)]):
            dtype = FLOATS[i]
            tensor = weights(dtype, [rows, cols], 80 + i)
            self.model({name: tensor, "wte.weight": weights("F32", [4, 4], 9)},
                       config={"model_type": "gpt2"})
            v = oracle.floats(dtype, tensor[2])
            turned = [v[r * cols + c] for c in range(cols) for r in range(rows)]
            out = self.convert("--to", "nf4", "m", "o")
            self.assertEqual(out[name][2], oracle.nf4(turned, 64)[0])
            self.assertEqual(oracle.state_of(out[name + STATE])["shape"], [cols, rows])
            out = self.convert("--to", "int8", "m", "o")
            codes, scb = oracle.int8_rows(turned, rows)
            self.assertEqual(out[name], ("I8", [cols, rows], codes))
            self.assertEqual(out[name[:-6] + "SCB"][2], mk.encode("F32", scb))

    CONV1D = "h.0.attn.c_attn.weight"

    def test_conv1d_is_turned_back(self):
        """From codes that lie as [out, in] to GPT-2's [in, out]."""
        name = self.CONV1D
        for i, (rows, cols) in enumerate([(24, 72), (5, 3), (1, 9), (130, 67)]):
            tensor = weights(FLOATS[i], [rows, cols], 84 + i)
            self.model({name: tensor}, config={"model_type": "gpt2"})
            v = oracle.floats(FLOATS[i], tensor[2])
            turned = [v[r * cols + c] for c in range(cols) for r in range(rows)]
            codes, scales = oracle.nf4(turned, 64)
            nf4 = oracle.nf4_values(codes, scales, 64, len(turned), "BF16")
            codes, scb = oracle.int8_rows(turned, rows)
            int8 = oracle.int8_row_values(struct.unpack("%db" % len(codes), codes), scb, rows,
                                          "BF16")
            codes, scales = oracle.int8_blocks(turned, 32)
            block = oracle.int8_block_values(struct.unpack("%db" % len(codes), codes), scales, 32,
                                             "BF16")
            for form, want in ((["nf4", "--no-double-quant"], nf4), (["int8"], int8),
                               (["int8", "--block-size", "32", "--no-double-quant"], block)):
                self.convert("--to", *form, "m", "q")
                back = self.convert("--to", "bf16", "q", "b")
                want = [want[c * rows + r] for r in range(rows) for c in range(cols)]
                self.assertEqual(back, {name: ("BF16", [rows, cols], mk.encode("BF16", want))},
                                 (form, rows, cols))

    def test_a_large_conv1d_is_turned_back(self):
        """Several frames: the transpose of what is written where the weight is a Linear."""
        rows, cols = 1500, 3100
        self.model({self.CONV1D: weights("BF16", [rows, cols], 88)}, config={"model_type": "gpt2"})
        for form in (["nf4"], ["int8"]):
            self.convert("--to", *form, "m", "q")
            back = self.convert("--to", "bf16", "--threads", "3", "q", "b")[self.CONV1D]
            self.ok("-q", "--force", "--to", "bf16", "--threads", "1", "q", "z")
            self.ok("-q", "unpack", "z", "u-" + form[0])
            self.assertTrue(mk.read_checkpoint(self.path("u-" + form[0]))[self.CONV1D] == back)
            with open(self.path("q", "config.json"), "w") as f:
                f.write('{"model_type": "llama"}')
            shape, body = self.convert("--to", "bf16", "q", "l")[self.CONV1D][1:]
            self.assertEqual((shape, back[1]), ([cols, rows], [rows, cols]))
            lain = array.array("H", body)
            want = b"".join(lain[r::rows].tobytes() for r in range(rows))
            self.assertTrue(back[2] == want, form)

    def test_a_conv1d_that_is_too_large_for_fp16(self):
        values = [1.0] * 4096
        values[3 * 64 + 5] = 1e5  # row 3, column 5 of [in, out]
        self.model({self.CONV1D: ("F32", [64, 64], mk.encode("F32", values))},
                   config={"model_type": "gpt2"})
        self.convert("--to", "nf4", "m", "q")
        self.fails(3, "--to", "fp16", "q", "o", has=[self.CONV1D, "row 3, column 5", "--to bf16"])

    def test_casts(self):
        for dtype in FLOATS:
            t = {"model.norm.weight": weights(dtype, [333], 90), Q: weights(dtype, [9, 9], 91)}
            self.model(t)
            for to, out_dtype in [("bf16", "BF16"), ("fp16", "F16")]:
                out = self.convert("--to", to, "m", "o")
                for name, (_, shape, body) in t.items():
                    # A double goes to half a float at once; to bfloat16 through a float.
                    want = mk.encode(out_dtype, mk.decode(dtype, body))
                    self.assertEqual(out[name], (out_dtype, shape, want), (dtype, to, name))


class Refused(OutputCase):
    replaces = True
    scale = "absmax"

    """A value that has no code: the tensor, the place, the way out; and nothing is left."""

    def with_value(self, value, row, col, shape=(70, 130), dtype="F32", name=Q):
        body = bytearray(weights(dtype, list(shape), 100)[2])
        each = mk.BITS[dtype] // 8
        at = (row * shape[1] + col) * each
        body[at:at + each] = mk.encode(dtype, [value])
        return {name: (dtype, list(shape), bytes(body)), OTHER: weights("F32", [4, 4], 1)}

    def test_keep_helps(self):
        """What the message advises (test_scale.py has it of every value, dtype and form)."""
        t = self.with_value(NAN, 33, 77)
        self.model(t)
        self.fails(3, "--to", "nf4", "m", "o", has=[Q, "row 33, column 77 ", "--keep '%s'" % Q])
        out = self.convert("--to", "nf4", "--keep", Q, "m", "o")
        self.assertEqual(out[Q], t[Q])
        self.assertIn(OTHER + ".absmax", out)

    def test_first_one_is_named(self):
        """With several threads too, in whichever frame it lies."""
        t = self.with_value(NAN, 5, 6)
        body = bytearray(t[Q][2])
        body[(60 * 130 + 3) * 4:(60 * 130 + 4) * 4] = mk.encode("F32", [INF])
        t[Q] = ("F32", [70, 130], bytes(body))
        self.model(t)
        self.fails(3, "--to", "nf4", "--threads", "3", "m", "o", has="row 5, column 6 ")

    def test_place_in_a_transposed_weight(self):
        """Rows and columns as they lie in the file."""
        name = "h.0.mlp.c_fc.weight"
        for row, col in [(0, 129), (69, 0), (12, 34)]:
            self.model(self.with_value(NAN, row, col, name=name), config={"model_type": "gpt2"})
            for form in [["--to", "nf4"], ["--to", "int8"]]:
                self.fails(3, *form, "m", "o", has=[name, "row %d, column %d " % (row, col)])
                self.assert_nothing("o")

    def test_rest_overflow(self):
        t = self.with_value(0.5, 0, 0)
        t["model.norm.weight"] = ("F32", [5], struct.pack("<5f", 1, 2, 65519.0, 65520.0, 3))
        self.model(t)
        self.fails(3, "--to", "nf4", "--rest", "fp16", "m", "o",
                   has=["model.norm.weight", "element 3 ", "--rest bf16"])
        self.assert_nothing("o")
        self.fails(3, "--to", "fp16", "m", "o", has=["model.norm.weight", "element 3 ", "--keep"])
        self.assert_nothing("o")
        # What the messages advise does help.
        self.ok("-q", "--to", "nf4", "--rest", "bf16", "m", "o")
        out = self.convert("--to", "fp16", "--keep", "model.norm.weight", "m", "o")
        self.assertEqual(out["model.norm.weight"], t["model.norm.weight"])

    def test_rest_keeps_nan(self):
        """A cast is no quantizer: NaN and infinity have a form in every float type."""
        t = {Q: weights("F32", [4, 4], 1),
             "model.norm.weight": ("F32", [3], struct.pack("<3f", NAN, INF, -INF))}
        self.model(t)
        out = self.convert("--to", "nf4", "--rest", "bf16", "m", "o")
        a, b, c = mk.decode("BF16", out["model.norm.weight"][2])
        self.assertTrue(a != a and b == INF and c == -INF)

    def test_int8_through_float16(self):
        self.model(self.with_value(65520.0, 3, 4))
        self.fails(3, "--to", "int8", "m", "o", has=[Q, "row 3, column 4 ", "float16", "--keep"])
        self.assert_nothing("o")
        self.model(self.with_value(65519.0, 3, 4))
        self.ok("-q", "--to", "int8", "m", "o")
        self.model(self.with_value(65520.0, 3, 4))
        self.ok("-q", "--to", "int8", "--block-size", "64", "m", "o")
        self.ok("-q", "--to", "nf4", "m", "o")
        # bfloat16 has room for it, float16 not.
        self.ok("-q", "--to", "bf16", "o", "b")
        self.fails(3, "--to", "fp16", "o", "h", has=[Q, "--to bf16"])
        self.assert_nothing("h")


if __name__ == "__main__":
    unittest.main()
