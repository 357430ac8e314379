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


class Targets(unittest.TestCase):
    def rows(self, *args, **more):
        return {(r[0], r[1], r[2]): r[3:] for r in targets.target_rows(result(*args, **more))}

    def test_least_ratio_counts(self):
        def ratio(scheme, n, k, m):
            return 2.5 if (n, k, m) == (8192, 28672, 8) and scheme == "nf4" else 3.5
        rows = self.rows(90, ratio)
        self.assertEqual(rows["nf4", "28672 x 8192, 8192 x 28672", "1 to 8"],
                         ("3.30x", "2.50x", "0.76 of it"))
        self.assertEqual(rows["nf4", "8192 x 8192", "1 to 8"], ("3.00x", "3.50x", "yes"))
        self.assertEqual(rows["int8", "each of the four", "1 to 16"], ("1.70x", "3.50x", "yes"))

    def test_points_that_are_missing_are_counted(self):
        def ratio(scheme, n, k, m):
            return None if (n, k, m) == (8192, 28672, 8) else 3.5
        rows = self.rows(90, ratio)
        self.assertEqual(rows["nf4", "28672 x 8192, 8192 x 28672", "1 to 8"][2], "yes (7 of 8 points)")
        self.assertEqual(rows["nf4", "8192 x 8192", "1 to 8"][2], "yes")

    def test_whole_layers(self):
        rows = self.rows(90, lambda *_: 1.0)
        self.assertEqual(rows["nf4", "one decoder layer", "16"], ("3.20x", "3.00x", "0.94 of it"))
        self.assertEqual(rows["nf4", "one decoder layer", "64"], ("2.00x", "1.50x", "0.75 of it"))
        self.assertNotIn(("nf4", "one decoder layer", "32"), rows)  # was not measured

    def test_a_whole_layer_of_given_shapes(self):
        r = result(90, lambda s, n, k, m: 3.0 if n == 28672 else 1.0)
        r["layers"] = []
        rows = {(x[0], x[1], x[2]): x[3:] for x in targets.target_rows(r)}
        # 2 of 7 weights are 3 times as fast.
        self.assertEqual(rows["nf4", "one decoder layer", "16"], ("3.20x", "1.57x", "0.49 of it"))
        r["rows"] = [x for x in r["rows"] if x["n"] != 1024]
        self.assertNotIn("one decoder layer", {x[1] for x in targets.target_rows(r)})

    def test_architectures(self):
        for sm, want in ((70, "3.30x"), (75, "3.30x"), (80, "3.40x"), (86, "3.40x"),
                         (90, "3.30x"), (100, "3.30x")):
            rows = self.rows(sm, lambda *_: 1.0)
            self.assertEqual(rows["nf4", "28672 x 8192, 8192 x 28672", "1 to 8"][0], want)
        self.assertEqual(self.rows(80, lambda *_: 1.0)["nf4", "each of the four", "1024"][0],
                         "0.92x")

    def test_bandwidth(self):
        name = ("nf4", "28672 x 8192, 8192 x 28672: of the best rate of memory", "1 to 8")
        self.assertEqual(self.rows(90, lambda *_: 1.0)[name], ("85%", "75%", "0.88 of it"))
        self.assertEqual(self.rows(90, lambda *_: 1.0, gbps=3600.0)[name][2], "yes")

    def test_without_cublas(self):
        rows = self.rows(90, lambda *_: None)
        self.assertNotIn(("nf4", "8192 x 8192", "1 to 8"), rows)
        self.assertEqual(targets.series(result(90, lambda *_: None), "nf4"), {})


class Plot(unittest.TestCase):
    def test_lines(self):
        lines = targets.series(result(90, lambda s, n, k, m: 4.0 / (1 + m / 64)), "nf4")
        self.assertEqual(len(lines), 4)
        self.assertEqual(sorted(lines["down, 8192 x 28672"]), MS)
        root = xml.fromstring(targets.plot(lines, "a title"))
        drawn = root.findall("{http://www.w3.org/2000/svg}polyline")
        self.assertEqual(len(drawn), 4)
        points = [tuple(map(float, p.split(","))) for p in drawn[0].get("points").split()]
        self.assertEqual(len(points), len(MS))
        self.assertEqual(points, sorted(points))  # M goes to the right
        self.assertTrue(all(a[1] <= b[1] for a, b in zip(points, points[1:])))  # lower, further down

    def test_one_point_and_extremes(self):
        for lines in ({"a": {8: 1.0}}, {"a": {1: 0.01, 4096: 40.0}}):
            root = xml.fromstring(targets.plot(lines, "t"))
            for p in root.iter("{http://www.w3.org/2000/svg}polyline"):
                for point in p.get("points").split():
                    x, y = map(float, point.split(","))
                    self.assertTrue(0 <= x <= targets.WIDTH and 0 <= y <= targets.HEIGHT)


if __name__ == "__main__":
    unittest.main()
