#!/usr/bin/env python3
"""bench/gpu_run.sh where there is no GPU, with programs that stand in for ours, killed at random
moments, and with kernels that run on the CPU."""
import concurrent.futures
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import unittest
import xml.etree.ElementTree as ET
import zipfile
from unittest import mock

from qconv_case import ROOT, SANITIZED, QconvCase

sys.path.insert(0, os.path.join(ROOT, "bench"))
import gpu_runner  # noqa: E402
import gpu_steps  # noqa: E402
import keep_gpu_results  # noqa: E402

WORDS = ("first", "second")
MOST_FILES = 8
# Stands in for qconv: writes what it would, fails where it is told to.
PROGRAM = """#!/bin/sh
echo "called with $*" >&2
echo "libraries ${LD_LIBRARY_PATH-} cublas ${QCONV_LIBCUBLAS-}" >&2
sleep 0.02
for last; do :; done
case "$1" in
hardware) case "$*" in *--json*) echo '{"gpus": []}' ;; esac; exit 0 ;;
plan) sleep "${PLAN_SLEEPS:-0}"; exit 0 ;;
validate)
    echo '{"layers": []}'; exit 0 ;;
--version) exit 0 ;;
esac
mkdir -p "$last"
echo weights >"$last/model.safetensors"
case "$*" in *int8*cuda*) echo other >"$last/model.safetensors" ;; esac
"""
# bench_matmul, some of whose results are wrong.
MATMUL = """#!/bin/sh
echo "libraries ${LD_LIBRARY_PATH-}" >&2
sleep 0.02
while [ $# -gt 1 ]; do [ "$1" != --output ] || output=$2; shift; done
[ -n "$output" ] || exit 0
rows=
for m in 1 8 16; do
    row='{"scheme": "nf4", "n": 8, "k": 8, "m": '$m', "us": {"median": 3}, "ratio": {"median": 2}}'
    rows="$rows${rows:+, }$row"
    echo '{"complete": false, "failed": [], "rows": ['"$rows"']}' >"$output.part"
    mv "$output.part" "$output"
    sleep 0.02
done
exit 4
"""
CEILINGS = """#!/bin/sh
for last; do :; done
echo "{\\"called\\": \\"$*\\"}" >"$last.part"
mv "$last.part" "$last"
"""
GRAPH = """#!/bin/sh
[ "$1" != --list ] || { printf 'gemv\\nstream\\ntiles\\n'; exit 0; }
case "$2" in stream) exit "${STREAM_EXITS:-0}" ;; tiles) exit 77 ;; esac
"""
# A tool of NVIDIA's, which must not see the carried libraries, runs what stands behind its options.
TOOL = """#!/bin/sh
case "${LD_LIBRARY_PATH-}" in *carried*) echo "it sees the carried libraries"; exit 9 ;; esac
while [ "${1#--}" != "$1" ]; do shift 2; done
echo "    Section: GPU Speed Of Light"
exec "$@"
"""
SMI = """#!/bin/sh
case "${LD_LIBRARY_PATH-}" in *carried*) exit 9 ;; esac
case "$*" in *query-gpu*) echo "NVIDIA H100 80GB HBM3, 580.1, 81559 MiB, ${CAPABILITY:-9.0}, 0:5:0.0" ;; esac
"""


