"""qconv.calibrate: tiny random models of many types are calibrated, and their answers are nearer to the original's than
those of searched scales.

usage: test_interop_calibrate.py            the tests
       test_interop_calibrate.py NAME...    one line for each model type
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from pathlib import Path

import interop_support
import torch
import transformers
from tiny_models import MAJOR, save

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import qconv  # noqa: E402
from qconv._values import Values  # noqa: E402
from qconv.stream import Stream, build  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
warnings.simplefilter("ignore")
torch.set_num_threads(1)

WINDOWS, LENGTH = 96, 24
DENSE = ["llama", "gemma2", "phi3", "gpt2", "gpt_neox", "bloom", "opt", "qwen3"]
MIXED = ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "jamba", "qwen3_next"]
OTHERS = ["bert", "modernbert", "t5", "falcon_mamba", "gemma3n_text"]
PYTHON = str(Path(__file__).resolve().parents[2] / "python")


def write_ids(path, seed, windows=WINDOWS):
    """Random ids, a few of which are much more frequent than the others, as in text."""
    generator = torch.Generator().manual_seed(seed)
    ids = 20 + (torch.rand(windows, LENGTH, generator=generator) ** 3 * 130).long()
    Path(path).write_text("".join(" ".join(map(str, row)) + "\n" for row in ids.tolist()))
    return ids


def answers(config_folder, values_folder, ids):
    """Log-probabilities, or states where there is no head."""
    model = build(config_folder)
    with Values(values_folder) as values:
        stream = Stream(model, values, rows=32)
        inputs = {"input_ids": ids}
        if getattr(model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids[:, LENGTH // 2:]
        body = stream.body(inputs)
        out = [body.head(piece) for piece in body.pieces()]
        stream.close()
    if out[0].get("logits") is None:
        return torch.cat([o["last_hidden_state"] for o in out]).double(), False
    return torch.cat([o["logits"] for o in out]).double().log_softmax(-1), True


def distance(one, other, predicts):
    """Mean KL divergence from one to other, or the mean squared difference of states."""
    return ((one.exp() * (one - other)).sum(-1) if predicts else (one - other).square().sum(-1)).mean().item()


class Folder:
    """A tiny model with texts of ids."""

    def __init__(self, name):
        self.path = tempfile.mkdtemp(prefix="qconv-calibrate-")
        self.model = os.path.join(self.path, "model")
        save(name, self.model)
        self.text = os.path.join(self.path, "text.ids")
        write_ids(self.text, 1)
        self.judge = write_ids(os.path.join(self.path, "judge.ids"), 2, 67)

    def out(self, name):
        return os.path.join(self.path, name)

    def calibrate(self, name, **options):
        return qconv.calibrate(self.model, self.out(name), text=self.text, calibration_context=LENGTH, device="cpu",
                               **{"to": "nf4", **options})

    def distances(self, *names):
        base, predicts = answers(self.model, self.model, self.judge)
        return [distance(base, answers(self.model, self.out(n), self.judge)[0], predicts) for n in names]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path)


def measured(name, **options):
    """(distance of searched scales, of calibrated ones, the result) of a type."""
    with Folder(name) as folder:
        qconv.convert(folder.model, folder.out("search"), to="nf4", device="cpu", **options)
        result = folder.calibrate("calibrated", **options)
        return (*folder.distances("search", "calibrated"), result)


class Calibrate(unittest.TestCase):
    def check(self, names):
        for name in names:
            with self.subTest(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                search, calibrated, result = measured(name)
                self.assertLess(calibrated, search)
                self.assertGreater(result.json["calibration"]["weights"], 0)

    def test_dense_models(self):
        self.check(DENSE)

    @unittest.skipIf(MAJOR < 5, "their experts are modules in transformers 4")
    def test_mixtures(self):
        self.check(MIXED)

    def test_encoders_and_others(self):
        self.check(OTHERS)

    def test_sides_and_seeds(self):
        """Two sides are nearer than one, and the same call makes the same bytes."""
        with Folder("llama") as folder:
            folder.calibrate("two")
            folder.calibrate("again")
            folder.calibrate("one", sided="one")
            two, one = folder.distances("two", "one")
            self.assertLess(two, one)
            self.assertEqual(digests(folder.out("two")), digests(folder.out("again")))

    def test_a_killed_run_goes_on(self):
        """Killed at moments of all kinds, the same command ends with the same bytes and makes no weight twice."""
        with Folder("qwen3_moe" if MAJOR > 4 else "llama") as folder:
            folder.calibrate("whole")
            argv = [sys.executable, "-B", "-m", "qconv", "calibrate", "--to=nf4", "--text=" + folder.text,
                    "--calibration-context=%d" % LENGTH, "--device=cpu", folder.model, folder.out("killed")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([PYTHON, os.environ.get("PYTHONPATH", "")])}
            killed = 0
            for least in (1, 400, 1200, 2500):
                run = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                       start_new_session=True)
                while run.poll() is None and size_of(folder.out("killed")) < least:
                    time.sleep(0.02)
                if run.poll() is None:
                    os.kill(run.pid, signal.SIGKILL)
                    killed += 1
                run.wait()
            self.assertGreaterEqual(killed, 2)
            subprocess.run(argv, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.assertEqual(digests(folder.out("killed")), digests(folder.out("whole")))

    def test_refusals(self):
        with self.assertRaisesRegex(qconv.UsageError, "expected one or two"):
            qconv.calibrate("model", "out", sided="three")
        with self.assertRaisesRegex(qconv.UsageError, "at least 2"):
            qconv.calibrate("model", "out", calibration_context=1)
        with self.assertRaisesRegex(qconv.InputError, "no such folder"):
            qconv.calibrate("/nowhere", "out", to="nf4")


def size_of(out):
    """Bytes of the journal of what was calibrated."""
    return sum(p.stat().st_size for p in Path(out).parent.glob(Path(out).name + "*/**/journal-calibrated"))


def digests(out):
    return [p.read_bytes() for p in sorted(Path(out).glob("model*.zst"))]


def main(names):
    for name in names:
        try:
            search, calibrated, result = measured(name)
            c = result.json["calibration"]
            print("%-20s %.3f  search %.3g, calibrated %.3g; %d weights, %d left" % (
                name, calibrated / search, search, calibrated, c["weights"], c.get("left", 0)), flush=True)
        except Exception as e:
            print("%-20s failed: %s: %s" % (name, type(e).__name__, " ".join(str(e).split())[:150]), flush=True)
            if os.environ.get("TRACE"):
                traceback.print_exc()


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        main(sys.argv[1:])
    else:
        interop_support.main()
