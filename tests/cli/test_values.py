"""qc_values_* of libqconv: whatever form a checkpoint stores its weights in, the list has the names and shapes,
and the values are the bytes, of `qconv convert --to bf16` and `--to fp16`.

$QCONV_LIBRARY is libqconv.so. A library with sanitizers cannot be loaded, and everything is skipped."""
import ctypes
import os
import random
import struct
import sys
import threading
import unittest

from output_case import PLAIN
from qconv_case import ROOT, SANITIZED
import make_checkpoint as mk
import test_experts
import test_forms
import test_integers

sys.path.insert(0, os.path.join(ROOT, "python"))
from qconv import _library, errors  # noqa: E402

os.environ.setdefault("QCONV_LIBRARY", os.path.join(ROOT, "build", "libqconv.so"))
AS_FOUND, SEPARATE, STACKED = 0, 1, 2
Q = test_forms.Q


class Values(_library._Handle):
    closes = "qc_values_close"

    def __init__(self, path, experts=AS_FOUND, adapters=()):
        paths = (ctypes.c_char_p * len(adapters))(*[a.encode() for a in adapters])
        options = _library.ValuesOptions(experts, len(adapters), paths, None)
        super().__init__("qc_values_open", path.encode(), ctypes.byref(options))
        library = _library.library()
        found = [library.qc_values_at(self._handle, i).contents
                 for i in range(library.qc_values_count(self._handle))]
        self.listed = {t.name.decode(): (_library.DTYPES[t.dtype], list(t.dims[:t.ndim])) for t in found}
        self.stored_as = {t.name.decode(): (t.stored_as or b"").decode() for t in found}
        self.names = [t.name.decode() for t in found]

    def read(self, name, dtype=None, first=0, count=None):
        own, shape = self.listed[name]
        rows = shape[0] if shape else 1
        count = rows - first if count is None else count
        size = mk.tensor_bytes(dtype or own, shape) // max(rows, 1) * max(count, 0)
        out = ctypes.create_string_buffer(size + 1)
        _library.call("qc_values_read", self._handle, self.names.index(name), first, count,
                      ctypes.addressof(out), _library.DTYPES.index(dtype or own))
        return out.raw[:size]


@unittest.skipIf(SANITIZED, "a library with sanitizers cannot be loaded")
class Case(test_forms.Forms):
    replaces = True
    scale = None

    def check(self, model, *options, experts=AS_FOUND, adapters=(), stored=None, types=("bf16", "fp16")):
        """Every tensor of a conversion to floats, whole and in two ranges of rows."""
        with Values(self.path(model), experts, [self.path(a) for a in adapters]) as v:
            self.assertEqual(v.names, sorted(v.names, key=str.encode))
            for to in types:
                self.ok("-q", "--force", *PLAIN, "--to", to, *options, model, "floats")
                floats = mk.read_checkpoint(self.path("floats"))
                self.assertEqual(sorted(floats), sorted(v.names))
                for name, (dtype, shape, data) in floats.items():
                    with self.subTest(model=model, name=name, dtype=dtype):
                        self.assertEqual(v.listed[name][1], shape)
                        self.assertEqual(v.read(name, dtype), data)
                        rows = shape[0] if shape else 1
                        half = rows // 2 or 1
                        self.assertEqual(v.read(name, dtype, 0, half) + v.read(name, dtype, half), data)
            if stored:
                self.assertEqual({s for s in v.stored_as.values() if s}, set(stored))


