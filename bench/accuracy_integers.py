"""4-bit integers of compressed-tensors beside llm-compressor's GPTQ, AutoRound and NF4, on the same
weights with the same tokens of text. For bench_accuracy.py --part integers.

Every model is taken in bfloat16, so that scales are in 16 bit as in the checkpoints that people
have. kjv-llama's down_proj has 440 columns, which no group divides: it stays in 16 bit everywhere.
"""
import json
import os

import numpy as np

import accuracy_calibrated as ac
import accuracy_models as am
import llama_numpy as lm

WINDOWS, CONTEXT = 128, 256  # of the calibration text
GROUPS = {"kjv-llama": (64,), "tinystories-656k": (128, 64)}
NF4_OF = {128: "64", 64: "32"}  # the block size of double-quantized NF4 with as many bits
KEPT = {"kjv-llama": "*.down_proj.weight"}
LEFT = {"kjv-llama": " (down_proj, whose 440 columns no group divides, stays in 16 bit)"}
IGNORED = {"kjv-llama": ["lm_head", "re:.*down_proj"], "tinystories-656k": ["lm_head"]}
AUTO = (4.5, 5)
MSE_SCALES = {"weights": {"observer": "memoryless_mse"}}  # of llm-compressor
FORMAT = ["--format", "compressed-tensors"]
OTHERS = (("GPTQ", "gptq", {}), ("GPTQ, mse scales", "gptq", MSE_SCALES))
# In groups of 128 only. GPTQ's own damping is 0.01. AutoRound takes a quarter of an hour.
SLOW = (("AutoRound", "autoround", {"settings": {"enable_torch_compile": False}}),
        *(("GPTQ, mse scales, damping %g" % x, "gptq",
           dict(MSE_SCALES, settings={"dampening_frac": x})) for x in (0.001, 0.1)))


def in_bfloat16(model, scratch, run, qconv):
    """The same model with its weights rounded to bfloat16."""
    folder = os.path.join(scratch, "bf16")
    run([qconv, "-q", "--to", "bf16", "--rest", "bf16", "--compress", "none", model.folder, folder])
    return am.Model(model.label, folder, model.windows, model.text)


def text(s):
    """(label, file of windows) that every method calibrates with."""
    label, path = ac.texts(s)[0]
    if label == "own text":
        ids = np.loadtxt(path, dtype=np.int64)
        ids = ids[np.linspace(0, len(ids) - 1, WINDOWS).astype(int)]
    else:
        ids = am.held_out(ac.write_text(os.path.join(s.scratch, "default.txt")), WINDOWS, CONTEXT)
    out = os.path.join(s.scratch, "calibration.ids")
    am.write_ids(out, ids)
    return label, out


def add_folder(s, name, by, folder, bits=None, **more):
    """A row of a checkpoint on disk, whoever wrote it."""
    stored = lm.read_tensors(folder)
    row = {"name": name, "by": by, "bits": bits or bits_of(s, stored),
           "rel_mse": s.relative_error(lm.restore(stored)), "eval": s.evaluate(folder),
           "second": s.on_sentences(folder), **more}
    print("  %-40s %.4f bits  MSE %.6f  KL %.6f +- %.6f" % (
        name, row["bits"], row["rel_mse"], row["eval"]["kl_mean"], row["eval"]["kl_error"]), flush=True)
    return row


def bits_of(s, stored):
    """Codes and scales; NF4's constant tables and the shapes beside packed integers are left out."""
    size = 0
    for n in s.names:
        for key in (n, n + "_packed", n + "_scale", n + ".absmax", n + ".nested_absmax",
                    n[:-len("weight")] + "SCB"):
            if key in stored:
                t = stored[key]
                size += t.nbytes // (2 if t.dtype == np.float32 and key in (n, n + "_scale") else 1)
    return 8 * size / sum(s.model.weights[n].size for n in s.names)


def own(s, run, name, options):
    folder = s.convert(options)[0]
    return add_folder(s, name, "qconv", folder,
                      options=[os.path.basename(o) for o in options])


