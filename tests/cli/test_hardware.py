#!/usr/bin/env python3
"""qconv hardware: this machine, machines described, and memory followed. The driver's library is a
stand-in (tests/tools/fake_nvml.c), which $FAKE_NVML and $FAKE_NVML_OLD name."""
import csv
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
import unittest

from qconv_case import QCONV, ROOT, QconvCase

BUILD = os.path.dirname(os.path.abspath(QCONV))
FAKE = os.environ.get("FAKE_NVML", os.path.join(BUILD, "tests", "libfake_nvml.so"))
FAKE_OLD = os.environ.get("FAKE_NVML_OLD", os.path.join(BUILD, "tests", "libfake_nvml_old.so"))
GIB = 1 << 30
A100 = "NVIDIA A100-SXM4-40GB,GPU-aaaa,80,%d,%d,5120,1215" % (40 * GIB, GIB)
V100 = "Tesla V100-SXM2-16GB,GPU-vvvv,70,%d,0,4096,877" % (16 * GIB)
OWN = ("QCONV_NVML", "QCONV_DEVICE", "QCONV_ISA", "CUDA_VISIBLE_DEVICES", "FAKE_NVML_GPUS",
       "FAKE_NVML_INIT", "FAKE_NVML_PEERS", "FAKE_NVML_PROCESSES", "FAKE_NVML_GROW",
       "FAKE_NVML_FADE", "FAKE_NVML_LOSE")


class HardwareCase(QconvCase):
    def setUp(self):
        super().setUp()
        kept = {k: os.environ.pop(k) for k in OWN if k in os.environ}
        self.addCleanup(os.environ.update, kept)

    @staticmethod
    def gpus(*gpus, **more):
        env = {"QCONV_NVML": FAKE, "FAKE_NVML_GPUS": ";".join(gpus)}
        env.update({k.upper() if k.startswith("cuda") else "FAKE_NVML_" + k.upper(): v
                    for k, v in more.items()})
        return env

    def documented(self, *objects):
        with open(os.path.join(ROOT, "docs", "hardware.md"), encoding="utf-8") as f:
            page = f.read()
        for o in objects:
            for name in o:
                self.assertIn("`%s`" % name, page)

    NONE = {"QCONV_NVML": "/nowhere/libnvidia-ml.so.1"}


