"""Pipelines of diffusers: a folder with model_index.json and a folder for each of its models.

The program takes one model. So the large ones (transformers, UNets, text encoders) are converted each by itself, into
folders of OUT, and all else (the VAE, schedulers, tokenizers) is copied. OUT/qconv-pipeline.json comes first and says
what is copied, which makes OUT an output that the same call continues; it has the digests when all is copied.
model_index.json comes last, and without it no loader takes OUT for a pipeline."""
from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import warnings
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type, Union, cast, get_type_hints

from . import _options
from ._folders import check_links, check_outside, copy, files_below, write_text
from ._program import ProgressCallback, R, StrPath, arguments, ask, failure, find, run, text_of
from .errors import CheckError, InputError, ProgramError, QconvWarning, UsageError
from .results import Comparison, Conversion, DryRun, Pipeline, Result, Unpacking, Verification

RECORD, INDEX, MANIFEST = "qconv-pipeline.json", "model_index.json", "qconv.json"
# A VAE is small and sensitive, and other parts are small.
LARGE = ("transformer", "unet", "text_encoder", "prior", "controlnet")
# Options that speak of one model.
OF_ONE = ("vram", "recipe", "lora", "calibrate", "hessians", "part", "requantize", "drop-mtp", "for")
OTHER_FORMATS = (".bin", ".msgpack", ".onnx", ".onnx_data", ".ckpt", ".pt", ".pth", ".h5", ".bin.index.json", ".gguf")
# The names that transformers and diffusers look for.
NAME = re.compile(r"(?:model|diffusion_pytorch_model)"
                  r"(?:(?P<variant>\.[^./-]+)?(?P<shard>-[^./]*)?\.safetensors(?:\.zst)?|"
                  r"\.safetensors\.index(?P<index>(?:\.[^./]+)?)\.json)\Z")
TORCH_NAME = re.compile(r"(?:pytorch_model|diffusion_pytorch_model)(?:\.[^./-]+)?(?:-[^./]*)?\.bin\Z")
Rules = Sequence[Tuple[str, str]]
Progress = Union[None, bool, ProgressCallback]


def is_pipeline(path: StrPath) -> bool:
    return os.path.isfile(os.path.join(path, INDEX)) and not os.path.isfile(os.path.join(path, "config.json"))


def variant_of(name: str) -> str:
    """".fp16" where a name of weights or of their index has it."""
    found = NAME.match(name)
    return (found.group("variant") or found.group("index") or "") if found else ""


def is_weights(name: str) -> bool:
    return bool(TORCH_NAME.match(name)) or name.endswith((".safetensors", ".safetensors.zst"))


class Source:
    """A pipeline that is read."""

    def __init__(self, folder: str) -> None:
        self.folder, self.files = folder, files_below(folder)
        try:
            with open(os.path.join(folder, INDEX), encoding="utf-8") as f:
                index = json.load(f)
            # ["diffusers", "AutoencoderKL"]; [null, null] is a part that this pipeline does without.
            self.parts = [name for name, what in index.items() if isinstance(what, list) and what and
                          isinstance(what[0], str) and re.match(r"[^_./\\][^/\\]*\Z", name)]
        except (ValueError, AttributeError, RecursionError):
            raise InputError("%s: no JSON object" % os.path.join(folder, INDEX)) from None
        there = {n.partition("/")[0] for n in self.files}  # an index may name any number of parts
        self.missing = [p for p in self.parts if p not in there]
        self.with_weights = [p for p in self.parts if p in there and any(is_weights(n) for n in self.of_part(p))]

    def of_part(self, part: str) -> List[str]:
        return [n[len(part) + 1:] for n in self.files if n.startswith(part + "/") and "/" not in n[len(part) + 1:]]

    def choose(self, rules: Rules) -> List[str]:
        """The parts to convert: the large ones, as keep and quantize change that."""
        chosen = {p: p.startswith(LARGE) for p in self.with_weights}
        for option, glob in rules:
            named = fnmatch.filter(chosen, glob)
            if not named:
                raise UsageError("--%s '%s' names no part of the pipeline %s; to give rules for tensors, convert the "
                                 "folder of one part by itself" % (option, glob, self.folder))
            chosen.update((p, option == "quantize") for p in named)
        parts = [p for p in self.with_weights if chosen[p]]
        if not parts:
            raise InputError("%s: no part of this pipeline is a transformer, UNet or text encoder with weights; name "
                             "one with --quantize PART" % self.folder)
        return parts

    def is_twin(self, path: str) -> bool:
        """Are these weights in another format or variant, where the folder has the full weights too?"""
        folder, _, name = path.rpartition("/")
        if not folder:  # the whole pipeline in one file, of which no output is made
            return is_weights(path) or path.endswith((".ckpt", ".gguf", ".bin"))
        beside = self.of_part(folder)
        if variant_of(name):
            return any(NAME.match(n) and not variant_of(n) for n in beside)
        return name.endswith(OTHER_FORMATS) and any(n.endswith(".safetensors") for n in beside)

    def copies(self, converted: Sequence[str]) -> Dict[str, str]:
        """What is copied: its name in OUT, and here. A variant that is alone gets the name of the full weights, so
        that all parts load alike; shards keep their names, which only their index needs to know."""
        found: Dict[str, str] = {}
        for path in self.files:
            if path.startswith(tuple(p + "/" for p in converted)) or path in (INDEX, MANIFEST, RECORD) or \
                    path.startswith(".") or "/." in path or path.endswith(".tmp") or self.is_twin(path):
                continue
            folder, _, name = path.rpartition("/")
            match = NAME.match(name) if folder else None
            if match and variant_of(name) and not match.group("shard"):
                name = name.replace(variant_of(name), "", 1)
            target = "%s/%s" % (folder, name) if folder else name
            if target in found:
                raise InputError("%s: '%s' and '%s' are variants of one file, and the file itself is not there; keep "
                                 "only the one to be copied" % (self.folder, found[target], path))
            found[target] = path
        check_links(self.folder, sorted(found.values()))
        return found


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


