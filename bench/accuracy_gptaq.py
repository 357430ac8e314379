"""What GPTAQ (Li et al. 2025, arXiv 2504.02692) makes of a model's weights, for accuracy_integers.py.

    accuracy_gptaq.py JOBS.json    needs torch, transformers, tqdm, accelerate

JOBS: {"source": the folder fake_quant of the authors' repository, "model": folder, "ids": windows of
tokens, one a line, "kept": ending of layers that are left as they are, or "", "jobs": [{"group":
columns, "mse": 0 or 1, "out": file.npz}]}. The solver and the quantizer are the authors' own, with
4 bits, symmetric, activations in order and groups static as in llm-compressor's GPTQ, and the
defaults of the rest (damping 0.01, alpha 0.25). The loop over layers is ours: theirs is written for
transformers 4.38 and a GPU. All is computed in float32.
"""
import json
import sys
import types

import numpy as np
import torch
from transformers import AutoModelForCausalLM

STEPS = (("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"), ("self_attn.o_proj",),
         ("mlp.up_proj", "mlp.gate_proj"), ("mlp.down_proj",))


class Taken(Exception):
    pass


def first_inputs(model, windows):
    """The first layer's inputs, and what else a layer is called with."""
    found = []

    def hook(_, args, more):
        found.append((args[0], more))
        raise Taken

    handle = model.model.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    for w in windows:
        try:
            model(w[None], use_cache=False)
        except Taken:
            pass
    handle.remove()
    return [x for x, _ in found], found[0][1]


def quantize(model, windows, gptaq, quant_utils, job, kept):
    inputs, more = first_inputs(model, windows)
    original = list(inputs)
    made = {}
    for i, layer in enumerate(model.model.layers):
        linear = {n: m for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
        seen = {n: [] for n in linear}
        handles = [m.register_forward_pre_hook(lambda _, args, n=n: seen[n].append(args[0]))
                   for n, m in linear.items()]
        original = [layer(x, **more) for x in original]
        for h in handles:
            h.remove()
        for names in STEPS:
            names = [n for n in names if not (kept and n.endswith(kept))]
            solvers = {n: gptaq.GPTAQ(linear[n]) for n in names}
            handles = []
            for n, s in solvers.items():
                s.fp_inp = [x.flatten(0, 1).t() for x in seen[n]]
                s.quantizer = quant_utils.WeightQuantizer()
                s.quantizer.configure(4, perchannel=True, sym=True, mse=bool(job["mse"]))
                handles.append(linear[n].register_forward_hook(
                    lambda _, args, out, s=s: s.add_batch(args[0], out)))
            for x in inputs:
                layer(x, **more)
            for h in handles:
                h.remove()
            for n, s in solvers.items():
                s.fasterquant(groupsize=job["group"], actorder=True, static_groups=True)
                made["model.layers.%d.%s.weight" % (i, n)] = linear[n].weight.data.numpy()
        inputs = [layer(x, **more) for x in inputs]
    return made


def main():
    with open(sys.argv[1]) as f:
        jobs = json.load(f)
    sys.path.insert(0, jobs["source"])
    sys.modules["fast_hadamard_transform"] = types.ModuleType("not needed without rotations")
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
    torch.set_grad_enabled(False)
    import gptaq_utils
    import quant_utils
    with open(jobs["ids"]) as f:
        windows = [torch.tensor([int(token) for token in line.split()]) for line in f]
    for job in jobs["jobs"]:
        model = AutoModelForCausalLM.from_pretrained(jobs["model"], dtype="float32").eval()
        np.savez(job["out"], **quantize(model, windows, gptaq_utils, quant_utils, job, jobs["kept"]))


main()
