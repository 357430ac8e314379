"""qconv's forward pass of mixtures of experts against transformers', in float32 on the same weights.

Small random models of every type are made by the installed transformers and saved in bfloat16.
Compared are the logits of every token: the error of a token's row relative to that row's norm.
"""
import unittest

import interop_support as s
import numpy as np
import torch
from safetensors.torch import save_file
from test_interop_llama import BOUND, FIVE, load, sequences, their_logits, worst
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
             initializer_range=0.3, rms_norm_eps=1e-5)
QWEN = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24)
DEEP = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, n_shared_experts=1,
            first_k_dense_replace=1, routed_scaling_factor=1.7)
LATENT = dict(kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
              num_key_value_heads=4)
MODELS = {
    "mixtral": ("mixtral", dict(num_local_experts=5, num_experts_per_tok=2)),
    "mixtral-window": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=1,
                                       sliding_window=9)),
    "qwen2_moe": ("qwen2_moe", dict(QWEN, shared_expert_intermediate_size=40)),
    "qwen2_moe-mixed": ("qwen2_moe", dict(QWEN, shared_expert_intermediate_size=16,
                                          norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3_moe": ("qwen3_moe", dict(QWEN, norm_topk_prob=True)),
    "qwen3_moe-steps": ("qwen3_moe", dict(QWEN, decoder_sparse_step=2, num_hidden_layers=4)),
    "olmoe": ("olmoe", dict(num_experts=6, num_experts_per_tok=2)),
    "olmoe-normalized": ("olmoe", dict(num_experts=6, num_experts_per_tok=3, norm_topk_prob=True)),
    "glm4_moe": ("glm4_moe", dict(DEEP, n_shared_experts=2, attention_bias=True)),
    "glm4_moe-groups": ("glm4_moe", dict(DEEP, use_qk_norm=True, n_group=4, topk_group=2,
                                         norm_topk_prob=False, first_k_dense_replace=2)),
    "deepseek_v2": ("deepseek_v2", dict(DEEP, **LATENT, q_lora_rank=None, norm_topk_prob=False,
                                        topk_method="greedy")),
    "deepseek_v2-groups": ("deepseek_v2", dict(
        DEEP, **LATENT, q_lora_rank=24, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        n_shared_experts=2)),
    "gpt_oss": ("gpt_oss", dict(num_local_experts=6, num_experts_per_tok=2, sliding_window=7,
                                swiglu_limit=1.5 if FIVE else 7.0)),  # 4 has a limit of 7, whatever the configuration says
    "deepseek_v3": ("deepseek_v3", dict(DEEP, **LATENT, q_lora_rank=24, n_group=4, topk_group=2)),
}


def make_model(name):
    """Folder of a random model in bfloat16. Norms and biases are random, too, as they start as 1 and 0."""
    folder = s.SCRATCH / "experts" / name
    if folder.exists():
        return folder
    kind, more = MODELS[name]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | more)))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                p += 0.2 * torch.randn_like(p)
            elif not p.any():
                p += 0.3 * torch.randn_like(p)
        for key, b in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                b += 0.1 * torch.rand_like(b)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    model.save_pretrained(folder)
    return folder


class Types(unittest.TestCase):
    pass


for _name in MODELS:
    def _test(self, name=_name):
        folder = make_model(name)
        ids = sequences(SIZES["vocab_size"], (40, 17, 1))
        error = worst(s.our_logits(folder, ids), their_logits(load(folder), ids))
        s.note(f"{name}: largest relative error of a token's logits {error:.1e}")
        self.assertLess(error, BOUND)
    setattr(Types, "test_" + _name.replace("-", "_"), _test)


class Calibrated(unittest.TestCase):
    """--calibrate of an expert is --hessians with the moments of the tokens that transformers sends to it,
    where nothing was quantized before."""

    @unittest.skipIf(FIVE, "5 has no module for each expert")
    def test_moments_of_experts(self):
        folder = make_model("qwen3_moe")
        ids = sequences(SIZES["vocab_size"], [60] * 30, seed=5)
        text = s.SCRATCH / "calibration.ids"
        text.write_text("".join(" ".join(map(str, row)) + "\n" for row in ids))
        moments, tokens = {}, {}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

        def hook(name):
            def add(module, args):
                x = args[0].double().reshape(-1, module.in_features)
                moments[name] = moments.get(name, 0) + x.T @ x
                tokens[name] = tokens.get(name, 0) + len(x)
            return add

        for name, module in model.named_modules():
            if name.startswith("model.layers.0.mlp.experts.") and name.endswith("_proj"):
                module.register_forward_pre_hook(hook(name))
        with torch.no_grad():
            for row in ids:
                model(input_ids=torch.tensor([row]))
        self.assertEqual(sum(n for m, n in tokens.items() if "gate" in m), 30 * 60 * QWEN["num_experts_per_tok"])
        file = {}
        for name, m in moments.items():
            file[name + ".second_moment"] = m / tokens[name]
            file[name + ".tokens"] = torch.tensor([tokens[name]])
        save_file(file, s.SCRATCH / "moments.safetensors")
        for parts in ("*.[gu]*_proj.*", "*.down_proj.*"):
            self.compare(folder, text, parts)

    def compare(self, folder, text, parts):
        outs = {}
        only = ("--keep", "*", "--quantize", "*.layers.0.mlp.experts" + parts)
        for name, *how in (("text", "--calibrate", text, "--sided", "one"),  # the file has no gradients
                           ("moments", "--hessians", s.SCRATCH / "moments.safetensors")):
            out = s.SCRATCH / f"calibrated-{name}"
            s.qconv("-q", "--to", "nf4", "--compress", "none", *only, *how, folder, out)
            outs[name] = s.read_folder(out)
        codes = [k for k, v in outs["text"].items() if v[0] == "U8" and k.endswith("_proj.weight")]
        self.assertEqual(len(codes), (2 if "gu" in parts else 1) * QWEN["num_experts"])
        same = np.mean([np.mean(np.frombuffer(outs["text"][k][2], np.uint8) ==
                                np.frombuffer(outs["moments"][k][2], np.uint8)) for k in codes])
        s.note(f"{parts}: {same:.2%} of the bytes of codes are the same")
        self.assertGreater(same, 0.99)


if __name__ == "__main__":
    s.main()
