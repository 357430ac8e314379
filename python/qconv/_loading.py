"""How qconv.load works: read, let transformers put everything in its place, then swap in modules that multiply.

Every quantized weight goes through from_pretrained as a QuantizedTensor under the weight's own name. So transformers
renames, ties, stacks and checks it like any other, in each version by its own rules, and no number is touched.
"""
import json
import sys
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from . import _library, errors
from ._weights import TORCH, groups, weights_of
from .torch import Linear, QuantizedTensor, Stack

# Packed by other tools, and kept beside weights that qconv quantized.
OTHERS = {"fp8", "mxfp4", "int-quantized", "pack-quantized", "gptq", "awq"}


def loaded(out, device_map, dtype, backend, threads, skip_digests, kwargs):
    out = Path(out)
    with _library.Reader(out) as reader:
        config = config_of(out, kwargs)
        kind = class_of(config, out)
        places = Places(out, reader, device_map)
        tensors = read(reader, places, threads, skip_digests)
    said = quantization_of(config)
    found = groups({name: dtype_name for name, (dtype_name, _) in tensors.items()})
    if found and hasattr(config, "quantization_config"):
        del config.quantization_config
    if dtype is None:
        dtype = getattr(config, "dtype", None) or floats_of(tensors)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    state = state_of(tensors, found, transposed_modules(kind, config), lambda: stack_shapes(kind, config), dtype)
    weights = {name: tensor for name, tensor in state.items() if isinstance(tensor, QuantizedTensor)}
    del tensors
    if any(tensor.stacked or ".experts." in name for name, tensor in weights.items()):
        if version() >= (5, 0):
            from . import _experts
            _experts.register()
            kwargs = {"experts_implementation": _experts.IMPLEMENTATION, **kwargs}
    model = built(kind, config, state, dtype, kwargs)
    del state
    swapped = swap(model, backend, dtype, said)
    if apart := sorted(set(weights) - swapped):
        raise errors.InputError(f"{kind.__name__} of transformers {transformers.__version__} has no place for the "
                                f"quantized weight '{apart[0]}' of {out}" +
                                (f" and {len(apart) - 1} more" if len(apart) > 1 else ""))
    generation_config(model, out)
    model = places.dispatch(model)
    if found and said:
        remember(model, said, backend)
    if any(isinstance(module, Stack) for module in model.modules()):
        model.save_pretrained = no_save
    return model


def version():
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


# ---- what the output says -----------------------------------------------------------------------


def config_of(out, kwargs):
    if not (out / "config.json").is_file():
        raise errors.InputError(f"{out} has no config.json, so the class of its model is not known")
    more = {k: kwargs[k] for k in ("trust_remote_code",) if k in kwargs}
    try:
        return transformers.AutoConfig.from_pretrained(out, **more)
    except Exception as e:  # also what the checks of huggingface_hub raise, which has no name in every version
        what = json.loads((out / "config.json").read_text()).get("model_type")
        lines = [line.strip() for line in str(e).splitlines()] or [type(e).__name__]
        said = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
        raise errors.InputError(f"transformers {transformers.__version__} does not take the config.json of {out} "
                                f"(model_type {what!r}): {said}") from None


def class_of(config, out):
    names = getattr(config, "architectures", None) or []
    for name in names:
        if kind := getattr(transformers, name, None):
            return kind
    if names:
        raise errors.InputError(f"transformers {transformers.__version__} has no {names[0]}, which config.json of "
                                f"{out} names")
    try:
        return transformers.AutoModel._model_mapping[type(config)]
    except KeyError:
        raise errors.InputError(f"config.json of {out} names no architecture") from None


def quantization_of(config):
    """quantization_config as a dict, or None."""
    said = getattr(config, "quantization_config", None)
    if said is None:
        return None
    said = said if isinstance(said, dict) else said.to_dict()
    if said.get("quant_method") == "qconv":
        others = OTHERS & set(str(said.get("quant_type", "")).split("+"))
        if others:
            raise errors.InputError(f"the output holds weights of another tool ({', '.join(sorted(others))}) beside "
                                    "qconv's, which qconv.load does not read: `qconv convert --to bf16` turns it back")
    return said


