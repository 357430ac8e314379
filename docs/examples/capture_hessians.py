#!/usr/bin/env python3
"""Captures second moments of every linear layer's inputs, for `qconv --calibrate --hessians`.

    capture_hessians.py MODEL TEXT OUT [--context N] [--paragraphs] [--tokens N] [--memory GB]
                        [--device cpu] [--only REGEX]

MODEL: a folder that transformers can load; TEXT: UTF-8. OUT becomes a folder in the format that
docs/calibration.md describes. The text is cut into windows of --context tokens, or with
--paragraphs into its paragraphs, the longer ones cut; a window passes alone, so that there is no
padding to be counted. The matrices of a pass take --memory at most: where all of them take more,
the text passes several times and each time a part of the layers is captured. An expert of a
mixture counts the tokens that were sent to it.
"""
import argparse
import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

ROWS = 512  # of a module's inputs, before they are multiplied


def load(path, device):
    names = AutoConfig.from_pretrained(path).architectures or [""]
    kind = AutoModelForCausalLM if names[0].endswith("ForCausalLM") else AutoModel
    return kind.from_pretrained(path).float().to(device).eval()


def windows_of(tokenizer, text, context, paragraphs, most):
    """Lists of ids; an id that the tokenizer puts in front or behind is there in every window."""
    bare = tokenizer("the", add_special_tokens=False)["input_ids"]
    whole = tokenizer("the")["input_ids"]
    at = next(i for i in range(len(whole)) if whole[i:i + len(bare)] == bare)
    front, back = whole[:at], whole[at + len(bare):]
    texts = [p for p in re.split(r"\n\s*\n", text) if p.strip()] if paragraphs else [text]
    count = 0
    for t in texts:
        ids = tokenizer(t, add_special_tokens=False, verbose=False)["input_ids"]
        room = context - len(front) - len(back)
        for at in range(0, len(ids), room):
            window = front + ids[at:at + room] + back
            if most and count + len(window) > most:
                return
            count += len(window)
            yield window


class Capture:
    """Sums of x x^T of some modules while text passes."""

    def __init__(self, modules):
        self.sums = {name: None for name in modules}
        self.tokens = dict.fromkeys(modules, 0)
        self.rows = {name: [] for name in modules}
        self.hooks = [m.register_forward_pre_hook(self.hook(n)) for n, m in modules.items()]

    def hook(self, name):
        def add(module, inputs):
            x = inputs[0].detach().reshape(-1, module.in_features).float()
            self.tokens[name] += len(x)
            self.rows[name].append(x)
            if sum(map(len, self.rows[name])) >= ROWS:
                self.flush(name)
        return add

    def flush(self, name):
        """In float what is few, in double the sum of it."""
        x = torch.cat(self.rows[name])
        self.rows[name] = []
        if self.sums[name] is None:
            n = x.shape[1]
            self.sums[name] = torch.zeros(n, n, dtype=torch.float64, device=x.device)
        self.sums[name] += x.T @ x

    def finish(self):
        for h in self.hooks:
            h.remove()
        out = {}
        for name in self.sums:
            if self.rows[name]:
                self.flush(name)
            if self.tokens[name]:  # an expert may have seen nothing
                out[name + ".second_moment"] = (self.sums[name] / self.tokens[name]).cpu()
                out[name + ".tokens"] = torch.tensor([self.tokens[name]])
        return out


def shared_inputs(model, modules, ids):
    """{module: the first one that saw the same tensor}, from one short pass."""
    seen, first, kept, hooks = {}, {}, [], []

    def hook(name):
        def look(module, inputs):
            x = inputs[0]
            kept.append(x)  # so that no later tensor takes its address
            first[name] = seen.setdefault((x.data_ptr(), tuple(x.shape)), name)
        return look

    for name, m in modules.items():
        hooks.append(m.register_forward_pre_hook(hook(name)))
    model(torch.tensor([ids], device=model.device))
    for h in hooks:
        h.remove()
    return {n: f for n, f in first.items() if n != f}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model")
    p.add_argument("text")
    p.add_argument("out", type=Path)
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--paragraphs", action="store_true")
    p.add_argument("--tokens", type=int, default=131072, help="0: the whole text")
    p.add_argument("--memory", type=float, default=8, help="GB of a pass's matrices")
    p.add_argument("--device", default="cpu")
    p.add_argument("--only", default=r"^(?!.*lm_head)", help="names of modules (regular expression)")
    a = p.parse_args()
    torch.set_grad_enabled(False)
    model, tokenizer = load(a.model, a.device), AutoTokenizer.from_pretrained(a.model)
    text = Path(a.text).read_text(encoding="utf-8")
    windows = list(windows_of(tokenizer, text, a.context, a.paragraphs, a.tokens))
    modules = {n: m for n, m in model.named_modules()
               if isinstance(m, torch.nn.Linear) and re.search(a.only, n)}
    same = shared_inputs(model, modules, windows[0][:16])
    passes, room = [], 0
    for name, m in modules.items():
        if name not in same:
            need = 8 * m.in_features ** 2
            if not passes or need > room:
                passes, room = passes + [[]], a.memory * 1e9
            passes[-1].append(name)
            room -= need
    a.out.mkdir(parents=True)
    weight_map, saw = {}, set()
    for i, names in enumerate(passes):
        capture = Capture({n: modules[n] for n in names})
        for window in windows:
            model(torch.tensor([window], device=a.device))
        tensors = capture.finish()
        saw.update(n for n in names if capture.tokens[n])
        if i == len(passes) - 1:
            tensors.update({n + ".same_as": torch.tensor(list(f.encode()), dtype=torch.uint8)
                            for n, f in same.items() if f in saw})
        file = f"moments-{i + 1:05d}-of-{len(passes):05d}.safetensors"
        save_file(tensors, a.out / file)
        weight_map.update(dict.fromkeys(tensors, file))
        print(f"pass {i + 1} of {len(passes)}: {len(names)} matrices")
    index = {"metadata": {}, "weight_map": weight_map}
    (a.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    print(f"{sum(map(len, windows))} tokens in {len(windows)} windows; {len(saw)} matrices, "
          f"{len(same)} modules share one; {len(modules) - len(saw) - len(same)} saw nothing")


if __name__ == "__main__":
    main()
