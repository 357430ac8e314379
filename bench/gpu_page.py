"""The part of docs/performance.md about what gpu_run.sh left of a GPU, for make_performance.py: which
steps ran, what the program and the operators of torch did there, kernels that were forced, what the GPU
gives at best beside what docs/kernels.md assumes, and the roof of a measurement that is older than the
roof."""
import os
import re
import statistics

import gpu_steps
from keep_gpu_results import NO_RESULT
from result_page import HERE, table

# Per clock and multiprocessor, as docs/kernels.md has them.
ASSUMED = {"FFMA": 64, "IMAD": 64, "LOP3": 64, "SHF": 64, "PRMT": 64, "cvt.rn.f16.f32": 16, "cvt.rn.f16x2.f32": 64,
           "SHFL": 32, "LDS.32": 128, "LDS.64": 128, "LDS.128": 128, "mma.m16n8k16": 1024, "mma.m8n8k4": 512}
KIB = 1024


def name_of(result):
    """The GPU's, of any result."""
    return result["gpus"][0]["name"] if "gpus" in result else result["device"]["name"]


def best(rows, **want):
    """The greatest median GB/s of those rows, or None."""
    found = [r["gbps"]["median"] for r in rows if all(r[k] == v for k, v in want.items())]
    return max(found, default=None)


def with_roof(r, ceilings):
    """A result of bench_matmul from before it measured the roof of memory, judged by that of
    bench_ceilings on such a GPU; any other as it is. The second value: whether that was done."""
    if "memory_gbps" in r["roof"] or not ceilings:
        return r, False
    copy = max(r["roof"]["copy_gbps"]["median"], best(ceilings["memory"], access="copy"))
    memory = max(copy, best(ceilings["memory"], access="read"))
    gemm = r["roof"]["gemm_tflops"]
    kernels = [dict(k, of_copy=k["gbps"]["median"] / copy, of_roof=k["gbps"]["median"] / memory)
               for k in r["kernels"]]
    rows = []
    for row in r["rows"]:
        floor = row["bytes"] / memory / 1e3
        if gemm:
            floor = max(floor, 2 * row["m"] * row["n"] * row["k"] / gemm["median"] / 1e6)
        rows.append(dict(row, floor_us=floor, of_roof=floor / row["us"]["median"]))
    return dict(r, roof=dict(r["roof"], memory_gbps=memory), kernels=kernels, rows=rows), True


# ---- what ran --------------------------------------------------------------------------------------

def run_section(run):
    gpu, out = run["gpus"][0], []
    rows = [(step, s["commit"][:7], "%d" % s["passed"], ", ".join("`%s`" % f for f in s["failed"]) or "-",
             "%.0f" % s["seconds"]) for step, s in run["steps"].items()]
    out += ["### What ran on %s" % gpu["name"], "",
            "%d GPU, driver %s, compute capability %s; %s, %d threads; %s." % (
                len(run["gpus"]), gpu["driver"], gpu["compute_capability"], run["cpu"], run["cpus"], run["nvcc"]), "",
            "Steps of `bench/gpu_run.sh` ([bench.md](bench.md#one-or-two-calls-on-a-gpu)):", "",
            table(("step", "commit", "passed", "failed", "seconds"), rows), ""]
    for step, s in run["steps"].items():
        if s.get("note"):
            out += ["%s: %s" % (step, s["note"]), ""]
    every = [name for word in gpu_steps.CALLS for name, _, _ in gpu_steps.CALLS[word]]
    told = NO_RESULT + ("model",)  # what has no result of its own, or only once it was measured
    missing = [n for n in list(dict.fromkeys(every)) + ["more sanitizers"] if n not in run["steps"] and n not in told]
    if missing:
        out += ["Not run there yet: %s." % ", ".join(missing), ""]
    return out


# ---- what the program did --------------------------------------------------------------------------

def conversions(figures):
    """Seconds of GPU, CPU and GPU again; the bytes of both compared."""
    rows = []
    for name, f in figures.items():
        times = {d: ["%.2f" % r["seconds"] for r in f["runs"] if r["device"] == d] for d in ("cuda", "cpu")}
        rows.append((name, "%.2f" % (f["out_bytes"] / 1e9), ", ".join(times["cuda"]), ", ".join(times["cpu"]),
                     "no: " + ", ".join(f["different"]) if f["different"] else "yes, %d files" % f["files"]))
    return ["#### Conversions", "",
            "A model of %.2f GB in bf16 with made-up weights, in the page cache: GPU, CPU, GPU in turn. Seconds of the"
            % (next(iter(figures.values()))["model_bytes"] / 1e9),
            "whole process, in which starting CUDA is counted.", "",
            table(("scheme, scales, compression", "GB", "GPU, seconds", "CPU, seconds", "the same bytes"), rows), ""]


