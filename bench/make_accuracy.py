#!/usr/bin/env python3
"""Write docs/accuracy.md from accuracy.json, mixture.json, mixtures.json, reallocations.json and width_errors.json of
bench/results.

    bench/make_accuracy.py            write it, and the tables of docs/calibration.md
    bench/make_accuracy.py --check    exit 1 if it is not what the results give

A figure that is not in the results does not exist.
"""
import json
import math
import os
import sys

from result_page import RESULTS, table, write_or_check

BNB = "bitsandbytes NF4, double"
INTEGER_HEAD = ("weights", "bits", "MSE / 1000", "perplexity", "difference", "KL divergence", "top-1",
                "other text")
TEXTS = {"own text": "text that the model sampled with other seeds", "default text": "the bundled text"}
TARGET = 0.14


def figure(x, digits=3):
    """So many significant digits, without an exponent."""
    if x == 0:
        return "0"
    return "%.*f" % (max(0, digits - 1 - math.floor(math.log10(abs(x)))), x)


def with_error(x, error):
    """x with the digits that its standard error leaves meaningful."""
    places = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 6
    return "%.*f &plusmn; %.*f" % (places, x, places, error)


def row_of(model, name):
    return next((r for r in model["rows"] if r["name"] == name), None)


def model_table(m):
    rows = []
    for r in m["rows"]:
        e = r["eval"]
        cells = [r["name"], "%.3f" % r["bits"], figure(1000 * r["rel_mse"])]
        if e:
            cells += ["%.4f" % e["perplexity"],
                      with_error(e["difference"], e["difference_error"]),
                      with_error(e["kl_mean"], e["kl_error"]), figure(e["kl_99"]),
                      "%.2f%%" % (100 * e["top1"])]
        rows.append(cells)
    head = ["weights", "bits", "MSE / 1000"]
    if m["rows"][0]["eval"]:
        head += ["perplexity", "difference", "KL divergence", "99%", "top-1"]
    return table(head, rows)


def targets(models):
    """Squared error of searched scales over bitsandbytes' own, both double-quantized."""
    rows = []
    for m in models:
        bnb = row_of(m, BNB)
        if not bnb:
            continue
        cells = [m["model"], figure(1000 * bnb["rel_mse"], 4)]
        for scale in ("absmax", "search", "refit"):
            r = row_of(m, "NF4, double, " + scale)
            cells.append("%+.2f%%" % (100 * (r["rel_mse"] / bnb["rel_mse"] - 1)) if r else "-")
        search = row_of(m, "NF4, double, search")
        reached = search and search["rel_mse"] <= (1 - TARGET) * bnb["rel_mse"]
        rows.append(cells + ["yes" if reached else "no"])
    return table(("model", "bitsandbytes, MSE / 1000", "absmax", "search", "refit",
                  "search 14% lower"), rows)


def mean_and_error(values):
    n = len(values)
    mean = sum(values) / n
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)


def placement_rows(m):
    """Ratios of KL divergence and differences of log perplexity against absmax, placement by
    placement."""
    at = {(p["form"], p["scale"], p["shift"]): p for p in m["placements"]}
    rows = []
    for form in dict.fromkeys(p["form"] for p in m["placements"]):
        shifts = [s for f, k, s in at if f == form and k == "absmax"]
        for scale in ("search", "refit"):
            if (form, scale, shifts[0]) not in at:
                continue
            pairs = [(at[form, "absmax", s], at[form, scale, s]) for s in shifts]
            kl = mean_and_error([math.log(b["kl_mean"] / a["kl_mean"]) for a, b in pairs])
            high = mean_and_error([math.log(b["kl_99"] / a["kl_99"]) for a, b in pairs])
            nll = mean_and_error([b["log_ratio"] - a["log_ratio"] for a, b in pairs])
            top = mean_and_error([b["top1"] - a["top1"] for a, b in pairs])
            worse = sum(b["kl_mean"] > a["kl_mean"] for a, b in pairs)
            rows.append((m["model"], form, scale,
                         "%+.1f%% &plusmn; %.1f" % (100 * math.expm1(kl[0]), 100 * kl[1]),
                         "%+.1f%% &plusmn; %.1f" % (100 * math.expm1(high[0]), 100 * high[1]),
                         "%+.3f%% &plusmn; %.3f" % (100 * math.expm1(nll[0]), 100 * nll[1]),
                         "%+.2f &plusmn; %.2f" % (100 * top[0], 100 * top[1]),
                         "%d of %d" % (worse, len(pairs))))
    return rows


