#!/usr/bin/env python3
"""The steps of gpu_run.sh: each with a time limit, a log and an exit code; one that fails does not
stop the others. Standard library only.

    gpu_steps.py RESULTS        with QC_RUN_WORK set

RESULTS gets at most 12 files, under 16 MiB:
    summary.json     GPU, driver, CUDA, commit; per step its exit code and seconds
    convert.json     seconds and bytes of every conversion; GPU and CPU compared byte for byte
    eval.json        perplexity and KL divergence of the bundled model on the GPU and on the CPU
    calibrate.json   seconds of --calibrate on the GPU, and what it gains there and on the CPU
    load.json        outputs to the GPU's memory, to the host's, and copies alone
    bench.json       qconv bench          hardware.json    qconv hardware --json
    ceilings.json    what the GPU gives at best (bench_ceilings)
    validate.json    qconv validate       validate.html    the same as a page
    gpu_tests.xml    ctest -L gpu         logs.tar.gz      everything that was printed, and what
                                                           qconv bench --tune found: tune.json and
                                                           the table that it makes, tuning.json

Exit codes of steps: 0 passed, 77 left out (the log says why), 124 ran into its limit, 99 found by
compute-sanitizer, others the program's.

Set by environment variables:
    QC_RUN_WORK      folder for the build and the models, kept; gpu_run.sh takes a new one and
                     removes it
    QC_RUN_BUILD     a finished build to use instead of building
    QC_RUN_PROGRAM   the program in it: qconv
    QC_RUN_LOADER    and this one: bench_gpu_load
    QC_RUN_CEILINGS  and this one: bench_ceilings
    QC_RUN_LABEL     the tests: gpu
    QC_RUN_ANYWAY    1: go on without a GPU (with qconv_shim and label kernels, say)
    QC_RUN_SECONDS   for all of it: 470
    QC_RUN_LAYERS    of the synthetic model, 0.44 GB each; as many as there is room for, at most 32
    QC_RUN_TOKENS    of eval and calibrate: 16384; 128 take the CPU shim a minute
    QC_RUN_STEPS     only these, by name: build,tests,bench
    QCONV_COMMIT     what is measured, where there is no git
"""
import filecmp
import glob
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SKIPPED, OUT_OF_TIME, FOUND = 77, 124, 99
CEILINGS_SECONDS = 40
LOG_BYTES = 1 << 20
RESULT_BYTES = 16 << 20
LAYER_BYTES = 436 << 20
BENCH_SECONDS = 120
TUNE_SECONDS = 45
BEHIND_TUNE = 290  # conversions 75, load 10, eval 15, calibrating 50, validate 40, the sanitizers 100
GROUPS_SECONDS = 20
BEHIND_BENCH = BEHIND_TUNE + TUNE_SECONDS + GROUPS_SECONDS
# How far a GPU's figures may be from the CPU's, relative and absolute: it multiplies float16 rows.
EVAL_APART = {"base_perplexity": (1e-3, 0), "perplexity": (1e-3, 0), "kl_mean": (2e-2, 5e-6),
              "top1": (0, 1e-2)}
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


class Skip(Exception):
    """Why a step is left out."""


def ask(command):
    """What a command says, or None."""
    try:
        r = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                           timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return r.stdout.strip() if r.returncode == 0 else None


class Log:
    """What a step prints, kept to its last LOG_BYTES."""

    def __init__(self, path):
        self.path = path
        self.file = open(path, "wb")

    def say(self, text):
        self.file.write(text.encode() + b"\n")
        self.file.flush()

    def has(self, words):
        with open(self.path, "rb") as f:
            return words in f.read()

    def close(self):
        self.file.close()
        size = os.path.getsize(self.path)
        if size > LOG_BYTES:
            with open(self.path, "rb") as f:
                f.seek(size - LOG_BYTES)
                tail = f.read()
            with open(self.path, "wb") as f:
                f.write(b"[%d bytes before this left out]\n" % (size - LOG_BYTES) + tail)


