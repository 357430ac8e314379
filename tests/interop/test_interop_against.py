"""qconv verify --against on what transformers + bitsandbytes saved: it is the model it was made
from, in every form and type they quantize from.
"""
import json
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import interop_support as s
import torch
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig

s.quiet()

CLASSES = {"minilm": AutoModel}
FORMS = {
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                   "bnb_4bit_use_double_quant": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4",
                   "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


class Against(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(dir=s.SCRATCH))
        self.addCleanup(shutil.rmtree, self.folder)

    def save(self, name, source, form, dtype):
        """A checkpoint of theirs, and the same with every weight as it is in memory."""
        out = self.folder / "theirs"
        shutil.rmtree(out, ignore_errors=True)
        model = CLASSES.get(name, AutoModelForCausalLM).from_pretrained(
            source, quantization_config=BitsAndBytesConfig(**FORMS[form]), dtype=dtype,
            device_map="cpu")
        model.save_pretrained(out)
        return out

    def verify(self, out, source):
        done = subprocess.run([str(s.QCONV), "verify", "--json", str(out), "--against", str(source)],
                              capture_output=True, text=True)
        return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr

    def plain(self, name, dtype):
        """The model, all of it in one type and under the names that transformers saves."""
        model = CLASSES.get(name, AutoModelForCausalLM).from_pretrained(s.model_path(name),
                                                                        dtype=dtype)
        folder = self.folder / "plain"
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        return folder, model

    def check(self, name, dtypes):
        for dtype in dtypes:
            source, model = self.plain(name, dtype)
            for form in FORMS:
                with self.subTest(model=name, form=form, dtype=str(dtype)):
                    out = self.save(name, source, form, dtype)
                    code, answer = self.verify(out, source)
                    self.assertEqual(code, 0, answer if isinstance(answer, str) else
                                     answer["first_problem"])
                    rows = [r for r in answer["rows"] if r["kind"] == "quantized"]
                    self.assertGreater(len(rows), 0)
                    self.assertLess(max(abs(r["ratio"] - 1) for r in rows), 1e-3)
                    s.note(f"{name} {dtype} {form}: {len(rows)} weights, codes not of MODEL: "
                           f"{sum(r['misplaced'] for r in rows)}, ratio up to "
                           f"{max(r['ratio'] for r in rows):.5f}")

    def test_kjv_llama(self):
        self.check("kjv-llama", [torch.bfloat16, torch.float32])

    def test_minilm(self):
        self.check("minilm", [torch.float16])


if __name__ == "__main__":
    s.main()
