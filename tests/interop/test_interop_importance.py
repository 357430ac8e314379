"""qconv.importance: its numbers against those of a whole model in memory, and what they predict against what noise in
the weights does to the answers of tiny models of many types."""
import io
import json
import math
import os
import re
import shutil
import sys
import tempfile
import unittest
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import interop_support
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_interop_calibrate import LENGTH, write_ids
from tiny_models import MAJOR, save

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import qconv  # noqa: E402
from qconv import _command, _text  # noqa: E402
from qconv._calibrate_run import Text, draw  # noqa: E402
from qconv._values import Values  # noqa: E402
from qconv.importance import EXPERT  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
warnings.simplefilter("ignore")
torch.set_num_threads(1)
DATA = interop_support.ROOT / "tests" / "data"
KNOWN = {"kjv-llama": (DATA / "kjv-llama" / "model", 8192), "kjv-moe": (DATA / "kjv-moe" / "model", 8192)}
TYPES = ["llama", "gpt2", "gemma2", "phi3", "t5"]
MIXED = ["qwen3_moe", "mixtral", "gpt_oss"]
# Errors in the values of tokens whose inputs are alike, as a random model's are, add up where attention takes their mean.
VALUES = re.compile(r"\.(v_proj|v|qkv_proj|c_attn)\.weight$")
# A router's choices know no gradient, so only what comes behind the last one is judged.
BEHIND_ROUTERS = re.compile(r"^lm_head|\.1\..*experts\.")


