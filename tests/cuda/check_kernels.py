#!/usr/bin/env python3
"""What the compilers make of the kernels: no warning, no spill, no stack, the instructions that are
meant, and loads that overlap products (waits.py). Standard library only; needs no GPU.

  check_kernels.py                      all toolkits found, kernels/*.cu and bench/ceilings_*.cu
  check_kernels.py --toolkit NVCC ...   these
  check_kernels.py --self-test          plant one violation of each kind and see it found
  check_kernels.py --cpath FOLDER       print what CPATH must be for /usr/bin/nvcc to find its own
                                        headers ("" if it does), with links made in FOLDER

Every file is compiled by every toolkit for every architecture with the flags of kernels/, warnings
as errors; ptxas says registers, stack and spills, cuobjdump the machine code. CUDA 11.8 needs
g++-11. Exit 1 if anything is found, 77 if there is no toolkit.
"""
import argparse
import concurrent.futures
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import waits

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# As cmake/qconv_cuda.cmake has them: from this version of CUDA on, these.
ARCHITECTURES = (((11, 8), (70, 80, 86, 89, 90)), ((12, 8), (70, 80, 86, 89, 90, 100, 120)),
                 ((13, 0), (75, 80, 86, 89, 90, 100, 120)))
# Which another one stands for where --lean is asked for: they have the same instructions, and the
# compilers make nearly the same of them. (Of 271 kernels, CUDA 13.0 gives sm_86 and sm_89 the same
# number of registers and of instructions in all, and sm_80 and sm_86 in 129. Of 306, sm_75 has no more
# than CUDA 11.8 gives sm_70 in 233, and 250 at most, as sm_70 has. sm_100 does not stand for sm_120: three
# kernels spilled there alone.)
STOOD_FOR = {75: 70, 86: 80, 89: 80}
# Files for instructions that only code for sm_NNa has: since which CUDA, and for which NN alone.
OWN_CODE = {"matmul_wgmma.cu": ((12, 0), 90)}
SOURCES = (("kernels", "*.cu"), ("bench", "ceilings_*.cu"))
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-DQC_HAVE_WGMMA", "-fmad=false", "-Werror=all-warnings",
         "-Xptxas=-v,-warn-spills,-warn-lmem-usage",
         "-Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off,-fPIC"]

# What is counted in the machine code of a kernel.
COUNTED = {
    "HMMA.884": r"HMMA\.884\b",
    "HMMA.16816": r"HMMA\.16816\b",
    "HGMMA": r"HGMMA\b",
    "LDG.64": r"LDG\.E\b[\w.]*\.64\b",
    "LDG.128": r"LDG\.E\b[\w.]*\.128\b",
    "LDG.NA.64": r"LDG\.E\.NA\b[\w.]*\.64\b",  # not kept in L1: weights, but not x
    "LDG.NA.128": r"LDG\.E\.NA\b[\w.]*\.128\b",
    "STG.128": r"STG\.E\b[\w.]*\.128\b",
    "STG.64": r"STG\.E\b[\w.]*\.64\b",
    "LDGSTS": r"LDGSTS\b",
    "LDSM": r"LDSM\b",
    "UBLKCP": r"UBLKCP\b",
    "LDL": r"LDL\b",
    "STL": r"STL\b",
}

