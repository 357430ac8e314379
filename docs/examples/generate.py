"""Loads an output of qconv, compressed or plain, and goes on with a text.

    python docs/examples/generate.py out/ "In the beginning"

Needs torch and transformers. The shards are read as they are; nothing is unpacked.
"""
import argparse
import sys

import qconv
from transformers import AutoTokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="a folder that qconv convert wrote")
    parser.add_argument("prompt", help="the text to go on with")
    parser.add_argument("--tokens", type=int, default=64, help="how many tokens to add")
    parser.add_argument("--device", help="cpu or cuda:0; otherwise the devices that the output was cut for")
    a = parser.parse_args()
    try:
        model = qconv.load(a.out, device_map=a.device)
    except qconv.Error as error:
        sys.exit("%s: %s" % (type(error).__name__, error))
    tokenizer = AutoTokenizer.from_pretrained(a.out)
    x = tokenizer(a.prompt, return_tensors="pt").to(model.device)
    y = model.generate(**x, max_new_tokens=a.tokens, do_sample=False)
    print(tokenizer.decode(y[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
