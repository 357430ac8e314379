#!/usr/bin/env python3
"""Compares the C interface of libqconv with the list in tests/golden/interface.txt: functions with their
types, the bytes of structs and where their members lie, values of enums, and that the libraries show these
functions, with a version, and nothing else.

  interface.py --build BUILD [--update]

Before a version is released anything may change, and --update writes it down. After that, within one minor
version (QCONV_0.5), lines may be added and no other may change: other programs are compiled against them.
Exit code 1 if the list differs, 77 where the build has no library."""
import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIST = os.path.join(ROOT, "tests", "golden", "interface.txt")
# Each library's own headers, and where it lies below the build folder; of the second library the one with
# its kernels on the CPU will do.
LIBRARIES = (("libqconv.so", ("device_reader.h", "qconv.h"), ("libqconv.so",)),
             ("libqconv_cuda.so", ("gpu_load.h", "qconv_cuda.h"),
              ("libqconv_cuda.so", "shim/libqconv_cuda.so")))


def run(argv):
    return subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout.decode()


def code_of(path):
    with open(path, encoding="utf-8") as f:
        return re.sub(r"/\*.*?\*/", " ", f.read(), flags=re.S)


def functions(text):
    """{name: declaration in one line}"""
    found = {}
    for words in re.findall(r"^QC_API\b([^;{]*);", text, re.M):
        words = re.sub(r"\bQC_(NODISCARD|PRINTF\([^)]*\))", " ", words)
        line = re.sub(r"\* (?=qc_)", "*", re.sub(r"\s+", " ", words)).strip()
        found[re.search(r"\b(qc_\w+)\(", line).group(1)] = line
    return found


def members(body):
    for line in body.split(";"):
        callback = re.search(r"\(\*(\w+)\)", line)
        if callback:
            yield callback.group(1)
        elif line.strip():
            for part in re.sub(r"\[[^\]]*\]", "", line).split(","):
                yield re.search(r"(\w+)\s*$", part).group(1)


def layout(include, text):
    """Lines about structs and enums, which a compiled program prints."""
    prints = []
    for body, name in re.findall(r"typedef struct \{([^{}]*)\} (\w+);", text):
        prints.append('printf("struct %s %%zu\\n", sizeof(%s));' % (name, name))
        prints += ['printf("struct %s.%s %%zu %%zu\\n", offsetof(%s, %s), sizeof(((%s *)0)->%s));'
                   % (name, m, name, m, name, m) for m in members(body)]
    # The counts grow when names are added.
    for name in sorted(set(re.findall(r"\b(QC_\w+)\b(?<!_COUNT)", enums(include)))):
        prints.append('printf("enum %s %%d\\n", (int)%s);' % (name, name))
    with tempfile.TemporaryDirectory(prefix="qconv-interface-") as d:
        source = os.path.join(d, "layout.c")
        with open(source, "w", encoding="utf-8") as f:
            f.write("#include <qconv/qconv_cuda.h>\n#include <stdio.h>\nint main(void)\n{\n    %s\n"
                    "    return 0;\n}\n" % "\n    ".join(prints))
        run([os.environ.get("CC", "cc"), "-std=c11", "-I" + include, source, "-o", os.path.join(d, "layout")])
        return run([os.path.join(d, "layout")]).splitlines()


def enums(include):
    """The text of all enums, with macros expanded."""
    text = run([os.environ.get("CC", "cc"), "-E", "-P", "-I" + include,
                os.path.join(include, "qconv", "qconv_cuda.h")])
    return " ".join(re.findall(r"enum\s*\{([^}]*)\}\s*qc_", text))


def symbols(path):
    lines = run(["nm", "-D", "--defined-only", "--with-symbol-versions", path]).splitlines()
    shown = {line.split()[-1] for line in lines if line.split()[-2] != "A"}
    return shown - {"qc_shim_enqueue@@QC_SHIM"}  # of the library with its kernels on the CPU


def interface(build):
    """The list's lines, and what is wrong with the libraries."""
    include, lines, wrong, text = os.path.join(build, "include"), [], [], ""
    with open(os.path.join(build, "libqconv.map"), encoding="utf-8") as f:
        node = re.search(r"^(QCONV_\S+) \{", f.read(), re.M).group(1)
    for library, headers, places in LIBRARIES:
        own = "".join(code_of(os.path.join(include, "qconv", h)) for h in headers)
        text += own
        declared = functions(own)
        lines += ["%s %s: %s" % (library, node, declared[name]) for name in sorted(declared)]
        for path in (os.path.join(build, p) for p in places):
            if os.path.exists(path):
                seen = symbols(path)
                expected = {"%s@@%s" % (name, node) for name in declared}
                wrong += ["%s: %s is declared and not shown" % (path, n) for n in sorted(expected - seen)]
                wrong += ["%s: %s is shown and not declared" % (path, n) for n in sorted(seen - expected)]
    return lines + layout(include, text), wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    if not os.path.exists(os.path.join(args.build, "libqconv.so")):
        print("the build has no library")
        return 77
    lines, wrong = interface(args.build)
    if args.update:
        with open(LIST, "w", encoding="utf-8") as f:
            f.write("\n".join(lines) + "\n")
    with open(LIST, encoding="utf-8") as f:
        known = f.read().splitlines()
    differs = list(difflib.unified_diff(known, lines, "tests/golden/interface.txt", "this build", n=0,
                                        lineterm=""))
    for line in wrong + differs:
        print(line)
    if differs:
        print("The C interface is another one. If that is meant, and what was released stays as it is "
              "(tests/interface.py says what may change): tests/interface.py --build BUILD --update")
    print("%d lines" % len(lines))
    return 1 if wrong or differs else 0


if __name__ == "__main__":
    sys.exit(main())
