#!/usr/bin/env python3
"""Do the tests of the kernels notice when a kernel is wrong? Breaks the kernels in one place at a
time, builds the file against the CPU shim, and runs the tests that are about it, in several orders
of threads, until one fails. A mutant that passes them all has survived: either a test is missing,
or the change is harmless, which harmless_mutants.txt says with the reason.

  barrier   one __syncthreads, __syncwarp, qc_grid_wait, qc_cp_async_wait or qc_cp_async_commit is
            left out
  bound     one `a < b` of a for, if, while or ?: becomes `a <= b`, or `a + 1 < b`
  fragment  one index of a fragment in the shim's matrix wrappers is another
  slice     one step of an epilogue or one use of where a slice begins is left out (SLICE)
  ring      one of the rules by which matmul_ring.cu shares stages and sums is broken (RING)
  pack      one step of packing codes, or of taking them out of bytes and words, is wrong (PACK)

  mutate_kernels.py --build BUILD [--kind KIND]... [--file NAME]... [--sample N] [--seed S] [--list]

BUILD: configured with Ninja, the targets shim_* built. Exit codes: 0, 1 a survivor (or an entry of
the list that is no longer true), 2 usage, 77 not possible here. Standard library only."""
import argparse
import json
import os
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
ORDERS = ["shuffle:1", "forward", "reverse", "shuffle:2"]
WRAPPERS = "tests/shim/include/shim_ptx.h"
# The tests that are about a file, with an argument if they have one; a kernel file that is not here
# fails the run.
TESTS = {
    "kernels/cuda_quantize.cu": ["quantize"],
    "kernels/cuda_quantize_rows.cu": ["quantize"],
    "kernels/cuda_dequantize.cu": ["dequantize"],
    "kernels/cuda_feedback_outputs.cu": ["feedback_rows", "feedback_outputs"],
    "kernels/cuda_feedback_rows.cu": ["feedback_rows"],
    "kernels/cuda_feedback_search.cu": ["feedback_search"],
    "kernels/cuda_memory_rate.cu": ["memory_rate"],
    "kernels/cuda_moments.cu": ["feedback_open"],
    "kernels/cuda_scale_search.cu": ["scale_search"],
    "kernels/cuda_scale_search_rows.cu": ["scale_search"],
    "kernels/matmul_experts.cu": ["experts"],
    "kernels/matmul_gemv.cu": ["products gemv", "experts"],
    "kernels/matmul_input.cu": ["products gemv", "graph", "products mma-884", "products general", "api", "experts"],
    "kernels/matmul_reduce.cu": ["products gemv", "graph", "products mma-884", "api"],
    "kernels/matmul_reference.cu": ["products gemv", "products mma-884", "api"],
    "kernels/matmul_dense_rows.cu": ["api"],
    "kernels/matmul_mma884.cu": ["products mma-884", "sharing mma-884"],
    "kernels/matmul_mma16816.cu": ["products general", "experts"],
    "kernels/matmul_ring.cu": ["graph", "ring", "products ring", "products ring-32"],
    "kernels/matmul_tiles.cu": ["sharing tiles", "products tiles"],
    "kernels/matmul_wgmma.cu": ["graph", "sharing wgmma", "products wgmma"],
    "tests/kernels/kernel_shim_matrix.cpp": ["matrix"],
}
QUICKEST = ["matrix", "memory_rate", "feedback_rows", "feedback_open", "llama", "dequantize", "quantize",
            "feedback_search", "scale_search", "products gemv", "graph", "sharing mma-884", "products mma-884",
            "products ring", "products ring-32", "products general", "api", "experts", "ring", "sharing wgmma", "sharing tiles",
            "products tiles", "products wgmma", "feedback_outputs", "slice"]
BARRIER = re.compile(r"\b(?:__syncthreads|__syncwarp|qc_grid_wait|qc_(?:cp_async|wgmma)_wait<[^;<>]*>"
                     r"|qc_(?:cp_async|wgmma)_commit|qc_wgmma_fence|qc_mbarrier_(?:ready|wait|arrive(?:_copied)?))"
                     r"\([^;()]*\);")
