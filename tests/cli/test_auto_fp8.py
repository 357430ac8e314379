"""qconv --to auto on weights in FP8 and MXFP4: kept as they are or quantized; and what auto says of
devices that do not run or hold what it would choose."""
import json
import random
import unittest

from output_case import OutputCase
from test_auto import CONFIG, ROOM, SHAPES
from test_forms import SEED, fp8, mxfp4
import make_checkpoint as mk

TILE = [64, 32]  # not the default: config.json has to carry it on
SOURCE_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": TILE}
NAMES = ["model.layers.%d.%s.weight" % (i, n) for i in range(4) for n in SHAPES]


class AutoFp8(OutputCase):
    partial = True

    def setUp(self):
        super().setUp()
        rng = random.Random(SEED)
        self.source, self.values = {}, {}
        for name in NAMES:
            shape = SHAPES[name.split(".", 3)[3][:-7]]
            tensors, self.values[name] = fp8(rng, name, shape, TILE)
            self.source.update(tensors)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            self.source[name] = ("BF16", [96, 128], mk.random_bytes("BF16", [96, 128], rng))
        self.write()

    def write(self):
        config = dict(CONFIG, torch_dtype="bfloat16", quantization_config=SOURCE_CONFIG)
        self.m = self.model(self.source, config)

    def choose(self, vram, *more):
        return json.loads(self.ok("--dry-run", "--json", "--explain", "--to", "auto", "--vram", vram,
                                  *ROOM, *more, self.m))["auto"]

    def auto(self, out, vram, *more):
        r = self.run_qconv("--to", "auto", "--compress", "none", "--vram", vram, *ROOM, *more,
                           self.m, out)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertTrue(json.loads(self.ok("verify", "--json", out))["ok"])
        return mk.read_checkpoint(self.path(out)), r.stderr.decode()

    def plain(self, out, *args):
        self.ok("-q", "--compress", "none", *args, self.m, out)
        return mk.read_checkpoint(self.path(out))

    def test_all_as_they_are(self):
        """With room for all there is no error, and nothing changes."""
        chosen = self.choose("10MB")
        self.assertEqual(chosen["predicted_error"], 0)
        self.assertEqual(chosen["chosen"], {"16bit": {"tensors": len(NAMES), "bytes": sum(
            len(t[2]) for n, t in self.source.items() if ".layers." in n)}})
        out, said = self.auto("o", "10MB")
        self.assertNotIn("transformers", said)
        self.assertEqual(out, self.plain("kept", "--to", "keep"))
        self.assertEqual(self.quantization("o"), SOURCE_CONFIG)

    def test_mixture(self):
        """What auto keeps is what --keep of those weights keeps, scales and all."""
        out, said = self.auto("o", "650KB", "--schemes", "nf4,16bit")
        kept = [n for n in NAMES if out[n][0] == "F8_E4M3"]
        self.assertTrue(0 < len(kept) < len(NAMES), len(kept))
        self.assertIn("only qconv reads this form (nf4+fp8)", said)
        rules = [a for n in kept for a in ("--keep", n)]
        self.assertEqual(out, self.plain("rules", "--to", "nf4", "--split-fused", *rules))
        for name in NAMES:
            self.assertEqual(name + "_scale_inv" in out, name in kept, name)
            if name in kept:
                self.assertEqual(out[name], self.source[name])
                self.assertEqual(out[name + "_scale_inv"], self.source[name + "_scale_inv"])
        q = self.quantization("o")
        self.assertEqual((q["quant_method"], q["quant_type"], q["weight_block_size"]),
                         ("qconv", "nf4+fp8", TILE))
        self.assertEqual(sorted(n[:-7] for n in kept),
                         sorted(n for n in q["modules_to_not_convert"] if n + ".weight" in NAMES))
        self.assertEqual(self.quantization("rules"), q)
        self.ok("inspect", "o")
        self.ok("-q", "--compress", "none", "--to", "bf16", "o", "back")
        back = mk.read_checkpoint(self.path("back"))
        self.assertEqual(sorted(back), sorted(n for n in self.source if "scale" not in n))
        self.assertIsNone(self.quantization("back"))
        for name in kept:
            self.assertEqual(back[name][2], mk.encode("BF16", self.values[name]), name)

    def test_sizes_are_exact(self):
        for vram in ("500KB", "650KB", "800KB"):
            plan = json.loads(self.ok("plan", "--json", "--to", "auto", "--vram", vram, *ROOM,
                                      self.m))
            out, _ = self.auto("o" + vram, vram)
            self.assertTrue(plan["auto"]["fits"], vram)
            self.assertEqual(plan["weight_bytes"], sum(len(t[2]) for t in out.values()), vram)
            chosen = sum(c["bytes"] for c in plan["auto"]["chosen"].values())
            self.assertEqual(chosen, sum(len(t[2]) for n, t in out.items() if ".layers." in n))
            # As it is, a weight has no error and is not larger than in int8.
            self.assertNotIn("int8", plan["auto"]["chosen"])

    def test_errors_are_of_the_decoded_weight(self):
        """Such small weights are sampled whole: their errors are those that a conversion finds."""
        groups = {g["name"]: g["relative_errors"] for g in self.choose("650KB")["groups"]}
        self.assertEqual(len(groups), len(NAMES))
        for scheme, args in (("nf4", ["--to", "nf4"]), ("int8", ["--to", "int8"]),
                             ("nf4-32", ["--to", "nf4", "--block-size", "32"])):
            self.plain(scheme, *args)
            tensors = {t["name"]: t for t in self.json_of(scheme, "qconv.json")["tensors"]}
            for name in NAMES:
                _, _, layer, path = name[:-7].split(".", 3)
                got = groups["layer %s %s" % (layer, path)]
                self.assertAlmostEqual(got[scheme], tensors[name]["rel_mse"],
                                       delta=1e-4 * got[scheme], msg=name)
                self.assertEqual(got["16bit"], 0)

    def test_not_finite(self):
        name = NAMES[9]
        dtype, shape, codes = self.source[name]
        self.source[name] = (dtype, shape, codes[:77] + b"\x7f" + codes[78:])
        self.write()
        group = [g for g in self.choose("650KB")["groups"] if g["name"] == "layer 1 " + name[15:-7]]
        self.assertEqual([(g["scheme"], g["reason"]) for g in group], [("16bit", "not finite")])
        out, _ = self.auto("o", "650KB")
        self.assertEqual(out[name], self.source[name])
        self.assertEqual(out[name + "_scale_inv"], self.source[name + "_scale_inv"])

    def test_schemes_without_it(self):
        out, said = self.auto("o", "10MB", "--schemes", "nf4,int8")
        self.assertFalse([n for n in out if "scale" in n])
        self.assertEqual({out[n][0] for n in NAMES}, {"I8"})
        self.assertEqual(self.quantization("o")["quant_method"], "bitsandbytes")
        self.assertNotIn("transformers", said)