class Known(unittest.TestCase):
    def test_files_are_what_the_command_makes(self):
        for name, (model, tokens) in KNOWN.items():
            with self.subTest(name):
                made = qconv.importance(model, tokens=tokens, context=256, device="cpu")
                kept = json.loads((DATA / "importance" / (name + ".json")).read_text())
                self.assertEqual({k: made[k] for k in ("format", "tokens", "windows", "text_digest", "filled")},
                                 {k: kept[k] for k in ("format", "tokens", "windows", "text_digest", "filled")})
                self.assertEqual(list(made["weights"]), list(kept["weights"]))
                for n, pair in made["weights"].items():
                    for value, other in zip(pair, kept["weights"][n]):
                        self.assertLess(abs(value - other), 0.01 * other, n)

    def test_traces_are_those_of_a_model_in_memory(self):
        """Of every linear layer, by hooks of torch; both moments over the tokens that count, as calibrate takes them."""
        model = transformers.AutoModelForCausalLM.from_pretrained(KNOWN["kjv-llama"][0], dtype=torch.float32)
        model.requires_grad_(False)
        windows = _text.windows("default", KNOWN["kjv-llama"][0], context=128, config=model.config)
        text = Text(windows, _text.spread(windows.lengths, 1024), model.config)
        xs, gs = {}, {}

        def seen(name):
            def hook(module, given, out):
                xs[name] = given[0].reshape(-1, given[0].shape[-1])
                out.register_hook(lambda g: gs.__setitem__(name, g.reshape(-1, g.shape[-1])))
            return hook
        linear = {n + ".weight": m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        for name, module in linear.items():
            module.register_forward_hook(seen(name))
        model.get_input_embeddings().register_forward_hook(lambda m, i, o: o.requires_grad_().clone())
        with torch.enable_grad():
            logits = model(text.inputs["input_ids"]).logits
        logits.backward(draw(logits, text.masks[-1], text.numbers + [0] * (text.rows - len(text.numbers))))
        found = qconv.importance(KNOWN["kjv-llama"][0], tokens=1024, context=128, device="cpu")["weights"]
        mask = text.masks[-1].reshape(-1)
        for name in linear:
            h = float(xs[name][mask].detach().square().sum() / mask.sum())
            g = float(gs[name].square().sum() / (gs[name] != 0).any(1).sum())
            first = 0.02 if ".q_proj." in name else 1e-4  # the first query of a window has one key, and no gradient
            self.assertLess(abs(found[name][0] - h), first * h, name)
            self.assertLess(abs(found[name][1] - g), 1e-4 * g, name)


class Predicted(unittest.TestCase):
    def check(self, names, judged=re.compile("")):
        for name in names:
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                save(name, folder + "/model")
                write_ids(folder + "/text.ids", 1)
                found = qconv.importance(folder + "/model", text=folder + "/text.ids", context=LENGTH, device="cpu")
                self.noise(folder, {n: p for n, p in found["weights"].items() if judged.search(n)})

    def noise(self, folder, pairs):
        """Puts noise into each weight, all experts of a projection together, and compares divergences."""
        model, other = Path(folder, "model"), Path(folder, "other")
        with Values(model, experts="separate") as alone, Values(model) as whole:
            shapes = {n: v.shape(n) for v in (alone, whole) for n in v.names}
            files = set(whole.names)
        weights, groups = load_file(model / "model.safetensors"), {}
        for name in pairs:
            self.assertIn(name, shapes)
            if name in files:
                groups.setdefault(EXPERT.sub(r"\1*.", name), []).append(name)
        self.assertGreater(len(groups), 2)
        for group, names in groups.items():
            generator, changed = torch.Generator().manual_seed(3), dict(weights)
            size = 0.1 * float(weights[names[0]].std())
            for n in names:
                changed[n] = weights[n] + size * torch.randn(weights[n].shape, generator=generator)
            shutil.copytree(model, other, dirs_exist_ok=True)
            save_file(changed, other / "model.safetensors", {"format": "pt"})
            predicted = sum(h * g for h, g in (pairs[n] for n in names)) * size ** 2 / 2
            kl = qconv.evaluate(other, against=model, text=folder + "/text.ids", context=LENGTH, device="cpu").kl_mean
            self.assertLess(abs(math.log(predicted / kl)), math.log(8 if VALUES.search(group) else 2.5), (group, predicted, kl))
            if os.environ.get("QC_TEST_SHOW"):
                print("%-60s %.3g %.3g %.2f" % (group, predicted, kl, predicted / kl))

    def test_dense_models(self):
        self.check(TYPES)

    @unittest.skipIf(MAJOR < 5, "their experts are modules in transformers 4")
    def test_mixtures(self):
        self.check(MIXED, BEHIND_ROUTERS)

    def test_experts_that_few_tokens_reach(self):
        """They have the means of the others, a share of one token at least, and are counted."""
        with tempfile.TemporaryDirectory() as folder:
            save("qwen3_moe", folder + "/model")
            Path(folder, "text.ids").write_text("21 22 23 24 25 26\n")
            with self.assertWarnsRegex(qconv.QconvWarning, "experts have the means"):
                found = qconv.importance(folder + "/model", text=folder + "/text.ids", device="cpu")
            gates = [p for n, p in found["weights"].items() if n.startswith("model.layers.0.") and n.endswith("gate_proj.weight")]
            self.assertEqual(len(gates), 4)
            self.assertEqual(len({g for _, g in gates}), 1)
            self.assertGreater(min(h for h, _ in gates), 0)
            self.assertEqual(found["filled"], 2 * 4 * 3)


class Door(unittest.TestCase):
    def run_it(self, *arguments):
        """(exit code, standard output, standard error)"""
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as error:
            code = _command.run(["importance", *map(str, arguments)])
        return code, out.getvalue(), error.getvalue()

    def test_file_and_refusals(self):
        model = KNOWN["kjv-llama"][0]
        with tempfile.TemporaryDirectory() as folder:
            ids, out, note = Path(folder, "text.ids"), Path(folder, "out.json"), Path(folder, "note.txt")
            ids.write_text(" ".join(map(str, range(32, 96))) + "\n")
            note.write_text("mine")
            code, shown, said = self.run_it(model, "--text", ids, "--device", "cpu")
            self.assertEqual((code, said), (0, ""))
            self.assertEqual(sorted(json.loads(shown)["weights"]), list(json.loads(shown)["weights"]))
            for _ in range(2):  # an importance file may be made again
                self.assertEqual(self.run_it(model, "--text", ids, "--device", "cpu", "--out", out)[0], 0)
            self.assertEqual(out.read_text(), shown)
            for code, sentence, arguments in (
                    (2, "--tokens is 0; expected at least 1", [model, "--tokens", 0]),
                    (2, "--context is 1; expected at least 2", [model, "--context", 1]),
                    (2, "--out %s is there and is no importance file; expected another name" % note, [model, "--out", note]),
                    (2, "there is no folder", [model, "--out", Path(folder, "no", "file")]),
                    (3, "there is no such folder", [Path(folder, "no")]),
                    (1, "there is no such text", [model, "--text", Path(folder, "no")]),
                    (2, "the following arguments are required: MODEL", [])):
                self.refused(code, sentence, *arguments)
            with mock.patch.object(transformers.models.llama.modeling_llama.LlamaMLP, "forward",
                                   side_effect=RuntimeError("mat1 and mat2\nmore")):
                self.refused(3, "does not compute %s forwards and back: RuntimeError: mat1 and mat2\n" % ids, model,
                             "--text", ids, "--device", "cpu", "--out", out)
            self.assertEqual((out.read_text(), note.read_text()), (shown, "mine"))
            self.assertEqual(sorted(os.listdir(folder)), ["note.txt", "out.json", "text.ids"])

    def refused(self, code, sentence, *arguments):
        found, out, error = self.run_it(*arguments)
        self.assertEqual((found, out, error.count("\n")), (code, "", 1), error)
        self.assertIn(sentence, error)


if __name__ == "__main__":
    interop_support.main()
