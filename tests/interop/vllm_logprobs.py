"""Loads models with vLLM on the CPU and prints the log-probabilities that it gives a prompt.

usage: vllm_logprobs.py WORKERS IDS MODEL...

Runs in the environment that vllm_environment.sh makes. IDS are the prompt's tokens, joined by commas.
Prints a line of JSON for each model: {"model": MODEL, "logprobs": [...]}, one row of the whole
vocabulary for each token but the first (null stands for NaN), or {"model": MODEL, "error": what vLLM said}.
"""
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import vllm_plugin


def register():
    """vLLM calls this in every process: a kernel for weights of 8 bits and inputs of 16, which vLLM has
    for GPUs only. It multiplies with the restored weights; vLLM's own code loads and splits them."""
    import torch
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.platforms.interface import PlatformEnum
    from vllm.scalar_type import scalar_types

    class RestoredWeights(MPLinearKernel):
        @classmethod
        def get_min_capability(cls):
            return -1

        @classmethod
        def can_implement(cls, config):
            ours = config.weight_type == scalar_types.uint8b128
            return ours, None if ours else "not 8 bits"

        def process_weights_after_loading(self, layer):
            words, scales, _ = self._get_weight_params(layer)
            codes = words.contiguous().view(torch.uint8).to(torch.float32) - 128
            grouped = codes.unflatten(1, (scales.shape[1], -1))
            layer.restored = (grouped * scales[:, :, None]).flatten(1).to(scales.dtype)

        def apply_weights(self, layer, x, bias=None):
            return torch.nn.functional.linear(x, layer.restored, bias)

    register_linear_kernel(RestoredWeights, PlatformEnum.CPU, "mp")


def logprobs(model, workers, ids):
    from vllm import LLM, SamplingParams
    engine = None
    try:
        engine = LLM(model=model, tensor_parallel_size=workers, skip_tokenizer_init=True,
                     enforce_eager=True, max_model_len=len(ids) + 8, max_logprobs=-1,
                     enable_prefix_caching=False)
        answer = engine.generate(
            [{"prompt_token_ids": ids}],
            SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False), use_tqdm=False)
    except Exception as e:  # whatever it is, the test shows it
        return {"model": model, "error": f"{type(e).__name__}: {e}"}
    finally:
        if engine:
            engine.llm_engine.engine_core.shutdown()
    rows = [[row[i].logprob for i in range(len(row))] for row in answer[0].prompt_logprobs[1:]]
    return {"model": model,
            "logprobs": [[None if math.isnan(x) else x for x in row] for row in rows]}


def main():
    workers, ids, models = int(sys.argv[1]), [int(i) for i in sys.argv[2].split(",")], sys.argv[3:]
    if "QCONV_VLLM_STARTED" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            vllm_plugin.install(__file__, Path(folder))
            settings = {**vllm_plugin.settings(Path(folder), workers), "QCONV_VLLM_STARTED": "1",
                        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(workers > 1))}
            return os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-B", *sys.argv], settings)
    for model in models:
        print(json.dumps(logprobs(model, workers, ids)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
