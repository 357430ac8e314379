#!/usr/bin/env python3
"""`qconv eval`: texts and ids, limits, refusals, and that nothing depends on threads or ISA. That its
numbers are right: tests/unit/eval/unit_eval_stats.c, and tests/interop against transformers."""
import json
import math
import os
import re
import shutil
import unittest

from output_case import OutputCase, isa_list
import make_checkpoint as mk
import qconv_case
from test_documented import members, page, section

BUNDLED = os.path.join(qconv_case.ROOT, "tests", "data", "kjv-llama")
MODEL = os.path.join(BUNDLED, "model")


class EvalCase(OutputCase):
    def setUp(self):
        super().setUp()
        with open(os.path.join(BUNDLED, "heldout.txt"), encoding="utf-8") as f:
            self.text = f.read()[:1500]
        self.write("t.txt", self.text)

    def eval(self, *args, **more):
        return json.loads(self.ok("eval", "--json", "-q", *args, **more))

    def numbers(self, *args, **more):
        """The result but for what names files and the clock."""
        r = self.eval(*args, **more)
        return {k: v for k, v in r.items() if k not in ("seconds", "text", "tokenizer", "path")}


class Texts(EvalCase):
    def test_ids_are_the_text(self):
        want = self.numbers(MODEL, "--text", "t.txt")
        self.write("t.ids", " ".join(str(b) for b in self.text.encode()))
        self.assertEqual(self.numbers(MODEL, "--text", "t.ids"), want)
        self.assertEqual((want["tokens"], want["windows"], want["context"], want["predicted"]),
                         (1500, 6, 256, 1494))
        self.assertTrue(2.5 < want["perplexity"] < 3.5, want)
        self.assertIn("perplexity", self.ok("eval", "-q", MODEL, "--text", "t.ids"))
        # Without its tokenizer.json a vocabulary of 256 is bytes.
        shutil.copytree(MODEL, self.path("m"))
        os.remove(self.path("m", "tokenizer.json"))
        self.assertEqual(self.numbers("m", "--text", "t.txt"), want)
        self.assertEqual(self.eval("m", "--text", "t.txt")["tokenizer"], "bytes")
        self.assertEqual(self.numbers("m", "--text", "t.txt", "--tokenizer", MODEL), want)

    def test_lines_are_cut_alone(self):
        ids = [str(b) for b in self.text.encode()]
        self.write("one.ids", " ".join(ids[:100]) + "\n" + " ".join(ids[100:150]) + "\n7\n")
        self.write("a.ids", " ".join(ids[:100]))
        self.write("b.ids", " ".join(ids[100:150]))
        both, a, b = (self.eval(MODEL, "--text", n + ".ids", "--context", "64")
                      for n in ("one", "a", "b"))
        self.assertEqual((both["tokens"], both["windows"], both["predicted"]), (151, 3, 147))
        nll = (math.log(a["perplexity"]) * a["predicted"] + math.log(b["perplexity"]) *
               b["predicted"]) / 147
        self.assertAlmostEqual(math.log(both["perplexity"]), nll, 12)

    def test_progress_in_tokens(self):
        self.write("long.txt", (self.text * 10)[:40000])  # for more than a tick of the clock
        r = self.run_qconv("eval", MODEL, "--text", "long.txt", "--progress", "always")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertRegex(r.stderr.decode(), r"evaluating +\d+%.* of [\d,]+ tokens")
        self.assertNotIn(b"B/s", r.stderr)

    def test_max_tokens(self):
        self.write("s.txt", self.text[:300])
        self.assertEqual(self.numbers(MODEL, "--text", "t.txt", "--max-tokens", "300"),
                         self.numbers(MODEL, "--text", "s.txt"))

    def test_refused(self):
        for name, text, has in (
                ("e.txt", "", ["e.txt", "0 tokens", "too few"]),
                ("o.txt", "x", ["o.txt", "1 token in 1 sequence", "at least 2"]),
                ("l.ids", "1\n2\n", ["l.ids", "2 tokens in 2 sequences"]),
                ("b.ids", "1 2\n3 4 x\n", ["b.ids: line 2, column 5", "'x'"]),
                ("v.ids", "1 256\n", ["v.ids: line 1, column 3", "256 is not in the vocabulary"])):
            self.write(name, text)
            self.fails(3, "eval", MODEL, "--text", name, has=has)
        with open(self.path("u.txt"), "wb") as f:
            f.write(b"abc\xff")
        self.fails(3, "eval", MODEL, "--text", "u.txt",
                   has=["u.txt", "the text is not UTF-8 at byte 3; convert it to UTF-8"])
        self.fails(1, "eval", MODEL, "--text", "none.txt", has="none.txt")
        self.fails(3, "eval", MODEL, "--text", "t.txt", "--tokenizer",
                   self.write("w.json", '{"model": {"type": "Unigram"}}'),
                   has=["w.json", "'Unigram' is not supported"])


