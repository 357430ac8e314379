"""How far a sentence model's embeddings move. For accuracy_calibrated.py.

    accuracy_embeddings.py MODEL SENTENCES WEIGHTS.npz...    needs torch, transformers

Prints a list, for each file of weights: the mean over sentences of one minus the cosine between
embeddings (mean over tokens, as sentence-transformers has it) and its standard error.
"""
import json
import sys

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer


def main():
    folder, sentences, *files = sys.argv[1:]
    torch.set_grad_enabled(False)
    model = AutoModel.from_pretrained(folder).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with open(sentences, encoding="utf-8") as f:
        batch = tokenizer(f.read().splitlines(), padding=True, return_tensors="pt")

    def embed():
        y = model(**batch).last_hidden_state.double()
        mask = batch["attention_mask"][..., None].double()
        return torch.nn.functional.normalize((y * mask).sum(1) / mask.sum(1), dim=1)

    original, out = embed(), []
    parameters = dict(model.named_parameters())
    for file in files:
        for name, w in np.load(file).items():
            parameters[name].copy_(torch.from_numpy(w))
        d = 1 - (embed() * original).sum(1)
        out.append((float(d.mean()), float(d.std() / len(d) ** 0.5)))
    print(json.dumps(out))


main()
