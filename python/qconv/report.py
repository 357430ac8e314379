"""`qconv report`: one HTML page about an output, a plan, a validation or settings for training, and the same as JSON.

    python -m qconv report out/ --against model/ --html report.html
    qconv.report("out/", against="model/", html="report.html").json["forms"]

First the facts are put together (_report_facts.py); the page and the JSON are two ways to show them. Drawings and
tables are those of _report_draw.py. Texts of files go through `esc`.
"""
from __future__ import annotations

import json
import math
import os
import stat
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ._command import Parser
from ._program import StrPath
from ._report_answers import plan_page, training_page, validation_of, validation_page
from ._report_draw import (COLOURS, MARKS, Axis, Cell, Point, cards, count, document, esc, folded, heat_map, histogram,
    keys,
                           label, line, num, plot, rect, section, size, stacked, svg, table)
from ._report_facts import (Json, Output, Watcher, decibels, facts, is_4_bit, kind_names, layer_of, mean_of, product,
                            read_answer)
from .errors import CheckError, Error, InputError, UsageError
from .results import Result


# What a member that is missing or of another kind ends in.
UNEXPECTED = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Report(Result):
    """What `report` returns: `json` are the facts, as `qconv report --json` prints them, and `html` is the page."""
    html: str = field(repr=False)


# ---- the page of an output ----------------------------------------------------------------------------------------

def bits_line(n: int, elements: int) -> str:
    """Bits per weight."""
    return num(n * 8.0 / elements, "%.3f") if elements else ""


def head_of(f: Json, out: Output) -> str:
    """What the output is, what was saved, and what is wrong with it."""
    s, made, c, e, of = f["sizes"], f["made"], f["compared"], f["eval"], f["forms"]
    before = s["source_file_bytes"] or s["unquantized_bytes"]
    mean = mean_of([(r["rel_mse"], product(r["shape"])) for r in f["weights"] if r["rel_mse"] is not None])
    text = "<h1>%s</h1>\n<p>%s%s weights; %d weight matri%s quantized: %s." % (
        esc(f["path"]), "A model of type <b>%s</b>, " % esc(f["model_type"]) if f["model_type"] else "",
        count(s["elements"]), len(f["weights"]), "x is" if len(f["weights"]) == 1 else "ces are",
        "; ".join("<b>%s</b> (%d)" % (esc(x["form"]), x["weights"]) for x in of))
    if made and made["scale"]:
        text += " Scales: <b>%s</b>, %s." % (esc(made["scale"]), "the largest value of a block"
                                             if made["scale"] == "absmax" else "those of least squared error")
    text += " Made by qconv %s, <code>--to %s</code>.</p>\n" % (esc(made["qconv_version"]),
        esc(made["to"])) if made else "</p>\n"
    notes = [*out.seen["warnings"], *([out.note] if out.note else [])]
    text += "".join('<p class="no"><b>Note:</b> %s</p>\n' % esc(n) for n in notes)
    if not made:
        text += "<p><b>Note:</b> there is no manifest (qconv.json), so this page knows neither the source nor the " \
            "options. Errors come from <code>--against</code> only.</p>\n"
    if c and c["faults"]:
        faults = [r for r in (out.compared or {"rows": []})["rows"] if r["fault"]]
        text += '<p class="no"><b>This is not %s, converted: %d fault%s.</b> %s: %s.</p>\n<ul>\n%s</ul>\n<p>All of ' \
            'them: ' \
            "<code>qconv verify OUT --against MODEL</code>.</p>\n" % (
                esc(f["against"]), c["faults"], "s" if c["faults"] > 1 else "", esc(c["first_what"]),
                esc(c["first_why"]),
                "".join("<li>%s: %s</li>\n" % (esc(r["name"]), esc(r["fault"])) for r in faults[:6]))
    elif c:
        text += '<p class="yes"><b>Compared with %s</b>: nothing is missing. Tensors equal bit for bit: %d; equal ' \
            'after a ' \
            "cast: %d; quantized with no more error than their form leaves: %d%s.</p>\n" % (
                esc(f["against"]), c["equal"], c["cast"], c["quantized"],
                "; all hashes are right" * c["hashes_checked"])
    elif out.trouble:
        text += '<p class="no"><b>The output is damaged:</b> %s.</p>\n' % esc(out.trouble)
    elif made and out.codes is not None:
        text += '<p class="yes">Every byte is what was written: all hashes are right.</p>\n'
    links = [("size", "Size"), ("memory", "Memory"), ("error", "Error"), ("layers", "Layers"), ("worst", "Worst"),
             *([("outputs", "Outputs")] if made and made.get("calibrate") else []), ("codes", "Codes"),
             ("left", "Not quantized"), ("perplexity", "Perplexity"), *([("speed", "Products")] if f["validation"]
             else []),
             ("made", "How made")]
    return text + "<nav>%s</nav>\n" % "".join('<a href="#%s">%s</a>' % x for x in links) + cards([
        (size(s["file_bytes"]), "on disk, %.1f%% of %s%s" % (
            100 * s["file_bytes"] / before, size(before), "" if s["source_file_bytes"] else " unquantized") if before
            else ""),
        (size(s["tensor_bytes"]), "of tensors in memory"),
        (num(s["bits_per_weight"], "%.3f"), "bits per weight, all weights") if s["bits_per_weight"] else None,
        (num(mean), "relative error of weights (MSE), mean") if mean is not None else None,
        (num(decibels(mean), "%.2f dB"), "signal to quantization noise") if mean else None,
        (num(e["perplexity"], "%.4g"), "perplexity" + (", source " + num(e["base_perplexity"], "%.4g") if e["against"]
        else ""))
        if e else ("not measured", "perplexity and KL divergence"),
        (num(e["kl_mean"], "%.3g nats"), "KL divergence to the source, mean") if e and e["against"] else None])


