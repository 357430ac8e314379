"""qconv.capture: second moments of a model's linear layers, for `qconv convert --hessians`."""
from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional, Union

from . import errors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Captured:
    """What `capture` has written: counts of tokens, windows, weights with moments (`shared` of them have the inputs of
    another), and of weights that no token reached."""
    tokens: int
    output_tokens: int
    windows: int
    weights: int
    shared: int
    unseen: int


def capture(model: Union[str, os.PathLike[str], PreTrainedModel], text: Union[str, os.PathLike[str]],
            out: Union[str, os.PathLike[str]], *,
            tokenizer: Union[None, str, os.PathLike[str], PreTrainedTokenizerBase] = None, context: int = 2048,
            tokens: int = 131072, output_tokens: int = 32768, block: Optional[int] = 1024, memory: float = 8,
            device: Union[None, str, torch.device] = None, only: Optional[str] = None, paragraphs: bool = False,
            seed: int = 0, sided: str = "two", quantized: Union[None, str, os.PathLike[str]] = None) -> Captured:
    """Lets a text pass through a transformers model and writes to the folder `out` what `convert(hessians=out)` reads:
    for each linear layer the second moments of its inputs, and of the gradients of its outputs (docs/calibration.md).

    model          a folder that transformers loads, or a model; experts may be modules or lie in one tensor
    text           a file in UTF-8; or of token ids, one window a line, if its name ends in ".ids"
    tokenizer      of the text; None: the model's own
    context        tokens of a window, which passes alone
    tokens         of the text that pass, in windows that are spread over it; 0: all
    output_tokens  of these, whose gradients are taken; 0: all
    block          gradients count together in blocks of so many outputs; None: all outputs of a layer
    memory         GB of the moments that are summed at a time: if all take more, the text passes several times
    device         of a model that is loaded here; None: a GPU if torch has one
    only           names of weights, as a regular expression; None: all linear layers but the head
    paragraphs     windows are the paragraphs of the text, and longer ones are cut
    seed           of the labels, which are drawn from the model's own predictions
    sided          "one": no gradients, and no pass backward
    quantized      a folder that qconv wrote of the same model: inputs are taken behind its layers, and their moments
                   with those of the original model are written too, which no expert can have

    The loss is the cross entropy with the drawn labels. A model without a head (AutoModel of an encoder) has the mean
    of its last hidden states, normalized, times a normal random vector for each window.

    Raises UsageError (arguments; torch, transformers or safetensors missing; something lies in `out`), and InputError
    (no text; a model that is not read)."""
    try:
        import safetensors  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as e:
        raise errors.UsageError(f"qconv.capture takes torch, transformers and safetensors, and {e.name} is not "
                                "installed: pip install torch transformers") from None
    if sided not in ("one", "two"):
        raise errors.UsageError(f"sided is {sided!r}; expected \"one\" or \"two\"")
    for name, number, least in (("context", context, 2), ("tokens", tokens, 0), ("output_tokens", output_tokens, 0),
                                ("block", 1 if block is None else block, 1)):
        if number < least:
            raise errors.UsageError(f"{name} is {number}; expected at least {least}")
    if not memory > 0:
        raise errors.UsageError(f"memory is {memory}; expected GB, more than 0")
    if os.path.isdir(out) and os.listdir(out):
        raise errors.UsageError(f"{os.fspath(out)}: something lies there; expected a folder that is empty or not there")
    if not os.path.isfile(text):
        raise errors.InputError(f"{os.fspath(text)}: there is no such text")
    from ._capture import captured
    options: Any = dict(context=context, tokens=tokens, output_tokens=output_tokens, block=block, memory=memory,
                        device=device, only=only, paragraphs=paragraphs, seed=seed, two=sided == "two")
    return Captured(*captured(model, os.fspath(text), os.fspath(out), tokenizer, quantized, **options))
