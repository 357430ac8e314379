"""How qconv.load works: read, let transformers put everything in its place, then swap in modules that multiply.

Every quantized weight goes through from_pretrained as a QuantizedTensor under the weight's own name. So transformers
renames, ties, stacks and checks it like any other, in each version by its own rules, and no number is touched.
"""
import contextlib
import json
import re
import sys
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from . import _library, errors
from ._stream_loader import judge_keys
from ._weights import TORCH, dtype_of, groups, joined, says_how, weights_of
from .torch import Linear, QuantizedTensor, Stack

# Packed by other tools, and kept beside weights that qconv quantized.
OTHERS = {"fp8", "mxfp4", "int-quantized", "pack-quantized", "gptq", "awq", "nvfp4"}


def loaded(out, device_map, dtype, threads, skip_digests, kwargs):
    out = Path(out)
    with _library.Reader(out) as reader:
        side = {name: side_file(reader, name, skip_digests)
                for name in ("config.json", "device_map.json", "generation_config.json")}
        config = config_of(out, kwargs, trusting=skip_digests)
        kind = class_of(config, out)
        places = Places(out, reader, device_map, side["device_map.json"])
        tensors = read(reader, places, threads, skip_digests)
    said = quantization_of(config, out)
    found = groups({name: dtype_name for name, (dtype_name, _, _) in tensors.items()})
    if found:
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            part._is_quantized = True  # models with Mamba's layers look for it
    if dtype is None:
        dtype = getattr(config, "dtype", None) or next(
            (TORCH[name] for name, _ in tensors.values() if name in ("BF16", "F16")), torch.float32)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise errors.InputError(f"the dtype of {out} is {dtype!r:.40}; expected one of torch for floats")
    with taken_as(kind), contextlib.ExitStack() as stack:
        state = state_of(tensors, found, kind, config, dtype)
        weights = {name: tensor for name, tensor in state.items() if isinstance(tensor, QuantizedTensor)}
        del tensors
        if any(tensor.stacked or ".experts." in name for name, tensor in weights.items()) and not transformers.__version__.startswith("4."):
            from . import _experts
            _experts.register()
            kwargs = {"experts_implementation": _experts.IMPLEMENTATION, **kwargs}
            stack.enter_context(_experts.gathered())
        kwargs = {k: v for k, v in kwargs.items() if k != "trust_remote_code"}
        kwargs["ignore_mismatched_sizes"] = True  # here they are an exception that names one
        if any(".experts." in name and not tensor.stacked for name, tensor in weights.items()):
            stack.enter_context(experts_as_modules(kind))
        model, info = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype,
                                           output_loading_info=True, **kwargs)
        for name, *sizes in sorted(info["mismatched_keys"]):
            raise ValueError("'%s' is %s in the file and %s in the model" % (name, *map(list, sizes)))
        if info.get("error_msgs"):
            raise ValueError(info["error_msgs"][0])
    del state
    swapped = swap(model, dtype)
    if apart := sorted(set(weights) - swapped):
        raise errors.InputError(f"{kind.__name__} of transformers {transformers.__version__} has no place for the "
                                f"quantized weight '{apart[0]}' of {out}" +
                                (f" and {len(apart) - 1} more" if len(apart) > 1 else ""))
    judge_keys(model, sorted(info["missing_keys"]), sorted(info["unexpected_keys"]))
    model.config._name_or_path = model.name_or_path = str(out)  # adapters name their base by it
    if model.can_generate() and side["generation_config.json"]:
        with taken_as(kind):
            model.generation_config = transformers.GenerationConfig.from_pretrained(out)
    model = places.dispatch(model)
    if found and said:  # save_pretrained says of the codes what the output said, and peft knows them
        model.config.quantization_config = said
    if any(isinstance(module, Stack) or getattr(module, "divided", False) for module in model.modules()):
        model.save_pretrained = no_save
    return model