def size_of(f: Json, out: Output) -> str:
    """Sizes before and now, and how tensors are stored."""
    s, made = f["sizes"], out.seen["manifest"]
    rest = s["tensor_bytes"] - s["quantized_bytes"]
    most = max(s["unquantized_bytes"], s["tensor_bytes"], 1)
    text = section("size", "Size") + stacked("Before, in the dtypes it had: <b>%s</b>" % size(s["unquantized_bytes"]), [
        ("codes", 0), ("scales and tables", 0), ("not quantized", s["unquantized_bytes"])], most)
    text += stacked("Now, in memory: <b>%s</b>" % size(s["tensor_bytes"]), [
        ("codes", s["quantized_bytes"] - s["scale_bytes"]), ("scales and tables", s["scale_bytes"]), ("not quantized",
        rest)],
        most) + keys(["codes", "scales and tables", "not quantized"])
    source = s["source_file_bytes"]
    text += "<p>%s have %s on disk%s.%s</p>\n" % (
        "The files of the source have %s; these" % size(source) if source else "The size of the source's files is not "
        "known. These", size(s["file_bytes"]), ", compressed with Zstandard" if made and made["compress"] == "zstd"
        else "",
        " Saved: <b>%s (%.1f%%)</b>." % (size(source - s["file_bytes"]), 100 - 100 * s["file_bytes"] / source)
        if source and source >= s["file_bytes"] else "")
    return text + table(["stored as", "tensors", "weights", "bytes", "bits per weight"], [
        ["not quantized" if name == "plain" else esc(name), str(x["tensors"]), count(x["weights"]), size(x["bytes"]),
         bits_line(x["bytes"], x["weights"])] for name, x in out.seen["totals"]["by_scheme"].items()])


def memory_of(f: Json, out: Output) -> str:
    """What lies on which device."""
    text, p, total = section("memory", "Memory per device"), out.manifest.get("placement"), f["sizes"]["tensor_bytes"]
    if not f["devices"] or not p:
        return text + "<p>All tensors together: <b>%s</b>. They were not placed on devices; <code>qconv " \
            "--vram</code> does " \
            "that, and <code>qconv plan</code> adds the KV cache and what else a device holds.</p>\n" % size(total)
    most = max([d["tensor_bytes"] for d in f["devices"]] + [1])
    text += "<p>Placed for <code>--vram %s</code>, of which %.3g%% may be used, for a context of %d tokens and a " \
        "batch of " \
        "%d. What is shown are the weights; <code>qconv plan</code> adds the KV cache and what else a device " \
        "holds.</p>\n" % (
            esc(p["vram"]), 100 * p["margin"], p["context"], p["batch"])
    text += "".join(stacked("<b>%s</b>: %s, %.1f%%" % (esc(d["name"]), size(d["tensor_bytes"]),
        100 * d["tensor_bytes"] / (
        total or 1)), [("weights", d["tensor_bytes"])], most) for d in f["devices"])
    return text + table(["device", "weights", "share", "files, decompressed"], [
        [esc(d["name"]), size(d["tensor_bytes"]), "%.1f%%" % (100 * d["tensor_bytes"] / (total or 1)),
        size(d["shard_bytes"])]
        for d in f["devices"]])


def marks_of(f: Json) -> Dict[str, str]:
    """The mark of each form."""
    return {x["form"]: MARKS[i % len(MARKS)] for i, x in enumerate(f["forms"])}


def marked(f: Json, form: str) -> str:
    """A form with its mark, where there are several."""
    return "%s %s" % (marks_of(f)[form], esc(form)) if len(f["forms"]) > 1 else ""


