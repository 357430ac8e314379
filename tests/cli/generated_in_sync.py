#!/usr/bin/env python3
"""The options of the Python package (python/qconv/_options.py) are what qconv's option table gives.

With --update the file is written instead of compared.
"""
import difflib
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "python"))
from make_options import module  # noqa: E402

OPTIONS = os.path.join(ROOT, "python", "qconv", "_options.py")


def main():
    said = subprocess.run([os.environ["QCONV"], "help", "--json"], check=True, stdout=subprocess.PIPE).stdout
    want = module(json.loads(said))
    if "--update" in sys.argv[1:]:
        with open(OPTIONS, "w", encoding="utf-8") as f:
            f.write(want)
        return 0
    with open(OPTIONS, encoding="utf-8") as f:
        have = f.read()
    if have == want:
        return 0
    sys.stdout.writelines(difflib.unified_diff(have.splitlines(True), want.splitlines(True), "python/qconv/_options.py",
                                               "qconv help --json"))
    print("it differs; QCONV=<qconv> python3 tests/cli/generated_in_sync.py --update")
    return 1


if __name__ == "__main__":
    sys.exit(main())
