"""qconv.capture: moments of inputs and of outputs' gradients, against hooks and autograd on tiny random models; and what
qconv makes of them."""
import json
import lzma
import unittest

import interop_support as s
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, normalize
from transformers.pytorch_utils import Conv1D

import qconv

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

FIVE = int(transformers.__version__.split(".")[0]) >= 5
SMALL = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
MODELS = {
    "qwen2": ("Qwen2ForCausalLM", dict(SMALL, tie_word_embeddings=True)),
    "gpt2": ("GPT2LMHeadModel", dict(vocab_size=61, n_embd=24, n_layer=2, n_head=4, n_positions=64)),
    "bert": ("BertModel", dict({k: v for k, v in SMALL.items() if k != "num_key_value_heads"})),
    # separate experts in transformers 4, stacked in 5
    "qwen3_moe": ("Qwen3MoeForCausalLM", dict(SMALL, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2,
                                              head_dim=6)),
}
BLOCK, CONTEXT, SEED = 16, 16, 5


def make(kind):
    torch.manual_seed(11)
    name, options = MODELS[kind]
    config = transformers.AutoConfig.for_model(kind, **options)
    path = s.SCRATCH / kind
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))  # biases and norms that say something
    model.save_pretrained(path)
    ids = torch.randint(0, 61, (12, CONTEXT))
    text = s.SCRATCH / f"{kind}.ids"
    text.write_text("".join(" ".join(map(str, row)) + "\n" for row in ids.tolist()))
    return path, text, ids


class Direct:
    """Inputs and gradients of every product, from hooks on modules and, of stacks, from a forward pass of its own."""

    def __init__(self, path):
        name = json.loads((path / "config.json").read_text())["architectures"][0]
        self.model = getattr(transformers, name).from_pretrained(path).float().eval()
        self.model.set_attn_implementation("eager")
        self.seen, self.x, self.g = [], {}, {}
        for own, module in self.model.named_modules():
            if isinstance(module, (torch.nn.Linear, Conv1D)):
                module.register_forward_hook(lambda _, args, y, own=own: self.take(own, args[0], y))
            elif "gate_up_proj" in dict(module.named_parameters(recurse=False)):
                module.forward = self.experts(own, module)

    def take(self, own, x, y):
        y.retain_grad()
        self.seen.append((own, x.detach(), y))

    def experts(self, own, module):
        def forward(hidden, chosen, weights):
            out = torch.zeros_like(hidden)
            for e in range(len(module.gate_up_proj)):
                token, place = torch.where(chosen == e)
                if len(token) == 0:
                    continue
                gate, up = (hidden[token] @ w.T for w in module.gate_up_proj[e].chunk(2))
                inner = module.act_fn(gate) * up
                down = inner @ module.down_proj[e].T
                for part, x, y in (("gate_proj", hidden[token], gate), ("up_proj", hidden[token], up),
                                   ("down_proj", inner, down)):
                    self.take(f"{own}.{e}.{part}", x, y)
                out.index_add_(0, token, down * weights[token, place, None])
            return out
        return forward

    def window(self, ids, number):
        generator = torch.Generator().manual_seed(SEED * 1000003 + number)
        out = self.model(ids[None])
        if "logits" in out:
            p = torch.softmax(out.logits[0].detach(), -1)
            labels = torch.multinomial(p, 1, generator=generator)[:, 0]
            cross_entropy(out.logits[0], labels, reduction="sum").backward()
        else:
            e = normalize(out.last_hidden_state[0].mean(0), dim=0)
            (e * torch.randn(e.shape, generator=generator)).sum().backward()
        for own, x, y in self.seen:
            self.x.setdefault(own, []).append(x.reshape(-1, x.shape[-1]).double())
            if y.grad is not None:  # a pooler has none
                self.g.setdefault(own, []).append(y.grad.reshape(-1, y.shape[-1]).double())
        self.seen = []


def read(folder):
    out = {}
    for file in folder.glob("*.safetensors"):
        out |= load_file(file)
    return out