def floats_of(tensors):
    """The dtype of the first parameter that is not quantized."""
    return next((TORCH[name] for name, _ in tensors.values() if name in ("BF16", "F16")), torch.float32)


# ---- reading ------------------------------------------------------------------------------------


class Places:
    """Where tensors go: while they are read, and when the model is whole."""

    def __init__(self, out, reader, asked):
        self.asked, self.map, self.out = asked, None, out
        devices = [d.name for d in reader.devices if d.tensors]
        if asked is None and devices == ["all"]:
            asked = "cpu"
        elif asked is None:
            for name in devices:
                exists(name, f"{out} was made for it; device_map=\"cpu\" loads it all there")
            asked = devices[0]
            if len(devices) > 1:
                asked = json.loads((out / "device_map.json").read_text())
        if isinstance(asked, dict) and len({str(d) for d in asked.values()}) == 1:
            asked = next(iter(asked.values()))
        self.automatic = isinstance(asked, str) and asked in ("auto", "balanced", "balanced_low_0", "sequential")
        if isinstance(asked, dict):
            self.map = asked
            for device in asked.values():
                exists(device)
        elif not self.automatic:
            self.map = {"": exists(asked)}
        self.planned = self.asked is None

    def of(self, device_name):
        """Where the tensors of a device of the output are read to."""
        if self.map and "" in self.map:
            return self.map[""]
        return exists(device_name) if self.planned else torch.device("cpu")

    def dispatch(self, model):
        if self.map and "" in self.map:
            model = model.to(self.map[""])
            model.hf_device_map = dict(self.map)
            return model
        try:
            import accelerate
        except ImportError:
            raise errors.UsageError("a model on several devices takes accelerate: pip install accelerate") from None
        if self.automatic:
            self.map = accelerate.infer_auto_device_map(
                model, no_split_module_classes=list(getattr(model, "_no_split_modules", None) or []))
        if "disk" in self.map.values():
            raise errors.DeviceError(f"{self.out} does not fit on the devices that there are, and qconv.load leaves no "
                                     "weights on the disk")
        on_cpu = any(str(device) == "cpu" for device in self.map.values())
        return accelerate.dispatch_model(model, self.map, main_device="cpu" if on_cpu else None, force_hooks=True)


def exists(device, why=""):
    """The device, if this machine has it."""
    why = f" ({why})" if why else ""
    if str(device) == "disk":
        raise errors.DeviceError(f"qconv.load leaves no weights on the disk{why}")
    try:
        found = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    except (RuntimeError, TypeError):
        raise errors.DeviceError(f"there is no device {device!r}{why}") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise errors.DeviceError(f"there is no {found}: torch sees {count} CUDA devices{why}")
    elif found.type == "meta":
        raise errors.DeviceError("nothing can be loaded on the device 'meta'")
    return found


def read(reader, places, threads, skip_digests):
    """{name: (dtype as the file has it, tensor)}. On the way to a GPU a tensor is in pinned memory; only codes and
    their scales are sent there, because transformers still works with the rest."""
    out = {}
    for number, device in enumerate(reader.devices):
        if not device.tensors:
            continue
        target, tensors = places.of(device.name), [None] * len(device.tensors)
        to_gpu = set()
        if target.type != "cpu":
            for members in groups({t.name: t.dtype for t in device.tensors}).values():
                to_gpu |= {name for ending, name in members.items()
                           if not ending.endswith(("weight_format", "weight_shape")) and "quant_state." not in ending}

        def place(i):
            t = device.tensors[i]
            dtype = TORCH.get(t.dtype)
            if dtype is None:
                raise errors.InputError(f"tensor '{t.name}' is {t.dtype}, which torch {torch.__version__} does not have")
            tensors[i] = torch.empty(t.shape, dtype=dtype, pin_memory=t.name in to_gpu)
            return tensors[i].data_ptr()

        def done(i):
            if device.tensors[i].name in to_gpu:
                tensors[i] = tensors[i].to(target, non_blocking=True)

        reader.load(number, place, done if to_gpu else None, threads, skip_digests)
        if to_gpu:
            torch.cuda.synchronize(target)
        out.update((t.name, (t.dtype, tensor)) for t, tensor in zip(device.tensors, tensors))
    return out


# ---- the model ----------------------------------------------------------------------------------