class Plain(Case):
    def test_floats_integers_and_scalars(self):
        tensors = {Q: ("BF16", [64, 96], mk.random_bytes("BF16", [64, 96], self.rng)),
                   "a.weight": ("F32", [3, 5, 7], mk.random_bytes("F32", [3, 5, 7], self.rng)),
                   "b.weight": ("F64", [4], struct.pack("<4d", 1, -2.5, 1 / 3, 0)),
                   "position_ids": ("I64", [1, 6], struct.pack("<6q", *range(6))), "scalar": ("F16", [], b"\0\x3c"),
                   "none.weight": ("BF16", [0, 8], b"")}
        self.model(tensors, {"model_type": "llama"}, shard_bytes=9000)
        with Values(self.path("m")) as v:
            self.assertEqual(v.listed, {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()})
            self.assertEqual(set(v.stored_as.values()), {""})
            for name, (dtype, shape, data) in tensors.items():
                self.assertEqual(v.read(name), data, name)
            self.assertEqual(v.read("b.weight", "F32"), struct.pack("<4f", 1, -2.5, 1 / 3, 0))
            self.assertEqual(v.read("position_ids", None, 0, 0), b"")
            for name, dtype, first, count, has in (("position_ids", "F32", 0, 1, "its own dtype"), (Q, "F64", 0, 1, "BF16"),
                                                   (Q, "BF16", 60, 5, "has 64 rows"), ("scalar", "F16", 1, 1, "has 1 rows")):
                with self.assertRaisesRegex(errors.UsageError, has):
                    v.read(name, dtype, first, count)
            with self.assertRaisesRegex(errors.UsageError, "number 99"):
                _library.call("qc_values_read", v._handle, 99, 0, 0, None, 0)

    def test_too_large_for_the_dtype(self):
        self.model({Q: ("F32", [2, 2], struct.pack("<4f", 1, 2, 3, 1e6))}, {"model_type": "llama"})
        with Values(self.path("m")) as v, self.assertRaisesRegex(errors.Error, "element 3 is too large for F16"):
            v.read(Q, "F16")

    def test_refused(self):
        self.model({"x.qweight": ("I32", [8, 8], bytes(256)), "x.W_q": ("I32", [8, 8], bytes(256))},
                   {"model_type": "llama", "quantization_config": {"quant_method": "hqq"}})
        with self.assertRaisesRegex(errors.InputError, "hqq|HQQ|GPTQ"):
            Values(self.path("m"))
        with self.assertRaises(errors.InputError):
            Values(self.path("nothing"))


class Outputs(Case):
    def test_what_qconv_writes(self):
        """Rows that are no whole blocks, so that blocks begin within rows; compressed and not."""
        rng = random.Random(3)
        shapes = {Q: [70, 96], test_forms.L + "mlp.up_proj.weight": [33, 160], "model.norm.weight": [96]}
        self.model({n: ("BF16", s, mk.random_bytes("BF16", s, rng)) for n, s in shapes.items()},
                   {"model_type": "llama", "torch_dtype": "bfloat16"}, name="source")
        for options, stored in ((["nf4"], "nf4"), (["nf4", "--no-double-quant", "--block-size", "128"], "nf4"),
                                (["int8"], "int8"), (["int8", "--block-size", "64"], "int8-block"),
                                (["int4", "--block-size", "32"], "w4a16"), (["int8", "--format", "compressed-tensors"], "w8a8"),
                                (["int4", "--block-size", "channel"], "w4a16-channel")):
            for packed in ("none", "zstd"):
                self.ok("-q", "--force", "--compress", packed, "--to", *options, "source", "m")
                self.check("m", stored=[stored])

    def test_conv1d(self):
        """GPT-2's matrices lie as [in, out], and their codes the other way round."""
        config = {"model_type": "gpt2", "torch_dtype": "bfloat16"}
        name = "transformer.h.0.attn.c_attn.weight"
        self.model({name: ("BF16", [96, 288], mk.random_bytes("BF16", [96, 288], self.rng)),
                    "transformer.h.0.attn.c_attn.bias": ("BF16", [288], bytes(576))}, config, name="source")
        for to in ("nf4", "int8"):
            self.ok("-q", "--force", "--to", to, "source", "m")
            self.check("m", stored=[to])
        with Values(self.path("m")) as v:
            self.assertEqual(v.listed[name], ("BF16", [96, 288]))

    def test_threads_read_at_once(self):
        self.model({"model.layers.%d.mlp.up_proj.weight" % i: ("BF16", [256, 512], mk.random_bytes("BF16", [256, 512], self.rng))
                    for i in range(8)}, {"model_type": "llama"}, name="source")
        self.ok("-q", "--to", "nf4", "source", "m")
        with Values(self.path("m")) as v:
            whole = {name: v.read(name, "F32") for name in v.names}
            wrong = []

            def work(seed):
                rng = random.Random(seed)
                for _ in range(40):
                    name, first = rng.choice(v.names), rng.randrange(256)
                    count = rng.randrange(257 - first)
                    if v.read(name, "F32", first, count) != whole[name][2048 * first:2048 * (first + count)]:
                        wrong.append(name)

            threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            self.assertEqual(wrong, [])