# (file, kernels' names as a pattern, least and largest architecture): what must be in there.
# Kernels for an architecture's own instructions trap elsewhere, and are not looked at there. Every
# row must meet a kernel, so that a name that changes does not end the check.
EXPECTED = [
    # By the numbers of qc_ceiling_access.
    ("ceilings_memory.cu", r"read_ahead<[13],", 70, 999, ["LDG.128"]),
    ("ceilings_memory.cu", r"read_ahead<4,", 70, 999, ["LDG.64"]),
    ("ceilings_memory.cu", r"read_ahead<5,", 80, 999, ["LDG.64"]),
    ("ceilings_memory.cu", r"copy_ahead", 70, 999, ["LDG.128", "STG.128"]),
    ("ceilings_memory.cu", r"read_ring", 80, 999, ["LDGSTS"]),
    ("ceilings_decode.cu", r"decode<\d+, 1>", 80, 999, ["HMMA.16816"]),
    ("ceilings_decode.cu", r"decode<\d+, 2>", 70, 75, ["HMMA.884"]),
    ("ceilings_rates.cu", r"rate_of_products$", 80, 999, ["HMMA.16816"]),
    ("ceilings_rates.cu", r"rate_of_products_884$", 70, 75, ["HMMA.884"]),
    # NF4 in blocks of 32: a thread has 16 codes, 8 bytes; only error sums are more.
    ("cuda_quantize.cu", r"quantize_pairs<(?!true, \S+, 1, false>)", 70, 999,
     ["LDG.128", "STG.128"]),
    ("cuda_quantize.cu", r"quantize_pairs<true, \S+, 1, false>", 70, 999, ["LDG.128", "STG.64"]),
    ("cuda_quantize_rows.cu", r"quantize_rows\b", 70, 999, ["LDG.128", "STG.128"]),
    ("cuda_memory_rate.cu", r"move_units\b", 70, 999, ["LDG.128", "STG.128"]),
    ("cuda_dequantize.cu", r"dequantize_chunks\b", 70, 999, ["STG.128"]),
    ("matmul_dense_rows.cu", r"matmul_dense_rows\b", 70, 999, ["LDG.128", "STG.128"]),
    ("matmul_gemv.cu", r"matmul_gemv<\w+, true,", 70, 999, ["LDG.128"]),
    # 64 rows of NF4 are for sm_70 alone.
    ("matmul_mma884.cu", r"matmul_mma884(_any)?\b(?!<shape<64, \(codes\)0>)", 70, 75,
     ["HMMA.884", "LDG.128"]),
    ("matmul_mma884.cu", r"matmul_mma884<shape<64, \(codes\)0>", 70, 74, ["HMMA.884", "LDG.128"]),
    ("matmul_mma16816.cu", r"matmul_mma16816\b", 80, 999, ["HMMA.16816", "LDG.128", "LDGSTS"]),
    ("matmul_ring.cu", r"matmul_ring\b", 80, 999, ["HMMA.16816", "LDGSTS"]),
    ("matmul_gemv.cu", r"matmul_gemv_experts<\w+, true,", 70, 999, ["LDG.128"]),
    ("matmul_experts.cu", r"matmul_mma884_any\b", 70, 75, ["HMMA.884", "LDG.128"]),
    ("matmul_tiles.cu", r"matmul_tiles\b", 80, 999, ["HMMA.16816", "LDGSTS"]),
    ("matmul_wgmma.cu", r"matmul_wgmma\b", 90, 90, ["HGMMA", "LDGSTS", "UBLKCP"]),
]
# (file, pattern, least and largest architecture): may have a stack and use it.
# m8n8k4 is emulated by a subroutine above sm_75; that is for testing there, not for use.
EMULATED = [("matmul_mma884.cu", "", 80, 999), ("matmul_experts.cu", "matmul_mma884_any", 80, 999)]
# (file, pattern, least and largest architecture, why): kernels of matrix products whose main loop may wait for loads
# before half of the products behind these are done.
NO_CP_ASYNC = "compiled for every device, and chosen on sm_80 and newer only (matmul_plan.c)"
WAITS = [
    ("matmul_tiles.cu", r"matmul_tiles<\d+, \(kind\)[01],", 80, 999,
     "scales come into registers a few steps ahead, codes and x by cp.async; they are to come with the codes"),
    ("matmul_wgmma.cu", r"matmul_wgmma<\d+, \(kind\)[01]>", 90, 90,
     "as in matmul_tiles.cu; codes and x come by cp.async and bulk copies"),
    ("matmul_mma16816.cu", r"matmul_mma16816\b", 80, 999,
     "codes in registers, for shapes that few weights have and for experts"),
    ("matmul_mma884.cu", r"matmul_mma884(_any)?\b", 70, 999, "sm_70 and sm_75 have no cp.async"),
    ("matmul_experts.cu", r"matmul_mma884_any\b", 70, 999, "the same"),
    ("matmul_ring.cu", r"", 70, 75, NO_CP_ASYNC), ("matmul_tiles.cu", r"", 70, 75, NO_CP_ASYNC),
    ("matmul_mma16816.cu", r"", 70, 75, NO_CP_ASYNC),
    ("matmul_reduce.cu", r"", 70, 999, "what it adds up are the loads themselves: there are no products"),
    ("matmul_gemv.cu", r"matmul_gemv(_experts)?\b", 70, 999,
     "codes in registers, for devices and shapes that matmul_ring.cu does not take"),
]


