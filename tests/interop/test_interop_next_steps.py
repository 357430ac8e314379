"""The commands that convert ends with, run as they are printed: what it says that loads, loads; what it
says that does not, does not; in the folder of somebody with blanks and quotes in the names."""
import json
import os
import subprocess
import sys
import traceback
import unittest

import interop_support as s
import transformers
from transformers import AutoModelForCausalLM

MAJOR = int(transformers.__version__.split(".")[0])
transformers.logging.set_verbosity_error()
RUNS = """
import transformers
transformers.utils.logging.disable_progress_bar()
%s
import torch
out = model(input_ids=torch.arange(8).reshape(1, 8)).logits
assert torch.isfinite(out).all()
"""
FORMS = [["--to", "nf4"], ["--to", "nf4", "--no-double-quant"], ["--to", "nf4", "--block-size", "32"],
         ["--to", "int8"], ["--to", "bf16"], ["--to", "keep"],
         ["--to", "nf4", "--compress", "none"], ["--to", "int8", "--compress", "none"]]
OWN = [["--to", "int8", "--block-size", "64"],
       ["--to", "auto", "--vram", "1500KB", "--schemes", "nf4,int8", "--margin", "1", "--cuda-context",
        "1KB", "--context", "16"]]


class NextSteps(unittest.TestCase):
    def setUp(self):
        self.folder = s.SCRATCH / f"it's \"next\" {MAJOR}"
        self.folder.mkdir(exist_ok=True)

    def converted(self, form, number):
        out = f"out {number}$x"
        done = subprocess.run([s.QCONV, "--json", *form, s.model_path("kjv-llama"), out],
                              cwd=self.folder, capture_output=True, check=True)
        return out, json.loads(done.stdout)["loads"], done.stderr.decode()

    def follow(self, loads, afresh=False):
        if loads["command"]:
            subprocess.run(["bash", "-c", loads["command"]], cwd=self.folder, check=True,
                           capture_output=True)
        if loads["python"] and afresh:
            subprocess.run([sys.executable, "-c", RUNS % loads["python"]], cwd=self.folder, check=True)
        elif loads["python"]:
            self.in_a_fork(RUNS % loads["python"])
        # What is cut for GPUs that are not here is loaded on the CPU.
        self.in_a_fork(RUNS % loads["load"].replace('")\n', '", device_map="cpu")\n'))

    def in_a_fork(self, code):
        """Runs it where transformers is imported already, which takes 6 s; this process starts no thread
        of torch's, which a fork would miss."""
        child = os.fork()
        if child == 0:
            os.chdir(self.folder)
            try:
                exec(code, {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0, code)

    def test_what_loads(self):
        for number, form in enumerate(FORMS):
            out, loads, said = self.converted(form, number)
            self.assertEqual(said, "")
            self.assertIn(MAJOR, loads["transformers"])
            self.assertEqual(loads["unpack_first"], "none" not in form)
            self.follow(loads, afresh=number == 0)
            if loads["unpack_first"]:
                with self.assertRaises(OSError):
                    AutoModelForCausalLM.from_pretrained(self.folder / out)
        s.note(f"{len(FORMS)} forms load by the commands that convert ends with")

    def test_what_does_not(self):
        for number, form in enumerate(OWN):
            out, loads, said = self.converted([*form, "--compress", "none"], f"own {number}")
            self.assertIn("only qconv reads this form", said)
            self.assertEqual((loads["transformers"], loads["python"]), ([], None))
            with self.assertRaises((ValueError, RuntimeError)):
                AutoModelForCausalLM.from_pretrained(self.folder / out)
            self.follow(loads)
            self.in_a_fork(f"import transformers; "
                           f"transformers.AutoModelForCausalLM.from_pretrained({out + '-bf16'!r})")


if __name__ == "__main__":
    s.main()
