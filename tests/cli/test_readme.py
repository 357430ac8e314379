"""The plan on the README's first screen is what qconv prints.

  test_readme.py --update   put what it prints into README.md
"""
import os
import re
import subprocess
import sys
import unittest

from qconv_case import QCONV, QconvCase, ROOT

PAGE = os.path.join(ROOT, "README.md")
COMMAND = re.compile(r"^    qconv (plan .*?) +#", re.M)
SHOWN = re.compile(r"^```\n(.*?)^```\n", re.M | re.S)


def read_page():
    with open(PAGE, encoding="utf-8") as f:
        return f.read()


def plans(run):
    """What the page's two blocks have to hold: the plan of its command, and the last line of the
    same in int8. run: arguments to standard output."""
    command = COMMAND.search(read_page()).group(1).split()
    return [run(command), run(command[:-1] + ["int8"]).strip().split("\n")[-1] + "\n"]


class Readme(QconvCase):
    def test_plan(self):
        shown = SHOWN.findall(read_page())[:2]
        self.assertEqual(shown, plans(lambda command: self.ok(*command)))


def update():
    texts = plans(lambda command: subprocess.run([QCONV] + command, stdout=subprocess.PIPE,
                                                 check=True).stdout.decode())
    page = read_page()
    with open(PAGE, "w", encoding="utf-8") as f:
        f.write(SHOWN.sub(lambda m: "```\n" + (texts.pop(0) if texts else m.group(1)) + "```\n",
                          page))


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update()
    else:
        unittest.main()
