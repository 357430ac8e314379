"""Exceptions, one for each exit code of the program."""


class Error(Exception):
    """What went wrong, in one sentence (exit code 1: input, output or memory)."""


class UsageError(Error):
    """The call is wrong (exit code 2)."""


class InputError(Error):
    """The input breaks a rule of its format, or is of a kind that is not supported (exit code 3)."""


class CheckError(Error):
    """A check failed: what was read is not what was written (exit code 4)."""


class DeviceError(Error):
    """There is no such device (exit code 5)."""
