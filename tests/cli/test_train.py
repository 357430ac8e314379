#!/usr/bin/env python3
"""qconv plan --mode train."""
import json
import os
import re
import unittest
from xml.etree import ElementTree

from qconv_case import QCONV, QconvCase, ROOT

BUILD = os.path.dirname(QCONV)
FAKE_CUDA = os.environ.get("FAKE_CUDA_LIB", os.path.join(BUILD, "tests", "libfake_cuda.so"))
FAKE_NVML = os.environ.get("FAKE_NVML", os.path.join(BUILD, "tests", "libfake_nvml.so"))


class Train(QconvCase):
    def plan(self, *args, **more):
        return json.loads(self.ok("plan", *args, "--mode", "train", "--json", **more))

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as f:
            return f.read()

    def exists(self, name):
        return os.path.exists(self.path(name))

    def test_parameters_and_states(self):
        p = self.plan("Llama-3.1-8B", "--vram", "8x80GB", "--method", "full", "--zero", "3",
                      "--context", "2048")
        self.assertEqual(p["parameters"], 8030261248)
        s = p["settings"][0]
        self.assertTrue(s["fits"])
        self.assertEqual(s["bytes_per_gpu"]["parameters"], 2 * 8030261248 // 8)
        self.assertEqual(s["bytes_per_gpu"]["gradients"], 2 * 8030261248 // 8)
        self.assertEqual(s["bytes_per_gpu"]["total"],
                         sum(v for k, v in s["bytes_per_gpu"].items() if k != "total"))
        self.assertLessEqual(s["bytes_per_gpu"]["total"], p["budget_bytes"])

    def test_lora_rank(self):
        a = self.plan("Llama-3.1-8B", "--vram", "80GB", "--method", "lora", "--lora-rank", "8")
        # q 8192, k and v 5120 each, o 8192, gate, up and down 18432 each; 32 layers
        self.assertEqual(a["settings"][0]["trained_parameters"],
                         8 * 32 * (2 * 8192 + 2 * 5120 + 3 * 18432))

    def test_qlora_base_is_the_quantized_model(self):
        p = self.plan("Llama-3.1-8B", "--vram", "24GB", "--method", "qlora", "--context", "512")
        nf4 = json.loads(self.ok("plan", "Llama-3.1-8B", "--vram", "24GB", "--json"))
        s = p["settings"][0]
        self.assertEqual(s["bytes_per_gpu"]["parameters"],
                         nf4["weight_bytes"] + 4 * s["trained_parameters"])

    def test_text(self):
        text = self.ok("plan", "Llama-3.1-8B", "--mode", "train", "--vram", "2x24GB")
        self.assertIn("8,030,261,248 parameters", text)
        self.assertIn("QLoRA r16", text)
        self.assertIn("short by", text)  # full fine-tuning on 2 x 24 GB

    def test_nothing_fits(self):
        p = self.plan("Llama-3.3-70B-Instruct", "--vram", "8GB")
        self.assertFalse(p["fits"])
        self.assertTrue(all(s["micro_batch"] == 0 and s["short_by_bytes"] > 0
                            for s in p["settings"]))
        self.fails(4, "plan", "Llama-3.3-70B-Instruct", "--mode", "train", "--vram", "8GB",
                   "--apply", "a.json", has="no setting fits")
        self.assertFalse(self.exists("a.json"))

    def test_way_out(self):
        """The longest sequences that are said to fit do, and one token more does not."""
        args = ["Llama-3.1-8B", "--vram", "24GB"]
        p = self.plan(*args, "--context", "8192")
        self.assertEqual((p["fits"], p["context"]), (False, 8192))
        longest = p["longest_context"]
        self.assertTrue(4096 < longest < 8192)
        for tokens, fits in ((longest, True), (longest + 1, False)):
            self.assertEqual(self.plan(*args, "--context", str(tokens))["fits"], fits)
        self.assertIn("\nNothing fits sequences of 8,192 tokens; the longest that fit have {:,} "
                      "(--context {})\n".format(longest, longest),
                      self.ok("plan", *args, "--mode", "train", "--context", "8192"))
        self.assertIn("not even with shorter sequences",
                      self.ok("plan", "Llama-3.3-70B-Instruct", "--mode", "train", "--vram", "24GB"))

    def test_default_is_shortened(self):
        """Without --context the default is halved until something fits, and that is said."""
        args = ["Llama-3.1-8B", "--vram", "24GB"]
        p = self.plan(*args)
        self.assertTrue(p["fits"])
        self.assertEqual(p["context"], 4096)
        text = self.ok("plan", *args, "--mode", "train")
        self.assertIn("sequences of 4,096 tokens\n", text)
        self.assertIn("Nothing fits sequences of 8,192 tokens, the default, so these are shorter; "
                      "the longest that fit have {:,} ".format(p["longest_context"]), text)
        self.assertIsNone(self.plan("Llama-3.1-8B", "--vram", "80GB")["longest_context"])

    def test_page(self):
        """--html has every setting as a bar and as a row; columns without values are left out."""
        args = ["Llama-3.1-8B", "--vram", "24GB", "--html", "p.html"]
        p = self.plan(*args)
        root = ElementTree.parse(self.path("p.html")).getroot()
        self.check_page(root)
        text = "".join(root.itertext())
        self.assertEqual(len(root.findall(".//{http://www.w3.org/2000/svg}svg")),
                         len(p["settings"]))
        rows = root.findall(".//tr")
        self.assertEqual(len(rows), 1 + len(p["settings"]))
        for row, s in zip(rows[1:], p["settings"]):
            cells = ["".join(c.itertext()) for c in row]
            self.assertEqual(cells[0], s["label"])
            self.assertEqual(cells[-1], str(s["effective_batch"]) if s["fits"] else "")
        self.assertIn("Nothing fits sequences of 8,192 tokens", text)
        self.assertIn("short by", text)
        self.plan("Llama-3.2-1B", "--vram", "80GB", "--html", "p.html")
        self.assertNotIn("short by", self.read("p.html"))

    def test_fp8_weights_are_parameters(self):
        for model in ["deepseek-ai/DeepSeek-V3", "gpt-oss-20b", "gpt2"]:
            infer = json.loads(self.ok("plan", model, "--vram", "8xH100", "--json"))
            self.assertEqual(self.plan(model, "--vram", "8xH100")["parameters"],
                             infer["parameters"])

    def test_steps_are_multiplied_out(self):
        text = self.ok("plan", "Llama-3.1-8B", "--mode", "train", "--vram", "4xA100-80GB")
        rows = re.findall(r" (\d+)  x (\d+) x (\d+) GPUs = (\d+)\n", text)
        self.assertTrue(rows, text)
        for micro, steps, gpus, all_of_them in rows:
            self.assertEqual(int(micro) * int(steps) * int(gpus), int(all_of_them))

    def test_members_are_documented(self):
        with open(os.path.join(ROOT, "docs", "training.md"), encoding="utf-8") as f:
            page = f.read()
        p = self.plan("Llama-3.1-8B", "--vram", "80GB")
        for o in [p, p["settings"][0], p["settings"][0]["bytes_per_gpu"]]:
            for name in o:
                self.assertIn("`%s`" % name, page)

    def test_apply(self):
        self.write("a.json", "old")
        self.plan("Llama-3.1-8B", "--vram", "4x80GB", "--apply", "a.json", "--method", "full")
        config = json.loads(self.read("a.json"))
        self.assertEqual(config["num_processes"], 4)
        self.assertEqual(config["mixed_precision"], "bf16")
        self.assertEqual(self.read("a.json.backup"), "old")
        p = self.plan("Llama-3.1-8B", "--vram", "4x80GB", "--apply", "ds_config.json",
                      "--method", "full")
        config = json.loads(self.read("ds_config.json"))
        s = p["settings"][0]
        self.assertEqual(config["zero_optimization"]["stage"], s["zero_stage"])
        self.assertEqual(config["train_batch_size"],
                         4 * config["train_micro_batch_size_per_gpu"] *
                         config["gradient_accumulation_steps"])
        self.assertFalse(self.exists("ds_config.json.backup"))

    def test_precision_of_old_cards(self):
        p = self.plan("Llama-3.2-1B", "--vram", "V100-32GB")
        self.assertEqual(p["settings"][0]["precision"], "fp16")

    def test_wrong(self):
        self.usage("plan", "Llama-3.1-8B", "--mode", "train", "--vram", "cpu:64GB",
                   has="needs a GPU", command="plan")
        os.mkdir(self.path("d"))
        self.usage("plan", "Llama-3.1-8B", "--mode", "train", "--vram", "80GB", "--apply", "d",
                   has="found a folder", command="plan")
        for option in [["--prefill", "whole"], ["--device-map", "p.json"], ["--batch", "4"],
                       ["--images", "2"], ["--kv-dtype", "fp8"], ["--mla", "expanded"]]:
            self.usage("plan", "Llama-3.1-8B", "--mode", "train", "--vram", "80GB", *option,
                       has="does not go with --mode train", command="plan")
        self.usage("plan", "Llama-3.1-8B", "--mode", "train", "--vram", "80GB", "--zero", "2",
                   has="but --vram names one", command="plan")
        self.usage("plan", "Llama-3.1-8B", "--vram", "80GB", "--zero", "2", has="--mode train", command="plan")
        self.usage("plan", "Llama-3.1-8B", "--mode", "train", "--vram", "2x80GB", "--zero", "3",
                   "--method", "qlora", has="4-bit", command="plan")

    def test_profile(self):
        gpu = {"QCONV_LIBCUDA": FAKE_CUDA, "QCONV_NVML": FAKE_NVML,
               "FAKE_CUDA": "%d:%d:%d" % (24 << 30, 400 << 20, 2 << 20)}
        args = ["Llama-3.2-1B", "--vram", "24GB", "--method", "qlora", "--context", "512",
                "--profile"]
        gpu.update(self.fake_gpu(24 << 30))
        p = self.plan(*args, env=gpu)["profile"]
        self.assertEqual(p["gpu"], "Fake GPU")
        self.assertEqual(p["context_bytes"], 400 << 20)
        self.assertGreaterEqual(p["allocated_bytes"], p["asked_bytes"])
        # At most one step of 2 MiB is lost per buffer.
        self.assertLess(p["allocated_bytes"], p["asked_bytes"] + 3000 * (2 << 20))
        gpu["FAKE_CUDA"] = "%d:%d:%d" % (1 << 30, 400 << 20, 2 << 20)
        self.fails(1, "plan", *args, "--mode", "train", env=gpu, has="out of memory")
        self.fails(5, "plan", *args, "--mode", "train",
                   env={"QCONV_NVML": "/nonexistent", "QCONV_LIBCUDA": "/nonexistent"})

    def fake_gpu(self, total):
        """Environment of the NVML for tests, with one idle GPU."""
        return {"FAKE_NVML_GPUS": "Fake GPU,GPU-1,80,%d,0" % total}


if __name__ == "__main__":
    unittest.main()
