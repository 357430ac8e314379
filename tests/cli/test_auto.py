"""qconv --to auto: fills the budget, is reproducible and never worse than a uniform scheme."""
import json
import os
import random
import re
import unittest

from output_case import OutputCase
from qconv_case import ROOT
import make_checkpoint as mk

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128,
          "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "rms_norm_eps": 1e-5,
          "max_position_embeddings": 64, "tie_word_embeddings": False}
SHAPES = {"self_attn.q_proj": [128, 128], "self_attn.k_proj": [64, 128],
          "self_attn.v_proj": [64, 128], "self_attn.o_proj": [128, 128],
          "mlp.gate_proj": [256, 128], "mlp.up_proj": [256, 128], "mlp.down_proj": [128, 256]}
# The budget is that of the weights, the cache of a short context and the workspace.
ROOM = ["--margin", "1", "--cuda-context", "1KB", "--context", "8"]
UNIFORM = {"nf4": ["--to", "nf4"], "nf4-32": ["--to", "nf4", "--block-size", "32"],
           "int8": ["--to", "int8"], "16bit": ["--to", "keep"]}


def llama(seed=1):
    rng = random.Random(seed)

    def weight(shape):
        return ("BF16", shape, mk.random_bytes("BF16", shape, rng))

    tensors = {"model.embed_tokens.weight": weight([96, 128])}
    for i in range(4):
        p = "model.layers.%d." % i
        tensors[p + "input_layernorm.weight"] = weight([128])
        tensors[p + "post_attention_layernorm.weight"] = weight([128])
        tensors.update({p + n + ".weight": weight(s) for n, s in SHAPES.items()})
    tensors["model.norm.weight"] = weight([128])
    tensors["lm_head.weight"] = weight([96, 128])
    return tensors


class Trade(OutputCase):
    """What auto gives to precision is not there for context: the plan says so."""

    def plan(self, *args):
        return json.loads(self.ok("plan", "--json", "--to", "auto", *args))

    def test_choices(self):
        args = ["--vram", "2x40GB", "Llama-3.3-70B-Instruct"]
        plan = self.plan(*args)
        self.assertEqual(plan["choices"][0],
                         {"change": None, "max_context": plan["max_context"],
                          "predicted_error": plan["auto"]["predicted_error"],
                          "own_form": "nf4+int8"})
        changes = {c["change"]: c for c in plan["choices"][1:]}
        self.assertEqual(list(changes), ["--to nf4", "--context 16384", "--context 32768",
                                         "--schemes nf4,nf4-32,16bit"])
        self.assertIsNone(changes["--to nf4"]["own_form"])
        self.assertIsNone(changes["--schemes nf4,nf4-32,16bit"]["own_form"])
        for change, said in changes.items():
            tried = self.plan(*args, *change.split())
            self.assertEqual(said["max_context"], tried["max_context"], change)
            if change != "--to nf4":
                self.assertEqual(said["predicted_error"], tried["auto"]["predicted_error"], change)
        self.assertGreater(changes["--to nf4"]["max_context"], 4 * plan["max_context"])
        self.assertEqual(changes["--to nf4"]["predicted_error"],
                         plan["auto"]["uniform"]["nf4"]["predicted_error"])
        text = self.ok("plan", "--to", "auto", *args)
        for c in plan["choices"]:
            self.assertRegex(text, r"(?m)^  %s +%s +%s  %s$"
                             % (c["change"] or "this plan", "{:,}".format(c["max_context"]),
                                "%.3g" % c["predicted_error"],
                                "qconv only" if c["own_form"] else "transformers too"))

    def test_explain_is_a_summary(self):
        """By kind and range of layers: all weights, and few lines; a line each with -v."""
        args = ["plan", "--to", "auto", "--explain", "--vram", "2x40GB", "Llama-3.3-70B-Instruct"]
        brief = self.ok(*args).split("Choice of schemes\n")[1]
        brief = brief[:brief.index("\n  hf download ")]
        self.assertLess(brief.count("\n"), 45)
        table = brief[brief.index("  kind "):]
        rows = [re.split(r"  +", line.strip()) for line in table.split("\n")[1:-2]]
        self.assertEqual(sum(int(r[2]) for r in rows), 560)
        kinds = {r[0] for r in rows}
        self.assertIn("mlp.down_proj", kinds)
        self.assertEqual(len(kinds), 7)
        for kind in kinds:
            layers = []
            for r in rows:
                if r[0] == kind and "more range" not in r[5]:
                    for part in r[5].split(", "):
                        a, _, b = part.partition("-")
                        layers += range(int(a), int(b or a) + 1)
            if not any("more range" in r[5] for r in rows if r[0] == kind):
                self.assertEqual(sorted(layers), list(range(80)), kind)
        every = self.ok(*args, "-v").split("Choice of schemes\n")[1]
        self.assertEqual(len(re.findall(r"(?m)^  layer \d+ ", every)), 560)

    def test_nothing_to_trade(self):
        """A model whose longest context is there in 16 bit."""
        self.assertEqual(self.plan("--vram", "80GB", "Llama-3.1-8B")["choices"], [])
        self.assertEqual(self.plan("--vram", "24GB", "all-MiniLM-L6-v2")["choices"], [])

    def test_nothing_to_quantize(self):
        """Where all fits as it is, that is said, and vLLM loads it by itself."""
        mk.write_model(self.path("m"), mk.load_model("Llama-3.1-8B"), layers=2, scale=64, seed=5)
        self.assertIn(": fits, and nothing has to be quantized\n", self.ok("plan", "--to", "auto", "--vram", "1GB", "m"))
        said = self.ok("--to", "auto", "--vram", "1GB", "--compress", "none", "m", "o")
        self.assertIn("keep; all of it fits, so nothing is quantized\n", said)
        self.assertIn("  loads in  transformers 4 and 5, vLLM, qconv.load\n", said)
        self.assertIn("\nWith vLLM:\n    vllm serve o\n", said)

    def test_measured_once(self):
        """The errors of a checkpoint are those of its weights in every row, and a fresh plan's."""
        m = self.model(llama(), CONFIG)
        args = ["--vram", "660KB", *ROOM, "--context", "32", m]
        plan = self.plan(*args)
        self.assertTrue(plan["auto"]["measured"])
        self.assertGreater(len(plan["choices"]), 1)
        for c in plan["choices"][1:]:
            tried = self.plan(*args, *c["change"].split())
            self.assertEqual(tried["max_context"], c["max_context"])
            if c["change"] != "--to nf4":
                self.assertAlmostEqual(tried["auto"]["predicted_error"], c["predicted_error"],
                                       places=12)  # sums in another order

    def test_what_an_error_is(self):
        """The perplexities named are those of bench/results/accuracy.json."""
        text = self.ok("plan", "--to", "auto", "--vram", "2x40GB", "Llama-3.3-70B-Instruct")
        with open(os.path.join(ROOT, "bench", "results", "accuracy.json"), encoding="utf-8") as f:
            models = json.load(f)["models"]
        rises = []
        for name in ("kjv-llama", "tinystories-656k"):
            model = next(m for m in models if m["model"] == name)
            row = next(r for r in model["rows"] if r["name"] == "NF4, double, search")
            rises.append("%.2g%%" % (row["eval"]["difference"] / model["base_perplexity"] * 100))
        self.assertIn("nf4 raises perplexity by " + " and ".join(rises), text)
        self.assertIn("It has no unit", text)
        self.assertRegex(text, r"error +0\.\d+ predicted, \d+% of nf4's: nf4 3\.27")


