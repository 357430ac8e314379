"""qconv from Python."""
from .errors import CheckError, DeviceError, Error, InputError, ProgramError, RunError, UsageError
from .load import load

__all__ = ["load", "Error", "ProgramError", "RunError", "UsageError", "InputError", "CheckError", "DeviceError"]
