"""bitsandbytes' modules over the codes of an output, for peft, QLoRA and what else knows these modules."""
import torch
import transformers
from torch import nn
from transformers.quantizers import AutoHfQuantizer

from . import errors
from ._weights import QuantizedWeight, ROLES, to_stored

try:
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit
except ImportError:
    raise errors.UsageError("backend=\"bitsandbytes\" takes bitsandbytes, which is not installed: pip install "
                            "bitsandbytes") from None


def module_of(weight: QuantizedWeight, bias, dtype, said):
    """Linear4bit or Linear8bitLt with the weight's own codes and scales."""
    if not weight.stored:
        raise errors.InputError(f"bitsandbytes has no module for '{weight.name}', which transformers "
                                f"{transformers.__version__} joins with others or divides: backend=\"qconv\" loads it")
    tensors = to_stored(weight.stored, {role: getattr(weight, role) for role in ROLES})
    four_bit = any("quant_state.bitsandbytes__" in ending for ending in tensors)
    if not four_bit and weight.form != "int8":
        raise errors.InputError(f"bitsandbytes has no module for the {weight.form} of '{weight.name}': "
                                "backend=\"qconv\" loads it")
    said = said or {}
    with torch.device("meta"):
        if four_bit:
            compute = getattr(torch, str(said.get("bnb_4bit_compute_dtype", "")), dtype)
            new = Linear4bit(weight.cols, weight.rows, bias is not None, compute_dtype=compute,
                             compress_statistics=weight.nested_absmax is not None,
                             quant_type=next(e for e in tensors if "quant_state." in e).rpartition("__")[2], quant_storage=torch.uint8)
        else:
            new = Linear8bitLt(weight.cols, weight.rows, bias is not None, has_fp16_weights=False,
                               threshold=said.get("llm_int8_threshold", 6.0))
    codes = tensors.pop("weight")
    if four_bit:
        stats = {ending[len("weight."):]: tensor for ending, tensor in tensors.items()}
        new.weight = Params4bit.from_prequantized(data=codes, quantized_stats=stats, requires_grad=False,
                                                  device=codes.device, module=new)
    else:
        codes = codes.view(weight.rows, weight.cols)
        new.weight = Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=tensors["SCB"])
    new.bias = bias if bias is None else nn.Parameter(bias.data, requires_grad=bias.requires_grad)
    return new


def mark(model, said):
    """What from_pretrained leaves on a model that bitsandbytes quantized, and what peft and Trainer look at."""
    kinds = {type(module) for module in model.modules()}
    model.is_quantized = True
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = Linear4bit in kinds, Linear8bitLt in kinds
    if said.get("quant_method") == "bitsandbytes":  # not of NF4 beside int8, which no quantizer of transformers makes
        quantizer = AutoHfQuantizer.from_config(said, pre_quantized=True)
        model.hf_quantizer, model.config.quantization_config = quantizer, quantizer.quantization_config
        model.quantization_method = quantizer.quantization_config.quant_method
        model.is_4bit_serializable = model.is_8bit_serializable = True
