"""Exceptions, one for each exit code of the program."""


class Error(Exception):
    """What went wrong, in one sentence."""


class ProgramError(Error):
    """The library is missing, is not for this machine, or is of another version than the package."""


class RunError(Error):
    """Exit code 1: input or output failed, memory ran out, or an internal error."""


class UsageError(Error, ValueError):
    """Exit code 2: an argument is wrong, or arguments do not go together."""


class InputError(Error, ValueError):
    """Exit code 3: the input breaks a rule of its format, or is not supported."""


class CheckError(Error):
    """Exit code 4: a check failed: what was read is not what was written."""


class DeviceError(Error):
    """Exit code 5: there is no such device."""


BY_EXIT_CODE = {1: RunError, 2: UsageError, 3: InputError, 4: CheckError, 5: DeviceError}
