"""The models that bench_accuracy.py measures on, and the texts.

A model is a folder as Hugging Face lays it out. A language model has text as token ids, one window
a line, as `qconv eval --text FILE.ids` reads it. tinystories-656k has no text at hand, so it writes
its own: sampled in float64, so that the ids do not depend on the machine's order of sums.
"""
import hashlib
import json
import os
import struct

import numpy as np

import llama_numpy as lm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KJV = os.path.join(ROOT, "tests", "data", "kjv-llama")
SEEDS = (1, 2, 3, 4)  # of sampled text
SAMPLED = (32, 128)  # windows a seed, tokens a window
HELD_OUT = (96, 256)


class Model:
    def __init__(self, label, folder, windows=None, text=None):
        self.label, self.folder, self.windows, self.text = label, folder, windows, text
        with open(os.path.join(folder, "config.json")) as f:
            self.config = json.load(f)
        self.weights = lm.read_weights(folder)


def write_ids(path, windows):
    with open(path, "w") as f:
        f.writelines(" ".join(map(str, w)) + "\n" for w in windows)


def ids_digest(windows):
    return hashlib.sha256(np.ascontiguousarray(windows, "<i8").tobytes()).hexdigest()[:16]


def sample(config, weights, windows, length, seed):
    """[windows, length] tokens that a Llama without biases writes at temperature 1, from its bos."""
    w = {k: v.astype(np.float64) for k, v in weights.items()}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    layers, eps = config["num_hidden_layers"], config["rms_norm_eps"]
    head = w["lm_head.weight"]
    table = w.get("model.embed_tokens.weight", head)
    rng = np.random.default_rng(seed)
    freq = theta ** (-np.arange(dim // 2) / (dim // 2))
    keys = np.zeros((layers, windows, groups, length, dim))
    values = np.zeros_like(keys)
    tokens = np.full((windows, length), config["bos_token_id"], np.int64)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[name]

    def turn(x, t):
        a, b = x[..., :dim // 2], x[..., dim // 2:]
        cos, sin = np.cos(t * freq), np.sin(t * freq)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    for t in range(length - 1):
        x = table[tokens[:, t]]
        for layer in range(layers):
            p = "model.layers.%d." % layer
            h = norm(x, p + "input_layernorm.weight")
            q, k, v = ((h @ w[p + "self_attn.%s_proj.weight" % n].T).reshape(windows, groups, -1, dim)
                       for n in "qkv")
            q = turn(q, t)
            keys[layer, :, :, t], values[layer, :, :, t] = turn(k, t)[:, :, 0], v[:, :, 0]
            score = np.einsum("wghd,wgtd->wght", q, keys[layer, :, :, :t + 1]) / np.sqrt(dim)
            score = np.exp(score - score.max(-1, keepdims=True))
            score /= score.sum(-1, keepdims=True)
            y = np.einsum("wght,wgtd->wghd", score, values[layer, :, :, :t + 1])
            x = x + y.reshape(windows, heads * dim) @ w[p + "self_attn.o_proj.weight"].T
            h = norm(x, p + "post_attention_layernorm.weight")
            gate = h @ w[p + "mlp.gate_proj.weight"].T
            up = h @ w[p + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
        z = norm(x, "model.norm.weight") @ head.T
        z = np.exp(z - z.max(-1, keepdims=True)).cumsum(-1)
        tokens[:, t + 1] = (z > rng.random((windows, 1)) * z[:, -1:]).argmax(-1)
    return tokens


def held_out(path, count, length):
    """`count` windows of bytes, evenly spread over a file."""
    data = np.fromfile(path, np.uint8).astype(np.int64)
    starts = np.linspace(0, len(data) - length, count).astype(int)
    return np.stack([data[s:s + length] for s in starts])


def write_safetensors(path, tensors):
    """tensors: name -> array; numbers with a point are written as F32."""
    tensors = {n: t.astype("<f4") if t.dtype.kind == "f" else t for n, t in tensors.items()}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": {"f": "F32", "i": "I64", "u": "U8"}[t.dtype.kind],
                        "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            f.write(np.ascontiguousarray(t).tobytes())


def write_model(folder, config, tensors):
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(dict(config, torch_dtype="float32", dtype="float32"), f, indent=1)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    return folder


def write_normal(folder):
    """Weights drawn from a normal distribution, as bfloat16 holds them, in the shapes of a Llama."""
    hidden, inner, layers, kv = 1024, 2816, 1, 256
    rng = np.random.default_rng(7)

    def draw(*shape):
        bits = rng.normal(0, 0.02, shape).astype(np.float32).view(np.uint32)
        return ((bits + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32)

    tensors = {"model.embed_tokens.weight": draw(32, hidden), "lm_head.weight": draw(32, hidden),
               "model.norm.weight": np.ones(hidden, np.float32)}
    for layer in range(layers):
        p = "model.layers.%d." % layer
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[p + name + ".weight"] = np.ones(hidden, np.float32)
        for name, rows, cols in (("self_attn.q_proj", hidden, hidden),
                                 ("self_attn.k_proj", kv, hidden), ("self_attn.v_proj", kv, hidden),
                                 ("self_attn.o_proj", hidden, hidden),
                                 ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden),
                                 ("mlp.down_proj", hidden, inner)):
            tensors[p + name + ".weight"] = draw(rows, cols)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
              "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 16,
              "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 2048, "rope_theta": 10000.0, "hidden_act": "silu",
              "tie_word_embeddings": False}
    return write_model(folder, config, tensors)


def kjv():
    return Model("kjv-llama", os.path.join(KJV, "model"),
                 held_out(os.path.join(KJV, "heldout.txt"), *HELD_OUT),
                 "held-out text, %d windows of %d bytes" % HELD_OUT)


def tinystories(folder):
    m = Model("tinystories-656k", folder)
    m.windows = np.concatenate([sample(m.config, m.weights, *SAMPLED, s) for s in SEEDS])
    m.text = ("sampled from the F32 model, seeds %s, %d windows of %d tokens each"
              % (", ".join(map(str, SEEDS)), *SAMPLED))
    return m
