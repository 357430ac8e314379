"""`python -m qconv ARGUMENTS` and the command `qconv`: the program itself, in place of Python."""
from __future__ import annotations

import os
import sys
from typing import NoReturn

from ._program import find, start_failure
from .errors import ProgramError


def main() -> NoReturn:
    """Becomes the program, with the arguments of this process."""
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
