"""What other quantizers make of a model's weights: bitsandbytes, llama.cpp. For bench_accuracy.py.

    accuracy_peers.py IN OUT [TYPE...]    needs numpy, torch, bitsandbytes, gguf, llama-cpp-python

TYPE: types of llama.cpp, and nothing else is made then, nor bitsandbytes needed (mixtures.py). K-quants need rows of a
multiple of 256; so they are made of rows as they are, where llama.cpp takes other types, and of rows put together to 256.
IN: a folder with weights.npz and config.json. OUT/NAME.npz gets the values as float32 that a reader
restores, OUT/peers.json bits per weight and what was really used. bitsandbytes works on the CPU.
"""
import collections
import ctypes
import json
import os
import re
import sys

import gguf
import llama_cpp
import numpy as np

if len(sys.argv) == 3:
    import bitsandbytes as bnb
    import bitsandbytes.functional as F
    import torch

ROLES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
         "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
         "self.query": "attn_q", "self.key": "attn_k", "self.value": "attn_v",
         "attention.output.dense": "attn_output", "intermediate.dense": "ffn_up",
         "output.dense": "ffn_down"}
KEPT = []
FILE_TYPES = {"Q4_0": 2, "Q4_K_M": 15, "IQ4_NL": 25, "Q8_0": 7}
OTHER_TYPES = {"Q5_K_M": 17, "Q6_K": 18}  # llama.h of llama.cpp


def save(out, name, values):
    np.savez(os.path.join(out, name + ".npz"), **values)


def nf4(weights, double):
    values, size = {}, 0
    for name, w in weights.items():
        q, state = F.quantize_4bit(torch.from_numpy(w), blocksize=64, compress_statistics=double,
                                   quant_type="nf4")
        values[name] = F.dequantize_4bit(q, state).numpy()
        size += q.numel() + state.absmax.numel() * state.absmax.element_size()
        size += state.state2.absmax.numel() * 4 if double else 0
    return values, size


def int8(weights):
    values, size = {}, 0
    for name, w in weights.items():
        codes, scb, _ = F.int8_vectorwise_quant(torch.from_numpy(w).to(torch.float16))
        values[name] = (codes.float() * scb.view(-1, 1) * (1 / 127)).numpy()
        size += codes.numel() + scb.numel() * 4
    return values, size


def gguf_name(name):
    layer = re.search(r"\.(\d+)\.", name)
    for ending, role in ROLES.items():
        if layer and name.endswith(ending + ".weight"):
            return "blk.%s.%s.weight" % (layer.group(1), role)
    return name


def write_gguf(path, config, weights):
    """Only the weights in question; llama.cpp chooses types by name, number and shape."""
    hidden = config["hidden_size"]
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(512)
    w.add_embedding_length(hidden)
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config.get("num_key_value_heads", config["num_attention_heads"]))
    w.add_layer_norm_rms_eps(1e-5)
    w.add_file_type(0)
    w.add_vocab_size(32)
    w.add_tokenizer_model("llama")
    w.add_token_list([b"<unk>", b"<s>", b"</s>"] + [b"t%d" % i for i in range(29)])
    w.add_token_scores([0.0] * 32)
    w.add_token_types([2, 3, 3] + [1] * 29)
    w.add_tensor("token_embd.weight", np.zeros((32, hidden), np.float32))
    w.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    w.add_tensor("output.weight", np.zeros((32, hidden), np.float32))
    for name, t in weights.items():
        w.add_tensor(gguf_name(name), t)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def importance(moments):
    """llama.cpp's importance matrix: mean squares of each input, by the tensor's name."""
    entries = (llama_cpp.llama_model_imatrix_data * (len(moments) + 1))()
    for e, (name, squares) in zip(entries, moments.items()):
        squares = np.ascontiguousarray(squares, np.float32)
        e.name, e.size = gguf_name(name).encode(), squares.size
        e.data = squares.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        KEPT.append(squares)
    return entries


def quantize_gguf(source, path, file_type, imatrix=None):
    p = llama_cpp.llama_model_quantize_default_params()
    p.nthread, p.ftype = 1, file_type
    if imatrix is not None:
        p.imatrix = ctypes.cast(imatrix, type(p.imatrix))
    status = llama_cpp.llama_model_quantize(source.encode(), path.encode(), ctypes.byref(p))
    if status != 0:
        raise SystemExit("llama_model_quantize: %d for type %d" % (status, file_type))


def read_gguf(path, weights):
    values, size, types = {}, 0, collections.Counter()
    names = {gguf_name(n): n for n in weights}
    for t in gguf.GGUFReader(path).tensors:
        if t.name in names:
            name = names[t.name]
            restored = gguf.quants.dequantize(t.data, t.tensor_type)
            values[name] = restored.reshape(weights[name].shape).astype(np.float32)
            size += int(t.n_bytes)
            types[t.tensor_type.name] += weights[name].size
    assert sorted(values) == sorted(weights)
    return values, size, types


def main():
    source, out, *types = sys.argv[1:]
    log = llama_cpp.llama_log_callback(lambda level, text, user: None)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    with open(os.path.join(source, "config.json")) as f:
        config = json.load(f)
    weights = dict(np.load(os.path.join(source, "weights.npz")))
    count = sum(w.size for w in weights.values())
    rows = []

    def add(name, program, values, size, types=None):
        file = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
        save(out, file, values)
        rows.append({"name": name, "program": program, "file": file + ".npz",
                     "bits": 8 * size / count,
                     "types": {k: v / count for k, v in types.items()} if types else None})

    if not types:
        add("bitsandbytes NF4", "bitsandbytes", *nf4(weights, False))
        add("bitsandbytes NF4, double", "bitsandbytes", *nf4(weights, True))
        add("bitsandbytes LLM.int8", "bitsandbytes", *int8(weights))
    plain = os.path.join(out, "source.gguf")
    for how in ("", ", rows of 256") if types else ("",):
        write_gguf(plain, config, {n: w.reshape(-1, 256) if how else w for n, w in weights.items()})
        for name, number in {t: OTHER_TYPES[t] for t in types}.items() or FILE_TYPES.items():
            path = os.path.join(out, name + ".gguf")
            quantize_gguf(plain, path, number)
            add("llama.cpp " + name + how, "llama.cpp", *read_gguf(path, weights))
            os.remove(path)
    if os.path.exists(os.path.join(source, "squares.npz")):
        matrix = importance(dict(np.load(os.path.join(source, "squares.npz"))))
        for name in ("Q4_K_M", "IQ4_NL"):
            path = os.path.join(out, name + "-imatrix.gguf")
            quantize_gguf(plain, path, FILE_TYPES[name], matrix)
            add("llama.cpp %s, importance matrix" % name, "llama.cpp", *read_gguf(path, weights))
            os.remove(path)
    os.remove(plain)
    with open(os.path.join(out, "peers.json"), "w") as f:
        others = {} if types else {"bitsandbytes": bnb.__version__, "torch": torch.__version__}
        json.dump({"versions": {**others, "llama-cpp-python": llama_cpp.__version__}, "rows": rows}, f)


main()
