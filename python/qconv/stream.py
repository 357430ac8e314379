"""Any transformers model with one layer in memory: its own forward runs once while layers are read, used and dropped.

    with Values(folder) as values:
        stream = Stream(build(folder), values, rows=4)
        body = stream.body({"input_ids": ids})
        for piece in body.pieces():
            logits = body.head(piece).logits

The model is made with its parameters on the meta device, so nothing is read for it. A layer's forward is overridden on
the instance: when the model calls it, it loads its weights through transformers' own conversion, runs the batch in
slices of `rows`, drops the weights and hands the joined outputs on. Between layers only hidden states exist. With
gradients a layer is one autograd function that keeps its inputs and computes the layer again, a slice at a time.

What the caller must see to: the number of rows in the batch is a prime that equals no integer of config.json and no
length of a window, because dimensions of the batch are recognised by their size; and full windows go without an
attention_mask, or masks of [rows, heads, T, T] are made for the whole batch.
"""
from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import (Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union)

from . import _stream_needs
from .errors import InputError, UsageError

_stream_needs.check()

import torch  # noqa: E402: it has been looked for, and is named where it is missing
from torch import nn  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_unflatten  # noqa: E402
from transformers import PretrainedConfig, PreTrainedModel  # noqa: E402

from ._loading import class_of, config_of  # noqa: E402
from ._stream_catch import Catch  # noqa: E402
from ._stream_layers import Call, Joined, Layer, find_layers, is_float, place  # noqa: E402
from ._stream_loader import Loader, Origin, Source  # noqa: E402

try:
    from transformers.initialization import no_init_weights  # noqa: E402
except ImportError:
    from transformers.modeling_utils import no_init_weights  # noqa: E402

__all__ = ["Body", "Call", "Catch", "Loader", "Origin", "Outlook", "Source", "Stream", "build"]

SENSES = ("pixel_values", "input_features", "input_values")  # arguments of forward that no text gives

Visit = Callable[[Call, List[slice], Dict[int, str]], Iterable[Any]]
"""visit(call, pieces, params) computes a layer in place of the plain loop `(call.run(piece) for piece in pieces)`.

`pieces` are slices of the layer's rows; visit may change the list in place before it yields. `params` has the name of
every parameter of the layer, loaded now, by id(), for Catch. It returns or yields what call.run returned, one for each
of `pieces` and in their order. A parameter that several layers share has another name in each of them (Loader.alias).
"""
Gradient = Callable[[str, Optional[int], torch.Tensor, torch.Tensor], None]
"""gradient(name, part, x, y) sees the products of a layer that is computed again for its gradients, as Catch's `after`:
y.register_hook(f) gives f the gradient at the outputs of the product."""


@dataclass(frozen=True)
class Outlook:
    """Bytes that a run takes at least. It holds one layer (two while it reads ahead), what stays, and a few states."""
    layer: int
    stays: int
    state: int


def build(folder: Union[str, Path], *, dtype: torch.dtype = torch.float32,
          trust_remote_code: bool = False) -> PreTrainedModel:
    """The model that config.json of `folder` describes: parameters on meta in `dtype`, buffers real, in eval mode.

    Its class is the one that config.json names under "architectures", or else the plain one of this model type. No weight
    file is looked at.

    Raises InputError where config.json is missing or transformers does not know its model type.
    """
    folder = Path(folder)
    config = config_of(folder, {"trust_remote_code": trust_remote_code})
    named = getattr(config, "auto_map", None) or {}
    remote = next((named[auto] for auto in sorted(named) if auto.startswith("AutoModelFor")), named.get("AutoModel"))
    if trust_remote_code and remote:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module
        kind = get_class_from_dynamic_module(remote, str(folder))
    else:
        kind = class_of(config, folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for part in [config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))]:
        if hasattr(part, "use_cache"):
            part.use_cache = False
    with no_init_weights(), parameters_on_meta():
        model = kind._from_config(config, dtype=dtype)
    model.tie_weights()                     # which no_init_weights leaves out
    if getattr(type(model), "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")       # one product an expert, which Catch sees
    return model.eval().requires_grad_(False)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters go to meta as they are registered; buffers (rotary tables, masks) are computed as always."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: Optional[nn.Parameter]) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = new = nn.Parameter(torch.empty_like(parameter, device="meta"),
                                                          requires_grad=parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
    setattr(nn.Module, "register_parameter", on_meta)
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)


class Reached(Exception):
    """The model's forward has come to its head."""


