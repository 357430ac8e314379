#!/usr/bin/env python3
"""The two calls of gpu_run.sh: which steps each has, how long a step may take, and what it leaves.
A step that fails does not stop the others. Standard library only.

    gpu_steps.py first|second RESULTS        with QC_RUN_WORK set

RESULTS gets at most 8 files of at most 16 MiB (FILES, below), each written anew, by renaming, whenever
there is more to say: whatever is killed and when, they are whole. summary.json has the GPU, the
driver, the commit and a row for each step that has ended: its exit code, its seconds, the parts that
it ran, and its figures. "running" names the step that had not ended. logs.tar.gz has all that was
printed, profiles among it.

Exit codes of steps: 0 passed, 4 a result is wrong, 77 left out (why is said), 99 found by
compute-sanitizer, 124 ran into its limit, others the program's.

Set by environment variables:
    QC_RUN_WORK      folder for the build, the models and the logs; gpu_run.sh takes build-gpu/ of
                     the tree. What was built there is used again
    QC_RUN_BUILD     a finished build to use instead of building
    QC_RUN_SECONDS   for the whole call: 540, or 240 where QC_RUN_BUILD is set
    QC_RUN_LAYERS    of the synthetic model; else as many as there is time and room for
    QC_RUN_STEPS     only these, by name: build,tests,bench
    QC_RUN_SHIM      1: a rehearsal without a GPU, with the programs of QC_RUN_BUILD that run kernels
                     on the CPU, and shapes small enough for them
    QC_RUN_TESTS     a regular expression for the tests to run; a rehearsal takes a few quick ones
    QC_RUN_DEBS      the folder given by --debs, in which a wheel of bitsandbytes may be
    QCONV_COMMIT     what is measured, where there is no git
"""
import concurrent.futures
import glob
import json
import os
import re
import shutil
import signal
import sys
import time
import xml.etree.ElementTree as ET

from gpu_runner import (FOUND, INTERRUPTED, LOG_BYTES, OUT_OF_TIME, ROOT, SKIPPED, Run, Skip, ask,
                        copy_sources, cuda_tool, end_of, generator, json_bytes, kill_below, last_line,
                        replace, same_file)

CALL_SECONDS = 540
BUILT_SECONDS = 240  # with a finished build
RESERVE = 20         # of a call: unpacking before the first step, writing after the last
BUILD_PLANNED = 120  # seconds on 16 cores; where it takes longer, the last steps have less time
TEST_SECONDS = 30    # for one test
PROFILE_SECONDS = 22 # for one point under a profiler: they took 10
LARGE = ("28672x8192", "8192x28672", "8192x8192", "1024x8192")  # of a 70B model
LAYER_BYTES = 436 << 20
# Each conversion is made on the GPU twice and on the CPU once. Of each scheme the first is kept: load
# and validate use it.
CONVERSIONS = (("nf4", "search", "none"), ("int8", "search", "none"), ("nf4", "search", "zstd:1"),
               ("nf4", "absmax", "none"))
SHIM_CONVERSIONS = (("nf4", "absmax", "none"), ("int8", "absmax", "none"))
# What compute-sanitizer says where it cannot look at anything: then no kernel has failed.
CANNOT_CHECK = (b"Device not supported", b"Unable to find injection library")
SHIM_TESTS = "^shim_(arguments|device|plan)$"  # each takes seconds on a CPU
SLACK = 1.5          # how much longer than measured a conversion may take
# What a profile has. All sections took 38 passes a kernel, and one point in four more than 10 s.
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "InstructionStats",
            "LaunchStats", "Occupancy")
DATA = os.path.join(ROOT, "tests", "data", "kjv-llama")


# ---- building and looking --------------------------------------------------------------------------

def machine(step):
    for command in (["nvidia-smi"], [cuda_tool("nvcc") or "nvcc", "--version"], ["cmake", "--version"],
                    ["lscpu"], ["free", "-h"], ["df", "-h", step.run.work]):
        if shutil.which(command[0]):
            step.call(command, 5)
    for name, value in sorted(step.run.own.items()):
        step.say("for our own programs: %s=%s" % (name, value))
    return 0


