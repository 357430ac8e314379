#!/usr/bin/env python3
"""Put what calls of gpu_run.sh left into bench/results/, in place of what is there.

    bench/keep_gpu_results.py NAME RESULTS... [--note STEP TEXT]

NAME is the GPU's: h200. Each measurement in a folder RESULTS becomes bench/results/gpu-NAME-KIND.json
(bench, packed, ceilings, groups, bitsandbytes). gpu-NAME-run.json gets the GPU, the driver and, for each step,
the commit, what passed and failed and its figures, without the paths in them. A step that no RESULTS
has stays as it is there. --note says of a step what its figures do not. Then bench/make_performance.py
writes the page. Standard library only.
"""
import argparse
import json
import os
import sys

from result_page import RESULTS, json_text

KINDS = ("bench", "packed", "ceilings", "groups", "bitsandbytes")
NO_RESULT = ("machine", "build", "hardware")
SKIPPED = 77


def read(path):
    with open(path) as f:
        return json.load(f)


def without_paths(value):
    """Figures without the members that name a place on the machine that was measured."""
    if not isinstance(value, dict):
        return value
    return {k: without_paths(v) for k, v in value.items() if not (isinstance(v, str) and v.startswith("/"))}


def steps_of(summary):
    """{step: what became of it}; the second call has what the first left to its sanitizers."""
    found = {}
    for row in summary["steps"]:
        if row["step"] in NO_RESULT or row["rc"] == SKIPPED:
            continue
        parts = row.get("parts") or [{"name": row["step"], "rc": row["rc"]}]
        more = summary["call"] == "second" and row["step"] == "sanitizers"
        kept = found["more sanitizers" if more else row["step"]] = {
            "commit": summary["commit"], "seconds": row["seconds"],
            "passed": sum(p["rc"] == 0 for p in parts),
            "left_out": sum(p["rc"] == SKIPPED for p in parts),
            "failed": [p["name"] for p in parts if p["rc"] not in (0, SKIPPED)]}
        if row.get("figures"):
            kept["figures"] = without_paths(row["figures"])
    return found


def main(argv):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("name")
    p.add_argument("results", nargs="+")
    p.add_argument("--note", nargs=2, action="append", default=[], metavar=("STEP", "TEXT"))
    options = p.parse_args(argv[1:])
    summaries = sorted((read(os.path.join(folder, "summary.json")) | {"folder": folder}
                        for folder in options.results), key=lambda s: s["when"])
    path = os.path.join(RESULTS, "gpu-%s-run.json" % options.name)
    steps = read(path)["steps"] if os.path.exists(path) else {}
    for s in summaries:
        if not s["gpus"]:
            sys.exit("%s: measured on no GPU" % s["folder"])
        steps.update(steps_of(s))
        for kind in KINDS:
            source = os.path.join(s["folder"], kind + ".json")
            if os.path.exists(source):
                with open(os.path.join(RESULTS, "gpu-%s-%s.json" % (options.name, kind)), "w") as f:
                    f.write(json_text(dict(read(source), commit=s["commit"])) + "\n")
    for step, text in options.note:
        if step not in steps:
            sys.exit("--note: there is no step '%s': %s" % (step, ", ".join(steps)))
        steps[step]["note"] = text
    last = summaries[-1]
    run = {"command": "gpu_run", "gpus": [{k: v for k, v in g.items() if k != "pci"} for g in last["gpus"]],
           "nvcc": last["nvcc"], "cpu": last["cpu"], "cpus": last["cpus"], "steps": steps}
    with open(path, "w") as f:
        f.write(json_text(run) + "\n")


if __name__ == "__main__":
    main(sys.argv)
