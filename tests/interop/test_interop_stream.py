"""Models computed with one layer in memory, beside transformers' own computation of the whole model.

usage: test_interop_stream.py            the tests
       test_interop_stream.py NAME...    one line for each model type
"""
import gc
import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

import interop_support
import tiny_models
import torch
import transformers
from tiny_models import MAJOR, STREAMED, Files, inputs, save
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from qconv import _stream_layers, errors, stream  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
warnings.simplefilter("ignore")
torch.set_num_threads(1)

# Beside caches: what compares all texts with all images of the batch, and so is another thing for a slice of it.
SKIPPED = ("logits_per_image", "logits_per_text", "past_key_values", "loss", "cache_params", "past_buckets_states")


def floats(out):
    """Tensors of floating-point numbers in a model's output."""
    if isinstance(out, torch.Tensor):
        return [out.detach()] if out.is_floating_point() and out.dim() else []
    if hasattr(out, "items"):
        return [tensor for key, value in out.items() if key not in SKIPPED for tensor in floats(value)]
    return [tensor for value in out for tensor in floats(value)] if isinstance(out, (list, tuple)) else []


def apart(one, other):
    """The largest difference beside the largest number, for tensors in pairs."""
    if [t.shape for t in one] != [t.shape for t in other] or not one:
        raise AssertionError(f"{[tuple(t.shape) for t in one]} beside {[tuple(t.shape) for t in other]}")
    return max(((a - b).abs().max() / (b.abs().max() + 1e-9)).item() for a, b in zip(one, other))


def whole(kind, folder):
    """The model as transformers loads it."""
    model = kind.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    if getattr(type(model), "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")
    for part in [model.config, *vars(model.config).values()]:
        if isinstance(part, transformers.PretrainedConfig) and hasattr(part, "use_cache"):
            part.use_cache = False
    return model


def pieces_of(body):
    """Outputs of the head, put together."""
    parts = [floats(body.head(piece)) for piece in body.pieces()]
    joined = []
    for values in zip(*parts):
        same = all(v.shape == values[0].shape and torch.equal(v, values[0]) for v in values)
        joined.append(values[0] if same and values[0].shape[0] != body.batch else torch.cat(values))
    return joined


class Moments:
    """Second moments of the gradients at the outputs of products, by weight."""

    def __init__(self):
        self.sums, self.alias = {}, {}

    def see(self, name, part, x, y):
        if y.requires_grad:
            y.register_hook(lambda grad: self.add((name, part), grad))

    def add(self, key, grad):
        key = (min(self.alias.get(key[0], [key[0]])), key[1])  # a weight that layers share has several names
        rows = grad.detach().reshape(-1, grad.shape[-1]).double()
        self.sums[key] = self.sums.get(key, 0) + rows.T @ rows


def loss_of(out, labels):
    """A loss that touches all numbers of an output."""
    return sum((t.float() * labels[: t.shape[0]].reshape([-1] + [1] * (t.dim() - 1))).sum()
               for t in [out["logits"] if "logits" in out else out[0]])


def moments_apart(kind, folder, given, made):
    """The largest difference between gradient moments of the stream `made` and of the whole model, and their number."""
    labels = torch.linspace(0.5, 1.5, tiny_models.ROWS)
    model, theirs = whole(kind, folder), Moments()
    theirs.alias = made.loader.alias
    within = {id(p): n for n, p in model.named_parameters() if any(n.startswith(path + ".") for path in made.layers)}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(lambda m, a, out: out.requires_grad_().clone() if out.is_leaf else out)
    with stream.Catch(within, after=theirs.see):
        out = model(**{k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in given.items()})
        loss_of(out, labels).backward()
    mine = Moments()
    mine.alias = made.loader.alias
    made.gradient = mine.see
    made.backward(given, lambda piece, out: loss_of(out, labels[piece]).backward())
    if not theirs.sums or set(mine.sums) != set(theirs.sums):
        raise AssertionError(f"products {sorted(map(str, set(mine.sums) ^ set(theirs.sums)))[:4]} of one only")
    top = max(v.abs().max().item() for v in theirs.sums.values())
    return max(((mine.sums[k] - v).abs().max() / max(v.abs().max().item(), 1e-6 * top)).item()
               for k, v in theirs.sums.items()), len(theirs.sums)


