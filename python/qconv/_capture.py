"""The work of qconv.capture."""
import json
import logging
import re
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoTokenizer

from . import errors

LOG = logging.getLogger("qconv")
ROWS = 512  # of inputs or gradients, before they are multiplied
KEY = 64    # values by which a matrix is found again
KEPT = 8    # the last inputs, to find out which weights share one

# Where a product has its input and its weight. Conv1D calls addmm with a weight that lies [in, out].
PRODUCTS = {torch.nn.functional.linear: (0, 1), torch.addmm: (1, 2)}


# ---- the text -----------------------------------------------------------------------------------


def windows_of(tokenizer, path, context, paragraphs):
    """Lists of ids; an id that the tokenizer puts in front or behind is there in every window."""
    text = Path(path).read_text(encoding="utf-8")
    if path.endswith(".ids"):
        lines = [[int(i) for i in line.split()] for line in text.splitlines() if line.strip()]
        return [ids[at:at + context] for ids in lines for at in range(0, len(ids), context)]
    bare = tokenizer("the", add_special_tokens=False)["input_ids"]
    whole = tokenizer("the")["input_ids"]
    at = next(i for i in range(len(whole)) if whole[i:i + len(bare)] == bare)
    front, back = whole[:at], whole[at + len(bare):]
    room, out = context - len(front) - len(back), []
    if room < 1:
        raise errors.UsageError(f"context is {context}, and the tokenizer adds {context - room} tokens to a window")
    for t in [p for p in re.split(r"\n\s*\n", text) if p.strip()] if paragraphs else [text]:
        ids = tokenizer(t, add_special_tokens=False, verbose=False)["input_ids"]
        out += [front + ids[at:at + room] + back for at in range(0, len(ids), room)]
    return out


def spread(windows, most):
    """Windows with `most` tokens at the most, spread evenly over all of them; 0: all."""
    total, seen, taken, out = sum(map(len, windows)), 0, 0, []
    for w in windows:
        seen += len(w)
        if not most or (taken + len(w)) * total <= most * seen or total <= most:
            taken += len(w)
            out.append(w)
    return out


# ---- the weights --------------------------------------------------------------------------------


@dataclass
class Site:
    """A matrix of the model. The checkpoint has it as one weight, or as several that lie one below the other."""
    parts: List[tuple]  # (name without ".weight", first output, end)
    module: Optional[str] = None
    inputs: int = 0     # 0: no token has reached it
    same: Optional["Site"] = None  # has the same inputs

    @property
    def name(self):
        return self.parts[0][0]


def key_of(weight):
    """Of a matrix's values: a module's name need not be the one in the checkpoint."""
    return tuple(weight.shape), tuple(weight.reshape(-1)[:KEY].float().tolist())