class Run:
    def __init__(self, results):
        self.results = os.path.abspath(results)
        self.begin = time.monotonic()
        self.seconds = float(os.environ.get("QC_RUN_SECONDS", "470"))
        self.work = os.path.abspath(os.environ["QC_RUN_WORK"])
        self.build = os.path.abspath(os.environ.get("QC_RUN_BUILD", os.path.join(self.work, "build")))
        self.program = os.path.join(self.build, os.environ.get("QC_RUN_PROGRAM", "qconv"))
        self.label = os.environ.get("QC_RUN_LABEL", "gpu")
        self.only = [s for s in os.environ.get("QC_RUN_STEPS", "").split(",") if s]
        self.logs = os.path.join(self.work, "logs")
        self.model = os.path.join(self.work, "model")
        self.steps = []
        self.gpu = find_gpus()
        self.converted = {}
        self.lock = threading.Lock()
        os.makedirs(self.results, exist_ok=True)
        os.makedirs(self.logs, exist_ok=True)

    def left(self):
        return self.seconds - (time.monotonic() - self.begin)

    def into(self, name):
        return os.path.join(self.results, name)

    def step(self, name, limit, do):
        """Run do(log, limit) -> exit code, and write down what became of it."""
        if self.only and name not in self.only:
            return None
        log = Log(os.path.join(self.logs, name + ".log"))
        begin = time.monotonic()
        why = None
        limit = min(limit, self.left())
        try:
            if not self.gpu and not os.environ.get("QC_RUN_ANYWAY"):
                raise Skip("no NVIDIA GPU")
            if limit < 3:
                raise Skip("no time left")
            code = do(log, limit)
        except Skip as e:
            code, why = SKIPPED, str(e)
        except Exception as e:  # the other steps go on
            code, why = 1, "%s: %s" % (type(e).__name__, e)
        if why:
            log.say(why)
        log.close()
        took = time.monotonic() - begin
        row = {"step": name, "rc": code, "seconds": round(took, 1)}
        if why:
            row["why"] = why
        with self.lock:
            self.steps.append(row)
            print("%-14s rc %3d  %6.1f s%s" % (name, code, took, "  " + why if why else ""),
                  flush=True)
        return code

    def call(self, log, command, limit, environment=None, stdout=None):
        """Exit code; 124 if it had to be ended. What it prints goes to the log, stdout to a file
        if one is named."""
        log.say("$ " + " ".join(command))
        out = open(stdout, "wb") if stdout else log.file
        try:
            p = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out,
                                 stderr=log.file, start_new_session=True,
                                 env=dict(os.environ, **(environment or {})))
            try:
                code = p.wait(timeout=max(limit, 0.1))
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()
                code = OUT_OF_TIME
        finally:
            if stdout:
                out.close()
        log.say("[exit code %d]" % code)
        return code

    def qconv(self, log, arguments, limit, stdout=None):
        if not os.path.exists(self.program):
            raise Skip("it was not built")
        return self.call(log, [self.program] + arguments, limit, stdout=stdout)


def find_gpus():
    said = ask(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap,pci.bus_id",
                "--format=csv,noheader"])
    found = []
    for line in (said or "").splitlines():
        facts = [f.strip() for f in line.split(",")]
        if len(facts) == 5:
            found.append(dict(zip(("name", "driver", "memory", "compute_capability", "pci"), facts)))
    return found


# ---- steps ---------------------------------------------------------------------------------------

def machine(run, log, limit):
    for command in (["nvidia-smi"], ["nvidia-smi", "-q"], [cuda_tool("nvcc") or "nvcc", "--version"],
                    ["cmake", "--version"], ["lscpu"], ["free", "-h"], ["df", "-h", run.work]):
        if shutil.which(command[0]):
            run.call(log, command, limit)
    return 0


def build(run, log, limit):
    if "QC_RUN_BUILD" in os.environ:
        raise Skip("QC_RUN_BUILD has one")
    # For this machine's GPUs alone: a fifth of the time.
    code = sorted({g["compute_capability"].replace(".", "") + "-real" for g in run.gpu})
    configure = ["cmake", "-S", ROOT, "-B", run.build, "-DCMAKE_BUILD_TYPE=Release",
                 "-DQCONV_CUDA=ON"]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    if code:
        configure += ["-DCMAKE_CUDA_ARCHITECTURES=" + ";".join(code)]
    begin = time.monotonic()
    rc = run.call(log, configure, limit)
    if rc == 0:
        rc = run.call(log, ["cmake", "--build", run.build, "-j", str(os.cpu_count() or 2),
                            "--target", "qconv", "bench_checkpoint", "bench_gpu_load", "bench_ceilings", "gpu_tests"],
                      limit - (time.monotonic() - begin))
    return rc