class AutoMxfp4(OutputCase):
    partial = True

    """Stacks of experts are chosen for with --requantize only."""
    CONFIG = {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64,
              "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 96,
              "max_position_embeddings": 64, "sliding_window": 16,
              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
              "quantization_config": {"quant_method": "mxfp4"}}

    def setUp(self):
        super().setUp()
        rng = random.Random(SEED)
        self.source = {}
        for i in range(3):
            stem = "model.layers.%d." % i
            self.source.update(mxfp4(rng, stem + "mlp.experts.gate_up_proj", 4, 128, 64)[0])
            self.source.update(mxfp4(rng, stem + "mlp.experts.down_proj", 4, 64, 64)[0])
            self.source[stem + "self_attn.q_proj.weight"] = (
                "BF16", [64, 64], mk.random_bytes("BF16", [64, 64], rng))
        self.m = self.model(self.source, self.CONFIG)

    def test_choice(self):
        common = ["--to", "auto", *ROOM, self.m]
        forms = set()
        for schemes in ("nf4,16bit", "nf4,int8", "nf4-32,int8,16bit"):
            for kb in range(85, 220, 15):
                args = ["--vram", "%dKB" % kb, "--schemes", schemes, "--requantize", *common]
                plan = json.loads(self.ok("plan", "--json", *args))
                if not plan["fits"]:
                    continue
                self.assertTrue(plan["auto"]["fits"], args)
                out = "%s-%d" % (schemes, kb)
                self.ok("-q", "--compress", "none", *args, out)
                tensors = mk.read_checkpoint(self.path(out))
                written = sum(len(t[2]) for t in tensors.values())
                self.assertEqual(plan["weight_bytes"], written, out)
                chosen = plan["auto"]["chosen"].values()  # that is all of this model
                self.assertEqual(sum(c["bytes"] for c in chosen), written, out)
                for name, (dtype, _, data) in tensors.items():
                    stack = name.startswith("model.") and "experts" in name
                    if stack and name.endswith("_proj_blocks"):
                        forms.add("kept")
                        scales = name.replace("_blocks", "_scales")
                        for part in (name, scales):
                            self.assertEqual(tensors[part], self.source[part])
                    elif stack and name.endswith("_proj"):
                        forms.add(dtype)
                        self.assertNotIn(name + "_scales", tensors)
                self.assertTrue(json.loads(self.ok("verify", "--json", out))["ok"])
        self.assertEqual(forms, {"kept", "U8", "I8"})

    def test_errors_and_importance(self):
        explained = json.loads(self.ok("plan", "--json", "--explain", "--requantize", "--to", "auto",
                                       "--vram", "1MB", *ROOM, self.m))["auto"]
        groups = {g["name"]: g for g in explained["groups"]}
        self.assertEqual(len(groups), 9)
        self.assertEqual(explained["predicted_error"], 0)
        self.assertEqual(groups["layer 1 mlp.experts.gate_up_proj"]["importance"], 2)
        for to in ("nf4", "int8"):
            self.ok("-q", "--to", to, "--requantize", self.m, to)
            tensors = {t["name"]: t for t in self.json_of(to, "qconv.json")["tensors"]}
            for name in ("gate_up_proj", "down_proj"):
                want = tensors["model.layers.1.mlp.experts." + name]["rel_mse"]
                got = groups["layer 1 mlp.experts." + name]["relative_errors"][to]
                self.assertAlmostEqual(got, want, delta=1e-4 * want)

    def test_passed_through(self):
        chosen = json.loads(self.ok("plan", "--json", "--explain", "--to", "auto", "--vram", "1MB",
                                    *ROOM, self.m))["auto"]
        self.assertEqual(len(chosen["groups"]), 3)


