#!/usr/bin/env python3
"""The Python package around the program that $QCONV names, without building a wheel."""
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
import typing
import unittest
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cli"))
from qconv_case import INTERRUPTED_ENV, QCONV, QconvCase, ROOT  # noqa: E402

PACKAGE = os.path.join(ROOT, "python")
sys.path.insert(0, PACKAGE)
os.environ["QCONV_PROGRAM"] = QCONV
import make_checkpoint as mk  # noqa: E402
import moments  # noqa: E402
import qconv  # noqa: E402
from qconv import _options, _program, errors  # noqa: E402

MODEL = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
TEXT = os.path.join(ROOT, "tests", "data", "kjv-llama", "heldout.txt")
FAULT_DISK = os.environ.get("FAULT_DISK", os.path.join(ROOT, "build", "tests", "libfault_disk.so"))


class Case(QconvCase):
    def setUp(self):
        super().setUp()
        before = os.getcwd()
        os.chdir(self.dir)
        self.addCleanup(os.chdir, before)

    def large_model(self):
        """A model of holes, large enough to be caught at work."""
        mk.write_model("m", mk.load_model("Llama-3.1-8B"), layers=2, scale=4)

    def slow_program(self):
        """The program on a disk of 60 MB a second, so that it is still at work when it is interrupted."""
        folders = ":".join(os.path.join(os.getcwd(), name) for name in "mo")
        script = self.write("slow", "#!/bin/sh\nQC_FAULT_DIRS='%s' QC_FAULT_SLOW=60000000 LD_PRELOAD='%s' exec '%s' "
                            "\"$@\"\n" % (folders, FAULT_DISK, QCONV))
        os.chmod(script, 0o755)
        return script

    def damaged(self):
        qconv.convert(MODEL, "out", to="nf4", compress="none")
        with open("out/model.safetensors", "r+b") as f:
            f.seek(-1, os.SEEK_END)
            last = f.read(1)
            f.seek(-1, os.SEEK_END)
            f.write(bytes([last[0] ^ 1]))


class Results(Case):
    """Every member that the program prints has a field, and every field is a member of some answer."""

    def check(self, kind, *answers):
        hints = typing.get_type_hints(kind)
        named = {name.rstrip("_") for name in hints} - {"json"}
        seen = set()
        for a in answers:
            self.assertIs(type(a), kind)
            seen |= set(a.json) - {"command"}
        self.assertEqual(seen, named)
        for name, inner in hints.items():
            inner = (typing.get_args(inner) or [inner])[-1 if typing.get_origin(inner) is dict else 0]
            if isinstance(inner, type) and issubclass(inner, qconv.Result):
                below = [getattr(a, name) for a in answers if getattr(a, name) is not None]
                flat = [r for b in below for r in (b.values() if isinstance(b, dict) else b if isinstance(b, tuple)
                                                   else [b])]
                self.assertEqual({type(r) for r in flat}, {inner})
                self.below.setdefault(inner, []).extend(flat)

    def test_all(self):
        self.below = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", qconv.QconvWarning)
            auto = qconv.convert(MODEL, "auto", to="auto", vram="1GB+1GB")
        calibrated = qconv.convert(MODEL, "calibrated", to="nf4", hessians=moments.of_model(MODEL, "m.safetensors", True)) \
            if has_openblas() else None
        part = qconv.convert(MODEL, "parts", to="nf4", part="1/2")
        nf4 = qconv.convert(MODEL, "out", to="nf4", vram="1GB+1GB")
        self.assertEqual((nf4.to, nf4.schemes["nf4"].tensors, nf4.loads.transformers), ("nf4", 28, (4, 5)))
        if calibrated:
            self.check(qconv.Conversion, auto, calibrated, part, nf4)
        self.check(qconv.Plan, qconv.plan(MODEL, vram="1GB+cpu:1GB", to="auto"), qconv.plan(MODEL, vram="1GB"))
        self.check(qconv.TrainingPlan, qconv.plan_training(MODEL, vram="1GB"))
        self.check(qconv.DryRun, qconv.dry_run(MODEL, to="auto", vram="1GB"))
        self.check(qconv.Inspection, qconv.inspect("out"), qconv.inspect(MODEL, for_="all"))
        self.check(qconv.Verification, qconv.verify("out"))
        self.check(qconv.Comparison, qconv.verify("out", against=MODEL))
        self.check(qconv.Unpacking, qconv.unpack("out", "plain"))
        self.check(qconv.Validation, qconv.validate("out", against=MODEL, sample=1, m=[1, 4]))
        self.check(qconv.Hardware, qconv.hardware(as_="2xA100-40GB"))
        for kind, rows in self.below.items():
            if kind is not qconv.TensorInfo:  # which leaves some to `json`
                self.assertEqual({k for r in rows for k in r.json},
                                 {f.name.rstrip("_") for f in dataclasses.fields(kind)} - {"json"}, kind)

    def test_new_members_are_kept_and_missing_ones_told(self):
        whole = json.loads(self.ok("plan", MODEL, "--vram", "1GB", "--json"))
        self.assertEqual(qconv.Plan.from_json({**whole, "newer": 1}).json["newer"], 1)
        del whole["parameters"]
        with self.assertRaisesRegex(qconv.ProgramError, "has no 'parameters'"):
            qconv.Plan.from_json(whole)


