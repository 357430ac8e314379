#!/usr/bin/env python3
"""bench/gpu_run.sh where there is no GPU, and with a program that stands in for one."""
import json
import os
import subprocess
import tarfile
import unittest

from qconv_case import ROOT, QconvCase

STEPS = ["machine", "build", "hardware", "tests", "ceilings", "model", "convert_absmax", "convert_nf4",
         "convert_zstd", "convert_int8", "load", "eval", "calibrate", "validate", "plan", "bench", "groups", "tune", "memcheck", "racecheck", "initcheck",
         "synccheck"]
# Stands in for qconv: writes what a conversion would, fails where it is told to.
PROGRAM = """#!/bin/sh
[ "$1" = eval ] || echo "called with $*"
for last; do :; done
case "$1" in
hardware) case "$*" in *--json*) echo '{}' ;; esac; exit 0 ;;
plan) sleep 60; exit 0 ;;
bench) while [ $# -gt 1 ]; do [ "$1" != --save ] || echo table >"$2"; shift; done; exit 3 ;;
validate) exit 0 ;;
eval) case "$*" in
    *calibrated-plain*) echo '{"kl_mean": 0.3}' ;;
    *calibrated-cuda*) echo '{"kl_mean": '"${GPU_KL:-0.1}"'}' ;;
    *eval-int8*cuda*) echo '{"device": "GPU", "base_perplexity": 3, "perplexity": 3.01, "kl_mean": 0.1, "top1": 1}' ;;
    *cuda*) echo '{"device": "GPU", "base_perplexity": 3.0001, "perplexity": 3, "kl_mean": 0.1, "top1": 1}' ;;
    *) echo '{"device": "cpu", "base_perplexity": 3, "perplexity": 3, "kl_mean": 0.1, "top1": 1}' ;;
    esac
    exit 0 ;;
--version) exit 0 ;;
esac
mkdir -p "$last"
echo weights >"$last/model.safetensors"
case "$*" in *int8*cuda*) echo other >"$last/model.safetensors" ;; esac
"""
CEILINGS = """#!/bin/sh
for last; do :; done
echo "{\\"called\\": \\"$*\\"}" >"$last"
"""
CHECKPOINT = """#!/bin/sh
for last; do :; done
mkdir -p "$last"
echo '{}' >"$last/config.json"
"""


