#!/usr/bin/env python3
"""One layer at full width of the models that qconv was made for, against transformers; and what it takes.

    PYTHON bench/bench_full_width.py --work DIR --transformers DIR [--transformers DIR] [--qconv build/qconv]
                                     [--json FILE] [NAME...]

writes bench/results/full_width.json, which docs/models.md quotes. PYTHON has torch, numpy and safetensors; each
--transformers is a folder with that package, of which the first has version 4 and makes the models. Weights are
random with a fixed seed, in bfloat16, and the vocabulary has 512 ids. Compared are the logits of every token with
those of transformers on the same weights, in float32. Then the model is converted to NF4, by search and calibrated,
and evaluated against its source. Calibrating leaves out what has most inputs (`left`), because factoring its moments
takes hours on two cores, and experts get too few tokens for it. Peak memory is the kernel's (ru_maxrss); beside it stands what qconv predicted.
DeepSeek's layer takes 8 GB of memory and 10 GB of disk, the others half of it.
"""
import argparse
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 512
SMALL = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
              rope_type="llama3")
SYSTEMS = {
    "Llama-3.2-11B-Vision": dict(
        type="mllama_text_model", model="MllamaForCausalLM", layers=2, states=1601, left=["*mlp*", "*self_attn*"],
        what="a layer with self-attention and one that looks at 1601 states of an image",
        config=dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
                    cross_attention_layers=[1], max_position_embeddings=131072, rope_theta=5e5, rope_scaling=LLAMA3,
                    rms_norm_eps=1e-5)),
    "gpt-oss-20b": dict(
        type="gpt_oss", model="GptOssForCausalLM", layers=1, left=[],
        what="a layer with 32 experts, of which 4 are chosen, in bfloat16",
        config=dict(hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
                    head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
                    layer_types=["sliding_attention"])),
    "DeepSeek-V2.5": dict(
        type="deepseek_v2", model="DeepseekV2ForCausalLM", layers=1, versions=("4",), left=["*_a_proj*", "*o_proj*", "*mlp*"],
        what="a layer with 160 experts, of which 6 of 3 of 8 groups are chosen, and 2 shared ones",
        config=dict(hidden_size=5120, intermediate_size=12288, num_attention_heads=128, num_key_value_heads=128,
                    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                    n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1536,
                    first_k_dense_replace=0, n_group=8, topk_group=3, topk_method="group_limited_greedy",
                    norm_topk_prob=False, routed_scaling_factor=16.0, max_position_embeddings=163840,
                    rope_theta=10000.0, rope_scaling=dict(
                        beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                        original_max_position_embeddings=4096, rope_type="yarn"))),
}
SHARD = 1 << 30


def rows(seed, count, length):
    import numpy as np
    rng = np.random.default_rng(seed)
    return [[int(i) for i in rng.integers(0, VOCABULARY, length)] for _ in range(count)]


# ---- with transformers, in a process of its own ---------------------------------------------


def values(name, shape):
    import torch
    x = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if "norm" in name:
        return (1 + 0.1 * x).bfloat16()
    return (0.5 + 0.1 * x if name.endswith("_gate") else x.mul_(0.02)).bfloat16()


def make(name, folder):
    """Shard by shard, so that a model needs no more memory than one of them."""
    import torch
    import transformers
    from safetensors.torch import save_file
    system = SYSTEMS[name]
    kind = getattr(transformers, system["model"])
    config = kind.config_class(num_hidden_layers=system["layers"], **SMALL, **system["config"])
    with torch.device("meta"):
        model = kind(config)
    config.architectures = [system["model"]]
    config.save_pretrained(folder)
    shard, used, weight_map = {}, 0, {}

    def flush():
        nonlocal shard, used
        file = "model-%05d.safetensors" % (len(set(weight_map.values())) + 1)
        save_file(shard, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard, used = {}, 0

    for key, p in model.state_dict().items():
        if used and used + p.numel() * 2 > SHARD:
            flush()
        shard[key] = values(key, p.shape)
        used += p.numel() * 2
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": sum(2 * p.numel() for p in model.state_dict().values())},
         "weight_map": weight_map}))
    if "states" in system:
        save_file({"states": values("states", (system["states"], config.hidden_size)) * 50},
                  folder.parent / "states.safetensors")


def reference(name, folder, out):
    """Logits in float32. DeepSeek's weights stay in bfloat16, and each is widened when it is used."""
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import load_file
    system = SYSTEMS[name]
    wide = system["type"] != "deepseek_v2"
    if not wide:
        linear = torch.nn.functional.linear
        torch.nn.functional.linear = lambda x, w, bias=None: linear(x.float(), w.float(), bias)
        embed = torch.nn.Embedding.forward
        torch.nn.Embedding.forward = lambda self, ids: embed(self, ids).float()
    five = transformers.__version__.startswith("5.")
    more = dict(experts_implementation="eager") if five and not wide else {}
    model = getattr(transformers, system["model"]).from_pretrained(
        folder, dtype=torch.float32 if wide else torch.bfloat16, attn_implementation="eager", **more).eval()
    if not wide and not five:
        # It leaves out YaRN's scaling of scores, with which the model was trained (docs/models.md).
        yarn = system["config"]["rope_scaling"]
        for layer in model.model.layers:
            layer.self_attn.scaling *= (0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1) ** 2
    more = {}
    if "states" in system:
        more["cross_attention_states"] = load_file(folder.parent / "states.safetensors")["states"][None].float()
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([row]), **more).logits[0].float().numpy() for row in rows(1, 2, 24)]
    np.concatenate(logits).astype("<f4").tofile(out)
    print(transformers.__version__)


# ---- measuring ------------------------------------------------------------------------------