def transposed_modules(kind, config):
    """Names of the modules that hold a weight as [in, out], like GPT-2's."""
    if "Conv1D" not in vars(sys.modules[kind.__module__]):
        return set()
    with torch.device("meta"):
        model = kind(config)
    prefix = f"{model.base_model_prefix}."
    names = {name for name, module in model.named_modules() if type(module) is Conv1D}
    return names | {name[len(prefix):] for name in names if name.startswith(prefix)} | {prefix + n for n in names}


def stack_shapes(kind, config):
    with torch.device("meta"):
        return {tuple(p.shape) for p in kind(config).parameters() if p.ndim == 3}


def state_of(tensors, found, transposed, stack_shapes_of, dtype):
    """What from_pretrained is given: each group of tensors as one QuantizedTensor. Codes of stacks lie as [experts, out,
    in]; models hold them so (Mixtral, Qwen), or as [experts, in, out] (gpt-oss)."""
    taken = {name for members in found.values() for name in members.values()}
    state = {name: tensor for name, (_, tensor) in tensors.items() if name not in taken}
    parts = {weight: weights_of(weight, {ending: tensors[name][1] for ending, name in members.items()})
             for weight, members in found.items()}
    stacks = {weight: (len(each), each[0].rows, each[0].cols) for weight, each in parts.items()
              if len(each) > 1 or not weight.endswith(".weight")}
    turned = bool(stacks) and not set(stacks.values()) <= stack_shapes_of()
    for weight, each in parts.items():
        stacked = weight in stacks
        state[weight] = QuantizedTensor([[part] for part in each], dtype, stacked,
                                        turned if stacked else weight.rpartition(".")[0] in transposed)
    return state


def built(kind, config, state, dtype, kwargs):
    kwargs = {k: v for k, v in kwargs.items() if k != "trust_remote_code"}
    try:
        model, info = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype,
                                           output_loading_info=True, **kwargs)
    except errors.Error:
        raise
    except (RuntimeError, ValueError, KeyError) as e:
        raise errors.InputError(f"transformers {transformers.__version__} does not take the output as a "
                                f"{kind.__name__}: {str(e).splitlines()[0]}") from e
    wrong = info.get("mismatched_keys") or info.get("error_msgs")
    if wrong:
        raise errors.InputError(f"transformers {transformers.__version__} does not take the output as a "
                                f"{kind.__name__}: {sorted(map(str, wrong))[0]}")
    return model


def swap(model, backend, dtype, said):
    """Puts modules in the place of quantized weights. Returns the names of these in the file."""
    names = set()
    for path, module in list(model.named_modules()):
        for key, tensor in list(module._parameters.items()):
            if not isinstance(tensor, QuantizedTensor):
                continue
            parent, _, child = path.rpartition(".")
            holder = model.get_submodule(parent) if parent else model
            names |= {part.name for parts in tensor.experts for part in parts}
            if tensor.stacked:
                if backend != "qconv":
                    raise errors.InputError(f"bitsandbytes has no module for the experts of '{path}', which "
                                            f"transformers {transformers.__version__} holds as one tensor")
                del module._parameters[key]
                setattr(module, key, Stack(tensor))
                continue
            if type(module).forward not in (nn.Linear.forward, Conv1D.forward) or key != "weight":
                raise errors.InputError(f"'{tensor.name}' is quantized, and {type(module).__name__}, which holds it, is "
                                        "no linear layer: convert with --keep for it")
            if backend == "qconv":
                new = Linear(tensor.experts[0][0], module.bias, dtype)
            else:
                from ._bitsandbytes import module_of
                new = module_of(tensor.experts[0][0], module.bias, dtype, said)
            new.train(module.training)
            holder._modules[child] = new
    return names


def remember(model, said, backend):
    """So that save_pretrained says of the codes that it writes what the output said, and peft knows them."""
    model.config.quantization_config = said
    if backend == "bitsandbytes":
        from ._bitsandbytes import mark
        mark(model, said)


def no_save(*_, **__):
    raise errors.UsageError("a model whose experts transformers holds as one tensor is not saved with qconv's codes: the "
                            "folder that it was loaded from has them")


def generation_config(model, out):
    if model.can_generate() and (out / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(out)
