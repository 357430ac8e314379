#!/usr/bin/env python3
"""Checkpoints for tests: real layouts without their weights, small ones with weights.

Standard library only. As a program:

  make_checkpoint.py PATTERN.json OUT [--random SEED] [--layers N] [--experts N] [--scale S]
                     [--shard-bytes N] [--no-config] [--dtype D]

PATTERN.json is one of tests/data/models. By default the files hold a true header and a hole of the
right length: a 470 GB checkpoint takes a few MB of disk. --random writes values; with --layers,
--experts and --scale it stays small (every dimension above 64 is divided by S).

As a module:

  write_safetensors(path, {"w": ("F32", [2, 3], encode("F32", values))})
  write_sparse(path, [("w", "F32", [2, 3])])
  write_checkpoint(dir, {"w": tensor, ...}, config={...}, shard_bytes=None)
  write_model(dir, load_model("Llama-3.1-8B"), layers=2, scale=64, seed=1)
  read_safetensors(path) -> ({"w": ("F32", [2, 3], bytes)}, metadata)
  read_checkpoint(dir)   -> the same over all shards
"""
import argparse
import array
import json
import os
import random
import statistics
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(HERE, "data", "models")
sys.path.insert(0, MODELS)
import expand as patterns  # noqa: E402

# In the order of the safetensors library, which writes wider dtypes first.
DTYPES = ["BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0",
          "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64",
          "F64", "I64", "U64"]
