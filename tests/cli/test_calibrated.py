"""What calibrating with --hessians writes, from outside: what it goes with, what qconv says of an output, and that
a run that dies at any record of what is calibrated goes on to the same bytes."""
import atexit
import ctypes.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

from output_case import AT_CALL, OutputCase, PLAIN, STAGING, at_call
from qconv_case import QCONV, ROOT, SANITIZED
import make_checkpoint as mk
import moments

MODEL = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
WEIGHTS = 28  # that are calibrated
FOLDER = tempfile.mkdtemp(prefix="qconv-moments-")
atexit.register(shutil.rmtree, FOLDER)
CALIBRATE = ["--hessians", moments.of_model(MODEL, os.path.join(FOLDER, "m.safetensors"), two=True)]
JOURNAL = "journal-calibrated"


def have_openblas():
    return bool(os.environ.get("QCONV_OPENBLAS") or ctypes.util.find_library("openblas"))


class Options(OutputCase):
    def test_what_goes_with_what(self):
        nf4 = ["--to", "nf4"]
        for args, has in (
                (nf4 + ["--hessians", ""], "--hessians: the path is empty; expected the name of a file"),
                (["--to", "bf16", "--hessians", "t"], "quantizes nothing"),
                (["--to", "keep", "--hessians", "h"], "--hessians does not go with --to keep"),
                (nf4 + ["--hessians", "t", "--part", "1/2"], "--hessians does not go with --part: a part has"),
                (nf4 + ["--damping", "0.1"], "--damping needs --hessians"),
                (nf4 + ["--sided", "one"], "--sided needs --hessians"),
                (nf4 + ["--hessians", "h", "--sided", "three"], "--sided: expected one or two"),
                (nf4 + ["--hessians", "t", "--damping", "0"], "above 0 and at most 1"),
                (nf4 + ["--hessians", "t", "--damping", "2"], "above 0 and at most 1"),
                *((nf4 + [option, "t"], f"qconv has no '{option}': 'python -m qconv calibrate MODEL OUT --to nf4 "
                   "--text FILE' calibrates with a text") for option in (
                       "--calibrate", "--calibration-tokens", "--calibration-context", "--image-states", "--tokenizer")),
                (nf4 + ["--calib-data", "t"], "did you mean 'python -m qconv calibrate MODEL OUT --text FILE'?")):
            with self.subTest(args=args):
                self.usage(*args, MODEL, "o", has=has)
                self.assert_nothing("o")

    def test_a_step_of_several_tasks(self):
        step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
                "SLURM_PROCID": "0"}
        self.usage("--to", "nf4", *CALIBRATE, MODEL, "o", env=step,
                   has="--hessians does not go with the 2 tasks of a Slurm step: a part has no inputs of later "
                   "layers without those of the earlier; start one task, or give --part 1/1")
        self.assert_nothing("o")

    def test_what_is_missing(self):
        self.fails(3, "-q", "--to", "nf4", "--hessians", "no.txt", MODEL, "o", has="no.txt")
        self.assert_nothing("o")


