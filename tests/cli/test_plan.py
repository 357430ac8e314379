"""qconv plan: what it says of every model of tests/data/models, to the byte; what it writes; how it
refuses."""
import json
import os
import re
import resource
import shutil
import subprocess
import unittest

from output_case import OutputCase
from test_models import constants
import make_checkpoint as mk

MEMBERS = ["command", "model", "model_type", "has_weights", "to", "vram", "margin", "parameters",
           "weight_bytes", "file_bytes", "context", "batch", "parallel", "tensor_parallel", "vllm", "vllm_needs_plugin",
           "mla", "mla_runtime",
           "kv_bytes_per_token", "kv_bytes", "devices", "fits", "short_by_bytes", "short_device",
           "schemes", "loads", "auto", "max_context", "prefill_tokens", "max_context_by_prefill",
           "max_batch", "transfer_bytes_per_token", "transfer_seconds_per_token", "device_map",
           "choices", "budget_notes", "suggestions", "download", "convert"]
DEVICE_MEMBERS = ["name", "card", "total_bytes", "budget_bytes", "weight_bytes", "kv_bytes",
                  "workspace_bytes", "context_bytes", "free_bytes", "short_by_bytes", "layers",
                  "first_layer"]
LLAMA70 = "meta-llama/Llama-3.3-70B-Instruct"


def expected_bytes(model, to):
    """Bytes of all tensors with --rest bf16: `sizes`, the constants of each weight, and the buffers,
    which are no parameters."""
    sizes = model["sizes"]
    total = sizes.get(to + " mxfp4=keep", sizes[to])
    for _, dtype, shape, role in mk.model_rows(model):
        if role == "linear":
            total += constants(dtype, shape, to)
        elif role == "buffer":
            total += mk.tensor_bytes(dtype, shape)
    return total


def kv_at(model, context, batch=1):
    """The cache in fp16, worked out from the pattern file's description of it."""
    total = 0
    for row in model["kv_cache"]:
        if row["kind"] == "mla":
            each = (row["kv_lora_rank"] + row["qk_rope_head_dim"]) * 2 * context
        else:
            tokens = min(context, row["window"] or context)
            if row.get("cross"):
                tokens = row["media_tokens"]
            each = 2 * row["kv_heads"] * row["head_dim"] * 2 * tokens
        total += each * row["layers"]
    return total * batch


class PlanCase(OutputCase):
    def plan(self, *args, **more):
        return json.loads(self.ok("plan", "--json", *args, **more))

    def check_sums(self, plan, where=None):
        """What must hold of any plan."""
        self.assertEqual(list(plan), MEMBERS, where)
        self.assertEqual(plan["command"], "plan")
        for d in plan["devices"]:
            self.assertEqual(list(d), DEVICE_MEMBERS, where)
            needed = (d["weight_bytes"] + d["kv_bytes"] + d["workspace_bytes"]
                      + d["context_bytes"])
            if d["budget_bytes"] is None:
                continue
            self.assertEqual(d["budget_bytes"], int(d["total_bytes"] * plan["margin"]), where)
            self.assertEqual(d["budget_bytes"] - needed, d["free_bytes"] - d["short_by_bytes"],
                             (where, d))
            self.assertEqual(min(d["free_bytes"], d["short_by_bytes"]), 0, where)
            self.assertEqual(d["first_layer"] is None, d["layers"] == 0, where)
        self.assertEqual(sum(d["weight_bytes"] for d in plan["devices"]), plan["weight_bytes"],
                         where)
        self.assertEqual(sum(d["kv_bytes"] for d in plan["devices"]), plan["kv_bytes"], where)
        shorts = [d["short_by_bytes"] for d in plan["devices"]]
        self.assertEqual(plan["short_by_bytes"], max(shorts), where)
        self.assertEqual(plan["fits"], max(shorts) == 0, where)
        self.assertEqual(plan["short_device"] is None, plan["fits"], where)
        self.assertEqual(sum(s["bytes"] for s in plan["schemes"].values()), plan["weight_bytes"],
                         where)
        self.assertEqual(sum(s["weights"] for s in plan["schemes"].values()), plan["parameters"],
                         where)
        self.assertGreater(plan["file_bytes"], plan["weight_bytes"], where)
        if plan["fits"]:
            self.assertEqual(plan["suggestions"], [], where)
        if plan["to"] != "auto":
            self.assertEqual(plan["choices"], [], where)

    def check_map(self, device_map, names, devices, where=None):
        """Every name lies below exactly one key, and every key has a device of the budget."""
        gpus = sum(d["name"].startswith("cuda:") for d in devices)
        tiers = {d["name"] for d in devices} & {"cpu", "disk"}
        for key, value in device_map.items():
            self.assertTrue(value in tiers if isinstance(value, str) else 0 <= value < gpus,
                            (where, key, value))
        for name in names:
            parts = name.split(".")
            above = [".".join(parts[:i + 1]) for i in range(len(parts))]
            self.assertEqual(sum(a in device_map for a in above), 1, (where, name))


