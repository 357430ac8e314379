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
from safetensors import safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

ROWS = 512  # of a weight's inputs, before they are multiplied
KEY = 64    # values by which a matrix is found again


def load(path, device):
    names = AutoConfig.from_pretrained(path).architectures or [""]
    kind = AutoModelForCausalLM if names[0].endswith("ForCausalLM") else AutoModel
    model = kind.from_pretrained(path).float().to(device).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # a product for each expert, not one for all
    return model


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


def key_of(weight):
    """Of a matrix's values: a module's name need not be the one in the checkpoint."""
    return tuple(weight.shape), tuple(weight.reshape(-1)[:KEY].float().tolist())


def sites_of(model, path, pattern):
    """{address of a matrix: names of the weights in it, without ".weight"}.

    The matrices of linear layers, and of experts that lie in one tensor [experts, out, in], where
    gate and up are the halves of one matrix."""
    names, all_names = {}, set()
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():
                piece = f.get_slice(name)
                if len(piece.get_shape()) == 2 and name.endswith(".weight"):
                    rows = piece[:max(1, -(-KEY // piece.get_shape()[1]))].float()
                    key = tuple(piece.get_shape()), tuple(rows.reshape(-1)[:KEY].tolist())
                    names.setdefault(key, name.removesuffix(".weight"))
                    all_names.add(name.removesuffix(".weight"))
    sites = {}

    def add(weight, own):
        half = weight[:len(weight) // 2], weight[len(weight) // 2:]
        if own in all_names:
            found = [own]
        elif key_of(weight) in names:
            found = [names[key_of(weight)]]
        else:
            found = [names[key_of(h)] for h in half if key_of(h) in names] or [own]
        found = [n for n in found if n and re.search(pattern, n)]
        if found:
            sites[weight.data_ptr()] = found

    for own, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            add(module.weight, own)
    for _, parameter in model.named_parameters():
        if parameter.ndim == 3:
            for matrix in parameter:
                add(matrix, None)
    return sites


class Watch(TorchFunctionMode):
    """Shows what every product with a matrix gets: see(names, x)."""

    def __init__(self, sites, see):
        super().__init__()
        self.sites, self.see = sites, see

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear and args[1].data_ptr() in self.sites:
            self.see(self.sites[args[1].data_ptr()], args[0])
        return func(*args, **(kwargs or {}))


class Capture:
    """Sums of x x^T for some weights while text passes."""

    def __init__(self, names):
        self.sums = dict.fromkeys(names)
        self.tokens = dict.fromkeys(names, 0)
        self.rows = {name: [] for name in names}

    def see(self, names, x):
        name = names[0]
        if name in self.sums:
            x = x.detach().reshape(-1, x.shape[-1]).float()
            self.tokens[name] += len(x)
            self.rows[name].append(x)
            if sum(map(len, self.rows[name])) >= ROWS:
                self.flush(name)

    def flush(self, name):
        """In float what is few, in double the sum of it."""
        x = torch.cat(self.rows[name])
        self.rows[name] = []
        if self.sums[name] is None:
            n = x.shape[1]
            self.sums[name] = torch.zeros(n, n, dtype=torch.float64, device=x.device)
        self.sums[name] += x.T @ x

    def finish(self):
        out = {}
        for name in self.sums:
            if self.rows[name]:
                self.flush(name)
            if self.tokens[name]:  # an expert may have seen nothing
                out[name + ".second_moment"] = (self.sums[name] / self.tokens[name]).cpu()
                out[name + ".tokens"] = torch.tensor([self.tokens[name]])
        return out


def shared_inputs(model, sites, ids):
    """{weight: the first one that saw the same tensor}, from one short pass."""
    seen, first, kept = {}, {}, []

    def see(names, x):
        kept.append(x)  # so that no later tensor takes its address
        first[names[0]] = seen.setdefault((x.data_ptr(), tuple(x.shape)), names[0])

    with Watch(sites, see):
        model(torch.tensor([ids], device=model.device))
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
    p.add_argument("--only", default=r"^(?!.*lm_head)", help="names of weights (regular expression)")
    a = p.parse_args()
    torch.set_grad_enabled(False)
    model, tokenizer = load(a.model, a.device), AutoTokenizer.from_pretrained(a.model)
    text = Path(a.text).read_text(encoding="utf-8")
    windows = list(windows_of(tokenizer, text, a.context, a.paragraphs, a.tokens))
    sites = sites_of(model, a.model, a.only)
    same = shared_inputs(model, sites, windows[0][:16])
    width = {}
    with Watch(sites, lambda names, x: width.update({names[0]: x.shape[-1]})):
        for window in windows:  # until every weight has been used, or none is left
            model(torch.tensor([window], device=a.device))
            if len(width) == len(sites):
                break
    passes, room = [], 0
    for name, n in width.items():
        if name not in same:
            if not passes or 8 * n * n > room:
                passes, room = passes + [[]], a.memory * 1e9
            passes[-1].append(name)
            room -= 8 * n * n
    a.out.mkdir(parents=True)
    weight_map, saw = {}, set()
    for i, names in enumerate(passes):
        capture = Capture(names)
        with Watch(sites, capture.see):
            for window in windows:
                model(torch.tensor([window], device=a.device))
        tensors = capture.finish()
        saw.update(names)
        if i == len(passes) - 1:
            for names in sites.values():  # the first one has them, or is the same as another
                first = same.get(names[0], names[0])
                for name in names:
                    if name != first and first in saw:
                        tensors[name + ".same_as"] = torch.tensor(list(first.encode()),
                                                                  dtype=torch.uint8)
        file = f"moments-{i + 1:05d}-of-{len(passes):05d}.safetensors"
        save_file(tensors, a.out / file)
        weight_map.update(dict.fromkeys(tensors, file))
        print(f"pass {i + 1} of {len(passes)}: {len(capture.sums)} matrices")
    index = {"metadata": {}, "weight_map": weight_map}
    (a.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    nothing = sum(len(names) for names in sites.values() if names[0] not in width)
    shared = sum(name.endswith(".same_as") for name in weight_map)
    print(f"{sum(map(len, windows))} tokens in {len(windows)} windows; {len(saw)} matrices, "
          f"{shared} weights share one; {nothing} saw nothing")


if __name__ == "__main__":
    main()
