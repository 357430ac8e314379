"""--consume-source: weight files go when all of them is written and on the disk, and a kill at any
moment loses nothing."""
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import unittest

from output_case import AT_CALL, OutputCase, PLAIN, STAGING, at_call, tree
from qconv_case import QCONV, SANITIZED
import make_checkpoint as mk

Q = "model.layers.%d.self_attn.q_proj.weight"
SLOW = "--slow" in sys.argv
FAULT_DISK = os.environ.get("FAULT_DISK")
FORMS = [["--to", "nf4"], ["--to", "nf4", *PLAIN], ["--to", "int8", "--max-shard-size", "9000B"],
         ["--to", "bf16", *PLAIN, "--max-shard-size", "20000B"]]


class ConsumeCase(OutputCase):
    M, O = "m", "o"

    def setUp(self):
        super().setUp()
        rng = random.Random(6)
        shapes = [[64, 64]] * 5 + [[96, 64], [64, 32]]
        tensors = {Q % i: ("F32" if i == 3 else "BF16", s,
                           mk.random_bytes("F32" if i == 3 else "BF16", s, rng))
                   for i, s in enumerate(shapes)}
        tensors["model.norm.weight"] = ("BF16", [64], mk.random_bytes("BF16", [64], rng))
        self.model(tensors, name="kept", shard_bytes=17000)
        self.write("kept/tokenizer.json", "{}")
        self.weights = sorted(n for n in os.listdir(self.path("kept"))
                              if n.endswith(".safetensors"))
        self.assertGreater(len(self.weights), 3)

    def fresh(self):
        for name in (self.M, self.O):
            shutil.rmtree(self.path(name), ignore_errors=True)
        shutil.copytree(self.path("kept"), self.path(self.M))

    def want(self, form):
        self.ok("-q", *form, "kept", "want")
        got = tree(self.path("want"))
        shutil.rmtree(self.path("want"))
        return got

    def torch_file(self):
        folder = os.path.join(os.path.dirname(mk.HERE), "tests", "data", "torch")
        return os.path.join(folder, min(n for n in os.listdir(folder) if n.endswith(".bin")))

    def left(self):
        """Weight files that are still there; those are whole, and nothing else has gone."""
        now, then = tree(self.path(self.M)), tree(self.path("kept"))
        for name, body in then.items():
            if name in now:
                self.assertEqual(now[name], body, name)
            else:
                self.assertIn(name, self.weights)
        self.assertEqual(set(now) - set(then), set())
        return [n for n in self.weights if n in now]

    def expect_done(self, want, note=None):
        self.assertEqual(tree(self.path(self.O)), want, note)
        self.assertEqual(self.left(), [], note)


