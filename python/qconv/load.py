"""qconv.load: a transformers model straight from the shards of an output, compressed or plain."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, Optional, Union

from . import _stream_needs

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load(out: Union[str, os.PathLike[str]], device_map: Optional[Union[str, int, Dict[str, Any]]] = None,
         dtype: Optional[torch.dtype] = None, threads: int = 0, skip_digests: bool = False,
         **kwargs: Any) -> PreTrainedModel:
    """The model of an output of `qconv convert`, ready to run.

    Its class is the one that config.json names. libqconv reads the shards with several threads straight into the memory
    of torch, decompresses them on the way and checks every digest; codes stay codes. Everything else is as
    from_pretrained does it: the other parameters have `dtype`, tied weights are tied, and the model is in eval mode.

    out            the folder that qconv wrote
    device_map     None: the devices of the plan that the output was made for (--vram), or the CPU without a plan;
                   a device ("cpu", "cuda:0", 0); "auto"; or {name of a module: device}
    dtype          of what is not quantized, and of what is computed; None: that of config.json
    threads        that read; 0: one per processor
    skip_digests   trust the disk, and check only what the compressed frames themselves carry
    kwargs         go to from_pretrained (attn_implementation, for example)

    Raises UsageError (arguments; torch or transformers missing or too old), InputError (no output of qconv, a class
    that transformers does not have, a form that is not read), CheckError (a shard is missing or damaged) and
    DeviceError (no such device). Nothing is left of a load that failed."""
    _stream_needs.check()
    from ._loading import loaded
    model: PreTrainedModel = loaded(out, device_map, dtype, threads, skip_digests, kwargs)
    return model