class Case(QconvCase):
    def setUp(self):
        super().setUp()
        os.mkdir(self.path("bin"))
        self.script("bin/nvidia-smi", "#!/bin/sh\nexit 9\n")  # as on a machine without a driver
        self.results = self.path("results")
        self.work = self.path("work")

    def script(self, name, text):
        path = self.write(name, text)
        os.chmod(path, 0o755)
        return path

    def environment(self, **env):
        full = {k: v for k, v in os.environ.items() if not k.startswith("QC_RUN_") and k != "OUT"}
        full.update({"PATH": self.path("bin") + ":" + full["PATH"], "QC_RUN_WORK": self.work}, **env)
        return full

    def start(self, *args, **env):
        return subprocess.Popen([os.path.join(ROOT, "bench", "gpu_run.sh")] + list(args),
                                env=self.environment(**env), stdout=subprocess.PIPE, text=True,
                                stderr=subprocess.STDOUT, cwd=self.dir, start_new_session=True)

    def gpu_run(self, *args, **env):
        p = self.start(*args, **env)
        said = p.communicate(timeout=600)[0]
        return p.returncode, said

    def result(self, name, results=None):
        with open(os.path.join(results or self.results, name)) as f:
            return json.load(f)

    def row(self, step):
        return next(s for s in self.result("summary.json")["steps"] if s["step"] == step)

    def log(self, name, results=None):
        with tarfile.open(os.path.join(results or self.results, "logs.tar.gz")) as tar:
            return tar.extractfile("logs/%s.log" % name).read().decode()

    def stand_in(self):
        """A build of scripts, and tools that would need a GPU; returns the environment for them."""
        build = self.path("build")
        os.mkdir(build)
        self.script("build/qconv_shim", PROGRAM)
        self.script("build/shim_graph", GRAPH)
        self.script("build/bench_gpu_load_shim", "#!/bin/sh\necho '{\"bytes\": 12}'\n")
        self.script("build/bench_ceilings_shim", CEILINGS)
        self.script("build/bench_matmul_shim", MATMUL)
        self.script("bin/nvidia-smi", SMI)
        for tool in ("compute-sanitizer", "ncu"):
            self.script("bin/" + tool, TOOL)
        found = []
        for name, code in (("shim_api", 0), ("shim_plan", 77), ("shim_stream", 0), ("shim_tiles", 3)):
            path = self.script("build/" + name, "#!/bin/sh\necho 'says \033[1m %s' \"$WITH\"\n"
                               "sleep ${TEST_SLEEPS:-0.05}\nexit %d\n" % (name, code))
            found.append({"name": name, "command": [path], "properties": [
                {"name": "ENVIRONMENT", "value": ["WITH=it"]}]})
        self.write("tests.json", json.dumps({"tests": found}))
        self.script("bin/ctest", "#!/bin/sh\ncat '%s'\n" % self.path("tests.json"))
        return {"QC_RUN_BUILD": build, "QC_RUN_SHIM": "1", "QC_RUN_TESTS": "."}