class Shown(Case):
    def test_tables(self):
        """print() and notebooks show what the program prints."""
        for result, *argv in ((qconv.plan("Llama-3.3-70B-Instruct", vram="2x40GB", to="auto"),
                               "plan", "--vram=2x40GB", "--to=auto", "Llama-3.3-70B-Instruct"),
                              (qconv.inspect(MODEL), "inspect", MODEL),
                              (qconv.hardware(as_="2xA100-40GB"), "hardware", "--as=2xA100-40GB")):
            self.assertEqual(str(result), self.ok(*argv).rstrip("\n"))
            self.assertTrue(result._repr_html_().startswith("<pre>"))
            self.assertNotIn(" <", result._repr_html_()[5:-6])

    def test_other_answers(self):
        """Their members, and as tables those that are lists of objects."""
        qconv.convert(MODEL, "out", to="nf4", compress="none")
        found = qconv.verify("out", against=MODEL)
        lines = str(found).splitlines()
        self.assertIn("quantized       28", lines)
        heads = next(line for line in lines if line.startswith("  name"))
        self.assertEqual(heads.split()[:4], ["name", "source", "kind", "scheme"])
        row = next(line for line in lines if line.startswith("  model.layers.0.mlp.down_proj.weight"))
        error = next(r for r in found.rows if r["name"] == row.split()[0])["error"]
        self.assertEqual(row[:heads.index(" error") + len(" error")].split()[-1], "%.5g" % error)
        self.assertEqual(lines[-1], "  and %d more in json" % (len(found.rows) - 20))
        self.assertNotIn("quantized_layers=", str(qconv.validate("out", against=MODEL, sample=1, m=[1])))
        self.assertRegex(str(qconv.Plan.from_json(qconv.plan(MODEL, vram="1GB").json)), r"(?m)^devices \(1\)$")
        self.assertEqual(found._repr_html_()[:15], "<pre>command   ")

    def test_names(self):
        self.assertEqual(qconv.__version__, qconv.version())
        self.assertEqual(set(dir(qconv)), {*qconv.__all__, "__version__"})
        self.assertFalse([name for name in qconv.__all__ if not hasattr(qconv, name)])
        with self.assertRaisesRegex(AttributeError, "no attribute 'versoin'"):
            qconv.versoin


def has_openblas():
    import ctypes
    try:
        ctypes.CDLL(os.environ.get("QCONV_OPENBLAS", "libopenblas.so.0"))
    except OSError:
        return False
    return True