class Totals(PlanCase):
    """Full-size checkpoints of headers only."""

    def test_models(self):
        for name in mk.model_names():
            model = mk.load_model(name)
            mk.write_model(self.path(name), model, shard_bytes=5 * 10 ** 9)
            names = [r[0] for r in mk.model_rows(model)]
            for to in ("nf4", "int8"):
                self.check(model, name, names, to)
            shutil.rmtree(self.path(name))

    def check(self, model, name, names, to):
        where = (name, to)
        context = 8192
        plan = self.plan("--to", to, "--rest", "bf16", "--vram", "2x40GB", "--context",
                         str(context), name)
        self.check_sums(plan, where)
        self.assertTrue(plan["has_weights"])
        self.assertEqual(plan["parameters"], model["total_parameters"], where)
        self.assertEqual(plan["weight_bytes"], expected_bytes(model, to), where)
        self.assertEqual(plan["kv_bytes"], kv_at(model, context), where)
        self.assertEqual(plan["kv_bytes"], model["sizes"]["kv_bytes_at_8192"], where)
        self.assertEqual(plan["kv_bytes_per_token"], model["sizes"]["kv_bytes_per_token"], where)
        self.check_map(plan["device_map"], names, plan["devices"], where)
        dry = json.loads(self.ok("--dry-run", "--json", "--to", to, "--rest", "bf16", name))
        self.assertEqual(plan["weight_bytes"], dry["tensor_bytes"], where)
        if plan["kv_bytes"]:
            more = self.plan("--to", to, "--vram", "2x40GB", "--context", "4000", "--batch", "3",
                             name)
            self.assertEqual(more["kv_bytes"], kv_at(model, 4000, 3), where)
        else:
            self.assertIsNone(plan["max_context"], where)

    def test_config_only(self):
        """The same answer without the weights: from the configuration, and from the id alone."""
        for name in mk.model_names():
            model = mk.load_model(name)
            mk.write_model(self.path(name), model)
            os.mkdir(self.path("config"))
            shutil.copy(self.path(name, "config.json"), self.path("config"))
            full = self.plan("--to", "nf4", "--vram", "2x40GB", name)
            # Buffers are what a configuration does not tell: transformers makes them itself.
            buffers = sum(mk.tensor_bytes(d, s) for _, d, s, role in mk.model_rows(model)
                          if role == "buffer")
            same = [m for m in MEMBERS if m not in ("model", "has_weights", "file_bytes", "download", "convert")]
            if buffers:
                same = [m for m in same if m not in ("weight_bytes", "devices", "schemes")]
            for other in ("config", os.path.join("config", "config.json"), model["hf_id"]):
                plan = self.plan("--to", "nf4", "--vram", "2x40GB", other)
                self.assertFalse(plan["has_weights"], (name, other))
                self.assertEqual(plan["weight_bytes"] + buffers, full["weight_bytes"],
                                 (name, other))
                for member in same:
                    self.assertEqual(plan[member], full[member], (name, other, member))
            shutil.rmtree(self.path(name))
            shutil.rmtree(self.path("config"))


class Large(PlanCase):
    CONFIG = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 11008,
              "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
              "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}

    def write(self, **more):
        with open(self.path("config.json"), "w") as f:
            json.dump(dict(self.CONFIG, **more), f)

    def test_many_layers(self):
        """The most layers there may be are planned in time that grows with them, not their square."""
        self.write(model_type="llama", num_hidden_layers=10000)
        for vram in ("2x40GB", "2x80GB+cpu:600GB", "24GB+cpu:4000GB+disk"):
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            self.ok("plan", "--vram", vram, "config.json")
            seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
            self.assertLess(seconds, 30, vram)

    def test_too_many_tensors(self):
        experts = 400000 // 60 // 3
        self.write(num_hidden_layers=60, num_local_experts=experts, num_experts_per_tok=2)
        self.fails(3, "plan", "--vram", "24GB", "config.json",
                   has="expected a model of at most 400000 tensors, found more: 60 layers with %d "
                       "experts each" % experts)
        self.write(num_hidden_layers=10, num_local_experts=3000, num_experts_per_tok=2)
        self.ok("plan", "--vram", "24GB", "config.json")


    def test_what_never_fits_is_not_planned_again(self):
        """A mixture that is too large in any form takes little longer than one that fits: it was five times as long."""
        self.write(model_type="qwen3_moe", num_hidden_layers=200, num_experts=100, moe_intermediate_size=768, head_dim=128)
        used = []
        for vram in ("2x90TB", "2x4GB"):
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            self.ok("plan", "--tp", "2", "--to", "keep", "--vram", vram, "config.json")
            used.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
        self.assertLess(used[1], 3.5 * used[0] + 0.05)


