"""qconv.evaluate beside transformers' own computation of whole models.

usage: test_interop_eval.py            the tests
       test_interop_eval.py NAME...    one line for each model type
"""
import math
import os
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

import interop_support
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import MAJOR, STREAMED, NotMade, inputs, save

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import qconv  # noqa: E402
from qconv import _text, errors  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
warnings.simplefilter("ignore")
torch.set_num_threads(1)

ROWS, LENGTH = 7, 12
# A sentence at a time would need other arguments than ids, or no token is predicted from those before it.
NOT_TEXT = set("""clip siglip vit dinov2 blip trocr qwen2_audio idefics3 smolvlm internvl mistral3 llava llava_next
    llava_onevision paligemma gemma3 xlnet vit-gpt2""".split())
ENCODERS = "bert roberta xlm-roberta distilbert albert electra mpnet modernbert".split()
# What few versions of transformers have: each must be among those that were evaluated where it is there.
WANTED = {5: "qwen3_next qwen3_5 qwen3_5_moe gemma3_text gemma4_text mllama gpt_oss deepseek_v3 jamba falcon_mamba whisper t5",
          4: "qwen3_next gemma3_text mllama gpt_oss deepseek_v3 jamba falcon_mamba whisper t5"}


def lines_of(folder, lengths=None):
    """A file of ids: ROWS sequences; and the ids."""
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(20, 150, (n,), generator=generator) for n in lengths or [LENGTH] * ROWS]
    path = Path(folder) / "text.ids"
    path.write_text("".join(" ".join(map(str, row.tolist())) + "\n" for row in ids))
    return path, ids