class GpuRun(QconvCase):
    def setUp(self):
        super().setUp()
        # As on a machine without driver, whatever this one has.
        os.mkdir(self.path("bin"))
        self.script("bin/nvidia-smi", "#!/bin/sh\nexit 9\n")
        self.results = self.path("results")
        self.work = self.path("work")
        os.mkdir(self.work)

    def script(self, name, text):
        path = self.write(name, text)
        os.chmod(path, 0o755)
        return path

    def gpu_run(self, *args, **env):
        full = {k: v for k, v in os.environ.items() if not k.startswith("QC_RUN_") and k != "OUT"}
        full["PATH"] = self.path("bin") + ":" + full["PATH"]
        full.update(env)
        r = subprocess.run([os.path.join(ROOT, "bench", "gpu_run.sh")] + list(args), env=full,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           cwd=self.dir, timeout=120)
        return r.returncode, r.stdout

    def summary(self):
        with open(os.path.join(self.results, "summary.json")) as f:
            return json.load(f)

    def test_without_a_gpu(self):
        code, said = self.gpu_run(self.results, QC_RUN_WORK=self.work)
        self.assertEqual(code, 77, said)
        self.assertIn("there is no NVIDIA GPU here (nvidia-smi shows none): all 22 steps were left "
                      "out (77), nothing was measured", said.splitlines()[-1])
        s = self.summary()
        self.assertEqual(sorted(x["step"] for x in s["steps"]), sorted(STEPS))
        self.assertEqual({x["rc"] for x in s["steps"]}, {77})
        self.assertEqual((s["passed"], s["failed"], s["left_out"]), (0, 0, 22))
        self.assertEqual(os.listdir(self.work), ["logs"])
        self.assertEqual(sorted(os.listdir(self.results)), ["logs.tar.gz", "summary.json"])

    def test_results_from_the_environment(self):
        code, _ = self.gpu_run(OUT=self.results)
        self.assertEqual(code, 77)
        self.assertEqual(len(self.summary()["steps"]), 22)

    def stand_in(self, steps, **env):
        build = self.path("build")
        os.mkdir(build)
        self.script("build/qconv", PROGRAM)
        self.script("build/bench_checkpoint", CHECKPOINT)
        self.script("build/bench_gpu_load", "#!/bin/sh\necho '{\"bytes\": 12}'\n")
        self.script("build/bench_ceilings", CEILINGS)
        return self.gpu_run(self.results, QC_RUN_WORK=self.work, QC_RUN_BUILD=build,
                            QC_RUN_ANYWAY="1", QC_RUN_STEPS=steps, **env)

    def test_a_step_that_fails_does_not_stop_the_others(self):
        code, said = self.stand_in("build,hardware,model,convert_nf4,convert_int8,load,validate,ceilings,"
                                   "bench")
        self.assertEqual(code, 1, said)
        rc = {x["step"]: x["rc"] for x in self.summary()["steps"]}
        self.assertEqual(rc, {"build": 77, "hardware": 0, "model": 0, "convert_nf4": 0,
                              "convert_int8": 4, "load": 0, "validate": 0, "ceilings": 0,
                              "bench": 3})
        self.assertIn("gpu_run: 6 steps passed, 2 failed, 1 left out", said)
        with open(os.path.join(self.results, "convert.json")) as f:
            converted = json.load(f)
        self.assertEqual(converted["nf4, search, none"]["different"], [])
        self.assertEqual(converted["int8, search, none"]["different"], ["model.safetensors"])
        self.assertEqual([r["device"] for r in converted["nf4, search, none"]["runs"]],
                         ["cuda", "cpu", "cuda", "cpu"])
        with tarfile.open(os.path.join(self.results, "logs.tar.gz")) as tar:
            log = tar.extractfile("logs/convert_int8.log").read().decode()
        self.assertIn("called with -v --to int8 --scale search --compress none --device cuda", log)
        self.assertIn("differ in model.safetensors", log)
        with open(os.path.join(self.results, "load.json")) as f:
            self.assertEqual(json.load(f), {k: {"bytes": 12} for k in ("out-nf4-cuda", "out-int8-cuda")})
        with open(os.path.join(self.results, "ceilings.json")) as f:
            self.assertRegex(json.load(f)["called"], "^--seconds 40 --output ")
        self.assertLessEqual(len(os.listdir(self.results)), 11)

    def test_tune(self):
        code, said = self.stand_in("tune")
        self.assertEqual(code, 1, said)
        self.assertEqual([x["rc"] for x in self.summary()["steps"]], [3])
        with tarfile.open(os.path.join(self.results, "logs.tar.gz")) as tar:
            self.assertIn("called with bench --tune --seconds 45 ",
                          tar.extractfile("logs/tune.log").read().decode())
            self.assertEqual(tar.extractfile("logs/tuning.json").read(), b"table\n")
        self.assertLessEqual(len(os.listdir(self.results)), 10)

    @unittest.skipUnless(os.environ.get("GPU_LOAD_SHIM"), "run by ctest")
    def test_the_loader_on_the_shim(self):
        model = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
        for compress in ("none", "zstd"):
            self.ok("-q", "--to", "nf4", "--compress", compress, model, self.path(compress))
            r = subprocess.run([os.environ["GPU_LOAD_SHIM"], "--rounds", "2", "--threads", "2",
                                self.path(compress)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               timeout=60)
            self.assertEqual(r.returncode, 0, r.stderr)
            got = json.loads(r.stdout)
            with open(self.path(compress, "qconv.json")) as f:
                m = json.load(f)
            self.assertEqual(got["bytes"], sum(s["content_bytes"] - s["header_bytes"]
                                               for s in m["shards"]))
            self.assertEqual([len(got[k]) for k in ("gpu", "host", "copy")], [2, 2, 1])

    @unittest.skipUnless(os.environ.get("CEILINGS_SHIM"), "run by ctest")
    def test_the_ceilings_on_the_shim(self):
        def run(devices, *args):
            return subprocess.run([os.environ["CEILINGS_SHIM"], "--small", "--rounds", "3"] + list(args),
                                  env=dict(os.environ, QC_SHIM_DEVICES=devices), text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
        names = {}
        for sm in (70, 90):
            r = run("sm_%d:2:64MiB" % sm)
            self.assertEqual((r.returncode, r.stderr), (0, ""))
            got = json.loads(r.stdout)
            self.assertEqual((got["command"], got["device"]["sm"]), ("ceilings", sm))
            for group, value in (("memory", "gbps"), ("l2", "gbps"), ("rates", "per_clock"),
                                 ("decode", "per_clock"), ("launch", "us"), ("bulk", "gbps")):
                for row in got[group]:
                    s = row[value]
                    self.assertEqual(s["samples"], 3, row)
                    self.assertTrue(0 < s["p25"] <= s["median"] <= s["p75"], row)
                names[sm, group] = {row.get("name", row.get("access")) for row in got[group]}
            # Every point once: by access, loads ahead and warps.
            points = [(r["access"], r["loads_ahead"], r["warps"]) for r in got["memory"]]
            self.assertEqual(len(set(points)), len(points))
            self.assertIn(("read", 8, 8), points)
            self.assertTrue(all(r["bytes_under_way"] == r["warps"] * 512 * r["loads_ahead"]
                                for r in got["memory"] if r["access"] == "ring"))
        self.assertEqual(names[90, "memory"] - names[70, "memory"], {"ring", "fragment 8 L2 128"})
        self.assertEqual(names[90, "rates"] ^ names[70, "rates"],
                         {"mma.m16n8k16", "cvt.rn.f16x2.f32", "mma.m8n8k4"})
        self.assertEqual({n for n in names[70, "decode"] if "mma" in n},
                         {"pairs x32 mma 884", "pairs x32 PRMT mma 884", "int8 mma 884"})
        self.assertEqual((names[70, "bulk"], names[90, "bulk"]), (set(), {"bulk"}))
        self.assertIn("graph, early", names[90, "launch"])
        self.assertNotIn("graph, early", names[70, "launch"])
        self.assertEqual(run("none").returncode, 5)
        for wrong in (("--rounds", "2"), ("--rounds",), ("--bogus", "1")):
            self.assertEqual(run("sm_90:2:64MiB", *wrong).returncode, 2, wrong)
        r = run("sm_90:2:64MiB", "--output", self.path("x.json"))
        self.assertEqual((r.returncode, r.stdout), (0, ""))
        with open(self.path("x.json")) as f:
            self.assertTrue(json.load(f)["bulk"])
        r = run("sm_90:2:64MiB", "--output", self.path("missing", "x.json"))
        self.assertEqual((r.returncode, r.stdout), (1, ""))

    def test_figures_of_a_gpu_that_are_others(self):
        code, said = self.stand_in("eval")
        self.assertEqual(code, 1, said)
        self.assertEqual([x["rc"] for x in self.summary()["steps"]], [4])
        with open(os.path.join(self.results, "eval.json")) as f:
            got = json.load(f)
        self.assertEqual(got["apart"], ["int8: perplexity is 3.01 on the GPU, 3 on the CPU"])
        self.assertEqual(sorted(got["figures"]), ["int8, cpu", "int8, cuda", "nf4, cpu", "nf4, cuda"])

    def test_calibrating(self):
        code, said = self.stand_in("model,calibrate")
        self.assertEqual(code, 0, said)
        with open(os.path.join(self.results, "calibrate.json")) as f:
            got = json.load(f)
        self.assertEqual((sorted(got["figures"]), got["wrong"]),
                         (["cpu", "cuda", "large", "plain"], []))
        with tarfile.open(os.path.join(self.results, "logs.tar.gz")) as tar:
            log = tar.extractfile("logs/calibrate.log").read().decode()
        self.assertIn("--calibrate default --calibration-tokens 16384 --device cuda", log)

    def test_calibrating_that_is_worse_on_the_gpu(self):
        code, said = self.stand_in("calibrate", GPU_KL="0.2")
        self.assertEqual(code, 1, said)
        with open(os.path.join(self.results, "calibrate.json")) as f:
            got = json.load(f)
        self.assertEqual(got["wrong"], ["KL divergence is 0.2 on the GPU, 0.1 on the CPU",
                                        "KL divergence is 0.2, 0.3 without calibration"])

    def test_time_limits(self):
        code, said = self.stand_in("model,plan,memcheck", QC_RUN_SECONDS="6")
        self.assertEqual(code, 1, said)
        rows = {x["step"]: x for x in self.summary()["steps"]}
        self.assertEqual(rows["plan"]["rc"], 124)
        self.assertLess(rows["plan"]["seconds"], 20)
        self.assertEqual((rows["memcheck"]["rc"], rows["memcheck"]["why"]), (77, "no time left"))

    def test_packages_that_are_not_there(self):
        self.script("bin/pkg-config", "#!/bin/sh\nexit 1\n")
        os.mkdir(self.path("debs"))
        code, said = self.gpu_run("--debs", self.path("debs"), self.results)
        self.assertEqual(code, 2, said)
        self.assertIn("no .deb files in", said)

    def test_usage(self):
        for args in [("--bogus",), ("a", "b"), ("--fetch",), ("--debs",)]:
            code, said = self.gpu_run(*args)
            self.assertEqual(code, 2, args)
            self.assertIn("usage:", said)


if __name__ == "__main__":
    unittest.main()