class Problem(Exception):
    """A sentence for the user."""


class Toolkit:
    def __init__(self, nvcc, folder):
        self.nvcc = nvcc
        said = run([nvcc, "--version"])
        m = re.search(r"release (\d+)\.(\d+)", said)
        if not m:
            raise Problem("%s --version does not answer as nvcc does" % nvcc)
        self.version = (int(m.group(1)), int(m.group(2)))
        self.name = "%d.%d" % self.version
        self.host = []
        # Debian's nvcc takes ptxas and the rest from the path: another CUDA's must not be there.
        self.environment = dict(os.environ)
        self.environment["PATH"] = ":".join(
            d for d in os.environ.get("PATH", "").split(":")
            if os.path.dirname(nvcc) == d or not os.path.exists(os.path.join(d, "ptxas"))
            or not os.path.realpath(nvcc).startswith("/usr/bin/"))
        if self.version < (12, 0):
            host = os.environ.get("CUDAHOSTCXX") or shutil.which("g++-11")
            if not host:
                raise Problem("CUDA %s needs g++-11" % self.name)
            self.host = ["-ccbin", host]
        cpath = own_headers(nvcc, self.version, self.host, folder, self.environment)
        if cpath:
            self.environment["CPATH"] = cpath
        self.cuobjdump = os.environ.get("QCONV_CUOBJDUMP") if self.version >= (12, 0) else None
        beside = os.path.join(os.path.dirname(nvcc), "cuobjdump")
        if not self.cuobjdump and os.path.exists(beside):
            self.cuobjdump = beside

    def architectures(self):
        return [known for since, known in ARCHITECTURES if since <= self.version][-1]

    def compile(self, source, out, architectures):
        """What nvcc said; Problem if it failed."""
        command = [self.nvcc] + self.host + FLAGS + ["-I" + ROOT, "-c", source, "-o", out]
        own = "a" if os.path.basename(source) in OWN_CODE else ""
        for a in architectures:
            command += ["-gencode", "arch=compute_%d%s,code=sm_%d%s" % (a, own, a, own)]
        r = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True)
        if r.returncode != 0:
            raise Problem("does not compile:\n" + without_info(r.stdout))
        return r.stdout

    def disassemble(self, path):
        environment = dict(self.environment)
        # cuobjdump takes nvdisasm from the path.
        environment["PATH"] = os.path.dirname(self.cuobjdump) + ":" + environment.get("PATH", "")
        return run([self.cuobjdump, "-sass", path], environment)


def run(command, environment=None):
    r = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                       text=True)
    if r.returncode != 0:
        raise Problem("%s failed:\n%s" % (" ".join(command), r.stdout))
    return r.stdout


def without_info(text):
    lines = [s for s in text.splitlines() if s.strip() and not s.startswith("ptxas info")
             and "bytes stack frame" not in s]
    return "\n".join(lines[:40])


def own_headers(nvcc, version, host, folder, environment):
    """Where another CUDA's headers lie in a folder that g++ searches before /usr/include, Debian's
    nvcc takes those. A folder of links to its own, to be set as CPATH; None if there is no need."""
    with tempfile.TemporaryDirectory() as scratch:
        probe = os.path.join(scratch, "probe.cu")
        with open(probe, "w") as f:
            f.write("qc_version=CUDART_VERSION\n")
        said = run([nvcc] + host + ["-E", probe], environment)
    m = re.search(r"qc_version=(\d+)", said)
    if m and int(m.group(1)) == version[0] * 1000 + version[1] * 10:
        return None
    if not os.path.realpath(nvcc).startswith("/usr/bin/"):
        raise Problem("%s finds another CUDA's headers; set CPATH to the folder of its own" % nvcc)
    os.makedirs(folder, exist_ok=True)
    for path in run(["dpkg", "-L", "nvidia-cuda-dev"]).split("\n"):
        if re.fullmatch(r"/usr/include/[^/]+", path):
            link = os.path.join(folder, os.path.basename(path))
            if not os.path.lexists(link):
                os.symlink(path, link)
    return os.path.abspath(folder)


