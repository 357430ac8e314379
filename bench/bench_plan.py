#!/usr/bin/env python3
"""How long planning the largest released checkpoint takes, and how much memory.

  bench_plan.py [--qconv build/qconv] [--rounds N] [--json FILE] [--keep DIR] [-- COMMAND...]

Writes a checkpoint with the names, dtypes and shapes of DeepSeek-V3 as released (FP8 with scales
per 128 x 128, one multi-token prediction layer: 91,991 tensors, 163 shards, 689 GB) whose files
hold true headers and holes, then runs the command on it: by default a plan. Beside it the floor:
reading the same headers with one thread and doing nothing with them.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests"))
import make_checkpoint as mc  # noqa: E402

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": 129280,
    "max_position_embeddings": 163840, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
}


def linear(name, rows, cols):
    return [(name + ".weight", "F8_E4M3", [rows, cols]),
            (name + ".weight_scale_inv", "F32", [-(-rows // 128), -(-cols // 128)])]


def mlp(name, width):
    h = CONFIG["hidden_size"]
    return (linear(name + ".gate_proj", width, h) + linear(name + ".up_proj", width, h) +
            linear(name + ".down_proj", h, width))


def layer(i):
    c, h, p = CONFIG, CONFIG["hidden_size"], "model.layers.%d." % i
    heads = c["num_attention_heads"]
    qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    rows = [(p + "input_layernorm.weight", "BF16", [h]),
            (p + "post_attention_layernorm.weight", "BF16", [h]),
            (p + "self_attn.q_a_layernorm.weight", "BF16", [c["q_lora_rank"]]),
            (p + "self_attn.kv_a_layernorm.weight", "BF16", [c["kv_lora_rank"]])]
    rows += linear(p + "self_attn.q_a_proj", c["q_lora_rank"], h)
    rows += linear(p + "self_attn.q_b_proj", heads * qk, c["q_lora_rank"])
    rows += linear(p + "self_attn.kv_a_proj_with_mqa", c["kv_lora_rank"] + c["qk_rope_head_dim"], h)
    rows += linear(p + "self_attn.kv_b_proj",
                   heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"])
    rows += linear(p + "self_attn.o_proj", h, heads * c["v_head_dim"])
    if i < c["first_k_dense_replace"]:
        return rows + mlp(p + "mlp", c["intermediate_size"])
    width = c["moe_intermediate_size"]
    rows += [(p + "mlp.gate.weight", "BF16", [c["n_routed_experts"], h]),
             (p + "mlp.gate.e_score_correction_bias", "F32", [c["n_routed_experts"]])]
    rows += mlp(p + "mlp.shared_experts", width * c["n_shared_experts"])
    for e in range(c["n_routed_experts"]):
        rows += mlp(p + "mlp.experts.%d" % e, width)
    return rows


def deepseek_v3():
    h, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    n = CONFIG["num_hidden_layers"]
    rows = [("model.embed_tokens.weight", "BF16", [vocab, h])]
    for i in range(n):
        rows += layer(i)
    p = "model.layers.%d." % n
    rows += layer(n) + [(p + "embed_tokens.weight", "BF16", [vocab, h]),
                        (p + "enorm.weight", "BF16", [h]), (p + "hnorm.weight", "BF16", [h]),
                        (p + "eh_proj.weight", "BF16", [h, 2 * h]),
                        (p + "shared_head.norm.weight", "BF16", [h]),
                        (p + "shared_head.head.weight", "BF16", [vocab, h])]
    return rows + [("model.norm.weight", "BF16", [h]), ("lm_head.weight", "BF16", [vocab, h])]


def write(path, rows, shards=163):
    total = sum(mc.tensor_bytes(d, s) for _, d, s in rows)
    limit, parts, size = total / shards, [[]], 0
    for row in rows:
        if size >= limit:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += mc.tensor_bytes(row[1], row[2])
    weight_map = {}
    for i, part in enumerate(parts):
        name = "model-%05d-of-%06d.safetensors" % (i + 1, len(parts))
        mc.write_sparse(os.path.join(path, name), mc.file_order(part))
        weight_map.update({row[0]: name for row in part})
    mc.write_json(os.path.join(path, "model.safetensors.index.json"),
                  {"metadata": {"total_size": total}, "weight_map": weight_map})
    mc.write_json(os.path.join(path, "config.json"), CONFIG)
    return total, len(parts)


def run(command):
    """Seconds, and peak memory in bytes, of a command."""
    start = time.perf_counter()
    p = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(p.pid, 0)
    seconds = time.perf_counter() - start
    p.returncode = os.waitstatus_to_exitcode(status)
    if p.returncode != 0:
        sys.exit("%s: exit code %d" % (" ".join(command), p.returncode))
    return seconds, usage.ru_maxrss * 1024


def floor(path):
    """Seconds to read every header."""
    start = time.perf_counter()
    size = 0
    for name in sorted(os.listdir(path)):
        with open(os.path.join(path, name), "rb", buffering=0) as f:
            if name.endswith(".safetensors"):
                size += len(f.read(int.from_bytes(f.read(8), "little")))
            else:
                size += len(f.read())
    return time.perf_counter() - start, size


def cpu_name():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")),
                    "?")


def commit():
    return subprocess.run(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], text=True,
                          capture_output=True).stdout.strip()


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--qconv", default=os.path.join(HERE, "..", "build", "qconv"))
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--json")
    p.add_argument("--keep", help="make the checkpoint here, and leave it")
    p.add_argument("command", nargs="*", default=["plan", "--vram", "8x80GB", "--json"])
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        path = a.keep or tmp
        os.makedirs(path, exist_ok=True)
        rows = deepseek_v3()
        total, shards = write(path, rows)
        command = [a.qconv, *a.command, path]
        times, floors, peak, header = [], [], 0, 0
        for _ in range(a.rounds):
            f, header = floor(path)
            t, m = run(command)
            floors.append(f)
            times.append(t)
            peak = max(peak, m)
        times.sort()
        floors.sort()
        result = {"tensors": len(rows), "bytes": total, "shards": shards, "header_bytes": header,
                  "planned": " ".join(["qconv", *a.command, "DeepSeek-V3"]),
                  "command": "bench/bench_plan.py --rounds %d --json FILE" % a.rounds,
                  "cpu": cpu_name(), "commit": commit(),
                  "seconds_median": times[len(times) // 2], "seconds_min": times[0],
                  "floor_seconds_median": floors[len(floors) // 2], "peak_bytes": peak,
                  "rounds": a.rounds}
        print(json.dumps(result, indent=2))
        if a.json:
            with open(a.json, "w") as f:
                f.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
