#!/usr/bin/env python3
"""docs/qconv.1, completions/ and the options of the Python package are what qconv's option table gives.

With --update they are written instead of compared.
"""
import difflib
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "python"))
from make_options import module  # noqa: E402

GENERATED = [
    ("docs/qconv.1", ["--man"]),
    ("completions/qconv.bash", ["--completion", "bash"]),
    ("completions/qconv.zsh", ["--completion", "zsh"]),
    ("completions/qconv.fish", ["--completion", "fish"]),
    ("python/qconv/_options.py", ["help", "--json"]),
]


def main():
    qconv = os.environ["QCONV"]
    differ = 0
    for path, args in GENERATED:
        full = os.path.join(ROOT, path)
        want = subprocess.run([qconv] + args, check=True, stdout=subprocess.PIPE).stdout
        if path.endswith(".py"):
            want = module(json.loads(want)).encode()
        if "--update" in sys.argv[1:]:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "wb") as f:
                f.write(want)
            continue
        have = b""
        if os.path.exists(full):
            with open(full, "rb") as f:
                have = f.read()
        if have != want:
            differ += 1
            sys.stdout.writelines(difflib.unified_diff(
                have.decode().splitlines(True), want.decode().splitlines(True),
                path, "qconv " + " ".join(args)))
    if differ:
        print("%d file(s) differ; QCONV=<qconv> python3 tests/cli/generated_in_sync.py --update"
              % differ)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
