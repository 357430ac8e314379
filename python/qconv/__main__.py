"""`python -m qconv ARGUMENTS` and the command `qconv`: the program itself, in place of Python, and the commands
that the package adds to it."""
from __future__ import annotations

import os
import sys
from typing import NoReturn

from ._command import run, wanted
from ._program import find, start_failure
from .errors import ProgramError


def main() -> NoReturn:
    """Runs a command of the package, or becomes the program with the arguments of this process."""
    own = wanted(sys.argv[1:])
    if own is not None:
        sys.exit(run(own))
    try:
        path = find()
        try:
            os.execv(path, ["qconv", *sys.argv[1:]])
        except OSError as error:
            raise start_failure(path, error) from None
    except ProgramError as error:
        sys.exit("qconv: %s" % error)


if __name__ == "__main__":
    main()
