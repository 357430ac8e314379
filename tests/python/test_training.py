#!/usr/bin/env python3
"""qconv.plan_training and `python -m qconv plan-training`: against what `qconv plan --mode train` printed before they
took its place (tests/golden/training, recorded at version 0.5.0), the ZeRO paper's figures, and sums done by hand."""
import json
import os
import subprocess
import sys
import unittest
import warnings
from dataclasses import replace

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cli"))
from qconv_case import QCONV, QconvCase, ROOT  # noqa: E402

sys.path.insert(0, os.path.join(ROOT, "python"))
os.environ["QCONV_PROGRAM"] = QCONV
import qconv  # noqa: E402
from qconv import training as t  # noqa: E402

GOLDEN = os.path.join(ROOT, "tests", "golden", "training")
# The order of the values in plans.jsonl.
ANSWER = ("parameters", "context", "gpus", "budget_bytes", "fits", "longest_context")
SETTING = ("label", "method", "optimizer", "precision", "zero_stage", "checkpointing", "trained_parameters", "fits",
           "short_by_bytes", "micro_batch", "accumulation", "effective_batch")
BYTES = ("parameters", "gradients", "optimizer", "activations", "batch_data", "workspace", "context", "total")

MODEL = t.Model(parameters=1000000, quantized_bytes=500000, layers=32, hidden=4096, intermediate=11008, heads=32,
                kv_heads=8, head_dim=128, vocab=32000, linear_sides=2000000, largest_linear=45088768,
                largest_layer=202383360)
ONE = t.Place(gpus=1, budget=0, context=0, tokens=1)


def setting(method, precision="bf16", **more):
    return t.Setting(**{"method": method, "optimizer": "adamw", "precision": precision, "zero": 0,
                        "checkpointing": False, "rank": 16, **more})


def golden(name):
    with open(os.path.join(GOLDEN, name), encoding="utf-8") as f:
        return f.read()


def called(arguments):
    """plan_training with the arguments of a command line."""
    words, options = arguments.split(), {}
    for i, word in enumerate(words[1:], 1):
        if word.startswith("--"):
            value = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else True
            options[word[2:].replace("-", "_")] = value
    return qconv.plan_training(words[0], **options)


class Case(QconvCase):
    def command(self, *arguments):
        return subprocess.run([sys.executable, "-B", "-m", "qconv", "plan-training", *arguments],
                              cwd=self.dir, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                              env={**os.environ, "PYTHONPATH": os.path.join(ROOT, "python")})


class Golden(Case):
    def test_every_figure(self):
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(ROOT)
        for line in golden("plans.jsonl").splitlines():
            want = json.loads(line)
            with self.subTest(want["arguments"]), warnings.catch_warnings():
                warnings.simplefilter("ignore", qconv.QconvWarning)
                got = called(want["arguments"]).json
                self.assertEqual([got[k] for k in ANSWER], want["answer"])
                self.assertEqual([[s[k] for k in SETTING] + [s["bytes_per_gpu"][k] for k in BYTES]
                                  for s in got["settings"]], want["settings"])
                self.assertEqual(list(got), ["command", "mode", "model", *ANSWER, "settings", "applied"])
                self.assertEqual((got["command"], got["mode"], got["applied"]), ("plan", "train", None))

    def test_texts(self):
        for part in golden("texts.txt").split("$ ")[1:]:
            arguments, _, want = part.partition("\n")
            r = self.command(*arguments.split())
            self.assertEqual((r.returncode, r.stdout, r.stderr), (0, want, ""))

    def test_files(self):
        for line in golden("files.jsonl").splitlines():
            want = json.loads(line)
            p = called(want["arguments"] + " --apply " + self.path("files"))
            self.assertEqual(p.applied, self.path("files"))
            for name in ("accelerate.json", "ds_config.json"):
                with open(self.path("files", name), encoding="utf-8") as f:
                    self.assertEqual(f.read(), want[name], want["arguments"])