def find_toolkits():
    """One nvcc per version, lowest first."""
    paths = [os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/bin/nvcc"]
    paths += sorted(glob.glob("/usr/local/cuda*/bin/nvcc"))
    found = {}
    for path in paths:
        if path and os.access(path, os.X_OK):
            m = re.search(r"release (\d+)\.(\d+)", run([path, "--version"]))
            if m:
                found.setdefault((int(m.group(1)), int(m.group(2))), path)
    return [found[v] for v in sorted(found)]


# ---- what was said and made ----------------------------------------------------------------------

def read_ptxas(text):
    """{(mangled name, architecture): {registers, shared, stack, spills}} of what ptxas -v said."""
    found = {}
    at = None
    for line in text.splitlines():
        m = re.search(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'", line)
        if m:
            at = found.setdefault((m.group(1), int(m.group(2))), {})
        m = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
                      line)
        if m and at is not None and "stack" not in at:
            at["stack"] = int(m.group(1))
            at["spills"] = int(m.group(2)) + int(m.group(3))
        m = re.search(r"Used (\d+) registers", line)
        if m and at is not None:
            at["registers"] = int(m.group(1))
            m = re.search(r"(\d+) bytes smem", line)
            at["shared"] = int(m.group(1)) if m else 0
    return found


def read_sass(text):
    """{(mangled name, architecture): {counted: n, "instructions": n}}"""
    patterns = {k: re.compile(v) for k, v in COUNTED.items()}
    counted_as = {}  # by opcode: there are some hundred of them, in millions of lines
    found = {}
    architecture = at = None
    for line in text.splitlines():
        m = re.match(r"arch = sm_(\d+)", line)
        if m:
            architecture = int(m.group(1))
            at = None
            continue
        m = re.match(r"\s*Function : (\w+)", line)
        if m:
            at = found[(m.group(1), architecture)] = dict.fromkeys(COUNTED, 0)
            at["instructions"] = 0
            continue
        m = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
        if m and at is not None:
            at["instructions"] += 1
            opcode = m.group(1)
            if opcode not in counted_as:
                counted_as[opcode] = [n for n, p in patterns.items() if p.match(opcode)]
            for name in counted_as[opcode]:
                at[name] += 1
    return found


def demangle(names):
    tool = shutil.which("c++filt")
    if not names or not tool:
        return {n: n for n in names}
    said = subprocess.run([tool], input="\n".join(names), stdout=subprocess.PIPE, text=True).stdout
    short = {}
    for name, words in zip(names, said.split("\n")):
        words = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+::|^void ", "", words)
        # The parameters say little and are long.
        depth = 0
        for i, c in enumerate(words):
            depth += (c == "<") - (c == ">")
            if c == "(" and depth == 0 and i > 0:
                words = words[:i]
                break
        short[name] = words
    return short


def applies(row, name, kernel, architecture):
    return (row[0] == name and re.search(row[1], kernel)
            and row[2] <= architecture <= row[3])


def judge(name, rows, expected, emulated, may_wait=()):
    """What is wrong with the kernels of one file and toolkit, as sentences."""
    for r in rows:
        where = "%s: %s for sm_%d" % (name, r["kernel"], r["architecture"])
        if any(applies(e, name, r["kernel"], r["architecture"]) for e in emulated):
            continue
        if r["spills"]:
            yield "%s spills %d bytes" % (where, r["spills"])
        elif r["stack"]:
            yield "%s has a stack of %d bytes" % (where, r["stack"])
        if r.get("LDL", 0) + r.get("STL", 0) > 0:
            yield "%s uses local memory" % where
        if r.get("waits") and not any(applies(w, name, r["kernel"], r["architecture"]) for w in may_wait):
            yield "%s %s" % (where, r["waits"])
        for e in expected:
            if "instructions" not in r or not applies(e, name, r["kernel"], r["architecture"]):
                continue
            for wanted in e[4]:
                if not any(r[w] for w in wanted.split("|")):
                    yield "%s has no %s" % (where, wanted)
    for e in list(expected) + list(may_wait):
        if e[0] == name and not any(re.search(e[1], r["kernel"]) for r in rows):
            yield "%s: no kernel is called %s" % (name, e[1])


def check_file(toolkit, source, folder, architectures, expected=None, emulated=None):
    """(rows, complaints, seconds) of one file."""
    name = os.path.basename(source)
    out = os.path.join(folder, "%s-%s.o" % (name, toolkit.name))
    begin = time.monotonic()
    try:
        text = toolkit.compile(source, out, architectures)
        said = read_ptxas(text)
        sass = toolkit.disassemble(out) if toolkit.cuobjdump else ""
        code = read_sass(sass)
        waiting = {key: waits.early_waits(c) for key, c in waits.functions(sass).items()} if (
            name.startswith(("matmul_", "planted"))) else {}
    except Problem as e:
        return [], ["%s %s" % (name, e)], time.monotonic() - begin
    names = demangle(sorted({k[0] for k in said}))
    rows = []
    complaints = []
    for (mangled, architecture), facts in sorted(said.items()):
        row = {"toolkit": toolkit.name, "file": name, "kernel": names[mangled],
               "architecture": architecture}
        row.update(facts)
        row.update(code.get((mangled, architecture), {}))
        if waiting.get((mangled, architecture)):
            row["waits"] = waits.sentence(waiting[mangled, architecture])
        if toolkit.cuobjdump and "instructions" not in row:
            complaints.append("%s: no machine code of %s for sm_%d" % (name, row["kernel"],
                                                                      architecture))
        rows.append(row)
    complaints += ["%s: %s" % (name, line.strip()) for line in text.splitlines()
                   if "Potential Performance Loss" in line]
    complaints += judge(name, rows, EXPECTED if expected is None else expected,
                        EMULATED if emulated is None else emulated, WAITS if expected is None else ())
    return rows, complaints, time.monotonic() - begin


# ---- output --------------------------------------------------------------------------------------

COLUMNS = [("kernel", "kernel"), ("architecture", "sm"), ("registers", "regs"),
           ("shared", "smem"), ("stack", "stack"), ("spills", "spills"),
           ("instructions", "instr")] + [(c, c) for c in COUNTED]


def print_table(rows):
    for toolkit, name in sorted({(r["toolkit"], r["file"]) for r in rows}):
        print("\nCUDA %s, %s" % (toolkit, name))
        lines = [[title for _, title in COLUMNS]]
        for r in rows:
            if r["toolkit"] == toolkit and r["file"] == name:
                lines.append([str(r.get(key, "?")) for key, _ in COLUMNS])
        wide = [max(len(s[i]) for s in lines) for i in range(len(COLUMNS))]
        for s in lines:
            print(("%-*s" % (wide[0], s[0]) + "".join("  %*s" % (w, x) for w, x in
                                                      zip(wide[1:], s[1:]))).rstrip())


def lean(toolkit, toolkits):
    """Every architecture that no other one stands for, once: an older toolkit has what the newest
    lacks, and sm_80; the newest has the rest."""
    newest = max(toolkits, key=lambda t: t.version)
    all_of_them = {a for t in toolkits for a in t.architectures()}
    kept = [a for a in toolkit.architectures() if STOOD_FOR.get(a) not in all_of_them]
    if toolkit is newest:
        return [a for a in kept if a != 80 or len(toolkits) == 1]
    return [a for a in kept if a == 80 or a not in newest.architectures()]


def has_code_for(toolkit, source):
    own = OWN_CODE.get(os.path.basename(source))
    return not own or toolkit.version >= own[0]


def own_or(architectures, source):
    own = OWN_CODE.get(os.path.basename(source))
    return [own[1]] if own else architectures


def check_all(options):
    toolkits = []
    scratch = tempfile.mkdtemp(prefix="qconv-cuda-")
    try:
        for nvcc in options.toolkit or find_toolkits():
            toolkits.append(Toolkit(nvcc, os.path.join(scratch, "include")))
        if not toolkits:
            print("check_kernels: no nvcc found")
            return 77
        for wanted in options.require or []:
            if not any(t.name == wanted for t in toolkits):
                raise Problem("CUDA %s is wanted and was not found" % wanted)
        sources = options.files or [path for pattern in SOURCES for path in
                                    sorted(glob.glob(os.path.join(ROOT, *pattern)))]
        if not sources:
            raise Problem("no kernels to check")
        asked = [int(a) for a in options.arch.split(",")] if options.arch else None
        work = [(t, s, own_or(asked or (lean(t, toolkits) if options.lean else t.architectures()), s))
                for s in sources for t in toolkits if has_code_for(t, s)]
        rows, complaints = [], []
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for (t, s, a), (found, wrong, seconds) in zip(
                    work, pool.map(lambda w: check_file(w[0], w[1], scratch, w[2]), work)):
                print("CUDA %s: %s: %d kernels for sm_%s, %.1f s" % (
                    t.name, os.path.basename(s), len({r["kernel"] for r in found}),
                    " ".join(map(str, a)), seconds), flush=True)
                rows += found
                complaints += ["CUDA %s: %s" % (t.name, w) for w in wrong]
    finally:
        shutil.rmtree(scratch)
    if options.table:
        print_table(rows)
        print()
    for t in toolkits:
        print("CUDA %s (%s): %d kernels compiled%s" % (
            t.name, t.nvcc, sum(r["toolkit"] == t.name for r in rows),
            "" if t.cuobjdump else "; no cuobjdump for it: machine code not looked at"))
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"kernels": rows, "found": complaints}, f, indent=1)
            f.write("\n")
    for c in complaints:
        print("FOUND " + c)
    print("%d violation%s" % (len(complaints), "" if len(complaints) == 1 else "s"))
    return 1 if complaints else 0


