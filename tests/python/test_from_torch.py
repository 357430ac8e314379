#!/usr/bin/env python3
"""`qconv from-torch` as far as it goes without torch; what it writes is in tests/interop/test_interop_from_torch.py."""
import json
import os
import subprocess
import sys
import types
import unittest
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cli"))
from qconv_case import QconvCase, ROOT  # noqa: E402

PACKAGE = os.path.join(ROOT, "python")
sys.path.insert(0, PACKAGE)
import qconv  # noqa: E402
from qconv import _command, _folders  # noqa: E402


class FakeTorch:
    """What from_torch asks of torch and safetensors before it reads."""

    def __enter__(self):
        fakes = {n: types.ModuleType(n) for n in ("torch", "safetensors", "safetensors.torch")}
        self.patch = mock.patch.dict(sys.modules, fakes)
        self.patch.start()

    def __exit__(self, *error):
        self.patch.stop()


class FromTorch(QconvCase):
    def setUp(self):
        super().setUp()
        before = os.getcwd()
        os.chdir(self.dir)
        self.addCleanup(os.chdir, before)

    def refuses(self, kind, words, *places):
        with self.assertRaises(kind) as raised, FakeTorch():
            qconv.from_torch(*places)
        self.assertIn(words, str(raised.exception))

    def test_packages_that_are_missing(self):
        os.mkdir("m")
        with mock.patch.dict(sys.modules, {"torch": None}), self.assertRaisesRegex(
                qconv.RunError, r"^from-torch needs torch and safetensors \(.+\); 'pip install torch safetensors' has"):
            qconv.from_torch("m", "o")
        self.assertFalse(os.path.exists("o"))

    def test_command_line(self):
        def run(*arguments):
            return subprocess.run([sys.executable, "-m", "qconv", *arguments], env={**os.environ, "PYTHONPATH": PACKAGE},
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.dir)
        for arguments, words in [([], "the following arguments are required: MODEL, OUT"), (["m"], "OUT"),
                                 (["m", "o", "--forec"], "--forec"), (["m", "o", "p"], "p")]:
            r = run("from-torch", *arguments)
            self.assertEqual((r.returncode, r.stdout, r.stderr.count("\n")), (2, "", 1), r.stderr)
            self.assertIn(words, r.stderr)
        for arguments in (["from-torch", "--help"], ["help", "from-torch"]):
            self.assertIn("MODEL OUT", run(*arguments).stdout)

    def test_what_is_no_folder_of_torch(self):
        self.refuses(qconv.InputError, "m does not exist", "m", "o")
        os.mkdir("m")
        self.refuses(qconv.InputError, "m has no weights of torch.save (.bin, .pt, .pth or .ckpt)", "m", "o")
        for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
            self.write("m/" + name, "x")
        self.refuses(qconv.InputError, "m has no weights of torch.save", "m", "o")
        self.write("m/a.bin", "x")
        self.write("m/b.pth", "x")
        self.refuses(qconv.InputError, "m has 2 files of torch.save, but no index that says what belongs together: "
                     "'a.bin', 'b.pth'; give one of them", "m", "o")
        self.write("m/model.safetensors", "x")
        self.refuses(qconv.InputError, "m has safetensors already, which qconv reads: 'model.safetensors'", "m", "o")
        self.assertEqual(os.listdir(), ["m"])

    def test_places(self):
        os.mkdir("m")
        self.write("m/pytorch_model.bin", "x")
        self.write("file", "x")
        os.mkdir("o")
        self.write("o/x", "x")
        self.refuses(qconv.UsageError, "o is not empty; choose another OUT", "m", "o")
        self.refuses(qconv.UsageError, "file is not a folder; choose another OUT", "m", "file")
        for inside in ("m", "m/o", "./m/../m/o"):
            self.refuses(qconv.UsageError, "is inside its source m", "m", inside)
        os.symlink("../file", "m/notes.txt")
        self.refuses(qconv.InputError, "'notes.txt' is a link that leads out of the folder", "m", "p")
        self.assertEqual(sorted(os.listdir()), ["file", "m", "o"])

    def test_the_cache_of_the_hub(self):
        """Its snapshots are links to blobs beside them."""
        os.makedirs("hub/models--x/snapshots/1")
        os.makedirs("hub/models--x/blobs")
        self.write("hub/models--x/blobs/abc", "text")
        os.symlink("../../blobs/abc", "hub/models--x/snapshots/1/README.md")
        _folders.check_links("hub/models--x/snapshots/1", _folders.files_below("hub/models--x/snapshots/1"))
        self.write("hub/secret", "text")
        os.symlink("../../../secret", "hub/models--x/snapshots/1/x")
        with self.assertRaises(qconv.InputError):
            _folders.check_links("hub/models--x/snapshots/1", ["x"])

    def test_staged(self):
        """What is staged appears at the end, or leaves nothing."""
        for error in (KeyboardInterrupt, ValueError):
            with self.assertRaises(error), _folders.staged("a/b") as folder:
                with open(os.path.join(folder, "x"), "w", encoding="ascii"):
                    pass
                raise error
            self.assertEqual(os.listdir("a"), [])
        os.mkdir("o")
        for out in ("o", "p"):
            with _folders.staged(out) as folder:
                with open(os.path.join(folder, "x"), "w", encoding="ascii"):
                    pass
                self.assertFalse(os.path.exists(os.path.join(out, "x")))
            self.assertEqual(os.listdir(out), ["x"])
        self.assertEqual(sorted(os.listdir()), ["a", "o", "p"])

    def test_answer(self):
        answer = {"model": "m", "out": "o", "files": [{"name": "model.safetensors", "tensors": 1, "bytes": 8}],
                  "tensors": 1, "bytes": 8, "copied": ["config.json"],
                  "shared": [{"name": "b", "same_as": "a", "written": True}],
                  "left_out": [{"file": "pytorch_model.bin", "entry": "epoch"}]}
        done = qconv.TorchFiles.from_json(answer)
        module = sys.modules["qconv.from_torch"]
        for arguments, words in [(["m", "o"], "shared (1)\n  name  same_as  written\n  b     a        True\n"),
                                 (["m", "o", "--json"], '"entry": "epoch"')]:
            said = StringIO()
            with mock.patch.object(module, "from_torch", return_value=done), redirect_stdout(said):
                self.assertEqual(_command.run(["from-torch", *arguments]), 0)
            self.assertIn(words, said.getvalue())
        self.assertEqual(json.loads(said.getvalue()), answer)


if __name__ == "__main__":
    unittest.main()
