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

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Protocol, Sequence, Tuple, Union

from . import _stream_needs

_stream_needs.check()

import torch  # noqa: E402: what it needs has been looked for, and is named where it is missing
from transformers import PreTrainedModel  # noqa: E402

from ._stream_catch import Catch  # noqa: E402
from ._stream_layers import Call  # noqa: E402
from ._stream_loader import Loader, Origin, Source  # noqa: E402

__all__ = ["Body", "Call", "Catch", "Loader", "Origin", "Outlook", "Source", "Stream", "build"]

Visit = Callable[[Call, List[slice], Dict[int, str]], Iterable[Any]]
"""visit(call, pieces, params) computes a layer in place of the plain loop `(call.run(piece) for piece in pieces)`.

`pieces` are slices of the layer's rows; visit may change the list in place before it yields. `params` has the name of
every parameter of the layer, loaded now, by id(), for Catch. It returns or yields what call.run returned, one for each of
`pieces` and in their order.
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


def build(folder: Union[str, Path], *, dtype: torch.dtype = torch.float32, kind: Optional[type] = None,
          trust_remote_code: bool = False) -> PreTrainedModel:
    """The model that config.json of `folder` describes: parameters on meta in `dtype`, buffers real, in eval mode.

    `kind` is a class of transformers; None takes the one that config.json names under "architectures", or else the
    class with a head that the tables of transformers give for this model type. No weight file is looked at.

    Raises InputError where config.json is missing or transformers does not know its model type.
    """
    raise NotImplementedError


class Body:
    """What the layers made of a batch: everything the head takes, for all rows."""

    def pieces(self) -> List[slice]:
        """Slices of the batch, `rows` of Stream each but for the last."""
        raise NotImplementedError

    def head(self, piece: slice) -> Any:
        """The model's own output object for the rows of `piece`: with logits, or last_hidden_state where it has no head.

        Tensors are on the first of the stream's devices.
        """
        raise NotImplementedError


class Stream:
    """A model of build() whose layers are read from `source` when they are called.

    rows: rows of the batch that a layer computes at once. devices: layers are dealt to them in turn, and the next layer
    is read while one computes where it is on another device; what is no layer is on the first. visit and gradient: see
    Visit and Gradient. folder: hidden states lie in files there instead of memory (their names are gone at once; the
    files with the last tensor that uses them); the model's own computation between layers is then on the CPU.

    Attributes: `model`; `layers`, the module path of each layer in the order of modules; `names`, the state dict names of
    each layer; `loader`; `loads`, how many times a layer was read; `reads`, bytes of checkpoint tensors read.

    Raises InputError where no layers are found, or where tensors of `source` and weights of the model do not match.
    """

    def __init__(self, model: PreTrainedModel, source: Source, *, rows: int = 4,
                 devices: Sequence[Union[str, torch.device]] = ("cpu",), visit: Optional[Visit] = None,
                 gradient: Optional[Gradient] = None, folder: Union[None, str, Path] = None) -> None:
        raise NotImplementedError

    def outlook(self, batch: int, tokens: int) -> Outlook:
        """What a batch of [batch, tokens] will take, in bytes; nothing has to be read for it."""
        raise NotImplementedError

    def body(self, inputs: Dict[str, Any]) -> Body:
        """Runs the model's forward once on the whole batch, up to what the head takes.

        inputs: arguments of forward by name; tensors have the batch in dimension 0, or (packed images) all of it.
        """
        raise NotImplementedError

    def backward(self, inputs: Dict[str, Any], each: Callable[[slice, Any], None]) -> None:
        """Runs body, then each(piece, output) for every slice, then the gradients through all layers, last to first.

        each() calls backward() on a loss of `output`. Gradients begin at the outputs of embeddings and at
        floating-point inputs. No parameter gets a gradient: Stream's `gradient` sees what flows.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Gives the layers their own forward back."""
        raise NotImplementedError
