#!/usr/bin/env python3
"""An input for the targets that take a whole folder: pack_folder.py TARGET DIR >INPUT.

The files of DIR that TARGET_fuzzer.c has names for, each behind its mark (see fuzz_files.h)."""
import os
import re
import sys


def names_of(target):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), target + "_fuzzer.c")
    with open(path, encoding="ascii") as f:
        return re.findall(r'"([^"]+)"', re.search(r"names\[\] = \{(.*?)\};", f.read(), re.S).group(1))


def pack(target, folder):
    packed = b""
    for number, name in enumerate(names_of(target)):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, "rb") as f:
                packed += b"\xf1\x1e\xf1" + bytes([ord("0") + number]) + f.read()
    return packed


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.stdout.buffer.write(pack(*sys.argv[1:]))
