"""`qconv report`: one HTML page about an output, and the same as JSON.

    python -m qconv report out/ --against model/ --html report.html
    qconv.report("out/", against="model/", html="report.html").json["forms"]

First the facts are put together (_report_facts.py); the page and the JSON are two ways to show them. A page is one file
without scripts or anything from outside, well-formed XML, for light and dark, wide and narrow screens and print: tables,
in which a larger error has a stronger colour. Texts of files go through `esc`.
"""
from __future__ import annotations

import html as markup
import json
import math
import os
import re
import stat
import sys
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from ._command import Parser, warnings_said, whole
from ._folders import write_text
from ._program import StrPath, size, version
from .evaluate import evaluate
from ._report_facts import Json, Output, Watcher, decibels, facts, mean_of
from .errors import CheckError, InputError, UsageError
from .results import Result

# What a member that is missing or of another kind ends in.
UNEXPECTED = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)
MARKS = ("&#9679;", "&#9632;", "&#9650;", "&#9670;", "&#9675;", "&#9633;")  # of forms
HEAT = 9  # colours, beside none
with open(os.path.join(os.path.dirname(__file__), "report.css"), encoding="utf-8") as _file:
    STYLE = _file.read()
Cell = Union[str, Tuple[str, str]]  # markup, or markup and the class of its cell


@dataclass(frozen=True)
class Report(Result):
    """What `report` returns: `json` are the facts, as `qconv report --json` prints them, and `html` is the page."""
    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        return '<iframe srcdoc="%s" width="100%%" height="700"></iframe>' % markup.escape(self.html)


# ---- text, numbers and tables -------------------------------------------------------------------------------------


def esc(text: object) -> str:
    """A text of somebody's file as markup: nothing in it ends a tag, an attribute or the document, hides, or turns the
    direction of what follows."""
    return markup.escape(re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f"
                               "\ufeff\ufff9-\uffff\ud800-\udfff\U000e0000-\U000e007f]", "?", str(text)))


def count(n: float) -> str:
    """"1,507,008", or "70.6 billion"."""
    return "{:,}".format(n) if n < 1e7 else "%.3g million" % (n / 1e6) if n < 999.5e6 else "%.4g billion" % (n / 1e9)


