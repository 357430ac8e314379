"""What test_resume.py does at some moments and slow_resume.py at many: a conversion dies, and the
same command goes on, to the same bytes, making again what was in hand and nothing else."""
import json
import os
import random
import shutil
import signal
import subprocess
import time

from fault_case import FORMS, FaultCase, SourceReads
from output_case import STAGING, tree_digest
from qconv_case import QCONV

THREADS = 2
MAGIC_BYTES = 8  # of a journal
# Where slow_resume.py leaves its figures, a line of JSON for each class.
RESULTS = os.environ.get("QCONV_RESULTS", "")


def wait_for_handler(p):
    """Until the process listens to SIGTERM, or has ended."""
    while p.poll() is None:
        with open("/proc/%d/status" % p.pid, encoding="ascii") as f:
            caught = [int(line.split()[1], 16) for line in f if line.startswith("SigCgt:")]
        if not caught or caught[0] & 1 << (signal.SIGTERM - 1):
            return


class ResumeCase(FaultCase):
    # Dead runs, and of them those that left something to go on with; most tensors made twice.
    deaths = kept_runs = most_redone = 0

    @classmethod
    def tearDownClass(cls):
        print("%s: %d dead runs, %d of them continued, at most %d tensors made twice" %
              (cls.__name__, cls.deaths, cls.kept_runs, cls.most_redone), flush=True)
        if RESULTS and cls.deaths:
            with open(RESULTS, "a", encoding="ascii") as f:
                f.write(json.dumps({"test": cls.__name__, "dead_runs": cls.deaths,
                                    "continued": cls.kept_runs,
                                    "most_tensors_made_twice": cls.most_redone,
                                    "threads": THREADS}) + "\n")

    def died(self, count=1):
        type(self).deaths += count

    def reads(self, form, log):
        return {"reads": self.path(log), "source": self.model_of(form)}

    def dying(self, form, log, threads=THREADS, **settings):
        return self.faulty("-q", *self.command(form, threads), **self.reads(form, log), **settings)

    def go_on(self, form, note, redone=THREADS, threads=THREADS):
        """The same command goes through: bytes as wanted, numbers that add up. redone: tensors of
        the source that may be read both before and now; None: any."""
        began = self.path("now")
        r = self.faulty("-q", "--json", *self.command(form, threads), **self.reads(form, "now"))
        self.assertEqual((r.returncode, r.stderr), (0, b""), note)
        self.assertEqual(tree_digest(self.path("o")), self.wanted(form)[0], note)
        sources = SourceReads(self.model_of(form))
        now = sources.tensors(began)
        twice = now & sources.tensors(self.path("before"))
        if redone is not None:
            self.assertLessEqual(len(twice), redone, (note, sorted(twice)))
            type(self).most_redone = max(self.most_redone, len(twice))
        type(self).kept_runs += len(now) < len(sources.names)
        self.forget("o")
        return r

    def is_finished(self):
        """A dead run had everything in place, and nothing is left to go on with."""
        staged = self.path("o", STAGING)
        return os.path.exists(self.path("o", "qconv.json")) and not (
            os.path.isdir(staged) and any(n.startswith("journal") for n in os.listdir(staged)))

    def finished(self, form, note):
        """The dead run, or one that the fault did not reach, made all of it."""
        if self.is_finished():
            got = {n: d for n, d in tree_digest(self.path("o")).items()
                   if not n.startswith(STAGING)}
            self.assertEqual(got, self.wanted(form)[0], note)
            self.forget("o")
            return True
        return False

    def forget(self, out):
        shutil.rmtree(self.path(out), ignore_errors=True)
        for name in ("before", "now"):
            if os.path.exists(self.path(name)):
                os.unlink(self.path(name))

    def killed_at(self, form, moments, seed, **more):
        """SIGKILL after so many changes of the disk; every fourth time the next run, too."""
        rng = random.Random(seed)
        for moment in moments:
            note = [form, moment]
            again = rng.random() < 0.25
            while True:
                r = self.dying(form, "before", signal="%d:9" % note[-1], **more)
                self.assertIn(r.returncode, (0, -signal.SIGKILL), (note, r.stderr))
                if r.returncode == 0:
                    break
                self.died()
                self.assert_no_whole_output(note)
                if not again or self.is_finished():
                    break  # nothing to go on with: the next run makes all of it
                again = False
                note.append(rng.randrange(1, self.wanted(form)[1]["change"]))
            if not self.finished(form, note):
                self.go_on(form, note, THREADS * (len(note) - 1))

    def killed_while(self, form, moments):
        """SIGKILL by the clock: moments are parts of an undisturbed run's time."""
        self.wanted(form)
        begin = time.monotonic()
        self.assertEqual(self.dying(form, "before").returncode, 0)
        whole = time.monotonic() - begin
        self.forget("o")
        for moment in moments:
            p = subprocess.Popen([QCONV, "-q", *self.command(form, THREADS)], cwd=self.dir,
                                 stdin=subprocess.DEVNULL)
            time.sleep(moment * whole)
            p.kill()
            self.died(p.wait(timeout=60) == -signal.SIGKILL)
            self.assert_no_whole_output((form, moment))
            if not self.finished(form, moment):
                self.go_on(form, (form, moment), None)

    def powerless(self, form, moments, seed):
        """The power goes; at times in the run that goes on, too. How many tensors are made twice
        is up to what was synced."""
        rng = random.Random(seed)
        for moment in moments:
            note = [form]
            for at in [moment] + [m for m in [rng.choice(moments)] if rng.random() < 0.3]:
                note.append("%d:%d" % (at, rng.randrange(1 << 30)))
                r = self.dying(form, "before", power=note[-1],
                               hurry=rng.choice((0, 900, 990, 997)))
                self.assertIn(r.returncode, (0, -signal.SIGKILL), (note, r.stderr))
                if r.returncode == 0:
                    break
                self.died()
                self.assert_no_whole_output(note)
            if not self.finished(form, note):
                self.go_on(form, note, None)

    def damage(self, path, rng):
        """Something that a disk does to a file."""
        size = os.path.getsize(path)
        how = rng.choice(["gone", "empty", "cut", "zeros", "bit", "longer"])
        if how == "gone" or not size:
            os.unlink(path)
            return "gone"
        at, end = sorted((rng.randrange(size), rng.randrange(size) + 1))
        with open(path, "r+b") as f:
            if how == "longer":
                f.seek(0, os.SEEK_END)
                f.write(bytes(rng.randrange(1, 1000)))
            elif how in ("empty", "cut"):
                f.truncate(0 if how == "empty" else at)
            elif how == "zeros":
                at = rng.choice((0, at))
                f.seek(at)
                f.write(bytes(end - at))
            else:
                f.seek(at)
                byte = f.read(1)[0]
                f.seek(at)
                f.write(bytes([byte ^ 1 << rng.randrange(8)]))
                if at < MAGIC_BYTES and "journal" in path:
                    return "magic"
        return how

    def damaged(self, form, moments, seed):
        """Staged files and the journal are not what the dead run left."""
        rng = random.Random(seed)
        for moment in moments:
            r = self.dying(form, "before", signal="%d:9" % moment)
            self.died(r.returncode == -signal.SIGKILL)
            staged = self.path("o", STAGING)
            if self.finished(form, moment) or not os.path.isdir(staged):
                self.forget("o")
                continue
            note, hows = [form, moment], []
            for name in sorted(os.listdir(staged)):
                # Files that are about to move are taken as they are: there is no telling.
                if name.startswith(("model-", "journal")) and rng.random() < 0.6 and \
                        not os.path.exists(os.path.join(staged, "qconv.json")):
                    hows.append(self.damage(os.path.join(staged, name), rng))
                    note.append((name, hows[-1]))
            if "magic" in hows:  # it may be a journal of another version
                r = self.faulty("-q", *self.command(form))
                self.assertEqual(r.returncode, 3, note)
                self.assertIn(b"does not begin as one of this version", r.stderr, note)
                self.assertIn(b"--restart begins anew", r.stderr, note)
                r = self.faulty("-q", "--restart", *self.command(form))
                self.assertEqual((r.returncode, r.stderr), (0, b""), note)
                self.assertEqual(tree_digest(self.path("o")), self.wanted(form)[0], note)
                self.forget("o")
                continue
            self.go_on(form, note, None)

    def full(self, form, rooms):
        """The disk takes so many bytes, and then no more."""
        for room in rooms:
            r = self.dying(form, "before", room=room)
            self.assertIn(r.returncode, (0, 1), (form, room, r.stderr))
            if r.returncode:
                self.died()
                self.assertRegex(r.stderr, rb"^qconv: .*bytes.*\n$", (form, room))
                self.assertEqual(r.stderr.count(b"\n"), 1, r.stderr)
            self.assert_no_whole_output((form, room))
            if not self.finished(form, room):
                self.go_on(form, (form, room))

    def rooms(self, form, count, seed):
        """Numbers of bytes that do not suffice."""
        self.wanted(form)
        self.assertEqual(self.dying(form, "before").returncode, 0)
        total = sum(os.path.getsize(os.path.join(folder, n))
                    for folder, _, names in os.walk(self.path("o")) for n in names)
        self.forget("o")
        rng = random.Random(seed)
        return [int(total * (i + rng.random()) / count) for i in range(count)]

    def failing(self, form, kind, numbers, error="EIO", dirs=None, on=""):
        """The N-th call of a kind fails. One that does not matter may be passed over."""
        failed = 0
        for n in numbers:
            note = (form, kind, n, error, dirs)
            r = self.dying(form, "before", dirs=dirs, fail="%s:%d:%s%s" % (kind, n, error, on))
            self.assertIn(r.returncode, (0, 1), (note, r.stderr))
            if r.returncode == 0:
                self.assertTrue(self.finished(form, note), note)
                continue
            failed += 1
            self.died()
            self.assertRegex(r.stderr, rb"^qconv: .+\n$", note)
            self.assertEqual(r.stderr.count(b"\n"), 1, r.stderr)
            self.assert_no_whole_output(note)
            if not self.finished(form, note):
                self.go_on(form, note, None if kind in ("syncloss", "range") else THREADS)
        return failed

    def signalled(self, form, moments, numbers):
        """Stops within two seconds, says so in one line, and how to go on."""
        stopped = 0
        for i, moment in enumerate(moments):
            number = numbers[i % len(numbers)]
            r = self.dying(form, "before", signal="%d:%d" % (moment, number))
            self.assertIn(r.returncode, (0, 130), (form, moment, number, r.stderr))
            if r.returncode:
                stopped += 1
                self.died()
                self.assertRegex(r.stderr, rb"^qconv: interrupted.*\n$")
                if os.path.isdir(self.path("o", STAGING)):
                    self.assertIn(b"same command", r.stderr)
                else:
                    self.assertFalse(os.path.exists(self.path("o")), (form, moment))
            if not self.finished(form, (form, moment, number)):
                self.go_on(form, (form, moment, number))
        return stopped

    def stops(self, form, moments, speed):
        """The longest time from a signal to the end, on a disk of so many bytes a second."""
        longest = 0.0
        env = self.fault_env(slow=speed, dirs=self.dir)
        for moment in moments:
            p = subprocess.Popen([QCONV, "-q", *self.command(form)], cwd=self.dir, env=env,
                                 stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
            wait_for_handler(p)
            time.sleep(moment)
            begin = time.monotonic()
            p.send_signal(signal.SIGTERM)
            _, text = p.communicate(timeout=60)
            longest = max(longest, time.monotonic() - begin)
            self.assertIn(p.returncode, (0, 130), text)
            if not self.finished(form, moment):
                self.go_on(form, (form, moment), None)
        return longest


__all__ = ["FORMS", "THREADS", "ResumeCase"]
