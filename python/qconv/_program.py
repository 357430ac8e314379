"""Runs the program: arguments go in, the object of --json, warnings, progress and errors come out."""
from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import platform
import queue
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import IO, Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar, Union

from ._options import REPEATED
from .errors import BY_EXIT_CODE, Error, ProgramError, QconvWarning, RunError, UsageError
from .results import Result

log = logging.getLogger("qconv")
StrPath = Union[str, "os.PathLike[str]"]
R = TypeVar("R", bound=Result)
# What these functions say to the program themselves.
RESERVED = {"json", "progress", "quiet", "verbose", "help", "version"}


@dataclass(frozen=True)
class Progress:
    """How far a step of the work is.

    `stage` is its verb, such as "converting". `done` and `total` are bytes, tokens or steps of no known
    size, as `unit` says; `total` is None where it is not known. One call may have several stages.
    """
    stage: str
    done: int
    total: Optional[int]
    unit: str


ProgressCallback = Callable[[Progress], object]


def find() -> str:
    """The path of the program: the one in the package, or the one that $QCONV_PROGRAM names.

    Raises ProgramError where there is none."""
    named = os.environ.get("QCONV_PROGRAM")
    path = named or os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "qconv")
    if os.path.isfile(path):
        return path
    if named:
        raise ProgramError("QCONV_PROGRAM names '%s', which is no file" % path)
    raise ProgramError("the program '%s' is missing; install the package with 'pip install .', or set "
                       "QCONV_PROGRAM to a build of qconv" % path)


def start_failure(path: str, error: OSError) -> ProgramError:
    """Says why the program at `path` could not be started."""
    if error.errno in (errno.ENOEXEC, errno.ENOENT):
        return ProgramError("'%s' does not run on this machine (%s %s); build qconv here with 'pip install .'" % (
            path, platform.system(), platform.machine()))
    return ProgramError("'%s' could not be started: %s" % (path, error.strerror))


