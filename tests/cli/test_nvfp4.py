"""Weights in NVFP4. The golden files are compressed-tensors' and ModelOpt's own (golden/gen_nvfp4.py), and beside each
lies what that library makes of it in float32."""
import json
import os
import re
import shutil
import struct
import unittest

from output_case import PLAIN
from qconv_case import ROOT, SANITIZED
from test_auto import ROOM
from test_forms import Forms
import make_checkpoint as mk
import test_values

GOLDEN = os.path.join(ROOT, "tests", "golden", "nvfp4")
CT, MODELOPT, STACKS = "compressed-tensors", "modelopt", "stacks"
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
CONFIGS = {
    CT: {"model_type": "qwen3_moe", "num_experts": 2, "quantization_config": {
        "quant_method": CT, "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4}}}},
    MODELOPT: {"model_type": "qwen3_moe", "num_experts": 2, "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}},
    STACKS: {"model_type": "llama4_text", "num_local_experts": 2, "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}},
}
M = "model.layers.0.self_attn.q_proj."


def golden(name):
    return mk.read_safetensors(os.path.join(GOLDEN, name + ".safetensors"))[0]


class Case(Forms):
    replaces = True

    def source(self, name, tensors=None, **config):
        self.model(tensors or golden(name), {**CONFIGS[name], "torch_dtype": "bfloat16", **config}, name=name)
        return golden(name), golden(name + ".values")


@unittest.skipIf(SANITIZED, "a library with sanitizers cannot be loaded")
class Values(test_values.Case):
    source = Case.source

    def test_as_the_libraries_have_them(self):
        """Bit for bit in float32, the sign of a zero among them, whole and from any row on."""
        for name in CONFIGS:
            _, values = self.source(name)
            with test_values.Values(self.path(name)) as v:
                self.assertEqual({n for n in v.names if v.stored_as[n] == "nvfp4"}, set(values))
                for weight, (_, shape, data) in values.items():
                    with self.subTest(name=name, weight=weight):
                        self.assertEqual(v.listed[weight], ("BF16", shape))
                        self.assertEqual(v.read(weight, "F32"), data)
                        first = shape[0] - 1
                        self.assertEqual(v.read(weight, "F32", first), data[len(data) // shape[0] * first:])
            self.check(name, stored=["nvfp4"])


class Targets(Case):
    def test_every_target(self):
        """What becomes of it is what becomes of a checkpoint that has its values in float32."""
        for name in (CT, MODELOPT, STACKS):
            tensors, values = self.source(name)
            rest = {n: t for n, t in tensors.items() if n in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")}
            floats = {**rest, **values}
            self.model(floats, {k: v for k, v in CONFIGS[name].items() if k != "quantization_config"}, name="f")
            for to in ["bf16", "fp16"] + (["nf4", "int8"] if name != STACKS else []):
                options = ["--to", to] + (["--no-double-quant"] if to == "nf4" else [])
                out, same = self.convert(*options, name, "o"), self.convert(*options, "f", "p")
                self.assertEqual(set(out), set(same))
                for n in out:
                    if "quant_state" not in n:
                        self.assertEqual(out[n], same[n], (name, to, n))
                if to in ("bf16", "fp16"):
                    self.assertNotIn("quantization_config", self.json_of("o", "config.json"))
                self.check_verified("o", name, len(values))
                shutil.rmtree(self.path("o"))
                shutil.rmtree(self.path("p"))

    def check_verified(self, out, source, weights):
        for has_manifest in (True, False):
            report = json.loads(self.ok("verify", "--json", out, "--against", source))
            self.assertTrue(report["ok"], report)
            if has_manifest:
                self.assertGreaterEqual(report["source_digests"], weights)
                os.remove(self.path(out, "qconv.json"))

    def test_integers_and_auto(self):
        for name in (CT, MODELOPT):
            _, values = self.source(name, num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
                                    num_key_value_heads=1, head_dim=16, vocab_size=8)
            for options in (["--to", "int4", "--block-size", "32"], ["--to", "int8", "--activation-bits", "16"],
                            ["--to", "auto", "--vram", "40KB", *ROOM, "--schemes", "int4-32,16bit"]):
                self.ok(*options, "--format", CT, *PLAIN, name, "o")
                self.assertEqual(self.quantization("o")["quant_method"], CT)
                self.assertFalse([n for n in mk.read_checkpoint(self.path("o")) if n.endswith("global_scale") or
                                  n.endswith("scale_2") or "input" in n])
                self.check_verified("o", name, len(values))
                shutil.rmtree(self.path("o"))

    def test_kept(self):
        """--to keep and --keep leave a weight with all that belongs to it; a list says which modules are plain."""
        for name in (CT, MODELOPT):
            tensors, _ = self.source(name)
            self.assertEqual(self.convert("--to", "keep", name, "o"), tensors)
            shutil.rmtree(self.path("o"))
            out = self.convert("--to", "bf16", "--keep", "*experts*", name, "o")
            kept = {n: t for n, t in tensors.items() if "experts" in n}
            self.assertEqual({n: t for n, t in out.items() if "experts" in n}, kept)
            self.assertIn(M[:-1], self.quantization("o")["ignore"])
            self.assertTrue(json.loads(self.ok("verify", "--json", "o", "--against", name))["ok"])
            shutil.rmtree(self.path("o"))
            out = self.convert("--to", "nf4", "--keep", "*experts*", name, "o")
            self.assertEqual({n: t for n, t in out.items() if "experts" in n}, kept)
            self.assertEqual(self.quantization("o")["quant_type"], "nf4+nvfp4")
            shutil.rmtree(self.path("o"))

    def test_named_before_it_gets_4_bits_again(self):
        self.source(MODELOPT)
        for to, count in (("nf4", 1), ("int8", 0), ("bf16", 0), ("keep", 0)):
            said = self.run_qconv("--force", *PLAIN, "--to", to, MODELOPT, "o").stderr.decode()
            self.assertEqual(len(re.findall("10 weights of modelopt are in nvfp4 already", said)), count, said)

    def test_planned(self):
        """Without --to a plan keeps it, as it does other weights of 4 bits, also where it is split over cards."""
        for name in (CT, MODELOPT):
            self.source(name, num_hidden_layers=1, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
                        vocab_size=8, moe_intermediate_size=32, num_experts_per_tok=1)
            for options in (["--vram", "8GB"], ["--vram", "2x8GB", "--tp", "2"]):
                plan = json.loads(self.ok("plan", "--json", "--incomplete", *options, name))
                self.assertEqual(plan["to"], "keep")
                self.assertEqual(list(plan["schemes"]), ["keep"])

    def test_inspected(self):
        for name, weights in ((CT, 18432), (MODELOPT, 18432), (STACKS, 5376)):
            self.source(name)
            facts = json.loads(self.ok("inspect", "--json", name))
            self.assertEqual(facts["totals"]["weights"], weights + 2 * 8 * 64 + 64)
            rows = [t for t in facts["tensors"] if t.get("scheme") == "nvfp4"]
            self.assertEqual({(t["bits"], t["block_size"], t["logical_dtype"]) for t in rows}, {(4, 16, "BF16")})


class Refused(Case):
    def check(self, tensors, says, name, weight=M, **config):
        self.source(name, tensors, **config)
        for to in ("bf16", "nf4", "int8"):
            self.assertIn(weight, self.fails(3, "--to", to, name, "o", has=says))
            self.assert_nothing("o")
        self.assertEqual(self.convert("--to", "keep", name, "o"), tensors)
        shutil.rmtree(self.path("o"))

    def without(self, name, tail):
        return {n: t for n, t in golden(name).items() if not n.startswith(M) or not n.endswith(tail)}

    def test_without_its_global_scale(self):
        self.check(self.without(CT, "weight_global_scale"), ["without the weight_global_scale", "--keep"], CT)
        self.check(self.without(MODELOPT, "weight_scale_2"), ["without the weight_scale_2", "--keep"], MODELOPT)
        stack = "model.layers.0.feed_forward.experts.gate_up_proj"
        self.check({n: t for n, t in golden(STACKS).items() if n != stack + "_weight_scale_2"},
                   ["without the weight_scale_2", "--keep"], STACKS, stack)

    def test_other_shapes(self):
        for name, tail, bad in ((CT, "weight_scale", ("F8_E4M3", [32, 2], bytes(64))),
                                (MODELOPT, "weight_scale", ("F8_E4M3", [128, 4], bytes(512))),
                                (MODELOPT, "weight_scale_2", ("F32", [2], bytes(8))),
                                (MODELOPT, "weight_scale_2", ("BF16", [], bytes(2)))):
            self.check({**golden(name), M + tail: bad}, ["scales of another shape", "--keep"], name)

    def test_what_changes_the_layer(self):
        """Forms whose codes and scales alone are not the weight, and files of ComfyUI, whose scales are in another
        order."""
        tensors = golden(MODELOPT)
        self.check({**tensors, M + "pre_quant_scale": ("BF16", [64], bytes(128))}, ["pre_quant_scale"], MODELOPT)
        marker = b'{"format": "nvfp4"}'
        self.check({**tensors, M + "comfy_quant": ("U8", [len(marker)], marker)}, ["for ComfyUI"], MODELOPT)
        mk.write_safetensors(self.path("alone.safetensors"), tensors)
        self.fails(3, "--to", "bf16", "alone.safetensors", "o", has=["for ComfyUI"])
        for key in ("_quantization_metadata", "quantization_config"):
            mk.write_safetensors(self.path("f.safetensors"), tensors, {"format": "pt", key: "{}"})
            self.source(MODELOPT)
            shutil.move(self.path("f.safetensors"), self.path(MODELOPT, "model.safetensors"))
            self.fails(3, "--to", "bf16", MODELOPT, "o", has=["for ComfyUI"])
        self.model({**golden(CT)}, {**CONFIGS[CT], "quantization_config": {
            **CONFIGS[CT]["quantization_config"], "transform_config": {"config_groups": {"R1": {}}}}}, name=CT)
        self.fails(3, "--to", "bf16", CT, "o", has=["rotations"])

    def test_values(self):
        """NaN among the scales, and a global scale that is 0 or no number."""
        for name, tail in ((CT, "weight_global_scale"), (MODELOPT, "weight_scale_2")):
            tensors = golden(name)
            dtype, shape, _ = tensors[M + tail]
            for value in (0.0, float("nan"), float("inf")):
                self.source(name, {**tensors, M + tail: (dtype, shape, struct.pack("<f", value))})
                self.fails(3, "--to", "bf16", name, "o", has=[M + tail, "finite"])
                self.assert_nothing("o")
            scales = tensors[M + "weight_scale"]
            nan = scales[2][:5] + b"\x7f" + scales[2][6:]
            self.source(name, {**tensors, M + "weight_scale": (*scales[:2], nan)})
            self.fails(3, "--to", "bf16", name, "o", has=["row 1, group 1", "not finite"])


if __name__ == "__main__":
    unittest.main()
