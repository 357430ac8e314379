#!/usr/bin/env python3
"""Finds circles: source files, or folders, that need each other. Standard library only.

  circles.py [--root ROOT] [--build BUILD] [--layers NAME,...] [--as FILE]
  circles.py --self-test

A module is a .c or .cu file with the header of its name: a.c and a.h are the module a. A header that has
no such file is a module by itself. Two graphs are searched for circles, in each layer:

  includes   One file includes the other. Only headers can be in such a circle.
  calls      One module uses a function or a table that the other defines. For .c and .cu files this
             is read from the symbols of their objects, which --build names. For functions that stand
             in headers it is read from the text.

A room is a folder. Among rooms both graphs count as one, so a room that includes a file of another room
must not be called from there. --as FILE gives the rooms of a tree that does not have its folders yet: a
line "convert/run: convert/resume* convert/part_run.*" puts the files that match into the room.

Every circle is printed with the edges that make it. The exit code is 1 if there is one.
"""
import argparse
import collections
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

from lint import C_ENDINGS, INCLUDE, LAYERS, files_of, without_comments_and_strings

COMPILED = (".c", ".cu")
DEFINED = "TDBRCS"  # The letters that nm gives to what an object defines for others.
SHOWN = 3           # how many names an edge is printed with
NAME = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof"}


class Tree:
    """The C files of some layers, and what belongs to what."""

    def __init__(self, root, layers, rooms=()):
        self.root = root
        self.paths = [p for p in files_of(root)
                      if p.endswith(C_ENDINGS) and p.split("/")[0] in layers]
        self.rooms = rooms
        known = set(self.paths)
        matches = {p: map(INCLUDE.match, self.text(p).split("\n")) for p in self.paths}
        self.included = {p: [m.group(2) for m in found if m and m.group(2) in known]
                         for p, found in matches.items()}

    def room(self, path):
        for room, pattern in self.rooms:
            if fnmatch.fnmatch(path, pattern):
                return room
        return os.path.dirname(path)

    def text(self, path):
        with open(os.path.join(self.root, path), encoding="utf-8") as f:
            return f.read()


def includes(tree):
    """(file, included file, the latter's name) of every include within the tree."""
    for path, others in tree.included.items():
        for other in others:
            yield path, other, os.path.basename(other)


def reached(tree, path):
    """The file and everything that it includes, directly or not."""
    seen, left = set(), [path]
    while left:
        path = left.pop()
        if path not in seen:
            seen.add(path)
            left += tree.included[path]
    return seen


def code_of_header(text):
    """What a header defines, and what its functions and macros use: two sets of names."""
    text = without_comments_and_strings(text)
    macros = re.findall(r"^[ \t]*#[ \t]*define\b(?:[^\n]*\\\n)*[^\n]*", text, re.M)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)
    text = re.sub(r"extern\s*\{", "", text)  # extern "C", whose string is blanked
    defined, used, depth, outside = set(), set(), 0, ""
    for part in re.split(r"([{}])", text):
        if part == "{":
            if depth == 0 and outside.rstrip().endswith(")"):
                head = re.split(r"[;}]", outside)[-1]
                defined.update(NAME.findall(head)[:1])
            depth += 1
        elif part == "}":
            depth = max(depth - 1, 0)
            outside = ""
        elif depth == 0:
            outside = part
        else:
            used.update(NAME.findall(part))
    for macro in macros:
        used.update(NAME.findall(macro.split("(", 1)[-1] if "(" in macro else ""))
    return defined - KEYWORDS, used


def objects_of(tree, build):
    """{source file: its object}. The layer's own object comes before one made for a test."""
    found = {}
    known = set(tree.paths)
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as f:
        commands = json.load(f)
    for command in commands:
        path = os.path.relpath(os.path.realpath(command["file"]), os.path.realpath(tree.root))
        path = path.replace(os.sep, "/")
        if path not in known:
            continue
        words = shlex.split(command["command"])
        output = os.path.join(command["directory"], words[words.index("-o") + 1])
        own = os.path.relpath(output, build).startswith(path.split("/")[0] + "/")
        if path not in found or own:
            found[path] = output
    return found