# ---- self-test -----------------------------------------------------------------------------------

HEAD = '#include "kernels/ptx.cuh"\nnamespace {\n'
TAIL = '\n}\nvoid call(const void *p, float *d, int i, cudaStream_t s)\n{\n' \
       '    QC_LAUNCH(planted_kernel, 1, 32, 0, s, p, d, i);\n}\n'
KERNEL = "__global__ void planted_kernel(const void *p, float *d, int i)\n{\n%s\n}"
# 64 values that live at once, for a kernel that may have 32 registers.
SPILL = "__global__ void __launch_bounds__(1024, 2) planted_kernel(const void *p, float *d, int i)" \
        "\n{\n    const volatile float *x = (const volatile float *)p;\n    float v[64];\n" \
        "_Pragma(\"unroll\")\n    for (int j = 0; j < 64; j++)\n        v[j] = x[j * i];\n" \
        "_Pragma(\"unroll\")\n    for (int j = 0; j < 64; j++)\n" \
        "        ((volatile float *)d)[j] = v[63 - j] * v[j];\n}"
LOCAL = KERNEL % ("    float v[64];\n    for (int j = 0; j < 64; j++)\n"
                  "        v[j * i & 63] = ((const float *)p)[j];\n    d[i] = v[i & 63];")
UNUSED = KERNEL % "    int unused;\n    d[i] = ((const float *)p)[i];"
NARROW = KERNEL % "    d[i] = ((const float *)p)[i];"
WIDE = KERNEL % "    *(uint4 *)d = qc_ld_stream_16((const uint4 *)p + i);"
MMA884 = KERNEL % ("    float r[8] = {};\n    const uint32_t *a = (const uint32_t *)p;\n"
                   "    uint4 w = qc_ld_stream_16(a + i * 4);\n"
                   "    uint32_t x[2] = {w.x, w.y}, y[2] = {w.z, w.w};\n"
                   "    qc_mma_m8n8k4(r, x, y);\n"
                   "    for (int j = 0; j < 8; j++)\n        d[j * 32 + i] = r[j];")

