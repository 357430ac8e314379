#!/usr/bin/env python3
"""Write docs/performance.md from the results in bench/results/.

    bench/make_performance.py            write it
    bench/make_performance.py --check    exit 1 if it is not what the results give

A figure without a result file does not exist. Each table names its command, machine and commit.
"""
import glob
import json
import os
import sys

import gpu_page
import kernel_targets
from result_page import RESULTS, table, write_or_check


def load(name):
    path = os.path.join(RESULTS, name + ".json")
    if not os.path.exists(path):
        return None
    with open(path) as f:
        return json.load(f)


def origin(r, command):
    """command: None, where what measured it is no longer kept."""
    parts = ["`%s`" % command if command else "Measured by a program that is no longer kept", r.get("cpu", "?")]
    if r.get("commit"):
        parts.append("commit %s" % r["commit"])
    if r.get("date"):
        parts.append(r["date"])
    return "; ".join(parts)


def quantizers(r):
    rows = []
    for row in r["rows"]:
        rows.append((row["name"], row.get("isa", ""), row.get("dtype", ""),
                     "%.2f" % row["gbps"]["median"],
                     "%.2f to %.2f" % (row["gbps"]["p10"], row["gbps"]["p90"]),
                     "%.0f%%" % (100 * row["roof_ratio"])))
    return table(("operation", "path", "source", "GB/s", "p10 to p90", "of the roof"), rows)


def peers(r):
    rows = [(row["name"], "%.4f" % row["gbps"], "%.1fx" % row["ratio"]) for row in r["rows"]]
    return table(("quantizer", "GB/s", "times bitsandbytes"), rows)


def reading(r):
    rows = []
    for row in r["rows"]:
        rows.append((row["name"], "%.2f" % row["gb_per_s"], "%.2f" % row["of_fio"],
                     "%.2f" % row["of_bound"] if "of_bound" in row else "",
                     "%.2f" % row["cpu_s_per_gb"], "%.0f" % (row["left_in_cache"] / 1e6),
                     "%.0f" % row["load"]))
    return table(("command", "GB/s", "x fio", "x slower of fio, cached", "CPU s a GB",
                  "MB left in the cache", "load of the machine"), rows)


def scale(r):
    rows = []
    for run in r["runs"]:
        flat = run["last_quarter_over_first"]
        rows.append((run["model"], " ".join(run["options"]), "%.0f" % (run["source_bytes"] / 1e9),
                     "{:,}".format(run["tensors"]), "%d" % len(run["shards"]),
                     "%.0f" % (run["peak_bytes"] / 2**20),
                     "yes" if run["planned_bytes"] == run["written_bytes"] else "no",
                     "%.0f" % run["seconds"], "%.2f" % run["source_gb_per_cpu_s"],
                     *("%.2f" % flat[k] if flat[k] else ""
                       for k in ("source_gb_per_cpu_s", "source_gb_per_s"))))
    return table(("model", "options", "GB", "tensors", "shards", "peak MiB", "planned = written",
                  "seconds", "GB a CPU s", "flat, CPU", "flat, wall"), rows)


def convert(r):
    rows = []
    for row in r["rows"]:
        rows.append((row["name"], "%.2f" % row["seconds"]["median"],
                     "%.2f to %.2f" % (row["seconds"]["min"], row["seconds"]["max"]),
                     "%.2f" % row["cpu_seconds"], "%.2f" % row["gb_per_s"],
                     "%.2f" % row["ratio to cp -r"], "%.2f" % row["ratio to cp -r, synced"],
                     "%.2f" % row["ratio to zstd -d -T0, cp"], "%.0f" % row["peak_mib"]))
    return table(("command", "seconds", "min to max", "CPU s", "source GB/s", "x cp -r",
                  "x cp -r synced", "x zstd -d, cp", "peak MiB"), rows)


def frames(r):
    rows = [(row["data"], row["coder"], "%.2f" % row["encode_gbps"], "%.2f" % row["decode_gbps"],
             "%.4f" % row["ratio"]) for row in r["rows"]
            if row["coder"] in ("qconv", "level 1", "level 3")]
    return table(("data", "coder", "encode GB/s", "decode GB/s", "content / stored"), rows)


def find(r, **want):
    return next(row for row in r["rows"] if all(row.get(k) == v for k, v in want.items()))


