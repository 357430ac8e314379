"""The facts of a report: what is known of an output, as `qconv report --json` prints it.

Everything comes from what the program prints (`inspect --json`, `verify --json --codes`), from `qconv.evaluate` and from the
manifest of the output. docs/report.md says what each number is.
"""
from __future__ import annotations

import json
import math
import os
import re
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from ._program import Progress, StrPath, answer, version
from .errors import CheckError, InputError
from .evaluate import evaluate
from .results import Answer

Json = Dict[str, Any]
Watcher = Union[None, bool, Callable[[Progress], object]]
MANIFEST = "qconv.json"
NONE_QUANTIZED = "%s: no weight in it is quantized in NF4, FP4, int8 or integers of compressed-tensors without zero " \
    "points or act-order"


# ---- codes and what normal weights would give --------------------------------------------------------------

# Half way between the values of NF4 (quant/quant_values.h).
NF4_THRESHOLDS = [float.fromhex(x) for x in (
    "-0x1.b239b2p-1 -0x1.38a4ep-1 -0x1.d709p-2 -0x1.5bd4ecp-2 -0x1.e079d8p-3 -0x1.1a7178p-3 -0x1.74f0e2p-5 "
    "0x1.45f5fep-5 0x1.ec90c6p-4 0x1.a0cfcp-3 0x1.2b05a8p-2 0x1.8ea7f2p-2 0x1.00da06p-1 0x1.491b5ep-1 "
    "0x1.b913b2p-1").split()]
MOST, STEP = 12.0, 0.01  # standard deviations; no normal value is larger


def is_4_bit(scheme: str) -> bool:
    """Whether its codes are 4 bits and not 8."""
    return scheme in ("nf4", "fp4") or scheme.startswith("w4")


def expected_shares(scheme: str, n: int) -> List[float]:
    """How often each code would occur among n independent normal values that share a scale, which is their largest
    magnitude m: one value has the code of +1 or -1, the others are normal values cut at m, and m has the density
    n (2 F(m) - 1)^(n-1) 2 f(m)."""
    if scheme == "nf4":
        thresholds = NF4_THRESHOLDS
    else:
        lowest, codes = (-8, 16) if is_4_bit(scheme) else (-127, 255)
        thresholds = [(lowest + i + 0.5) * 2.0 / (codes - 1) for i in range(codes - 1)]
    half, rest, total, m = math.sqrt(0.5), float(n - 1), 0.0, STEP / 2
    shares = [0.0] * (len(thresholds) + 1)
    while n > 1 and m < MOST:
        inside = math.erf(m * half)
        density = math.exp(rest * math.log(inside) - m * m / 2)
        if density >= 1e-18:
            cuts = [math.erf(t * m * half) / 2 for t in thresholds] + [inside / 2]
            before = -inside / 2
            for c, after in enumerate(cuts):
                shares[c] += density * (after - before) / inside
                before = after
            total += density
        m += STEP
    weight = rest / n / total if total > 0 else 0.0
    shares = [s * weight for s in shares]
    shares[0] += 0.5 / n
    shares[-1] += 0.5 / n
    return shares if is_4_bit(scheme) else [0.0] + shares  # nothing is -128


def entropy(counts: Sequence[int]) -> float:
    total = sum(counts) or 1
    return max(0.0, -sum(c / total * math.log2(c / total) for c in counts if c))


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
    def pattern(found: re.Match[str]) -> str:
        if found["inner"] is None:
            return {"*": ".*", "?": "."}.get(found[0]) or re.escape(found[0][-1])
        members = re.findall(r"\\.|[^\\]", found["inner"], re.S)
        inner = "".join(c if c in ("-", "\\-") else re.escape(c[-1]) for c in members)
        return "[%s%s]" % ("^" if found["not"] else "", inner)
    parts = r"\[(?P<not>[!^]?)(?P<inner>(?:\\.|[^\\])(?:\\.|[^\\\]])*)\]|\\?.|\\"
    whole = re.sub(parts, pattern, glob, flags=re.S)
    return re.fullmatch(whole, name, re.S) is not None


# ---- the output --------------------------------------------------------------------------------------------

WHY_LEFT = {"embedding": "looked up row by row, not multiplied",
            "head": "what the model says depends on it directly; loaders keep it in 16 bit",
            "router": "small, and it decides which experts are asked",
            "norm": "a vector: nothing to save", "bias": "a vector: nothing to save",
            "conv": "a convolution: loaders keep it in 16 bit",
            "packed": "quantized before, in a form that was passed on",
            "state": "scales of a weight that was quantized before"}