def loss_of(folder, kind, ids, more):
    """The mean loss of the whole model."""
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    with torch.no_grad():
        for i, row in enumerate(ids):
            own, targets = {k: v[i:i + 1] for k, v in more.items()}, row
            if "input_features" in more:
                own["decoder_input_ids"] = row[None]
            elif model.config.is_encoder_decoder:
                targets = row[LENGTH // 2:]
                own |= {"input_ids": row[None, :LENGTH // 2], "decoder_input_ids": targets[None]}
            else:
                own["input_ids"] = row[None]
            logits = model(**own, use_cache=False).logits[0, -len(targets):].double()
            losses.append(torch.nn.functional.cross_entropy(logits[:-1], targets[1:], reduction="none"))
    return float(torch.cat(losses).mean())


def check(name):
    """The relative difference of qconv's loss from the whole model's. Raises NotMade where the tiny model of the type
    does not predict text by itself."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            kind = save(name, folder)
        except Exception as error:
            raise NotMade("not made: %s" % error) from None
        if not kind.can_generate() or name in NOT_TEXT:
            raise NotMade("not a model of text")
        config = transformers.AutoConfig.from_pretrained(folder)
        more = {k: v for k, v in inputs(config, ROWS, LENGTH).items()
                if k not in ("input_ids", "decoder_input_ids")} if name in ("mllama", "whisper") else {}
        text, ids = lines_of(folder)
        try:
            theirs = loss_of(folder, kind, ids, more)
        except Exception as error:
            raise NotMade("the whole model fails: %s" % error) from None
        path = None
        if more:
            path = Path(folder) / "more.safetensors"
            save_file({k: v.contiguous() for k, v in more.items()}, path)
        ours = qconv.evaluate(folder, text=text, context=LENGTH, inputs=path, device="cpu")
        return abs(math.log(ours.perplexity) / theirs - 1)


class Whole(unittest.TestCase):
    def test_types_of_transformers(self):
        equal, seen = [], []
        for name in STREAMED:
            with self.subTest(name):
                try:
                    apart = check(name)
                except NotMade as error:
                    print(f"{name}: {str(error)[:100]}")
                    continue
                finally:
                    seen.append(name)
                self.assertLess(apart, 1e-5)
                equal.append(name)
        print(f"{len(equal)} of {len(seen)} types have the whole model's loss: {' '.join(equal)}")
        self.assertGreaterEqual(len(equal), 60)
        self.assertFalse(set(WANTED[min(MAJOR, 5)].split()) - set(equal))

    def test_a_text_alone_is_too_little(self):
        for name, lacking in (("vit", "pixel_values"), ("clip", "pixel_values"), ("whisper", "input_features")):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                save(name, folder)
                text, _ = lines_of(folder)
                with self.assertRaisesRegex(qconv.InputError, rf"(?m)^\w+ .*: --inputs FILE gives {lacking}$"):
                    qconv.evaluate(folder, against=folder, text=text, device="cpu")

    def test_halves_of_windows_of_several_lengths(self):
        for name in ("t5", "bart"):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                kind = save(name, folder)
                text, ids = lines_of(folder, [12, 9, 6, 4])
                ours = qconv.evaluate(folder, text=text, device="cpu")
                model = kind.from_pretrained(folder, dtype=torch.float32).eval()
                losses = []
                with torch.no_grad():
                    for row in ids:
                        half = len(row) // 2
                        logits = model(input_ids=row[None, :half], decoder_input_ids=row[None, half:]).logits[0].double()
                        losses.append(torch.nn.functional.cross_entropy(logits[:-1], row[half + 1:], reduction="none"))
                self.assertAlmostEqual(math.log(ours.perplexity) / float(torch.cat(losses).mean()), 1, delta=1e-5)

    def test_distances_of_encoders_whose_windows_have_several_lengths(self):
        for name in ENCODERS:
            with self.subTest(name), tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
                save(name, folder)
                save(name, other)
                changed = {k: v * 1.01 if v.dim() == 2 else v for k, v in load_file(other + "/model.safetensors").items()}
                save_file(changed, other + "/model.safetensors", {"format": "pt"})
                text, ids = lines_of(folder, [12, 9, 12, 5, 2])
                ours = qconv.evaluate(other, against=folder, text=text, device="cpu")
                one, two = (transformers.AutoModel.from_pretrained(f, dtype=torch.float32).eval() for f in (other, folder))
                with torch.no_grad():
                    pairs = [[m(row[None]).last_hidden_state[0].double() for m in (one, two)] for row in ids]
                theirs = sum(float((a - b).norm() / b.norm()) for a, b in pairs) / len(pairs)
                self.assertAlmostEqual(ours.distance_mean / theirs, 1, delta=1e-4)
                self.assertIsNone(ours.kl_mean)
                self.assertIsNone(ours.perplexity)


class Figures(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.model, cls.other = os.path.join(cls.folder.name, "model"), os.path.join(cls.folder.name, "other")
        save("llama", cls.model)
        save("llama", cls.other)
        file = os.path.join(cls.other, "model.safetensors")
        save_file({k: v * 1.05 if v.dim() == 2 else v for k, v in load_file(file).items()}, file, {"format": "pt"})
        cls.text, cls.ids = lines_of(cls.folder.name, [12, 9, 30, 5, 1, 2])

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_it(self, **more):
        return qconv.evaluate(self.other, **{"text": self.text, "context": LENGTH, "device": "cpu", **more})

    def test_divergence_and_its_errors(self):
        ours = self.run_it(against=self.model)
        windows = [row[at:at + LENGTH] for row in self.ids for at in range(0, len(row), LENGTH)]
        q, p, came = [], [], []
        models = [transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval()
                  for f in (self.other, self.model)]
        with torch.no_grad():
            for row in (w for w in windows if len(w) > 1):
                for kept, model in zip((q, p), models):
                    kept.append(model(row[None]).logits[0, :-1].double().log_softmax(-1))
                came.append(row[1:])
        q, p, came = torch.cat(q), torch.cat(p), torch.cat(came)
        kl = (p.exp() * (p - q)).sum(-1)
        nll, base = (-one.gather(1, came[:, None])[:, 0] for one in (q, p))
        n = len(came)
        expected = {
            "predicted": n, "windows": sum(len(w) > 1 for w in windows), "tokens": sum(map(len, self.ids)),
            "perplexity": nll.mean().exp(), "base_perplexity": base.mean().exp(),
            "difference": nll.mean().exp() - base.mean().exp(), "log_ratio": (nll - base).mean(), "kl_mean": kl.mean(),
            "kl_error": kl.std() / n ** 0.5, "kl_median": kl.median() if n % 2 else kl.sort().values[n // 2 - 1:n // 2 + 1].mean(),
            "kl_max": kl.max(), "top1": (q.argmax(-1) == p.argmax(-1)).double().mean(),
            "probability_rms": ((-nll).exp() - (-base).exp()).square().mean().sqrt(),
            "perplexity_error": nll.mean().exp() * nll.std() / n ** 0.5,
            "difference_error": (nll.mean().exp() * nll - base.mean().exp() * base).std() / n ** 0.5}
        for name, value in expected.items():
            self.assertAlmostEqual(getattr(ours, name) / float(value), 1, delta=2e-4, msg=name)

    def test_a_model_against_itself_is_no_divergence(self):
        ours = self.run_it(against=self.other)
        self.assertEqual((ours.kl_max, ours.top1, ours.difference), (0.0, 1.0, 0.0))

    def test_limits_are_checks(self):
        with self.assertRaises(errors.CheckError) as caught:
            self.run_it(against=self.model, max_kl=1e-9)
        self.assertGreater(caught.exception.result.kl_mean, 1e-9)
        self.assertIn("above --max-kl 1e-09", str(caught.exception))
        self.run_it(against=self.model, max_kl=100.0)

    def test_what_is_refused(self):
        far = Path(self.folder.name) / "far.ids"
        far.write_text("1 2\n3 4000\n")
        short = Path(self.folder.name) / "short.ids"
        short.write_text("1\n\n2\n")
        for error, words, more in (
                (errors.InputError, "line 2, column 3: token id 4000 is not in the vocabulary", {"text": far}),
                (errors.InputError, "too few to predict one", {"text": short}),
                (errors.RunError, "there is no such text", {"text": "nowhere.txt"}),
                (errors.UsageError, "expected at least 2", {"context": 1}),
                (errors.UsageError, "--max-kl needs --against MODEL", {"max_kl": 1.0}),
                (errors.UsageError, "expected --max-kl", {"max_distance": 1.0, "against": self.model}),
                (errors.UsageError, "expected auto, cpu, cuda", {"device": "tpu"}),
                (errors.DeviceError, "finds 0 GPUs here", {"device": "cuda:0"})):
            with self.subTest(words), self.assertRaisesRegex(error, words):
                self.run_it(**more)

    def test_logits_that_are_not_finite(self):
        with tempfile.TemporaryDirectory() as folder:
            save("llama", folder)
            file = os.path.join(folder, "model.safetensors")
            tensors = load_file(file)
            tensors["model.norm.weight"][3] = math.inf
            save_file(tensors, file, {"format": "pt"})
            with self.assertRaisesRegex(errors.InputError, "the logits of a token are not finite"):
                qconv.evaluate(folder, text=self.text, device="cpu")


class Texts(unittest.TestCase):
    def test_what_a_tokenizer_puts_in_front_stands_in_front_of_every_window(self):
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        with tempfile.TemporaryDirectory() as folder:
            save("llama", folder)
            words = {w: i for i, w in enumerate(["<s>", "</s>", "a", "b", "c", "d", "e", "[UNK]"])}
            own = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
            own.pre_tokenizer = pre_tokenizers.Whitespace()
            own.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
            own.enable_truncation(3)
            own.save(folder + "/tokenizer.json")
            text = Path(folder) / "text.txt"
            text.write_text("a b c d e a b")
            made = _text.windows(text, folder, context=4)
            self.assertEqual([row[:n] for row, n in zip(made.ids.tolist(), made.lengths)],
                             [[0, 2, 3, 4], [0, 5, 6, 2], [0, 3]])
            self.assertEqual((made.first, made.tokens, made.kind), (1, 7, "WordLevel"))
            text.write_bytes(b"a \xff")
            with self.assertRaisesRegex(errors.InputError, "byte 2 is no UTF-8"):
                _text.windows(text, folder, context=4)

    def test_ids_are_read_by_line_and_column(self):
        self.assertEqual(_text.parse_ids(b"1 2\t3\r\n\n 4\n", 5), [[1, 2, 3], [4]])
        self.assertEqual(_text.parse_ids(b"1 2\n3 4\n", 5, 3), [[1, 2], [3]])
        for data, words in ((b"1 5", "line 1, column 3: token id 5 is not in the vocabulary of 5"),
                            (b"9" * 5000, "line 1, column 1: token id 999999999999999999999999... is not in the vocabulary of 5"),
                            (b"1\n 01", "line 2, column 2: a token id has no leading zeros"),
                            (b"1,2", "line 1, column 2: expected a decimal token id, found ','"),
                            (b"\x01", "line 1, column 1: expected a decimal token id, found the byte 0x01")):
            with self.subTest(words), self.assertRaisesRegex(errors.InputError, words):
                _text.parse_ids(data, 5)

    def test_windows_are_spread(self):
        self.assertEqual(_text.spread([4] * 10, 100), list(range(10)))
        self.assertEqual(_text.spread([4] * 10, 8), [2, 7])
        self.assertEqual(_text.spread([4] * 10, 1), [5])

    def test_rows_are_a_prime_that_is_no_other_size(self):
        with tempfile.TemporaryDirectory() as folder:
            save("llama", folder)
            config = transformers.AutoConfig.from_pretrained(folder)
            config.some_size = 11
            text, _ = lines_of(folder, [7] * 10)
            made = _text.windows(text, folder, context=7, config=config)
            batch, (mask,) = made.batch(range(10), config)
            self.assertEqual(list(batch["input_ids"].shape), [13, 7])
            self.assertEqual(mask.sum(1).tolist(), [7] * 10 + [0] * 3)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in STREAMED:
        for given in sys.argv[1:]:
            print(given, check(given))
    else:
        interop_support.main()
