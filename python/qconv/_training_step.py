"""What `plan-training --profile` measures: two steps of a setting in torch on the first GPU. The second one has the
optimizer's states, so that everything the estimate counts is there at its peak. ZeRO divides nothing here."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Callable

from ._program import answer
from .errors import DeviceError, InputError, RunError
from .results import Hardware, Json

if TYPE_CHECKING:
    from .training import Setting


def measure(model: str, has_weights: bool, s: Setting, tokens: int) -> Json:
    """Bytes of the CUDA context, and the most that torch had allocated in a step. Raises DeviceError without a GPU."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise DeviceError("--profile runs a step in torch on a GPU, and Python has no '%s' here" % error.name) from None
    if not torch.cuda.is_available():
        raise DeviceError("--profile needs a GPU, and torch finds none")
    if s.method == "qlora" and not has_weights:
        raise InputError("%s: --profile of QLoRA needs a checkpoint with weights to quantize" % model)
    before = _free_bytes()
    torch.ones(1, device="cuda") + 1
    context = max(0, before - _free_bytes() - torch.cuda.memory_reserved())
    try:
        step = trainer(transformers, torch, model, has_weights, s, tokens, "cuda")
        step()
        step()
    except torch.cuda.OutOfMemoryError:
        raise RunError("--profile: out of memory after %d bytes" % torch.cuda.max_memory_allocated()) from None
    return {"gpu": torch.cuda.get_device_name(0), "context_bytes": context,
            "allocated_bytes": torch.cuda.max_memory_allocated()}


def _free_bytes() -> int:
    gpus = answer(Hardware, "hardware", [], {}).json["gpus"]
    return int(gpus[0]["free_bytes"]) if gpus else 0


def trainer(transformers: Any, torch: Any, model: str, has_weights: bool, s: Setting, tokens: int,
            device: str) -> Callable[[], float]:
    """A function that does one step on random ids and returns its loss."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[s.precision]
    auto = transformers.AutoModelForCausalLM
    if has_weights:
        more = {}
        if s.method == "qlora":
            more["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
        net = auto.from_pretrained(model, dtype=dtype, device_map={"": device}, **more)
    else:  # random ones
        with torch.device(device):
            net = auto.from_config(transformers.AutoConfig.from_pretrained(model), dtype=dtype)
    if s.checkpointing:
        net.gradient_checkpointing_enable()
    if not s.full:
        import peft
        net = peft.get_peft_model(net, peft.LoraConfig(r=s.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        net.enable_input_require_grads()
    net.train()
    updates = [_update(torch, s, p) for p in net.parameters() if p.requires_grad]
    ids = torch.randint(0, net.config.get_text_config().vocab_size, (s.micro_batch, tokens), device=device)

    def step() -> float:
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for update in updates:
            update()
        return float(loss)
    return step


def _update(torch: Any, s: Setting, parameter: Any) -> Callable[[], None]:
    """The optimizer's step for one parameter. One in 16 bits has a float32 copy, which small steps are added to."""
    master = parameter if parameter.element_size() == 4 else parameter.detach().float().requires_grad_()
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    if s.optimizer == "adam8bit":
        optimizer = importlib.import_module("bitsandbytes").optim.Adam8bit([master], lr=1e-4)
    elif s.optimizer in kinds:
        optimizer = kinds[s.optimizer]([master], lr=1e-4)
    else:
        optimizer = torch.optim.SGD([master], lr=1e-4, momentum=0.9)

    def update() -> None:
        if parameter.grad is None:
            return
        if master is not parameter:
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        master.grad = None
        if master is not parameter:
            with torch.no_grad():
                parameter.copy_(master)
    return update