class Headers(PlanCase):
    """Shards of which only the beginnings were downloaded."""

    def cut(self, *tails):
        mk.write_model(self.path("m"), mk.load_model("Llama-3.1-8B"), layers=2, scale=64, seed=5, shard_bytes=200000)
        whole = self.plan("--vram", "1GB", "m")
        self.names = sorted(n for n in os.listdir(self.path("m")) if n.endswith(".safetensors"))
        for name, tail in zip(self.names, tails + (0,) * len(self.names)):
            with open(self.path("m", name), "r+b") as f:
                f.truncate(8 + int.from_bytes(f.read(8), "little") + tail)
        return whole

    def test_are_enough(self):
        """The plan is that of the whole checkpoint, also for a type that no family knows; convert refuses it."""
        whole = self.cut(0, 1000)
        self.assertEqual(dict(whole, has_weights=False), self.plan("--vram", "1GB", "m"))
        r = self.run_qconv("plan", "--vram", "1GB", "m")
        self.assertIn(b"the weights are cut off, and a plan needs their headers alone", r.stderr)
        self.fails(3, "--to", "nf4", "m", "o", has="are missing, and 'lm_head.weight' is the first")
        config = self.json_of("m", "config.json")
        self.write("m/config.json", json.dumps(dict(config, model_type="new")))
        self.assertEqual(self.plan("--vram", "1GB", "--to", "keep", "m")["parameters"], whole["parameters"])

    def test_all_are_needed(self):
        self.cut()
        os.remove(self.path("m", self.names[-1]))
        self.fails(3, "plan", "--vram", "1GB", "m", has=self.names[-1])
        with open(self.path("m", self.names[0]), "r+b") as f:
            f.truncate(100)
        self.fails(3, "plan", "--vram", "1GB", "m")

    def test_an_index_alone_is_no_weights(self):
        """The config.json says what the model is."""
        self.cut()
        for name in self.names:
            os.remove(self.path("m", name))
        self.assertGreater(self.plan("--vram", "1GB", "m")["weight_bytes"], 0)


class NoConfig(PlanCase):
    def test_unknown_cache(self):
        """Without a config.json the cache is unknown, not empty, and both commands warn of it."""
        tensors = {"model.layers.0.mlp.up_proj.weight": ("F32", [64, 64], bytes(64 * 64 * 4))}
        mk.write_checkpoint(self.path("bare"), tensors)
        r = self.run_qconv("plan", "--json", "--vram", "24GB", "bare")
        self.assertEqual(r.returncode, 0, r.stderr)
        plan = json.loads(r.stdout)
        for member in ("kv_bytes", "kv_bytes_per_token", "max_context", "max_batch"):
            self.assertIsNone(plan[member], member)
        self.assertIsNone(plan["devices"][0]["kv_bytes"])
        self.assertIn(b"no config.json", r.stderr)
        text = self.ok("plan", "--vram", "24GB", "bare")
        self.assertIn("fits without a KV cache, whose size is not known", text)
        self.assertRegex(text, r"KV cache +its size is not known")
        r = self.run_qconv("--to", "nf4", "bare", "out")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn(b"no config.json", r.stderr)

    def test_unknown_type(self):
        """That general rules choose what is quantized is said once, without -v."""
        tensors = {"model.layers.0.mlp.up_proj.weight": ("F32", [64, 64], bytes(64 * 64 * 4))}
        mk.write_checkpoint(self.path("own"), tensors, config={"model_type": "somebodys_own"})
        r = self.run_qconv("--to", "nf4", "own", "out")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertEqual(r.stderr.count(b"'somebodys_own' is not known"), 1, r.stderr)

    def test_config_of_another_name(self):
        mk.write_json(self.path("mine.json"), mk.load_model("Llama-3.1-8B")["config"])
        self.assertFalse(self.plan("--vram", "24GB", "--to", "nf4", "mine.json")["has_weights"])
        self.fails(3, "plan", "--vram", "24GB", "nobody/has-this", has=["folder with its config"])
        mk.write_json(self.path("tokenizer.json"), {"version": "1.0", "model": {"type": "BPE"}})
        self.fails(3, "plan", "--vram", "24GB", "tokenizer.json",
                   has=["tokenizer.json: expected the configuration of a model, with a model_type or architectures, "
                        "found JSON with neither"])


