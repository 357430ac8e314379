"""Pages of what `validate`, `plan` and `plan-training` wrote with --json."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ._report_draw import (COLOURS, Axis, Point, cards, count, document, esc, keys, label, num, plot, rect, size,
    stacked,
                           svg, table)
from ._report_facts import Json, kind_names, layer_of


def validation_of(v: Json) -> str:
    """What `qconv validate` found: in sum, what is not good enough, plots over the layers, and all numbers."""
    layers, worst = v["layers"], v["worst"]
    text = "<p>%d of %d quantized layers were measured on %s in %.1f s; %d rows of %s.%s</p>\n" % (
        v["measured_layers"], v["quantized_layers"], esc(v["device"]), v["seconds"], v["rows"],
        "random normal activations, seed %d" % v["seed"] if v["activations"] == "normal" else
        "activations captured in " + esc(v["activations"]),
        " Largest output error: %s, %.4g%%." % (esc(worst["name"]), 100 * worst["output_error"])
        if worst and worst["output_error"] is not None else "")
    text += "<p>%s</p>\n" % esc(v["left_out"]) if v["left_out"] else ""
    for title, rows in (('<h3 class="no">Not good enough</h3>', v["failed"]), ("<h3>Measured another way, or not "
            "compared</h3>", [
            *v["not_compared"], *({"name": x["name"], "why": x["note"]} for x in layers if x["note"])])):
        text += "%s\n<ul>\n%s</ul>\n" % (title, "".join("<li>%s: %s</li>\n" % (esc(x["name"]), esc(x["why"]))
            for x in rows)) \
            if rows else ""
    kinds = kind_names([x["name"] for x in layers])
    series = list(dict.fromkeys(kinds))
    blocks = [layer_of(x["name"]) for x in layers]
    across = ["" if b is None or i and blocks[i - 1] == b else str(b) for i, b in enumerate(blocks)]
    colours = {k: min(i, 24) for i, k in enumerate(series)}
    ms = [t["m"] for t in layers[0]["times"]] if layers else []

    def figure(title: str, note: str, values: Callable[[Json, int], Any], count_of: int, names: Sequence[str],
            **more: Any) -> str:
        points: List[Tuple[int, List[Optional[Point]]]] = []
        for s in range(count_of):
            of = [values(x, s) if names is not kindly or colours[kinds[i]] == s else None for i, x in enumerate(layers)]
            points.append((s, [None if p is None else (100.0 * p, 0, 0, bool(x["failure"])) if more.get("form") else (
                p, 0, 0, bool(x["failure"])) for p, x in zip(of, layers)]))
        limit = more.get("limit") or 0.0
        every = [p[0] for _, of2 in points for p in of2 if p]
        if not every:
            return ""
        return "<h3>%s</h3>\n<p class=\"soft\">%s</p>\n%s%s" % (title, note, plot(
            title + " of every layer; the numbers are in the table", Axis(every + [limit] * bool(limit),
            more.get("zero", False)),
            across, points, height=240, **{k: x for k, x in more.items() if k != "zero"}), keys(names))
    kindly = [esc(k) for k in series[:24]] + (["others"] if len(series) > 24 else [])
    by_m = ["M = %d" % m for m in ms]

    def of_time(key: str) -> Callable[[Json, int], Any]:
        return lambda x, s: x["times"][s][key] if s < len(x["times"]) else None
    text += figure("Output error", "How far the outputs of a layer are from those of the 16-bit weights: relative, "
        "over all "
                   "outputs.", lambda x, s: x["output_error"], len(kindly), kindly, form="%.3g%%",
                   limit=100 * (v["max_error"] or 0.0))
    text += figure("Weight error", "How far the weights are from those of the model: relative, over all weights "
        "(Frobenius "
                   "norms).", lambda x, s: x["weight_error"], len(kindly), kindly, form="%.3g%%")
    text += figure("Error of the kernel itself", "How far the kernel's result is from sums in double of the same "
        "quantized "
                   "weights.", lambda x, s: x["kernel_error"], len(kindly), kindly, form="%.3g%%")
    text += figure("Speed-up over fp16", "The time of cuBLAS with the 16-bit weights over the time with the quantized "
        "ones, by "
                   "the rows of activations that are multiplied at once.", of_time("speedup"), len(ms), by_m, limit=1.0,
                   zero=True)
    text += figure("Share of the roof", "The least time that memory and arithmetic units, as measured here, would "
        "need, over the "
                   "time that was taken, by the rows of activations that are multiplied at once.", of_time("roof"),
                   len(ms), by_m,
                   form="%.3g%%", zero=True)
    fast = any(t["speedup"] is not None for x in layers for t in x["times"])
    return text + "<h3>Layers</h3>\n" + table(
        [".name layer", "scheme", "shape", "weight error", "SQNR, dB", "largest", "at row, column", "output error",
         "kernel error", *("%s, M = %d" % ("fp16 / ours" if fast else "ms", m) for m in ms)], [
             [(esc(x["name"]), "no" if x["failure"] else ""), esc(x["scheme"]) + ("-%d" % x["block_size"]
             if x["block_size"] else ""),
              str(x["shape"]), num(x["weight_error"] and 100 * x["weight_error"], "%.3g%%"), num(x["sqnr_db"], "%.2f"),
              num(x["largest_error"]), "%d, %d" % tuple(x["largest_at"]), num(x["output_error"]
              and 100 * x["output_error"], "%.3g%%"),
              num(x["kernel_error"] and 100 * x["kernel_error"], "%.3g%%"),
              *(num(t["speedup"] if fast else t["seconds"] and 1e3 * t["seconds"]) for t in x["times"]),
              *([""] * (len(ms) - len(x["times"])))] for x in layers])


def validation_page(v: Json) -> str:
    """The page of a validation."""
    verdict = ': <span class="no">%d not good enough</span>' % len(v["failed"]) if v["failed"] else \
        ': <span class="yes">passed</span>' if v["baseline"] or v["max_error"] is not None else ""
    return document("qconv validate", "<h1>%s against %s%s</h1>\n" % (esc(v["path"]), esc(v["against"]),
        verdict) + validation_of(v))


def found_text(n: Optional[int]) -> str:
    """A longest context or largest batch."""
    return "no limit" if n is None else count(n) if n else "none fits"


def placement_of(p: Json) -> str:
    """The layers in the order a token passes, in shades of their devices."""
    runs = [d for d in p["devices"] if d["layers"]]
    n, inside = sum(d["layers"] for d in runs), []
    if not n or not p["device_map"] or p["parallel"] != "layers":
        return ""
    for k, d in enumerate(sorted(runs, key=lambda d: int(d["first_layer"]))):
        for i in range(d["first_layer"], d["first_layer"] + d["layers"]):
            inside.append(rect("strip s%d" % (k % COLOURS), 100 * i / n, 2, 100 / n, 28, "layer %d: %s" % (i,
                esc(d["name"]))))
        if d["layers"] > 0.12 * n:
            inside.append(label(100 * (d["first_layer"] + d["layers"] / 2) / n, 46, esc(d["name"]), "middle"))
    names = [d["name"] for d in p["devices"]]
    others: Dict[str, List[str]] = {}
    for name, device in p["device_map"].items():
        if layer_of(name) is None:
            others.setdefault(names[device] if isinstance(device, int) and device < len(names) else str(device),
                []).append(name)
    words = ["<b>%s</b>: %s" % (esc(d["name"]), ", ".join(
        (["layer %d" % d["first_layer"] + (" to layer %d" % (d["first_layer"] + d["layers"] - 1) if d["layers"] > 1
        else "")]
         if d["layers"] else []) + [esc(x) for x in others.get(d["name"], [])])) for d in p["devices"]]
    return "<h2>Placement, in the order a token passes</h2>\n" + svg(
        52, "which layers lie where; also in words below", "\n".join(inside)) + "<p>%s.</p>\n" % "; ".join(words)


def plan_page(p: Json) -> str:
    """The page of a plan: whether it fits, memory of each device, placement, schemes, and what else would do."""
    title = "%s as %s%s" % (esc(p["model"]), esc(p["to"]), " on " + esc(p["vram"]) if p["vram"] else "")
    text = '<h1>%s: <span class="%s">%s</span></h1>\n' % (title, "yes" if p["fits"] else "no", "fits" if p["fits"]
        else "does not fit")
    if not p["fits"]:
        text += '<p class="no">Short by %s on %s.</p>\n' % (size(p["short_by_bytes"]), esc(p["short_device"]))
    text += '<p class="no">The size of its KV cache is not known.</p>\n' if p["kv_bytes"] is None else ""
    known = p["kv_bytes"] is not None and p["max_context"] is not None
    text += cards([(size(p["weight_bytes"]), "of weights in %s parameters" % count(p["parameters"])),
                   (size(p["file_bytes"]), "of files before compression"),
                   (size(p["kv_bytes"]), "KV cache: a context of %s tokens, batch %d" % (count(p["context"]),
                   p["batch"]))
                   if p["kv_bytes"] else None,
                   (found_text(p["max_context"]), "longest context at batch 1") if known else None,
                   (found_text(p["max_batch"]), "largest batch at this context") if known else None])
    ways = p["max_context_by_prefill"] or {}
    text += "<p>Longest context at batch 1, by how prompts are read: %s.</p>\n" % "; ".join("%s, %s" % (
        found_text(n), "whole" if way == "whole" else "%s tokens at once" % esc(way)) for way,
        n in ways.items()) if known and ways else ""
    parts = (("weights", "weight_bytes"), ("KV cache", "kv_bytes"), ("workspace", "workspace_bytes"), ("CUDA context",
        "context_bytes"))
    needs = [sum(d[key] or 0 for _, key in parts) for d in p["devices"]]
    most = max([1.0, *needs, *(d["budget_bytes"] or 0 for d in p["devices"])])
    text += "<h2>Memory</h2>\n" + "".join(stacked("<b>%s</b>: %s%s%s" % (
        esc(d["name"]), size(n), ", no limit" if d["budget_bytes"] is None else " of " + size(d["budget_bytes"]),
        ' <span class="no">(too much)</span>' if d["short_by_bytes"] else ""), [(name, d[key] or 0) for name,
        key in parts],
        most, d["budget_bytes"] or 0.0) for d, n in zip(p["devices"], needs)) + keys([name for name, _ in parts])
    text += '<p class="soft">Budgets: %s.</p>\n' % ". ".join(esc(n)
        for n in p["budget_notes"]) if p["budget_notes"] else ""
    text += placement_of(p)
    if p["tensor_parallel"]:
        text += "<h2>Split</h2>\n<p>In this plan every layer is split over %d card%s, as vLLM splits it with " \
            "--tensor-parallel-size.</p>\n" % (p["tensor_parallel"], "s" if p["tensor_parallel"] > 1 else "")
        text += "<p><code>%s</code></p>\n" % esc(p["vllm"]) if p["vllm"] else ""
    text += "<h2>Devices</h2>\n" + table(["device", ".text card", "budget", *(name for name, _ in parts), "free",
        "short by", "layers"], [
        [esc(d["name"]), esc(d["card"] or ""), "no limit" if d["budget_bytes"] is None else size(d["budget_bytes"]),
         *(size(d[key]) if d[key] else "" for _, key in parts), size(d["free_bytes"]) if d["free_bytes"] else "",
         (size(d["short_by_bytes"]), "no") if d["short_by_bytes"] else "", str(d["layers"] or "")]
         for d in p["devices"]])
    text += "<h2>Schemes</h2>\n" + table(["scheme", "tensors", "parameters", "bytes"], [
        [esc(name), str(x["tensors"]), count(x["weights"]), size(x["bytes"])] for name, x in p["schemes"].items()])
    if p["auto"]:
        text += "<h2>Error</h2>\n<p>Predicted: %.3g. It has no unit: the sum over weights of relative squared error " \
            "times " \
            "importance.</p>\n" % p["auto"]["predicted_error"] + table(["one scheme for all", "predicted error",
                "fits"], [
                [esc(name), num(x["predicted_error"]), "yes" if x["fits"] else ("no", "no")]
                for name, x in p["auto"]["uniform"].items()])
    text += "<h2>What else these devices could hold</h2>\n" + table([".text with", "longest context",
        "predicted error"], [
        [esc(x["change"] or "what is planned"), found_text(x["max_context"]), num(x["predicted_error"])]
        for x in p["choices"]]) \
        if p["choices"] else ""
    text += "<h2>What would fit</h2>\n<ul>\n%s</ul>\n" % "".join("<li>%s</li>\n" % esc(x) for x in p["suggestions"]) \
        if p["suggestions"] else ""
    return document("qconv plan", text)


def training_page(p: Json) -> str:
    """The page of settings for fine-tuning: what each takes of a GPU."""
    names = [("weights", "parameters"), ("gradients", "gradients"), ("optimizer", "optimizer"), ("activations",
        "activations"),
             ("batch data", "batch_data"), ("workspace", "workspace"), ("CUDA context", "context")]
    budget, gpus = p["budget_bytes"], p["gpus"]
    most = max([budget, *(s["bytes_per_gpu"]["total"] for s in p["settings"]), 1])
    text = "<h1>Fine-tuning %s</h1>\n<p>%s parameters, sequences of %s tokens; %d GPU%s with %s to use%s.</p>\n" % (
        esc(p["model"]), count(p["parameters"]), count(p["context"]), gpus, "s" * (gpus > 1), size(budget),
        " each" * (gpus > 1))
    if p["longest_context"]:
        text += '<p class="no">Nothing fits the sequences that were asked for; the longest that fit have %s ' \
            'tokens.</p>\n' % (
            count(p["longest_context"]))
    text += "<h2>Memory of a GPU</h2>\n" + "".join(stacked("<b>%s</b>: %s of %s%s" % (
        esc(s["label"]), size(s["bytes_per_gpu"]["total"]), size(budget), "" if s["fits"] else
        ' <span class="no">(does not fit)</span>'), [(name, s["bytes_per_gpu"][key]) for name, key in names], most,
        budget)
        for s in p["settings"]) + keys([name for name, _ in names])
    return document("qconv plan-training", text + "<h2>Settings</h2>\n" + table(
        [".text setting", *(name for name, _ in names), "total", "short by", "micro-batch", "steps",
        "batch of all GPUs"], [
            [esc(s["label"]), *(size(s["bytes_per_gpu"][key]) for _, key in names), size(s["bytes_per_gpu"]["total"]),
             *(["", str(s["micro_batch"]), str(s["accumulation"]), str(s["effective_batch"])] if s["fits"] else
               [(size(s["short_by_bytes"]), "no"), "", "", ""])] for s in p["settings"]]))
