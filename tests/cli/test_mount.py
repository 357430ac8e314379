"""qconv mount: a compressed output as plain files, through a real FUSE where /dev/fuse is there."""
import contextlib
import errno
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from output_case import OutputCase, PLAIN, seek_table, tree
from qconv_case import QCONV, SANITIZED
import make_checkpoint as mk

UNMOUNT = shutil.which("fusermount3")
BUILT = b"built without libfuse 3" not in subprocess.run(
    [QCONV, "mount", "/nowhere", "/nowhere"], stderr=subprocess.PIPE).stderr
CAN_MOUNT = BUILT and UNMOUNT and os.access("/dev/fuse", os.R_OK | os.W_OK)
WHY_NOT = "nothing can be mounted here (no libfuse 3, fusermount3 or /dev/fuse)"


class MountCase(OutputCase):
    def setUp(self):
        super().setUp()
        os.mkdir(self.path("dir"))

    def output(self, *args, big=0, name="out"):
        """out, and plain, which is what unpack makes of it."""
        rng = random.Random(3)
        tensors = {"model.embed_tokens.weight": ("BF16", [64, 96], None),
                   "model.norm.weight": ("F32", [96], None),
                   "model.empty": ("F32", [0, 5], None)}
        for i in range(4):
            tensors["model.layers.%d.mlp.up_proj.weight" % i] = ("BF16", [256, 128], None)
        tensors = {k: (d, s, mk.random_bytes(d, s, rng)) for k, (d, s, _) in tensors.items()}
        if big:
            tensors["model.big"] = ("U8", [big], os.urandom(big))
        folder = self.model(tensors)
        os.makedirs(os.path.join(folder, "1_Pooling"), exist_ok=True)
        self.write("m/1_Pooling/config.json", "{}\n")
        self.write("m/tokenizer.json", json.dumps({"x": list(range(20000))}))
        self.ok("-q", "--to", "nf4", *args, folder, self.path(name))
        self.ok("unpack", "-q", "--force", self.path(name), self.path("plain"))

    def unmount(self):
        subprocess.run([UNMOUNT, "-u", self.path("dir")], check=True)

    @contextlib.contextmanager
    def mounted(self, *args, code=0, says=b"", end=None, out="out"):
        """In the foreground. Ends the mount, and compares the exit code and standard error."""
        p = subprocess.Popen([QCONV, "mount", "--foreground", *args, out, "dir"], cwd=self.dir,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(subprocess.run, [UNMOUNT, "-uzq", self.path("dir")],
                        stderr=subprocess.DEVNULL)
        try:
            line = p.stdout.readline()
            self.assertIn(b"now in dir, until 'fusermount3 -u dir' or Ctrl-C", line,
                          line or p.stderr.read())
            yield p
        finally:
            if p.poll() is None and end is None:
                self.unmount()
            elif p.poll() is None:
                p.send_signal(end)
            err = p.communicate(timeout=60)[1]
        self.assertEqual(p.returncode, code, err)
        if isinstance(says, bytes):
            self.assertEqual(err, says)
        else:
            says(err.decode())
        if code == 0:
            self.assertEqual(os.listdir(self.path("dir")), [])


@unittest.skipUnless(CAN_MOUNT, WHY_NOT)
class Mounted(MountCase):
    def processes(self):
        """Those that serve this test's folder."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                with open("/proc/%s/cmdline" % pid, "rb") as f:
                    if self.path("dir").encode() in f.read().split(b"\0"):
                        found.append(int(pid))
        return found

    def test_in_the_background(self):
        self.output()
        text = self.ok("mount", self.path("out"), self.path("dir"))
        self.assertEqual(text, "%s: mounted, 5 files; now in %s, until 'fusermount3 -u %s'\n" % (
            self.path("out"), self.path("dir"), self.path("dir")))
        self.addCleanup(subprocess.run, [UNMOUNT, "-uzq", self.path("dir")],
                        stderr=subprocess.DEVNULL)
        self.assertEqual(len(self.processes()), 1)
        self.assert_same("plain", "dir")
        self.assertIn("verified", self.ok("verify", "dir"))
        self.fails(2, "mount", "out", "dir", has="there is something in it")
        self.unmount()
        for _ in range(200):
            if not self.processes():
                break
            time.sleep(0.05)
        self.assertEqual(self.processes(), [])
        self.assertEqual(os.listdir(self.path("dir")), [])

    def test_as_unpacked(self):
        """Shards, devices, folders, sizes, times; nothing can be written."""
        for args in ([], ["--max-shard-size", "60KB"], ["--scale", "absmax", "--compress", "zstd:9"]):
            self.output(*args, "--force")
            with self.mounted("--threads=2"):
                self.assert_same("plain", "dir")
                for folder, _, names in os.walk(self.path("out")):
                    for name in names:
                        made = os.path.join(folder, name)
                        shown = made.replace(self.path("out"), self.path("dir")).removesuffix(".zst")
                        self.assertEqual(os.stat(made).st_mtime_ns, os.stat(shown).st_mtime_ns)
                        self.assertEqual(os.stat(shown).st_mode, 0o100444)
                with self.assertRaises(OSError) as e:
                    with open(self.path("dir", "config.json"), "a", encoding="utf-8"):
                        pass
                self.assertEqual(e.exception.errno, errno.EROFS)
                self.assertFalse(os.path.exists(self.path("dir", "no")))
                self.assertEqual(os.listdir(self.path("dir", "1_Pooling")), ["config.json"])

    def test_placed(self):
        model = os.path.join(os.path.dirname(mk.__file__), "data", "kjv-llama", "model")
        self.ok("-q", "--to", "int8", "--vram", "3x2GB", "--context", "256", model, "out")
        self.ok("unpack", "-q", "out", "plain")
        with self.mounted():
            self.assert_same("plain", "dir")

    def test_pipeline(self):
        """A pipeline of diffusers is one tree."""
        rng = random.Random(1)
        shape = [64, 64]
        part = {"a.weight": ("BF16", shape, mk.random_bytes("BF16", shape, rng))}
        for name, cls in (("transformer", "FluxTransformer2DModel"), ("vae", "AutoencoderKL")):
            os.makedirs(self.path("m", name))
            self.write("m/%s/config.json" % name, json.dumps({"_class_name": cls}))
            mk.write_safetensors(self.path("m", name, "diffusion_pytorch_model.safetensors"), part)
        self.write("m/model_index.json", json.dumps({
            "_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"],
            "transformer": ["diffusers", "FluxTransformer2DModel"]}))
        self.ok("-q", "--to", "nf4", "m", "out")
        self.ok("unpack", "-q", "out", "plain")
        with self.mounted(out="./out/"):
            self.assert_same("plain", "dir")

    def test_any_order_of_reading(self):
        """Random stretches by several threads, and a mapping of the file, with little memory."""
        self.output(big=40 << 20)
        with open(self.path("plain", "model.safetensors"), "rb") as f:
            want = f.read()
        wrong = []

        def read(seed, fd):
            rng = random.Random(seed)
            for _ in range(60):
                at, n = rng.randrange(len(want)), rng.choice([1, 4096, 100000, 3 << 20])
                if os.pread(fd, n, at) != want[at:at + n]:
                    wrong.append((at, n))

        with self.mounted("--memory", "1MB") as p:
            with open(self.path("dir", "model.safetensors"), "rb") as f:
                with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
                    rng = random.Random(9)
                    for _ in range(100):
                        at = rng.randrange(len(want) - 10)
                        self.assertEqual(m[at:at + 10], want[at:at + 10])
                team = [threading.Thread(target=read, args=(i, f.fileno())) for i in range(6)]
                for t in team:
                    t.start()
                for t in team:
                    t.join()
                self.assertEqual(os.pread(f.fileno(), 10, len(want) - 3), want[-3:])
                self.assertEqual(os.pread(f.fileno(), 10, len(want)), b"")
            self.assertEqual(wrong, [])
            with open("/proc/%d/status" % p.pid, encoding="ascii") as f:
                peak = int(f.read().split("VmHWM:")[1].split()[0]) * 1024
            # Two frames of 8 MiB, two in the making, and the program.
            if not SANITIZED:
                self.assertLess(peak, 2 * (8 << 20) + os.cpu_count() * (8 << 20) + (24 << 20))

    def test_damage(self):
        """EIO instead of wrong bytes, one line that says what is damaged, and the rest is served."""
        self.output(big=20 << 20)
        path = self.path("out", "model.safetensors.zst")
        with open(self.path("plain", "model.safetensors"), "rb") as f:
            want = f.read()
        content = 0
        for stored, _, n in seek_table(path)[0]:
            if n > 1 << 20:
                break
            content += n
        with open(path, "r+b") as f:
            f.seek(stored + 5000)
            byte = f.read(1)
            f.seek(stored + 5000)
            f.write(bytes([byte[0] ^ 1]))
        said = b"qconv: tensor 'model.big' in out/model.safetensors.zst: a frame cannot be decompressed\n"
        with self.mounted(says=said):
            with open(self.path("dir", "model.safetensors"), "rb", buffering=0) as f:
                for at in (content, content + n - 1, content + 5000) * 2:
                    with self.assertRaises(OSError) as e:
                        os.pread(f.fileno(), 1, at)
                    self.assertEqual(e.exception.errno, errno.EIO)
                # All but the pages that have bytes of the frame.
                for at, end in ((0, content & -4096), (content + n + 4095 & -4096, len(want))):
                    self.assertEqual(os.pread(f.fileno(), end - at, at), want[at:end])
                with self.assertRaises(OSError):
                    while f.read(1 << 20):
                        pass
        self.fails(4, "unpack", "out", "new", has="tensor 'model.big'")

    def test_signals_end_it(self):
        self.output()
        for stop in (signal.SIGINT, signal.SIGTERM):
            with self.mounted(end=stop):
                self.assert_same("plain", "dir")

    def test_a_kill_leaves_a_mount_that_can_be_ended(self):
        self.output()
        with self.mounted(end=signal.SIGKILL, code=-signal.SIGKILL):
            self.assert_same("plain", "dir")
        with self.assertRaises(OSError) as e:
            os.listdir(self.path("dir"))
        self.assertEqual(e.exception.errno, errno.ENOTCONN)
        self.fails(2, "mount", "out", "dir", has="dir: an earlier mount is still here, but the "
                   "process that served it is gone; end it with 'fusermount3 -u dir'")
        self.unmount()
        with self.mounted():
            self.assert_same("plain", "dir")

    def test_refusals(self):
        self.output()
        r = ["mount", "out"]
        self.fails(2, *r, "no", has="no: expected an empty folder to mount on; No such file or directory")
        self.write("file", "x")
        self.fails(2, *r, "file", has="file: expected an empty folder to mount on; Not a directory")
        self.fails(2, *r, "m", has="m: expected an empty folder to mount on; there is something in it")
        self.fails(3, "mount", "m", "dir", has="m")
        self.ok("-q", "--to", "nf4", *PLAIN, "m", "flat")
        self.fails(3, "mount", "flat", "dir", has="flat: its shards are plain .safetensors files already, "
                   "which every program reads as they are")
        os.remove(self.path("out", "model.safetensors.zst"))
        self.fails(4, *r, "dir", has="out/model.safetensors.zst: the file is missing")
        self.assertEqual(os.listdir(self.path("dir")), [])

    def test_without_the_device(self):
        self.output()
        elsewhere = tempfile.mkdtemp(prefix="qconv-cli-")
        self.addCleanup(shutil.rmtree, elsewhere)
        os.mkdir(os.path.join(elsewhere, "dir"))
        shutil.copytree(self.path("out"), os.path.join(elsewhere, "out"))
        hide = "mount -t tmpfs none /dev && exec \"$@\""
        can = subprocess.run(["unshare", "-m", "sh", "-c", hide, "-", sys.executable, "-c", ""],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if can.returncode != 0:
            self.skipTest("a folder without /dev/fuse cannot be made here")
        r = subprocess.run(["unshare", "-m", "sh", "-c", hide, "-", QCONV, "mount", "out", "dir"],
                           cwd=elsewhere, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual((r.returncode, r.stdout), (1, b""))
        self.assertEqual(r.stderr.decode(), "qconv: dir: nothing can be mounted, because there is no /dev/fuse here "
                         "that may be opened; a container has to be started with --device /dev/fuse --cap-add "
                         "SYS_ADMIN, and 'qconv unpack' needs none of it\n")


@unittest.skipIf(BUILT, "this build has libfuse 3")
class NotBuilt(MountCase):
    def test_it_says_so(self):
        self.output()
        self.fails(3, "mount", "out", "dir", has="dir: nothing can be mounted, because this qconv was built without "
                   "libfuse 3; install libfuse3-dev and build it again, or write plain files with 'qconv unpack'")


if __name__ == "__main__":
    unittest.main()
