"""qconv.evaluate and `python -m qconv eval`: what quantizing has cost a model's predictions on a text.

Both models pass over the whole text once, one layer in memory at a time (stream.py); then their heads answer a few
windows at a time, side by side. What is computed of the logits, and how, is in docs/eval.md."""
from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from ._command import Parser, warnings_said, whole
from ._program import Progress, ProgressCallback, StrPath, listening
from .errors import CheckError, DeviceError, InputError, UsageError
from .results import Evaluation

if TYPE_CHECKING:
    import torch

    from .stream import Stream

SLICE_TOKENS = 4096           # that pass through a layer at a time
LOGIT_BYTES = 256 << 20       # of one model, at a time
CHUNK = 1 << 22               # logits that are computed with in double at a time
STATES = 4                    # of the whole batch that are held at once
DTYPES = ("float32", "bfloat16", "float16")


def evaluate(out: StrPath, *, text: StrPath, against: Optional[StrPath] = None, tokenizer: Optional[StrPath] = None,
             inputs: Optional[StrPath] = None, context: Optional[int] = None, max_tokens: Optional[int] = None,
             max_kl: Optional[float] = None, max_distance: Optional[float] = None, lora: Union[StrPath, Sequence[StrPath]] = (),
             device: str = "auto", dtype: str = "float32", threads: Optional[int] = None, trust_remote_code: bool = False,
             dry_run: bool = False, progress: Union[None, bool, ProgressCallback] = None) -> Evaluation:
    """Measures the perplexity of a language model over a text, and with `against` the KL divergence in nats of its
    predictions from those of another; of an encoder, how far its hidden states are from those of `against`.

    out           an output of qconv, or any checkpoint that it reads and whose type transformers knows
    text          a file in UTF-8; of token ids, one sequence a line, if its name ends in ".ids"; or "default"
    against       the checkpoint that `out` was made from
    tokenizer     a tokenizer.json, or a folder that has one; None: the model's own
    inputs        a .safetensors file with further arguments of the model's forward, with rows for each sequence
    context       tokens of a window; None: 2048, or the model's limit
    max_tokens    read at most so many tokens of the text
    max_kl        the largest mean KL divergence that is no failed check
    max_distance  the same for an encoder: the largest mean distance of hidden states
    lora          adapters of peft's, each a folder or "folder:scale", merged into `against`, or without one into `out`
    device        "auto", "cpu", "cuda" or "cuda:0,1": what computes; layers are dealt to several GPUs in turn
    dtype         that is computed in: "float32", "bfloat16" or "float16"; logits are compared in double
    threads       of torch; None: as it is set
    trust_remote_code  run the Python code that `out` brings with it
    dry_run       reads the text and says what memory it takes, and evaluates nothing: all figures are None
    progress      a function that is called with a Progress, or True for a bar

    Raises CheckError, with the whole result, where max_kl or max_distance is exceeded; UsageError (an argument; torch or
    transformers missing or too old); InputError (a model or text that is not read; logits that are not finite);
    DeviceError (no such GPU, or no room on it)."""
    if dtype not in DTYPES:
        raise UsageError("dtype is %r; expected one of %s" % (dtype, ", ".join(DTYPES)))
    for name, given, least in (("context", context, 2), ("max-tokens", max_tokens, 2), ("threads", threads, 1)):
        if given is not None and given < least:
            raise UsageError("--%s is %d; expected at least %d" % (name, given, least))
    from . import _stream_needs
    _stream_needs.check()
    with listening(progress) as listener:
        run = _Evaluation(out, against, listener, dtype, trust_remote_code,
                          [lora] if isinstance(lora, (str, os.PathLike)) else lora)
        try:
            run.open(text, tokenizer, inputs, context, max_tokens, device, threads)
            run.check_limits(max_kl, max_distance)
            result = run.result({} if dry_run else run.figures())
        finally:
            run.close()
    run.judge(result, max_kl, max_distance)
    return result


