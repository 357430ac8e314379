"""bench_model: made-up checkpoints are true safetensors, the same wherever they are read, and
bench_scale.py converts them."""
import array
import json
import os
import statistics
import struct
import subprocess
import sys
import unittest

from qconv_case import QCONV, ROOT, QconvCase

MAKER = os.environ.get("BENCH_MODEL", os.path.join(ROOT, "build", "bench_model"))
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024,
         "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
LLAMA = dict(SMALL, architectures=["LlamaForCausalLM"], model_type="llama")
DEEPSEEK = dict(SMALL, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3",
                q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64,
                v_head_dim=128, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
                moe_intermediate_size=128, first_k_dense_replace=1, moe_layer_freq=1,
                num_nextn_predict_layers=0,
                quantization_config={"activation_scheme": "dynamic", "fmt": "e4m3",
                                     "quant_method": "fp8", "weight_block_size": [128, 128]})


def tensors(folder):
    """name -> (dtype, bytes) of all shards."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            with open(os.path.join(folder, name), "rb") as f:
                data = f.read()
            n = struct.unpack_from("<Q", data)[0]
            for key, t in json.loads(data[8:8 + n]).items():
                if key != "__metadata__":
                    a, b = t["data_offsets"]
                    found[key] = (t["dtype"], data[8 + n + a:8 + n + b])
    return found


@unittest.skipUnless(os.path.exists(MAKER), "bench_model is not built")
class Made(QconvCase):
    def config(self, fields):
        os.makedirs(self.path("c"), exist_ok=True)
        return self.write("c/config.json", json.dumps(fields))

    def made(self, name, fields, *args):
        subprocess.run([MAKER, "write", *args, self.config(fields), self.path(name)], check=True)
        return self.path(name)

    def test_names_and_values(self):
        """Names are those of the plan; values depend on the name and the place only."""
        one = tensors(self.made("one", LLAMA))
        folder = self.made("many", LLAMA, "--shard-bytes", "3e5", "--threads", "3")
        self.assertEqual(one, tensors(folder))
        self.assertEqual(len({b for _, b in one.values()}), len(one), "two tensors are alike")
        with open(os.path.join(folder, "model.safetensors.index.json")) as f:
            index = json.load(f)
        self.assertEqual(set(index["weight_map"]), set(one))
        self.assertGreater(len(set(index["weight_map"].values())), 3)
        self.assertEqual(index["metadata"]["total_size"], sum(len(b) for _, b in one.values()))
        planned = json.loads(self.ok("--to", "nf4", "--dry-run", "--json", "many", "o"))
        self.assertEqual(len(planned["tensors"]), 3 * 9 + 3)

    def test_values_are_normal(self):
        _, raw = tensors(self.made("m", LLAMA))["model.layers.1.mlp.up_proj.weight"]
        values = array.array("f")
        values.frombytes(b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2)))
        n = len(values)
        self.assertLess(abs(statistics.fmean(values)), 4 * 0.02 / n ** 0.5)
        # The deviation of an estimate of the deviation is sigma / sqrt(2 n).
        self.assertLess(abs(statistics.pstdev(values) - 0.02), 4 * 0.02 / (2 * n) ** 0.5)
        fourth = statistics.fmean(v ** 4 for v in values) / 0.02 ** 4
        self.assertLess(abs(fourth - 3), 4 * (96 / n) ** 0.5)

    def test_fp8_converts(self):
        made = tensors(self.made("m", DEEPSEEK))
        self.assertEqual({d for d, _ in made.values()}, {"BF16", "F32", "F8_E4M3"})
        codes = b"".join(b for d, b in made.values() if d == "F8_E4M3")
        self.assertFalse(set(codes) & {0x7f, 0xff}, "not a number")
        self.assertGreater(len(set(codes)), 200)
        self.ok("--to", "nf4", "m", "o")
        self.ok("verify", "o")

    def test_wrong_models(self):
        for words, code in ((("list", "no/such"), 3), (("list", self.path()), 3), (("make", "x"), 2)):
            r = subprocess.run([MAKER, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self.assertEqual(r.returncode, code, r.stderr)

    def test_scale(self):
        script = os.path.join(ROOT, "bench", "bench_scale.py")
        r = subprocess.run([sys.executable, "-B", script, "--qconv", QCONV, "--maker", MAKER,
                            "--work", self.path("work"), "--model", self.config(LLAMA), "--json",
                            self.path("scale.json"), "--punch", "always", "--", "--to", "nf4",
                            "--max-shard-size", "400KB"],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(r.returncode, 0, r.stdout)
        with open(self.path("scale.json")) as f:
            run = json.load(f)["runs"][0]
        self.assertEqual(run["planned_bytes"], run["written_bytes"])
        self.assertEqual(run["faults"], [])
        self.assertGreater(len(run["shards"]), 2)
        self.assertEqual(sum(s["source_bytes"] for s in run["shards"]), run["source_bytes"])
        self.assertFalse(os.path.exists(self.path("work", "out")))


if __name__ == "__main__":
    unittest.main()
