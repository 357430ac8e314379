#!/usr/bin/env python3
"""Rules of the tree that a compiler does not check. Standard library only.

  lint.py [ROOT]       print what breaks a rule; exit 1 if anything does
  lint.py --self-test  plant one violation of each rule and see it found
  lint.py --counts     how large the program is, and how often it names a scheme outside its row
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

# What a layer may include of the project. Everything not named here (tests, bench) may use all.
LAYERS = {
    "base": {"base"},
    "quant": {"base", "quant"},
    "formats": {"base", "formats"},
    "kernels": {"base", "quant", "kernels"},
    "convert": {"base", "quant", "formats", "kernels", "convert"},
}
# The rooms of convert/, from the lowest floor up (docs/architecture.md). An include stays in its room
# or goes to a lower floor. convert/ itself holds main.c, which may use all of them.
FLOORS = [
    {"families", "output", "term"},
    {"adapter", "device", "model"},
    {"hardware", "known", "library", "plan", "validate"},
    {"calibrate", "fit"},
    {"gpu", "pipeline"},
    {"run"},
    {"verify"},
    {"cli"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The budget: lines of the product, which is the C and CUDA of all layers (CONTRIBUTING.md says when it changes).
MAX_PRODUCT_LINES = 91999
MAX_ROOM_FILES = 40
MAX_LINES = 800
MAX_COLUMNS = 100
C_ENDINGS = (".c", ".h", ".cu", ".cuh")
SOURCE_ENDINGS = C_ENDINGS + (".py", ".sh", ".bats", ".cmake")
TEXT_ENDINGS = SOURCE_ENDINGS + (".md", ".txt", ".json", ".1", ".bash", ".zsh", ".fish", ".yml",
                                 ".yaml", ".in", ".svg")
# Test data is as it came.
SKIPPED_DIRS = {".git", "out", ".cache", "__pycache__", "node_modules"}
DATA_DIRS = ("tests/data/", "tests/golden/", "tests/fuzz/corpus/")
BANNED = ["atoi", "atol", "strtok", "sprintf", "vsprintf", "strcpy", "strcat", "sscanf", "gets",
          "alloca"]
BANNED_HEAP = ["malloc", "calloc", "realloc"]
BANNED_ENDS = ["exit", "abort"]
CLANG_FORMAT = "clang-format-14"
# Absolute paths of somebody's machine: folders of users, and temporary files that have a name
# already (mkstemp's template has none yet).
MACHINE_PATH = (rb"(?:/(?:home|root|Users|work|workspace)/[\w.-]+"
                rb"|/(?:tmp|var/tmp|dev/shm)/(?![\w.-]*XXXXXX)[\w.%-]+)")
# In text, a/home/x is a path of the tree. In data a letter before may be a length, and JSON may
# have written \/.
MACHINE_PATH_IN_TEXT = re.compile(rb"(?<![\w.}])" + MACHINE_PATH)
MACHINE_PATH_IN_DATA = re.compile(MACHINE_PATH.replace(b"/", rb"\\?/"))
MAX_PARAMETERS = 8
# The head of a function that is defined here, and its parameters.
LONG_LIST = re.compile(r"^[\w \t*]*?\b(\w+)\(([^(){};]*)\)\s*\{", re.M)
# A scheme named in code, by any of the enums that there are for it.
SCHEME_NAMED = re.compile(
    r"\bQC_(?:(?:SCHEME|WEIGHTS|CHECK|FORM)_(?:NF4|INT8_ROWS|INT8_BLOCKS|W4A16|W8A16|W8A8)|TO_(?:NF4|INT8)"
    r"|AUTO_(?:AT_)?(?:NF4|NF4_32|INT8))\b|\bis_nf4\b")
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')


def files_of(root):
    """Paths below root, with '/', sorted: what git tracks or would, else everything."""
    if os.path.exists(os.path.join(root, ".git")):
        r = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "-z"],
                           stdout=subprocess.PIPE)
        if r.returncode == 0:
            names = {n.decode() for n in r.stdout.split(b"\0") if n}
            return sorted(n for n in names if os.path.isfile(os.path.join(root, n)))
    found = []
    for folder, dirs, names in os.walk(root):
        dirs[:] = [d for d in dirs if d not in SKIPPED_DIRS and not d.startswith(("build", ".venv"))]
        for n in names:
            found.append(os.path.relpath(os.path.join(folder, n), root).replace(os.sep, "/"))
    return sorted(found)


def without_comments_and_strings(text):
    """C text of the same lines, comments and the insides of literals blanked."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def room_of(path):
    """Of a file below convert/: its room, or "" for one that is in none."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else ""


def check_rooms(paths):
    files = {}
    for path in paths:
        if not path.startswith("convert/"):
            continue
        room = room_of(path)
        if room and room not in FLOOR_OF:
            yield "%s: the room %s/ has no floor in FLOORS" % (path, room)
        if not room and path not in ("convert/main.c", "convert/CMakeLists.txt"):
            yield "%s: convert/ holds main.c and rooms only" % path
        if path.endswith(C_ENDINGS):
            files[room] = files.get(room, 0) + 1
    for room, count in sorted(files.items()):
        if count > MAX_ROOM_FILES:
            yield "convert/%s: %d source files, more than %d" % (room, count, MAX_ROOM_FILES)


def check_floors(path, number, target):
    here, there = room_of(path), room_of(target)
    if path == "convert/main.c" or here == there:
        return
    if FLOOR_OF.get(there, len(FLOORS)) >= FLOOR_OF.get(here, -1):
        yield "%s:%d: the room %s/ must not include %s/, which is not on a lower floor" % (
            path, number, here, there)


def check_includes(path, lines):
    layer = path.split("/")[0]
    for number, line in enumerate(lines, 1):
        m = INCLUDE.match(line)
        if not m:
            continue
        name = m.group(2)
        if layer not in LAYERS:
            continue
        target = name.split("/")[0]
        if target in LAYERS and target not in LAYERS[layer]:
            yield "%s:%d: %s/ must not include %s/" % (path, number, layer, target)
        if layer == target == "convert":
            yield from check_floors(path, number, name)
        if os.path.basename(name).startswith("cu") and layer in ("base", "quant", "formats"):
            yield "%s:%d: %s/ must not include CUDA" % (path, number, layer)
        if m.group(1) == '"' and "/" not in name:
            yield "%s:%d: write the folder too: \"%s/%s\"" % (path, number, layer, name)


def check_banned(path, text):
    # base/ owns the heap. Tests take exact blocks from it so that sanitizers see overruns, and may
    # end the process: nothing of tests/ and bench/ is part of the program.
    beside = path.startswith(("tests/", "bench/"))
    names = list(BANNED)
    if not beside:
        names += BANNED_ENDS
        if not path.startswith("base/"):
            names += BANNED_HEAP
    pattern = re.compile(r"(?<![\w.>])(%s)\s*\(" % "|".join(names))
    for number, line in enumerate(without_comments_and_strings(text).split("\n"), 1):
        for m in pattern.finditer(line):
            yield "%s:%d: %s is banned" % (path, number, m.group(1))


def check_text(path, raw, lines):
    if path.endswith(SOURCE_ENDINGS) or os.path.basename(path) == "CMakeLists.txt":
        for number, line in enumerate(raw.split(b"\n"), 1):
            if any(b > 126 or (b < 32 and b != 9) for b in line):
                yield "%s:%d: not ASCII" % (path, number)
        if len(lines) > MAX_LINES:
            yield "%s: %d lines, more than %d" % (path, len(lines), MAX_LINES)
    if path.endswith(C_ENDINGS):
        # clang-format breaks code, and leaves tables that are marked for it; comments are broken by
        # hand.
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS and line.lstrip().startswith(("/*", "*", "//")):
                yield "%s:%d: %d columns, more than %d" % (path, number, len(line), MAX_COLUMNS)
    for number, line in enumerate(lines, 1):
        if line != line.rstrip():
            yield "%s:%d: white space at the end" % (path, number)
    if raw and not raw.endswith(b"\n"):
        yield "%s: no newline at the end" % path


def is_product(path):
    return path.split("/")[0] in LAYERS and path.endswith(C_ENDINGS)


def check_budget(lines):
    if lines > MAX_PRODUCT_LINES:
        yield "tests/lint.py: the product has %d lines, more than MAX_PRODUCT_LINES = %d: a feature in, a feature out" % (
            lines, MAX_PRODUCT_LINES)


def check_machine_paths(path, raw):
    """Of any file: text, corpora that are half binary, programs without an ending."""
    if path.startswith(DATA_DIRS):
        for m in MACHINE_PATH_IN_DATA.finditer(raw):
            yield "%s: byte %d: path of a machine: %s" % (path, m.start(), m.group().decode())
        return
    for number, line in enumerate(raw.split(b"\n"), 1):
        m = MACHINE_PATH_IN_TEXT.search(line)
        if m:
            yield "%s:%d: path of a machine: %s" % (path, number, m.group().decode())


def check_names(paths):
    seen = {}
    for path in paths:
        name = os.path.basename(path)
        if not path.endswith(SOURCE_ENDINGS) or name == "__init__.py":
            continue
        if name in seen:
            yield "%s: %s has the same name" % (path, seen[name])
        seen.setdefault(name, path)


def check_format(root, paths):
    """clang-format's complaints; says so on stderr when it is not there."""
    tool = shutil.which(CLANG_FORMAT)
    if not tool:
        print("lint: %s is not installed: formatting not checked" % CLANG_FORMAT, file=sys.stderr)
        return
    if not os.path.exists(os.path.join(root, ".clang-format")):
        return
    sources = [p for p in paths if p.endswith(C_ENDINGS)]
    if not sources:
        return
    r = subprocess.run([tool, "--dry-run", "--ferror-limit=1"] + sources, cwd=root,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in r.stdout.decode(errors="replace").splitlines():
        if "-Wclang-format-violations" in line:
            yield re.sub(r"^([^:]+:\d+):.*", r"\1: not as %s has it" % CLANG_FORMAT, line)


def lint(root):
    """All complaints, as lines."""
    everything = files_of(root)
    paths = [p for p in everything if not p.startswith(DATA_DIRS)]
    found = []
    product_lines = 0
    for path in everything:
        with open(os.path.join(root, path), "rb") as f:
            raw = f.read()
        found += check_machine_paths(path, raw)
        if path.startswith(DATA_DIRS) or not path.endswith(TEXT_ENDINGS):
            continue
        text = raw.decode("utf-8", errors="replace")
        lines = text.split("\n")
        if lines and lines[-1] == "":
            lines.pop()
        found += check_text(path, raw, lines)
        if path.endswith(C_ENDINGS):
            found += check_includes(path, lines)
            found += check_banned(path, text)
        product_lines += len(lines) if is_product(path) else 0
    found += check_budget(product_lines)
    found += check_names(paths)
    found += check_rooms(paths)
    found += check_format(root, paths)
    return found


class SelfTest(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="qconv-lint-")
        self.addCleanup(shutil.rmtree, self.root)

    def plant(self, path, text):
        full = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as f:
            f.write(text if isinstance(text, bytes) else text.encode())

    def clean(self, path, text):
        self.plant(path, text)
        self.assertEqual(lint(self.root), [])

    def found(self, path, text, *words):
        self.plant(path, text)
        lines = lint(self.root)
        os.remove(os.path.join(self.root, path))
        self.assertEqual(len(lines), 1, lines)
        for w in (path,) + words:
            self.assertIn(w, lines[0])

    def test_clean_tree(self):
        self.clean("base/a.c", '#include "base/a.h"\n\n#include <stdlib.h>\n')
        self.clean("quant/b.c", '#include "base/a.h"\n#include "quant/b.h"\n')
        self.clean("convert/run/c.c", '#include "formats/x.h"\n#include "kernels/k.h"\n')
        self.clean("docs/text.md", "No path here: a/home/x, ./data/x, http://host/data/x.\n")

    def test_upward_includes(self):
        for layer, target in [("base", "quant"), ("base", "formats"), ("base", "convert"),
                              ("quant", "formats"), ("quant", "kernels"), ("quant", "convert"),
                              ("formats", "quant"), ("formats", "kernels"),
                              ("formats", "convert"), ("kernels", "formats"),
                              ("kernels", "convert")]:
            self.found(layer + "/bad.c", '\n#include "%s/x.h"\n' % target, ":2:", target)
        self.found("quant/bad.h", "#  include <formats/x.h>\n", ":1:", "formats")

    def test_floors(self):
        self.clean("convert/main.c", '#include "convert/cli/x.h"\n')
        self.clean("convert/run/good.c", '#include "convert/run/x.h"\n#include "convert/term/x.h"\n')
        self.found("convert/term/a.c", '\n#include "convert/run/x.h"\n', ":2:", "run/")
        self.found("convert/fit/a.c", '#include "convert/gpu/x.h"\n', ":1:", "gpu/")
        self.found("convert/fit/a.c", '#include "convert/x.h"\n', ":1:", "lower floor")

    def test_rooms(self):
        self.found("convert/a.c", "int x;\n", "main.c and rooms")
        self.found("convert/attic/a.c", "int x;\n", "no floor")
        for i in range(MAX_ROOM_FILES):
            self.plant("convert/fit/a%d.c" % i, "int x;\n")
        self.assertEqual(lint(self.root), [])
        self.plant("convert/fit/b.c", "int x;\n")
        self.assertEqual(lint(self.root), ["convert/fit: 41 source files, more than 40"])

    def test_cuda(self):
        for layer in ["base", "quant", "formats"]:
            self.found(layer + "/bad.c", "#include <cuda_runtime_api.h>\n", "CUDA")
        self.clean("kernels/good.cu", "#include <cuda_runtime_api.h>\n")

    def test_include_without_folder(self):
        self.found("base/bad.c", '#include "a.h"\n', "folder")

    def test_banned(self):
        for name in BANNED + BANNED_HEAP + BANNED_ENDS:
            self.found("convert/run/bad.c", "x = 1;\ny = %s (z);\n" % name, ":2:", name)
        self.found("base/bad.c", "exit(1);\n", "exit")
        self.clean("base/heap.c", "p = malloc(1);\n")
        self.clean("tests/unit/run/unit_x.c", "p = malloc(1);\nabort();\n")
        self.clean("convert/run/fine.c",
                   "/* malloc(1) */\nqc_malloc(1); // exit(1)\nputs(\"abort()\");\no->exit(1);\n"
                   "snprintf(a);\nfgets(b);\n")

    def test_long_file(self):
        self.found("quant/long.c", "int x;\n" * 801, "801 lines")
        self.clean("quant/long2.c", "int x;\n" * 800)

    def test_budget(self):
        """Lines of all files of the product count together, and no others."""
        whole = ["base/a.h", "quant/a.c", "formats/b.c", "kernels/c.cu", "convert/run/d.c"]
        self.plant("tests/beside.h", "\n" * 700)
        self.plant("kernels/notes.md", "\n" * 700)
        with unittest.mock.patch(__name__ + ".MAX_PRODUCT_LINES", 7 * len(whole)):
            for path in whole:
                self.plant(path, "int x;\n" * 7)
            self.assertEqual(lint(self.root), [])
            self.plant("kernels/e.cuh", "int x;\n")
            self.assertEqual(lint(self.root), ["tests/lint.py: the product has 36 lines, more than MAX_PRODUCT_LINES = 35: "
                                               "a feature in, a feature out"])

    def test_names(self):
        self.plant("base/same.c", "\n")
        self.found("quant/same.c", "\n", "base/same.c")

    def test_ascii(self):
        self.found("quant/a.c", b"/* \xc3\xa9 */\n", ":1:", "ASCII")
        self.found("tests/a.py", b"# \xe2\x80\x93\n", "ASCII")
        self.found("quant/a.c", b"int x;\x01\n", "ASCII")
        self.clean("docs/a.md", "caf\u00e9\n")

    def test_white_space(self):
        self.found("quant/a.c", "int x; \n", ":1:", "white space")
        self.found("docs/a.md", "text\t\n", "white space")
        self.found("quant/a.c", "/* %s */\n" % ("x" * 95), ":1:", "101 columns")
        self.clean("quant/a.c", "/* %s */\n" % ("x" * 94))
        self.found("docs/a.md", "text", "newline")

    def test_machine_paths(self):
        for top in ["home", "root", "Users", "work"]:
            self.found("docs/a.md", "see /%s/somebody/x\n" % top, "path of a machine")
        self.found("tests/a.py", "x = '/%s/me'\n" % "home", "path of a machine")
        self.found(".ci/run", "cd /%s/x\n" % "work", ":1:", "path of a machine")

    def test_temporary_files(self):
        for top in ["tmp", "var/tmp", "dev/shm"]:
            self.found("docs/a.md", "\nin /%s/x.log\n" % top, ":2:", "path of a machine")
        self.found("tests/a.c", 'f("/%s/x-%%d");\n' % "tmp", "path of a machine")
        self.clean("tests/b.c", 'char p[] = "/tmp/qconv-x-XXXXXX", *t = "/tmp";\n')
        self.clean("tests/c.sh", 'd=$(mktemp -d "${TMPDIR:-/tmp}/x-XXXXXX")\n')

    def test_data(self):
        """Whatever is before a path, and between its parts; the rest is as it came."""
        for text in [b"\0\x8c0/%s/me\0\xff", b'{"against":"\\/%s\\/me"}', b"x=/%s/me"]:
            for path in ["tests/fuzz/corpus/manifest/found_00", "tests/data/x/a.bin"]:
                self.found(path, text % b"work", "path of a machine", "byte")
        self.found("tests/fuzz/corpus/journal/a", b"\1/%s/x-1" % b"tmp", "byte 1:")
        self.clean("tests/fuzz/corpus/words/a", b"\xff \n/work\0/home tests/data/x")

    def test_format(self):
        if not shutil.which(CLANG_FORMAT):
            self.skipTest("no " + CLANG_FORMAT)
        self.plant(".clang-format", "BasedOnStyle: LLVM\n")
        self.found("quant/a.c", "int  x;\n", ":1:", CLANG_FORMAT)


def counts(root):
    """What docs/architecture.md and the guides say of the program's size, as lines of text."""
    sizes, parameters, schemes = {}, [], {}
    for path in files_of(root):
        if not is_product(path):
            continue
        layer = path.split("/")[0]
        with open(os.path.join(root, path)) as f:
            text = f.read()
        room = "/".join(path.split("/")[:2]) if room_of(path) and layer == "convert" else layer
        files, lines = sizes.get(room, (0, 0))
        sizes[room] = (files + 1, lines + text.count("\n"))
        code = without_comments_and_strings(text)
        parameters += ["%s:%s" % (path, m.group(1)) for m in LONG_LIST.finditer(code)
                       if m.group(2).count(",") >= MAX_PARAMETERS]
        named = len([line for line in code.split("\n") if SCHEME_NAMED.search(line)])
        if named:
            schemes[path] = named
    for room in sorted(sizes):
        yield "%-20s %3d files %6d lines" % (room, *sizes[room])
    yield "%-20s %3d files %6d lines" % ("all", *(sum(s[i] for s in sizes.values()) for i in (0, 1)))
    yield "%-20s %16d lines" % ("budget", MAX_PRODUCT_LINES)
    yield "functions with more than %d parameters: %d" % (MAX_PARAMETERS, len(parameters))
    yield from ("  " + p for p in parameters)
    yield "lines that name a scheme: %d in %d files" % (sum(schemes.values()), len(schemes))
    yield from ("  %-44s %d" % item for item in sorted(schemes.items()))


def main(argv):
    if argv[1:2] == ["--counts"]:
        print("\n".join(counts(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
        return 0
    if argv[1:2] == ["--self-test"]:
        return 0 if unittest.main(argv=argv[:1], exit=False).result.wasSuccessful() else 1
    root = argv[1] if len(argv) > 1 else os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = lint(root)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
