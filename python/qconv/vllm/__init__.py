"""vLLM serves outputs of qconv with this plug-in, on one card or on several:

    vllm serve OUT --tensor-parallel-size 2

vLLM finds it by the entry point group vllm.general_plugins and calls register() in each of its processes. It takes
every folder that has a qconv.json, compressed or not, and asks for no option:

    load format "qconv"    reads the tensors through libqconv, digests or checksums checked, and of quantized weights
                           the rows or columns that this worker multiplies with
    quantization "qconv"   NF4, int8 and mixtures of them and 16 bits multiply with qconv's operators

Outputs in the form of compressed-tensors keep vLLM's own kernels; --quantization qconv takes them to qconv's.
With --load-format or --quantization of another name vLLM does without the plug-in.
"""
import os

NAME = "qconv"


def is_output(folder) -> bool:
    """Whether a folder is a finished output of qconv."""
    return bool(folder) and os.path.isfile(os.path.join(folder, "qconv.json"))


def register() -> None:
    """Tells vLLM of the quantization and of the load format. vLLM calls it, once or more in a process."""
    from vllm.engine.arg_utils import EngineArgs

    from . import layers, loader  # noqa: F401, which register themselves

    if hasattr(EngineArgs.create_load_config, "qconv"):
        return
    create = EngineArgs.create_load_config

    def create_load_config(self):
        if self.load_format == "auto" and is_output(self.model):
            self.load_format = NAME
        return create(self)

    create_load_config.qconv = True
    EngineArgs.create_load_config = create_load_config