BOUND = re.compile(r"([\w\])]) < (?=[\w(])")
FRAGMENT = [("lane / 4", "lane % 8"), ("lane % 4", "lane / 8"), ("2 * t + h", "2 * t + 1 - h"),
            ("+ 8 + h", "+ h"), ("g + 8", "g"), ("(lane & 1)", "(lane >> 1 & 1)"),
            ("(lane & 2)", "(2 * (lane & 1))"), ("(e & 4)", "(2 * (e & 2))"),
            ("(e & 2)", "(2 * (e & 1))"), ("(e & 2 ? 8 : 0)", "(e & 1 ? 8 : 0)"),
            ("(e & 1)", "(e >> 1 & 1)"), ("lane >= 16", "lane >= 8"), ("i >= 4", "i >= 2"),
            ("p->a, 2 + h", "p->a, 4 + h"), ("p->a, 4 + h", "p->a, 2 + h"),
            ("p->b, 2 + h", "p->b, h"), ("half_of(p->b, k)", "half_of(p->b, 3 - k)"),
            ("8 * i + lane / 4", "8 * i + lane % 4")]
# What is left out, of which file, and in which unit; shim_slice is about them.
SLICE = [("kernels/matmul_run.cuh", "if (o.residual)", "if (false)", "kernels/matmul_ring.cu"),
         ("kernels/matmul_run.cuh", "if (o.gate)", "if (false)", "kernels/matmul_reduce.cu"),
         ("kernels/matmul_ring.cu", "(to->w.first / granule)", "0", "kernels/matmul_ring.cu"),
         ("kernels/matmul_share.cuh", "(to->w.first / QC_SHARE_BLOCK)", "0", "kernels/matmul_tiles.cu")]
# A group of copies that is waited for too early, a stage that is used again too soon, sums out of order, and a tile that
# is finished too early: of the ring.
RING = [("kernels/matmul_ring.cu", "qc_cp_async_wait<S::stages - 2>();", "qc_cp_async_wait<S::stages - 1>();"),
        ("kernels/matmul_ring.cu", "free_at = at;", ";"),
        ("kernels/matmul_ring.cuh", "sums + p.piece * each", "sums + (a.ring.pieces - 1 - p.piece) * each"),
        ("kernels/matmul_ring.cuh", "!= a.ring.pieces - 1)", "!= (a.ring.pieces - 1) / 2)"),
        ("kernels/matmul_ring.cuh", "(p.turn >> a.ring.slots_log) + 1", "(p.turn >> a.ring.slots_log)")]
# What lies behind a byte, a word or the codes of a row is not taken, not written or not cleared; and a unit.
PACK = [("kernels/cuda_scale_search_internal.cuh", "value | next << (wide - inside)", "value", "kernels/cuda_scale_search.cu"),
        ("kernels/cuda_scale_search_internal.cuh", "16) << 2 * bits", "16) << bits", "kernels/cuda_scale_search.cu"),
        ("kernels/cuda_scale_search_internal.cuh", "at + l < n ? (uint32_t)((int)q + how.zero) : 0",
         "(uint32_t)((int)q + how.zero)", "kernels/cuda_scale_search_rows.cu"),
        ("kernels/cuda_scale_search_internal.cuh", "at < n && at + 16 >= n && byte < end", "false",
         "kernels/cuda_scale_search_rows.cu"),
        ("kernels/cuda_scale_search_rows.cu", "row * job.row_bytes", "row * job.a.cols * job.how.bits / 8", None),
        ("kernels/cuda_dequantize.cu", "8 * job.bits > 32", "8 * job.bits > 40", None),
        ("kernels/cuda_dequantize.cu", "8 * job.bits > 64", "8 * job.bits > 72", None),
        ("kernels/cuda_dequantize.cu", "(bit % 8 + job.bits - 1) / 8", "0", None),
        ("kernels/cuda_dequantize.cu", "job.by_rows)", "true)", None),
        ("kernels/cuda_feedback_rows.cu", "stored_code(how, from, k) >> cut", "stored_code(how, from, k)", None),
        ("kernels/cuda_feedback_rows.cu", "have < 8", "have < 7", None),
        ("kernels/cuda_feedback_rows.cu", "gaps ? qc_form_row_bytes(form) : bytes", "bytes", None)]


class Mutant:
    def __init__(self, path, kind, start, end, text, new):
        self.path, self.kind, self.unit = path, kind, None
        self.text = text[:start] + new + text[end:]  # of the whole file
        self.line = text.count("\n", 0, start) + 1
        begin = text.rfind("\n", 0, start) + 1
        stop = text.find("\n", start)
        self.result = (text[begin:start] + new + text[end:stop]).strip()

    def __str__(self):
        return "%s:%d: %s: %s" % (self.path, self.line, self.kind, self.result)