@unittest.skipUnless(have_openblas(), "OpenBLAS is not installed")
class Calibrated(OutputCase):
    def make(self, *more, out="o", model=MODEL, form=("--to", "nf4", *PLAIN), **run):
        return self.ok("-q", *form, *CALIBRATE, *more, model, out, **run)

    kept = None

    def wanted(self):
        """What a whole run writes to "want": made once, as the same command has the same bytes
        (test_what_it_does_not_depend_on)."""
        if not Calibrated.kept:
            Calibrated.kept = tempfile.mkdtemp(prefix="qconv-want-")
            self.addClassCleanup(shutil.rmtree, Calibrated.kept)
            self.make(out=os.path.join(Calibrated.kept, "o"))
        shutil.copytree(os.path.join(Calibrated.kept, "o"), self.path("want"), symlinks=True)

    def test_what_is_said(self):
        got = json.loads(self.make("--json"))["calibration"]
        self.assertEqual((got["text"], got["hessians"], got["weights"], got["left"]),
                         (None, CALIBRATE[1], WEIGHTS, 0))
        self.assertEqual(got["tokens"], 5000)
        self.assertTrue(0 < got["calibrated"] < got["rounded"])
        with open(self.path("o", "qconv.json"), encoding="utf-8") as f:
            manifest = json.load(f)
        self.assertEqual(manifest["version"], 3)
        said = manifest["options"]["calibrate"]
        self.assertEqual((said["hessians"], said["damping"], said["sided"], got["sided"]),
                         ("m.safetensors", 0, "two", "two"))
        rows = [t["calibrated"] for t in manifest["tensors"] if "calibrated" in t]
        self.assertEqual(len(rows), WEIGHTS)
        self.assertAlmostEqual(sum(r["rounded"] for r in rows) / WEIGHTS, got["rounded"], 12)
        self.assertAlmostEqual(sum(r["calibrated"] for r in rows) / WEIGHTS, got["calibrated"], 12)
        inspected = json.loads(self.ok("inspect", "--json", "o"))
        self.assertEqual(inspected["manifest"]["calibrate"], said)
        self.assertEqual([t["calibrated"] for t in inspected["tensors"] if "calibrated" in t],
                         sorted(rows, key=lambda r: next(
                             i for i, t in enumerate(inspected["tensors"])
                             if t.get("calibrated") == r)))
        self.assertIn("calibrated with m.safetensors", self.ok("inspect", "o"))
        text = self.ok(*("--to nf4 --force".split()), *CALIBRATE, MODEL, "o2")
        self.assertIn("calibrated %d weights with %s" % (WEIGHTS, CALIBRATE[1]), text)
        dry = json.loads(self.ok("--dry-run", "--json", "--to", "nf4", *CALIBRATE, MODEL))
        self.assertEqual(dry["calibration"]["hessians"], CALIBRATE[1])
        self.assertNotIn("seconds", dry["calibration"])
        plain = json.loads(self.ok("--dry-run", "--json", "--to", "nf4", MODEL))
        self.assertNotIn("calibration", plain)
        self.assertEqual(dry["tensors"], plain["tensors"])  # the same form and size

    def test_forms_are_verified(self):
        for form in (["--to", "nf4"], ["--to", "nf4", "--no-double-quant", "--block-size", "32"],
                     ["--to", "int8"], ["--to", "int8", "--block-size", "64"],
                     ["--to", "int4", "--block-size", "channel"], ["--to", "int5", "--block-size", "channel"],
                     ["--to", "nf4", "--scale", "absmax", "--keep", "*.1.*"]):
            with self.subTest(form=form):
                self.make(form=form)
                self.ok("verify", "o")
                got = json.loads(self.ok("verify", "--json", "o", "--against", MODEL))
                marked = [r for r in got["rows"] if r.get("calibrated")]
                self.assertEqual(len(marked), WEIGHTS - 7 * ("--keep" in form))
                self.ok("-q", "unpack", "o", "u")
                self.ok("verify", "u", "--against", MODEL)
                shutil.rmtree(self.path("o"))
                shutil.rmtree(self.path("u"))

    def test_what_it_does_not_depend_on(self):
        self.make("--threads", "1", out="a")
        self.make("--threads", "2", out="b")
        self.assert_same("a", "b")

    def dies(self, env, *more, model=MODEL):
        full = dict(os.environ, **env)
        p = subprocess.Popen([QCONV, "-q", "--to", "nf4", *PLAIN, *CALIBRATE, *more, model, "o"],
                             cwd=self.dir, env=full, stderr=subprocess.PIPE)
        _, err = p.communicate(timeout=120)
        return p.returncode, err.decode()

    @unittest.skipUnless(AT_CALL, "at_call is not built")
    def test_killed_and_continued(self):
        self.wanted()
        self.make(env=at_call("sync:1", JOURNAL, count=self.path("n")))
        with open(self.path("n"), encoding="ascii") as f:
            syncs = int(f.read())
        self.assertGreater(syncs, 2 * WEIGHTS)  # bytes and record of each
        self.assert_same("o", "want")
        shutil.rmtree(self.path("o"))
        for n in range(1, syncs + 1, 1 if "--slow" in sys.argv else 40 if SANITIZED else 19):
            code, _ = self.dies(at_call("sync:%d" % n, JOURNAL, run="kill -9 $PPID"))
            self.assertEqual(code, -signal.SIGKILL, n)
            r = self.run_qconv("--to", "nf4", *PLAIN, "-v", *CALIBRATE, MODEL, "o")
            self.assertEqual(r.returncode, 0, r.stderr)
            kept = [int(line.split()[1]) for line in r.stderr.decode().splitlines()
                    if "weights were calibrated before" in line]
            # magic, identity; then two syncs a weight, of which the first is before its record
            self.assertAlmostEqual(kept[0] if kept else 0, (n - 2) / 2, delta=2)
            self.assert_same("o", "want")
            shutil.rmtree(self.path("o"))

    @unittest.skipUnless(AT_CALL, "at_call is not built")
    def test_interrupted(self):
        self.wanted()
        code, err = self.dies(at_call("sync:30", JOURNAL, run="kill -TERM $PPID"))
        self.assertEqual(code, 130, err)
        self.assertIn("weights are calibrated, and the same command continues from there", err)
        # other moments, or other options, are another conversion
        for more in (["--damping", "0.02"], ["--sided", "one"]):
            self.fails(2, "-q", "--to", "nf4", *PLAIN, *CALIBRATE, *more, MODEL, "o",
                       has=[more[0], "--restart"])
        others = moments.of_model(MODEL, self.path("others.safetensors"))
        self.fails(2, "-q", "--to", "nf4", *PLAIN, "--hessians", others, MODEL, "o", has=["calibration was", "--restart"])
        self.fails(2, "-q", "--to", "nf4", *PLAIN, MODEL, "o",
                   has=["--hessians was 'given' then and is 'not given' now", "--restart"])
        self.make()
        self.assert_same("o", "want")
        self.assertNotIn(STAGING, os.listdir(self.path("o")))

    @unittest.skipIf(SANITIZED, "takes other memory")
    def test_moments_that_are_no_numbers(self):
        """They show only when their weight's turn comes. The same command fails again, so nothing stays."""
        tensors, _ = mk.read_safetensors(CALIBRATE[1])
        name = max(n for n in tensors if n.startswith("model.layers.") and n.endswith(".second_moment"))
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, shape, mk.encode(dtype, [math.nan] + mk.decode(dtype, data)[1:])
        mk.write_safetensors(self.path("nan.safetensors"), tensors)
        self.fails(3, "-q", "--to", "nf4", "--hessians", "nan.safetensors", MODEL, "o", has="not a finite number")
        self.assert_nothing("o")

    def test_a_damaged_store(self):
        """Bytes of the store change while nobody looks: what they were is calibrated again."""
        if not AT_CALL:
            self.skipTest("at_call is not built")
        self.wanted()
        code, _ = self.dies(at_call("sync:40", JOURNAL, run="kill -9 $PPID"))
        self.assertEqual(code, -signal.SIGKILL)
        with open(self.path("o", STAGING, JOURNAL + "-weights"), "r+b") as f:
            f.seek(200)
            b = f.read(1)
            f.seek(200)
            f.write(bytes([b[0] ^ 1]))
        r = self.run_qconv("--to", "nf4", *PLAIN, "-v", *CALIBRATE, MODEL, "o")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn(b", and 1 of them were damaged since", r.stderr)
        self.assert_same("o", "want")


if __name__ == "__main__":
    if not have_openblas():
        print("skipped in part: OpenBLAS is not installed", flush=True)
    unittest.main(argv=[a for a in sys.argv if a != "--slow"])
