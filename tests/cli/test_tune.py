#!/usr/bin/env python3
"""`qconv bench --tune`, the table that it saves, and who reads it, over the CPU shim on tiny weights:
times mean nothing here, and what is found faster is chance; everything else is as on a GPU."""
import json
import os
import re
import sys
import unittest
from unittest import mock

from output_case import OutputCase
from qconv_case import QconvCase, ROOT
from test_documented import members, page, section

sys.path.insert(0, os.path.join(ROOT, "bench"))
import make_performance as performance  # noqa: E402

SHIM = os.environ.get("QCONV_SHIM", os.path.join(ROOT, "build", "qconv_shim"))
FAKE_CUBLAS = os.environ.get("FAKE_CUBLAS", os.path.join(ROOT, "build", "tests", "shim",
                                                       "libfake_cublas.so"))
BUNDLED = os.path.join(ROOT, "tests", "data", "kjv-llama")
MODEL = os.path.join(BUNDLED, "model")
TINY = "64x256"


def row(n, k, path, least=1, most=4096, kind="nf4", **more):
    return dict({"kind": kind, "n": n, "k": k, "m_least": least, "m_most": most, "path": path}, **more)


def table(rows, sm=80, multiprocessors=1, **more):
    return dict({"qconv_tuning": 1, "program": "qconv 0.0", "date": "2026-01-31T12:00:00Z",
                 "gpu": "CPU shim sm_%d" % sm, "sm": sm, "multiprocessors": multiprocessors,
                 "driver_version": 13000, "runtime_version": 13000, "rows": rows}, **more)


class Alone(QconvCase):
    """The program as it is built: there is no GPU."""

    def test_usage(self):
        self.usage("bench", "--save", "t.json", has="--save needs --tune", command="bench")
        for name, *value in [["path", "gemv"], ["markdown"], ["tuning", "t.json"]]:
            self.usage("bench", "--tune", "--" + name, *value, has=["--tune", "--" + name],
                       command="bench")
        self.usage("bench", "--tuning", "", has="--tuning", command="bench")

    def test_no_gpu(self):
        self.fails(5, "bench", "--tune", env={"CUDA_VISIBLE_DEVICES": ""}, has="no GPU")

    def test_save_is_checked_first(self):
        os.mkdir(self.path("folder"))
        tune = ["bench", "--tune", "--save"]
        self.fails(1, *tune, self.path("no", "folder", "t.json"), has="--save")
        self.usage(*tune, "folder", has=["--save", "a folder"], command="bench")
        self.usage(*tune, "/dev/full", has=["--save", "a device"], command="bench")
        self.usage(*tune, "t.json", "--output", "t.json", has=["--save", "--output"],
                   command="bench")
        if os.getuid() != 0:
            os.chmod(self.write("t.json", ""), 0o444)
            self.fails(1, *tune, "t.json",
                       has=["--save", "expected a file that may be written, found one that may not"])

    def test_read_also_without_a_gpu(self):
        """Somebody who names a table that is broken wants to know, whatever works then."""
        self.write("t.txt", "In the beginning")
        bad = self.write("bad.json", json.dumps(table([row(64, 256, "auto")])))
        words = ["--tuning: ", "bad.json: rows[0]: path is 'auto'", "one of gemv"]
        self.fails(3, "eval", MODEL, "--text", "t.txt", "--device", "cpu", "--tuning", bad, has=words)
        self.fails(3, "bench", "--tuning", bad, has=words)
        self.fails(3, "bench", env={"QCONV_TUNING": bad}, has=["QCONV_TUNING: "] + words[1:])
        self.fails(1, "bench", "--tuning", "none.json", has=["--tuning", "none.json"])
        good = self.write("good.json", json.dumps(table([])))
        r = self.run_qconv("eval", MODEL, "--text", "t.txt", "--device", "cpu", "--tuning", good)
        self.assertEqual((r.returncode, b"warning" in r.stderr), (0, False), r.stderr)


