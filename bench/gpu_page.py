"""The part of docs/performance.md about what gpu_run.sh left of a GPU, for make_performance.py: which
steps ran, what the GPU gives at best beside what docs/kernels.md assumes, and the roof of a
measurement that is older than the roof."""
import os
import re

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
    """A result of `qconv bench` from before it measured the roof of memory, judged by that of
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
    missing = [n for n in list(dict.fromkeys(every)) + ["more sanitizers"] if n not in run["steps"] and n not in NO_RESULT + ("model",)]
    if missing:
        out += ["Not run there yet: %s." % ", ".join(missing), ""]
    return out


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
