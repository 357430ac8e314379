"""The disk that fails (tests/tools/fault_disk.c): that it loses what was not synced, and nothing
else. A test that rests on it would otherwise pass because nothing was lost."""
import errno
import os
import shutil
import signal
import sys
import unittest

from fault_case import FaultCase

SEEDS, MOST_SEEDS = 32, 512
NEW = bytes(range(1, 255)) * 80  # five pages, no zeros


class FaultDisk(FaultCase):
    def script(self, text, **settings):
        """Python that has `os`, the folder d and the bytes NEW."""
        return self.faulty("-c", "import os\nd = %r\nNEW = %r\n%s" % (self.path("d"), NEW, text),
                           program=[sys.executable, "-B", "-S"], **settings)

    def after_power(self, text, change, before=()):
        """The folder's files after the power went at that change, seed by seed."""
        for seed in range(MOST_SEEDS):
            shutil.rmtree(self.path("d"), ignore_errors=True)
            os.mkdir(self.path("d"))
            for name, data in before:
                with open(self.path("d", name), "wb") as f:
                    f.write(data)
            r = self.script(text, power="%d:%d" % (change, seed))
            self.assertEqual(r.returncode, -signal.SIGKILL, r.stderr)
            files = {}
            for name in os.listdir(self.path("d")):
                with open(self.path("d", name), "rb") as f:
                    files[name] = f.read()
            yield files

    def assert_kinds(self, wanted, text, change, name="new", before=(), under=0):
        """What becomes of a file, in words; "torn" is a mixture of NEW with what was under it.
        Chance has to do with the numbers of files, too: rare kinds may take some more seeds."""
        old = dict(before).get(name, b"")
        known = {None: "gone", NEW: "new", b"": "empty", bytes(len(NEW)): "zeros"}
        if old:
            known[old] = "old"
        found = set()
        for seed, files in enumerate(self.after_power(text, change, before)):
            data = files.get(name)
            kind = known.get(data, "torn")
            self.assertIn(kind, wanted)
            found.add(kind)
            if kind == "torn":
                for i, byte in enumerate(data):
                    self.assertIn(byte, (NEW[i], under))
            if seed + 1 >= SEEDS and found == wanted:
                break
        self.assertEqual(found, wanted)

    WRITE = """
f = os.open(d + "/new", os.O_RDWR | os.O_CREAT)
os.pwrite(f, NEW, 0)
"""
    SYNC_FOLDER = """
f = os.open(d, os.O_RDONLY)
os.fsync(f)
"""

    def test_nothing_synced(self):
        """Name, bytes, size: each is lost at times, and kept at times; torn at times."""
        self.assert_kinds({"gone", "new", "empty", "zeros", "torn"}, self.WRITE, 2)

    def test_synced_file_without_its_name(self):
        text = self.WRITE + "os.fsync(f)\n" + self.WRITE
        self.assert_kinds({"gone", "new"}, text, 4)

    def test_synced_name_without_its_bytes(self):
        text = self.WRITE + self.SYNC_FOLDER + self.WRITE
        self.assert_kinds({"new", "empty", "zeros", "torn"}, text, 4)

    def test_synced_stays(self):
        text = self.WRITE + "os.fdatasync(f)\n" + self.SYNC_FOLDER + "os.unlink(d + '/old')\n"
        self.assert_kinds({"new"}, text, 5, "new", [("old", b"old")])
        self.assert_kinds({"gone", "old"}, text, 5, "old", [("old", b"old")])

    def test_overwritten_and_cut(self):
        """Old bytes come back, at times a part of them."""
        text = 'f = os.open(d + "/old", os.O_RDWR)\nos.pwrite(f, NEW, 0)\nos.ftruncate(f, 512)\n'
        self.assert_kinds({"old", "torn"}, text, 2, "old", [("old", bytes([0xff]) * len(NEW))],
                          0xff)

    def test_renamed_without_sync(self):
        """As programs lose files: the new name with nothing in it, or the old file as it was."""
        text = self.WRITE + 'os.rename(d + "/new", d + "/old")\n'
        self.assert_kinds({"old", "new", "empty", "zeros", "torn"}, text, 3, "old",
                          [("old", b"old")])

    def test_sync_that_dies(self):
        """The sync at which the power goes made nothing durable."""
        self.assert_kinds({"gone", "new", "empty", "zeros", "torn"}, self.WRITE + "os.fsync(f)\n", 3)

    def test_failed_sync_loses(self):
        os.mkdir(self.path("d"))
        text = self.WRITE + "try:\n    os.fsync(f)\nexcept OSError as e:\n    print(e.errno)\n"
        r = self.script(text, fail="syncloss:1:EIO")
        self.assertEqual((r.returncode, r.stdout), (0, b"%d\n" % errno.EIO), r.stderr)
        with open(self.path("d", "new"), "rb") as f:
            self.assertNotIn(1, f.read())

    def test_full(self):
        os.mkdir(self.path("d"))
        text = self.WRITE + "try:\n    os.pwrite(f, b'1', 0)\nexcept OSError as e:\n" \
                            "    print(e.errno)\n"
        r = self.script(text, room=1000)
        self.assertEqual((r.returncode, r.stdout), (0, b"%d\n" % errno.ENOSPC), r.stderr)
        with open(self.path("d", "new"), "rb") as f:
            self.assertEqual(f.read(), NEW[:1000])

    def test_nth_call_fails(self):
        for kind, n, on in [("write", 1, ""), ("write", 2, ""), ("read", 2, ":on"), ("open", 1, ""),
                            ("rename", 1, ""), ("remove", 1, ""), ("make", 1, ""), ("sync", 1, ""),
                            ("resize", 1, "")]:
            shutil.rmtree(self.path("d"), ignore_errors=True)
            os.mkdir(self.path("d"))
            text = "f = os.open(d + '/a', os.O_RDWR | os.O_CREAT)\n" \
                   "g = lambda *a: os.open(d + '/a', os.O_RDWR)\n" \
                   "for i in range(3):\n    try:\n        %s\n    except OSError:\n" \
                   "        print(i + 1)\n" % {
                       "write": "os.pwrite(f, b'1', 0)", "read": "os.pread(f, 1, 0)",
                       "open": "g()", "rename": "os.rename(d + '/a', d + '/a')",
                       "remove": "os.unlink(d + '/a'); os.close(os.open(d + '/a', os.O_CREAT))",
                       "make": "os.mkdir(d + '/%d' % i)", "sync": "os.fsync(f)",
                       "resize": "os.ftruncate(f, i)"}[kind]
            # The first file is opened and made, too.
            at = n + (kind in ("open", "make"))
            r = self.script(text, fail="%s:%d:EIO%s" % (kind, at, on))
            want = [i for i in (1, 2, 3) if i == n or (on and i > n)]
            self.assertEqual((r.returncode, r.stdout.decode().split()), (0, [str(i) for i in want]),
                             (kind, r.stderr))

    def test_signal(self):
        os.mkdir(self.path("d"))
        r = self.script(self.WRITE * 3, signal="2:%d" % signal.SIGKILL)
        self.assertEqual(r.returncode, -signal.SIGKILL)
        self.assertEqual(self.counts()["change"], 2)

    def test_slow(self):
        os.mkdir(self.path("d"))
        r = self.script("import time\nt = time.monotonic()\n" + self.WRITE +
                        "print(time.monotonic() - t)\n", slow=len(NEW) * 4)
        self.assertGreater(float(r.stdout), 0.24)

    def test_not_modelled_is_an_error(self):
        r = None
        with self.assertRaises(AssertionError):
            r = self.script("os.symlink('a', d)")
        self.assertIsNone(r)


if __name__ == "__main__":
    unittest.main()
