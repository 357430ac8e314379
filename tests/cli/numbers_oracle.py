"""NF4, LLM.int8 and block-wise int8 in plain Python, from the papers and bitsandbytes' sources.

Written without a look at quant/: what a conversion must give, one element at a time. Every
intermediate is rounded to a float as soon as it exists; a double holds the product of two floats
exactly and rounds a quotient or sum harmlessly, so that is IEEE single precision.
"""
import json
import struct

import make_checkpoint as mk

NF4_CODE = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
            -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
            0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
            0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
# bitsandbytes csrc/kernels.cu, dQuantizeNF4; in rising order.
NF4_BORDERS = [-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544,
               -0.23460740596055984, -0.13791173323988914, -0.045525018125772476,
               0.03979014977812767, 0.1202552504837513, 0.2035212516784668, 0.2920137718319893,
               0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011]
GROUP = 256


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def f16(x):
    return struct.unpack("<e", struct.pack("<e", x))[0]


def floats(dtype, data):
    """The weights as floats: what every quantizer starts from."""
    return [f32(x) for x in mk.decode(dtype, data)]


BORDERS = [f32(b) for b in NF4_BORDERS]


def inverse(a):
    return f32(1.0 / a) if a > 0 else 0.0


def nf4_code(y):
    return sum(1 for b in BORDERS if y > b)


def blocks(values, size):
    return [values[i:i + size] for i in range(0, len(values), size)]


def nf4(values, size):
    """-> (packed bytes, absmax of the blocks)"""
    codes, scales = [], []
    for block in blocks(values, size):
        a = max(abs(x) for x in block)
        inv = inverse(a)
        scales.append(a)
        codes += [nf4_code(f32(x * inv)) for x in block]
    if len(codes) % 2:
        codes.append(7)
    return bytes(codes[i] << 4 | codes[i + 1] for i in range(0, len(codes), 2)), scales


def int8_blocks(values, size):
    codes, scales = [], []
    for block in blocks(values, size):
        a = max(abs(x) for x in block)
        factor = f32(inverse(a) * 127.0)
        scales.append(a)
        codes += [max(-127, min(127, round(f32(x * factor)))) for x in block]
    return struct.pack("%db" % len(codes), *codes), scales


def int8_rows(values, cols):
    codes, scb = [], []
    for row in blocks(values, cols):
        row = [f16(x) for x in row]
        a = max(abs(x) for x in row)
        factor = f32(inverse(a) * 127.0)
        scb.append(a)
        codes += [round(f32(x * factor)) for x in row]
    return struct.pack("%db" % len(codes), *codes), scb


def dynamic_map():
    """bitsandbytes.functional.create_dynamic_map(), in double; good to a few parts in 10^7."""
    data = [0.0, 1.0]
    for i in range(7):
        count = 2 ** i
        bounds = [0.1 + 0.9 * k / count for k in range(count + 1)]
        for k in range(count):
            mean = (bounds[k] + bounds[k + 1]) / 2 * 10.0 ** (i - 6)
            data += [mean, -mean]
    return sorted(data)


def check_nested(test, scales, codes, group_absmax, offset, table):
    """Are these the double-quantized scales? Returns what they decode to."""
    test.assertEqual(len(codes), len(scales))
    test.assertEqual(len(group_absmax), -(-len(scales) // GROUP))
    for have, want in zip(table, dynamic_map()):
        test.assertAlmostEqual(have, want, delta=1e-6 * abs(want))
    mean = sum(scales) / len(scales)
    test.assertEqual(offset, struct.unpack("<f", b"\0\0" + struct.pack("<H", mk.to_bf16_bits(
        f32(mean))))[0])
    final = []
    for g, group in enumerate(blocks(scales, GROUP)):
        rest = [f32(a - offset) for a in group]
        top = max(abs(d) for d in rest)
        test.assertEqual(group_absmax[g], top)
        inv = inverse(top)
        for d, code in zip(rest, codes[g * GROUP:]):
            y = f32(d * inv)
            nearest = min(abs(y - c) for c in table)
            test.assertLessEqual(abs(y - table[code]), nearest + 2.0 ** -24)
            final.append(f32(f32(table[code] * top) + offset))
    return final


def round_to(dtype, x):
    return mk.decode(dtype, mk.encode(dtype, [x]))[0]


def nf4_values(packed, scales, size, count, dtype):
    codes = [n for b in packed for n in (b >> 4, b & 15)][:count]
    return [round_to(dtype, f32(f32(NF4_CODE[c]) * scales[i // size]))
            for i, c in enumerate(codes)]


INV127 = 0.007874015718698502


def int8_row_values(codes, scb, cols, dtype):
    return [round_to(dtype, f32(f32(c * scb[i // cols]) * INV127)) for i, c in enumerate(codes)]


def int8_block_values(codes, scales, size, dtype):
    return [round_to(dtype, f32(f32(c * INV127) * scales[i // size])) for i, c in enumerate(codes)]


def state_of(tensor):
    """The JSON of a quant_state tensor, without its padding."""
    dtype, shape, body = tensor
    assert dtype == "U8" and shape == [len(body)]
    return json.loads(body.decode())


def bnb_nf4(name, shape, values, size, table, nested=True, state_dtype="bfloat16"):
    """A weight as bitsandbytes saves it, by this file's own arithmetic; what it decodes to."""
    packed, scales = nf4(values, size)
    state = {"quant_type": "nf4", "blocksize": size, "dtype": state_dtype, "shape": shape}
    t = {name: ("U8", [len(packed), 1], packed),
         name + ".quant_map": ("F32", [16], mk.encode("F32", NF4_CODE))}
    if nested:
        offset = f32(sum(scales) / len(scales))
        codes, tops, final = bytearray(), [], []
        for group in blocks(scales, GROUP):
            rest = [f32(a - offset) for a in group]
            tops.append(max(abs(d) for d in rest))
            for d in rest:
                y = f32(d * inverse(tops[-1]))
                code = min(range(256), key=lambda c: abs(y - table[c]))
                codes.append(code)
                final.append(f32(f32(table[code] * tops[-1]) + offset))
        state.update(nested_blocksize=GROUP, nested_dtype="float32", nested_offset=offset)
        t[name + ".absmax"] = ("U8", [len(codes)], bytes(codes))
        t[name + ".nested_absmax"] = ("F32", [len(tops)], mk.encode("F32", tops))
        t[name + ".nested_quant_map"] = ("F32", [256], mk.encode("F32", table))
        scales = final
    else:
        t[name + ".absmax"] = ("F32", [len(scales)], mk.encode("F32", scales))
    text = json.dumps(state).encode()
    t[name + ".quant_state.bitsandbytes__nf4"] = ("U8", [len(text)], text)
    return t, nf4_values(packed, scales, size, len(values), "BF16")
