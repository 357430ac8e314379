"""Trains a low-rank adapter on a quantized model: the codes stay as they are, gradients flow through them.

    python docs/examples/qlora.py out/ text.txt adapter/

Needs torch, transformers and peft. OUT is what qconv convert wrote; the adapter is peft's and loads on top of the same
output, or of the model that it was made from.
"""
import argparse
import sys

import qconv
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoTokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="a folder that qconv convert wrote")
    parser.add_argument("text", help="the text to learn")
    parser.add_argument("adapter", help="the folder to write the adapter to")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the adapter's first values and of the order of the text")
    a = parser.parse_args()
    torch.manual_seed(a.seed)
    try:
        model = qconv.load(a.out)
    except qconv.Error as error:
        sys.exit("%s: %s" % (type(error).__name__, error))
    with open(a.text, encoding="utf-8") as f:
        ids = AutoTokenizer.from_pretrained(a.out)(f.read(), return_tensors="pt").input_ids[0]
    if len(ids) <= a.context:
        sys.exit("%s has %d tokens, and a sequence takes %d" % (a.text, len(ids), a.context))
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(r=a.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), a.rate)
    losses = []
    for step in range(a.steps):
        starts = torch.randint(len(ids) - a.context, (a.batch,))
        x = torch.stack([ids[s:s + a.context] for s in starts]).to(model.device)
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == 10 or step == a.steps - 1:
            print("step %d: mean loss %.4f" % (step + 1, sum(losses) / len(losses)), flush=True)
            losses = []
    model.save_pretrained(a.adapter)


if __name__ == "__main__":
    main()