def targets(quant, bnb, conv):
    """What was set out to be reached, and what was."""
    def of(name, isa):
        return find(quant, name=name, isa=isa)["roof_ratio"]

    def ratio(name, base):
        return find(conv, name=name)["ratio to " + base]

    def row(what, target, value, text, reached):
        return (what, target, text % value, "yes" if reached else "no")

    alone2, errors2 = of("nf4 alone", "avx2"), of("nf4 with error terms", "avx2")
    times = find(bnb, name="qconv avx2, double quantization")["ratio"]
    none, zstd = ratio("nf4 --compress none", "cp -r"), ratio("nf4 (zstd)", "cp -r")
    verify = ratio("verify", "zstd -d -T0, cp")
    unpack = ratio("unpack", "zstd -d -T0, cp")
    peak = max(r["peak_mib"] for r in conv["rows"]
               if r["name"].startswith(("nf4", "int8", "verify", "unpack")))
    rows = [
        row("NF4 alone, AVX2, of the read rate", "25%", 100 * alone2, "%.0f%%", alone2 >= .25),
        row("the same with the error terms a conversion needs", "25%", 100 * errors2, "%.0f%%", errors2 >= .25),
        row("times bitsandbytes on the CPU", "20", times, "%.0f", times >= 20),
        row("conversion, `--compress none`, seconds over `cp -r`", "1.0", none, "%.2f",
            none <= 1),
        row("conversion with zstd, seconds over `cp -r`", "1.5", zstd, "%.2f", zstd <= 1.5),
        row("`verify`, seconds over `zstd -d -T0` plus `cp`", "2.0", verify, "%.2f", verify <= 2),
        row("`unpack`, seconds over the same", "2.0", unpack, "%.2f", unpack <= 2),
        row("peak memory, MiB", "512", peak, "%.0f", peak < 512),
    ]
    return table(("", "target", "measured", "reached"), rows)


def loading(r):
    gb = 1e9
    rows = [(name, "%.2f" % (x["core_bytes_per_second"] / gb), "%.2f" % (x["wall_bytes_per_second"] / gb),
             "%.2f" % (x["cold_bytes_per_second"] / gb), "%.3f" % (x["bytes"] / x["stored_bytes"]))
            for name, x in r["rows"].items()]
    models = [(name, kind, "%.1f" % (m["bytes"] / gb), "%.2f" % (m["core_bytes_per_second"] / gb),
               "yes" if m["core_bytes_per_second"] >= 2 * gb else "no", "%.1f" % m["plain_seconds"],
               "%.1f" % m["seconds"], "%.2f" % m["of_plain"], "yes" if m["of_plain"] <= 1 else "no")
              for name, kinds in r["models"].items() for kind, m in kinds.items()]
    return ["## Loading", "",
            "GB/s of decompressed bytes from the page cache into memory, digests checked, by what the",
            "output is made of: a core (by processor time, one thread), and by the clock with %d threads," % r["threads"],
            "warm and cold, beside other work. `files` is pread of plain files and nothing else.", "",
            table(("output", "a core", "by the clock", "cold", "content / stored"), rows), "",
            "Whole models, 16-bit tensors included, by these rates: 8 cores behind a disk of 3 GB/s,",
            "against reading the uncompressed files from it (seconds). Targets: 2 GB/s a core for NF4, and no",
            "slower than plain files.", "",
            table(("model", "scheme", "GB", "GB/s a core", "2 GB/s", "plain files", "output",
                   "of plain", "no slower"), models), "",
            "Where a core is slower than 2 GB/s, it is Huffman decoding of what stays in 16 bit and of int8;",
            "`--compress none` has neither. Why NF4 codes are stored: decisions/0013.",
            *([r["notes"]] if r.get("notes") else []), "", origin(r, r["command"]), ""]