# Two buffers in registers, loaded a turn ahead of the products; and the same through shared memory by cp.async.
AHEAD = KERNEL % ("    const uint4 *from = (const uint4 *)p + threadIdx.x;\n    float r[4] = {};\n"
                  "    uint4 now = qc_ld_stream_16(from), next = qc_ld_stream_16(from + 32);\n"
                  "    for (int j = 2; j < i; j += 2) {\n        uint32_t b[2] = {now.x, now.y}, a[4] = {now.x, now.y, now.z, now.w};\n"
                  "        now = qc_ld_stream_16(from + j * 32);\n        qc_mma_m16n8k16(r, a, b);\n"
                  "        uint32_t y[2] = {next.x, next.y}, x[4] = {next.x, next.y, next.z, next.w};\n"
                  "        next = qc_ld_stream_16(from + j * 32 + 32);\n        qc_mma_m16n8k16(r, x, y);\n    }\n"
                  "    d[threadIdx.x] = r[0] + r[1] + r[2] + r[3];")
RING = KERNEL % ("    QC_SHARED(uint4, ring);\n    const uint4 *from = (const uint4 *)p + threadIdx.x;\n"
                 "    uint4 *to = &ring + threadIdx.x;\n    float r[4] = {};\n    for (int j = 0; j < i; j++) {\n"
                 "        qc_cp_async_16(to + (j + 1) % 2 * 32, from + j * 32, 16);\n        qc_cp_async_commit();\n"
                 "        qc_cp_async_wait<1>();\n        uint4 v = to[j % 2 * 32];\n"
                 "        uint32_t b[2] = {v.x, v.y}, a[4] = {v.x, v.y, v.z, v.w};\n        qc_mma_m16n8k16(r, a, b);\n    }\n"
                 "    d[threadIdx.x] = r[0] + r[1] + r[2] + r[3];")


