"""Second moments for tests of --hessians: made up, the same on every machine, positive."""
import array
import functools
import random
import struct

import make_checkpoint as mk


@functools.lru_cache(maxsize=200)
def square(n, seed, dtype="d", times=1.0):
    """A positive matrix: a diagonal, and a product of two vectors."""
    r = random.Random(f"{n} {seed}")
    u = [r.uniform(-1, 1) for _ in range(n)]
    d = [r.uniform(0.5, 2) for _ in range(n)]
    return array.array(dtype, (times * (u[i] * u[j] + (d[i] if i == j else 0)) for i in range(n)
                               for j in range(n))).tobytes()


def moments_of(weight, tokens=5000, two=False, like=None):
    """The tensors of a weight, which is a row of a door's phase: {"module", "rows", "cols"}."""
    n, m, name = weight["cols"], weight["rows"], weight["module"]
    out = {f"{name}.same_as": ("U8", [len(like)], like.encode())} if like else {
        f"{name}.second_moment": ("F64", [n, n], square(n, name)),
        f"{name}.cross_moment": ("F64", [n, n], square(n, name, times=0.9)),
        f"{name}.tokens": ("I64", [1], struct.pack("<q", tokens))}
    if two:
        out[f"{name}.output_moment"] = "F32", [m, m], square(m, "g" + name, "f")
        out[f"{name}.output_tokens"] = "I64", [1], struct.pack("<q", tokens)
    return out


def inputs_of(name):
    """Weights with the same inputs have the same name here."""
    for part in ("q_proj", "k_proj", "v_proj"):
        name = name.replace(part, "qkv")
    return name.replace("gate_proj", "gate_up").replace("up_proj", "gate_up").replace(", up]", ", gate]")


def of_model(model, path, two=False):
    """Writes the moments of all matrices in the layers of a model to a file."""
    tensors, first = {}, {}
    for name, (_, shape, _) in sorted(mk.read_checkpoint(model).items()):
        if ".layers." not in name or len(shape) != 2:
            continue
        module = name.removesuffix(".weight")
        like = first.setdefault(inputs_of(module), module)
        tensors |= moments_of({"module": module, "rows": shape[0], "cols": shape[1]}, two=two,
                              like=like if like != module else None)
    mk.write_safetensors(path, tensors)
    return path
