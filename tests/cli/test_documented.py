#!/usr/bin/env python3
"""What the pages say of JSON and of cards is what the program prints and knows."""
import json
import os
import re
import subprocess
import unittest

from qconv_case import QconvCase, ROOT

MODEL = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
# Members of these are names of schemes, dtypes and modules.
BY_NAME = {"schemes", "device_map", "uniform", "chosen", "by_dtype", "by_scheme",
           "relative_errors"}


def page(name):
    with open(os.path.join(ROOT, "docs", name), encoding="utf-8") as f:
        return f.read()


def section(text, title):
    """From the heading that begins with title to the next."""
    return re.search(r"^## %s.*?(?=^## |\Z)" % re.escape(title), text, re.M | re.S).group(0)


def members(value, found, is_named=False):
    if isinstance(value, dict):
        if not is_named:
            found.update(value)
        for name, inner in value.items():
            members(inner, found, name in BY_NAME)
    elif isinstance(value, list):
        for inner in value:
            members(inner, found)
    return found


class Documented(QconvCase):
    def check(self, text, *args):
        printed = members(json.loads(self.ok(*args)), set())
        described = set(re.findall(r"`([^`]+)`", text))
        self.assertEqual(sorted(printed - described), [], args)
        return printed

    def named(self, text, printed):
        """Nothing is promised that is not there: the first column of the table."""
        for row in re.findall(r"^\| (`.*?) \|", text, re.M):
            for name in re.findall(r"`(\w+)`", row):
                self.assertIn(name, printed)

    def test_plan(self):
        text = section(page("cli.md"), "`qconv plan --json`")
        printed = self.check(text, "plan", MODEL, "--vram", "1GB+cpu:1GB", "--json")
        printed |= self.check(text, "plan", "Llama-3.3-70B-Instruct", "--vram", "8GB", "--json", "-v")
        printed |= self.check(text, "plan", MODEL, "--vram", "1GB", "--to", "auto", "--explain",
                              "--json")
        self.named(text, printed)

    def test_convert(self):
        pages = page("cli.md")
        plan = section(pages, "`qconv plan --json`")  # for "auto"
        text = section(pages, "`qconv --json`")
        printed = self.check(text + plan, "--to", "auto", "--vram", "1GB+1GB", "--json", MODEL,
                             "out")
        printed |= self.check(text + plan, "--to", "nf4", "--part", "1/2", "--json", MODEL, "parts")
        self.named(text, printed)
        text = section(pages, "`qconv --dry-run --json`")
        printed = self.check(text + plan, "--to", "auto", "--vram", "1GB+1GB", "--json",
                             "--dry-run", MODEL)
        self.named(text, printed)

    def test_help(self):
        text = section(page("cli.md"), "`qconv help --json`")
        self.named(text, self.check(text, "help", "--json"))
        self.check(text, "help", "plan", "--json")

    def test_outputs(self):
        self.ok("--to", "nf4", "--vram", "1GB+1GB", "-q", MODEL, "out")
        pages = page("cli.md")
        text = section(pages, "`qconv inspect --json`")
        self.named(text, self.check(text, "inspect", "out", "--json") |
                   self.check(text, "inspect", MODEL, "--json", "--for", "all"))
        text = section(pages, "`qconv verify --json`")
        self.named(text, self.check(text, "verify", "out", "--json") |
                   self.check(text, "unpack", "out", "plain", "--json") |
                   self.check(text, "unpack", "out", "one", "--device", "cuda:1", "--json"))

    def test_cards(self):
        """docs/hardware.md lists every card of the table, and every one it lists is known."""
        known = subprocess.check_output([os.environ["CARD_NAMES"]], text=True).split()
        text = page("hardware.md")
        text = text[text.index("These cards are known"):]
        listed = re.findall(r"`([^`]+)`", text[:text.index(".\n")])
        self.assertEqual(listed, known)
        for some in (listed[:40], listed[40:]):  # --as takes 64
            o = json.loads(self.ok("hardware", "--as", "+".join(some), "--json"))
            self.assertEqual([g["card"] for g in o["gpus"]], some)

    def test_pages_are_linked(self):
        """Every page can be reached from the README."""
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
            readme = f.read()
        for name in sorted(os.listdir(os.path.join(ROOT, "docs"))):
            if name.endswith(".md"):
                self.assertIn("(docs/%s)" % name, readme)


if __name__ == "__main__":
    unittest.main()
