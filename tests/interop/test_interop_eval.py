"""`qconv eval` against torch: perplexity and KL divergence of transformers' logits, in double."""
import json
import math
import unittest

import torch
import transformers

import interop_support as s

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

TEXT = s.ROOT / "tests/data/kjv-llama/heldout.txt"


def probabilities(folder, windows, first):
    """log-probabilities [predicted, vocabulary] in double, targets"""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows, targets = [], []
    with torch.no_grad():
        for ids in windows:
            logits = model(torch.tensor([ids])).logits[0].double()
            rows.append(torch.log_softmax(logits, -1)[first - 1:-1])
            targets += ids[first:]
    return torch.cat(rows), torch.tensor(targets)


def cut(ids, front, context):
    room = context - len(front)
    return [w for w in (front + ids[i:i + room] for i in range(0, len(ids), room)) if len(w) > 1]


class Eval(unittest.TestCase):
    def check(self, name, context, front, length, form="nf4-double"):
        model = s.model_path(name)
        out = s.converted(model, form)
        text = TEXT.read_text()[:length]
        path = s.SCRATCH / "eval.txt"
        path.write_text(text)
        plain = s.SCRATCH / (name + "-dequantized")
        s.qconv("--to", "bf16", "--compress", "none", "-q", "--force", out, plain)
        got = json.loads(s.qconv("eval", out, "--against", model, "--text", path, "--context",
                                 str(context), "--json", "-q"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        windows = cut(tokenizer(text, add_special_tokens=False)["input_ids"], front, context)
        first = max(1, len(front))
        p, targets = probabilities(model, windows, first)
        base = -p[torch.arange(len(targets)), targets]
        self.assertEqual(got["predicted"], len(targets))
        self.assertEqual(got["windows"], len(windows))
        want = math.exp(base.mean())
        s.note(f"{name}: perplexity {got['base_perplexity']:.6f}, transformers {want:.6f}")
        self.assertAlmostEqual(got["base_perplexity"], want, delta=1e-4 * want)
        error = want * base.std().item() / math.sqrt(len(targets))
        self.assertAlmostEqual(got["base_perplexity_error"], error, delta=1e-3 * error)
        q, _ = probabilities(plain, windows, first)  # rounded to bf16: near, not equal
        kl = (p.exp() * (p - q)).sum(-1)
        s.note(f"{name}: KL {got['kl_mean']:.6f}, transformers {kl.mean():.6f}")
        self.assertAlmostEqual(got["kl_mean"], kl.mean().item(), delta=0.03 * kl.mean().item())
        same = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
        self.assertAlmostEqual(got["top1"], same, delta=0.01)

    def test_kjv(self):
        self.check("kjv-llama", 256, [], 20000)

    def test_tinystories(self):
        self.check("tinystories", 100, [1], 4000)


if __name__ == "__main__":
    s.main()