def run(*command, env=None):
    """(what it printed, stderr, seconds, peak bytes)"""
    began = time.monotonic()
    p = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         env=os.environ | (env or {}))
    out, err = p.stdout.read().decode(), p.stderr.read().decode()
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    if p.returncode:
        sys.exit("%s: exit %d: %s" % (" ".join(map(str, command)), p.returncode, err[-3000:]))
    return out, err, round(time.monotonic() - began, 1), usage.ru_maxrss * 1024


def size(text):
    number, unit = re.match(r"([0-9.]+) ([KMG]?B)", text).groups()
    return int(float(number) * 1000 ** ["B", "KB", "MB", "GB"].index(unit))


def took(result, predicted=None):
    _, err, seconds, peak = result
    more = {"predicted_bytes": size(re.search(predicted, err).group(1))} if predicted else {}
    return {"seconds": seconds, "peak_bytes": peak} | more


class Bench:
    def __init__(self, a):
        self.a, self.work = a, Path(a.work).resolve()
        self.tool = Path(a.qconv).with_name("logits_tool")

    def python(self, folder, what, name, *more):
        return run(sys.executable, __file__, what, name, *more, env={
            "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})

    def logits_error(self, name, model, images, folder, ours):
        import numpy as np
        out, _, seconds, peak = self.python(folder, "reference", name, model, self.work / "theirs")
        theirs = np.fromfile(self.work / "theirs", "<f4").reshape(-1, VOCABULARY).astype(np.float64)
        error = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
        return {"transformers": out.strip(), "largest_relative_error": float(error.max()),
                "seconds": seconds, "peak_bytes": peak}

    def system(self, name):
        import numpy as np
        s, a = SYSTEMS[name], self.a
        model = self.work / name
        images = ["--image-states", self.work / "states.safetensors"] if "states" in s else []
        if not (model / "model.safetensors.index.json").exists():
            model.mkdir(parents=True)
            self.python(a.transformers[0], "make", name, model)
        for file, seed, count, length in (("t.ids", 1, 2, 24), ("c.ids", 2, a.windows, 256)):
            (self.work / file).write_text("".join(" ".join(map(str, r)) + "\n" for r in rows(seed, count, length)))
        r = {"name": name, "what": s["what"], "hidden": s["config"]["hidden_size"], "layers": s["layers"],
             "source_bytes": sum(f.stat().st_size for f in model.glob("*.safetensors")), "tokens": 48}
        logits = run(self.tool, *(["--images", images[1]] if images else []), model, self.work / "t.ids",
                     self.work / "ours")
        ours = np.fromfile(self.work / "ours", "<f4").reshape(-1, VOCABULARY)
        r["logits"] = took(logits)
        r["against"] = [self.logits_error(name, model, images, folder, ours) for folder in a.transformers
                        if self.version(folder) in s.get("versions", ("4", "5"))]
        print(name, r["against"], flush=True)
        nf4 = ["--to", "nf4", "--compress", "none", "--force", "-v"]
        calibrate = ["--calibrate", self.work / "c.ids", *images]
        for glob in s["left"]:
            calibrate += ["--keep", glob]
        for kind, options in (("search", []), ("calibrated", calibrate))[:1 if a.no_calibrate else 2]:
            out = self.work / "out"
            shutil.rmtree(out, ignore_errors=True)
            done = run(a.qconv, *nf4, *options, model, out)
            r[kind] = took(done, r"up to ([0-9.]+ [KMG]?B) of memory" if options else None)
            if options:
                m = re.search(r"calibrated ([0-9,]+) weights? with .*?(?:; ([0-9,]+) by search)?$", done[0], re.M)
                r[kind] |= {"kept": s["left"], "tokens": 256 * a.windows, "weights": int(m[1].replace(",", "")),
                            "left": int((m[2] or "0").replace(",", ""))}
            said = run(a.qconv, "eval", out, "--against", model, "--text", self.work / "t.ids", *images, "--json", "-v")
            r[kind]["eval"] = took(said, r"takes up to ([0-9.]+ [KMG]?B) of memory")
            r[kind]["kl_mean"] = json.loads(said[0])["kl_mean"]
            print(name, kind, r[kind], flush=True)
        return r

    def version(self, folder):
        return next(Path(folder).glob("transformers-*.dist-info")).name.split("-")[1].split(".")[0]


def main():
    if len(sys.argv) > 3 and sys.argv[1] in ("make", "reference"):
        what, name, folder, *out = sys.argv[1:]
        return make(name, Path(folder)) if what == "make" else reference(name, Path(folder), *out)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", required=True)
    parser.add_argument("--transformers", action="append", required=True)
    parser.add_argument("--qconv", default=str(ROOT / "build" / "qconv"))
    parser.add_argument("--windows", type=int, default=8, help="of 256 tokens, to calibrate with")
    parser.add_argument("--no-calibrate", action="store_true", help="leave that out")
    parser.add_argument("--json", default=str(ROOT / "bench" / "results" / "full_width.json"))
    parser.add_argument("names", nargs="*", default=list(SYSTEMS))
    a = parser.parse_args()
    path = Path(a.json)
    result = json.loads(path.read_text()) if path.exists() else {"systems": []}
    bench = Bench(a)
    for name in a.names:
        row = bench.system(name)
        result["systems"] = [s for s in result["systems"] if s["name"] != name] + [row]
        result["systems"].sort(key=lambda s: list(SYSTEMS).index(s["name"]))
        result |= {"command": "bench/bench_full_width.py", "machine": platform.machine(), "cores": os.cpu_count(),
                   "qconv": run(a.qconv, "--version")[0].split("\n")[0]}
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
