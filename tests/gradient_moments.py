"""Second moments of the gradients of linear layers' outputs by PyTorch: what convert/backward computes."""
import torch
from transformers.pytorch_utils import Conv1D

MASK = 2**64 - 1


def uniform(number):
    """As qc_gradient_uniform (quant/gradient.h)."""
    z = (number + 1) * 0x9e3779b97f4a7c15 & MASK
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & MASK
    z = (z ^ z >> 27) * 0x94d049bb133111eb & MASK
    return ((z ^ z >> 31) >> 11) * 2.0**-53


def moments(model, ids):
    """{name of a weight: mean over tokens of g g^T}, in double. g is the gradient of a token's cross entropy with a
    label that is drawn from the model's own distribution."""
    outputs, sums, first = {}, {}, 0

    def keep(name):
        def hook(_module, _inputs, output):
            output.retain_grad()
            outputs[name] = output
        return hook

    model.requires_grad_(True)
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and "head" not in name and "embed_out" not in name:
            module.register_forward_hook(keep(name + ".weight"))
    for row in ids:
        logits = model(input_ids=torch.tensor([row])).logits[0]
        p = torch.softmax(logits.detach().double(), -1)
        at = torch.tensor([uniform(first + i) for i in range(len(row))], dtype=torch.float64)
        labels = (p.cumsum(-1) <= at[:, None]).sum(-1)
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        first += len(row)
        for name, output in outputs.items():
            g = output.grad.reshape(-1, output.shape[-1]).double()
            sums[name] = sums.get(name, 0) + g.T @ g
        outputs.clear()
    return {name: total / first for name, total in sums.items()}