def num(v: Optional[float], form: str = "%.3g", unit: str = "") -> str:
    """A number; nothing where it is not known."""
    return "" if v is None or not math.isfinite(v) else form % v + unit


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table, which scrolls beside its first column where it is too wide. A title may begin with the class of its
    column: ".name weight". Columns without anything are left out."""
    parts = [c[1:].split(" ", 1) if c.startswith(".") else ["", c] for c in columns]
    heads: List[Tuple[str, str]] = [(title, names) for names, title in parts]
    cells = [[c if isinstance(c, tuple) else (c, "") for c in row] for row in rows]
    shown = [i for i in range(len(heads)) if any(row[i][0] for row in cells)]

    def tag(kind: str, cell: Tuple[str, str], names: str = "") -> str:
        names = (names + " " + cell[1]).strip()
        return "<%s%s>%s</%s>" % (kind, ' class="%s"' % names if names else "", cell[0], kind)
    lines = ["<tr>%s</tr>" % "".join(tag("th", heads[i]) for i in shown)]
    lines += ["<tr>%s</tr>" % "".join(tag("td", row[i], heads[i][1]) for i in shown) for row in cells]
    return '<div class="scroll"><table>\n%s\n</table></div>\n' % "\n".join(lines) if cells else ""


def section(name: str, title: str, *notes: str) -> str:
    return '<h2 id="%s">%s</h2>\n' % (name, title) + "".join("<p>%s</p>\n" % note for note in notes)


def cards(items: Iterable[Optional[Tuple[str, str]]]) -> str:
    """Boxes with a large number and what it is."""
    return '<div class="cards">%s</div>\n' % "\n".join("<div><b>%s</b>%s</div>" % i for i in items if i)


def document(title: str, body: str) -> str:
    return ('<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"/><meta name="viewport" '
            'content="width=device-width, initial-scale=1"/><meta name="color-scheme" content="light dark"/>'
            "<title>%s</title><style>%s</style></head>\n<body>\n%s<p class=\"soft\">Made by qconv %s.</p>\n</body>\n"
            "</html>\n" % (esc(title), STYLE, body, esc(version())))


# ---- the page of an output ----------------------------------------------------------------------------------------


def bits_line(n: int, elements: int) -> str:
    return num(n * 8.0 / elements, "%.3f") if elements else ""


def mean_error(rows: Sequence[Json]) -> Optional[float]:
    return mean_of([(r["rel_mse"], math.prod(r["shape"])) for r in rows if r["rel_mse"] is not None])


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
    mean = mean_error(weights)
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
    text = f"Of the tensors {size(s['quantized_bytes'] - s['scale_bytes'])} are codes, {size(s['scale_bytes'])} scales and " \
        f"tables, and {size(s['tensor_bytes'] - s['quantized_bytes'])} not quantized; in the dtypes they had, all were " \
        f"{size(s['unquantized_bytes'])}. "
    text += f"The files of the source have {size(source)}; these" if source else \
        "The size of the source's files is not known. These"
    text += f" have {size(s['file_bytes'])} on disk"
    text += ", compressed with Zstandard." if made and made["compress"] == "zstd" else "."
    if source and source >= s["file_bytes"]:
        text += f" Saved: <b>{size(source - s['file_bytes'])} ({100 - 100 * s['file_bytes'] / source:.1f}%)</b>."
    return section("size", "Size", text) + table(["stored as", "tensors", "weights", "bytes", "bits per weight"], [
        ["not quantized" if name == "plain" else esc(name), str(x["tensors"]), count(x["weights"]), size(x["bytes"]),
         bits_line(x["bytes"], x["weights"])] for name, x in out.seen["totals"]["by_scheme"].items()])


def memory_of(f: Json, out: Output) -> str:
    p, total = out.manifest.get("placement"), f["sizes"]["tensor_bytes"]
    if not f["devices"] or not p:
        return section("memory", "Memory per device", f"All tensors together: <b>{size(total)}</b>. They were not placed on "
                       "devices; <code>qconv --vram</code> does that, and <code>qconv plan</code> adds the KV cache and "
                       "what else a device holds.")
    return section("memory", "Memory per device", f"Placed for <code>--vram {esc(p['vram'])}</code>, of which "
                   f"{100 * p['margin']:.3g}% may be used, for a context of {p['context']:d} tokens and a batch of "
                   f"{p['batch']:d}. <code>qconv plan</code> adds the KV cache and what else a device holds.") + table(
        ["device", "weights", "share", "files, decompressed"], [
            [esc(d["name"]), size(d["tensor_bytes"]), "%.1f%%" % (100 * d["tensor_bytes"] / (total or 1)),
             size(d["shard_bytes"])] for d in f["devices"]])


def marks_of(f: Json) -> Dict[str, str]:
    return {x["form"]: MARKS[i % len(MARKS)] for i, x in enumerate(f["forms"])}


def marked(f: Json, form: str) -> str:
    """A form with its mark, where there are several."""
    return f"{marks_of(f)[form]} {esc(form)}" if len(f["forms"]) > 1 else ""


def error_of(f: Json) -> str:
    marks, weights = marks_of(f), f["weights"]
    unknown = sum(r["rel_mse"] is None for r in weights)
    origin = {"source": f"These were measured now, against <b>{esc(f['against'])}</b>.",
              "manifest": "These are from the manifest, as convert measured them.",
              "none": "There are none: OUT has no manifest. <code>--against MODEL</code> measures them."}
    text = section("error", "Error of the weights",
                   "Relative MSE of a weight matrix: the sum of squared differences to the source, over the sum of squares "
                   "of the source. 0.01 is an error of 10% in size, 20 dB of signal to quantization noise (SQNR). Means "
                   f"count each matrix by its size. {origin[f['errors_from']]}")
    if f["errors_from"] != "none" and unknown:
        text += f"<p><b>Note:</b> the error of {unknown} of {len(weights)} weights is not known: " \
            f"{esc(f['errors_missing'])}.</p>\n"
    text += table(["form", "mean", "SQNR of mean, dB", "median", "least", "largest", "weights", "bits per weight"], [
        [f"{marks[x['form']]} {esc(x['form'])}", num(x["mean"]), num(decibels(x["mean"]), "%.2f"), num(x["median"]),
         num(x["least"]), num(x["most"]), str(x["weights"]), bits_line(x["bytes"], x["elements"])] for x in f["forms"]])
    text += "<h3>By kind of layer</h3>\n" + table(
        ["kind", "mean", "SQNR, dB", "largest", ".name in", ".text form", "weights", "bits per weight"], [
            [esc(k["kind"]), num(k["mean"]), num(decibels(k["mean"]), "%.2f"), num(k["most"]),
             esc(k["most_of"] or "") if k["weights"] > 1 else "", marked(f, k["form"]), str(k["weights"]),
             bits_line(k["bytes"], k["elements"])] for k in f["kinds"][:200]])
    if len(f["kinds"]) > 200:
        text += f"<p>{len(f['kinds']) - 200} more kinds are in <code>--json</code>.</p>\n"
    return text


def layers_of(f: Json) -> str:
    """Errors of kinds over the layers, in colours on a logarithmic scale."""
    title, marks = "Error over the layers", marks_of(f)
    cells: Dict[Tuple[str, int], List[Json]] = {}
    for r in f["weights"]:
        if r["rel_mse"] is not None and r["layer"] is not None:
            cells.setdefault((r["kind"], r["layer"]), []).append(r)
    if not cells:
        return section("layers", title, "No weight has both an error and a layer number in its name.")
    layers, kinds = sorted({layer for _, layer in cells}), {kind for kind, _ in cells}
    series = [k for k in dict.fromkeys(k["kind"] for k in f["kinds"]) if k in kinds]
    if len(series) * len(layers) > 6000:
        return section("layers", title, "There are too many kinds and layers to show; <code>--json</code> has them.")
    means = {key: mean_error(of) or 0.0 for key, of in cells.items()}
    above = [math.log(v) for v in means.values() if v > 0]
    low, high = min(above, default=0.0), max(above, default=0.0)

    def cell(k: str, n: int) -> Cell:
        of = cells.get((k, n))
        if not of:
            return ""
        mean, alike = means[k, n], len({r["form"] for r in of}) == 1
        mark = "" if len(marks) == 1 else " " + marks[of[0]["form"]] if alike else " *"
        heat = (math.log(mean) - low) / (high - low) if mean > 0 and high > low else 0.0
        return "%.3g%s" % (mean, mark), "h%d" % round(HEAT * heat)
    return section("layers", title, "Relative error (MSE) of each kind; a stronger colour is a larger error, on a logarithmic "
                   "scale. Where a layer has several weights of a kind, as with experts, it is their mean; * where their "
                   "forms differ.") + table(["layer", *map(esc, series)], (
                       [str(n), *(cell(k, n) for k in series)] for n in layers))


def worst_of(f: Json) -> str:
    known = sorted((r for r in f["weights"] if r["rel_mse"] is not None), key=lambda r: -float(r["rel_mse"]))
    if not known:
        return section("worst", "Worst weights", "Not known: no weight has an error.")

    def row(r: Json) -> List[Cell]:
        far = (r["over_median"] or 0) >= 2
        expected = "%.3f" % (r["rel_mse"] / r["expected_mse"] if r["expected_mse"] else 1.0) if f["compared"] else ""
        return [esc(r["name"]), num(r["rel_mse"]), num(r["sqnr"], "%.2f"),
                (num(r["over_median"] or None, "%.2f") + " (!)" * far, "no" * far), expected,
                str(r["clipped"]) if f["compared"] else "", num(r["max_err"]), str(r["max_at"]), marked(f, r["form"]),
                str(r["shape"])]
    return section("worst", "Worst weights", f"The {len(known[:20])} of {len(known)} with the largest relative error, and the "
                   "largest difference of a single value, in the unit of the weights, with its place.") + table(
        [".name weight", "relative MSE", "SQNR, dB", "times the form's median", "times what absmax scales leave",
         "clipped values", "largest difference", "at [row, column]", ".text form", "shape"], map(row, known[:20]))


def outputs_of(f: Json) -> str:
    """What calibrating gained in the outputs of layers."""
    c = (f["made"] or {}).get("calibrate")
    rows = [r for r in f["weights"] if "outputs" in r]
    if not c:
        return ""

    def gain(of: Sequence[Json]) -> List[str]:
        """Errors rounded and calibrated, and their quotient."""
        before, after = (mean_of([(r["outputs"][k], math.prod(r["shape"])) for r in of]) or 0.0
                         for k in ("rounded", "calibrated"))
        return ["%.3g" % before, "%.3g" % after, "%.2f" % (after / before if before > 0 else 1.0)]
    windows = "" if c.get("hessians") else f", {c['tokens']:d} tokens in windows of {c['context']:d}"
    text = section("outputs", "Gain of calibrating",
                   f"Calibrated with <b>{esc(c.get('hessians') or c['text'])}</b>{windows}: {len(rows)} of "
                   f"{len(f['weights'])} quantized weights. The error is that in a layer's outputs on these inputs, squared, "
                   "over the outputs' squares: <i>rounded</i> is what searched scales and codes rounded to nearest leave, "
                   "<i>calibrated</i> what is in the files, <i>left over</i> their quotient. Means count each matrix by its "
                   "size.")
    if not rows:
        return text
    kinds: Dict[str, List[Json]] = {"all together": rows}
    for r in rows:
        kinds.setdefault(r["kind"], []).append(r)
    return text + table([".name kind", "rounded", "calibrated", "left over", "weights"], [
        [esc(k), *gain(of), str(len(of))] for k, of in list(kinds.items())[:200]])


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

    path     an output of qconv, or a checkpoint that bitsandbytes or compressed-tensors quantized
    against  the checkpoint that `path` was made from: errors are measured against it
    html     a file for the page
    lora     with `against`: adapters that `path` was made with
    text     a text over which perplexity and, with `against`, KL divergence are measured
    eval     a file that an earlier `qconv eval --json` wrote

    `json` of what comes back are the facts, and `html` is the page. `options` are those of `evaluate`. Raises CheckError, with the report as its `result`, where the output is damaged or was not made from
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
    p.takes(report)
    of_evaluate = "tokenizer", "inputs", "context", "max_tokens", "device"
    p.takes(evaluate, *of_evaluate)
    add = p.add_argument
    add("--threads", metavar="N", help="use this many threads")
    add("--json", action="store_true", help="write the same facts as one JSON object to standard output")
    add("-q", "--quiet", action="store_true", help="show neither progress nor notes")
    o = p.parse_args(list(argv))
    of_text = {k: getattr(o, k) for k in of_evaluate if getattr(o, k) != p.get_default(k)}
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
