"""A zoo of model types: tiny random models, qconv's form of each beside what transformers and
bitsandbytes make of the same model.

For every type and form: from_pretrained takes qconv's output without a missing, unexpected or
mismatched key and without a warning that the source does not give, too; the same modules are
quantized as bitsandbytes takes by itself, but for those in LEFT_ALONE; codes, scales and every
other parameter and buffer are equal, and so are the outputs, all bit for bit.

usage: test_interop_zoo.py --all [NAME...]   every type that transformers can build, in a table
"""
import inspect
import json
import logging
import re
import shutil
import subprocess
import sys
import unittest
import warnings

import bitsandbytes.nn.modules
import interop_support as s
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from tiny_models import MAJOR, TYPES, made, model_of
from transformers import BitsAndBytesConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

bitsandbytes.nn.modules.has_avx512bf16 = lambda: False  # see interop_support.quiet
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # the matrices are tiny

# ---- what is known of types ----------------------------------------------------------------------

# Experts that transformers 5 holds in one tensor: the output is for transformers 4.
STACKED = set("mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 olmoe phimoe glm4_moe jamba "
              "minimax".split())
# Of these only what is in memory is compared: what they compute takes more than a test of this
# size can make up, or what bitsandbytes has not on a CPU (int8 of activations with outliers).
NOT_RUN = {"grounding-dino", "jamba", "mllama", "qwen2_audio", "blip", "idefics3", "smolvlm"}
if MAJOR > 4:
    NOT_RUN |= {"lfm2", "deepseek_v2", "deepseek_v3"}

# Modules that qconv leaves in 16 bit and bitsandbytes by itself does not, and the other way round.
LEFT_ALONE = re.compile(r"(?:^|\.)(?:"
                        r"gate|router(?:\.layer)?|shared_expert_gate"  # routers
                        r"|dt_proj|encoder_output_bbox_embed\.layers\.2"  # a side shorter than 32
                        r"|lm_head\.dense|classifier|text_model\.head"  # with their heads
                        r"|head\.attention\.out_proj"  # multiplied with raw
                        r"|(?:class_embed|bbox_embed)\b.*)$")
# transformers 4 leaves the last module of a model alone, whatever it is.
QUANTIZED = re.compile(r"(?:^|\.)(?:predictions\.(?:transform\.)?dense|head\.mlp\.fc2)$")


# ---- loading and comparing ----------------------------------------------------------------------


