#!/usr/bin/env python3
"""What a turn of a kernel's main loop costs: instructions, from the machine code.

  cuobjdump -sass OBJECT | hot_path.py WEIGHTS [--pattern NAME] [--copies N]
  cuobjdump -sass OBJECT | hot_path.py 1 --from-wait [--pattern NAME]

WEIGHTS: that one lane multiplies in a turn, to divide by. --copies: turns that the loop's body
holds, where it was written out more than once. A turn is followed from its first HMMA over its
last one and its last load or copy of weights (LDG, LDGSTS) to the first HMMA of the next; where the
way branches, the side with fewer instructions is taken, so what is done seldom (another tile, other
scales) is left out. Prints per kernel the instructions, those per weight, and the mix.

--from-wait: instead, how many instructions stand between the grid's wait (ACQBULK) and the first
load of weights (the first that L1 does not keep) behind it, and how many are on the shortest way.
Standard library only.
"""
import argparse
import collections
import heapq
import re
import sys


def functions(lines):
    name, out = None, {}
    for line in lines:
        m = re.match(r"\s*Function : (\S+)", line)
        if m:
            name = m.group(1)
            out[name] = []
        m = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", line)
        if m and name:
            out[name].append((int(m.group(1), 16), m.group(2)))
    return out


def successors(code):
    at = {address: i for i, (address, _) in enumerate(code)}
    out = []
    for i, (_, text) in enumerate(code):
        m = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        after = [i + 1] if i + 1 < len(code) else []
        if m:
            after = after if text.startswith("@") or re.search(r"BRA\S*\s+!?U?P\d", text) else []
            after = after + [at[int(m.group(1), 16)]]
        elif re.match(r"(EXIT|RET)", text):
            after = []
        out.append(after)
    return out


def shortest(after, start, goal):
    best, before, heap = {start: 0}, {}, [(0, start)]
    while heap:
        length, i = heapq.heappop(heap)
        if i == goal:
            break
        for j in after[i] if length == best[i] else []:
            if length + 1 < best.get(j, 1 << 30):
                best[j], before[j] = length + 1, i
                heapq.heappush(heap, (length + 1, j))
    way = []
    while goal != start:
        way.append(goal)
        if goal not in before:
            return None
        goal = before[goal]
    return way[::-1]


def turn(code, copies):
    """Indices of the instructions of a turn, or None."""
    products = [i for i, (_, text) in enumerate(code) if "HMMA" in text]
    if len(products) < 2 * copies:
        return None
    per = len(products) // copies
    first, last, then = products[0], products[per - 1], products[per] if copies > 1 else products[0]
    span = range(last, then) if copies > 1 else range(first)  # one turn's copies stand in front of its products
    loads = [i for i in span if re.search(r"LDG\S*\.(64|128)\b", code[i][1])]
    stops = [first, last] + loads[-1:] + [then]
    after, way = successors(code), []
    for start, goal in zip(stops, stops[1:]):
        part = shortest(after, start, goal)
        if part is None:
            return None
        way += part
    return way


def mix_of(code, way):
    count = collections.Counter()
    for i in way:
        words = re.sub(r"^@!?U?P\w+\s+", "", code[i][1]).split()[0].split(".")
        wide = [w for w in words if w in ("64", "128")] if words[0][:2] in ("LD", "ST") else []
        count[".".join(words[:1] + wide)] += 1
    return ", ".join("%s %d" % item for item in count.most_common(14))


def from_wait(code):
    """Instructions from the wait in front of the first load of weights to that load, and those of
    the shortest way; None where there is no wait."""
    loads = [i for i, (_, text) in enumerate(code) if re.search(r"LDG\S*\.NA\b", text)]
    waits = [i for i, (_, text) in enumerate(code) if "ACQBULK" in text and i < (loads + [0])[0]]
    if not waits:
        return None
    way = shortest(successors(code), waits[-1], loads[0])
    return loads[0] - waits[-1], len(way) if way else 0


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("weights", type=float)
    p.add_argument("--pattern", default="")
    p.add_argument("--copies", type=int, default=1)
    p.add_argument("--from-wait", action="store_true")
    a = p.parse_args()
    for name, code in functions(sys.stdin).items():
        if not re.search(a.pattern, name):
            continue
        if a.from_wait:
            counts = from_wait(code)
            print("%s: %s" % (name, "%d instructions from the wait to the first load, %d on the "
                              "shortest way" % counts if counts else "no wait"))
            continue
        way = turn(code, a.copies)
        if way is None:
            print("%s: no turn found" % name)
        else:
            print("%s: %d instructions, %.2f per weight: %s" %
                  (name, len(way), len(way) / a.weights, mix_of(code, way)))


if __name__ == "__main__":
    main()