def build(step):
    """The targets of this call, for this machine's GPUs alone. What an earlier call has built is used
    again where it was configured in the same way; what has changed since is built anew."""
    run = step.run
    if os.environ.get("QC_RUN_BUILD"):
        raise Skip("QC_RUN_BUILD has one")
    source, stamp = run.at("source"), os.path.join(run.build, "gpu_run.json")
    code = sorted({g["compute_capability"].replace(".", "") + "-real" for g in run.gpu})
    make = generator()
    options = make + ["-S", source, "-B", run.build, "-DCMAKE_BUILD_TYPE=Release", "-DQCONV_CUDA=ON",
                      "-DCMAKE_CUDA_ARCHITECTURES=" + ";".join(code)]
    made_by = json_bytes([options, run.facts["nvcc"]])
    copy_sources(ROOT, source)
    if not os.path.exists(stamp) or open(stamp, "rb").read() != made_by:
        shutil.rmtree(run.build, ignore_errors=True)
        rc = step.call(["cmake"] + options)
        if rc != 0:
            return rc
        replace(stamp, made_by)
    begin = time.monotonic()
    rc = step.call(["cmake", "--build", run.build, "-j", str(os.cpu_count() or 2), "--target"]
                   + TARGETS[run.word] + ["--"] + (["-k", "0"] if "Ninja" in make else ["-k"]))
    step.part("targets", rc, time.monotonic() - begin)
    return rc


def hardware(step):
    rc = step.program("qconv", "--version") or step.program("qconv", "hardware")
    if rc == 0:
        rc, said = said_json(step, "qconv", "hardware", "--json")
        step.find(hardware=said)
    return rc


def said_json(step, name, *arguments, log=None):
    """Exit code of a program of ours, and the JSON that it prints."""
    path = step.run.at("said.json")
    rc = step.program(name, *arguments, stdout=path, log=log)
    if rc != 0:
        return rc, None
    with open(path) as f:
        return rc, json.load(f)


def worst(codes):
    """Of a step's parts: the first that is a failure, a limit only if nothing else is."""
    bad = [c for c in codes if c not in (0, SKIPPED)]
    if codes and all(c == SKIPPED for c in codes):
        raise Skip("each part was left out, its log says why")
    return next((c for c in bad if c != OUT_OF_TIME), bad[0] if bad else 0)


def at_once(step, many, jobs):
    """Do the jobs, `many` at a time; the results in their order."""
    with concurrent.futures.ThreadPoolExecutor(max(1, min(many, len(jobs)))) as pool:
        return list(pool.map(lambda job: job(), jobs))


# ---- the first call --------------------------------------------------------------------------------

def smoke(step):
    """Each kernel in a process of its own: one that ends its GPU context, or hangs, leaves the rest."""
    program = step.run.built("gpu_graph")
    listed = step.run.at("kernels.txt")
    if step.run.shim:
        step.end += 60  # its kernels run on a CPU, which others may use as well
    rc = step.call([program, "--list"], own=True, stdout=listed)
    if rc != 0:
        return rc
    codes = []
    with open(listed) as f:
        names = f.read().split()
    if not names:
        step.say("gpu_graph names no kernels")
        return 1
    for name in names:
        begin = time.monotonic()
        if step.left() < 1:
            codes.append(OUT_OF_TIME)
            step.part(name, OUT_OF_TIME, 0, why="there was no time left")
            continue
        codes.append(step.call([program, "--smoke", name], 10, own=True))
        step.part(name, codes[-1], time.monotonic() - begin)
    return worst(codes)


def run_bench(step, seconds, shapes, rows, schemes, *more, output="bench.json"):
    """bench_matmul rewrites its file after each point, and ends with 4 where a result was wrong."""
    environment = {}
    if step.run.shim:
        shapes, rows, schemes = ("64+40x256" if "+" in shapes[0] else "8x64",), "1", "nf4"
        more, environment = more + ("--rounds", "1"), {"QC_SHIM_DEVICES": "sm_80:2:2MiB"}
        seconds = 60
    seconds = max(5, min(seconds, step.left() - 8))
    return step.program("bench_matmul", "--seconds", str(int(seconds)), "--shapes", ",".join(shapes),
                        "--m", rows, "--scheme", schemes, "--output", step.run.into(output), *more,
                        environment=environment)


def headline(step):
    rc = run_bench(step, 60, LARGE, "1,8,16,32,64,256,1024,4096", "nf4,int8")
    if os.path.exists(step.run.into("bench.json")):
        print(headline_text(step.run.into("bench.json")), flush=True)
    return rc


