"""Checkpoints that somebody made to harm: names that speak to the terminal, links to files that are
not theirs, headers that lie, a little that becomes a lot. docs/security.md has the figures."""
import json
import os
import struct
import subprocess
import unicodedata
import unittest

from output_case import OutputCase
from qconv_case import QCONV, ROOT, SANITIZED
import make_checkpoint as mk

MIB = 1 << 20
# What an 80-column terminal, a pager or a log would act on, and a name that looks like another.
EVIL = "a\x1b]0;x\x07\x1b[31m\x7f\x9b2J\u202egnp.\u2028\ufeff\u200b\u200d\u2060\u00ad\U000e0041\"<b>"
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def header_file(path, header, data_bytes=0, said=None):
    """A safetensors file: header bytes, a hole for the data; said: the length it claims."""
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(header) if said is None else said) + header)
        f.truncate(8 + len(header) + data_bytes)


def zstd(content):
    return subprocess.run(["zstd", "-q", "-c", "-3"], input=content, stdout=subprocess.PIPE,
                          check=True).stdout


def seekable(frames):
    """frames: [(stored bytes, how much the table says is in them)]."""
    entries = b"".join(struct.pack("<II", len(z), n) for z, n in frames)
    return b"".join(z for z, n in frames) + struct.pack("<II", 0x184D2A5E, len(entries) + 9) + \
        entries + struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)