def noise_histogram(f: Json, i: int) -> str:
    """How many weights of a form have which SQNR."""
    form = f["forms"][i]
    known = [r["rel_mse"] for r in f["weights"] if r["form"] == form["form"] and r["rel_mse"] is not None]
    values = [decibels(v) or 0.0 for v in known if v]
    if not values:
        return "<p>%s: no error at all.</p>\n" % esc(form["form"]) if known else ""
    low, high = min(values), max(values)
    width = next((w for w in (.01, .02, .05, .1, .2, .5, 1, 2, 5, 10) if (high - low) / w <= 10),
        math.ceil((high - low) / 10))
    first = math.floor(low / width + 1e-9)
    bins = [0] * max(4, math.floor(high / width + 1e-9) - first + 1)
    for v in values:
        bins[math.floor(v / width + 1e-9) - first] += 1
    n, most, inside = len(bins), max(bins), []
    for k, b in enumerate(bins):
        tall = 76.0 * b / most
        inside.append(rect("fill s%d" % (i % COLOURS), 100 * (k + .06) / n, 96 - tall, 88 / n, tall))
        inside.append(label(100 * (k + .5) / n, 92 - tall, str(b), "middle", "ink") if b else "")
        if n <= 6 or k % 2 == 0:
            inside.append(label(100 * k / n, 112, "%.4g" % ((first + k) * width), "start" if k == 0 else "middle"))
    inside.append(line("axis", 0, 100, 96, 96) + label(100, 128, "dB, higher is better", "end"))
    more = len(known) - len(values)
    return "<figure><figcaption><b>%s</b>: how many weights have which SQNR%s</figcaption>\n%s</figure>\n" % (
        esc(form["form"]), "; %d more without any error" % more if more else "", svg(
            130, "histogram of SQNR; counts stand on the bars", "\n".join(inside)))


def error_of(f: Json) -> str:
    """Errors by form and by kind."""
    marks, forms, known = marks_of(f), f["forms"], sum(r["rel_mse"] is not None for r in f["weights"])
    text = section("error", "Error of the weights") + \
        "<p>Relative MSE of a weight matrix: the sum of squared differences to the source, over the sum of squares " \
        "of the " \
        "source. 0.01 is an error of 10% in size, 20 dB of signal to quantization noise (SQNR). Means count each " \
        "matrix by " \
        "its size. " + {"source": "These were measured now, against <b>%s</b>." % esc(f["against"]),
                        "manifest": "These are from the manifest, as convert measured them.",
                        "none": "There are none: OUT has no manifest. <code>--against MODEL</code> measures them."}[
                            f["errors_from"]] + "</p>\n"
    if f["errors_from"] != "none" and known < len(f["weights"]):
        text += "<p><b>Note:</b> the error of %d of %d weights is not known: %s.</p>\n" % (
            len(f["weights"]) - known, len(f["weights"]), esc(f["errors_missing"]))
    text += table(["form", "mean", "SQNR of mean, dB", "median", "least", "largest", "weights", "bits per weight"], [
        ["%s %s" % (marks[x["form"]], esc(x["form"])), num(x["mean"]), num(decibels(x["mean"]), "%.2f"),
        num(x["median"]),
         num(x["least"]), num(x["most"]), str(x["weights"]), bits_line(x["bytes"], x["elements"])] for x in forms])
    text += '<div class="grid">\n%s</div>\n' % "".join(noise_histogram(f, i) for i in range(min(12, len(forms))))
    text += "<h3>By kind of layer</h3>\n" + table(
        ["kind", "mean", "SQNR, dB", "largest", ".name in", ".text form", "weights", "bits per weight"], [
            [esc(k["kind"]), num(k["mean"]), num(decibels(k["mean"]), "%.2f"), num(k["most"]),
             esc(k["most_of"] or "") if k["weights"] > 1 else "", marked(f, k["form"]), str(k["weights"]),
             bits_line(k["bytes"], k["elements"])] for k in f["kinds"][:200]])
    if len(f["kinds"]) > 200:
        text += "<p>%d more kinds are in <code>--json</code>.</p>\n" % (len(f["kinds"]) - 200)
    return text


