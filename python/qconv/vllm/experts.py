"""How mixtures of experts hold and multiply weights of an output: as codes, by qconv::experts.

vLLM's layer of experts has two weights an expert, w13 (gate and up, or up alone) and w2 (down). Each is loaded as pieces
(pieces.py). Where the pieces of all experts that this worker has are alike, they are laid into one tensor and are one
launch; otherwise, and where codes cannot be cut as tensor parallelism wants it, they are restored to 16 bits and vLLM
multiplies them, which its log says.
"""
import functools

import torch
from torch.nn import Parameter
from torch.nn.functional import gelu, relu, silu
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.utils import set_weight_attrs

from .. import _library, errors, ops
from .._weights import groups
from ..torch import alike, routed
from . import is_output
from .pieces import Codes, Piece, joined, reading, runs, taken

logger = init_logger(__name__)
_gelu_tanh = functools.partial(gelu, approximate="tanh")
ACTIVATIONS = {MoEActivation.SILU: silu, MoEActivation.GELU: gelu, MoEActivation.GELU_TANH: _gelu_tanh,
               MoEActivation.SILU_NO_MUL: silu, MoEActivation.GELU_NO_MUL: gelu,
               MoEActivation.GELU_TANH_NO_MUL: _gelu_tanh, MoEActivation.RELU2_NO_MUL: lambda x: relu(x).square()}


@functools.lru_cache(maxsize=None)
def has_quantized_experts(folder) -> bool:
    """Whether an output holds experts as codes."""
    if not is_output(folder):
        return False
    with _library.Reader(folder) as reader:
        dtypes = {t.name: t.dtype for device in reader.devices for t in device.tensors}
    return any(".experts." in weight for weight in groups(dtypes))


class Stack(Codes):
    """Some outputs of every expert, in one form."""

    def forward(self, x, offsets, x_rows, row_weights, bias):
        """bias: that of all outputs of the layer."""
        if bias is not None:
            bias = torch.nn.functional.pad(bias[:, self.first:self.first + self.count], (self.skip, 0))
        y = ops.experts(x, offsets, x_rows, row_weights, self.codes, self.scales, self.code_map, self.nested_absmax,
                        self.nested_map, bias, *self.numbers)
        return y[:, self.skip:] if self.skip else y


def stacked(each, dtype):
    """The Stacks of a list of pieces for each expert; or a reason why there are none."""
    stacks = []
    for pieces in zip(*each):
        first = pieces[0]
        places = {(piece.first, piece.count, piece.skip, piece.numbers is None) for piece in pieces}
        if len(places) > 1 or first.numbers is None or len({*map(len, each)}) > 1:
            return "those of a layer are in different forms, or a share of them cannot be cut out"
        if first.codes.device.type != "cpu" and not ops.launcher(first.codes.device, dtype, first.numbers[0]):
            return f"no kernel multiplies experts in {first.numbers[0]} and {dtype} on {first.codes.device}"
        made = alike(list(pieces))
        if made is None:
            return "those of a layer are in different forms"
        stacks.append(Stack(first.first, first.count, first.skip, *made))
    return stacks


