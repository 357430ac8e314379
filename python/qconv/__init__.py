"""qconv from Python."""
from .errors import CheckError, DeviceError, Error, InputError, UsageError
from .load import load

__all__ = ["load", "Error", "UsageError", "InputError", "CheckError", "DeviceError"]
