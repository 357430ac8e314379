"""A conversion that dies goes on with the same command. Some moments of everything; many are in
slow_resume.py."""
import os
import shutil
import signal
import unittest

from fault_case import SourceReads
from output_case import STAGING, tree_digest
from resume_case import FORMS, ResumeCase


class Resume(ResumeCase):
    def test_killed(self):
        for i, form in enumerate(FORMS):
            self.killed_at(form, self.moments(form, 4, i), i)

    def test_power(self):
        for i, form in enumerate(FORMS):
            self.powerless(form, self.moments(form, 3, 10 + i), i)

    def test_damaged(self):
        for i, form in enumerate(FORMS):
            self.damaged(form, self.moments(form, 3, 60 + i), i)

    def test_headers_alone(self):
        """The first record is of a header; its bytes are lost, and its record is not."""
        for form in ("int8-rows", "vram-plain"):
            for moment in range(8, 20):
                r = self.dying(form, "before", signal="%d:9" % moment)
                self.assertEqual(r.returncode, -signal.SIGKILL, r.stderr)
                staged = self.path("o", STAGING)
                for name in os.listdir(staged):
                    if name.startswith("model-"):
                        size = os.path.getsize(os.path.join(staged, name))
                        with open(os.path.join(staged, name), "wb") as f:
                            f.truncate(size)
                self.go_on(form, (form, moment), None)

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
                            ("syncloss", "EIO"), ("range", "EIO"), ("rename", "EIO"), ("open", "EIO"),
                            ("make", "EIO"), ("resize", "EIO")]:
            count = calls["sync" if kind == "syncloss" else kind]
            numbers = sorted({1, 2, count // 3, count // 2, count - 1, count} - {0})
            failed = self.failing("vram", kind, numbers, error)
            self.assertGreater(failed, 0 if count else -1, kind)
        self.assertGreater(self.failing("nf4", "read", [1, 5, 20, 40], dirs=self.source), 2)

    def test_dies_again_and_again(self):
        """Each run comes a little further, until one comes to the end."""
        for form in ("nf4", "int8-rows-plain"):
            self.wanted(form)
            for runs in range(1, 100):
                r = self.dying(form, "before", signal="45:9")
                if r.returncode == 0:
                    break
                self.died()
            self.assertEqual(r.returncode, 0, form)
            self.assertGreater(runs, 2)
            self.assertTrue(self.finished(form, runs))
            self.forget("o")


class Several(ResumeCase):
    """One weight of several frames among the others."""

    BIG = True

    def test_killed(self):
        for i, form in enumerate(["nf4", "nf4-plain", "int8-rows", "int8-blocks-plain"]):
            self.killed_at(form, self.moments(form, 3, 50 + i), i)


class Changed(ResumeCase):
    """What differs from the run that died is refused by name, unless nothing in it is old."""

    def left(self, *args):
        """A run that died after six tenths of its changes."""
        changes = self.wanted("nf4")[1]["change"]
        r = self.faulty("-q", *args, signal="%d:9" % (changes * 0.6))
        self.assertEqual(r.returncode, -signal.SIGKILL, r.stderr)

    def test_source(self):
        """Another byte in a weight that is done: refused by file and tensor. One in a weight that
        is not: taken, and what is made is that of the source as it is now."""
        want = self.wanted("nf4")[0]
        shutil.copytree(self.source, self.path("copy"))
        words = [*FORMS["nf4"], "copy", "o"]
        ranges = SourceReads(self.path("copy")).ranges
        self.left(*words)
        files = {os.stat(self.path("copy", n)).st_ino: n for n in os.listdir(self.path("copy"))}
        refused = taken = 0
        for inode, tensors in ranges.items():
            for begin, end, name in tensors:
                file = self.path("copy", files[inode])
                kept = self.path("kept")
                shutil.copytree(self.path("o"), kept)
                self.change_byte(file, (begin + end) // 2)
                r = self.run_qconv("-q", *words)
                if r.returncode == 0:
                    taken += 1
                    self.ok("-q", *FORMS["nf4"], "copy", "p")
                    self.assert_same("o", "p")
                    shutil.rmtree(self.path("o"))
                    shutil.rmtree(self.path("p"))
                else:
                    refused += 1
                    self.assertEqual(r.returncode, 3, r.stderr)
                    for text in (files[inode], name, "--restart"):
                        self.assertIn(text.encode(), r.stderr)
                    shutil.rmtree(self.path("o"))
                os.rename(kept, self.path("o"))
                self.change_byte(file, (begin + end) // 2)
        self.assertGreater(refused, 3)
        self.assertGreater(taken, 0)
        self.ok("-q", *words)
        self.assertEqual(tree_digest(self.path("o")), want)


if __name__ == "__main__":
    unittest.main()
