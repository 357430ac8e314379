"""Loads models with vLLM on the CPU and prints the log-probabilities that it gives prompts, and how it
goes on.

usage: vllm_logprobs.py [--qconv [--expert-parallel]] WORKERS QUESTIONS

With --qconv vLLM has the plug-in of qconv's Python package, and else a kernel of ours (register below). With
--expert-parallel each worker has some of the experts, whole. Runs in
the environment that vllm_environment.sh makes. The file QUESTIONS has a list in JSON:
[{"model": MODEL, "prompts": [[id, ...], ...], "tokens": how many are to follow}, ...]. Prints a line of
JSON for each: {"model": MODEL, "logprobs": [...], "texts": [[id, ...], ...]}, for the first prompt one row
of the whole vocabulary for each token but the first (null stands for NaN), and for each prompt the most
probable tokens, and with --qconv "weights": [bytes of each worker's]; or {"model": MODEL, "error": what vLLM said}.
"""
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import vllm_plugin


def register():
    """vLLM calls this in every process: a kernel for packed weights of 2 to 8 bits and inputs of 16, which vLLM has
    for GPUs only, but for those of 4 bits where the processor has AVX-512. It multiplies with the restored
    weights; vLLM's own code loads and splits them."""
    import torch
    import vllm._custom_ops  # noqa: F401, which makes torch.ops._C
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.platforms.interface import PlatformEnum
    from vllm.scalar_type import scalar_types

    types = [scalar_types.uint2b2, scalar_types.uint3b4, scalar_types.uint5b16, scalar_types.uint6b32,
             scalar_types.uint7b64, scalar_types.uint8b128]
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        types.append(scalar_types.uint4b8)
        os.environ["VLLM_DISABLED_KERNELS"] = "CPUWNA16LinearKernel"

    class RestoredWeights(MPLinearKernel):
        @classmethod
        def get_min_capability(cls):
            return -1

        @classmethod
        def can_implement(cls, config):
            ours = config.weight_type in types
            return ours, None if ours else "not of these bits"

        def process_weights_after_loading(self, layer):
            words, scales, _ = self._get_weight_params(layer)
            bits, columns = self.config.weight_type.size_bits, self.config.partition_weight_shape[0]
            first = torch.arange(columns) * bits  # of a code's bits in its row, least significant first
            words = torch.nn.functional.pad(words.long() & 0xffffffff, (0, 1))
            pairs = words[:, first // 32] | words[:, first // 32 + 1] << 32
            codes = (pairs >> first % 32 & (1 << bits) - 1).to(torch.float32) - self.config.weight_type.bias
            grouped = codes.unflatten(1, (scales.shape[1], -1))
            layer.restored = (grouped * scales[:, :, None]).flatten(1).to(scales.dtype)

        def apply_weights(self, layer, x, bias=None):
            return torch.nn.functional.linear(x, layer.restored, bias)

    register_linear_kernel(RestoredWeights, PlatformEnum.CPU, "mp")


def held(worker):
    """The bytes of a worker's weights; it runs there."""
    return sum(p.numel() * p.element_size() for p in worker.get_model().parameters())


def answer_of(workers, ours, model, prompts, tokens):
    from vllm import LLM, SamplingParams
    engine = None
    try:
        engine = LLM(model=model, tensor_parallel_size=workers, skip_tokenizer_init=True,
                     enforce_eager=True, max_model_len=max(map(len, prompts)) + tokens,
                     max_logprobs=-1, enable_prefix_caching=False,
                     enable_expert_parallel="--expert-parallel" in sys.argv)
        answers = engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, prompt_logprobs=-1,
                           detokenize=False), use_tqdm=False)
        weights = {"weights": engine.collective_rpc(held)} if ours else {}
    except Exception as e:  # whatever it is, the test shows it
        return {"model": model, "error": f"{type(e).__name__}: {e}"}
    finally:
        if engine:
            engine.llm_engine.engine_core.shutdown()
    rows = [[row[i].logprob for i in range(len(row))] for row in answers[0].prompt_logprobs[1:]]
    return {"model": model, **weights, "texts": [list(a.outputs[0].token_ids) for a in answers],
            "logprobs": [[None if math.isnan(x) else x for x in row] for row in rows]}


def main():
    ours, (workers, questions) = "--qconv" in sys.argv, sys.argv[-2:]
    workers, questions = int(workers), json.loads(Path(questions).read_text())
    if "QCONV_VLLM_STARTED" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            if ours:
                vllm_plugin.install_qconv(Path(folder))
            else:
                vllm_plugin.install(__file__, Path(folder))
            settings = {**vllm_plugin.settings(Path(folder), workers), "QCONV_VLLM_STARTED": "1",
                        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for held()
                        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(workers > 1))}
            return os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-B", *sys.argv], settings)
    for question in questions:
        print(json.dumps(answer_of(workers, ours, **question)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
