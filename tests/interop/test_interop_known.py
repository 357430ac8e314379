"""Tensors worked out from a config.json, against those of a checkpoint that transformers writes.

A tiny random model of each family of convert/families/ is saved. `qconv plan` of its folder and of its config.json alone
say the same: tensors, bytes, and what lies on which device, module by module.
"""
import json
import shutil
import unittest

import interop_support as s
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import test_interop_moe as moe
import test_interop_zoo as zoo
import tiny_models

INDEXED = moe.LATENT | {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 4}
LINEAR = moe.LINEAR | {"mtp_num_hidden_layers": 0}
FAMILIES = {name: {} for name in """llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe phi3 gemma gemma2 gemma3_text
    gpt_oss granite smollm3 olmo2 olmo3 olmoe glm glm4 seed_oss helium gpt2 gpt_neox minimax_m2""".split()}
FAMILIES |= {
    "deepseek_v2": moe.LATENT | {"num_experts_per_tok": 2}, "deepseek_v3": moe.LATENT,
    "glm4_moe_lite": moe.LATENT, "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}, "youtu": moe.LATENT, "deepseek_v32": INDEXED, "glm_moe_dsa": INDEXED, "glm4_moe": {},
    "qwen3_next": LINEAR, "qwen3_5": {"text_config": LINEAR}, "qwen3_5_moe": {"text_config": LINEAR},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, "mamba_n_heads": 8,
                         "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1},
    "gemma3": {"vision_config": {"vision_use_head": False}},
    "mistral3": {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}},
    "mllama": tiny_models.TYPES["mllama"],
}
# transformers 5 writes the experts of qwen3_5_moe one by one; released checkpoints have stacks.
TENSORS = ".schemes.keep.tensors", ".schemes.cast.tensors", ".file_bytes"
NOT_COMPARED = {name: {".model", ".convert", ".has_weights"} for name in FAMILIES}  # the second names MODEL, too
NOT_COMPARED["qwen3_5_moe"] |= set(TENSORS)
NOT_COMPARED["gemma3"] |= {".file_bytes"}  # transformers 5 leaves "vision_model" out of names


def flat(value, path=""):
    """Every leaf of a JSON value, by its path."""
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}[{i}]").items()}
    return {path: value}


def planned(model):
    return flat(json.loads(s.qconv("plan", "--json", "-q", "--to", "bf16", "--vram", "1GB", model)))


def tiny(name):
    kind = CONFIG_MAPPING[name]
    config = kind(**tiny_models.merged(tiny_models.shrunk(kind()), {"num_nextn_predict_layers": 0} | FAMILIES[name]))
    return zoo.saved(tiny_models.made(config, tiny_models.class_of(config), torch.float32), f"known-{name}")


def differing(name):
    """What the two plans say differently, as a dict from paths in their JSON to pairs."""
    folder = tiny(name)
    alone = folder.with_name(folder.name + "-alone")
    shutil.rmtree(alone, ignore_errors=True)
    alone.mkdir()
    shutil.copy(folder / "config.json", alone)
    mine, whole = planned(alone), planned(folder)
    return {k: (mine.get(k), whole.get(k)) for k in mine | whole
            if k not in NOT_COMPARED[name] and mine.get(k) != whole.get(k)}


class Known(unittest.TestCase):
    pass


for family in FAMILIES:
    if family in CONFIG_MAPPING:
        setattr(Known, f"test_{family}", lambda self, name=family: self.assertEqual(differing(name), {}))

if __name__ == "__main__":
    s.main()