@unittest.skipUnless(os.path.exists(SHIM), "no qconv_shim")
class Shim(OutputCase):
    scale = "absmax"

    def setUp(self):
        super().setUp()
        self.device = "sm_80:1:512KiB"

    def run_qconv(self, *args, env=None, **more):
        full = {"QC_SHIM_DEVICES": self.device, "QCONV_LIBCUBLAS": FAKE_CUBLAS}
        full.update(env or {})
        with mock.patch("qconv_case.QCONV", SHIM):
            return super().run_qconv(*args, env=full, **more)

    def table(self, *args, **more):
        return self.write("t.json", json.dumps(table(*args, **more)))

    # ---- making one ----

    def test_tune(self):
        self.write("t.json", "what was there before")
        r = self.run_qconv("bench", "--tune", "--shapes", TINY, "--m", "2,16", "--rounds", "3",
                           "--scheme", "nf4", "--save", "t.json", "--output", "o.json", timeout=300)
        self.assertEqual(r.returncode, 0, r.stderr)
        with open(self.path("o.json")) as f:
            result = json.load(f)
        with open(self.path("t.json")) as f:
            saved = json.load(f)
        self.assertEqual(sorted(os.listdir(self.dir)), ["o.json", "t.json"])
        self.check_result(result)
        self.check_saved(saved, result)
        self.check_text(r.stdout.decode(), r.stderr.decode(), result)
        self.check_documented(result, saved)
        # And it is one that can be read.
        self.assertIn("\nKernels as t.json says.\n", self.ok("bench", "--tuning", "t.json", "--shapes", TINY, "--m", "2",
                                     "--rounds", "1", "--scheme", "nf4"))

    def test_candidates_that_fail(self):
        """One that is refused is named and the others are compared; without a truth there is no row."""
        counts = []
        for env in [{"QC_SHIM_FAIL_LAUNCH": "matmul_gemv:1"}, {"QC_SHIM_FAIL_LAUNCH": "matmul_reference:1"}]:
            r = self.run_qconv("bench", "--tune", "--shapes", TINY, "--m", "2", "--rounds", "3", "--scheme", "nf4",
                               "-q", "--output", "o.json", env=env, timeout=300)
            self.assertEqual(r.returncode, 4, r.stderr)
            with open(self.path("o.json")) as f:
                result = json.load(f)
            self.assertEqual(([x["m"] for x in result["failed"]], result["complete"]), ([2], True))
            self.assertIn(b"cudaErrorLaunchOutOfResources", r.stderr)
            counts.append([x["candidates"] for x in result["rows"]])
            if counts[-1]:
                self.assertEqual(result["failed"][0]["path"], "gemv")
                self.assertNotEqual(result["rows"][0]["plan"]["path"], "gemv")
        self.assertEqual(len(counts[0]), 1)
        self.assertEqual(counts[1], [])

    def check_result(self, result):
        self.assertEqual((result["command"], result["left_out"]), ("bench --tune", 0))
        self.assertEqual([(x["n"], x["k"], x["m"], x["m_least"], x["m_most"]) for x in result["rows"]],
                         [(64, 256, 2, 2, 2), (64, 256, 16, 9, 16)])
        self.assertEqual([x["plan"]["path"] for x in result["rows"]], ["mma-16816", "mma-16816"])
        for x in result["rows"]:
            self.assertGreaterEqual(x["candidates"], 4, x)  # two paths, K whole or in two
            self.assertGreater(x["plan_us"]["median"], 0)
            self.assertEqual(x["other"] is None, x["us"] is None)
            self.assertEqual(x["other"] is None, x["ratio"] is None)
            better = False
            if x["other"]:
                self.assertNotEqual(x["other"], x["plan"])
                self.assertGreaterEqual(x["ratio"]["samples"], 5)
                self.assertEqual(x["us"]["samples"], 2 * x["ratio"]["samples"])
                better = x["ratio"]["median"] >= 1.01 and x["ratio"]["p10"] > 1
            self.assertIs(x["better"], better)

    def check_saved(self, saved, result):
        device = result["device"]
        self.assertEqual((saved["qconv_tuning"], saved["gpu"], saved["sm"], saved["multiprocessors"]),
                         (1, device["name"], 80, 1))
        self.assertEqual(saved["program"], result["program"])
        self.assertEqual((saved["driver_version"], saved["runtime_version"]),
                         (device["driver_version"], device["runtime_version"]))
        self.assertRegex(saved["date"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        better = [x for x in result["rows"] if x["better"]]
        self.assertEqual(
            [(x["kind"], x["n"], x["k"], x["m_least"], x["m_most"], x["path"], x.get("variant"), x["us"],
              x["plan_us"]) for x in saved["rows"]],
            [("nf4", x["n"], x["k"], x["m_least"], x["m_most"], x["other"]["path"],
              x["other"]["variant"], x["us"]["median"], x["plan_us"]["median"]) for x in better])

    def check_text(self, text, told, result):
        better = sum(x["better"] for x in result["rows"])
        self.assertIn("\nA better choice than the plan's for %d of 2.\n2 measured in " % better, text)
        self.assertTrue(text.startswith("CPU shim sm_80, sm_80, 1 multiprocessors\n"), text)
        self.assertRegex(text, r"weight +M +scheme +of +planned +us +best( +us +gain +p10 to p90)?")
        self.assertRegex(told, r"given 64x256 M=2 nf4: [^:]*, [0-9.]+ us(, the best of|; better: )")

    def check_documented(self, result, saved):
        text = section(page("bench.md"), "Tuning")
        above = section(page("bench.md"), "JSON")
        described = set(re.findall(r"`([^`]+)`", text)) | set(re.findall(r"`([^`]+)`", above))
        # A table with all that there can be.
        saved = dict(saved, rows=[row(1, 1, "mma-16816", variant="tiles", blocks=2, us=1, plan_us=1)])
        printed = members(result, set()) | members(saved, set())
        self.assertEqual(sorted(printed - described), [])
        known = printed | {"gemv", "general", "stream", "tiles", "nf4", "int8"}
        for name in re.findall(r"^\| (`.*?) \|", text, re.M):
            for word in re.findall(r"`(\w+)`", name):
                self.assertIn(word, known)

    def test_volta(self):
        """Other tensor cores, weights that are laid out anew, two schemes."""
        self.device = "sm_70:1:512KiB"
        self.ok("bench", "--tune", "--shapes", "33x65", "--m", "9", "--rounds", "1", "--scheme",
                "int8,int8-blocks", "--output", "o.json", "-q", timeout=300)
        with open(self.path("o.json")) as f:
            rows = json.load(f)["rows"]
        self.assertEqual([(x["scheme"], x["plan"]["path"], x["repacked"]) for x in rows],
                         [("int8", "mma-884", True), ("int8-blocks", "mma-884", True)])

    def test_no_time(self):
        r = self.run_qconv("bench", "--tune", "--shapes", TINY + ",1024x512", "--m", "1,65536",
                           "--rounds", "1", "--scheme", "nf4", "--json", "-q", timeout=300)
        self.assertEqual(r.returncode, 0, r.stderr)
        result = json.loads(r.stdout)
        self.assertEqual((len(result["rows"]), result["left_out"]), (1, 3))  # no room for them

    # ---- using one ----

    def paths(self, *args, m="1,16", **more):
        r = self.run_qconv("bench", "--shapes", TINY, "--m", m, "--rounds", "1", "--json", *args,
                           timeout=200, **more)
        self.assertEqual(r.returncode, 0, r.stderr)
        result = json.loads(r.stdout)
        rows, self.tuned_by = result["rows"], result["tuning"]
        return {(x["m"], x["scheme"]): x["path"] for x in rows}, r.stderr.decode()

    OWN = {(1, "nf4"): "mma-16816", (1, "int8"): "mma-16816", (16, "nf4"): "mma-16816",
           (16, "int8"): "mma-16816"}

    def test_bench(self):
        self.table([row(64, 256, "gemv", 1, 8, blocks=2), row(64, 256, "gemv", 1, 16),
                    row(64, 257, "gemv"), row(64, 256, "gemv", 17, kind="int8")])
        changed = {**self.OWN, (1, "nf4"): "gemv", (16, "nf4"): "gemv"}
        got, told = self.paths("--tuning", "t.json")
        self.assertEqual((got, self.tuned_by), (changed, "t.json"))
        self.assertNotIn("warning", told)
        self.write("other.json", json.dumps(table([])))
        # The option counts, and an empty variable is none; a path that is forced is that path.
        for args, variable, path in [([], "t.json", "gemv"), ([], "", "mma-16816"),
                                     (["--tuning", "other.json"], "t.json", "mma-16816"),
                                     (["--path", "gemv"], "t.json", "gemv")]:
            got, _ = self.paths("--scheme", "nf4", *args, m="1", env={"QCONV_TUNING": variable})
            self.assertEqual(got, {(1, "nf4"): path}, (args, variable))

    def test_a_page_tells(self):
        self.table([row(64, 256, "mma-16816")])
        text = self.ok("bench", "--shapes", TINY, "--m", "1", "--rounds", "1", "--scheme", "nf4",
                       "--tuning", "t.json", "--markdown", "--output", "o.json", timeout=200)
        with open(self.path("o.json")) as f:
            self.assertEqual(performance.kernel_section(json.load(f)), text)
        self.assertIn("\nKernels were chosen by a table of `qconv bench --tune`.\n", text)

    def test_another_gpu(self):
        for more in [{"sm": 90}, {"multiprocessors": 2}, {"gpu": "CPU shim sm_80 Ti"}]:
            self.table([row(64, 256, "gemv")], **more)
            got, told = self.paths("--tuning", "t.json", "--scheme", "nf4", m="1")
            self.assertEqual((got, self.tuned_by), ({(1, "nf4"): "mma-16816"}, None))
            warning = [s for s in told.splitlines() if "warning" in s]
            self.assertEqual(len(warning), 1, told)
            for text in ["t.json is not used", "CPU shim", "sm_%d with %d " % (
                    more.get("sm", 80), more.get("multiprocessors", 1)), "bench --tune"]:
                self.assertIn(text, warning[0])

    def test_tune_does_not_look_at_one(self):
        self.write("bad.json", "{")
        r = self.run_qconv("bench", "--tune", "--shapes", "8x8", "--m", "1", "--rounds", "1", "--scheme",
                           "int8", "-q", env={"QCONV_TUNING": "bad.json"}, timeout=200)
        self.assertEqual((r.returncode, r.stderr), (0, b""))

    def test_broken(self):
        for change, words in [
                ({"rows": None}, ["rows is of kind null; expected an array"]),
                ({"sm": "90"}, ["sm is of kind string; expected a number"]),
                ({"qconv_tuning": 2}, ["a table of version 1"]),
                ({"rows": [row(64, 256, "gemv"), row(64, 256, "gemv", most=0)]},
                 ["rows[1]: m_most is 0; expected a number from 1 to "])]:
            self.write("t.json", json.dumps({**table([]), **change}))
            self.fails(3, "bench", "--tuning", "t.json", has=["--tuning: t.json: "] + words)
        self.write("t.json", json.dumps(table([]))[:50])
        self.fails(3, "bench", "--tuning", "t.json", has=["t.json: JSON byte 50"])

    def small(self):
        with open(os.path.join(BUNDLED, "heldout.txt"), encoding="utf-8") as f:
            self.write("t.txt", f.read()[:24])
        self.ok("-q", "--device", "cpu", "--to", "nf4", MODEL, "out")

    def test_validate_and_eval(self):
        self.small()
        self.device = "sm_80:2:2MiB"
        self.table([row(n, k, "gemv", 9, 64) for n in (192, 64, 440) for k in (192, 440)],
                   multiprocessors=2)
        kernels = []
        for more in [[], ["--tuning", "t.json"]]:
            got = json.loads(self.ok("validate", "out", "--against", MODEL, "--device", "cuda",
                                     "--sample", "1", "--m", "12", "--json", *more, timeout=300))
            kernels.append([x["times"][0]["kernel"] for x in got["layers"] if x["times"]])
        self.assertEqual(kernels, [["mma-16816"], ["gemv"]])
        # Exact weights instead of float16's: other last digits.
        self.device = "sm_80:2:1GiB"
        numbers = []
        for more in [[], ["--tuning", "t.json"], ["--tuning", "t.json"]]:
            got = json.loads(self.ok("eval", "out", "--text", "t.txt", "--device", "cuda", "--json", "-q",
                                     *more, timeout=300))
            numbers.append(got["perplexity"])
        self.assertNotEqual(numbers[0], numbers[1])
        self.assertLess(abs(numbers[1] / numbers[0] - 1), 1e-3)
        self.assertEqual(numbers[1], numbers[2])
        self.table([], sm=90)
        r = self.run_qconv("eval", "out", "--text", "t.txt", "--device", "cuda", "--json",
                           env={"QCONV_TUNING": "t.json"}, timeout=300)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn(b"t.json is not used: it was made on CPU shim sm_90", r.stderr)
        self.assertEqual(json.loads(r.stdout)["perplexity"], numbers[0])


if __name__ == "__main__":
    unittest.main()
