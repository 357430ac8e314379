"""Models of diffusers in NF4 and int8 beside what diffusers makes of them with bitsandbytes: the same
modules, codes, dtypes and outputs, no missing or unexpected key, no warning of its own; and a pipeline.

Modules are those of diffusers given the same list to skip; SPARED are the ones it would quantize if it
were given none. diffusers asks for a GPU before it uses bitsandbytes, which does not need one: that
question is answered here."""
import json
import logging
import os
import shutil
import unittest
import warnings

import bitsandbytes
import interop_support as s
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt

import diffusers
import transformers
from diffusers.quantizers.bitsandbytes import bnb_quantizer

os.environ["QCONV_PROGRAM"] = str(s.QCONV)
import qconv  # noqa: E402

CPU = {"": torch.device("cpu")}
bitsandbytes.nn.modules.has_avx512bf16 = lambda: False  # see interop_support.quiet
for _quantizer in (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer):
    _quantizer.validate_environment = lambda self, *args, **kwargs: None
    _quantizer.update_device_map = lambda self, device_map: device_map or CPU
for _library in (diffusers, transformers):
    _library.utils.logging.disable_progress_bar()
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

HEADS = {"num_attention_heads": 2, "attention_head_dim": 32}
UNET = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 64}
VIDEO = {"in_channels": 4, "out_channels": 4}
AXES = (8, 12, 12)


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def image(**more):
    return {"hidden_states": noise(1, 4, 8, 8), "encoder_hidden_states": noise(1, 6, 64),
            "timestep": torch.tensor([3.0]), **more}


def video():
    return image(hidden_states=noise(1, 4, 1, 8, 8))


# class, arguments, inputs, and what our rules spare beyond diffusers
MODELS = {
    "flux": (diffusers.FluxTransformer2DModel, {
        **HEADS, "patch_size": 1, "in_channels": 64, "num_layers": 1, "num_single_layers": 1,
        "joint_attention_dim": 64, "pooled_projection_dim": 64, "axes_dims_rope": AXES},
        lambda: {"hidden_states": noise(1, 4, 64), "encoder_hidden_states": noise(1, 6, 64),
                 "pooled_projections": noise(1, 64), "timestep": torch.tensor([0.5]),
                 "img_ids": torch.zeros(4, 3), "txt_ids": torch.zeros(6, 3)},
        {"context_embedder", "x_embedder"}),
    "sd3": (diffusers.SD3Transformer2DModel, {
        **HEADS, "sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4,
        "num_layers": 2, "joint_attention_dim": 64, "caption_projection_dim": 64,
        "pooled_projection_dim": 64, "pos_embed_max_size": 16},
        lambda: image(pooled_projections=noise(1, 64)), {"context_embedder", "proj_out"}),
    "qwenimage": (diffusers.QwenImageTransformer2DModel, {
        **HEADS, "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2,
        "joint_attention_dim": 64, "axes_dims_rope": AXES},
        lambda: image(hidden_states=noise(1, 4, 16), img_shapes=[[(1, 2, 2)]],
                      encoder_hidden_states_mask=torch.ones(1, 6, dtype=torch.bool)),
        {"img_in", "proj_out"}),
    "wan": (diffusers.WanTransformer3DModel, {
        **HEADS, **VIDEO, "patch_size": (1, 2, 2), "text_dim": 64, "freq_dim": 64, "ffn_dim": 128,
        "num_layers": 2, "rope_max_seq_len": 32}, video, {"proj_out"}),
    "ltx": (diffusers.LTXVideoTransformer3DModel, {
        **HEADS, "in_channels": 32, "out_channels": 32, "cross_attention_dim": 64, "num_layers": 2,
        "caption_channels": 64},
        lambda: image(hidden_states=noise(1, 8, 32), num_frames=2, height=2, width=2,
                      encoder_attention_mask=torch.ones(1, 6)), set()),
    "unet": (diffusers.UNet2DConditionModel, {**UNET, **VIDEO, "attention_head_dim": 8},
             lambda: {"sample": noise(1, 4, 8, 8), "timestep": 3,
                      "encoder_hidden_states": noise(1, 6, 64)}, set()),
    "hunyuanvideo": (diffusers.HunyuanVideoTransformer3DModel, {
        **HEADS, **VIDEO, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
        "patch_size": 1, "patch_size_t": 1, "guidance_embeds": False, "text_embed_dim": 64,
        "pooled_projection_dim": 64, "rope_axes_dim": AXES},
        lambda: {**video(), "pooled_projections": noise(1, 64),
                 "encoder_attention_mask": torch.ones(1, 6)}, set()),
    "pixart": (diffusers.PixArtTransformer2DModel, {
        **HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 2, "cross_attention_dim": 64,
        "sample_size": 8, "caption_channels": 64, "use_additional_conditions": False},
        lambda: image(added_cond_kwargs={"resolution": None, "aspect_ratio": None}), set()),
    "dit": (diffusers.DiTTransformer2DModel, {
        **HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 2, "sample_size": 8,
        "patch_size": 2, "num_embeds_ada_norm": 40},
        lambda: {"hidden_states": noise(1, 4, 8, 8), "timestep": torch.tensor([3]),
                 "class_labels": torch.tensor([7])}, set()),
}


