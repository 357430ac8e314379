"""qconv: quantization and model conversion for Hugging Face checkpoints, from Python.

    import qconv
    qconv.plan("meta-llama/Llama-3.3-70B-Instruct", vram="2x40GB").fits
    qconv.convert("model/", "out/", to="nf4", vram="2x40GB", progress=True)
    qconv.verify("out/", against="model/")
    model = qconv.load("out/")      # a transformers model on the planned devices

`load` reads an output with libqconv, `calibrate` converts with codes and scales that are chosen by what a text does in
the model, `importance` weighs errors for `to="auto"` by it, and `evaluate` measures what quantizing has cost; they take
torch and transformers (docs/python.md). Every other function runs the program of the same name (`python -m qconv`), and its keyword arguments are the program's options with
underscores: `block_size=32` is `--block-size 32`, `force=True` is `--force`, a list is several values.
`python -m qconv COMMAND --help` explains them. What comes back is the object of `--json` (qconv.results). Where
the program ends with an exit code other than 0 there is a qconv.Error with its one sentence; its warnings are
Python warnings (QconvWarning), and its notes go to the logger "qconv".

Ctrl-C ends the program in order and raises KeyboardInterrupt; the same call of `convert` continues.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union, overload

from ._cuda import CudaLibrary, cuda_library
from ._pipeline import is_pipeline as _is_pipeline
from ._pipeline import walk as _walk
from ._program import Progress, ProgressCallback, StrPath, answer, version
from ._register import register as _register
from .calibrate import calibrate
from .errors import (CheckError, DeviceError, Error, InputError, ProgramError, QconvWarning, RunError, StoppedError,
                     UsageError)
from .evaluate import evaluate
from .from_torch import from_torch
from .importance import importance
from .load import load
from .report import Report, report
from .results import (Answer, Comparison, Conversion, DryRun, Evaluation, Hardware, Inspection, Loads, Plan,
                      Pipeline, PlanDevice, Result, SchemeTotals, TensorInfo, TorchFiles, TrainingPlan, Unpacking,
                      Validation, Verification)
from .training import plan_training

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import (ConvertOptions, HardwareOptions, InspectOptions, PlanOptions, UnpackOptions,
                           ValidateOptions)

__all__ = ["Answer", "CheckError", "Comparison", "Conversion", "CudaLibrary", "DeviceError", "DryRun",
           "Error", "Evaluation", "Hardware", "InputError", "Inspection", "Loads", "Pipeline", "Plan", "PlanDevice",
           "ProgramError", "Progress", "ProgressCallback", "QconvWarning", "Report", "Result", "RunError",
           "SchemeTotals", "StoppedError", "TensorInfo", "TorchFiles", "TrainingPlan", "Unpacking", "UsageError", "Validation",
           "Verification", "calibrate", "call", "convert", "cuda_library", "dry_run", "eval", "evaluate", "from_torch", "hardware",
           "importance", "inspect", "load", "plan", "plan_training", "report", "unpack", "validate", "verify", "version"]

_register()

eval = evaluate

__version__: str  # the program's
ProgressWish = Union[None, bool, ProgressCallback]


def plan(model: StrPath, **options: Unpack[PlanOptions]) -> Plan:
    """Works out what fits on which device; writes nothing.

    `model` is a checkpoint (only headers are read), a config.json, or the id of a well-known model such as
    "meta-llama/Llama-3.3-70B-Instruct". The devices are `vram`: "2x40GB", "24GB+16GB", "3090+cpu:64GB". `to` is a
    scheme, or "auto" for the least error that fits. All sizes in the result are bytes.

    Raises UsageError for a budget or an option that cannot be read, InputError for a model that cannot be read, and
    DeviceError for vram="auto" without a GPU. That it does not fit is no error: see `Plan.fits`."""
    return answer(Plan, "plan", [model], options)


def convert(model: StrPath, out: StrPath, *, progress: ProgressWish = None,
            **options: Unpack[ConvertOptions]) -> Conversion:
    """Converts the checkpoint `model` and writes the result to the folder `out`.

    `to` says what weights become: "nf4", "int8", "int4", "auto", "fp16", "bf16" or "keep". With `vram` each device
    gets shards of its own. `progress` is a function that is called with a Progress about six times a second, or True
    for a bar (of tqdm, where it is installed).

    If it was interrupted, the same call continues it; if `out` holds this very output already, nothing is done
    (`Conversion.complete_before`). Raises UsageError if something else lies in `out`, InputError for a model that
    cannot be converted, RunError if the disk fails or is full. An exception in `progress` ends the program in order
    and comes back to the caller.

    Of a pipeline of diffusers (a folder with model_index.json) the transformers, UNets and text encoders are converted
    each by itself, or the parts that `keep` and `quantize` name, and all else is copied; the result is a Pipeline."""
    if dict(options).get("dry_run"):
        raise UsageError("dry_run: qconv.dry_run() does that")
    if _is_pipeline(model):
        return _walk(Conversion, "convert", [model, out], options, progress)
    return answer(Conversion, "convert", [model, out], options, progress)


def dry_run(model: StrPath, out: Optional[StrPath] = None, **options: Unpack[ConvertOptions]) -> DryRun:
    """What `convert` would write, with exact sizes in bytes; writes nothing. Raises what `convert` would refuse."""
    if _is_pipeline(model):
        return _walk(DryRun, "convert", [model], {**options, "dry_run": True}, None)
    return answer(DryRun, "convert", [model, out], {**options, "dry_run": True})


def inspect(path: StrPath, **options: Unpack[InspectOptions]) -> Inspection:
    """Lists the tensors of a checkpoint, of an output or of one file, with totals in bytes. Reads headers only.

    `for_="vllm"` or "all" also says which engines load it. Raises InputError for what is no checkpoint."""
    return answer(Inspection, "inspect", [path], options)


@overload
def verify(out: StrPath, against: None = None, *, threads: Union[None, int, str] = None,
           progress: ProgressWish = None) -> Verification: ...


@overload
def verify(out: StrPath, against: StrPath, *, threads: Union[None, int, str] = None,
           progress: ProgressWish = None) -> Comparison: ...


def verify(out: StrPath, against: Optional[StrPath] = None, *, threads: Union[None, int, str] = None,
           progress: ProgressWish = None) -> Union[Verification, Comparison]:
    """Compares every byte of an output with its hashes, and with `against` every tensor with that model.

    Raises CheckError if anything differs, with the first fault as its message and all of them in its `result`;
    InputError if `out` is no output of qconv. Of a pipeline of diffusers the copied files and each part are verified."""
    options = {"against": against, "threads": threads}
    if _is_pipeline(out):
        return _walk(Verification, "verify", [out], options, progress)
    if against is None:
        return answer(Verification, "verify", [out], options, progress)
    return answer(Comparison, "verify", [out], options, progress)


def unpack(out: StrPath, folder: StrPath, *, progress: ProgressWish = None,
           **options: Unpack[UnpackOptions]) -> Unpacking:
    """Writes the output `out` to `folder` with its shards decompressed, ready for from_pretrained.

    Hashes are checked on the way. Raises CheckError if one differs, UsageError if something else lies in `folder`."""
    if _is_pipeline(out):
        return _walk(Unpacking, "unpack", [out, folder], options, progress)
    return answer(Unpacking, "unpack", [out, folder], options, progress)


def validate(out: StrPath, *, progress: ProgressWish = None, **options: Unpack[ValidateOptions]) -> Validation:
    """Measures how far the weights and products of every layer are from those of the model `against`.

    Errors are relative to what they are errors of; times are seconds, and there are none without a GPU. Raises
    CheckError, with the whole result, if a layer is worse than `max_error` or `baseline` allow."""
    return answer(Validation, "validate", [out], options, progress)


def hardware(**options: Unpack[HardwareOptions]) -> Hardware:
    """Describes the GPUs, processor and memory of this machine in bytes, or with `as_="2xA100-40GB"` of another one,
    and what qconv would choose there. Raises UsageError for a card that is not known."""
    return answer(Hardware, "hardware", [], options)


def call(command: str, *places: StrPath, progress: ProgressWish = None, **options: Any) -> Answer:
    """Runs any command of the program that has --json, such as call("inspect", "model"). The answer's `json` is the
    object that it printed. Raises as the other functions do."""
    return answer(Answer, command, places, options, progress)


if not TYPE_CHECKING:
    def __getattr__(name):
        if name == "__version__":
            return version()
        raise AttributeError("module 'qconv' has no attribute '%s'" % name)

    def __dir__():
        return [*__all__, "__version__"]
