"""qconv's device maps in accelerate and transformers.

On models without weights (meta tensors), because that is how a map is read before a model is
loaded.
"""
import json
import shutil
import sys
import unittest
import warnings

import accelerate.utils
import interop_support as s
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

s.quiet()
sys.path.insert(0, str(s.ROOT / "tests"))
import make_checkpoint  # noqa: E402

# What transformers builds from these configurations without code from elsewhere.
FAMILIES = ["Llama-3.3-70B-Instruct", "Qwen2.5-72B-Instruct", "Qwen3-32B", "gpt-oss-20b",
            "gemma-2-2b", "deepseek-llm-7b-chat", "all-MiniLM-L6-v2", "DeepSeek-V2.5",
            "Llama-3.2-11B-Vision-Instruct"]


def device_map(model, vram, *more):
    return json.loads(s.qconv("plan", "-q", "--json", "--vram", vram, *more, model))["device_map"]


def empty(folder, kind):
    with init_empty_weights():
        return kind.from_config(AutoConfig.from_pretrained(folder))


def kind_of(name):
    if "Vision" in name:
        return AutoModelForImageTextToText
    return AutoModel if "minilm" in name.lower() else AutoModelForCausalLM


class DeviceMaps(unittest.TestCase):
    def accepted(self, model, placed, where, two_names=False):
        """Every key is a module, and every parameter lies below one: accelerate's own check, which
        warns of the first and raises for the second. two_names: the map has the module names of
        older versions beside today's."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if two_names else "error")
            accelerate.utils.check_device_map(model, placed)
        for name, _ in model.named_parameters():
            keys = [k for k in placed if name == k or name.startswith(k + ".")]
            self.assertEqual(len(keys), 1, (where, name, keys))

    def test_families(self):
        """Full-size models, from headers alone."""
        for name in FAMILIES:
            with self.subTest(name=name):
                folder = s.SCRATCH / "headers" / name
                make_checkpoint.write_model(str(folder), make_checkpoint.load_model(name))
                model = empty(folder, kind_of(name))
                for vram in ("4x40GB", "2x40GB+cpu:300GB+disk", "cpu:900GB"):
                    placed = device_map(folder, vram)
                    self.accepted(model, placed, (name, vram), two_names="Vision" in name)
                    s.note(f"{name}: {len(placed)} entries over {len(set(placed.values()))} devices")
                shutil.rmtree(folder)


if __name__ == "__main__":
    s.main()