COMPRESSED_TENSORS = ("int-quantized", "pack-quantized")
INTEGERS = {"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"}


def ask(command: str, places: Sequence[StrPath], options: Mapping[str, Any], progress: Watcher) -> Tuple[Json, str]:
    """The object that a command prints, and what its check found wrong, which is no reason to stop here."""
    try:
        return answer(Answer, command, places, options, progress).json, ""
    except CheckError as error:
        if error.result is None:
            raise
        return error.result.json, str(error)


def product(dims: Iterable[int]) -> int:
    return math.prod(dims)


def logical(t: Json) -> List[int]:
    """The shape of a tensor of inspect, and of what it holds where that is quantized."""
    return list(t.get("logical_shape") or t["shape"])


class Output:
    """What is known of an output: inspect's answer, its manifest, counts of codes, and a comparison with MODEL."""

    def __init__(self, path: str, against: Optional[str], more: Mapping[str, Any], progress: Watcher) -> None:
        self.path, self.against, self.trouble, self.note = path, against, "", ""
        self.seen = answer(Answer, "inspect", [path], {}, progress).json
        self.manifest: Json = {}
        if self.seen["manifest"]:
            with open(os.path.join(path, MANIFEST), encoding="utf-8") as f:
                self.manifest = json.load(f)
        if not any(self.is_stored(t) for t in self.seen["tensors"]):
            raise InputError(NONE_QUANTIZED % path)
        self.compared: Optional[Json] = None
        self.codes: Optional[Dict[str, List[int]]] = None
        # Without a manifest there is nothing to verify; compared with itself, the output is read all the same.
        other = against or (None if self.manifest else path)
        try:
            found, trouble = ask("verify", [path], {"codes": True, "against": other, **more}, progress)
            self.codes = {row["name"]: row["counts"] for row in found["codes"]} or None
            self.trouble = trouble if against or self.manifest else ""
            self.compared = found if against else None
        except (InputError, CheckError) as error:
            if against:
                raise
            self.note = "the codes could not be counted: %s" % error
        self.model = answer(Answer, "inspect", [against], {}, progress).json if against else None
        self.tensors: List[Json] = self.seen["tensors"]
        self.stored = [t for t in self.tensors if (t["name"] in self.codes if self.codes else self.is_stored(t))]
        self.ints = max((t for t in self.stored if t.get("format") in COMPRESSED_TENSORS),
                        key=lambda t: int(t["bits"]), default=None)

    @staticmethod
    def is_stored(t: Json) -> bool:
        """Whether it is a weight in one of the forms that the program makes, as far as inspect tells."""
        scheme = t["scheme"] or ""
        return scheme in ("nf4", "fp4", "int8", "int8-block") or bool(
            re.match("w[48]a", scheme)) and t.get("format") in COMPRESSED_TENSORS and not (
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
            row["elements"] += product(logical(t)) if counted else 0
            row["bytes"] += t.get("bytes_with_state", t["bytes"])
        return sorted(rows.values(), key=lambda r: (-r["bytes"], r["example"].encode()))

    def sizes(self) -> Json:
        """Sums of bytes and of elements, before and now."""
        totals, names = self.seen["totals"], {t["name"] for t in self.stored}
        plain = 0
        for t in self.tensors:
            if t["name"] in names:
                plain += product(logical(t)) * (int(re.findall("[0-9]+", t["logical_dtype"])[0]) // 8)
            elif "state_of" not in t:
                plain += t["bytes_with_state"] if t["scheme"] else t["bytes"]
        elements = sum(product(logical(t)) for t in self.stored)
        quantized = sum(t["bytes_with_state"] for t in self.stored)
        source = (sum(f["file_bytes"] for f in self.model["files"]) if self.model else
                  sum(f["bytes"] for f in self.seen["manifest"]["source"]) if self.seen["manifest"] else 0)
        return {"source_file_bytes": source or None, "unquantized_bytes": plain, "tensor_bytes": totals["tensor_bytes"],
                "file_bytes": totals["file_bytes"], "elements": totals["weights"], "quantized_elements": elements,
                "quantized_bytes": quantized, "scale_bytes": quantized - sum(t["bytes"] for t in self.stored),
                "bits_per_weight": totals["bits_per_weight"],
                "quantized_bits_per_weight": quantized * 8.0 / elements if elements else None}

    def made(self) -> Optional[Json]:
        """How the output was made, with the command line as far as the manifest has the options."""
        m = self.seen["manifest"]
        if not m:
            return None
        scale = None if m["to"] == "keep" else m["scale"] or "absmax"
        c = m.get("calibrate")
        words = ["python -m qconv calibrate --to" if c and not c.get("hessians") else "qconv --to", m["to"]]
        if self.ints:
            words.append("--format compressed-tensors")
            words += ["--activation-bits 16"] if self.ints["bits"] == 8 and "a16" in self.ints["scheme"] else []
        words += (["--block-size %d" % m["block_size"]] if m["block_size"] else
                  ["--block-size channel"] if m["to"] == "int4" else [])
        words += ["--no-double-quant"] if m["block_size"] and not m["double_quant"] and not self.ints else []
        words += ["--scale " + scale] if scale else []
        if c:
            words += ["--hessians " + quoted(c["hessians"])] if c.get("hessians") else [
                "--text " + quoted(c["text"]), "--calibration-tokens %d" % c["tokens"],
                "--calibration-context %d" % c["context"]]
            words += ["--damping %.6g" % c["damping"]] if c["damping"] > 0 else []
            words.append("--sided " + c["sided"])
        for a in m.get("adapters") or []:
            words.append("--lora " + quoted(a["name"]) + (":%.17g" % a["scale"] if a["scale"] != 1 else ""))
        words += ["--rest " + m["rest"]] if m["rest"] != "keep" else []
        words += ["--%s %s" % (what, quoted(glob)) for what, glob in self.rules()]
        p = self.manifest.get("placement")
        if p and p["devices"]:
            words.append("--vram %s --margin %.6g --context %d --batch %d" % (
                quoted(p["vram"]), p["margin"], p["context"], p["batch"]))
        words += (["--compress none"] if m["compress"] == "none" else ["--compress zstd:%d" % m["level"]]
                  if m["level"] != 1 else [])
        words.append("--max-shard-size %d MODEL OUT" % m["max_shard_bytes"])
        return {"qconv_version": m["qconv_version"], "to": m["to"], "scale": scale,
                **{key: m[key] for key in ("calibrate", "adapters") if key in m},
                "command_line": " ".join(words), "sources": m["source"]}

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


def quoted(text: str) -> str:
    """A name as a shell reads it back."""
    return text if re.fullmatch(r"[A-Za-z0-9_+=:,./-]+", text) else "'" + text.replace("'", "'\\''") + "'"


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
        if known and e["at"] >= product(shape) > 0:
            raise CheckError("%s: tensor '%s': the place of its largest error is %d, expected less than %d" % (
                MANIFEST, t["name"], e["at"], product(shape)))
        rows.append({"name": t["name"], "kind": kind, "form": form, "layer": layer_of(t["name"]),
                     "shape": shape, "bytes": t["bytes_with_state"],
                     "rel_mse": e.get("rel_mse"), "sqnr": decibels(e.get("rel_mse")),
                     "max_err": e.get("max_err"), "max_at": place_of(e["at"], shape) if known else None,
                     **({"outputs": t["calibrated"]} if "calibrated" in t else {}), "over_median": None,
                     "expected_mse": e.get("expected"), "clipped": e.get("clipped"), "fault": e.get("fault")})
    return rows


def sums_of(rows: Sequence[Json], codes: Optional[Dict[str, List[int]]]) -> Json:
    """What forms and kinds have in common: sums, errors and codes of their weights."""
    known = [(r["rel_mse"], product(r["shape"])) for r in rows if r["rel_mse"] is not None]
    return {"weights": len(rows), "elements": sum(product(r["shape"]) for r in rows),
            "bytes": sum(r["bytes"] for r in rows), "mean": mean_of(known),
            "most": max((v for v, _ in known), default=None),
            "codes": [sum(c) for c in zip(*(codes[r["name"]] for r in rows))] if codes else None}


def forms_of(rows: Sequence[Json], out: Output) -> List[Json]:
    """Sums over the weights of one scheme and block size, with what is expected of their codes."""
    schemes, forms = {t["name"]: t for t in out.stored}, []
    for name in dict.fromkeys(r["form"] for r in rows):
        of = [r for r in rows if r["form"] == name]
        s, scheme = sums_of(of, out.codes), str(schemes[of[0]["name"]]["scheme"])
        errors = sorted(r["rel_mse"] for r in of if r["rel_mse"] is not None)
        n = len(errors)
        median = None if n == 0 else errors[n // 2] if n % 2 else (errors[n // 2 - 1] + errors[n // 2]) / 2
        expected: Optional[List[float]] = None
        if scheme != "fp4" and s["elements"]:
            shares: Dict[int, List[float]] = {}
            expected = [0.0] * (16 if is_4_bit(scheme) else 256)
            for r in of:
                elements = product(r["shape"])
                per = schemes[r["name"]].get("block_size") or (r["shape"][-1] if r["shape"] else 1)
                per = max(1, min(per, elements))
                shares[per] = shares.get(per) or expected_shares(scheme, per)
                for c, share in enumerate(shares[per]):
                    expected[c] += share * elements / s["elements"]
        distance = None
        if expected and s["codes"]:
            total = sum(s["codes"]) or 1
            distance = sum(abs(c / total - e) for c, e in zip(s["codes"], expected)) / 2
        forms.append({"form": name, "scheme": scheme, "weights": s["weights"], "elements": s["elements"],
                      "bytes": s["bytes"], "mean": s["mean"], "median": median, "least": errors[0] if n else None,
                      "most": s["most"], "codes": s["codes"], "expected": expected,
                      "entropy": entropy(s["codes"]) if s["codes"] else None, "distance": distance})
        for r in of:
            r["over_median"] = None if r["rel_mse"] is None else r["rel_mse"] / median if median else 0.0
    return forms


def kinds_of(rows: Sequence[Json], forms: Sequence[Json], codes: Optional[Dict[str, List[int]]]) -> List[Json]:
    """Sums over the weights of one form whose names differ only in numbers."""
    order, kinds = [f["form"] for f in forms], []
    groups: Dict[Tuple[str, str], List[Json]] = {}
    for r in rows:
        groups.setdefault((r["kind"], r["form"]), []).append(r)
    for (kind, form), of in sorted(groups.items(), key=lambda g: (natural(g[0][0]), g[0][0], order.index(g[0][1]))):
        s, known = sums_of(of, codes), [r for r in of if r["rel_mse"] is not None]
        worst = max(known, key=lambda r: float(r["rel_mse"]), default=None)
        largest = max(known, key=lambda r: float(r["max_err"]), default=None)
        counted = s.pop("codes")
        kinds.append({"kind": kind, "form": form, **s, "most_of": worst and worst["name"],
                      "max_err": largest and largest["max_err"], "max_of": largest and largest["name"],
                      "codes": counted})
    return kinds


def read_answer(path: StrPath, commands: Sequence[str]) -> Json:
    """The object that one of these commands wrote with --json. InputError for anything else."""
    with open(path, "rb") as f:
        text = f.read(1 << 28)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("%s: expected what 'qconv %s --json' writes, found no JSON: %s" % (
            os.fspath(path), commands[0], error)) from None
    command = value.get("command") if isinstance(value, dict) else None
    if command not in commands:
        raise InputError("%s: expected what 'qconv %s --json' writes, found %s" % (
            os.fspath(path), " or ".join(commands), "the answer of '%s'" % command if command else "something else"))
    return dict(value)


def check_eval(found: Json, path: str) -> Json:
    """Refuses what a page has no figures for."""
    if found.get("distance_mean") is not None:
        raise InputError("%s: it has the distances of an encoder, and a report shows what --text says of a language "
                         "model; 'qconv eval --against' tells the distance of hidden states" % path)
    numbers = ["predicted", "perplexity"] + (["base_perplexity", "kl_mean"] if found.get("against") is not None else [])
    values = [v for v in map(found.get, numbers) if isinstance(v, (int, float)) and math.isfinite(v)]
    if len(values) < len(numbers) or min(values[:3]) < 1 or min(values[3:], default=0) < 0:
        raise InputError("%s: the numbers cannot come from 'qconv eval'" % path)
    return found


def facts(path: StrPath, against: Optional[StrPath] = None, *, lora: Sequence[str] = (), text: Optional[StrPath] = None,
          eval_file: Optional[StrPath] = None, validate_file: Optional[StrPath] = None, progress: Watcher = None,
          threads: Optional[int] = None, **of_eval: Any) -> Tuple[Json, Output]:
    """All that a report of an output says (docs/report.md), and where it came from."""
    started = time.monotonic()
    found = check_eval(read_answer(eval_file, ["eval"]), os.fspath(eval_file)) if eval_file else None
    validation = read_answer(validate_file, ["validate"]) if validate_file else None
    base = os.fspath(against) if against is not None else None
    out = Output(os.fspath(path), base, {"lora": list(lora) or None, "threads": threads}, progress)
    if text:
        asked: Dict[str, Any] = {"against": base, "text": text, "threads": threads, "lora": lora, "progress": progress,
                                 **of_eval}
        found = check_eval(evaluate(path, **asked).json, os.fspath(path))
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
            "forms": forms, "kinds": kinds_of(rows, forms, out.codes), "weights": rows, "not_quantized": out.left(),
            "eval": found, "validation": validation, "made": out.made(),
            "seconds": time.monotonic() - started}, out
