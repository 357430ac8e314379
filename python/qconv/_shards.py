"""from_pretrained of transformers, 4 and 5, for outputs whose shards are compressed: it takes them for files of torch, and
libqconv reads them. What qconv.json lists is what is read, whatever else lies in the folder.
"""
import functools
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from ._library import Reader
from ._stored import Output
from ._weights import dtype_of

ENDING = ".safetensors.zst"


def register(modeling):
    """Teaches transformers.modeling_utils."""
    resolve, load = modeling._get_resolved_checkpoint_files, modeling.load_state_dict

    @functools.wraps(resolve)
    def resolved(pretrained_model_name_or_path, *args, **kwargs):
        folder = os.path.join(pretrained_model_name_or_path or "", kwargs.get("subfolder") or "")
        if not pretrained_model_name_or_path or not os.path.isfile(os.path.join(folder, "qconv.json")):
            return resolve(pretrained_model_name_or_path, *args, **kwargs)
        with Reader(folder) as reader:
            shard_of = {t.name: t.shard for device in reader.devices for t in device.tensors}
        files = [os.path.join(folder, name) for name in sorted(set(shard_of.values()))]
        if not all(name.endswith(ENDING) for name in files):
            return resolve(pretrained_model_name_or_path, *args, **kwargs)
        return files, {"all_checkpoint_keys": list(shard_of), "weight_map": shard_of} if len(files) > 1 else None

    @functools.wraps(load)
    def load_state_dict(checkpoint_file, *args, map_location="cpu", **kwargs):
        if not str(checkpoint_file).endswith(ENDING):
            return load(checkpoint_file, *args, map_location=map_location, **kwargs)
        folder, shard = os.path.split(checkpoint_file)
        with Output(folder) as output, ThreadPoolExecutor(os.cpu_count()) as pool:
            found = {name: t for name, (_, t) in output.tensors.items() if t.shard == shard}
            if str(map_location) == "meta":
                return {name: torch.empty(t.shape, dtype=dtype_of(t), device="meta") for name, t in found.items()}
            return {name: tensor.to(map_location) for name, tensor in zip(found, pool.map(output.read, found))}

    modeling._get_resolved_checkpoint_files, modeling.load_state_dict = resolved, load_state_dict