def cpu_peers(r):
    ms = sorted({int(m) for c in r["contenders"].values() for m in c["x_rows"]})
    rows = []
    for name, c in r["contenders"].items():
        cells = []
        for m in ms:
            x = c["x_rows"][str(m)]
            share = ", %.0f%%" % (100 * x["of_read_rate"]) if x["of_read_rate"] >= 0.005 else ""
            cells.append("%s ms%s" % (digits(1e3 * x["seconds"]), share))
        rows.append((name, "%.1f" % (c["bytes"] / 1e6), *cells))
    ours = [(kind, name) for kind in ("nf4", "int8") for name in ("qconv %s" % kind,) if name in r["contenders"]]
    ratios = []
    for kind, name in ours:
        for other in r["contenders"]:
            if other.startswith("qconv"):
                continue
            ratios.append((name, other, *("%.2f" % r["contenders"][name]["x_rows"][str(m)]["over " + other]
                                          for m in ms)))
    versions = ", ".join("%s %s" % v for v in r["versions"].items())
    return ["## Products on the CPU beside others", "",
            "%s, %d threads; %s. %d weights of %d x %d one after the other, so that codes come from"
            % (r["machine"]["cpu"], r["machine"]["threads"], versions, r["weights"], r["rows"], r["cols"]),
            "memory; x in bfloat16, for llama.cpp in float32. Milliseconds a weight, and the share of the rate at which",
            "as many threads read (%.1f GB/s), by rows of x; medians of %d rounds." % (r["read_gbps"], r["rounds"]), "",
            table(("", "MB", *("%d rows" % m if m > 1 else "1 row" for m in ms)), rows), "",
            "How many times as long the others take as qconv does:", "",
            table(("", "beside", *("%d rows" % m if m > 1 else "1 row" for m in ms)), ratios), "",
            *([r["notes"], ""] if r.get("notes") else []),
            origin({"cpu": r["machine"]["cpu"], **r}, r["command"]), ""]


# ---- kernels on a GPU: what bench_matmul measured, and bitsandbytes beside it ----

def digits(v):
    """1.23, 45.6, 789."""
    return ("%.2f" if v < 10 else "%.1f" if v < 100 else "%.0f") % v


def spread_range(s):
    return "%s to %s" % (digits(s["p10"]), digits(s["p90"]))


def size_text(n):
    """As qconv has it: 1.07 GB."""
    units = ("B", "KB", "MB", "GB", "TB")
    v, i = float(n), 0
    while v >= 999.5 and i + 1 < len(units):
        v /= 1000
        i += 1
    if i == 0:
        return "%d B" % n
    return "%s %s" % ("%.2f" % v if v < 9.995 else "%.1f" % v if v < 99.95 else "%.0f" % v,
                      units[i])


def kernel_roofs(r):
    roof = r["roof"]
    size = roof["gemm_size"]
    rows = [("device copy of %s, read + written" % size_text(roof["copy_bytes"]), "copy_gbps",
             "GB/s"),
            ("the same by a kernel of qconv", "kernel_copy_gbps", "GB/s"),
            ("reading %s by a kernel of qconv" % size_text(roof["copy_bytes"]), "read_gbps", "GB/s"),
            ("cuBLAS, %d x %d x %d" % (size, size, size), "gemm_tflops", "TFLOP/s"),
            ("a kernel that does nothing, in a graph", "launch_us", "us"),
            ("host to device, pinned", "to_device_gbps", "GB/s"),
            ("device to host, pinned", "to_host_gbps", "GB/s")]
    return table(("roof", "median", "", "p10 to p90"),
                 [(name, digits(roof[key]["median"]), unit, spread_range(roof[key]))
                  for name, key, unit in rows if roof.get(key)])


def kernel_cell(row):
    if row is None:
        return "-"
    share = "%.0f%%" % (100 * row["of_roof"])
    return "%.2fx, %s" % (row["ratio"]["median"], share) if row["ratio"] else share


def unique(values):
    return list(dict.fromkeys(values))


def schemes_of(rows):
    """In the order in which they were asked for: that of the points that lack the fewest."""
    points = {}
    for row in rows:
        points.setdefault((row["layer"], row["m"]), []).append(row["scheme"])
    return unique(s for point in sorted(points.values(), key=len, reverse=True) for s in point)


def kernel_tables(r):
    """One table per model and scheme: M down, layers across."""
    out = []
    at = {(row["model"], row["layer"], row["scheme"], row["m"]): row for row in r["rows"]}
    layers = {(row["model"], row["scheme"], row["m"]): row for row in r["layers"]}
    ms = sorted({row["m"] for row in r["rows"]})
    for model in unique(row["model"] for row in r["rows"]):
        mine = [row for row in r["rows"] if row["model"] == model]
        names = unique((row["layer"], row["n"], row["k"]) for row in mine)
        whole = all(row["count"] for row in mine)
        for scheme in schemes_of(mine):
            head = ["M"] + ["%s, %d x %d" % name for name in names]
            rows = []
            for m in ms:
                cells = [str(m)] + [kernel_cell(at.get((model, name[0], scheme, m)))
                                    for name in names]
                if whole:
                    sums = layers.get((model, scheme, m))
                    cells.append("-" if sums is None else
                                 "%.2fx, %s us" % (sums["dense_us"] / sums["us"],
                                                   digits(sums["us"]))
                                 if sums["dense_us"] else "%s us" % digits(sums["us"]))
                rows.append(cells)
            out += ["", "#### %s, %s" % (model, scheme), "",
                    table(head + ["all of a layer"] * whole, rows)]
    return out


