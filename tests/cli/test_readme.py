"""Every command that README.md and docs/features.md show with its output prints just that, and links
between pages lead somewhere.

  test_readme.py --update   put what they print, and the times of first_minute.json, into the pages

Such a command is a block that begins with ```console and "$ ". The commands of a page run one after the
other in one folder, through a shell. Times, rates, processor and the size that zstd comes to differ from
machine to machine and are not compared.
"""
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

from qconv_case import QCONV, QconvCase, ROOT

PAGES = ["README.md", "docs/features.md"]
SHOWN = re.compile(r"^```console\n\$ (.*)\n((?:.*\n)*?)```\n", re.M)
VARYING = re.compile(r"[\d.:]+ (?:s\b|min\b|[KMG]?B/s|[KMG]?B on disk)|\d+ threads?, \w+")

COMMANDS = "    ./bootstrap.sh test    # builds and runs the tests\n"
TIMES = re.compile(re.escape(COMMANDS) + r"(\nIn a fresh clone on .*\n)?")
BLOCK = re.compile(r"^```.*?^```\n", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


def read_page(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


def anchors(text):
    """What a link may name behind '#': the headings, as GitHub writes them there."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*?) *$", BLOCK.sub("", text), re.M)}


def with_outputs(page, folder):
    """The page with what its commands print now, where that is not what it shows. The commands see
    build/qconv and tests/, as in the tree."""
    os.mkdir(os.path.join(folder, "build"))
    os.symlink(os.path.abspath(QCONV), os.path.join(folder, "build", "qconv"))
    os.symlink(os.path.join(ROOT, "tests"), os.path.join(folder, "tests"))

    def run(shown):
        printed = subprocess.run(shown.group(1), shell=True, cwd=folder, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
        block = "```console\n$ %s\n%s```\n" % (shown.group(1), printed.stdout.decode())
        same = VARYING.sub("#", block) == VARYING.sub("#", shown.group())
        return shown.group() if same else block

    return SHOWN.sub(run, page)


def with_times(page):
    """The page with a sentence that has the times of bench/results/first_minute.json."""
    path = os.path.join(ROOT, "bench", "results", "first_minute.json")
    said = ""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            result = json.load(f)
        first, second = (round(result[command]["seconds"]) for command in ("run", "test"))
        said = "\nIn a fresh clone on %d cores the first takes %d s, the second %d min %d s ([how measured](%s)).\n" % (
            result["cores"], first, second // 60, second % 60, result["command"])
    page, count = TIMES.subn(lambda found: COMMANDS + said, page)
    assert count == 1, "README.md does not show the commands"
    return page


class Readme(QconvCase):
    def test_shown_outputs(self):
        for name in PAGES:
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                page = read_page(name)
                self.assertTrue(SHOWN.search(page), "the page shows no command")
                self.assertEqual(page, with_outputs(page, folder))

    def test_times(self):
        self.assertEqual(read_page("README.md"), with_times(read_page("README.md")))

    def test_links(self):
        paths = glob.glob(os.path.join(ROOT, "*.md")) + \
            glob.glob(os.path.join(ROOT, "docs", "**", "*.md"), recursive=True)
        pages = {os.path.relpath(path, ROOT): read_page(path) for path in paths}
        for name, text in pages.items():
            for path, anchor in LINK.findall(BLOCK.sub("", text)):
                if "://" in path:
                    continue
                to = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
                self.assertTrue(os.path.exists(os.path.join(ROOT, to)), (name, path))
                if anchor and to in pages:
                    self.assertIn(anchor, anchors(pages[to]), (name, to))


def update():
    for name in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            page = with_outputs(read_page(name), folder)
        if name == "README.md":
            page = with_times(page)
        with open(os.path.join(ROOT, name), "w", encoding="utf-8") as f:
            f.write(page)


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update()
    else:
        unittest.main()