class Options(Case):
    def test_spelling(self):
        typed = _program.arguments({"block_size": 32, "force": True, "restart": False, "vram": None, "for_": "all",
                                    "keep": ["*.a", "b"], "m": [1, 4], "max_kl": 1e-9, "quantize": "c"})
        self.assertEqual(typed, ["--block-size=32", "--force", "--for=all", "--keep=*.a", "--keep=b", "--m=1,4",
                                 "--max-kl=0.000000001", "--quantize=c"])

    def test_what_the_program_refuses(self):
        for options, words in [({"blocksize": 4}, "unknown option '--blocksize'; did you mean --block-size?"),
                               ({"to": "nf5"}, "--to: "), ({"force": 1}, "--force takes no value"),
                               ({"keep": True}, "--keep needs a value"), ({"block_size": [1, 2]}, "'1,2'"),
                               ({"max_error": 1}, "--max-error is not an option of 'qconv convert'")]:
            with self.assertRaises(qconv.UsageError) as raised:
                qconv.convert(MODEL, "out", **{"to": "nf4", **options})
            self.assertIn(words, str(raised.exception))
            self.assertIsInstance(raised.exception, ValueError)
        self.assertEqual(os.listdir(), [])

    def test_what_the_functions_have_themselves(self):
        for call in [lambda: qconv.convert(MODEL, "out", to="nf4", json=True),
                     lambda: qconv.plan(MODEL, progress=print),
                     lambda: qconv.convert(MODEL, "out", to="nf4", dry_run=True)]:
            with self.assertRaisesRegex(qconv.UsageError, "is no argument of this function|does that"):
                call()

    def test_places_are_no_options(self):
        os.mkdir("--to")
        with self.assertRaisesRegex(qconv.InputError, "^--to has no .safetensors file"):
            qconv.convert("--to", "out", to="nf4")
        os.symlink(MODEL, "verify")
        self.assertEqual(qconv.convert("verify", "out", to="nf4").model, "verify")

    def test_ids(self):
        plan = qconv.plan("meta-llama/Llama-3.3-70B-Instruct", vram="2x40GB")
        self.assertTrue(plan.fits)
        self.assertEqual([d.name for d in plan.devices], ["cuda:0", "cuda:1"])

    def test_repeated(self):
        kept = qconv.dry_run(MODEL, to="nf4", keep=["*.q_proj.*", "*.o_proj.*"], split_fused=True)
        self.assertEqual(sum(t["scheme"] == "nf4" for t in kept.tensors), 28 - 8)
        self.assertEqual(_options.REPEATED, {"keep", "lora", "quantize"})


