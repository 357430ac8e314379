"""`qconv report`: one HTML page about an output, and the same as JSON.

    python -m qconv report out/ --against model/ --html report.html
    qconv.report("out/", against="model/", html="report.html").json["forms"]

First the facts are put together (_report_facts.py); the page and the JSON are two ways to show them, with the same names
(docs/report.md). A page is one file without scripts or anything from outside, well-formed XML, for light and dark, wide
and narrow screens and print. Texts of files go through `esc`.
"""
from __future__ import annotations

import html as markup
import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ._command import Parser, warnings_said, whole
from ._folders import write_text
from ._program import StrPath, size, version
from ._report_facts import Json, Output, Watcher, facts, mean_of
from .errors import CheckError, UsageError
from .evaluate import evaluate
from .results import Result, short

MARKS = "\u25cf\u25a0\u25b2\u25c6\u25cb\u25a1"  # of forms
HEAT = 9  # colours, beside none
NAMES = ("name", "kind", "form", "why", "example", "most_of", "max_of", "role", "option", "member", "value")  # of columns of text
with open(os.path.join(os.path.dirname(__file__), "report.css"), encoding="utf-8") as _file:
    STYLE = _file.read()


@dataclass(frozen=True)
class Report(Result):
    """What `report` returns: `json` are the facts, as `qconv report --json` prints them, and `html` is the page."""
    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        return '<iframe srcdoc="%s" width="100%%" height="700"></iframe>' % markup.escape(self.html)


# ---- texts and tables ---------------------------------------------------------------------------------------------


def esc(text: object) -> str:
    """A text of somebody's file as markup: nothing in it ends a tag, an attribute or the document, hides, or turns the
    direction of what follows."""
    return markup.escape(re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f"
                               "\ufeff\ufff9-\uffff\ud800-\udfff\U000e0000-\U000e007f]", "?", str(text)))


def plain(name: str, value: Any) -> str:
    """A member as text; nothing where it is not known."""
    if value is None or isinstance(value, float) and not math.isfinite(value):
        return ""
    return size(value) if name.endswith("bytes") and isinstance(value, (int, float)) else short(value)


def table(rows: Sequence[Json], heat: Mapping[Tuple[int, str], int] = {}) -> str:
    """Objects below each other, which scroll beside the first column where they are too wide, without the members that none
    of them has. heat: the colour of a row's member."""
    heads = [h for h in dict.fromkeys(h for row in rows for h in row) if any(plain(h, row.get(h)) for row in rows)]

    def line(kind: str, i: int, cells: Sequence[str]) -> str:
        classes = ["name" if h in NAMES else "h%d" % heat[i, h] if (i, h) in heat else "" for h in heads]
        return "<tr>%s</tr>" % "".join("<%s%s>%s</%s>" % (kind, ' class="%s"' % c if c else "", esc(text), kind)
                                       for c, text in zip(classes, cells))
    lines = [line("th", -1, heads if heat else [h.replace("_", " ") for h in heads])]
    lines += [line("td", i, [plain(h, row.get(h)) for h in heads]) for i, row in enumerate(rows)]
    return '<div class="scroll"><table>\n%s\n</table></div>\n' % "\n".join(lines) if rows else ""


def members(found: Json) -> str:
    """The members of an object that are no objects themselves."""
    return table([{"member": name.replace("_", " "), "value": plain(name, value)} for name, value in found.items()
                  if value not in (None, []) and not isinstance(value, dict)])


def section(name: str, title: str, *notes: str) -> str:
    return '<h2 id="%s">%s</h2>\n' % (name, title) + "".join("<p>%s</p>\n" % note for note in notes)


def document(title: str, body: str) -> str:
    return ('<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"/><meta name="viewport" '
            'content="width=device-width, initial-scale=1"/><meta name="color-scheme" content="light dark"/>'
            "<title>%s</title><style>%s</style></head>\n<body>\n%s<p class=\"soft\">Made by qconv %s.</p>\n</body>\n"
            "</html>\n" % (esc(title), STYLE, body, esc(version())))


# ---- the page of an output ----------------------------------------------------------------------------------------


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


def mean_error(rows: Sequence[Json]) -> Optional[float]:
    return mean_of([(r["rel_mse"], math.prod(r["shape"])) for r in rows if r["rel_mse"] is not None])


