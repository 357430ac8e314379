#!/usr/bin/env python3
"""The tables at the end of docs/planning.md: every model of tests/data/models on five budgets, as
qconv plans them from their ids alone. Standard library only; $QCONV names the program.

  planning_table.py            print the tables
  planning_table.py --update   put them into docs/planning.md
  planning_table.py --check    exit 1 if docs/planning.md has others
"""
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
PAGE = os.path.join(ROOT, "docs", "planning.md")
QCONV = os.environ.get("QCONV", os.path.join(ROOT, "build", "qconv"))
BEGIN = "<!-- tables: tests/planning_table.py --update -->\n"
END = "<!-- end of tables -->\n"
BUDGETS = [("2x40GB", "Two cards of 40 GB"), ("24GB", "One card of 24 GB"),
           ("V100-16GB", "One V100 of 16 GB"), ("80GB", "One card of 80 GB"),
           ("cpu:64GB", "The CPU with 64 GB")]
SCHEMES = [("bf16", "16 bit"), ("int8", "int8"), ("nf4", "NF4")]


def models():
    folder = os.path.join(HERE, "data", "models")
    for name in sorted(os.listdir(folder)):
        if name.endswith(".json"):
            with open(os.path.join(folder, name), encoding="utf-8") as f:
                yield json.load(f)["hf_id"]


def plan(model, budget, to):
    r = subprocess.run([QCONV, "plan", "-q", "--json", "--vram", budget, "--to", to, model],
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if r.returncode != 0:
        raise SystemExit("planning_table: %s --to %s on %s: exit %d: %s"
                         % (model, to, budget, r.returncode, r.stderr.decode().strip()))
    return json.loads(r.stdout)


def room(p):
    """Whether it fits, and the context that remains."""
    if p["max_context"] is None:
        return "yes" if p["fits"] else "no"
    if p["fits"]:
        return "{:,}".format(p["max_context"])
    return "no (up to {:,})".format(p["max_context"]) if p["max_context"] else "no"


def mix(p):
    """What auto took, in shares of the weights it chose for."""
    chosen = {k: v["bytes"] for k, v in p["auto"]["chosen"].items()}
    total = sum(chosen.values())
    if not p["fits"]:
        return ""
    shares = sorted(((b / total, k) for k, b in chosen.items()), reverse=True) if total else []
    return ", ".join("{} {}".format(k.replace("16bit", "16 bit"),
                                    "{:.0%}".format(s) if s >= 0.005 else "under 1%")
                     for s, k in shares)


def tables():
    lines = []
    for budget, title in BUDGETS:
        lines += ["", "### %s (`--vram %s`)" % (title, budget), "",
                  "| model | " + " | ".join(t for _, t in SCHEMES) + " | auto | auto takes, by bytes |",
                  "|---|" + "---:|" * (len(SCHEMES) + 1) + "---|"]
        for model in models():
            cells = [room(plan(model, budget, to)) for to, _ in SCHEMES]
            auto = plan(model, budget, "auto")
            cells += [room(auto), mix(auto)]
            lines.append("| %s | %s |" % (model.split("/")[1], " | ".join(cells)))
    return "\n".join(lines[1:]) + "\n"


def main(argv):
    if argv not in ([], ["--update"], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    text = tables()
    if not argv:
        sys.stdout.write(text)
        return 0
    with open(PAGE, encoding="utf-8") as f:
        page = f.read()
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        print("docs/planning.md: the marks of the tables are missing", file=sys.stderr)
        return 1
    head, rest = page.split(BEGIN)
    old, tail = rest.split(END)
    new = "\n" + text + "\n"
    if argv == ["--update"]:
        with open(PAGE, "w", encoding="utf-8") as f:
            f.write(head + BEGIN + new + END + tail)
        return 0
    if old != new:
        print("docs/planning.md: the tables are not what qconv plans; "
              "tests/planning_table.py --update writes them", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