@unittest.skipIf(SANITIZED, "scripts and what stands in for our programs")
class GpuRun(Case):
    def test_without_a_gpu(self):
        for word in WORDS:
            results = self.path(word)
            code, said = self.gpu_run(word, OUT=results)
            count = len(gpu_steps.CALLS[word])
            self.assertEqual(code, 77, said)
            self.assertIn("there is no NVIDIA GPU here (nvidia-smi shows none): all %d steps of the %s "
                          "call were left out, nothing was measured" % (count, word),
                          said.splitlines()[-1])
            s = self.result("summary.json", results)
            self.assertEqual([(x["step"], x["rc"]) for x in s["steps"]],
                             [(name, 77) for name, _, _ in gpu_steps.CALLS[word]])
            self.assertEqual((s["passed"], s["failed"], s["left_out"], s["complete"], s["running"]),
                             (0, 0, count, True, None))
            self.assertEqual(sorted(os.listdir(results)), ["logs.tar.gz", "summary.json"])

    def test_words(self):
        self.assertEqual(self.gpu_run("first")[0], 77)
        os.mkdir(self.path("debs"))
        self.script("bin/pkg-config", "#!/bin/sh\nexit 1\n")
        for args, words in (((), "usage:"), (("--bogus",), "usage:"), (("first", "a", "b"), "usage:"),
                            (("first", "second"), "usage:"), (("--fetch",), "usage:"), (("--debs",), "usage:"),
                            (("third",), "first|second"),
                            (("first",), "has results of an earlier call"),
                            (("--debs", "debs", "second"), "there are no .deb files in")):
            code, said = self.gpu_run(*args)
            self.assertEqual(code, 2, args)
            self.assertIn(words, said)

    def test_layers(self):
        """As many as the time, the disk and the memory have room for."""
        for make, convert, disk, want in ((0.01, 0.01, 1 << 40, 16), (30, 60, 1 << 40, 1), (5, 0.1, 1 << 40, 4),
                                          (0.1, 1.5, 1 << 40, 4), (0.1, 0.1, 3 * 3 * (436 << 20), 3)):
            for spaces in ((disk, 1 << 40), (1 << 40, disk)):
                self.assertEqual(gpu_steps.layers_for(make, convert, 20, 120, *spaces), want)

    def test_budgets(self):
        for word, steps in gpu_steps.CALLS.items():
            limits = {name: limit for name, limit, _ in steps}
            room = gpu_steps.CALL_SECONDS - gpu_steps.RESERVE
            built = sum(v for k, v in limits.items() if k not in ("build",) + gpu_steps.LEFT_OVER[word])
            self.assertLessEqual(built + gpu_steps.BUILD_PLANNED, room, word)
            self.assertLessEqual(built, gpu_steps.BUILT_SECONDS - gpu_steps.RESERVE, word)
            self.assertLessEqual(gpu_steps.BUILT_SECONDS, 4 * 60)
            # Also after the slowest build what a call is for has its time.
            last = {"first": "profiles", "second": "bitsandbytes"}[word]
            names = list(limits)
            self.assertLessEqual(sum(limits[n] for n in names[:names.index(last) + 1]), room, word)
            self.assertLess(len(gpu_steps.FILES[word]), MOST_FILES)  # and one half-written
        self.assertLessEqual(gpu_steps.CALL_SECONDS, 9 * 60)
        with open(os.path.join(ROOT, "docs", "bench.md")) as f:
            page = f.read()
        for word, files in gpu_steps.FILES.items():
            line = next(s for s in page.splitlines() if "--debs debs %s " % word in s)
            self.assertEqual(set(re.findall(r"`(\w+\.[\w.]+)`", line)), set(files), word)

    def test_a_model_of_as_many_layers_as_there_is_time_for(self):
        env = self.stand_in()
        del env["QC_RUN_SHIM"]
        self.script("build/qconv", PROGRAM.replace("sleep 0.02", "sleep 1"))
        self.script("build/bench_checkpoint", "#!/bin/sh\nfor last; do :; done\nmkdir -p \"$last\"\n"
                    "echo {} >\"$last/config.json\"\n")
        code, said = self.gpu_run("second", self.results, QC_RUN_STEPS="model", **env)
        self.assertEqual(code, 0, said)
        found = self.row("model")["figures"]
        self.assertGreaterEqual(found["convert_one_layer_seconds"], 1)
        self.assertTrue(1 <= found["layers"] <= 2, found)  # 35 s for 12 conversions of 1.5 s a layer
        self.assertIn("--layers %d " % found["layers"], self.log("model"))

    def test_all_steps(self):
        env = self.stand_in()
        ended = {}
        for word in WORDS:
            results = self.path(word)
            code, said = self.gpu_run(word, results, STREAM_EXITS="1", **env)
            self.assertEqual(code, 1, said)
            s = self.result("summary.json", results)
            ended[word] = {x["step"]: x["rc"] for x in s["steps"]}
            self.assertIn("%d steps passed, %d failed, %d left out" %
                          (s["passed"], s["failed"], s["left_out"]), said)
            self.assertLessEqual(set(os.listdir(results)), set(gpu_steps.FILES[word]))
        self.assertEqual(ended, {
            "first": {"machine": 0, "build": 77, "hardware": 0, "smoke": 1, "bench": 4, "tests": 3,
                      "ceilings": 0, "sanitizers": 3, "profiles": 0},
            "second": {"machine": 0, "build": 77, "hardware": 0, "model": 0, "convert": 4, "load": 0,
                       "validate": 0, "plan": 0, "groups": 4,
                       "bitsandbytes": 77, "sanitizers": 3}})
        self.results = self.path("first")
        self.assertEqual([(p["name"], p["rc"]) for p in self.row("smoke")["parts"]],
                         [("gemv", 0), ("stream", 1), ("tiles", 77)])
        self.assertEqual(len(self.result("bench.json")["rows"]), 3)
        self.assertEqual({p["name"] for p in self.row("sanitizers")["parts"]},
                         {"%s-shim_%s" % (t, k) for t in ("racecheck", "memcheck")
                          for k in ("stream", "tiles")})
        suite = ET.parse(os.path.join(self.results, "gpu_tests.xml")).getroot()
        cases = {c.get("name"): c for c in suite}
        self.assertEqual([suite.get(k) for k in ("tests", "failures", "skipped")], ["4", "1", "1"])
        self.assertEqual(cases["shim_tiles"].find("failure").get("message"), "exit code 3")
        self.assertIsNotNone(cases["shim_plan"].find("skipped"))
        self.assertIn("shim_stream it", cases["shim_stream"].find("system-out").text)
        self.assertRegex(self.result("ceilings.json")["called"], "^--seconds [67] ")
        self.results = self.path("second")
        found = self.row("convert")["figures"]
        self.assertEqual([found[k]["different"] for k in ("nf4 absmax none", "int8 absmax none")],
                         [[], ["model.safetensors"]])
        self.assertEqual([r["device"] for r in found["nf4 absmax none"]["runs"]], ["cuda", "cpu", "cuda"])
        self.assertEqual(self.row("load")["figures"],
                         {k: {"bytes": 12} for k in ("out-nf4-cuda", "out-int8-cuda")})
        self.assertEqual(len(self.row("sanitizers")["parts"]), 4 + 2 * 2)

    def keep(self, *words):
        with mock.patch.object(keep_gpu_results, "RESULTS", self.path("kept")):
            keep_gpu_results.main(["keep_gpu_results", "x"] + list(words))
        with open(self.path("kept", "gpu-x-run.json")) as f:
            return json.load(f)["steps"]

    def test_results_are_kept(self):
        env = self.stand_in()
        os.mkdir(self.path("kept"))
        self.gpu_run("first", self.results, QCONV_COMMIT="one", QC_RUN_STEPS="smoke,bench,ceilings,tests", **env)
        steps = self.keep(self.results, "--note", "tests", "as was to be expected")
        self.assertEqual(list(steps), ["smoke", "bench", "tests", "ceilings"])
        self.assertEqual({k: v for k, v in steps["tests"].items() if k != "seconds"}, {
            "commit": "one", "passed": 2, "left_out": 1, "failed": ["shim_tiles"], "note": "as was to be expected"})
        # A later call replaces what it has, and nothing else; figures name no places.
        self.gpu_run("second", self.path("later"), QCONV_COMMIT="two", QC_RUN_STEPS="model,convert", **env)
        steps = self.keep(self.path("later"))
        self.assertEqual((steps["smoke"]["commit"], steps["convert"]["commit"]), ("one", "two"))
        self.assertIn("nf4 absmax none", steps["convert"]["figures"])
        self.assertEqual(keep_gpu_results.without_paths({"nf4": {"path": "/x", "kl": 0.5}, "runs": [1]}),
                         {"nf4": {"kl": 0.5}, "runs": [1]})
        self.assertEqual(sorted(os.listdir(self.path("kept"))),
                         ["gpu-x-%s.json" % k for k in ("bench", "ceilings", "run")])
        with self.assertRaisesRegex(SystemExit, "there is no step 'x': smoke, bench"):
            self.keep(self.path("later"), "--note", "x", "y")
        self.script("bin/nvidia-smi", "#!/bin/sh\nexit 9\n")
        self.gpu_run("first", self.path("none"))
        with self.assertRaisesRegex(SystemExit, "measured on no GPU"):
            self.keep(self.path("none"))

    def test_time_limits(self):
        env = self.stand_in()
        code, said = self.gpu_run("second", self.results, QC_RUN_SECONDS="8", PLAN_SLEEPS="60",
                                  QC_RUN_STEPS="model,plan,sanitizers", **env)
        self.assertEqual(code, 1, said)
        self.assertEqual(self.row("plan")["rc"], 124)
        self.assertLess(self.row("plan")["seconds"], 10)
        self.assertEqual((self.row("sanitizers")["rc"], self.row("sanitizers")["why"]),
                         (77, "there is no time left"))
        # Of a single test, in its XML too.
        with mock.patch.dict(os.environ, self.environment(TEST_SLEEPS="30", **env), clear=True), \
                mock.patch.object(gpu_steps, "TEST_SECONDS", 0.3), \
                contextlib.redirect_stdout(io.StringIO()):
            os.environ["QC_RUN_STEPS"] = "tests"
            self.results = self.path("again")
            begin = time.monotonic()
            self.assertEqual(gpu_steps.main(["gpu_steps", "first", self.results]), 1)
        self.assertLess(time.monotonic() - begin, 20)
        suite = ET.parse(os.path.join(self.results, "gpu_tests.xml")).getroot()
        self.assertEqual({c.find("failure").get("message") for c in suite}, {"ran into its limit"})

    def test_sizes(self):
        """A result that is too large is removed, and the summary says so; logs keep their ends."""
        def large(step):
            step.say("begin")
            step.say("".join(random.Random(1).choices("0123456789", k=20000)))
            with open(step.run.into("bench.json"), "w") as f:
                f.write(" " * 5000)
            return 0

        with mock.patch.dict(os.environ, self.environment(**self.stand_in()), clear=True), \
                mock.patch.object(gpu_runner, "FILE_BYTES", 4000), \
                mock.patch.dict(gpu_steps.CALLS, {"first": (("large", 10, large),)}), \
                contextlib.redirect_stdout(io.StringIO()):
            gpu_steps.main(["gpu_steps", "first", self.results])
        self.assertEqual(sorted(os.listdir(self.results)), ["logs.tar.gz", "summary.json"])
        self.assertEqual(self.row("large")["why"], "bench.json is too large to keep: 5000 bytes")
        self.assertLessEqual(os.path.getsize(os.path.join(self.results, "logs.tar.gz")), 4000)
        self.assertRegex(self.log("large"), r"^\[\d+ bytes before this left out\]\n\d+\nbench.json is")

    def ours(self):
        """Processes that have our folder among their words."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open("/proc/%s/cmdline" % pid, "rb") as f:
                    words = f.read()
            except OSError:
                continue
            if self.dir.encode() in words:
                found.append(words)
        return found

    def none_is_left(self):
        """Whoever is killed takes a moment to go."""
        end = time.monotonic() + 5
        while self.ours() and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(self.ours(), [])

    def test_interrupted(self):
        env = self.stand_in()
        p = self.start("second", self.results, QC_RUN_STEPS="model,plan,sanitizers", PLAN_SLEEPS="60",
                       **env)
        while not any(b"\0plan\0" in words for words in self.ours()) and p.poll() is None:
            time.sleep(0.02)
        p.send_signal(signal.SIGTERM)
        said = p.communicate(timeout=30)[0]
        self.assertEqual(p.returncode, 130, said)
        self.assertEqual([(s["step"], s["rc"]) for s in self.result("summary.json")["steps"]],
                         [("model", 0), ("plan", 130)])
        self.assertFalse(self.result("summary.json")["complete"])
        self.none_is_left()

    def check_files(self, results, said):
        """All files are whole and hold every step that had ended."""
        names = os.listdir(results) if os.path.isdir(results) else []
        self.assertLessEqual(len(names), MOST_FILES)
        ended = re.findall(r"^(\w+) +rc", said, re.M)
        if not ended:
            return 0
        for name in names:
            if name.endswith(".json"):
                self.result(name, results)
        s = self.result("summary.json", results)
        self.assertEqual([x["step"] for x in s["steps"]][:len(ended)], ended)
        with tarfile.open(os.path.join(results, "logs.tar.gz")) as tar:
            logs = {m.name for m in tar.getmembers() if tar.extractfile(m).read() is not None}
        self.assertLessEqual({"logs/%s.log" % e for e in ended}, logs)
        parts = [p["name"] for x in s["steps"] + [s.get("so_far", {})] if x.get("step") == "tests"
                 for p in x.get("parts", [])]
        if parts:
            suite = ET.parse(os.path.join(results, "gpu_tests.xml")).getroot()
            self.assertLessEqual(set(parts), {c.get("name") for c in suite})
        if not s["complete"] and len(ended) < len(gpu_steps.CALLS[s["call"]]):
            self.assertIn(s["running"], [n for n, _, _ in gpu_steps.CALLS[s["call"]]] + [None])
        return len(ended)

    def test_killed_at_random_moments(self):
        env = self.stand_in()
        seed = int(os.environ.get("GPU_RUN_SEED") or random.SystemRandom().randrange(1 << 30))
        print("GPU_RUN_SEED=%d" % seed, flush=True)
        rng, whole, ended = random.Random(seed), {}, 0
        for word in WORDS:
            begin = time.monotonic()
            _, said = self.gpu_run(word, self.path(word), **env)
            whole[word] = time.monotonic() - begin
            self.assertEqual(self.check_files(self.path(word), said), len(gpu_steps.CALLS[word]))
        kills = [(i, WORDS[i % 2], rng.uniform(0.1, 1)) for i in range(20)]

        def kill(i, word, when):
            p = self.start(word, self.path("killed-%d" % i),
                           **dict(env, QC_RUN_WORK=self.path("work-%d" % i)))
            time.sleep(when * whole[word])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            return p.communicate(timeout=30)[0]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            saids = list(pool.map(lambda k: kill(*k), kills))
        for (i, word, when), said in zip(kills, saids):
            with self.subTest(seed=seed, kill=i, word=word, when=when):
                ended += self.check_files(self.path("killed-%d" % i), said)
        self.none_is_left()
        self.assertGreater(ended, 20)  # else nothing was looked at

    def test_the_peer_of_a_carried_wheel(self):
        env = self.stand_in()
        os.mkdir(self.path("debs"))
        with zipfile.ZipFile(self.path("debs", "bitsandbytes-0.1-py3-none-any.whl"), "w") as z:
            z.writestr("bitsandbytes/__init__.py", "__version__ = '0.1'\n")
            z.writestr("torch/__init__.py", "class cuda:\n    is_available = staticmethod(lambda: True)\n"
                       "class ops:\n    bitsandbytes = None\n")
            info = "bitsandbytes-0.1.dist-info/"
            z.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.1\n")
            z.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            z.writestr(info + "RECORD", "")
        if subprocess.run([sys.executable, "-m", "pip", "--version"], stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL).returncode:
            self.skipTest("there is no pip")
        self.gpu_run("second", self.results, QC_RUN_STEPS="bitsandbytes", QC_RUN_DEBS="debs", **env)
        row = self.row("bitsandbytes")
        self.assertEqual(row["rc"], 77, self.log("bitsandbytes"))
        self.assertIn("bitsandbytes 0.1 has no gemm_4bit", row["why"])

    # ---- a bare machine ----

    def test_libraries_for_our_own_programs_alone(self):
        env = self.stand_in()
        self.script("bin/nvcc", "#!/bin/sh\ncase \"$LD_LIBRARY_PATH\" in *carried*) exit 9 ;; esac\n"
                    "echo 'Cuda compilation tools, release 99.1, V99.1.1'\n")
        for folder, name in (("cublas", "libcublas.so.99"), ("cublas", "libcublasLt.so.99"),
                             ("cuda_runtime", "libcudart.so.99"), ("nvjitlink", "libnvJitLink.so.99")):
            os.makedirs(self.path("site-packages", "nvidia", folder, "lib"), exist_ok=True)
            self.write(os.path.join("site-packages", "nvidia", folder, "lib", name), "")
        full = {"QC_RUN_LIBRARIES": self.path("carried"), "PYTHONPATH": self.path("site-packages"),
                "LD_LIBRARY_PATH": "", "QCONV_LIBCUBLAS": ""}
        code, said = self.gpu_run("first", self.results, QC_RUN_STEPS="machine,hardware,profiles",
                                  **env, **full)
        self.assertEqual(code, 0, said)
        words = re.search("libraries (.*) cublas (.*)", self.log("hardware"))
        wheels = self.path("site-packages", "nvidia", "%s", "lib")
        self.assertEqual(words.group(2), os.path.join(wheels % "cublas", "libcublas.so.99"))
        paths = words.group(1).split(":")
        self.assertEqual(paths[0], self.path("carried"))
        self.assertLessEqual({wheels % "cublas", wheels % "cuda_runtime", wheels % "nvjitlink"}, set(paths))
        # Under a profiler it is our program that has them.
        self.assertIn("libraries " + self.path("carried"), self.log("profiles-nf4-1"))
        self.assertNotIn("it sees", self.log("profiles-nf4-1"))

    def test_which_library(self):
        for folder, names in (("a", ("libcublas.so.11", "libcublas.so", "libcublas.so.12.1")),
                              ("b", ("libcublas.so.12", "libcusolver.so.11")), ("c", ("libcublas.so.13",))):
            os.mkdir(self.path(folder))
            for n in names:
                self.write(os.path.join(folder, n), "")
        folders = [self.path(f) for f in "abc"]
        for toolkit, want in ((12, "b/libcublas.so.12"), (11, "a/libcublas.so.11"), (99, "c/libcublas.so.13")):
            found = gpu_runner.find_libraries(folders, toolkit)
            self.assertEqual(found, {"libcublas": self.path(want),
                                     "libcusolver": self.path("b", "libcusolver.so.11")})

    def test_a_ninja_that_does_not_run(self):
        os.mkdir(self.path("good"))
        self.script("bin/ninja", "#!/bin/sh\nexit 1\n")
        with mock.patch.dict(os.environ, PATH=self.path("bin")):
            self.assertEqual(gpu_runner.generator(), ["-G", "Unix Makefiles"])
        good = self.script("good/ninja", "#!/bin/sh\necho 1.11\n")
        with mock.patch.dict(os.environ, PATH=self.path("bin") + ":" + self.path("good")):
            self.assertEqual(gpu_runner.generator(), ["-G", "Ninja", "-DCMAKE_MAKE_PROGRAM=" + good])

    def test_a_build_is_used_again(self):
        self.script("bin/nvidia-smi", SMI)
        self.script("bin/cmake", "#!/bin/sh\ncase \"$*\" in *-S*) mkdir -p '%s' ;; esac\necho \"cmake: $*\"\n"
                    % self.path("work", "build"))

        def built(word, **env):
            self.results = self.path("%s-%d" % (word, len(os.listdir(self.dir))))
            code, said = self.gpu_run(word, self.results, QC_RUN_STEPS="build", **env)
            self.assertEqual(code, 0, said)
            return [line for line in self.log("build").splitlines() if line.startswith("cmake:")]

        first = built("first")
        self.assertEqual(len(first), 2)
        self.assertIn("-DCMAKE_CUDA_ARCHITECTURES=90-real", first[0])
        self.assertIn("--target qconv gpu_tests bench_matmul bench_ceilings --", first[1])
        source = self.path("work", "source")
        mark = os.path.join(source, "CMakeLists.txt")
        os.utime(mark, (1, 1))
        self.write(os.path.join("work", "source", "stale.c"), "")
        second = built("second")
        self.assertEqual(len(second), 1)  # configured as before
        self.assertIn("--target qconv bench_checkpoint bench_gpu_load bench_matmul gpu_tests --", second[0])
        self.assertEqual(os.stat(mark).st_mtime, 1)  # the same file keeps its time
        self.assertFalse(os.path.exists(os.path.join(source, "stale.c")))
        self.write(os.path.join("work", "source", "CMakeLists.txt"), "changed")
        self.assertIn("80-real", built("first", CAPABILITY="8.0")[0])  # another GPU
        self.assertTrue(gpu_runner.same_file(mark, os.path.join(ROOT, "CMakeLists.txt")))
        tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], stdout=subprocess.PIPE, text=True)
        for name in tracked.stdout.split():
            if name.split("/")[0] in gpu_runner.SOURCES and os.path.exists(os.path.join(ROOT, name)):
                self.assertTrue(os.path.exists(os.path.join(source, name)), name)

    @unittest.skipUnless(shutil.which("cmake"), "no cmake")
    def test_the_copied_sources_are_all_that_cmake_wants(self):
        gpu_runner.copy_sources(ROOT, self.path("source"))
        r = subprocess.run(["cmake", "-S", self.path("source"), "-B", self.path("built"), "-DQCONV_CUDA=OFF"],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(r.returncode, 0, r.stdout)

    @unittest.skipUnless(shutil.which("dpkg-deb"), "no dpkg-deb")
    def test_packages_that_were_carried(self):
        """The build and our own programs see them, a tool does not."""
        lib = os.path.join("usr", "lib", "x86_64-linux-gnu")
        for folder in ("DEBIAN", os.path.join("usr", "bin"), os.path.join(lib, "pkgconfig"),
                       os.path.join(lib, "openblas-pthread")):
            os.makedirs(self.path("package", folder))
        self.write("package/DEBIAN/control", "Package: a\nVersion: 1\nArchitecture: all\n"
                   "Maintainer: a <a@example.org>\nDescription: a\n")
        self.script("package/usr/bin/pkgconf", "#!/bin/sh\necho \"pkgconf $LD_LIBRARY_PATH\"\n")
        os.symlink("pkgconf", self.path("package", "usr", "bin", "pkg-config"))
        self.write(os.path.join("package", lib, "pkgconfig", "a.pc"), "prefix=/usr\nCflags: -I/usr/x\n")
        self.write(os.path.join("package", lib, "openblas-pthread", "libopenblas.so.0"), "")
        # A library outside of /usr, and the link to it that building needs.
        os.makedirs(self.path("package", "lib", "x86_64-linux-gnu"))
        self.write("package/lib/x86_64-linux-gnu/liba.so.3", "a")
        os.symlink("/lib/x86_64-linux-gnu/liba.so.3", self.path("package", lib, "liba.so"))
        os.mkdir(self.path("debs"))
        subprocess.run(["dpkg-deb", "-b", self.path("package"), self.path("debs", "a.deb")], check=True,
                       stdout=subprocess.DEVNULL)
        env = self.stand_in()
        for tool in ("nvidia-smi", "nvcc"):
            self.script("bin/" + tool, "#!/bin/sh\necho \"%s ${LD_LIBRARY_PATH-none}\"\n" % tool)
        self.script("bin/pkg-config", "#!/bin/sh\nexit 1\n")
        self.script("build/qconv_shim", "#!/bin/sh\necho \"{}\"\n{ echo \"own $LD_LIBRARY_PATH $QCONV_OPENBLAS\"\n"
                    "\"$CMAKE_PREFIX_PATH/bin/pkg-config\"; cat \"${PKG_CONFIG_PATH%%:*}/a.pc\"; } >&2\n")
        full = {k: "" for k in ("CMAKE_PREFIX_PATH", "PKG_CONFIG_PATH", "LD_LIBRARY_PATH")}
        code, said = self.gpu_run("--debs", "debs", "first", self.results,
                                  QC_RUN_STEPS="machine,hardware", **env, **full)
        self.assertEqual(code, 0, said)
        own, root = self.log("hardware"), self.path("work", "debs")
        self.assertIn("own %s" % os.path.join(root, lib), own)
        self.assertIn(os.path.join(root, lib, "openblas-pthread", "libopenblas.so.0"), own)
        self.assertIn("pkgconf %s\n" % os.path.join(root, lib), own)
        self.assertIn("prefix=%s/usr\nCflags: -I%s/usr/x" % (root, root), own)
        self.assertIn("nvidia-smi \n", self.log("machine"))
        self.assertIn("nvcc \n", self.log("machine"))
        for name in ("liba.so.3", "liba.so"):
            with open(os.path.join(root, lib, name)) as f:
                self.assertEqual(f.read(), "a")
        # Libraries alone, for a finished build.
        for what in ("bin", "lib/x86_64-linux-gnu/pkgconfig"):
            shutil.rmtree(self.path("package", "usr", what))
        subprocess.run(["dpkg-deb", "-b", self.path("package"), self.path("debs", "a.deb")], check=True,
                       stdout=subprocess.DEVNULL)
        self.script("build/qconv_shim", "#!/bin/sh\necho \"{}\"\necho \"own $LD_LIBRARY_PATH\" >&2\n")
        code, said = self.gpu_run("--debs", "debs", "first", self.path("again"), QC_RUN_STEPS="hardware",
                                  **env, **full)
        self.assertEqual(code, 0, said)
        self.assertIn("own %s" % os.path.join(root, lib), self.log("hardware", self.path("again")))


class OnTheShim(Case):
    """Our own programs, with kernels that run on the CPU."""

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
        for group, only in (("memory", {"ring", "fragment 8 L2 128"}), ("bulk", {"bulk"}), ("rates", {"mma.m16n8k16", "cvt.rn.f16x2.f32"}),
                            ("launch", {"graph, early", "stream, early", "gap in a graph, early"})):
            self.assertEqual(names[90, group] - names[70, group], only)
        self.assertEqual(names[70, "rates"] - names[90, "rates"], {"mma.m8n8k4"})
        missing = self.path("missing", "x.json")
        for devices, args, code in (("none", (), 5), ("sm_90:2:64MiB", ("--rounds", "2"), 2),
                                    ("sm_90:2:64MiB", ("--rounds",), 2), ("sm_90:2:64MiB", ("--bogus", "1"), 2),
                                    ("sm_90:2:64MiB", ("--output", missing), 1)):
            self.assertEqual(run(devices, *args).returncode, code, args)

    @unittest.skipIf(SANITIZED or not os.environ.get("QCONV_SHIM"), "run by ctest, where it is quick")
    def test_rehearsal(self):
        whole = os.environ.get("GPU_RUN_WHOLE")
        self.script("bin/nvidia-smi", SMI)
        for tool in ("compute-sanitizer", "ncu"):
            self.script("bin/" + tool, TOOL)
        env = {"QC_RUN_SHIM": "1", "QC_RUN_BUILD": os.path.dirname(os.environ["QCONV_SHIM"]),
               "QC_RUN_TESTS": "^shim_(device|%s)$" % ("stream|tiles" if whole else "plan"),
               "QCONV_LIBCUBLAS": os.environ["FAKE_CUBLAS"],
               "QCONV_LIBCUSOLVER": os.environ["FAKE_CUSOLVER"], "QC_SHIM_DEVICES": "sm_90:2:256MiB"}
        steps = {} if whole else {
            "first": "machine,build,hardware,smoke,bench,tests,ceilings", "second": "model,convert,load"}
        for word in WORDS:
            self.results = self.path(word)
            code, said = self.gpu_run(word, self.results, QC_RUN_STEPS=steps.get(word, ""), **env)
            s = self.result("summary.json")
            self.assertTrue(s["complete"], said)
            self.assertLessEqual(set(os.listdir(self.results)), set(gpu_steps.FILES[word]))
            rc = {x["step"]: x["rc"] for x in s["steps"]}
            if whole:
                # There is no driver for plan; a CPU may run into limits.
                bad = {k for k, v in rc.items() if v not in (0, 77, 124)}
                self.assertLessEqual(bad, {"plan"}, said)
                continue
            if word == "first":
                # gpu_graph (here shim_graph) is a part of the run, not an extra.
                self.assertEqual(rc.pop("smoke"), 0, "gpu_graph was not built, or a kernel is wrong")
                self.assertEqual(rc.pop("build"), 77)
                self.assertTrue(self.result("bench.json")["rows"])
                self.assertTrue(self.result("ceilings.json")["bulk"])
            self.assertEqual(set(rc.values()), {0}, said)


if __name__ == "__main__":
    unittest.main()
