"""qconv.calibrate and `python -m qconv calibrate`: quantized weights for the least error in a model's answers on a
text. torch takes the text through the model, one layer in memory; the program solves and writes."""
from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import _stream_needs
from ._command import Parser, warnings_said
from ._pipeline import is_pipeline, split
from ._program import Bars, ProgressCallback, StrPath, arguments, listening
from .errors import UsageError
from .results import Conversion, DryRun

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import ConvertOptions

TOKENS = 131072
def calibrate(  # type: ignore[misc]  # options of convert that are parameters here
              model: StrPath, out: Optional[StrPath] = None, *, text: StrPath = "default",
              calibration_tokens: int = TOKENS, calibration_context: Optional[int] = None,
              tokenizer: Optional[StrPath] = None, inputs: Optional[StrPath] = None,
              mix: Union[str, float] = "auto", sided: Optional[str] = None, damping: Optional[float] = None,
              device: str = "auto", trust_remote_code: bool = False, dry_run: bool = False,
              progress: Union[None, bool, ProgressCallback] = None,
              **options: Unpack[ConvertOptions]) -> Union[Conversion, DryRun]:
    """Converts the checkpoint `model` to the folder `out` as `convert` does, with codes and scales that are chosen for
    the least error in the model's answers on a text (docs/calibration.md). transformers has to know the model.

    text                 a file in UTF-8; of token ids, one sequence a line, if its name ends in ".ids"; or "default",
                         the bundled text
    calibration_tokens   the most tokens of it that are taken, in windows that are spread over it
    calibration_context  tokens of a window; None: 2048, or the model's limit
    tokenizer            a tokenizer.json, or a folder that has one; None: the model's own
    inputs               a .safetensors file with further arguments of the model's forward, a row for each sequence
    mix                  the bundled text's share of all tokens, from 0 and below 1; "auto": by how narrow the text is
    sided                "one": all outputs of a layer count alike; None and "two": by what they do to the answer
    damping              how much more the weights are trusted than the text; None: 0.1, and more with few tokens
    device               "auto", "cpu", "cuda" or "cuda:0,1": what computes
    trust_remote_code    runs the Python code that `model` brings with it
    dry_run              says what would be written, as qconv.dry_run does, and writes nothing
    progress             a function that is called with a Progress, or True for a bar

    `options` are those of `convert`. The same call continues what was interrupted. Raises UsageError (an argument;
    torch or transformers missing or too old), InputError (a model or text that is not read), and what `convert`
    raises."""
    for name in ("calibrate", "hessians", "image_states"):
        if options.get(name):
            raise UsageError("%s is no argument of qconv.calibrate" % name)
    own = {"text": text, "calibration_tokens": calibration_tokens, "calibration_context": calibration_context,
           "tokenizer": tokenizer, "inputs": inputs, "mix": mix, "sided": sided, "device": device,
           "trust_remote_code": trust_remote_code}
    typed = arguments(dict(options, damping=damping, dry_run=dry_run))
    with listening(progress) as listener:
        result = started(typed, model, out, own, listener, False)
    assert result is not None
    return result


def started(typed: Sequence[str], model: StrPath, out: Optional[StrPath], own: Mapping[str, Any],
            progress: Optional[ProgressCallback], shown: bool) -> Union[None, Conversion, DryRun]:
    """Checks what can be checked without torch, and calibrates."""
    own = dict(own, mix=share_of(own["mix"]))
    if own["sided"] not in (None, "one", "two"):
        raise UsageError("--sided is '%s'; expected one or two" % own["sided"])
    for name, least in (("calibration_tokens", 1), ("calibration_context", 2)):
        if own[name] is not None and own[name] < least:
            raise UsageError("--%s is %d; expected at least %d" % (name.replace("_", "-"), own[name], least))
    if is_pipeline(model):
        raise UsageError("calibrating takes one model, and MODEL is a pipeline of several: name the folder of one part")
    _stream_needs.check()
    from ._calibrate_run import calibrated
    return calibrated(typed, model, out, own, progress, shown)


def share_of(mix: Union[str, float]) -> Optional[float]:
    """What --mix says; None: auto."""
    try:
        share = None if mix == "auto" else float(mix)
    except ValueError:
        share = 1.0
    if share is not None and not 0 <= share < 1:
        raise UsageError("--mix is '%s'; expected auto, or a share of all tokens from 0 and below 1" % mix)
    return share


# The options that are this command's own, with their defaults; what else there is goes to `qconv convert`.
OWN = {name: p.default for name, p in inspect.signature(calibrate).parameters.items()
       if name not in ("model", "out", "dry_run", "progress", "options")}


def parsed(argv: Sequence[str]) -> Tuple[Dict[str, Any], List[str], List[str]]:
    """A command line as own options, those of `convert` as they are typed, and places."""
    words, places, rules = split(["convert", *(w + "=true" if w == "--trust-remote-code" else w for w in argv)])
    own: Dict[str, Any] = dict(OWN)
    typed: List[str] = ["--%s=%s" % rule for rule in rules]
    for word in words:
        option, _, value = word[2:].partition("=")
        name = option.replace("-", "_")
        if name in OWN:
            own[name] = value
        if name not in OWN or name == "damping":
            typed.append(word)
        if name in ("calibration_tokens", "calibration_context"):
            if not value.isdigit():
                raise UsageError("--%s is '%s'; expected a number of tokens" % (option, value))
            own[name] = int(value)
    return own, typed, places


def main(argv: Sequence[str]) -> None:
    if {"--help", "-h"} & set(argv):
        parser = Parser("calibrate", "Convert MODEL to OUT as `qconv convert` does, with codes and scales that are "
                        "chosen for the least error in the model's answers on a text. All options of convert are "
                        "taken. Needs torch and transformers: pip install 'qconv[models]'.")
        parser.takes(calibrate)
        parser.print_help()
        return
    own, typed, places = parsed(argv)
    if not 1 <= len(places) <= 2 or len(places) == 1 and "--dry-run" not in typed:
        raise UsageError("expected MODEL and OUT; try 'qconv calibrate --help'")
    quiet = "--quiet" in typed or "-q" in typed
    with warnings_said(quiet):
        started(typed, places[0], places[1] if len(places) == 2 else None, own, None if quiet else Bars(lines=True), True)