def paired_rows(m):
    return [(m["model"], p["form"], p["scale"],
             "%+.1f%% &plusmn; %.1f" % (100 * p["kl"] / p["base_kl"],
                                        100 * p["kl_error"] / p["base_kl"]),
             "%+.3f%% &plusmn; %.3f" % (100 * math.expm1(p["log_ratio"]),
                                        100 * p["log_ratio_error"])) for p in m["paired"]]


def types_used(models):
    rows = []
    for m in models:
        for r in m["rows"]:
            if r.get("types"):
                types = sorted(r["types"].items(), key=lambda kv: -kv[1])
                rows.append((m["model"], r["name"].replace("llama.cpp ", ""), "%.3f" % r["bits"],
                             ", ".join("%s %.1f%%" % (k, 100 * v) for k, v in types)))
    return table(("model", "asked for", "bits", "types used, share of the weights"), rows)


def oracle(models):
    names = ("NF4, search", "NF4, double, search", "NF4, double, block 32, search",
             "int8 by row, search", "int8, block 64, search")
    rows = []
    for m in models:
        found = [row_of(m, name) for name in names]
        if any(r and "oracle_mse" in r for r in found):
            rows.append([m["model"]] + ["%+.2f%%" % (100 * (r["rel_mse"] / r["oracle_mse"] - 1))
                                        if r else "-" for r in found])
    return table(("model",) + names, rows)


def agreement(models):
    rows = []
    for m in models:
        own = [r["eval"] for r in m["rows"] if r["eval"] and "numpy" in r["eval"]]
        if own:
            rows.append((m["model"], "numpy, every row",
                         "%.1e" % max(abs(e["perplexity"] / e["numpy"]["perplexity"] - 1)
                                      for e in own),
                         "%.1e" % max(abs(e["kl_mean"] / e["numpy"]["kl_mean"] - 1) for e in own)))
        if "transformers" in m:
            off = m["transformers"]["off"]
            rows.append((m["model"], "transformers, NF4 double absmax",
                         "%.1e" % max(off["perplexity"], off["base_perplexity"]),
                         "%.1e" % off["kl_mean"]))
    return table(("model", "beside", "perplexity apart by at most", "KL divergence"), rows)


def judged(row, base):
    """A calibrated row or a peer's: beside plain NF4, on both texts."""
    e, first, other = row["eval"], base["eval"], row.get("second")
    return [row["name"], "%.3f" % row["bits"], "%.4f" % e["perplexity"],
            with_error(e["difference"], e["difference_error"]),
            with_error(e["kl_mean"], e["kl_error"]), "%.2f%%" % (100 * e["top1"]),
            "%.3f" % (e["kl_mean"] / first["kl_mean"]),
            "%.2f" % (e["difference"] / first["difference"]),
            with_error(other["kl_mean"], other["kl_error"]) if other else "-",
            "%.3f" % (other["kl_mean"] / base["second"]["kl_mean"]) if other else "-"]


def measured_with(part):
    """Rows of --to auto may have been measured again by themselves."""
    later = {r["commit"] for r in part.get("rows", []) + part.get("auto", []) if "commit" in r}
    return "%s, commit %s%s" % (part["qconv"], part["commit"], "".join(
        " (rows of `--to auto`: commit %s)" % c for c in sorted(later)))


def embedding_tables(c):
    base = c["embeddings"][0]["distance"]
    out = ["Distance is the mean cosine distance between the embeddings before and after, of the",
           "sentences in `bench/sentences.txt`, which are not in the calibration text. Calibrated",
           "with the bundled text's paragraphs, 16384 tokens.", "",
           table(("weights", "bits", "MSE / 1000", "distance", "ratio"),
                 [(e["name"], "%.3f" % e["bits"], figure(1000 * e["rel_mse"]),
                   with_error(e["distance"], e["distance_error"]),
                   "%.3f" % (e["distance"] / base)) for e in c["embeddings"]]), ""]
    if "blocks" in c:
        one, whole = c["blocks"][0], c["blocks"][-1]
        sizes = sorted(one["costs"], key=int)
        rows = []
        for b in c["blocks"]:
            gains = [math.log(b["costs"][k] / one["costs"][k]) / math.log(whole["costs"][k] / one["costs"][k])
                     for k in sizes]
            rows.append([b["name"]] + ["%.3f" % (b["costs"][k] / one["costs"][k]) for k in sizes]
                        + ["%.0f%%" % (100 * g + 0.0) for g in gains]
                        + [with_error(b["distance"], b["distance_error"]), "%.3f" % (b["distance"] / base)])
        out += ["How much of that is lost where outputs count together in blocks only: tr(G E H E^T) with all of G,",
                "over that of one-sided calibrating, is a geometric mean over the layers with 384 and with 1536",
                "outputs. **kept** is the share of the gain (in logarithms). Both columns are of NF4.", "",
                table(["outputs that count together"] + ["%s outputs" % k for k in sizes]
                      + ["%s, kept" % k for k in sizes] + ["distance", "of plain NF4's"], rows), ""]
    return out


