"""Outputs of qconv that somebody forged: a list of what may be wrong in one, and a writer that makes all digests fit.

A mutation is (name, what it does to the tensors of one weight and to config.json, whether that is no model any more).
Every reader of the package goes through the same list (test_interop_forged.py).
"""
import json
import shutil
import struct
from pathlib import Path

import interop_support as s
import xxhash


def sealed(path, manifest):
    """Writes a manifest with the digest that fits what it says."""
    manifest["manifest_xxh3_128"] = "0" * 32
    text = (json.dumps(manifest, indent=2) + "\n").encode()
    path.write_bytes(text[:-36] + xxhash.xxh3_128_hexdigest(text[:-36]).encode() + text[-4:])


def forge(source, folder, change):
    """A copy of a plain output of one shard, in which change(tensors, config) has altered {name: (dtype, shape, bytes)} and
    config.json, and every size and digest says so."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    manifest = json.loads((folder / "qconv.json").read_text())
    (shard,) = manifest["shards"]
    file = s.SafetensorsFile(folder / shard["name"])
    tensors = {name: (t["dtype"], t["shape"], file.tensor_bytes(name))
               for name, t in sorted(file.header.items(), key=lambda item: item[1]["data_offsets"])}
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    (folder / "config.json").write_text(json.dumps(config))
    schemes = {t["name"]: t["scheme"] for t in manifest["tensors"]}
    header, rows, at = {"__metadata__": file.metadata} if file.metadata else {}, [], 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        rows.append({"name": name, "scheme": schemes.get(name, "state"), "dtype": dtype, "shape": shape, "shard": 0,
                     "begin": at, "end": at + len(data), "piece_bytes": len(data),
                     "xxh3_128": xxhash.xxh3_128_hexdigest(data)})
        at += len(data)
    text = json.dumps(header).encode()
    head = struct.pack("<Q", len(text) + -len(text) % 8) + text + b" " * (-len(text) % 8)
    (folder / shard["name"]).write_bytes(head + b"".join(data for _, _, data in tensors.values()))
    shard |= {"content_bytes": len(head) + at, "header_bytes": len(head), "header_xxh3_128": xxhash.xxh3_128_hexdigest(head)}
    manifest["tensors"] = rows
    for row in manifest["files"]:
        data = (folder / row["path"]).read_bytes()
        row |= {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    sealed(folder / "qconv.json", manifest)
    return folder


# ---- what may be wrong --------------------------------------------------------------------------

ABSENT = object()
WRONG = [ABSENT, None, "64", "", -64, 0, 63, 1.5, 64.0, True, [64], {}, 1 << 32, (1 << 32) + 64, 1 << 70]
SHAPES = [ABSENT, None, [], "x", [64], [64, 64, 64, 64], [10 ** 9, 1, 1], [1 << 16, 1, 1], [-64, 128], [0, 8192], [64.0, 128],
          ["64", 128], [1 << 62, 4], [1 << 33, 1], [64, 129], [[64], 128], {"0": 64}, [True, 8192]]
TEXTS = [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe{}", b"[" * 60000, b'{"shape": [1, 1]}', b" " * (1 << 17)]


def stated(name, **changes):
    """Of the quant_state of a weight, some members."""
    def change(tensors, config):
        state = next(n for n in tensors if n.startswith(f"{name}.quant_state."))
        text = json.loads(tensors[state][2])
        for key, value in changes.items():
            if value is ABSENT:
                text.pop(key)
            else:
                text[key] = value
        data = json.dumps(text).encode()
        tensors[state] = ("U8", [len(data)], data)
    return change


def written(name, data):
    def change(tensors, config):
        state = next(n for n in tensors if n.startswith(f"{name}.quant_state."))
        tensors[state] = ("U8", [len(data)], data)
    return change


def without(ending):
    return lambda tensors, config: tensors.pop(ending)


def typed(name, dtype, size):
    """The same bytes as numbers of another kind."""
    def change(tensors, config):
        data = tensors[name][2]
        tensors[name] = (dtype, [len(data) // size], data[:len(data) // size * size])
    return change


def cut(name, keep):
    """Its first elements alone, as a tensor of one dimension."""
    def change(tensors, config):
        dtype, shape, data = tensors[name]
        size = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I64": 8}.get(dtype, 1)
        count = keep(len(data) // size)
        tensors[name] = (dtype, [count], data[:count * size])
    return change


def configured(**changes):
    def change(tensors, config):
        for key, value in changes.items():
            config.pop(key, None) if value is ABSENT else config.update({key: value})
    return change


def of_weight(tensors, name):
    """{name of a mutation: function} for the quantized weight `name` among the names of tensors."""
    stem = name.removesuffix(".weight")
    members = [n for n in tensors if n == name or n.startswith(f"{name}.") or n.startswith(f"{stem}.weight_")
               or n in (f"{stem}.SCB", f"{stem}.weight_format")]
    found = {}
    for member in members:
        ending = member[len(stem) + 1:]
        if ending != "weight_format":  # which may be left out
            found[f"no {ending}"] = without(member)
        for dtype, size in (("I32", 4), ("F64", 8), ("F16", 2), ("U8", 1), ("I8", 1), ("F32", 4)):
            if dtype != tensors[member][0]:
                found[f"{ending} as {dtype}"] = typed(member, dtype, size)
        found[f"{ending} empty"] = cut(member, lambda n: 0)
        found[f"{ending} one too few"] = cut(member, lambda n: n - 1)
        found[f"half of {ending}"] = cut(member, lambda n: n // 2)
    if any(".quant_state." in member for member in members):
        for i, value in enumerate(WRONG):
            found[f"blocksize {i}"] = stated(name, blocksize=value)
            if f"{name}.nested_absmax" in tensors:
                found[f"nested_blocksize {i}"] = stated(name, nested_blocksize=value)
        for i, value in enumerate(SHAPES):
            found[f"shape {i}"] = stated(name, shape=value)
        for i, value in enumerate(["x", None, [0.0], {}, float("nan"), 1e999, True]):
            if f"{name}.nested_absmax" in tensors:
                found[f"nested_offset {i}"] = stated(name, nested_offset=value)
        for i, value in enumerate([5, [], "nn", "float99", None]):
            found[f"dtype {i}"] = stated(name, dtype=value)
        for i, data in enumerate(TEXTS):
            found[f"text {i}"] = written(name, data)
    return found


# What still is the same model: codes that bitsandbytes may store in any dtype, names of dtypes that nobody knows, and the
# blank at the end of a quant_state.
HARMLESS = {"nf4": {*(f"weight as {dtype}" for dtype in ("I32", "F64", "F16", "I8", "F32")), "dtype 2", "dtype 3",
                    "weight.quant_state.bitsandbytes__nf4 one too few"},
            "int8": {"weight_format as I8"},
            "int8-block": {"weight as U8", "dtype 2", "dtype 3", "weight.quant_state.qconv__int8 one too few"},
            "int4": set()}

# A packed weight's shape follows from codes and scales, and without codes there is no such weight.
NOT_NEEDED = dict.fromkeys(("values", "convert"), {"no weight_shape", "no weight_packed"})

CONFIGS = {
    "no architectures and no type": configured(architectures=ABSENT, model_type=ABSENT),
    "architectures 5": configured(architectures=5), "architectures of numbers": configured(architectures=[5]),
    "architectures __version__": configured(architectures=["__version__"]),
    "architectures a config": configured(architectures=["LlamaConfig"]),
    "a layer more": configured(num_hidden_layers=3), "a layer less": configured(num_hidden_layers=1),
    "no layers": configured(num_hidden_layers=-1), "layers as text": configured(num_hidden_layers="2"),
    "hidden_size None": configured(hidden_size=None), "hidden_size a list": configured(hidden_size=[64]),
    "heads 0": configured(num_attention_heads=0), "heads 7": configured(num_attention_heads=7),
    "quantization_config a text": configured(quantization_config="nf4"),
    "quantization_config a list": configured(quantization_config=[]),
    "dtype unknown": configured(dtype="float99", torch_dtype="float99"), "dtype nn": configured(dtype="nn", torch_dtype="nn"),
    "hidden_act unknown": configured(hidden_act="nothing"), "hidden_act a number": configured(hidden_act=3),
    "rope a text": configured(rope_scaling="x", rope_parameters="x"),
    "no head": lambda tensors, config: tensors.pop("lm_head.weight"),
    "no norm": lambda tensors, config: tensors.pop("model.norm.weight"),
    "a weight of a layer gone": lambda tensors, config: [
        tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.1.mlp.up_proj.")],
    "a layer too many": lambda tensors, config: tensors.update(
        {"model.layers.2.input_layernorm.weight": tensors["model.layers.1.input_layernorm.weight"]}),
}
