"""The plan on the README's first screen is what qconv prints."""
import os
import re
import unittest

from qconv_case import QconvCase, ROOT


class Readme(QconvCase):
    def test_plan(self):
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
            page = f.read()
        command = re.search(r"^    qconv (plan .*?) +#", page, re.M).group(1).split()
        shown = re.search(r"^```\n(.*?)^```\n", page, re.M | re.S).group(1)
        self.assertEqual(self.ok(*command), shown)
        short = self.ok(*command[:-1], "int8").strip().split("\n")[-1]
        self.assertIn(short, " ".join(page.split()))


if __name__ == "__main__":
    unittest.main()
