"""A conversion that dies goes on with the same command. Some moments of everything; many are in
slow_resume.py."""
import os
import shutil
import signal
import unittest

from resume_case import FORMS, ResumeCase


class Resume(ResumeCase):
    def test_killed(self):
        for i, form in enumerate(FORMS):
            self.killed_at(form, self.moments(form, 4, i), i)

    def test_power(self):
        for i, form in enumerate(FORMS):
            self.powerless(form, self.moments(form, 3, 10 + i), i)

    def test_full(self):
        for i, form in enumerate(FORMS):
            self.full(form, self.rooms(form, 2, 20 + i))

    def test_signals(self):
        stopped = 0
        for i, form in enumerate(["nf4", "int8-blocks-plain", "vram"]):
            stopped += self.signalled(form, self.moments(form, 4, 30 + i),
                                      [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        self.assertGreater(stopped, 6)

    def test_stops_in_time(self):
        """On a disk of 20 MB/s, too, where a frame takes its time."""
        self.assertLess(self.stops("int8-rows-plain", [0.1, 0.5], 20 << 20), 2)

    def test_failing_calls(self):
        """A few of each kind, on a small model."""
        calls = self.wanted("vram")[1]
        for kind, error in [("write", "EIO"), ("write", "ENOSPC"), ("sync", "EIO"),
                            ("syncloss", "EIO"), ("rename", "EIO"), ("open", "EIO"),
                            ("make", "EIO"), ("resize", "EIO")]:
            count = calls["sync" if kind == "syncloss" else kind]
            numbers = sorted({1, 2, count // 3, count // 2, count - 1, count} - {0})
            self.failing("vram", kind, numbers, error)
        self.assertGreater(self.failing("nf4", "read", [1, 5, 20, 40], dirs=self.source), 2)

    def test_dies_again_and_again(self):
        """Each run comes a little further, until one comes to the end."""
        for form in ("nf4", "int8-rows-plain"):
            self.wanted(form)
            for runs in range(1, 100):
                r = self.dying(form, "before", signal="25:9")
                if r.returncode == 0:
                    break
                self.died()
            self.assertEqual(r.returncode, 0, form)
            self.assertGreater(runs, 3)
            self.assertEqual(self.counts()["write"] > 0, True)
            self.forget("o")


class Several(ResumeCase):
    """One weight of several frames among the others."""

    BIG = True

    def test_killed(self):
        for i, form in enumerate(["nf4", "nf4-plain", "int8-rows", "int8-blocks-plain"]):
            self.killed_at(form, self.moments(form, 3, 50 + i), i)


class Changed(ResumeCase):
    """What differs from the run that died is refused by name, unless nothing in it is old."""

    def left(self, form="nf4", source=None):
        self.wanted(form)
        if source:
            FORMS["copy"] = FORMS[form]
        r = self.dying(form, "before", signal="60:9")
        self.assertEqual(r.returncode, -signal.SIGKILL)

    def test_options(self):
        self.left()
        m = self.source
        for words, name in [(["--to", "int8", "--max-shard-size", "4MB"], "option.to"),
                            (["--to", "nf4", "--max-shard-size", "5MB"], "option"),
                            (["--to", "nf4", "--max-shard-size", "4MB", "--compress", "none"],
                             "option"),
                            (["--to", "nf4", "--max-shard-size", "4MB", "--block-size", "128"],
                             "option")]:
            self.fails(2, *words, m, "o", has=[name, "--restart"])
        self.go_on("nf4", "after refusals")
        self.left()
        self.ok("-q", "--restart", *FORMS["int8-rows"], m, "o")
        self.ok("-q", *FORMS["int8-rows"], m, "p")
        self.assert_same("o", "p")

    def test_source(self):
        """Another byte in a weight that is done: refused. A copy of the same: taken."""
        self.wanted("nf4")
        want = self.wanted("nf4")[0]
        shutil.copytree(self.source, self.path("copy"))
        words = [*FORMS["nf4"], "copy", "o"]
        r = self.faulty("-q", *words, dirs=self.path(), signal="60:9")
        self.assertEqual(r.returncode, -signal.SIGKILL)
        first = self.path("copy", "model-00001-of-00003.safetensors")
        with open(first, "r+b") as f:
            f.seek(-1, os.SEEK_END)
            byte = f.read(1)
            f.seek(-1, os.SEEK_END)
            f.write(bytes([byte[0] ^ 1]))
        line = self.fails(3, *words, has=["model-00001-of-00003.safetensors", "--restart"])
        self.assertIn("--restart", line)
        with open(first, "r+b") as f:
            f.seek(-1, os.SEEK_END)
            f.write(byte)
        self.ok("-q", *words)
        self.assertEqual({n: d for n, d in self.tree_digest("o").items()}, want)

    def tree_digest(self, out):
        from output_case import tree_digest
        return tree_digest(self.path(out))


if __name__ == "__main__":
    unittest.main()
