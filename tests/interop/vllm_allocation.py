"""Starts vLLM's CPU workers on models and prints what each worker holds as weights.

usage: vllm_allocation.py WORKERS MODEL...

Runs in the environment that vllm_environment.sh makes. Prints a line of JSON for each model:
{"model": MODEL, "ranks": [{parameter: bytes}, ...]}, or {"model": MODEL, "error": what vLLM said}.
A plug-in of vLLM records the parameters in every worker when the weights are loaded, before the
kernels of the CPU pack them anew, and ends the worker.
"""
import json
import os
import sys
import tempfile
from pathlib import Path

import vllm_plugin

FOLDER = "QCONV_VLLM_RECORD"


def register():
    """vLLM calls this in every process."""
    from vllm.model_executor.model_loader import base_loader

    def record(model, _config, _device):
        from vllm.distributed import get_tensor_model_parallel_rank
        rows = {n: p.numel() * p.element_size() for n, p in model.named_parameters()}
        path = Path(os.environ[FOLDER], f"rank{get_tensor_model_parallel_rank()}")
        path.with_suffix(".part").write_text(json.dumps(rows))
        path.with_suffix(".part").rename(path)
        raise RuntimeError("the parameters are recorded")

    base_loader.process_weights_after_loading = record


def allocated(model, workers):
    from vllm import LLM
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        said = ""
        try:
            LLM(model=model, tensor_parallel_size=workers, skip_tokenizer_init=True,
                enforce_eager=True, max_model_len=64)
        except Exception as e:  # always: the workers end themselves
            said = str(e)
        ranks = [Path(folder, f"rank{i}") for i in range(workers)]
        if not all(r.exists() for r in ranks):
            return {"model": model, "error": said}
        return {"model": model, "ranks": [json.loads(r.read_text()) for r in ranks]}


def main():
    workers, models = int(sys.argv[1]), sys.argv[2:]
    if FOLDER not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            vllm_plugin.install(__file__, Path(folder))
            settings = {**vllm_plugin.settings(Path(folder), workers), FOLDER: folder}
            return os.spawnve(os.P_WAIT, sys.executable, [sys.executable, *sys.argv],
                              settings)
    for model in models:
        print(json.dumps(allocated(model, workers)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