def names_of(folder):
    """({key of a matrix's values: its name}, all names) of a checkpoint, without ".weight"."""
    names, every = {}, set()
    for file in sorted(Path(folder).glob("*.safetensors")) if folder else ():
        with safe_open(file, "pt") as f:
            for name in f.keys():
                piece = f.get_slice(name)
                shape = tuple(piece.get_shape())
                if len(shape) == 2 and name.endswith(".weight"):
                    rows = piece[:max(1, -(-KEY // shape[1]))].float()
                    every.add(name.removesuffix(".weight"))
                    names.setdefault((shape, tuple(rows.reshape(-1)[:KEY].tolist())), name.removesuffix(".weight"))
    return names, every


def sites_of(model, folder, only):
    """{address of a matrix: Site}: of linear layers, and of experts that lie in one tensor [experts, out, in], where
    gate and up are the halves of one matrix."""
    from transformers.pytorch_utils import Conv1D
    names, every = names_of(folder)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    sites = {}

    def add(weight, own, module=None, turned=False):
        rows = weight.shape[1 if turned else 0]
        found = [(own, 0, rows)]
        if own not in every and key_of(weight) in names:
            found = [(names[key_of(weight)], 0, rows)]
        elif own not in every and not turned:
            halves = [(names.get(key_of(h)), i * (rows // 2), (i + 1) * (rows // 2))
                      for i, h in enumerate(weight.split(max(1, rows // 2))[:2])]
            found = halves if rows % 2 == 0 and all(h[0] for h in halves) else found
        found = [p for p in found if p[0] and re.search(only or "", p[0])]
        if found:
            sites[weight.data_ptr()] = Site(found, module)

    for own, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and (only or module is not head):
            add(module.weight, own, own, isinstance(module, Conv1D))
    for _, parameter in model.named_parameters():
        if parameter.ndim == 3:
            for matrix in parameter:
                add(matrix, None)
    return sites


# ---- products while text passes -----------------------------------------------------------------


class Watch(TorchFunctionMode):
    """Shows each product of a site: see(site, inputs). With grad(site) there is a function that gets the gradients of
    its outputs."""

    def __init__(self, sites, see, grad=None):
        super().__init__()
        self.sites, self.see, self.grad, self.again = sites, see, grad, False

    @contextmanager
    def repeated(self):
        """A layer is computed once more for its gradients: what it is given has been seen."""
        self.again = True
        try:
            yield
        finally:
            self.again = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **kwargs)
        x, weight = (args[i] for i in PRODUCTS[func])
        site = self.sites.get(weight.data_ptr())
        y = func(*args, **kwargs)
        if site is None:
            return y
        if not self.again:
            self.see(site, x.detach())
        take = self.grad(site) if self.grad and torch.is_grad_enabled() else None
        if take:
            y = y if y.requires_grad else y.requires_grad_() + 0  # what follows may change it in its place
            if not self.again:
                y.register_hook(take)
        return y


@contextmanager
def repeating(model, watch):
    """Layers keep only their inputs for the pass backward, and are computed again in it."""
    lists, layers = [], []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(n + ".") for n in lists):
            lists.append(name)
            layers += module

    def wrapped(forward):
        def run(*args, **kwargs):
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if args and not args[0].requires_grad:
                args = (args[0].detach().requires_grad_(), *args[1:])
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False,
                              context_fn=lambda: (nullcontext(), watch.repeated()), **kwargs)
        return run

    try:
        for layer in layers:
            layer.forward = wrapped(layer.forward)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def backward(output, seed):
    """Gradients of the loss with labels that are drawn from the model's predictions; of an encoder without a head, of
    its normalized embedding times a random vector."""
    logits = output.get("logits")
    if logits is None and output.get("last_hidden_state") is None:
        raise errors.InputError("the model gives neither logits nor last_hidden_state, so its outputs have no gradients; "
                                "sided=\"one\" takes none")
    if logits is None:
        embedding = torch.nn.functional.normalize(output["last_hidden_state"].float().mean(1), dim=-1)
        generator = torch.Generator(embedding.device).manual_seed(seed)
        embedding.backward(torch.randn(embedding.shape, generator=generator, device=embedding.device))
        return
    generator = torch.Generator(logits.device).manual_seed(seed)
    p = torch.softmax(logits.detach().float(), -1)
    labels = torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator).reshape(*p.shape[:-1], 1)
    p.scatter_add_(-1, labels, torch.full_like(labels, -1, dtype=p.dtype))
    logits.backward(p.to(logits.dtype))


# ---- sums ---------------------------------------------------------------------------------------


@dataclass
class Sum:
    """The sum of a b^T over tokens, in blocks on the diagonal: in float for a few, in double over these."""
    block: int
    total: Optional[torch.Tensor] = None
    tokens: int = 0
    rows: list = field(default_factory=list)

    def add(self, a, b=None):
        a = a.reshape(-1, a.shape[-1]).float()
        self.tokens += len(a)
        self.rows.append((a, a if b is None else b.reshape(-1, b.shape[-1]).float()))
        if sum(len(r) for r, _ in self.rows) >= ROWS:
            self.flush()

    def blocks(self, rows):
        x = torch.cat(rows)
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % self.block))
        return x.reshape(len(x), -1, self.block).transpose(0, 1)

    def flush(self):
        a, b = zip(*self.rows)
        self.rows = []
        a, b = self.blocks(a), self.blocks(b) if any(p is not q for p, q in zip(a, b)) else None
        add = a.transpose(1, 2) @ (a if b is None else b)
        self.total = add.double() if self.total is None else self.total.add_(add)

    def mean(self):
        if self.rows:
            self.flush()
        return (self.total / self.tokens).cpu()


class Sums:
    """All sums of one pass."""

    def __init__(self, sites, block):
        self.inputs = {id(s): Sum(s.inputs) for s in sites}
        self.cross = {id(s): Sum(s.inputs) for s in sites}
        self.outputs, self.block = {}, block
        self.originals = {}  # inputs of a window in the original model, which wait for those behind quantized layers
        self.parts = {id(s): s.parts for s in sites}

    def see(self, site, x):
        if id(site) in self.inputs:
            self.inputs[id(site)].add(x)

    def keep(self, site, x):
        if id(site) in self.inputs:
            self.originals[id(site)] = x

    def see_quantized(self, site, x):
        if id(site) in self.inputs:
            z = self.originals.pop(id(site))
            self.inputs[id(site)].add(x)
            self.cross[id(site)].add(x, z)

    def grad(self, site):
        if id(site) not in self.parts:
            return None

        def take(g):
            for name, first, end in self.parts[id(site)]:
                size = min(self.block or end - first, end - first)
                self.outputs.setdefault(name, Sum(size)).add(g[..., first:end])
        return take

    def tensors(self, sites):
        out = {}
        for s in sites:
            h, c = self.inputs.get(id(s)), self.cross.get(id(s))
            if h and h.tokens:  # an expert may have seen nothing
                out[s.name + ".second_moment"] = h.mean()[0]
                out[s.name + ".tokens"] = torch.tensor([h.tokens])
                if c.tokens:
                    out[s.name + ".cross_moment"] = c.mean()[0]
        for name, g in self.outputs.items():
            out[name + ".output_moment"] = g.mean().float()
            out[name + ".output_tokens"] = torch.tensor([g.tokens])
        return out


# ---- passes -------------------------------------------------------------------------------------


def survey(run, sites, windows):
    """Finds the inputs of each site, and which sites share them. Windows pass until every site has been used."""
    last = deque(maxlen=KEPT)

    def see(site, x):
        shared = next((s for s, seen in last if seen.data_ptr() == x.data_ptr() and seen.shape == x.shape), None)
        if not site.inputs:
            site.inputs, site.same = x.shape[-1], shared
        elif site.same is not shared:
            site.same = None
        if shared is None:
            last.append((site, x))

    with Watch(sites, see), torch.no_grad():
        for window in windows:
            run(window)
            last.clear()
            if all(s.inputs for s in sites.values()):
                break


def passes_of(sites, options, two, cross):
    """Lists of sites whose sums fit the memory together. A site goes with the one that it shares inputs with."""
    out, room = [], 0
    for s in sites.values():
        if not s.inputs:
            continue
        need = 0 if s.same else 8 * s.inputs ** 2 * (2 if cross else 1)
        for _, first, end in s.parts if two else ():
            size = min(options["block"] or end - first, end - first)
            need += 8 * -(-(end - first) // size) * size ** 2
        if not out or need > room:
            out.append([])
            room = options["memory"] * 1e9
        out[-1].append(s)
        room -= need
    return out


def one_pass(run, run_quantized, sites, mine, windows, with_gradients, options):
    sums = Sums([s for s in mine if not s.same], options["block"])
    sums.parts = {id(s): s.parts for s in mine}
    watch = Watch(sites, sums.keep if run_quantized else sums.see, sums.grad)
    for i, window in enumerate(windows):
        gradients = id(window) in with_gradients
        with watch, repeating(run.model, watch), torch.set_grad_enabled(gradients):
            output = run(window)
            if gradients:
                backward(output, options["seed"] * 1000003 + i)
            del output
        if run_quantized:
            with torch.no_grad():
                run_quantized(window, sums.see_quantized)
    return sums


class Run:
    """Lets a window pass through a model."""

    def __init__(self, model):
        self.model = model
        self.device = model.get_input_embeddings().weight.device

    def __call__(self, window):
        return self.model(torch.tensor([window], device=self.device))


class RunQuantized(Run):
    """The same through an output of qconv, whose modules have the same names."""

    def __init__(self, folder, sites, device):
        from .load import load
        super().__init__(load(folder, device_map=str(device), dtype=torch.float32))
        self.see = None
        self.model.config.use_cache = False
        modules = dict(self.model.named_modules())
        for site in sites.values():
            if site.module is None:
                raise errors.InputError(f"the experts of '{site.name}' lie in one tensor, and moments behind quantized "
                                        "layers are captured of modules only; leave out quantized, or use only")
            modules[site.module].register_forward_pre_hook(self.hook(site))

    def hook(self, site):
        def pre(_, args):
            self.see(site, args[0].detach())
        return pre

    def __call__(self, window, see):
        self.see = see
        return super().__call__(window)


def loaded(folder, device):
    names = AutoConfig.from_pretrained(folder).architectures or [""]
    kind = getattr(transformers, names[0], AutoModel)
    return kind.from_pretrained(folder).float().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


@contextmanager
def prepared(model):
    """Nothing of a model that was given stays changed."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    training, cache = model.training, getattr(model.config, "use_cache", None)
    experts = getattr(model.config, "_experts_implementation", None)
    try:
        model.eval()
        model.requires_grad_(False)
        model.config.use_cache = False
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # a product for each expert, not one for all
        yield
    finally:
        model.train(training)
        model.config.use_cache = cache
        if hasattr(model, "set_experts_implementation") and experts:
            model.set_experts_implementation(experts)
        for p in wanted:
            p.requires_grad_(True)


def write(out, file, tensors):
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / file)
    return dict.fromkeys(tensors, file)


def capture_all(run, folder, windows, out, quantized, options):
    two = options["two"]
    sites = sites_of(run.model, folder, options["only"])
    if not sites:
        raise errors.InputError("the model has no linear layer that is asked for")
    survey(run, sites, windows)
    run_quantized = RunQuantized(quantized, sites, run.device) if quantized else None
    gradients = {id(w) for w in spread(windows, options["output_tokens"])} if two else set()
    passes = passes_of(sites, options, two, bool(quantized))
    weight_map: Dict[str, str] = {}
    for i, mine in enumerate(passes):
        sums = one_pass(run, run_quantized, sites, mine, windows, gradients, options)
        tensors = sums.tensors(mine)
        for s in mine:  # of several parts the first one has the moments
            first = s.same or s
            for name, _, _ in s.parts:
                if name != first.name and first.name + ".second_moment" in {**weight_map, **tensors}:
                    tensors[name + ".same_as"] = torch.tensor(list(first.name.encode()), dtype=torch.uint8)
        weight_map |= write(out, f"moments-{i + 1:05d}-of-{len(passes):05d}.safetensors", tensors)
        LOG.info("pass %d of %d: %d matrices", i + 1, len(passes), len(mine))
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    shared = sum(name.endswith(".same_as") for name in weight_map)
    moments = sum(name.endswith(".second_moment") for name in weight_map)
    return (sum(map(len, windows)), sum(len(w) for w in windows if id(w) in gradients), len(windows), moments + shared,
            shared, sum(len(s.parts) for s in sites.values()) - moments - shared)


def captured(model, text, out, tokenizer, quantized, **options):
    folder = model
    if isinstance(model, torch.nn.Module):
        folder = getattr(model.config, "_name_or_path", "") or ""
    elif not Path(model).is_dir():
        raise errors.InputError(f"{model}: there is no such folder")
    folder = folder if Path(folder).is_dir() and str(folder) else None
    if isinstance(tokenizer, (str, Path)) or tokenizer is None and not text.endswith(".ids"):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer or folder)
    windows = spread(windows_of(tokenizer, text, options["context"], options["paragraphs"]), options["tokens"])
    if not windows:
        raise errors.InputError(f"{text}: expected at least one window of text, found none")
    run = Run(model if isinstance(model, torch.nn.Module) else loaded(model, options["device"]))
    Path(out).mkdir(parents=True, exist_ok=True)
    with prepared(run.model):
        return capture_all(run, folder, windows, Path(out), quantized, options)
