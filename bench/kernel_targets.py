"""The targets of the matmul kernels beside what bench_matmul measured, as a table and a plot, for
make_performance.py. Ratios are speed over 16-bit cuBLAS in the same rounds.

Targets by architecture: (what, shapes, rows of x, least ratio). A GPU that is not listed has the
row of its architecture; V100's and A100's are by design.
"""

from math import log2

LARGE = ((28672, 8192), (8192, 28672))
SQUARE = ((8192, 8192),)
NARROW = ((1024, 8192),)
# (n, k, how often a decoder layer of the 70B model has it)
LAYER = ((8192, 8192, 2), (1024, 8192, 2), (28672, 8192, 2), (8192, 28672, 1))
FEW = (1, 2, 4, 8)
MEMORY_SHARE = 0.85  # of the best rate of memory, for FEW rows of the LARGE ones


def targets_of(sm):
    """(scheme, name, shapes or None for a whole layer, rows of x, ratio)."""
    by_sm = ((90, (3.3, 3.0, 1.2), (3.2, 2.7, 2.0), (0.85, 0.92, 0.98), 1.7),
             (80, (3.4, 3.0, 1.5), (3.3, 2.8, 1.8), (0.85, 0.92, 0.97), 1.85),
             (70, (3.3, 3.0, 1.5), (3.0, 2.3, 1.4), (0.80, 0.90, 0.97), 1.85))
    few, layer, many, int8 = next((v[1:] for v in by_sm if sm >= v[0]), by_sm[-1][1:])
    out = [("nf4", "28672 x 8192, 8192 x 28672", LARGE, FEW, few[0]),
           ("nf4", "8192 x 8192", SQUARE, FEW, few[1]),
           ("nf4", "1024 x 8192", NARROW, FEW, few[2])]
    out += [("nf4", "one decoder layer", None, (m,), r) for m, r in zip((16, 32, 64), layer)]
    out += [("nf4", "each of the four", LARGE + SQUARE + NARROW, (m,), r)
            for m, r in zip((256, 1024, 4096), many)]
    return out + [("int8", "each of the four", LARGE + SQUARE + NARROW, FEW + (16,), int8)]


def layer_ratio(r, scheme, m):
    """Of the medians of its weights, where they were measured by --shapes; else None."""
    at = {(row["n"], row["k"]): row for row in r["rows"]
          if row["scheme"] == scheme and row["m"] == m and row["ratio"]}
    if any((n, k) not in at for n, k, _ in LAYER):
        return None
    return (sum(times * at[n, k]["dense_us"]["median"] for n, k, times in LAYER)
            / sum(times * at[n, k]["us"]["median"] for n, k, times in LAYER))


def measured(r, scheme, shapes, ms):
    """The least ratio of those that were measured, and how many were; None, 0 without any."""
    if shapes is None:
        found = [row["dense_us"] / row["us"] for row in r["layers"]
                 if row["scheme"] == scheme and row["m"] in ms and row["dense_us"]
                 and "70B" in row["model"]]
        if not r["layers"]:
            found = [ratio for ratio in (layer_ratio(r, scheme, m) for m in ms) if ratio]
    else:
        found = [row["ratio"]["median"] for row in r["rows"]
                 if row["scheme"] == scheme and row["m"] in ms and row["ratio"]
                 and (row["n"], row["k"]) in shapes]
    return (min(found), len(found)) if found else (None, 0)


def bandwidths(r):
    """Shares of the best rate of memory, few rows of the large layers."""
    best = r["roof"].get("memory_gbps")
    return [row["gbps"] / best for row in r["rows"]
            if best and row["scheme"] == "nf4" and row["m"] in FEW
            and (row["n"], row["k"]) in LARGE]


def rows_text(ms):
    return "%d to %d" % (ms[0], ms[-1]) if len(ms) > 1 else "%d" % ms[0]


def reached(got, want, points, all_points):
    """"yes" or the share that was reached, and of how many points where some are missing."""
    text = "yes" if got >= want else "%.2f of it" % (got / want)
    return text if points >= all_points else "%s (%d of %d points)" % (text, points, all_points)