class Consume(ConsumeCase):
    def test_all_goes_and_the_bytes_are_the_same(self):
        for form in FORMS:
            self.fresh()
            want = self.want(form)
            sizes = sum(os.path.getsize(self.path("m", n)) for n in self.weights)
            out = json.loads(self.ok("--json", *form, "--consume-source", "m", "o"))
            self.assertEqual((out["files_consumed"], out["bytes_consumed"]),
                             (len(self.weights), sizes))
            self.expect_done(want, form)
            self.ok("-q", "verify", "o")

    def test_one_file(self):
        """In its folder, and given by itself."""
        for model in ("m", "m/model.safetensors"):
            shutil.rmtree(self.path("m"), ignore_errors=True)
            shutil.rmtree(self.path("o"), ignore_errors=True)
            shutil.rmtree(self.path("want"), ignore_errors=True)
            rng = random.Random(7)
            self.model({Q % i: ("BF16", [64, 64], mk.random_bytes("BF16", [64, 64], rng))
                        for i in range(3)})
            self.ok("-q", "--to", "nf4", model, "want")
            text = self.ok("--to", "nf4", "--consume-source", model, "o")
            self.assertIn("deleted   1 weight file of the source", text)
            self.assert_same("want", "o")
            self.assertEqual(os.listdir(self.path("m")), ["config.json"])
        # Again; PyTorch's form of it, beside, is not what is gone.
        for beside in (False, True):
            if beside:
                shutil.copy(self.torch_file(), self.path("m", "pytorch_model.bin"))
            err = self.run_qconv("--to", "nf4", "--consume-source", "m", "o")
            self.assertEqual(err.returncode, 0, err.stderr)
            self.assertIn(b"o is complete already; the weight files of m were deleted once it was", err.stderr)

    def test_a_qconv_output(self):
        """Compressed shards are weight files like others."""
        self.ok("-q", "--to", "bf16", "kept", "m")
        self.ok("-q", "--to", "nf4", "m", "want")
        self.ok("-q", "--to", "nf4", "--consume-source", "m", "o")
        self.assert_same("want", "o")
        self.assertFalse([n for n in os.listdir(self.path("m")) if n.endswith(".zst")])

    def test_a_file_that_nothing_is_made_of(self):
        """Weights without elements are in a file as well."""
        self.fresh()
        index_path = self.path("kept", "model.safetensors.index.json")
        with open(index_path, encoding="utf-8") as f:
            index = json.load(f)
        index["weight_map"]["model.nothing"] = "nothing.safetensors"
        mk.write_json(index_path, index)
        mk.write_safetensors(self.path("kept", "nothing.safetensors"),
                             {"model.nothing": ("BF16", [0, 4], b"")})
        self.weights.append("nothing.safetensors")
        self.fresh()
        want = self.want(["--to", "nf4"])
        self.ok("-q", "--to", "nf4", "--consume-source", "m", "o")
        self.expect_done(want)

    def test_another_model_for_a_whole_out(self):
        """OUT is whole, and none of its source's files is in MODEL: because MODEL is another."""
        self.ok("-q", "--to", "nf4", "kept", "o")
        self.ok("-q", "--to", "bf16", *PLAIN, "--max-shard-size", "1GB", "kept", "m")
        self.ok("-q", "--to", "nf4", "m", "want")
        out = json.loads(self.ok("--json", "--to", "nf4", "--consume-source", "--force", "m", "o"))
        self.assertEqual(out["files_consumed"], 1)
        self.assert_same("want", "o")

    def test_parts_that_replace_a_whole_out_stay(self):
        """What is left of a conversion of which nothing remains to be done is not theirs."""
        self.fresh()
        self.ok("-q", "--to", "nf4", "--consume-source", "m", "o")
        part = ["--force", "--to", "int8", "--max-shard-size", "9000B", "--part"]
        self.ok("-q", *part, "1/2", "kept", "o")
        staged = tree(self.path("o", STAGING))
        self.ok("--to", "nf4", "--consume-source", "m", "o")
        self.assertEqual(tree(self.path("o", STAGING)), staged)
        self.ok("-q", *part, "2/2", "kept", "o")
        self.assertEqual(tree(self.path("o")), self.want(part[:-1]))

    def test_dry_run_touches_nothing(self):
        self.fresh()
        self.ok("--to", "nf4", "--consume-source", "--dry-run", "m", "o")
        self.assertEqual(self.left(), self.weights)


