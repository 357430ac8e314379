"""qconv.plan_training against what it plans for: the configurations that `apply` writes, in
accelerate's and DeepSpeed's own readers; the number of adapter parameters, in peft; and activations,
against what torch keeps and allocates in a training step of transformers' Llama on the CPU.
"""
import json
import logging
import os
import shutil
import sys
import unittest
import warnings
from unittest import mock

import deepspeed.runtime.config
import interop_support as s
import peft
import torch
import transformers
from accelerate import init_empty_weights
from accelerate.commands.config.config_args import load_config_from_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
transformers.logging.set_verbosity_error()
sys.path[:0] = [str(s.ROOT / "tests"), str(s.ROOT / "python")]
os.environ["QCONV_PROGRAM"] = str(s.QCONV)
import make_checkpoint  # noqa: E402
import qconv  # noqa: E402
from qconv import training  # noqa: E402

DENSE = ["Llama-3.1-8B", "Qwen2.5-72B-Instruct", "Qwen3-32B", "gemma-2-2b", "deepseek-llm-7b-chat"]


def plan(model, **options):
    return qconv.plan_training(model, **options).json


def lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear",
                                                      task_type="CAUSAL_LM"))


class Configurations(unittest.TestCase):
    """(cards, options, distributed_type)"""
    CASES = [("80GB", {"precision": "fp16"}, "NO"), ("4x80GB", {"zero": 0}, "MULTI_GPU"),
             ("4x80GB", {"zero": 1}, "DEEPSPEED"), ("4x80GB", {"zero": 2}, "DEEPSPEED"),
             ("4x80GB", {"zero": 3, "precision": "fp32"}, "DEEPSPEED")]

    def applied(self, name, vram, options):
        p = plan("Llama-3.2-1B", vram=vram, method="full", context=1024, effective_batch=64,
                 apply=s.SCRATCH / "applied", **options)
        chosen = next(c for c in p["settings"] if c["fits"])
        return s.SCRATCH / "applied" / name, p["gpus"], chosen

    def test_accelerate(self):
        for vram, options, kind in self.CASES:
            with self.subTest(vram=vram, options=options):
                path, gpus, chosen = self.applied("accelerate.json", vram, options)
                config = load_config_from_file(str(path))  # refuses a key that it does not know
                self.assertEqual(config.distributed_type.value, kind)
                self.assertEqual(config.num_processes, gpus)
                self.assertEqual(config.mixed_precision,
                                 {"fp32": "no"}.get(chosen["precision"], chosen["precision"]))
                if kind == "DEEPSPEED":
                    self.assertEqual(config.deepspeed_config["zero_stage"], chosen["zero_stage"])
                    self.assertEqual(config.deepspeed_config["gradient_accumulation_steps"],
                                     chosen["accumulation"])

    def test_deepspeed(self):
        for vram, options, _ in self.CASES:
            with self.subTest(vram=vram, options=options):
                path, gpus, chosen = self.applied("ds_config.json", vram, options)
                with mock.patch.object(deepspeed.runtime.config, "dist") as dist:
                    dist.get_rank.return_value = 0
                    dist.get_world_size.return_value = gpus
                    config = deepspeed.runtime.config.DeepSpeedConfig(str(path))
                    # It adds up the batches: another number of GPUs is refused.
                    dist.get_world_size.return_value = gpus + 1
                    with self.assertRaises(AssertionError):
                        deepspeed.runtime.config.DeepSpeedConfig(str(path))
                self.assertEqual(config.train_batch_size, chosen["effective_batch"])
                self.assertEqual(config.train_micro_batch_size_per_gpu, chosen["micro_batch"])
                self.assertEqual(config.gradient_accumulation_steps, chosen["accumulation"])
                self.assertEqual(config.zero_optimization_stage, chosen["zero_stage"])
                self.assertEqual(config.zero_enabled, chosen["zero_stage"] > 0)
                self.assertEqual(config.bfloat16_config.enabled, chosen["precision"] == "bf16")
                self.assertEqual(config.float16_config.enabled, chosen["precision"] == "fp16")


class Adapters(unittest.TestCase):
    def check(self, path, name):
        with init_empty_weights():
            model = lora(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)))
        trained = plan(path, method="lora", vram="8x80GB",
                       lora_rank=16)["settings"][0]["trained_parameters"]
        self.assertEqual(trained, model.get_nb_trainable_parameters()[0], name)
        self.assertEqual({p.dtype for p in model.parameters() if p.requires_grad}, {torch.float32})
        s.note(f"{name}: {trained} adapter parameters at rank 16, as peft has them")

    def test_bundled(self):
        self.check(s.model_path("kjv-llama"), "kjv-llama")

    def test_tinystories(self):
        self.check(s.model_path("tinystories"), "tinystories")

    def test_families(self):
        """Full-size models, from headers alone."""
        for name in DENSE:
            folder = s.SCRATCH / "headers" / name
            make_checkpoint.write_model(str(folder), make_checkpoint.load_model(name))
            self.check(folder, name)
            shutil.rmtree(folder)


# ---- activations --------------------------------------------------------------------------------

HIDDEN, TOKENS = 128, (128, 384)
GEOMETRIES = ((8, 64, 352), (4, 2000, 352), (4, 512, 640))  # layers, vocabulary, intermediate