class Heard(logging.Handler):
    """What the libraries say while something is loaded."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())

    def __enter__(self):
        self.caught = warnings.catch_warnings(record=True)
        self.warned = self.caught.__enter__()
        warnings.simplefilter("always")
        for library in ("diffusers", "transformers", "accelerate"):
            logging.getLogger(library).addHandler(self)
        return self

    def __exit__(self, *error):
        for library in ("diffusers", "transformers", "accelerate"):
            logging.getLogger(library).removeHandler(self)
        self.said += [str(w.message) for w in self.warned]
        self.caught.__exit__(*error)


def load(cls, folder, **more):
    with Heard() as heard:
        model, info = cls.from_pretrained(folder, device_map=CPU, torch_dtype=torch.bfloat16,
                                          output_loading_info=True, **more)
    return model, info, set(heard.said)


def quantized(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, (Linear4bit, Linear8bitLt))}


def scales(module):
    if isinstance(module, Linear8bitLt):
        return module.weight.SCB if module.weight.SCB is not None else module.state.SCB
    return module.weight.quant_state.absmax


def inputs_of(make):
    return {k: v.to(torch.bfloat16) if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in make().items()}


def source_of(name):
    """The model as it would be released: in bfloat16, but for what its class holds in float32."""
    folder = s.SCRATCH / "diffusers" / name
    if not folder.exists():
        cls, arguments, _, _ = MODELS[name]
        torch.manual_seed(1)
        model = cls(**arguments)
        for p in model.parameters():  # some begin as zeros, which would hide everything before them
            if not p.abs().sum():
                torch.nn.init.normal_(p, std=0.05)
        model.save_pretrained(folder / "f32")
        model = cls.from_pretrained(folder / "f32", torch_dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="100KB")
        shutil.rmtree(folder / "f32")
    return folder


class Model:
    def check(self, form):
        cls, _, inputs, spared = MODELS[self.name]
        source = source_of(self.name)
        out = s.converted(source, form)
        skip = json.loads((out / "config.json").read_text())["quantization_config"][
            "llm_int8_skip_modules"]

        def config(skipped):
            return diffusers.BitsAndBytesConfig(
                load_in_4bit=form == "nf4", load_in_8bit=form == "int8", bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=skipped)

        ours, info, said = load(cls, out)
        self.assertEqual({k: v for k, v in info.items() if v}, {})
        want, _, expected = load(cls, source, quantization_config=config(list(skip)))
        self.assertEqual(said - expected, set())
        mine, theirs = quantized(ours), quantized(want)
        self.assertEqual(set(mine), set(theirs))
        all_of_it = quantized(load(cls, source, quantization_config=config(None))[0])
        self.assertEqual(set(all_of_it) - set(mine), spared)
        for name, module in mine.items():
            self.assertTrue(torch.equal(module.weight.data, theirs[name].weight.data), name)
            self.assertTrue(torch.equal(scales(module), scales(theirs[name])), name)
        mine, theirs = dict(ours.named_parameters()), dict(want.named_parameters())
        self.assertEqual({n: p.dtype for n, p in mine.items()},
                         {n: p.dtype for n, p in theirs.items()})
        given = inputs_of(inputs)
        with torch.no_grad():
            a, b = ours(**given)[0], want(**given)[0]
        self.assertTrue(torch.isfinite(a.float()).all())
        self.assertTrue(torch.equal(a, b), f"outputs differ by {(a - b).abs().max()}")
        s.note(f"{self.name} {form}: {len(quantized(ours))} modules, outputs equal")

    def test_nf4(self):
        self.check("nf4")

    def test_int8(self):
        self.check("int8")


for _name in MODELS:
    globals()[_name.title()] = type(_name.title(), (Model, unittest.TestCase),
                                    {"name": _name, "__module__": __name__})


class Pipeline(unittest.TestCase):
    def test_stable_diffusion(self):
        """Two parts converted, the VAE copied: the output is the source with those two quantized."""
        source, out = s.SCRATCH / "pipeline", s.SCRATCH / "pipeline-out"
        torch.manual_seed(2)
        text = transformers.CLIPTextModel(transformers.CLIPTextConfig(
            vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=16))
        vae = diffusers.AutoencoderKL(block_out_channels=(32, 64), latent_channels=4, sample_size=8,
                                      down_block_types=("DownEncoderBlock2D",) * 2,
                                      up_block_types=("UpDecoderBlock2D",) * 2)
        diffusers.StableDiffusionPipeline(
            vae=vae, text_encoder=text, tokenizer=None,
            scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
            unet=diffusers.UNet2DConditionModel(**UNET, **VIDEO, attention_head_dim=8),
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        ).save_pretrained(source)
        done = qconv.convert(source, s.SCRATCH / "pipeline-zst", to="nf4", rest="bf16")
        self.assertEqual(sorted(done.parts), ["text_encoder", "unet"])
        qconv.unpack(s.SCRATCH / "pipeline-zst", out)
        qconv.verify(out, against=source)
        pipe = diffusers.DiffusionPipeline.from_pretrained(
            out, torch_dtype=torch.bfloat16, tokenizer=None, safety_checker=None,
            feature_extractor=None)
        self.assertTrue(quantized(pipe.unet) and quantized(pipe.text_encoder))
        self.assertFalse(quantized(pipe.vae))
        with torch.no_grad():
            prompt = pipe.text_encoder(torch.arange(1, 9)[None])[0].to(torch.bfloat16)
            made = pipe(prompt_embeds=prompt, negative_prompt_embeds=prompt, num_inference_steps=2,
                        output_type="latent").images
        self.assertTrue(torch.isfinite(made.float()).all())


if __name__ == "__main__":
    s.main()