class Formulas(unittest.TestCase):
    def test_zero_paper(self):
        """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, mixed precision Adam, 64 GPUs."""
        m = replace(MODEL, parameters=7500000000)
        for zero, gigabytes in enumerate((120.0, 31.4, 16.6, 1.9)):
            b = t.estimate(m, setting("full", zero=zero), t.Place(64, 0, 0, 2048), 1)
            self.assertAlmostEqual((b["parameters"] + b["gradients"] + b["optimizer"]) / 1e9, gigabytes, delta=0.06)

    def test_states_by_hand(self):
        for s, want in [
                (setting("full"), (2000000, 2000000, 12000000)),
                (setting("full", "fp32"), (4000000, 4000000, 8000000)),  # no second copy of the weights
                (setting("full", "fp32", optimizer="sgd"), (4000000, 4000000, 4000000)),
                (setting("full", "fp32", optimizer="adam8bit"), (4000000, 4000000, 2000000 + 3907 * 8)),
                (setting("lora"), (2000000 + 128000000, 128000000, 256000000)),  # adapters: float32
                (setting("qlora"), (500000 + 128000000, 128000000, 256000000))]:
            b = t.estimate(MODEL, s, ONE, 1)
            self.assertEqual((b["parameters"], b["gradients"], b["optimizer"]), want)
            self.assertEqual(b["workspace"], 2 * 45088768 if s.method == "qlora" else 0)
            self.assertEqual(b["total"], sum(b.values()) - b["total"])

    def test_activations_by_hand(self):
        """Bytes a token of what torch was measured to keep; see docs/training.md."""
        attention = (2 * 4096 + 2 * 1024) * 2 + 32 * 4  # q, output; k, v; log-sum-exp of every head
        full = 4096 * 8 + 4096 * 8 + attention + 4 * 11008 * 2
        lora = 4096 * 8 + attention + 3 * 11008 * 2 + 4 * (5 * 4096 + 4096 + 11008) + 7 * 16 * 4
        lora32 = 4096 * 8 + 2 * attention - 32 * 4 + 3 * 11008 * 4 + 2 * 4096 * 4 + 11008 * 4 + 448
        loss = 4096 * 8 + 32000 * 14
        small = replace(MODEL, vocab=64)  # the peak is in the layer that is recomputed, not at the loss
        for m, s, want in [
                (MODEL, setting("full"), 32 * full + loss),
                (MODEL, setting("full", checkpointing=True), 32 * 4096 * 2 + loss),
                (MODEL, setting("full", "fp32", checkpointing=True), 32 * 4096 * 4 + 4096 * 12 + 32000 * 16),
                (MODEL, setting("lora"), 32 * lora + 4096 * 4 + 32000 * 14),
                (MODEL, setting("lora", "fp32"), 32 * lora32 + 4096 * 4 + 32000 * 16),
                (small, setting("full", checkpointing=True),
                 32 * 4096 * 2 + full + 4 * 11008 + 2 * 4096 + 64 * 2),
                (small, setting("qlora", checkpointing=True),
                 32 * 4096 * 2 + lora + 8 * 11008 + 12 * 4096 + 64 * 2)]:
            b = t.estimate(m, s, replace(ONE, tokens=1000), 3)
            self.assertEqual((b["activations"], b["batch_data"]), (3000 * want, 3000 * 24), s)

    def test_communication(self):
        m, four = replace(MODEL, parameters=7000000000), t.Place(4, 0, 0, 1)
        for zero, want in [(0, 14000000000), (2, 1000000000), (3, 1000000000 + 4 * 202383360)]:
            self.assertEqual(t.estimate(m, setting("full", zero=zero), four, 1)["workspace"], want)

    def test_search_is_exhaustive(self):
        m, s = replace(MODEL, parameters=3000000000, quantized_bytes=1500000000), setting("qlora")
        for budget in range(10 ** 9, 2 * 10 ** 11, 777777777):
            place, want = t.Place(2, budget, 0, 4096), 0
            while want < 32 and t.estimate(m, s, place, want + 1)["total"] <= budget:
                want += 1
            self.assertEqual(t.largest_batch(m, s, place, 64), want)

    def test_settings(self):
        m, place = replace(MODEL, parameters=7000000000, quantized_bytes=3500000000), t.Place(4, 72 * 10 ** 9, 0, 2048)
        found = t.settings(m, t.Wish(None, None, "bf16", None, None, 16, 32), place)
        self.assertEqual((found[0].method, found[-1].method), ("full", "qlora"))
        for s in found:
            self.assertTrue(s.micro_batch > 0 and s.bytes["total"] <= place.budget)
            self.assertTrue(s.micro_batch * (s.accumulation - 1) * 4 < 32 <= s.micro_batch * s.accumulation * 4)
        asked = t.Wish("full", "sgd", "bf16", 2, True, 16, 32)
        for budget in (place.budget, 10 ** 6):
            (s,) = t.settings(m, asked, replace(place, budget=budget))
            self.assertEqual((s.zero, s.checkpointing, s.optimizer), (2, True, "sgd"))
        self.assertEqual(s.micro_batch, 0)
        self.assertGreater(s.bytes["total"], 10 ** 6)


