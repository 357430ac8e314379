"""The facts of a report: what is known of an output, as `qconv report --json` prints it.

Everything comes from what the program prints (`inspect --json`, `verify --json`), from `qconv.evaluate` and from the
manifest of the output. docs/report.md says what each number is.
"""
from __future__ import annotations

import fnmatch
import json
import math
import os
import re
import statistics
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ._program import Progress, StrPath, answer, version
from .errors import CheckError, InputError, ProgramError
from .evaluate import evaluate
from .results import Answer, Evaluation

Json = Dict[str, Any]
Watcher = Union[None, bool, Callable[[Progress], object]]
MANIFEST = "qconv.json"
NONE_QUANTIZED = "%s: no weight in it is quantized in NF4, FP4, int8 or integers of compressed-tensors without zero " \
    "points or act-order"


# ---- names -------------------------------------------------------------------------------------------------

def natural(name: str) -> List[Tuple[int, int]]:
    """A key that sorts names as the program does: digits by their number, everything else by its bytes."""
    return [(48, int(part)) if part[:1].isdigit() else (byte, 0)
            for part in re.findall("[0-9]+|[^0-9]", name)
            for byte in (b"0" if part[:1].isdigit() else part.encode("utf-8", "surrogatepass"))]


def kind_names(names: Sequence[str]) -> List[str]:
    """"self_attn.q_proj" from "model.layers.12.self_attn.q_proj.weight": numbers become '*', and what all names with a
    number begin with is left out."""
    kinds = []
    for name in names:
        for tail in (".weight", ".weight_packed"):
            name = name[:-len(tail)] if name.endswith(tail) else name
        kinds.append(".".join("*" if re.fullmatch("[0-9]+", part) else part for part in name.split(".")))
    common: Optional[List[str]] = None
    for kind in kinds:
        if "*" in kind:
            parts = kind.split(".")[:-1]
            common = parts if common is None else common[:next(
                (i for i, (a, b) in enumerate(zip(common, parts)) if a != b), min(len(common), len(parts)))]
    start = "".join(part + "." for part in common or [])
    return [kind[len(start):] if kind.startswith(start) else kind for kind in kinds]


def layer_of(name: str) -> Optional[int]:
    """The first component that is a number of up to 8 digits."""
    return next((int(part) for part in name.split(".") if re.fullmatch("[0-9]{1,8}", part)), None)


def glob_matches(glob: str, name: str) -> bool:
    """Globs of --keep: *, ?, [a-z], [!a] and \\ before what is meant as it is."""
    return fnmatch.fnmatchcase(name, re.sub(r"\\(.)", r"[\1]", glob).replace("[^", "[!"))


# ---- the output --------------------------------------------------------------------------------------------

WHY_LEFT = {"embedding": "looked up row by row, not multiplied",
            "head": "what the model says depends on it directly; loaders keep it in 16 bit",
            "router": "small, and it decides which experts are asked",
            "norm": "a vector: nothing to save", "bias": "a vector: nothing to save",
            "conv": "a convolution: loaders keep it in 16 bit",
            "packed": "quantized before, in a form that was passed on",
            "state": "scales of a weight that was quantized before"}
OPTIONS = ("block_size", "double_quant", "rest", "rules", "compress", "level", "max_shard_bytes")
COMPRESSED_TENSORS = ("int-quantized", "pack-quantized")
INTEGERS = {"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"}


def logical(t: Json) -> List[int]:
    """The shape of a tensor of inspect, and of what it holds where that is quantized."""
    return list(t.get("logical_shape") or t["shape"])


