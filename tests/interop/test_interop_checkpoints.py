"""Whole checkpoints: qconv's in transformers + bitsandbytes, and theirs in qconv.

For every model and form: (a) from_pretrained takes qconv's output as it is and the model runs;
(b) every stored tensor equals what bitsandbytes makes of the same weights, exceptions counted and
bounded; (c) so do the weights both stand for, and the outputs of the model; (d) qconv reads what
transformers + bitsandbytes saved and gives the values bitsandbytes gives.
"""
import functools
import json
import os
import unittest

import bitsandbytes.nn.modules
import interop_support as s
import numpy as np
import torch
import transformers
from bitsandbytes import functional as F
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig

MAJOR = int(transformers.__version__.split(".")[0])
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CLASSES = {"minilm": AutoModel}
STATE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map",
         "quant_state.bitsandbytes__nf4")

s.quiet()
torch.manual_seed(0)


@functools.lru_cache(maxsize=None)
def source_of(name):
    """The model's folder. transformers 4 cannot load the published tinystories at all: its one copy
    of the tied table has the head's name; there, the same file under the table's name."""
    path = s.model_path(name)
    if name != "tinystories" or MAJOR > 4:
        return path
    return s.under_table_name(path)


def load(name, folder, **options):
    model, info = CLASSES.get(name, AutoModelForCausalLM).from_pretrained(
        folder, output_loading_info=True, **options)
    return model.eval(), info


def source_dtype(name):
    tensors = s.read_folder(source_of(name))
    return TORCH_DTYPES[next(d for d, _, _ in tensors.values() if d in TORCH_DTYPES)]


def bnb_config(form, skip=None, compute=torch.bfloat16):
    if form == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                              bnb_4bit_use_double_quant=form == "nf4-double",
                              bnb_4bit_compute_dtype=compute, llm_int8_skip_modules=skip)


def modules(model, kind):
    return {n: m for n, m in model.named_modules() if type(m) is kind}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@functools.lru_cache(maxsize=None)
def theirs(name, form):
    """(model, folder): quantized by transformers + bitsandbytes and saved by them."""
    skip = config_of(s.converted(source_of(name), form))["quantization_config"]
    model, _ = load(name, source_of(name), quantization_config=bnb_config(
        form, skip["llm_int8_skip_modules"], getattr(torch, skip.get("bnb_4bit_compute_dtype", "bfloat16"))),
        dtype=source_dtype(name), device_map="cpu")
    folder = s.SCRATCH / "theirs" / f"{name}-{form}"
    model.save_pretrained(folder)
    return model, folder


@functools.lru_cache(maxsize=None)
def ours(name, form):
    return load(name, s.converted(source_of(name), form), dtype=source_dtype(name))