class Output:
    """The folder that is written, and its record: what it was made as, and the digest of each copied file."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            with open(os.path.join(folder, RECORD), encoding="utf-8") as f:
                self.record: Dict[str, Any] = json.load(f)
            self.files = {f["path"]: f["sha256"] for f in self.record["files"]}
            self.parts = [str(p) for p in self.record["parts"]]
        except (OSError, ValueError, KeyError, TypeError):
            self.record, self.files, self.parts = {}, {}, []

    def begin(self, source: str, made_as: Dict[str, Any], digests: Mapping[str, str], force: bool) -> None:
        """Says what OUT is to be, or finds that it is that, or is not to be replaced."""
        check_outside(source, self.folder)
        same = all(self.record.get(k) == v for k, v in made_as.items())
        if self.record and same and (not self.files or self.files == digests):
            return
        if os.path.lexists(self.folder) and not os.path.isdir(self.folder):
            raise UsageError("%s: expected a folder to write to, found a file" % self.folder)
        if os.path.isdir(self.folder) and os.listdir(self.folder) and not self.record and \
                not os.path.isfile(os.path.join(self.folder, MANIFEST)):
            raise UsageError("%s is not empty, and it is no output of qconv; choose another OUT" % self.folder)
        if (self.record or os.path.isfile(os.path.join(self.folder, MANIFEST))) and not force:
            raise UsageError("%s: it holds the output of another conversion; choose another OUT, or replace that one "
                             "with --force" % self.folder)
        stale = [p for p in self.parts if p not in made_as["parts"]]
        if stale:
            raise UsageError("%s has the converted part '%s', which is now to be copied; choose another OUT, or delete "
                             "that folder" % (self.folder, stale[0]))
        for path in [INDEX, MANIFEST, *self.files]:
            if (path not in digests or path == INDEX) and os.path.isfile(os.path.join(self.folder, path)):
                os.unlink(os.path.join(self.folder, path))
        self.files = {}
        os.makedirs(self.folder, exist_ok=True)
        self.save(made_as)

    def save(self, made_as: Dict[str, Any]) -> None:
        text = {**made_as, "files": [{"path": p, "sha256": self.files[p]} for p in sorted(self.files)]}
        write_text(os.path.join(self.folder, RECORD), json.dumps(text, indent=2) + "\n")

    def fill(self, source: str, made_as: Dict[str, Any], digests: Mapping[str, str], copies: Mapping[str, str]) -> None:
        for path, origin in copies.items():
            if path not in self.files or not os.path.isfile(os.path.join(self.folder, path)):
                copy(os.path.join(source, origin), os.path.join(self.folder, path))
        if not self.files:
            self.files = dict(digests)
            self.save(made_as)

    def check(self) -> None:
        """Are the copied files what was copied, and are all parts there?"""
        if not self.record:
            raise InputError("%s has no %s, so it is no output of qconv; its parts may each be one" % (
                self.folder, RECORD))
        for part in self.parts:
            if not os.path.isfile(os.path.join(self.folder, part, MANIFEST)):
                raise CheckError("%s: the part '%s' is missing or not finished; the command that made the other parts "
                                 "continues with it" % (self.folder, part))
        for path in sorted(self.files) or [INDEX]:
            whole = os.path.join(self.folder, path)
            if not os.path.isfile(whole):
                raise CheckError("%s: %s: the file is missing" % (self.folder, path))
            if path in self.files and sha256(whole) != self.files[path]:
                raise CheckError("%s: %s: its bytes are not those that were written" % (self.folder, path))


class Walk:
    """One command over the parts of a pipeline. `typed` are its options as they are typed."""

    def __init__(self, command: str, places: Sequence[str], typed: Sequence[str], rules: Rules,
                 progress: Progress = None) -> None:
        self.command, self.places, self.progress = command, places, progress
        self.given = {t[2:].partition("=")[0]: t.partition("=")[2] for t in typed if t.startswith("--")}
        self.rules, self.typed = rules, typed
        self.shown = False  # the program prints for people, and nothing comes back
        self.parts: Dict[str, Result] = {}

    def part(self, kind: Type[Result], name: str) -> None:
        places = [os.path.join(p, name) for p in self.places]
        typed = [t for t in self.typed if not t.startswith("--against=")]
        if "against" in self.given:
            typed.append("--against=" + os.path.join(self.given["against"], name))
        if not self.shown:
            there = kind is Unpacking and os.path.isfile(os.path.join(places[1], MANIFEST))
            try:
                self.parts[name] = ask(kind, self.command, typed, places, self.progress)
            except ProgramError:  # the program has no answer where all is unpacked already
                if not there:
                    raise
                found = ask(Verification, "verify", [], [places[1]], self.progress)
                self.parts[name] = Unpacking.from_json({**found.json, "path": places[0], "out": places[1]})
            return
        sys.stdout.flush()
        code = subprocess.call([find(), self.command, *typed, "--", *places])
        if code:
            sys.exit(code if code > 0 else 1)

    def try_out(self, name: str) -> None:
        """Finds a mistake in the last part before the first is converted."""
        shown = ("--json", "--quiet", "--verbose", "--progress", "--dry-run", "-q", "-v")
        silent = [t for t in self.typed if not t.startswith(shown)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QconvWarning)
            part = os.path.join(self.places[0], name)
            code, _, message = run(["convert", *silent, "--dry-run", "--json", "--", part], None)
        if code:
            raise failure(code, message, None)

    def convert(self) -> Pipeline:
        for option in OF_ONE:
            if option in self.given:
                self.of_one_model("--" + option)
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1" and os.environ.get("SLURM_NTASKS", tasks) == tasks:
            self.of_one_model("a Slurm step of several tasks")
        source = Source(self.places[0])
        parts = source.choose(self.rules)
        copies = source.copies(parts)
        dry = "dry-run" in self.given
        if not dry:
            for name in parts:
                self.try_out(name)
        self.say("%s is a diffusers pipeline: %s %s converted, everything else (%d file%s) is copied" % (
            source.folder, ", ".join("'%s'" % p for p in parts), "is" if len(parts) == 1 else "are", len(copies) + 1,
            "s" if copies else ""))
        if source.missing:
            self.warn("%s names %s, and %s has no such folder: diffusers does not load the pipeline without" % (
                INDEX, ", ".join("'%s'" % p for p in source.missing[:5]), source.folder))
        if dry:
            for name in parts:
                self.part(DryRun, name)
            return self.result(sorted([*copies, INDEX]))
        made_as = {"version": 1, "to": self.given.get("to"), "rest": self.given.get("rest"),
                   "rules": ["%s %s" % r for r in self.rules], "parts": parts}
        digests = {path: sha256(os.path.join(source.folder, origin)) for path, origin in
                   {**copies, INDEX: INDEX}.items()}
        return self.write(Conversion, source.folder, made_as, digests, copies)

    def unpack(self) -> Pipeline:
        made = Output(self.places[0])
        made.check()
        made_as = {k: v for k, v in made.record.items() if k != "files"}
        return self.write(Unpacking, made.folder, made_as, made.files, {p: p for p in made.files if p != INDEX})

    def write(self, kind: Type[Result], source: str, made_as: Dict[str, Any], digests: Mapping[str, str],
              copies: Mapping[str, str]) -> Pipeline:
        out = Output(self.places[1])
        out.begin(source, made_as, digests, "force" in self.given)
        out.fill(source, made_as, digests, copies)
        for name in made_as["parts"]:
            self.part(kind, name)
        copy(os.path.join(source, INDEX), os.path.join(out.folder, INDEX))
        return self.result(sorted(out.files))

    def verify(self) -> Pipeline:
        made = Output(self.places[0])
        made.check()
        for name in made.parts:
            self.part(Comparison if "against" in self.given else Verification, name)
        return self.result(sorted(made.files))

    def result(self, copied: Sequence[str]) -> Pipeline:
        out = self.places[1] if len(self.places) > 1 else None
        return Pipeline(json={"path": self.places[0], "out": out, "copied": list(copied),
                              "parts": {name: part.json for name, part in self.parts.items()}},
                        path=self.places[0], out=out, copied=tuple(copied), parts=dict(self.parts))

    def of_one_model(self, what: str) -> None:
        raise UsageError("%s is for one model, and %s is a pipeline of several; convert the folder of each part by "
                         "itself" % (what, self.places[0]))

    def say(self, text: str) -> None:
        if self.shown and not {"quiet", "q"} & {t.lstrip("-") for t in self.typed}:
            print("qconv: " + text, file=sys.stderr)

    def warn(self, text: str) -> None:
        if self.shown:
            print("qconv: warning: " + text, file=sys.stderr)
        else:
            warnings.warn(text, QconvWarning, stacklevel=4)


def walk(kind: Type[R], command: str, places: Sequence[Optional[StrPath]], options: Mapping[str, Any],
         progress: Progress) -> R:
    """A function of the package for a pipeline. The answer is a Pipeline, which only a look into the folder can tell:
    type checkers are told `kind`, which it is for a model."""
    rules = [(name, text_of(glob)) for name in options if name in ("keep", "quantize") and options[name] is not None
             for glob in (options[name] if isinstance(options[name], (list, tuple)) else [options[name]])]
    typed = arguments({k: v for k, v in options.items() if k not in ("keep", "quantize")})
    whole = Walk(command, [os.fspath(p) for p in places if p is not None], typed, rules, progress)
    return cast(R, getattr(whole, command)())


def split(argv: Sequence[str]) -> Tuple[List[str], List[str], Rules]:
    """A command line as options with their values behind "=", places, and rules."""
    kinds = {"convert": _options.ConvertOptions, "unpack": _options.UnpackOptions}
    flags = {name.rstrip("_").replace("_", "-") for name, hint in get_type_hints(kinds[argv[0]]).items()
             if hint is bool} if argv[0] in kinds else set()
    flags |= {"dry-run", "json", "quiet", "verbose", "version"}
    typed: List[str] = []
    places: List[str] = []
    rules: List[Tuple[str, str]] = []
    rest = iter(argv[1:])
    for word in rest:
        if word == "--":
            places += rest
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and name not in flags:
                value = next(rest, "")
                word = "--%s=%s" % (name, value)
            if name in ("keep", "quantize") and argv[0] == "convert":
                rules.append((name, value))
            else:
                typed.append(word)
        else:
            (typed if word.startswith("-") and word != "-" else places).append(word)
    return typed, places, rules


def main(argv: Sequence[str]) -> None:
    """`qconv convert`, `verify` or `unpack` of a pipeline: argv[0] is the command."""
    typed, places, rules = split(argv)
    most = 1 if argv[0] == "verify" or "--dry-run" in typed else 2
    if len(places) > 2 or len(places) < most:
        raise UsageError("expected %s; try 'qconv %s --help'" % ("OUT" if most == 1 else "MODEL and OUT", argv[0]))
    json_wanted = "--json" in typed
    command = Walk(argv[0], places if argv[0] != "verify" else places[:1], [t for t in typed if t != "--json"], rules)
    command.shown = not json_wanted
    result = getattr(command, argv[0])()
    if json_wanted:
        print(json.dumps(result.json, indent=2))