class Described(HardwareCase):
    def test_without_a_gpu(self):
        text = self.ok("hardware", env=self.NONE)
        self.assertTrue(text.startswith(
            "No GPU: the NVIDIA driver was not found: /nowhere/libnvidia-ml.so.1 cannot be opened.\n"))
        for word in ["processor", "threads" if os.cpu_count() > 1 else "thread", "memory", "disk",
                     "strategy   cpu", "--vram cpu", "hardware --as"]:
            self.assertIn(word, text)
        self.assertNotIn("cuda", text)
        o = json.loads(self.ok("hardware", "--json", env=self.NONE))
        self.assertEqual(o["gpus"], [])
        self.assertIsNone(o["driver"])
        self.assertEqual(o["strategy"]["name"], "cpu")
        self.assertEqual(o["strategy"]["room_bytes"], int(o["cpu"]["memory_free_bytes"] * 0.9))
        self.assertEqual(o["cpu"]["threads"] <= len(os.sched_getaffinity(0)), True)
        self.assertGreater(o["disk_free_bytes"], 0)

    def test_gpus(self):
        env = self.gpus(A100, V100, peers="0-1")
        text = self.ok("hardware", env=env)
        self.assertIn("NVIDIA driver 999.1\n", text)
        rows = {line.split()[0]: line for line in reversed(text.splitlines())
                if line.startswith("cuda:")}
        self.assertIn("NVIDIA A100-SXM4-40GB  80  Ampere", rows["cuda:0"])
        self.assertIn("42.9 GB  41.9 GB  1.56 TB/s  fp16 bf16 tf32 int8  1", rows["cuda:0"])
        self.assertIn("Tesla V100-SXM2-16GB   70  Volta", rows["cuda:1"])
        self.assertNotIn("tf32", rows["cuda:1"])
        self.assertIn("bfloat16  tensor cores support it from Ampere on", text)
        self.assertIn("float16   its tensor cores support neither bfloat16 nor TF32", text)
        self.assertRegex(text, r"(?m)^kernels    (none: this build is for the CPU only|CUDA \d)")
        self.assertRegex(text, r"(?m)^quantizes  on \S")
        self.assertIn("strategy   gpus-balanced: ", text)

    def test_json(self):
        o = json.loads(self.ok("hardware", "--json", env=self.gpus(A100, V100, peers="0-1")))
        self.assertEqual(list(o), ["command", "assumed", "driver", "gpus", "no_gpu", "warning",
                                   "cuda_kernels", "cuda_build", "quantizes_on",
                                   "quantizes_why", "cpu", "disk_free_bytes", "strategy"])
        self.assertEqual((o["command"], o["assumed"], o["driver"], o["no_gpu"]),
                         ("hardware", False, "999.1", None))
        self.assertEqual(o["cuda_kernels"], o["cuda_build"] is not None)
        if not o["cuda_kernels"]:
            self.assertEqual((o["quantizes_on"], o["quantizes_why"]),
                             ("cpu", "this build has no GPU kernels"))
        a, v = o["gpus"]
        self.assertEqual(list(a), [
            "index", "driver_index", "name", "uuid", "card", "sm", "architecture", "total_bytes",
            "used_bytes", "free_bytes", "bandwidth_bytes_per_second", "host_link_bytes_per_second",
            "peer_link_bytes_per_second", "tensor_cores", "peers", "choice"])
        self.assertEqual((a["uuid"], a["card"], a["sm"], a["architecture"]),
                         ("GPU-aaaa", "A100-40GB", 80, "Ampere"))
        self.assertEqual((a["total_bytes"], a["used_bytes"], a["free_bytes"]),
                         (40 * GIB, GIB, 39 * GIB))
        self.assertEqual(a["bandwidth_bytes_per_second"], 1555200000000)
        self.assertEqual((a["peers"], v["peers"]), ([1], [0]))
        self.assertEqual(v["tensor_cores"], {"fp16": True, "bf16": False, "tf32": False,
                                             "int8": False, "fp8": False})
        self.assertEqual(v["choice"]["compute_dtype"], "float16")
        self.assertEqual(a["choice"]["compute_dtype"], "bfloat16")
        self.assertEqual(a["choice"]["room_bytes"], int(39 * GIB * 0.9) - 500000000)
        self.assertEqual(o["strategy"]["vram"], "auto")
        self.assertEqual(o["strategy"]["room_bytes"],
                         sum(g["choice"]["room_bytes"] for g in o["gpus"]))
        self.documented(o, a, a["choice"], o["cpu"], o["strategy"])

    def test_an_old_driver(self):
        env = self.gpus(A100, "NVIDIA Odd,x,80,%d,0" % GIB)
        env["QCONV_NVML"] = FAKE_OLD
        a, odd = json.loads(self.ok("hardware", "--json", env=env))["gpus"]
        self.assertEqual((a["sm"], a["bandwidth_bytes_per_second"], a["uuid"], a["peers"]),
                         (80, 1555000000000, None, None))
        self.assertEqual((odd["sm"], odd["architecture"], odd["tensor_cores"], odd["card"]),
                         (None, None, None, None))
        self.assertIn("not known", self.ok("hardware", env=env))

    def test_drivers_that_fail(self):
        o = json.loads(self.ok("hardware", "--json", env=self.gpus(A100, init="9")))
        self.assertEqual(o["no_gpu"], "the NVIDIA driver does not answer: Driver Not Loaded")
        r = self.run_qconv("hardware", "--json", env=self.gpus(A100, V100, lose="1@0"))
        self.assertEqual(r.returncode, 0)
        self.assertEqual(r.stderr.decode(), "qconv: warning: cuda:1 is left out: GPU 1 of the driver "
                                            "does not answer: GPU is lost\n")
        self.assertEqual(len(json.loads(r.stdout)["gpus"]), 1)

    def test_names_are_made_harmless(self):
        text = self.ok("hardware", env=self.gpus("Evil\033[2J,GPU-\033x,80,%d,0" % GIB))
        self.assertNotIn("\033", text)
        json.loads(self.ok("hardware", "--json", env=self.gpus("Evil\033[2J,GPU-x,80,%d,0" % GIB)))
        text = self.ok("hardware", env=self.gpus(A100, cuda_visible_devices="\033[2J"))
        self.assertNotIn("\033", text)

    def test_choosing_devices(self):
        env = self.gpus(A100, V100, cuda_visible_devices="GPU-v,GPU-a")
        names = [g["card"] for g in json.loads(self.ok("hardware", "--json", env=env))["gpus"]]
        self.assertEqual(names, ["V100-16GB", "A100-40GB"])
        env["QCONV_DEVICE"] = "cuda:1"
        o = json.loads(self.ok("hardware", "--json", env=env))
        self.assertEqual([(g["index"], g["driver_index"]) for g in o["gpus"]], [(1, 0)])
        env["QCONV_DEVICE"] = "cuda:2"
        self.fails(5, "hardware", env=env, has="there is no cuda:2")
        env["QCONV_DEVICE"] = "tpu"
        self.usage("hardware", env=env, has=["QCONV_DEVICE", "tpu"], command="hardware")
        env["QCONV_DEVICE"] = "cpu"
        self.assertIn("No GPU: QCONV_DEVICE=cpu.", self.ok("hardware", env=env))