class _Evaluation:
    """One run: OUT, and MODEL if there is one, over one text."""

    def __init__(self, out: StrPath, against: Optional[StrPath], progress: Optional[ProgressCallback], dtype: str,
                 trust_remote_code: bool, lora: Sequence[StrPath]) -> None:
        self.adapters = [_adapter(os.fspath(a)) for a in lora]
        self.paths = [os.fspath(p) for p in (out, against) if p is not None]
        self.progress, self.dtype, self.trust = progress, dtype, trust_remote_code
        self.started, self.done = time.monotonic(), 0
        self.streams: List[Stream] = []
        self.values: List[Any] = []
        self.said: Dict[str, Any] = {}

    # ---- before ----

    def open(self, text: StrPath, tokenizer: Optional[StrPath], inputs: Optional[StrPath], context: Optional[int],
             max_tokens: Optional[int], device: str, threads: Optional[int]) -> None:
        import torch

        from . import _text
        from ._loading import config_of
        from ._values import Values
        from .stream import Stream, build
        if threads:
            torch.set_num_threads(threads)
        devices = devices_of(device)
        configs = [config_of(Path(path), {"trust_remote_code": self.trust}) for path in self.paths]
        models = [build(path, dtype=getattr(torch, self.dtype), trust_remote_code=self.trust) for path in self.paths]
        config, vocabularies = configs[0], [getattr(c.get_text_config(), "vocab_size", None) for c in configs]
        self.text_name = os.fspath(text)
        try:
            known: Optional[int] = int(models[0].get_input_embeddings().weight.shape[0])
        except (AttributeError, NotImplementedError):  # transformers names no embeddings of tokens
            known = None
        self.windows = w = _text.windows(
            text, self.paths[0], tokenizer=tokenizer, context=context, max_tokens=max_tokens, inputs=inputs,
            beside=self.paths[-1], config=config, vocabulary=known)
        self.answers = Answers(w, config, vocabularies[0])
        if self.answers.encoder and len(self.paths) == 1:
            raise UsageError("%s is an encoder (%s), whose hidden states are compared with another's: expected "
                             "--against MODEL" % (self.paths[0], config.model_type))
        for path, model in zip(self.paths, models):
            self.values.append(Values(path, adapters=self.adapters if path is self.paths[-1] else ()))
            self.streams.append(Stream(model, self.values[-1], rows=max(1, SLICE_TOKENS // w.longest),
                                       devices=devices, visit=self._visit))
        if vocabularies[0] != vocabularies[-1]:
            raise InputError("%s has a vocabulary of %s; expected %s, that of %s" % (
                self.paths[-1], vocabularies[-1], vocabularies[0], self.paths[0]))
        self.said = {"model_type": config.model_type, "tokenizer": w.kind, "device": ",".join(map(str, devices))}
        look = [s.outlook(len(self.answers.masks[-1]), w.longest) for s in self.streams]
        state = sum(l.state for l in look)
        self.memory = max(l.layer for l in look) + sum(l.stays for l in look) + STATES * state
        free = torch.cuda.mem_get_info(devices[0])[0] if devices[0] != "cpu" else self.memory
        if self.memory > free:
            raise DeviceError("evaluating takes %.1f GB on %s, which has %.1f GB free; expected fewer tokens "
                              "(--max-tokens), --dtype bfloat16, or --device cpu" % (
                                  self.memory / 1e9, devices[0], free / 1e9))

    def _visit(self, call: Any, pieces: List[slice], params: Dict[int, str]) -> Iterator[Any]:
        for piece in pieces:
            yield call.run(piece)
        self.done += 1
        if self.progress:
            total = sum(len(s.layers) for s in self.streams) + 1
            self.progress(Progress("evaluating", min(self.done, total), total, "layers"))

    def check_limits(self, max_kl: Optional[float], max_distance: Optional[float]) -> None:
        encoder = self.answers.encoder
        for option, limit, other in (("--max-kl", max_kl, encoder), ("--max-distance", max_distance, not encoder)):
            if limit is not None and len(self.paths) == 1:
                raise UsageError("%s needs --against MODEL" % option)
            if limit is not None and other:
                raise UsageError("%s does not go with %s, which is %s; expected %s" % (
                    option, self.paths[0], "an encoder" if encoder else "no encoder",
                    "--max-distance" if encoder else "--max-kl"))

    # ---- the result ----

    def figures(self) -> Dict[str, Any]:
        import torch
        with torch.no_grad():
            return self.answers.figures([s.body(self.answers.inputs) for s in self.streams])

    def result(self, figures: Dict[str, Any]) -> Evaluation:
        w = self.windows
        said: Dict[str, Any] = {f.name: None for f in fields(Evaluation)}
        said.update(self.said, path=self.paths[0], against=self.paths[1] if len(self.paths) > 1 else None,
                    text=self.text_name, tokens=w.tokens, windows=len(w.lengths), context=w.context, predicted=0)
        said.update(figures, seconds=time.monotonic() - self.started)
        del said["json"]
        found = Evaluation.from_json({"command": "eval", **said})
        return found.shown_by(partial(shown, found))

    def judge(self, r: Evaluation, max_kl: Optional[float], max_distance: Optional[float]) -> None:
        for what, limit, value, option in (("KL divergence", max_kl, r.kl_mean, "--max-kl"),
                                           ("distance of hidden states", max_distance, r.distance_mean,
                                            "--max-distance")):
            if limit is not None and value is not None and value > limit:
                raise CheckError("%s: the mean %s to %s is %.5g, above %s %g, over %s" % (
                    r.path, what, r.against, value, option, limit, r.text), r)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        for values in self.values:
            values.close()


class Answers:
    """What models make of the windows of a text: their predictions, or the hidden states of an encoder."""

    def __init__(self, windows: Any, config: Any, vocabulary: Optional[int], predicts: bool = True) -> None:
        self.windows, self.vocabulary = windows, vocabulary
        self.inputs, self.masks = windows.batch(range(len(windows.lengths)), config)
        self.encoder = not (predicts and (windows.causal or windows.halves or "decoder_input_ids" in self.inputs))

    def figures(self, bodies: Sequence[Any]) -> Dict[str, Any]:
        """Of one that computed `inputs`, beside the model that it was made from if that comes second."""
        import torch
        with torch.no_grad():
            return state_figures(self._states(bodies)) if self.encoder else word_figures(self._logits(bodies), len(bodies) > 1)

    def _rows(self) -> Iterator[slice]:
        count = len(self.windows.lengths)
        tokens = int(self.masks[-1].shape[1])
        step = 1 if self.encoder else max(1, LOGIT_BYTES // 4 // max(self.vocabulary or 1, 1) // tokens)
        step = 64 if self.encoder else min(step, 64)
        for at in range(0, count, step):
            yield slice(at, min(at + step, count))

    def _logits(self, bodies: Sequence[Any]) -> Iterator[List[Any]]:
        """[logits of each model [tokens, vocabulary], ids that came [tokens]], a piece of the predicted tokens at a time."""
        import torch
        mask = self.masks[-1]
        ids = self.inputs["decoder_input_ids" if "decoder_input_ids" in self.inputs else "input_ids"]
        first = self.windows.first if not self.windows.halves else 1
        for rows in self._rows():
            judged = mask[rows].clone()
            judged[:, :first] = False
            judged &= ids[rows] < (self.vocabulary or 1 << 62)
            targets = ids[rows][judged]
            logits = [b.head(rows).logits[:, -mask.shape[1]:] for b in bodies]
            places = judged[:, 1:].to(logits[0].device)
            picked = [one[:, :-1][places] for one in logits]
            step = max(1, CHUNK // max(picked[0].shape[-1], 1))
            for at in range(0, len(targets), step):
                yield [*(p[at:at + step].to(torch.float64) for p in picked), targets[at:at + step].to(picked[0].device)]

    def _states(self, bodies: Sequence[Any]) -> Iterator[List[Any]]:
        """[hidden states of each model [tokens, hidden] of one window]."""
        import torch
        for rows in self._rows():
            states = [b.states(rows).last_hidden_state for b in bodies]
            for i, mask in enumerate(self.masks[-1][rows]):
                yield [s[i][mask.to(s.device)].to(torch.float64) for s in states]


def devices_of(asked: str) -> Tuple[str, ...]:
    """The devices of torch that --device names."""
    import torch
    with warnings.catch_warnings():  # of a driver that is too old for this torch
        warnings.simplefilter("ignore")
        there = torch.cuda.is_available()  # for the CPU, too: or gradients would begin with it
    if asked == "cpu" or asked == "auto" and not there:
        return ("cpu",)
    kind, _, numbers = asked.partition(":")
    if asked != "auto" and (kind != "cuda" or numbers and not all(n.isdigit() for n in numbers.split(","))):
        raise UsageError("--device is '%s'; expected auto, cpu, cuda or cuda:0,1" % asked)
    count = torch.cuda.device_count() if there else 0
    chosen = [int(n) for n in numbers.split(",")] if numbers else list(range(count if asked != "auto" else 1))
    if not chosen or max(chosen) >= count:
        raise DeviceError("--device %s: torch %s finds %d GPU%s here" % (asked, torch.__version__, count, "s" * (count != 1)))
    return tuple("cuda:%d" % n for n in chosen)


def _adapter(text: str) -> Union[str, Tuple[str, float]]:
    path, colon, scale = text.rpartition(":")
    try:
        return (path, float(scale)) if colon and path else text
    except ValueError:
        return text


# ---- statistics ---------------------------------------------------------------------------------


def word_figures(pairs: Iterator[List[torch.Tensor]], compared: bool) -> Dict[str, Any]:
    """The figures of a language model. pairs: [logits of OUT (and of MODEL) [tokens, vocabulary] F64, ids [tokens]]."""
    import torch
    kept: Dict[str, List[torch.Tensor]] = {}
    for *logits, ids in pairs:
        logs = [torch.log_softmax(one, -1) for one in logits]
        came = [-one.gather(-1, ids[:, None])[:, 0] for one in logs]
        found = {"nll": came[0]}
        if compared:
            kl = (logs[1].exp() * (logs[1] - logs[0])).sum(-1)
            found.update(base=came[1], kl=kl.clamp(min=0) if bool(torch.isfinite(kl).all()) else kl,
                         same=(logits[0].argmax(-1) == logits[1].argmax(-1)).double(),
                         change=(-came[0]).exp() - (-came[1]).exp())
        if not all(bool(torch.isfinite(v).all()) for v in found.values()) or not all(
                bool(torch.isfinite(one).all()) for one in logits):
            raise InputError("the logits of a token are not finite")
        for name, value in found.items():
            kept.setdefault(name, []).append(value.cpu())
    one = {name: torch.cat(values) for name, values in kept.items()}
    nll, n = one["nll"], len(one["nll"])
    perplexity = math.exp(float(nll.mean()))
    out: Dict[str, Any] = {"predicted": n, "perplexity": perplexity,
                           "perplexity_error": _times(perplexity, _error(nll))}
    if not compared:
        return out
    base, ratio = math.exp(float(one["base"].mean())), nll - one["base"]
    kls, same = one["kl"].float().double().sort().values, float(one["same"].mean())
    difference = base * math.expm1(float(ratio.mean()))
    out.update(base_perplexity=base, base_perplexity_error=_times(base, _error(one["base"])),
               log_ratio=float(ratio.mean()), log_ratio_error=_error(ratio), difference=difference,
               difference_error=_error(perplexity * ratio + difference * one["base"]), kl_mean=float(one["kl"].mean()),
               kl_error=_error(one["kl"]), kl_median=_quantile(kls, 0.5), kl_99=_quantile(kls, 0.99),
               kl_max=float(one["kl"].max()), top1=same,
               top1_error=math.sqrt(same * (1 - same) / (n - 1)) if n > 1 else None,
               probability_rms=math.sqrt(float(one["change"].square().mean())))
    return out


def state_figures(pairs: Iterator[List[torch.Tensor]]) -> Dict[str, Any]:
    """The figures of an encoder. pairs: hidden states of OUT and of MODEL [tokens, hidden] F64, of one window each."""
    import torch
    distances, cosines = [], []
    for ours, theirs in pairs:
        distances.append((ours - theirs).norm() / theirs.norm())
        e, f = ours.mean(0), theirs.mean(0)
        # Half the squared distance of the two at length 1: vectors that are nearly alike lose no digits.
        cosines.append((e / e.norm() - f / f.norm()).square().sum() / 2)
    out: Dict[str, Any] = {}
    for name, values in (("distance", distances), ("cosine", cosines)):
        one = torch.stack(values).cpu()
        if not bool(torch.isfinite(one).all()):
            raise InputError("the hidden states of a window are not finite, or the original's are 0")
        ordered = one.float().double().sort().values
        out.update({name + "_mean": float(one.mean()), name + "_99": _quantile(ordered, 0.99),
                    name + "_max": float(ordered[-1])})
    return out


def _error(values: torch.Tensor) -> Optional[float]:
    """The standard error of a mean; None of one value."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None


def _times(factor: float, error: Optional[float]) -> Optional[float]:
    return None if error is None else factor * error


def _quantile(ordered: torch.Tensor, q: float) -> float:
    """At place q (n - 1) of sorted values, linear between neighbours."""
    place = q * (len(ordered) - 1)
    low = int(place)
    here = float(ordered[low])
    return here + (place - low) * (float(ordered[low + 1]) - here) if low + 1 < len(ordered) else here


# ---- the command ---------------------------------------------------------------------------------


def shown(r: Evaluation) -> str:
    what = "%s (%s)" % (r.path, r.model_type) + (" against %s" % r.against if r.against else "")
    encoder = r.distance_mean is not None
    head = "  %d tokens (%s), %d window%s of at most %d%s; %s, %.1f s" % (
        r.tokens, r.tokenizer, r.windows, "s" * (r.windows != 1), r.context,
        "" if encoder else ", %d predicted" % r.predicted, r.device, r.seconds)
    rows: List[Tuple[str, Optional[float], Any, str]] = []
    if encoder:
        for what_of, name in (("hidden states", "distance"), ("embeddings", "cosine")):
            for kind, key in (("mean", "mean"), ("99%", "99"), ("largest", "max")):
                rows.append(("distance of %s, %s" % (what_of, kind), getattr(r, "%s_%s" % (name, key)), False, ""))
    else:
        rows.append(("perplexity of OUT" if r.against else "perplexity", r.perplexity, r.perplexity_error, ""))
    if r.against and not encoder and r.log_ratio is not None:
        more = 100 * math.exp(r.log_ratio)
        rows += [("perplexity of MODEL", r.base_perplexity, r.base_perplexity_error, ""),
                 ("difference", r.difference, r.difference_error, ""),
                 ("difference, relative", 100 * math.expm1(r.log_ratio), _times(more, r.log_ratio_error), "%"),
                 ("KL divergence, mean", r.kl_mean, r.kl_error, ""),
                 ("KL divergence, median", r.kl_median, False, ""), ("KL divergence, 99%", r.kl_99, False, ""),
                 ("KL divergence, largest", r.kl_max, False, ""),
                 ("same most probable token", _times(100, r.top1), _times(100, r.top1_error), "%"),
                 ("change of probability, rms", _times(100, r.probability_rms), False, "%")]
    texts = [(name, _number(value, unit), "" if error is False else "+- " + _number(error, unit))
             for name, value, error, unit in rows]
    wide, long = max(len(t[0]) for t in texts), max(len(t[1]) for t in texts)
    table = [("  %-*s  %*s  %s" % (wide, name, long, value, error)).rstrip() for name, value, error in texts]
    return "\n".join(["%s over %s" % (what, r.text), head, "", *table])


def _number(value: Optional[float], unit: str) -> str:
    return "-" if value is None or not math.isfinite(value) else "%.5g%s" % (value, unit)


def main(argv: Sequence[str]) -> None:
    parser = Parser("eval", "Read a text with the language model OUT, an output of qconv or any checkpoint whose type "
                    "transformers knows, and report its perplexity; with --against, how far its predictions are from "
                    "those of MODEL. One layer is in memory at a time. docs/eval.md says what is computed and how.")
    parser.takes(evaluate)
    add = parser.add_argument
    add("--json", action="store_true", help="write the result to standard output as one JSON object")
    add("-q", "--quiet", action="store_true", help="show errors only")
    given = vars(parser.parse_args(list(argv)))
    as_json, quiet = given.pop("json"), given.pop("quiet")
    shown = not quiet and sys.stderr.isatty()
    with warnings_said(quiet):
        result, failed = whole(Evaluation, lambda: evaluate(given.pop("out"), progress=shown, **given))
    if as_json:
        print(json.dumps(result.json))
    elif not quiet:
        print(result, flush=True)
    if failed:
        raise failed