class Names(OutputCase):
    """Nothing of a name reaches a terminal as more than text, whichever command shows it."""

    def check(self, r, note):
        for stream in (r.stdout, r.stderr):
            text = stream.decode("utf-8")
            acts = [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Zl")]
            self.assertEqual(acts, [], (note, text))

    def run_checked(self, code, *args):
        r = self.run_qconv(*args)
        self.assertEqual(r.returncode, code, (args, r.stderr))
        self.check(r, args)
        return r

    def test_every_command(self):
        odd = "model.layers.0." + EVIL + ".weight"
        self.model({WEIGHT: ("F32", [32, 64], mk.encode("F32", [0.5, -1.0] * 1024)),
                    odd: ("F32", [64, 64], mk.encode("F32", [0.5, 0.25] * 2048)),
                    EVIL: ("F32", [4], bytes(16))},
                   config={"model_type": EVIL, "torch_dtype": EVIL, "architectures": [EVIL]},
                   name="m" + EVIL.replace("/", ""))
        m = "m" + EVIL.replace("/", "")
        os.rename(self.path(m), self.path("m"))
        with open(self.path("m", "t" + EVIL + ".txt"), "w") as f:
            f.write("x")
        os.symlink("m", self.path(m))
        for args in (["inspect", m], ["inspect", "-v", m], ["inspect", "--json", m], ["plan", m],
                     ["plan", "--json", m], ["plan", "-v", "--vram", "1GB", m],
                     ["--to", "nf4", "--dry-run", m, "x" + EVIL],
                     ["--to", "nf4", "--explain", "-v", "-v", m, "o" + EVIL],
                     ["--to", "int8", "--json", m, "i" + EVIL],
                     ["verify", "o" + EVIL], ["verify", "--json", "o" + EVIL],
                     ["verify", "-v", "--against", m, "o" + EVIL],
                     ["verify", "--json", "--against", m, "o" + EVIL],
                     ["inspect", "o" + EVIL], ["inspect", "--json", "o" + EVIL],
                     ["unpack", "--json", "o" + EVIL, "u" + EVIL]):
            r = self.run_checked(2 if "--explain" in args else 0, *args)
            if "--explain" in args:
                self.run_checked(0, *[a for a in args if a != "--explain"])
            if "--json" in args:
                json.loads(r.stdout)
        shown = json.loads(self.ok("inspect", "--json", m))
        self.assertIn(odd, [t["name"] for t in shown["tensors"]])
        self.assertEqual(mk.read_checkpoint(self.path("u" + EVIL))[EVIL][1], [4])
        # And where something is wrong with what has that name.
        for args in (["inspect", "none" + EVIL], ["--to", "nf4", "--keep", EVIL + "*", m, "y"],
                     ["--to", EVIL, m, "y"], ["--" + EVIL, m], [EVIL, m, "y", "z"],
                     ["plan", "--vram", EVIL, m], ["verify", m]):
            r = self.run_qconv(*args)
            self.check(r, args)
            self.assertLessEqual(r.stderr.count(b"\n"), 3, (args, r.stderr))
        nan = mk.encode("F32", [float("nan")] * 2048)
        self.model({odd: ("F32", [32, 64], nan)}, name="nan")
        self.assertNotIn("\x1b", self.fails(3, "-q", "--to", "nf4", "nan", "n", has="is not finite"))

    def test_paths_that_are_not_utf8(self):
        self.model({WEIGHT: ("F32", [32, 64], bytes(8192))})
        with open(os.fsencode(self.path("m")) + b"/bad\xff\x1bname.txt", "w") as f:
            f.write("x")
        r = self.run_checked(0, "--to", "nf4", "--json", "m", "o\udcff")
        self.assertEqual(json.loads(r.stdout)["out"], "o\ufffd")
        self.assertIn("1 file is not copied for a name that is not UTF-8: 'bad??name.txt'",
                      r.stderr.decode())
        self.ok("verify", "o\udcff")
        self.usage("--to", "nf4", "--keep", "[\udc80-\udcff]*", "m", "p",
                   has="expected a glob in UTF-8, as the names of tensors are, found ")


class Links(OutputCase):
    """What a link in a model's folder leads to is not handed on, unless it lies in the folder."""

    def setUp(self):
        super().setUp()
        self.model({WEIGHT: ("F32", [32, 64], bytes(8192))})
        self.write("secret", "precious")

    def test_links_that_leave(self):
        for target in ("../secret", self.path("secret"), "../m/../secret"):
            os.symlink(target, self.path("m/notes.txt"))
            self.fails(3, "-q", "--to", "nf4", "m", "o", has=["'notes.txt'", "leads out of"])
            self.fails(3, "-q", "--to", "nf4", "--dry-run", "m", "o", has="leads out of")
            self.assert_nothing("o")
            os.remove(self.path("m/notes.txt"))
        os.mkdir(self.path("m/more"))
        os.symlink("../../secret", self.path("m/more/notes.txt"))
        self.fails(3, "-q", "--to", "nf4", "m", "o", has="'more/notes.txt'")

    def test_a_folder_beside_with_a_longer_name(self):
        os.mkdir(self.path("m2"))
        os.rename(self.path("secret"), self.path("m2/secret"))
        os.symlink("../m2/secret", self.path("m/notes.txt"))
        self.fails(3, "-q", "--to", "nf4", "m", "o", has="leads out of")

    def test_links_that_stay(self):
        os.mkdir(self.path("m/files"))
        os.rename(self.path("secret"), self.path("m/files/kept.txt"))
        os.symlink("files/kept.txt", self.path("m/notes.txt"))
        os.symlink("/", self.path("m/root"))
        self.ok("-q", "--to", "nf4", "m", "o")
        with open(self.path("o/notes.txt")) as f:
            self.assertEqual(f.read(), "precious")
        self.assertFalse(os.path.lexists(self.path("o/root")))
        os.symlink("nowhere", self.path("m/gone.txt"))
        self.fails(3, "-q", "--to", "nf4", "m", "p", has="a link to a file that does not exist")

    def test_cache_of_the_hub(self):
        """snapshots/REVISION links to blobs/ two folders up, and nowhere else."""
        repo = self.path("models--a--b")
        os.makedirs(repo + "/blobs")
        os.makedirs(repo + "/snapshots/1234")
        for i, name in enumerate(sorted(os.listdir(self.path("m")))):
            os.rename(self.path("m", name), repo + "/blobs/%d" % i)
            os.symlink("../../blobs/%d" % i, repo + "/snapshots/1234/" + name)
        os.rename(self.path("secret"), repo + "/blobs/9")
        os.symlink("../../blobs/9", repo + "/snapshots/1234/notes.txt")
        self.ok("-q", "--to", "nf4", repo + "/snapshots/1234", "o")
        with open(self.path("o/notes.txt")) as f:
            self.assertEqual(f.read(), "precious")
        self.write("models--a--b/other", "precious")
        os.symlink("../../other", repo + "/snapshots/1234/more.txt")
        self.fails(3, "-q", "--to", "nf4", repo + "/snapshots/1234", "p", has="'more.txt'")

    def test_index_that_leaves(self):
        os.rename(self.path("m", "model.safetensors"), self.path("m", "shard.safetensors"))
        for name in ("../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors",
                     "..\\secret.safetensors", "./model.safetensors"):
            mk.write_json(self.path("m/model.safetensors.index.json"),
                          {"weight_map": {WEIGHT: name}})
            self.fails(3, "inspect", "m")

    def test_output_that_leaves(self):
        """A manifest whose files lie elsewhere is refused, even with a digest that is right."""
        self.ok("-q", "--to", "nf4", "m", "o")
        with open(self.path("o/qconv.json"), encoding="utf-8") as f:
            text = f.read()
        self.write("o/qconv.json", text.replace('"config.json"', '"../config.json"'))
        self.fails(4, "unpack", "o", "u")
        self.assert_nothing("u")


class Measured(OutputCase):
    def peak(self, code, *args, has=""):
        """Peak memory in MiB of qconv, which must end with this code, and within 3 GiB of addresses
        and a minute of a processor's time, both far more than any of these tests needs."""
        r = subprocess.run(["python3", "-c", """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
if not int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, use = os.wait4(pid, 0)
print(use.ru_maxrss // 1024, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))""", str(int(SANITIZED)), QCONV, "-q", *args],
                           cwd=self.dir, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        lines = r.stderr.decode().splitlines()
        self.assertEqual(r.returncode, code, (args, lines))
        self.assertEqual(len(lines), 2 if code else 1, lines)
        self.assertIn(has, lines[0])
        # The address sanitizer keeps what was freed, and zones around what was not.
        return int(lines[-1]) // (3 if SANITIZED else 1)


class Sizes(Measured):
    """The most memory a command takes of what a small or a lying file asks for."""

    def folder(self, name="m"):
        os.mkdir(self.path(name))
        return self.path(name, "model.safetensors")

    def test_ten_million_tensors(self):
        """A header of 700 MB that would name them: its length alone is too much."""
        header_file(self.folder(), b'{"a":', 700000000, said=700000000)
        self.assertLess(self.peak(3, "inspect", "m"), 64)

    def test_one_hundred_thousand_on_the_same_bytes(self):
        entry = b'"t%d":{"dtype":"F32","shape":[200,200],"data_offsets":[0,160000]}'
        header = b"{" + b",".join(entry % i for i in range(100000)) + b"}"
        header_file(self.folder(), header, 160000)
        self.assertLess(self.peak(3, "inspect", "m"), 20 * len(header) // MIB)

    def test_lengths_that_lie(self):
        good = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
        big = 1 << 52
        path = self.folder()
        for header, said, data in (
                (good, 2**64 - 1, 16), (good, 100000001, 16), (good, 100000000, 16),
                (good, 0, 16), (good, len(good) + 17, 16), (good, None, 15), (good, None, 17),
                (good.replace(b"[4]", b"[%d]" % big), None, 16),
                (good.replace(b"[4]", b"[4294967296,4294967296]"), None, 16),
                (good.replace(b"0,16", b"%d,%d" % (big, big + 16)), None, 16),
                (good.replace(b"0,16", b"0,%d" % big).replace(b"[4]", b"[%d]" % (big // 4)),
                 None, 16)):
            header_file(path, header, data, said)
            self.assertLess(self.peak(3, "inspect", "m"), 64, (header, said))
            self.assertLess(self.peak(3, "--to", "nf4", "m", "o"), 64, (header, said))
            self.assert_nothing("o")

    def test_values_without_end(self):
        """A header of 20 MB of numbers would be a tree of 1.6 GB."""
        header_file(self.folder(), b'{"a":[' + b"0," * (10 * MIB) + b"0]}")
        self.assertLess(self.peak(3, "inspect", "m"), 15 * 20)
        with open(self.path("m/config.json"), "w") as f:
            f.write("[" * 100000)
        header_file(self.path("m/model.safetensors"), b"{}")
        self.assertLess(self.peak(3, "inspect", "m"), 64)

    def test_bomb_in_a_header(self):
        """3 KB that become a header of 96 MB, all of it spaces: no more than such a header."""
        n = 96 * 1000 * 1000
        content = struct.pack("<Q", n) + b"{}" + b" " * (n - 2)
        self.folder()
        with open(self.path("m/model.safetensors.zst"), "wb") as f:
            f.write(seekable([(zstd(content), len(content))]))
        self.assertLess(os.path.getsize(self.path("m/model.safetensors.zst")), 20000)
        self.assertLess(self.peak(0, "inspect", "m"), 300)

    def test_frames_that_say_less_or_more_than_they_hold(self):
        header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (4 * MIB, 4 * MIB)
        head = zstd(struct.pack("<Q", len(header)) + header)
        body = zstd(bytes(4 * MIB))
        self.folder()
        for said_head, said_body, code in ((8 + len(header), 4 * MIB, 0),
                                           (8 + len(header), 4 * MIB - 1, 3),
                                           (8 + len(header) + 1, 4 * MIB - 1, 3),
                                           (8 + len(header), 257 * MIB, 3),
                                           (8 + len(header), 2**32 - 1, 3), (4, 4 * MIB, 3)):
            with open(self.path("m/model.safetensors.zst"), "wb") as f:
                f.write(seekable([(head, said_head), (body, said_body)]))
            self.assertLess(self.peak(code, "--to", "keep", "m", "o"), 100, (said_head, said_body))
            self.assertLess(self.peak(code, "--to", "keep", "--compress", "none", "--force", "m",
                                      "o"), 100, (said_head, said_body))
        # A frame that holds more than anybody says: 256 MiB in 8 KB behind a table of 4 MiB.
        body = zstd(bytes(256 * MIB))
        with open(self.path("m/model.safetensors.zst"), "wb") as f:
            f.write(seekable([(head, 8 + len(header)), (body, 4 * MIB)]))
        self.assertLess(self.peak(3, "--to", "keep", "m", "p"), 100)

    def test_a_table_of_very_many_frames(self):
        """16 MB of frames without content: three words a frame, as the table has two."""
        count = MIB
        frame = struct.pack("<I", 0xFD2FB528) + b"\x20\x00\x01\x00\x00"
        with open(self.folder() + ".zst", "wb") as f:
            f.write(seekable([(frame, 0)] * count))
        self.assertLess(self.peak(3, "inspect", "m"), 64)


if __name__ == "__main__":
    unittest.main()
