"""from_pretrained of transformers 5 for mixtures of experts that qconv wrote for bitsandbytes.

transformers 5 holds the experts of a layer in one parameter, and its quantizers for bitsandbytes know linear layers only.
These take their place: the tensors of an expert become a QuantizedTensor, which the model's own rules stack and join, and
a qconv.torch.Stack computes with the codes. A checkpoint without quantized experts is loaded as it was before.

IMPLEMENTATION is the name of transformers' experts_implementation under which the rows of all experts are one call.
"""
import contextlib

from transformers import conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import auto

from . import errors

IMPLEMENTATION = "qconv"
BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4",
          "quant_state.bitsandbytes__fp4", "SCB", "weight_format")
# Granite's stacks are published as modules, beside whose weights int8 has its scales.
PUBLISHED = {rf"(?<=\.block_sparse_moe)\.{module}\.{more}": stack for module, stack in (("input_linear", "gate_up_proj"),
                                                               ("output_linear", "down_proj"))
             for more in ("SCB", "weight_format")}


# Published with stacks alone, so transformers has no rule for experts that lie one by one.
ONE_BY_ONE = "qwen3_vl_moe_text"


@contextlib.contextmanager
def gathered():
    """transformers stacks the experts of ONE_BY_ONE, too, as it does those of the types that are published so."""
    rules = conversion_mapping.get_checkpoint_conversion_mapping("qwen2_moe")
    conversion_mapping.register_checkpoint_conversion_mapping(ONE_BY_ONE, rules)
    try:
        yield
    finally:
        del conversion_mapping._checkpoint_conversion_mapping_cache[ONE_BY_ONE]


class Gather(ConversionOps):
    """{pattern: a tensor of each expert} of all that belongs to a weight, to {its pattern: QuantizedTensors}."""

    def __init__(self, hf_quantizer):
        self.hf_quantizer = hf_quantizer  # transformers asks for it, and then casts nothing

    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name=None, model=None, **kwargs):
        from ._weights import weights_of
        from .torch import QuantizedTensor
        parameter, out = model.get_parameter(full_layer_name), {}
        holder = model.get_submodule(full_layer_name.rpartition(".")[0])
        for pattern in [p for p in source_patterns if p in input_dict and not p.endswith(BESIDE)]:
            stacked = not pattern.endswith(".weight")
            module = pattern.removesuffix(".weight")
            members = {p[len(module):].lstrip("."): tensors for p, tensors in input_dict.items()
                       if p == module or p.startswith(f"{module}.")}
            members |= {more: input_dict[p] for p in PUBLISHED if p in input_dict for more in BESIDE if p.endswith(more)}
            if len(members) == 1:
                out[pattern] = [tensor.to(parameter.dtype) for tensor in input_dict[pattern]]
                continue
            count = {len(tensors) for tensors in members.values()}
            if len(count) > 1:
                raise errors.InputError(f"the experts of '{full_layer_name}' are not all quantized in the same way, and "
                                        "transformers holds them as one: qconv.load loads them")
            out[pattern] = []
            for i in range(*count):
                name = full_layer_name + ("" if stacked else f".{i}.weight")
                parts = weights_of(name, {ending: tensors[i] for ending, tensors in members.items()})
                turned = stacked and getattr(holder, "is_transposed", parts[0].rows != parameter.shape[1])
                out[pattern].append(QuantizedTensor([[part] for part in parts], parameter.dtype, stacked, turned))
        return {target_patterns[0]: out[pattern]} if stacked else out

    @property
    def reverse_op(self):
        from ._loading import no_save
        no_save()


def with_experts(kind):
    """A quantizer of transformers, for stacks of experts too."""

    class WithExperts(kind):
        def get_load_operations(self):
            return {**super().get_load_operations(), "dequantize": Gather}

        def update_weight_conversions(self, weight_conversions, model):
            """Also collects experts that the file has as one tensor."""
            if not self.pre_quantized:
                return super().update_weight_conversions(weight_conversions, model)
            self.stacks = {name for name, p in model.named_parameters()
                           if p.ndim == 3 and name.rpartition(".")[0].endswith(".experts")}
            if model.config.get_text_config().model_type == ONE_BY_ONE:
                weight_conversions = weight_conversions + conversion_mapping.get_checkpoint_conversion_mapping("qwen2_moe")
            endings = sorted({name.rpartition(".experts.")[2] for name in self.stacks})
            return [WeightConverter([rf"\.experts\.{e}", *(rf"\.experts\.{e}.{more}" for more in BESIDE),
                                     *(p for p, stack in PUBLISHED.items() if stack == e)], f".experts.{e}",
                                    [Gather(self)]) for e in endings
                    ] + super().update_weight_conversions(weight_conversions, model)

        def param_element_size(self, model, param_name, param):
            kept = self.quantization_config.llm_int8_skip_modules or ()
            if param_name in getattr(self, "stacks", ()) and not any(".experts" in name for name in kept):
                return self.quantized_element_size or 1
            return super().param_element_size(model, param_name, param)

        def _process_model_after_weight_loading(self, model, **kwargs):
            from . import _loading
            from .torch import QuantizedTensor, Stack
            if any(isinstance(p, QuantizedTensor) for p in model.parameters()):
                _loading.swap(model, model.dtype)
            if any(isinstance(module, Stack) for module in model.modules()):
                model.set_experts_implementation(IMPLEMENTATION)
                model.save_pretrained = _loading.no_save
            return super()._process_model_after_weight_loading(model, **kwargs)

    WithExperts.__name__ = WithExperts.__qualname__ = kind.__name__
    return WithExperts


def forward(self, hidden_states, top_k_index, top_k_weights):
    """Of a module that transformers decorates with use_experts_implementation. Where qconv::experts does not compute all
    of it, the module's own loop does, with a product for each expert."""
    from .torch import Stack, routed
    first = "gate_up_proj" if self.has_gate else "up_proj"
    stacks = [getattr(self, name, None) for name in (first, "down_proj")]
    if self.has_post_expert_norm or self._is_expert_parallel or not all(
            isinstance(s, Stack) and s.transposed == self.is_transposed and s.multiplies() for s in stacks):
        return type(self).forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)
    up_bias, down_bias = (getattr(self, f"{name}_bias") if self.has_bias else None for name in (first, "down_proj"))
    up, down = stacks

    def expert(x, offsets, rows, weights):
        y = up.products(x, offsets, rows, None, up_bias)
        return down.products(self._apply_gate(y) if self.has_gate else self.act_fn(y), offsets, None, weights, down_bias)
    return routed(hidden_states, top_k_index, top_k_weights, len(up), expert)


def register(auto=auto):
    """Teaches transformers.quantizers.auto."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)
    for name in ("bitsandbytes_4bit", "bitsandbytes_8bit"):
        kind = auto.AUTO_QUANTIZER_MAPPING[name]
        if hasattr(kind, "update_weight_conversions") and not hasattr(kind, "stacks"):
            auto.AUTO_QUANTIZER_MAPPING[name] = with_experts(kind)
