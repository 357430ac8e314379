"""Forged outputs in every reader of the Python package: qconv.load, the values that streaming reads, from_pretrained after
`import qconv`, and what the plug-in of vLLM reads of a weight. Each ends in one of qconv's exceptions, which names the
weight, or is the model that it was.
"""
import functools
import json
import shutil
import subprocess
import time
import unittest
import warnings

import forged
import interop_support as s
import torch
import transformers

import test_interop_zoo as zoo

import qconv
from qconv import errors
from qconv._values import Values
from qconv._stored import Output

WEIGHT = "model.layers.1.mlp.down_proj.weight"
FORMS = {
    "nf4": ["--to", "nf4"],
    "int8": ["--to", "int8"],
    "int8-block": ["--to", "int8", "--block-size", "64"],
    "int4": ["--to", "int4", "--block-size", "32"],
}
SECONDS = 20  # of one reader: nothing is built without end


@functools.cache
def source():
    torch.manual_seed(5)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=160,
                                      num_attention_heads=4, num_key_value_heads=2, architectures=["LlamaForCausalLM"])
    folder = s.SCRATCH / "forged" / "source"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@functools.cache
def made(form):
    out = s.SCRATCH / "forged" / form
    s.qconv("-q", "--compress", "none", *FORMS[form], source(), out)
    return out


def by_load(folder):
    model = qconv.load(folder, device_map="cpu")
    with torch.no_grad():
        model(input_ids=torch.arange(12).reshape(1, 12))
    return model.state_dict()


def by_values(folder):
    values = Values(folder)
    return {name: values.read(name) for name in values.names}


def by_plugin(folder):
    """Each weight as two workers would take it, and whole."""
    with Output(folder) as output:
        found = {}
        for name, stored in output.weights():
            if stored is None:
                found[name] = output.read(name)
                continue
            rows, cols = stored.shape
            for some in ((0, rows), (rows // 2, rows)):
                for columns in ((0, cols), (0, cols // 2)):
                    found[name] = stored.part(some, columns).weight.dequantize(torch.float32)
        return found


def by_program(*words):
    """What the program says: an answer, or the exception of its exit code with its sentence."""
    r = subprocess.run([s.QCONV, "-q", *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if r.returncode:
        raise errors.BY_EXIT_CODE[r.returncode](r.stderr.strip().splitlines()[-1])


def by_verify(folder):
    by_program("verify", folder)


def by_convert(folder):
    out = s.SCRATCH / "forged" / "converted"
    shutil.rmtree(out, ignore_errors=True)
    try:
        by_program("--to", "bf16", "--compress", "none", folder, out)
    except qconv.Error:
        if out.exists():
            raise AssertionError(f"{out} is left")
        raise


READERS = {"qconv.load": by_load, "values": by_values, "plug-in": by_plugin, "verify": by_verify, "convert": by_convert}


class Forged(unittest.TestCase):
    def tried(self, reader, folder):
        """The exception of qconv, or None. Any other one is raised, and slowness is a failure."""
        began = time.monotonic()
        try:
            with warnings.catch_warnings(action="ignore"):
                READERS[reader](folder)
            return None
        except qconv.Error as e:
            self.assertNotIn("\n", str(e))
            return e
        finally:
            self.assertLess(time.monotonic() - began, SECONDS)

    def check(self, form):
        out, count = made(form), 0
        tensors = s.read_folder(out)
        for name, change in forged.of_weight(tensors, WEIGHT).items():
            folder = forged.forge(out, s.SCRATCH / "forged" / "now", change)
            for reader in READERS:
                with self.subTest(form=form, mutation=name, reader=reader):
                    error, count = self.tried(reader, folder), count + 1
                    if name in forged.HARMLESS[form] or name in forged.NOT_NEEDED.get(reader, ()):
                        continue
                    self.assertIsNotNone(error, "was taken")
                    self.assertIsInstance(error, (qconv.InputError, qconv.CheckError))
                    self.assertIn(WEIGHT.removesuffix(".weight"), str(error))
        s.note(f"{form}: {count} readings of forged outputs")

    def test_configs(self):
        """Of config.json and of tensors that are missing or too many. What qconv.load takes all the same has no layer too
        few."""
        for name, change in forged.CONFIGS.items():
            folder = forged.forge(made("nf4"), s.SCRATCH / "forged" / "now", change)
            with self.subTest(mutation=name):
                error = self.tried("qconv.load", folder)
                self.assertIsInstance(error, (qconv.InputError, qconv.CheckError))

    def test_control(self):
        """A forged output in which nothing was altered is read by all."""
        for form in FORMS:
            folder = forged.forge(made(form), s.SCRATCH / "forged" / "now", lambda tensors, config: None)
            for reader in READERS:
                self.assertIsNone(self.tried(reader, folder), (form, reader))


for _form in FORMS:
    setattr(Forged, "test_" + _form.replace("-", "_"), lambda self, form=_form: self.check(form))


@unittest.skipIf(zoo.MAJOR == 4, "transformers 4 takes each expert by itself")
class Experts(unittest.TestCase):
    """from_pretrained of a mixture, whose experts qconv reads. transformers reports what its conversions raise."""
    EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"

    def test_experts(self):
        model = zoo.model_of("mixtral")
        out, _ = zoo.converted(zoo.saved(model, "forged-mixtral"), "nf4")
        tensors, count = s.read_folder(out), 0
        expert = next(n for n in tensors if n.endswith("experts.2.w2.weight") or n.endswith("experts.2.down_proj.weight"))
        for name, change in forged.of_weight(tensors, expert).items():
            folder = forged.forge(out, s.SCRATCH / "forged" / "now", change)
            with self.subTest(mutation=name), warnings.catch_warnings(action="ignore"):
                count += 1
                try:
                    type(model).from_pretrained(folder, dtype=torch.bfloat16)
                    self.assertIn(name, forged.HARMLESS["nf4"])
                except qconv.Error:
                    pass
                except RuntimeError as e:
                    self.assertIn("conversion of the weights", str(e))
                    said = " ".join(zoo.WARNINGS.taken())
                    self.assertRegex(said, "quantized weight|not all quantized in the same way")
        s.note(f"{count} forged experts in from_pretrained")


if __name__ == "__main__":
    s.main()