def inputs(name, seed=0):
    vocabulary = config_of(source_of(name))["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, min(vocabulary, 20000), (2, 48), generator=generator)


@torch.no_grad()
def outputs(model, ids):
    return model(input_ids=ids)[0].float()


def distance(a, b):
    return float((a - b).norm() / b.norm())


def dequantized(tensors, name, dtype):
    """A stored weight as bitsandbytes restores it, straight into dtype."""
    def get(key):
        kind, shape, raw = tensors[key]
        numpy_kind = {"U8": np.uint8, "I8": np.int8, "F32": np.float32}[kind]
        return torch.from_numpy(np.frombuffer(raw, numpy_kind).copy()).reshape(shape)

    module = name.removesuffix(".weight")
    if tensors[name][0] == "I8":
        restored = torch.ops.bitsandbytes.int8_vectorwise_dequant.default(
            get(name), get(f"{module}.SCB"))
        return restored.to(dtype)
    parts = {f"{name}.{k}": get(f"{name}.{k}") for k in STATE if f"{name}.{k}" in tensors}
    state = F.QuantState.from_dict(parts, device=torch.device("cpu"))
    state.dtype = dtype
    return F.dequantize_4bit(get(name), state)


def raw(t):
    return t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def quantized_names(tensors):
    return [n for n, (dtype, _, _) in tensors.items()
            if n.endswith(".weight") and dtype in ("U8", "I8")]


class Checkpoint:
    """The checks; one subclass per model and form below."""

    name = form = None

    @classmethod
    def setUpClass(cls):
        cls.source = source_of(cls.name)
        cls.out = s.converted(cls.source, cls.form)
        cls.stored = s.read_folder(cls.out)
        cls.dtype = source_dtype(cls.name)
        cls.kind = Linear8bitLt if cls.form == "int8" else Linear4bit

    # ---- (a)

    def test_a1_loads_unchanged_and_runs(self):
        model, info = load(self.name, self.out)  # nothing said about dtype or quantization
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            self.assertFalse(info[key], key)
        quantized = modules(model, self.kind)
        expected = {n.removesuffix(".weight") for n in quantized_names(self.stored)}
        self.assertEqual(set(quantized), expected)
        self.assertTrue(torch.isfinite(outputs(model, inputs(self.name))).all())
        if hasattr(model, "lm_head"):
            ids = model.generate(inputs(self.name)[:1, :8], max_new_tokens=12, do_sample=False)
            self.assertEqual(ids.shape[1], 20)

    def test_a2_skip_modules_stay(self):
        model, _ = ours(self.name, self.form)
        skip = config_of(self.out)["quantization_config"]["llm_int8_skip_modules"]
        plain = modules(model, torch.nn.Linear)
        for name in plain:
            self.assertIn(name, skip)
            self.assertTrue(plain[name].weight.dtype.is_floating_point)
        s.note(f"{self.name} {self.form}: {len(modules(model, self.kind))} modules quantized, "
               f"{sorted(plain) or 'none'} left alone")

    def test_a4_fused_group(self):
        """A rule for queries counts for keys and values; the engines' name for the three on the
        list means no module here, and spares none but them."""
        names = [n for n in quantized_names(self.stored) if "layers.0.self_attn." in n]
        q = [n for n in names if n.endswith("q_proj.weight")]
        if not q:
            self.skipTest("no attention in the manner of Llama")
        group = [n.removesuffix(".weight") for n in names if not n.endswith("o_proj.weight")]
        out = s.converted(self.source, self.form, "--keep", q[0])
        skip = config_of(out)["quantization_config"]["llm_int8_skip_modules"]
        self.assertLessEqual({*group, q[0].replace("q_proj.weight", "qkv_proj")}, set(skip))
        model, info = load(self.name, out)
        self.assertFalse(info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
        for module in group:
            self.assertIs(type(model.get_submodule(module)), torch.nn.Linear)
        self.assertEqual(len(modules(model, self.kind)), len(quantized_names(self.stored)) - 3)

    # ---- (b)

    def test_b1_same_modules_as_transformers(self):
        """Without a list of its own, transformers quantizes the same modules."""
        model, _ = load(self.name, self.source, quantization_config=bnb_config(self.form),
                        dtype=self.dtype, device_map="cpu")
        default = set(modules(model, self.kind))
        mine = {n.removesuffix(".weight") for n in quantized_names(self.stored)}
        # transformers 4 keeps a headless model's last module; transformers 5 does not.
        allowed = {"pooler.dense"} if self.name == "minilm" else set()
        self.assertLessEqual(default ^ mine, allowed)
        if default != mine:
            s.note(f"{self.name} {self.form}: qconv and transformers {transformers.__version__} "
                   f"differ in {sorted(default ^ mine)}")

    def test_b2_stored_tensors(self):
        _, folder = theirs(self.name, self.form)
        mine, other = self.stored, s.read_folder(folder)
        # A tied table may be saved under either of its names.
        tied = {"lm_head.weight", "model.embed_tokens.weight"}
        names = set(tied) if self.name == "tinystories" else set()
        # buffers that transformers rebuilds
        names |= {n for n in mine if n.endswith(("position_ids", "inv_freq"))}
        self.assertLessEqual(set(mine) ^ set(other), names)
        if tied <= names:
            self.assertEqual(s.difference(*(t[(tied & set(t)).pop()] for t in (mine, other))), "")
        equal, exceptions = 0, ("absmax", "nested_absmax", "quant_state.bitsandbytes__nf4")
        for name in sorted(set(mine) & set(other)):
            if name.endswith(exceptions) and self.form != "int8":
                self.check_state(name, mine[name], other[name])
                continue
            self.assertEqual(s.difference(mine[name], other[name]), "", name)
            equal += 1
        s.note(f"{self.name} {self.form}: {equal} tensors equal byte for byte, "
               f"{len(set(mine) & set(other)) - equal} of scales and state checked on their own")

    def check_state(self, name, mine, other):
        if not name.endswith("quant_state.bitsandbytes__nf4"):
            self.assertEqual(mine[:2], other[:2], name)  # dtype and shape
            if self.form == "nf4":
                self.assertEqual(s.difference(mine, other), "", name)
            return
        text, their_text = mine[2].decode(), other[2].decode()
        state, their_state = json.loads(text), json.loads(their_text)
        offset, their_offset = (t.pop("nested_offset", 0.0) for t in (state, their_state))
        self.assertEqual(list(state.items()), list(their_state.items()), name)
        self.assertEqual(text.rstrip(" "), json.dumps(json.loads(text)), name)
        if self.form == "nf4":
            self.assertEqual(text.rstrip(" "), their_text, name)
        self.assertLessEqual(abs(offset - their_offset), 2.0**-8 * abs(their_offset), name)
        self.assertEqual(s.bfloat16_nearest(offset), np.float32(offset), name)

    # ---- (c)

    def test_c1_dequantized_weights(self):
        _, folder = theirs(self.name, self.form)
        other = s.read_folder(folder)
        sums = np.zeros(2)
        for name in quantized_names(self.stored):
            mine, yours = (dequantized(t, name, torch.float32) for t in (self.stored, other))
            if self.form != "nf4-double":
                self.assertTrue(torch.equal(mine, yours), name)
            sums += [float((mine - yours).square().sum()), float(yours.square().sum())]
        relative = (sums[0] / sums[1]) ** 0.5
        self.assertLessEqual(relative, 0.006 if self.form == "nf4-double" else 0)
        s.note(f"{self.name} {self.form}: weights restored from both files differ by "
               f"{relative:.2e} of their norm")

    def test_c2_outputs(self):
        mine, _ = ours(self.name, self.form)
        other, _ = theirs(self.name, self.form)
        ids = inputs(self.name)
        a, b = outputs(mine, ids), outputs(other, ids)
        plain, _ = load(self.name, self.source, dtype=torch.float32)
        full = outputs(plain, ids)
        if self.form != "nf4-double":
            self.assertTrue(torch.equal(a, b), distance(a, b))
        apart, mine_off, other_off = distance(a, b), distance(a, full), distance(b, full)
        self.assertLessEqual(apart, 0.35 * other_off)
        self.assertLessEqual(mine_off, 1.1 * other_off)
        s.note(f"{self.name} {self.form}: outputs of the two differ by {apart:.2e}; from the "
               f"float32 model ours by {mine_off:.4f}, theirs by {other_off:.4f}")

    # ---- (d)

    def test_d1_inspect_reads_theirs(self):
        _, folder = theirs(self.name, self.form)
        answer = json.loads(s.qconv("inspect", "--json", folder))
        schemes = {t["name"]: t for t in answer["tensors"] if t["scheme"]}
        other = s.read_folder(folder)
        names = quantized_names(other)
        self.assertEqual(set(schemes), set(names))
        original = s.read_folder(self.source)
        for name in names:
            entry = schemes[name]
            self.assertEqual(entry["scheme"], "int8" if self.form == "int8" else "nf4", name)
            self.assertEqual(entry["logical_shape"], original[name][1], name)
            if self.form != "int8":
                self.assertEqual(entry["double_quant"], self.form == "nf4-double", name)
                self.assertEqual(entry["block_size"], 64, name)
        self.assertGreater(len(s.qconv("inspect", folder)), 0)

    def check_dequantized_by_qconv(self, folder, to, rest):
        dtypes = {"bf16": (torch.bfloat16, "BF16"), "fp16": (torch.float16, "F16")}
        out = s.SCRATCH / "dequantized" / f"{folder.parent.name}-{folder.name}-{to}-{rest}"
        s.qconv("--to", to, "--rest", rest, "--compress", "none", "-q", folder, out)
        stored, result = s.read_folder(folder), s.read_folder(out)
        names = quantized_names(stored)
        module_states = {n for n in stored if n.endswith((".SCB", ".weight_format"))
                         or any(n.endswith(f".weight.{k}") for k in STATE)}
        self.assertEqual(set(result), set(stored) - module_states)
        for name in result:
            kind, shape, data = stored[name]
            if name in names:
                dtype, kind = dtypes[to]
                tensor = dequantized(stored, name, dtype)
                shape, data = list(tensor.shape), raw(tensor)
            elif rest != "keep" and kind in TORCH_DTYPES:
                dtype, kind = dtypes[rest]
                data = raw(torch.from_numpy(s.as_float32(stored[name][0], data).copy()).to(dtype))
            self.assertEqual(s.difference(result[name], (kind, shape, data)), "", f"{name} as {to}")
        self.assertNotIn("quantization_config", config_of(out))
        model, info = load(self.name, out, dtype=torch.float32)
        self.assertFalse(info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
        self.assertFalse(modules(model, self.kind))
        self.assertTrue(torch.isfinite(outputs(model, inputs(self.name))).all())
        return len(names)

    def test_d2_theirs_dequantized(self):
        _, folder = theirs(self.name, self.form)
        for to, rest in (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "keep")):
            count = self.check_dequantized_by_qconv(folder, to, rest)
        s.note(f"{self.name} {self.form} saved by transformers, --to bf16 and fp16: {count} "
               f"weights equal bitsandbytes' bit for bit")

    def test_d3_ours_dequantized(self):
        for to, rest in (("bf16", "bf16"), ("fp16", "keep")):
            self.check_dequantized_by_qconv(self.out, to, rest)
        for method in ("search", "refit"):  # scales that are not the largest value, some of them negative
            self.check_dequantized_by_qconv(s.converted(self.source, self.form, "--scale", method), "bf16", "bf16")


def make_cases():
    for name in s.MODELS:
        for form in s.FORMS:
            title = f"{name}-{form}".title().replace("-", "")
            globals()[title] = type(title, (Checkpoint, unittest.TestCase),
                                    {"name": name, "form": form, "__module__": __name__})


make_cases()


class Published(unittest.TestCase):
    def test_tinystories_as_published(self):
        """One tied table under the head's name: loads where transformers takes that name."""
        path = s.model_path("tinystories")
        for form in s.FORMS:
            out = s.converted(path, form)
            if MAJOR > 4:
                model, _ = load("tinystories", out)
                self.assertTrue(torch.isfinite(outputs(model, inputs("tinystories"))).all())
                continue
            plain, _ = load("tinystories", path)
            self.assertTrue(plain.lm_head.weight.is_meta)
        if MAJOR == 4:
            s.note(f"transformers {transformers.__version__} leaves the head of the published "
                   "tinystories empty, quantized or not; checked with its table's other name")

    def test_offline(self):
        self.assertEqual(os.environ.get("HF_HUB_OFFLINE"), "1")


def setUpModule():
    s.note(f"transformers {transformers.__version__}, bitsandbytes {bitsandbytes.__version__}, "
           f"torch {torch.__version__}")


if __name__ == "__main__":
    s.main()