class Output:
    """What is known of an output: inspect's answer, its manifest, and what verify says, of MODEL too."""

    def __init__(self, path: str, against: Optional[str], more: Mapping[str, Any], progress: Watcher) -> None:
        self.path, self.against, self.trouble = path, against, ""
        self.seen = answer(Answer, "inspect", [path], {}, progress).json
        self.manifest: Json = {}
        if self.seen["manifest"]:
            with open(os.path.join(path, MANIFEST), encoding="utf-8") as f:
                self.manifest = json.load(f)
        self.tensors: List[Json] = self.seen["tensors"]
        self.stored = [t for t in self.tensors if self.is_stored(t)]
        if not self.stored:
            raise InputError(NONE_QUANTIZED % path)
        self.compared: Optional[Json] = None
        if against or self.manifest:
            found = self.verified({"against": against, **more}, progress)
            self.compared = found if against else None
        self.model = answer(Answer, "inspect", [against], {}, progress).json if against else None
        self.ints = max((t for t in self.stored if t.get("format") in COMPRESSED_TENSORS),
                        key=lambda t: int(t["bits"]), default=None)

    def verified(self, options: Mapping[str, Any], progress: Watcher) -> Json:
        """What `verify` prints. What its check found wrong is no reason to stop here, and goes to `trouble`."""
        try:
            found: Json = answer(Answer, "verify", [self.path], options, progress).json
        except CheckError as error:
            if error.result is None:
                raise
            self.trouble, found = str(error), error.result.json
        return found

    @staticmethod
    def is_stored(t: Json) -> bool:
        """Whether it is a weight in one of the forms that the program makes, as far as inspect tells."""
        scheme = t["scheme"] or ""
        return scheme in ("nf4", "fp4", "int8", "int8-block") or bool(
            re.match("w[2-8]a", scheme)) and t.get("format") in COMPRESSED_TENSORS and not (
                t["zero_points"] or t["act_order"])

    def rules(self) -> List[List[str]]:
        """["keep", GLOB] and ["quantize", GLOB], as convert had them."""
        return [r.split(" ", 1) for r in (self.seen["manifest"] or {}).get("rules", []) if " " in r]

    def why_left(self, t: Json) -> str:
        """Why a tensor was not quantized. The last rule that matches decides, as it did then."""
        role, made = t["role"], self.seen["manifest"]
        if role != "linear":
            return WHY_LEFT.get(role or "", "not the weight of a linear layer")
        rule = next((r for r in reversed(self.rules()) if glob_matches(r[1], t["name"])), None)
        if rule and rule[0] == "keep":
            return "--keep " + rule[1]
        if made and made["to"] == "auto":
            return "--to auto chose 16 bit for it"
        if made and made["block_size"] and self.ints and logical(t)[1] % made["block_size"]:
            return "its rows are no whole groups"
        return "a linear layer that was left as it is (docs/recipes.md)"

    def left(self) -> List[Json]:
        """What was not quantized; tensors with one role and reason are one row, the largest first."""
        rows: Dict[Tuple[str, str], Json] = {}
        names = {t["name"] for t in self.stored}
        for t in self.tensors:
            if t["name"] in names or "state_of" in t:
                continue
            role, why = t["role"] or "not known", self.why_left(t)
            if (role, why) not in rows and len(rows) == 64:
                role, why = list(rows)[-1]
            row = rows.setdefault((role, why), {"role": role, "why": why, "example": t["name"], "tensors": 0,
                                                "elements": 0, "bytes": 0})
            counted = bool(t["scheme"]) or role != "state" and t["dtype"] not in INTEGERS
            row["tensors"] += 1
            row["elements"] += math.prod(logical(t)) if counted else 0
            row["bytes"] += t.get("bytes_with_state", t["bytes"])
        return sorted(rows.values(), key=lambda r: (-r["bytes"], r["example"].encode()))

    def sizes(self) -> Json:
        """Sums of bytes and of elements, before and now."""
        totals, names = self.seen["totals"], {t["name"] for t in self.stored}
        plain = 0
        for t in self.tensors:
            if t["name"] in names:
                plain += math.prod(logical(t)) * (int(re.findall("[0-9]+", t["logical_dtype"])[0]) // 8)
            elif "state_of" not in t:
                plain += t["bytes_with_state"] if t["scheme"] else t["bytes"]
        elements = sum(math.prod(logical(t)) for t in self.stored)
        quantized = sum(t["bytes_with_state"] for t in self.stored)
        source = (sum(f["file_bytes"] for f in self.model["files"]) if self.model else
                  sum(f["bytes"] for f in self.seen["manifest"]["source"]) if self.seen["manifest"] else 0)
        return {"source_file_bytes": source or None, "unquantized_bytes": plain, "tensor_bytes": totals["tensor_bytes"],
                "file_bytes": totals["file_bytes"], "elements": totals["weights"], "quantized_elements": elements,
                "quantized_bytes": quantized, "scale_bytes": quantized - sum(t["bytes"] for t in self.stored),
                "bits_per_weight": totals["bits_per_weight"],
                "quantized_bits_per_weight": quantized * 8.0 / elements if elements else None}

    def made(self) -> Optional[Json]:
        """How the output was made, as far as the manifest has the options."""
        m = self.seen["manifest"]
        return m and {"qconv_version": m["qconv_version"], "to": m["to"],
                      "scale": None if m["to"] == "keep" else m["scale"] or "absmax",
                      **{key: m[key] for key in ("calibrate", "adapters") if key in m},
                      "options": {key: m.get(key) for key in OPTIONS}, "sources": m["source"]}

    def errors(self) -> Dict[str, Json]:
        """The error of each weight by name, of the comparison or else of the manifest."""
        found: Dict[str, Json] = {}
        if self.compared is None:
            at = {t["name"]: t["max_err_index"] for t in self.manifest.get("tensors", []) if "max_err_index" in t}
            for t in self.stored:
                if "rel_mse" in t and t["name"] in at:
                    found[t["name"]] = {"rel_mse": t["rel_mse"], "max_err": t["max_err"], "at": at[t["name"]]}
            return found
        shapes = {t["name"]: logical(t) for t in (self.model or {"tensors": []})["tensors"]}
        rows = self.compared["rows"]

        def turns(row: Json) -> bool:
            return len(row["shape"]) == 2 and bool(row["shape"] == shapes.get(row["source"], [])[::-1])
        # Where MODEL has Conv1D weights, which lie the other way, it has square ones, too.
        conv1d = any(turns(r) and r["shape"][0] != r["shape"][1] for r in rows)
        for r in rows:
            known = r["kind"] == "quantized" and r.get("error") is not None
            found[r["name"]] = {"fault": r["fault"]}
            if known:
                row, col = r["largest_at"][::-1] if conv1d and turns(r) else r["largest_at"]
                found[r["name"]].update(rel_mse=r["error"] ** 2, expected=r["expected"] ** 2, clipped=r["clipped"],
                                        max_err=r["largest_error"], at=row * r["shape"][-1] + col)
        return found


def place_of(index: int, dims: Sequence[int]) -> List[int]:
    """The indices that a flat index means."""
    at: List[int] = []
    for d in reversed(dims):
        at.insert(0, index % d if d else 0)
        index = index // d if d else 0
    return at


def mean_of(pairs: Sequence[Tuple[float, int]]) -> Optional[float]:
    """The mean of errors, each counted by its elements: the manifest does not have the sums of squares."""
    elements = float(sum(n for _, n in pairs))
    return sum(v * n for v, n in pairs) / elements if elements else 0.0 if pairs else None


def decibels(rel_mse: Optional[float]) -> Optional[float]:
    """The signal to quantization noise; None where there is no error, or where it is not known."""
    return -10.0 * math.log10(rel_mse) if rel_mse else None


def weights_of(out: Output) -> List[Json]:
    """Each quantized weight with its kind, form, layer and error."""
    errors, rows = out.errors(), []
    for t, kind in zip(out.stored, kind_names([t["name"] for t in out.stored])):
        e, shape = errors.get(t["name"], {}), logical(t)
        form = "%s, blocks of %d%s" % (t["scheme"], t["block_size"], ", 8-bit scales" if t.get("double_quant") else "") \
            if t.get("block_size") else "%s, a scale per row" % t["scheme"]
        known = "rel_mse" in e
        if known and e["at"] >= math.prod(shape) > 0:
            raise CheckError("%s: tensor '%s': the place of its largest error is %d, expected less than %d" % (
                MANIFEST, t["name"], e["at"], math.prod(shape)))
        rows.append({"name": t["name"], "kind": kind, "form": form, "layer": layer_of(t["name"]),
                     "shape": shape, "bytes": t["bytes_with_state"],
                     "rel_mse": e.get("rel_mse"), "sqnr": decibels(e.get("rel_mse")),
                     "max_err": e.get("max_err"), "max_at": place_of(e["at"], shape) if known else None,
                     **({"outputs": t["calibrated"]} if "calibrated" in t else {}), "over_median": None,
                     "expected_mse": e.get("expected"), "clipped": e.get("clipped"), "fault": e.get("fault")})
    return rows


def sums_of(rows: Sequence[Json]) -> Json:
    """What forms and kinds have in common: sums and errors of their weights."""
    known = [(r["rel_mse"], math.prod(r["shape"])) for r in rows if r["rel_mse"] is not None]
    return {"weights": len(rows), "elements": sum(math.prod(r["shape"]) for r in rows),
            "bytes": sum(r["bytes"] for r in rows), "mean": mean_of(known),
            "most": max((v for v, _ in known), default=None)}


def forms_of(rows: Sequence[Json], out: Output) -> List[Json]:
    """Sums over the weights of one scheme and block size."""
    schemes, forms = {t["name"]: str(t["scheme"]) for t in out.stored}, []
    for name in dict.fromkeys(r["form"] for r in rows):
        of = [r for r in rows if r["form"] == name]
        sums, errors = sums_of(of), [r["rel_mse"] for r in of if r["rel_mse"] is not None]
        median = statistics.median(errors) if errors else None
        most = sums.pop("most")
        forms.append({"form": name, "scheme": schemes[of[0]["name"]], **sums, "median": median,
                      "least": min(errors, default=None), "most": most})
        for r in of:
            r["over_median"] = None if r["rel_mse"] is None else r["rel_mse"] / median if median else 0.0
    return forms


def kinds_of(rows: Sequence[Json], forms: Sequence[Json]) -> List[Json]:
    """Sums over the weights of one form whose names differ only in numbers."""
    order, kinds = [f["form"] for f in forms], []
    groups: Dict[Tuple[str, str], List[Json]] = {}
    for r in rows:
        groups.setdefault((r["kind"], r["form"]), []).append(r)
    for (kind, form), of in sorted(groups.items(), key=lambda g: (natural(g[0][0]), g[0][0], order.index(g[0][1]))):
        known = [r for r in of if r["rel_mse"] is not None]
        worst = max(known, key=lambda r: float(r["rel_mse"]), default=None)
        largest = max(known, key=lambda r: float(r["max_err"]), default=None)
        kinds.append({"kind": kind, "form": form, **sums_of(of), "most_of": worst and worst["name"],
                      "max_err": largest and largest["max_err"], "max_of": largest and largest["name"]})
    return kinds


def read_eval(path: StrPath) -> Json:
    """The object that `eval --json` wrote. InputError for anything else."""
    try:
        with open(path, "rb") as f:
            found: Json = Evaluation.from_json(json.loads(f.read(1 << 28))).json
        if found["command"] == "eval":
            return found
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, ProgramError):
        pass
    raise InputError("%s: expected what 'qconv eval --json' writes, found something else" % os.fspath(path))


