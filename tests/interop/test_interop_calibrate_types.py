"""qconv.calibrate with experts of all forms, heads, images and chosen schemes; and types of transformers by the dozen.

usage: test_interop_calibrate_types.py                    the tests; QCONV_ALL_TYPES=1: with all types
       test_interop_calibrate_types.py --table FILE [NAME...]   what is measured of all types goes to a file of JSON
"""
import json
import os
import subprocess
import sys
import unittest
import warnings
from pathlib import Path

import interop_support
import tiny_models
import torch
import transformers
from safetensors.torch import save_file
from test_interop_calibrate import LENGTH, WINDOWS, Folder, distance
from tiny_models import STREAMED, NotMade
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import qconv
from qconv._calibrate_experts import Call, Found, Intercepted, Sent
from qconv._values import Values
from qconv.stream import Catch, Stream, build

MIXED = "mllama whisper llava gemma3 paligemma blip clip siglip".split()  # read images or sound beside text
DOZEN = """qwen2_moe mixtral qwen3_5 qwen3_5_moe gemma3 gemma4_text mllama whisper bamba falcon_h1 granitemoehybrid zamba2
    switch_transformers jamba""".split()
JUDGED = 67  # windows
# What reads images only, gives neither logits nor states of every token, or has the tokens before the rows (XLNet), so
# that its layers are not computed in slices.
WITHOUT = "clip siglip vit dinov2 xlnet".split()


