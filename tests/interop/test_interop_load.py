"""qconv.load: models straight from compressed shards.

For a zoo of tiny random models the loaded model is held against transformers + bitsandbytes on the same file, unpacked:
the same modules are quantized, every weight is restored to the same bits, every other parameter and buffer is equal, and
so are the outputs within BOUND. Models of the Llama family are held against a forward pass in numpy, in every form
that qconv writes. Faults are planted, and have to end in one exception with one sentence.
"""
import contextlib
import copy
import functools
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import unittest
import warnings
from unittest import mock

import interop_support as s
import torch
import transformers
from bitsandbytes.nn import Linear4bit, Linear8bitLt

import test_interop_zoo as zoo
import tiny_models

import qconv
from qconv.torch import Linear, QuantizedTensor, Stack

FOUR = zoo.MAJOR == 4
# Products of a few rows quantize x to 15 bits of the largest of 64 (2^-15 of it), which moves a product by about 2e-5
# of its size. What dozens of layers make of that on the way to the logits was 4e-4 at most. A scale of one block times
# 1.1 moves them by 2e-3 and more (test_planted_scale).
BOUND = 1e-3

TYPES = """llama mistral qwen2 qwen3 gemma2 gemma3 phi3 gpt2 opt bloom gpt_neox bert t5 whisper vit clip llava qwen2_vl
    mixtral qwen3_moe olmoe""".split()


def apart(mine, other):
    """Distance as a share of the other's norm."""
    mine, other = mine.double(), other.double()
    return ((mine - other).norm() / other.norm()).item()


@functools.lru_cache(maxsize=None)
def made(source, *arguments):
    """(compressed output, the same unpacked)"""
    name = re.sub(r"\W+", "_", "-".join([source.parent.name, source.name, *arguments]))
    out = s.SCRATCH / "load" / name
    s.qconv("--progress", "never", *arguments, source, out)
    assert list(out.glob("*.zst")) and not list(out.glob("*.safetensors")), out
    plain = out.with_name(name + "-plain")
    s.qconv("unpack", out, plain)
    return out, plain


def restored_by_bitsandbytes(kind, folder):
    """transformers + bitsandbytes' model of a folder with the weights that bitsandbytes restores, all in float32."""
    model, trouble = zoo.load(kind, folder, dtype=torch.float32)
    assert not trouble, trouble
    return zoo.in_float32(model)


def restored_by_qconv(kind, folder, config):
    """For experts that bitsandbytes has no module for: the weights as `qconv --to bf16` restores them are rounded, so
    those of the codes themselves, in the places where transformers puts plain weights."""
    from qconv import _loading
    with qconv._library.Reader(folder) as reader:
        tensors = _loading.read(reader, _loading.Places(folder, reader, "cpu", None), 0, False)
    config = copy.deepcopy(config)
    del config.quantization_config
    state = _loading.state_of(tensors, _loading.groups({n: d for n, (d, *_) in tensors.items()}), kind, config, torch.float32)
    state = {n: t.dequantize() if isinstance(t, QuantizedTensor) else t for n, t in state.items()}
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32,
                                experts_implementation="eager").eval()


def loaded(out, **options):
    return qconv.load(out, dtype=torch.float32, **options)