class Warnings(logging.Handler):
    """What transformers says, instead of printing it."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(re.sub(r"\S*/\S*", "PATH", record.getMessage()))

    def taken(self):
        lines, self.lines = self.lines, []
        return set(lines)


WARNINGS = Warnings()
LOGGER = transformers.utils.logging.get_logger()
LOGGER.handlers[:] = [WARNINGS]
LOGGER.propagate = False


def bnb_config(form, skip=None):
    if form == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                              bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=skip)


def saved(model, name):
    folder = s.SCRATCH / "zoo" / name
    shutil.rmtree(folder, ignore_errors=True)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(folder)
    return folder


def converted(source, form, *arguments):
    """(folder, what qconv said): "nf4" without double quantization, or int8."""
    out = source.with_name(f"{source.name}-{form}")
    shutil.rmtree(out, ignore_errors=True)
    plain = ["--no-double-quant"] if form == "nf4" else []
    done = subprocess.run([str(a) for a in (s.QCONV, "convert", "--progress", "never", "--scale", "absmax",
                                            "--compress", "none", "--to", form, *plain, *arguments,
                                            source, out)], capture_output=True, text=True)
    if done.returncode and "though nothing asked for it" not in done.stderr:  # stacks of experts that no option quantizes
        raise AssertionError(done.stderr)
    said = [line for line in done.stderr.splitlines()
            if "warning" in line and "general rules choose" not in line]
    return out, "\n".join(said)


def load(kind, folder, **options):
    """(model, trouble): trouble is "" or what from_pretrained reports."""
    with warnings.catch_warnings(action="ignore"):  # Python's: of torch, not of transformers
        model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    trouble = {key: sorted(map(str, keys))[:4] for key, keys in info.items() if keys}
    return model.eval(), str(trouble) if trouble else ""


def state(model):
    """({quantized module: its tensors}, {other parameter or buffer: its tensor})"""
    quantized, rest = {}, {}
    for name, module in model.named_modules():
        if type(module) is Linear4bit:
            held = getattr(module.weight, "quant_state", None)
            quantized[name] = (module.weight.data, held and held.absmax, held and held.shape,
                               held and held.dtype)
        elif type(module) is Linear8bitLt:
            scb = getattr(module.weight, "SCB", None)
            quantized[name] = (module.weight.data, module.state.SCB if scb is None else scb)
        for kind in (module.named_parameters, module.named_buffers):
            for key, tensor in kind(recurse=False):
                if name not in quantized or key != "weight":
                    rest[f"{name}.{key}"] = (tensor.data,)
    return quantized, rest


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype == b.dtype and a.shape == b.shape and
                torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))
    return a == b


def differing(mine, other):
    return [key for key in mine if key in other
            and not all(same(x, y) for x, y in zip(mine[key], other[key]))]


def default_modules(model, form):
    """Names of the modules that transformers would quantize without a list."""
    with torch.device("meta"):
        model = type(model)._from_config(model.config)
    from transformers.integrations import bitsandbytes as integration
    keys = getattr(integration, "get_keys_to_not_convert", None)
    if keys is None:
        from transformers.quantizers.base import get_keys_to_not_convert as keys
    # Also what the class holds in 32 bit.
    skip = keys(model) + list(getattr(model, "_keep_in_fp32_modules", None) or [])
    replaced = integration.replace_with_bnb_linear(model, modules_to_not_convert=skip,
                                                   quantization_config=bnb_config(form))
    return {n for n, m in replaced.named_modules() if type(m) in (Linear4bit, Linear8bitLt)}


def in_float32(model):
    """Its linear layers of bitsandbytes, which other checks hold against it, by plain ones, and all else in float32."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            module.weight.quant_state.dtype = torch.float32
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
        elif isinstance(module, Linear8bitLt):
            scales = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            weight = module.weight.data.float() * scales[:, None] * (1 / 127)
        else:
            continue
        new = torch.nn.Linear(*weight.shape[::-1], module.bias is not None, device="meta")
        new.weight, new.bias = torch.nn.Parameter(weight, requires_grad=False), module.bias
        model.set_submodule(name, new)
    for tensor in [*model.parameters(), *model.buffers()]:  # transformers 5 leaves some in 16 bits
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            tensor.data = tensor.data.float()
    return model


@torch.no_grad()
def outputs(model, name):
    takes = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(3)
    inputs = {}
    if "input_ids" in takes and name not in ("vit", "dinov2"):
        inputs["input_ids"] = torch.arange(20, 36).reshape(2, 8)
    if "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = torch.arange(24, 40).reshape(2, 8)
    if name in ("clip", "siglip", "vit", "dinov2") or name.startswith("vit-"):
        inputs["pixel_values"] = torch.randn(2, 3, 32, 32, generator=generator).bfloat16()
    if name == "whisper":
        inputs["input_features"] = torch.randn(2, 80, 128, generator=generator).bfloat16()
    out = model(**inputs)
    return next(v for v in (getattr(out, "logits", None), getattr(out, "logits_per_text", None), out[0])
                if v is not None).float()


