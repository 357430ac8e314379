#!/usr/bin/env python3
"""bench_matmul over the CPU shim on tiny weights, where times mean nothing and everything else does, and
the programs of bench/ that share its result."""
import io
import json
import os
import re
import subprocess
import sys
import time
import unittest
from contextlib import redirect_stderr
from unittest import mock

from qconv_case import QconvCase, ROOT
from test_documented import members, page, section

sys.path.insert(0, os.path.join(ROOT, "bench"))
import bench_kernels_bitsandbytes as peer  # noqa: E402
import make_performance as performance  # noqa: E402

SHIM = os.environ.get("BENCH_MATMUL_SHIM", os.path.join(ROOT, "build", "bench_matmul_shim"))
FAKE_CUBLAS = os.environ.get("FAKE_CUBLAS", os.path.join(ROOT, "build", "tests", "shim",
                                                       "libfake_cublas.so"))
# Small memory: copies, large products and rotations shrink with it.
SMALL = "sm_80:1:512KiB"
TINY = "64x192"


class Shim(QconvCase):
    def setUp(self):
        super().setUp()
        if not os.path.exists(SHIM):
            self.skipTest("no bench_matmul_shim")
        self.device = SMALL
        self.cublas = FAKE_CUBLAS

    def start(self, *args, env=None):
        full = dict(os.environ, QC_SHIM_DEVICES=self.device, QCONV_LIBCUBLAS=self.cublas or "none.so", **(env or {}))
        p = subprocess.Popen([SHIM, *args], cwd=self.dir, env=full, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
        self.addCleanup(lambda: [p.poll() is None and p.kill(), p.communicate()])
        return p

    def run_shim(self, *args, code=0, env=None):
        """Standard output and the lines on standard error."""
        p = self.start(*args, env=env)
        out, told = p.communicate(timeout=300)
        self.assertEqual(p.returncode, code, told)
        return out, told.splitlines()

    def bench(self, *args, shapes=TINY, m="1", rounds="1", code=0, env=None):
        """The lines on standard error, and the result of --output."""
        out, told = self.run_shim("--shapes", shapes, "--m", m, "--rounds", rounds, "--output", "o.json", *args,
                                  code=code, env=env)
        self.assertEqual(out, "")
        with open(self.path("o.json")) as f:
            return told, json.load(f)

    def test_result(self):
        """Rows, floors and ratios add up, the page can be made of it, and all is documented."""
        told, r = self.bench(shapes=TINY + ",33x65", m="1,16", rounds="2")
        self.assertIn("\nIn 8 the weights together", performance.kernel_section(r))  # tiny weights
        self.assertIn("shim", r["device"]["name"])
        self.assertEqual(r["device"]["sm"], 80)
        self.assertEqual([(row["n"], row["k"], row["m"], row["scheme"]) for row in r["rows"]],
                         [(n, k, m, s) for n, k in [(64, 192), (33, 65)] for m in [1, 16]
                          for s in ["nf4", "int8"]])
        self.assertEqual([row["repacked"] for row in r["rows"]], [False] * 4 + [True] * 4)
        self.assertEqual((r["left_out"], r["complete"], r["failed"]), (0, True, []))
        for row in r["rows"]:
            self.check_row(row, r, 2)
        self.assertEqual({row["path"] for row in r["rows"]}, {"gemv", "mma-16816"})
        self.assertRegex(told[0], r"^64x192 M=1 nf4 mma-16816: [\d.]+ us, [\d.]+x cuBLAS$")
        self.assertEqual(len(r["kernels"]), 8)
        for k in r["kernels"]:
            best = max(r["roof"][name]["median"] for name in ("copy_gbps", "kernel_copy_gbps"))
            self.assertAlmostEqual(k["of_copy"], k["gbps"]["median"] / best)
            self.assertAlmostEqual(k["of_roof"], k["gbps"]["median"] / r["roof"]["memory_gbps"])
        self.documented(r)

    def check_row(self, row, r, rounds):
        n, k, m = row["n"], row["k"], row["m"]
        roof = r["roof"]
        blocks = -(-n * k // 64)
        weight = {"nf4": (n * k + 1) // 2 + blocks + 4 * -(-blocks // 256) + 1024,
                  "int8": n * k + 4 * n}[row["scheme"]]
        self.assertEqual(row["bytes"], weight + 2 * m * k + 2 * m * n)
        best = max(roof[name]["median"] for name in ("copy_gbps", "kernel_copy_gbps", "read_gbps"))
        self.assertEqual(roof["memory_gbps"], best)
        floor = row["bytes"] / best / 1e3
        if roof["gemm_tflops"]:
            floor = max(floor, 2 * m * n * k / roof["gemm_tflops"]["median"] / 1e6)
        self.assertAlmostEqual(row["floor_us"] / floor, 1)
        self.assertAlmostEqual(row["of_roof"], floor / row["us"]["median"])
        self.assertLessEqual(row["us"]["p10"], row["us"]["median"])
        self.assertLessEqual(row["us"]["median"], row["us"]["p90"])
        self.assertEqual(row["us"]["samples"], 2 * rounds)
        self.assertTrue(0 < row["error"] <= 1e-3, row["error"])
        turn = row["rotation"]
        self.assertEqual(turn["launches"] % turn["copies"], 0)
        self.assertGreaterEqual(turn["launches"], 20)
        # Small memory: not more than four times the L2, but some.
        self.assertLess(turn["bytes"], 4 * r["device"]["l2_bytes"])
        self.assertGreater(turn["copies"], 2)
        # What is read of them: codes that are laid out anew (33 x 65) count once.
        self.assertEqual(turn["bytes"], turn["copies"] * weight)
        if self.cublas:
            self.assertEqual(row["ratio"]["samples"], rounds)
            self.assertGreater(row["ratio"]["median"], 0)

    def documented(self, r):
        text = section(page("bench.md"), "JSON")
        printed = members(r, set()) | {"us", "dense_us"}
        described = set(re.findall(r"`([^`]+)`", page("bench.md")))
        self.assertEqual(sorted(printed - described), [])
        for row in re.findall(r"^\| (`.*?) \|", text, re.M):
            for name in re.findall(r"`(\w+)`", row):
                self.assertIn(name, printed)
        for name in re.findall(r"`(\w+)`", text[text.index("A row has"):]):
            if name != "null":
                self.assertIn(name, printed)

    def test_schemes_and_paths(self):
        """Rows are by scheme and path, in order: what a device does not have and what has no room is named."""
        for sm, args, shapes, m, code, want in (
                ("sm_80", "", "128+64+64x256,256x256", "12", 0,
                 [(n, s, "mma-16816") for n in (256, 256) for s in ("nf4", "int8")]),
                # The second part begins within scales of scales.
                ("sm_80", "--scheme nf4", "40+64x256", "2", 0, [(104, "nf4", "mma-16816")]),
                ("sm_80", "--bf16 --path gemv --scheme nf4,nf4-plain,int8,int8-blocks", TINY, "3", 0,
                 [(64, s, "gemv") for s in ("nf4", "nf4-plain", "int8", "int8-blocks")]),
                ("sm_80", "--scheme nf4 --path auto,gemv,mma-884,wgmma", TINY, "16", 4,
                 [(64, "nf4", path) for path in ("mma-16816", "gemv", "mma-884")]),
                ("sm_70", "--scheme nf4", TINY, "16", 0, [(64, "nf4", "mma-884")]),
                ("sm_80", "--scheme nf4", "1024x512," + TINY, "1,2", 0, [(64, "nf4", "mma-16816")] * 2)):
            with self.subTest(args=args, shapes=shapes):
                self.device = SMALL.replace("sm_80", sm)
                _, r = self.bench(*args.split(), shapes=shapes, m=m, code=code)
                self.assertEqual([(x["n"], x["scheme"], x["path"]) for x in r["rows"]], want)
                self.assertEqual([f["what"] for f in r["failed"] if "path wgmma needs sm_90" not in f["what"]], [])
                self.assertEqual((len(r["failed"]), r["left_out"]), (code // 4, 2 * ("1024" in shapes)))
                for row in r["rows"]:
                    self.assertTrue(0 < row["error"] <= (4e-3 if "--bf16" in args else 1e-3), row)
                    self.assertIsNotNone(row["ratio"])

    def test_without_cublas(self):
        self.cublas = ""
        _, r = self.bench()
        self.assertIn("\nNo comparison with cuBLAS: ", performance.kernel_section(r))
        self.assertIsNotNone(r["device"]["no_gemm"])
        self.assertIsNone(r["roof"]["gemm_tflops"])
        self.assertEqual(len(r["rows"]), 2)
        for row in r["rows"]:
            self.assertIsNone(row["ratio"])
            self.assertIsNone(row["dense_us"])
            self.assertIsNone(row["dense_rotation"])
            self.check_row(row, r, 1)

    def test_devices_and_words(self):
        self.device = "none"
        self.assertIn("there is no GPU 0: ", self.run_shim(code=5)[1][-1])
        self.device = SMALL + "," + SMALL.replace("sm_80", "sm_90")
        self.assertIn("there is no GPU 2", self.run_shim("--gpu", "2", code=5)[1][-1])
        _, r = self.bench("--gpu", "1", "--scheme", "nf4")
        self.assertEqual(r["device"]["sm"], 90)
        for option, values in (("--shapes", ("", "8", "8x", "0x8", "8x8,", "16777217x1", "8+x8", "16777216+1x8",
                                             "1+1+1+1+1+1+1+1+1x8")), ("--m", ("", "0", "2,1", "1,1")),
                               ("--scheme", ("", "fp4", "nf4,nf4")), ("--path", ("fast", "gemv,gemv")),
                               ("--seconds", ("0",)), ("--bogus", ("1",))):
            for value in values:
                self.run_shim(option, value, code=2)
        self.run_shim("--m", code=2)
        self.assertIn("o.json", self.run_shim("--output", self.path("no", "folder", "o.json"), code=1)[1][-1])

    # ---- what goes wrong on the way ----

    def test_goes_on_after_a_failure(self):
        """One launch of ours is refused, and cuBLAS is right in plain launches and wrong in a graph:
        that much is named and has no times; all else has."""
        told, r = self.bench("--path", "gemv", m="1,3", code=4, env={
            "QC_SHIM_FAIL_LAUNCH": "matmul_gemv:1", "FAKE_CUBLAS_WRONG": "3:2"})
        self.assertEqual([(x["m"], x["scheme"], bool(x["ratio"]), bool(x["dense_us"]), bool(x["dense_rotation"]))
                          for x in r["rows"]],
                         [(1, "int8", True, True, True), (3, "nf4", False, False, False),
                          (3, "int8", False, False, False)])
        self.assertEqual([(f["model"], f["layer"], f["n"], f["k"], f["m"], f["scheme"], f["path"])
                          for f in r["failed"]],
                         [("given", TINY, 64, 192, 1, "nf4", "gemv"), ("given", TINY, 64, 192, 3, None, "cublas")])
        self.assertIn("cudaErrorLaunchOutOfResources", r["failed"][0]["what"])
        self.assertRegex(r["failed"][1]["what"], "cuBLAS on CPU shim sm_80 is wrong when it is replayed as a graph")
        self.assertEqual((r["complete"], r["left_out"], len(r["kernels"])), (True, 0, 8))
        self.assertIn("Wrong, or could not run:", performance.kernel_section(r))
        self.assertIn("2 of the results were wrong or missing, as said above", told[-1])
        self.documented(r)

    def test_results_that_are_looked_at(self):
        """The plain launch is right in each of these. Launches of ours do nothing from the one with the
        second copy of the weights on, or from those on that a graph is made of; cuBLAS is wrong in the
        last replay of the rounds only."""
        copies = 0
        for variable, value, path, words in [
                ("QC_SHIM_SKIP", lambda: "matmul_gemv:2", "gemv", r"is wrong with copy 2 of (\d+) of its weights: "),
                # Plain launches are one for each copy and one before the graph is made.
                ("QC_SHIM_SKIP", lambda: "matmul_gemv:%d" % (copies + 2), "gemv",
                 "is wrong when it is replayed as a graph: "),
                ("FAKE_CUBLAS_WRONG", lambda: "1:3", "cublas", "is wrong when it is replayed as a graph: ")]:
            _, r = self.bench("--path", "gemv", "--scheme", "nf4", env={variable: value()}, code=4)
            self.assertEqual([f["path"] for f in r["failed"]], [path])
            self.assertRegex(r["failed"][0]["what"], words + "its normwise error is (nan|0[.])")
            self.assertEqual([x["ratio"] for x in r["rows"]], [None] * (path == "cublas"))
            copies = copies or int(re.search(words, r["failed"][0]["what"]).group(1))

    def test_dead_device(self):
        """An error that sticks ends the run; what was measured before is in the file."""
        told, r = self.bench("--path", "gemv", "--scheme", "nf4", shapes=TINY + ",33x65", code=1,
                             env={"QC_SHIM_DIE_AT": "matmul_reference:3"})
        self.assertEqual((r["complete"], len(r["kernels"]), [x["layer"] for x in r["rows"]]), (False, 8, [TINY]))
        self.assertIn("cudaErrorIllegalAddress", told[-1])

    def test_killed(self):
        """At any moment: the file is whole, with whole rows in their order."""
        order = [(layer, m, s) for layer in (TINY, "33x65") for m in (1, 2, 3, 4) for s in ("nf4", "int8")]
        for rows in (0, 6):
            p = self.start("--shapes", TINY + ",33x65", "--m", "1,2,3,4", "--path", "gemv", "--rounds", "1",
                           "--output", "o.json")
            r = {"rows": []}
            while p.poll() is None and len(r["rows"]) <= rows:
                time.sleep(0.002)
                if os.path.exists(self.path("o.json")):
                    with open(self.path("o.json")) as f:
                        r = json.load(f)
            p.kill()
            p.communicate()
            with open(self.path("o.json")) as f:
                r = json.load(f)
            got = [(x["layer"], x["m"], x["scheme"]) for x in r["rows"]]
            self.assertEqual(got, order[:len(got)])
            self.assertEqual((r["complete"], r["failed"], r["left_out"]), (False, [], 0))
            for x in r["rows"]:
                self.check_row(x, r, 1)
            self.assertIn("ended before all was measured", performance.kernel_section(r))
            os.remove(self.path("o.json"))


class Peer(unittest.TestCase):
    """bench_kernels_bitsandbytes.py, on a GPU made up."""

    def test_method(self):
        # As tests/unit/validate/unit_timing.c.
        self.assertEqual(peer.launches_of(6, 20, 7.2, 2000), 282)
        self.assertEqual(peer.copies_of(35 << 20, 50 << 20, 100 << 20), 2)
        self.assertEqual([peer.turn(i // 4, i % 4, 2) for i in range(8)], [0, 1, 1, 0, 1, 0, 0, 1])
        self.assertEqual(peer.spread([3, 1]), {"median": 2, "p10": 1.2, "p90": 2.8, "samples": 2})
        self.assertEqual(peer.weight_bytes(8192, 8192), 33554432 + 1048576 + 16384 + 1024)
        # Its own: shares of the time in equal parts.
        self.assertEqual(peer.rounds_of(30, 1, 100, 10), 20)

    def test_missing(self):
        program = os.path.join(ROOT, "bench", "bench_kernels_bitsandbytes.py")
        r = subprocess.run([sys.executable, "-B", "-S", "-E", program], stderr=subprocess.PIPE)
        self.assertEqual(r.returncode, 77)
        self.assertIn(b"torch", r.stderr)

    def test_result(self):
        args = peer.parse(["--m", "1,16", "--rounds", "3"])
        with redirect_stderr(io.StringIO()):
            r = peer.measure(MadeUpGpu(), args)
        text = section(page("bench.md"), "JSON")
        described = set(re.findall(r"`([^`]+)`", page("bench.md")))
        self.assertEqual(sorted(members(r, set()) - described), [])
        for name in re.findall(r"`(\w+)`", text[text.index("A row has"):]):
            if name != "null":
                self.assertIn(name, members(r["rows"], set()))
        self.assertEqual(len(r["rows"]), 8 * 2 * 2)
        self.assertEqual(len(r["layers"]), 2 * 2 * 2)
        self.assertAlmostEqual(r["rows"][0]["ratio"]["median"], 4)
        self.assertAlmostEqual(r["rows"][1]["ratio"]["median"], 0.8)
        self.assertEqual(r["rows"][0]["us"]["samples"], 6)
        self.assertAlmostEqual(r["layers"][0]["dense_us"], 7 * 100)
        # A wrong result is not timed.
        gpu = MadeUpGpu()
        gpu.wrong = float("nan")
        with redirect_stderr(io.StringIO()) as told:
            self.assertIsNone(peer.measure(gpu, peer.parse(["--m", "1"])))
        self.assertIn("is wrong", told.getvalue())

class MadeUpGpu:
    """What TorchGpu offers; a launch takes the microseconds it is called with."""
    wrong = 1e-4

    def facts(self):
        return {"name": "Made Up 1", "pci": "", "sm": 90, "multiprocessors": 1,
                "memory_bytes": 1, "l2_bytes": 1, "driver_version": 0, "runtime_version": 0,
                "kernels": "bitsandbytes 0.50.2, torch 2.8", "no_gemm": None}, "bitsandbytes 0.50.2"

    def graph(self, launch, launches, copies):
        return lambda: sum(launch(i % copies) for i in range(launches))

    def sizes(self):
        return 64, 1 << 20, 1 << 18

    def copy(self, n):
        return lambda i: 10

    product = upload = download = copy

    def nothing(self):
        return lambda i: 1

    def weights(self, n, k, max_m):
        return MadeUpWeights(self)


class MadeUpWeights:
    copies = [2, 3, 5]
    bytes_each = [10, 10, 10]

    def __init__(self, gpu):
        self.gpu = gpu

    def launch(self, which, m):
        return lambda i: (100, 25, 125)[which]

    def error(self, which, m):
        return self.gpu.wrong if which else 1e-4


class Page(QconvCase):
    """Of docs/performance.md's part on kernels what the results that are kept do not show: lint_performance compares
    what they do."""

    def test_kernels(self):
        def kept(name):
            with open(os.path.join(ROOT, "bench", "results", "gpu-h200-%s.json" % name)) as f:
                return json.load(f)

        def text(**files):
            for name, content in files.items():
                self.write("gpu-%s.json" % name, json.dumps(content))
            with mock.patch.object(performance, "RESULTS", self.dir):
                return "\n".join(performance.kernels())
        ours, theirs = kept("bench"), kept("bitsandbytes")
        self.assertIn("No GPU has been measured yet", text())
        whole = text(a=ours, b=theirs)
        self.assertIn("#### Beside bitsandbytes ", whole)
        self.assertNotIn("ended before", whole)
        theirs["device"]["name"] = "Made Up 2"  # other devices are not compared
        ours.update(complete=False, failed=[{"model": "given", "layer": "8x8", "n": 8, "k": 8, "m": 4,
                                             "scheme": "nf4", "path": None, "what": "it is wrong"}])
        broken = text(a=ours, b=theirs)
        self.assertNotIn("Beside", broken)
        self.assertIn("**The run ended before all was measured**", broken)
        self.assertIn("- given 8x8 M=4 nf4: it is wrong\n", broken)
        ours["device"]["name"] = "CPU shim sm_90"
        with self.assertRaises(SystemExit):
            text(a=ours)


if __name__ == "__main__":
    unittest.main()