class Devices(OutputCase):
    def plan(self, model, vram, *more):
        r = self.run_qconv("plan", "--json", "--to", "auto", "--vram", vram, *more, model)
        self.assertEqual(r.returncode, 0, r.stderr)
        said = r.stderr.decode()
        p = json.loads(r.stdout)
        own = "qconv: warning: only qconv reads this form (%s)" % p["loads"]["form"]
        self.assertEqual(said.count(own), not p["loads"]["transformers"], said)
        return p, "".join(s for s in said.splitlines(True) if not s.startswith(own))

    def test_deepseek_v3(self):
        """671 billion weights in FP8 on 640 GB: some stay, the others fill what is left."""
        p, _ = self.plan("DeepSeek-V3", "8x80GB")
        a = p["auto"]
        self.assertTrue(p["fits"] and a["fits"])
        self.assertEqual(set(a["chosen"]), {"nf4-32", "16bit"})
        self.assertGreater(a["chosen"]["16bit"]["bytes"], a["chosen"]["nf4-32"]["bytes"])
        self.assertLess(a["predicted_error"], a["uniform"]["nf4-32"]["predicted_error"] / 5)
        # The experts of a layer are one choice, and NF4 instead of FP8 is 5 GB for them.
        self.assertLess(max(d["free_bytes"] for d in p["devices"]), 6e9)
        whole, _ = self.plan("DeepSeek-V3", "16x80GB")
        self.assertEqual(whole["auto"]["predicted_error"], 0)
        kept = json.loads(self.ok("plan", "--json", "--to", "keep", "--vram", "16x80GB",
                                  "DeepSeek-V3"))
        self.assertEqual(whole["weight_bytes"], kept["weight_bytes"])

    def test_integers_of_deepseek_v3(self):
        """compressed-tensors has no place for FP8 beside its integers."""
        p, _ = self.plan("DeepSeek-V3", "8x80GB", "--format", "compressed-tensors", "--tp", "8")
        self.assertTrue(p["fits"])
        self.assertEqual(set(p["auto"]["chosen"]), {"int6", "int8"})
        self.assertIn("no weight stays in fp8", p["auto"]["notes"][0])

    def test_cards_without_int8(self):
        p, said = self.plan("Llama-3.1-70B", "2xV100-32GB")
        self.assertNotIn("int8", p["auto"]["uniform"])
        self.assertEqual(set(p["auto"]["chosen"]), {"nf4-32", "16bit"})
        self.assertEqual(len(p["auto"]["notes"]), 1)
        self.assertIn("V100-32GB", p["auto"]["notes"][0])
        self.assertIn(p["auto"]["notes"][0], said)
        # One such card among others counts for all; Turing runs int8; who names it gets it.
        p, _ = self.plan("Llama-3.1-70B", "A100-40GB+V100-32GB")
        self.assertNotIn("int8", p["auto"]["uniform"])
        for vram, more in (("4xT4", []), ("2x40GB", []),
                           ("2xV100-32GB", ["--schemes", "nf4,int8,16bit"])):
            p, said = self.plan("Llama-3.1-70B", vram, *more)
            self.assertIn("int8", p["auto"]["uniform"], vram)
            self.assertEqual((p["auto"]["notes"], said), ([], ""), vram)

    def test_tiers(self):
        """Where the GPUs are too small for the smallest choice, that is taken, and said."""
        p, said = self.plan("Llama-3.1-70B", "24GB+cpu:128GB")
        a = p["auto"]
        self.assertTrue(p["fits"] and a["spills"] and not a["fits"])
        self.assertEqual(set(a["chosen"]), {"nf4"})
        self.assertEqual(len(a["notes"]), 1)
        self.assertIn("cpu", a["notes"][0])
        self.assertIn(a["notes"][0], said)
        text = self.ok("plan", "--to", "auto", "--explain", "--vram", "24GB+cpu:128GB",
                       "Llama-3.1-70B")
        self.assertIn(a["notes"][0], text)
        self.assertNotIn("Nothing fits", text)
        p, said = self.plan("Llama-3.1-70B", "2x40GB+cpu:128GB")
        self.assertTrue(p["auto"]["fits"] and not p["auto"]["spills"])
        self.assertEqual((p["auto"]["notes"], said), ([], ""))
        p, said = self.plan("Llama-3.1-70B", "24GB")
        self.assertEqual((p["fits"], p["auto"]["spills"], said), (False, False, ""))
        cards = [s for s in p["suggestions"] if "cards" in s]
        self.assertEqual(len(cards), 1, p["suggestions"])
        self.assertRegex(cards[0], r"^with \d+ cards of 24.0 GB: .* at least, .* for better schemes$")
        more = cards[0].split()[1]
        self.assertTrue(self.plan("Llama-3.1-70B", more + "x24GB")[0]["auto"]["fits"])


if __name__ == "__main__":
    unittest.main()