def beside_c():
    with open(os.path.join(RESULTS, "calibrate_beside_c.json")) as f:
        cases = json.load(f)
    rows = [(name, figure(c["plain"]), "%.3f" % c["share_c"], "%.3f" % c["share_python"], "%.3f" % c["python_over_c"])
            for name, c in cases.items()]
    return ["### In Python beside C", "",
            "Until 0.5.0 the program itself took the text through the model, which computed 25 families. The Python package",
            "does it for any model of transformers, and the solver is the same. Below both are beside each other, with the",
            "same text, options and judge (`bench/calibrate_beside_c.py`): KL divergence of plain NF4 or int4 (double-quantized",
            "where there are nested scales, absmax), and the shares of it that are left after calibrating; of MiniLM it is the",
            "distance of embeddings, where C had the original's inputs alone. Labels of the backward pass are drawn from other",
            "random numbers, which alone moves a share by some percent.", "",
            table(("model and text", "plain", "calibrated by C", "by Python", "Python over C"), rows), ""]


def calibrated(models):
    by = {}
    for m in models:
        if "calibrated" in m:
            by.setdefault(measured_with(m["calibrated"]), []).append(m["model"])
    out = ["## Calibrated", "",
           "These are calibrated outputs ([calibration.md](calibration.md)), in windows of 256 tokens,",
           "with 131072 tokens or all of the text, and with both sides where a row does not say otherwise. \"Windows",
           "of 128\" have the same number of tokens of the model's own text, in windows as long as those that judge.",
           "**KL ratio** and **loss ratio** are KL divergence and difference in perplexity over those of plain",
           "NF4 (double-quantized, absmax), the first row. Of int8 the KL divergence alone says something.",
           "**other text** is KL divergence on `bench/sentences.txt`, everyday sentences that are in no text of",
           "calibrating, and **other ratio** the same over plain NF4's there. `bench/bench_accuracy.py --part calibrated`",
           "measured them:", "; ".join("%s with %s" % (" and ".join(names), what) for what, names in by.items()) + ".",
           "",
           "llama.cpp's importance matrix has the mean squares of the inputs, of 16384 tokens of the same text.",
           "Its rows do not depend on qconv's code and were measured earlier, on the first text only.", "", *beside_c()]
    for m in models:
        c = m.get("calibrated")
        if not c:
            continue
        out += ["### %s, calibrated" % m["model"], ""]
        if "rows" in c:
            out += [table(("weights", "bits", "perplexity", "difference", "KL divergence", "top-1",
                           "KL ratio", "loss ratio", "other text", "other ratio"),
                          [judged(r, c["rows"][0]) for r in c["rows"] + c.get("peers", [])]), ""]
        else:
            out += embedding_tables(c)
    return out + two_texts(models)


def ratio(a, b):
    """(a over b, its standard error as if the two were independent)."""
    r = a["kl_mean"] / b["kl_mean"]
    return r, r * math.hypot(a["kl_error"] / a["kl_mean"], b["kl_error"] / b["kl_mean"])