class Search(PlanCase):
    def test_boundaries(self):
        """One more than what was found does not fit; what was found does."""
        args = ["--vram", "2x26GB", "--to", "nf4", LLAMA70]
        plan = self.plan("--context", "4096", *args)
        self.check_sums(plan)
        longest, most = plan["max_context"], plan["max_batch"]
        self.assertGreater(longest, 0)
        self.assertGreater(most, 0)
        self.assertTrue(self.plan("--context", str(longest), *args)["fits"])
        self.assertFalse(self.plan("--context", str(longest + 1), *args)["fits"])
        self.assertTrue(self.plan("--context", "4096", "--batch", str(most), *args)["fits"])
        self.assertFalse(self.plan("--context", "4096", "--batch", str(most + 1), *args)["fits"])

    def test_prefill(self):
        """A prompt is read whole unless a step is given, and the text says which holds."""
        args = ["--vram", "2x40GB", "--to", "nf4"]
        whole, steps = self.plan(*args, LLAMA70), self.plan(*args, "--prefill", "2048", LLAMA70)
        # A token of one sequence takes 1/2 of the cache and 2 B * (4 * 8192 + 2 * 128 + 12 +
        # 3 * 28672) of workspace on each device.
        token = whole["kv_bytes_per_token"] / 2 + 2 * (4 * 8192 + 2 * 128 + 12 + 3 * 28672)
        room = min(d["free_bytes"] for d in whole["devices"])
        self.assertEqual(whole["max_context"], 8192 + int(room / token))
        self.assertEqual((whole["prefill_tokens"], steps["prefill_tokens"]), (None, 2048))
        for plan in (whole, steps):
            self.check_sums(plan)
            self.assertEqual(plan["max_context_by_prefill"],
                             {"whole": whole["max_context"], "2048": steps["max_context"]})
        self.assertGreater(steps["max_context"], 2 * whole["max_context"])
        self.assertEqual(dict(self.plan(*args, "--prefill", "whole", LLAMA70), convert=whole["convert"]), whole)
        text = self.ok("plan", *args, LLAMA70)
        for way, p in (("prompts are read whole, as transformers does by default", whole),
                       ("prompts are read 2,048 tokens at a time", steps)):
            self.assertIn("{:,} tokens; {}".format(p["max_context"], way), text)
        self.assertIn("prompts are read 512 tokens at a time",
                      self.ok("plan", *args, "--prefill", "512", LLAMA70))
        for wrong in ("0", "-1", "all", ""):
            self.usage("plan", *args, "--prefill", wrong, LLAMA70, has=["--prefill", "whole"],
                       command="plan")

    def test_latent_attention(self):
        """What is said of DeepSeek names the form and who computes so."""
        args = ["--vram", "4x80GB", "DeepSeek-V2.5"]
        plans = {f: self.plan("--mla", f, *args) for f in ("latent", "absorbed", "expanded")}
        self.assertEqual(dict(self.plan(*args), convert=plans["latent"]["convert"]), plans["latent"])
        self.assertEqual([p["mla"] for p in plans.values()], list(plans))
        self.assertEqual(plans["latent"]["kv_bytes"], plans["absorbed"]["kv_bytes"])
        self.assertEqual(plans["latent"]["kv_bytes_per_token"], 60 * (512 + 64) * 2)
        self.assertEqual(plans["expanded"]["kv_bytes_per_token"], 60 * 128 * (192 + 128) * 2)
        # Keys and values of every head, for the whole context, while a layer computes.
        work = [max(d["workspace_bytes"] for d in plans[f]["devices"])
                for f in ("latent", "absorbed")]
        self.assertGreaterEqual(work[0], 8192 * 128 * (192 + 128) * 2)
        self.assertNotEqual(*work)
        for form, runtime in (("latent", "transformers 5"), ("absorbed", "vLLM"),
                              ("expanded", "transformers 4")):
            self.assertIn(runtime, plans[form]["mla_runtime"])
            self.assertRegex(self.ok("plan", "--mla", form, *args), "MLA: .*, as " + runtime)
        self.assertIsNone(self.plan("--vram", "2x40GB", LLAMA70)["mla"])
        self.assertNotIn("MLA", self.ok("plan", "--vram", "2x40GB", LLAMA70))

    def test_margin_and_auto_are_offered(self):
        args = ["--vram", "2x43GB", LLAMA70, "--to"]
        plan = self.plan(*args, "int8")
        said = " ".join(plan["suggestions"])
        margin = re.search(r"with --margin (0\.\d\d) \(this leaves (\d+)% of each device", said)
        self.assertTrue(margin, said)
        self.assertEqual(float(margin.group(1)) * 100, 100 - int(margin.group(2)))
        self.assertTrue(self.plan("--margin", margin.group(1), *args, "int8")["fits"])
        less = "%.2f" % (float(margin.group(1)) - 0.01)
        self.assertFalse(self.plan("--margin", less, *args, "int8")["fits"])
        self.assertIn("with --to auto: ", said)
        self.assertTrue(self.plan(*args, "auto")["fits"])
        self.assertIn("or with --to auto", self.ok("plan", *args, "int8"))
        # Two of 40 GB would need more than all.
        self.assertNotIn("--margin", " ".join(self.plan("--vram", "2x40GB", LLAMA70, "--to",
                                                        "int8")["suggestions"]))

    def test_budgets_are_explained(self):
        for vram, margin, notes in (
                ("2x40GB", "0.9", ["36.0 GB is 90% of 40.0 GB (--margin)",
                                   "40GB is taken as 40.0 GB; cards sold with 40GB have 42.3 GB "
                                   "(A100-40GB): name the card in --vram"]),
                ("2xA100-40GB", "0.9", ["38.1 GB is 90% of the 42.3 GB that the driver of A100-40GB "
                                        "reports (--margin)"]),
                ("23GB+cpu:64GB+disk", "0.875", ["20.1 GB is 87.5% of 23.0 GB (--margin)",
                                                 "56.0 GB is 87.5% of 64.0 GB (--margin)"]),
                ("480GB", "1", ["480 GB is 100% of 480 GB (--margin)"])):
            args = ["--vram", vram, "--margin", margin, "Llama-3.1-8B"]
            self.assertEqual(self.plan(*args)["budget_notes"], notes)
            text = self.ok("plan", *args)
            for note in notes:
                self.assertIn("  " + note + "\n", text)
        self.assertRegex(self.plan("--vram", "24GB", "Llama-3.1-8B")["budget_notes"][1],
                         r"cards sold with 24GB have .* \(.*\) to .* \(.*\): name")

    def test_suggestions(self):
        """Each is true when tried, and one card less than suggested does not do."""
        plan = self.plan("--vram", "2x40GB", "--to", "int8", LLAMA70)
        self.check_sums(plan)
        self.assertFalse(plan["fits"])
        found = {}
        for s in plan["suggestions"]:
            words = s.split(": ")[0].split()
            self.assertEqual(words[0], "with", s)
            found.setdefault(words[1], []).append(words[2].rstrip(":"))
        self.assertEqual(found["--to"], ["nf4", "auto"])
        self.assertTrue(self.plan("--vram", "2x40GB", "--to", "nf4", LLAMA70)["fits"])
        self.assertEqual(found["3"], ["cards"])
        self.assertTrue(self.plan("--vram", "3x40GB", "--to", "int8", LLAMA70)["fits"])
        tier = [w for w in found if w.startswith("+cpu:")][0].rstrip(":")
        spilled = self.plan("--vram", "2x40GB" + tier, "--to", "int8", LLAMA70)
        self.assertTrue(spilled["fits"])
        self.assertGreater(spilled["transfer_bytes_per_token"], 0)
        self.assertGreater(spilled["transfer_seconds_per_token"], 0)
        text = self.ok("plan", "--vram", "2x40GB", "--to", "int8", LLAMA70)
        self.assertIn("short by ", text)
        self.assertIn("; would fit with --to nf4, or with ", text)
        self.assertIn(", or with 3 cards", text)

    def test_free_changes_come_first(self):
        """Each is true when tried; two together are offered only where none is enough alone."""
        for args, first in (
                (["Llama-3.3-70B-Instruct", "--vram", "2x3090"], ["--prefill 2048", "--context 5072"]),
                (["Qwen3-Next-80B-A3B-Instruct", "--vram", "49GB"],
                 ["--prefill 2048", "--drop-mtp", "--quantize lm_head.weight", "--context 5556"]),
                (["Llama-3.1-8B", "--vram", "8GB"],
                 ["--prefill 2048 --kv-dtype fp8", "--quantize lm_head.weight --kv-dtype fp8",
                  "--context 3514"])):
            plan = self.plan(*args)
            said = [re.match(r"with (.*?)( \(prompts .*\))?: ", s).group(1) for s in plan["suggestions"]]
            self.assertEqual(said[:len(first)], first)
            for change in first:
                self.assertTrue(self.plan(*args, *change.split())["fits"], change)
        # What the user keeps is not what is offered, and --drop-mtp only where there is such a layer.
        args = ["plan", "Qwen3-Next-80B-A3B-Instruct", "--vram", "49GB", "--keep", "lm_head.weight"]
        self.assertNotIn("lm_head", self.ok(*args).splitlines()[-1])
        self.assertNotIn("--drop-mtp", self.ok("plan", "Llama-3.3-70B-Instruct", "--vram", "2x3090"))

    def test_what_has_4_bits_already_is_kept(self):
        """The default, the advice where NF4 was asked for, and where bf16 does not fit."""
        fp8, four = (json.loads(self.ok("plan", model, "--vram", "8x80GB", "--json"))["to"]
                     for model in ("DeepSeek-V3", "gpt-oss-120b"))
        self.assertEqual((fp8, four), ("nf4", "keep"))
        again = json.loads(self.ok("plan", "gpt-oss-20b", "--vram", "80GB", "--requantize", "--json"))
        self.assertEqual(again["to"], "nf4")
        r = self.run_qconv("plan", "gpt-oss-120b", "--vram", "2x40GB")
        self.assertEqual(r.stderr, b"")
        r = self.run_qconv("plan", "gpt-oss-120b", "--vram", "2x40GB", "--to", "nf4")
        self.assertIn(b"; --to keep makes what it loads", r.stderr)
        said = self.plan("gpt-oss-20b", "--vram", "24GB", "--to", "bf16")["suggestions"]
        self.assertTrue(said[0].startswith("with --to keep: "), said)
        self.assertFalse([s for s in said[1:] if "--to" in s], said)

    def test_the_verdict_says_what_it_rests_on(self):
        args = ["plan", "Llama-3.3-70B-Instruct", "--vram", "2x3090"]
        for more, said in (
                ([], " 8,192 tokens with prompts read whole; with --prefill 2048 it fits 9,468"),
                (["--context", "9216"], " 9,216 tokens with prompts read whole; with --prefill 2048 it fits 9,468"),
                (["--context", "10240"], " 10,240 tokens with prompts read whole"),
                (["--context", "10240", "--prefill", "2048"], " 10,240 tokens with prompts read 2,048 at a time"),
                (["--batch", "3"], " 8,192 tokens in each of 3 sequences with prompts read whole"),
                (["--to", "int8"], "")):
            self.assertRegex(self.ok(*args, *more).splitlines()[0], ": does not fit%s$" % said)

    def test_spilled_experts_are_not_all_moved(self):
        """What +cpu: is said to cost a token is what the plan with it says."""
        for model in ["deepseek-ai/DeepSeek-V3", "Mixtral-8x7B-v0.1", LLAMA70]:
            text = " ".join(json.loads(self.ok("plan", model, "--vram", "16GB", "--json"))
                            ["suggestions"])
            size, moved = re.search(r"with \+cpu:(\d+GB) \((.*?) cross the host link", text).groups()
            self.assertIn("host: %s cross its link" % moved,
                          self.ok("plan", model, "--vram", "16GB+cpu:" + size))

    def test_fp8_is_decoded_somewhere(self):
        """A weight kept in FP8 may have to become 16 bit to be multiplied with, as one in NF4."""
        kept, nf4 = (self.plan("DeepSeek-V3", "--vram", "16x80GB", "--to", to)
                     for to in ("keep", "nf4"))
        self.assertEqual(max(d["workspace_bytes"] for d in kept["devices"]),
                         max(d["workspace_bytes"] for d in nf4["devices"]))

    def test_disk_is_named(self):
        args = ["plan", LLAMA70, "--to", "int8", "--vram"]
        self.assertIn("spilled to the host and to disk: ",
                      self.ok(*args, "3090+cpu:8GB+disk"))
        self.assertIn("spilled to the host: ", self.ok(*args, "3090+cpu:200GB+disk"))

    def test_no_int8_for_volta(self):
        """What bitsandbytes cannot run on a card is not what "would fit" there."""
        small = json.loads(self.ok("plan", "Llama-3.1-8B", "--vram", "V100-16GB", "--to", "bf16",
                                   "--json"))
        self.assertFalse(small["fits"])
        self.assertIn("with --to nf4:", " ".join(small["suggestions"]))
        self.assertNotIn("int8", " ".join(small["suggestions"]))
        turing = json.loads(self.ok("plan", "Llama-3.1-8B", "--vram", "T4", "--to", "bf16",
                                    "--json"))
        self.assertIn("with --to int8:", " ".join(turing["suggestions"]))
        for card, warned in [("V100-16GB", True), ("T4", False), ("16GB", False)]:
            r = self.run_qconv("plan", "Llama-3.1-8B", "--vram", card, "--to", "int8")
            self.assertEqual(r.returncode, 0)
            said = b"needs compute capability 7.5 to compute in int8, and V100-16GB has less"
            self.assertEqual(said in r.stderr, warned, card)

    def test_two_changes(self):
        """Where none alone is enough: NF4 and another, both needed."""
        model = "deepseek-ai/DeepSeek-V3"
        plan = json.loads(self.ok("plan", model, "--vram", "16GB", "--to", "bf16", "--json"))
        self.assertFalse(plan["fits"])
        self.assertTrue(plan["suggestions"])
        for s in plan["suggestions"]:
            self.assertTrue(s.startswith("with --to nf4 and "), s)
        size = re.search(r"--to nf4 and \+cpu:(\d+GB)", " ".join(plan["suggestions"])).group(1)
        for to, fits in [("bf16", False), ("nf4", True)]:
            more = json.loads(self.ok("plan", model, "--vram", "16GB+cpu:" + size, "--to", to,
                                      "--json"))
            self.assertEqual(more["fits"], fits)

    def test_shorter_context(self):
        plan = self.plan("--vram", "2x26GB", "--to", "nf4", "--context", "131072", LLAMA70)
        self.assertFalse(plan["fits"])
        said = [s for s in plan["suggestions"] if s.startswith("with --context ")]
        self.assertEqual(len(said), 1, plan["suggestions"])
        tokens = said[0].split()[2].rstrip(":")
        self.assertEqual(int(tokens), plan["max_context"])
        for more, fits in ((0, True), (1, False)):
            self.assertEqual(self.plan("--vram", "2x26GB", "--to", "nf4", "--context",
                                       str(int(tokens) + more), LLAMA70)["fits"], fits)

    def test_smaller_batch(self):
        args = ["--vram", "2x26GB", "--to", "nf4", "--context", "4096", LLAMA70]
        plan = self.plan("--batch", "1000", *args)
        said = [s for s in plan["suggestions"] if s.startswith("with --batch ")]
        self.assertEqual(said[0].split()[2].rstrip(":"), str(plan["max_batch"]))

    def test_nothing_helps(self):
        """A layer that no card can hold: no number of cards is suggested."""
        plan = self.plan("--vram", "1GB", "--to", "nf4", LLAMA70)
        self.assertFalse(plan["fits"])
        self.assertFalse([s for s in plan["suggestions"] if " card" in s], plan["suggestions"])