def target_rows(r):
    out = []
    for scheme, name, shapes, ms, want in targets_of(r["device"]["sm"]):
        got, count = measured(r, scheme, shapes, ms)
        if count:
            out.append((scheme, name, rows_text(ms), "%.2fx" % want, "%.2fx" % got,
                        reached(got, want, count, len(shapes or (None,)) * len(ms))))
    shares = bandwidths(r)
    if shares:
        out.append(("nf4", "28672 x 8192, 8192 x 28672: of the best rate of memory", rows_text(FEW),
                    "%.0f%%" % (100 * MEMORY_SHARE), "%.0f%%" % (100 * min(shares)),
                    reached(min(shares), MEMORY_SHARE, len(shares), len(LARGE) * len(FEW))))
    return out


PEER_RATIO, PEER_ROWS = 1.5, 64  # times bitsandbytes' kernel, up to so many rows of x; never slower


def least_peer(ours, theirs):
    """What came of that, as a sentence; None where nothing was measured by both. `ours`: {(n, k, m, scheme): us}."""
    found = [(row["us"]["median"] / ours[key], row) for row in theirs["rows"] if row["scheme"] == "bitsandbytes"
             for key in [(row["n"], row["k"], row["m"], "nf4")] if key in ours]
    parts = []
    for name, some in (("up to %d rows" % PEER_ROWS, [f for f in found if f[1]["m"] <= PEER_ROWS]),
                       ("above", [f for f in found if f[1]["m"] > PEER_ROWS])):
        if some:
            ratio, row = min(some, key=lambda f: f[0])
            parts.append("%s %.2fx (%s, M = %d)" % (name, ratio, row["layer"], row["m"]))
    return ("Target beside bitsandbytes' own kernel: %.1fx up to %d rows of x, and never slower. Least: %s."
            % (PEER_RATIO, PEER_ROWS, "; ".join(parts)) if parts else None)


# ---- the plot: ratio over rows of x, both in powers of two ----

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 640, 320, 46, 14, 40, 150
COLOURS = ("#1b6ca8", "#c1440e", "#2e7d32", "#7b3fa0", "#806000", "#444444")


def series(r, scheme):
    """Name to {rows of x: ratio}, of the model that was measured first."""
    mine = [row for row in r["rows"] if row["scheme"] == scheme and row["ratio"]]
    if not mine:
        return {}
    out = {}
    for row in mine:
        if row["model"] == mine[0]["model"]:
            name = "%s, %d x %d" % (row["layer"], row["n"], row["k"])
            out.setdefault(name, {})[row["m"]] = row["ratio"]["median"]
    return out


def plot(lines, title):
    """An SVG as text; the steps of both axes are powers of two, 0.5 to 4 at least."""
    ms = sorted({m for line in lines.values() for m in line})
    top = max([4.0] + [v for line in lines.values() for v in line.values()])
    low, high = 0.25, 4.0
    while high < top:
        high *= 2

    def x_of(m):
        span = max(log2(ms[-1]) - log2(ms[0]), 1e-9)
        return LEFT + (WIDTH - LEFT - RIGHT) * (log2(m) - log2(ms[0])) / span

    def y_of(v):
        span = log2(high) - log2(low)
        return TOP + (HEIGHT - TOP - BOTTOM) * (log2(high) - log2(max(v, low))) / span

    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" '
           'font-size="11">' % (WIDTH, HEIGHT), "<title>%s</title>" % title,
           '<rect width="%d" height="%d" fill="white"/>' % (WIDTH, HEIGHT)]
    v = low
    while v <= high:
        out.append('<path d="M%d %.1fH%d" stroke="%s"/><text x="%d" y="%.1f" text-anchor="end">%gx'
                   '</text>' % (LEFT, y_of(v), WIDTH - RIGHT, "#888" if v == 1 else "#ddd",
                                LEFT - 5, y_of(v) + 4, v))
        v *= 2
    for m in ms:
        out.append('<text x="%.1f" y="%d" text-anchor="middle">%d</text>'
                   % (x_of(m), HEIGHT - BOTTOM + 16, m))
    out.append('<text x="%d" y="%d" text-anchor="middle">rows of x</text>'
               % ((LEFT + WIDTH - RIGHT) // 2, HEIGHT - 6))
    for i, (name, line) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join("%.1f,%.1f" % (x_of(m), y_of(line[m])) for m in sorted(line))
        out.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="1.6"/>'
                   % (points, colour))
        out.append('<text x="%d" y="%d" fill="%s">%s</text>'
                   % (WIDTH - RIGHT + 8, TOP + 12 + 16 * i, colour, name))
    return "\n".join(out + ["</svg>"]) + "\n"
