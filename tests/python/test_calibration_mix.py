#!/usr/bin/env python3
"""How much of the bundled text goes with a narrow calibration text: effective ranks, shares and counts of tokens."""
import importlib
import math
import os
import random
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "python"))
mix = importlib.import_module("qconv._calibration_mix")
calibrate = importlib.import_module("qconv.calibrate")
errors = importlib.import_module("qconv.errors")


def libraries():
    """What makes a matrix of a list of rows, in each library that is here."""
    found = []
    for name, make in (("numpy", "array"), ("torch", "tensor")):
        try:
            found.append((name, getattr(importlib.import_module(name), make)))
        except ImportError:
            pass
    return found


LIBRARIES = libraries()


@unittest.skipUnless(LIBRARIES, "neither numpy nor torch is here")
class Ranks(unittest.TestCase):
    def each(self):
        for _, make in LIBRARIES:
            yield lambda rows, make=make: mix.effective_rank(make(rows))

    def test_of_directions_that_are_alike(self):
        for rank in self.each():
            for n in (1, 2, 7):
                unit = [[float(i == j) for j in range(n)] for i in range(n)]
                self.assertAlmostEqual(rank(unit), n)
            # Three of five directions; a length does not count.
            self.assertAlmostEqual(rank([[9.0 * (i == j < 3) for j in range(5)] for i in range(5)]), 3)

    def test_of_shares(self):
        shares = (0.5, 0.25, 0.25)
        want = math.exp(-sum(p * math.log(p) for p in shares))
        for rank in self.each():
            self.assertAlmostEqual(rank([[8.0 * shares[i] * (i == j) for j in range(3)] for i in range(3)]), want)

    def test_directions_that_are_no_axes(self):
        r = random.Random(1)
        tokens = [[r.gauss(0, 1) for _ in range(6)] for _ in range(2)]
        both = [[sum(t[i] * t[j] for t in tokens) for j in range(6)] for i in range(6)]
        each_other = [[sum(x * y for x, y in zip(a, b)) for b in tokens] for a in tokens]
        (a, b), (_, d) = each_other
        root = math.sqrt((a - d) ** 2 + 4 * b * b) / (a + d)  # eigenvalues as shares: (1 + root) / 2, (1 - root) / 2
        want = math.exp(-sum(p * math.log(p) for p in ((1 + root) / 2, (1 - root) / 2)))
        self.assertGreater(want, 1.1)
        for rank in self.each():
            self.assertAlmostEqual(rank(both), want, places=6)
            self.assertAlmostEqual(rank(each_other), want, places=6)
            one = [[tokens[0][i] * tokens[0][j] for j in range(6)] for i in range(6)]
            self.assertAlmostEqual(rank(one), 1, places=6)

    def test_refusals(self):
        for rank in self.each():
            for bad in (0.0, math.nan, math.inf):
                with self.assertRaises(ValueError):
                    rank([[bad, bad], [bad, bad]])


class Relative(unittest.TestCase):
    def test_geometric_mean(self):
        self.assertAlmostEqual(mix.relative_rank({"a": 10, "b": 5}, {"a": 20, "b": 40}), 0.25)
        self.assertAlmostEqual(mix.relative_rank({"a": 3, "b": 4}, {"b": 4, "a": 3}), 1)

    def test_other_layers(self):
        for text, bundled in (({}, {}), ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 1, "b": 1})):
            with self.assertRaises(ValueError):
                mix.relative_rank(text, bundled)


class Shares(unittest.TestCase):
    def test_wide_text_stays_alone(self):
        for relative in (mix.WIDE, 1, 1.4):
            self.assertEqual(mix.share(relative), 0)

    def test_narrow_text(self):
        self.assertAlmostEqual(mix.share(0), mix.MOST)
        self.assertAlmostEqual(mix.share(mix.WIDE / 2), mix.MOST / 2)
        falling = [mix.share(i / 100) for i in range(91)]
        self.assertEqual(falling, sorted(falling, reverse=True))

    def test_tokens(self):
        for text, bundled, most, share, want in (
                (64, 600, 512, 0, (64, 0)), (600, 600, 512, 0, (512, 0)),
                (64, 600, 512, 0.5, (64, 64)), (64, 600, 512, 0.75, (64, 192)),  # in addition
                (600, 600, 512, 0.5, (256, 256)), (512, 600, 512, 0.75, (128, 384)),  # instead
                (200, 600, 512, 0.75, (128, 384)),
                (64, 10, 512, 0.5, (64, 10)), (1, 0, 1, 0.75, (1, 0)), (5, 5, 1, 0.75, (1, 0))):
            self.assertEqual(mix.tokens(text, bundled, most, share), want)

    def test_tokens_keep_the_share(self):
        for text in range(1, 40):
            for most in range(1, 60, 7):
                for share in (0, 0.1, 0.3, 0.62, 0.75, 0.99):
                    own, other = mix.tokens(text, 1000, most, share)
                    self.assertTrue(1 <= own <= text and own + other <= most)
                    self.assertLess(other - share * (own + other), 1)

    def test_refusals(self):
        for arguments in ((0, 1, 1, 0), (1, -1, 1, 0), (1, 1, 0, 0), (1, 1, 1, 1), (1, 1, 1, -0.1),
                          (1, 1, 1, math.nan)):
            with self.assertRaises(ValueError):
                mix.tokens(*arguments)


class Options(unittest.TestCase):
    def test_shares(self):
        for said, want in (("auto", None), ("0", 0), ("0.25", 0.25), (0.5, 0.5), (0, 0), ("1e-3", 0.001)):
            self.assertEqual(calibrate.share_of(said), want)

    def test_refusals(self):
        for said in ("1", "-0.1", "nan", "inf", "", "a", "25%", 1.0, -1):
            with self.assertRaisesRegex(errors.UsageError, "^--mix is '%s'; expected auto, or a share of all tokens from 0 "
                                        "and below 1$" % said):
                calibrate.share_of(said)

    def test_the_command(self):
        own, typed, _ = calibrate.parsed(["--mix", "0.5", "--to", "nf4", "model", "out"])
        self.assertEqual((own["mix"], typed), ("0.5", ["--to=nf4"]))
        with self.assertRaisesRegex(errors.UsageError, "--mix is '2'"):
            calibrate.main(["--mix=2", "model", "out"])


if __name__ == "__main__":
    unittest.main()