class Assumed(HardwareCase):
    def test_cards(self):
        for card in ["2xA100-40GB", "V100-16GB", "3090", "4090", "H100-80GB", "A6000",
                     "2xA100-40GB+3090", "t4", "RTX 5090", "8xh200"]:
            o = json.loads(self.ok("hardware", "--json", "--as", card, env=self.NONE))
            self.assertTrue(o["assumed"], card)
            self.assertGreater(len(o["gpus"]), 0)
            again = self.ok("hardware", "--as", o["strategy"]["vram"].replace("+cpu", ""),
                            env=self.NONE)
            self.assertTrue(again.startswith("GPUs assumed; "), card)
        o = json.loads(self.ok("hardware", "--json", "--as", "2xA100-40GB+3090", env=self.NONE))
        self.assertEqual([g["peers"] for g in o["gpus"]], [[1], [0], []])
        self.assertEqual(o["strategy"]["vram"], "2xA100-40GB+RTX3090")

    def test_the_driver_is_not_asked(self):
        env = self.gpus(A100, cuda_visible_devices="")
        env["QCONV_DEVICE"] = "nonsense"
        self.assertIn("RTX3090", self.ok("hardware", "--as", "3090", env=env))

    def test_unknown_cards(self):
        self.usage("hardware", "--as", "A100-48GB", command="hardware",
                   has="unknown card 'A100-48GB'; did you mean A100-40GB?")
        self.usage("hardware", "--as", "Voodoo", command="hardware", has="expected one such as")
        self.usage("hardware", "--as", "0xT4", command="hardware", has="1 to 64")
        self.usage("hardware", "--as", "", command="hardware", has="--as")
        self.usage("hardware", "--as", "T4", "--watch", command="hardware", has="--watch")
        self.usage("hardware", "--csv", "x", command="hardware", has="--watch")


