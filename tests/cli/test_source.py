"""Where a source may lie, and what of it may not be touched: read-only, forbidden, on another file
system, under any name, in the links of a hub cache; and a source that changes while it is read."""
import hashlib
import json
import os
import random
import shutil
import stat
import subprocess
import tempfile
import unittest

from output_case import AT_CALL, OutputCase, PLAIN, at_call, tree
from qconv_case import QCONV
import make_checkpoint as mk

Q = "model.layers.%d.self_attn.q_proj.weight"
NORM = "model.norm.weight"
NOBODY = 65534
SIDE = {"tokenizer.json": "{}", "sub/notes.txt": "text"}


def somebody(case):
    """Arguments for subprocess to run the program as somebody who is not root; skips where it cannot be."""
    who = {"user": NOBODY} if os.geteuid() == 0 else {}
    try:
        subprocess.run([QCONV, "--version"], stdout=subprocess.DEVNULL, check=True, **who)
    except (OSError, subprocess.CalledProcessError):
        case.skipTest("another user cannot run the program")
    return who


class SourceCase(OutputCase):
    def small(self, name="m", shard_bytes=9000):
        """Some weights in several shards, and side files."""
        rng = random.Random(3)
        tensors = {Q % i: ("BF16", [64, 64], mk.random_bytes("BF16", [64, 64], rng))
                   for i in range(4)}
        tensors[NORM] = ("BF16", [64], mk.random_bytes("BF16", [64], rng))
        self.model(tensors, name=name, shard_bytes=shard_bytes)
        for side, text in SIDE.items():
            os.makedirs(os.path.dirname(self.path(name, side)), exist_ok=True)
            self.write(name + "/" + side, text)

    def want(self, name="m"):
        """What converting it gives, from a place without peculiarities."""
        with tempfile.TemporaryDirectory(dir=self.dir) as d:
            self.ok("-q", "--to", "nf4", name, d + "/o")
            return tree(d + "/o")

    def stats(self, name):
        """Everything of a tree that a program could change but the times of access."""
        found = {}
        for folder, dirs, names in os.walk(self.path(name)):
            for n in dirs + names + ["."]:
                full = os.path.join(folder, n)
                s = os.lstat(full)
                digest = None
                if stat.S_ISREG(s.st_mode):
                    with open(full, "rb") as f:
                        digest = hashlib.sha256(f.read()).digest()
                found[full] = (s.st_mode, s.st_ino, s.st_nlink, s.st_size, s.st_mtime_ns,
                               s.st_ctime_ns, digest)
        return found

    def mount(self, *args):
        r = subprocess.run(["mount", *args], stderr=subprocess.PIPE, cwd=self.dir)
        if r.returncode:
            self.skipTest("no file system can be mounted here")
        self.addCleanup(subprocess.run, ["umount", args[-1]], cwd=self.dir, check=True)


class ReadOnly(SourceCase):
    def test_nothing_is_touched(self):
        """Folders and files without a right to write, by somebody who is not root."""
        self.small()
        want = self.want()
        for folder, _, names in os.walk(self.path("m"), topdown=False):
            for n in names:
                os.chmod(os.path.join(folder, n), 0o444)
            os.chmod(folder, 0o555)
        self.addCleanup(self.writable)
        os.chmod(self.dir, 0o777)
        before = self.stats("m")
        who = somebody(self)
        r = subprocess.run([QCONV, "-q", "--to", "nf4", "m", "o"], cwd=self.dir, **who,
                           stderr=subprocess.PIPE)
        if who and b"Permission denied: '" in r.stderr:
            self.skipTest("another user cannot run the program")
        self.assertEqual((r.returncode, r.stderr), (0, b""))
        self.assertEqual(tree(self.path("o")), want)
        self.assertEqual(self.stats("m"), before)
        for n in os.listdir(self.path("o")):  # what is copied is ours to change
            self.assertTrue(os.stat(self.path("o", n)).st_mode & stat.S_IWUSR, n)

    def writable(self):
        for folder, _, names in os.walk(self.path("m")):
            os.chmod(folder, 0o755)
            for n in names:
                os.chmod(os.path.join(folder, n), 0o644)

    def test_read_only_file_system(self):
        self.small("w")
        want = self.want("w")
        os.mkdir(self.path("m"))
        self.mount("--bind", "w", self.path("m"))
        subprocess.run(["mount", "-o", "remount,bind,ro", self.path("m")], check=True)
        with self.assertRaises(OSError):
            open(self.path("m", "x"), "w").close()
        self.ok("-q", "--to", "nf4", "m", "o")
        self.assertEqual(tree(self.path("o")), want)
        self.fails(1, "--to", "nf4", "w", "m/o", has=["m/o", "Read-only"])


