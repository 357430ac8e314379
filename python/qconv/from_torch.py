"""`qconv.from_torch` and `qconv from-torch`: what torch.save wrote becomes safetensors, which the program reads.

torch.load reads with weights_only=True, so no code of a file runs, and maps the file into memory. One file of
the source is open at a time and becomes one .safetensors file."""
from __future__ import annotations

import fnmatch
import importlib
import json
import os
import re
import warnings
import zipfile
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ._command import Parser
from ._folders import check_links, check_outside, copy, files_below, staged, write_text
from ._program import StrPath
from .errors import InputError, RunError, listed
from .results import TorchFiles

# How the names of weight files begin, and what the new files are called; the first that is there is read.
STEMS = {"pytorch_model": "model", "diffusion_pytorch_model": "diffusion_pytorch_model",
         "adapter_model": "adapter_model", "pytorch_lora_weights": "pytorch_lora_weights"}
ENDINGS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# What trainers leave beside the weights, and weights in other formats: neither is read or copied.
TRAINERS = ("training_args*", "optimizer*", "scheduler*", "rng_state*", "*.pkl", "*.pickle")
LEFT = ("pytorch_model*.bin", "diffusion_pytorch_model*.bin", "adapter_model*.bin", "pytorch_lora_weights*.bin",
        "*.bin.index*.json", "consolidated.*", "*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.safetensors.index*.json",
        "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.tmp", ".*")
TWINS = ("original/", "metal/")  # the same weights again (Llama 3, gpt-oss)
WRAPPERS = ("state_dict", "model", "module", "model_state_dict")  # where trainers keep the model's own dict
SHARED_MOST = 64  # bytes written for each byte of a file: thousands of names for one storage would fill a disk


def from_torch(model: StrPath, out: StrPath) -> TorchFiles:
    """Writes the files of torch.save in the folder `model` to the new folder `out` as .safetensors, and copies all
    other files. `model` may also be one such file, which becomes a folder with the config.json beside it.

    Needs torch and safetensors. Nothing of a file is run. `out` appears when it is whole. Raises InputError for what
    torch.load(weights_only=True) refuses, UsageError if something lies in `out`."""
    source, target = os.fspath(model), os.fspath(out)
    try:
        safetensors, torch = importlib.import_module("safetensors.torch"), importlib.import_module("torch")
    except ImportError as error:
        raise RunError("from-torch needs torch and safetensors (%s); 'pip install torch safetensors' has them" %
                       error) from None
    try:
        return _Folder(source, target, torch, safetensors).write()
    except OSError as error:
        raise RunError(str(error)) from None


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(os.path.basename(name), pattern) for pattern in patterns)


def is_weights(name: str) -> bool:
    return matches(name, ENDINGS) and not matches(name, TRAINERS)


