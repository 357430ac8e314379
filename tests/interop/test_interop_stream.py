"""Models computed with one layer in memory, beside transformers' own computation of the whole model.

usage: test_interop_stream.py            the tests
       test_interop_stream.py NAME...    one line for each model type
"""
import gc
import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

import tiny_models
import torch
import transformers
from tiny_models import MAJOR, STREAMED, Files, inputs, save

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from qconv import errors, stream  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
warnings.simplefilter("ignore")
torch.set_num_threads(1)

SKIPPED = ("past_key_values", "loss", "cache_params", "past_buckets_states")


def floats(out):
    """Tensors of floating-point numbers in a model's output."""
    if isinstance(out, torch.Tensor):
        return [out.detach()] if out.is_floating_point() else []
    if hasattr(out, "items"):
        return [tensor for key, value in out.items() if key not in SKIPPED for tensor in floats(value)]
    return [tensor for value in out for tensor in floats(value)] if isinstance(out, (list, tuple)) else []


def apart(one, other):
    """The largest difference beside the largest number, for tensors in pairs."""
    if [t.shape for t in one] != [t.shape for t in other] or not one:
        raise AssertionError(f"{[tuple(t.shape) for t in one]} beside {[tuple(t.shape) for t in other]}")
    return max(((a - b).abs().max() / (b.abs().max() + 1e-9)).item() for a, b in zip(one, other))


def whole(kind, folder):
    """The model as transformers loads it."""
    model = kind.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    if getattr(type(model), "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")
    for part in [model.config, *vars(model.config).values()]:
        if isinstance(part, transformers.PretrainedConfig) and hasattr(part, "use_cache"):
            part.use_cache = False
    return model


def pieces_of(body):
    """Outputs of the head, put together."""
    parts = [floats(body.head(piece)) for piece in body.pieces()]
    joined = []
    for values in zip(*parts):
        same = all(v.shape == values[0].shape and torch.equal(v, values[0]) for v in values)
        joined.append(values[0] if same and values[0].shape[0] != body.batch else torch.cat(values))
    return joined


class Moments:
    """Second moments of the gradients at the outputs of products, by weight."""

    def __init__(self):
        self.sums = {}

    def see(self, name, part, x, y):
        if y.requires_grad:
            y.register_hook(lambda grad: self.add((name, part), grad))

    def add(self, key, grad):
        rows = grad.detach().reshape(-1, grad.shape[-1]).double()
        self.sums[key] = self.sums.get(key, 0) + rows.T @ rows


def loss_of(out, labels):
    """A loss that touches all numbers of an output."""
    return sum((t.float() * labels[: t.shape[0]].reshape([-1] + [1] * (t.dim() - 1))).sum()
               for t in [out["logits"] if "logits" in out else out[0]])


def moments_apart(kind, folder, given, made):
    """The largest difference between gradient moments of the stream `made` and of the whole model, and their number."""
    labels = torch.linspace(0.5, 1.5, tiny_models.ROWS)
    model, theirs = whole(kind, folder), Moments()
    within = {id(p): n for n, p in model.named_parameters() if any(n.startswith(path + ".") for path in made.layers)}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(lambda m, a, out: out.requires_grad_().clone() if out.is_leaf else out)
    with stream.Catch(within, after=theirs.see):
        out = model(**{k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in given.items()})
        loss_of(out, labels).backward()
    mine = Moments()
    made.gradient = mine.see
    made.backward(given, lambda piece, out: loss_of(out, labels[piece]).backward())
    if not theirs.sums or set(mine.sums) != set(theirs.sums):
        raise AssertionError(f"products {sorted(map(str, set(mine.sums) ^ set(theirs.sums)))[:4]} of one only")
    top = max(v.abs().max().item() for v in theirs.sums.values())
    return max(((mine.sums[k] - v).abs().max() / max(v.abs().max().item(), 1e-6 * top)).item()
               for k, v in theirs.sums.items()), len(theirs.sums)


def compare(name, gradient=True):
    """(relative difference of outputs, of gradient moments or None, number of products)"""
    with tempfile.TemporaryDirectory() as folder:
        kind = save(name, folder)
        model = whole(kind, folder)
        given = inputs(model.config)
        with torch.no_grad():
            want = floats(model(**given))
        del model
        made = stream.Stream(stream.build(folder), Files(folder), rows=2)
        with torch.no_grad():
            got = pieces_of(made.body(given))
        left = [n for names in made.names.values() for n in names
                if n in made.loader.meta and not made.loader.get(n).is_meta]
        if left:
            raise AssertionError(f"still in memory: {left[:3]}")
        distance = apart(got, want)
        moments = moments_apart(kind, folder, given, made) if gradient else (None, 0)
        made.close()
    return (distance, *moments)


def show(names):
    for name in names:
        try:
            print(name, *compare(name), flush=True)
        except BaseException as e:
            print(name, type(e).__name__, str(e)[:250].replace("\n", " "), flush=True)
            if os.environ.get("TRACE"):
                raise
        gc.collect()


if __name__ == "__main__":
    if sys.argv[1:]:
        show(list(STREAMED) if sys.argv[1] == "--all" else sys.argv[1:])
    else:
        unittest.main()