class Small(PlanCase):
    """Real conversions of scaled-down models: what was predicted is what is written."""

    FORMS = [["--to", "nf4"], ["--to", "int8"], ["--to", "nf4", "--block-size", "32"],
             ["--to", "nf4", "--no-double-quant"], ["--to", "int8", "--block-size", "64"],
             ["--to", "bf16"], ["--to", "keep"], ["--to", "nf4", "--rest", "fp16"]]

    def test_written(self):
        """Every other form of each model; test_models.py converts each of them to three."""
        for number, name in enumerate(mk.model_names()):
            model = mk.load_model(name)
            mk.write_model(self.path("m"), model, layers=2, experts=2, scale=64, seed=11,
                           shard_bytes=300000)
            for form in self.FORMS[number % 2::2]:
                where = (name, form)
                sizes = ["--max-shard-size", "200KB"]
                plan = self.plan("--vram", "1GB", *form, *sizes, "m")
                self.check_sums(plan, where)
                out = self.convert(*form, *sizes, "m", "o")
                written = [os.path.getsize(self.path("o", n)) for n in os.listdir(self.path("o"))
                           if n.endswith(".safetensors")]
                self.assertEqual(plan["file_bytes"], sum(written), where)
                self.assertEqual(plan["weight_bytes"], sum(len(t[2]) for t in out.values()), where)
                source = mk.read_checkpoint(self.path("m"))
                self.check_map(plan["device_map"], source, plan["devices"], where)
                # Scales lie below the weights they belong to, so the map covers them too.
                self.check_map(plan["device_map"], out, plan["devices"], where)
                shutil.rmtree(self.path("o"))
            shutil.rmtree(self.path("m"))

    def test_the_command_makes_the_plan_so(self):
        """A shell that runs the plan's command gets the output that was planned, and what is said to
        load it is what convert says."""
        model = "it's a model"
        mk.write_model(self.path(model), mk.load_model("Llama-3.1-8B"), layers=2, scale=64, seed=5)
        for more in ([], ["--to", "int8", "--keep", "*.o_proj.*", "--vram", "2GB", "--context=4096"]):
            text = self.ok("plan", *more, model)
            command, rest = re.search(r"\n  (.*qconv --.* OUT)\n((?s:.*))", text).groups()
            self.assertEqual(self.plan(*more, model)["convert"], command)
            r = subprocess.run(["sh", "-c", command], cwd=self.path(""), capture_output=True, check=True)
            self.assertTrue(r.stdout.decode().endswith(rest), r.stdout)
            self.assertEqual(self.plan(*more, model)["file_bytes"],
                             sum(os.path.getsize(self.path("OUT", n)) for n in os.listdir(self.path("OUT"))
                                 if n.endswith(".safetensors")))
            shutil.rmtree(self.path("OUT"))

    def test_written_for_devices(self):
        """Shards cut at the devices: the same bytes, and device_map.json is the plan's."""
        mk.write_model(self.path("m"), mk.load_model("Llama-3.1-8B"), layers=6, scale=64, seed=5)
        args = ["--to", "nf4", "--vram", "3x1GB", "--prefill", "2048", "m"]
        plan = self.plan(*args)
        self.check_sums(plan)
        self.assertEqual([d["layers"] > 0 for d in plan["devices"]], [True] * 3)
        self.convert(*args, "o")
        written = [os.path.getsize(self.path("o", n)) for n in os.listdir(self.path("o"))
                   if n.endswith(".safetensors")]
        self.assertEqual(len(written), 3)
        self.assertEqual(plan["file_bytes"], sum(written))
        self.assertEqual(self.json_of("o", "device_map.json"), plan["device_map"])
        placement = self.json_of("o", "qconv.json")["placement"]
        self.assertEqual([d["tensor_bytes"] for d in placement["devices"]],
                         [d["weight_bytes"] for d in plan["devices"]])

    def test_default_target(self):
        """nf4, and keep for what is quantized already."""
        mk.write_model(self.path("m"), mk.load_model("Llama-3.1-8B"), layers=2, scale=64, seed=3)
        self.assertEqual(self.plan("--vram", "1GB", "m")["to"], "nf4")
        self.ok("-q", "--to", "nf4", "m", "o")
        kept = self.plan("--vram", "1GB", "o")
        self.check_sums(kept)
        self.assertEqual(kept["to"], "keep")
        self.assertEqual(kept["parameters"], self.plan("--vram", "1GB", "m")["parameters"])
        self.assertEqual(kept["weight_bytes"],
                         self.plan("--vram", "1GB", "--to", "nf4", "m")["weight_bytes"])

    def test_tied_head_only(self):
        """One table under the head's name: the embedding is in the map, where the head is."""
        mk.write_checkpoint(self.path("m"), {
            "lm_head.weight": ("F32", [64, 32], None),
            "model.layers.0.mlp.up_proj.weight": ("F32", [64, 32], None),
            "model.norm.weight": ("F32", [32], None),
        }, config={"model_type": "llama", "tie_word_embeddings": True, "num_hidden_layers": 1,
                   "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
                   "vocab_size": 64})
        placed = self.plan("--vram", "2x1GB", "--incomplete", "m")["device_map"]
        self.assertEqual(placed["model.embed_tokens"], placed["lm_head"])

    def test_device_map(self):
        """--device-map is the map of --json."""
        self.ok("plan", "--vram", "24GB", "--device-map", "map.json", LLAMA70)
        device_map = self.json_of("map.json")
        self.assertEqual(device_map, self.plan("--vram", "24GB", LLAMA70)["device_map"])
        self.assertEqual(os.listdir(self.dir), ["map.json"])

    def test_spill(self):
        plan = self.plan("--vram", "24GB+cpu:64GB+disk", "--to", "int8", "--prefill", "2048",
                         LLAMA70)
        self.check_sums(plan)
        self.assertTrue(plan["fits"])
        self.assertEqual([d["name"] for d in plan["devices"]], ["cuda:0", "cpu", "disk"])
        self.assertIsNone(plan["devices"][2]["budget_bytes"])
        self.assertIsNone(plan["devices"][2]["free_bytes"])
        self.assertEqual(set(map(str, plan["device_map"].values())), {"0", "cpu"})
        self.assertEqual(plan["transfer_bytes_per_token"] > 0, True)

    def test_text(self):
        text = self.ok("plan", "--vram", "2x40GB", LLAMA70,
                       env={"LC_ALL": "C.UTF-8", "TERM": "xterm"})
        self.assertTrue(text.isascii(), "not a terminal: ASCII only")
        for part in ["as nf4 on 2x40GB: fits", "KV cache", "cuda:0  [#", "cuda:1  [#",
                     "longest context at batch 1", "largest batch at this context"]:
            self.assertIn(part, text)
        for line in text.split("\n"):
            self.assertEqual(line, line.rstrip())