def facts(path: StrPath, against: Optional[StrPath] = None, *, lora: Sequence[str] = (), text: Optional[StrPath] = None,
          eval_file: Optional[StrPath] = None, progress: Watcher = None, threads: Optional[int] = None,
          **of_eval: Any) -> Tuple[Json, Output]:
    """All that a report of an output says (docs/report.md), and where it came from."""
    started = time.monotonic()
    found = read_eval(eval_file) if eval_file else None
    base = os.fspath(against) if against is not None else None
    out = Output(os.fspath(path), base, {"lora": list(lora) or None, "threads": threads}, progress)
    if text:
        asked: Dict[str, Any] = {"against": base, "text": text, "threads": threads, "lora": lora, "progress": progress,
                                 **of_eval}
        found = evaluate(path, **asked).json
    rows = weights_of(out)
    forms = forms_of(rows, out)
    source = "source" if out.compared else "manifest" if out.seen["manifest"] else "none"
    compared, missing = out.compared, None
    if any(r["rel_mse"] is None for r in rows):
        missing = {"none": "there is no manifest, and no --against to compare with",
                   "source": "the source has nothing to compare them with",
                   "manifest": "the manifest has none for them"}[source]
    first = (compared or {}).get("first_problem") or {}
    return {"command": "report", "program": "qconv " + version(), "path": out.path, "against": out.against,
            "model_type": out.seen["model_type"], "sizes": out.sizes(),
            "devices": (out.manifest.get("placement") or {}).get("devices", []),
            "errors_from": source, "errors_missing": missing,
            "compared": compared and {**{k: compared[k] for k in ("equal", "cast", "quantized")},
                                      "hashes_checked": compared["manifest"], "faults": compared["problems"],
                                      "first_what": first.get("what"), "first_why": first.get("why")},
            "forms": forms, "kinds": kinds_of(rows, forms), "weights": rows, "not_quantized": out.left(),
            "eval": found, "made": out.made(),
            "seconds": time.monotonic() - started}, out