class SelfTest(unittest.TestCase):
    toolkit = None

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="qconv-cuda-test-")
        self.addCleanup(shutil.rmtree, self.folder)

    def check(self, kernel, architectures, wanted=(), least=0, emulated=(), part="planted"):
        path = os.path.join(self.folder, "planted.cu")
        with open(path, "w") as f:
            f.write(HEAD + kernel + TAIL)
        expected = [("planted.cu", part, least, 999, list(wanted))] if wanted else []
        rows, complaints, _ = check_file(self.toolkit, path, self.folder, architectures, expected,
                                         list(emulated))
        return rows, complaints

    def test_clean(self):
        rows, complaints = self.check(WIDE, (80, 90))
        self.assertEqual(complaints, [])
        self.assertEqual([(r["kernel"], r["architecture"]) for r in rows],
                         [("planted_kernel", 80), ("planted_kernel", 90)])
        self.assertTrue(all(r["registers"] > 0 and r["spills"] == r["stack"] == 0 for r in rows))

    def test_warning(self):
        _, complaints = self.check(UNUSED, (80,))
        self.assertEqual(len(complaints), 1)
        self.assertIn("unused", complaints[0])

    def test_spill(self):
        _, complaints = self.check(SPILL, (80,))
        self.assertEqual(len(complaints), 1)
        self.assertIn("spill", complaints[0])

    def test_spill_without_warning(self):
        # The report is read as well: not every toolkit warns of everything.
        said = "ptxas info    : Compiling entry function 'k' for 'sm_80'\n" \
               "ptxas info    : Function properties for k\n" \
               "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n" \
               "ptxas info    : Used 32 registers, 7 bytes smem, 368 bytes cmem[0]\n"
        facts = read_ptxas(said)
        self.assertEqual(facts, {("k", 80): {"stack": 16, "spills": 12, "registers": 32,
                                             "shared": 7}})
        row = dict(facts[("k", 80)], kernel="k", architecture=80)
        self.assertEqual(list(judge("a.cu", [row], [], [])), ["a.cu: k for sm_80 spills 12 bytes"])
        row["spills"] = 0
        self.assertEqual(list(judge("a.cu", [row], [], [])),
                         ["a.cu: k for sm_80 has a stack of 16 bytes"])
        self.assertEqual(list(judge("a.cu", [row], [], [("a.cu", "", 80, 999)])), [])

    def test_local_array(self):
        _, complaints = self.check(LOCAL, (80,))
        self.assertEqual(len(complaints), 1)
        self.assertRegex(complaints[0], "local|stack")

    def test_local_memory_in_the_code(self):
        code = read_sass("arch = sm_80\n\t\tFunction : k\n"
                         "        /*0000*/    @!P0 LDL.64 R2, [R1+0x8] ;   /* 0x00 */\n"
                         "        /*0010*/         EXIT ;   /* 0x00 */\n")
        self.assertEqual(code[("k", 80)]["LDL"], 1)
        self.assertEqual(code[("k", 80)]["instructions"], 2)
        row = dict(code[("k", 80)], kernel="k", architecture=80, spills=0, stack=0)
        self.assertEqual(list(judge("a.cu", [row], [], [])), ["a.cu: k for sm_80 uses local memory"])

    def test_instructions(self):
        if not self.toolkit.cuobjdump:
            self.skipTest("no cuobjdump for CUDA " + self.toolkit.name)
        first = self.toolkit.architectures()[0]
        self.assertEqual(self.check(WIDE, (first, 90), ["LDG.128"])[1], [])
        _, complaints = self.check(NARROW, (first, 90), ["LDG.128"])
        self.assertEqual(complaints, ["planted.cu: planted_kernel for sm_%d has no LDG.128" % a
                                      for a in (first, 90)])
        self.assertEqual(self.check(MMA884, (first,), ["HMMA.884", "LDG.128|LDGSTS"])[1], [])
        # No matrix instruction: what should have one, and m8n8k4 where it is emulated.
        _, complaints = self.check(WIDE, (90,), ["HMMA.16816"])
        self.assertEqual(complaints, ["planted.cu: planted_kernel for sm_90 has no HMMA.16816"])
        _, complaints = self.check(MMA884, (80,), ["HMMA.884"])
        self.assertEqual(complaints, ["planted.cu: planted_kernel for sm_80 has no HMMA.884"])
        self.assertEqual(self.check(MMA884, (80,), ["HMMA.884"], least=100)[1], [])

    def test_lean(self):
        def known(*version):
            t = object.__new__(Toolkit)
            t.version = version
            return t
        old, new = known(11, 8), known(13, 0)
        self.assertEqual(known(12, 6).architectures(), old.architectures())
        self.assertEqual(known(12, 9).architectures(), old.architectures() + (100, 120))
        self.assertEqual(lean(old, [old, new]), [70, 80])
        self.assertEqual(lean(new, [old, new]), [90, 100, 120])
        # Alone, a toolkit has all that no other architecture stands for.
        self.assertEqual(lean(new, [new]), [75, 80, 90, 100, 120])
        self.assertEqual(lean(old, [old]), [70, 80, 90])

    def test_waits(self):
        if not self.toolkit.cuobjdump:
            self.skipTest("no cuobjdump for CUDA " + self.toolkit.name)
        self.assertEqual(self.check(RING, (80, 90))[1], [])
        rows, complaints = self.check(AHEAD, (80, 90))
        self.assertEqual(len(complaints), 2)
        for r, c in zip(rows, complaints):
            self.assertRegex(c, r"for sm_%d waits for \d+ of the loads in its main loop before half of its \d+ products" %
                             r["architecture"])
            where = "a.cu", [dict(r, kernel="k")], [], []
            self.assertEqual(len(list(judge(*where))), 1)
            self.assertEqual(list(judge(*where, [("a.cu", "k", 80, 999, "why")])), [])

    def test_name_that_changed(self):
        _, complaints = self.check(WIDE, (90,), ["LDG.128"], part="other")
        self.assertEqual(complaints, ["planted.cu: no kernel is called other"])