class Refused(ConsumeCase):
    """What cannot be consumed is told before anything is done."""

    def refused(self, has, *args, model="m"):
        self.usage(*(args or ["--to", "nf4"]), "--consume-source", model, "o", has=has)
        self.assert_nothing("o")

    def test_links(self):
        """A snapshot of the hub cache, a link to a disk, a folder that is one."""
        self.fresh()
        name = self.weights[2]
        os.makedirs(self.path("blobs"))
        os.rename(self.path("m", name), self.path("blobs", "abc"))
        os.symlink("../blobs/abc", self.path("m", name))
        self.refused([name, "is a link"])
        self.assertEqual(self.left(), self.weights)

        self.fresh()
        index_path = self.path("m", "model.safetensors.index.json")
        with open(index_path, encoding="utf-8") as f:
            index = json.load(f)
        index["weight_map"] = {k: "sub/" + v for k, v in index["weight_map"].items()}
        mk.write_json(index_path, index)
        os.makedirs(self.path("elsewhere"))
        for n in self.weights:
            os.rename(self.path("m", n), self.path("elsewhere", n))
        os.symlink("../elsewhere", self.path("m", "sub"))
        self.refused(["m/sub", "is a link"])
        self.assertEqual(sorted(os.listdir(self.path("elsewhere"))), self.weights)

    def test_a_link_to_the_model_is_fine(self):
        self.fresh()
        want = self.want(["--to", "nf4"])
        os.symlink("m", self.path("alias"))
        self.ok("-q", "--to", "nf4", "--consume-source", "alias", "o")
        self.expect_done(want)

    def test_hard_links(self):
        self.fresh()
        os.link(self.path("m", self.weights[1]), self.path("second"))
        self.refused([self.weights[1], "2 names"])
        self.assertEqual(self.left(), self.weights)

    @unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
    def test_two_at_once(self):
        """Each would delete what the other has not read yet."""
        self.fresh()
        form = ["--to", "nf4", "--threads", "1"]
        second = "'%s' -q --to nf4 --consume-source m p >second 2>&1; echo $? >>second" % QCONV
        self.ok("-q", *form, "--consume-source", "m", "o",
                env=at_call("unlink:1", "m/model", second))
        with open(self.path("second"), encoding="utf-8") as f:
            said = f.read()
        self.assertIn("another conversion", said)
        self.assertTrue(said.endswith("\n2\n"), said)
        self.assert_nothing("p")
        self.expect_done(self.want(form))

    def test_what_could_not_be_planned_again(self):
        self.fresh()
        self.refused("--to auto", "--to", "auto", "--vram", "1GB")
        self.ok("-q", "--to", "nf4", *PLAIN, "m", "q")
        self.refused("quantized already", "--to", "bf16", model="q")
        self.refused("--part", "--to", "nf4", "--part", "1/2")
        self.assertEqual(self.left(), self.weights)

    def test_pytorch_files(self):
        shutil.copytree(os.path.join(os.path.dirname(mk.HERE), "tests", "data", "torch"),
                        self.path("t"))
        found = [n for n in sorted(os.listdir(self.path("t"))) if n.endswith((".bin", ".pt"))]
        self.assertTrue(found)
        before = tree(self.path("t"))
        r = self.run_qconv("--to", "bf16", "--consume-source", "t/" + found[0], "o")
        self.assertEqual(r.returncode, 2, r.stderr)
        self.assertIn(b"safetensors files only", r.stderr)
        self.assertEqual(tree(self.path("t")), before)

    def test_folder_that_cannot_be_written_to(self):
        self.fresh()
        os.chmod(self.dir, 0o777)
        who = {"user": 65534} if os.geteuid() == 0 else {}
        os.chmod(self.path("m"), 0o555)
        self.addCleanup(os.chmod, self.path("m"), 0o755)
        r = subprocess.run([QCONV, "-q", "--to", "nf4", "--consume-source", "m", "o"], cwd=self.dir,
                           stderr=subprocess.PIPE, **who)
        self.assertEqual(r.returncode, 2, r.stderr)
        self.assertIn(b"--consume-source cannot delete files in ", r.stderr)
        self.assertEqual(self.left(), self.weights)
        self.assert_nothing("o")


@unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
class Killed(ConsumeCase):
    """At every call that changes something on the disk, and while going on as well."""

    def calls(self, form):
        self.fresh()
        self.ok("-q", *form, "--consume-source", "m", "o", env=at_call("any:1", count="n"))
        with open(self.path("n"), encoding="ascii") as f:
            return int(f.read())

    def killed(self, form, moment):
        """Run it and kill it at that call; was it killed before its end?"""
        r = self.run_qconv("-q", *form, "--consume-source", "m", "o",
                           env=at_call("any:%d" % moment, run="kill -9 $PPID"))
        self.assertIn(r.returncode, (0, -signal.SIGKILL), r.stderr)
        return r.returncode != 0

    def chain(self, form, want, moment, rng, total):
        """Killed at that call, then at random ones, then not."""
        self.fresh()
        moments = [moment]
        alive = not self.killed(form, moment)
        while not alive and rng.random() < 0.6:
            self.left()
            moments.append(rng.randrange(1, total + 1))
            alive = not self.killed(form, moments[-1])
        self.left()
        if not alive:
            # Whatever it was told to do with its source before: what is gone is known.
            more = ["--consume-source"] if rng.random() < 0.7 or not self.left() else []
            self.ok("-q", *form, *more, "m", "o")
            self.assertEqual(tree(self.path("o")), want, moments)
            self.left()
        else:
            self.expect_done(want, moments)

    def test_at_any_call(self):
        seed = int(os.environ.get("QC_SEED", "1"))
        rng = random.Random(seed)
        for form in FORMS:
            form = form + ["--threads", rng.choice("123")]
            want = self.want(form)
            total = self.calls(form)
            self.expect_done(want)
            moments = range(1, total + 1)
            if not SLOW:
                moments = sorted(rng.sample(moments, 4 if SANITIZED else 14) +
                                 [total - i for i in range(3, 60, 18 if SANITIZED else 6)])
            for moment in moments:
                with self.subTest(form=form, moment=moment, seed=seed):
                    self.chain(form, want, moment, rng, total)

    def test_around_every_deletion(self):
        """Before the file's name goes; and before each sync and rename that leads to it."""
        form = ["--to", "nf4", "--threads", "1"]
        want = self.want(form)
        for i in range(len(self.weights)):
            self.fresh()
            r = self.run_qconv("-q", *form, "--consume-source", "m", "o",
                               env=at_call("unlink:%d" % (i + 1), ".safetensors", "kill -9 $PPID"))
            self.assertEqual(r.returncode, -signal.SIGKILL, r.stderr)
            self.assertEqual(len(self.left()), len(self.weights) - i)
            out = json.loads(self.ok("--json", *form, "--consume-source", "m", "o"))
            self.assertEqual(out["continued"]["tensors_redone"], 0)
            self.assertEqual(out["files_consumed"], len(self.weights) - i)
            self.expect_done(want)

    def interrupted(self, form, deleted=2):
        """Stopped after some files were deleted."""
        self.fresh()
        r = self.run_qconv("-q", *form, "--consume-source", "m", "o",
                           env=at_call("unlink:%d" % (deleted + 1), "m/model", "kill -9 $PPID"))
        self.assertEqual(r.returncode, -signal.SIGKILL)
        self.assertEqual(len(self.left()), len(self.weights) - deleted)

    def test_what_would_lose_it_is_refused(self):
        form = ["--to", "nf4", "--threads", "1"]
        self.interrupted(form)
        kept = tree(self.path("o"))
        self.usage(*form, "--restart", "m", "o", has=["2 files", "only copy"])
        self.usage(*form, "--restart", "--force", "kept", "o", has=["2 files", "only copy"])
        # Nothing advises to remove, or to begin anew, what is the only copy.
        for args in (["--to", "int8"], ["--to", "int8", "--force"], [*form, "--keep", Q % 0]):
            line = self.fails(2, *args, "m", "o", has=["keep o/" + STAGING, "only copy"])
            self.assertNotIn("--restart", line)
        self.usage("--to", "int8", "m", "o", has="--to was")
        self.ok("-q", "--to", "nf4", "kept", "whole")
        line = self.usage("unpack", "whole", "o", command="unpack", has="interrupted conversion")
        self.assertNotIn("remove", line)
        self.fails(3, "--to", "nf4", "m", "other", has="missing")
        self.assertEqual(tree(self.path("o")), kept)
        line = self.fails(2, *form, "--part", "1/2", "m", "o", has=["--part 1/1", "only copy"])
        self.assertNotIn("--restart", line)
        self.ok("-q", *form, "--consume-source", "m", "o")
        self.expect_done(self.want(form))

    def test_restart_is_fine_where_nothing_is_lost(self):
        """The files are back, from a backup."""
        form = ["--to", "nf4", "--threads", "1"]
        self.interrupted(form)
        for n in self.weights:
            shutil.copy2(self.path("kept", n), self.path("m", n))
        self.ok("-q", "--restart", *form, "m", "o")
        self.assertEqual(tree(self.path("o")), self.want(form))
        self.assertEqual(self.left(), self.weights)

    def test_files_that_come_back_are_used(self):
        form = ["--to", "nf4", "--threads", "1"]
        self.interrupted(form)
        for n in self.weights:
            shutil.copy(self.path("kept", n), self.path("m", n))  # with times of its own
        self.ok("-q", *form, "--consume-source", "m", "o")
        self.expect_done(self.want(form))

    def test_goes_on_without_the_option(self):
        form = ["--to", "nf4", "--threads", "1"]
        self.interrupted(form)
        left = self.left()
        self.ok("-q", *form, "m", "o")
        self.assertEqual(tree(self.path("o")), self.want(form))
        self.assertEqual(self.left(), left)

    def test_from_another_folder(self):
        """The source was moved or is named otherwise; OUT, too."""
        form = ["--to", "nf4", "--threads", "1"]
        self.interrupted(form)
        want = self.want(form)
        os.makedirs(self.path("new place"))
        os.rename(self.path("m"), self.path("new place", "model"))
        os.rename(self.path("o"), self.path("new place", "out"))
        self.ok("-q", *form, "--consume-source", "new place/model/", "new place/out")
        self.assertEqual(tree(self.path("new place", "out")), want)

    def test_a_file_that_somebody_else_deleted(self):
        form = ["--to", "nf4", "--threads", "1"]
        self.interrupted(form)
        name = self.left()[-1]
        os.rename(self.path("m", name), self.path(name))
        self.fails(3, *form, "--consume-source", "m", "o", has=[name, "missing"])
        os.rename(self.path(name), self.path("m", name))
        self.ok("-q", *form, "--consume-source", "m", "o")
        self.expect_done(self.want(form))

    def test_a_damaged_only_copy(self):
        """Bytes of a deleted file that were staged and are no longer so: told, and nothing is
        thrown away."""
        form = ["--to", "nf4", *PLAIN, "--threads", "1"]
        self.interrupted(form)
        shard = self.path("o", STAGING, "model.safetensors")
        size = os.path.getsize(shard)
        with open(shard, "r+b") as f:
            kept = f.read()
            f.truncate(size // 8)
        before = tree(self.path("o"))
        for _ in range(2):
            self.fails(3, *form, "m", "o", has=["model.safetensors: what was written of tensor",
                                                "--consume-source", "cannot be read again"])
            self.assertEqual(tree(self.path("o")), before)
        with open(shard, "wb") as f:
            f.write(kept)
        self.ok("-q", *form, "--consume-source", "m", "o")
        self.expect_done(self.want(form))

    def test_lost_frames_that_the_journal_has(self):
        """What is derived from a weight is recorded with it, so that the weight's file may go, and
        once more where it is written. After a power loss that second record may be there without
        the frame."""
        form = ["--to", "nf4", "--threads", "1"]
        want = self.want(form)
        self.ok("-q", *form, "kept", "want")
        with open(self.path("want", "qconv.json"), encoding="utf-8") as f:
            tensors = json.load(f)["tensors"]
        self.interrupted(form)
        lost = [t for t in tensors if t["name"].endswith("weight.absmax")]
        self.assertGreater(len(lost), 3)
        with open(self.path("o", STAGING, "model.safetensors.zst"), "r+b") as f:
            for t in lost:
                f.seek(t["stored_offset"])
                f.write(bytes(t["stored_bytes"]))
        out = json.loads(self.ok("--json", *form, "--consume-source", "m", "o"))
        self.assertEqual(out["continued"]["tensors_redone"], 0)
        self.expect_done(want)

    def test_a_damaged_header(self):
        """What is kept of a file is read before the file goes."""
        self.fresh()
        folder = self.path("o", STAGING, "journal-headers")
        saves = 2 * len(self.weights)  # syncs: each header and the folder
        self.fails(3, "--to", "nf4", "--threads", "1", "--consume-source", "m", "o",
                   has=["-gone", "damaged"],
                   env=at_call("sync:%d" % (saves + 1), "journal-headers",
                               "for f in '%s'/*-gone; do printf x >>\"$f\"; done" % folder))
        self.assertEqual(self.left(), self.weights)

    def test_changed_at_the_last_moment(self):
        """While its saved header is brought to the disk, which comes right before it would go."""
        saves = 2 * len(self.weights)  # syncs: each header and the folder
        self.fresh()
        self.fails(3, "--to", "nf4", "--threads", "1", "--consume-source", "m", "o",
                   has=[self.weights[0], "while it was read"],
                   env=at_call("sync:%d" % (saves + 1), "journal-headers",
                               "printf x >>'%s'" % self.path("m", self.weights[0])))
        self.assertTrue(os.path.exists(self.path("m", self.weights[0])))

    def test_interrupted_in_a_long_step(self):
        """A process that ends in the middle of something leaves what it has staged: a thread may be
        about to delete a file for which that is all there is."""
        self.fresh()
        form = ["--to", "nf4", *PLAIN, "--threads", "1"]
        r = self.run_qconv(*form, "--consume-source", "m", "o",
                           env=at_call("write:1", STAGING + "/model",
                                       "kill -TERM $PPID; sleep 2"))
        self.assertEqual(r.returncode, 130, r.stderr)
        self.assertIn(b"0 of ", r.stderr)
        self.assertIn(b"same command continues", r.stderr)
        self.assertTrue(os.path.isdir(self.path("o", STAGING, "journal-headers")))
        self.assertEqual(self.left(), self.weights)
        self.ok("-q", *form, "--consume-source", "m", "o")
        self.expect_done(self.want(form))

    def test_changed_meanwhile(self):
        """A file that was written to is not deleted, whatever else happens."""
        form = ["--to", "nf4", "--threads", "1"]
        for name in self.weights:
            self.fresh()
            path = self.path("m", name)
            line = self.fails(3, *form, "--consume-source", "m", "o",
                              has=[name, "while it was read"],
                              env=at_call("unlink:1", "m/model", "for f in '%s'; do printf x >>\"$f\"; "
                                          "done" % path) if name != self.weights[0] else
                              at_call("write:3", STAGING, "printf x >>'%s'" % path))
            if name != self.weights[0]:  # else nothing need be finished yet
                self.assertIn("same command continues", line)
            self.assertTrue(os.path.exists(path))
            shutil.copy(self.path("kept", name), path)
            self.ok("-q", *form, "--consume-source", "m", "o")
            self.expect_done(self.want(form))


@unittest.skipUnless(FAULT_DISK, "needs the library of tests/tools/fault_disk.c")
class PowerLoss(ConsumeCase):
    """What was not synced when the power went is lost, or half lost: never a weight of a file that
    is gone."""

    M, O = "w/m", "w/o"

    def faulty(self, form, **settings):
        env = {"QC_FAULT_" + k.upper(): str(v) for k, v in settings.items()}
        env.update(LD_PRELOAD=FAULT_DISK, QC_FAULT_DIRS=self.path("w"),
                   QC_FAULT_COUNTS=self.path("counts"), QC_FAULT_ATTIC=self.path("attic"))
        env["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
        shutil.rmtree(self.path("attic"), ignore_errors=True)
        os.mkdir(self.path("attic"))
        r = self.run_qconv("-q", *form, "--consume-source", self.M, self.O, env=env)
        self.assertNotEqual(r.returncode, 99, r.stderr)
        return r

    def changes(self):
        with open(self.path("counts"), "rb") as f:
            return struct.unpack("<Q", f.read()[-8:])[0]  # the last: any change

    def test_a_manifest_that_cannot_be_read(self):
        """Files were moving to OUT when it died. Whatever cannot be opened by the next run, the one
        after it goes on: nothing that has moved is to be made again, and nothing could be."""
        os.mkdir(self.path("w"))
        form = ["--to", "nf4", "--threads", "1", "--max-shard-size", "9000B"]
        want = self.want(form)
        self.fresh()
        r = self.run_qconv("-q", *form, "--consume-source", self.M, self.O,
                           env=at_call("rename:3", STAGING + "/model-", "kill -9 $PPID"))
        self.assertEqual(r.returncode, -signal.SIGKILL, r.stderr)
        self.assertEqual(self.left(), [])
        os.rename(self.path("w"), self.path("dead"))
        refused = []
        for n in range(1, 40):
            shutil.copytree(self.path("dead"), self.path("w"))
            r = self.faulty(form, fail="open:%d:EIO" % n)
            refused.append(r.stderr.decode())
            if r.returncode:
                self.assertEqual(r.returncode, 1, r.stderr)
            self.ok("-q", *form, "--consume-source", self.M, self.O)
            self.expect_done(want, n)
            shutil.rmtree(self.path("w"))
        self.assertTrue(any(STAGING + "/qconv.json cannot be opened" in e for e in refused))

    def test_what_an_earlier_run_wrote_is_synced(self):
        """It may be in the page cache only: whoever deletes on its account brings it to the disk."""
        os.mkdir(self.path("w"))
        form = ["--to", "nf4", "--threads", "1"]
        self.fresh()
        r = self.run_qconv("-q", *form, "--consume-source", self.M, self.O,
                           env=at_call("rename:2", "-headers/00000", "kill -9 $PPID"))
        self.assertEqual(r.returncode, -signal.SIGKILL, r.stderr)
        self.assertEqual(self.left(), self.weights)
        os.rename(self.path("w"), self.path("dead"))
        shard = STAGING + "/model.safetensors.zst could not be brought to the disk"
        for n in range(1, 40):
            shutil.copytree(self.path("dead"), self.path("w"))
            r = self.faulty(form, fail="sync:%d:EIO" % n)
            left = self.left()
            shutil.rmtree(self.path("w"))
            if shard in r.stderr.decode():
                break
            self.assertEqual(left, self.weights, r.stderr)
        self.assertIn(shard, r.stderr.decode())
        self.assertEqual(left, self.weights)

    def test_at_changes_of_the_disk(self):
        seed = int(os.environ.get("QC_SEED", "1"))
        rng = random.Random(seed)
        os.mkdir(self.path("w"))
        for form in FORMS:
            form = form + ["--threads", rng.choice("12")]
            want = self.want(form)
            self.fresh()
            self.assertEqual(self.faulty(form).returncode, 0)
            self.expect_done(want)
            total = self.changes()
            moments = list(range(1, total + 1))
            if not SLOW:
                moments = rng.sample(moments, 8) + rng.sample(moments[-60:], 8)
            for moment in moments:
                with self.subTest(form=form, moment=moment, seed=seed):
                    self.fresh()
                    deaths = [moment]
                    self.faulty(form, power="%d:%d" % (moment, rng.randrange(1000)))
                    while rng.random() < 0.5:
                        self.left()
                        deaths.append(rng.randrange(1, total + 1))
                        self.faulty(form, power="%d:%d" % (deaths[-1], rng.randrange(1000)))
                    self.left()
                    self.ok("-q", *form, "--consume-source", self.M, self.O)
                    self.expect_done(want, deaths)


class SmallDisk(ConsumeCase):
    """A disk that holds the source and little more."""

    def disk(self, room):
        where = self.path("disk")
        os.mkdir(where)
        r = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=%d" % room, "none", where],
                           stderr=subprocess.PIPE)
        if r.returncode:
            self.skipTest("no file system can be mounted here")
        self.addCleanup(subprocess.run, ["umount", where], check=True)

    def test_as_bf16(self):
        """Output as large as the source: fits only because files go, or by the same command."""
        rng = random.Random(8)
        self.model({Q % i: ("BF16", [512, 512], mk.random_bytes("BF16", [512, 512], rng))
                    for i in range(12)}, name="big", shard_bytes=1100000)
        form = ["--to", "bf16", *PLAIN, "--threads", "1", "--max-shard-size", "1MB"]
        self.ok("-q", *form, "big", "want")
        total = sum(os.path.getsize(self.path("big", n)) for n in os.listdir(self.path("big")))
        self.disk(total + 3 * 1100000)
        shutil.copytree(self.path("big"), self.path("disk", "m"))
        self.fails(1, *form, "disk/m", "disk/o", has="missing")
        for runs in range(12):
            r = self.run_qconv("-q", *form, "--consume-source", "disk/m", "disk/o")
            if r.returncode == 0:
                break
            self.assertEqual(r.returncode, 1, r.stderr)
            self.assertIn(b"same command continues", r.stderr)
        self.assertEqual(r.returncode, 0)
        self.assertEqual(runs, 0, "the disk was full where it need not have been")
        self.assert_same("want", "disk/o")


if __name__ == "__main__":
    unittest.main(argv=[a for a in sys.argv if a != "--slow"])