class Zoo(unittest.TestCase):
    worst = {}

    def check(self, name, form):
        model = zoo.model_of(name)
        source = zoo.saved(model, f"load-{name}")
        # Scales of NF4 are doubly quantized in one half of the types, and not in the other.
        double = ["--no-double-quant"] if form == "nf4" and TYPES.index(name) % 4 > 1 else []
        out, plain = made(source, "--to", form, *double)
        mine = loaded(out)
        self.assertIs(type(mine), type(model))
        self.assertFalse(mine.training)
        stacked = not FOUR and name in zoo.STACKED
        theirs = (restored_by_qconv(type(model), plain, transformers.AutoConfig.from_pretrained(plain)) if stacked
                  else restored_by_bitsandbytes(type(model), plain))
        plain_weights = dict(theirs.state_dict())
        quantized = {n: m for n, m in mine.named_modules() if isinstance(m, Linear)}
        stacks = {n: m for n, m in mine.named_modules() if isinstance(m, Stack)}
        self.assertEqual(bool(stacks), stacked)
        if stacked:
            with self.assertRaisesRegex(qconv.UsageError, "is not saved"):
                mine.save_pretrained(out)
        for n, stack in stacks.items():
            want = plain_weights.pop(n)
            got = torch.stack([torch.cat([part.dequantize(torch.float32) for part in parts]) for parts in stack.experts])
            self.assertTrue(torch.equal(got, want), n)
        for n, module in quantized.items():
            if any(n.startswith(f"{stack}.") for stack in stacks):
                continue
            want = plain_weights.pop(f"{n}.weight")
            self.assertTrue(torch.equal(module.dequantize(torch.float32), want), n)
        rest = {n: t for n, t in [*mine.named_parameters(), *mine.named_buffers()]
                if n.rpartition(".")[0] not in quantized or n.endswith(".bias")}
        their_rest = {n: t for n, t in [*theirs.named_parameters(), *theirs.named_buffers()]
                      if n.rpartition(".")[0] not in quantized or n.endswith(".bias")}
        their_rest = {n: t for n, t in their_rest.items() if n not in stacks}
        self.assertEqual(set(rest), set(their_rest))
        self.assertFalse([n for n in rest if not zoo.same(rest[n].data, their_rest[n].data)])
        if getattr(theirs.config.get_text_config(), "tie_word_embeddings", False) and theirs.get_output_embeddings():
            self.assertIs(mine.get_output_embeddings().weight, mine.get_input_embeddings().weight)
        if name not in zoo.NOT_RUN:
            got, want = outputs(mine, name), outputs(theirs, name)
            distance = apart(got, want)
            Zoo.worst[name, form] = distance
            self.assertLess(distance, BOUND)
        for folder in (source, out, plain):
            shutil.rmtree(folder, ignore_errors=True)

    @classmethod
    def tearDownClass(cls):
        if cls.worst:
            where = max(cls.worst, key=cls.worst.get)
            s.note(f"{len(cls.worst)} outputs equal those of the restored weights within {cls.worst[where]:.1e} "
                   f"({' '.join(where)}), {len(TYPES)} types")


def outputs(model, name):
    """zoo.outputs makes pixels of 16 bits."""
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
        return zoo.outputs(model, name)


def make_zoo():
    """One form of each type; the other version of transformers has the other form."""
    for i, name in enumerate(TYPES):
        form = ("nf4", "int8")[(i + FOUR) % 2]

        def test(self, name=name, form=form):
            self.check(name, form)
        setattr(Zoo, f"test_{name}_{form}".replace("-", "_"), test)


make_zoo()

ROOM = ["--margin", "1", "--cuda-context", "1KB", "--context", "16"]
PACKED = ["--format", "compressed-tensors"]
FORMS = {
    "nf4": ["--to", "nf4"],
    "nf4-32": ["--to", "nf4", "--block-size", "32", "--no-double-quant"],
    "nf4-4096": ["--to", "nf4", "--block-size", "4096"],
    "int8": ["--to", "int8"],
    "int8-block": ["--to", "int8", "--block-size", "64"],
    "int4-32": ["--to", "int4", "--block-size", "32"],
    "int4-channel": ["--to", "int4", "--block-size", "channel"],
    "int2-64": ["--to", "int2", "--block-size", "64"],
    "int3-32": ["--to", "int3", "--block-size", "32"],
    "int5-64": ["--to", "int5", "--block-size", "64"],
    "int6-channel": ["--to", "int6", "--block-size", "channel"],
    "int7-channel": ["--to", "int7", "--block-size", "channel"],
    "w8a16": ["--to", "int8", *PACKED, "--activation-bits", "16"],
    "w8a16-64": ["--to", "int8", *PACKED, "--activation-bits", "16", "--block-size", "64"],
    "w8a8": ["--to", "int8", *PACKED],
    "auto": ["--to", "auto", "--schemes", "nf4,int8,16bit", "--vram", "1700KB", *ROOM],
    "auto-packed": ["--to", "auto", *PACKED, "--vram", "1700KB", *ROOM],
    "bf16": ["--to", "bf16"],
}
IDS = [[(7 * i + 3 * j) % 90 + 32 for i in range(24)] for j in range(2)]


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.tensor(IDS)).logits.float().flatten(0, 1)


