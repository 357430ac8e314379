#!/usr/bin/env python3
"""bench/kernel_targets.py: what a result of bench_matmul makes of the targets, and the plot."""
import os
import sys
import unittest
import xml.etree.ElementTree as xml

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "bench"))
import kernel_targets as targets  # noqa: E402

SHAPES = [("q, o", 8192, 8192), ("k, v", 1024, 8192), ("gate, up", 28672, 8192),
          ("down", 8192, 28672)]
MS = [1, 2, 4, 8, 16, 64, 1024]


def result(sm, ratio_of, gbps=3000.0):
    """ratio_of(scheme, n, k, m); None: not measured against cuBLAS."""
    rows = []
    for scheme in ("nf4", "int8"):
        for layer, n, k in SHAPES:
            for m in MS:
                ratio = ratio_of(scheme, n, k, m)
                rows.append({"model": "Llama-3.3-70B", "layer": layer, "n": n, "k": k, "m": m,
                             "scheme": scheme, "gbps": gbps, "us": {"median": 10.0},
                             "dense_us": {"median": 10.0 * (ratio or 0)},
                             "ratio": {"median": ratio} if ratio else None})
    layers = [{"model": "Llama-3.3-70B", "scheme": "nf4", "m": m, "us": 100.0,
               "dense_us": 300.0 if m != 64 else 150.0} for m in MS]
    return {"device": {"sm": sm}, "rows": rows, "layers": layers,
            "roof": {"memory_gbps": 4000.0}}


FAST = ("nf4", "28672 x 8192, 8192 x 28672", "1 to 8")
SQUARE = ("nf4", "8192 x 8192", "1 to 8")
MANY = ("nf4", "each of the four", "1024")
A_LAYER = ("nf4", "one decoder layer", "16")


def rows_of(r):
    return {tuple(row[:3]): row[3:] for row in targets.target_rows(r)}


class Targets(unittest.TestCase):
    """What is not on docs/performance.md, which lint_performance compares with the H200's results."""

    def test_rows(self):
        def ratio(scheme, n, k, m):
            return None if (n, k, m) == (8192, 28672, 8) else 2.5 if (n, k, m) == (28672, 8192, 1) else 3.5

        given = result(90, lambda s, n, k, m: 3.0 if n == 28672 else 1.0)  # 2 of 7 weights are 3 times as fast
        given["layers"] = []
        without = result(90, lambda *_: None)
        for r, key, want in ((result(90, ratio), FAST, ("3.30x", "2.50x", "0.76 of it (7 of 8 points)")),
                             (result(90, ratio), SQUARE, ("3.00x", "3.50x", "yes")),
                             (result(90, ratio), A_LAYER, ("3.20x", "3.00x", "0.94 of it")),
                             (given, A_LAYER, ("3.20x", "1.57x", "0.49 of it")),
                             (without, SQUARE, None)):
            self.assertEqual(rows_of(r).get(key), want, key)
        self.assertEqual(targets.series(without, "nf4"), {})
        for sm, few, many in ((70, "3.30x", "0.90x"), (75, "3.30x", "0.90x"), (80, "3.40x", "0.92x"),
                              (86, "3.40x", "0.92x"), (90, "3.30x", "0.92x"), (100, "3.30x", "0.92x")):
            rows = rows_of(result(sm, lambda *_: 1.0))
            self.assertEqual((rows[FAST][0], rows[MANY][0]), (few, many))

    def test_plot(self):
        lines = targets.series(result(90, lambda s, n, k, m: 4.0 / (1 + m / 64)), "nf4")
        for drawn in (lines, {"a": {8: 1.0}}, {"a": {1: 0.01, 4096: 40.0}}):
            found = xml.fromstring(targets.plot(drawn, "a title")).findall("{http://www.w3.org/2000/svg}polyline")
            self.assertEqual(len(found), len(drawn))
            for line in found:
                points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
                self.assertEqual(points, sorted(points))  # M goes to the right
                self.assertTrue(all(0 <= x <= targets.WIDTH and 0 <= y <= targets.HEIGHT for x, y in points))


if __name__ == "__main__":
    unittest.main()
