"""Interruption, sudden death, a full disk. Folders that cannot be read or written: test_source.py.

A conversion that ends so leaves its staging folder, if anything in it is finished, and the same
command goes on; unpack leaves nothing."""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
import unittest

from output_case import OutputCase, PLAIN, STAGING, tree, tree_digest
from qconv_case import INTERRUPTED_ENV, QCONV, SANITIZED
import make_checkpoint as mk

TOLD = re.compile(r"; (\d+) of (\d+) tensors are done, and the same command continues from there\n$")
Q = "model.layers.%d.self_attn.q_proj.weight"


class Slow(OutputCase):
    """A model that takes a while: a hole of 150 MB, one thread."""

    COUNT = 9

    def setUp(self):
        super().setUp()
        self.model({Q % i: ("BF16", [2048, 4096], None) for i in range(self.COUNT)},
                   shard_bytes=40 << 20)
        self.write("m/tokenizer.json", "{}")

    def start(self, *args):
        return subprocess.Popen([QCONV, "-q", *args], cwd=self.dir, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=INTERRUPTED_ENV)

    def started(self, *args):
        """The same, and it listens to signals by now (or is done already)."""
        p = self.start(*args)
        if not os.path.exists("/proc/self/status"):
            time.sleep(0.3)
        while os.path.exists("/proc/self/status"):
            try:
                with open("/proc/%d/status" % p.pid) as f:
                    lines = dict(line.split(":", 1) for line in f)
            except OSError:
                break
            if lines["State"].strip()[0] == "Z" or int(lines["SigCgt"], 16) & 1 << (
                    signal.SIGINT - 1):
                break
        return p

    def seconds(self, *args):
        begin = time.monotonic()
        self.ok("-q", *args)
        return time.monotonic() - begin

    def moments(self, seed, count, whole):
        rng = random.Random(seed)
        return [whole * (i + rng.random()) / count for i in range(count)]


class Interrupted(Slow):
    def check(self, args, out, count):
        """SIGINT, SIGTERM and SIGHUP at many moments: 130 within two seconds and nothing that
        passes for an output, or done and all there."""
        whole = self.seconds(*args)
        want = tree_digest(self.path(out))
        shutil.rmtree(self.path(out))
        stopped = 0
        for i, moment in enumerate(self.moments(1, count, whole)):
            p = self.started(*args)
            time.sleep(moment)
            p.send_signal([signal.SIGINT, signal.SIGTERM, signal.SIGHUP][i % 3])
            begin = time.monotonic()
            stdout, stderr = p.communicate(timeout=60)
            took = time.monotonic() - begin
            self.assertEqual(stdout, b"")
            if p.returncode != 0:
                stopped += 1
                self.assertLess(took, 2)
                self.assertEqual(p.returncode, 130)
                self.check_left(args, out, stderr.decode())
            self.ok("-q", *args)
            self.assertEqual(tree_digest(self.path(out)), want)
            shutil.rmtree(self.path(out))
        self.assertGreater(stopped, 0)

    def check_left(self, args, out, stderr):
        """What was told to be done is what the same command keeps."""
        if stderr == "qconv: interrupted\n":
            self.assert_nothing(out)
            return
        told = TOLD.search(stderr)
        self.assertTrue(told and stderr.startswith("qconv: interrupted;"), stderr)
        self.assertEqual(stderr.count("\n"), 1)
        self.assertNotEqual(args[0], "unpack")
        self.assertEqual(os.listdir(self.path(out)), [STAGING])
        self.fails(3, "verify", out, has="qconv.json")
        r = json.loads(self.ok("-q", "--json", *args))
        self.assertGreaterEqual(r["continued"]["tensors_kept"], int(told.group(1)), r)
        self.assertLessEqual(r["continued"]["tensors_redone"], r["threads"])

    def test_convert(self):
        self.check(["--to", "int8", "--threads", "2", "m", "o"], "o", 8)

    def test_unpack(self):
        self.ok("-q", "--to", "int8", "m", "o")
        self.check(["unpack", "o", "u"], "u", 5)

    def test_verify_leaves_no_trace(self):
        self.ok("-q", "--to", "int8", "m", "o")
        before = tree_digest(self.path("o"))
        for moment in (0.03, 0.06, 0.1, 0.2):
            p = self.started("verify", "o")
            time.sleep(moment)
            p.send_signal(signal.SIGINT)
            p.communicate(timeout=60)
            self.assertIn(p.returncode, (0, 130))
        self.assertEqual(tree_digest(self.path("o")), before)

    def test_old_output_stays(self):
        """Interrupted while it makes a replacement: the old one is whole."""
        self.ok("-q", "--to", "nf4", "m", "o")
        before = tree_digest(self.path("o"))
        for moment in (0.1, 0.2):
            p = self.started("--to", "int8", "--force", "--threads", "1", "m", "o")
            time.sleep(moment)
            p.send_signal(signal.SIGINT)
            p.communicate(timeout=60)
            self.assertIn(p.returncode, (0, 130))
            if p.returncode == 0:
                break  # too fast
            left = {n: d for n, d in tree_digest(self.path("o")).items()
                    if not n.startswith(STAGING)}
            self.assertEqual(left, before)

    def test_seconds_in_hand(self):
        """A frame at level 19 takes longer than an interruption may."""
        self.model({Q % 0: ("BF16", [2048, 4096], mk.random_bytes("BF16", [2048, 4096],
                                                                  random.Random(1)))}, name="n")
        args = ["--to", "bf16", "--compress", "zstd:19", "--threads", "2", "n", "o"]
        p = self.started(*args)
        time.sleep(0.5)
        begin = time.monotonic()
        p.send_signal(signal.SIGTERM)
        stdout, stderr = p.communicate(timeout=60)
        self.assertLess(time.monotonic() - begin, 15 if SANITIZED else 2.5)
        self.assertEqual((p.returncode, stdout, stderr), (130, b"", b"qconv: interrupted\n"))
        self.assert_nothing("o")

    def test_ignored_signal_stays_ignored(self):
        """As nohup and a shell's background jobs have it."""
        p = subprocess.Popen(["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh", QCONV, "-q", "--to",
                              "int8", "m", "o"], cwd=self.dir)
        time.sleep(0.15)
        p.send_signal(signal.SIGINT)
        p.send_signal(signal.SIGHUP)
        self.assertEqual(p.wait(timeout=60), 0)
        self.ok("-q", "verify", "o")


