#!/usr/bin/env python3
"""Planning the largest released checkpoint: 91,991 tensors in less than 200 MiB."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "bench"))
import bench_plan  # noqa: E402
from qconv_case import QCONV  # noqa: E402


class LargestPlan(unittest.TestCase):
    def test_memory_and_sums(self):
        with tempfile.TemporaryDirectory(prefix="qconv-plan-") as folder:
            rows = bench_plan.deepseek_v3()
            self.assertEqual(len(rows), 91991)
            bench_plan.write(folder, rows)
            for args in (["--vram", "8x80GB"], ["--vram", "16x80GB", "--to", "int8"],
                         ["--vram", "40GB+cpu:1TB"]):
                command = [QCONV, "plan", *args, "--json", folder]
                seconds, peak = bench_plan.run(command)
                print("%s: %.2f s, %.0f MB" % (" ".join(args), seconds, peak / 1e6))
                self.assertLess(peak, 200 << 20, args)
                plan = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                self.assertEqual(plan["parameters"], 684489845504)
                self.assertEqual(plan["weight_bytes"],
                                 sum(d["weight_bytes"] for d in plan["devices"]))
                self.assertEqual(plan["weight_bytes"],
                                 sum(s["bytes"] for s in plan["schemes"].values()))
                self.assertGreater(plan["file_bytes"], plan["weight_bytes"])


if __name__ == "__main__":
    unittest.main()
