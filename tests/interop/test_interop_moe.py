"""Mixtures of experts in NF4 and int8, in transformers 4 and 5.

For tiny random models of many types: from_pretrained takes what qconv wrote, after `import qconv`, without a missing,
unexpected or mismatched key, holds the experts as codes, and gives the outputs of the same model with the weights that
bitsandbytes restores from the same files, in float32. What does not load is refused, with the reason that is listed here.

usage: test_interop_moe.py --all [NAME...]   a line per type, with the distance of its outputs
"""
import copy
import json
import shutil
import sys
import unittest
import unittest.mock

import interop_support as s
import torch
import transformers
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import test_interop_forms as forms
import test_interop_zoo as zoo

import qconv
from qconv.torch import Stack

transformers.logging.set_verbosity_warning()  # test_interop_forms wants errors only

# What qconv writes for each expert by itself.
SEPARATE = """mixtral qwen2_moe qwen3_moe qwen3_next qwen3_5_moe_text qwen3_5_moe phimoe olmoe flex_olmo deepseek_v2 deepseek_v3
    deepseek_v32 glm4_moe glm4_moe_lite glm_moe_dsa jamba ernie4_5_moe minimax minimax_m2 lfm2_moe dots1 hunyuan_v1_moe
    longcat_flash nemotron_h exaone_moe afmoe solar_open cohere2_moe mellum qwen3_vl_moe""".split()
# The same, and transformers makes a module for each where bitsandbytes is named, so qconv has nothing to say.
MODULES = ["llama4_text"]
# Stacks whose layout qconv does not know, kept in 16 bits with a warning.
KEPT = """aria_text jetmoe qwen3_vl_moe_text""".split()
# Published as stacks, which --experts stacked quantizes. transformers 4 has no place for them but by qconv.load.
PUBLISHED = """granitemoe granitemoeshared granitemoehybrid""".split()
# The same without the option. transformers 4 does not multiply with them.
WHOLE = ["gpt_oss"]
# In floats these load as stacks only.
ONLY_STACKS = ["llama4_text", "qwen3_vl_moe"]
# In 16 bits, stacks of these lie as [experts, in, out].
TURNED = """llama4_text qwen3_vl_moe gpt_oss""".split()
TYPES = {name: {} for name in SEPARATE + MODULES + KEPT + PUBLISHED + WHOLE}
# transformers 4 cannot build a tiny one, or compute with it.
UNKNOWN = {"qwen3_vl_moe", "qwen3_vl_moe_text", *WHOLE} if zoo.MAJOR == 4 else set()
# Products of a few rows quantize x to 15 bits of the largest of 64, as in test_interop_load.py.
BOUND = 1e-3
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
          "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