def headline_text(path):
    """The speed over cuBLAS by shape and rows of x, as far as it was measured."""
    with open(path) as f:
        rows = [r for r in json.load(f)["rows"] if r["us"]]
    lines = {}
    for r in rows:
        ratio = "%.2fx" % r["ratio"]["median"] if r["ratio"] else "%.0f us" % r["us"]["median"]
        lines.setdefault("  %-5s %5d x %-5d" % (r["scheme"], r["n"], r["k"]), []).append(
            "%d: %s" % (r["m"], ratio))
    return "\n".join(["  speed over 16-bit cuBLAS, by rows of x:"] +
                     ["%s  %s" % (name, "  ".join(cells)) for name, cells in lines.items()])


def programs(run):
    """(name, command, environment) of each test."""
    label = "kernels" if run.shim else "gpu"
    wanted = os.environ.get("QC_RUN_TESTS") or (SHIM_TESTS if run.shim else "")
    said = ask(["ctest", "--test-dir", run.build, "-L", "^%s$" % label, "--show-only=json-v1"])
    found = []
    for t in json.loads(said or "{}").get("tests", []):
        facts = {p["name"]: p["value"] for p in t.get("properties", [])}
        if t.get("command") and os.path.exists(t["command"][0]) and \
                re.search(wanted, t["name"]):
            found.append((t["name"], t["command"],
                          dict(v.split("=", 1) for v in facts.get("ENVIRONMENT", []))))
    if not found:
        raise Skip("no tests were built")
    return found


def tests(step):
    """Every test with a limit of its own. CTest would write its XML at the end only, and killed
    before that it would leave none; here it is written after each test."""
    done = []

    def one(name, command, environment):
        begin = time.monotonic()
        rc = OUT_OF_TIME
        if step.left() > 1:
            rc = step.call(command, TEST_SECONDS, own=True, environment=environment, log=name)
        with step.run.lock:
            done.append((name, rc, time.monotonic() - begin,
                         os.path.join(step.run.logs, "tests-%s.log" % name)))
            replace(step.run.into("gpu_tests.xml"), junit(done))
            step.part(name, rc, done[-1][2])
        return rc

    jobs = [lambda t=t: one(*t) for t in programs(step.run)]
    return worst(at_once(step, min(8, os.cpu_count() or 2), jobs))


