"""A Llama forward pass in numpy, a reader of quantized checkpoints and what is judged of them: for bench_accuracy.py
and for tests, which so need no other package."""
import json
import os
import struct

import numpy as np


def read_tensors(folder):
    """name -> array of every .safetensors file of a folder (BF16 as float32)."""
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1",
             "I32": "<i4", "I64": "<i8"}
    out = {}
    for file in sorted(os.listdir(folder)):
        if not file.endswith(".safetensors"):
            continue
        with open(os.path.join(folder, file), "rb") as f:
            data = f.read()
        n = struct.unpack("<Q", data[:8])[0]
        for name, info in json.loads(data[8:8 + n]).items():
            if name == "__metadata__":
                continue
            begin, end = info["data_offsets"]
            raw = data[8 + n + begin:8 + n + end]
            if info["dtype"] == "BF16":
                wide = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
                array = wide.view(np.float32)
            else:
                array = np.frombuffer(raw, kinds[info["dtype"]])
            out[name] = array.reshape(info["shape"])
    return out


def read_weights(folder):
    """name -> float32 values; NF4, int8 and symmetric integers of compressed-tensors turned back."""
    return restore(read_tensors(folder))


def unpack(words, shape, scale):
    """Symmetric integers of compressed-tensors' pack-quantized, the first column in the low bits, of 2 to 8 bits."""
    rows, columns = shape
    bits = words.shape[1] * 32 // columns
    of_rows = np.unpackbits(words.view(np.uint8).reshape(rows, -1), axis=1, bitorder="little")[:, :columns * bits]
    codes = of_rows.reshape(rows, columns, bits) @ (1 << np.arange(bits))
    return (codes.astype(np.float32) - 2 ** (bits - 1)) * np.repeat(scale, columns // scale.shape[1], 1)


def restore(stored):
    """As read_weights, of what read_tensors gave."""
    out = {}
    for name, t in stored.items():
        nf4 = stored.get(name + ".quant_state.bitsandbytes__nf4")
        state = nf4 if nf4 is not None else stored.get(name + ".quant_state.qconv__int8")
        if state is not None:
            info = json.loads(state.tobytes().decode())
            count = int(np.prod(info["shape"]))
            scale = stored[name + ".absmax"]
            if name + ".nested_absmax" in stored:
                nested = np.repeat(stored[name + ".nested_absmax"], 256)[:scale.size]
                scale = (stored[name + ".nested_quant_map"][scale] * nested
                         + np.float32(info["nested_offset"]))
            scale = np.repeat(scale, info["blocksize"])[:count]
            codes = t.reshape(-1)
            if nf4 is None:
                values = codes.astype(np.float32) / np.float32(127)
            else:
                nibbles = np.stack([codes >> 4, codes & 15], 1).reshape(-1)
                values = stored[name + ".quant_map"][nibbles[:count]]
            out[name] = (values * scale).reshape(info["shape"])
        elif name.endswith(".weight_packed"):
            base = name[:-len("_packed")]
            out[base] = unpack(t, stored[base + "_shape"], stored[base + "_scale"])
        elif name + "_scale" in stored:
            out[name] = t.astype(np.float32) * stored[name + "_scale"]
        elif t.dtype == np.int8:
            scale = stored[name[:-len("weight")] + "SCB"].astype(np.float32)
            # Beside NF4 weights the codes are stored in one column.
            out[name] = t.reshape(scale.size, -1).astype(np.float32) * scale[:, None] / np.float32(127)
        elif t.dtype.kind == "f" and not name.endswith(".weight_scale"):
            out[name] = t.astype(np.float32)
    return out


def rope(x, theta):
    """x [batch, heads, tokens, dim]."""
    half = x.shape[-1] // 2
    freq = theta ** (-np.arange(half, dtype=np.float64) / half)
    angle = np.arange(x.shape[2])[:, None] * freq
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def read_config(folder):
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        return json.load(f)


def logits(config, w, tokens, before=None):
    """tokens [batch, n] -> [batch, n, vocab], float32. Where before is given, before(names, x) gets the
    inputs of the weights that are used next, and may replace these in w; then there is no result."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    eps = config["rms_norm_eps"]
    head = w["lm_head.weight"] if "lm_head.weight" in w else w["model.embed_tokens.weight"]
    table = w.get("model.embed_tokens.weight", head)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * w[name]

    batch, n = tokens.shape
    mask = np.triu(np.full((n, n), -np.inf, np.float32), 1)
    x = table[tokens]

    def use(inputs, *names):
        if before:
            before([p + n + "_proj.weight" for n in names], inputs)

    for layer in range(config["num_hidden_layers"]):
        p = "model.layers.%d." % layer
        h = norm(x, p + "input_layernorm.weight")
        use(h, "self_attn.q", "self_attn.k", "self_attn.v")

        def split(name, count):
            y = h @ w[p + "self_attn." + name + ".weight"].T
            return y.reshape(batch, n, count, dim).transpose(0, 2, 1, 3)

        q, k = rope(split("q_proj", heads), theta), rope(split("k_proj", groups), theta)
        v = split("v_proj", groups)
        k, v = (np.repeat(t, heads // groups, 1) for t in (k, v))
        score = q @ k.transpose(0, 1, 3, 2) / np.float32(np.sqrt(dim)) + mask
        score = np.exp(score - score.max(-1, keepdims=True))
        y = (score / score.sum(-1, keepdims=True)) @ v
        y = y.transpose(0, 2, 1, 3).reshape(batch, n, heads * dim)
        use(y, "self_attn.o")
        x = x + y @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        use(h, "mlp.gate", "mlp.up")
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        y = gate / (1 + np.exp(-gate)) * (h @ w[p + "mlp.up_proj.weight"].T)
        use(y, "mlp.down")
        x = x + y @ w[p + "mlp.down_proj.weight"].T
    if before:
        return None
    return norm(x, "model.norm.weight") @ head.T


def forward(config, w, tokens):
    """tokens [batch, n] -> log probabilities [batch, n, vocab], float64."""
    x = logits(config, w, tokens).astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


class Judge:
    """What predictions of other weights are beside those of a model, over windows of ids, [windows, tokens]."""

    def __init__(self, config, weights, windows, step=16):
        self.config, self.ids, self.step = config, windows, step
        self.base = [self.logs(weights, i) for i in range(0, len(windows), step)]
        self.windows = None  # of the last call: KL divergence and log ratio, a mean for each

    def logs(self, weights, at):
        return forward(self.config, weights, self.ids[at:at + self.step])[:, :-1]

    def __call__(self, weights):
        right, base_right, kl, same = [], [], [], []
        for i, a in enumerate(self.base):
            b = self.logs(weights, i * self.step)
            next_token = self.ids[i * self.step:(i + 1) * self.step, 1:, None]
            right.append(-np.take_along_axis(b, next_token, -1).ravel())
            base_right.append(-np.take_along_axis(a, next_token, -1).ravel())
            kl.append((np.exp(a) * (a - b)).sum(-1).ravel())
            same.append((a.argmax(-1) == b.argmax(-1)).ravel())
        right, base_right, kl, same = map(np.concatenate, (right, base_right, kl, same))
        paired, n = right - base_right, len(kl)
        self.windows = [x.reshape(len(self.ids), -1).mean(1) for x in (kl, paired)]
        error = [float(x.std(ddof=1) / n ** 0.5) for x in (right, paired, kl, same)]
        p, p0 = float(np.exp(right.mean())), float(np.exp(base_right.mean()))
        return {"perplexity": p, "perplexity_error": p * error[0], "base_perplexity": p0,
                "difference": p - p0, "difference_error": p * error[1],
                "log_ratio": float(paired.mean()), "log_ratio_error": error[1],
                "kl_mean": float(kl.mean()), "kl_error": error[2],
                "kl_99": float(np.quantile(kl, 0.99)), "top1": float(same.mean()),
                "top1_error": error[3], "predicted": n}
