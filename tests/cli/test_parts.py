"""One conversion by several processes: the same bytes as by one, whoever dies on the way."""
import fcntl
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
import unittest

from output_case import AT_CALL, OutputCase, PLAIN, STAGING, at_call, tree, tree_digest
from qconv_case import INTERRUPTED_ENV, QCONV, SANITIZED
import make_checkpoint as mk

Q = "model.layers.%d.self_attn.q_proj.weight"
N = "model.layers.%d.input_layernorm.weight"


def step(index, count, **more):
    """The environment of a task of a Slurm step."""
    return dict({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count),
                 "SLURM_NTASKS": str(count), "SLURM_PROCID": str(index)}, **more)


JOB, DONE = 3, 7


def has_weight(journal, want=JOB):
    """A weight is recorded: behind 8 bytes of magic type, length, payload and sum of each record."""
    try:
        with open(journal, "rb") as f:
            data = f.read()
    except OSError:
        return False
    at = 8
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<II", data, at)
        if kind == want:
            return True
        at += 16 + length
    return False


def level(n):
    return ["--compress", "zstd:%d" % n]


class PartsCase(OutputCase):
    LAYERS = 7
    SHAPE = [256, 512]
    SHARDS = ["--max-shard-size", "150KB"]

    def setUp(self):
        super().setUp()
        tensors = {}
        rng = random.Random(6)
        for i in range(self.LAYERS):
            n = mk.numel(self.SHAPE)
            mask = int.from_bytes(b"\xff\x3d" * n, "little")  # below 1 in BF16
            values = int.from_bytes(rng.randbytes(2 * n), "little") & mask
            tensors[Q % i] = ("BF16", self.SHAPE, values.to_bytes(2 * n, "little"))
            tensors[N % i] = ("BF16", [64], bytes(128))
        self.model(tensors, shard_bytes=400000)
        self.write("m/tokenizer.json", "{}")

    def args(self, *more):
        return ["--to", "nf4", *self.SHARDS, "--threads", "2", *more, "m"]

    def whole(self, *more, out="one"):
        self.ok("-q", *self.args(*more), out)
        return tree_digest(self.path(out))

    def part(self, index, of, *more, out="o"):
        """Its report."""
        return json.loads(self.ok("--json", "--part", "%d/%d" % (index, of), *self.args(*more), out))

    def start(self, *args, env=None):
        return subprocess.Popen([QCONV, *args], cwd=self.dir, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env=dict(INTERRUPTED_ENV, **(env or {})))

    def assert_is(self, want, out="o", note=None):
        self.assertEqual(tree_digest(self.path(out)), want, note)

    def staged(self, *names):
        return self.path("o", STAGING, *names)