def loads(figures):
    rows = []
    for name, f in figures.items():
        seconds = {k: statistics.median(f[k]) for k in ("gpu", "host", "copy")}
        rows.append([name.split("-")[1], "%.2f" % (f["bytes"] / 1e9)]
                    + ["%.1f" % (f["bytes"] / 1e9 / s) for s in seconds.values()]
                    + ["%.1fx" % (seconds["gpu"] / seconds["copy"])])
    return ["#### Loading to the GPU", "",
            "GB/s of `bench_gpu_load`, medians of its rounds: an output that is not compressed from the page cache",
            "to the GPU, digests checked; to host memory, likewise; and copies of as many bytes from pinned memory.", "",
            table(("output", "GB", "to the GPU", "to host memory", "copies alone", "time over the copies'"), rows), ""]


PROGRAM = {"convert": conversions, "load": loads}


def program_section(run):
    out = []
    for step, section in PROGRAM.items():
        if run["steps"].get(step, {}).get("figures"):
            out += section(run["steps"][step]["figures"])
    return ["### What the program did on %s" % name_of(run), ""] + out if out else []


# ---- kernels that were forced ----------------------------------------------------------------------

PATHS = "mma-16816", "wgmma", "dequant-gemm"


def microseconds(values):
    """The figures of a cell: of one call, or of several."""
    return "%g" % values[0] if len(values) == 1 else "%g to %g" % (min(values), max(values))


def points_of(r, bench):
    """{(scheme, n, k, m): {path: microseconds}}; figures of `bench` and of earlier runs fill what was not forced."""
    points = {}
    for row in r["rows"]:
        points.setdefault((row["scheme"], row["n"], row["k"], row["m"]), {})[row["path"]] = row["us"]
    filling = [dict(row, us=[float("%.1f" % row["us"]["median"])]) for row in bench["rows"]] if bench else []
    for row in filling + r["earlier"]:
        key = row["scheme"], row["n"], row["k"], row["m"]
        if row["path"] in PATHS and key[3] <= max(k[3] for k in points):
            points.setdefault(key, {}).setdefault(row["path"], row["us"])
    return points


def paths_section(r, bench):
    points = points_of(r, bench)
    dense = {(row["n"], row["k"], row["m"]): row["dense_us"]["median"] for row in bench["rows"]} if bench else {}
    sizes = list(dict.fromkeys(key[:3] for key in points))
    rows = []
    for key in sorted(points, key=lambda k: (sizes.index(k[:3]), k[3])):
        have = points[key]
        fastest = min(statistics.mean(v) for v in have.values())
        cells = [("**%s**" if len(have) > 1 and statistics.mean(have[p]) == fastest else "%s") % microseconds(have[p])
                 if p in have else "-" for p in PATHS]
        cublas = dense.get(key[1:])
        rows.append([key[0], "%d x %d" % key[1:3], "%d" % key[3]] + cells
                    + ["%.2fx" % (cublas / fastest) if cublas else "-"])
    return ["### Forced kernels on %s" % name_of(r), "",
            "Microseconds, medians; the fastest of several is bold. The last column is its speed over cuBLAS of",
            "the run above. Which kernel is chosen since: [matmul.md](matmul.md#4-which-path).", "",
            table(["scheme", "weight", "M"] + ["`%s`" % p for p in PATHS] + ["over cuBLAS"], rows), "",
            "%s, commit %s. A point that was not forced is from the run above,"
            % (" and ".join("`%s`" % c for c in r["ran"]), r["commit"][:7]),
            "or from `%s` of commit %s, when that kernel was the same." % (
                r["earlier_ran"], r["earlier_commit"][:7]), ""]


# ---- operators of torch ----------------------------------------------------------------------------