def compare(name, gradient=True):
    """(relative difference of outputs, of gradient moments or None, number of products)"""
    with tempfile.TemporaryDirectory() as folder:
        kind = save(name, folder)
        model = whole(kind, folder)
        given = inputs(model.config)
        with torch.no_grad():
            want = floats(model(**given))
        del model
        made = stream.Stream(stream.build(folder), Files(folder), rows=2)
        with torch.no_grad():
            got = pieces_of(made.body(given))
        left = [n for names in made.names.values() for n in names
                if n in made.loader.meta and not made.loader.get(n).is_meta]
        if left:
            raise AssertionError(f"still in memory: {left[:3]}")
        distance = apart(got, want)
        moments = moments_apart(kind, folder, given, made) if gradient else (None, 0)
        made.close()
    return (distance, *moments)


# Types whose gradients the tests look at too: about a third.
GRADIENTS = set("""llama gemma2 gemma3 gpt2 gpt_neox bloom phi3 gpt_oss mamba bert albert t5 bart whisper vit llava
    paligemma mixtral qwen3_moe deepseek_v3 jamba falcon qwen2_5_vl mllama qwen3_next qwen3_5 qwen3_5_moe gemma3n_text
    gemma4_text zamba2 llama4_text""".split())


class Types(unittest.TestCase):
    """Outputs, and gradients, of one layer in memory are those of the whole model."""


def test_of(name):
    def test(self):
        distance, moments, products = compare(name, name in GRADIENTS)
        self.assertLess(distance, 1e-5)
        if name in GRADIENTS:
            self.assertLess(moments, 1e-4)
            self.assertGreater(products, 2)
    return test


# transformers 4 keeps RecurrentGemma's states from one call to the next, whatever its rows, and does not save Zamba 2.
NOT_IN_4 = {"recurrent_gemma", "zamba2", "apertus"}
for name in STREAMED if MAJOR > 4 else sorted(GRADIENTS & set(STREAMED) & set(CONFIG_MAPPING.keys()) - NOT_IN_4):
    setattr(Types, "test_" + name.replace("-", "_"), test_of(name))


class Origins(unittest.TestCase):
    """What origin() says rebuilds every parameter from the checkpoint, number by number."""

    def check(self, name):
        with tempfile.TemporaryDirectory() as folder:
            save(name, folder)
            files = Files(folder)
            loader = stream.Loader(stream.build(folder), files)
            found = []
            for path, parameter in loader.meta.items():
                if parameter.dim() not in (2, 3):
                    self.assertEqual(loader.origin(path), [])
                    continue
                origins = loader.origin(path)
                loader.load([path])
                value = loader.get(path)
                module = loader.owner(path)[0]
                if type(module).__name__ == "Conv1D" or getattr(module, "is_transposed", False):
                    value = value.transpose(-1, -2)
                made = torch.full(value.shape, float("nan"))
                for origin in origins:
                    tensor = files.read(origin.tensor)
                    matrix = tensor if origin.matrix is None else tensor[origin.matrix]
                    matrix = matrix.T if origin.turned else matrix
                    (made if origin.part is None else made[origin.part])[origin.rows] = matrix[origin.at]
                self.assertTrue(torch.equal(made, value), path)
                loader.drop([path])
                found += origins
        return found

    def test_origins(self):
        for name in ("llama", "phi3", "gpt2", "t5", "bert", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3",
                     "qwen3_next"):
            with self.subTest(name):
                found = self.check(name)
                self.assertEqual(any(o.turned for o in found), name == "gpt2" or name == "gpt_oss" and MAJOR > 4)
                if MAJOR > 4:
                    self.assertEqual(any(o.part is not None and o.tensor.count(".experts.") for o in found),
                                     name in ("gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next"))