class Pairs(EvalCase):
    def setUp(self):
        super().setUp()
        self.ok("-q", "--to", "nf4", MODEL, "out")

    def test_itself(self):
        r = self.eval(MODEL, "--against", MODEL, "--text", "t.txt")
        for name in ("kl_mean", "kl_error", "kl_median", "kl_99", "kl_max", "difference",
                     "difference_error", "log_ratio", "log_ratio_error", "probability_rms",
                     "top1_error"):
            self.assertEqual(r[name], 0, name)
        self.assertEqual(r["top1"], 1)
        self.assertEqual(r["perplexity"], r["base_perplexity"])
        self.assertEqual(r["perplexity_error"], r["base_perplexity_error"])

    def test_quantized(self):
        r = self.eval("out", "--against", MODEL, "--text", "t.txt")
        alone = self.eval("out", "--text", "t.txt")
        base = self.eval(MODEL, "--text", "t.txt")
        self.assertEqual(r["perplexity"], alone["perplexity"])
        self.assertEqual(r["base_perplexity"], base["perplexity"])
        self.assertAlmostEqual(r["difference"], r["perplexity"] - r["base_perplexity"], 12)
        self.assertAlmostEqual(r["log_ratio"], math.log(r["perplexity"] / r["base_perplexity"]), 12)
        self.assertTrue(0.002 < r["kl_mean"] < 0.03, r)
        self.assertTrue(0 < r["kl_median"] < r["kl_mean"] < r["kl_99"] < r["kl_max"], r)
        self.assertTrue(0.9 < r["top1"] < 1, r)
        # The models saw the same tokens: their difference is far better known than either.
        self.assertLess(r["difference_error"], 0.3 * r["perplexity_error"])

    def test_threads_isa_and_form(self):
        want = self.numbers("out", "--against", MODEL, "--text", "t.txt", "--threads", "1")
        self.assertEqual(self.numbers("out", "--against", MODEL, "--text", "t.txt", "--threads",
                                      "3"), want)
        self.ok("-q", "unpack", "out", "plain")
        self.assertEqual(self.numbers("plain", "--against", MODEL, "--text", "t.txt"), want)
        self.write("s.txt", self.text[:200])
        one = self.numbers("out", "--text", "s.txt")
        for isa in isa_list():
            self.assertEqual(self.numbers("out", "--text", "s.txt", env={"QCONV_ISA": isa}), one)

    def test_device(self):
        """Only the CPU computes. QCONV_DEVICE is for the other commands too, so it may name GPUs."""
        self.write("s.txt", self.text[:200])
        one = self.numbers("out", "--text", "s.txt")
        for device in ("cuda", "cuda:0,1"):
            self.fails(2, "eval", "out", "--text", "s.txt", "--device", device,
                       has=f"--device {device}: 'qconv eval' computes on the CPU only; leave --device out")
        for device in ("auto", "cpu"):
            self.assertEqual(self.numbers("out", "--text", "s.txt", "--device", device), one)
        self.assertEqual(self.numbers("out", "--text", "s.txt", env={"QCONV_DEVICE": "cuda"}), one)
        self.assertEqual(self.eval("out", "--text", "s.txt")["device"], "cpu")

    def test_max_kl(self):
        args = ["eval", "out", "--against", MODEL, "--text", "t.txt", "--max-kl"]
        self.assertIn("KL divergence, mean", self.ok(*args, "0.05"))
        r = self.run_qconv(*args, "0.001", "--json", "-q")
        self.assertEqual(r.returncode, 4)
        self.assertGreater(json.loads(r.stdout)["kl_mean"], 0.001)
        self.assertRegex(r.stderr.decode(), r"^qconv: out: the mean KL divergence to .* is "
                         r"0\.\d+, above --max-kl 0\.001, over t\.txt\n$")

    def test_vocabularies_differ(self):
        with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as f:
            config = json.load(f)
        tensors = mk.read_checkpoint(MODEL)
        for name, (dtype, shape, data) in list(tensors.items()):
            if shape == [256, 192] and ("embed" in name or "head" in name):
                tensors[name] = (dtype, [128, 192], data[:len(data) // 2])
        config["vocab_size"] = 128
        self.model(tensors, config=config, name="half")
        self.fails(3, "eval", "out", "--against", "half", "--text", "t.txt",
                   has=["vocabulary of 256", "half has one of 128", "cannot be compared"])

    def test_documented(self):
        text = section(page("eval.md"), "`qconv eval --json`")
        printed = members(self.eval("out", "--against", MODEL, "--text", "t.txt"), set())
        self.assertEqual(printed, set(re.findall(r"`(\w+)`", "".join(
            row.split("|")[1] for row in text.splitlines() if row.startswith("| `")))))


if __name__ == "__main__":
    unittest.main()
