"""Second moments of the gradients of linear layers' outputs by PyTorch: what convert/backward computes."""
import torch
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

MASK = 2**64 - 1
# qconv leaves these as they are.
ROUTERS = ("mlp.gate", "shared_expert_gate", "router")
RELEASED = {"mixtral": {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}}


def uniform(number):
    """As qc_gradient_uniform (quant/gradient.h)."""
    z = (number + 1) * 0x9e3779b97f4a7c15 & MASK
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & MASK
    z = (z ^ z >> 27) * 0x94d049bb133111eb & MASK
    return ((z ^ z >> 31) >> 11) * 2.0**-53


class Experts(TorchFunctionMode):
    """Keeps the outputs of the products with experts that lie in one tensor, by the names that logits_tool gives
    them: gpt-oss has gate and up in one matrix, others have two that lie one below the other."""

    def __init__(self, model, outputs):
        super().__init__()
        self.outputs, self.released = outputs, RELEASED.get(model.config.model_type, {})
        self.own = {matrix.data_ptr(): (name, i) for name, p in model.named_parameters() if p.ndim == 3
                    for i, matrix in enumerate(p)}

    def named(self, name):
        for transformers, file in self.released.items():
            name = name.replace(transformers, file)
        return name

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        product = getattr(func, "__name__", "")
        if product not in ("linear", "matmul", "__matmul__") or args[1].data_ptr() not in self.own:
            return y
        name, i = self.own[args[1].data_ptr()]
        y.retain_grad()
        if product != "linear":
            self.outputs[f"{name}[{i}]"] = (y, slice(None))
        elif name.endswith("gate_up_proj"):
            half = y.shape[-1] // 2
            for part, at in (("gate_proj", slice(half)), ("up_proj", slice(half, None))):
                self.outputs[self.named(f"{name.removesuffix('gate_up_proj')}{i}.{part}.weight")] = (y, at)
        else:
            self.outputs[self.named(f"{name.removesuffix('down_proj')}{i}.down_proj.weight")] = (y, slice(None))
        return y


def moments(model, ids):
    """{name of a weight: mean over its tokens of g g^T}, in double. g is the gradient of a token's cross entropy with a
    label that is drawn from the model's own distribution."""
    outputs, sums, first = {}, {}, 0

    def keep(name):
        def hook(_module, _inputs, output):
            output.retain_grad()
            outputs[name] = (output, slice(None))
        return hook

    model.requires_grad_(True)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # a product for each expert, not one for all
    for name, module in model.named_modules():
        if (isinstance(module, (torch.nn.Linear, Conv1D)) and "head" not in name and "embed_out" not in name and
                not name.endswith(ROUTERS)):
            module.register_forward_hook(keep(name + ".weight"))
    for row in ids:
        with Experts(model, outputs):
            logits = model(input_ids=torch.tensor([row])).logits[0]
        p = torch.softmax(logits.detach().double(), -1)
        at = torch.tensor([uniform(first + i) for i in range(len(row))], dtype=torch.float64)
        labels = (p.cumsum(-1) <= at[:, None]).sum(-1)
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        first += len(row)
        for name, (output, part) in outputs.items():
            g = output.grad.reshape(-1, output.shape[-1])[:, part].double()
            total, tokens = sums.get(name, (0, 0))
            sums[name] = (total + g.T @ g, tokens + len(g))
        outputs.clear()
    return {name: total / tokens for name, (total, tokens) in sums.items()}