def form_of(form):
    return made(s.model_path("kjv-llama"), *FORMS[form])


class Forms(unittest.TestCase):
    def test_as_eval_computes(self):
        """Every form that qconv writes, mixtures among them, from compressed and from plain shards."""
        seen = {}
        for form in ("nf4", "int8", "auto") if FOUR else FORMS:  # all of them in the other version
            with self.subTest(form=form):
                out, plain = form_of(form)
                model = loaded(out, device_map="cpu")
                kinds = {m.form for m in model.modules() if isinstance(m, Linear)}
                self.assertEqual(len(kinds) > 1, form in ("auto", "auto-packed"), kinds)
                self.assertEqual(not kinds, form == "bf16")
                mine = logits(model)
                seen[form] = apart(mine, torch.from_numpy(s.our_logits(plain, IDS)))
                self.assertLess(seen[form], BOUND)
                self.assertTrue(torch.equal(mine, logits(loaded(plain, device_map="cpu", skip_digests=True))))
                # A token at a time, which takes other kernels where rows are whole groups of 64.
                with torch.no_grad():
                    token = model(input_ids=torch.tensor(IDS)[:, :1]).logits.float()[:, 0]
                self.assertLess(apart(token, mine.unflatten(0, (2, -1))[:, 0]), BOUND)
        s.note("kjv-llama against numpy: " + ", ".join(f"{f} {d:.0e}" for f, d in seen.items()))

    def test_planted_scale(self):
        """One block's scale times 1.1 is seen."""
        out, plain = form_of("nf4-32")
        model, other = loaded(out), torch.from_numpy(s.our_logits(plain, IDS))
        self.assertLess(apart(logits(model), other), BOUND)
        scales = model.model.layers[1].mlp.down_proj.scales.data.view(torch.float32)
        scales[:440] *= 1.1
        self.assertGreater(apart(logits(model), other), BOUND)

    def test_speaks(self):
        """generate() goes on as transformers does with bitsandbytes' weights, and as generation_config.json says."""
        out, plain = form_of("nf4")
        theirs = restored_by_bitsandbytes(transformers.LlamaForCausalLM, plain)
        mine = loaded(out)
        tokens = transformers.AutoTokenizer.from_pretrained(out)
        self.assertEqual(mine.generation_config.to_dict(), theirs.generation_config.to_dict())
        for start in ("In the beginning God", "And it came to pass", "Blessed are"):
            ids = tokens(start, return_tensors="pt").input_ids
            texts = [tokens.decode(m.generate(ids, max_new_tokens=48, do_sample=False)[0]) for m in (mine, theirs)]
            self.assertEqual(*texts)
            self.assertGreater(len(texts[0]), len(start) + 20)
        s.note(f"kjv-llama says: {texts[0]!r}")

    def test_dtypes(self):
        out, _ = form_of("nf4")
        self.assertEqual(qconv.load(out).dtype, torch.bfloat16)  # as config.json has it
        model = qconv.load(out, dtype="float16", threads=1)
        self.assertEqual(model.dtype, torch.float16)
        self.assertLess(apart(logits(model), logits(loaded(out))), 0.02)

    def test_arguments_for_transformers(self):
        out, _ = form_of("nf4")
        self.assertEqual(loaded(out, attn_implementation="eager").config._attn_implementation, "eager")