def operators_section(r):
    c = r["checks"]
    skipped = [name for name, found in c.items() if "skipped" in found]
    rows = [("M = %s" % m[2:],) + tuple("%.1f" % t[k] for k in ("qconv, graph", "dense, graph", "qconv, call",
                                                                "dense, call"))
            + ("%.2fx" % (t["dense, graph"] / t["qconv, graph"]),) for m, t in c["device_time"].items()]
    host = c["host_time"]
    return ["### Operators of torch on %s" % name_of(r), "",
            "`%s`, torch %s, kernels of %s, %s: %d passed, %d failed%s." % (
                r["ran"], r["torch"], r["build"], r["date"], r["passed"] - len(skipped), r["failed"],
                ", not run: " + ", ".join("`%s` (%s)" % (n, c[n]["skipped"]) for n in skipped) if skipped else ""),
            "%d products of %d weights of all forms; with a model by `qconv.load`, transformers %s, on the GPU the"
            % (c["products"]["products"], c["restored"]["weights"], c["model"]["transformers"]),
            "same %d tokens as on the CPU; captured graphs, streams, gradients, `torch.compile` with and without graphs."
            % c["model"]["same tokens"], "",
            "Microseconds a product of NF4, 28672 x 8192, beside torch's in float16, in turn; a ratio of graphs:", "",
            table(("", "graph", "dense, graph", "calls", "dense, calls", "over dense"), rows), "",
            "Of the host a call takes %.0f us, %.0f of them in torch's dispatcher; a dense one %.0f.%s" % (
                host["qconv"], host["qconv"] - host["qconv, without torch's dispatcher"], host["dense"],
                "\n" + r["note"] if r.get("note") else ""), ""]


# ---- what the GPU gives at best --------------------------------------------------------------------

def memory_table(r):
    points = r["memory"] + r["bulk"]
    names = list(dict.fromkeys(p["access"] for p in points))
    rows = []
    for under_way in sorted({p["bytes_under_way"] for p in points}):
        cells = [best(points, access=n, bytes_under_way=under_way) for n in names]
        cells.append(best(r["l2"], bytes_under_way=under_way))
        rows.append(["%d" % (under_way // KIB)] + ["%.0f" % c if c else "-" for c in cells])
    return table(["KB under way"] + names + ["read, from L2"], rows)


def rate_table(r):
    rows = []
    for name in dict.fromkeys(row["name"] for row in r["rates"]):
        row = max((x for x in r["rates"] if x["name"] == name), key=lambda x: x["per_clock"]["median"])
        assumed = ASSUMED.get(name)
        rows.append((name, row["unit"], "%.0f" % row["per_clock"]["median"], "%d" % assumed if assumed else "-",
                     "%.2f" % (row["mhz"]["median"] / 1000)))
    return table(("instruction", "unit", "a clock", "assumed", "GHz"), rows)


def counted_bounds(sm):
    """{name of a way to decode: weights a clock at most}, from the table of docs/bench.md."""
    with open(os.path.join(HERE, "..", "docs", "bench.md")) as f:
        text = f.read()
    architecture = 90 if sm >= 90 else 80 if sm >= 80 else 70
    return dict(re.findall(r"^\| ([^|]+) \| %d \|.* \| (\d+) \| \w+ \|$" % architecture, text, re.M))


def decode_table(r):
    bounds, rows = counted_bounds(r["device"]["sm"]), []
    for name in dict.fromkeys(row["name"] for row in r["decode"]):
        got = max(row["per_clock"]["median"] for row in r["decode"] if row["name"] == name)
        rows.append((name, "%.1f" % got, bounds.get(name, "-")))
    return table(("way to decode", "weights a clock", "at most, by counts"), rows)


def launch_table(r):
    rows = [(row["name"], "%d x %d" % (row["blocks"], row["threads"]), "%.2f" % row["us"]["median"])
            for row in r["launch"] if row["us"]]
    return table(("a kernel that does nothing", "blocks x threads", "us"), rows)


def ceilings_section(r):
    d = r["device"]
    return ["### What %s gives at best" % d["name"], "",
            "`bench_ceilings`, commit %s ([bench.md](bench.md#ceilings) says what the names mean). Per clock is per clock"
            % r.get("commit", "unknown")[:7],
            "and multiprocessor, of which there are %d. Assumed: what [kernels.md](kernels.md) calculates with."
            % d["multiprocessors"], "",
            "GB/s, the best of all numbers of warps and loads with so many bytes under way per multiprocessor:", "",
            memory_table(r), "", rate_table(r), "", decode_table(r), "", launch_table(r), ""]
