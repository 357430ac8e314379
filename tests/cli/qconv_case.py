"""Base of the command-line tests: runs the program that $QCONV names in a folder of its own."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.dirname(HERE))
QCONV = os.environ.get("QCONV", os.path.join(ROOT, "build", "qconv"))
# With a sanitizer memory and time are not the program's own.
with open(QCONV, "rb") as _program:
    _bytes = _program.read()
    SANITIZED = b"__asan_init" in _bytes or b"__tsan_init" in _bytes
    del _bytes
# Who is interrupted and cannot wait any longer leaves threads behind, some of which ended: to the
# thread sanitizer a leak, and no fault here.
INTERRUPTED_ENV = dict(os.environ, TSAN_OPTIONS=os.environ.get("TSAN_OPTIONS", "") +
                       " report_thread_leaks=0")


class QconvCase(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="qconv-cli-")
        self.addCleanup(shutil.rmtree, self.dir)

    def path(self, *names):
        return os.path.join(self.dir, *names)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as f:
            f.write(text)
        return self.path(name)

    def json_of(self, *names):
        """What a file has, as JSON."""
        with open(self.path(*names), encoding="utf-8") as f:
            return json.load(f)

    def quantization(self, out):
        """The quantization_config of an output, or None."""
        return self.json_of(out, "config.json").get("quantization_config")

    def change_byte(self, path, at, bits=1):
        """Turns bits of one byte around; `at` may count from the end, as -1 does."""
        with open(path, "r+b") as f:
            f.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
            byte = f.read(1)[0]
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte ^ bits]))

    # Of a class whose numbers are those of one method: --scale where a conversion does not say.
    scale = None

    # Of a class that converts into one OUT over and over: it says --force each time.
    replaces = False

    def with_force(self, args):
        words = " ".join(args).replace("--to=", "--to ").split()
        if not self.replaces or "--to" not in words or {"--force", "--", "plan"} & set(words):
            return list(args)
        return [*args, "--force"]

    # Of a class whose models are a few tensors: it says --incomplete wherever a model is taken.
    partial = False

    def with_incomplete(self, args):
        words = " ".join(args).replace("--to=", "--to ").split()
        if not self.partial or not {"--to", "plan"} & set(words) or {"--incomplete", "--"} & set(words):
            return list(args)
        return [*args, "--incomplete"]

    def with_scale(self, args):
        words = " ".join(args).replace("--to=", "--to ").split()
        to = words[words.index("--to") + 1:][:1] if "--to" in words else []
        if not self.scale or "--scale" in words or to not in (["nf4"], ["int8"], ["auto"]) or \
                args[0] == "plan":
            return list(args)
        return [*args, "--scale", self.scale]

    def run_qconv(self, *args, env=None, stdout=subprocess.PIPE, timeout=60):
        full = dict(os.environ)
        full.pop("NO_COLOR", None)
        full.update(env or {})
        return subprocess.run([QCONV] + self.with_force(self.with_scale(self.with_incomplete(args))), stdout=stdout,
                              stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=self.dir,
                              env=full, timeout=timeout)

    def ok(self, *args, **more):
        """Exit 0; returns standard output as text."""
        r = self.run_qconv(*args, **more)
        self.assertEqual(r.returncode, 0, (args, r.stderr))
        return r.stdout.decode()

    def warned(self, *args, **more):
        """Exit 0; returns standard error as text."""
        r = self.run_qconv(*args, **more)
        self.assertEqual(r.returncode, 0, (args, r.stderr))
        return r.stderr.decode()

    def interrupt_at(self, words, argv, env=None):
        """Starts a program and interrupts it after a line of standard error that has these words."""
        p = subprocess.Popen(argv, cwd=self.dir, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                             env={**INTERRUPTED_ENV, **(env or {})})
        seen = False
        for line in p.stderr:
            seen = words in line
            if seen:
                p.send_signal(signal.SIGINT)
                break
        p.stderr.read()
        p.stderr.close()
        self.assertEqual((seen, p.wait(120) != 0), (True, True))

    def fails(self, code, *args, has=(), **more):
        """Exit `code`, nothing on stdout, one line on stderr that holds every text in `has`. The
        warning that only qconv reads a form comes before the work, and may stand before it."""
        r = self.run_qconv(*args, **more)
        line = re.sub(r"\Aqconv: warning: only qconv reads this form [^\n]*\n", "",
                      r.stderr.decode())
        self.assertEqual(r.returncode, code, (args, line))
        self.assertEqual(r.stdout, b"", args)
        self.assertTrue(line.startswith("qconv: "), (args, line))
        self.assertTrue(line.endswith("\n"), (args, line))
        self.assertEqual(line.count("\n"), 1, (args, line))
        for text in [has] if isinstance(has, str) else has:
            self.assertIn(text, line, args)
        return line

    def usage(self, *args, has=(), command="convert", **more):
        """A usage error: exit 2 and the way to --help at the end."""
        line = self.fails(2, *args, has=has, **more)
        hint = "try 'qconv %s--help'" % (command + " " if command else "")
        self.assertTrue(line.endswith("; " + hint + "\n"), (args, line))
        return line