def two_texts(models):
    """Two sides over one, on the text that judges and on the other."""
    rows, first, found = [], [], []
    for m in models:
        for part in ("calibrated", "integers"):
            p = m.get(part, {})
            for group in [p["rows"]] if "rows" in p else [g["rows"] for g in p.get("groups", ())]:
                for one in group:
                    form = one["name"].removesuffix(", calibrated, one-sided")
                    if form == one["name"]:
                        continue
                    two = next(r for r in group if r["name"] in (
                        form + ", calibrated", form + ", calibrated, own text" if "tiny" in m["model"] else
                        form + ", calibrated, default text"))
                    pair = [ratio(two["eval"], one["eval"]), ratio(two["second"], one["second"])]
                    first, found = first + pair[:1], found + pair[1:]
                    rows.append([m["model"] + (", bfloat16" if part == "integers" else ""), form]
                                + ["%.3f &plusmn; %.3f" % x for x in pair])
    if not rows:
        return []
    holds = all(r + 2 * e < 1 for r, e in found)
    return ["### Two sides over one, on both texts", "",
            "KL divergence of two-sided calibrating over that of one-sided; the standard errors take the two as",
            "independent. **On text unlike the calibration text the gain %s**"
            % ("holds in every row" if holds else "does not hold in every row"),
            "(%sby more than two standard errors), and the mean of the ratios is %.3f there and %.3f on the first text."
            % ("" if holds else "not everywhere ", *(sum(r for r, _ in f) / len(f) for f in (found, first))), "",
            table(("model", "weights", "text of the first columns", "other text"), rows), ""]


def integer_rows(rows, compared):
    """compared: with llm-compressor's GPTQ among them, on both texts."""
    gptq = next((r for r in rows if r["name"].startswith("GPTQ, group")), None)
    fitted = [r for r in rows if r["name"].startswith("GPTQ, mse scales")]
    out = []
    for r in rows:
        e = r["eval"]
        out.append([r["name"], "%.3f" % r["bits"], figure(1000 * r["rel_mse"]), "%.4f" % e["perplexity"],
                    with_error(e["difference"], e["difference_error"]),
                    with_error(e["kl_mean"], e["kl_error"]), "%.2f%%" % (100 * e["top1"]),
                    with_error(r["second"]["kl_mean"], r["second"]["kl_error"])])
        if compared:
            out[-1] += ["%.3f, %.3f" % (r[text]["kl_mean"] / gptq[text]["kl_mean"],
                                        r[text]["kl_mean"] / min(f[text]["kl_mean"] for f in fitted))
                        for text in ("eval", "second")]
    return out


def integers(models):
    texts = [(m["model"], m["integers"]) for m in models if "integers" in m]
    if not texts:
        return []
    out = ["## Integers of compressed-tensors", "",
           "4-bit integers as vLLM loads them (`--to int4 --format compressed-tensors`, W4A16) stand here",
           "beside those of llm-compressor's GPTQ and of AutoRound, and beside our NF4 with as many bits. In a table",
           "all rows have the same weights quantized, and all that are calibrated read the same %d tokens, in"
           % texts[0][1]["tokens"],
           "windows of 256. One forward pass evaluated all of them, from the others' files as they are.",
           "Each model was rounded to bfloat16 before, so that scales take 16 bits, as in nearly every checkpoint.",
           "",
           "- **GPTQ**, **AutoRound**: by llm-compressor's own pipeline, symmetric, with its defaults: `actorder`",
           "  static, damping 0.01, scales by absmax. AutoRound made its 200 steps in float32, which the CPU is faster",
           "  in; its scales are counted as 16 bits. Of mse scales its observer is `memoryless_mse`.",
           "- **GPTAQ** (arXiv 2504.02692): the authors' solver and quantizer (their repository, commit 883afc6), symmetric,",
           "  ordered and with static groups like GPTQ above, and their defaults for the rest; **mse scales** are their",
           "  `w_clip`. The loop over layers was ours, in float32, a script that is no longer kept; scales are counted as 16 bits.",
           "- **other text**: KL divergence on `bench/sentences.txt`, everyday sentences that are in neither text of",
           "  calibrating.",
           "- **over GPTQ**: KL divergence over that of the row \"GPTQ\" of the same group size, which has its defaults,",
           "  and over the lowest of the rows \"GPTQ, mse scales\" of that size, on both texts.", "",
           "Our calibrated rows have both sides where they do not say otherwise, and are of %s."
           % measured_with(texts[0][1]),
           "GPTQ's and AutoRound's were measured before and kept: they do not depend on qconv's code, and their versions",
           "(at the end of this page) are those that pip installs today, as llm-compressor 0.14.0.1 takes AutoRound",
           "up to 0.15.1.", ""]
    for name, i in texts:
        out += ["### %s, integers" % name, "",
                "%d weights in %d tensors%s. Calibrated with %s. Perplexity of the original: %.4f."
                % (i["elements"], i["tensors"], i["left"], TEXTS[i["text"]], i["base_perplexity"]), "",
                table(INTEGER_HEAD + ("over GPTQ", "other text, over GPTQ"),
                      [row for g in i["groups"] for row in integer_rows(g["rows"], True)]), ""]
        if "auto" in i:
            out += ["Mixtures that `--to auto` chose for a budget of bits, from int4 in groups of 128 and 32, int8 by",
                    "row and 16 bits, stand beside those from bitsandbytes' forms:", "",
                    table(INTEGER_HEAD, integer_rows(i["auto"], False)), ""]
    return out + ["`bench/bench_accuracy.py --part integers --tinystories DIR --check PYTHON --peers PYTHON`",
                  "measures them.", ""]