class Watched(HardwareCase):
    def read_csv(self, name):
        with open(self.path(name), newline="", encoding="utf-8") as f:
            return list(csv.DictReader(f))

    def test_without_a_gpu(self):
        line = self.fails(5, "hardware", "--watch", "--csv", "m.csv", env=self.NONE)
        self.assertEqual(line, "qconv: --watch: there is no GPU to watch: the NVIDIA driver was not found: "
                               "/nowhere/libnvidia-ml.so.1 cannot be opened\n")
        self.assertFalse(os.path.exists(self.path("m.csv")))

    def test_samples(self):
        own = os.getpid()
        env = self.gpus(A100, V100, grow=str(GIB),
                        processes="0,%d,5000000000;1,4194303,?;1,%d,7" % (own, own))
        text = self.ok("hardware", "--watch", "--samples", "3", "--interval", "0.01", "--csv",
                       "m.csv", env=env)
        lines = text.splitlines()
        with open("/proc/self/comm", encoding="utf-8") as f:
            name = f.read().strip()
        of_gpu = [line for line in lines if re.match(r"[\d.]+ s  cuda:0  used ", line)]
        self.assertEqual(len(of_gpu), 3, text)
        self.assertIn("pid %d %s  used 5.00 GB, peak 5.00 GB" % (own, name), text)
        self.assertIn("pid 4194303 ?  memory not known", text)
        self.assertIn("peaks of 3 samples", text)
        rows = self.read_csv("m.csv")
        self.assertEqual(list(rows[0]), ["time", "seconds", "kind", "gpu", "pid", "process",
                                         "used_bytes", "free_bytes", "total_bytes", "peak_bytes"])
        gpu0 = [r for r in rows if r["kind"] == "gpu" and r["gpu"] == "0"]
        used = [int(r["used_bytes"]) for r in gpu0]
        self.assertEqual(len(used), 3)
        self.assertEqual([b - a for a, b in zip(used, used[1:])], [GIB, GIB])
        for r in gpu0:
            self.assertEqual(int(r["used_bytes"]) + int(r["free_bytes"]), 40 * GIB)
            self.assertEqual(r["peak_bytes"], r["used_bytes"])
            self.assertRegex(r["time"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
        processes = [r for r in rows if r["kind"] == "process"]
        self.assertEqual(len(processes), 9)
        self.assertEqual(processes[0]["process"], name)
        self.assertEqual(processes[0]["used_bytes"], "5000000000")
        self.assertEqual({r["used_bytes"] for r in processes if r["pid"] == "4194303"}, {""})

    def test_json_and_quiet(self):
        env = self.gpus(A100, grow=str(GIB), processes="0,4194303,?")
        o = json.loads(self.ok("hardware", "--watch", "--samples", "2", "--interval", "0.01",
                               "--json", env=env))
        self.assertEqual((o["command"], o["samples"], o["interrupted"]), ("watch", 2, False))
        g = o["gpus"][0]
        self.assertEqual(g["peak_used_bytes"] - g["first_used_bytes"], GIB)
        self.documented(o, g, o["processes"][0])
        self.assertEqual(o["processes"], [{"gpu": 0, "pid": 4194303, "name": None,
                                           "peak_bytes": None}])
        self.assertEqual(self.ok("hardware", "--watch", "--samples", "2", "--interval", "0.01",
                                 "-q", "--csv", "m.csv", env=env), "")
        self.assertEqual(len(self.read_csv("m.csv")), 4)

    def test_processes_come_to_an_end(self):
        """They keep their peak, and are no longer listed."""
        env = self.gpus(A100, fade="1000", processes="0,4194301,5000;0,4194302,3500")
        o = json.loads(self.ok("hardware", "--watch", "--samples", "5", "--interval", "0.01",
                               "--json", "--csv", "m.csv", env=env))
        self.assertEqual([p["peak_bytes"] for p in o["processes"]], [4000, 2500])
        rows = [r for r in self.read_csv("m.csv") if r["kind"] == "process"]
        self.assertEqual([(r["used_bytes"], r["peak_bytes"]) for r in rows
                          if r["pid"] == "4194301"],
                         [(str(b), "4000") for b in (4000, 3000, 2000, 1000)])
        self.assertEqual([r["used_bytes"] for r in rows if r["pid"] == "4194302"],
                         ["2500", "1500", "500"])

    def test_a_gpu_is_lost(self):
        env = self.gpus(A100, V100, lose="0@2")
        r = self.run_qconv("hardware", "--watch", "--samples", "4", "--interval", "0.01", "--csv",
                           "m.csv", env=env)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertEqual(r.stderr.decode().count("\n"), 1)
        self.assertRegex(r.stderr.decode(), r"warning: cuda:0 is lost after [\d.]+ s: .*GPU is lost")
        rows = [r for r in self.read_csv("m.csv") if r["gpu"] == "0"]
        kinds = [r["kind"] for r in rows]
        self.assertEqual(kinds[-1], "lost")
        self.assertEqual(sorted(kinds), kinds)
        self.assertEqual(rows[-1]["used_bytes"], "")
        self.assertEqual(rows[-1]["peak_bytes"], str(GIB))
        self.assertEqual(len([r for r in self.read_csv("m.csv") if r["gpu"] == "1"]), 4)
        r = self.run_qconv("hardware", "--watch", "--interval", "0.01", env=self.gpus(A100,
                           lose="0@2"))
        self.assertEqual(r.returncode, 5)
        self.assertIn(b"peaks of ", r.stdout)
        self.assertIn(b"there is no GPU left to watch", r.stderr)

    def test_processes_are_not_listed(self):
        env = self.gpus(A100)
        env["QCONV_NVML"] = FAKE_OLD
        r = self.run_qconv("hardware", "--watch", "--samples", "3", "--interval", "0.01", env=env)
        self.assertEqual(r.returncode, 0)
        self.assertEqual(r.stderr.decode().count("processes cannot be followed"), 1)

    def start(self, *args, env, **more):
        full = dict(os.environ)
        full.update(env)
        return subprocess.Popen([QCONV, "hardware", "--watch"] + list(args), cwd=self.dir, env=full,
                                stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **more)

    def wait_for(self, test, what):
        for _ in range(600):
            if test():
                return
            time.sleep(0.05)
        self.fail("waited in vain for " + what)

    def test_interrupt(self):
        for stop in (signal.SIGINT, signal.SIGTERM):
            name = "m%d.csv" % stop
            p = self.start("--interval", "3600", "--csv", name, env=self.gpus(A100),
                           stdout=subprocess.PIPE)
            # The sample is in the file as soon as it was taken.
            self.wait_for(lambda: os.path.exists(self.path(name))
                          and os.path.getsize(self.path(name)) > 0, "a sample")
            self.assertEqual(len(self.read_csv(name)), 1)
            p.send_signal(stop)
            out, err = p.communicate(timeout=30)
            self.assertEqual(p.returncode, 130)
            self.assertIn(b"peaks of 1 sample in", out)
            self.assertEqual(err, b"qconv: interrupted\n")

    def test_the_reader_goes(self):
        p = self.start("--interval", "0.01", env=self.gpus(A100), stdout=subprocess.PIPE)
        p.stdout.readline()
        p.stdout.close()
        self.assertEqual(p.wait(timeout=30), 0)
        self.assertEqual(p.stderr.read(), b"")
        p.stderr.close()

    def test_csv_cannot_be_written(self):
        self.fails(1, "hardware", "--watch", "--csv", "no/where.csv", env=self.gpus(A100),
                   has="no/where.csv")
        r = self.run_qconv("hardware", "--watch", "--csv", "/dev/full", "--samples", "1",
                           env=self.gpus(A100))
        self.assertNotEqual(r.returncode, 0)

    def test_terminal(self):
        """On a terminal each sample is drawn over the last, and never wider or higher than it."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 6, 40, 0, 0))
        processes = ";".join("0,%d,1000" % (4194200 + i) for i in range(20))
        p = self.start("--samples", "3", "--interval", "0.01",
                       env=dict(self.gpus(A100, processes=processes), TERM="xterm"), stdout=slave)
        os.close(slave)
        data = b""
        while True:
            try:
                got = os.read(master, 65536)
            except OSError:
                got = b""
            if not got:
                break
            data += got
        os.close(master)
        self.assertEqual(p.wait(timeout=30), 0)
        p.stderr.close()
        text = data.decode()
        frames, peaks = text.split("\r\npeaks of 3 samples", 1)
        self.assertEqual(frames.count("\033[5A"), 2)
        self.assertIn("cuda:0", peaks)
        for line in re.split(r"\r\n", frames):
            self.assertLessEqual(len(re.sub(r"\033\[[0-9]*[A-Z]|\r", "", line)), 40, line)
        self.assertEqual(frames.count("\033[K\r\n"), 15)


if __name__ == "__main__":
    unittest.main()
