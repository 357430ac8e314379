"""What GPTQ of llm-compressor and AutoRound make of a model, as folders of compressed-tensors. For
accuracy_integers.py.

    accuracy_compressors.py JOBS.json    needs torch, llmcompressor, auto-round

JOBS: {"model": folder, "ids": windows of tokens, one a line, "ignore": layers left as they are,
"jobs": [{"method": "gptq" or "autoround", "group": columns, "settings": of the modifier, "weights":
of the scheme, "out": folder}]}. Prints {"versions": ...}. 4 bits, symmetric, on the CPU, by the
library's own pipeline: what is not in settings is its default. AutoRound's hundreds of steps are in
float32, the rest in the model's dtype.
"""
import json
import sys
from importlib.metadata import version

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM

MODIFIERS = {"gptq": GPTQModifier, "autoround": AutoRoundModifier}


def read_ids(path):
    with open(path) as f:
        return [[int(token) for token in line.split()] for line in f]


def compress(jobs, job, windows):
    weights = dict({"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                    "group_size": job["group"]}, **job.get("weights", {}))
    modifier = MODIFIERS[job["method"]](
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        ignore=jobs["ignore"], **job.get("settings", {}))
    tuned = job["method"] == "autoround"
    model = AutoModelForCausalLM.from_pretrained(jobs["model"], dtype="float32" if tuned else "auto")
    text = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(w) for w in windows]})
    oneshot(model=model, dataset=text, recipe=[modifier], num_calibration_samples=len(windows),
            max_seq_length=max(map(len, windows)), shuffle_calibration_samples=False,
            batch_size=1 if tuned else 16)  # AutoRound makes its own batches
    model.save_pretrained(job["out"], save_compressed=True)


def main():
    with open(sys.argv[1]) as f:
        jobs = json.load(f)
    windows = read_ids(jobs["ids"])
    for job in jobs["jobs"]:
        compress(jobs, job, windows)
    print(json.dumps({"versions": {"llm-compressor": version("llmcompressor"),
                                   "auto-round": version("auto-round")}}))


main()
