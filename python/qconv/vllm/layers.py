"""How layers of vLLM hold and multiply weights of an output: the quantization "qconv".

Nothing is known of a layer's weights until they are loaded. vLLM's model class says which weight goes where, by calling
the weight loader of a parameter; that of ours asks the layer's own weight loader which rows and columns it would take,
and reads just these. So a layer is a list of pieces, each some of its outputs, in whatever form the output has them: q,
k and v of one layer may be NF4, int8 and 16 bits.
"""
import functools
import weakref
from dataclasses import replace
from typing import List

import torch
from torch.nn import Parameter
from torch.nn.functional import linear
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from .. import errors, ops
from .._weights import ROLES
from ..torch import QuantizedTensor
from . import NAME, is_output
from .stored import Part

logger = init_logger(__name__)
_tables = weakref.WeakValueDictionary()
PLAIN = (torch.bfloat16, torch.float16, torch.float32)


def handle(stored, start):
    """A quantized weight on its way to its layer, of which nothing was read. start(f) lets f read beside others, and
    returns a function that waits for what f returns."""
    weight = QuantizedTensor([[stored.form]], torch.bfloat16)
    weight.stored, weight.start = stored, start
    return weight


@register_quantization_config(NAME)
class QconvConfig(QuantizationConfig):
    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):
        """Outputs of qconv are ours, where the user asks for nothing else. On GPUs vLLM has good kernels for the form
        of compressed-tensors and keeps it; on CPUs it lacks them for 8 bits, and without AVX-512 for 4."""
        if user_quant == NAME or hf_quant_cfg.get("quant_method") == NAME:
            return NAME
        ours = {"bitsandbytes"} | ({"compressed-tensors"} if current_platform.is_cpu() else set())
        if user_quant is None and hf_quant_cfg.get("quant_method") in ours and is_output(hf_config.name_or_path):
            return NAME
        return None

    @classmethod
    def from_config(cls, config):
        return cls()

    def get_name(self):
        return NAME

    def get_supported_act_dtypes(self):
        return list(PLAIN)

    @classmethod
    def get_min_capability(cls):
        return 70

    @staticmethod
    def get_config_filenames():
        return []

    def get_quant_method(self, layer, prefix):
        if isinstance(layer, RoutedExperts):
            return QconvExperts(layer.moe_config)
        return QconvLinear() if isinstance(layer, LinearBase) else None


class Piece(torch.nn.Module):
    """Outputs [first, first + count) of a layer: a Part, or a plain tensor [count, columns]."""

    def __init__(self, first, count, weight):
        super().__init__()
        self.first, self.count, self.numbers, self.skip = first, count, None, 0
        tensors = [weight, *[None] * 4]
        if isinstance(weight, Part):
            self.numbers, self.skip, tensors = weight.weight.numbers, weight.skip, weight.weight.tensors()
        for role, tensor in zip(ROLES, tensors):
            if tensor is not None:
                tensor = _table(tensor) if role.endswith("map") else Parameter(tensor, requires_grad=False)
            self.register_parameter(role, tensor)

    def forward(self, x):
        if self.numbers is None:
            return linear(x, self.codes)
        y = ops.linear(x, self.codes, self.scales, self.code_map, self.nested_absmax, self.nested_map, None,
                       *self.numbers)
        return y[..., self.skip:] if self.skip else y

    def join(self, other) -> bool:
        """Takes the next piece into this one, if their codes can simply be laid end to end."""
        if (self.numbers is None) != (other.numbers is None):
            return False
        if self.numbers:
            form, rows, cols, block, nested_block, offset = self.numbers
            if other.numbers != (form, other.numbers[1], cols, block, nested_block, offset) or self.skip or other.skip:
                return False
            if rows * cols % (max(block, 2) * max(nested_block, 1)):
                return False
            if self.code_map is not other.code_map or self.nested_map is not other.nested_map:
                return False
            self.numbers = form, rows + other.numbers[1], cols, block, nested_block, offset
        for role in ("codes", "scales", "nested_absmax"):
            if getattr(self, role) is not None:
                both = torch.cat([getattr(self, role), getattr(other, role)])
                setattr(self, role, Parameter(both, requires_grad=False))
        self.count += other.count
        return True


def _table(tensor):
    """The one parameter for all tables of these numbers on a device: those of all weights are alike."""
    made = Parameter(tensor, requires_grad=False)
    return _tables.setdefault((tensor.device, tensor.cpu().numpy().tobytes()), made)


def _to(part, device):
    """A part in a device's memory."""
    tensors = {role: None if t is None else t.to(device) for role, t in zip(ROLES, part.weight.tensors())}
    return Part(replace(part.weight, **tensors), part.skip)