class Killed(Slow):
    COUNT = 6

    def check(self, args, out, count, seed):
        whole = self.seconds(*args)
        want = tree_digest(self.path(out))
        shutil.rmtree(self.path(out))
        killed = 0
        for moment in self.moments(seed, count, whole):
            p = self.start(*args)
            time.sleep(moment)
            p.kill()
            p.communicate(timeout=60)
            killed += p.returncode == -signal.SIGKILL
            if p.returncode == -signal.SIGKILL and os.path.isdir(self.path(out)):
                # Whole, or nothing that passes for whole.
                self.assertIn(self.run_qconv("verify", "-q", out).returncode, (0, 3))
            # Every other time onto what is left of two.
            if random.Random(moment).random() < 0.5:
                self.ok("-q", *args)
                self.assertEqual(tree_digest(self.path(out)), want)
                shutil.rmtree(self.path(out))
        self.assertGreater(killed, 0)
        self.ok("-q", *args)
        self.assertEqual(tree_digest(self.path(out)), want)

    def test_unpack(self):
        self.ok("-q", "--to", "int8", "m", "o")
        self.check(["unpack", "o", "u"], "u", 5, 4)

    def test_while_files_move(self):
        """The moment that no clock hits: some files are in place, the manifest is not."""
        self.model({Q % i: ("BF16", [64, 64], None) for i in range(6)}, shard_bytes=9000, name="n")
        for name in ["a.txt", "sub/b.txt", "z.txt"]:
            os.makedirs(os.path.dirname(self.path("n", name)), exist_ok=True)
            self.write("n/" + name, name)
        args = ["--to", "int8", "--max-shard-size", "5000B", "n", "o"]
        self.ok("-q", *args)
        want = tree(self.path("o"))
        other = ["--to", "nf4", "m", "o"]
        shutil.rmtree(self.path("o"))
        self.ok("-q", *other)
        want_other = tree(self.path("o"))
        names = sorted(n for n, body in want.items() if body is not None and n != "qconv.json")
        for moved in range(len(names) + 1):
            for command, result in ((args, want), (other, want_other)):
                shutil.rmtree(self.path("o"))
                for i, name in enumerate(names + ["qconv.json"]):
                    full = self.path("o", *([] if i < moved else [STAGING]), name)
                    os.makedirs(os.path.dirname(full), exist_ok=True)
                    with open(full, "wb") as f:
                        f.write(want[name])
                self.write("o/%s/lock" % STAGING, "")
                self.fails(3, "verify", "o", has="qconv.json")
                self.ok("-q", "--dry-run", "--json", *command)
                self.ok("-q", *command)
                self.assertEqual(tree(self.path("o")), result, (moved, command))


class Full(OutputCase):
    """No room: how many bytes are missing; what is finished stays, and only that."""

    def setUp(self):
        super().setUp()
        rng = random.Random(5)
        self.model({Q % i: ("BF16", [512, 512], mk.random_bytes("BF16", [512, 512], rng))
                    for i in range(4)})
        self.write("m/tokenizer.json", "{}")

    def assert_staging(self, out):
        """Nothing, or a staging folder with a journal."""
        if os.path.lexists(self.path(out)):
            self.assertEqual(os.listdir(self.path(out)), [STAGING])
            self.assertIn("journal-00001-of-00001", os.listdir(self.path(out, STAGING)))

    def full_disk(self, limit):
        """A file system of `limit` bytes, or a skip."""
        where = self.path("disk")
        os.mkdir(where)
        r = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=%d" % limit, "none", where],
                           stderr=subprocess.PIPE)
        if r.returncode:
            self.skipTest("no file system can be mounted here")
        self.addCleanup(subprocess.run, ["umount", where], check=True)

    def test_full_disk(self):
        self.full_disk(256 << 10)
        for form in [["--to", "int8"], ["--to", "nf4", *PLAIN], ["--to", "int8", *PLAIN],
                     ["--to", "nf4", "--max-shard-size", "100KB"]]:
            for threads in ("1", "3"):
                self.fails(1, "-q", *form, "--threads", threads, "m", "disk/o", has="bytes")
                self.assert_staging("disk/o")
                shutil.rmtree(self.path("disk", "o"), ignore_errors=True)
        self.ok("-q", "--to", "int8", "m", "o")
        self.fails(1, "unpack", "o", "disk/u", has="bytes")
        self.assertEqual(os.listdir(self.path("disk")), [])

    def test_old_output_stays(self):
        self.full_disk(1 << 20)
        self.ok("-q", "--to", "nf4", "m", "disk/o")
        before = tree(self.path("disk", "o"))
        self.fails(1, "-q", "--to", "int8", "--force", "m", "disk/o", has="bytes")
        left = tree(self.path("disk", "o"))
        self.assertEqual({n: b for n, b in left.items() if not n.startswith(STAGING)}, before)


if __name__ == "__main__":
    unittest.main()