class Foreign(Case):
    def test_fp8(self):
        shape = [136, 272]
        for tile, dtype, scales in (((128, 128), "F8_E4M3", "F32"), ((16, 32), "F8_E5M2", "BF16")):
            config = dict(test_forms.DEEPSEEK, quantization_config={"quant_method": "fp8", "weight_block_size": list(tile)})
            tensors, _ = test_forms.fp8(self.rng, Q, shape, tile, dtype, scales)
            self.model({**tensors, "model.norm.weight": ("BF16", [64], bytes(128))}, config)
            self.check("m", stored=["fp8"])

    def test_mxfp4(self):
        test_forms.Mxfp4.make(self, test_forms.Mxfp4.CONFIG)
        self.check("m", stored=["mxfp4"])
        with Values(self.path("m")) as v:
            self.assertEqual(v.listed[self.UP], ("BF16", [3, 64, 96]))

    UP, DOWN = test_forms.Mxfp4.UP, test_forms.Mxfp4.DOWN

    def test_integers(self):
        w = test_integers.Weight
        ct = test_integers.ct_config
        for weight, form, more, config, stored in (
                (w(self.rng, 96, 128, 8, 1, "BF16", symmetric=True), test_integers.int_quantized, {"symmetric": True},
                 ct("int-quantized", 8, "channel"), "w8a16-channel"),
                (w(self.rng, 40, 72, 4, 1, single=True), test_integers.pack_quantized, {"single": True},
                 ct("pack-quantized", 4, "tensor", symmetric=False), None),
                (w(self.rng, 96, 128, 4, 4, shuffled=True), test_integers.pack_quantized, {"shuffled": True},
                 ct("pack-quantized", 4, "group", 32, symmetric=False, actorder="group"), None),
                (w(self.rng, 96, 128, 4, 4, shuffled=True), test_integers.gptq, {},
                 test_integers.Gptq.config(self, desc_act=True), "gptq"),
                (w(self.rng, 96, 128, 4, 4), test_integers.awq, {}, test_integers.Awq.CONFIG, "awq")):
            with self.subTest(form=form.__name__):
                self.model({**form(weight, **more), "model.norm.weight": ("BF16", [64], bytes(128))},
                           {"model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": config})
                self.check("m", stored=stored and [stored])
                with Values(self.path("m")) as v:
                    self.assertEqual(v.read(Q, "F32"), mk.encode("F32", weight.values()))


class Experts(Case):
    layers = test_forms.Fused.layers
    both = test_experts.Experts.both

    def test_each_form_as_either(self):
        for family in test_experts.FAMILIES:
            self.both(family)
            for form in ("nf4", "int8", "bf16"):
                for source, written in (("r", "separate"), ("f", "stacked")):
                    self.ok("-q", "--force", "--experts", written, *test_experts.FORMS[form], source, "m")
                    self.check("m", types=["bf16"])
                    self.check("m", "--experts", "separate", experts=SEPARATE, types=["bf16"])
                    self.check("m", "--experts", "stacked", experts=STACKED, types=["bf16"])


class Adapters(Case):
    def test_merged(self):
        shape = [64, 96]
        self.model({Q: ("BF16", shape, mk.random_bytes("BF16", shape, self.rng)),
                    "model.norm.weight": ("BF16", [96], bytes(192))}, {"model_type": "llama"})
        a, b = mk.random_bytes("F32", [4, 96], self.rng), mk.random_bytes("F32", [64, 4], self.rng)
        module = "base_model.model." + Q[:-len(".weight")]
        os.mkdir(self.path("lora"))
        mk.write_safetensors(self.path("lora", "adapter_model.safetensors"),
                             {module + ".lora_A.weight": ("F32", [4, 96], a), module + ".lora_B.weight": ("F32", [64, 4], b)})
        mk.write_json(self.path("lora", "adapter_config.json"),
                      {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
        self.check("m", "--lora", "lora", adapters=["lora"])
        with Values(self.path("m")) as plain, Values(self.path("m"), adapters=[self.path("lora")]) as merged:
            self.assertEqual(merged.listed, plain.listed)
            self.assertNotEqual(merged.read(Q), plain.read(Q))


if __name__ == "__main__":
    unittest.main()
