"""Pages of what `validate`, `plan` and `plan-training` wrote with --json. Sizes are bytes, errors relative."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from ._report_draw import (COLOURS, Axis, Cell, Point, cards, count, document, esc, keys, label, num, plot, rect, size,
                           stacked, svg, table)
from ._report_facts import Json, kind_names, layer_of

# What is drawn of each layer of a validation: the member, the title and what it says. The second ones are members of
# `times`, of which a layer has one for each number of rows.
ERRORS = (("output_error", "Output error", "How far the outputs of a layer are from those of the 16-bit weights: "
           "relative, over all outputs."),
          ("weight_error", "Weight error", "How far the weights are from those of the model: relative, over all "
           "weights (Frobenius norms)."),
          ("kernel_error", "Error of the kernel itself", "How far the kernel's result is from sums in double of the "
           "same quantized weights."))
TIMES = (("speedup", "Speed-up over fp16", "The time of cuBLAS with the 16-bit weights over the time with the "
          "quantized ones, by the rows of activations that are multiplied at once."),
         ("roof", "Share of the roof", "The least time that memory and arithmetic units, as measured here, would need, "
          "over the time that was taken, by the rows of activations that are multiplied at once."))


def percent(v: Optional[float]) -> str:
    return num(v and 100 * v, "%.3g%%")


def figures_of(v: Json) -> str:
    """Errors and times over the layers, which stand in the order of the answer."""
    layers = v["layers"]
    kinds = kind_names([x["name"] for x in layers])
    series = list(dict.fromkeys(kinds))
    colours = [min(series.index(k), 24) for k in kinds]
    blocks = [layer_of(x["name"]) for x in layers]
    across = ["" if b is None or i and blocks[i - 1] == b else str(b) for i, b in enumerate(blocks)]
    by_kind = [esc(k) for k in series[:24]] + ["others"] * (len(series) > 24)
    by_rows = ["M = %d" % t["m"] for t in layers[0]["times"]] if layers else []

    def figure(title: str, note: str, values: Sequence[Sequence[Any]], names: Sequence[str], scale: float,
               limit: float = 0.0, zero: bool = False) -> str:
        """`values` are those of each series for every layer; None is not drawn."""
        points: List[Tuple[int, List[Optional[Point]]]] = [
            (s, [None if p is None else (scale * p, 0, 0, bool(x["failure"])) for p, x in zip(of, layers)])
            for s, of in enumerate(values)]
        every = [p[0] for _, of in points for p in of if p]
        if not every:
            return ""
        drawn = plot(title + " of every layer; the numbers are in the table", Axis(every + [limit] * bool(limit), zero),
                     across, points, height=240, form="%.3g" if scale == 1 else "%.3g%%", limit=limit)
        return '<h3>%s</h3>\n<p class="soft">%s</p>\n%s%s' % (title, note, drawn, keys(names))
    text = ""
    for key, title, note in ERRORS:
        values = [[x[key] if colour == s else None for x, colour in zip(layers, colours)] for s in range(len(by_kind))]
        text += figure(title, note, values, by_kind, 100.0, 100 * (v["max_error"] or 0.0) * (key == "output_error"))
    for key, title, note in TIMES:
        values = [[x["times"][s][key] if s < len(x["times"]) else None for x in layers] for s in range(len(by_rows))]
        text += figure(title, note, values, by_rows, *((1.0, 1.0) if key == "speedup" else (100.0, 0.0)), zero=True)
    return text


def validation_of(v: Json) -> str:
    """What `qconv validate` found: in sum, what is not good enough, plots over the layers, and all numbers."""
    layers, worst = v["layers"], v["worst"]
    rows = "random normal activations, seed %d" % v["seed"] if v["activations"] == "normal" else \
        "activations captured in " + esc(v["activations"])
    text = f"<p>{v['measured_layers']:d} of {v['quantized_layers']:d} quantized layers were measured on " \
        f"{esc(v['device'])} in {v['seconds']:.1f} s; {v['rows']:d} rows of {rows}."
    if worst and worst["output_error"] is not None:
        text += f" Largest output error: {esc(worst['name'])}, {100 * worst['output_error']:.4g}%."
    text += "</p>\n" + ("<p>%s</p>\n" % esc(v["left_out"]) if v["left_out"] else "")
    noted = [{"name": x["name"], "why": x["note"]} for x in layers if x["note"]]
    for title, found in (('<h3 class="no">Not good enough</h3>', v["failed"]),
                         ("<h3>Measured another way, or not compared</h3>", [*v["not_compared"], *noted])):
        listed = "".join(f"<li>{esc(x['name'])}: {esc(x['why'])}</li>\n" for x in found)
        text += f"{title}\n<ul>\n{listed}</ul>\n" if found else ""
    ms = [t["m"] for t in layers[0]["times"]] if layers else []
    fast = any(t["speedup"] is not None for x in layers for t in x["times"])

    def row(x: Json) -> List[Cell]:
        times = [num(t["speedup"] if fast else t["seconds"] and 1e3 * t["seconds"]) for t in x["times"]]
        scheme = esc(x["scheme"]) + ("-%d" % x["block_size"] if x["block_size"] else "")
        return [(esc(x["name"]), "no" if x["failure"] else ""), scheme, esc(x["shape"]), percent(x["weight_error"]),
                num(x["sqnr_db"], "%.2f"), num(x["largest_error"]), "%d, %d" % tuple(x["largest_at"]),
                percent(x["output_error"]), percent(x["kernel_error"]), *times, *[""] * (len(ms) - len(times))]
    return text + figures_of(v) + "<h3>Layers</h3>\n" + table(
        [".name layer", "scheme", "shape", "weight error", "SQNR, dB", "largest", "at row, column", "output error",
         "kernel error", *("%s, M = %d" % ("fp16 / ours" if fast else "ms", m) for m in ms)], [row(x) for x in layers])


def validation_page(v: Json) -> str:
    verdict = f': <span class="no">{len(v["failed"])} not good enough</span>' if v["failed"] else \
        ': <span class="yes">passed</span>' if v["baseline"] or v["max_error"] is not None else ""
    title = f"<h1>{esc(v['path'])} against {esc(v['against'])}{verdict}</h1>\n"
    return document("qconv validate", title + validation_of(v))


def found_text(n: Optional[int]) -> str:
    return "no limit" if n is None else count(n) if n else "none fits"


def placement_of(p: Json) -> str:
    """The layers in the order a token passes, in shades of their devices."""
    runs = [d for d in p["devices"] if d["layers"]]
    n, inside = sum(d["layers"] for d in runs), []
    if not n or not p["device_map"] or p["parallel"] != "layers":
        return ""
    for k, d in enumerate(sorted(runs, key=lambda d: int(d["first_layer"]))):
        for i in range(d["first_layer"], d["first_layer"] + d["layers"]):
            title = "layer %d: %s" % (i, esc(d["name"]))
            inside.append(rect("strip s%d" % (k % COLOURS), 100 * i / n, 2, 100 / n, 28, title))
        if d["layers"] > 0.12 * n:
            inside.append(label(100 * (d["first_layer"] + d["layers"] / 2) / n, 46, esc(d["name"]), "middle"))
    names = [d["name"] for d in p["devices"]]
    held: Dict[str, List[str]] = {name: [] for name in names}
    for d in runs:
        last = d["first_layer"] + d["layers"] - 1
        held[d["name"]].append("layer %d" % d["first_layer"] + (" to layer %d" % last if d["layers"] > 1 else ""))
    for name, device in p["device_map"].items():
        on = names[device] if isinstance(device, int) and device < len(names) else str(device)
        if layer_of(name) is None and on in held:
            held[on].append(esc(name))
    words = "; ".join(f"<b>{esc(name)}</b>: {', '.join(held[name])}" for name in names)
    drawn = svg(52, "which layers lie where; also in words below", "\n".join(inside))
    return f"<h2>Placement, in the order a token passes</h2>\n{drawn}<p>{words}.</p>\n"


def plan_page(p: Json) -> str:
    """The page of a plan: whether it fits, memory of each device, placement, schemes, and what else would do."""
    devices = p["devices"]
    fits = '<span class="yes">fits</span>' if p["fits"] else '<span class="no">does not fit</span>'
    text = f"<h1>{esc(p['model'])} as {esc(p['to'])}{' on ' + esc(p['vram']) if p['vram'] else ''}: {fits}</h1>\n"
    if not p["fits"]:
        text += f'<p class="no">Short by {size(p["short_by_bytes"])} on {esc(p["short_device"])}.</p>\n'
    text += '<p class="no">The size of its KV cache is not known.</p>\n' if p["kv_bytes"] is None else ""
    known = p["kv_bytes"] is not None and p["max_context"] is not None
    cache = f"KV cache: a context of {count(p['context'])} tokens, batch {p['batch']:d}" if p["kv_bytes"] else ""
    text += cards([(size(p["weight_bytes"]), f"of weights in {count(p['parameters'])} parameters"),
                   (size(p["file_bytes"]), "of files before compression"),
                   (size(p["kv_bytes"]), cache) if cache else None,
                   (found_text(p["max_context"]), "longest context at batch 1") if known else None,
                   (found_text(p["max_batch"]), "largest batch at this context") if known else None])
    ways = [found_text(n) + (", whole" if way == "whole" else f", {esc(way)} tokens at once")
            for way, n in (p["max_context_by_prefill"] or {}).items()]
    if known and ways:
        text += f"<p>Longest context at batch 1, by how prompts are read: {'; '.join(ways)}.</p>\n"
    parts = {"weights": "weight_bytes", "KV cache": "kv_bytes", "workspace": "workspace_bytes",
             "CUDA context": "context_bytes"}
    budgets = ["no limit" if d["budget_bytes"] is None else size(d["budget_bytes"]) for d in devices]
    needs = [sum(d[key] or 0 for key in parts.values()) for d in devices]
    most = max([1.0, *needs, *(d["budget_bytes"] or 0 for d in devices)])
    text += "<h2>Memory</h2>\n"
    for d, n, budget in zip(devices, needs, budgets):
        of = ", no limit" if d["budget_bytes"] is None else " of " + budget
        short = ' <span class="no">(too much)</span>' if d["short_by_bytes"] else ""
        text += stacked(f"<b>{esc(d['name'])}</b>: {size(n)}{of}{short}",
                        [(name, d[key] or 0) for name, key in parts.items()], most, d["budget_bytes"] or 0.0)
    text += keys(list(parts))
    if p["budget_notes"]:
        text += f'<p class="soft">Budgets: {". ".join(esc(n) for n in p["budget_notes"])}.</p>\n'
    text += placement_of(p)
    if p["tensor_parallel"]:
        text += f"<h2>Split</h2>\n<p>In this plan every layer is split over {p['tensor_parallel']:d} " \
            f"card{'s' * (p['tensor_parallel'] > 1)}, as vLLM splits it with --tensor-parallel-size.</p>\n"
        text += f"<p><code>{esc(p['vllm'])}</code></p>\n" if p["vllm"] else ""
    text += "<h2>Devices</h2>\n" + table(
        ["device", ".text card", "budget", *parts, "free", "short by", "layers"],
        [[esc(d["name"]), esc(d["card"] or ""), budget, *(size(d[key]) if d[key] else "" for key in parts.values()),
          size(d["free_bytes"]) if d["free_bytes"] else "",
          (size(d["short_by_bytes"]), "no") if d["short_by_bytes"] else "", esc(d["layers"] or "")]
         for d, budget in zip(devices, budgets)])
    text += "<h2>Schemes</h2>\n" + table(["scheme", "tensors", "parameters", "bytes"], [
        [esc(name), esc(x["tensors"]), count(x["weights"]), size(x["bytes"])] for name, x in p["schemes"].items()])
    if p["auto"]:
        text += f"<h2>Error</h2>\n<p>Predicted: {p['auto']['predicted_error']:.3g}. It has no unit: the sum over " \
            "weights of relative squared error times importance.</p>\n"
        text += table(["one scheme for all", "predicted error", "fits"], [
            [esc(name), num(x["predicted_error"]), "yes" if x["fits"] else ("no", "no")]
            for name, x in p["auto"]["uniform"].items()])
    if p["choices"]:
        text += "<h2>What else these devices could hold</h2>\n" + table(
            [".text with", "longest context", "predicted error"],
            [[esc(x["change"] or "what is planned"), found_text(x["max_context"]), num(x["predicted_error"])]
             for x in p["choices"]])
    if p["suggestions"]:
        listed = "".join(f"<li>{esc(x)}</li>\n" for x in p["suggestions"])
        text += f"<h2>What would fit</h2>\n<ul>\n{listed}</ul>\n"
    return document("qconv plan", text)


def training_page(p: Json) -> str:
    """The page of settings for fine-tuning: what each takes of a GPU."""
    terms = {"weights": "parameters", "gradients": "gradients", "optimizer": "optimizer", "activations": "activations",
             "batch data": "batch_data", "workspace": "workspace", "CUDA context": "context"}
    budget, gpus = p["budget_bytes"], p["gpus"]
    most = max([budget, *(s["bytes_per_gpu"]["total"] for s in p["settings"]), 1])
    several = gpus > 1
    text = f"<h1>Fine-tuning {esc(p['model'])}</h1>\n<p>{count(p['parameters'])} parameters, sequences of " \
        f"{count(p['context'])} tokens; {gpus:d} GPU{'s' * several} with {size(budget)} to use" \
        f"{' each' * several}.</p>\n"
    if p["longest_context"]:
        text += '<p class="no">Nothing fits the sequences that were asked for; the longest that fit have ' \
            f"{count(p['longest_context'])} tokens.</p>\n"
    text, rows = text + "<h2>Memory of a GPU</h2>\n", []
    for s in p["settings"]:
        of, name = s["bytes_per_gpu"], esc(s["label"])
        short = "" if s["fits"] else ' <span class="no">(does not fit)</span>'
        text += stacked(f"<b>{name}</b>: {size(of['total'])} of {size(budget)}{short}",
                        [(title, of[key]) for title, key in terms.items()], most, budget)
        ends: List[Cell] = [(size(s["short_by_bytes"]), "no"), "", "", ""]
        if s["fits"]:
            ends = ["", esc(s["micro_batch"]), esc(s["accumulation"]), esc(s["effective_batch"])]
        rows.append([name, *(size(of[key]) for key in terms.values()), size(of["total"]), *ends])
    return document("qconv plan-training", text + keys(list(terms)) + "<h2>Settings</h2>\n" + table(
        [".text setting", *terms, "total", "short by", "micro-batch", "steps", "batch of all GPUs"], rows))