def layers_of(f: Json) -> str:
    """Errors over the layers: a map of all, a drawing for each kind, and the numbers."""
    text, colours = section("layers", "Error over the layers"), {x["form"]: i for i, x in enumerate(f["forms"])}
    rows = [r for r in f["weights"] if r["rel_mse"] is not None and r["layer"] is not None]
    if not rows:
        return text + "<p>No weight has both an error and a layer number in its name.</p>\n"
    layers = sorted({r["layer"] for r in rows})
    series = [k for k in dict.fromkeys(k["kind"] for k in f["kinds"]) if any(r["kind"] == k for r in rows)] \
        if len({r["kind"] for r in rows}) * len(layers) <= 1 << 18 else []
    if not series or len(series) > 64 and len(series) > len(rows) / 2:
        return text + "<p>There are too many kinds and layers to draw.</p>\n"
    cells: Dict[Tuple[str, int], List[Json]] = {}
    for r in rows:
        cells.setdefault((r["kind"], r["layer"]), []).append(r)
    means = {key: mean_of([(r["rel_mse"], product(r["shape"])) for r in of]) or 0.0 for key, of in cells.items()}
    axis, across, titled = Axis(r["rel_mse"] for r in rows), [str(n) for n in layers], len(cells) <= 1500
    shown, marks = series[:24], marks_of(f)
    text += "<p>Relative error (MSE) of each layer; a stronger colour is a larger error, on a%s scale. The largest " \
        "has a frame.</p>\n" % (
        " logarithmic" if axis.log else " linear") + heat_map(
            "relative error by kind and layer; the numbers are in the table below", axis, across,
            [(esc(k), [means.get((k, n)) for n in layers]) for k in shown], titled)
    text += "<p>The same with one drawing for each kind, all with one axis. A line through a mark goes from the " \
        "least to " \
        "the largest where a layer has several such weights.</p>\n"
    text += keys([esc(x["form"]) for x in f["forms"]]) if len(f["forms"]) > 1 else ""
    drawn = []
    for k in shown:
        lines: Dict[int, List[Optional[Point]]] = {}
        for i, n in enumerate(layers):
            of = cells.get((k, n))
            if of:
                errors = [r["rel_mse"] for r in of]
                lines.setdefault(colours[of[0]["form"]], [None] * len(layers))[i] = (
                    means[k, n], min(errors), max(errors), False)
        drawn.append("<figure><figcaption>%s</figcaption>\n%s</figure>\n" % (esc(k), plot(
            "relative error of %s over the layers; the numbers are in the table below" % esc(k), axis, across,
            sorted(lines.items()), titled=titled, joined=len(lines) == 1)))
    text += '<div class="grid">\n%s</div>\n' % "".join(drawn)
    if len(series) * len(layers) > 6000:
        return text + "<p>The %d numbers are in <code>--json</code>.</p>\n" % len(cells)

    def cell(k: str, n: int) -> Cell:
        of = cells.get((k, n))
        if not of:
            return ""
        mark = "" if len(f["forms"]) == 1 else " *" if len({r["form"] for r in of}) > 1 else " " + marks[of[0]["form"]]
        return "%.3g%s" % (means[k, n], mark), "h%d" % round(9 * axis.share(means[k, n]))
    return text + folded("The numbers, layer by layer", table(["layer", *(esc(k) for k in series)], [
        [str(n), *(cell(k, n) for k in series)] for n in layers]) +
        '<p class="soft">A stronger colour is a larger error. Where a layer has several weights of a kind, as with '
        'experts, it is '
        "their mean; * where their forms differ.</p>\n")


def worst_of(f: Json) -> str:
    """The weights with the largest errors."""
    known = sorted((r for r in f["weights"] if r["rel_mse"] is not None), key=lambda r: -float(r["rel_mse"]))
    shown = known[:20]
    if not known:
        return section("worst", "Worst weights") + "<p>Not known: no weight has an error.</p>\n"

    def more(r: Json) -> List[Cell]:
        if not f["compared"]:
            return []
        return ["%.3f" % (r["rel_mse"] / r["expected_mse"] if r["expected_mse"] else 1.0), str(r["clipped"])]
    return section("worst", "Worst weights") + "<p>The %d of %d with the largest relative error, and the largest " \
        "difference " \
        "of a single value, in the unit of the weights, with its place.</p>\n" % (len(shown), len(known)) + table(
            [".name weight", "relative MSE", "SQNR, dB", "times the form's median",
             *(["times what absmax scales leave", "clipped values"] if f["compared"] else []), "largest difference",
             "at [row, column]", ".text form", "shape"], [
                [esc(r["name"]), num(r["rel_mse"]), num(r["sqnr"], "%.2f"),
                 ("%.2f%s" % (r["over_median"], " (!)" if r["over_median"] >= 2 else ""),
                  "no" if r["over_median"] >= 2 else "") if r["over_median"] else "", *more(r), num(r["max_err"]),
                 str(r["max_at"]), marked(f, r["form"]), str(r["shape"])] for r in shown])