class Denied(SourceCase):
    """As somebody who is not root: what cannot be read is named, and nothing is left."""

    def setUp(self):
        super().setUp()
        self.small()
        os.chmod(self.dir, 0o777)
        self.who = somebody(self)

    def line(self, name, *args):
        r = subprocess.run([QCONV, *args], cwd=self.dir, capture_output=True, **self.who)
        line = r.stderr.decode()
        self.assertEqual((r.returncode, r.stdout, line.count("\n")), (1, b"", 1), line)
        self.assertIn(name, line)
        self.assertIn("denied", line)
        return line

    def denied(self, name):
        line = self.line(name, "--to", "nf4", "m", "o")
        self.assertFalse(os.path.exists(self.path("o", "qconv.json")))
        # Only what was not found out at once left work to go on with.
        self.assertEqual(os.path.exists(self.path("o")), "same command continues" in line)

    def test_every_file_and_folder(self):
        want = self.want()
        for name in ["model.safetensors.index.json", "model-00003-of-00004.safetensors",
                     "config.json", "tokenizer.json", "sub/notes.txt", "sub", "."]:
            full = self.path("m", name)
            mode = stat.S_IMODE(os.stat(full).st_mode)
            os.chmod(full, 0)
            self.denied("m" if name == "." else name)
            os.chmod(full, mode)
            self.ok("-q", "--to", "nf4", "m", "o")
            self.assertEqual(tree(self.path("o")), want, name)
            shutil.rmtree(self.path("o"))

    def test_out(self):
        for name, out in (("ro", "ro/o"), ("ro2", "ro2")):
            os.mkdir(self.path(name))
            os.chmod(self.path(name), 0o555)
            self.line(out, "--to", "nf4", "m", out)
            self.assertEqual(os.listdir(self.path(name)), [])
        self.ok("-q", "--to", "nf4", "m", "o")
        for name in (n for n, body in tree(self.path("o")).items() if body is not None):
            os.chmod(self.path("o", name), 0)
            self.line(name, "verify", "o")
            os.chmod(self.path("o", name), 0o644)

    def test_folder_that_can_be_listed_only(self):
        os.chmod(self.path("m"), 0o444)
        self.denied("m")
        os.chmod(self.path("m"), 0o755)


class OtherFileSystem(SourceCase):
    def test_tmp_and_shm(self):
        """The folder of these tests is in memory where there is such a place; OUT is elsewhere."""
        self.small()
        want = self.want()
        with tempfile.TemporaryDirectory(prefix="qconv-cli-") as other:
            if os.stat(other).st_dev == os.stat(self.dir).st_dev:
                self.skipTest("one file system only")
            self.ok("-q", "--to", "nf4", "m", other + "/o")
            self.assertEqual(tree(other + "/o"), want)
            os.symlink(other, self.path("away"))
            self.ok("-q", "--to", "nf4", "m", "away/p")
            self.assertEqual(tree(other + "/p"), want)
            os.mkdir(other + "/q")
            os.symlink(other + "/q", self.path("q"))
            self.ok("-q", "--to", "nf4", "m", "q")
            self.assertEqual(tree(other + "/q"), want)
            shutil.copytree(self.path("m"), other + "/m")
            self.ok("-q", "--to", "nf4", other + "/m", "o")
            self.assertEqual(tree(self.path("o")), want)

    def test_out_is_a_mounted_file_system(self):
        self.small()
        want = self.want()
        os.mkdir(self.path("o"))
        self.mount("-t", "tmpfs", "-o", "size=4m", "none", self.path("o"))
        self.ok("-q", "--to", "nf4", "m", "o")
        self.assertEqual(tree(self.path("o")), want)
        self.ok("-q", "--to", "int8", "--force", "m", "o")
        self.ok("-q", "--to", "nf4", "--force", "m", "o")
        self.assertEqual(tree(self.path("o")), want)

    def test_a_shard_is_on_another(self):
        """A folder whose files are links to several disks."""
        self.small()
        want = self.want()
        with tempfile.TemporaryDirectory(prefix="qconv-cli-") as other:
            name = "model-00002-of-00004.safetensors"
            shutil.move(self.path("m", name), other + "/" + name)
            os.symlink(other + "/" + name, self.path("m", name))
            self.ok("-q", "--to", "nf4", "m", "o")
            self.assertEqual(tree(self.path("o")), want)