@contextlib.contextmanager
def taken_as(kind):
    """What transformers makes of a config or of weights that it does not expect, in one sentence."""
    QuantizedTensor.refused = None
    try:
        yield
    except (errors.Error, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        if QuantizedTensor.refused:
            raise QuantizedTensor.refused from None
        raise errors.InputError(f"transformers {transformers.__version__} does not take the output as a "
                                f"{kind.__name__}: {[*str(e).splitlines(), type(e).__name__][0]}") from e


@contextlib.contextmanager
def experts_as_modules(kind):
    """Builds a model as transformers does whose weights are codes: Llama 4 with a module for each expert."""
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION as patches
    module = sys.modules[kind.__module__]
    plain = {name: vars(module)[name] for name in patches if name in vars(module)}
    for name, stacks in plain.items():
        modules = patches[name]["module_name"]
        setattr(module, name, type(name, (stacks,), {"__new__": lambda cls, config, modules=modules: modules(config)}))
    try:
        yield
    finally:
        vars(module).update(plain)


# ---- what the output says -----------------------------------------------------------------------


def side_file(reader, name, skip_digests):
    """The object of a JSON file of the output, None where there is no such file."""
    content = reader.file(name, skip_digests)
    try:
        found = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as e:
        raise errors.InputError(f"{reader.folder / name} is no JSON: {e}") from None
    if not isinstance(found, dict):
        raise errors.InputError(f"{reader.folder / name} is no JSON object")
    return None if content is None else found


def config_of(out, kwargs, trusting=False):
    if not (out / "config.json").is_file():
        raise errors.InputError(f"{out} has no config.json, so the class of its model is not known")
    more = {k: kwargs[k] for k in ("trust_remote_code",) if k in kwargs}
    try:
        return transformers.AutoConfig.from_pretrained(out, **more)
    except Exception as e:  # also what the checks of huggingface_hub raise, which has no name in every version
        if not trusting:
            _library.Reader.check_beside(out / "config.json")
        what = re.search(r'"model_type"\s*:\s*"([^"]*)"', (out / "config.json").read_text(errors="replace"))
        lines = [line.strip() for line in str(e).splitlines()] or [type(e).__name__]
        why = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
        raise errors.InputError(f"transformers {transformers.__version__} does not take the config.json of {out} "
                                f"(model_type {what and what[1]!r}): {why}") from None


def class_of(config, out):
    names = getattr(config, "architectures", None) or []
    names = names if isinstance(names, list) else [names]
    for name in names:
        kind = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    if names:
        raise errors.InputError(f"transformers {transformers.__version__} has no {names[0]!s:.60}, which config.json of "
                                f"{out} names")
    try:
        return transformers.AutoModel._model_mapping[type(config)]
    except KeyError:
        raise errors.InputError(f"config.json of {out} names no architecture") from None


def quantization_of(config, out):
    said = getattr(config, "quantization_config", None)
    if said is None:
        return None
    said = said if isinstance(said, dict) or not hasattr(said, "to_dict") else said.to_dict()
    if not isinstance(said, dict):
        raise errors.InputError(f"the quantization_config in config.json of {out} is no JSON object")
    if said.get("quant_method") == "qconv":
        others = OTHERS & set(str(said.get("quant_type", "")).split("+"))
        if others:
            raise errors.InputError(f"the output holds weights of another tool ({', '.join(sorted(others))}) beside "
                                    "qconv's, which qconv.load does not read: `qconv convert --to bf16` turns it back")
    return said


# ---- reading ------------------------------------------------------------------------------------


class Places:
    """Where tensors go: while they are read, and when the model is whole."""

    def __init__(self, out, reader, asked, planned):
        self.asked, self.map, self.out = asked, None, out
        devices = [d.name for d in reader.devices if d.tensors]
        if asked is None and devices == ["all"]:
            asked = "cpu"
        elif asked is None:
            for name in devices:
                exists(name, f"{out} was made for it; device_map=\"cpu\" loads it all there")
            asked = devices[0]
            if len(devices) > 1:
                asked = planned
                if not asked or any(type(device) not in (str, int) for device in asked.values()):
                    raise errors.InputError(f"{out} has no device_map.json that names a device for each module")
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
        try:
            return accelerate.dispatch_model(model, self.map, main_device="cpu" if on_cpu else None, force_hooks=True)
        except (ValueError, KeyError) as e:
            raise (errors.InputError if self.planned else errors.UsageError)(
                f"accelerate does not take the device_map of {self.out}: {e}") from e


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
    """{name: (dtype as the file has it, tensor, scheme)}. On the way to a GPU a tensor is in pinned memory; only codes and
    their scales are sent there, because transformers still works with the rest."""
    out = {}
    for number, device in enumerate(reader.devices):
        if not device.tensors:
            continue
        target, tensors = places.of(device.name), [None] * len(device.tensors)
        to_gpu = set()
        if target.type != "cpu":
            for members in groups({t.name: t.dtype for t in device.tensors}).values():
                to_gpu |= {name for ending, name in members.items() if not says_how(ending)}

        def place(i):
            t = device.tensors[i]
            tensors[i] = torch.empty(t.shape, dtype=dtype_of(t), pin_memory=t.name in to_gpu)
            return tensors[i].data_ptr()

        def done(i):
            if device.tensors[i].name in to_gpu:
                tensors[i] = tensors[i].to(target, non_blocking=True)

        reader.load(number, place, done if to_gpu else None, threads, skip_digests)
        if to_gpu:
            torch.cuda.synchronize(target)
        out.update((t.name, (t.dtype, tensor, t.scheme)) for t, tensor in zip(device.tensors, tensors))
    return out


# ---- the model ----------------------------------------------------------------------------------


def state_of(tensors, found, kind, config, dtype):
    """What from_pretrained is given: each group of tensors as one QuantizedTensor. Codes of stacks lie as [experts, out,
    in]; models hold them so (Mixtral, Qwen), or as [experts, in, out] (gpt-oss)."""
    taken = {name for members in found.values() for name in members.values()}
    state = {name: tensor for name, (_, tensor, _) in tensors.items() if name not in taken}
    parts = {weight: weights_of(weight, {ending: tensors[name][1] for ending, name in members.items()},
                                tensors[next(iter(members.values()))][2]) for weight, members in found.items()}
    stacks = {weight: (len(each), each[0].rows, each[0].cols) for weight, each in parts.items()
              if len(each) > 1 or not weight.endswith(".weight")}
    turned, lie = False, set()  # whether stacks, and which modules, hold weights as [in, out]
    if stacks or "Conv1D" in vars(sys.modules[kind.__module__]):
        with torch.device("meta"):
            model = kind(config)
        turned = not set(stacks.values()) <= {tuple(p.shape) for p in model.parameters() if p.ndim == 3}
        prefix = f"{model.base_model_prefix}."
        names = {name for name, module in model.named_modules() if type(module) is Conv1D}
        lie = names | {name.removeprefix(prefix) for name in names} | {prefix + name for name in names}
    for weight, each in parts.items():
        stacked = weight in stacks
        state[weight] = QuantizedTensor([[part] for part in each], dtype, stacked,
                                        turned if stacked else weight.rpartition(".")[0] in lie)
    return state


def swap(model, dtype):
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
                del module._parameters[key]
                setattr(module, key, Stack(tensor))
                continue
            if type(module).forward not in (nn.Linear.forward, Conv1D.forward) or key != "weight":
                raise errors.InputError(f"'{tensor.name}' is quantized, and {type(module).__name__}, which holds it, is "
                                        "no linear layer: convert with --keep for it")
            new = Linear(joined(tensor.experts[0]), module.bias, dtype)
            new.train(module.training)
            holder._modules[child] = new
    return names


def no_save(*_, **__):
    raise errors.UsageError("a model whose weights transformers joins or divides is not saved with qconv's codes: the folder "
                            "that it was loaded from has them")