def geometry(layers, vocabulary, wide):
    return LlamaConfig(hidden_size=HIDDEN, intermediate_size=wide, num_hidden_layers=layers,
                       num_attention_heads=2, num_key_value_heads=1, vocab_size=vocabulary,
                       max_position_embeddings=1024)


def allocated_peak(step):
    """The most that torch's CPU allocator held at once of what it gave out during step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if node.typed[0] == torch._C._profiler._EventType.Allocation:
            events.append((node.start_time_ns, node.typed[1].alloc_size))
    held = peak = 0
    for _, size in sorted(events, key=lambda e: e[0]):
        held += size
        peak = max(peak, held)
    return peak


def saved_bytes(model, step):
    """Storages that autograd keeps for the backward pass, each once, weights not counted."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), t)  # t: so that no address comes twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step()
    return sum(size for size, _ in kept.values())


class Prefill(unittest.TestCase):
    """What a prompt that generate reads whole takes a token, cache and workspace, is what the plan
    says: logits of the last position only, scores never written out."""

    def test_whole(self):
        for hidden, wide, heads, kv_heads, layers, vocabulary in (
                (256, 896, 4, 2, 4, 2000), (512, 1376, 8, 8, 2, 4000), (1024, 1792, 8, 1, 2, 64)):
            config = LlamaConfig(hidden_size=hidden, intermediate_size=wide, vocab_size=vocabulary,
                                 num_hidden_layers=layers, num_attention_heads=heads,
                                 num_key_value_heads=kv_heads, max_position_embeddings=4096)
            model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa",
                                                  dtype=torch.bfloat16).eval()
            folder = s.SCRATCH / "prefill"
            shutil.rmtree(folder, ignore_errors=True)
            config.architectures = ["LlamaForCausalLM"]
            config.save_pretrained(folder)
            peaks, stated = [], []
            for tokens in (512, 1536):
                ids = torch.randint(0, vocabulary, (1, tokens))
                peaks.append(allocated_peak(lambda ids=ids: model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False,
                    pad_token_id=0)))
                device = json.loads(s.qconv("plan", "--json", "-q", "--to", "bf16", "--vram", "80GB",
                                            "--context", str(tokens), folder))["devices"][0]
                stated.append(device["kv_bytes"] + device["workspace_bytes"])
            peak, said = ((b[1] - b[0]) / 1024 for b in (peaks, stated))
            s.note(f"prompt read whole, hidden {hidden}, intermediate {wide}, {layers} layers: "
                   f"{peak:.0f} bytes a token, {said:.0f} stated")
            self.assertLess(abs(said / peak - 1), 0.01)


class Activations(unittest.TestCase):
    """Per token, as the difference of two lengths: what does not grow with tokens drops out."""

    def measured(self, config, method, precision, checkpointing):
        torch.manual_seed(1)
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa",
                                              dtype=precision).train()
        if method == "lora":
            model = lora(model)
            model.enable_input_require_grads()
        if checkpointing:
            model.gradient_checkpointing_enable()
        for p in model.parameters():
            if p.requires_grad:  # gradients are a term of their own
                p.grad = torch.zeros_like(p)
        peaks, saved = [], []
        for tokens in TOKENS:
            ids = torch.randint(0, config.vocab_size, (1, tokens))

            def forward(ids=ids):
                return model(input_ids=ids, labels=ids, use_cache=False)

            def step():
                out = forward()
                out.loss.backward()

            peaks.append(allocated_peak(step))
            saved.append(saved_bytes(model, forward))
        length = TOKENS[1] - TOKENS[0]
        return (peaks[1] - peaks[0]) / length, (saved[1] - saved[0]) / length

    def planned(self, config, method, precision, checkpointing):
        folder = s.SCRATCH / "activations"
        shutil.rmtree(folder, ignore_errors=True)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        bytes_at = [plan(folder, vram="80GB", method=method, precision=precision,
                         checkpointing=checkpointing, effective_batch=1,
                         context=tokens)["settings"][0]["bytes_per_gpu"]["activations"]
                    for tokens in TOKENS]
        return (bytes_at[1] - bytes_at[0]) / (TOKENS[1] - TOKENS[0])

    def check(self, method, precision="bf16", geometries=GEOMETRIES):
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        for layers, vocabulary, wide in geometries:
            config = geometry(layers, vocabulary, wide)
            for checkpointing in ("off", "on"):
                with self.subTest(layers=layers, vocabulary=vocabulary, wide=wide,
                                  checkpointing=checkpointing):
                    peak, saved = self.measured(config, method, dtype, checkpointing == "on")
                    stated = self.planned(config, method, precision, checkpointing)
                    s.note(f"{method} {precision}, {layers} layers, hidden {HIDDEN}, "
                           f"intermediate {wide}, vocabulary {vocabulary}, checkpointing "
                           f"{checkpointing}: {saved:.0f} bytes a token saved, {peak:.0f} at the "
                           f"peak, {stated:.0f} stated, ratio {stated / peak:.3f}")
                    self.assertLess(abs(stated / peak - 1), 0.05)

    def test_full(self):
        self.check("full")

    def test_full_float32(self):
        self.check("full", "fp32", GEOMETRIES[1:])

    def test_lora(self):
        self.check("lora", geometries=GEOMETRIES[:2])


if __name__ == "__main__":
    s.main()
