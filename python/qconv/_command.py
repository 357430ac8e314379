"""Commands that the package adds to those of the program: one module each, with a function `main(argv)`."""
from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
import warnings
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence, Tuple, Type

from .errors import CheckError, Error, QconvWarning, UsageError
from .results import R

# The module of each command. The program lists the same commands in its help (convert/cli/command_table.c).
MODULES = {"calibrate": "calibrate", "importance": "importance", "eval": "evaluate", "plan-training": "training", "from-torch": "from_torch", "report": "report"}
# Commands of the program that the package does for each part of a pipeline of diffusers.
OF_PIPELINES = ("convert", "verify", "unpack")


PLACES = ("model", "out", "path")
NOT_TYPED = ("progress", "options")
ROW = re.compile(r"^    (\w+) {2,}(\S.*(?:\n {6,}\S.*)*)", re.M)  # of a docstring: a parameter and what it is


class Parser(argparse.ArgumentParser):
    """The arguments of a command, refused as the program refuses its own: one sentence and exit code 2."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog="qconv " + command, description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def takes(self, function: Callable[..., object], *only: str) -> None:
        """Adds the parameters of a function, or some of them, as arguments, with what a line of its docstring says of each."""
        said = {name: " ".join(text.split()) for name, text in ROW.findall(function.__doc__ or "")}
        for name, parameter in inspect.signature(function).parameters.items():
            hint, given = set(re.findall(r"\w+", str(parameter.annotation))), parameter.default is not parameter.empty
            if only and name not in only or name in NOT_TYPED:
                continue
            text = re.sub(r"[;,]? ?None: ([^;]*)", r" (default: \1)", said.get(name, "")).replace("%", "%%")
            text += " (default: %s)" % parameter.default if given and parameter.default else ""
            more: Dict[str, Any] = {"metavar": name.rpartition("_")[2].upper(), "help": text.strip()}
            if name in PLACES:
                self.add_argument(name, **more)
                continue
            if "bool" in hint and "str" not in hint:
                more = {"action": "store_true", "help": text}
            elif "Sequence" in hint:
                more.update(action="append", default=[])
            else:
                kind = float if "float" in hint else int if "int" in hint else str
                more.update(default=parameter.default if given else None, required=not given,
                            type=str if "str" in hint else kind)
            self.add_argument("--" + name.replace("_", "-"), **more)

    def error(self, message: str) -> NoReturn:
        raise UsageError("%s; try '%s --help'" % (message, self.prog))


@contextmanager
def warnings_said(quiet: bool = False) -> Iterator[None]:
    """Warnings become lines as the program's own are; `quiet` leaves out those of the program."""
    def said(message: object, *_: object, **__: object) -> None:
        print("qconv: warning: %s" % message, file=sys.stderr)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        if quiet:
            warnings.simplefilter("ignore", QconvWarning)
        setattr(warnings, "showwarning", said)
        yield


def whole(kind: Type[R], work: Callable[[], R]) -> Tuple[R, Optional[CheckError]]:
    """What `work` returns, or what its failed check has found, and that failure, which is raised when all is said."""
    try:
        return work(), None
    except CheckError as error:
        if not isinstance(error.result, kind):
            raise
        return error.result, error


def wanted(argv: Sequence[str]) -> Optional[List[str]]:
    """The command of the package that `argv` names, with its arguments; None for all that the program does."""
    if argv and argv[0] in MODULES:
        return list(argv)
    if len(argv) == 2 and argv[0] == "help" and argv[1] in MODULES:
        return [argv[1], "--help"]
    named = argv[0] if argv else ""
    command = named if named in OF_PIPELINES else "convert" if named.startswith("-") or os.path.isdir(named) else None
    if command and not {"--help", "-h"} & set(argv):
        line = [command, *(argv if named != command else argv[1:])]
        if any(os.path.isfile(os.path.join(word, "model_index.json")) for word in line[1:]):
            from ._pipeline import is_pipeline, split
            places = split(line)[1]
            return line if places and is_pipeline(places[0]) else None
    return None


def run(argv: Sequence[str]) -> int:
    """Runs argv[0] and returns the exit code that the program would have."""
    try:
        if argv[0] in OF_PIPELINES:
            importlib.import_module("._pipeline", __package__).main(argv)
        else:
            importlib.import_module("." + MODULES[argv[0]], __package__).main(argv[1:])
    except Error as error:
        print("qconv: %s" % error, file=sys.stderr)
        return error.exit_code or 1
    except OSError as error:
        print("qconv: %s" % error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("qconv: interrupted", file=sys.stderr)
        return 130
    return 0