def outputs_of(f: Json) -> str:
    """What calibrating gained in the outputs of layers."""
    c = (f["made"] or {}).get("calibrate")
    rows = [r for r in f["weights"] if "outputs" in r]
    if not c:
        return ""

    def gain(of: Sequence[Json]) -> Tuple[float, float, float]:
        before, after = (mean_of([(r["outputs"][k], product(r["shape"])) for r in of]) or 0.0 for k in ("rounded",
            "calibrated"))
        return before, after, after / before if before > 0 else 1.0
    text = section("outputs", "Gain of calibrating") + \
        "<p>Calibrated with <b>%s</b>%s: %d of %d quantized weights. The error is that in a layer's outputs on " \
        "these inputs, " \
        "squared, over the outputs' squares: <i>rounded</i> is what searched scales and codes rounded to nearest " \
        "leave, " \
        "<i>calibrated</i> what is in the files, <i>left over</i> their quotient. Means count each matrix by its " \
        "size.</p>\n" % (
            esc(c.get("hessians") or c["text"]), "" if c.get("hessians") else ", %d tokens in windows of %d" % (
                c["tokens"], c["context"]), len(rows), len(f["weights"]))
    if not rows:
        return text
    kinds = [(k, [r for r in rows if r["kind"] == k]) for k in dict.fromkeys(k["kind"] for k in f["kinds"])]
    kinds = [(k, of) for k, of in kinds if of]
    text += "<p>All together: %.3g rounded, %.3g calibrated, %.2f left over.</p>\n" % gain(rows)
    inside = []
    for i, (k, of) in enumerate(kinds[:40]):
        share = gain(of)[2]
        inside += [label(0, 34 * i + 13, "%s: %.0f%%" % (esc(k), 100 * share), names="ink"),
                   rect("fill s0", 0, 34 * i + 17, min(100, 100 * share), 12), rect("frame", 0, 34 * i + 17, 100, 12)]
    text += "<figure><figcaption>What is left of the error in outputs, by kind; the frame is all of it" \
        "</figcaption>\n%s" \
        "</figure>\n" % svg(34.0 * min(40, len(kinds)), "share of the error in outputs that is left; the numbers are "
            "in the "
                            "table", "\n".join(inside))
    text += table([".name kind", "rounded", "calibrated", "left over", "weights"], [
        [esc(k), *("%.3g" % v for v in gain(of)[:2]), "%.2f" % gain(of)[2], str(len(of))] for k, of in kinds])
    if len(rows) > 2000:
        return text + "<p>The %d weights are in <code>--json</code>.</p>\n" % len(rows)
    return text + folded("The numbers, weight by weight", table([".name weight", "rounded", "calibrated", "left over"],
        [
        [esc(r["name"]), *("%.3g" % v for v in gain([r])[:2]), "%.2f" % gain([r])[2]] for r in rows]))


def bins_of(values: Sequence[float]) -> List[float]:
    """16 codes as they are; 256 in 17 bins of 15, the first with -128."""
    if len(values) == 16:
        return list(values)
    return [sum(values[0 if i == 0 else 1 + 15 * i:16 + 15 * i]) for i in range(17)]


def codes_of(f: Json, out: Output) -> str:
    """How often codes occur, beside what normal weights would give."""
    text = section("codes", "Codes")
    if out.codes is None:
        return text + "<p>Not counted.</p>\n"
    text += "<p>How often each code occurs among the quantized weights (bars), and how often it would if weights " \
        "were normal " \
        "and scales the largest value of their block or row (dashed line); searched scales differ from those. The " \
        "entropy " \
        "says how many of a code's bits carry anything.</p>\n"
    drawn, tables = [], ""
    for i, x in enumerate(f["forms"]):
        four, total = is_4_bit(x["scheme"]), sum(x["codes"]) or 1
        first = 0 if x["scheme"] in ("nf4", "fp4") else -8
        names = [str(first + k) for k in range(16)] if four else [str(15 * k - 120) for k in range(17)]
        expected = bins_of(x["expected"]) if x["expected"] else None
        caption = "<b>%s</b>: entropy %.3f of %d bits%s" % (
            esc(x["form"]), x["entropy"], 4 if four else 8,
            "; %.2f%% of the codes differ from those of normal weights" % (100 * x["distance"]) if expected else "")
        shares = bins_of([c / total for c in x["codes"]])
        words = "code %s: %.2f%%" if four else "around %s: %.2f%%"
        drawn.append("<figure><figcaption>%s</figcaption>\n%s<p class=\"soft\">%s</p></figure>\n" % (caption, histogram(
            "share of each code; the numbers are in the table below", shares, names, i, expected, 170, words),
            "code" if four else "middle of 15 codes"))
        small: List[str] = []
        lines: List[Tuple[str, Sequence[float]]] = [("<b>all weights</b>", shares)]
        lines += [("normal weights", expected)] if expected else []
        for k in [k for k in f["kinds"] if k["form"] == x["form"]][:100]:
            of = bins_of([c / (sum(k["codes"]) or 1) for c in k["codes"]])
            lines.append((esc(k["kind"]), of))
            if len(small) < 24:
                small.append("<figure><figcaption>%s</figcaption>\n%s</figure>\n" % (esc(k["kind"]), histogram(
                    "share of each code; the numbers are in the table below", of, names, i, expected, 110, words)))
        heads = names if four else ["%d to %d" % (15 * k - 127 if k else -128, 15 * k - 113) for k in range(17)]
        most = max(max(shares), 1e-9)
        tables += folded("%s kind of layer, in drawings and percent" % (
            esc(x["form"]) + ": by" if len(f["forms"]) > 1 else "By"),
            '<div class="grid">%s</div>\n' % "".join(small) + table(
                ["code", *heads], [[name, *(("%.2f" % (100 * v), "h%d" % min(9, round(9 * v / most))) for v in values)]
                                   for name, values in lines]))
    return text + '<div class="grid large">\n%s</div>\n' % "".join(drawn) + tables


