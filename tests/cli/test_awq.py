"""--format awq: the codes of --to int4 in AWQ's order. What is written is compared, byte for byte, with the layout in
plain Python (test_integers.awq), made of what --format compressed-tensors writes."""
import json
import os
import random
import shutil
import signal
import struct
import unittest

from output_case import AT_CALL, OutputCase, PLAIN, at_call, tree
from qconv_case import ROOT, SANITIZED
from test_integers import Weight, awq, gptq
import make_checkpoint as mk
import moments

L = "model.layers.0."
SHAPES = {"self_attn.q_proj": [64, 256], "self_attn.k_proj": [8, 256], "self_attn.o_proj": [256, 128],
          "mlp.down_proj": [24, 384], "mlp.up_proj": [40, 512]}
CONFIG = {"model_type": "llama", "torch_dtype": "float16"}


class Awq(OutputCase):
    replaces = True

    def setUp(self):
        super().setUp()
        self.rng = random.Random(5)

    def source(self, dtype="F16", shapes=None, **more):
        tensors = {"model.norm.weight": (dtype, [256], mk.encode(dtype, [1.0] * 256)),
                   "lm_head.weight": (dtype, [16, 256], mk.random_bytes(dtype, [16, 256], self.rng))}
        for name, shape in (shapes or SHAPES).items():
            block = [self.rng.gauss(0, 0.03) for _ in range(4096)]
            values = [block[(i * 7919 + i // 4096) % 4096] for i in range(mk.numel(shape))]
            tensors[L + name + ".weight"] = (dtype, shape, mk.encode(dtype, values))
        self.model(tensors, CONFIG, **more)
        return tensors

    def expected(self, out, group=128):
        """AWQ's tensors of an output of compressed-tensors."""
        want = {}
        for name, (dtype, shape, data) in out.items():
            if not name.endswith("_packed"):
                if "_scale" not in name and "_shape" not in name:
                    want[name] = (dtype, shape, data)
                continue
            stem = name[:-len("weight_packed")]
            rows, cols = shape[0], shape[1] * 8
            w = Weight.__new__(Weight)
            w.shape, w.dtype, w.groups = [rows, cols], "F16", cols // group
            codes = [b >> s & 15 for b in data for s in (0, 4)]
            w.codes = [codes[r * cols:(r + 1) * cols] for r in range(rows)]
            w.zeros = [[8] * w.groups for _ in range(rows)]
            scales = mk.decode("F16", out[stem + "weight_scale"][2])
            w.scales = [scales[r * w.groups:(r + 1) * w.groups] for r in range(rows)]
            want.update(awq(w, stem))
        return want

    def test_every_byte(self):
        """Of both ways of finding scales, and of groups of 32, on any number of threads."""
        self.source()
        for group, options in ((128, []), (128, ["--scale", "absmax"]), (32, ["--block-size", "32"])):
            self.ok("-q", *PLAIN, "--force", "--to", "int4", *options, "m", "ct")
            want = self.expected(mk.read_checkpoint(self.path("ct")), group)
            for threads in ("1", "3"):
                self.ok("-q", *PLAIN, "--force", "--threads", threads, "--to", "int4", "--format", "awq", *options, "m", "o")
                found = mk.read_checkpoint(self.path("o"))
                self.assertEqual(set(found), set(want))
                for name in want:
                    self.assertEqual(found[name], want[name], (options, threads, name))
            self.assertEqual(self.json_of("o", "config.json")["quantization_config"], {
                "bits": 4, "group_size": group, "quant_method": "awq", "version": "gemm", "zero_point": True,
                "modules_to_not_convert": ["classifier", "lm_head", "qa_outputs", "score"]})
            for to in ("fp16", "bf16"):  # back, by qconv's own reader of AWQ
                for source in ("ct", "o"):
                    self.ok("-q", *PLAIN, "--force", "--to", to, source, source + "-16")
                self.assertEqual(mk.read_checkpoint(self.path("o-16")), mk.read_checkpoint(self.path("ct-16")))

    def test_pieces(self):
        """Codes of two pieces, which are whole groups of all outputs; there is an odd number of them."""
        name, shape = L + "mlp.up_proj.weight", [1000, 161 * 128]
        row = mk.encode("F16", [self.rng.gauss(0, 0.03) for _ in range(shape[1] + 2000)])
        self.model({name: ("F16", shape, b"".join(row[4 * r:4 * r + 2 * shape[1]] for r in range(1000)))}, CONFIG)
        for form in ("awq", "compressed-tensors"):
            self.ok("-q", *PLAIN, "--to", "int4", "--format", form, "m", form)
            self.ok("-q", *PLAIN, "--to", "fp16", form, form + "-16")
        pieces = [t["piece_bytes"] for t in self.json_of("awq", "qconv.json")["tensors"] if t["name"].endswith("qweight")]
        self.assertEqual((pieces[0] % (1000 * 128 // 2), pieces[0] < mk.numel(shape) // 2), (0, True), pieces)
        self.assertEqual(*(mk.read_checkpoint(self.path(form + "-16")) for form in ("awq", "compressed-tensors")))
        self.assertTrue(json.loads(self.ok("verify", "--json", "awq", "--against", "m"))["ok"])

    def test_the_same_of_other_sources(self):
        """Weights in GPTQ's form, decoded, come out as those of their 16 bits; scales are F16 whatever the source has."""
        w = Weight(self.rng, 64, 256, 4, 2, shuffled=True)
        self.model(gptq(w, L + "self_attn.q_proj."), {**CONFIG, "quantization_config": {
            "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}}, name="g")
        self.model({L + "self_attn.q_proj.weight": ("F32", w.shape, mk.encode("F32", w.values()))}, CONFIG)
        for source in ("g", "m"):
            self.ok("-q", *PLAIN, "--to", "int4", "--format", "awq", source, source + "o")
        self.assertEqual(*(mk.read_checkpoint(self.path(o)) for o in ("go", "mo")))
        self.source("BF16")
        self.ok("-q", *PLAIN, "--to", "int4", "--format", "awq", "m", "o")
        out = mk.read_checkpoint(self.path("o"))
        self.assertEqual({t[0] for n, t in out.items() if n.endswith(".scales")}, {"F16"})

    @unittest.skipIf(SANITIZED, "long, and unit_error_feedback has it")
    def test_calibrated(self):
        """What was solved for a row goes to its place."""
        model = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
        folder = self.path("m")
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        tensors = {n: ("F16", shape, mk.encode("F16", mk.decode(dtype, data)))
                   for n, (dtype, shape, data) in mk.read_checkpoint(model).items()}
        mk.write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
        moments.of_model(folder, self.path("h.safetensors"), two=True)
        for form in ("awq", "compressed-tensors"):
            self.ok("-q", *PLAIN, "--to", "int4", "--block-size", "32", "--format", form, "--hessians", "h.safetensors", "m", form)
            self.ok("-q", *PLAIN, "--to", "fp16", form, form + "-16")
        self.assertEqual(*(mk.read_checkpoint(self.path(form + "-16")) for form in ("awq", "compressed-tensors")))
        report = json.loads(self.ok("verify", "--json", "awq", "--against", "m"))
        self.assertTrue(report["ok"] and report["quantized"] > 0, report)

    def test_verified_inspected_unpacked(self):
        self.source()
        self.ok("-q", "--to", "int4", "--format", "awq", "m", "o")
        self.assertTrue(json.loads(self.ok("verify", "--json", "o"))["ok"])
        report = json.loads(self.ok("verify", "--json", "o", "--against", "m"))
        self.assertTrue(report["ok"], report)
        self.assertEqual((report["quantized"], report["equal"], report["source_digests"]), (5, 2, 7))
        self.ok("-q", "unpack", "o", "plain")
        self.ok("-q", *PLAIN, "--to", "int4", "--format", "awq", "m", "same")
        self.assertEqual(tree(self.path("plain"))["model.safetensors"], tree(self.path("same"))["model.safetensors"])
        rows = {t["name"]: t for t in json.loads(self.ok("inspect", "--json", "o"))["tensors"]}
        row = rows[L + "mlp.up_proj.qweight"]
        self.assertEqual((row["scheme"], row["logical_shape"], row["bits"], row["block_size"]), ("awq", [40, 512], 4, 128))

    def test_against_finds(self):
        """Another code, of a model that differs in one weight: named by its row and column in MODEL."""
        tensors = self.source()
        name = L + "self_attn.q_proj.weight"
        dtype, shape, data = tensors[name]
        at = 2 * (37 * 256 + 201)
        self.model({**tensors, name: (dtype, shape, data[:at] + struct.pack("<e", -0.02) + data[at + 2:])}, CONFIG,
                   name="other")
        self.ok("-q", *PLAIN, "--scale", "absmax", "--to", "int4", "--format", "awq", "other", "o")
        r = self.run_qconv("verify", "o", "--against", "m")
        self.assertEqual(r.returncode, 4)
        self.assertIn(b"row 37, column 201", r.stdout + r.stderr)

    @unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
    def test_continued(self):
        self.source()
        form = ["-q", "--to", "int4", "--format", "awq", "--threads", "1", "m"]
        self.ok(*form, "want")
        for call in ("write:3", "write:6", "write:12"):
            r = self.run_qconv(*form, "o", env=at_call(call, "/model", "kill -9 $PPID"))
            self.assertEqual(r.returncode, -signal.SIGKILL, r.stderr)
            self.ok(*form, "o")
            self.assertEqual(tree(self.path("o")), tree(self.path("want")), call)
            shutil.rmtree(self.path("o"))

    def test_refused(self):
        self.source(shapes={"mlp.up_proj": [36, 256], "mlp.down_proj": [64, 256]})
        self.fails(3, "--to", "int4", "--format", "awq", "m", "o", has=["mlp.up_proj", "36 outputs", "--keep"])
        self.assert_nothing("o")
        self.ok("-q", "--to", "int4", "--format", "awq", "--keep", "*up_proj*", "--split-fused", "m", "o")
        self.assertIn(L + "mlp.up_proj", self.json_of("o", "config.json")["quantization_config"]["modules_to_not_convert"])
        for to in ("int8", "int5", "nf4"):
            self.fails(2, "--to", to, "--format", "awq", "m", "p", has=["--format awq", "--to int4"])
        self.fails(2, "--to", "int4", "--format", "awq", "--block-size", "256", "m", "p", has=["128"])
        self.source()
        self.assertIn(b"was not tried", self.run_qconv("--to", "int4", "--format", "awq", "--for", "transformers", "--compress",
                                                       "none", "m", "p").stderr)

    def test_for_v100(self):
        self.source(shapes={**SHAPES, "self_attn.k_proj": [64, 256], "mlp.up_proj": [64, 512],
                            "self_attn.o_proj": [256, 256]})
        tp = ["--vram", "2xV100-16GB", "--tp", "2", "--context", "128"]
        config = {**CONFIG, "num_hidden_layers": 1, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2,
                  "head_dim": 32, "vocab_size": 16}
        with open(self.path("m", "config.json"), "w") as f:
            json.dump(config, f)
        plan = self.run_qconv("plan", "--incomplete", "--to", "int4", *tp, "--keep", "*down_proj*", "m")
        self.assertIn(b"vLLM does not start on a V100-16GB", plan.stderr)
        self.assertIn(b"--to int4 --format awq", plan.stderr)
        plan = self.run_qconv("plan", "--incomplete", "--to", "int4", "--format", "awq", *tp, "--keep", "*down_proj*", "m")
        self.assertNotIn(b"does not start", plan.stderr)
        self.assertIn(b"lmdeploy serve api_server OUT --backend turbomind --model-format awq --tp 2", plan.stdout, plan.stderr)


if __name__ == "__main__":
    unittest.main()