def main(argv):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--toolkit", action="append", metavar="NVCC")
    p.add_argument("--require", action="append", metavar="VERSION",
                   help="fail if this CUDA is not among those found")
    p.add_argument("--arch", metavar="80,90", help="instead of the toolkit's list")
    p.add_argument("--lean", action="store_true",
                   help="without sm_86 and sm_89, and sm_75 where there is sm_70; by one toolkit each")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    p.add_argument("--json", metavar="FILE")
    p.add_argument("--table", action="store_true", help="every kernel and architecture")
    p.add_argument("--cpath", metavar="FOLDER")
    p.add_argument("--self-test", action="store_true")
    p.add_argument("files", nargs="*", help="instead of all kernels")
    options = p.parse_args(argv[1:])
    try:
        if options.cpath:
            print(Toolkit("/usr/bin/nvcc", options.cpath).environment.get("CPATH", ""))
            return 0
        if options.self_test:
            found = options.toolkit or find_toolkits()
            if not found:
                print("check_kernels: no nvcc found")
                return 77
            with tempfile.TemporaryDirectory() as folder:
                SelfTest.toolkit = Toolkit(found[0], folder)
                print("CUDA " + SelfTest.toolkit.name)
                ok = unittest.main(argv=argv[:1], exit=False).result.wasSuccessful()
            return 0 if ok else 1
        return check_all(options)
    except Problem as e:
        print("check_kernels: %s" % e, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