class _Folder:
    """What is read, and what was done with it."""

    def __init__(self, source: str, out: str, torch: Any, safetensors: Any) -> None:
        self.source, self.out, self.torch, self.safetensors = source, out, torch, safetensors
        self.index: Dict[str, str] = {}  # tensor -> file, as the index has it
        self.stem = "model"
        if os.path.isfile(source):
            self.folder, self.files = os.path.dirname(source) or ".", [os.path.basename(source)]
            self.others = [n for n in ("config.json", "adapter_config.json")
                           if os.path.isfile(os.path.join(self.folder, n))]
            self.name_after(self.files[0])
        elif os.path.isdir(source):
            self.folder, names = source, files_below(source)
            self.files = self.find([n for n in names if "/" not in n])
            self.others = [n for n in names if n not in self.files and not n.startswith(TWINS) and "/." not in n and
                           not matches(n, LEFT) and not matches(n, TRAINERS)]
        else:
            raise InputError("%s does not exist" % source)
        try:  # only an explicit statement counts: an extra head does no harm, while a missing one does
            with open(os.path.join(self.folder, "config.json"), encoding="utf-8") as f:
                config = json.load(f)
            says = config.get("tie_word_embeddings")
            self.tied = bool((config.get("text_config") or {}).get("tie_word_embeddings") if says is None else says)
        except (OSError, ValueError, AttributeError):
            self.tied = False
        self.written: List[Dict[str, Any]] = []
        self.shared: List[Dict[str, Any]] = []
        self.left_out: List[Dict[str, Any]] = []
        self.places: Dict[str, int] = {}  # tensor -> its place in `written`

    # ---- what is there ----

    def name_after(self, file: str) -> None:
        for stem, new in STEMS.items():
            if re.match(re.escape(stem) + r"[.-]", file):
                self.stem = new

    def find(self, names: List[str]) -> List[str]:
        """The files that hold the weights, in order. An index decides; the names of shards are never interpreted."""
        safetensors = [n for n in names if n.endswith(".safetensors") and not n.startswith("adapter_model")]
        if safetensors:
            raise InputError("%s has safetensors already, which qconv reads: %s" % (self.source, listed(safetensors, 5)))
        for stem in STEMS:
            for index in (stem + ".bin.index.json", *fnmatch.filter(names, stem + ".bin.index.*.json")):
                if index in names:
                    self.name_after(stem + ".")
                    return self.read_index(index)
            if stem + ".bin" in names:
                self.name_after(stem + ".")
                return [stem + ".bin"]
        weights = [n for n in names if is_weights(n)]
        if len(weights) > 1:
            raise InputError("%s has %d files of torch.save, but no index that says what belongs together: %s; give "
                             "one of them" % (self.source, len(weights), listed(weights, 5)))
        if not weights:
            raise InputError("%s has no weights of torch.save (.bin, .pt, .pth or .ckpt)" % self.source)
        self.name_after(weights[0])
        return weights

    def read_index(self, name: str) -> List[str]:
        path = os.path.join(self.folder, name)
        try:
            with open(path, encoding="utf-8") as f:
                self.index = json.load(f)["weight_map"]
            files = sorted(set(self.index.values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError("%s: weight_map is missing or no map of tensors to files" % path) from None
        for file in files:
            if not isinstance(file, str) or os.path.basename(file) != file or not is_weights(file):
                raise InputError("%s: '%s' is not the name of a file of weights beside it" % (path, file))
        missing = [file for file in files if not os.path.isfile(os.path.join(self.folder, file))]
        if missing:
            raise InputError("%s: %d of the %d files that it names are missing: %s; download them, too" % (
                path, len(missing), len(files), listed(missing, 5)))
        return files

    # ---- one file ----

    def load(self, name: str) -> Any:
        path = os.path.join(self.folder, name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of old classes in old files
                return self.torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except MemoryError:
            raise RunError("%s: memory ran out" % path) from None
        except OSError:
            raise
        except Exception as error:  # torch has no class of its own for a file that it does not take
            raise self.refused(path, error) from None

    def refused(self, path: str, error: Exception) -> InputError:
        """torch's reason without its advice, which is to run the file's code."""
        text = str(error).strip() or type(error).__name__
        said = re.search(r"(?:WeightsUnpickler error:\s*|(?=Trying to load ))(.+?)(?:\.\s|\n|$)", text)
        reason = (said.group(1) if said else re.split(r"\.\s|\n", text)[0]).rstrip(".")
        if "Unsupported operand" in reason:
            reason += " (it takes pickles of protocol 2, which is what torch.save writes if not told otherwise)"
        return InputError("%s: torch.load(weights_only=True) refuses it: %s" % (path, reason))

    def state_of(self, name: str, loaded: Any) -> Dict[str, Any]:
        """The tensors of a loaded file by name: its own, or those of the dict in it that trainers write."""
        path = os.path.join(self.folder, name)
        if not isinstance(loaded, dict):
            raise InputError("%s holds %s; expected a state dict" % (
                path, "a single tensor" if self.torch.is_tensor(loaded) else "something that is not a dict"))
        inner = [key for key in WRAPPERS if isinstance(loaded.get(key), dict) and
                 any(self.torch.is_tensor(v) for v in loaded[key].values())]
        if inner and not any(self.torch.is_tensor(v) for v in loaded.values()):
            if len(inner) > 1:
                raise InputError("%s: tensors are in '%s' and in '%s'; save the model's state_dict() alone" % (
                    path, inner[0], inner[1]))
            self.leave(name, [key for key in loaded if key != inner[0]])
            loaded = loaded[inner[0]]
        state = {key: value.detach() for key, value in loaded.items() if self.torch.is_tensor(value)}
        if loaded and not state:
            raise InputError("%s: no entry of its dict is a tensor, nor of 'state_dict' or 'model' in it; save the "
                             "model's state_dict() alone" % path)
        self.leave(name, [key for key in loaded if key not in state])
        for key in state:
            if not isinstance(key, str) or key == "__metadata__":
                raise InputError("%s: %r is no name that safetensors can hold" % (path, key))
        return state

    def leave(self, name: str, keys: Sequence[Any]) -> None:
        self.left_out += [{"file": name, "entry": str(key)} for key in keys]

    def share(self, state: Dict[str, Any]) -> Dict[str, Any]:
        """The tensors as they are written: a head that is tied is left out, every other one has bytes of its own."""
        same: Dict[Tuple[Any, ...], List[str]] = {}
        for name in sorted(state):
            t = state[name]
            if t.layout == self.torch.strided and not t.is_quantized and t.device.type == "cpu" and t.numel():
                same.setdefault((t.data_ptr(), t.dtype, tuple(t.shape), t.stride()), []).append(name)
        for names in same.values():
            kept = [n for n in names if not n.endswith("lm_head.weight")]
            first = (kept or names)[0]
            for n in names:
                drop = self.tied and bool(kept) and n not in kept
                if n != first:
                    self.shared.append({"name": n, "same_as": first, "written": not drop})
                if drop:
                    del state[n]
        return state

    def check(self, name: str, state: Dict[str, Any]) -> None:
        """Refuses what safetensors cannot hold, with the name of the tensor."""
        path = os.path.join(self.folder, name)
        for key, t in state.items():
            if t.layout != self.torch.strided or t.is_quantized or t.device.type != "cpu":
                raise InputError("%s: tensor '%s' has no plain values (it is sparse, quantized or empty of data)" % (
                    path, key))
            try:
                self.safetensors.save({"x": self.torch.empty(0, dtype=t.dtype)})
            except Exception:  # a KeyError of one version, an error of its own in another
                raise InputError("%s: tensor '%s' is %s, which safetensors cannot hold" % (path, key, t.dtype)) from None
        needed = sum(t.numel() * t.element_size() for t in state.values())
        size = os.path.getsize(path)
        if needed > SHARED_MOST * size:
            raise InputError("%s: its %d tensors share their bytes: expected at most %d times the file's %d bytes, "
                             "found %d" % (path, len(state), SHARED_MOST, size, needed))

    def write_file(self, name: str, folder: str) -> None:
        state = self.state_of(name, self.load(name))
        for key in state:
            if self.index and self.index.get(key) != name:
                raise InputError("%s: tensor '%s' is in '%s', but the index has it %s" % (
                    self.source, key, name, "in '%s'" % self.index[key] if key in self.index else "nowhere"))
        lost = [key for key, file in self.index.items() if file == name and key not in state]
        if lost:
            raise InputError("%s: %d tensors of the index are not in '%s': %s" % (
                self.source, len(lost), name, listed(lost, 5)))
        self.check(name, state)
        state = self.share(state)
        used: Dict[int, int] = {}  # names of each storage
        for t in state.values():
            used[t.untyped_storage().data_ptr()] = used.get(t.untyped_storage().data_ptr(), 0) + 1
        for key, t in state.items():  # each contiguous, in storage of its own that is not larger than it is
            storage = t.untyped_storage()
            alone = used[storage.data_ptr()] == 1 and storage.nbytes() == t.numel() * t.element_size()
            t = t.resolve_conj().resolve_neg()
            state[key] = t if alone and t.is_contiguous() else t.contiguous().clone()
        self.places.update((key, len(self.written)) for key in state)
        size = sum(t.numel() * t.element_size() for t in state.values())
        part = os.path.join(folder, "%05d.safetensors" % len(self.written))
        try:
            self.safetensors.save_file(state, part, metadata={"format": "pt"})
        except Exception as error:  # of safetensors' own class where the disk is full
            raise RunError("%s could not be written: %s" % (self.out, error)) from None
        self.written.append({"name": part, "tensors": len(state), "bytes": size})

    # ---- all of it ----

    def write(self) -> TorchFiles:
        check_outside(self.source, self.out)
        check_links(self.folder, self.others)
        with staged(self.out) as folder:
            for name in self.files:
                self.write_file(name, folder)
            for i, file in enumerate(self.written):
                part = file["name"]
                file["name"] = "%s.safetensors" % self.stem if len(self.written) == 1 else \
                    "%s-%05d-of-%05d.safetensors" % (self.stem, i + 1, len(self.written))
                os.rename(part, os.path.join(folder, file["name"]))
            total = sum(file["bytes"] for file in self.written)
            if len(self.written) > 1:
                where = {key: self.written[self.places[key]]["name"] for key in sorted(self.places)}
                index = {"metadata": {"total_size": total}, "weight_map": where}
                name = self.stem + ".safetensors.index.json"
                write_text(os.path.join(folder, name), json.dumps(index, indent=2) + "\n")
            for name in self.others:
                copy(os.path.join(self.folder, name), os.path.join(folder, name))
        return TorchFiles.from_json({
            "model": self.source, "out": self.out, "files": self.written, "tensors": len(self.places), "bytes": total,
            "copied": self.others, "shared": self.shared, "left_out": self.left_out})


def main(argv: Optional[Sequence[str]]) -> None:
    parser = Parser("from-torch", "Write the files of torch.save in MODEL (a folder, or one file) to the new folder "
                    "OUT as .safetensors, which qconv reads, and copy the other files. Nothing in a file is run. Needs "
                    "torch and safetensors.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--json", action="store_true", help="print the answer as an object")
    asked = parser.parse_args(argv)
    done = from_torch(asked.model, asked.out)
    print(json.dumps(done.json, indent=2) if asked.json else done)