class Behaviour(unittest.TestCase):
    """What people do with a model."""

    def setUp(self):
        self.out, self.plain = form_of("nf4")
        self.model = loaded(self.out)
        self.logits = logits(self.model)

    def test_copies(self):
        twin = copy.deepcopy(self.model)
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        for p in self.model.parameters():
            p.data.zero_()
        self.assertTrue(torch.equal(logits(twin), self.logits))
        self.assertTrue(torch.equal(logits(again), self.logits))

    def test_state_dict(self):
        """It has the names and bytes of the file, and comes back."""
        state = self.model.state_dict()
        stored = s.read_folder(self.plain)
        quantized = [n for n in stored if "_proj." in n]
        self.assertTrue(quantized)
        for name in quantized:
            tensor = state[name].contiguous()
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            self.assertEqual((list(tensor.shape), raw), (stored[name][1], stored[name][2]), name)
        other = copy.deepcopy(self.model)
        for p in other.parameters():
            p.data.zero_()
        other.load_state_dict(state)
        self.assertTrue(torch.equal(logits(other), self.logits))
        with self.assertRaisesRegex(RuntimeError, "weight.absmax"):
            other.load_state_dict({n: t for n, t in state.items() if not n.endswith("q_proj.weight.absmax")})

    def test_save_pretrained(self):
        """What is saved is a checkpoint of bitsandbytes: the codes that were loaded, and a config that says so."""
        folder = s.SCRATCH / "load" / "saved"
        self.model.save_pretrained(folder)
        stored, again = s.read_folder(self.plain), s.read_folder(folder)
        self.assertEqual(set(again), set(stored))
        self.assertFalse([n for n in stored if "_proj." in n and s.difference(again[n], stored[n])])
        model, trouble = zoo.load(transformers.LlamaForCausalLM, folder, dtype=torch.bfloat16)
        self.assertEqual(trouble, "")
        self.assertIs(type(model.model.layers[0].mlp.up_proj), Linear4bit)

    def test_compile(self):
        compiled = torch.compile(self.model, fullgraph=True, backend="eager")
        self.assertLess(apart(logits(compiled), self.logits), 1e-5)

    def test_backward(self):
        """Gradients reach what lies before a quantized layer, and codes have none."""
        self.model.requires_grad_(False)
        self.model.get_input_embeddings().weight.requires_grad_(True)
        out = self.model(input_ids=torch.tensor(IDS), labels=torch.tensor(IDS))
        out.loss.backward()
        self.assertGreater(self.model.get_input_embeddings().weight.grad.norm().item(), 0)
        self.assertFalse([n for n, p in self.model.named_parameters() if p.requires_grad and "_proj" in n])


