"""The load format "qconv": tensors of an output through libqconv, to whatever model class vLLM has."""
import os
from concurrent.futures import ThreadPoolExecutor

from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from .. import _cuda, errors
from . import NAME, is_output
from .pieces import handle
from .._stored import Output


@register_model_loader(NAME)
class QconvLoader(BaseModelLoader):
    def __init__(self, load_config):
        super().__init__(load_config)
        asked = dict(load_config.model_loader_extra_config or {})
        self.restores = asked.pop("restore", False)
        if asked or not isinstance(self.restores, bool):
            raise errors.UsageError(f"--model-loader-extra-config is {load_config.model_loader_extra_config}; load format "
                                    "qconv has 'restore', true or false, and nothing else")

    def download_model(self, model_config):
        if not is_output(model_config.model):
            raise errors.InputError(f"{model_config.model}: no qconv.json is there, so it is no finished output of "
                                    "qconv on this machine")

    def load_weights(self, model, model_config):
        self.download_model(model_config)
        problem = _cuda.cuda_library().problem if current_platform.is_cuda() else None
        if problem and model_config.quantization == NAME and not self.restores:
            raise errors.UsageError(
                f"{model_config.model}: qconv's kernels for GPUs cannot be used: {problem}; without them every weight is "
                "restored whenever it is used, which is slow. Build the package with them (pip install . "
                "--config-settings=cmake.define.QCONV_CUDA=ON), or ask for it with --model-loader-extra-config "
                "'{\"restore\": true}'")
        with Output(model_config.model) as output, ThreadPoolExecutor(os.cpu_count()) as pool:
            started = []

            def start(make):
                started.append(pool.submit(make))
                return started[-1].result

            try:
                # In the order of the files. Where vLLM multiplies quantized weights itself, all is as it is in the files.
                read = ((name, handle(stored, start) if stored else output.read(name)) for name, stored in output.weights()) \
                    if model_config.quantization == NAME else ((name, output.read(name)) for name in output.tensors)
                loaded = model.load_weights(read)
                for reading in started:
                    reading.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if loaded is not None and model_config.quantization in (None, NAME):
            DefaultModelLoader.track_weights_loading(self, model, loaded, quantized=True)
