#!/usr/bin/env python3
"""The table of docs/bench.md: what decoding 32 weights costs in machine code, scheme by scheme, and
what that bounds. Compiles bench/ceilings_decode.cu and counts in each kernel's loop, which makes 4
steps of 32 weights a lane. Standard library only; needs nvcc and cuobjdump, no GPU.

    ceilings_table.py [--toolkit NVCC] [--arch 70,80,90] [--write]

Prints Markdown; --write puts it into docs/bench.md between its marks. The bound is the slowest of
what docs/kernels.md assumes per clock and multiprocessor: issue of 4 instructions of a warp, 2 on
the pipe of logic, shifts, PRMT and conversions, 2 on that of multiply-adds, 1 shuffle, 1 wavefront
of shared memory, mma.m16n8k16 and mma.m8n8k4 in 2 clocks.
"""
import argparse
import collections
import os
import re
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests", "cuda"))
import check_kernels  # noqa: E402  (stands in another folder)

SOURCE = os.path.join(ROOT, "bench", "ceilings_decode.cu")
DOC = os.path.join(ROOT, "docs", "bench.md")
MARKS = ("<!-- ceilings_table.py: begin -->", "<!-- ceilings_table.py: end -->")
STEPS = 4
MMA, MMA_884 = 1, 2  # sinks
# Wavefronts of a load of 32 lanes with random codes. 1 copy: the fullest of 32 banks when 32 lanes
# read words of 256 (equal ones are read once); 16 copies of 4 or 8 bytes: two lanes to a bank.
WAVEFRONTS = {"pairs x1": 3.17, "pairs x16": 2, "float pairs": 2}
COLUMNS = [("LDS", ("LDS",)), ("SHFL", ("SHFL",)), ("PRMT", ("PRMT",)), ("LOP3", ("LOP3",)),
           ("SHF", ("SHF",)), ("IMAD", ("IMAD",)), ("HADD2", ("HADD2", "HFMA2", "HMUL2")),
           ("FFMA", ("FFMA",)), ("HMMA", ("HMMA",))]
LOGIC = ("PRMT", "LOP3", "SHF", "IADD3", "ISETP", "MOV", "SEL", "F2FP")
MULTIPLY = ("IMAD", "FFMA", "FMUL", "FADD", "HADD2", "HFMA2", "HMUL2")


def schemes():
    """{(number of the scheme, of the sink): name} as the source has them, in its order."""
    with open(SOURCE) as f:
        text = f.read()
    order, sinks = (re.search(r"enum \{ (%s[^}]*) \}" % first, text).group(1).split(", ")
                    for first in ("SHUFFLE", "FOLD"))
    found = re.findall(r'QC_DECODE\("([^"]+)", (\w+), (\w+)\)', text)
    return {(order.index(scheme), sinks.index(sink)): name for name, scheme, sink in found}


def loop_of(code):
    """Instructions between the farthest branch back and where it goes."""
    best = ()
    for i, (at, words) in enumerate(code):
        m = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", words)
        if m and int(m.group(1), 16) < at:
            body = [w for a, w in code[:i + 1] if a >= int(m.group(1), 16)]
            if len(body) > len(best):
                best = body
    names = collections.Counter()
    for words in best:
        names[re.sub(r"^@!?U?P\w+\s+", "", words).split()[0].split(".")[0]] += 1
    return names


def read_loops(sass):
    """{(mangled name, architecture): Counter of the loop}"""
    found, architecture, name = {}, None, None
    code = collections.defaultdict(list)
    for line in sass.splitlines():
        m = re.match(r"arch = sm_(\d+)", line)
        if m:
            architecture = int(m.group(1))
        m = re.match(r"\s*Function : (\w+)", line)
        if m:
            name = m.group(1)
        m = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line)
        if m and name:
            code[(name, architecture)].append((int(m.group(1), 16), m.group(2)))
    for key, instructions in code.items():
        found[key] = loop_of(instructions)
    return found


def bound(name, n, architecture):
    """(weights per clock and multiprocessor, what bounds them) of a loop's counts."""
    clocks = {
        "issue": sum(n.values()) / 4,
        "logic": sum(n[k] for k in LOGIC) / 2,
        "multiply": sum(n[k] for k in MULTIPLY) / 2,
        "shuffles": n["SHFL"],
        "shared": n["LDS"] * WAVEFRONTS.get(name, 1),
        # m16n8k16: 1024 multiply-adds a clock; an m8n8k4 is four HMMA, 512 a clock.
        "mma": n["HMMA"] * (2 if architecture >= 80 else 0.5),
    }
    # The compiler puts a shuffle of nothing into some loops for sm_70.
    if architecture < 75 and n["SHFL"] == 1:
        clocks["shuffles"] = 0
    slowest = max(clocks, key=clocks.get)
    return STEPS * 32 * 32 / clocks[slowest], slowest


def table(toolkit, architectures, folder):
    out = os.path.join(folder, "decode.o")
    said = check_kernels.read_ptxas(toolkit.compile(SOURCE, out, architectures))
    loops = read_loops(toolkit.disassemble(out))
    names = check_kernels.demangle(sorted({k[0] for k in loops}))
    by_scheme = {}
    for (mangled, architecture), counts in loops.items():
        m = re.match(r"decode<(\d+), (\d+)>", names[mangled])
        if m:
            by_scheme[(int(m.group(1)), int(m.group(2)), architecture)] = (
                counts, said[(mangled, architecture)]["registers"])
    lines = ["| scheme | sm | " + " | ".join(c for c, _ in COLUMNS)
             + " | other | all | registers | at most, weights a clock | bound by |",
             "|---|---|" + "---|" * (len(COLUMNS) + 5)]
    for (number, sink), name in schemes().items():
        for architecture in architectures:
            if sink == MMA and architecture < 80 or sink == MMA_884 and architecture >= 80:
                continue
            n, registers = by_scheme[(number, sink, architecture)]
            columns = [sum(n[k] for k in kinds) for _, kinds in COLUMNS]
            rest = sum(n.values()) - sum(columns)
            most, why = bound(name, n, architecture)
            cells = ["%g" % (c / STEPS) if c else "" for c in columns]
            lines.append("| %s | %d | %s | %g | %.1f | %d | %.0f | %s |" % (
                name, architecture, " | ".join(cells), rest / STEPS, sum(n.values()) / STEPS,
                registers, most, why))
    return "\n".join(lines)


def main(argv):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--toolkit", metavar="NVCC", default="/usr/bin/nvcc")
    p.add_argument("--arch", default="70,80,90")
    p.add_argument("--write", action="store_true")
    options = p.parse_args(argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        toolkit = check_kernels.Toolkit(options.toolkit, os.path.join(folder, "include"))
        if not toolkit.cuobjdump:
            sys.exit("ceilings_table: no cuobjdump beside %s" % options.toolkit)
        text = table(toolkit, [int(a) for a in options.arch.split(",")], folder)
    if not options.write:
        print(text)
        return 0
    with open(DOC) as f:
        before, rest = f.read().split(MARKS[0])
    with open(DOC, "w") as f:
        f.write(before + MARKS[0] + "\n" + text + "\n" + MARKS[1] + rest.split(MARKS[1])[1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