def trouble_of(name, form, *arguments):
    """What is wrong with qconv's form of the model, in a few words, or ""; and what qconv said."""
    model = model_of(name)
    source = saved(model, name)
    out, said = converted(source, form, *arguments)
    skip = json.loads((out / "config.json").read_text())["quantization_config"]
    WARNINGS.taken()
    theirs, trouble = load(type(model), source, dtype=torch.bfloat16, device_map="cpu",
                           quantization_config=bnb_config(form, skip["llm_int8_skip_modules"]))
    known = WARNINGS.taken()
    mine, trouble = load(type(model), out, dtype=torch.bfloat16)
    said_too = WARNINGS.taken() - known
    if trouble or said_too:
        return f"{trouble} {sorted(said_too)}", said
    (quantized, rest), (their_quantized, their_rest) = state(mine), state(theirs)
    if apart := set(quantized) ^ set(their_quantized):
        return f"modules {sorted(apart)[:4]} with the list of the output", said
    if not arguments:
        default = default_modules(model, form)
        apart = ({n for n in default - set(quantized) if not LEFT_ALONE.search(n)} |
                 {n for n in set(quantized) - default if not (QUANTIZED.search(n) and MAJOR == 4)})
        if apart:
            return f"modules {sorted(apart)[:4]} by default", said
    if set(rest) != set(their_rest):
        return f"parameters {sorted(set(rest) ^ set(their_rest))[:4]}", said
    if apart := differing(quantized, their_quantized) + differing(rest, their_rest):
        return f"values of {apart[:4]}", said
    if name not in NOT_RUN and not torch.equal(outputs(mine, name).nan_to_num(),
                                               outputs(theirs, name).nan_to_num()):
        return "outputs", said
    for folder in (source, out):
        shutil.rmtree(folder)
    return "", said


class Zoo(unittest.TestCase):
    def check(self, name, form):
        if MAJOR > 4 and name in STACKED:
            # The output is not for this version, and qconv says so; without its experts it is.
            _, said = converted(saved(model_of(name), name), form)
            self.assertIn("transformers 5 loads quantized experts", said)
            trouble, said = trouble_of(name, form, "--keep", "*.experts.*")
        elif MAJOR > 4 and name == "falcon":
            out, said = converted(saved(model_of(name), name), form)
            self.assertIn("transformers 5 loads no quantized Falcon", said)
            WARNINGS.taken()
            with self.assertRaises(RuntimeError):  # in int8 not before it computes
                outputs(load(type(model_of(name)), out, dtype=torch.bfloat16)[0], name)
            WARNINGS.taken()
            return
        elif name == "gpt_oss":
            # Its experts become stacks of codes, which transformers takes after `import qconv` (test_interop_moe.py).
            trouble, said = trouble_of(name, form, "--keep", "*.experts.*")
        else:
            trouble, said = trouble_of(name, form)
            if name in STACKED | {"falcon"}:
                self.assertIn("transformers 5", said)
                said = ""
        self.assertEqual(trouble, "", name)
        if name not in ("gpt_oss", "granitemoe"):  # stacks of experts are kept with a warning
            self.assertEqual(said, "", name)


def make_zoo():
    for name in [*TYPES, "vit-gpt2", "vit-trocr", "vit-bert"]:
        for form in ("nf4", "int8"):
            def test(self, name=name, form=form):
                self.check(name, form)
            setattr(Zoo, f"test_{name}_{form}".replace("-", "_"), test)


make_zoo()


class Kept(unittest.TestCase):
    """Parts left alone by --keep: exactly they are plain when loaded, whatever their names in
    memory are."""

    KEEPS = ["*vision*", "*visual*", "*projector*", "*layers.0.*", "*layer.0.*", "*language_model*"]

    def test_kept(self):
        for name in ("llava", "llava_onevision", "paligemma", "gemma3", "internvl", "mistral3",
                     "qwen2_vl", "qwen2_5_vl", "idefics3", "mllama", "vit", "vit-gpt2"):
            source = saved(model_of(name), name)
            names = s.read_folder(source)
            for keep in self.KEEPS:
                glob = re.compile(keep.replace(".", r"\.").replace("*", ".*") + "$")
                if not any(glob.match(n) and n.endswith(".weight") and len(v[1]) == 2
                           for n, v in names.items()):
                    continue
                with self.subTest(name=name, keep=keep):
                    out, _ = converted(source, "nf4", "--keep", keep)
                    stored = {n for n in s.read_folder(out) if n.endswith(".absmax")}
                    WARNINGS.taken()
                    model, trouble = load(type(model_of(name)), out, dtype=torch.bfloat16)
                    quantized, _ = state(model)
                    self.assertEqual(trouble, "")
                    self.assertEqual(len(quantized), len(stored))
                    self.assertFalse([n for n, t in quantized.items() if t[1] is None])
                    self.assertFalse([n for n, p in model.named_parameters() if p.is_meta])