def left_of(f: Json) -> str:
    """What was not quantized, and why."""
    return section("left", "Not quantized, and why") + (table(
        ["what", ".text why", "tensors", "weights", "bytes", ".name such as"], [
            [esc(x["role"]), esc(x["why"]), str(x["tensors"]), count(x["elements"]), size(x["bytes"]),
            esc(x["example"])]
            for x in f["not_quantized"]]) or "<p>Nothing was left: every tensor is a quantized weight or belongs to "
            "one.</p>\n")


def eval_of(f: Json, eval_file: Optional[StrPath]) -> str:
    """Perplexity, and how far the answers are from those of the source."""
    e, text = f["eval"], section("perplexity", "Perplexity and KL divergence")
    if not e:
        return text + "<p><b>Not measured.</b> For a language model <code>qconv report OUT --against MODEL --text " \
            "FILE</code> " \
            "measures it, or <code>--eval eval.json</code> takes up what <code>qconv eval OUT --against MODEL " \
            "--text FILE " \
            "--json &gt; eval.json</code> found before.</p>\n"
    text += "<p>Over %s: %s tokens read with the tokenizer <b>%s</b>, in %s windows of at most %s; " \
        "%s predicted, on %s." % (
        esc(e.get("text") or "a text"), count(e["tokens"]), esc(e.get("tokenizer")), count(e["windows"]),
        count(e["context"]),
        count(e["predicted"]), esc(e.get("device")))
    if eval_file:
        text += " This was measured before: it is from the file %s about %s%s, and whether that was this very " \
            "output is not " \
            "checked." % (esc(os.fspath(eval_file)), esc(e.get("path")), " against " + esc(e["against"])
                if e["against"] else "")
    text += " The number after &#177; is one standard error.</p>\n"
    rows = [("perplexity", "perplexity", "perplexity_error", 1.0, "", "of the quantized model; lower is better")]
    if e["against"]:
        rows += [("perplexity of the source", "base_perplexity", "base_perplexity_error", 1.0, "",
                  "the same text, the model before quantizing"),
                 ("difference", "difference", "difference_error", 1.0, "",
                  "more is worse; the standard error is that of paired tokens"),
                 ("KL divergence, mean", "kl_mean", "kl_error", 1.0, " nats",
                  "how far the predictions are from those of the source; 0 means that they are equal"),
                 ("KL divergence, median", "kl_median", "", 1.0, " nats", "of the tokens"),
                 ("KL divergence, 99%", "kl_99", "", 1.0, " nats", "one token of a hundred is further off"),
                 ("KL divergence, largest", "kl_max", "", 1.0, " nats", "of all tokens"),
                 ("same first choice", "top1", "top1_error", 100.0, "%", "tokens for which both would say the same"),
                 ("difference in probability", "probability_rms", "", 100.0, "%",
                  "of the right token, root mean square, in percentage points")]
        spots = [(name, e.get(key)) for name, key in (("median", "kl_median"), ("mean", "kl_mean"), ("99%", "kl_99"),
                                                      ("largest", "kl_max"))]
        known = [(name, v) for name, v in spots if v and v > 0]
        axis = Axis([v for _, v in known] + [min((v for _, v in known), default=1.0) / 4])
        if known:
            inside = [line("axis", 0, 100, 40, 40)]
            inside += [label(100 * axis.share(v), 57, "%.3g" % v, "middle") + line(
                "axis", 100 * axis.share(v), 100 * axis.share(v), 40, 44) for v in axis.ticks()]
            inside += ['<circle class="fill s0" cx="%.2f%%" cy="40" r="5"><title>%s: %.3g nats</title></circle>' % (
                100 * axis.share(v), name, v) + label(100 * axis.share(v), 28 if i % 2 else 12, name, "end"
                                                      if axis.share(v) > 0.9 else "middle", "ink") +
                       line("rule", 100 * axis.share(v), 100 * axis.share(v), 30 if i % 2 else 16, 35)
                       for i, (name, v) in enumerate(known)]
            text += "<figure><figcaption>KL divergence of the tokens, in nats%s</figcaption>\n%s</figure>\n" % (
                ", on a logarithmic axis" if axis.log else "", svg(62, "KL divergence: median, mean, 99% and largest; "
                "the "
                                                                   "numbers are in the table", "\n".join(inside)))
    return text + table(["measure", "value", ".text what it is"], [
        [name, ("%.5g" % (by * e[key]) + (" &#177; %.2g" % (by * e[error]) if error and e.get(error) else "") + unit)
         if e.get(key) is not None else "not known", meaning] for name, key, error, by, unit, meaning in rows]) + (
             "" if e["against"] else "<p>There is nothing to compare with; with <code>--against MODEL</code> the "
             "source is "
             "read as well.</p>\n")