def without_comments(text):
    """The same length, comments and literals blanked."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def read(path):
    with open(os.path.join(ROOT, path), encoding="ascii") as f:
        return f.read()


def kernel_files():
    return sorted("kernels/" + n for n in os.listdir(os.path.join(ROOT, "kernels"))
                  if n.endswith((".cu", ".cuh")) and n not in ("ptx.cuh", "cuda_launch.cuh"))


def mutants_of(path):
    text = read(path)
    code = without_comments(text)
    found = []
    for changed, old, new, unit in SLICE:
        if changed == path:
            at = code.index(old)
            found.append(Mutant(path, "slice", at, at + len(old), text, new))
            found[-1].unit = unit
    for changed, old, new in RING:
        if changed == path:
            at = code.index(old)
            found.append(Mutant(path, "ring", at, at + len(old), text, new))
    for changed, old, new, unit in PACK:
        if changed == path:
            at = code.index(old)
            found.append(Mutant(path, "pack", at, at + len(old), text, new))
            found[-1].unit = unit
    if path == WRAPPERS:
        begin = code.index("ldmatrix_compute")
        for old, new in FRAGMENT:
            at = code.find(old, begin)
            while at >= 0:
                found.append(Mutant(path, "fragment", at, at + len(old), text, new))
                at = code.find(old, at + 1)
        return found
    for n, m in enumerate(BARRIER.finditer(code), 1):
        found.append(Mutant(path, "barrier", m.start(), m.end(), text, ";"))
        found[-1].result = "without %s (number %d)" % (m.group(), n)
    for m in BOUND.finditer(code):
        begin = code.rfind("\n", 0, m.start()) + 1
        line = code[begin:code.find("\n", m.start())]
        if re.search(r"\b(?:for|if|while) \(|\?|return ", line):
            a = m.group(1)
            found.append(Mutant(path, "bound", m.start(), m.end(), text, a + " <= "))
            found.append(Mutant(path, "bound", m.start(), m.end(), text, a + " + 1 < "))
    return found


def includers(path):
    """The .cu files whose code a change of this file changes."""
    if path.endswith(".cu"):
        return [path]
    seen, todo, units = {path}, [path], set()
    while todo:
        name = todo.pop()
        for other in kernel_files():
            if other not in seen and '#include "%s"' % name in read(other):
                seen.add(other)
                todo.append(other)
                if other.endswith(".cu"):
                    units.add(other)
    return sorted(units)


class Build:
    def __init__(self, folder):
        self.folder = os.path.abspath(folder)
        commands = os.path.join(self.folder, "compile_commands.json")
        if not os.path.exists(os.path.join(self.folder, "build.ninja")) or \
                not os.path.exists(commands):
            raise SystemExit(77)
        with open(commands) as f:
            self.commands = json.load(f)
        self.links = {}
        self.limits = {}

    def compile(self, source, overlay, to):
        """The object of a unit with the overlay's files before the tree's; None: does not build."""
        for c in self.commands:
            if c["file"] == os.path.join(ROOT, source) and "QC_CUDA_SHIM" in c["command"]:
                words = shlex.split(c["command"])
                break
        else:
            raise SystemExit("%s is not built for the shim in %s" % (source, self.folder))
        words[words.index("-o") + 1] = to
        mine = os.path.join(overlay, source)
        words = [mine if w == c["file"] and os.path.exists(mine) else w for w in words]
        first = next(i for i, w in enumerate(words) if w.startswith("-I"))
        words[first:first] = ["-I" + overlay, "-I" + os.path.join(overlay, "tests/shim/include")]
        r = subprocess.run(words + ["-w", "-O1", "-g0"], cwd=c["directory"],
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return to if r.returncode == 0 else None

    def link(self, topic, objects, to):
        """shim_<topic> with other objects in place of those of the same source."""
        name = "shim_" + topic.split()[0]
        if name not in self.links:
            r = subprocess.run(["ninja", "-C", self.folder, "-t", "commands", name],
                               stdout=subprocess.PIPE, universal_newlines=True, check=True)
            self.links[name] = r.stdout.strip().split("\n")[-1]
        words = [w for w in shlex.split(self.links[name]) if w not in ("&&", ":")]
        words[words.index("-o") + 1] = to
        for source, o in objects.items():
            # A library's member is not looked at when its symbols are there already.
            same = [i for i, w in enumerate(words) if w.endswith(os.path.basename(source) + ".o")]
            if same:
                words[same[0]] = o
            else:
                words.insert(words.index("-o"), o)
        subprocess.run(words, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)

    def passes(self, program, topic, order, limit):
        # The same random input each time; the first case that fails ends the program.
        env = dict(os.environ, QC_SHIM_ORDER=order, QC_SEED="1", CMOCKA_TEST_ABORT="1",
                   QCONV_LIBCUBLAS=os.path.join(self.folder, "tests/shim/libfake_cublas.so"),
                   QCONV_LIBCUSOLVER=os.path.join(self.folder, "tests/shim/libfake_cusolver.so"))
        try:
            r = subprocess.run([program] + topic.split()[1:], env=env, timeout=limit, cwd=self.folder,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return False
        return r.returncode == 0

    def limit(self, topic):
        """Seconds that a mutant's run may take. The kernels as they are have to pass: else every
        mutant would be found."""
        if topic not in self.limits:
            start = time.monotonic()
            if not self.passes(os.path.join(self.folder, "shim_" + topic.split()[0]), topic, ORDERS[0], 600):
                print("mutate_kernels: shim_%s fails without a mutant, or is not built" % topic)
                raise SystemExit(1)
            self.limits[topic] = 10 + 10 * (time.monotonic() - start)
        return self.limits[topic]


def judge(build, mutant):
    """How the mutant ended: 'survived', or by what it was found."""
    with tempfile.TemporaryDirectory(prefix="qconv-mutant-") as overlay:
        shutil.copytree(os.path.join(ROOT, "kernels"), os.path.join(overlay, "kernels"))
        os.makedirs(os.path.join(overlay, "tests/shim/include"))
        with open(os.path.join(overlay, mutant.path), "w") as f:
            f.write(mutant.text)
        units = ["tests/kernels/kernel_shim_matrix.cpp"] if mutant.path == WRAPPERS \
            else [mutant.unit] if mutant.unit else includers(mutant.path)
        about = {u: ["slice"] if mutant.kind == "slice" else TESTS[u] for u in units}
        objects = {}
        topics = []
        for unit in units:
            topics += [t for t in about[unit] if t not in topics]
        topics.sort(key=QUICKEST.index)
        programs = {}
        for order in ORDERS:
            for topic in topics:
                limit = build.limit(topic)
                for unit in (u for u in units if topic in about[u] and u not in objects):
                    objects[unit] = build.compile(unit, overlay, os.path.join(
                        overlay, "unit%d.o" % len(objects)))
                    if not objects[unit]:
                        return "does not build"
                if topic not in programs:
                    programs[topic] = os.path.join(overlay, "shim_" + topic.replace(" ", "_"))
                    build.link(topic, {u: o for u, o in objects.items() if topic in about[u]},
                               programs[topic])
                if not build.passes(programs[topic], topic, order, limit):
                    return "found by shim_%s, %s" % (topic, order)
    return "survived"


def harmless_list():
    """(path, kind, what was done) -> reason."""
    found = {}
    with open(os.path.join(HERE, "harmless_mutants.txt"), encoding="ascii") as f:
        text = re.sub(r"^#.*\n", "", f.read(), flags=re.M)
    for entry in filter(None, (e.strip() for e in text.split("\n\n"))):
        where, line, reason = (x.strip() for x in entry.split("\n", 2))
        path, kind = where.split()
        found[(path, kind, line)] = reason
    return found


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--build", required=True)
    p.add_argument("--kind", action="append", choices=["barrier", "bound", "fragment", "slice", "ring", "pack"])
    p.add_argument("--file", action="append")
    p.add_argument("--sample", type=int)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--list", action="store_true")
    args = p.parse_args()

    unknown = [k for k in kernel_files() if k.endswith(".cu") and k not in TESTS]
    if unknown:
        print("mutate_kernels: which tests are about %s? Say so in TESTS" % ", ".join(unknown))
        return 1
    every = [m for path in kernel_files() + [WRAPPERS] for m in mutants_of(path)]
    harmless = harmless_list()
    stale = set(harmless) - {(m.path, m.kind, m.result) for m in every}
    for key in sorted(stale):
        print("harmless_mutants.txt: no such mutant: %s %s: %s" % key)
    chosen = [m for m in every if (not args.kind or m.kind in args.kind) and
              (not args.file or os.path.basename(m.path) in args.file)]
    if args.sample is not None:
        random.Random(args.seed).shuffle(chosen)
        chosen = chosen[:args.sample]
    if args.list:
        print("\n".join(map(str, chosen)))
        return 0
    build = Build(args.build)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    counts = {"found": 0, "does not build": 0, "harmless": 0, "survived": 0}
    for m in chosen:
        start = time.monotonic()
        end = judge(build, m)
        reason = harmless.get((m.path, m.kind, m.result))
        if end == "survived" and reason:
            end = "harmless"
        counts[end if end in counts else "found"] += 1
        print("%s\n    %s (%.0f s)" % (m, end, time.monotonic() - start), flush=True)
    print("%d mutants: %s" % (len(chosen), ", ".join("%d %s" % (n, k)
                                                     for k, n in counts.items())))
    return 1 if counts["survived"] or stale else 0


if __name__ == "__main__":
    sys.exit(main())