LATENT = {"num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
TYPES |= {
    "qwen3_next": LINEAR, "qwen3_5_moe_text": LINEAR, "qwen3_5_moe": {"text_config": LINEAR},
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT, "deepseek_v32": LATENT, "glm_moe_dsa": LATENT,
    "jamba": {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1, "mamba_dt_rank": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
              "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2, "num_experts": 4},
    "granitemoehybrid": {"layer_types": ["attention", "attention"], "shared_intermediate_size": 64},
    "longcat_flash": LATENT | {"ffn_hidden_size": 128, "expert_ffn_hidden_size": 64, "n_routed_experts": 4,
                               "zero_expert_num": 2, "moe_topk": 2, "num_layers": 1},
    "qwen3_vl_moe": {"text_config": {"moe_intermediate_size": 128}},  # square stacks are kept
    "nemotron_h": {"layers_block_type": ["moe", "attention"], "n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16,
                   "ssm_state_size": 16},
}


def apart(mine, other):
    return ((mine.double() - other.double()).norm() / other.double().norm()).item()


def restored(out):
    """A copy of a plain output with every weight as bitsandbytes restores it, in float32."""
    folder = out.with_name(out.name + "-restored")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config", None)
    for part in (config, config.get("text_config", {})):
        part.update({key: "float32" for key in ("dtype", "torch_dtype") if key in part})
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for path in out.glob("*.safetensors"):
        tensors |= load_file(path)
    plain = dict(tensors)
    for name in tensors:
        weight, is_4bit, _ = name.partition(".quant_state.")
        if is_4bit:
            beside = {key: tensors[key] for key in tensors if key.startswith(weight + ".")}
            state = QuantState.from_dict(dict(beside), device="cpu")
            state.dtype = torch.float32
            plain[weight] = dequantize_4bit(tensors[weight], state)
            for key in beside:
                del plain[key]
        elif name.endswith(".SCB"):
            stem = name.removesuffix(".SCB")
            weight = stem + ".weight" if stem + ".weight" in tensors else stem
            codes = tensors[weight].float().view(*tensors[name].shape, -1)  # those of a stack are flat
            plain[weight] = codes * tensors[name][..., None] * (1 / 127)
            del plain[name]
            plain.pop(stem + ".weight_format", None)
    for name in [name for name in plain if config["model_type"] in ONLY_STACKS and ".experts.0.gate_proj." in name]:
        stem = name.partition("0.gate_proj.")[0]
        gate, up, down = (torch.stack([plain.pop(f"{stem}{e}.{m}_proj.weight") for e in range(4)])
                          for m in ("gate", "up", "down"))
        both = torch.cat([gate, up], 1)
        turns = config["model_type"] == "llama4_text"
        plain[f"{stem}gate_up_proj"] = both.mT.contiguous() if turns else both
        plain[f"{stem}down_proj"] = down.mT.contiguous() if turns else down
    if config["model_type"] == "gpt_oss":
        plain |= {name: t.mT.contiguous() for name, t in plain.items() if ".experts." in name and t.ndim == 3
                  and t.shape != tensors[name].shape}
    save_file({name: t.float() if t.is_floating_point() else t for name, t in plain.items()},
              folder / "model.safetensors", {"format": "pt"})
    return folder


def codes_in(model):
    """How many expert matrices, or stacks of them, are codes."""
    return sum(isinstance(m, Stack) or (".experts." in name and isinstance(m, (Linear4bit, Linear8bitLt)))
               for name, m in model.named_modules())


@torch.no_grad()
def outputs(model):
    asked = torch.arange(20, 44).reshape(2, 12)
    more = {"decoder_input_ids": asked} if model.config.is_encoder_decoder else {}
    out = model(input_ids=asked, use_cache=False, **more)
    return getattr(out, "logits", out[0]).float()


def source_of(name):
    zoo.TYPES[name] = TYPES[name]
    model = zoo.model_of(name)
    source = zoo.saved(model, f"moe-{name}")
    if name == "qwen3_vl_moe":  # as published; transformers 5 saves stacks as it holds them, and loads both
        tensors = load_file(source / "model.safetensors")
        save_file({n: t.mT.contiguous() if t.ndim == 3 and ".experts." in n else t for n, t in tensors.items()},
                  source / "model.safetensors", {"format": "pt"})
    return model, source


def tried(name, form, *arguments, load=None):
    """(distance of the outputs from those of the restored weights, that of the source's, modules of experts that are
    codes, what qconv said)"""
    model, source = source_of(name)
    out, said = zoo.converted(source, form, *arguments)
    mine, trouble = zoo.load(type(model), out, dtype=torch.float32) if load is None else (load(out), "")
    count = codes_in(mine)
    theirs, trouble_too = zoo.load(type(model), restored(out), dtype=torch.float32)
    if trouble or trouble_too:
        raise AssertionError(f"{name} {form}: {trouble} {trouble_too}")
    theirs, mine, model = outputs(zoo.in_float32(theirs)), outputs(zoo.in_float32(mine)), outputs(copy.deepcopy(model).float())
    return apart(mine, theirs), apart(model, theirs), count, said


class Loaded(unittest.TestCase):
    """from_pretrained, in a Python that has imported qconv."""
    worst, count = 0, 0

    def check(self, name, form):
        distance, moved, count, said = tried(name, form)
        self.assertLess(distance, BOUND)
        self.assertGreater(moved, 4 * distance)  # or the outputs would not show the weights
        self.assertEqual(count > 0, name not in KEPT)
        if name in MODULES:
            self.assertEqual(said, "")
        else:
            self.assertIn("stacks of experts" if name in KEPT else "import qconv", said)
        Loaded.worst = max(Loaded.worst, distance)
        Loaded.count += 1


def add_tests():
    known = [name for name in SEPARATE + MODULES + KEPT + WHOLE if name in CONFIG_MAPPING and name not in UNKNOWN]
    for i, name in enumerate(known):
        form = ("nf4", "int8")[i % 2]
        for form in ("nf4", "int8") if name in ("mixtral", *TURNED) else (form,):
            def test(self, name=name, form=form):
                self.check(name, form)
            setattr(Loaded, f"test_{name}_{form}", test)


class Others(unittest.TestCase):
    def doubly_quantized(self, name, *arguments):
        """(the output, the outputs of its restored weights), after those of transformers' model of it are compared."""
        model, source = source_of(name)
        out = source.with_name("moe-double" + "".join(arguments))
        s.qconv("--to", "nf4", *arguments, "--compress", "none", "-q", source, out)
        mine, trouble = zoo.load(type(model), out, dtype=torch.float32)
        self.assertFalse(trouble)
        wanted = outputs(zoo.in_float32(zoo.load(type(model), restored(out), dtype=torch.float32)[0]))
        self.assertLess(apart(outputs(zoo.in_float32(mine)), wanted), BOUND)
        return out, wanted

    def test_double_quantization(self):
        """Groups of 256 scales do not end where experts do."""
        self.doubly_quantized("qwen3_moe")

    def test_stacked(self):
        """`--experts stacked` has the codes of the separate form and loads in transformers 5; either becomes the other."""
        for name in ("mixtral", "qwen3_moe"):
            if zoo.MAJOR == 4:
                self.skipTest("transformers 4 has no place for stacks")
            for form in ("nf4", "int8"):
                distance, moved, count, said = tried(name, form, "--experts", "stacked")
                self.assertLess(distance, BOUND)
                self.assertEqual(count, 4)
                self.assertNotIn("stacks of experts", said)
        double, wanted = self.doubly_quantized("mixtral", "--experts", "stacked")
        self.assertLess(apart(outputs(qconv.load(double, dtype=torch.float32)), wanted), BOUND)

    def test_published_stacks(self):
        """Granite's: in 16 bits with a warning that names the option, which quantizes them."""
        for i, name in enumerate(PUBLISHED):
            distance, _, count, said = tried(name, "nf4")
            self.assertEqual((distance, count), (0, 0))
            self.assertIn("--experts stacked quantizes them", said)
            ours = [lambda out: qconv.load(out, dtype=torch.float32)]
            for form in ("nf4", "int8"):
                for load in ours if zoo.MAJOR == 4 else [None, *ours]:
                    distance, _, count, _ = tried(name, form, "--experts", "stacked", load=load)
                    self.assertLess(distance, BOUND)
                    self.assertEqual(count, 4)

    def test_released_stacks(self):
        """Qwen3.5's mixtures are published with stacks, which transformers 5 and qconv take apart."""
        if "qwen3_5_moe_text" not in CONFIG_MAPPING:
            self.skipTest("transformers 4 does not know the type")
        model, source = source_of("qwen3_5_moe_text")
        out, _ = zoo.converted(source, "nf4")
        fused = source.with_name("moe-fused")
        shutil.copytree(source, fused, dirs_exist_ok=True)
        tensors = {n: t for n, t in load_file(source / "model.safetensors").items() if ".experts." not in n}
        tensors |= {n: p.detach().contiguous() for n, p in model.state_dict().items() if ".experts." in n}
        save_file(tensors, fused / "model.safetensors", {"format": "pt"})
        again, _ = zoo.converted(fused, "nf4")
        self.assertEqual(s.read_folder(out), s.read_folder(again))

    def test_turned_stacks(self):
        """qconv.load computes as the restored weights do, and what --to bf16 makes of the codes loads as the source does."""
        for name in TURNED:
            if name in UNKNOWN:
                continue
            for form in ("nf4", "int8"):
                distance, moved, *_ = tried(name, form, load=lambda out: qconv.load(out, dtype=torch.float32))
                self.assertLess(distance, BOUND)
                self.assertGreater(moved, 4 * distance)
                model, source = source_of(name)
                out, _ = zoo.converted(source, form)
                back = out.with_name(out.name + "-back")
                shutil.rmtree(back, ignore_errors=True)
                s.qconv("--to", "bf16", "--compress", "none", "-q", out, back)
                shapes = [{n: list(t.shape) for n, t in load_file(f / "model.safetensors").items()} for f in (source, back)]
                self.assertEqual(*shapes)
                theirs, trouble = zoo.load(type(model), back, dtype=torch.float32)
                self.assertFalse(trouble)
                self.assertLess(apart(outputs(theirs), outputs(qconv.load(out, dtype=torch.float32))), 0.01)  # bfloat16
                self.assertGreater(apart(outputs(theirs), outputs(copy.deepcopy(model).float())), 1e-4)

    @unittest.skipIf(zoo.MAJOR == 4, "nothing is stacked")
    def test_square_stacks(self):
        """gpt-oss-20b's down_proj is as wide as high, so no shape says which way it lies."""
        with unittest.mock.patch.dict(TYPES, gpt_oss=TYPES["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 64}):
            distance, moved, count, _ = tried("gpt_oss", "nf4")
        self.assertLess(distance, BOUND)
        self.assertGreater(moved, 4 * distance)
        self.assertEqual(count, 4)

    @unittest.skipIf(zoo.MAJOR == 4, "nothing is stacked")
    def test_one_call_for_all_experts(self):
        """Two for each layer, whose outputs are those of a product for each expert."""
        model, source = source_of("qwen3_moe")
        out, _ = zoo.converted(source, "nf4")
        mine = zoo.in_float32(zoo.load(type(model), out, dtype=torch.float32)[0])
        calls, products = [], Stack.products
        with unittest.mock.patch.object(Stack, "products", lambda *a: calls.append(a) or products(*a)):
            one = outputs(mine)
        self.assertEqual(len(calls), 2 * mine.config.num_hidden_layers)
        mine.set_experts_implementation("eager")
        self.assertLess(apart(one, outputs(mine)), 1e-6)

    @unittest.skipIf(zoo.MAJOR == 4, "nothing is stacked")
    def test_biases_of_experts(self):
        """gpt-oss, whose experts have biases and lie turned: one call adds what a product for each expert does."""
        for form in ("nf4", "int8"):
            out = forms.convert(forms.mxfp4_source(), f"moe-biases-{form}", "--to", form, "--requantize")
            mine = qconv.load(out, dtype=torch.float32)
            biases = [p for name, p in mine.named_parameters() if name.endswith("_proj_bias")]
            self.assertEqual(len(biases), 2 * mine.config.num_hidden_layers)
            calls, products = [], Stack.products
            with unittest.mock.patch.object(Stack, "products", lambda *a: calls.append(a) or products(*a)):
                one = outputs(mine)
            self.assertEqual([a[-1] is bias for a, bias in zip(calls, biases)], len(biases) * [True])
            mine.set_experts_implementation("eager")
            self.assertLess(apart(one, outputs(mine)), 1e-6)
            with torch.no_grad():
                for bias in biases:
                    bias.zero_()
            self.assertGreater(apart(one, outputs(mine)), 1e-3)

    @unittest.skipIf(zoo.MAJOR == 4, "nothing is stacked")
    def test_sentences(self):
        """What cannot be held as one is refused, and what holds codes is not saved."""
        model, source = source_of("mixtral")
        with self.assertRaises(Exception) as caught:
            out, _ = zoo.converted(source, "nf4", "--keep", "*.experts.1.*", "--split-fused")
            zoo.load(type(model), out, dtype=torch.float32)
        self.assertIn("not all quantized in the same way", str(caught.exception) + "".join(zoo.WARNINGS.taken()))
        out, _ = zoo.converted(source, "nf4")
        mine, _ = zoo.load(type(model), out, dtype=torch.float32)
        with self.assertRaisesRegex(qconv.UsageError, "the folder that it was loaded from has them"):
            mine.save_pretrained(s.SCRATCH / "saved")

    def test_plain_experts(self):
        """A checkpoint whose experts are plain, and one that bitsandbytes quantizes on the way, load as before."""
        model, source = source_of("mixtral")
        out, said = zoo.converted(source, "nf4", "--keep", "*.experts.*")
        mine, trouble = zoo.load(type(model), out, dtype=torch.float32)
        self.assertFalse(trouble)
        self.assertEqual(codes_in(mine), 0)
        self.assertNotIn("experts", said)
        mine, trouble = zoo.load(type(model), source, dtype=torch.float32, device_map="cpu",
                                 quantization_config=zoo.bnb_config("nf4"))
        self.assertFalse(trouble)
        self.assertGreater(sum(isinstance(m, Linear4bit) for m in mine.modules()), 0)


def tearDownModule():
    s.note(f"transformers {transformers.__version__}: {Loaded.count} mixtures; outputs at most {Loaded.worst:.1e} of "
           "their norm from those of the weights that bitsandbytes restores")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--all"]:
        for name in sys.argv[2:] or TYPES:
            for form in ("nf4", "int8"):
                try:
                    print(name, form, *tried(name, form), flush=True)
                except Exception as e:
                    print(name, form, type(e).__name__, str(e).splitlines()[:2], flush=True)
        sys.exit()
    add_tests()
    s.main()
