"""What the scripts that make a page of docs/ from bench/results/ share: tables, the choice between
writing the page and checking it, and how a result is written."""
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.path.join(HERE, "results")


def table(head, rows):
    out = ["| " + " | ".join(head) + " |", "|" + "|".join("--" for _ in head) + "|"]
    out += ["| " + " | ".join(r) + " |" for r in rows]
    return "\n".join(out)


def json_text(value, indent=0):
    """JSON in which whatever has room on a line is on one."""
    line = json.dumps(value)
    if len(line) + indent <= 240 or not isinstance(value, (dict, list)):
        return line
    parts = ([json.dumps(k) + ": " + json_text(v, indent + 1) for k, v in value.items()]
             if isinstance(value, dict) else [json_text(v, indent + 1) for v in value])
    begin, end = "{}" if isinstance(value, dict) else "[]"
    pad = "\n" + " " * (indent + 1)
    return begin + pad + ("," + pad).join(parts) + "\n" + " " * indent + end


def write_or_check(name, text, source, script):
    """docs/NAME becomes `text`; with --check, is 1 where it is not that already."""
    path = os.path.join(HERE, "..", "docs", name)
    if sys.argv[1:] == ["--check"]:
        if not os.path.exists(path):
            print("docs/%s: not there; run %s" % (name, script))
            return 1
        with open(path) as f:
            if f.read() != text:
                print("docs/%s: not what %s gives; run %s" % (name, source, script))
                return 1
        return 0
    with open(path, "w") as f:
        f.write(text)
    return 0