class Auto(OutputCase):
    def setUp(self):
        super().setUp()
        self.m = self.model(llama(), CONFIG)

    def auto(self, vram, *more, code=0):
        r = self.run_qconv("--dry-run", "--json", "--to", "auto", "--vram", vram, *ROOM, *more,
                           self.m)
        self.assertEqual(r.returncode, code, r.stderr)
        return json.loads(r.stdout) if code == 0 else r.stderr.decode()

    def test_needs_a_budget(self):
        self.usage("--to", "auto", self.m, "o", has=["--vram"])
        self.usage("--to", "auto", "--vram", "1GB", "--schemes", "nf4,q4", self.m, "o",
                   has=["'q4'", "nf4, nf4-32, int8 and 16bit"])
        self.usage("--to", "auto", "--vram", "1GB", "--schemes", "", self.m, "o", has=["nf4-32"])

    def test_sweep(self):
        """Fits, never above a uniform scheme that fits, and more room is never worse."""
        before, seen = None, set()
        for kb in (492, *range(455, 1400, 50)[1:]):
            vram = "%dKB" % kb
            r = self.run_qconv("--dry-run", "--json", "--to", "auto", "--vram", vram, *ROOM, self.m)
            fitting = {k for k, o in UNIFORM.items()
                       if self.run_qconv("--dry-run", "--vram", vram, *o, *ROOM,
                                         self.m).returncode == 0}
            if r.returncode == 4:
                self.assertEqual(fitting, set(), vram)
                continue
            auto = json.loads(r.stdout)["auto"]
            self.assertTrue(auto["fits"])
            self.assertEqual({k for k, u in auto["uniform"].items() if u["fits"]}, fitting, vram)
            for k in fitting:
                self.assertLessEqual(auto["predicted_error"],
                                     auto["uniform"][k]["predicted_error"], (vram, k))
            self.assertLessEqual(auto["lower_bound"], auto["predicted_error"] * 1.000001)
            if before is not None:
                self.assertLessEqual(auto["predicted_error"], before * 1.02)
            before = auto["predicted_error"]
            seen |= set(auto["chosen"])
        self.assertLess(before, 1e-12)
        self.assertEqual(seen, set(UNIFORM))

    def test_two_devices(self):
        """Each device holds what is put on it."""
        out = self.auto("2x600KB", "--explain")
        self.assertTrue(out["auto"]["fits"])
        self.assertEqual(len({s.get("device") for s in out["shards"]}), 2)
        self.assertEqual(len(out["auto"]["groups"]), 28)
        self.assertIn("short by", self.auto("2x200KB", code=4))

    def test_mixed_output(self):
        """Reproducible; readable by qconv; named so that other loaders refuse it."""
        args = ["--to", "auto", "--vram", "700KB", *ROOM]
        for i, more in enumerate([[], ["--threads", "1"], ["--threads", "3"]]):
            r = self.run_qconv(*args, *more, self.m, "out%d" % i)
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertEqual(r.stderr.count(b"transformers does not load"), 1)
            self.assertIn(b"--schemes", r.stderr)
        self.assert_same("out0", "out1")
        self.assert_same("out0", "out2")
        q = self.quantization("out0")
        self.assertEqual((q["quant_method"], q["quant_type"]), ("qconv", "nf4+int8"))
        self.ok("verify", "out0")
        self.ok("inspect", "out0")
        self.ok("unpack", "out0", "plain")
        stored = mk.read_checkpoint(self.path("plain"))
        with open(self.path("out0", "qconv.json")) as f:
            self.assertIn("nf4", f.read())
        self.ok("-q", "--compress", "none", "--to", "bf16", "out0", "back")
        back, source = mk.read_checkpoint(self.path("back")), llama()
        self.assertEqual(sorted(back), sorted(source))
        kinds = set()
        for name, (dtype, shape, data) in source.items():
            self.assertEqual(back[name][:2], (dtype, shape), name)
            if stored[name][0] == dtype:
                kinds.add("kept")
                self.assertEqual(back[name][2], data, name)
                continue
            kinds.add(stored[name][0])
            x, y = mk.decode("BF16", data), mk.decode("BF16", back[name][2])
            error = sum((a - b) ** 2 for a, b in zip(x, y)) / sum(a * a for a in x)
            self.assertLess(error, 2e-2 if stored[name][0] == "U8" else 3e-4, name)
        self.assertEqual(kinds, {"kept", "U8", "I8"})

    def config_of(self, schemes, vram):
        self.ok("-q", "--to", "auto", "--schemes", schemes, "--vram", vram, *ROOM, self.m, schemes)
        return self.quantization(schemes)

    def test_what_loaders_read(self):
        """Without a mixture: bitsandbytes' configuration, and what is 16 bit on its list."""
        for schemes, vram, key in (("nf4,16bit", "900KB", "load_in_4bit"),
                                   ("nf4,nf4-32", "500KB", "load_in_4bit"),
                                   ("int8,16bit", "1000KB", "load_in_8bit")):
            q = self.config_of(schemes, vram)
            self.assertEqual(q["quant_method"], "bitsandbytes", schemes)
            self.assertTrue(q[key], schemes)
            self.ok("unpack", schemes, schemes + ".plain")
            stored = mk.read_checkpoint(self.path(schemes + ".plain"))
            kept = sorted(n[:-7] for n in stored
                          if n.endswith("_proj.weight") and stored[n][0] == "BF16")
            listed = sorted(n for n in q["llm_int8_skip_modules"] if n + ".weight" in stored
                            and n.endswith("_proj"))
            self.assertEqual(kept, listed, schemes)
            self.assertEqual(bool(kept), "16bit" in schemes, schemes)
        self.assertIsNone(self.config_of("16bit", "10MB"))

    def test_not_finite(self):
        """Such a weight stays as it is, with the reason; the rest is quantized."""
        tensors = llama()
        name = "model.layers.2.mlp.up_proj.weight"
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, b"\xc0\x7f" + data[2:])
        self.m = self.model(tensors, CONFIG, name="nan")
        out = self.auto("1MB", "--explain")
        group = [g for g in out["auto"]["groups"] if g["name"] == "layer 2 mlp.up_proj"][0]
        self.assertEqual((group["scheme"], group["reason"]), ("16bit", "not finite"))
        gate = [g for g in out["auto"]["groups"] if g["name"] == "layer 2 mlp.gate_proj"][0]
        self.assertEqual((gate["scheme"], gate["reason"]),
                         ("16bit", "loaded as one with what cannot be quantized"))
        alone = self.auto("1MB", "--explain", "--split-fused")["auto"]["groups"]
        self.assertIsNone([g for g in alone if g["name"] == "layer 2 mlp.gate_proj"][0]["reason"])
        self.ok("-q", "--to", "auto", "--vram", "1MB", *ROOM, self.m, "nan-out")

    def test_explain(self):
        args = ["--dry-run", "--to", "auto", "--explain", "--vram", "1MB", *ROOM, self.m]
        text = self.ok(*args)
        for part in ("predicted error", "  mlp.down_proj ", "sampled rows"):
            self.assertIn(part, text)
        self.assertNotIn("layer 3 mlp.down_proj", text)
        self.assertIn("layer 3 mlp.down_proj", self.ok("-v", *args))


if __name__ == "__main__":
    unittest.main()