def head_of(f: Json, out: Output) -> str:
    """What the output is, and what is wrong with it."""
    links = {"size": "Size", "memory": "Memory", "error": "Error", "layers": "Layers", "worst": "Worst",
             "outputs": "Outputs", "left": "Not quantized", "perplexity": "Perplexity", "made": "How made"}
    if not (f["made"] or {}).get("calibrate"):
        del links["outputs"]
    forms = "; ".join(f"<b>{esc(x['form'])}</b> ({x['weights']:d})" for x in f["forms"])
    text = f"<h1>{esc(f['path'])}</h1>\n<p>{esc(f['model_type'] or 'A model')}: {len(f['weights']):,} quantized weights, " \
        f"{forms}; {size(f['sizes']['file_bytes'])} on disk.</p>\n"
    text += "".join(f'<p class="no"><b>Note:</b> {esc(n)}</p>\n' for n in out.seen["warnings"])
    if not f["made"]:
        text += "<p><b>Note:</b> there is no manifest (qconv.json), so this page knows neither the source nor the " \
            "options. Errors come from <code>--against</code> only.</p>\n"
    return text + verdict_of(f, out) + "<nav>%s</nav>\n" % "".join(
        f'<a href="#{name}">{title}</a>' for name, title in links.items())


def memory_of(f: Json, out: Output) -> str:
    p = out.manifest.get("placement")
    note = f"Placed for <code>--vram {esc(p['vram'])}</code>, of which {100 * p['margin']:.3g}% may be used, for a context of " \
        f"{p['context']:d} tokens and a batch of {p['batch']:d}" if p else "They were not placed on devices; <code>qconv --vram" \
        "</code> does that"
    return section("memory", "Memory per device", f"Tensors: {size(f['sizes']['tensor_bytes'])}. {note}. <code>qconv plan</code> "
                   "adds the KV cache and what else a device holds.") + table(f["devices"])


def marked(f: Json, rows: Sequence[Json]) -> List[Json]:
    """With the mark of each one's form in front, where there are several."""
    marks = {x["form"]: MARKS[i % len(MARKS)] for i, x in enumerate(f["forms"])}
    return [{"": marks[r["form"]], **r} if len(marks) > 1 else r for r in rows]


def error_of(f: Json) -> str:
    unknown = sum(r["rel_mse"] is None for r in f["weights"])
    origin = {"source": f"These were measured now, against <b>{esc(f['against'])}</b>.",
              "manifest": "These are from the manifest, as convert measured them.",
              "none": "There are none: OUT has no manifest. <code>--against MODEL</code> measures them."}
    notes = ["Relative MSE of a weight matrix: the sum of squared differences to the source, over the sum of squares of the "
             f"source. Means count each matrix by its size. {origin[f['errors_from']]}"]
    if f["errors_from"] != "none" and unknown:
        notes.append(f"<b>Note:</b> the error of {unknown} of {len(f['weights'])} weights is not known: "
                     f"{esc(f['errors_missing'])}.")
    text = section("error", "Error of the weights", *notes) + table(marked(f, f["forms"])) + "<h3>By kind of layer</h3>\n" + \
        table(marked(f, f["kinds"][:200]))
    if len(f["kinds"]) > 200:
        text += f"<p>{len(f['kinds']) - 200} more kinds are in <code>--json</code>.</p>\n"
    return text


def layers_of(f: Json) -> str:
    """Errors of kinds over the layers, in colours on a logarithmic scale."""
    title, found = "Error over the layers", {}  # type: str, Dict[Tuple[int, str], List[Json]]
    for r in marked(f, f["weights"]):
        if r["rel_mse"] is not None and r["layer"] is not None:
            found.setdefault((r["layer"], r["kind"]), []).append(r)
    if not found:
        return section("layers", title, "No weight has both an error and a layer number in its name.")
    layers, kinds = sorted({layer for layer, _ in found}), {kind for _, kind in found}
    kinds_in_order = [k for k in dict.fromkeys(k["kind"] for k in f["kinds"]) if k in kinds]
    if len(kinds) * len(layers) > 6000:
        return section("layers", title, "There are too many kinds and layers to show; <code>--json</code> has them.")
    means = {key: mean_error(of) or 0.0 for key, of in found.items()}
    above = [math.log(v) for v in means.values() if v > 0]
    low, high = min(above, default=0.0), max(above, default=0.0)
    rows: List[Json] = [{"layer": n} for n in layers]
    heat: Dict[Tuple[int, str], int] = {}
    for i, n in enumerate(layers):
        for k in kinds_in_order:
            if (n, k) in found:
                mean, forms = means[n, k], {r.get("", "") for r in found[n, k]}
                rows[i][k] = "%.3g %s" % (mean, forms.pop() if len(forms) == 1 else "*")
                heat[i, k] = round(HEAT * (math.log(mean) - low) / (high - low)) if mean > 0 and high > low else 0
    return section("layers", title, "Relative error (MSE) of each kind; a stronger colour is a larger error, on a logarithmic "
                   "scale. Where a layer has several weights of a kind, as with experts, it is their mean; * where their "
                   "forms differ.") + table(rows, heat)