class Errors(Case):
    def test_classes_are_the_exit_codes(self):
        codes = {int(row["code"]) for row in json.loads(self.ok("help", "--json"))["exit_codes"]}
        self.assertEqual(set(errors.BY_EXIT_CODE), codes - {0})

    def test_each(self):
        os.mkdir("empty")
        self.write("file", "")
        self.write("reads.ids", "1 2 3\n")
        for kind, words, call in [
                (qconv.UsageError, "--to is missing", lambda: qconv.convert(MODEL, "out")),
                (qconv.InputError, "^no-such does not exist$", lambda: qconv.convert("no-such", "out", to="nf4")),
                (qconv.InputError, "^o/m does not exist; if it is the id of a model",
                 lambda: qconv.convert("o/m", "out", to="nf4")),
                (qconv.RunError, "file could not be made", lambda: qconv.convert(MODEL, "file/out", to="nf4")),
                (qconv.DeviceError, "GPU", lambda: qconv.convert(MODEL, "out", to="nf4", device="cuda"))]:
            with self.assertRaisesRegex(kind, words) as raised:
                call()
            self.assertEqual(raised.exception.exit_code, kind.exit_code)
            self.assertIsNone(raised.exception.result)
            self.assertNotIn("\n", str(raised.exception))

    def test_a_check_that_fails_has_its_result(self):
        self.damaged()
        with self.assertRaises(qconv.CheckError) as raised:
            qconv.verify("out")
        self.assertIn("model.safetensors", str(raised.exception))
        self.assertIsInstance(raised.exception.result, qconv.Verification)
        self.assertEqual((raised.exception.result.ok, raised.exception.result.problems), (False, 1))
        qconv.convert(MODEL, "whole", to="int8")
        with self.assertRaises(qconv.CheckError) as raised:
            qconv.validate("whole", against=MODEL, sample=1, max_error=1e-9)
        self.assertEqual(len(raised.exception.result.failed), 1)

    def test_warnings(self):
        with self.assertWarnsRegex(qconv.QconvWarning, "^only qconv reads this form") as warned:
            qconv.convert(MODEL, "out", to="int8", block_size=64)
        self.assertEqual(warned.filename, __file__)
        with warnings.catch_warnings():  # as errors they end the program, too
            warnings.simplefilter("error")
            with self.assertRaises(qconv.QconvWarning):
                qconv.convert(MODEL, "other", to="int8", block_size=64)

    def test_programs_that_do_not_start(self):
        script = self.write("script", "no program\n")
        for path, words in [("missing", "^QCONV_PROGRAM names 'missing', which is no file$"),
                            (script, "could not be started: Permission denied$")]:
            with mock.patch.dict(os.environ, QCONV_PROGRAM=path), self.assertRaisesRegex(qconv.ProgramError, words):
                qconv.hardware()
        os.chmod(script, 0o755)
        with mock.patch.dict(os.environ, QCONV_PROGRAM=script):
            with self.assertRaisesRegex(qconv.ProgramError, "does not run on this machine .*; build qconv here"):
                qconv.hardware()
            self.module(1, "--version", has=["qconv: '", "does not run on this machine"])
        with mock.patch.dict(os.environ), self.assertRaisesRegex(qconv.ProgramError, "bin/qconv' is missing; install"):
            del os.environ["QCONV_PROGRAM"]
            qconv.hardware()

    def test_a_program_that_dies(self):
        script = self.write("script", "#!/bin/sh\necho 'qconv: last words' >&2\nkill -9 $$\n")
        os.chmod(script, 0o755)
        with mock.patch.dict(os.environ, QCONV_PROGRAM=script):
            with self.assertRaisesRegex(qconv.RunError, "^the program was ended by signal 9: last words$"):
                qconv.hardware()
        self.write("script", "#!/bin/sh\nexit 0\n")
        with mock.patch.dict(os.environ, QCONV_PROGRAM=script):
            with self.assertRaisesRegex(qconv.ProgramError, "printed nothing"):
                qconv.hardware()

    def module(self, code, *args, has=()):
        r = subprocess.run([sys.executable, "-B", "-m", "qconv", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           env=dict(os.environ, PYTHONPATH=PACKAGE), timeout=60)
        self.assertEqual(r.returncode, code, r.stderr)
        for text in has:
            self.assertIn(text, r.stderr.decode())
        return r.stdout.decode()

    def test_module_is_the_program(self):
        self.assertEqual(self.module(0, "--version"), self.ok("--version"))
        self.assertEqual(qconv.version(), self.ok("--version").split()[1])
        self.module(2, "convert", "--no-such", has=["unknown option '--no-such'"])
        self.damaged()
        self.module(4, "verify", "out")


class Page(Case):
    def test_example(self):
        """The first block of Python on docs/python.md, with the bundled model."""
        with open(os.path.join(ROOT, "docs", "python.md"), encoding="utf-8") as f:
            block = f.read().split("\n```python\n", 1)[1].split("\n```\n", 1)[0]
        os.symlink(MODEL, "model")
        text = StringIO()
        with mock.patch.dict(sys.modules, {"tqdm.auto": None}), redirect_stdout(text), redirect_stderr(StringIO()):
            exec(compile(block, "docs/python.md", "exec"), {})
        lines = text.getvalue().splitlines()
        self.assertRegex(lines[0], r"^True \d+ \[\d+, \d+\]$")
        self.assertRegex(lines[1], r"^5\.1\d+ \(4, 5\)$")
        self.assertEqual(len(lines), 5)


class Example(Case):
    def run_example(self, *args):
        r = subprocess.run([sys.executable, "-B", os.path.join(ROOT, "docs", "examples", "convert_model.py"), *args],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=PACKAGE),
                           timeout=120, text=True)
        return r.returncode, r.stdout, r.stderr

    def test_convert_model(self):
        code, printed, said = self.run_example(MODEL, "out", "1GB+1GB")
        self.assertEqual(code, 0, said)
        self.assertRegex(printed, r"^cuda:0 +0\.00 GB of weights in \d layers\ncuda:1 [^\n]+\n16\.\d+ bits a weight, ")
        code, _, said = self.run_example(MODEL, "out", "1MB")
        self.assertEqual(code, 1)
        self.assertIn("it does not fit: cuda:0 lacks", said)
        code, _, said = self.run_example(MODEL, "out", "much")
        self.assertEqual(code, 1)
        self.assertRegex(said, r"^UsageError: --vram: ")


