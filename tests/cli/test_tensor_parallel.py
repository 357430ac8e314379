"""qconv plan and convert --tp: a model split over cards as vLLM splits it.

tests/data/vllm_allocation.json has the bytes that vLLM's workers held as weights; it was written by
tests/interop/test_interop_vllm.py with vLLM on the CPU, and no qconv took part in that."""
import json
import os
import subprocess
import unittest

from output_case import PLAIN, OutputCase
from qconv_case import QCONV, ROOT, SANITIZED
import make_checkpoint as mk
import vllm_models

TWO = ["--vram", "2x1GB", "--tp", "2"]
KJV = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
LLAMA70 = "meta-llama/Llama-3.3-70B-Instruct"
with open(os.path.join(ROOT, "tests", "data", "vllm_allocation.json"), encoding="utf-8") as f:
    RECORDED = json.load(f)


class TensorParallel(OutputCase):
    def plan(self, *args):
        return json.loads(self.ok("plan", "--json", *args))

    def model(self, name, **changes):
        config, rows = vllm_models.models()[name]
        config.update(changes)
        vllm_models.write(self.path(name), config, rows)
        return self.path(name)

    def test_every_card_has_the_bytes_that_vllm_had(self):
        models = vllm_models.models()
        self.assertEqual(set(models), set(RECORDED["bytes"]))
        for name in models:
            with self.subTest(name):
                plan = self.plan(*TWO, self.model(name))
                self.assertEqual([d["weight_bytes"] for d in plan["devices"]],
                                 RECORDED["bytes"][name])
                self.assertEqual(plan["to"], "keep")

    def test_one_card_has_all(self):
        plan = self.plan("--vram", "1GB", "--tp", "1", self.model("llama"))
        padding = (1024 - vllm_models.VOCABULARY) * vllm_models.HIDDEN * 2
        self.assertEqual(plan["devices"][0]["weight_bytes"], plan["weight_bytes"] + 2 * padding)

    def test_caches_are_split_by_heads(self):
        for name, share in (("llama", 2), ("llama-one-kv-head", 1), ("deepseek_v2", 1)):
            with self.subTest(name):
                model = self.model(name)
                whole = self.plan("--vram", "2x1GB", "--mla", "absorbed", model)
                split = self.plan(*TWO, model)
                self.assertEqual(split["kv_bytes"] * share, whole["kv_bytes"])
                self.assertEqual({d["kv_bytes"] for d in split["devices"]}, {split["kv_bytes"]})
                self.assertLess(split["devices"][0]["workspace_bytes"],
                                whole["devices"][0]["workspace_bytes"])

    def test_the_answer_has_vllms_command(self):
        text = self.ok("plan", "--to", "bf16", "--vram", "4x80GB", "--tp", "4", "--context", "4096",
                       "--margin", "0.85", LLAMA70)
        command = ("vllm serve OUT --tensor-parallel-size 4 --max-model-len 4096 "
                   "--gpu-memory-utilization 0.85 --max-num-batched-tokens 2048")
        self.assertEqual(text.splitlines()[-1], "  " + command)
        self.assertTrue(text.splitlines()[-2].endswith(
            "qconv --to bf16 --vram 4x80GB --tp 4 --context 4096 --margin 0.85 --compress none "
            "Llama-3.3-70B-Instruct OUT"), text)
        self.assertIn("every layer is split over 4 cards", text)
        plan = self.plan("--to", "bf16", "--vram", "4x80GB", "--parallel", "tensor", "--context",
                         "4096", "--margin", "0.85", LLAMA70)
        self.assertEqual((plan["parallel"], plan["tensor_parallel"], plan["vllm"]),
                         ("tensor", 4, command))
        self.assertIsNone(plan["device_map"])
        self.assertEqual(plan["prefill_tokens"], 2048)
        # Layers that are placed whole have none.
        plan = self.plan("--vram", "2x40GB", LLAMA70)
        self.assertEqual((plan["parallel"], plan["tensor_parallel"], plan["vllm"]),
                         ("layers", None, None))

    def test_what_does_not_fit_is_split_further(self):
        plan = self.plan("--to", "bf16", "--vram", "2x40GB", "--tp", "2", LLAMA70)
        self.assertFalse(plan["fits"])
        self.assertIsNone(plan["vllm"])
        for way in ("--to int4", "--to auto --format compressed-tensors", "--tp 8 on as many cards"):
            self.assertTrue(any(s.startswith("with %s: " % way) for s in plan["suggestions"]),
                            plan["suggestions"])
        self.assertFalse([s for s in plan["suggestions"] if "cpu" in s])
        self.assertTrue(self.plan("--to", "bf16", "--vram", "8x40GB", "--tp", "8", LLAMA70)["fits"])

    @unittest.skipIf(SANITIZED, "sanitizers have memory of their own")
    def test_trying_other_plans_keeps_none_of_them(self):
        """A small config.json may name very many tensors, and each plan of them takes as much as the first."""
        config = {"model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 128, "moe_intermediate_size": 64,
                  "num_hidden_layers": 200, "num_attention_heads": 256, "num_key_value_heads": 256, "head_dim": 16,
                  "num_experts": 100, "num_experts_per_tok": 2, "vocab_size": 160, "torch_dtype": "bfloat16"}
        os.makedirs(self.path("tiny"))
        self.write("tiny/config.json", json.dumps(config))
        peaks = []
        for vram in ("2x80GB", "2x1GB"):
            p = subprocess.Popen([QCONV, "plan", "tiny", "--tp", "2", "--vram", vram], cwd=self.dir,
                                 stdout=subprocess.DEVNULL)
            _, p.returncode, usage = os.wait4(p.pid, 0)
            peaks.append(usage.ru_maxrss)
        self.assertLess(peaks[1], 3.4 * peaks[0], peaks)

    def test_what_vllm_does_not_split_is_refused(self):
        llama = self.model("llama")
        for args, code, words in (
                (["--to", "nf4", "--for", "vllm", *TWO], 2, "does not split weights in bitsandbytes' form"),
                (["--to", "auto", *TWO], 2, "needs --format compressed-tensors"),
                (["--to", "auto", "--for", "vllm", *TWO], 2, "or --for vllm-qconv"),
                (["--vram", "3x1GB", "--tp", "3"], 3, "8 attention heads over 3 cards"),
                (["--vram", "3x1GB", "--tp", "2"], 2, "but that names 3"),
                (["--vram", "cpu:1GB", "--tp", "1"], 2, "over GPUs only"),
                (["--vram", "2x1GB+cpu:1GB", "--tp", "2"], 2, "over GPUs only"),
                (["--tp", "2", "--parallel", "layers", "--vram", "2x1GB"], 2, "does not go with"),
                ([*TWO, "--device-map", self.path("map.json")], 2, "does not go with")):
            with self.subTest(" ".join(args)):
                self.assertIn(words, self.fails(code, "plan", *args, llama))
        self.assertFalse(os.path.exists(self.path("map.json")))

    def test_models_that_do_not_divide_are_named(self):
        # Two groups of 128 inputs do not divide over 4 cards.
        said = self.fails(3, "plan", "--vram", "4x1GB", "--tp", "4", self.model("w4a16-group-128"))
        self.assertIn("o_proj.weight_scale': vLLM does not split it over 4 cards", said)
        said = self.fails(3, "plan", *TWO, self.model("qwen2", model_type="falcon"))
        self.assertIn("it is not known how vLLM splits model type 'falcon' over cards", said)
        said = self.fails(3, "plan", "--incomplete", "--vram", "4x1GB", "--tp", "4", self.model(
            "llama", num_attention_heads=12, num_key_value_heads=6))
        self.assertIn("6 KV heads over 4 cards", said)
        config, rows = vllm_models.models()["gemma2"]
        rows.append(("model.layers.0.self_attn.extra.weight", "BF16", [4, 4]))
        vllm_models.write(self.path("extra"), config, rows)
        r = self.run_qconv("plan", *TWO, self.path("extra"))
        self.assertEqual(r.returncode, 3)
        self.assertIn("'model.layers.0.self_attn.extra.weight': it is not known how vLLM splits it", r.stderr.decode())

    def test_a_tied_head_in_the_file_is_not_counted(self):
        config, rows = vllm_models.models()["qwen2"]
        rows.append(("lm_head.weight", "BF16", [vllm_models.VOCABULARY, vllm_models.HIDDEN]))
        vllm_models.write(self.path("tied"), config, rows)
        plan = self.plan(*TWO, self.path("tied"))
        self.assertEqual([d["weight_bytes"] for d in plan["devices"]], RECORDED["bytes"]["qwen2"])

    def test_convert_writes_one_set_of_shards(self):
        said = self.ok("--to", "bf16", "--vram", "2x1GB", "--tp", "2", "--context", "100", *PLAIN,
                       KJV, self.path("split"))
        self.assertIn("With vLLM:\n    vllm serve %s --tensor-parallel-size 2 --max-model-len 100 "
                      "--gpu-memory-utilization 0.9 --max-num-batched-tokens 2048\n"
                      % self.path("split"), said)
        self.ok("-q", "--to", "bf16", *PLAIN, KJV, self.path("whole"))
        self.assertEqual(mk.read_checkpoint(self.path("split")),
                         mk.read_checkpoint(self.path("whole")))
        self.assertEqual(sorted(os.listdir(self.path("split"))),
                         sorted(os.listdir(self.path("whole"))))
        self.assertNotIn("placement", self.json_of("split", "qconv.json"))
        said = self.fails(4, "--to", "bf16", "--vram", "2x1MB", "--tp", "2", "--cuda-context", "0",
                          KJV, self.path("none"))
        self.assertIn("does not fit --vram 2x1MB", said)
        self.assertFalse(os.path.exists(self.path("none")))
        # Half of 440 columns is no whole number of the smallest blocks; int8 has none.
        said = self.fails(3, "--to", "nf4", "--vram", "2x1GB", "--tp", "2", KJV, self.path("none"))
        self.assertIn("down_proj.weight' as nf4: qconv's plug-in of vLLM does not split it over 2 cards: columns 0 to "
                      "220 of a weight in nf4 cut through 32", said)
        self.assertFalse(os.path.exists(self.path("none")))

    def test_the_plug_in_of_qconv(self):
        """NF4 and int8 are planned and converted for it, and the plan says so; with --for, mixtures of them too."""
        llama = self.model("llama")
        for to in (["nf4"], ["int8"], ["int8", "--block-size", "64"], ["nf4", "--no-double-quant"]):
            with self.subTest(" ".join(to)):
                plan = self.plan("--to", *to, "--for", "vllm-qconv", *TWO, llama)
                self.assertTrue(plan["vllm_needs_plugin"] and plan["fits"])
                self.assertIn("--tensor-parallel-size 2", plan["vllm"])
                one = self.plan("--to", *to, "--vram", "1GB", "--tp", "1", llama)
                shares = {d["weight_bytes"] for d in plan["devices"]}
                self.assertEqual(len(shares), 1)
                # More than half: norms are whole, and so are tables and scales of rows.
                self.assertTrue(one["devices"][0]["weight_bytes"] < 2 * shares.pop() <
                                one["devices"][0]["weight_bytes"] * 1.2)
        self.assertIn("and the plug-in of qconv's Python package (docs/serving.md)",
                      self.ok("plan", "--to", "int8", *TWO, llama))
        plan = self.plan("--to", "bf16", *TWO, llama)
        self.assertFalse(plan["vllm_needs_plugin"])
        said = self.ok("--to", "int8", *TWO, "--context", "100", KJV, self.path("o"))
        self.assertIn("With vLLM and the plug-in of that package:\n    vllm serve %s --tensor-parallel-size 2 "
                      "--max-model-len 100" % self.path("o"), said)

    def test_a_mixture_for_the_plug_in(self):
        plan = self.plan("--to", "auto", "--for", "vllm-qconv", "--vram", "2x40GB", "--tp", "2", LLAMA70)
        self.assertEqual(set(plan["schemes"]), {"nf4-32", "int8", "keep"})
        self.assertTrue(plan["fits"] and plan["vllm_needs_plugin"])
        self.assertLess(plan["devices"][0]["free_bytes"], 100e6)
        self.assertEqual(plan["loads"]["form"], "nf4+int8")
        # Experts are codes on the cards, too: 46.7 billion weights of 4.1 bits, and two tables in 16.
        plan = self.plan("--to", "nf4", "--vram", "4x80GB", "--tp", "4", "Mixtral-8x7B-Instruct-v0.1")
        self.assertAlmostEqual(plan["devices"][0]["weight_bytes"] * 4 / 1e9, 24.6, 1)


if __name__ == "__main__":
    unittest.main()