class Body:
    """What the layers made of a batch: everything the head takes, for all rows.

    It is what the model's base model returned. A model that calls no base model (T5, OPT) is cut at every module that
    owns a list of layers.
    """

    def __init__(self, stream: Stream, inputs: Dict[str, Any]) -> None:
        self.stream, self.model = stream, stream.model
        self.inputs = {key: value.to(stream.home) if isinstance(value, torch.Tensor) else value
                       for key, value in inputs.items()}
        self.batch = next((value.shape[0] for value in inputs.values() if isinstance(value, torch.Tensor)), 0)
        self.flat: Dict[str, Tuple[List[Any], Any]] = {}
        self.grads: Dict[Tuple[str, int], torch.Tensor] = {}
        self.leaves: Dict[str, List[Any]] = {}
        stream.batch = self.batch
        cuts: Dict[str, Callable[..., Any]] = {}
        base = self.model.base_model
        self.base: Optional[str] = None
        if base is not self.model:
            self.base = path = next(name for name, module in self.model.named_modules() if module is base)
            cuts[path] = self._keep(path, base.forward, True)
        for path in sorted({path.rpartition(".")[0].rpartition(".")[0] for path in stream.layers}, key=len):
            module = self.model.get_submodule(path)
            if path not in cuts and module is not self.model:
                cuts[path] = self._keep(path, module.forward, False)
        def stop(*_: Any, **__: Any) -> Any:
            raise Reached
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None
        if head is not None:
            path = next((name for name, module in self.model.named_modules() if module is head), "")
            if path and path not in cuts:
                cuts[path] = stop
        with instead(self.model, cuts):
            try:
                self.model(**self.inputs)
            except Reached:
                pass

    def _keep(self, path: str, own: Callable[..., Any], last: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            out = own(*args, **kwargs)
            if last:
                self.flat.clear()               # the base model's output holds all that its parts made
            self.flat[path] = tree_flatten(out)
            if last:
                raise Reached
            return out
        return forward

    def pieces(self) -> List[slice]:
        """Slices of the batch, `rows` of Stream each but for the last."""
        rows = self.stream.rows
        return [slice(i, min(i + rows, self.batch)) for i in range(0, self.batch, rows)]

    def head(self, piece: slice) -> Any:
        """The model's own output for the rows of `piece`: with logits, or last_hidden_state where it has no head.

        Tensors are on the first of the stream's devices.
        """
        device = self.stream.devices[0]
        self.stream.move(device)

        def cut(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return (value[piece] if value.dim() and value.shape[0] == self.batch else value).to(device)
        self.leaves = {path: [cut(leaf).detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor)
                              else leaf for leaf in leaves] for path, (leaves, _) in self.flat.items()}
        self.stream.batch = piece.stop - piece.start
        def given(path: str, *_: Any, **__: Any) -> Any:
            return tree_unflatten(self.leaves[path], self.flat[path][1])
        with instead(self.model, {path: partial(given, path) for path in self.flat}):
            return self.model(**{key: cut(value) for key, value in self.inputs.items()})

    def states(self, piece: slice) -> Any:
        """What the base model returned, for the rows of `piece`: with last_hidden_state, whatever head there is."""
        if self.base is None:
            return self.head(piece)
        leaves, tree = self.flat[self.base]
        return tree_unflatten([leaf[piece] if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == self.batch
                               else leaf for leaf in leaves], tree)

    def gather(self, piece: slice) -> None:
        """Adds the gradients that the last head(piece) left to those of the body."""
        for path, leaves in self.leaves.items():
            for i, leaf in enumerate(leaves):
                if not isinstance(leaf, torch.Tensor) or leaf.grad is None:
                    continue
                whole = self.flat[path][0][i]
                if (path, i) not in self.grads:
                    self.grads[path, i] = place(whole.shape, whole, self.stream.folder).zero_()
                grad = self.grads[path, i]
                part = grad[piece] if leaf.shape != whole.shape else grad
                part.add_(leaf.grad.to(part.device))
        self.leaves = {}


@contextmanager
def instead(model: nn.Module, forwards: Dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Modules by path compute with other functions than their own."""
    modules = {path: model.get_submodule(path) for path in forwards}
    for path, module in modules.items():
        module.__dict__["forward"] = forwards[path]
    try:
        yield
    finally:
        for module in modules.values():
            module.__dict__.pop("forward", None)


class Stream:
    """A model of build() whose layers are read from `source` when they are called.

    rows: rows of the batch that a layer computes at once. devices: layers are dealt to them in turn, and the next layer
    is read while one computes where it is on another device; what is no layer is on the first. visit and gradient: see
    Visit and Gradient. folder: hidden states lie in files there instead of memory (their names are gone at once; the
    files with the last tensor that uses them); the model's own computation between layers is then on the CPU.

    Attributes: `model`; `layers`, the module path of each layer in the order of modules; `names`, the state dict
    names of each layer; `loader`; `replace`, checkpoint tensors that layers are made of instead of the source's
    (Loader.load); `loads`, how many times a layer was read; `reads`, bytes of checkpoint tensors read.

    Raises InputError where no layers are found, or where tensors of `source` and weights of the model do not match.
    """

    def __init__(self, model: PreTrainedModel, source: Source, *, rows: int = 4,
                 devices: Sequence[Union[str, torch.device]] = ("cpu",), visit: Optional[Visit] = None,
                 gradient: Optional[Gradient] = None, folder: Union[None, str, Path] = None) -> None:
        if rows < 1 or not devices:
            raise UsageError("a stream needs one row or more in a slice, and a device")
        self.model, self.rows, self.visit, self.gradient, self.folder = model, rows, visit, gradient, folder
        self.devices = [torch.device(device) for device in devices]
        self.home = torch.device("cpu") if folder is not None else self.devices[0]
        self.layers = find_layers(model)
        if not self.layers:
            raise InputError("no layers were found in %s: no list of modules with matrices" % type(model).__name__)
        self.loader = Loader(model, source)
        self.replace: Dict[str, torch.Tensor] = {}
        state = list(self.loader.state)
        self.names = {path: [name for name in state if name.startswith(path + ".")] for path in self.layers}
        within = {name for names in self.names.values() for name in names}
        self.rest = [name for name in state if name not in within]
        self.device_of = {path: self.devices[i % len(self.devices)] for i, path in enumerate(self.layers)}
        self.batch = self.loads = 0
        self.forwards: Dict[str, Callable[..., Any]] = {}
        self._at: Optional[torch.device] = None             # where what is no layer is now; None: on meta
        self._ahead: Dict[str, Any] = {}
        self._reader = ThreadPoolExecutor(1)
        for path in self.layers:
            layer = model.get_submodule(path)
            self.forwards[path] = layer.forward
            layer.__dict__["forward"] = partial(self._forward, path, layer)

    @property
    def reads(self) -> int:
        """Bytes of checkpoint tensors read."""
        return self.loader.reads

    def outlook(self, batch: int, tokens: int) -> Outlook:
        """What a batch of [batch, tokens] will take, in bytes; nothing has to be read for it."""
        meta = self.loader.meta

        def size(names: Iterable[str]) -> int:
            parameters = {id(meta[name]): meta[name] for name in names if name in meta}
            return sum(one.numel() * one.element_size() for one in parameters.values())
        text = self.model.config.get_text_config()
        dtype = next(iter(meta.values())).dtype
        return Outlook(max(size(names) for names in self.names.values()), size(self.rest),
                       batch * tokens * text.hidden_size * dtype.itemsize)

    def body(self, inputs: Dict[str, Any]) -> Body:
        """Runs the model's forward once on the whole batch, up to what the head takes.

        inputs: arguments of forward by name; tensors have the batch in dimension 0, or (packed images) all of it.

        Raises InputError where forward fails and takes images or sounds that `inputs` lacks.
        """
        self.move(self.home)
        try:
            return Body(self, inputs)
        except (AttributeError, TypeError, ValueError) as error:
            lacking = [n for n in SENSES if n in inspect.signature(self.model.forward).parameters and n not in inputs]
            if not lacking:
                raise
            raise InputError("%s does not compute a text alone (%s: %s): --inputs FILE gives %s" % (
                type(self.model).__name__, type(error).__name__, error, " or ".join(lacking))) from error

    def backward(self, inputs: Dict[str, Any], each: Callable[[slice, Any], None]) -> None:
        """Runs body, then each(piece, output) for every slice, then the gradients through all layers, last to first.

        each() calls backward() on a loss of `output`. Gradients begin at the outputs of embeddings and at
        floating-point inputs. No parameter gets a gradient: Stream's `gradient` sees what flows.
        """
        def begin(_: nn.Module, __: Any, out: Any) -> Any:
            fresh = is_float(out) and torch.is_grad_enabled() and not out.requires_grad
            return out.requires_grad_().clone() if fresh else out
        hooks = [module.register_forward_hook(begin) for module in self.model.modules()
                 if isinstance(module, nn.Embedding)]
        try:
            with torch.enable_grad():
                body = self.body({key: value.detach().clone().requires_grad_() if is_float(value) else value
                                  for key, value in inputs.items()})
                for piece in body.pieces():
                    each(piece, body.head(piece))
                    body.gather(piece)
                self.move(self.home)
                self.batch = body.batch
                pairs = [(body.flat[path][0][i], grad) for (path, i), grad in body.grads.items()]
                if pairs:
                    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        finally:
            for hook in hooks:
                hook.remove()

    def close(self) -> None:
        """Gives the layers their own forward back, and puts all weights back on meta."""
        self._settle()
        self._reader.shutdown()
        for path in self.layers:
            self.model.get_submodule(path).__dict__.pop("forward", None)
        self.loader.drop(self.rest)
        self._at = None

    # ---- what is no layer ---------------------------------------------------------------------------------------

    def move(self, device: torch.device) -> None:
        """Puts all parameters and buffers outside layers on a device; reads them the first time."""
        if self._at is None:
            self.loader.load(self.rest)
            # What transformers looks for in no file (sinusoidal positions) is made as from_pretrained does.
            owners = {}
            for name in [name for name in self.rest if self.loader.get(name).is_meta]:
                self.loader.put(name, nn.Parameter(torch.empty_like(self.loader.meta[name], device="cpu"),
                                                   requires_grad=False))
                module = self.loader.owner(name)[0]
                owners[id(module)] = module
            with torch.no_grad():
                for module in owners.values():
                    self.model._init_weights(module)
        if self._at == device:
            return
        self._at, moved = device, {}
        layers = [self.model.get_submodule(path) for path in self.layers]
        within = {id(module) for layer in layers for module in layer.modules()}
        for module in self.model.modules():
            if id(module) in within:
                continue
            for held in (module._parameters, module._buffers):
                for name, value in held.items():
                    if value is not None and not value.is_meta and value.device != device:
                        if id(value) not in moved:
                            moved[id(value)] = (value, nn.Parameter(value.to(device), requires_grad=False)
                                                if isinstance(value, nn.Parameter) else value.to(device))
                        held[name] = moved[id(value)][1]

    # ---- a layer ------------------------------------------------------------------------------------------------

    def _forward(self, path: str, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = Call(self, path, layer, args, kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors):
            made: List[Any] = []
            tensors = iter(Layer.apply(call, made, *call.tensors))
            flat, tree = [next(tensors) if isinstance(value, torch.Tensor) else value for value in made[0]], made[1]
        else:
            flat, tree = self.compute(call)
        out, new = tree_unflatten(flat, tree)
        for key, values in new.items():
            call.sides[key].update(values)
        return out

    def compute(self, call: Call) -> Tuple[List[Any], Any]:
        """The outputs of a call for the whole batch, flat, and their tree."""
        joined, pieces = Joined(call), call.pieces()
        with torch.no_grad(), self.loaded(call.name, 1) as params:
            parts = self.visit(call, pieces, params) if self.visit else map(call.run, pieces)
            for i, (flat, tree) in enumerate(parts):
                joined.add(flat, tree, pieces[i])
        return joined.whole, joined.tree

    @contextmanager
    def loaded(self, path: str, step: int) -> Iterator[Dict[int, str]]:
        """The parameters of a layer, by id(), while it is in memory. step: 1 or -1, the direction to the next layer."""
        if path in self._ahead:
            self._ahead.pop(path).result()
        else:
            self._settle()
            self._read(path)
        self.loads += 1
        after = self.layers.index(path) + step
        if 0 <= after < len(self.layers) and self.device_of[self.layers[after]] != self.device_of[path]:
            self._settle()
            self._ahead[self.layers[after]] = self._reader.submit(self._read, self.layers[after])
        try:
            yield {id(self.loader.get(name)): name for name in self.names[path] if name in self.loader.meta}
        finally:
            self.loader.drop(self.names[path])

    def _read(self, path: str) -> None:
        device = self.device_of[path]
        with torch.no_grad():
            self.loader.load(self.names[path], self.replace, device)
            for module in self.model.get_submodule(path).modules():
                for name, value in module._buffers.items():
                    if value is not None and value.device != device:
                        module._buffers[name] = value.to(device)

    def _settle(self) -> None:
        """Drops a layer that was read ahead and not called."""
        for path in list(self._ahead):
            self._ahead.pop(path).result()
            self.loader.drop(self.names[path])