def grouped(s, run, group, calibrate):
    keep = ["--keep", KEPT[s.model.label]] if s.model.label in KEPT else []
    int4 = ["--to", "int4", *FORMAT, "--block-size", str(group)] + keep
    nf4 = ["--to", "nf4", "--block-size", NF4_OF[group]] + keep
    label = "int4, group %d" % group
    rows = [own(s, run, label + ", absmax", int4 + ["--scale", "absmax"])]
    for label, to in ((label, int4), ("NF4, double, block " + NF4_OF[group], nf4)):
        rows += [own(s, run, label + ", search", to + ["--scale", "search"]),
                 own(s, run, label + ", calibrated, one-sided", to + calibrate + ["--sided", "one"]),
                 own(s, run, label + ", calibrated", to + calibrate)]
    return rows


def auto(s, run, budget, calibrate):
    rows, tables = [], 0
    for key, t in s.convert(["--to", "nf4"])[1].items():  # beside every NF4 weight
        tables += t.nbytes if key.endswith(("quant_map", "__nf4")) else 0
    for bits in AUTO:
        for label, more, beside in (("compressed-tensors", FORMAT, 0), ("NF4", [], tables)):
            name = "auto, %s, %.1f bits, " % (label, bits)
            options = budget(s, {"bits": bits, "table_bytes": beside}, bits, more)
            rows += [own(s, run, name + "search", options + ["--scale", "search"]),
                     own(s, run, name + "calibrated", options + calibrate)]
    return rows


def others(s, run, ids, versions):
    """(group, name, folder) of what llm-compressor and AutoRound wrote."""
    made, jobs = [], []
    for group in GROUPS[s.model.label]:
        for name, method, more in OTHERS + (SLOW if group == 128 else ()):
            out = os.path.join(s.scratch, "other%d" % len(jobs))
            jobs.append(dict(more, method=method, group=group, out=out))
            made.append((group, name, out))
    path = os.path.join(s.scratch, "jobs.json")
    with open(path, "w") as f:
        json.dump({"model": s.model.folder, "ids": ids, "ignore": IGNORED[s.model.label],
                   "jobs": jobs}, f)
    found = run([s.args.peers, "-B", os.path.join(ac.HERE, "accuracy_compressors.py"), path])
    versions.update(json.loads(found.splitlines()[-1])["versions"])
    return made


def kept(s, row):
    """Is a row of before to stay?"""
    return row["by"] == "GPTAQ" or row["by"] != "qconv" and not s.args.peers


def begin(s):
    """Sets the names of the weights; (what the text is, options to calibrate with it)."""
    label, ids = text(s)
    left = KEPT.get(s.model.label, "").strip("*")
    s.names = sorted(n for n in s.model.weights
                     if n.endswith("_proj.weight") and not (left and n.endswith(left)))
    return label, ["--calibrate", ids, "--calibration-context", str(CONTEXT)]


def auto_alone(s, run, budget):
    return auto(s, run, budget, begin(s)[1])


def measure(s, part, run, budget, versions, before):
    """part: the same with few windows, on which numpy evaluates a row of each kind too. Others whose
    option is not given keep the rows that they have in `before`."""
    label, calibrate = begin(s)
    ids = calibrate[1]
    part.names = s.names
    groups = [{"group": g, "rows": grouped(s, run, g, calibrate)} for g in GROUPS[s.model.label]]
    rows = {g["group"]: g["rows"] for g in groups}
    mixed = None if s.model.label in KEPT else auto(s, run, budget, calibrate)
    for g in before["groups"] if before else ():
        rows[g["group"]] += [r for r in g["rows"] if kept(s, r)]
    for group, name, folder in others(s, run, ids, versions) if s.args.peers else ():
        if name == "GPTQ":  # and numpy, on few windows: a failure if they differ
            part.add(name, name, 0, lm.restore(lm.read_tensors(folder)), folder)
        rows[group].append(add_folder(s, "%s, group %d" % (name, group), name.split(",")[0], folder))
    out = {"left": LEFT.get(s.model.label, ""), "text": label, "tokens": WINDOWS * CONTEXT,
           "tensors": len(s.names), "groups": groups, "elements": int(sum(s.model.weights[n].size for n in s.names)),
           "base_perplexity": groups[0]["rows"][0]["eval"]["base_perplexity"]}
    return dict(out, auto=mixed) if mixed else out
