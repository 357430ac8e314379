"""Calibrated checkpoints in transformers and bitsandbytes, and the moments of inputs that qconv.capture takes."""
import json
import math
import os
import sys
import unittest

import bitsandbytes
import numpy as np
import torch
import transformers

import interop_support as s

sys.path.insert(0, str(s.ROOT / "python"))
os.environ.setdefault("QCONV_LIBRARY", str(s.BUILD / "libqconv.so"))
import qconv  # noqa: E402

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
torch.set_grad_enabled(False)

# Its fused layer packs weights anew, in bfloat16, and only where rows are a multiple of 32.
bitsandbytes.nn.modules.has_avx512bf16 = lambda: False

HELD_OUT = s.ROOT / "tests/data/kjv-llama/heldout.txt"


def bundled():
    path = s.SCRATCH / "calibration.txt"
    if not path.exists():
        path.write_bytes(s.run("zstd", "-dcq", s.ROOT / "convert/calibrate/calibration_text.zst"))
    return path


def convert(name, *options):
    out = s.SCRATCH / ("-".join([name, *(o.strip("-").split("/")[-1] for o in options)]))
    s.qconv("--compress", "none", "-q", "--compute-dtype", "float32", *options,
            s.model_path(name), out)
    return out


class Loaded(unittest.TestCase):
    """The same perplexity as `qconv eval`, to 0.1%, of weights that bitsandbytes dequantizes."""

    def check(self, name, context, front, length, form):
        out = convert(name, "--to", form, "--calibrate", "default", "--calibration-context", "128",
                      "--calibration-tokens", "4096")
        path = s.SCRATCH / "eval.txt"
        text = HELD_OUT.read_text()[:length]
        path.write_text(text)
        got = json.loads(s.qconv("eval", out, "--text", path, "--context", context, "--json", "-q"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(s.model_path(name))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        room = context - len(front)
        windows = [front + ids[i:i + room] for i in range(0, len(ids), room)]
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        kinds = {type(m).__name__ for m in model.modules()}
        self.assertIn("Linear4bit" if form == "nf4" else "Linear8bitLt", kinds)
        total, count, first = 0.0, 0, max(1, len(front))
        for w in windows:
            if len(w) > first:
                logs = torch.log_softmax(model(torch.tensor([w])).logits[0].double(), -1)
                total -= logs[first - 1:-1].gather(1, torch.tensor(w[first:])[:, None]).sum().item()
                count += len(w) - first
        self.assertEqual(got["predicted"], count)
        want = math.exp(total / count)
        s.note(f"{name}, {form}: perplexity {got['perplexity']:.6f}, transformers {want:.6f}")
        # LLM.int8 rounds its inputs to 8 bits as well: that is its matmul, not the weights.
        slack = 1e-3 if form == "nf4" else 2e-2
        self.assertAlmostEqual(got["perplexity"], want, delta=slack * want)

    def test_kjv(self):
        self.check("kjv-llama", 256, [], 8000, "nf4")

    def test_kjv_int8(self):
        self.check("kjv-llama", 256, [], 4000, "int8")

    def test_tinystories(self):
        self.check("tinystories", 100, [1], 4000, "nf4")


class Captured(unittest.TestCase):
    def capture(self, name, text, **options):
        out = s.SCRATCH / (name + "-moments")
        qconv.capture(s.model_path(name), text, out, sided="one", device="cpu", **options)
        tensors = {}
        for n, (dtype, shape, data) in s.read_folder(out).items():
            kind = {"F64": "<f8", "I64": "<i8", "U8": "u1"}[dtype]
            tensors[n] = np.frombuffer(data, kind).reshape(shape)
        return out, tensors

    def test_kjv(self):
        """The first layer's inputs are its norm of the embeddings: computed here once more. Shared
        inputs are found, and matrices that take several passes are the same."""
        model, text = s.model_path("kjv-llama"), s.SCRATCH / "kjv.ids"
        ids = transformers.AutoTokenizer.from_pretrained(model)(
            bundled().read_text(encoding="utf-8")[:20000], add_special_tokens=False)["input_ids"][:4096]
        text.write_text("".join(" ".join(map(str, ids[i:i + 128])) + "\n" for i in range(0, 4096, 128)))
        out, t = self.capture("kjv-llama", text, memory=0.002)
        weights = {n: np.frombuffer(d, "<f4").reshape(shape)
                   for n, (dtype, shape, d) in s.read_folder(model).items() if dtype == "F32"}
        if not weights:
            weights = {n: torch.frombuffer(bytearray(d), dtype=torch.bfloat16).float().reshape(
                shape).numpy() for n, (_, shape, d) in s.read_folder(model).items()}
        embed = weights.get("model.embed_tokens.weight", weights.get("lm_head.weight"))
        x = embed[ids].astype(np.float64)
        eps = json.loads((model / "config.json").read_text())["rms_norm_eps"]
        x = x / np.sqrt((x * x).mean(1, keepdims=True) + eps)
        x *= weights["model.layers.0.input_layernorm.weight"]
        h = x.T @ x / len(x)
        p = "model.layers.0.self_attn."
        self.assertEqual(t[p + "q_proj.tokens"][0], 4096)
        got = t[p + "q_proj.second_moment"]
        off = np.abs(got - h).max() / h.diagonal().mean()
        s.note(f"kjv-llama: first second moments apart by {off:.1e} of the diagonal's mean")
        self.assertLess(off, 1e-4)  # norms and products in float
        for n in ("k_proj", "v_proj"):
            self.assertEqual(bytes(t[p + n + ".same_as"]).decode(), p + "q_proj")
        self.assertGreater(len(list(out.glob("*.safetensors"))), 1)
        a = convert("kjv-llama", "--to", "nf4", "--hessians", str(out))
        plain = convert("kjv-llama", "--to", "nf4", "--scale", "absmax")
        kl = [json.loads(s.qconv("eval", o, "--against", model, "--text", HELD_OUT, "--context",
                                 256, "--max-tokens", 8192, "--json", "-q"))["kl_mean"]
              for o in (a, plain)]
        s.note(f"kjv-llama: KL divergence {kl[0]:.5f}, plain NF4 {kl[1]:.5f}")
        self.assertLess(kl[0], 0.6 * kl[1])

    def test_experts(self):
        """Experts that lie in one tensor are captured under the checkpoint's names, each with the
        tokens that were sent to it; too few are left to the search."""
        path, tokens, chosen = s.SCRATCH / "experts", 1536, 2
        torch.manual_seed(7)
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
            vocab_size=256, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
            num_experts_per_tok=chosen)).to(torch.bfloat16).save_pretrained(path)
        for file in s.model_path("kjv-llama").glob("tokenizer*"):
            (path / file.name).write_bytes(file.read_bytes())
        sums, model = [0, 0], transformers.AutoModelForCausalLM.from_pretrained(path).float()
        for i, layer in enumerate(model.model.layers):
            def add(_, inputs, i=i):
                x = inputs[0].reshape(-1, 128).double()
                sums[i] = sums[i] + x.T @ x
            layer.mlp.register_forward_pre_hook(add)
        ids = transformers.AutoTokenizer.from_pretrained(path)(
            bundled().read_text(encoding="utf-8")[:9000])["input_ids"][:tokens]
        for i in range(0, tokens, 128):
            model(torch.tensor([ids[i:i + 128]]))
        for size, left in ((tokens, 0), (128, 1)):
            out = s.SCRATCH / f"experts-moments-{size}"
            text = s.SCRATCH / "experts.ids"
            text.write_text("".join(" ".join(map(str, ids[i:i + 128])) + "\n" for i in range(0, size, 128)))
            qconv.capture(path, text, out, sided="one", device="cpu")
            t = {}
            for n, (dtype, shape, data) in s.read_folder(out).items():
                t[n] = np.frombuffer(data, {"F64": "<f8", "I64": "<i8", "U8": "u1"}[dtype])
            got = s.SCRATCH / f"experts-nf4-{size}"
            s.qconv("--to", "nf4", "-q", "--hessians", out, path, got)
            entries = json.loads((got / "qconv.json").read_text())["tensors"]
            made = [e["calibrated"] for e in entries if "calibrated" in e]
            quantized = sum(e["scheme"] == "nf4" for e in entries)
            self.assertEqual((quantized, len(made) < quantized), (56, left == 1))
            self.assertTrue(all(e["calibrated"] < e["rounded"] for e in made))
            if left:
                break
            for i in range(2):
                whole, count = 0, 0
                for e in range(8):
                    at = f"model.layers.{i}.mlp.experts.{e}."
                    self.assertEqual(bytes(t[at + "up_proj.same_as"]).decode(), at + "gate_proj")
                    self.assertEqual(t[at + "down_proj.tokens"], t[at + "gate_proj.tokens"])
                    whole = whole + t[at + "gate_proj.second_moment"] * t[at + "gate_proj.tokens"]
                    count += t[at + "gate_proj.tokens"][0]
                self.assertEqual(count, chosen * tokens)
                want = chosen * sums[i].numpy().reshape(-1)
                self.assertLess(np.abs(whole - want).max(), 1e-4 * np.abs(want).max())

    def test_minilm(self):
        """Embeddings' cosine distance is halved."""
        out, t = self.capture("minilm", bundled(), paragraphs=True, context=128, tokens=12288, only="encoder")
        self.assertTrue(all(np.array_equal(m, m.T) for n, m in t.items()
                            if n.endswith(".second_moment")))
        model = s.model_path("minilm")
        made = [str(convert("minilm", "--to", "nf4", *o)) for o in (
            ("--scale", "absmax"), ("--hessians", str(out)))]
        files = []
        for m in made:
            s.qconv("--to", "bf16", "--compress", "none", "-q", m, m + "-plain")
            files.append(m + ".npz")
            np.savez(files[-1], **{
                n: torch.frombuffer(bytearray(d), dtype=torch.bfloat16).float().reshape(shape)
                for n, (dtype, shape, d) in s.read_folder(m + "-plain").items()
                if dtype == "BF16" and n.endswith("dense.weight") or ".self." in n
                and n.endswith("weight") and dtype == "BF16"})
        found = json.loads(s.run(sys.executable, "-B", s.ROOT / "bench/accuracy_embeddings.py",
                                 model, s.ROOT / "bench/sentences.txt",
                                 *files).splitlines()[-1])
        s.note(f"minilm: distance {found[1][0]:.5f}, plain NF4 {found[0][0]:.5f}")
        self.assertLess(found[1][0], 0.5 * found[0][0])


if __name__ == "__main__":
    s.main()
