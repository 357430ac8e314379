"""Weights of the tiny models of tests/data/families, from their names and shapes alone: so the models need
no files. Every number is exact in bfloat16."""
import struct
import zlib


def values(name, shape, around):
    """Floats: of a norm around 1 or, as `around` says, 0; of anything else within half a unit."""
    count = 1
    for n in shape:
        count *= n
    state, out = zlib.crc32(name.encode()), []
    norm = name.lower().endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        v = (state >> 56) - 128
        out.append(around + (v // 4) / 128 if norm else v / 256)
    return out


def tensor(name, shape, around):
    """As make_checkpoint wants it: (dtype, shape, bytes)."""
    raw = struct.pack(f"<{len(v)}f", *v) if (v := values(name, shape, around)) else b""
    return "BF16", list(shape), b"".join(raw[i + 2:i + 4] for i in range(0, len(raw), 4))
