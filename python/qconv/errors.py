"""What can go wrong: one class for each exit code of the program, with its sentence as the message."""
from __future__ import annotations

from typing import Dict, Optional, Sequence, Type

from .results import Result

__all__ = ["CheckError", "DeviceError", "Error", "InputError", "ProgramError", "QconvWarning",
           "RunError", "StoppedError", "UsageError"]


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few names in quotes, and how many more there are."""
    more = " and %d more" % (len(names) - most) if len(names) > most else ""
    return ", ".join("'%s'" % name for name in names[:most]) + more


class QconvWarning(UserWarning):
    """What the program warns of while it works."""


class Error(Exception):
    """The program did not do what it was asked.

    str() is its one sentence. `exit_code` is None where the program could not be started. `result` is
    what it found all the same: `verify`, `validate` and `eval` answer in full where a check fails.
    """
    exit_code: Optional[int] = None

    def __init__(self, message: str, result: Optional[Result] = None) -> None:
        super().__init__(message)
        self.result = result


class ProgramError(Error):
    """The program is missing, is not for this machine, or is of another version than the package."""


class RunError(Error):
    """Exit code 1: input or output failed, memory ran out, or an internal error."""
    exit_code = 1


class UsageError(Error, ValueError):
    """Exit code 2: an argument is wrong, or arguments do not go together."""
    exit_code = 2


class InputError(Error, ValueError):
    """Exit code 3: the input breaks a rule of its format, is not supported, or holds a bad value."""
    exit_code = 3


class CheckError(Error):
    """Exit code 4: a check failed. `result` has what was found."""
    exit_code = 4


class DeviceError(Error):
    """Exit code 5: there is no such device."""
    exit_code = 5


class StoppedError(Error):
    """Exit code 130: somebody else than this process interrupted the program."""
    exit_code = 130


BY_EXIT_CODE: Dict[int, Type[Error]] = {
    kind.exit_code: kind for kind in (RunError, UsageError, InputError, CheckError, DeviceError, StoppedError)}