def by_key(models, key, head):
    """KL divergence of calibrated NF4 over plain NF4's, a column for each text."""
    columns, values = [], {}
    for m in models:
        for point in m.get("calibrated", {}).get(key, ()):
            column = "%s, %s" % (m["model"], point["text"])
            if column not in columns:
                columns.append(column)
            base = m["calibrated"]["rows"][0]["eval"]
            values[column, point[key]] = "%.3f (%.2f)" % (point["kl_mean"] / base["kl_mean"],
                                                          point["difference"] / base["difference"])
    keys = sorted({k for _, k in values})
    return table((head, *columns), [["%g" % k] + [values.get((c, k), "-") for c in columns]
                                    for k in keys])


def calibration_page(models):
    """docs/calibration.md with its tables between marks replaced."""
    with open(os.path.join(RESULTS, "..", "..", "docs", "calibration.md")) as f:
        text = f.read()
    for key, head in (("tokens", "tokens"), ("damping", "--damping")):
        begin, end = ("<!-- %s: %s -->\n" % (key, word) for word in ("begin", "end"))
        before, rest = text.split(begin)
        text = before + begin + by_key(models, key, head) + "\n" + end + rest.split(end)[1]
    return text


def mixture(m):
    """Of mixture.json, whose script is no longer kept."""
    out = ["## A mixture of experts", "",
           "`tests/data/kjv-moe` has 4 layers of 8 experts, of which 2 take each token: %d parameters, of which"
           % m["parameters"],
           "%d in %d tensors are quantized. The second half of the held-out text judges; the first half is the"
           % (m["quantized"], m["tensors"]),
           "\"own text\" of calibrating. Perplexity of the original: %.4f. **seconds** are of the whole conversion"
           % m["rows"][0]["base_perplexity"],
           "with one thread, measured beside other work. **bits** are with the 1.3 KB of tables beside each weight in",
           "NF4, which are half a bit of matrices as small as these.", "",
           table(("weights", "bits", "perplexity", "difference", "KL divergence", "99%", "top-1", "seconds"),
                 [[r["name"], "%.3f" % r["bits"], "%.4f" % r["perplexity"],
                   with_error(r["difference"], r["difference_error"]), with_error(r["kl_mean"], r["kl_error"]),
                   figure(r["kl_99"]), "%.2f%%" % (100 * r["top1"]), "%.1f" % r["processor_seconds"]]
                  for r in m["rows"]]), "",
           "A script that is no longer kept measured it, with %s, commit %s." % (m["qconv"], m["commit"]), ""]
    return out


def widths(rows):
    """Of width_errors.json."""
    found = {(r["scheme"], r["group"], r["scale"]): r["rel_mse"] for r in rows}

    def cell(scheme, group):
        return "%.3g (%.3g)" % tuple(1e3 * found[scheme, group, scale] for scale in ("search", "absmax"))

    groups = ("128", "64", "32", "channel")
    mixed = (found["int4", "128", "search"] + found["int8", "128", "search"]) / 2
    out = ["## Widths", "", "The relative squared error of every width on normally distributed weights (`bench/width_errors.py`). In "
           "groups of 128",
           "a width takes its bits and 0.125 more, in groups of 64 0.25 and in groups of 32 0.5, by row 0.004. NF4 in blocks of",
           "64 with double quantization has %s at 4.129 bits." % cell("nf4", None), ""]
    out += ["| squared error / 1000, searched (absmax) | groups of 128 | 64 | 32 | by row of 4096 |", "|--|--|--|--|--|"]
    out += ["| int%d | %s |" % (bits, " | ".join(cell("int%d" % bits, g) for g in groups)) for bits in range(2, 9)]
    return out + ["", "Half int4 and half int8 at 6.125 bits leave %.3g, %.1f times what int6 leaves." % (
        1e3 * mixed, mixed / found["int6", "128", "search"]), ""]