def kernel_notes(r):
    """What the cells do not tell."""
    notes = []
    if r["device"].get("no_gemm"):
        notes += ["", "No comparison with cuBLAS: %s." % r["device"]["no_gemm"]]
    if r.get("left_out"):
        notes += ["", "%d left out: no time or no memory." % r["left_out"]]
    if not r.get("complete", True):
        notes += ["", "**The run ended before all was measured**: points are missing, and minima over points"
                  " are of those that are here."]
    short = sum((row.get("rotation") or {}).get("bytes", l2 + 1) <= l2
                for l2 in [4 * r["device"].get("l2_bytes", 0)] for row in r["rows"])
    if short:
        notes += ["", "In %d the weights together are not more than four times the L2 cache: memory was "
                  "too small, or the weights are; the cache may have helped." % short]
    if r.get("failed"):
        notes += ["", "Wrong, or could not run:", ""] + ["- " + failure_text(f) for f in r["failed"]]
    return notes


def failure_text(f):
    if f["layer"] is None:
        return f["what"]
    scheme = " " + f["scheme"] if f["scheme"] else ""
    path = " (%s)" % f["path"] if f["path"] else ""
    return "%s %s M=%d%s%s: %s" % (f["model"], f["layer"], f["m"], scheme, path, f["what"])


def kernel_section(r):
    """The section of one result."""
    d = r["device"]
    out = ["### %s" % d["name"], "",
           "sm_%d, %d multiprocessors; kernels of %s; x and y in %s."
           % (d["sm"], d["multiprocessors"], d["kernels"], r["dtype"]), "", kernel_roofs(r)]
    if r["kernels"]:
        out += ["", table(("kernel", "GB/s", "p10 to p90", "of the copy", "of the roof"),
                          [(k["name"], digits(k["gbps"]["median"]), spread_range(k["gbps"]),
                            "%.0f%%" % (100 * k["of_copy"]), "%.0f%%" % (100 * k["of_roof"]))
                           for k in r["kernels"]])]
    return "\n".join(out + kernel_tables(r) + kernel_notes(r)) + "\n"


def kernel_peers(ours, theirs):
    """Times of theirs over times of ours, where both measured the same."""
    at = {(row["n"], row["k"], row["m"], row["scheme"]): row["us"]["median"]
          for row in ours["rows"]}
    rows = []
    for row in theirs["rows"]:
        mine = at.get((row["n"], row["k"], row["m"], "nf4"))
        if mine:
            rows.append((row["model"], row["layer"], str(row["m"]), row["scheme"],
                         digits(row["us"]["median"]), digits(mine),
                         "%.2fx" % (row["us"]["median"] / mine)))
    text = table(("model", "layer", "M", "", "us", "qconv nf4, us", "times qconv's"), rows)
    least = kernel_targets.least_peer(at, theirs)
    return text + "\n\n" + least if least else text


PLOTS = {}  # name in docs/ to SVG: made beside the page


def kernel_goals(r, name):
    """The targets, and the ratios as plots."""
    rows = kernel_targets.target_rows(r)
    out = []
    if rows:
        out += ["#### Targets", "",
                "Least ratio to 16-bit cuBLAS of all that the row names.", "",
                table(("scheme", "layer", "M", "target", "measured", "reached"), rows), ""]
    for scheme in unique(row["scheme"] for row in r["rows"]):
        lines = kernel_targets.series(r, scheme)
        if lines:
            path = "images/%s-%s.svg" % (name, scheme)
            PLOTS[path] = kernel_targets.plot(lines, "Speed over 16-bit cuBLAS, %s, %s"
                                              % (scheme, r["device"]["name"]))
            out += ["![Speed over cuBLAS, %s](%s)" % (scheme, path), ""]
    return out


