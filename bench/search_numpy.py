"""Quantizers in numpy, absmax and searched, by trying scales: slow, and independent of qconv's.

The oracle of bench_accuracy.py: what --scale absmax, search and refit can reach at the best. A
quantizer takes a weight (any shape, float32) and gives (values as a reader restores them, bits of
codes and scales). Chunks keep memory small.
"""
import numpy as np

NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0], np.float32)
NF4_MIDDLE = ((NF4[1:].astype(np.float64) + NF4[:-1]) / 2).astype(np.float32)
GROUP = 256  # blocks that share a nested absmax
GRID = 64  # scales tried for one block, as shares of its absmax
CHUNK = 1 << 22  # elements at a time


def dynamic_map():
    """The 256 values of bitsandbytes' signed 8-bit map."""
    values = [0.0, 1.0]
    for i in range(7):
        edge = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        middle = (edge[:-1] + edge[1:]) / np.float32(2)
        values += list(np.float32(10.0 ** (i - 6)) * middle)
        values += list(-np.float32(10.0 ** (i - 6)) * middle)
    return np.sort(np.array(values, np.float32))


MAP = dynamic_map()


def blocks_of(w, block):
    """(rows of `block`, which elements are not padding)."""
    flat = np.asarray(w, np.float32).ravel()
    padded = np.zeros(-(-flat.size // block) * block, np.float32)
    padded[: flat.size] = flat
    return padded.reshape(-1, block)


def to_bfloat16(x):
    bits = np.float32(x).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def values_at(rows, scale, kind):
    """rows [n, block] rounded to the codes of scale [n], turned back."""
    s = scale.astype(np.float32)[:, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        y = rows * (np.float32(1) / s)
    y = np.where(np.isfinite(y), y, np.float32(0))
    if kind == "nf4":
        return NF4[np.searchsorted(NF4_MIDDLE, y.ravel(), side="left")].reshape(rows.shape) * s
    q = np.clip(np.rint(y * np.float32(127)), -127, 127)
    return q * s / np.float32(127)


def error_at(rows, scale, kind, power=0.0):
    """Sum over a row of |x|^power (x - x')^2, double; power 0 is what qconv minimizes."""
    d = (values_at(rows, scale, kind) - rows).astype(np.float64) ** 2
    if power:
        d *= np.abs(rows.astype(np.float64)) ** power
    return d.sum(1)


def best_scales(rows, kind, power=0.0, low=0.45, high=1.1, signs=(1,)):
    """The scale of least error of each row: a grid, then least squares for the codes found."""
    top = np.abs(rows).max(1)
    best, scale = np.full(len(rows), np.inf), top.copy()
    if kind == "int8":
        low, high = 0.8, 1.02
    for share in np.linspace(low, high, GRID):
        for sign in signs:
            tried = (top * np.float32(share * sign)).astype(np.float32)
            error = error_at(rows, tried, kind, power)
            better = error < best
            best[better], scale[better] = error[better], tried[better]
    weight = np.abs(rows.astype(np.float64)) ** power if power else 1.0
    for _ in range(4):
        with np.errstate(divide="ignore", invalid="ignore"):
            code = values_at(rows, scale, kind).astype(np.float64) / scale[:, None]
            fitted = (weight * code * rows).sum(1) / (weight * code * code).sum(1)
        fitted = np.where(np.isfinite(fitted), fitted, scale).astype(np.float32)
        error = error_at(rows, fitted, kind, power)
        better = error < best
        best[better], scale[better] = error[better], fitted[better]
    return scale


def in_chunks(rows, function, step=None):
    step = step or max(1, CHUNK // rows.shape[1])
    return np.concatenate([function(rows[i:i + step]) for i in range(0, len(rows), step)])


def nested_once(wanted, offset):
    """Group by group what bitsandbytes does to absmax: nearest in the map, scaled by the largest."""
    out = np.empty_like(wanted)
    for i in range(0, wanted.size, GROUP):
        d = wanted[i:i + GROUP] - offset
        n = np.abs(d).max()
        y = d / n if n > 0 else d
        out[i:i + GROUP] = MAP[np.searchsorted((MAP[1:] + MAP[:-1]) / 2, y)] * n + offset
    return out


def nested_search(rows, wanted, offset, kind, power, shares):
    """As nested_once, but each block takes the scale of least error of all that its group can hold;
    of several nested absmax (shares of the largest difference) the best for the group."""
    out = np.empty(len(rows), np.float32)
    for i in range(0, len(rows), GROUP):
        r, d = rows[i:i + GROUP], wanted[i:i + GROUP] - offset
        found = np.inf
        for share in shares:
            n = np.float32(np.abs(d).max() * share)
            held = MAP * n + offset
            # Near the wanted scale only: the error rises on both sides over many steps of the map.
            at = np.searchsorted(held, d + offset)
            best, pick = np.full(len(r), np.inf), np.zeros(len(r), np.float32)
            for step in range(-6, 6):
                tried = held[np.clip(at + step, 0, 255)]
                error = error_at(r, tried, kind, power)
                better = error < best
                best[better], pick[better] = error[better], tried[better]
            if best.sum() < found:
                found, out[i:i + GROUP] = best.sum(), pick
    return out


def blocks(w, kind="nf4", block=64, nested=True, scale="search", power=0.0, signs=None):
    """kind nf4 or int8 in blocks; scale absmax, search (the nested absmax from the scales found)
    or refit (also others tried). NF4 has 8 codes above zero and 7 below, so scales of both signs
    are tried; then their offset is 0."""
    signs = signs or ((1, -1) if kind == "nf4" else (1,))
    rows = blocks_of(w, block)
    if scale == "absmax":
        wanted = np.abs(rows).max(1)
    else:
        wanted = in_chunks(rows, lambda r: best_scales(r, kind, power, signs=signs))
    held = wanted
    if nested:
        offset = to_bfloat16(wanted.astype(np.float64).mean())
        if len(signs) == 2 and scale != "absmax":
            offset = np.float32(0)
        if scale == "absmax":
            held = nested_once(wanted, offset)
        else:
            shares = (1.0,) if scale == "search" else np.linspace(0.6, 1.1, 11)
            held = nested_search(rows, wanted, offset, kind, power, shares)
    out = values_at(rows, held, kind).ravel()[: w.size].reshape(w.shape)
    code_bits = 4 * ((w.size + 1) // 2 * 2) if kind == "nf4" else 8 * w.size
    scale_bits = (8 * len(rows) + 32 * -(-len(rows) // GROUP)) if nested else 32 * len(rows)
    return out, code_bits + scale_bits


def rows(w, scale="search", power=0.0):
    """int8 with a scale per row, of weights in float16, as LLM.int8 has it."""
    half = w.astype(np.float16).astype(np.float32)
    s = np.abs(half).max(1) if scale == "absmax" else best_scales(half, "int8", power)
    return values_at(half, s, "int8"), 8 * w.size + 32 * len(w)