def junit(done):
    """The XML that CTest writes, of (name, exit code, seconds, log)."""
    suite = ET.Element("testsuite", name="gpu", tests=str(len(done)),
                       failures=str(sum(d[1] not in (0, SKIPPED) for d in done)),
                       skipped=str(sum(d[1] == SKIPPED for d in done)))
    for name, rc, seconds, log in done:
        case = ET.SubElement(suite, "testcase", name=name, classname=name, time="%.3f" % seconds)
        if rc == SKIPPED:
            ET.SubElement(case, "skipped", message="exit code 77")
        elif rc != 0:
            ET.SubElement(case, "failure", message="ran into its limit" if rc == OUT_OF_TIME else
                          "exit code %d" % rc)
        text = end_of(log, LOG_BYTES // 16).decode(errors="replace") if os.path.exists(log) else ""
        ET.SubElement(case, "system-out").text = re.sub(r"[^\t\n\x20-\ud7ff]", "?", text)
    return ET.tostring(suite, encoding="utf-8", xml_declaration=True)


def sanitize(step, pairs):
    """compute-sanitizer's tools over programs: (tool, test) pairs, four at a time, with the shapes of
    QC_TEST_QUICK. They mostly wait for one thread each."""
    checker = cuda_tool("compute-sanitizer")
    if not checker:
        raise Skip("there is no compute-sanitizer")

    def one(tool, name, command, environment):
        begin = time.monotonic()
        prefix = [checker, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20",
                  "--target-processes", "all"]
        if tool == "memcheck":  # tests ask for what CUDA must refuse, too
            prefix += ["--report-api-errors", "no"]
        label = "%s-%s" % (tool, name)
        rc = OUT_OF_TIME
        if step.left() > 3:
            rc = step.call(step.under(prefix, command), log=label,
                           environment=dict(environment, QC_TEST_QUICK="1"))
            path = os.path.join(step.run.logs, "sanitizers-%s.log" % label)
            if any(words in end_of(path, LOG_BYTES) for words in CANNOT_CHECK):
                rc = SKIPPED
        step.part(label, rc, time.monotonic() - begin)
        return rc

    if not pairs:
        raise Skip("the tests that it is for were not built")
    return worst(at_once(step, 4, [lambda p=p: one(*p) for p in pairs]))


def sanitizers(step):
    """First call: races and memory of the two kernels that the headline rests on. Second call: the
    rest. A plan starts nothing on a GPU, which the checker takes for an error; the test of the API has
    cuBLAS in it, the slowest to look at, and comes last."""
    found = sorted((p for p in programs(step.run) if not p[0].endswith("_plan")),
                   key=lambda p: (p[0].endswith("_api"), p[0]))
    main = [p for p in found if re.fullmatch("(gpu|shim)_(stream|tiles)", p[0])]
    if step.run.word == "first":
        return sanitize(step, [(t, *p) for t in ("racecheck", "memcheck") for p in main])
    return sanitize(step, [(t, *p) for p in found
                           for t in ("memcheck", "racecheck", "initcheck", "synccheck")
                           if p not in main or t in ("initcheck", "synccheck")])


def ceilings(step):
    # Its own limit ends it between rounds, a few seconds late at most. On an H200 all took 3.5.
    seconds = max(5, min(45, step.left() - 5))
    more = ["--small", "--rounds", "3"] if step.run.shim else []
    return step.program("bench_ceilings", "--seconds", str(int(seconds)), *more, "--output",
                        step.run.into("ceilings.json"))


def profiles(step):
    """Points under ncu, as many as there is time for: the first kernel of each, in the log."""
    ncu, program = cuda_tool("ncu"), step.run.built("bench_matmul")
    if not ncu:
        raise Skip("there is no ncu")
    codes = []
    for scheme, m in (("nf4", "1"), ("nf4", "16"), ("nf4", "64"), ("int8", "1")):
        name, begin = "%s-%s" % (scheme, m), time.monotonic()
        if codes and step.left() < PROFILE_SECONDS / 2:
            step.part(name, SKIPPED, 0, why="there was no time left")
            continue
        command = step.under(
            [ncu, "--clock-control", "none", "--target-processes", "all"]
            + [word for name in SECTIONS for word in ("--section", name)]
            + ["--kernel-name", "regex:matmul_(gemv|stream|tiles|mma)", "--launch-count", "1", "--kill", "yes"],
            [program, "--shapes", "64x128" if step.run.shim else LARGE[0], "--m", m,
             "--scheme", scheme, "--rounds", "2", "--seconds", "5"])
        rc = step.call(command, PROFILE_SECONDS, log=name)
        said = end_of(os.path.join(step.run.logs, "profiles-%s.log" % name), LOG_BYTES)
        if b"Section: " in said:  # after --kill the exit code is that of a killed program
            rc = 0
        codes.append(rc)
        step.part(name, rc, time.monotonic() - begin)
    return worst(codes)


# ---- the second call -------------------------------------------------------------------------------

def groups(step):
    # q, k and v of a 70B model in one launch, gate and up in one.
    return run_bench(step, 18, ("8192+1024+1024x8192", "28672+28672x8192"), "1,2,4,8", "nf4",
                     output="groups.json")


def bitsandbytes(step):
    """matmul_4bit at points that the first call measures of ours, if it is here or its wheel was
    carried."""
    debs = os.environ.get("QC_RUN_DEBS")
    wheels = glob.glob(os.path.join(os.path.abspath(debs), "bitsandbytes-*.whl")) if debs else []
    environment = {}
    if wheels:
        folder = step.run.at("site")
        shutil.rmtree(folder, ignore_errors=True)
        rc = step.call([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
                        "--no-compile", "--target", folder, wheels[-1]], 30)
        if rc != 0:
            return rc
        before = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = folder + (os.pathsep + before if before else "")
    seconds = max(10, min(60, step.left() - 15))
    rc = step.call([sys.executable, "-B", os.path.join(ROOT, "bench", "bench_kernels_bitsandbytes.py"),
                    "--shapes", ",".join(LARGE), "--m", "1,16,256", "--seconds", str(int(seconds)),
                    "--output", step.run.into("bitsandbytes.json")], environment=environment)
    if rc == SKIPPED:
        raise Skip(last_line(step.log_path))
    return rc


def layers_for(make_seconds, convert_seconds, make_budget, convert_budget, disk, memory):
    """How many layers the synthetic model can have: a layer takes make_seconds to write and
    convert_seconds to convert once, both measured; the model and its outputs take three times its
    bytes, on the disk and in the page cache. At least 1."""
    by_time = min(make_budget / max(make_seconds, 1e-3),
                  convert_budget / max(3 * len(CONVERSIONS) * SLACK * convert_seconds, 1e-3))
    return int(max(1, min(16, by_time, disk // (3 * LAYER_BYTES), memory // (3 * LAYER_BYTES))))


def model(step):
    """A checkpoint with the shapes of an 8B model. One layer is made and converted first, on the CPU,
    and from what that took it follows how many layers there is time for."""
    run = step.run
    folder = run.at("model")
    shutil.rmtree(folder, ignore_errors=True)
    if run.shim:
        shutil.copytree(os.path.join(DATA, "model"), folder)
        return 0
    tool, layers = run.built("bench_checkpoint"), int(os.environ.get("QC_RUN_LAYERS") or 0)
    if not layers:
        begin = time.monotonic()
        rc = step.call([tool, "--layers", "1", folder], own=True)
        made = time.monotonic() - begin
        rc = rc or convert_once(step, "nf4", "search", "none", "cpu", run.at("out-one"))
        converted = time.monotonic() - begin - made
        shutil.rmtree(run.at("out-one"), ignore_errors=True)
        if rc != 0:
            return rc
        layers = layers_for(made, converted, step.left() - 2, run.limit_of("convert"),
                            shutil.disk_usage(run.work).free,
                            os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        step.find(make_one_layer_seconds=made, convert_one_layer_seconds=converted)
    step.find(layers=layers)
    if layers == 1 and os.path.exists(os.path.join(folder, "config.json")):
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    return step.call([tool, "--layers", str(layers), folder], own=True)


def the_model(run):
    folder = run.at("model")
    if not os.path.exists(os.path.join(folder, "config.json")):
        raise Skip("there is no model")
    return folder


def size_of(folder):
    return sum(os.path.getsize(p) for p in glob.glob(os.path.join(folder, "*")))


def different(a, b):
    """Names of files that two folders do not have alike."""
    return [n for n in sorted(set(os.listdir(a)) | set(os.listdir(b)))
            if not same_file(os.path.join(a, n), os.path.join(b, n))]


def convert_once(step, scheme, scale, compress, device, out):
    shutil.rmtree(out, ignore_errors=True)
    if not step.run.shim:
        os.sync()  # what was written before is not in the way of what is measured
    return step.program("qconv", "-v", "--to", scheme, "--scale", scale, "--compress", compress,
                        "--device", device, the_model(step.run), out)


def convert(step):
    """GPU, CPU, GPU; the outputs of the two compared byte for byte. Files stay in the page cache."""
    run, codes, found = step.run, [], {}
    source = size_of(the_model(run))
    for scheme, scale, compress in SHIM_CONVERSIONS if run.shim else CONVERSIONS:
        name = "%s %s %s" % (scheme, scale, compress)
        keep = not any(n.startswith(scheme) for n in found)
        outs = {d: run.at("out-%s-%s" % (scheme if keep else "other", d)) for d in ("cuda", "cpu")}
        begin, rc, rounds = time.monotonic(), 0, []
        for device in ("cuda", "cpu", "cuda"):
            started = time.monotonic()
            rc = rc or convert_once(step, scheme, scale, compress, device, outs[device])
            seconds = time.monotonic() - started
            rounds.append({"device": device, "seconds": round(seconds, 3),
                           "read_bytes_per_second": round(source / seconds)})
        if rc == 0:
            unlike = different(outs["cuda"], outs["cpu"])
            found[name] = {"model_bytes": source, "out_bytes": size_of(outs["cuda"]), "runs": rounds,
                           "files": len(os.listdir(outs["cpu"])), "different": unlike}
            step.find(**found)
            step.say("%s: GPU and CPU %s" % (name, "differ in " + ", ".join(unlike) if unlike else
                                             "make the same bytes in every file"))
            rc = 4 if unlike else 0
        elif keep:
            shutil.rmtree(outs["cuda"], ignore_errors=True)
        for device in ("cpu",) if keep else ("cuda", "cpu"):
            shutil.rmtree(outs[device], ignore_errors=True)
        codes.append(rc)
        step.part(name, rc, time.monotonic() - begin)
    return worst(codes)


def load(step):
    """What was converted, to the GPU; what arrives is compared with what the host reads."""
    outs = [o for o in ("out-nf4-cuda", "out-int8-cuda") if os.path.isdir(step.run.at(o))]
    if not outs:
        raise Skip("nothing was converted")
    for out in outs:
        rc, said = said_json(step, "bench_gpu_load", "--rounds", "2" if step.run.shim else "5",
                             step.run.at(out))
        if rc != 0:
            return rc
        step.find(**{out: said})
    return 0


def validate(step):
    out = step.run.at("out-nf4-cuda")
    if not os.path.isdir(out):
        raise Skip("nothing was converted")
    rc, said = said_json(step, "qconv", "validate", out, "--against", the_model(step.run), "--sample",
                         *(("1", "--m", "1") if step.run.shim else ("14",)), "--json")
    if said is not None:
        replace(step.run.into("validate.json"), json_bytes(said))
    return rc


def plan(step):
    folder = the_model(step.run)
    return step.program("qconv", "plan", folder, "--vram", "auto")


# ---- the calls -------------------------------------------------------------------------------------

BEGIN = (("machine", 4, machine), ("build", 240, build), ("hardware", 4, hardware))
# Name, the most seconds it may take, what it does. The build's seconds are for a slow machine; planned
# are BUILD_PLANNED, with which the limits of a call add up to less than CALL_SECONDS less RESERVE, and
# without any to BUILT_SECONDS less RESERVE. On 16 cores and an H200 smoke took 8 s, bench 49, tests
# 7, ceilings 4 and the sanitizers 38; what the second call has was not measured yet. What a call is
# for comes before the rest, so that nothing takes its time away.
CALLS = {
    "first": BEGIN + (("smoke", 12, smoke), ("bench", 96, headline),
                      ("tests", 14, tests), ("ceilings", 12, ceilings), ("sanitizers", 44, sanitizers),
                      ("profiles", 34, profiles)),
    "second": BEGIN + (("model", 10, model), ("convert", 35, convert), ("load", 10, load),
                       ("validate", 15, validate), ("plan", 5, plan), ("groups", 20, groups),
                       ("bitsandbytes", 35, bitsandbytes), ("sanitizers", 80, sanitizers)),
}
# Steps that have what time is left, and none of the plan.
LEFT_OVER = {"first": (), "second": ("sanitizers",)}
TARGETS = {"first": ["qconv", "gpu_tests", "bench_matmul", "bench_ceilings"],
           "second": ["qconv", "bench_checkpoint", "bench_gpu_load", "bench_matmul", "gpu_tests"]}
FILES = {"first": ("summary.json", "logs.tar.gz", "bench.json", "gpu_tests.xml", "ceilings.json"),
         "second": ("summary.json", "logs.tar.gz", "groups.json", "bitsandbytes.json", "validate.json")}


def main(argv):
    if len(argv) != 3 or argv[1] not in CALLS:
        sys.exit("usage: gpu_steps.py first|second RESULTS")
    if "QC_RUN_WORK" not in os.environ:
        sys.exit("gpu_steps: QC_RUN_WORK names no folder")
    word, results = argv[1:]
    if os.path.isdir(results) and set(os.listdir(results)) & set(FILES[word]):
        print("gpu_run: %s has results of an earlier call; name another folder" % results,
              file=sys.stderr)
        return 2
    run = Run(word, results, BUILT_SECONDS if os.environ.get("QC_RUN_BUILD") else CALL_SECONDS)
    limits = {name: limit for name, limit, _ in CALLS[word]}
    run.limit_of = limits.get

    def interrupted(*_):
        run.stopped = True
        kill_below(os.getpid(), False)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
    only = [s for s in os.environ.get("QC_RUN_STEPS", "").split(",") if s]
    for name, limit, do in CALLS[word]:
        if (not only or name in only) and not run.stopped:
            run.step(name, limit, do)
    for path in glob.glob(run.at("out-*")) + [run.at("model")]:
        shutil.rmtree(path, ignore_errors=True)
    run.complete = not run.stopped
    run.save_summary()
    if not run.gpu and not run.shim:
        print("gpu_run: there is no NVIDIA GPU here (nvidia-smi shows none): all %d steps of the %s "
              "call were left out, nothing was measured" % (len(run.steps), word))
        return SKIPPED
    print("gpu_run: %s call: %d steps passed, %d failed, %d left out, %.0f s; results in %s"
          % (word, *run.counts().values(), time.monotonic() - run.begin, run.results))
    return INTERRUPTED if run.stopped else 1 if run.counts()["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