def _taken(load, axis, held, whole, *shard, **named):
    """Which rows (axis 0) or columns (1) of a weight a layer's weight loader puts where: for each that the layer holds
    its number among `whole`, or -1 where it is another weight's."""
    def shape(n):
        return (n, 1) if axis == 0 else (1, n)

    proxy = Parameter(torch.full(shape(held), -1), requires_grad=False)
    set_weight_attrs(proxy, {"output_dim" if axis == 0 else "input_dim": axis, "ignore_warning": True})
    load(proxy, torch.arange(whole).view(shape(whole)), *shard, **named)
    return proxy.data.flatten()


def _runs(taken) -> List[tuple]:
    """(place in the layer, first row of the weight, how many) for each run of rows."""
    places = (taken >= 0).nonzero().flatten()
    if not len(places):
        return []
    rows = taken[places]
    begins = torch.cat([torch.tensor([True]), (places.diff() != 1) | (rows.diff() != 1)]).nonzero().flatten().tolist()
    return [(places[a].item(), rows[a].item(), b - a) for a, b in zip(begins, [*begins[1:], len(places)])]


class QconvLinear(LinearMethodBase):
    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size,
                       params_dtype, **extra):
        weight = Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
        held = sum(output_partition_sizes), input_size_per_partition
        set_weight_attrs(weight, {**extra, "weight_loader": functools.partial(
            self.load, layer, held, extra["weight_loader"])})
        layer.register_parameter("weight", weight)
        layer.qconv_held, layer.qconv_loading = held, []

    def load(self, layer, held, load, param, weight, *shard, **named):
        """vLLM calls this with each weight of the layer; shard says which of a fused layer's it is."""
        rows = _taken(load, 0, held[0], weight.shape[0], *shard, **named)
        cols = _taken(load, 1, held[1], weight.shape[1], *shard, **named)
        (_, col, count), = _runs(cols)
        assert count == held[1]
        if not isinstance(weight, QuantizedTensor) and weight.dtype not in PLAIN:
            raise errors.InputError(f"a weight of '{layer.prefix}' stays in {weight.dtype}, which the plug-in does not "
                                    "multiply; 'qconv --to bf16' restores the model")
        device = param.device
        for place, row, n in _runs(rows):
            if isinstance(weight, QuantizedTensor):
                made = functools.partial(weight.stored.part, (row, row + n), (col, col + count))
                layer.qconv_loading.append((place, n, weight.start(lambda made=made: _to(made(), device))))
            else:
                part = weight[row:row + n, col:col + count]
                part = part.to(device, param.dtype, copy=part.shape != weight.shape)
                layer.qconv_loading.append((place, n, lambda part=part: part))

    def process_weights_after_loading(self, layer):
        pieces, end = [], 0
        for place, n, done in sorted(layer.qconv_loading, key=lambda piece: piece[0]):
            if place != end:
                break
            end += n
            piece = Piece(place, n, done())
            if not (pieces and pieces[-1].join(piece)):
                pieces.append(piece)
        if end != layer.qconv_held[0]:
            raise errors.InputError(f"the output has weights for {end} of the {layer.qconv_held[0]} rows of "
                                    f"'{layer.prefix}'")
        layer.qconv_loading = []
        if len(pieces) == 1 and pieces[0].numbers is None:
            layer.weight = Parameter(pieces[0].codes.data, requires_grad=False)
            layer.quant_method = UnquantizedLinearMethod()
            layer.quant_method.process_weights_after_loading(layer)
        else:
            layer.qconv_pieces = torch.nn.ModuleList(pieces)

    def apply(self, layer, x, bias=None):
        parts = [piece(x) for piece in layer.qconv_pieces]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if bias is None else y + bias


class QconvExperts(UnquantizedFusedMoEMethod):
    """vLLM's own experts in 16 bits, to which quantized ones are restored as they are loaded."""

    def create_weights(self, layer, *args, **extra):
        super().create_weights(layer, *args, **extra)
        load = layer.load_weights
        layer.load_weights = lambda weights: load((name, self.restored(layer, w)) for name, w in weights)
        for param in layer.parameters(recurse=False):  # model classes that do without layer.load_weights
            param.weight_loader = functools.partial(self.load, layer, param.weight_loader)

    def load(self, layer, load, param, loaded_weight, *args, **kwargs):
        return load(param, self.restored(layer, loaded_weight), *args, **kwargs)

    def restored(self, layer, weight):
        if not isinstance(weight, QuantizedTensor):
            return weight
        held = sum(p.numel() * p.element_size() for p in layer.parameters(recurse=False))
        logger.warning_once("qconv: vLLM multiplies these experts in 16 bits only, so they are restored as they are "
                            "loaded: each layer's take %.3f GB on this worker", held / 1e9)
        return weight.stored.part((0, weight.shape[0]), (0, weight.shape[1])).weight.dequantize(layer.params_dtype)
