"""compressed-tensors as qconv writes it, in the engines it is written for.

transformers with compressed-tensors restores every weight to the bits of `qconv --to bf16`. vLLM on
the CPU, one worker and two, gives a prompt the log-probabilities that transformers computes in
float32 from those restored weights. Planted faults have to fail the same two comparisons. vLLM runs
in the environment that vllm_environment.sh makes; where it is not there, its checks are skipped.
"""
import functools
import json
import os
import shutil
import subprocess
import unittest
from pathlib import Path

import interop_support as s
import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

ENVIRONMENT = Path(os.environ.get("QCONV_VLLM_ENV", s.ROOT / "build-interop" / "vllm"))
PYTHON = ENVIRONMENT / "bin" / "python"
COMPRESSED = ["--format", "compressed-tensors"]
FORMS = {
    "int4-128": ["--to", "int4"],
    "int4-64": ["--to", "int4", "--block-size", "64"],
    "int4-32": ["--to", "int4", "--block-size", "32"],
    "w8a8": ["--to", "int8", *COMPRESSED],
    "w8a16": ["--to", "int8", *COMPRESSED, "--activation-bits", "16"],
    "w8a16-128": ["--to", "int8", *COMPRESSED, "--activation-bits", "16", "--block-size", "128"],
}
# How far the log-probabilities may be apart: the engine computes in bfloat16, and rounds the inputs
# of layers to 8 bits where the form says so.
APART = {form: 0.12 if form == "w8a8" else 0.05 for form in FORMS}
SPLIT = ["int4-128", "w8a8"]
VOCABULARY = 256
IDS = torch.randint(3, VOCABULARY, (48,), generator=torch.Generator().manual_seed(1)).tolist()
VICTIM = "model.layers.1.mlp.down_proj.weight"


@functools.cache
def source():
    """A tiny Llama whose groups of 128 can be split over two workers."""
    torch.manual_seed(11)
    folder = s.SCRATCH / "compressed" / "model"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=VOCABULARY,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.05)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@functools.cache
def converted(form):
    folder = s.SCRATCH / "compressed" / form
    s.qconv("-q", "--compress", "none", *FORMS[form], source(), folder)
    return folder


@functools.cache
def restored(form):
    folder = s.SCRATCH / "compressed" / f"{form}-bf16"
    s.qconv("-q", "--compress", "none", "--to", "bf16", converted(form), folder)
    return folder


def scale_times_1_1(tensors):
    tensors[VICTIM + "_scale"] *= 1.1


def swapped_nibbles(tensors):
    codes = tensors[VICTIM + "_packed"].view(torch.uint8)
    tensors[VICTIM + "_packed"] = (codes << 4 | codes >> 4).view(torch.int32)


def missing_scale(tensors):
    del tensors[VICTIM + "_scale"]


# vLLM leaves a missing scale as the memory was, so that one goes first: before a whole model was there.
FAULTS = {"int4-128": [missing_scale, scale_times_1_1, swapped_nibbles], "w8a8": [scale_times_1_1],
          "w8a16": [scale_times_1_1]}
PLANTED = [(form, fault) for form, faults in FAULTS.items() for fault in faults]


@functools.cache
def planted(form, fault):
    """A copy of the output with one fault in one weight."""
    folder = s.SCRATCH / "compressed" / f"{form}-{fault.__name__}"
    shutil.copytree(converted(form), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    fault(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def unlike(folder, form):
    """The names of the tensors that transformers holds otherwise than qconv restores them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16,
        quantization_config=transformers.CompressedTensorsConfig(run_compressed=False))
    have, want = model.state_dict(), load_file(restored(form) / "model.safetensors")
    stays = [name for name in have if not name.endswith(("_scale", "_shape"))]  # beside the weights
    return [name for name in sorted({*stays, *want})
            if name not in have or name not in want or have[name].dtype != want[name].dtype
            or not torch.equal(have[name], want[name])]


class Transformers(unittest.TestCase):
    def test_every_weight_is_equal(self):
        for form in FORMS:
            with self.subTest(form):
                self.assertEqual(unlike(converted(form), form), [])
                s.note(f"{form}: every weight is equal, bit for bit")

    def test_planted_faults_are_found(self):
        for form, fault in PLANTED:
            with self.subTest(form=form, fault=fault.__name__):
                try:
                    found = unlike(planted(form, fault), form)
                except (AttributeError, RuntimeError):  # how 4 and 5 refuse a weight without scales
                    self.assertIs(fault, missing_scale)
                else:
                    self.assertEqual(found, [VICTIM])


@functools.cache
def reference(form):
    """What transformers computes in float32 from the restored weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(restored(form), dtype=torch.float32)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([IDS])).logits[0, :-1]
    return torch.log_softmax(logits, -1)


def answers(workers, folders):
    """folder -> what vLLM gives IDS: a tensor, or what it said instead."""
    script = s.ROOT / "tests" / "interop" / "vllm_logprobs.py"
    done = subprocess.run(
        [PYTHON, "-B", script, str(workers), ",".join(map(str, IDS)), *map(str, folders)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"model"')]
    if len(lines) != len(folders):
        raise RuntimeError(f"vLLM answered {len(lines)} of {len(folders)}: {done.stderr[-2000:]}")
    return {Path(a["model"]): a.get("error") or torch.tensor(
        [[float("nan") if x is None else x for x in row] for row in a["logprobs"]]) for a in lines}


def apart(answer, form):
    """The largest difference of log-probabilities, over the whole vocabulary; infinite for a NaN and
    for a refusal."""
    if isinstance(answer, str):
        return float("inf")
    return (answer - reference(form)).abs().nan_to_num(float("inf")).max().item()


@unittest.skipUnless(PYTHON.exists(), f"no vLLM in {ENVIRONMENT}: tests/interop/vllm_environment.sh")
@unittest.skipIf(transformers.__version__ < "5", "vLLM is asked once, beside transformers 5")
class Vllm(unittest.TestCase):
    def compare(self, workers, forms, found):
        for form in forms:
            with self.subTest(form):
                answer = found[converted(form)]
                self.assertNotIsInstance(answer, str)
                difference = apart(answer, form)
                s.note(f"{form}, {workers} worker(s): log-probabilities at most {difference:.4f} apart")
                self.assertLessEqual(difference, APART[form])

    def test_one_worker(self):
        plain = restored("int4-128")
        found = answers(1, [*(planted(*p) for p in PLANTED), *map(converted, FORMS), plain])
        self.compare(1, FORMS, found)
        s.note(f"int4-128 turned back into bf16: {apart(found[plain], 'int4-128'):.4f} apart")
        for form, fault in PLANTED:
            with self.subTest(form=form, fault=fault.__name__):
                difference = apart(found[planted(form, fault)], form)
                s.note(f"{form}, {fault.__name__}: {difference:.4f} apart")
                self.assertGreater(difference, APART[form])

    def test_two_workers(self):
        self.compare(2, SPLIT, answers(2, [converted(f) for f in SPLIT]))


if __name__ == "__main__":
    s.main()
