"""peft on models that qconv.load made, and that from_pretrained made of a compressed output: LoRA on every linear layer."""
import os
import re
import subprocess
import sys
import unittest

import interop_support as s
import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

import qconv

transformers.utils.logging.set_verbosity_error()
IDS = torch.tensor([[(7 * i + 3 * j) % 90 + 32 for i in range(24)] for j in range(2)])


class Lora(unittest.TestCase):
    def steps(self, load):
        torch.manual_seed(3)
        out = s.SCRATCH / "adapters"
        if not out.exists():
            s.qconv("--to", "nf4", "--progress", "never", s.model_path("kjv-llama"), out)
        base = load(out)
        codes = {n: p.clone() for n, p in base.named_parameters() if not p.is_floating_point()}
        base = prepare_model_for_kbit_training(base)
        model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        wanted = [p for p in model.parameters() if p.requires_grad]
        self.assertEqual(len(wanted), 2 * 28)
        optimizer, losses = torch.optim.Adam(wanted, 2e-3), []
        for _ in range(4):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        self.assertEqual(losses, sorted(losses, reverse=True))
        s.note(f"{load.__qualname__}: losses {', '.join(f'{x:.3f}' for x in losses)}")
        left = dict(model.base_model.model.named_parameters())
        for name, before in codes.items():
            parent, _, leaf = name.rpartition(".")
            self.assertTrue(torch.equal(left[f"{parent}.base_layer.{leaf}"], before), name)
        return model

    def test_qconv(self):
        model = self.steps(qconv.load)
        with self.assertRaisesRegex(qconv.UsageError, "is codes"):  # codes cannot take an adapter in
            model.merge_and_unload()

    def test_bitsandbytes(self):
        self.steps(transformers.AutoModelForCausalLM.from_pretrained)


class Examples(unittest.TestCase):
    """docs/examples/, as a user calls them."""

    def run_example(self, name, *arguments):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(s.ROOT / "python"), os.environ.get("PYTHONPATH", "")])}
        said = subprocess.run([sys.executable, s.ROOT / "docs/examples" / name, *map(str, arguments)], env=env,
                              capture_output=True, text=True)
        self.assertEqual(said.returncode, 0, said.stderr)
        return said.stdout

    def test_generate_and_train(self):
        out, adapter = s.SCRATCH / "examples", s.SCRATCH / "adapter"
        s.qconv("--to", "nf4", "--progress", "never", s.model_path("kjv-llama"), out)
        said = self.run_example("generate.py", out, "In the beginning God", "--tokens", 16)
        self.assertRegex(said, r"^In the beginning God\S* \w+")
        # The model has not seen a text of this kind, so there is much to learn: 4.1 to 3.3 in 20 steps.
        text = s.ROOT / "CONTRIBUTING.md"
        said = self.run_example("qlora.py", out, text, adapter, "--steps", 20, "--context", 64, "--rate", 5e-3)
        losses = [float(x) for x in re.findall(r"mean loss ([\d.]+)", said)]
        self.assertEqual(len(losses), 2, said)
        self.assertLess(losses[1], 0.9 * losses[0])
        self.assertTrue((adapter / "adapter_config.json").is_file())


if __name__ == "__main__":
    s.main()