BITS = {d: 8 for d in DTYPES}
BITS.update({"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
             "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64})
INTEGER_CODES = {"BOOL": "B", "U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i",
                 "U64": "Q", "I64": "q"}


def numel(shape):
    n = 1
    for d in shape:
        n *= d
    return n


def tensor_bytes(dtype, shape):
    bits = numel(shape) * BITS[dtype]
    if bits % 8:
        raise ValueError("%s %s is not whole bytes" % (dtype, shape))
    return bits // 8


# ---- values --------------------------------------------------------------------------------

def to_bf16_bits(x):
    """Round to nearest even, as torch does."""
    u = struct.unpack("<I", struct.pack("<f", x))[0]
    if u & 0x7F800000 == 0x7F800000:
        return (u >> 16) | (0x40 if u & 0x7FFFFF else 0)
    return (u + 0x7FFF + (u >> 16 & 1)) >> 16


def encode(dtype, values):
    """Numbers (any iterable) to little-endian bytes of a dtype."""
    values = list(values)
    if dtype == "BF16":
        return struct.pack("<%dH" % len(values), *map(to_bf16_bits, values))
    code = {"F16": "e", "F32": "f", "F64": "d"}.get(dtype) or INTEGER_CODES[dtype]
    return struct.pack("<%d%s" % (len(values), code), *values)


def decode(dtype, data):
    """Bytes of a dtype to a list of numbers."""
    n = len(data) * 8 // BITS[dtype]
    if dtype == "BF16":
        wide = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
        return list(struct.unpack("<%df" % n, wide))
    code = {"F16": "e", "F32": "f", "F64": "d"}.get(dtype) or INTEGER_CODES[dtype]
    return list(struct.unpack("<%d%s" % (n, code), data))


_tables = {}


def random_bytes(dtype, shape, rng):
    """Weights as trained ones look: normal, sd 0.02, without NaN or infinity. Integers: any."""
    n = numel(shape)
    if dtype in ("F16", "BF16", "F32", "F64"):
        if dtype not in _tables:
            normal = statistics.NormalDist(0.0, 0.02)
            values = [normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)]
            data = encode(dtype, values)
            code = {2: "H", 4: "I", 8: "Q"}[BITS[dtype] // 8]
            _tables[dtype] = array.array(code, data)
        table = _tables[dtype]
        out = array.array(table.typecode, (table[i] for i in array.array("H", rng.randbytes(2 * n))))
        return out.tobytes()
    if dtype == "BOOL":
        return bytes(b & 1 for b in rng.randbytes(n))
    if dtype.startswith("F8_E4M3"):
        return bytes(b & 0xBF for b in rng.randbytes(n))
    return rng.randbytes(tensor_bytes(dtype, shape))


# ---- files ---------------------------------------------------------------------------------

def header_bytes(rows, metadata=None):
    """rows: [(name, dtype, shape)] in file order -> the length, the JSON, padding to 8."""
    parts = []
    if metadata is not None:
        parts.append('"__metadata__":' + json.dumps(metadata, separators=(",", ":")))
    offset = 0
    for name, dtype, shape in rows:
        end = offset + tensor_bytes(dtype, shape)
        parts.append('%s:{"dtype":"%s","shape":[%s],"data_offsets":[%d,%d]}'
                     % (json.dumps(name, ensure_ascii=False), dtype, ",".join(map(str, shape)),
                        offset, end))
        offset = end
    text = ("{" + ",".join(parts) + "}").encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offset


def file_order(rows):
    """As the reference writer sorts: dtype descending, then name."""
    return sorted(rows, key=lambda r: (-DTYPES.index(r[1]), r[0]))


PT = {"format": "pt"}


def write_sparse(path, rows, metadata=PT):
    """A true header, then a hole as long as the data. rows: [(name, dtype, shape)]."""
    head, data = header_bytes(file_order(rows), metadata)
    with open(path, "wb") as f:
        f.write(head)
        f.truncate(len(head) + data)
    return len(head) + data


def write_safetensors(path, tensors, metadata=PT):
    """tensors: name -> (dtype, shape, bytes); bytes None leaves a hole."""
    rows = file_order([(name, t[0], t[1]) for name, t in tensors.items()])
    head, data = header_bytes(rows, metadata)
    with open(path, "wb") as f:
        f.write(head)
        for name, dtype, shape in rows:
            body = tensors[name][2]
            if body is None:
                f.seek(tensor_bytes(dtype, shape), os.SEEK_CUR)
                continue
            if len(body) != tensor_bytes(dtype, shape):
                raise ValueError("%s: %d bytes for %s %s" % (name, len(body), dtype, shape))
            f.write(body)
        f.truncate(len(head) + data)
    return len(head) + data


def read_safetensors(path):
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        head = json.loads(f.read(n))
        base = 8 + n
        out = {}
        metadata = head.pop("__metadata__", None)
        for name, info in head.items():
            begin, end = info["data_offsets"]
            f.seek(base + begin)
            out[name] = (info["dtype"], info["shape"], f.read(end - begin))
    return out, metadata


def read_checkpoint(path):
    index = os.path.join(path, "model.safetensors.index.json")
    if not os.path.exists(index):
        return read_safetensors(os.path.join(path, "model.safetensors"))[0]
    with open(index) as f:
        names = sorted(set(json.load(f)["weight_map"].values()))
    out = {}
    for name in names:
        out.update(read_safetensors(os.path.join(path, name))[0])
    return out


def write_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=2)
        f.write("\n")


def write_checkpoint(path, tensors, config=None, shard_bytes=None, metadata=PT):
    """A checkpoint directory. tensors: name -> (dtype, shape, bytes or None), in model order.
    shard_bytes: greedy shards of at most so many bytes and an index, as Hugging Face cuts them.
    Returns the names of the weight files."""
    os.makedirs(path, exist_ok=True)
    if config is not None:
        write_json(os.path.join(path, "config.json"), config)
    shards, used, total = [{}], 0, 0
    for name, t in tensors.items():
        size = tensor_bytes(t[0], t[1])
        if shard_bytes and shards[-1] and used + size > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = t
        used += size
        total += size
    if not shard_bytes:
        write_safetensors(os.path.join(path, "model.safetensors"), shards[0], metadata)
        return ["model.safetensors"]
    names = ["model-%05d-of-%05d.safetensors" % (i + 1, len(shards)) for i in range(len(shards))]
    weight_map = {}
    for file_name, shard in zip(names, shards):
        write_safetensors(os.path.join(path, file_name), shard, metadata)
        weight_map.update({name: file_name for name in shard})
    write_json(os.path.join(path, "model.safetensors.index.json"),
               {"metadata": {"total_size": total}, "weight_map": weight_map})
    return names


# ---- models from pattern files -------------------------------------------------------------

def load_model(name):
    """By file name in tests/data/models, with or without .json, or by path."""
    path = name if os.path.exists(name) else os.path.join(MODELS, name)
    if not path.endswith(".json"):
        path += ".json"
    with open(path) as f:
        return json.load(f)


def model_names():
    return sorted(f[:-5] for f in os.listdir(MODELS) if f.endswith(".json"))


def scaled_dim(d, scale):
    """Dimensions above 64 shrink, to a multiple of 32; equal ones stay equal."""
    return d if d <= 64 or scale <= 1 else max(64, d // scale // 32 * 32)


def scaled_shape(shape, role, scale):
    if role in ("mxfp4_blocks", "mxfp4_scales"):
        groups = scaled_dim(shape[2] * 32, scale) // 32
        return [shape[0], scaled_dim(shape[1], scale), groups] + shape[3:]
    if role == "fp8_scale":
        return [-(-scaled_dim(d * 128, scale) // 128) for d in shape]
    return [scaled_dim(d, scale) for d in shape]


# Shapes that are sums or products of fields of config.json, and so shrink with these.
def special_shape(name, config, shape):
    c = config.get("text_config", config)
    vision = config.get("vision_config", {})
    if name.endswith("kv_a_proj_with_mqa.weight"):
        return [c["kv_lora_rank"] + c["qk_rope_head_dim"], c["hidden_size"]]
    if ".shared_experts." in name:
        inner = c["n_shared_experts"] * c["moe_intermediate_size"]
        return [c["hidden_size"], inner] if "down_proj" in name else [inner, c["hidden_size"]]
    if ".experts.gate_up_proj" in name:
        return [shape[0], 2 * c["intermediate_size"]] + shape[2:]
    if config["model_type"] != "mllama":
        return shape
    side, tiles, width = vision["image_size"] // vision["patch_size"], vision["max_num_tiles"], vision["hidden_size"]
    if name.endswith("gated_positional_embedding.embedding"):
        return [side * side + 1, width]
    if name.endswith("gated_positional_embedding.tile_embedding.weight"):
        return [shape[0], tiles * width * (side * side + 1)]
    if name.endswith("tile_positional_embedding.embedding.weight"):
        return [shape[0], tiles * width]
    if name.endswith("embed_tokens.weight"):
        return [c["vocab_size"] + 8, c["hidden_size"]]
    return shape


def scale_config(config, scale):
    """The fields that the scaled shapes follow from."""
    c = config.get("text_config", config)
    heads = c["num_attention_heads"]
    kv = c.get("num_key_value_heads", heads)
    size = c.get("head_dim", c["hidden_size"] // heads)
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "q_lora_rank",
                "kv_lora_rank"):
        if key in c:
            c[key] = scaled_dim(c[key], scale)
    if config["model_type"] == "bert":
        c["max_position_embeddings"] = scaled_dim(c["max_position_embeddings"], scale)
        c["num_attention_heads"] = 2
    elif "kv_lora_rank" in c:
        c.update(qk_nope_head_dim=64, v_head_dim=64, qk_rope_head_dim=32)
        c["num_attention_heads"] = c["num_key_value_heads"] = scaled_dim(heads * 128, scale) // 64
    else:
        q, k = scaled_dim(heads * size, scale), scaled_dim(kv * size, scale)
        c["head_dim"] = {"qwen3": 64, "mllama": 64, "gpt_oss": q // heads}.get(config["model_type"], 16)
        c["num_attention_heads"], c["num_key_value_heads"] = q // c["head_dim"], k // c["head_dim"]
    vision = config.get("vision_config")
    if vision:
        for key in ("hidden_size", "intermediate_size", "vision_output_dim"):
            vision[key] = scaled_dim(vision[key], scale)
        vision["image_size"] = 8 * vision["patch_size"]


def model_rows(model, layers=None, experts=None, scale=1, dtype=None):
    """[(name, dtype, shape, role)], cut to the first layers and experts and scaled."""
    small = model_config(model, layers, experts, scale) if scale > 1 else None
    cut = dict(model)
    config = model.get("config", {})
    count = config.get("num_local_experts", config.get("n_routed_experts"))
    if "tensor_patterns" in model:
        rows = []
        for name, kind, shape, span_l, span_e, role in model["tensor_patterns"]:
            if layers is not None and span_l is not None:
                span_l = [span_l[0], min(span_l[1], layers - 1)] + span_l[2:]
            if experts is not None and span_e is not None:
                span_e = [span_e[0], min(span_e[1], experts - 1)] + span_e[2:]
            rows.append([name, kind, shape, span_l, span_e, role])
        cut["tensor_patterns"] = rows
    for name, kind, shape, role in patterns.expand(cut):
        full, shape = shape[0], scaled_shape(list(shape), role, scale)
        if count and full == count and ("experts." in name or "router" in role):
            shape[0] = count if experts is None else min(experts, count)
        if small:
            shape = special_shape(name, small, shape)
        if dtype and kind in ("F64", "F32", "F16", "BF16"):
            kind = dtype
        yield name, kind, shape, role


def model_config(model, layers=None, experts=None, scale=1):
    """config.json as the repository has it: members marked config_not_in_file are left out."""
    config = json.loads(json.dumps(model["config"]))
    for key in model.get("config_not_in_file", []):
        config.pop(key, None)
    if scale > 1:
        scale_config(config, scale)
    # mllama has the text model's facts one level down.
    vision = config.get("vision_config", {})
    for key in ("num_hidden_layers", "num_global_layers"):
        if layers is not None and key in vision:
            vision[key] = min(layers, vision[key])
    for part in (config, config.get("text_config", {})):
        if layers is not None and "num_hidden_layers" in part:
            part["num_hidden_layers"] = min(layers, part["num_hidden_layers"])
            if "layer_types" in part:
                part["layer_types"] = part["layer_types"][:layers]
            if "cross_attention_layers" in part:
                part["cross_attention_layers"] = [
                    i for i in part["cross_attention_layers"] if i < layers]
        for key in ("num_local_experts", "n_routed_experts"):
            if experts is not None and key in part:
                part[key] = min(experts, part[key])
                for each in ("num_experts_per_tok", "experts_per_token"):
                    if each in part:
                        part[each] = min(part[each], part[key])
    return config


def write_model(path, model, layers=None, experts=None, scale=1, seed=None, shard_bytes=None,
                config=True, dtype=None):
    """A checkpoint directory from a pattern file. seed None: holes instead of values."""
    rng = random.Random(seed)
    tensors = {}
    for name, kind, shape, role in model_rows(model, layers, experts, scale, dtype):
        body = None if seed is None else random_bytes(kind, shape, rng)
        if body is not None and role == "mxfp4_scales":
            body = bytes(112 + b % 12 for b in body)  # as trained ones: 255 would be NaN
        tensors[name] = (kind, shape, body)
    conf = model_config(model, layers, experts, scale) if config else None
    return write_checkpoint(path, tensors, conf, shard_bytes)


def main(argv):
    p = argparse.ArgumentParser(description="Write a checkpoint from a pattern file.")
    p.add_argument("pattern")
    p.add_argument("out")
    p.add_argument("--random", type=int, metavar="SEED", help="write values, not holes")
    p.add_argument("--layers", type=int)
    p.add_argument("--experts", type=int)
    p.add_argument("--scale", type=int, default=1)
    p.add_argument("--shard-bytes", type=lambda s: int(float(s)))
    p.add_argument("--dtype", choices=["F64", "F32", "F16", "BF16"], help="for floating tensors")
    p.add_argument("--no-config", action="store_true")
    a = p.parse_args(argv)
    files = write_model(a.out, load_model(a.pattern), a.layers, a.experts, a.scale, a.random,
                        a.shard_bytes, not a.no_config, a.dtype)
    print("%s: %d file(s)" % (a.out, len(files)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