def kernels():
    """Everything of bench/results/gpu-*.json, by what measured it."""
    paths = sorted(glob.glob(os.path.join(RESULTS, "gpu-*.json")))
    found, names = [], {}
    for path in paths:
        with open(path) as f:
            found.append(json.load(f))
        if "shim" in gpu_page.name_of(found[-1]).lower():
            raise SystemExit("%s: measured on the CPU shim, which says nothing about speed" % path)
        names[id(found[-1])] = os.path.basename(path)[:-len(".json")]
    out = ["## Kernels on a GPU", ""]
    if not found:
        return out + ["No GPU has been measured yet. `bench/gpu_run.sh` measures one, and",
                      "`bench/keep_gpu_results.py` puts its results into `bench/results/gpu-NAME-*.json`.", ""]
    def of(command):
        return [r for r in found if r["command"] == command]

    for r in of("gpu_run"):
        out += gpu_page.run_section(r)
    ceilings = {gpu_page.name_of(r): r for r in of("ceilings")}
    measured = [r for r in found if r["command"] not in ("gpu_run", "ceilings", "paths", "operators")]
    out += kernel_measurements(measured, names, ceilings)
    bench = {gpu_page.name_of(r): r for r in of("bench") if not is_of_groups(r)}
    for r in of("paths"):
        out += gpu_page.paths_section(r, bench.get(gpu_page.name_of(r)))
    for r in of("gpu_run"):
        out += gpu_page.program_section(r)
    for r in of("operators"):
        out += gpu_page.operators_section(r)
    for r in ceilings.values():
        out += gpu_page.ceilings_section(r)
    return out


def is_of_groups(r):
    """Whether weights that share x were measured, in one launch."""
    return bool(r["rows"]) and all("+" in row["layer"] for row in r["rows"])


def kernel_measurements(found, names, ceilings):
    out = ["Cells: speed over 16-bit cuBLAS in the same rounds, and share of the roof: the later of",
           "moving weights, x and y at the best rate of memory that was measured and computing at the rate of",
           "a large product of cuBLAS. Method: [bench.md](bench.md). The quantizers' target is 80% of the copy.", ""]
    groups = [r for r in found if r["command"] == "bench" and is_of_groups(r)]
    ours = [r for r in found if r["command"] == "bench" and r not in groups]
    for r in ours:
        judged, old = gpu_page.with_roof(r, ceilings.get(r["device"]["name"]))
        out += [kernel_section(judged), "`bench_matmul`; %s" % r["program"] +
                (", commit %s" % r["commit"][:7] if r.get("commit") else ""), ""]
        if old:
            out += ["That program took its own copy for the roof of memory, which is too low. Shares here are of the %.0f GB/s"
                    % judged["roof"]["memory_gbps"],
                    "that reading, and of the best copy that copying, gave in `bench_ceilings` on such a GPU (below).", ""]
        out += kernel_goals(judged, names[id(r)])
        for peer in found:
            if (peer["command"] != "bench" and peer["device"]["name"] == r["device"]["name"]
                    and peer["dtype"] == r["dtype"]):
                out += ["#### Beside %s" % peer["program"], "",
                        "%s; another run on such a GPU, its own cuBLAS: read its ratios too."
                        % peer["device"]["kernels"], "", kernel_peers(r, peer), ""]
        for group in groups:
            if group["device"]["name"] == r["device"]["name"]:
                out += ["#### Weights that share x, in one launch", *kernel_tables(group)[2:],
                        "", "`bench_matmul`, commit %s; against as many products of cuBLAS."
                        % group.get("commit", "unknown")[:7], ""]
    for r in found:
        if r["command"] != "bench":
            out += [kernel_section(r), "`bench/%s.py`; %s" % (r["command"], r["program"]), ""]
    return out