def made_of(f: Json) -> str:
    """How it was made, and how to check it."""
    made, text = f["made"], section("made", "How it was made, and how to check it")
    if made:
        text += "<p>Made by qconv %s with this command, as far as the manifest has the options:</p>\n" \
            "<pre>%s</pre>\n" % (
            esc(made["qconv_version"]), esc(made["command_line"])) + "<h3>Source files</h3>\n" + table(
                [".name file", "bytes", ".text XXH3-128 of its header"], [
                    [esc(x["name"]), size(x["bytes"]), "<code>%s</code>" % esc(x["header_xxh3_128"])]
                    for x in made["sources"]])
        text += "<p>The manifest, qconv.json, has the hash of every source tensor and of every byte written.</p>\n"
    else:
        text += "<p>Not known: there is no manifest.</p>\n"
    return text + "<h3>Commands</h3>\n<pre>%sqconv verify OUT --against MODEL\nqconv eval OUT --against MODEL " \
        "--text FILE " \
        "--json &gt; eval.json\nqconv validate OUT --against MODEL --json &gt; validate.json\nqconv report OUT " \
        "--against MODEL " \
        "--eval eval.json --validate validate.json --html report.html</pre>\n" % ("qconv verify OUT\n" if made else "")


def output_page(f: Json, out: Output, eval_file: Optional[StrPath] = None) -> str:
    """The page of an output."""
    return document("qconv report: " + out.path, head_of(f, out) + size_of(f, out) + memory_of(f, out) + error_of(f) +
                    layers_of(f) + worst_of(f) + outputs_of(f) + codes_of(f, out) + left_of(f) + eval_of(f, eval_file) +
                    (section("speed", "Products and their speed") + validation_of(f["validation"]) if f["validation"]
                    else "") +
                    made_of(f))


# ---- the command --------------------------------------------------------------------------------------------------

def is_answer(path: StrPath) -> bool:
    """Whether it is a file of JSON and no output."""
    try:
        with open(path, "rb") as f:
            return f.read(1) == b"{"
    except OSError:
        return False


def page_of(path: StrPath) -> Tuple[Json, str]:
    """What `plan`, `validate` or `plan-training` wrote with --json, and its page."""
    value = read_answer(path, ["plan", "validate", "plan-training"])
    try:
        if value["command"] == "validate":
            return value, validation_page(value)
        return value, training_page(value) if "settings" in value else plan_page(value)
    except UNEXPECTED as error:
        raise InputError("%s: a member of the answer is missing or is not what 'qconv %s --json' writes: %s %s" % (
            os.fspath(path), value["command"], type(error).__name__, error)) from None


def check_target(target: str, read: Sequence[Optional[StrPath]]) -> None:
    """Refuses a page that would take the place of a folder, a device, or a file that is read. Of what lies in OUT and
    MODEL only a page may be replaced."""
    folder = os.path.dirname(target) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError("--html: '%s': there is no folder '%s'" % (target, folder))
    if not os.path.lexists(target):
        return
    mode = os.stat(target).st_mode if os.path.exists(target) else stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise UsageError("--html: '%s': expected a file, found a %s" % (
            target, "folder" if stat.S_ISDIR(mode) else "device or a pipe"))
    for path in (os.fspath(p) for p in read if p):
        inside = [path]
        if os.path.isdir(path):
            inside = [os.path.join(path, n) for n in os.listdir(path) if not n.endswith(".html")]
        if any(os.path.exists(p) and os.path.samefile(p, target) for p in inside):
            raise UsageError("--html: '%s' is only read: it is a file of %s" % (target, path))


