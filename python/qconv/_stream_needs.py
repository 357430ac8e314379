"""What streaming needs beside the package itself: torch and transformers, and a sentence where one is missing."""
from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .errors import UsageError

NEEDS = {"torch": (2, 1), "transformers": (4, 57), "safetensors": (0, 4)}


def check() -> None:
    """Raises UsageError, with the line for pip, where one of these is missing or too old."""
    line = "pip install " + " ".join("'%s>=%d.%d'" % (name, *least) for name, least in NEEDS.items())
    for name, least in NEEDS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UsageError("computing a model needs the Python package %s, which is missing: %s"
                             % (name, line)) from None
        if tuple(int(part) for part in found.split(".")[:2]) < least:
            raise UsageError("computing a model needs %s %d.%d or later, and this is %s: %s"
                             % (name, *least, found, line))