def tests(run, log, limit):
    if not os.path.exists(os.path.join(run.build, "CTestTestfile.cmake")):
        raise Skip("it was not built")
    return run.call(log, ["ctest", "--test-dir", run.build, "-L", "^%s$" % run.label,
                          "-j", str(min(8, os.cpu_count() or 2)), "--output-on-failure",
                          "--no-tests=error", "--output-junit",
                          run.into("gpu_tests.xml")], limit)


def cuda_tool(name):
    """Where a program of the toolkit is, or None: by PATH, beside nvcc, in the usual folder."""
    folders = [os.environ.get("PATH", "")]
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc:
        folders.append(os.path.dirname(os.path.realpath(nvcc)))
    folders.append("/usr/local/cuda/bin")
    return shutil.which(name, path=os.pathsep.join(folders))


def programs(run):
    """Commands of the tests."""
    said = ask(["ctest", "--test-dir", run.build, "-L", "^%s$" % run.label, "--show-only=json-v1"])
    found = []
    for t in json.loads(said or "{}").get("tests", []):
        if t.get("command"):
            found.append((t["name"], t["command"]))
    if not found:
        raise Skip("no tests were built")
    return found


def sanitize(run, log, limit, tool):
    """All programs under one tool, with the shapes of QC_TEST_QUICK."""
    checker = cuda_tool("compute-sanitizer")
    if not checker:
        raise Skip("there is no compute-sanitizer")
    end = time.monotonic() + limit
    worst, ran = 0, 0
    # gpu_plan starts nothing on a GPU, which the checker takes for an error; gpu_api has cuBLAS in
    # it, the slowest to look at, and comes last.
    chosen = [p for p in programs(run) if not p[0].endswith("_plan")]
    for name, command in sorted(chosen, key=lambda p: (p[0].endswith("_api"), p[0])):
        if end - time.monotonic() < 3:
            log.say("RESULT %s %s left out: no time left" % (tool, name))
            worst = worst or OUT_OF_TIME
            continue
        prefix = [checker, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
        if tool == "memcheck":
            # Tests ask for what CUDA must refuse, too.
            prefix += ["--report-api-errors", "no"]
        rc = run.call(log, prefix + command, end - time.monotonic(),
                      {"QC_TEST_QUICK": "1"})
        log.say("RESULT %s %s rc %d" % (tool, name, rc))
        if not ran and log.has(b"Device not supported"):
            raise Skip("compute-sanitizer does not support this device here")
        if rc == SKIPPED:
            continue
        ran += 1
        if rc != 0 and worst in (0, OUT_OF_TIME):
            worst = rc
    if not ran:
        raise Skip("every program was skipped")
    return worst


def sanitizers(run):
    """The four at once: they mostly wait for one thread each."""
    threads = []
    for tool in TOOLS:
        threads.append(threading.Thread(target=run.step, args=(
            tool, 170, lambda log, limit, tool=tool: sanitize(run, log, limit, tool))))
        threads[-1].start()
    for t in threads:
        t.join()


def hardware(run, log, limit):
    rc = run.qconv(log, ["--version"], limit) or run.qconv(log, ["hardware"], limit)
    rc = rc or run.qconv(log, ["hardware", "--json"], limit, stdout=run.into("hardware.json"))
    return rc or run.qconv(log, ["hardware", "--watch", "--samples", "3"], limit)


def layers_that_fit(run):
    """By the disk (model and four outputs) and by the page cache."""
    if "QC_RUN_LAYERS" in os.environ:
        return int(os.environ["QC_RUN_LAYERS"])
    disk = shutil.disk_usage(run.work).free
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(32, disk // (3 * LAYER_BYTES), memory // (3 * LAYER_BYTES)))


def model(run, log, limit):
    tool = os.path.join(run.build, "bench_checkpoint")
    if not os.path.exists(tool):
        raise Skip("it was not built")
    shutil.rmtree(run.model, ignore_errors=True)
    return run.call(log, [tool, "--layers", str(layers_that_fit(run)), run.model], limit)


def size_of(folder):
    return sum(os.path.getsize(p) for p in glob.glob(os.path.join(folder, "*")))


def different(a, b):
    """Names of files that two folders do not have alike."""
    names = sorted(set(os.listdir(a)) | set(os.listdir(b)))
    return [n for n in names if not (os.path.isfile(os.path.join(a, n))
                                     and os.path.isfile(os.path.join(b, n))
                                     and filecmp.cmp(os.path.join(a, n), os.path.join(b, n),
                                                     shallow=False))]


def convert(run, log, limit, scheme, scale, compress):
    """GPU, CPU, GPU, CPU; the outputs compared. Files stay in the page cache, both ways."""
    if not os.path.exists(os.path.join(run.model, "config.json")):
        raise Skip("there is no model")
    end = time.monotonic() + limit
    rounds = []
    outs = {d: os.path.join(run.work, "out-%s-%s" % (scheme, d)) for d in ("cuda", "cpu")}
    for i in range(2):
        for device, out in outs.items():
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            begin = time.monotonic()
            rc = run.qconv(log, ["-v", "--to", scheme, "--scale", scale, "--compress", compress,
                                 "--device", device, run.model, out], end - begin)
            seconds = time.monotonic() - begin
            if rc != 0:
                return rc
            rounds.append({"device": device, "round": i, "seconds": round(seconds, 3),
                           "read_bytes_per_second": round(size_of(run.model) / seconds)})
    unlike = different(outs["cuda"], outs["cpu"])
    run.converted["%s, %s, %s" % (scheme, scale, compress)] = {
        "model_bytes": size_of(run.model), "out_bytes": size_of(outs["cuda"]), "runs": rounds,
        "files": len(os.listdir(outs["cpu"])), "different": unlike}
    with open(run.into("convert.json"), "w") as f:
        json.dump(run.converted, f, indent=1)
        f.write("\n")
    log.say("GPU and CPU: %s" % ("differ in " + ", ".join(unlike) if unlike else
                                 "the same bytes in every file"))
    shutil.rmtree(outs["cpu"])
    return 4 if unlike else 0


def load(run, log, limit):
    """What was converted, to the GPU; what arrives is compared with what the host reads."""
    tool = os.path.join(run.build, os.environ.get("QC_RUN_LOADER", "bench_gpu_load"))
    outs = [o for o in ("out-nf4-cuda", "out-int8-cuda") if os.path.isdir(os.path.join(run.work, o))]
    if not os.path.exists(tool):
        raise Skip("it was not built")
    if not outs:
        raise Skip("nothing was converted")
    end, found = time.monotonic() + limit, {}
    for out in outs:
        path = os.path.join(run.work, out + "-load.json")
        rc = run.call(log, [tool, "--rounds", "5", os.path.join(run.work, out)],
                      end - time.monotonic(), stdout=path)
        if rc != 0:
            return rc
        with open(path) as f:
            found[out] = json.load(f)
    with open(run.into("load.json"), "w") as f:
        json.dump(found, f, indent=1)
        f.write("\n")
    return 0


def evaluate(run, log, limit):
    """The bundled model in NF4 and in int8 against its source: the GPU's figures beside the CPU's."""
    end = time.monotonic() + limit
    data = os.path.join(ROOT, "tests", "data", "kjv-llama")
    figures, apart = {}, []
    for scheme in ("nf4", "int8"):
        out = os.path.join(run.work, "eval-" + scheme)
        shutil.rmtree(out, ignore_errors=True)
        rc = run.qconv(log, ["-q", "--to", scheme, "--device", "cpu", os.path.join(data, "model"), out],
                       end - time.monotonic())
        for device in ("cuda", "cpu"):
            path = os.path.join(run.work, "eval-%s-%s.json" % (scheme, device))
            rc = rc or run.qconv(log, ["eval", out, "--against", os.path.join(data, "model"),
                                       "--text", os.path.join(data, "heldout.txt"), "--max-tokens",
                                       os.environ.get("QC_RUN_TOKENS", "16384"), "--device", device, "--json"],
                                 end - time.monotonic(), stdout=path)
            if rc != 0:
                return rc
            with open(path) as f:
                figures["%s, %s" % (scheme, device)] = json.load(f)
        gpu, cpu = figures[scheme + ", cuda"], figures[scheme + ", cpu"]
        if gpu["device"] == cpu["device"]:
            apart.append("%s: the GPU was not used" % scheme)
        for what, (relative, absolute) in EVAL_APART.items():
            if not abs(gpu[what] - cpu[what]) <= relative * abs(cpu[what]) + absolute:
                apart.append("%s: %s is %.9g on the GPU, %.9g on the CPU"
                             % (scheme, what, gpu[what], cpu[what]))
    with open(run.into("eval.json"), "w") as f:
        json.dump({"figures": figures, "apart": apart}, f, indent=1)
        f.write("\n")
    log.say("GPU and CPU: " + ("; ".join(apart) if apart else "the same figures"))
    return 4 if apart else 0


def calibrate(run, log, limit):
    """The bundled model calibrated on the GPU and on the CPU: as good; then two layers of the large
    one on the GPU, for the time."""
    end = time.monotonic() + limit
    data = os.path.join(ROOT, "tests", "data", "kjv-llama")
    source = os.path.join(data, "model")
    tokens = os.environ.get("QC_RUN_TOKENS", "16384")
    found, wrong = {}, []

    def convert_timed(name, *arguments):
        out = os.path.join(run.work, "calibrated-" + name)
        shutil.rmtree(out, ignore_errors=True)
        begin = time.monotonic()
        rc = run.qconv(log, ["-v", "--compress", "none", *arguments, out], end - time.monotonic())
        found[name] = {"seconds": time.monotonic() - begin}
        return rc, out

    for name, more in (("plain", ["--scale", "absmax"]),
                       ("cuda", ["--calibrate", "default", "--calibration-tokens", tokens]),
                       ("cpu", ["--calibrate", "default", "--calibration-tokens", tokens])):
        device = "cpu" if name == "plain" else name
        rc, out = convert_timed(name, "--to", "nf4", *more, "--device", device, source)
        path = os.path.join(run.work, "calibrated-%s.json" % name)
        rc = rc or run.qconv(log, ["eval", out, "--against", source, "--text",
                                   os.path.join(data, "heldout.txt"), "--max-tokens", tokens,
                                   "--device", "cpu", "--json"], end - time.monotonic(), stdout=path)
        if rc != 0:
            return rc
        with open(path) as f:
            found[name]["kl_mean"] = json.load(f)["kl_mean"]
    plain, cuda, cpu = (found[n]["kl_mean"] for n in ("plain", "cuda", "cpu"))
    if not cuda <= 1.15 * cpu:
        wrong.append("KL divergence is %.4g on the GPU, %.4g on the CPU" % (cuda, cpu))
    if not cuda < 0.6 * plain:
        wrong.append("KL divergence is %.4g, %.4g without calibration" % (cuda, plain))
    if os.path.exists(os.path.join(run.model, "config.json")):
        ids = os.path.join(run.work, "calibrate.ids")
        with open(ids, "w") as f:
            for i in range(16):
                f.write(" ".join(str((i * 2048 + k) * 7919 % 32000) for k in range(2048)) + "\n")
        rc, _ = convert_timed("large", "--to", "nf4", "--calibrate", ids, "--keep",
                              "*.layers.[2-9].*", "--keep", "*.layers.[1-9][0-9].*", "--device",
                              "cuda", run.model)
        if rc != 0:
            return rc
    with open(run.into("calibrate.json"), "w") as f:
        json.dump({"figures": found, "wrong": wrong}, f, indent=1)
        f.write("\n")
    log.say("calibrated: " + ("; ".join(wrong) if wrong else "as good on the GPU as on the CPU"))
    return 4 if wrong else 0


def validate(run, log, limit):
    out = os.path.join(run.work, "out-nf4-cuda")
    if not os.path.isdir(out):
        raise Skip("nothing was converted")
    rc = run.qconv(log, ["validate", out, "--against", run.model, "--sample", "14", "--json",
                         "--html", run.into("validate.html")], limit,
                   stdout=run.into("validate.json"))
    return rc


def plan(run, log, limit):
    if not os.path.exists(os.path.join(run.model, "config.json")):
        raise Skip("there is no model")
    rc = run.qconv(log, ["plan", run.model, "--vram", "auto"], limit)
    return rc or run.qconv(log, ["plan", run.model, "--mode", "train", "--vram", "auto", "--profile"],
                           limit)


def ceilings(run, log, limit):
    tool = os.path.join(run.build, os.environ.get("QC_RUN_CEILINGS", "bench_ceilings"))
    if not os.path.exists(tool):
        raise Skip("it was not built")
    # Its own limit ends it between rounds, a few seconds late at most.
    seconds = max(5, min(limit - 15, CEILINGS_SECONDS))
    return run.call(log, [tool, "--seconds", str(int(seconds)), "--output",
                          run.into("ceilings.json")], limit)


def bench(run, log, limit):
    # What it is given, less what starting and ending take, and what the steps behind it should have.
    seconds = max(20, min(limit - 10, BENCH_SECONDS, run.left() - BEHIND_BENCH))
    return run.qconv(log, ["bench", "--seconds", str(int(min(seconds, max(5, limit - 10)))),
                           "--output", run.into("bench.json")], limit)


def tune(run, log, limit):
    # The large layers of a 70B model; what there is no time for is left out.
    seconds = max(15, min(limit - 15, TUNE_SECONDS, run.left() - BEHIND_TUNE))
    return run.qconv(log, ["bench", "--tune", "--seconds", str(int(seconds)), "--m", "1,4,16,64",
                           "--shapes", "8192x8192,1024x8192,28672x8192,8192x28672",
                           "--output", os.path.join(run.logs, "tune.json"),
                           "--save", os.path.join(run.logs, "tuning.json")], limit)


def groups(run, log, limit):
    # q, k and v of a 70B model in one launch, gate and up in one.
    seconds = max(10, min(limit - 10, GROUPS_SECONDS))
    return run.qconv(log, ["bench", "--seconds", str(int(seconds)), "--m", "1,2,4,8",
                           "--scheme", "nf4",
                           "--shapes", "8192+1024+1024x8192,28672+28672x8192",
                           "--output", os.path.join(run.logs, "groups.json")], limit)


# ---- together ------------------------------------------------------------------------------------

def finish(run):
    commit = os.environ.get("QCONV_COMMIT") or ask(["git", "-C", ROOT, "rev-parse", "HEAD"])
    nvcc = ask([cuda_tool("nvcc") or "nvcc", "--version"]) or ""
    failed = [s for s in run.steps if s["rc"] not in (0, SKIPPED)]
    skipped = [s for s in run.steps if s["rc"] == SKIPPED]
    summary = {
        "gpus": run.gpu, "cpu": cpu_name(), "cpus": os.cpu_count(), "machine": platform.machine(),
        "nvcc": next((s.strip() for s in nvcc.splitlines() if "release" in s), None),
        "commit": commit or "unknown", "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - run.begin, 1), "steps": run.steps,
        "passed": len(run.steps) - len(failed) - len(skipped), "failed": len(failed),
        "left_out": len(skipped)}
    with open(run.into("summary.json"), "w") as f:
        json.dump(summary, f, indent=1)
        f.write("\n")
    with tarfile.open(run.into("logs.tar.gz"), "w:gz") as tar:
        tar.add(run.logs, arcname="logs")
    for path in sorted(glob.glob(run.into("*")), key=os.path.getsize, reverse=True):
        if sum(os.path.getsize(p) for p in glob.glob(run.into("*"))) > RESULT_BYTES:
            print("gpu_run: %s is too large to keep" % os.path.basename(path))
            os.remove(path)
    if not run.gpu and not os.environ.get("QC_RUN_ANYWAY"):
        print("gpu_run: there is no NVIDIA GPU here (nvidia-smi shows none): all %d steps were left "
              "out (77), nothing was measured" % len(run.steps))
        return SKIPPED
    print("gpu_run: %d steps passed, %d failed, %d left out; results in %s"
          % (summary["passed"], summary["failed"], summary["left_out"], run.results))
    return 1 if failed else 0


def cpu_name():
    try:
        with open("/proc/cpuinfo") as f:
            return next(s.split(":", 1)[1].strip() for s in f if s.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main(argv):
    if len(argv) != 2:
        sys.exit("usage: gpu_steps.py RESULTS")
    if "QC_RUN_WORK" not in os.environ:
        sys.exit("gpu_steps: QC_RUN_WORK names no folder")
    run = Run(argv[1])

    def step(name, limit, do, *more):
        return run.step(name, limit, lambda log, seconds: do(run, log, seconds, *more))

    step("machine", 20, machine)
    step("build", 200, build)
    step("hardware", 20, hardware)
    step("tests", 120, tests)
    step("ceilings", 60, ceilings)
    step("bench", 160, bench)
    step("groups", 35, groups)
    step("tune", 60, tune)
    step("model", 60, model)
    step("convert_absmax", 60, convert, "nf4", "absmax", "none")
    step("convert_nf4", 90, convert, "nf4", "search", "none")
    step("convert_zstd", 90, convert, "nf4", "search", "zstd:1")
    step("convert_int8", 60, convert, "int8", "search", "none")
    step("load", 40, load)
    step("eval", 60, evaluate)
    step("calibrate", 70, calibrate)
    step("validate", 60, validate)
    step("plan", 30, plan)
    sanitizers(run)
    return finish(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