def page():
    out = ["# Performance", "",
           "Generated by `bench/make_performance.py` from `bench/results/*.json`; do not edit. The",
           "machines are shared and noisy: read ratios, which are taken within one run, not seconds.",
           ""]
    if load("quant") and load("bitsandbytes") and load("convert"):
        out += ["## Targets", "", targets(load("quant"), load("bitsandbytes"), load("convert")), "",
                "zstd: measured when NF4 codes were still compressed, at about 0.8 GB/s a core; now they",
                "are stored (decisions/0013). Error terms: 172 vector operations for 64 weights, beside 58",
                "without; the notes in quant/quant_avx2_blocks.c count them.", ""]
    r = load("convert")
    if r:
        out += ["## Whole conversions", "",
                "A checkpoint of %d Llama-3.1-8B layers (%.2f GB bf16, normal weights), in the page cache,"
                % (r["layers"], r["source_bytes"] / 1e9),
                "%d threads. `cp -r` is the roof for something that reads and writes files; it does not"
                % r["threads"],
                "sync, qconv always does, so `cp -r` followed by a sync of the file system is beside it.",
                "Ratios are medians over %d rounds; below 1 is faster than the other. Scales are those of"
                % r["rounds"],
                "`--scale absmax`; what the search, the default, takes is in [quantizers.md](quantizers.md).",
                "", convert(r), "", origin(r, r["command"]), ""]
        if r.get("notes"):
            out += [r["notes"], ""]
    r = load("load")
    if r:
        out += loading(r)
    r = load("cpu_peers")
    if r:
        out += cpu_peers(r)
    out += kernels()
    r = load("quant")
    if r:
        out += ["## Quantizers, one thread", "",
                "GB/s of source bytes. The roof is the rate at which one thread reads the same memory.",
                "", quantizers(r), "",
                origin(r, r.get("command", "build/bench_quant --json bench/results/quant.json")), ""]
    r = load("quant_integers")
    if r:
        out += ["## Integers of compressed-tensors beside NF4, one thread", "",
                "All in one run, on another machine than the table above.", "", quantizers(r), "",
                origin(r, r["command"]), ""]
    r = load("bitsandbytes")
    if r:
        out += ["## Beside bitsandbytes on the CPU, one thread", "",
                "NF4, block 64, the same %s tensor; bitsandbytes %s, torch %s."
                % (r["tensor"], r["bitsandbytes"], r["torch"]), "", peers(r), "",
                origin(r, r["command"]), ""]
    r = load("frames")
    if r:
        out += ["## Frame coding, one thread", "",
                "8 MiB frames of what qconv writes for normal weights. `qconv` is what `--compress zstd` does;",
                "the levels are libzstd's own.", "", frames(r), "",
                origin(r, None), ""]
    r = load("io")
    if r:
        out += ["## Reading from a cold cache", "",
                "%.1f GB of weights in files of which nothing is cached, %d threads. `fio` reads sequentially"
                % (r["bytes"] / 1e9, r["threads"]),
                "with O_DIRECT and as many jobs: what the disk gives; a ratio to it is to the fastest of the",
                "three engines in the same round. `bench_read` reads and does nothing else, `stream` as convert",
                "does. A conversion writes to the same disk, or to memory, which leaves the disk the reading",
                "alone; \"cached\" has the source in the page cache, too: what the processors give at that load.",
                "Target: %.0f%% of the slower of the two."
                % (100 * r["target"]), "", reading(r), "", origin(r, r["command"]), ""]
    r = load("scale")
    if r:
        out += ["## Models of any size", "",
                "Whole conversions of models with made-up weights, which were made while they were read,",
                "each finished shard read back. Flat: the rate of the last quarter of the",
                "shards over that of the first, a processor second and a second. Seconds hold the making of the",
                "weights and whatever else the machine did.", "", scale(r), "",
                origin(r["runs"][-1], r["command"] + " --json bench/results/scale.json"), ""]
    r = load("plan")
    if r:
        out += ["## Planning the largest released checkpoint", "",
                "DeepSeek-V3 as released: %s tensors in %d shards, %.0f GB; only headers are read (%.0f MB)."
                % ("{:,}".format(r["tensors"]), r["shards"], r["bytes"] / 1e9,
                   r["header_bytes"] / 1e6),
                "The floor is reading them. Target: one second, 200 MiB.", "",
                table(("command", "seconds", "reading alone", "peak MiB"),
                      [("`%s`" % r["planned"], "%.2f" % r["seconds_median"],
                        "%.3f" % r["floor_seconds_median"], "%.0f" % (r["peak_bytes"] / 2**20))]),
                "", origin(r, r["command"]), ""]
    return "\n".join(out)


def main():
    status = write_or_check("performance.md", page(), "bench/results", "bench/make_performance.py")
    for name, text in PLOTS.items():
        os.makedirs(os.path.join(RESULTS, "..", "..", "docs", "images"), exist_ok=True)
        status |= write_or_check(name, text, "bench/results", "bench/make_performance.py")
    return status


if __name__ == "__main__":
    sys.exit(main())