def blocks(g):
    """Mean of g g^T in blocks on the diagonal, the last one filled up."""
    whole = g.T @ g / len(g)
    out = torch.zeros(-(-len(whole) // BLOCK), BLOCK, BLOCK, dtype=torch.float64)
    for i, b in enumerate(out):
        part = whole[i * BLOCK:(i + 1) * BLOCK, i * BLOCK:(i + 1) * BLOCK]
        b[:len(part), :len(part)] = part
    return out


class Moments(unittest.TestCase):
    def check(self, kind, count, **options):
        path, text, ids = make(kind)
        direct = Direct(path)
        for i, row in enumerate(ids):
            direct.window(row, i)
        out = s.SCRATCH / f"{kind}-moments"
        got = qconv.capture(path, text, out, context=CONTEXT, tokens=0, output_tokens=0, block=BLOCK, seed=SEED,
                            memory=20e-6, device="cpu", **options)
        self.assertEqual((got.tokens, got.output_tokens, got.windows), (ids.numel(), ids.numel(), len(ids)))
        self.assertGreater(len(list(out.glob("*.safetensors"))), 1)  # the memory is for a part of the layers
        t = read(out)
        prefix = "" if any(n.removesuffix(".tokens") in direct.x for n in t) else direct.model.base_model_prefix + "."
        names = {n.rsplit(".", 1)[0] for n in t}
        self.assertEqual(len(names), count, names)
        self.assertEqual(got.weights, count)
        worst = 0
        for name in names:
            x, g = torch.cat(direct.x[prefix + name]), direct.g.get(prefix + name)
            of = bytes(t[name + ".same_as"]).decode() if name + ".same_as" in t else name
            h = x.T @ x / len(x)
            worst = max(worst, ((t[of + ".second_moment"] - h).abs().max() / h.diagonal().mean()).item())
            self.assertEqual(t[of + ".tokens"].item(), len(x))
            if g is None:
                self.assertNotIn(name + ".output_moment", t)
                continue
            g = torch.cat(g)
            size = min(BLOCK, g.shape[1])
            want = blocks(g)[:, :size, :size]
            have = t[name + ".output_moment"].double()
            self.assertEqual(have.shape, want.shape)
            self.assertEqual(t[name + ".output_tokens"].item(), len(g))
            scale = want.diagonal(dim1=1, dim2=2).mean()
            worst = max(worst, ((have - want).abs().max() / scale).item())
        s.note(f"{kind}: {count} weights, largest difference {worst:.1e} of the mean of a diagonal")
        self.assertLess(worst, 1e-3)
        return path, out, t

    def test_linear(self):
        """The head is tied to the embeddings, and not among them."""
        path, out, t = self.check("qwen2", 14)
        self.assertEqual(bytes(t["model.layers.1.self_attn.v_proj.same_as"]).decode(), "model.layers.1.self_attn.q_proj")
        s.qconv("--to", "nf4", "-q", "--hessians", out, "--sided", "two", path, s.SCRATCH / "qwen2-nf4")
        manifest = json.loads((s.SCRATCH / "qwen2-nf4/qconv.json").read_text())
        self.assertEqual(manifest["options"]["calibrate"]["sided"], "two")
        self.assertEqual(sum("calibrated" in e for e in manifest["tensors"]), 14)

    def test_tied_head(self):
        """With a pattern that names it the head has the name that the checkpoint has for it."""
        path, text, _ = make("qwen2")
        out = s.SCRATCH / "head-moments"
        got = qconv.capture(path, text, out, context=CONTEXT, tokens=0, only="embed|o_proj", device="cpu")
        self.assertEqual(got.weights, 3)
        self.assertEqual(read(out)["model.embed_tokens.output_moment"].shape, (1, 61, 61))

    def test_conv1d(self):
        path, out, _ = self.check("gpt2", 8)
        s.qconv("--to", "nf4", "-q", "--hessians", out, "--sided", "two", path, s.SCRATCH / "gpt2-nf4")

    def test_encoder(self):
        path, out, _ = self.check("bert", 12, only="encoder")
        s.qconv("--to", "nf4", "-q", "--hessians", out, "--sided", "two", path, s.SCRATCH / "bert-nf4")

    def test_experts(self):
        """Routers are linear layers in transformers 4, and are kept by the recipe."""
        path, out, t = self.check("qwen3_moe", 8 + 36, only="self_attn|experts")
        self.assertEqual(bytes(t["model.layers.0.mlp.experts.3.up_proj.same_as"]).decode(),
                         "model.layers.0.mlp.experts.3.gate_proj")
        s.qconv("--to", "nf4", "-q", "--hessians", out, path, s.SCRATCH / "moe-nf4")

    def test_a_model_as_it_is(self):
        """A model that is given gives the same moments, and stays as it was."""
        path, text, _ = make("qwen2")
        model = transformers.AutoModelForCausalLM.from_pretrained(path).train()
        before = {n: p.clone() for n, p in model.named_parameters()}
        options = dict(context=CONTEXT, tokens=0, block=BLOCK)
        qconv.capture(model, text, s.SCRATCH / "given", **options)
        qconv.capture(path, text, s.SCRATCH / "loaded", device="cpu", **options)
        given, loaded = read(s.SCRATCH / "given"), read(s.SCRATCH / "loaded")
        self.assertEqual(set(given), set(loaded))
        self.assertTrue(all(torch.equal(given[n], loaded[n]) for n in given))
        self.assertTrue(model.training and all(p.requires_grad and p.grad is None for p in model.parameters()))
        self.assertTrue(all(torch.equal(p, before[n]) for n, p in model.named_parameters()))
        self.assertNotIn("forward", vars(model.model.layers[0]))
        qconv.capture(path, text, s.SCRATCH / "one", device="cpu", sided="one", **options)
        one = read(s.SCRATCH / "one")
        self.assertEqual(set(one), {n for n in loaded if ".output_" not in n})
        self.assertTrue(all(torch.equal(one[n], loaded[n]) for n in one))

    def test_behind_quantized_layers(self):
        """x of the quantized model, and C of both."""
        path, text, ids = make("qwen2")
        quantized, out = s.SCRATCH / "behind-nf4", s.SCRATCH / "behind"
        s.qconv("--to", "nf4", "-q", "--compute-dtype", "float32", path, quantized)
        qconv.capture(path, text, out, context=CONTEXT, tokens=0, device="cpu", quantized=quantized)
        plain = s.SCRATCH / "behind-plain"
        s.qconv("--to", "bf16", "-q", "--compress", "none", quantized, plain)
        z, x = Direct(path), Direct(path)
        model = qconv.load(quantized, dtype=torch.float32)
        with torch.no_grad():
            for own, module in x.model.named_modules():
                if isinstance(module, torch.nn.Linear) and own != "lm_head":
                    module.weight.copy_(model.get_submodule(own).weight.dequantize(torch.float32))
        for d in (x, z):
            for i, row in enumerate(ids):
                d.window(row, i)
        t = read(out)
        for name in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
            of = bytes(t[name + ".same_as"]).decode() if name + ".same_as" in t else name
            a, b = torch.cat(x.x[name]), torch.cat(z.x[name])
            scale = (b.T @ b / len(b)).diagonal().mean()
            self.assertLess((t[of + ".second_moment"] - a.T @ a / len(a)).abs().max() / scale, 1e-3)
            self.assertLess((t[of + ".cross_moment"] - a.T @ b / len(a)).abs().max() / scale, 1e-3)
            self.assertGreater((a - b).abs().max(), 1e-2)
        s.qconv("--to", "nf4", "-q", "--hessians", out, path, s.SCRATCH / "behind-again")

    def test_refused(self):
        path, text, _ = make("qwen2")
        for kind, words, options in (
                (qconv.UsageError, "expected \"one\" or \"two\"", dict(sided="both")),
                (qconv.UsageError, "context is 1; expected at least 2", dict(context=1)),
                (qconv.UsageError, "memory is 0", dict(memory=0)),
                (qconv.InputError, "no linear layer that is asked for", dict(only="nothing")),
                (qconv.InputError, "there is no such text", dict(text="nowhere.txt")),
                (qconv.InputError, "there is no such folder", dict(model=s.SCRATCH / "nowhere")),
                (qconv.UsageError, "something lies there", dict(out=path))):
            with self.subTest(words), self.assertRaisesRegex(kind, words):
                qconv.capture(**{**dict(model=path, text=text, out=s.SCRATCH / "refused", device="cpu"), **options})


class Gain(unittest.TestCase):
    def text(self):
        path = s.SCRATCH / "calibration.txt"
        path.write_bytes(lzma.decompress((s.ROOT / "python/qconv/calibration_text.xz").read_bytes()))
        return path

    def apart(self, model, number, text, *ways):
        """How far NF4 made in each way is from the model, over a text that was not captured."""
        found = []
        for i, way in enumerate(ways):
            out = s.SCRATCH / f"{model.name}-gain-{i}"
            s.qconv("--to", "nf4", "-q", *way, model, out)
            found.append(s.evaluated(out, model, "--text", text, "--context", 256, "--max-tokens", 4096)[number])
        s.note(f"{model.name}: {number} {', '.join(f'{x:.5f}' for x in found)}")
        return found

    def test_kjv(self):
        """Two sides are nearer to the original than one, and one much nearer than the largest values."""
        model, moments = s.model_path("kjv-llama"), ("--hessians", s.SCRATCH / "kjv")
        qconv.capture(model, self.text(), moments[1], context=128, tokens=4096, output_tokens=0, device="cpu")
        plain, one, two = self.apart(model, "kl_mean", s.ROOT / "tests/data/kjv-llama/heldout.txt",
                                     ("--scale", "absmax"), (*moments, "--sided", "one"), (*moments, "--sided", "two"))
        self.assertLess(one, 0.6 * plain)
        self.assertLess(two, one)

    def test_minilm(self):
        """Embeddings' cosine distance is halved."""
        model, moments = s.model_path("minilm"), s.SCRATCH / "minilm"
        qconv.capture(model, self.text(), moments, sided="one", device="cpu", paragraphs=True, context=128, tokens=12288,
                      only="encoder")
        plain, calibrated = self.apart(model, "cosine_mean", s.ROOT / "bench/sentences.txt", ("--scale", "absmax"),
                                       ("--hessians", moments))
        self.assertLess(calibrated, 0.5 * plain)


if __name__ == "__main__":
    s.main()