def reallocations(found):
    """Of reallocations.json."""
    models, most = found["models"], len(found["models"][0]["reallocations"])
    heads = ["%s, weighed by %s" % (m["model"], {"default": "the bundled text"}.get(m["text"], m["text"])) for m in models]
    predictors = list(models[0]["spearman"])
    chosen = [[heads[i], "%.1f" % c["bits"], figure(c[predictors[0]])] + ["%.2f" % (c[p] / c[predictors[0]])
                                                                      for p in predictors[1:]]
              for i, m in enumerate(models) for c in m["chosen"]]
    return ["## Reallocations", "",
            "Which number puts mixtures in the right order? %d mixtures of equal bytes for each model leave some matrices" % most,
            "in int4 and give int6 or int8 to others, by random marks of layers, of roles or of matrices. The tables have",
            "Spearman's correlation of what was predicted with the KL divergence measured. E is the error of a weight, H the",
            "second moment of its inputs, and G that of the gradients of its outputs; the two traces alone are those of",
            "[`python -m qconv importance`](importance.md), and importance is what `--to auto` goes by without a file. The",
            "squared gradient is the weight's own, which takes no inputs and gradients as independent. Text of the kind that",
            "judges weighs better than the bundled text.", "",
            table(["prediction", *heads], [[p, *("%.2f" % m["spearman"][p] for m in models)] for p in predictors]), "",
            "The next table lets each prediction choose from int4, int5, int6 and int8 for every matrix within a number of",
            "bits: KL divergence by the first, and that of the others relative to it.", "",
            table(["model", "bits", *predictors], chosen), "",
            "`bench/reallocations.py` measured it (commit %s). Codes: %s." % (found["commit"], found["codes"]), ""]


def ladder(found):
    """Of mixtures.json."""
    out = ["## Mixtures between 4 and 8 bits", "",
           "What `--to auto --format compressed-tensors --bits B` makes of models in bfloat16: from int4 and int8 alone, as before",
           "there were other widths; by weights alone; by [`importance`](importance.md) of a text; and calibrated on it. Beside",
           "them are K-quants of llama.cpp, which need rows of a multiple of 256: of rows as they are it takes other types, so",
           "they are also made of rows put together to 256. **of int4 and int8**: KL divergence over that of the mixture of",
           "these two at as many bits.", ""]
    for m in found["models"]:
        least = {r["name"].split(",")[1]: r["kl"] for r in m["rows"] if r["name"].endswith("int4 and int8")}
        rows = [[r["name"], "%.3f" % r["bits"], with_error(r["kl"], r["kl_error"]),
                 "%.2f" % (r["kl"] / least[r["name"].split(",")[1]]) if r["name"].startswith("auto") else "-",
                 ", ".join("%s %.0f%%" % (t, 100 * share) for t, share in sorted((r.get("types") or {}).items()))]
                for r in m["rows"]]
        out += ["### %s, mixtures" % m["model"], "",
                "Weighed and calibrated with %s." % {"default": "the bundled text"}.get(m["text"], m["text"]), "",
                table(["mixture", "bits", "KL divergence", "of int4 and int8", "types of llama.cpp"], rows), ""]
    versions = {v for m in found["models"] for v in m["versions"].values()}
    return out + ["`bench/mixtures.py` measured it (commit %s%s)." % (found["commit"], "; llama.cpp of " * bool(versions)
                                                                  + ", ".join(versions)), ""]