class Asking(Case):
    def test_longest_context(self):
        """The longest sequences that are said to fit do, and one token more does not."""
        longest = qconv.plan_training("Llama-3.1-8B", vram="24GB", context=8192).longest_context
        for tokens, fits in ((longest, True), (longest + 1, False)):
            self.assertEqual(qconv.plan_training("Llama-3.1-8B", vram="24GB", context=tokens).fits, fits)

    def test_members_are_documented(self):
        with open(os.path.join(ROOT, "docs", "training.md"), encoding="utf-8") as f:
            page = f.read()
        p = qconv.plan_training("Llama-3.1-8B", vram="80GB").json
        self.assertEqual([name for o in [p, p["settings"][0], p["settings"][0]["bytes_per_gpu"]] for name in o
                          if "`%s`" % name not in page], [])

    def test_without_v_the_plan_has_no_shape(self):
        self.assertNotIn("model_shape", json.loads(self.ok("plan", "--json", "--vram", "80GB", "Llama-3.1-8B")))

    def test_apply_keeps_what_was_there(self):
        os.mkdir(self.path("d"))
        self.write("d/ds_config.json", "old")
        qconv.plan_training("Llama-3.2-1B", vram="80GB", apply=self.path("d"))
        self.assertEqual(sorted(os.listdir(self.path("d"))),
                         ["accelerate.json", "ds_config.json", "ds_config.json.backup"])
        with open(self.path("d", "ds_config.json.backup"), encoding="utf-8") as f:
            self.assertEqual(f.read(), "old")

    def test_nothing_fits(self):
        r = self.command("Llama-3.3-70B-Instruct", "--vram", "8GB", "--apply", "d")
        self.assertEqual((r.returncode, r.stdout), (4, ""))
        self.assertIn("no setting fits 1 GPU, so there is none to apply; ", r.stderr)
        self.assertEqual(os.listdir(self.dir), [])
        with self.assertRaises(qconv.CheckError) as raised:
            qconv.plan_training("Llama-3.3-70B-Instruct", vram="8GB", apply="d")
        self.assertFalse(raised.exception.result.fits)

    def test_refused(self):
        self.write("f", "")
        for arguments, words in [
                (["--vram", "cpu:64GB"], "needs a GPU in --vram, found 'cpu:64GB'"),
                (["--vram", "80GB", "--apply", "f"], "expected a folder, found a file"),
                (["--vram", "80GB", "--zero", "2"], "but --vram names one"),
                (["--vram", "2x80GB", "--zero", "3", "--method", "qlora"], "does not divide 4-bit weights"),
                (["--vram", "2x80GB", "--zero", "4"], "--zero: expected a whole number from 0 to 3, found '4'"),
                (["--vram", "2x80GB", "--lora-rank", "x"], "--lora-rank: expected a whole number from 1 to 65536"),
                (["--vram", "2x80GB", "--method", "dora"], "--method: expected full or lora or qlora, found 'dora'"),
                (["--vram", "2x80GB", "--checkpointing", "no"], "--checkpointing: expected on or off, found 'no'"),
                (["--vram", "2x80GB", "--batch", "4"], "unrecognized arguments: --batch 4; try 'qconv plan-training"),
                (["--vram", "80 apples"], "--vram")]:
            r = self.command("Llama-3.1-8B", *arguments)
            self.assertEqual((r.returncode, r.stdout), (2, ""), arguments)
            self.assertIn(words, r.stderr)
            self.assertTrue(r.stderr.startswith("qconv: "))
        r = self.command("nothing-there", "--vram", "80GB")
        self.assertEqual((r.returncode, r.stdout), (3, ""))
        for options, words in [({"batch": 4}, "batch is no option"), ({"checkpointing": "maybe"}, "on or off")]:
            with self.assertRaisesRegex(qconv.UsageError, words):
                qconv.plan_training("Llama-3.1-8B", vram="80GB", **options)

    def test_warnings(self):
        arguments = ["Llama-3.2-1B", "--vram", "80GB", "--context", "200000", "--json"]
        r = self.command(*arguments)
        self.assertEqual(r.stderr, "qconv: warning: --context 200000 is beyond the model's limit of 131072 tokens\n")
        self.assertEqual(json.loads(r.stdout)["context"], 200000)
        self.assertEqual(self.command(*arguments, "-q").stderr, "")


if __name__ == "__main__":
    unittest.main()
