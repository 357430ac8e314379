#!/usr/bin/env python3
"""qconv hardware: this machine, and machines described. The driver's library is a stand-in
(tests/tools/fake_nvml.c), which $FAKE_NVML and $FAKE_NVML_OLD name."""
import json
import os
import unittest

from qconv_case import QCONV, ROOT, QconvCase

BUILD = os.path.dirname(os.path.abspath(QCONV))
FAKE = os.environ.get("FAKE_NVML", os.path.join(BUILD, "tests", "libfake_nvml.so"))
FAKE_OLD = os.environ.get("FAKE_NVML_OLD", os.path.join(BUILD, "tests", "libfake_nvml_old.so"))
GIB = 1 << 30
A100 = "NVIDIA A100-SXM4-40GB,GPU-aaaa,80,%d,%d,5120,1215" % (40 * GIB, GIB)
V100 = "Tesla V100-SXM2-16GB,GPU-vvvv,70,%d,0,4096,877" % (16 * GIB)
OWN = ("QCONV_NVML", "QCONV_DEVICE", "QCONV_ISA", "CUDA_VISIBLE_DEVICES", "FAKE_NVML_GPUS",
       "FAKE_NVML_INIT", "FAKE_NVML_PEERS", "FAKE_NVML_LOSE")


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


if __name__ == "__main__":
    unittest.main()
