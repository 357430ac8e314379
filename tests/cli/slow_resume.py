"""test_resume.py's long form ($QCONV_RESULTS names a file for its figures): 200 deaths at random moments, the power gone at 50, full at 50 byte
counts, and every call on a file failing in turn, in every form; what docs/reliability.md says."""
import random
import signal
import time
import unittest

from fault_case import SourceReads
from resume_case import FORMS, ResumeCase

KILLS, POWER_CUTS, FULL_DISKS = 200, 50, 50


def shares(total):
    """That many in all, dealt out over the forms."""
    names = list(FORMS)
    return [(f, total // len(names) + (i < total % len(names)), i) for i, f in enumerate(names)]


class Killed(ResumeCase):
    BIG = True

    def test_at_changes_of_the_disk(self):
        for form, count, i in shares(KILLS):
            self.killed_at(form, self.moments(form, count, 100 + i), i)
        self.assertGreaterEqual(self.deaths, KILLS * 9 // 10)

    def test_by_the_clock(self):
        rng = random.Random(7)
        for form, count, _ in shares(KILLS):
            self.killed_while(form, [rng.random() for _ in range(count)])


class Power(ResumeCase):
    BIG = True

    def test_power(self):
        for form, count, i in shares(POWER_CUTS):
            self.powerless(form, self.moments(form, count, 200 + i), 200 + i)
        self.assertGreaterEqual(self.deaths, POWER_CUTS)

    def test_every_change(self):
        """Of a small model each in turn."""
        for form in ("vram", "vram-plain"):
            self.powerless(form, self.moments(form, 1000, 0), 300)


class Damaged(ResumeCase):
    def test_damaged(self):
        for form, count, i in shares(KILLS):
            self.damaged(form, self.moments(form, count, 600 + i), 600 + i)


class Lag(ResumeCase):
    """What a power loss costs is what was not synced yet: about a second's work."""

    def test_slow_disk(self):
        form, rng = "int8-rows-plain", random.Random(5)
        changes = self.wanted(form)[1]["change"]
        sources = SourceReads(self.source)
        for _ in range(20):
            at = rng.randrange(20, changes - 20)
            begin = time.monotonic()
            self.dying(form, "before", power="%d:%d" % (at, rng.randrange(1 << 30)), slow=4 << 20)
            seconds = time.monotonic() - begin
            self.died()
            before = sources.tensors(self.path("before"))
            r = self.counted(*self.command(form), **self.reads(form, "now"))
            self.assertEqual(r.returncode, 0, r.stderr)
            twice = len(before & sources.tensors(self.path("now")))
            print("power lost after %.1f s and %d tensors: %d made twice" %
                  (seconds, len(before), twice), flush=True)
            self.forget("o")


class Full(ResumeCase):
    BIG = True

    def test_full(self):
        for form, count, i in shares(FULL_DISKS):
            self.full(form, self.rooms(form, count, 400 + i))
        self.assertGreaterEqual(self.deaths, FULL_DISKS * 9 // 10)


class EveryCall(ResumeCase):
    """Each call of each kind fails, alone and with all that come after it."""

    def each(self, form, **where):
        calls = self.wanted(form)[1]
        if where:
            r = self.dying(form, "before", **where)
            self.assertEqual(r.returncode, 0)
            calls = self.counts()
            self.forget("o")
        for kind, error in [("write", "EIO"), ("write", "ENOSPC"), ("read", "EIO"), ("sync", "EIO"),
                            ("syncloss", "EIO"), ("range", "EIO"), ("rename", "EIO"), ("make", "EACCES"),
                            ("open", "EIO"), ("resize", "EIO")]:
            count = calls["sync" if kind == "syncloss" else kind]
            failed = self.failing(form, kind, range(1, count + 1), error, **where)
            self.failing(form, kind, range(1, count + 1, 7), error, on=":on", **where)
            print("%s, %s: %d of %d calls that failed ended the run" % (form, kind, failed, count),
                  flush=True)

    def test_output(self):
        for form in ("vram", "int8-blocks-plain"):
            self.each(form)

    def test_source(self):
        self.each("nf4", dirs=self.source)


class Signals(ResumeCase):
    BIG = True

    def test_signals(self):
        for form, _, i in shares(1):
            self.signalled(form, self.moments(form, 8, 500 + i),
                           [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


if __name__ == "__main__":
    unittest.main()