class Plain(unittest.TestCase):
    def test_from_pretrained(self):
        """After `import qconv` transformers reads compressed shards, one and several, as it reads the plain ones; and of them,
        not what lies beside them."""
        for form, more in (("nf4", []), ("int8", ["--max-shard-size", "500KB"])):
            out, plain = made(s.model_path("kjv-llama"), "--to", form, *more)
            with warnings.catch_warnings(action="ignore"):
                mine, theirs = (transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
                                for folder in (out, plain))
            self.assertIs(type(mine.model.layers[0].mlp.up_proj), Linear4bit if form == "nf4" else Linear8bitLt)
            self.assertTrue(torch.equal(logits(mine), logits(theirs)), form)
            self.assertEqual((mine.name_or_path, mine.dtype), (str(out), theirs.dtype))
        folder = s.SCRATCH / "load" / "twin"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(form_of("nf4")[0], folder)
        shutil.copy(form_of("int8")[1] / "model.safetensors", folder)
        with warnings.catch_warnings(action="ignore"):
            mine = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.assertIs(type(mine.model.layers[0].mlp.up_proj), Linear4bit)
        self.assertEqual(mine.state_dict().keys(), transformers.AutoModelForCausalLM.from_pretrained(
            form_of("nf4")[1]).state_dict().keys())

    def test_damaged(self):
        folder = s.SCRATCH / "load" / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(form_of("nf4")[0], folder)
        shard = folder / "model.safetensors.zst"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        with self.assertRaises(qconv.CheckError):
            transformers.AutoModelForCausalLM.from_pretrained(folder)

    def test_twin(self):
        """eval and streaming read what the manifest lists, or say that something else is there."""
        from qconv._values import Values
        folder = s.SCRATCH / "load" / "twin-of-values"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(form_of("nf4")[0], folder)
        Values(folder).close()
        shutil.copy(s.model_path("kjv-llama") / "model.safetensors", folder)
        with self.assertRaisesRegex(qconv.InputError, "'model.safetensors' lies beside 'model.safetensors.zst'"):
            Values(folder)

    def test_values_of_damaged_outputs(self):
        """What is not what was written, when it is opened or while it is read, is a CheckError, which says what helps."""
        from qconv._values import Values
        folder = s.SCRATCH / "load" / "damaged-values"

        def flip(path):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        changes = {"cut": lambda path: os.truncate(path, path.stat().st_size // 2), "flipped": flip,
                   "empty": lambda path: os.truncate(path, 0), "gone": os.unlink}
        for form, shard in enumerate(("model.safetensors.zst", "model.safetensors")):
            for name, change in changes.items():
                for opened in (False, True):
                    # Plain bytes have no checksum of their own, and what is open stays.
                    if (name, form) == ("flipped", 1) or (name, opened) == ("gone", True):
                        continue
                    shutil.rmtree(folder, ignore_errors=True)
                    shutil.copytree(form_of("nf4")[form], folder)
                    with self.subTest(shard=shard, change=name, opened=opened):
                        values = Values(folder) if opened else None
                        change(folder / shard)
                        with self.assertRaisesRegex(qconv.CheckError, f"; copy or convert {folder} again$"):
                            values = values or Values(folder)
                            for tensor in values.names:
                                values.read(tensor)
        for beside in ("config.json", "tokenizer.json"):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(form_of("nf4")[0], folder)
            os.truncate(folder / beside, 100)
            with self.assertRaisesRegex(qconv.CheckError, f"{beside}: its bytes are .*; copy or convert {folder} again$"):
                qconv.evaluate(folder, text="default", max_tokens=10)

    def test_name(self):
        """By which adapters know their base."""
        out, _ = form_of("nf4")
        model = loaded(out)
        self.assertEqual((model.name_or_path, model.config._name_or_path), (str(out), str(out)))


@unittest.skipIf(FOUR, "transformers 4 loads weights as they are in files")
class Divided(unittest.TestCase):
    """Linear layers that transformers 5 holds otherwise than files do."""
    TYPES = ["nomic_bert", "gte", "jina_embeddings_v3", "hrm_text", "molmo2_text", "tipsv2", "qianfan_ocr", "dinov2-swiglu",
             "kimi_k25", "mistral_large4"]
    # Its converters of matrices that are no experts, by what they do. A new one is to be tried, and written down here.
    KNOWN = {
        "Chunk": """hrm_text radio Dinov2Model Dinov2WithRegistersModel Dinov2Backbone Dinov2WithRegistersBackbone
            Molmo2TextModel RfDetrModel nomic_bert gte jina_embeddings_v3 qianfan_ocr sapiens2 UnlimitedOcrVisionEncoder
            Tipsv2TextModel Tipsv2VisionModel Tipsv2VisionBackbone nemo_speechlm ernie4_5_vl_moe""",
        "Split": "Molmo2TextModel lara_mini sarvam_moe",
        "Concatenate": """minimax_m3_vl Molmo2TextModel glm5_next glm5_next_text olmo_hybrid bailing_hybrid kimi_linear
            qwen4_exp_text""",
        "Transpose": "ernie4_5_vl_moe",
        # Their rows come in another order, as far as blocks do not span them: test_order.
        "Chunk PermuteForRope": "kimi_k25 step3p5_vision gradium_phonon_tts", "PermuteForRope": "mistral_large4",
        "Interleave Chunk": "inkling_mm_model",
        # Rows of the head that no token has, and queries of a loop: no linear layers that are quantized.
        "Inkling2UnpadVocab": "inkling2 inkling2_text inkling2_loop inkling2_loop_text",
        "Inkling2LoopMergeMessageQueries": "inkling2_loop_text",
    }

    def test_table(self):
        from transformers import conversion_mapping
        from transformers.core_model_loading import WeightConverter
        known, new = {(kind, name) for kind, names in self.KNOWN.items() for name in names.split()}, set()
        for name, rules in conversion_mapping._build_checkpoint_conversion_mapping().items():
            for rule in rules:
                patterns = [*getattr(rule, "source_patterns", ()), *getattr(rule, "target_patterns", ())]
                if isinstance(rule, WeightConverter) and not any("expert" in p.lower() for p in patterns):
                    new |= {(" ".join(type(o).__name__ for o in rule.operations), name)} - known
        self.assertEqual(new, set())

    @staticmethod
    def model(name):
        if name != "dinov2-swiglu":
            return zoo.model_of(name)
        config = transformers.Dinov2Config(**zoo.model_of("dinov2").config.to_dict() | {"use_swiglu_ffn": True})
        return tiny_models.made(config, transformers.Dinov2Model)

    def test_types(self):
        """Every weight has the values of the same rows of the file's, and the others are equal."""
        count = 0
        for name in self.TYPES:
            for more in (["--to", "nf4"], ["--to", "int8"], ["--to", "nf4", "--block-size", "32", "--no-double-quant"]):
                with self.subTest(name=name, form=more), warnings.catch_warnings(action="ignore"):
                    model = self.model(name)
                    source = zoo.saved(model, f"divided-{name}")
                    out, _ = made(source, *more)
                    mine = loaded(out)
                    plain = source.with_name("restored")
                    s.qconv("-q", "--to", "bf16", "--compress", "none", out, plain)
                    theirs = type(model).from_pretrained(plain, dtype=torch.float32)
                    want = theirs.state_dict()
                    # Stacks of experts are test_interop_moe.py's.
                    layers = {n: m for n, m in mine.named_modules() if isinstance(m, Linear) and ".experts." not in n}
                    self.assertTrue(any(layer.divided for layer in layers.values()))
                    for n, layer in layers.items():
                        got = layer.dequantize(torch.float32).bfloat16().float()
                        self.assertTrue(torch.equal(got, want.pop(f"{n}.weight")), n)
                        count += layer.divided
                    have = mine.state_dict()
                    self.assertFalse([n for n, t in want.items() if n.rpartition(".")[0] not in layers
                                      and ".experts." not in n and not zoo.same(have[n], t)])
                    with self.assertRaisesRegex(qconv.UsageError, "is not saved"):
                        mine.save_pretrained(out)
        s.note(f"{count} divided layers have the values of their rows, {len(self.TYPES)} types")

    def test_joined(self):
        """Weights of one form become one weight, and of several forms are refused."""
        from qconv import _weights
        for form in ("nf4", "nf4-32", "int8", "int8-block"):
            layers = loaded(form_of(form)[0]).model.layers
            parts = [layer.quantized for layer in (layers[0].mlp.gate_proj, layers[0].mlp.up_proj)]
            whole = _weights.joined(parts)
            want = torch.cat([w.dequantize(torch.float32) for w in parts])
            self.assertTrue(torch.equal(whole.dequantize(torch.float32), want), form)
            for first, end in ((0, 440), (440, 880), (220, 660), (1, 880) if form == "int8" else (32, 64)):
                got = _weights.rows_of(whole, first, end).dequantize(torch.float32)
                self.assertTrue(torch.equal(got, want[first:end]), (form, first))
        other = loaded(form_of("nf4")[0]).model.layers[0].mlp.up_proj.quantized
        with self.assertRaisesRegex(qconv.InputError, "joins 'model.layers.0.mlp.gate_proj.weight' and .*different forms"):
            _weights.joined([parts[0], other])

    def test_order(self):
        with warnings.catch_warnings(action="ignore"):
            out, _ = made(zoo.saved(zoo.model_of("kimi_k25"), "divided-kimi"), "--to", "nf4", "--block-size", "128")
            with self.assertRaisesRegex(qconv.InputError, "wqkv.weight' has blocks of 128 that span rows, .*--keep"):
                loaded(out)


class Mamba(unittest.TestCase):
    def test_what_models_ask(self):
        """falcon_mamba and jamba multiply with dt_proj's own weight unless config says that it is quantized."""
        ids = torch.arange(20, 36).reshape(2, 8)
        for name in ("falcon_mamba", "jamba"):
            with warnings.catch_warnings(action="ignore"), torch.no_grad():
                model = zoo.model_of(name)
                model.config.use_mamba_kernels = False
                source = zoo.saved(model, f"asks-{name}")
                out, _ = made(source, "--to", "nf4", "--quantize", "*dt_proj.weight")
                mine = loaded(out)
                s.qconv("-q", "--to", "bf16", "--compress", "none", out, source.with_name("asks-plain"))
                theirs = type(model).from_pretrained(source.with_name("asks-plain"), dtype=torch.float32)
                distance = apart(*(m(input_ids=ids, use_cache=False).logits for m in (mine, theirs)))
            self.assertTrue([n for n, m in mine.named_modules() if n.endswith("dt_proj") and isinstance(m, Linear)], name)
            self.assertLess(distance, 0.02, name)  # the restored weights are rounded to bfloat16


class Devices(unittest.TestCase):
    def test_maps(self):
        out, _ = form_of("nf4")
        want = logits(loaded(out))
        for device_map in ("cpu", {"": "cpu"}, {"model": "cpu", "lm_head": torch.device("cpu")}, "auto"):
            self.assertTrue(torch.equal(logits(loaded(out, device_map=device_map)), want), device_map)

    def test_no_such_device(self):
        out, _ = form_of("nf4")
        for device, words in (("cuda:0", "no cuda:0"), (3, "no cuda:3"), ({"model": "cpu", "lm_head": "cuda:1"},
                              "no cuda:1"), ("npu9x", "no device 'npu9x'"), ({"model": "disk", "lm_head": "cpu"}, "disk")):
            with self.assertRaisesRegex(qconv.DeviceError, words):
                loaded(out, device_map=device)

    def test_plan(self):
        """The plan's devices where they exist; a sentence where they do not; all of it on the CPU if asked for."""
        out, plain = made(s.model_path("kjv-llama"), "--to", "nf4", "--vram", "2x740KB", *ROOM)
        devices = [d["name"] for d in json.loads((out / "qconv.json").read_text())["placement"]["devices"]]
        self.assertEqual(devices, ["cuda:0", "cuda:1"])
        with self.assertRaisesRegex(qconv.DeviceError, "no cuda:0.* was made for it; device_map=\"cpu\" loads it all"):
            loaded(out)
        self.assertLess(apart(logits(loaded(out, device_map="cpu")), torch.from_numpy(s.our_logits(plain, IDS))),
                        BOUND)


@unittest.skipIf(FOUR, "transformers 5 has the same test")
class Memory(unittest.TestCase):
    MORE = 300 << 20

    def test_peak(self):
        """No second copy and nothing unpacked: the peak is below the output's size plus 300 MB."""
        torch.manual_seed(1)
        config = transformers.LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=18, vocab_size=4096,
                                          num_attention_heads=8, num_key_value_heads=8, architectures=["LlamaForCausalLM"])
        folder = s.SCRATCH / "load" / "wide"
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        numbers = torch.randn(1 << 20).to(torch.bfloat16) * 0.02
        model.to_empty(device="cpu")
        for p in model.parameters():
            p.data.view(-1)[:] = numbers.repeat(-(-p.numel() // numbers.numel()))[:p.numel()]
        model.save_pretrained(folder)
        del model
        out, plain = made(folder, "--to", "int8")
        shutil.rmtree(folder)
        size = sum(f.stat().st_size for f in plain.glob("*.safetensors"))
        shutil.rmtree(plain)
        program = ("import re, sys, torch, transformers\n"
                   "transformers.LlamaForCausalLM, transformers.AutoConfig\n"
                   "import qconv, qconv._loading\n"
                   "def peak(): return int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) << 10\n"
                   "before = peak()\n"
                   "model = qconv.load(sys.argv[1])\n"
                   "print(before, peak())\n")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(s.ROOT / "python"), *sys.path])}
        printed = subprocess.run([sys.executable, "-c", program, str(out)], env=environment, capture_output=True, text=True)
        self.assertEqual(printed.returncode, 0, printed.stderr[-2000:])
        before, peak = map(int, printed.stdout.split()[-2:])
        shutil.rmtree(out)
        s.note(f"an output of {size >> 20} MB: loading takes {peak - before >> 20} MB")
        self.assertGreater(peak - before, size // 2)
        self.assertLess(peak - before, size + self.MORE)


class Faults(unittest.TestCase):
    def copied(self, form="nf4"):
        folder = s.SCRATCH / "load" / "fault"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(form_of(form)[0], folder)
        return folder

    def refused(self, kind, words, folder, **options):
        with self.assertRaisesRegex(kind, words) as caught:
            loaded(folder, **options)
        self.assertNotIn("\n", str(caught.exception))

    def test_shards(self):
        folder = self.copied()
        shard = next(folder.glob("*.zst"))
        good = shard.read_bytes()
        for at in (len(good) // 2, len(good) // 4, len(good) - 4000):
            shard.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1:])
            self.refused(qconv.CheckError, r"model\.safetensors", folder)
        shard.write_bytes(good[:-1000])
        self.refused(qconv.Error, r"model\.safetensors", folder)
        shard.unlink()
        self.refused(qconv.Error, r"model\.safetensors", folder)

    def test_manifest(self):
        folder = self.copied()
        manifest = folder / "qconv.json"
        manifest.write_text(manifest.read_text().replace('"nf4"', '"nf5"', 1))
        self.refused(qconv.Error, "qconv.json", folder)
        manifest.unlink()
        self.refused(qconv.InputError, "qconv.json", folder)
        self.refused(qconv.Error, "nowhere", s.SCRATCH / "nowhere")

    def config(self, folder, **changes):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def test_architectures(self):
        folder, trusting = self.copied(), {"skip_digests": True}
        self.config(folder, architectures=["LlamaForDivination"])
        self.refused(qconv.InputError, "has no LlamaForDivination", folder, **trusting)
        self.config(folder, architectures=["LlamaForCausalLM"], model_type="llama9")
        self.refused(qconv.InputError, "model_type 'llama9'", folder, **trusting)
        self.config(folder, model_type="llama", hidden_size=384)
        self.refused(qconv.InputError, "does not take the output as a LlamaForCausalLM", folder, **trusting)
        self.config(folder, hidden_size=192, num_hidden_layers=2)
        self.refused(qconv.InputError, "no place for the quantized weight 'model.layers.2", folder, **trusting)
        (folder / "config.json").unlink()
        self.refused(qconv.InputError, "has no config.json", folder)

    def test_side_files(self):
        """What decides which model it is has the bytes that were written, or is not believed."""
        for name, text in (("config.json", None), ("generation_config.json", '{"max_length": 7}'),
                           ("device_map.json", '{"model": "cpu", "lm_head": "cpu"}')):
            folder = self.copied()
            self.config(folder, rms_norm_eps=0.1) if text is None else (folder / name).write_text(text)
            self.refused(qconv.CheckError, rf"{name}: (its bytes are not|qconv\.json does not list)", folder)
            loaded(folder, skip_digests=True)

    def test_keys(self):
        """Weights that a config asks for and that are not there are no random numbers."""
        folder = self.copied()
        self.config(folder, num_hidden_layers=5)
        self.refused(qconv.InputError, "no weights for 'model.layers.4.input_layernorm.weight', .* and [0-9]+ more, which "
                     "LlamaForCausalLM", folder, skip_digests=True)
        self.config(folder, num_hidden_layers=4, architectures=["LlamaModel"])
        with self.assertWarnsRegex(qconv.QconvWarning, "LlamaModel of .* does not use the checkpoint's 'lm_head.weight'"):
            loaded(folder, skip_digests=True)

    def test_versions(self):
        out, _ = form_of("nf4")
        installed = qconv._stream_needs.version
        with mock.patch.object(qconv._stream_needs, "version", lambda name: {"transformers": "4.40.1"}.get(name, "9.9")):
            self.refused(qconv.UsageError, r"needs transformers 4\.57 or later, and this is 4\.40\.1: pip install", out)
        for package in ("torch", "transformers"):
            def lacking(name, package=package):
                if name == package:
                    raise importlib.metadata.PackageNotFoundError(name)
                return installed(name)
            with mock.patch.object(qconv._stream_needs, "version", lacking):
                self.refused(qconv.UsageError, f"the Python package {package}, which is missing: pip install", out)
        with mock.patch.object(qconv._library, "INTERFACE", "9.9"), unlocked():
            self.refused(qconv.ProgramError, "this package is for 9.9", out)
        with mock.patch.dict(os.environ, {"QCONV_LIBRARY": str(out / "config.json")}), unlocked():
            self.refused(qconv.ProgramError, "config.json cannot be used", out)


@contextlib.contextmanager
def unlocked():
    """The library is opened anew, before and after."""
    qconv._library.library.cache_clear()
    try:
        yield
    finally:
        qconv._library.library.cache_clear()


if __name__ == "__main__":
    s.main()