def write_page(target: str, text: str) -> None:
    """Writes the page whole or not at all."""
    mask = os.umask(0)
    os.umask(mask)
    handle, name = tempfile.mkstemp(prefix=".qconv-", dir=os.path.dirname(target) or ".")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(text.encode())
            os.fchmod(f.fileno(), 0o666 & ~mask)
            f.flush()
            os.fsync(f.fileno())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def report(path: StrPath, against: Optional[StrPath] = None, *, html: Optional[StrPath] = None,
        lora: Sequence[str] = (),
           text: Optional[StrPath] = None, eval: Optional[StrPath] = None, validate: Optional[StrPath] = None,
           progress: Watcher = None, **options: Any) -> Report:
    """Tells what became of the output `path`: sizes, errors, codes, and with `against`, `text`, `eval` and `validate`
    what those find. Or draws the file `path` that `plan`, `validate` or `plan_training` wrote as JSON.

    `json` of what comes back are the facts, `html` is the page, which also goes to the file `html`. `eval` and
    `validate` name files of earlier runs. Raises CheckError, with the report as its `result`, where the output is
    damaged or was not made from `against`; the page is written all the same."""
    if html is not None:
        check_target(os.fspath(html), [path, against, text, eval, validate, options.get("tokenizer"), *lora])
    trouble = ""
    if is_answer(path):
        if against or text or eval or validate:
            raise UsageError("%s is an answer of qconv, and its page takes nothing else" % os.fspath(path))
        found, page = page_of(path)
    else:
        if text and eval:
            raise UsageError("text and eval do not go together: a file of eval has its own text")
        found, out = facts(path, against, lora=lora, text=text, eval_file=eval, validate_file=validate,
            progress=progress,
                           **options)
        try:
            page, trouble = output_page(found, out, eval), out.trouble
        except UNEXPECTED as error:
            given = [os.fspath(x) for x in (eval, validate) if x]
            if not given:
                raise
            raise InputError("%s: not what qconv writes with --json: %s" % (" or ".join(given), error)) from None
    if html is not None:
        write_page(os.fspath(html), page)
    result = Report(json=found, html=page)
    if trouble:
        raise CheckError(trouble, result)
    return result


def main(argv: Sequence[str]) -> None:
    """`python -m qconv report ARGUMENTS`."""
    p = Parser("report", "Write one HTML page about the output OUT, or about what plan, validate or plan-training "
        "wrote with "
               "--json to FILE.")
    p.add_argument("path", metavar="OUT|FILE.json")
    p.add_argument("--against", metavar="MODEL", help="the checkpoint that OUT was made from: measures errors against "
        "it")
    p.add_argument("--lora", metavar="ADAPTER[:SCALE]", action="append", default=[],
                   help="with --against: an adapter that OUT was made with; may be repeated")
    p.add_argument("--text", metavar="FILE",
        help="measure perplexity and, with --against, KL divergence over this text")
    for name, meta, what in (("tokenizer", "PATH", "a tokenizer.json, or a directory that has one"),
                             ("image-states", "FILE", "states of images that the text's sequences see"),
                             ("context", "TOKENS", "length of the windows that the text is cut into"),
                             ("max-tokens", "N", "read at most this many tokens"),
                             ("device", "DEVICE", "where to compute: auto, cpu, cuda or cuda:0,2")):
        p.add_argument("--" + name, metavar=meta, help="with --text: " + what)
    p.add_argument("--eval", metavar="FILE", help="include the result of an earlier 'qconv eval --json'")
    p.add_argument("--validate", metavar="FILE", help="include the result of an earlier 'qconv validate --json'")
    p.add_argument("--threads", metavar="N", help="use this many threads")
    p.add_argument("--html", metavar="FILE", help="write the page to a file; default: standard output")
    p.add_argument("--json", action="store_true", help="write the same facts as one JSON object to standard output")
    p.add_argument("-q", "--quiet", action="store_true", help="show neither progress nor notes")
    o = p.parse_args(list(argv))
    of_text = {k: v for k in ("tokenizer", "image_states", "context", "max_tokens", "device")
               for v in [getattr(o, k)] if v is not None}
    if of_text and not o.text:
        p.error("--%s needs --text" % list(of_text)[0].replace("_", "-"))
    if o.text and o.eval:
        p.error("--text does not go with --eval")
    if o.lora and not o.against:
        p.error("--lora needs --against")
    if not o.json and not o.html and sys.stdout.isatty():
        raise UsageError("the page would be written to a terminal; expected --html FILE, or standard output led to a "
            "file "
                         "('> report.html')")

    def warn(message: Any, *_: Any, **__: Any) -> None:
        print("qconv: warning: %s" % message, file=sys.stderr)
    failed: Optional[Error] = None
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        setattr(warnings, "showwarning", warn)
        try:
            result: Optional[Result] = report(
                o.path, o.against, html=o.html, lora=o.lora, text=o.text, eval=o.eval, validate=o.validate,
                threads=o.threads,
                progress=True if sys.stderr.isatty() and not o.quiet else None, **of_text)
        except CheckError as error:
            result, failed = error.result, error
            if not isinstance(result, Report):
                raise
    assert isinstance(result, Report)
    if o.html and not o.quiet:
        print("qconv: the page is in %s" % o.html, file=sys.stderr)
    if o.json or not o.html:
        text = json.dumps(result.json, indent=2) + "\n" if o.json else result.html
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.flush()
    if failed:
        raise failed
