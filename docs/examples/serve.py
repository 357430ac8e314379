"""Serves an output of qconv from Python: vLLM with qconv's plug-in, on one card or split over several.

usage: serve.py OUT [CARDS [PROMPT...]]

Needs vLLM, and qconv's Python package beside it (docs/serving.md). OUT is what qconv wrote, compressed or not.
"""
import sys

from vllm import LLM, SamplingParams


def main():
    out, cards, prompts = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1, sys.argv[3:]
    model = LLM(out, tensor_parallel_size=cards, max_model_len=256)
    answers = model.generate(prompts or ["In the beginning "], SamplingParams(temperature=0, max_tokens=64))
    for answer in answers:
        print(answer.prompt + answer.outputs[0].text)


if __name__ == "__main__":  # vLLM starts its workers by importing this file
    main()
