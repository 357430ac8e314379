"""How layers of vLLM hold and multiply weights of an output: the quantization "qconv".

Nothing is known of a layer's weights until they are loaded. vLLM's model class says which weight goes where, by calling
the weight loader of a parameter; that of ours asks the layer's own weight loader which rows and columns it would take,
and reads just these. So a layer is a list of pieces, each some of its outputs, in whatever form the output has them: q,
k and v of one layer may be NF4, int8 and 16 bits.
"""
import functools

import torch
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from .. import errors
from . import NAME, is_output
from .experts import QconvExperts, has_quantized_experts
from .pieces import PLAIN, Piece, joined, reading, runs, taken


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
            model = get_current_vllm_config().model_config.model
            return QconvExperts(layer.moe_config) if has_quantized_experts(model) else None
        if isinstance(layer, LinearBase):
            return QconvLinear()
        return None


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
        rows = taken(load, 0, held[0], weight.shape[0], *shard, **named)
        cols = taken(load, 1, held[1], weight.shape[1], *shard, **named)
        (_, col, count), = runs(cols)
        assert count == held[1]
        for place, row, n in runs(rows):
            layer.qconv_loading.append((place, n, reading(layer.prefix, weight, (row, row + n), (col, col + count), param)))

    def process_weights_after_loading(self, layer):
        pieces, end = [], 0
        for place, n, done in sorted(layer.qconv_loading, key=lambda piece: piece[0]):
            if place != end:
                break
            end += n
            pieces.append(Piece(place, n, done()))
        if end != layer.qconv_held[0]:
            raise errors.InputError(f"the output has weights for {end} of the {layer.qconv_held[0]} rows of "
                                    f"'{layer.prefix}'")
        layer.qconv_loading, pieces = [], joined(pieces)
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