class Progressing(Case):
    def test_callback(self):
        self.large_model()
        seen = []
        qconv.convert("m", "o", to="nf4", threads=1, progress=seen.append)
        self.assertEqual({(p.stage, p.total, p.unit) for p in seen}, {("converting", 185870336, "bytes")})
        self.assertEqual(sorted(p.done for p in seen), [p.done for p in seen])
        self.assertEqual(seen[-1].done, seen[-1].total)

    def test_exception_in_a_callback_ends_in_order(self):
        self.large_model()

        def refuse(p):
            if p.done > p.total // 2:
                raise RuntimeError("enough")
        with mock.patch.dict(os.environ, QCONV_PROGRAM=self.slow_program()), \
                self.assertRaisesRegex(RuntimeError, "^enough$"):
            qconv.convert("m", "o", to="nf4", threads=1, progress=refuse)
        self.assertEqual(os.listdir("o"), [".qconv-partial"])
        self.assertGreater(qconv.convert("m", "o", to="nf4", threads=1).continued["tensors_kept"], 0)
        qconv.verify("o")

    def bars(self):
        bars = []

        class Bar:
            def __init__(self, **more):
                self.n, self.closed, self.more = 0, False, more
                bars.append(self)

            def update(self, more):
                self.n += more

            def close(self):
                self.closed = True
        return bars, types.SimpleNamespace(tqdm=Bar)

    def test_tqdm(self):
        bars, fake = self.bars()
        with mock.patch.dict(sys.modules, {"tqdm": fake, "tqdm.auto": fake}):
            qconv.convert(MODEL, "o", to="nf4", progress=True)
        self.assertEqual([(b.more["desc"], b.n, b.total, b.closed) for b in bars],
                         [("converting", 3014016, 3014016, True)])

    def test_lines_without_tqdm(self):
        text = StringIO()
        with mock.patch.dict(sys.modules, {"tqdm.auto": None}), redirect_stderr(text):
            qconv.convert(MODEL, "o", to="nf4", progress=True)
        self.assertRegex(text.getvalue(), r"(?m)^qconv: converting 100%, 0:00 left\n\Z")


class Interrupted(Case):
    def test_ctrl_c(self):
        """As a terminal sends it, to the whole group of processes: the program ends in order, and the same
        call continues."""
        self.large_model()
        script = self.write("work.py", "import qconv\n"
                            "try:\n"
                            "    show = lambda p: print(p.done, flush=True)\n"
                            "    qconv.convert('m', 'o', to='nf4', threads=1, progress=show)\n"
                            "except KeyboardInterrupt as stopped:\n"
                            "    print('stopped:', stopped)\n")
        p = subprocess.Popen([sys.executable, "-B", script], stdout=subprocess.PIPE, start_new_session=True, text=True,
                             env=dict(INTERRUPTED_ENV, PYTHONPATH=PACKAGE, QCONV_PROGRAM=self.slow_program()))
        with p.stdout:
            while int(p.stdout.readline()) < 185870336 // 3:
                pass
            os.killpg(p.pid, signal.SIGINT)
            *_, last = p.stdout.read().splitlines()
        self.assertEqual(p.wait(timeout=30), 0)
        self.assertRegex(last, r"^stopped: interrupted; \d+ of \d+ tensors are done, and the same command continues")
        self.assertGreater(qconv.convert("m", "o", to="nf4", threads=1).continued["tensors_kept"], 0)
        qconv.verify("o")

    def test_interrupted_by_somebody_else(self):
        script = self.write("script", "#!/bin/sh\necho 'qconv: interrupted' >&2\nexit 130\n")
        os.chmod(script, 0o755)
        with mock.patch.dict(os.environ, QCONV_PROGRAM=script):
            with self.assertRaisesRegex(qconv.StoppedError, "^interrupted$"):
                qconv.hardware()

    def test_ctrl_c_after_its_last_word(self):
        """The program has closed standard error and has not ended yet."""
        script = self.write("script", "#!/bin/sh\nexec 2>&-\ntrap 'exit 130' TERM\nwhile :; do sleep 0.05; done\n")
        os.chmod(script, 0o755)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with mock.patch.dict(os.environ, QCONV_PROGRAM=script), self.assertRaises(KeyboardInterrupt):
            qconv.hardware()
        timer.join()

    def test_nothing_is_left_running(self):
        """Also of a program that takes its time to end."""
        line = json.dumps({"progress": "working", "done": 1, "total": None, "unit": "bytes"})
        script = self.write("script", "#!/bin/sh\ntrap 'sleep 0.3; echo ended >ended; exit 130' TERM\n"
                            "echo '" + line + "' >&2\n"
                            "while :; do sleep 0.05; done\n")
        os.chmod(script, 0o755)

        def refuse(p):
            raise KeyboardInterrupt
        started = time.monotonic()
        with mock.patch.dict(os.environ, QCONV_PROGRAM=script), self.assertRaises(KeyboardInterrupt):
            qconv.verify("o", progress=refuse)
        self.assertTrue(os.path.exists("ended"))
        self.assertGreater(time.monotonic() - started, 0.3)


if __name__ == "__main__":
    unittest.main()