class SameBytes(PartsCase):
    def check(self, of, *more):
        want = self.whole(*more)
        order = list(range(1, of + 1))
        random.Random(of).shuffle(order)
        read = 0
        for k, i in enumerate(order):
            report = self.part(i, of, *more)
            self.assertEqual(report["part"]["index"], i)
            self.assertEqual(report["part"]["of"], of)
            self.assertEqual(report["part"]["to_come"], sorted(order[k + 1:]))
            self.assertEqual(report["part"]["completed"], "here" if k == of - 1 else None)
            self.assertEqual(os.path.exists(self.path("o", "qconv.json")), k == of - 1)
            read += report["bytes_in"] if k < of - 1 else 0
        self.assert_is(want)
        one = json.loads(self.ok("--json", *self.args(*more), "again"))
        self.assertLessEqual(read, one["bytes_in"])
        # What the last one says is what one process says.
        for member in ("bytes_in", "bytes_out", "bytes_stored", "shards", "side_files", "schemes",
                       "worst"):
            self.assertEqual(report[member], one[member], member)
        self.ok("verify", "o")
        # And each finds its share of the source again in what OUT was made of.
        for i in order:
            self.assertEqual(self.part(i, of, *more)["part"]["completed"], "before")
        self.assert_is(want)

    def test_in_turn(self):
        """The last: more parts than shards."""
        for of, *more in ((2,), (3, *PLAIN), (3, "--to", "int8"), (2, "--to", "int8", "--block-size", "64"),
                          (2, "--to", "int4"), (2, "--to", "fp16"), (12,)):
            with self.subTest(of=of, more=more):
                self.check(of, *more)
                for name in ("one", "o", "again"):
                    shutil.rmtree(self.path(name))

    def test_for_devices(self):
        want = self.whole()
        self.write("m/config.json", json.dumps(
            {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": self.LAYERS,
             "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 512,
             "vocab_size": 100}))
        placed = ["--vram", "2x2GB", "--incomplete"]
        want = self.whole(*placed, out="placed")
        for i in (2, 1):
            self.part(i, 2, *placed)
        self.assert_is(want)
        self.assertIn("device_map.json", want)

    def test_together(self):
        """All at once, again and again: whoever is last always notices that he is."""
        want = self.whole()
        for attempt in range(4 if SANITIZED else 12):
            team = [self.start("--json", "--part", "%d/4" % (i + 1), *self.args(), "o")
                    for i in range(4)]
            reports = []
            for p in team:
                out, err = p.communicate(timeout=60)
                self.assertEqual(p.returncode, 0, err)
                self.assertEqual(err, b"")
                reports.append(json.loads(out)["part"])
            self.assert_is(want, note=attempt)
            self.assertEqual(sum(r["completed"] == "here" for r in reports), 1, reports)
            shutil.rmtree(self.path("o"))

    def test_an_old_output_is_replaced_at_the_end(self):
        self.ok("-q", "--to", "bf16", "m", "o")
        before = tree_digest(self.path("o"))
        want = self.whole()
        self.usage("--part", "1/2", *self.args(), "o", has=["--to was 'bf16'", "--force"])
        self.part(1, 2, "--force")
        after = {n: d for n, d in tree_digest(self.path("o")).items() if not n.startswith(STAGING)}
        self.assertEqual(after, before)
        self.part(2, 2, "--force")
        self.assert_is(want)