def text_of(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(text_of(v) for v in value)
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")  # no exponent
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def arguments(options: Mapping[str, Any]) -> List[str]:
    """Options as the command line has them: {"block_size": 32, "force": True} is --block-size=32 --force.

    A trailing "_" is left out (for_). None and False mean: not given. The program judges all else, so
    that names, values and what goes together are told in one place."""
    typed: List[str] = []
    for key, value in options.items():
        name = key.rstrip("_").replace("_", "-")
        if name in RESERVED:
            raise UsageError("%s is no argument of this function; 'python -m qconv' takes --%s" % (key, name))
        if value is None or value is False:
            continue
        if value is True:
            typed.append("--" + name)
        elif name in REPEATED and isinstance(value, (list, tuple)):
            typed += ["--%s=%s" % (name, text_of(v)) for v in value]
        else:
            typed.append("--%s=%s" % (name, text_of(value)))
    return typed


class Bars:
    """Progress for people: tqdm's bars where tqdm is installed and wanted, else a line at each tenth, with the time that
    the rest takes if it goes on like this."""

    def __init__(self, lines: bool = False) -> None:
        try:
            self.tqdm: Any = None if lines else importlib.import_module("tqdm.auto").tqdm
        except ImportError:
            self.tqdm = None
        self.bar: Any = None
        self.stage, self.tenth, self.began = "", 0, 0.0

    def __call__(self, p: Progress) -> None:
        if p.stage != self.stage:
            self.close()
            self.stage, self.tenth, self.began = p.stage, -1, time.monotonic()
            if self.tqdm:
                self.bar = self.tqdm(desc=p.stage, total=p.total, unit={"bytes": "B"}.get(p.unit, " " + p.unit),
                                     unit_scale=p.unit == "bytes")
        if self.bar is not None:
            self.bar.total = p.total
            self.bar.update(p.done - self.bar.n)
        elif not self.tqdm and p.total and 10 * p.done // p.total > self.tenth:
            self.tenth = 10 * p.done // p.total
            left = (time.monotonic() - self.began) * (p.total - p.done) / max(p.done, 1)
            print("qconv: %s %d%%, %d:%02d left" % (p.stage, 100 * p.done // p.total, left // 60, left % 60), file=sys.stderr,
                  flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


@contextmanager
def listening(progress: Union[None, bool, ProgressCallback]) -> Iterator[Optional[ProgressCallback]]:
    """Who hears of progress: the caller's function, or for True a bar."""
    bars = Bars() if progress is True else None
    try:
        yield bars or (progress if callable(progress) else None)
    finally:
        if bars:
            bars.close()


class Run:
    """One run of the program. Its own process group keeps Ctrl-C of a terminal from it: this process
    passes it on once, because the second one would end the program at once. shown: its output is this process's."""

    def __init__(self, argv: Sequence[str], inherited: Sequence[int] = (), shown: bool = False) -> None:
        path, pipe = find(), None if shown else subprocess.PIPE
        try:
            self.process = subprocess.Popen([path, *argv], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe,
                                            start_new_session=True, pass_fds=inherited)
        except OSError as error:
            raise start_failure(path, error) from None
        self.printed = b""
        self.message = ""
        self.said_all = shown
        self.lines: "queue.SimpleQueue[Optional[str]]" = queue.SimpleQueue()
        out, err = self.process.stdout, self.process.stderr
        self.threads = [threading.Thread(target=take, args=(file,), daemon=True)
                        for take, file in ((self.take_output, out), (self.take_lines, err)) if file]
        for thread in self.threads:
            thread.start()

    def take_output(self, pipe: IO[bytes]) -> None:
        with pipe:
            self.printed = pipe.read()

    def take_lines(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self.lines.put(line.decode("utf-8", "replace").rstrip("\n"))
        self.lines.put(None)

    def listen(self, progress: Optional[ProgressCallback]) -> None:
        """Until the program closes standard error: passes on what it says there."""
        while not self.said_all:
            line = self.lines.get()
            if line is None:
                self.said_all = True
            elif line.startswith('{"progress": '):
                if progress:
                    p = json.loads(line)
                    progress(Progress(p["progress"], p["done"], p["total"], p["unit"]))
            elif line.startswith("qconv: warning: "):
                warnings.warn(line[len("qconv: warning: "):], QconvWarning, stacklevel=6)
            else:
                self.message = line[len("qconv: "):] if line.startswith("qconv: ") else line
                log.info("%s", self.message)

    def stop(self) -> None:
        """Ends the program in order, and waits for that; another Ctrl-C meanwhile ends it at once."""
        while self.process.poll() is None:
            # Not SIGINT, which a shell may have told both of us to ignore; it means the same.
            self.process.terminate()
            try:
                self.process.wait()
            except KeyboardInterrupt:
                pass
        self.join()

    def join(self) -> int:
        for thread in self.threads:
            thread.join()
        return self.process.wait()


def run(argv: Sequence[str], progress: Optional[ProgressCallback]) -> Tuple[int, bytes, str]:
    """Exit code, standard output and last message of one run. A KeyboardInterrupt, or an exception in
    `progress`, first ends the program in order."""
    started = Run(argv)
    try:
        started.listen(progress)
        code = started.join()
    except KeyboardInterrupt:
        started.stop()
        try:
            started.listen(None)  # the last sentence says how to go on
        except Warning:
            pass
        raise KeyboardInterrupt(started.message) from None
    except BaseException:
        started.stop()
        raise
    return code, started.printed, started.message


def failure(code: int, message: str, result: Optional[Result]) -> Error:
    """The exception for an exit code; a negative one is a signal."""
    if code < 0:
        return RunError("the program was ended by signal %d%s" % (-code, ": " + message if message else ""))
    kind = BY_EXIT_CODE.get(code, RunError)
    return kind(message or "the program ended with exit code %d and said nothing" % code, result)


def answer(kind: Type[R], command: str, places: Sequence[Optional[StrPath]], options: Mapping[str, Any],
           progress: Union[None, bool, ProgressCallback] = None, more: Sequence[str] = ()) -> R:
    """Runs a command of the program with --json and the arguments `more`, and returns what it printed as a `kind`."""
    return ask(kind, command, [*arguments(options), *more], places, progress)


def ask(kind: Type[R], command: str, typed: Sequence[str], places: Sequence[Optional[StrPath]],
        progress: Union[None, bool, ProgressCallback] = None) -> R:
    """The same with options as they are typed."""
    with listening(progress) as listener:
        argv = [command, *typed, "--json", *(["--progress=json"] if listener else []), "--",
                *(os.fspath(p) for p in places if p is not None)]
        code, printed, message = run(argv, listener)
    result = kind.from_json(json.loads(printed)) if printed.strip() else None
    if result and command in ("plan", "inspect", "hardware"):  # the program is asked for its table then
        result.shown_by(partial(shown, command, typed, [os.fspath(p) for p in places if p is not None]))
    if code:
        raise failure(code, message, result)
    if result is None:
        raise ProgramError("'%s' printed nothing for 'qconv %s --json'" % (find(), command))
    return result


def shown(command: str, typed: Sequence[str], places: Sequence[str]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QconvWarning)  # they were said before
        code, printed, message = run([command, *typed, "--", *places], None)
    if code:
        raise failure(code, message, None)
    return printed.decode("utf-8", "replace").rstrip("\n")


def size(n: float, unit: str = "bytes") -> str:
    """"36.0 GB", by thousands, as the program writes it."""
    if n < 1000:
        return "%d %s" % (n, unit)
    for unit in ("KB", "MB", "GB", "TB", "PB"):
        n /= 1000.0
        if n < 999.5 or unit == "PB":
            break
    return "%.*f %s" % (2 if n < 9.995 else 1 if n < 99.95 else 0, n, unit)


def version() -> str:
    """The version of the program, such as "0.5.0"."""
    code, printed, message = run(["--version"], None)
    if code:
        raise failure(code, message, None)
    return printed.decode().split()[1]
