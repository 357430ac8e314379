#!/usr/bin/env python3
"""Golden texts of Python's float repr and of json.dumps for a bitsandbytes quant_state.

Writes py_repr.txt ("bits-of-the-double-in-hex repr") and quant_state.txt (JSON, one per line).
Made with Python 3.11; repr of a float is the same in every Python since 3.1.
"""
import json
import pathlib
import random
import struct

random.seed(20240611)
here = pathlib.Path(__file__).parent


def bits(d):
    return struct.unpack("<Q", struct.pack("<d", d))[0]


def widened(f):
    return struct.unpack("<f", struct.pack("<f", f))[0]


def bf16(f):
    u = struct.unpack("<I", struct.pack("<f", f))[0]
    return struct.unpack("<f", struct.pack("<I", u & 0xFFFF0000))[0]


values = [0.0, -0.0, 1.0, -1.0, 0.1, widened(0.1), 1e15, 1e16, 1e17, 123456789012345.0, 9999999999999998.0,
          1234567890123456.0, 12345678901234567.0, 1e-4, 9.999e-5, 1e-5, 0.00012345, 5e-324, 1e-323,
          2.2250738585072014e-308, 2.225073858507201e-308, 1.7976931348623157e308, 1e22, 1e23, 9007199254740993.0,
          4503599627370497.5, 0.3, 2.0 / 3, 1e100, 1.5, 100.0, 1e21, 5e-5]
values += [2.0 ** e for e in range(-1074, 1024, 23)]
values += [10.0 ** e for e in range(-20, 25)]
values += [bf16(10 ** random.uniform(-4, 1)) for _ in range(100)]
values += [widened(10 ** random.uniform(-38, 38)) for _ in range(100)]
values += [struct.unpack("<d", struct.pack("<Q", random.getrandbits(63) % 0x7FF0000000000000))[0] for _ in range(100)]
with open(here / "py_repr.txt", "w") as f:
    for v in values:
        f.write("%016x %r\n" % (bits(v), v))

states = []
for shape, dtype, block, offset in [
    ([4096, 4096], "bfloat16", 64, bf16(0.0436)),
    ([11008, 4096], "float16", 64, widened(0.1)),
    ([1, 1], "float32", 4096, 0.0),
    ([3, 5, 7], "bfloat16", 128, 1e-05),
    ([262144, 18446], "bfloat16", 32, widened(1.1754943508222875e-38)),
    ([2, 2], "float16", 64, widened(3.4e38)),
    ([2, 2], "float16", 64, -1.0),
] + [([random.randrange(1, 99999), 64], "bfloat16", 64, bf16(10 ** random.uniform(-4, 1))) for _ in range(40)]:
    s = {"quant_type": "nf4", "blocksize": block, "dtype": dtype, "shape": shape}
    states.append(s)
    states.append({**s, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": widened(offset)})
with open(here / "quant_state.txt", "w") as f:
    for s in states:
        f.write(json.dumps(s) + "\n")