class Heads(unittest.TestCase):
    def test_labels(self):
        """A class with a head for labels, on a quantized language model: what is new is plain."""
        autos = (transformers.AutoModelForSequenceClassification,
                 transformers.AutoModelForTokenClassification)
        count = 0
        for name in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "opt", "bloom",
                     "gpt_neox", "roberta"):
            for form in ("nf4", "int8"):
                out, _ = converted(saved(model_of(name), name), form)
                for auto in autos:
                    if type(model_of(name).config) not in auto._model_mapping.keys():
                        continue
                    model, info = auto.from_pretrained(out, dtype=torch.bfloat16,
                                                       output_loading_info=True)
                    WARNINGS.taken()
                    quantized, _ = state(model)
                    self.assertTrue(quantized, name)
                    self.assertFalse([n for n, t in quantized.items() if t[1] is None], name)
                    heads = {n.rsplit(".", 1)[0] for n in info["missing_keys"]}
                    self.assertTrue(heads, name)
                    for head in heads:
                        self.assertIs(type(model.get_submodule(head)), torch.nn.Linear, name)
                    count += 1
        s.note(f"{count} classes with heads for labels load quantized language models")


class Dtypes(unittest.TestCase):
    def test_floats_beside_a_config_of_16_bit(self):
        """Weights in F32, config.json says bfloat16: qconv names the option that helps."""
        for name in ("phi", "opt", "gpt2", "bert"):
            model = model_of(name)
            source = saved(made(model.config, type(model), torch.float32), name)
            config = json.loads((source / "config.json").read_text())
            config["dtype" if MAJOR > 4 else "torch_dtype"] = "bfloat16"
            (source / "config.json").write_text(json.dumps(config))
            _, said = converted(source, "nf4")
            self.assertIn("--rest bf16", said, name)
            out, said = converted(source, "nf4", "--rest", "bf16")
            self.assertEqual(said, "", name)
            mine, trouble = load(type(model), out, dtype="auto")
            self.assertEqual(trouble, "", name)
            self.assertTrue(torch.isfinite(outputs(mine, name)).all(), name)

    def test_wo_of_t5(self):
        """In float16 transformers holds it in 32 bit, so that it does not overflow."""
        model = model_of("t5")
        out, _ = converted(saved(made(model.config, type(model), torch.float16), "t5"), "int8")
        mine, trouble = load(type(model), out, dtype="auto")
        self.assertEqual(trouble, "")
        kinds = {m.weight.dtype for n, m in mine.named_modules() if n.endswith(".wo")}
        self.assertEqual(kinds, {torch.float32})


def sweep(names):
    good = 0
    for name in names or CONFIG_MAPPING.keys():
        try:
            model_of(name)
        except BaseException as e:  # many need arguments or packages that are not here
            print(f"{name}: not made: {type(e).__name__} {str(e)[:80]!r}", flush=True)
            continue
        for form in ("nf4", "int8"):
            try:
                trouble, said = trouble_of(name, form)
            except BaseException as e:
                trouble, said = f"{type(e).__name__}: {str(e)[:160]!r}", ""
            good += not trouble
            if trouble or said:
                print(f"{name} {form}: {trouble} {said}", flush=True)
        model_of.cache_clear()
    print(f"{good} equal")


def setUpModule():
    s.note(f"transformers {transformers.__version__}: {len(TYPES)} model types, {len(STACKED)} of "
           "them with stacks of experts")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--all"]:
        sweep(sys.argv[2:])
    else:
        s.main()