class Given(Folder):
    """A tiny model with texts, and what it reads beside them."""

    def __init__(self, name):
        super().__init__(name)
        config = transformers.AutoConfig.from_pretrained(self.model)
        self.more, self.given = {}, {"input_ids": self.judge}
        if name in MIXED:
            more = self.beside(config, WINDOWS, self.text)
            self.more = {"inputs": self.out("more.safetensors")}
            save_file({k: v.contiguous() for k, v in more.items()}, self.more["inputs"])
            ids = os.path.join(self.path, "judge.ids")
            more = self.beside(config, JUDGED, ids)
            rows = torch.tensor([[int(n) for n in line.split()] for line in open(ids)])
            self.given = more | {"decoder_input_ids" if "input_features" in more else "input_ids": rows}
        elif getattr(config, "is_encoder_decoder", False):
            self.given["decoder_input_ids"] = self.judge[:, LENGTH // 2:]

    @staticmethod
    def beside(config, rows, text):
        """Arguments beside ids. Where they have places among the ids, the text becomes one with such places."""
        more = tiny_models.inputs(config, rows, LENGTH)
        more.pop("decoder_input_ids", None)
        ids = more.pop("input_ids", None)
        if ids is not None and config.model_type != "mllama":
            with open(text, "w") as file:
                file.writelines(" ".join(map(str, row)) + "\n" for row in ids.tolist())
        return more

    def answers(self, values_folder):
        """Log-probabilities, or states where there is no head."""
        model = build(self.model)
        with Values(values_folder) as values:
            stream = Stream(model, values, rows=JUDGED)
            body = stream.body(self.given)
            out = [body.head(piece) for piece in body.pieces()]
            stream.close()
        key = "logits" if out[0].get("logits") is not None else "last_hidden_state"
        found = torch.cat([o[key] for o in out]).double()
        return (found.log_softmax(-1), True) if key == "logits" else (found, False)

    def both(self, **options):
        """(distance of searched scales, of calibrated ones, the result)"""
        qconv.convert(self.model, self.out("search"), device="cpu", **{"to": "nf4", **options})
        result = self.calibrate("calibrated", **options, **self.more)
        base, predicts = self.answers(self.model)
        return (*(distance(base, self.answers(self.out(n))[0], predicts) for n in ("search", "calibrated")), result)


def measured(name):
    """Raises NotMade where transformers does not make or save its tiny model."""
    try:
        given = Given(name)
    except Exception as error:
        raise NotMade(error) from None
    with given, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search, calibrated, result = given.both()
        made = result.json["calibration"]
    return {"type": name, "search": search, "calibrated": calibrated, "share": calibrated / search,
            "weights": made["weights"], "left": made["left"]}


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Mixture(nn.Module):
    """Each token goes to one of three experts. scaled: an expert gets all tokens, times a factor that is zero for most."""

    def __init__(self, scaled):
        super().__init__()
        self.scaled, self.router = scaled, nn.Linear(8, 3)
        self.experts = nn.ModuleList([Expert() for _ in range(3)])

    def forward(self, x):
        x = x.reshape(-1, 8)
        best, numbers = self.router(x).max(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if self.scaled:
                out += expert(x * (best.sigmoid() * (numbers == e))[:, None])
            elif (numbers == e).any():
                out[numbers == e] = expert(x[numbers == e]) * best[numbers == e, None]
        return out


class Experts(unittest.TestCase):
    def check(self, scaled):
        """z's inputs of an expert are those of the tokens that x sends to it."""
        torch.manual_seed(3)
        model = nn.Module()
        model.layer = nn.Module()
        model.layer.mlp = mixture = Mixture(scaled)
        x, z = torch.randn(4, 5, 8), torch.randn(4, 5, 8)
        x[3, 4] = x[1, 2]  # two tokens with the same states
        z[3, 4] = z[1, 2]
        mask = torch.arange(20) != 7
        found = Found(model, "layer", set())
        with found.watching():
            mixture(x)
        members = ["layer.mlp.experts.%d" % e for e in range(3)]
        self.assertEqual(found.members("layer.mlp"), members)
        calls = {}

        def enter(path, own, args, kwargs):
            calls.setdefault(path, []).append(Call(own, (args, kwargs), x.reshape(-1, 8)))
            return own(*args, **kwargs)
        with Intercepted(model, members, enter):
            mixture(x)
        sent = Sent(mixture.forward, ((z,), {}), ((x,), {}), mask, calls, {id(p): n for n, p in model.named_parameters()}, {})
        best, numbers = mixture.router(x.reshape(-1, 8)).max(1)
        for e, member in enumerate(members):
            tokens = ((numbers == e) & mask).nonzero()[:, 0]
            factors = best.sigmoid()[tokens, None] if scaled else 1
            (ours, theirs, counted), = sent.inputs((member, None), [member + ".down.weight"], True)
            up = mixture.experts[e].up
            for got, states in ((ours, x), (theirs, z)):
                expected = up(states.reshape(-1, 8)[tokens] * factors).relu()
                self.assertLess((got[counted] - expected).abs().max().item(), 1e-5)

    def test_lists_whose_members_get_copies(self):
        self.check(False)

    def test_lists_whose_members_get_scaled_states(self):
        self.check(True)

    def test_lists_that_are_no_experts(self):
        model = nn.Module()
        model.layer = nn.Module()
        model.layer.mlp = nn.Sequential(nn.Linear(8, 8))
        model.layer.mlp.parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        model.layer.mlp.forward = lambda x: model.layer.mlp.parts[1](model.layer.mlp.parts[0](x))
        found = Found(model, "layer", set())
        with found.watching(), torch.no_grad(), Catch({}):
            model.layer.mlp(torch.randn(6, 8))
        self.assertEqual(found.owner_of, {})

    def test_a_stack_has_the_values_of_separate_experts(self):
        with Folder("qwen3_moe") as folder:
            folder.calibrate("stacked", experts="stacked", no_double_quant=True)
            folder.calibrate("separate", no_double_quant=True)
            with Values(folder.out("stacked"), experts="separate") as one, Values(folder.out("separate")) as other:
                self.assertEqual(one.names, other.names)
                for name in other.names:
                    self.assertTrue(torch.equal(one.read(name), other.read(name)), name)


class EndToEnd(unittest.TestCase):
    def test_a_quantized_head(self):
        for name, glob, keep in (("llama", "lm_head*", "model.*"), ("gpt_neox", "embed_out*", "gpt_neox.*")):
            with self.subTest(name), Given(name) as given:
                search, calibrated, result = given.both(quantize=[glob], keep=[keep])
                self.assertEqual(result.json["calibration"]["weights"], 1)
                self.assertLess(calibrated, search)

    def test_schemes_chosen_by_moments(self):
        for name in ("llama", "qwen3_moe"):
            with self.subTest(name), Given(name) as given:
                search, calibrated, result = given.both(to="auto", vram="250KB", margin="1", cuda_context="1KB",
                                                        context=LENGTH, schemes="nf4,int8,16bit")
                self.assertEqual(result.json["auto"]["weighed_by"], "moments")
                self.assertGreater(len(result.json["auto"]["chosen"]), 1)
                self.assertGreater(result.json["calibration"]["weights"], 0)
                self.assertLess(calibrated, search)

    def test_images_beside_text(self):
        """Layers that look at images are calibrated only where there are images."""
        with Given("mllama") as given:
            search, calibrated, result = given.both()
            self.assertLess(calibrated, search)
            blind = given.calibrate("blind")
            self.assertGreater(result.json["calibration"]["weights"], blind.json["calibration"]["weights"])


class Types(unittest.TestCase):
    def test_types_of_transformers(self):
        everything = os.environ.get("QCONV_ALL_TYPES") == "1"
        names = [n for n in (STREAMED if everything else DOZEN) if n in CONFIG_MAPPING]
        lowered = []
        for name in names:
            with self.subTest(name):
                if name in WITHOUT:
                    continue
                try:
                    row = measured(name)
                except NotMade as error:
                    print(f"{name}: not made: {str(error)[:100]}")
                    continue
                self.assertLess(row["calibrated"], row["search"])
                self.assertGreater(row["weights"], 0)
                lowered.append(name)
        print(f"{len(lowered)} of {len(names)} types are nearer to the original")
        self.assertGreaterEqual(len(lowered), 60 if everything else 8)


def table(path, names):
    """Measures types and writes the file, beside what it has of other versions of transformers."""
    from result_page import json_text
    rows = []
    for name in names or STREAMED:
        if name in CONFIG_MAPPING:
            try:
                rows.append(measured(name))
            except Exception as error:
                rows.append({"type": name, "failed": " ".join(("%s: %s" % (type(error).__name__, error)).split())[:200]})
            print(rows[-1], flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    found = json.loads(path.read_text()) if path.exists() else {
        "bench": "calibrate_types",
        "command": "PYTHON tests/interop/test_interop_calibrate_types.py --table bench/results/calibrate_types.json"}
    own = found.get("transformers " + transformers.__version__, {}) if names else {}
    if own:  # the other rows stay
        measured_now = {row["type"]: row | {"commit": commit} for row in rows}
        rows = [measured_now.get(row["type"], row) for row in own["rows"]]
    found["transformers " + transformers.__version__] = {
        "commit": own.get("commit", commit), "torch": torch.__version__.partition("+")[0], "to": "nf4",
        "tokens": WINDOWS * LENGTH, "lowered": sum(row.get("share", 1) < 1 and row["weights"] > 0 for row in rows),
        "of": len(rows), "rows": rows}
    path.write_text(json_text(found) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--table"]:
        table(Path(sys.argv[2]), sys.argv[3:])
    else:
        interop_support.main()