class Streams(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.kind = save("llama", self.folder)
        self.given = inputs(transformers.AutoConfig.from_pretrained(self.folder))

    def logits(self, **options):
        made = stream.Stream(stream.build(self.folder), Files(self.folder), rows=2, **options)
        with torch.no_grad():
            out = pieces_of(made.body(self.given))
        return made, out

    def test_devices(self):
        """Layers dealt to two devices are read ahead, and are the same."""
        _, plain = self.logits()
        made, dealt = self.logits(devices=("cpu", "cpu:0"))
        self.assertEqual(apart(dealt, plain), 0)
        self.assertEqual(made.loads, len(made.layers))

    def test_states_in_files(self):
        least, _stream_layers.LEAST_IN_FILE = _stream_layers.LEAST_IN_FILE, 0
        try:
            with tempfile.TemporaryDirectory() as states:
                _, plain = self.logits()
                _, filed = self.logits(folder=states)
                self.assertEqual(apart(filed, plain), 0)
                self.assertEqual(os.listdir(states), [])
                made = stream.Stream(stream.build(self.folder), Files(self.folder), rows=2, folder=states)
                self.assertLess(moments_apart(self.kind, self.folder, self.given, made)[0], 1e-6)
        finally:
            _stream_layers.LEAST_IN_FILE = least

    def test_replace_and_visit(self):
        """A replaced checkpoint tensor, and a weight put in by Catch, give the same other logits."""
        _, plain = self.logits()
        name = "model.layers.1.mlp.down_proj.weight"
        other = Files(self.folder).read(name) * 0.5
        made = stream.Stream(stream.build(self.folder), Files(self.folder), rows=2)
        made.replace = {name: other}
        with torch.no_grad():
            replaced = pieces_of(made.body(self.given))
        self.assertGreater(apart(replaced, plain), 1e-3)

        def visit(call, pieces, params):
            for piece in pieces:
                with stream.Catch(params, lambda weight, part, x: other if weight == name else None):
                    yield call.run(piece)
        _, caught = self.logits(visit=visit)
        self.assertEqual(apart(caught, replaced), 0)

    def test_outlook_and_counters(self):
        made, _ = self.logits()
        sizes = {n: p.numel() * 4 for n, p in made.loader.meta.items()}
        layer = sum(size for n, size in sizes.items() if ".layers.0." in n)
        found = made.outlook(5, 12)
        self.assertEqual(found, stream.Outlook(layer, sum(sizes.values()) - 2 * layer, 5 * 12 * 64 * 4))
        self.assertEqual(made.reads, sum(sizes.values()))

    def test_refused(self):
        model, files = stream.build(self.folder), Files(self.folder)
        name = "model.layers.1.mlp.down_proj.weight"
        files.names.remove(name)
        with self.assertRaisesRegex(errors.InputError, f"no weights for '{name}'"):
            stream.Stream(model, files)
        files.names += [name, "model.layers.7.mlp.down_proj.weight"]
        files.at["model.layers.7.mlp.down_proj.weight"] = files.at[name]
        with self.assertRaisesRegex(errors.InputError, r"does not use: 'model\.layers\.7\."):
            stream.Stream(model, files)
        files = Files(self.folder)
        files.at[name] = files.at["model.layers.1.mlp.up_proj.weight"]
        with self.assertRaisesRegex(errors.InputError, r"down_proj.*needs \[64, 128\]"):
            stream.Stream(model, files)
        config = Path(self.folder, "config.json")
        config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "lama"'))
        with self.assertRaisesRegex(errors.InputError, "model_type 'lama'"):
            stream.build(self.folder)

    def test_no_layers(self):
        with tempfile.TemporaryDirectory() as folder:
            save("squeezebert", folder)
            with self.assertRaisesRegex(errors.InputError, "no layers were found"):
                stream.Stream(stream.build(folder), Files(folder))

    def test_missing_packages(self):
        """Without torch, or with an old transformers, the sentence has the line for pip."""
        code = ("import importlib.metadata as m\n"
                "old = m.version\n"
                "def version(name):\n"
                "    if name == 'torch' and {missing}: raise m.PackageNotFoundError(name)\n"
                "    return '4.40.1' if name == 'transformers' else old(name)\n"
                "m.version = version\n"
                "import qconv.errors\n"
                "try:\n    import qconv.stream\n"
                "except qconv.errors.UsageError as e:\n    print(e)\n")
        for missing, said in ((True, "torch, which is missing: pip install"), (False, "this is 4.40.1: pip install")):
            done = subprocess.run([sys.executable, "-B", "-c", code.replace("{missing}", str(missing))], text=True,
                                  capture_output=True,
                                  env={**os.environ, "PYTHONPATH": str(Path(stream.__file__).parents[1])})
            self.assertIn(said, done.stdout, done.stderr)


def show(names):
    for name in names:
        try:
            print(name, *compare(name), flush=True)
        except BaseException as e:
            print(name, type(e).__name__, str(e)[:250].replace("\n", " "), flush=True)
            if os.environ.get("TRACE"):
                raise
        gc.collect()


if __name__ == "__main__":
    if sys.argv[1:]:
        show(list(STREAMED) if sys.argv[1] == "--all" else sys.argv[1:])
    else:
        interop_support.main()
