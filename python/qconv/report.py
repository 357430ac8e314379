"""`qconv report`: one HTML page about an output, and the same as JSON.

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
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ._command import Parser, warnings_said, whole
from ._folders import write_text
from ._program import StrPath
from ._report_draw import (MARKS, Axis, Cell, cards, count, document, esc, folded, heat_map, keys, num, section, size,
                           stacked, table)
from ._report_facts import Json, Output, Watcher, decibels, facts, mean_of
from .errors import CheckError, InputError, UsageError
from .results import Result

# What a member that is missing or of another kind ends in.
UNEXPECTED = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Report(Result):
    """What `report` returns: `json` are the facts, as `qconv report --json` prints them, and `html` is the page."""
    html: str = field(repr=False)


# ---- the page of an output ----------------------------------------------------------------------------------------

def bits_line(n: int, elements: int) -> str:
    return num(n * 8.0 / elements, "%.3f") if elements else ""


def verdict_of(f: Json, out: Output) -> str:
    """What the comparison or the hashes say of the output."""
    c, against = f["compared"], esc(f["against"])
    if c and c["faults"]:
        faults = [r for r in (out.compared or {"rows": []})["rows"] if r["fault"]][:6]
        listed = "".join(f"<li>{esc(r['name'])}: {esc(r['fault'])}</li>\n" for r in faults)
        faults_of = f'{c["faults"]:d} fault{"s" * (c["faults"] > 1)}'
        return f'<p class="no"><b>This is not {against}, converted: {faults_of}.</b> ' \
            f'{esc(c["first_what"])}: {esc(c["first_why"])}.</p>\n<ul>\n{listed}</ul>\n<p>All of them: ' \
            "<code>qconv verify OUT --against MODEL</code>.</p>\n"
    if c:
        return f'<p class="yes"><b>Compared with {against}</b>: nothing is missing. Tensors equal bit for bit: ' \
            f'{c["equal"]:d}; equal after a cast: {c["cast"]:d}; quantized with no more error than their form ' \
            f'leaves: {c["quantized"]:d}{"; all hashes are right" * c["hashes_checked"]}.</p>\n'
    if out.trouble:
        return f'<p class="no"><b>The output is damaged:</b> {esc(out.trouble)}.</p>\n'
    if f["made"]:
        return '<p class="yes">Every byte is what was written: all hashes are right.</p>\n'
    return ""


def head_of(f: Json, out: Output) -> str:
    """What the output is, what was saved, and what is wrong with it."""
    s, made, e, weights = f["sizes"], f["made"], f["eval"], f["weights"]
    model = f"A model of type <b>{esc(f['model_type'])}</b>, " if f["model_type"] else ""
    forms = "; ".join(f"<b>{esc(x['form'])}</b> ({x['weights']:d})" for x in f["forms"])
    text = f"<h1>{esc(f['path'])}</h1>\n<p>{model}{count(s['elements'])} weights; {len(weights)} weight " \
        f"{'matrix is' if len(weights) == 1 else 'matrices are'} quantized: {forms}."
    if made and made["scale"]:
        what = "the largest value of a block" if made["scale"] == "absmax" else "those of least squared error"
        text += f" Scales: <b>{esc(made['scale'])}</b>, {what}."
    text += f" Made by qconv {esc(made['qconv_version'])}, <code>--to {esc(made['to'])}</code>." if made else ""
    text += "</p>\n"
    text += "".join(f'<p class="no"><b>Note:</b> {esc(n)}</p>\n' for n in out.seen["warnings"])
    if not made:
        text += "<p><b>Note:</b> there is no manifest (qconv.json), so this page knows neither the source nor the " \
            "options. Errors come from <code>--against</code> only.</p>\n"
    links = {"size": "Size", "memory": "Memory", "error": "Error", "layers": "Layers", "worst": "Worst",
             "outputs": "Outputs", "left": "Not quantized", "perplexity": "Perplexity", "made": "How made"}
    if not (made and made.get("calibrate")):
        del links["outputs"]
    text += verdict_of(f, out) + "<nav>%s</nav>\n" % "".join(
        f'<a href="#{name}">{title}</a>' for name, title in links.items())
    before = s["source_file_bytes"] or s["unquantized_bytes"]
    saved = f", {100 * s['file_bytes'] / before:.1f}% of {size(before)}" if before else ""
    mean = mean_of([(r["rel_mse"], math.prod(r["shape"])) for r in weights if r["rel_mse"] is not None])
    perplexity = "perplexity" + (", source " + num(e["base_perplexity"], "%.4g") if e and e["against"] else "")
    return text + cards([
        (size(s["file_bytes"]), "on disk" + saved + " unquantized" * bool(before and not s["source_file_bytes"])),
        (size(s["tensor_bytes"]), "of tensors in memory"),
        (num(s["bits_per_weight"], "%.3f"), "bits per weight, all weights") if s["bits_per_weight"] else None,
        (num(mean), "relative error of weights (MSE), mean") if mean is not None else None,
        (num(decibels(mean), "%.2f dB"), "signal to quantization noise") if mean else None,
        (num(e["perplexity"], "%.4g"), perplexity) if e else ("not measured", "perplexity and KL divergence"),
        (num(e["kl_mean"], "%.3g nats"), "KL divergence to the source, mean") if e and e["against"] else None])


def size_of(f: Json, out: Output) -> str:
    """Sizes before and now, and how tensors are stored."""
    s, made, source = f["sizes"], out.seen["manifest"], f["sizes"]["source_file_bytes"]
    most = max(s["unquantized_bytes"], s["tensor_bytes"], 1)
    names = ["codes", "scales and tables", "not quantized"]
    now = [s["quantized_bytes"] - s["scale_bytes"], s["scale_bytes"], s["tensor_bytes"] - s["quantized_bytes"]]
    text = section("size", "Size")
    text += stacked(f"Before, in the dtypes it had: <b>{size(s['unquantized_bytes'])}</b>",
                    list(zip(names, [0, 0, s["unquantized_bytes"]])), most)
    text += stacked(f"Now, in memory: <b>{size(s['tensor_bytes'])}</b>", list(zip(names, now)), most) + keys(names)
    text += f"<p>The files of the source have {size(source)}; these" if source else \
        "<p>The size of the source's files is not known. These"
    text += f" have {size(s['file_bytes'])} on disk"
    text += ", compressed with Zstandard." if made and made["compress"] == "zstd" else "."
    if source and source >= s["file_bytes"]:
        text += f" Saved: <b>{size(source - s['file_bytes'])} ({100 - 100 * s['file_bytes'] / source:.1f}%)</b>."
    return text + "</p>\n" + table(["stored as", "tensors", "weights", "bytes", "bits per weight"], [
        ["not quantized" if name == "plain" else esc(name), str(x["tensors"]), count(x["weights"]), size(x["bytes"]),
         bits_line(x["bytes"], x["weights"])] for name, x in out.seen["totals"]["by_scheme"].items()])


def memory_of(f: Json, out: Output) -> str:
    text, p, total = section("memory", "Memory per device"), out.manifest.get("placement"), f["sizes"]["tensor_bytes"]
    if not f["devices"] or not p:
        return text + f"<p>All tensors together: <b>{size(total)}</b>. They were not placed on devices; <code>qconv " \
            "--vram</code> does that, and <code>qconv plan</code> adds the KV cache and what else a device holds.</p>\n"
    most = max([d["tensor_bytes"] for d in f["devices"]] + [1])
    shares = ["%.1f%%" % (100 * d["tensor_bytes"] / (total or 1)) for d in f["devices"]]
    text += f"<p>Placed for <code>--vram {esc(p['vram'])}</code>, of which {100 * p['margin']:.3g}% may be used, for " \
        f"a context of {p['context']:d} tokens and a batch of {p['batch']:d}. What is shown are the weights; <code>" \
        "qconv plan</code> adds the KV cache and what else a device holds.</p>\n"
    text += "".join(stacked(f"<b>{esc(d['name'])}</b>: {size(d['tensor_bytes'])}, {share}",
                            [("weights", d["tensor_bytes"])], most) for d, share in zip(f["devices"], shares))
    return text + table(["device", "weights", "share", "files, decompressed"], [
        [esc(d["name"]), size(d["tensor_bytes"]), share, size(d["shard_bytes"])]
        for d, share in zip(f["devices"], shares)])


def marks_of(f: Json) -> Dict[str, str]:
    return {x["form"]: MARKS[i % len(MARKS)] for i, x in enumerate(f["forms"])}


def marked(f: Json, form: str) -> str:
    """A form with its mark, where there are several."""
    return f"{marks_of(f)[form]} {esc(form)}" if len(f["forms"]) > 1 else ""


def error_of(f: Json) -> str:
    marks, forms, weights = marks_of(f), f["forms"], f["weights"]
    known = sum(r["rel_mse"] is not None for r in weights)
    origin = {"source": f"These were measured now, against <b>{esc(f['against'])}</b>.",
              "manifest": "These are from the manifest, as convert measured them.",
              "none": "There are none: OUT has no manifest. <code>--against MODEL</code> measures them."}
    text = section("error", "Error of the weights") + \
        "<p>Relative MSE of a weight matrix: the sum of squared differences to the source, over the sum of squares " \
        "of the source. 0.01 is an error of 10% in size, 20 dB of signal to quantization noise (SQNR). Means count " \
        f"each matrix by its size. {origin[f['errors_from']]}</p>\n"
    if f["errors_from"] != "none" and known < len(weights):
        text += f"<p><b>Note:</b> the error of {len(weights) - known} of {len(weights)} weights is not known: " \
            f"{esc(f['errors_missing'])}.</p>\n"
    text += table(["form", "mean", "SQNR of mean, dB", "median", "least", "largest", "weights", "bits per weight"], [
        [f"{marks[x['form']]} {esc(x['form'])}", num(x["mean"]), num(decibels(x["mean"]), "%.2f"), num(x["median"]),
         num(x["least"]), num(x["most"]), str(x["weights"]), bits_line(x["bytes"], x["elements"])] for x in forms])
    text += "<h3>By kind of layer</h3>\n" + table(
        ["kind", "mean", "SQNR, dB", "largest", ".name in", ".text form", "weights", "bits per weight"], [
            [esc(k["kind"]), num(k["mean"]), num(decibels(k["mean"]), "%.2f"), num(k["most"]),
             esc(k["most_of"] or "") if k["weights"] > 1 else "", marked(f, k["form"]), str(k["weights"]),
             bits_line(k["bytes"], k["elements"])] for k in f["kinds"][:200]])
    if len(f["kinds"]) > 200:
        text += f"<p>{len(f['kinds']) - 200} more kinds are in <code>--json</code>.</p>\n"
    return text


def layers_of(f: Json) -> str:
    """Errors over the layers: a map of all, a drawing for each kind, and the numbers."""
    text, forms = section("layers", "Error over the layers"), [x["form"] for x in f["forms"]]
    rows = [r for r in f["weights"] if r["rel_mse"] is not None and r["layer"] is not None]
    if not rows:
        return text + "<p>No weight has both an error and a layer number in its name.</p>\n"
    layers, drawn_kinds = sorted({r["layer"] for r in rows}), {r["kind"] for r in rows}
    series = [k for k in dict.fromkeys(k["kind"] for k in f["kinds"]) if k in drawn_kinds] \
        if len(drawn_kinds) * len(layers) <= 1 << 18 else []
    if not series or len(series) > 64 and len(series) > len(rows) / 2:
        return text + "<p>There are too many kinds and layers to draw.</p>\n"
    cells: Dict[Tuple[str, int], List[Json]] = {}
    for r in rows:
        cells.setdefault((r["kind"], r["layer"]), []).append(r)
    means = {key: mean_of([(r["rel_mse"], math.prod(r["shape"])) for r in of]) or 0.0 for key, of in cells.items()}
    axis, across, titled = Axis(r["rel_mse"] for r in rows), [str(n) for n in layers], len(cells) <= 1500
    shown, marks = series[:24], marks_of(f)
    text += "<p>Relative error (MSE) of each layer; a stronger colour is a larger error, on a " \
        f"{'logarithmic' if axis.log else 'linear'} scale. The largest has a frame.</p>\n"
    text += heat_map("relative error by kind and layer; the numbers are in the table below", axis, across,
                     [(esc(k), [means.get((k, n)) for n in layers]) for k in shown], titled)
    if len(series) * len(layers) > 6000:
        return text + f"<p>The {len(cells)} numbers are in <code>--json</code>.</p>\n"

    def cell(k: str, n: int) -> Cell:
        of = cells.get((k, n))
        if not of:
            return ""
        mark = "" if len(forms) == 1 else " *" if len({r["form"] for r in of}) > 1 else " " + marks[of[0]["form"]]
        return "%.3g%s" % (means[k, n], mark), "h%d" % round(9 * axis.share(means[k, n]))
    numbers = table(["layer", *map(esc, series)], [[str(n), *(cell(k, n) for k in series)] for n in layers])
    return text + folded("The numbers, layer by layer", numbers + '<p class="soft">A stronger colour is a larger '
                         "error. Where a layer has several weights of a kind, as with experts, it is their mean; * "
                         "where their forms differ.</p>\n")


def worst_of(f: Json) -> str:
    known = sorted((r for r in f["weights"] if r["rel_mse"] is not None), key=lambda r: -float(r["rel_mse"]))
    text, compared = section("worst", "Worst weights"), f["compared"]
    if not known:
        return text + "<p>Not known: no weight has an error.</p>\n"

    def row(r: Json) -> List[Cell]:
        far = (r["over_median"] or 0) >= 2
        times: Cell = ("%.2f%s" % (r["over_median"], " (!)" if far else ""), "no" if far else "") \
            if r["over_median"] else ""
        expected = "%.3f" % (r["rel_mse"] / r["expected_mse"] if r["expected_mse"] else 1.0) if compared else ""
        return [esc(r["name"]), num(r["rel_mse"]), num(r["sqnr"], "%.2f"), times, expected,
                str(r["clipped"]) if compared else "", num(r["max_err"]), str(r["max_at"]), marked(f, r["form"]),
                str(r["shape"])]
    shown = known[:20]
    return text + f"<p>The {len(shown)} of {len(known)} with the largest relative error, and the largest difference " \
        "of a single value, in the unit of the weights, with its place.</p>\n" + table(
            [".name weight", "relative MSE", "SQNR, dB", "times the form's median", "times what absmax scales leave",
             "clipped values", "largest difference", "at [row, column]", ".text form", "shape"],
            [row(r) for r in shown])


def outputs_of(f: Json) -> str:
    """What calibrating gained in the outputs of layers."""
    c = (f["made"] or {}).get("calibrate")
    rows = [r for r in f["weights"] if "outputs" in r]
    if not c:
        return ""

    def gain(of: Sequence[Json]) -> Tuple[float, float, float]:
        """Errors rounded and calibrated, and their quotient."""
        before, after = (mean_of([(r["outputs"][k], math.prod(r["shape"])) for r in of]) or 0.0
                         for k in ("rounded", "calibrated"))
        return before, after, after / before if before > 0 else 1.0

    def cells(of: Sequence[Json]) -> List[str]:
        return ["%.3g" % gain(of)[0], "%.3g" % gain(of)[1], "%.2f" % gain(of)[2]]
    windows = "" if c.get("hessians") else f", {c['tokens']:d} tokens in windows of {c['context']:d}"
    text = section("outputs", "Gain of calibrating") + \
        f"<p>Calibrated with <b>{esc(c.get('hessians') or c['text'])}</b>{windows}: {len(rows)} of " \
        f"{len(f['weights'])} quantized weights. The error is that in a layer's outputs on these inputs, squared, " \
        "over the outputs' squares: <i>rounded</i> is what searched scales and codes rounded to nearest leave, " \
        "<i>calibrated</i> what is in the files, <i>left over</i> their quotient. Means count each matrix by its " \
        "size.</p>\n"
    if not rows:
        return text
    kinds = {k["kind"]: [r for r in rows if r["kind"] == k["kind"]] for k in f["kinds"]}
    kinds = {k: of for k, of in kinds.items() if of}
    text += "<p>All together: %s rounded, %s calibrated, %s left over.</p>\n" % tuple(cells(rows))
    heads = ["rounded", "calibrated", "left over"]
    text += table([".name kind", *heads, "weights"], [[esc(k), *cells(of), str(len(of))] for k, of in kinds.items()])
    if len(rows) > 2000:
        return text + f"<p>The {len(rows)} weights are in <code>--json</code>.</p>\n"
    return text + folded("The numbers, weight by weight",
                         table([".name weight", *heads], [[esc(r["name"]), *cells([r])] for r in rows]))


def left_of(f: Json) -> str:
    return section("left", "Not quantized, and why") + (table(
        ["what", ".text why", "tensors", "weights", "bytes", ".name such as"], [
            [esc(x["role"]), esc(x["why"]), str(x["tensors"]), count(x["elements"]), size(x["bytes"]),
             esc(x["example"])]
            for x in f["not_quantized"]]) or
        "<p>Nothing was left: every tensor is a quantized weight or belongs to one.</p>\n")


# Of the evaluation: what it is called, its members with the standard error, factor and unit, and what it means.
PERPLEXITY = ("perplexity", "perplexity", "perplexity_error", 1.0, "", "of the quantized model; lower is better")
BESIDE_SOURCE = (
    ("perplexity of the source", "base_perplexity", "base_perplexity_error", 1.0, "",
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
     "of the right token, root mean square, in percentage points"))


def eval_of(f: Json, eval_file: Optional[StrPath]) -> str:
    """Perplexity, and how far the answers are from those of the source."""
    e, text = f["eval"], section("perplexity", "Perplexity and KL divergence")
    if not e:
        return text + "<p><b>Not measured.</b> For a language model <code>qconv report OUT --against MODEL --text " \
            "FILE</code> measures it, or <code>--eval eval.json</code> takes up what <code>qconv eval OUT --against " \
            "MODEL --text FILE --json &gt; eval.json</code> found before.</p>\n"
    text += f"<p>Over {esc(e.get('text') or 'a text')}: {count(e['tokens'])} tokens read with the tokenizer " \
        f"<b>{esc(e.get('tokenizer'))}</b>, in {count(e['windows'])} windows of at most {count(e['context'])}; " \
        f"{count(e['predicted'])} predicted, on {esc(e.get('device'))}."
    if eval_file:
        against = " against " + esc(e["against"]) if e["against"] else ""
        text += f" This was measured before: it is from the file {esc(os.fspath(eval_file))} about " \
            f"{esc(e.get('path'))}{against}, and whether that was this very output is not checked."
    text += " The number after &#177; is one standard error.</p>\n"
    rows = []
    for name, key, error, by, unit, meaning in (PERPLEXITY, *(BESIDE_SOURCE if e["against"] else ())):
        spread = " &#177; %.2g" % (by * e[error]) if error and e.get(error) else ""
        value = "not known" if e.get(key) is None else "%.5g%s%s" % (by * e[key], spread, unit)
        rows.append([name, value, meaning])
    return text + table(["measure", "value", ".text what it is"], rows) + (
        "" if e["against"] else
        "<p>There is nothing to compare with; with <code>--against MODEL</code> the source is read as well.</p>\n")


def made_of(f: Json) -> str:
    made, text = f["made"], section("made", "How it was made, and how to check it")
    if made:
        text += f"<p>Made by qconv {esc(made['qconv_version'])} with this command, as far as the manifest has the " \
            f"options:</p>\n<pre>{esc(made['command_line'])}</pre>\n<h3>Source files</h3>\n"
        text += table([".name file", "bytes", ".text XXH3-128 of its header"], [
            [esc(x["name"]), size(x["bytes"]), f"<code>{esc(x['header_xxh3_128'])}</code>"] for x in made["sources"]])
        text += "<p>The manifest, qconv.json, has the hash of every source tensor and of every byte written.</p>\n"
    else:
        text += "<p>Not known: there is no manifest.</p>\n"
    return text + "<h3>Commands</h3>\n<pre>" + "qconv verify OUT\n" * bool(made) + \
        "qconv verify OUT --against MODEL\nqconv eval OUT --against MODEL --text FILE --json &gt; eval.json\n" \
        "qconv validate OUT --against MODEL\n" \
        "qconv report OUT --against MODEL --eval eval.json --html report.html</pre>\n"


# ---- the command --------------------------------------------------------------------------------------------------

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


def report(path: StrPath, against: Optional[StrPath] = None, *, html: Optional[StrPath] = None,
           lora: Sequence[str] = (), text: Optional[StrPath] = None, eval: Optional[StrPath] = None,
           progress: Watcher = None, **options: Any) -> Report:
    """Tells what became of the output `path`: sizes, errors, and with `against`, `text` and `eval` what those find.

    `json` of what comes back are the facts, `html` is the page, which also goes to the file `html`. `eval` names a file of
    an earlier run. Raises CheckError, with the report as its `result`, where the output is damaged or was not made from
    `against`; the page is written all the same."""
    if html is not None:
        check_target(os.fspath(html), [path, against, text, eval, options.get("tokenizer"), *lora])
    if text and eval:
        raise UsageError("text and eval do not go together: a file of eval has its own text")
    found, out = facts(path, against, lora=lora, text=text, eval_file=eval, progress=progress, **options)
    try:
        page = document("qconv report: " + out.path, "".join((
            head_of(found, out), size_of(found, out), memory_of(found, out), error_of(found), layers_of(found),
            worst_of(found), outputs_of(found), left_of(found), eval_of(found, eval), made_of(found))))
    except UNEXPECTED as error:
        if not eval:
            raise
        raise InputError("%s: not what qconv writes with --json: %s" % (os.fspath(eval), error)) from None
    if html is not None:
        write_text(os.fspath(html), page)
    result = Report(json=found, html=page)
    if out.trouble:
        raise CheckError(out.trouble, result)
    return result


def main(argv: Sequence[str]) -> None:
    p = Parser("report", "Write one HTML page about the output OUT.")
    add = p.add_argument
    add("path", metavar="OUT")
    add("--against", metavar="MODEL", help="the checkpoint that OUT was made from: measures errors against it")
    add("--lora", metavar="ADAPTER[:SCALE]", action="append", default=[],
        help="with --against: an adapter that OUT was made with; may be repeated")
    add("--text", metavar="FILE", help="measure perplexity and, with --against, KL divergence over this text")
    for name, meta, what in (("tokenizer", "PATH", "a tokenizer.json, or a directory that has one"),
                             ("inputs", "FILE", "states of images that the text's sequences see"),
                             ("context", "TOKENS", "length of the windows that the text is cut into"),
                             ("max-tokens", "N", "read at most this many tokens"),
                             ("device", "DEVICE", "where to compute: auto, cpu, cuda or cuda:0,2")):
        add("--" + name, metavar=meta, help="with --text: " + what)
    add("--eval", metavar="FILE", help="include the result of an earlier 'qconv eval --json'")
    add("--threads", metavar="N", help="use this many threads")
    add("--html", metavar="FILE", help="write the page to a file; default: standard output")
    add("--json", action="store_true", help="write the same facts as one JSON object to standard output")
    add("-q", "--quiet", action="store_true", help="show neither progress nor notes")
    o = p.parse_args(list(argv))
    of_text = {k: v for k in ("tokenizer", "inputs", "context", "max_tokens", "device")
               for v in [getattr(o, k)] if v is not None}
    if of_text and not o.text:
        p.error("--%s needs --text" % list(of_text)[0].replace("_", "-"))
    if o.text and o.eval:
        p.error("--text does not go with --eval")
    if o.lora and not o.against:
        p.error("--lora needs --against")
    if not o.json and not o.html and sys.stdout.isatty():
        raise UsageError("the page would be written to a terminal; expected --html FILE, or standard output led to a "
                         "file ('> report.html')")

    bars = True if sys.stderr.isatty() and not o.quiet else None
    with warnings_said():
        result, failed = whole(Report, lambda: report(
            o.path, o.against, html=o.html, lora=o.lora, text=o.text, eval=o.eval, threads=o.threads,
            progress=bars, **of_text))
    if o.html and not o.quiet:
        print("qconv: the page is in %s" % o.html, file=sys.stderr)
    if o.json or not o.html:
        text = json.dumps(result.json, indent=2) + "\n" if o.json else result.html
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.flush()
    if failed:
        raise failed