class QconvExperts(FusedMoEMethodBase):
    def __init__(self, moe):
        super().__init__(moe)
        self.plain = UnquantizedFusedMoEMethod(moe)

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra):
        rows = intermediate_size_per_partition * (2 if self.moe.is_act_and_mul else 1)
        layer.qconv_created = dict(extra, num_experts=num_experts, hidden_size=hidden_size, params_dtype=params_dtype)
        layer.qconv_held = {"w13": rows, "w2": intermediate_size_per_partition}
        layer.qconv_loading = {shard: [[] for _ in range(num_experts)] for shard in layer.qconv_held}
        layer.qconv_taken = {}  # of the first expert, as all are cut alike
        for shard, outputs in (("w13", rows), ("w2", hidden_size)):
            weight = Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            set_weight_attrs(weight, {**extra, "weight_loader": functools.partial(self.load, layer)})
            layer.register_parameter(f"{shard}_weight", weight)
            if self.moe.has_bias:
                bias = Parameter(torch.zeros(num_experts, outputs, dtype=params_dtype), requires_grad=False)
                set_weight_attrs(bias, extra)
                layer.register_parameter(f"{shard}_bias", bias)

    def load(self, layer, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
        """vLLM calls this with each weight of the layer: gate (w1), down (w2) or up (w3) of an expert."""
        expert = layer._map_global_expert_id_to_local_expert_id(expert_id)
        if expert == -1:
            return False if return_success else None
        if loaded_weight.dim() != 2:
            raise errors.InputError(f"the experts of '{layer.layer_name}' are one tensor of {loaded_weight.dim()} "
                                    "dimensions beside others that are quantized, which the plug-in does not serve; "
                                    "'qconv --to bf16' restores the model")
        shard, axis = ("w2", 1) if shard_id == "w2" else ("w13", 0)
        if loaded_weight.shape[1 - axis] != layer.hidden_size:
            raise errors.InputError(f"'{layer.layer_name}' wants experts of {layer.hidden_size} columns, and the output "
                                    f"has {loaded_weight.shape[1 - axis]}")
        key = shard_id, loaded_weight.shape[axis]
        if key not in layer.qconv_taken:
            def into(proxy, numbers):
                experts = proxy.data.expand(layer.local_num_experts, -1, -1)
                layer.weight_loader(Parameter(experts, requires_grad=False), numbers, weight_name, shard_id, expert_id)
            layer.qconv_taken[key] = runs(taken(into, axis, layer.qconv_held[shard], loaded_weight.shape[axis]))
        for place, first, n in layer.qconv_taken[key]:
            part, all_of_it = (first, first + n), (0, layer.hidden_size)
            rows, cols = (part, all_of_it) if axis == 0 else (all_of_it, part)
            done = reading(layer.layer_name, loaded_weight, rows, cols, param, or_restored=True)
            layer.qconv_loading[shard][expert].append((place, n, done))
        return True if return_success else None

    def loaded(self, layer, shard):
        """A list of pieces for each expert."""
        each = []
        for found in layer.qconv_loading.pop(shard):
            found.sort(key=lambda piece: piece[0])
            count = sum(n for _, n, _ in found)
            if count != layer.qconv_held[shard]:
                raise errors.InputError(f"the output has {count} of the {layer.qconv_held[shard]} "
                                        f"{'rows' if shard == 'w13' else 'columns'} of {shard} of expert {len(each)} "
                                        f"in '{layer.layer_name}'")
            each.append(joined(Piece(place, n, done()) if shard == "w13" else Piece(0, layer.hidden_size, done())
                               for place, n, done in found))
        return each

    def process_weights_after_loading(self, layer):
        shards = {shard: self.loaded(layer, shard) for shard in layer.qconv_held}
        asked = layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta, self.moe.swiglu_limit
        why = None if layer.activation in ACTIVATIONS and asked == 4 * (None,) else f"its activation is {layer.activation}"
        stacks = {}
        for shard, each in shards.items():
            stacks[shard] = why or stacked(each, layer.params_dtype)
            why = stacks[shard] if isinstance(stacks[shard], str) else None
        if why:
            self.restore(layer, shards, why)
        else:
            layer.qconv_w13, (layer.qconv_w2,) = torch.nn.ModuleList(stacks["w13"]), stacks["w2"]
            # Gate and up are two where their scales have offsets of their own, or differ in form.
            assert len(stacks["w13"]) in ((1, 2) if self.moe.is_act_and_mul else (1,))

    def restore(self, layer, shards, why):
        """Gives the layer to vLLM's own experts, in 16 bits."""
        if any(piece.numbers for each in shards.values() for pieces in each for piece in pieces):
            held = sum(piece.count * layer.qconv_held["w2"] if shard == "w2" else piece.count * layer.hidden_size
                       for shard, each in shards.items() for pieces in each for piece in pieces)
            logger.warning_once("qconv: experts are restored to 16 bits as they are loaded, because %s: each layer's take "
                                "%.3f GB on this worker", why, held * layer.params_dtype.itemsize / 1e9)
        biases = {name: getattr(layer, name) for name in ("w13_bias", "w2_bias") if self.moe.has_bias}
        width = layer.intermediate_size_per_partition
        layer.hidden_size, padded = self.plain.maybe_roundup_sizes(layer.hidden_size, width, self.moe.in_dtype,
                                                                   self.moe.moe_parallel_config)
        layer.intermediate_size_per_partition = layer.moe_config.intermediate_size_per_partition = padded
        with layer.w13_weight.device:
            self.plain.create_weights(layer, intermediate_size_per_partition=padded, **layer.qconv_created)
        parts = 2 if self.moe.is_act_and_mul else 1
        for shard in shards:
            axis, split = (1, (parts, -1)) if shard == "w13" else (2, (1, -1))  # which is padded; gate and up apart
            into = getattr(layer, f"{shard}_weight").data.zero_().unflatten(1, split).narrow(axis + 1, 0, width)
            for place, pieces in zip(into, shards[shard]):
                place.copy_(torch.cat([piece.values(layer.params_dtype) for piece in pieces]).unflatten(0, split))
                pieces.clear()
            if biases:
                bias = biases[f"{shard}_bias"].unflatten(1, split)
                getattr(layer, f"{shard}_bias").data.unflatten(1, split)[..., :bias.shape[-1]].copy_(bias)
        layer._replace_quant_method(self.plain)
        self.plain.process_weights_after_loading(layer)

    def get_fused_moe_quant_config(self, layer):
        return None

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        act, gated = ACTIVATIONS[layer.activation], self.moe.is_act_and_mul
        biases = [getattr(layer, name) if self.moe.has_bias else None for name in ("w13_bias", "w2_bias")]

        def experts(x, offsets, rows, weights):
            ys = [stack(x, offsets, rows, None, biases[0]) for stack in layer.qconv_w13]
            if not gated:
                h = act(ys[0])
            else:
                gate, up = ys if len(ys) == 2 else ys[0].chunk(2, -1)
                h = act(gate) * up
            return layer.qconv_w2(h, offsets, None, weights, biases[1])

        if layer.expert_map is not None:  # of all experts, those of this worker have a number
            topk_ids = layer.expert_map[topk_ids.long()]
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        return routed(x, topk_ids, topk_weights, layer.local_num_experts, experts)
