#!/usr/bin/env python3
"""Whether the loads of a kernel's main loop overlap its products, from the control bits of the machine code.

  cuobjdump -sass CUBIN | waits.py [--pattern NAME]

Compilers may give all global loads of a loop one scoreboard, and a wait is for all that are on it: a load for the next
turn is then waited for as soon as anything of this turn is needed, and nothing overlaps (docs/kernels.md). cp.async and
bulk copies are waited for by number and are not looked at. For each load into registers (LDG) in the main loop this says
how many products the shortest way through the loop has between the load and the first wait for its scoreboard. A loop
passes where that is half of its products or more. The main loop is the smallest with the most products (HMMA, HGMMA;
FFMA where there are none of these).

Control bits of a 128-bit instruction (sm_70 and newer): write scoreboard 110 .. 112 (7: none), wait mask 116 .. 121.
Standard library only.
"""
import argparse
import heapq
import re
import sys
from typing import NamedTuple, Optional


class Instruction(NamedTuple):
    address: int
    text: str
    op: str
    conditional: bool
    target: Optional[int]
    scoreboard: int  # that a load sets; 7: none
    waits: int       # mask


def instruction(address, text, bits):
    m = re.match(r"(@!?U?P\w+\s+)?(\S+)(.*)", text)
    op, rest = m.group(2), m.group(3)
    to = re.search(r"0x([0-9a-f]+)\s*$", rest) if op.startswith("BRA") else None
    conditional = bool(m.group(1)) or bool(op.startswith("BRA") and re.match(r"\S*\s+!?U?P\w+\s*,", op + rest))
    return Instruction(address, text, op, conditional, int(to.group(1), 16) if to else None, bits >> 46 & 7,
                       bits >> 52 & 63)


def functions(text):
    """{(mangled name, architecture): [Instruction]} of what cuobjdump -sass says."""
    found, code, architecture, last = {}, None, 0, None
    for line in text.splitlines():
        m = re.match(r"\s*(?:arch = |code for )sm_(\d+)", line)
        if m:
            architecture = int(m.group(1))
        m = re.match(r"\s*Function : (\S+)", line)
        if m:
            code = found.setdefault((m.group(1), architecture), [])
        m = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/", line)
        if m:
            last = int(m.group(1), 16), m.group(2)
            continue
        m = re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$", line)
        if m and last and code is not None:
            code.append(instruction(*last, int(m.group(1), 16)))
            last = None
    return found


def main_loop(code):
    """(first, last index, indices of products), or None."""
    for kind in (r"HG?MMA\b", r"FFMA\b"):
        products = [i for i, x in enumerate(code) if re.match(kind, x.op)]
        if products:
            break
    at, best = {x.address: i for i, x in enumerate(code)}, None
    for last, x in enumerate(code):
        first = at.get(x.target, len(code))
        if first <= last:
            inside = [i for i in products if first <= i <= last]
            if inside and (best is None or (-len(inside), last - first) < (-len(best[2]), best[1] - best[0])):
                best = first, last, inside
    return best


def after(code, at, first, last, i):
    """The instructions that may come next and are in the loop."""
    x = code[i]
    found = [i + 1] if x.conditional or x.target is None else []
    if x.target is not None:
        found.append(at[x.target])
    if re.match(r"(EXIT|RET)\b", x.op) and not x.conditional:
        found = []
    return [j for j in found if first <= j <= last]


def products_before_wait(code, loop, load):
    """(products on the way with the fewest, the instruction that waits), or None where nothing in the loop does."""
    first, last, products = loop
    at, counted, mask = {x.address: i for i, x in enumerate(code)}, set(products), 1 << code[load].scoreboard
    heap, seen = [(0, j) for j in after(code, at, first, last, load)], set()
    while heap:
        count, i = heapq.heappop(heap)
        if i in seen:
            continue
        seen.add(i)
        if code[i].waits & mask:
            return count, i
        for j in after(code, at, first, last, i):
            heapq.heappush(heap, (count + (i in counted), j))
    return None


def early_waits(code):
    """[(load, instruction that waits, products between them, products of the loop)] of loads that are waited for too
    early."""
    loop = main_loop(code)
    if loop is None:
        return []
    found = []
    for load in range(loop[0], loop[1] + 1):
        if re.match(r"LDG\b", code[load].op) and code[load].scoreboard < 6:
            wait = products_before_wait(code, loop, load)
            if wait and 2 * wait[0] < len(loop[2]):
                found.append((code[load], code[wait[1]], wait[0], len(loop[2])))
    return found


def sentence(found):
    load, wait, products, of = found[0]
    return ("waits for %d of the loads in its main loop before half of its %d products: '%s' at %05x, behind %d, for '%s' "
            "at %05x" % (len(found), of, wait.text[:40], wait.address, products, load.text[:40], load.address))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pattern", default="")
    a = p.parse_args()
    for (name, architecture), code in functions(sys.stdin.read()).items():
        if re.search(a.pattern, name) and main_loop(code):
            found = early_waits(code)
            print("%s, sm_%d: %s" % (name, architecture, sentence(found) if found else "passes"))


if __name__ == "__main__":
    main()