class Ranks(PartsCase):
    def test_a_step_is_parts(self):
        want = self.whole()
        self.ok("-q", *self.args(), "o", env=step(1, 2))
        self.assertFalse(os.path.exists(self.path("o", "qconv.json")))
        text = self.ok(*self.args(), "o", env=step(0, 2))
        self.assertTrue(text.startswith("part 1 of 2 was the last: converted m -> o as nf4"), text)
        self.assert_is(want)

    def test_what_is_no_step(self):
        want = self.whole()
        for env in (step(0, 1), {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
                    step(1, 2, SLURM_NTASKS="1")):
            self.ok("-q", *self.args(), "o", env=env)
            self.assert_is(want)

    def test_the_option_wins(self):
        want = self.whole()
        text = self.ok("--part", "1/1", *self.args(), "o", env=step(1, 2))
        self.assertTrue(text.startswith("converted m -> o"), text)
        self.assert_is(want)

    def test_refused(self):
        self.fails(2, *self.args(), "o", env=step("x", 2), has=["SLURM_PROCID", "'x'", "--part"])
        for part in ("3/2", "0/4", "2", "1/0", "1/", "/2", "-1/2", "1/2/3", "1/4097", "", "x" * 99):
            self.fails(2, "--part", part, *self.args(), "o",
                       has=["--part: expected I/N", "I from 1 to N", "4096", "'%s'" % part])
        self.assert_nothing("o")

    def test_a_dry_run_is_of_all(self):
        self.assertEqual(self.ok("--dry-run", *self.args(), "o"),
                         self.ok("--dry-run", "--part", "2/3", *self.args(), "o"))
        self.assert_nothing("o")


class Going(PartsCase):
    def test_a_part_that_is_done_is_done(self):
        want = self.whole()
        self.part(1, 2)
        before = {n: os.stat(self.staged(n)).st_mtime_ns for n in os.listdir(self.staged())
                  if n.startswith("model-")}
        self.assertTrue(before)
        report = self.part(1, 2)
        self.assertEqual(report["part"]["to_come"], [2])
        for n, t in before.items():
            self.assertEqual(os.stat(self.staged(n)).st_mtime_ns, t, n)
        self.part(2, 2)
        self.assert_is(want)

    def test_complete_already(self):
        want = self.whole()
        for i in (1, 2, 1, 2):
            report = self.part(i, 2)
        self.assertEqual(report["part"]["completed"], "before")
        self.assertEqual(self.ok("--part", "2/2", *self.args(), "o"),
                         "part 2 of 2: o is complete already; --restart makes it anew\n")
        self.assert_is(want)
        # By other parts, or none: the same.
        self.assertEqual(self.part(3, 3)["part"]["completed"], "before")
        for i, left in ((1, [2]), (2, [])):
            self.assertEqual(self.part(i, 2, "--restart")["part"]["to_come"], left)
        self.assert_is(want)
        # Not the same at all.
        self.usage("--part", "1/2", *self.args(*level(3)), "o", has=["zstd:1", "--force"])
        self.assertIsNone(self.part(1, 2, "--force", *level(3))["part"]["completed"])
        self.part(2, 2, "--force", *level(3))
        self.assert_is(self.whole(*level(3), out="three"))

    def test_another_model_of_the_same_shapes(self):
        """OUT is complete, and of a model whose headers are the same to the byte."""
        for i in (1, 2):
            self.part(i, 2)
        first = tree_digest(self.path("o"))
        name = max(n for n in os.listdir(self.path("m")) if n.endswith(".safetensors"))
        stat = os.stat(self.path("m", name))
        self.change_byte(self.path("m", name), -2000)
        os.utime(self.path("m", name), ns=(stat.st_atime_ns, stat.st_mtime_ns))
        want = self.whole()
        self.assertNotEqual(want, first)
        for more in ([], ["--restart"]):
            self.usage("--part", "1/2", *more, *self.args(), "o", has=["other weights", "--force"])
        self.assertEqual(tree_digest(self.path("o")), first)
        said = [self.part(i, 2, "--force")["part"]["completed"] for i in (1, 2, 1)]
        self.assertIn("here", said)
        self.assert_is(want)

    def test_same_weights_in_other_files(self):
        """OUT's manifest would name other sources."""
        for i in (1, 2):
            self.part(i, 2)
        for n in [n for n in os.listdir(self.path("m")) if n.endswith(".safetensors")]:
            os.rename(self.path("m", n), self.path("m", n.replace("model-", "other-")))
        with open(self.path("m", "model.safetensors.index.json"), encoding="utf-8") as f:
            text = f.read()
        self.write("m/model.safetensors.index.json", text.replace("model-0", "other-0"))
        said = [self.part(i, 2, "--force")["part"]["completed"] for i in (1, 2)]
        self.assertEqual(said, [None, "here"])
        self.assert_is(self.whole())

    def test_same_weights_in_other_schemes(self):
        """--requantize is seen in what became of the tensors alone."""
        shutil.rmtree(self.path("m"))
        data = os.path.join(os.path.dirname(mk.HERE), "tests", "data", "models", "gpt-oss-20b.json")
        subprocess.run([sys.executable, "-B", mk.__file__, data, self.path("m"), "--random", "1",
                        "--layers", "1", "--experts", "2", "--scale", "16"], check=True,
                       stdout=subprocess.DEVNULL)
        for i in (1, 2):
            self.part(i, 2, "--requantize")
        said = [self.part(i, 2, "--force")["part"]["completed"] for i in (1, 2)]
        self.assertEqual(said, [None, "here"])
        self.assert_is(self.whole())

    def test_a_staged_manifest_that_is_none(self):
        want = self.whole()
        self.part(1, 2)
        with open(self.staged("qconv.json"), "w") as f:
            f.write("{}")
        self.part(2, 2)
        self.assert_is(want)

    def test_other_parts_are_refused(self):
        want = self.whole()
        self.part(1, 3)
        before = tree(self.path("o"))
        self.fails(2, "-q", "--part", "1/2", *self.args(), "o",
                   has=["part 1 of 3", "this is part 1 of 2", "--restart"])
        self.fails(2, "-q", *self.args(), "o", has=["part 1 of 3", "--part 1/3", "--restart"])
        self.fails(2, "-q", "--part", "2/3", *self.args(*level(2)), "o",
                   has=["part 1 of 3", "zstd:1", "zstd:2", "--restart"])
        now = tree(self.path("o"))
        self.assertEqual({n: now[n] for n in before}, before)
        # Whoever begins anew does away with it.
        self.part(1, 2, "--restart")
        self.part(2, 2, "--restart")
        self.assert_is(want)

    @unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
    def test_parts_after_one_process(self):
        want = self.whole()
        r = self.run_qconv("-q", *self.args(), "o", env=at_call("rename:1", run="kill -9 $PPID"))
        self.assertEqual(r.returncode, -signal.SIGKILL)
        self.fails(2, "-q", "--part", "1/2", *self.args(), "o", has=["by one process", "--part 1/1", "--restart"])
        for i in (1, 2):
            self.part(i, 2, "--restart")
        self.assert_is(want)

    def test_source_changed_between_parts(self):
        """By what its head says at once; by its bytes when its time says so."""
        want = self.whole()
        config = self.read_bytes("m/config.json")
        self.part(1, 2)
        self.write("m/config.json", config.decode().replace("{", '{"x": 1, ', 1))
        self.fails(3, "-q", "--part", "2/2", *self.args(), "o", has=["source.config", "--restart"])
        self.write("m/config.json", config.decode())
        files = [self.path("m", n) for n in sorted(os.listdir(self.path("m")))
                 if n.endswith(".safetensors")]
        self.assertGreater(len(files), 1)
        # Copied, or touched: who read it before compares, when it is started again.
        for name in files:
            os.utime(name, (1, 1))
        self.fails(3, "-q", "--part", "2/2", *self.args(), "o", has=["modified", "part 1"])
        self.part(1, 2)
        self.assert_is(want)
        shutil.rmtree(self.path("o"))
        # A last byte changed.
        self.part(1, 2)
        for name in files:
            with open(name, "r+b") as f:
                f.seek(-200, 2)
                f.write(b"\0")
        self.fails(3, "-q", "--part", "2/2", *self.args(), "o", has=["modified", "part 1"])
        self.fails(3, "-q", "--part", "1/2", *self.args(), "o", has=["changed", "layers", "--restart"])

    def read_bytes(self, name):
        with open(self.path(name), "rb") as f:
            return f.read()


class Beside(PartsCase):
    """While a part runs."""

    LAYERS = 10
    SHAPE = [512, 1024]
    SHARDS = ["--max-shard-size", "600KB", *level(9)]

    def test_refusals(self):
        p = self.start("-q", "--part", "1/2", *self.args("--threads", "1"), "o")
        end = time.monotonic() + 30
        # At work, not at its turn: who stops there stops the others.
        while not any(name.startswith("model") for name in
                      (os.listdir(self.staged()) if os.path.isdir(self.staged()) else [])):
            self.assertIsNone(p.poll())
            self.assertLess(time.monotonic(), end)
        os.kill(p.pid, signal.SIGSTOP)
        try:
            self.fails(2, "-q", "--part", "1/2", *self.args(), "o", has=["part 1 of 2", "now"])
            self.fails(2, "-q", *self.args(), "o", has=["now"])
            self.fails(2, "-q", "--part", "2/3", "--restart", *self.args(), "o",
                       has=["part 1 of 2", "now"])
        finally:
            os.kill(p.pid, signal.SIGCONT)
        out, err = p.communicate(timeout=60)
        self.assertEqual((p.returncode, err), (0, b""))
        self.part(2, 2)
        self.assert_is(self.whole())

    def test_killed_at_any_moment(self):
        """Parts die, and are started again until OUT is complete."""
        begin = time.monotonic()
        want = self.whole()
        seconds = time.monotonic() - begin
        rng = random.Random(2)
        deaths = 0
        for attempt in range(3):
            for turn in range(40):
                last = turn == 39
                team = [self.start("-q", "--part", "%d/3" % (i + 1), *self.args(), "o")
                        for i in range(3)]
                if not last:
                    for n, p in enumerate(rng.sample(team, 3)):
                        # One dies before it can have done anything, however fast the machine is.
                        time.sleep(rng.random() * seconds if n or turn else 0)
                        p.kill()
                codes = []
                for p in team:
                    out, err = p.communicate(timeout=60)
                    codes.append(p.returncode)
                    self.assertIn(p.returncode, (0, -signal.SIGKILL), err)
                deaths += codes.count(-signal.SIGKILL)
                if os.path.exists(self.path("o", "qconv.json")) and \
                        not os.path.exists(self.staged()):
                    break
            self.assert_is(want, note=(attempt, turn))
            shutil.rmtree(self.path("o"))
        self.assertGreater(deaths, 0)


@unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
class Commit(PartsCase):
    """The part that completes OUT dies of it; and others die beside it."""

    def dies(self, index, of, call, path="", out="o"):
        """Killed before that call; False: there was none."""
        p = self.start("-q", "--part", "%d/%d" % (index, of), *self.args(), out,
                       env=at_call(call, path, "kill -9 $PPID"))
        out, err = p.communicate(timeout=60)
        self.assertIn(p.returncode, (0, -signal.SIGKILL), err)
        return p.returncode != 0

    def shards(self):
        """Where they are does not matter."""
        return {n: os.stat(os.path.join(folder, n)).st_ino
                for folder, _, names in os.walk(self.path("o")) for n in names
                if n.startswith("model-")}

    def goes_on(self, index, of, want, note):
        before = self.shards()
        report = self.part(index, of)["part"]
        self.assertIn(report["completed"], ("here", "before"), note)
        self.assertEqual(self.shards(), before, note)  # not made again
        self.assert_is(want, note=note)
        shutil.rmtree(self.path("o"))

    def test_killed_at_every_rename(self):
        want = self.whole()
        n = 0
        while True:
            n += 1
            self.part(1, 2)
            if not self.dies(2, 2, "rename:%d" % n):
                break
            self.goes_on(1, 2, want, n)
        self.assertGreater(n, len(self.shards()))

    def test_killed_while_it_clears_up(self):
        want = self.whole()
        for n in (1, 2, 3):
            for index in (1, 3):
                self.part(1, 3)
                self.part(2, 3)
                self.assertTrue(self.dies(3, 3, "unlink:%d" % n, "/journal-0"))
                self.goes_on(index, 3, want, (n, index))

    def test_killed_while_it_mends(self):
        """What a part that was done has to write again, it is not done with."""
        want = self.whole()
        for table in (0, 1):
            self.part(1, 2)
            shard = min(n for n in os.listdir(self.staged()) if n.startswith("model-"))
            with open(self.staged(shard), "r+b") as f:
                f.seek(-12 if table else 4, 2 if table else 0)
                f.write(b"\xa5\x5a")
            for name in os.listdir(self.path("m")):
                os.utime(self.path("m", name), (table + 1, table + 1))
            self.assertTrue(self.dies(1, 2, "write:1", "/model-"))
            self.assertEqual(self.part(2, 2)["part"]["to_come"], [1])
            self.part(1, 2)
            self.assert_is(want)
            shutil.rmtree(self.path("o"))

    def test_killed_while_another_waits(self):
        want = self.whole()
        # What part 2 leaves when it dies with one shard moved.
        self.part(1, 2, out="dead")
        self.assertTrue(self.dies(2, 2, "rename:2", "/model-", out="dead"))
        dead = self.path("dead", STAGING)
        moved = [n for n in os.listdir(self.path("dead")) if n != STAGING]
        self.assertEqual(sum(n.startswith("model-") for n in moved), 1)
        self.part(2, 2)
        p = self.start("-q", "--part", "1/2", *self.args("--threads", "1"), "o",
                       env=at_call("write:1", "/model-", "kill -STOP $PPID"))
        self.wait_for(p, lambda: self.is_stopped(p))
        with open(self.staged("lock-turn")) as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            p.send_signal(signal.SIGCONT)
            self.wait_for(p, lambda: has_weight(self.staged("journal-00001-of-00002"), DONE))
            for name in os.listdir(dead):
                if not name.startswith(("model-", "lock", "journal-00001")):
                    shutil.copy(os.path.join(dead, name), self.staged(name))
            for name in moved:
                if name.startswith("model-"):
                    os.rename(self.staged(name), self.path("o", name))
                else:
                    shutil.copy(self.path("dead", name), self.path("o", name))
        out, err = p.communicate(timeout=60)
        self.assertEqual((p.returncode, err), (0, b""))
        self.assert_is(want)

    def test_waiting_for_a_stopped_one_is_said_once(self):
        want = self.whole()
        self.part(1, 2)
        holder = self.start("-q", "--part", "2/2", *self.args(), "o",
                            env=at_call("rename:1", "", "kill -STOP $PPID"))
        self.addCleanup(holder.kill)  # a stopped process stays
        self.wait_for(holder, lambda: self.is_stopped(holder))
        begin = time.monotonic()
        waiter = self.start("--part", "1/2", *self.args(), "o")
        self.addCleanup(waiter.kill)
        said = b""
        while not said.endswith(b"\n"):
            self.assertTrue(select.select([waiter.stderr], [], [], 60)[0], said)
            more = os.read(waiter.stderr.fileno(), 4096)
            self.assertTrue(more, "it ended")
            said += more
        self.assertGreaterEqual(time.monotonic() - begin, 4.9)
        self.assertEqual(said.decode(), "qconv: warning: waiting for process %d, which holds the "
                         "lock of o/%s/lock-turn\n" % (holder.pid, STAGING))
        time.sleep(0.5)
        self.assertIsNone(waiter.poll())
        holder.send_signal(signal.SIGCONT)
        self.assertEqual(holder.communicate(timeout=60), (b"", b""))
        _, said = waiter.communicate(timeout=60)
        self.assertEqual((holder.returncode, waiter.returncode), (0, 0), said)
        self.assertNotIn(b"waiting", said)
        self.assert_is(want)

    def wait_for(self, p, what):
        end = time.monotonic() + 30
        while not what():
            self.assertIsNone(p.poll())
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def is_stopped(self, p):
        with open("/proc/%d/stat" % p.pid) as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "T"

    def test_interrupted_with_nothing_done(self):
        """In a step that takes long: what others did stays."""
        want = self.whole()
        self.part(1, 2)
        before = tree(self.path("o"))
        p = self.start("-q", "--part", "2/2", *self.args("--threads", "1"), "o",
                       env=at_call("write:1", "/model-",
                                   "exec >/dev/null 2>&1; kill -TERM $PPID; sleep 3"))
        out, err = p.communicate(timeout=60)
        self.assertEqual(p.returncode, 130, err)
        now = tree(self.path("o"))
        self.assertEqual({n: now.get(n) for n in before}, before)
        self.part(2, 2)
        self.assert_is(want)


if __name__ == "__main__":
    unittest.main()
