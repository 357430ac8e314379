"""What `calibrate` says before it begins: the plan's operations, memory and disk against counts by hand, and one sentence
with the right exit code for what cannot begin."""
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest import mock

import interop_support
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import qconv  # noqa: E402
from qconv import _calibrate_plan  # noqa: E402

warnings.simplefilter("ignore")
torch.set_num_threads(1)
MODEL = interop_support.ROOT / "tests" / "data" / "kjv-llama" / "model"
HIDDEN, INSIDE, KV, HEADS, LAYERS, VOCABULARY, CONTEXT = 192, 440, 64, 6, 4, 256, 128
# (inputs, outputs of each weight) of the sets of a layer.
SETS = [(HIDDEN, (HIDDEN, KV, KV)), (HIDDEN, (HIDDEN,)), (HIDDEN, (INSIDE, INSIDE)), (INSIDE, (HIDDEN,))]


class Plans(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.text = Path(cls.folder.name) / "text.ids"
        cls.text.write_text("".join(" ".join(str((7 * i + j) % 251) for j in range(CONTEXT)) + "\n" for i in range(64)))

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def ahead(self, **options):
        out = Path(self.folder.name) / "out"
        before = set(os.listdir(self.folder.name))
        found = qconv.calibrate(MODEL, out, to="nf4", text=self.text, mix=0, device="cpu", dry_run=True, **options)
        self.assertEqual(set(os.listdir(self.folder.name)), before)
        return found.json["calibration_ahead"]

    def test_counts(self):
        plan = self.ahead()
        self.assertEqual([plan[n] for n in ("layers", "weights", "sets", "tokens", "windows", "context", "gradient_tokens")],
                         [LAYERS, 28, 16, 64 * CONTEXT, 64, CONTEXT, 64 * CONTEXT])
        linear = LAYERS * sum(n * sum(rows) for n, rows in SETS)
        token = 2 * linear + LAYERS * 4 * CONTEXT * HIDDEN
        batch = 67 * CONTEXT  # 64 windows, filled up to a prime
        outputs = LAYERS * sum(2 * rows * rows for _, each in SETS for rows in each)
        parts = plan["parts"]
        self.assertAlmostEqual(parts["streams"]["operations"] / (token * (2 * batch + 4096)), 1)
        self.assertAlmostEqual(parts["gradients"]["operations"] / (
            batch * (3 * token + 4 * VOCABULARY * HIDDEN + outputs)), 1)
        self.assertAlmostEqual(parts["moments"]["operations"] / (
            64 * CONTEXT * LAYERS * sum(4 * n * n for n, _ in SETS)), 1)
        self.assertEqual(plan["files"], 4 * LAYERS * sum(rows * rows for _, each in SETS for rows in each))
        self.assertEqual(plan["read"], 3 * 4 * (linear + LAYERS * 2 * HIDDEN))
        for part in parts.values():
            self.assertGreater(part["seconds"], 0)
        self.assertGreater(plan["rate"], 1e6)
        self.assertGreater(plan["host"], 2 * 6 * batch * HIDDEN * 4)
        self.assertEqual((plan["cards"], plan["devices"], plan["states"]), ({}, ["cpu"], "memory"))

    def test_fewer_of_everything(self):
        whole, half = self.ahead(), self.ahead(calibration_tokens=32 * CONTEXT)
        for name in ("streams", "gradients", "moments"):
            self.assertLess(half["parts"][name]["operations"], 0.7 * whole["parts"][name]["operations"])
        self.assertEqual(half["parts"]["solver"]["operations"], whole["parts"]["solver"]["operations"])
        one = self.ahead(sided="one")
        self.assertNotIn("gradients", one["parts"])
        self.assertEqual((one["gradient_tokens"], one["files"], 3 * one["read"]), (0, 0, whole["read"]))
        self.assertLess(one["parts"]["solver"]["operations"], whole["parts"]["solver"]["operations"])

    def test_inputs_that_are_shared(self):
        def sets(*modules):
            return list(_calibrate_plan.sets_of([{"module": m, "cols": 8} for m in modules]))
        self.assertEqual(len(sets("a.0.self_attn.q_proj", "a.0.self_attn.k_proj", "a.0.self_attn.o_proj")), 2)
        self.assertEqual(len(sets("a.experts.gate_up[3, gate]", "a.experts.gate_up[3, up]", "a.experts.gate_up[4, up]")), 2)

    def test_room(self):
        fields = {f.name: 0 for f in dataclasses.fields(_calibrate_plan.Plan)}
        plan = _calibrate_plan.Plan(**dict(fields, devices=["cuda:1"], cards={"cuda:1": 50 * 10 ** 9}, parts={}))
        with mock.patch("torch.cuda.mem_get_info", lambda device: ({"cuda:1": 42 * 10 ** 9}[device], 43 * 10 ** 9)):
            with self.assertRaisesRegex(qconv.RunError, r"takes 50.0 GB of cuda:1's memory, and 42.0 GB of it are free: "):
                _calibrate_plan.check_room(plan)
            _calibrate_plan.check_room(dataclasses.replace(plan, cards={"cuda:1": 42 * 10 ** 9}))
        usage = shutil.disk_usage(tempfile.gettempdir())
        with self.assertRaisesRegex(qconv.RunError, "TMPDIR"):
            _calibrate_plan.check_room(dataclasses.replace(plan, cards={}, files=usage.total + 1))

    def test_cards(self):
        """What lies where on GPUs of other sizes, from the arguments that a plan for the CPU was made of."""
        asked = []

        def foresee(*given):
            asked.append(given)
            return _calibrate_plan.foresee(*given)
        with mock.patch("qconv._calibrate_run.foresee", foresee):
            cpu = self.ahead()
        phase, *between, _, rate = asked[0]
        phase = dict(phase, device_memory=10 ** 9)

        def on(total, *devices):
            with mock.patch("torch.cuda.get_device_properties", lambda device: mock.Mock(total_memory=total)):
                return _calibrate_plan.foresee(phase, *between, devices, rate)
        roomy, tight, two = on(10 ** 11, "cuda:0"), on(12 * 10 ** 8, "cuda:0"), on(10 ** 9, "cuda:0", "cuda:1")
        self.assertEqual((roomy.states, tight.states, two.states), ("cuda:0", "memory", "cuda:1"))
        self.assertEqual([p.devices for p in (roomy, tight, two)], [["cuda:0"], ["cuda:0"], ["cuda:1"]])
        batch = 67 * CONTEXT
        layer = 2 * 4 * (sum(n * sum(rows) for n, rows in SETS) + 2 * HIDDEN) + 4 * 2 * batch * (INSIDE + 2 * HIDDEN)
        stays = 4 * (2 * VOCABULARY * HIDDEN + HIDDEN)
        states = 4 * HIDDEN * batch * max(6 * 2, LAYERS + 6)
        self.assertEqual(tight.cards, {"cuda:0": layer + 10 ** 9})
        self.assertEqual(roomy.cards, {"cuda:0": layer + 10 ** 9 + stays + states})
        self.assertEqual(two.cards["cuda:0"], 10 ** 9)
        self.assertEqual(cpu["cards"], {})
        self.assertAlmostEqual(tight.host - roomy.host, stays + states, delta=states / 2)  # beside what Python takes

    def test_products_of_a_gpu(self):
        torch.set_float32_matmul_precision("highest")
        for devices, precision in ((["cpu"], "highest"), (["cuda:0"], "high")):
            with self.assertRaises(KeyError), _calibrate_plan.fast_products(devices):
                self.assertEqual(torch.get_float32_matmul_precision(), precision)
                raise KeyError
            self.assertEqual(torch.get_float32_matmul_precision(), "highest")


class Sentences(unittest.TestCase):
    """A command that cannot begin says one sentence, and nothing is written."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.model = self.folder / "model"
        shutil.copytree(MODEL, self.model)

    def refused(self, code, pattern, *more, path=()):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([*map(str, path), os.environ["PYTHONPATH"]]))
        run = subprocess.run([sys.executable, "-B", "-m", "qconv", "calibrate", "--to=nf4", "--device=cpu", *more,
                              str(self.model), str(self.folder / "out")], env=environment, capture_output=True, text=True)
        self.assertEqual(run.returncode, code, run.stderr)
        self.assertRegex(run.stderr, pattern)
        self.assertEqual(run.stderr.count("\n"), 1, run.stderr)
        self.assertEqual(run.stdout, "")
        self.assertFalse((self.folder / "out").exists())

    def configured(self, **members):
        path = self.model / "config.json"
        path.write_text(json.dumps(dict(json.loads((MODEL / "config.json").read_text()), **members)))

    def test_text(self):
        short = self.folder / "short.ids"
        short.write_text("5\n")
        self.refused(3, r"short.ids: 1 token in 1 sequence are too few", "--text=%s" % short)
        self.refused(1, r"there is no such text", "--text=%s" % (self.folder / "none"))

    def test_models(self):
        self.configured(model_type="qwen9")
        self.refused(3, r"transformers [\d.]+ does not take the config.json of .* \(model_type 'qwen9'\)")
        self.configured(num_hidden_layers=5)
        self.refused(3, r"the checkpoint has no weights for 'model.layers.4.")
        self.configured(num_hidden_layers=3)
        self.refused(3, r"the checkpoint has weights that LlamaForCausalLM .* does not use: 'model.layers.3")
        self.configured(hidden_size=200)
        self.refused(3, r"does not take the config.json|the checkpoint's .* makes ")

    def test_packages(self):
        for name, version, said in (("transformers", "4.30.0", "transformers 4.57 or later, and this is 4.30.0"),
                                    ("torch", "1.13.1+cpu", r"torch 2.1 or later, and this is 1.13.1\+cpu")):
            with self.subTest(name):
                about = self.folder / name / ("%s-%s.dist-info" % (name, version))
                about.mkdir(parents=True)
                (about / "METADATA").write_text("Metadata-Version: 2.1\nName: %s\nVersion: %s\n" % (name, version))
                self.refused(2, r"computing a model needs %s: pip install 'torch" % said, path=[about.parent])


if __name__ == "__main__":
    interop_support.main()