def symbols(objects):
    """({name: files that define it}, {file: names it needs}) from {file: object}."""
    defined, needed = collections.defaultdict(set), collections.defaultdict(set)
    of_object = {o: path for path, o in objects.items()}
    if not of_object:
        return defined, needed
    # POSIX's form: the name of the object and a colon, then "symbol letter value size" lines.
    r = subprocess.run(["nm", "-A", "-P", "-g"] + sorted(of_object), stdout=subprocess.PIPE,
                       check=True, universal_newlines=True)
    for line in r.stdout.splitlines():
        name, symbol, letter = re.match(r"(.*): (\S+) (\S)", line).groups()
        if letter == "U":
            needed[of_object[name]].add(symbol)
        elif letter in DEFINED:
            defined[symbol].add(of_object[name])
    return defined, needed


def calls(tree, build):
    """(file, file whose function or table it uses, the name of that)."""
    defined, needed = symbols(objects_of(tree, build))
    inline, mentioned = {}, {}
    for path in tree.paths:
        text = tree.text(path)
        if path.endswith(COMPILED):
            mentioned[path] = set(NAME.findall(without_comments_and_strings(text)))
        else:
            inline[path], mentioned[path] = code_of_header(text)
            needed[path] = mentioned[path]  # A header has no object that would say it.
    for path in tree.paths:
        here = {}  # the functions of headers that the file sees
        for header in reached(tree, path) & set(inline):
            here.update((name, header) for name in inline[header])
        for name in mentioned[path] & set(here):
            yield path, here[name], name
        for name in needed[path] - set(here):
            for other in defined.get(name, ()):
                yield path, other, name


def graph_of(edges, node):
    """{node: {other node: names}} without what a node has with itself."""
    graph = collections.defaultdict(dict)
    for a, b, name in edges:
        if node(a) != node(b):
            graph[node(a)].setdefault(node(b), set()).add(name)
    return graph


def circles(graph):
    """The strongly connected components of more than one node, by Tarjan's algorithm."""
    order, low, stack, found = {}, {}, [], []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return sorted(found)


def described(what, graph):
    for circle in circles(graph):
        yield "%s: circle of %d: %s" % (what, len(circle), " ".join(circle))
        for a in circle:
            for b in sorted(set(graph.get(a, ())) & set(circle)):
                names = sorted(graph[a][b])
                more = ", ..." if len(names) > SHOWN else ""
                yield "  %s -> %s: %s" % (a, b, ", ".join(names[:SHOWN]) + more)


def search(root, layers, build=None, rooms=()):
    """All complaints, as lines."""
    tree = Tree(root, layers, rooms)
    by_include = list(includes(tree))
    by_call = []
    found = []
    if build:
        lost = sorted(o for o in objects_of(tree, build).values() if not os.path.exists(o))
        if lost:
            return ["%s is not built: objects missing: %d, the first is %s"
                    % (build, len(lost), lost[0])]
        by_call = list(calls(tree, build))
    for layer in layers:
        def inside(edges, prefix=layer + "/"):
            return [e for e in edges if e[0].startswith(prefix) and e[1].startswith(prefix)]
        found += described("includes", graph_of(inside(by_include), str))
        found += described("calls", graph_of(inside(by_call), lambda path: os.path.splitext(path)[0]))
    found += described("rooms", graph_of(by_include + by_call, tree.room))
    return found


def read_rooms(path):
    with open(path, encoding="utf-8") as f:
        lines = [line.split(":", 1) for line in f if line.strip() and not line.startswith("#")]
    return [(room.strip(), pattern) for room, patterns in lines for pattern in patterns.split()]