def page(r, experts, found, errors, mixed):
    models = r["models"]
    versions = ", ".join("%s %s" % kv for kv in sorted(r["versions"].items()))
    out = ["# Accuracy", "",
           "This page says how much quantizing costs: for two small language models, MiniLM and normal",
           "random weights, in every form of qconv, beside bitsandbytes and llama.cpp. To measure your own",
           "model, run `python -m qconv eval OUT --against MODEL --text FILE` ([eval.md](eval.md)).", "",
           "Only the weights of linear layers differ between the rows of a model. Embeddings, norms and",
           "the head stay as they are, also for llama.cpp, which would quantize them too. All weights are",
           "restored to float32 and evaluated by the same forward pass, "
           + ("with which one in numpy agrees." if r["evaluator"] == "qconv" else "in numpy."), "",
           "- **bits**: bits of codes and scales per quantized weight, as stored. Constant tables beside an",
           "  NF4 weight (1.3 KB, whatever its size) are left out.",
           "- **MSE / 1000**: sum of squared errors over sum of squares of the weights, in thousandths.",
           "- **difference**: of the perplexity to the original's, with the standard error of paired tokens.",
           "- **KL divergence**: of the original's predictions from the quantized model's, mean in nats.",
           "  **99%** is its 99th percentile over tokens.",
           "- **top-1**: share of tokens where both models predict the same token.",
           "- `absmax`, `search`, `refit`: the value of `--scale` ([quantizers.md](quantizers.md)).",
           "- `split`: with `--split-fused`, so that q, k and v, and gate and up, are chosen apart.", "",
           "## By model", ""]
    for m in models:
        out += ["### %s" % m["model"], ""]
        if "text" in m:
            out += ["%d weights in %d tensors; %s. Perplexity of the original: %.4f."
                    % (m["elements"], m["tensors"], m["text"], m["base_perplexity"]), ""]
        else:
            out += ["%d weights in %d tensors; weights only." % (m["elements"], m["tensors"]), ""]
        out += [model_table(m), ""]
    if any("calibrated" in m for m in models):
        out += calibrated(models)
    out += integers(models) + widths(errors) + mixture(experts) + ladder(mixed) + reallocations(found)
    texts = [m for m in models if "placements" in m]
    if texts:
        shifts = len({p["shift"] for p in texts[0]["placements"] if p["form"] == "NF4, double"})
        out += ["## Which --scale", "",
                "The table shows the change against absmax of the same form, on the same tokens: its mean and",
                "its standard error over windows of text.", "",
                table(("model", "form", "--scale", "KL divergence", "perplexity"),
                      [row for m in texts for row in paired_rows(m)]), "",
                "That error is of the text alone. One conversion is also one draw of rounding errors, and",
                "where blocks begin moves KL divergence by some percent. So every weight is also quantized",
                "in %d placements of its blocks (turned before, and back afterwards). Each is compared with"
                % shifts,
                "absmax in the same placement, on every second window. The table shows mean and standard error",
                "over placements. [Decision 0012](decisions/0012-default-scale.md) draws the conclusion.", "",
                table(("model", "form", "--scale", "KL divergence", "99%", "perplexity",
                       "top-1, points", "worse than absmax"),
                      [row for m in texts for row in placement_rows(m)]), ""]
    out += ["## Squared error of searched scales", "",
            "The squared error is compared with that of bitsandbytes' own NF4, both after double",
            "quantization.", "", targets(models), "",
            "To see how near the search comes to the best, the next table compares it with a slow search in",
            "numpy, a script that is no longer kept. It tries 64 scales of each sign for each block or row and then",
            "fits them to the codes found.", "", oracle(models), "",
            "## How it was measured", "",
            "`bench/make_accuracy.py` generates this page from `bench/results/accuracy.json`, `mixture.json`,",
            "`mixtures.json`, `reallocations.json` and `width_errors.json`; do not edit it.",
            "The command was `%s`, of %s, commit %s, with %s."
            % (r["command"], r["qconv"], r["commit"], versions), ""]
    if any(row.get("types") for m in models for row in m["rows"]):
        out += ["llama.cpp itself replaces a type whose blocks do not divide the rows: K-quants need rows of a",
                "multiple of 256, the others of 32. It used these types:", "", types_used(models), ""]
    checks = agreement(models)
    if checks.count("\n") > 1:
        out += ["The evaluation was checked beside others:", "", checks, ""]
    return "\n".join(out)


def main():
    with open(os.path.join(RESULTS, "accuracy.json")) as f:
        result = json.load(f)
    with open(os.path.join(RESULTS, "mixture.json")) as f:
        experts = json.load(f)
    with open(os.path.join(RESULTS, "reallocations.json")) as f:
        found = json.load(f)
    with open(os.path.join(RESULTS, "width_errors.json")) as f:
        errors = json.load(f)
    with open(os.path.join(RESULTS, "mixtures.json")) as f:
        mixed = json.load(f)
    made = (("accuracy.md", page(result, experts, found, errors, mixed)),
            ("calibration.md", calibration_page(result["models"])))
    return max(write_or_check(name, text, "bench/results/accuracy.json", "bench/make_accuracy.py")
               for name, text in made)


if __name__ == "__main__":
    sys.exit(main())
