#!/usr/bin/env python3
"""Makes a line of convert/families/known_models.txt.

usage: known_model.py ID CONFIG.json

Prints the id and the fields of a released config.json that the lines have already, at the same
place: what says nothing about the tensors or the cache is left out. If a line above has just these
fields, '=' and its id stand for them. Standard library only."""
import json
import os
import sys

LIST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../convert/families/known_models.txt")


def paths(config, start=()):
    for name, value in config.items():
        yield start + (name,)
        if isinstance(value, dict):
            yield from paths(value, start + (name,))


def fields_of(config, known, start=()):
    return {name: fields_of(value, known, start + (name,)) if isinstance(value, dict) else value
            for name, value in config.items() if start + (name,) in known}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    known, ids = set(), {}
    with open(LIST, encoding="ascii") as lines:
        for line in lines:
            name, config = line.rstrip("\n").split(" ", 1)
            if not config.startswith("="):
                ids.setdefault(json.dumps(json.loads(config), sort_keys=True), name)
                known.update(paths(json.loads(config)))
    with open(sys.argv[2], encoding="utf-8") as file:
        fields = fields_of(json.load(file), known)
    same = ids.get(json.dumps(fields, sort_keys=True))
    print(sys.argv[1], "=" + same if same else json.dumps(fields, separators=(",", ":")))


if __name__ == "__main__":
    main()