class SelfTest(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="qconv-circles-")
        self.addCleanup(shutil.rmtree, self.root)

    def plant(self, path, text):
        full = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="utf-8") as f:
            f.write(text)

    def build(self):
        """Compiles what was planted, as CMake would have it. A .cu file is C here."""
        commands = []
        for path in files_of(self.root):
            if path.endswith(COMPILED):
                output = "%s/CMakeFiles/%s.o" % (path.split("/")[0], os.path.basename(path))
                os.makedirs(os.path.join(self.root, "build", os.path.dirname(output)), exist_ok=True)
                command = ["cc", "-x", "c", "-I.", "-o", "build/" + output, "-c", path]
                subprocess.run(command, cwd=self.root, check=True)
                commands.append({"directory": self.root, "file": os.path.join(self.root, path),
                                 "command": shlex.join(command)})
        self.plant("build/compile_commands.json", json.dumps(commands))
        return os.path.join(self.root, "build")

    def found(self, *words, **options):
        lines = [line for line in search(self.root, list(LAYERS), self.build(), **options)
                 if not line.startswith(" ")]
        self.assertEqual(len(lines), 1 if words else 0, lines)
        for word in words:
            self.assertIn(word, lines[0])

    def test_clean(self):
        self.plant("base/a.h", "int qc_a(void);\n")
        self.plant("base/a.c", '#include "base/a.h"\nint qc_a(void) { return 1; }\n')
        self.plant("quant/b.c", '#include "base/a.h"\nint qc_b(void) { return qc_a(); }\n')
        self.found()

    def test_includes(self):
        self.plant("base/a.h", '#ifndef A\n#define A\n#include "base/b.h"\n#endif\n')
        self.plant("base/b.h", '#ifndef B\n#define B\n#include "base/a.h"\n#endif\n')
        self.found("includes", "2", "base/a.h", "base/b.h")

    def test_calls(self):
        self.plant("formats/a.c", "int qc_b(void);\nint qc_a(void) { return qc_b(); }\n")
        self.plant("formats/b.c", "int qc_c(void);\nint qc_b(void) { return qc_c(); }\n")
        self.plant("formats/c.cu", "int qc_a(void);\nint qc_c(void) { return qc_a(); }\n")
        self.found("calls", "3", "formats/a formats/b formats/c")

    def test_tables(self):
        self.plant("formats/a.c", "extern int qc_t[];\nint qc_a(void) { return qc_t[0]; }\n")
        self.plant("formats/b.c", "int qc_a(void);\nint qc_t[1];\nint qc_b(void) { return qc_a(); }\n")
        self.found("calls", "formats/a formats/b")

    def test_code_in_headers(self):
        """A function, or a macro, that stands in a header calls back; a declaration does not."""
        user = '#include "quant/d.h"\nint qc_a(void) { return helper(); }\n'
        for text, there in [("int qc_a(void);\nstatic inline int helper(void) { return qc_a(); }\n", True),
                            ("int qc_a(void);\n#define OTHER() qc_a()\n"
                             "static inline int helper(void) { return 1; }\n", True),
                            ("/* qc_a() */ int qc_a(void);\n"
                             "static inline int helper(void) { return 1; }\n", False)]:
            self.plant("quant/d.h", '#ifdef __cplusplus\nextern "C" {\n#endif\n' + text)
            self.plant("quant/a.c", user)
            self.found(*(["calls", "quant/a quant/d"] if there else []))

    def test_header_of_a_module(self):
        """a.h belongs to a.c, so a.c does not call another module through it."""
        self.plant("quant/a.h", "int qc_a(void);\n"
                   "static inline int helper(void) { return qc_a(); }\n")
        self.plant("quant/a.c", '#include "quant/a.h"\nint qc_a(void) { return helper(); }\n')
        self.found()

    def test_rooms(self):
        """One room includes the other, which calls it: no circle of files, but one of rooms."""
        self.plant("convert/run/a.h", "int qc_a(void);\n")
        self.plant("convert/run/a.c", "int qc_b(void);\nint qc_a(void) { return qc_b(); }\n")
        self.plant("convert/run/c.h", "#define C 1\n")
        self.plant("convert/plan/b.c", '#include "convert/run/c.h"\nint qc_b(void) { return C; }\n')
        self.found("rooms", "convert/plan convert/run")

    def test_planned_rooms(self):
        self.plant("convert/a.c", "int qc_b(void);\nint qc_a(void) { return qc_b(); }\n")
        self.plant("convert/b.c", "int qc_c(void);\nint qc_b(void) { return qc_c(); }\n")
        self.plant("convert/c.c", "int qc_c(void) { return 1; }\n")
        self.found()
        self.plant("rooms", "# what goes where\nconvert/run: convert/a.c convert/c.*\nconvert/plan: *b.c\n")
        self.found("rooms", "convert/plan convert/run",
                   rooms=read_rooms(os.path.join(self.root, "rooms")))

    def test_missing_object(self):
        self.plant("base/a.c", "int qc_a;\n")
        build = self.build()
        os.remove(os.path.join(build, "base/CMakeFiles/a.c.o"))
        self.assertIn("not built", search(self.root, ["base"], build)[0])


def main(argv):
    if argv[1:2] == ["--self-test"]:
        return 0 if unittest.main(argv=argv[:1], exit=False).result.wasSuccessful() else 1
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    parser.add_argument("--build")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--as", dest="rooms")
    options = parser.parse_args(argv[1:])
    found = search(options.root, options.layers.split(","), options.build,
                   read_rooms(options.rooms) if options.rooms else ())
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
