"""qconv.calibrate: tiny random models of many types are calibrated, and their answers are nearer to the original's than
those of searched scales.

usage: test_interop_calibrate.py            the tests
       test_interop_calibrate.py NAME...    one line for each model type
"""
import json
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
import tokenizers
import torch
import transformers
from tiny_models import MAJOR, save

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import qconv  # noqa: E402
from qconv import _text  # noqa: E402
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
KJV = interop_support.MODELS["kjv-llama"]
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

    def test_mix_without_a_tokenizer(self):
        """Ids alone are calibrated with, and judged by nobody."""
        with Folder("llama") as folder:
            with self.assertRaisesRegex(qconv.UsageError, "--mix 0.25: the model has no tokenizer.json"):
                folder.calibrate("out", mix=0.25)
            folder.calibrate("out")
            self.assertEqual(said_of(folder.out("out"))[:3], (0, 0, 0))

    def test_other_kinds_are_judged(self):
        """An encoder by its states, and a model in two parts."""
        for name in ("bert", "t5"):
            with self.subTest(name), Folder(name) as folder:
                write_tokenizer(folder.model)
                Path(folder.text).write_text("7 7 7 8\n" * 200)
                folder.calibrate("out")
                mix, rank, tokens, search, calibrated = said_of(folder.out("out"))
                self.assertGreater(mix, 0.1)
                self.assertTrue(0 < rank < 0.9 and 0 < tokens <= 4096 and 0 < calibrated < search)

    def test_refusals(self):
        with self.assertRaisesRegex(qconv.UsageError, "--mix 0.5: the text is the bundled one already"):
            qconv.calibrate(KJV, "out", to="nf4", mix=0.5)
        with self.assertRaisesRegex(qconv.UsageError, "expected one or two"):
            qconv.calibrate("model", "out", sided="three")
        with self.assertRaisesRegex(qconv.UsageError, "at least 2"):
            qconv.calibrate("model", "out", calibration_context=1)
        with self.assertRaisesRegex(qconv.InputError, "no such folder"):
            qconv.calibrate("/nowhere", "out", to="nf4")


class Narrow(unittest.TestCase):
    """Two characters over and over, for a model that reads bytes."""

    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp(prefix="qconv-narrow-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.text = cls.folder / "two.txt"
        cls.text.write_text("ab" * 2048)
        qconv.convert(KJV, cls.folder / "search", to="nf4", scale="search", device="cpu")

    def calibrate(self, name, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", qconv.QconvWarning)
            result = qconv.calibrate(KJV, self.folder / name, to="nf4", device="cpu", calibration_tokens=8192,
                                     calibration_context=128, sided="one", **{"text": self.text, **options})
        return result, [str(w.message) for w in caught if "times as far" in str(w.message)]

    def kl(self, name, ids):
        """Mean KL divergence of an output from the model."""
        base = answers(KJV, KJV, ids)[0]
        return distance(base, answers(KJV, self.folder / name, ids)[0], True)

    def test_the_bundled_text_helps(self):
        said = self.calibrate("auto")[1]
        self.assertEqual(said, [])
        mix, rank, tokens, search, calibrated = said_of(self.folder / "auto")
        self.assertTrue(0.6 < mix < 0.75 and 0 < rank < 0.1 and tokens == 4096 and calibrated < 0.8 * search)
        other = torch.tensor(list((KJV.parent / "heldout.txt").read_bytes()[-67 * 128:])).view(67, 128)
        self.assertLess(self.kl("auto", other), 1.02 * self.kl("search", other))
        self.assertTrue(self.calibrate("auto")[0].complete_before)  # the same share is chosen again

    def test_alone_it_is_worse_and_that_is_said(self):
        result, said = self.calibrate("alone", mix=0)
        mix, rank, tokens, search, calibrated = said_of(self.folder / "alone")
        self.assertEqual((mix, rank, tokens), (0, 0, 4096))
        self.assertGreater(calibrated, 1.02 * search)
        self.assertEqual(len(said), 1)
        self.assertIn("%.2f times as far" % (calibrated / search), said[0])
        self.assertIn("--mix auto", said[0])
        c = result.json["calibration"]
        self.assertEqual((c["mix"], c["judged_tokens"], c["judged_search"], c["judged_calibrated"]),
                         (mix, tokens, search, calibrated))
        # The figures are those of outputs, on windows of the bundled text that are spread over it.
        windows = _text.windows("default", KJV, context=128)
        ids = windows.of(_text.spread(windows.lengths, 4096)).ids
        (self.folder / "judge.ids").write_text("".join(" ".join(map(str, row)) + "\n" for row in ids.tolist()))
        for name, figure in (("search", search), ("alone", calibrated)):
            found = qconv.evaluate(self.folder / name, against=KJV, text=self.folder / "judge.ids", device="cpu")
            self.assertAlmostEqual(found.kl_mean / figure, 1, 3)

    def test_a_share_that_is_asked_for(self):
        self.calibrate("half", mix=0.5)
        mix, rank, tokens, search, calibrated = said_of(self.folder / "half")
        self.assertEqual((mix, rank, tokens), (0.5, 0, 4096))
        self.assertLess(calibrated, search)

    def test_the_bundled_text_alone(self):
        self.assertEqual(self.calibrate("default", text="default")[1], [])
        mix, rank, tokens, search, calibrated = said_of(self.folder / "default")
        self.assertEqual((mix, rank, tokens), (0, 0, 4096))
        self.assertLess(calibrated, 0.8 * search)


def said_of(out):
    """What the manifest says of the mixture, and of the judges: tokens and both figures."""
    said = json.loads((Path(out) / "qconv.json").read_text())["options"]["calibrate"]
    return tuple(said[k] for k in ("mix", "relative_rank", "judged_tokens", "judged_search", "judged_calibrated"))


def write_tokenizer(folder):
    """One that has a token for each ASCII character, as BERT's frames them."""
    vocabulary = {"?": 0, "[CLS]": 1, "[SEP]": 2, **{chr(c): c for c in range(33, 127) if chr(c) != "?"}}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    own.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    own.save(os.path.join(folder, "tokenizer.json"))


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