def worst_of(f: Json) -> str:
    known = sorted((r for r in f["weights"] if r["rel_mse"] is not None), key=lambda r: -float(r["rel_mse"]))
    shown = ("", "name", "rel_mse", "sqnr", "over_median", "expected_mse", "clipped", "max_err", "max_at", "form", "shape")
    return section("worst", "Worst weights", f"The {len(known[:20])} of {len(known)} with the largest relative error.") + table(
        [{key: r[key] for key in shown if key in r} for r in marked(f, known[:20])])


def outputs_of(f: Json) -> str:
    """What calibrating gained in the outputs of layers."""
    c, kinds = (f["made"] or {}).get("calibrate"), {}  # type: Any, Dict[str, List[Json]]
    if not c:
        return ""
    for r in f["weights"]:
        if "outputs" in r:
            for kind in ("all together", r["kind"]):
                kinds.setdefault(kind, []).append(r)
    rows = []
    for kind, of in kinds.items():
        before, after = (mean_of([(r["outputs"][k], math.prod(r["shape"])) for r in of]) or 0.0
                         for k in ("rounded", "calibrated"))
        rows.append({"kind": kind, "rounded": before, "calibrated": after, "left over": after / before if before else 1.0,
                     "weights": len(of)})
    return section("outputs", "Gain of calibrating", "The error in a layer's outputs on the text that calibrated, squared, over "
                   "the outputs' squares: <i>rounded</i> is what searched scales and codes rounded to nearest leave, "
                   "<i>calibrated</i> what is in the files, <i>left over</i> their quotient. Means count each matrix by its "
                   "size.") + members(c) + table(rows[:200])


def eval_of(f: Json, eval_file: Optional[StrPath]) -> str:
    """Perplexity, and how far the answers are from those of the source."""
    if not f["eval"]:
        return section("perplexity", "Perplexity and KL divergence", "<b>Not measured.</b> <code>--text FILE</code> measures it, "
                       "or <code>--eval eval.json</code> takes up what <code>qconv eval OUT --against MODEL --text FILE --json "
                       "&gt; eval.json</code> found before.")
    before = [f"This was measured before: it is from the file {esc(os.fspath(eval_file))}, and whether that was about this very "
              "output is not checked."] if eval_file else []
    return section("perplexity", "Perplexity and KL divergence", *before) + members(f["eval"])


def made_of(f: Json) -> str:
    made = f["made"]
    text = section("made", "How it was made, and how to check it",
                   *([] if made else ["Not known: there is no manifest."]))
    if made:
        text += members({**made, "sources": None, **made["options"]}) + table(made["sources"])
    return text + "<pre>" + "qconv verify OUT\n" * bool(made) + "qconv verify OUT --against MODEL\n" \
        "qconv eval OUT --against MODEL --text FILE\nqconv validate OUT --against MODEL</pre>\n"


# ---- the command --------------------------------------------------------------------------------------------------

def check_target(target: str) -> None:
    """Refuses a page that would take the place of anything but a page."""
    folder = os.path.dirname(target) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError("--html: '%s': there is no folder '%s'" % (target, folder))
    if os.path.lexists(target) and not (target.endswith(".html") and os.path.isfile(target)):
        raise UsageError("--html: '%s' is there and is no page: expected a new file, or one that ends in .html" % target)


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

    `json` of what comes back are the facts, and `html` is the page. `options` are those of `evaluate`. Raises CheckError,
    with the report as its `result`, where the output is damaged or was not made from `against`; the page is written all the
    same."""
    if html is not None:
        check_target(os.fspath(html))
    if text and eval:
        raise UsageError("text and eval do not go together: a file of eval has its own text")
    found, out = facts(path, against, lora=lora, text=text, eval_file=eval, progress=progress, **options)
    page = document("qconv report: " + out.path, "".join((
        head_of(found, out), section("size", "Size"), members(found["sizes"]),
        table([{"scheme": name, **x} for name, x in out.seen["totals"]["by_scheme"].items()]), memory_of(found, out),
        error_of(found), layers_of(found), worst_of(found), outputs_of(found),
        section("left", "Not quantized, and why"), table(found["not_quantized"]), eval_of(found, eval), made_of(found))))
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