class Refusals(PlanCase):
    def test_usage(self):
        """Budgets that cannot be read: unit_budget.c."""
        for args, has in [
            (["--vram", "2x", LLAMA70], "2x"),
            (["--vram", "40GB", "--margin", "1.01", LLAMA70], "--margin"),
            (["--vram", "40GB", "--margin", "0", LLAMA70], "--margin"),
            (["--vram", "40GB", "--context", "0", LLAMA70], "--context"),
        ]:
            self.usage("plan", *args, has=has, command="plan")

    def test_models(self):
        self.fails(3, "plan", "--vram", "40GB", "meta-llama/Llama-3.3-71B-Instruct",
                   has="Llama-3.3-70B-Instruct")
        os.mkdir(self.path("m"))
        self.write("m/config.json", "{}")
        self.fails(3, "plan", "--vram", "40GB", "m", has="m")
        self.write("m/config.json", '{"num_hidden_layers": 2}')
        self.fails(3, "plan", "--vram", "40GB", "m", has="expected the configuration of a model, with a model_type or "
                   "architectures, found JSON with neither")
        self.write("m/config.json", "[")
        self.fails(3, "plan", "--vram", "40GB", "m", has="JSON")

    def test_files(self):
        self.fails(1, "plan", "--vram", "40GB", "--device-map", "no/such/p.json", LLAMA70,
                   has=["--device-map: 'no/such/p.json'", "no folder 'no/such'"])
        os.mkdir(self.path("d"))
        self.usage("plan", "--vram", "40GB", "--device-map", "d", LLAMA70,
                   has=["--device-map: 'd'", "found a folder"], command="plan")
        self.assertEqual(os.listdir(self.path("d")), [])
        self.assertEqual(os.listdir(self.dir), ["d"])

    def test_no_device_is_renamed_over(self):
        os.mkfifo(self.path("pipe"))
        # If this fails for root, the machine has lost its /dev/stdout.
        for path in [self.path("pipe")] + (["/dev/stdout"] if os.geteuid() else []):
            before = os.lstat(path)
            self.usage("plan", "--vram", "40GB", "--device-map", path, LLAMA70, has="a device or a pipe",
                       command="plan")
            self.assertEqual((os.lstat(path).st_mode, os.lstat(path).st_ino),
                             (before.st_mode, before.st_ino))

    @unittest.skipIf(os.geteuid() == 0, "root may write everything")
    def test_read_only_file(self):
        self.write("p.json", "kept")
        os.chmod(self.path("p.json"), 0o444)
        self.fails(1, "plan", "--vram", "40GB", "--device-map", "p.json", LLAMA70, has="p.json")
        with open(self.path("p.json"), encoding="utf-8") as f:
            self.assertEqual(f.read(), "kept")

    def test_no_gpu(self):
        """Without --vram and without a GPU the plan is for this machine's memory, and says so."""
        r = self.run_qconv("plan", "--json", "sentence-transformers/all-MiniLM-L6-v2",
                           env={"QCONV_DEVICE": "cpu"})
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn(b", so this plan is for the CPU; --vram names the devices to plan for", r.stderr)
        plan = json.loads(r.stdout)
        self.check_sums(plan)
        self.assertEqual([d["name"] for d in plan["devices"]], ["cpu"])
        self.assertEqual(set(plan["device_map"].values()), {"cpu"})
        self.assertEqual(plan["devices"][0]["context_bytes"], 0)


if __name__ == "__main__":
    unittest.main()