class Names(SourceCase):
    """Spaces, UTF-8, quotes, what a shell or a format string would trip over."""

    FOLDERS = ["two words", " begins and ends ", "\u6a21\u578b-\u00e4\u00f6\u00fc \U0001f9e0",
               "it's \"quoted\"", "100%s %n %d", "-starts-with-dash", "a\\b", "$HOME `x` ;&|", "~",
               "new\nline\tand tab", "*?[x]", "n" * 200]

    def test_folders(self):
        self.small()
        want = self.want()
        for i, name in enumerate(self.FOLDERS):
            source = self.path("s%d" % i, name)
            shutil.copytree(self.path("m"), source)
            out = self.path("o%d" % i, name, name)
            for env in ({"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}):
                self.ok("-q", "--to", "nf4", source, out, env=env)
                self.assertEqual(tree(out), want, name)
                self.ok("-q", "verify", out, env=env)
                json.loads(self.ok("inspect", "--json", source, env=env))
                json.loads(self.ok("--to", "nf4", "--dry-run", "--json", source, env=env))
                self.ok("unpack", "-q", out, self.path("u%d" % i, name), env=env)
                shutil.rmtree(self.path("u%d" % i))
                shutil.rmtree(self.path("o%d" % i))

    def test_relative_to_where_it_is_run(self):
        self.small()
        want = self.want()
        os.makedirs(self.path("a b", "-c"))
        for words in (["../../m", "o"], ["./../../m/", "./o/"], ["../../m", "../../o o"]):
            subprocess.run([QCONV, "-q", "--to", "nf4", *words], cwd=self.path("a b", "-c"),
                           check=True)
            out = os.path.normpath(self.path("a b", "-c", words[1]))
            self.assertEqual(tree(out), want)
            shutil.rmtree(out)

    def test_shards_and_side_files(self):
        """Names of files that only the index knows."""
        self.small()
        want = self.want()
        index = self.json_of("m", "model.safetensors.index.json")
        odd = {}
        for i, old in enumerate(sorted(set(index["weight_map"].values()))):
            odd[old] = ["a b.safetensors", "\u00e9\u6f22.safetensors", "sub dir/x %s.safetensors",
                        "'q'.safetensors", "$x;.safetensors"][i]
            os.makedirs(os.path.dirname(self.path("m", odd[old])), exist_ok=True)
            os.rename(self.path("m", old), self.path("m", odd[old]))
        index["weight_map"] = {k: odd[v] for k, v in index["weight_map"].items()}
        mk.write_json(self.path("m", "model.safetensors.index.json"), index)
        side = ["my notes.txt", "\u043b\u0438\u0446\u0435\u043d\u0437\u0438\u044f.md", "100%.json"]
        for name in side:
            self.write("m/" + name, name)
        self.ok("-q", "--to", "nf4", "m", "o")
        got = tree(self.path("o"))
        for name in side:
            self.assertEqual(got.pop(name).decode(), name)
        manifest, manifest_want = json.loads(got.pop("qconv.json")), json.loads(
            want.pop("qconv.json"))
        self.assertEqual(got, want)
        self.assertEqual(manifest["tensors"], manifest_want["tensors"])
        self.assertEqual(sorted(odd.values()),
                         sorted(s["name"] for s in manifest["sources"]))
        self.ok("-q", "verify", "o")
        self.ok("-q", "verify", "o", "--against", "m")


class HubCache(SourceCase):
    """models--A--B/{blobs,refs,snapshots/REVISION}: every file of a snapshot is a link."""

    def cache(self, blobs="blobs"):
        self.small()
        self.assertEqual(self.want(), self.want())
        root = self.path("hub", "models--acme--tiny")
        snapshot = os.path.join(root, "snapshots", "0123abcd")
        os.makedirs(os.path.join(root, blobs))
        os.makedirs(os.path.join(root, "refs"))
        with open(os.path.join(root, "refs", "main"), "w") as f:
            f.write("0123abcd")
        for name in tree(self.path("m")):
            source = self.path("m", name)
            link = os.path.join(snapshot, name)
            if os.path.isdir(source):
                os.makedirs(link, exist_ok=True)
                continue
            os.makedirs(os.path.dirname(link), exist_ok=True)
            with open(source, "rb") as f:
                blob = os.path.join(root, blobs, hashlib.sha256(f.read()).hexdigest())
            shutil.copy(source, blob)
            os.symlink(os.path.relpath(blob, os.path.dirname(link)), link)
        return snapshot

    def test_snapshot(self):
        snapshot = self.cache()
        want = self.want()
        before = self.stats("hub")
        for model in (snapshot, snapshot + "/", os.path.relpath(snapshot, self.dir)):
            self.ok("-q", "--to", "nf4", model, "o")
            self.assertEqual(tree(self.path("o")), want)
            for folder, dirs, names in os.walk(self.path("o")):
                for n in dirs + names:
                    self.assertFalse(os.path.islink(os.path.join(folder, n)), n)
            self.ok("-q", "verify", "o", "--against", model)
            shutil.rmtree(self.path("o"))
        self.assertEqual(self.stats("hub"), before)

    def test_link_to_the_snapshot(self):
        snapshot = self.cache()
        os.symlink(snapshot, self.path("latest"))
        self.ok("-q", "--to", "nf4", "latest", "o")
        self.assertEqual(tree(self.path("o")), self.want())
        self.usage("--to", "nf4", "latest", "latest/o", has="inside its source")
        self.usage("--to", "nf4", "latest", snapshot, has="source")

    def test_one_file(self):
        """One link to one blob, given by itself: what the blob is called does not matter."""
        rng = random.Random(4)
        self.model({Q % 0: ("BF16", [64, 64], mk.random_bytes("BF16", [64, 64], rng))}, name="s")
        self.ok("-q", "--to", "nf4", "s/model.safetensors", "want")
        os.makedirs(self.path("blobs"))
        os.rename(self.path("s", "model.safetensors"), self.path("blobs", "ab12"))
        os.symlink("../blobs/ab12", self.path("s", "model.safetensors"))
        self.ok("-q", "--to", "nf4", "s/model.safetensors", "o")
        self.assert_same("want", "o")

    def test_missing_blob(self):
        """An interrupted download leaves a link that leads nowhere."""
        snapshot = self.cache()
        name = "model-00003-of-00004.safetensors"
        os.remove(os.path.realpath(os.path.join(snapshot, name)))
        self.fails(3, "--to", "nf4", snapshot, "o", has=[name])
        self.assert_nothing("o")

    def test_blob_being_downloaded(self):
        """Shorter than its header says."""
        snapshot = self.cache()
        name = "model-00002-of-00004.safetensors"
        os.truncate(os.path.join(snapshot, name), 5000)
        self.fails(3, "--to", "nf4", snapshot, "o", has=[name, "bytes"])
        self.assert_nothing("o")


@unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
class Changing(SourceCase):
    """The source is written to, replaced or removed while it is read."""

    SHARD = "model-00003-of-00004.safetensors"

    def setUp(self):
        super().setUp()
        self.small()
        self.expected = self.want()
        shutil.copytree(self.path("m"), self.path("kept"))
        for folder, _, names in os.walk(self.path("m")):
            for n in names:  # long ago, so that any write is another time
                os.utime(os.path.join(folder, n), ns=(10 ** 18, 10 ** 18))

    def restore(self):
        shutil.copy(self.path("kept", self.SHARD), self.path("m", self.SHARD))
        os.utime(self.path("m", self.SHARD), ns=(10 ** 18, 10 ** 18))

    def reads(self, form):
        """How often the shard is read by a conversion, opening included."""
        self.ok("-q", *form, "m", "count", env=at_call("read:1", self.SHARD, count="n"))
        shutil.rmtree(self.path("count"))
        with open(self.path("n"), encoding="ascii") as f:
            return int(f.read())

    CHANGES = {
        "grows": ("printf x >>%s", "bytes"),
        "shrinks": ("truncate -s 8000 %s", "bytes"),
        "is emptied": ("truncate -s 0 %s", "bytes"),
        "is overwritten": ("printf x | dd of=%s bs=1 seek=7000 conv=notrunc status=none", "written"),
        "is replaced": ("cp %s new && mv new %s", "another file"),
        "is removed": ("rm %s", "removed"),
    }

    def changed(self, form, name, moment):
        command, words = self.CHANGES[name]
        path = self.path("m", self.SHARD)
        line = self.fails(3, *form, "m", "o", has=[self.SHARD, "while it was read", words],
                          env=at_call("read:%d" % moment, self.SHARD,
                                      command.replace("%s", "'%s'" % path)))
        # What is done stays, and the same command is right to try again.
        self.assertEqual(os.path.isdir(self.path("o")), "same command continues" in line, line)
        self.assertFalse(os.path.exists(self.path("o", "qconv.json")))

    def test_every_change_at_every_read(self):
        for form in (["--to", "nf4", "--threads", "1"], ["--to", "int8", *PLAIN]):
            shutil.rmtree(self.path("o"), ignore_errors=True)
            self.ok("-q", *form, "m", "o")
            want = tree(self.path("o"))
            shutil.rmtree(self.path("o"))
            last = self.reads(form)
            for name in self.CHANGES:
                # The first reads are those of opening: what is there then is what is converted.
                for moment in (last, last - 1):
                    self.changed(form, name, moment)
                    self.restore()
                    self.ok("-q", *form, "m", "o")
                    self.assertEqual(tree(self.path("o")), want, name)
                    shutil.rmtree(self.path("o"))

    def test_after_its_last_read(self):
        """Whoever changes a file that is done is told as well, before anything is in place."""
        form = ["--to", "nf4", "--threads", "1"]
        for name in self.CHANGES:
            command, words = self.CHANGES[name]
            path = self.path("m", self.SHARD)
            # tokenizer.json is copied when all weights are written; opening has read its two ends.
            line = self.fails(3, *form, "m", "o", has=[self.SHARD, "while it was read", words],
                              env=at_call("read:3", "m/tokenizer.json",
                                          command.replace("%s", "'%s'" % path)))
            self.assertIn("5 of 5 tensors are done, and the same command continues", line)
            self.restore()
            out = json.loads(self.ok("--json", *form, "m", "o"))
            self.assertEqual(out["continued"], {"tensors_kept": 5, "tensors_redone": 0})
            self.assertEqual(tree(self.path("o")), self.expected, name)
            shutil.rmtree(self.path("o"))

    def test_touched_only(self):
        """Another time, the same bytes: the first run stops, the same command continues."""
        form = ["--to", "nf4", "--threads", "1"]
        self.fails(3, *form, "m", "o", has=[self.SHARD, "written"],
                   env=at_call("read:3", "m/tokenizer.json",
                               "touch '%s'" % self.path("m", self.SHARD)))
        out = json.loads(self.ok("--json", *form, "m", "o"))
        self.assertEqual(out["continued"], {"tensors_kept": 5, "tensors_redone": 0})
        self.assertEqual(tree(self.path("o")), self.expected)

    def test_other_bytes_do_not_continue(self):
        form = ["--to", "nf4", "--threads", "1"]
        self.fails(3, *form, "m", "o", has=[self.SHARD, "written"],
                   env=at_call("read:3", "m/tokenizer.json",
                               self.CHANGES["is overwritten"][0] % self.path("m", self.SHARD)))
        self.fails(3, *form, "m", "o", has=[self.SHARD, "self_attn.q_proj.weight", "--restart"])
        self.ok("-q", "--restart", *form, "m", "o")
        self.assertEqual(tree(self.path("o")), self.want())
        self.ok("-q", "verify", "o", "--against", "m")

    def test_what_is_no_change(self):
        """Rights, names and times of access."""
        path = self.path("m", self.SHARD)
        for command in ("chmod 600 %s", "ln %s hard", "cat %s >/dev/null",
                        "mv %s moved && ln -s ../moved %s"):
            self.ok("-q", "--to", "nf4", "m", "o",
                    env=at_call("read:3", self.SHARD, command.replace("%s", path)))
            self.assertEqual(tree(self.path("o")), self.expected, command)
            shutil.rmtree(self.path("o"))
            if os.path.islink(path):
                os.remove(path)
                os.rename(self.path("moved"), path)


class Adapters(SourceCase):
    """What peft saves is no model; beside a model it is a side file."""

    def adapter(self, folder, rank, name="adapter_model.safetensors", config=True):
        os.makedirs(self.path(folder), exist_ok=True)
        rng = random.Random(rank)
        stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        mk.write_safetensors(self.path(folder, name), {
            stem + "A.weight": ("F32", [rank, 64], mk.random_bytes("F32", [rank, 64], rng)),
            stem + "B.weight": ("F32", [64, rank], mk.random_bytes("F32", [64, rank], rng))})
        if config:
            self.write(folder + "/adapter_config.json", '{"peft_type": "LORA", "r": %d}' % rank)

    def test_alone(self):
        for rank in (8, 64):
            self.adapter("a%d" % rank, rank)
            self.adapter("named", rank, "weights-%d.safetensors" % rank, config=False)
            for model in ("a%d" % rank, "a%d/adapter_model.safetensors" % rank,
                          "named/weights-%d.safetensors" % rank):
                self.fails(3, "--to", "nf4", model, "o",
                           has=["is an adapter", "with --lora", "load the adapter on the result"])
                self.fails(3, "plan", model, "--vram", "24GB", has="is an adapter")
                self.ok("inspect", model)
        self.assertFalse(os.path.exists(self.path("o")))

    def test_beside_a_model(self):
        self.small()
        self.adapter("m", 64)
        self.adapter("m/checkpoint-500", 8)
        self.assertIn("copied as it is: 'adapter_model.safetensors', 'checkpoint-500/",
                      self.warned("--to", "nf4", "m", "o"))
        want, got = tree(self.path("m")), tree(self.path("o"))
        for name in ("adapter_model.safetensors", "adapter_config.json",
                     "checkpoint-500/adapter_model.safetensors"):
            self.assertEqual(got[name], want[name])
        self.ok("verify", "o")
        self.ok("-q", "unpack", "o", "u")
        # One file and an adapter: the model is the one that is none.
        self.model({Q % 0: ("BF16", [64, 64], mk.random_bytes("BF16", [64, 64], random.Random(1)))},
                   name="one")
        os.rename(self.path("one/model.safetensors"), self.path("one/w.safetensors"))
        self.adapter("one", 8)
        self.ok("-q", "--to", "nf4", "one", "p")


class OneFile(SourceCase):
    """MODEL is a file: with the config.json beside it, where that is the file's own."""

    def setUp(self):
        super().setUp()
        self.model({Q % 0: ("BF16", [64, 64], mk.random_bytes("BF16", [64, 64], random.Random(1)))},
                   name="m")

    def convert(self, model):
        r = self.run_qconv("--to", "nf4", model, "o")
        self.assertEqual(r.returncode, 0, r.stderr)
        names = sorted(os.listdir(self.path("o")))
        shutil.rmtree(self.path("o"))
        return r.stderr.decode(), names

    def test_config_is_taken(self):
        whole = self.convert("m")[1]
        words, names = self.convert("m/model.safetensors")
        self.assertIn("'config.json' beside 'model.safetensors' is taken as its own\n", words)
        self.assertEqual(names, whole)
        # Other files are the folder's, not the file's.
        self.write("m/tokenizer.json", "{}")
        words, names = self.convert("m/model.safetensors")
        self.assertIn("other files of the folder are not", words)
        self.assertEqual(names, whole)
        # The only one of its folder may have any name.
        os.rename(self.path("m/model.safetensors"), self.path("m/mine.safetensors"))
        self.assertEqual(self.convert("m/mine.safetensors")[1], whole)

    def test_config_of_something_else(self):
        shutil.copy(self.path("m/model.safetensors"), self.path("m/other.safetensors"))
        words, names = self.convert("m/other.safetensors")
        self.assertIn("'config.json' beside 'other.safetensors' is not taken", words)
        self.assertNotIn("config.json", names)
        self.assertIn("is taken", self.convert("m/model.safetensors")[0])
        os.mkdir(self.path("loose"))
        shutil.copy(self.path("m/model.safetensors"), self.path("loose"))
        words, names = self.convert("loose/model.safetensors")
        self.assertNotIn("is taken", words)
        self.assertNotIn("is not taken", words)

    def test_index_is_the_folder(self):
        self.small("s")
        want = self.want("s")
        for model in ("s/model.safetensors.index.json", self.path("s/model.safetensors.index.json")):
            self.ok("-q", "--to", "nf4", model, "o")
            self.assertEqual(tree(self.path("o")), want)
            shutil.rmtree(self.path("o"))
        self.usage("--to", "nf4", "s/model.safetensors.index.json", "s/o", has="inside its source")


if __name__ == "__main__":
    unittest.main()
