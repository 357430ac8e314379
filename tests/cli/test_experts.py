"""`--experts stacked|separate`: the two forms of a mixture, which have the same codes, scales and weights."""
import json
import os
import random
import signal
import struct
import unittest

from fault_case import FaultCase
from output_case import PLAIN, tree_digest
import make_checkpoint as mk
import numbers_oracle as oracle
import test_forms

FAMILIES = [("mixtral", "block_sparse_moe.experts", "w1", "w3", "w2"),
            ("qwen3_moe", "mlp.experts", "gate_proj", "up_proj", "down_proj")]
FORMS = {"nf4": ["--to", "nf4", "--no-double-quant"], "absmax": ["--to", "nf4", "--no-double-quant", "--scale", "absmax"],
         "int8": ["--to", "int8"], "bf16": ["--to", "bf16"]}
STATE = ".quant_state.bitsandbytes__nf4"
UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


class Mixture(test_forms.Forms):
    layers = test_forms.Fused.layers
    scale = None

    def made(self, out, *arguments):
        self.ok("-q", "--force", "--compress", "none", *arguments, out)
        return mk.read_checkpoint(self.path(out))


class Experts(Mixture):
    def both(self, family=FAMILIES[0], **shapes):
        kind, *parts = family
        released, fused = self.layers(*parts, **shapes)
        config = {"model_type": kind, "num_local_experts": shapes.get("experts", 3), "torch_dtype": "bfloat16"}
        self.model(released, config, name="r", shard_bytes=60000)
        self.model(fused, config, name="f", shard_bytes=60000)
        return released, fused

    def test_each_becomes_the_other(self):
        for family in FAMILIES:
            self.both(family)
            for form, options in FORMS.items():
                separate = self.made("separate", *options, "--experts", "separate", "r")
                stacked = self.made("stacked", *options, "--experts", "stacked", "r")
                self.assertEqual(self.made("s", *options, "--experts", "stacked", "f"), stacked, form)
                if form != "bf16":
                    self.assertEqual(self.made("s", *options, "r"), separate, form)
                self.assertEqual(self.made("there", "--to", "keep", "--experts", "stacked", "separate"), stacked, form)
                self.assertEqual(self.made("back", "--to", "keep", "--experts", "separate", "there"), separate, form)
                self.assertEqual(self.made("k", "--to", "keep", "there"), stacked, form)
                self.assertLess(len(stacked), len(separate))
                for out in ("separate", "stacked", "there", "back"):
                    for model in ("r", "f"):
                        self.ok("verify", "-q", out, "--against", model)
                if form != "bf16":
                    for out in ("separate", "stacked"):
                        r = self.run_qconv("validate", out, "--against", "r")
                        self.assertEqual(r.returncode, 0, r.stderr)
                        self.assertNotIn(b"not compared", r.stdout + r.stderr)
                for out, source in (("there", "separate"), ("back", "stacked")):
                    self.ok("verify", "-q", out, "--against", source)

    def test_layout(self):
        """The codes of the experts one after the other, gate before up, each with its own blocks."""
        experts, inner, hidden = 3, 64, 96
        released, fused = self.both()
        out = self.made("o", *FORMS["absmax"], "--experts", "stacked", "r")
        for name, rows, cols in ((UP, 2 * inner, hidden), (DOWN, hidden, inner)):
            codes, scales = oracle.nf4(mk.decode("BF16", fused[name][2]), 64)
            self.assertEqual(out[name], ("U8", [len(codes), 1], codes))
            self.assertEqual(out[name + ".absmax"], ("F32", [len(scales)], struct.pack("<%df" % len(scales), *scales)))
            state = oracle.state_of(out[name + STATE])
            self.assertEqual((state["shape"], state["dtype"]), ([experts, rows, cols], "bfloat16"))
        self.assertEqual(out["model.layers.1.mlp.gate.weight"], released["model.layers.1.block_sparse_moe.gate.weight"])
        out = self.made("o", "--to", "int8", "--scale", "absmax", "--experts", "stacked", "r")
        self.assertEqual(out[UP][:2], ("I8", [experts * 2 * inner * hidden, 1]))  # a loader takes no codes for weights
        self.assertEqual(out[UP + ".SCB"][:2], ("F32", [experts, 2 * inner]))

    def test_decoded(self):
        """Of either form --to bf16 makes the released names, and the same weights."""
        self.both()
        for form in ("nf4", "int8"):
            self.made("separate", *FORMS[form], "r")
            self.made("stacked", *FORMS[form], "--experts", "stacked", "r")
            wanted = self.made("a", "--to", "bf16", "separate")
            self.assertEqual(self.made("b", "--to", "bf16", "stacked"), wanted)
            stacked = self.made("c", "--to", "bf16", "--experts", "stacked", "stacked")
            self.assertEqual(stacked[UP][1], [3, 128, 96])
            self.assertEqual(self.made("d", "--to", "bf16", "--experts", "separate", "c"), wanted)
            for out, source in (("a", "separate"), ("b", "stacked"), ("c", "stacked")):
                self.ok("verify", "-q", out, "--against", source)

    def test_double_quantization(self):
        """A stack's nested groups end with a matrix only where it has whole ones; separate offsets are not joined."""
        self.both(inner=128, hidden=128)  # 256 scales a matrix
        self.made("stacked", "--to", "nf4", "--experts", "stacked", "r")
        out = self.made("separate", "--to", "keep", "--experts", "separate", "stacked")
        self.ok("verify", "-q", "separate", "--against", "r")
        self.assertEqual(out["model.layers.1.block_sparse_moe.experts.2.w2.weight.nested_absmax"][1], [1])
        self.assertEqual(self.made("a", "--to", "bf16", "stacked"), self.made("b", "--to", "bf16", "separate"))
        self.fails(3, "--to", "keep", "--experts", "stacked", "separate", "x",
                   has=["one offset", "--no-double-quant"])
        self.both()
        self.made("stacked", "--to", "nf4", "--experts", "stacked", "r")
        self.fails(3, "--to", "keep", "--experts", "separate", "stacked", "x",
                   has=["96 scales, which are no whole groups of 256", "--no-double-quant"])
        self.ok("verify", "-q", "stacked", "--against", "r")

    def test_said(self):
        """What loads the output, in texts and in JSON; and what plan counts."""
        self.both()
        for experts, loads in (("stacked", "transformers 5 with bitsandbytes after import qconv"),
                               ("separate", "transformers 4 with bitsandbytes (5 after import qconv)")):
            r = self.run_qconv("--to", "nf4", "--no-double-quant", "--compress", "none", "--force", "--experts", experts,
                               "r", experts)
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertIn("  loads in  %s, qconv.load" % loads, r.stdout.decode())
            self.assertIn("import qconv  # transformers 5 needs it for experts\n", r.stdout.decode())
            planned = json.loads(self.ok("plan", "--json", "--to", "nf4", "--no-double-quant", "--experts", experts, "r"))
            shown = json.loads(self.ok("inspect", "--json", experts))
            self.assertEqual(planned["weight_bytes"], sum(t["bytes"] for t in shown["tensors"]))
        for engine in ("transformers", "vllm", "vllm-qconv"):
            plain = ["--compress", "none", "--no-double-quant"]
            r = self.run_qconv("--to", "nf4", *plain, "--experts", "stacked", "--for", engine, "r", "x")
            self.assertEqual(r.returncode, 2)
            self.assertRegex(r.stderr.decode(), r"stacked in one tensor \('.*'\): .*--experts separate")
            r = self.run_qconv("inspect", "--for", engine, "stacked")
            self.assertEqual(r.returncode, 4)
            self.assertIn("--to keep --experts separate", r.stdout.decode())

    def test_refused(self):
        released, _ = self.both()
        for more in (["--to", "auto", "--vram", "1GB"], ["--to", "int4"], ["--to", "int8", "--format", "compressed-tensors"]):
            self.fails(2, *more, "--experts", "stacked", "r", "x", has=["--experts stacked"])
        self.fails(3, "--to", "nf4", "--experts", "stacked", "--block-size", "4096", "r", "x", has=["whole blocks of 4096"])
        config = {"model_type": "mixtral"}
        stem = "model.layers.0.block_sparse_moe.experts."
        odd = dict(released)
        del odd[stem + "1.w3.weight"]
        self.model(odd, config, name="odd")
        self.fails(3, "--to", "nf4", "--experts", "stacked", "odd", "x", has=["number 1", "not all alike"])
        odd = {**released, stem + "2.w1.bias": ("BF16", [64], bytes(128))}
        self.model(odd, config, name="odd")
        self.fails(3, "--to", "nf4", "--experts", "stacked", "odd", "x", has=["2.w1.bias", "no place for it"])
        self.made("mixed", "--to", "nf4", "--no-double-quant", "--split-fused", "--keep", stem + "1.w2.weight", "r")
        self.fails(3, "--to", "keep", "--experts", "stacked", "mixed", "x", has=["another form or shape"])
        self.model(released, {"model_type": "jamba"}, name="other")
        self.fails(3, "--to", "nf4", "--experts", "stacked", "other", "x", has=["not known for this model type"])

    def test_published_stacks(self):
        """Granite's stacks have no other form: kept in 16 bits, with the option's name, or quantized by it."""
        moe = "model.layers.0.block_sparse_moe."
        up, down = moe + "input_linear.weight", moe + "output_linear.weight"
        tensors = {up: ("BF16", [3, 128, 96], mk.random_bytes("BF16", [3, 128, 96], self.rng)),
                   down: ("BF16", [3, 96, 64], mk.random_bytes("BF16", [3, 96, 64], self.rng)),
                   "model.layers.0.self_attn.q_proj.weight": ("BF16", [96, 96], mk.random_bytes("BF16", [96, 96], self.rng))}
        self.model(tensors, {"model_type": "granitemoe", "num_local_experts": 3, "torch_dtype": "bfloat16"})
        r = self.run_qconv("--to", "nf4", *PLAIN, "m", "kept")
        said = r.stderr.decode()
        self.assertEqual(r.returncode, 4)
        self.assertIn("2 stacks of experts", said)
        self.assertIn("--experts stacked quantizes them to nf4 and int8", said)
        out = self.made("o", *FORMS["absmax"], "--experts", "stacked", "m")
        codes, _ = oracle.nf4(mk.decode("BF16", tensors[up][2]), 64)
        self.assertEqual(out[up], ("U8", [len(codes), 1], codes))
        self.assertEqual(oracle.state_of(out[up + STATE])["shape"], [3, 128, 96])
        self.ok("verify", "-q", "o", "--against", "m")
        out = self.made("o8", "--to", "int8", "--experts", "stacked", "m")
        self.assertEqual(out[moe + "input_linear.SCB"][:2], ("F32", [3, 128]))
        self.ok("verify", "-q", "o8", "--against", "m")
        for form in ("o", "o8"):
            again = self.made("again", "--to", "bf16", form)
            self.assertEqual({n: t[:2] for n, t in again.items()}, {n: t[:2] for n, t in tensors.items()})
            self.ok("verify", "-q", "again", "--against", form)

    def test_stacks_in_fp8(self):
        """--experts stacked does not reach stacks in FP8, whose scales are stacks of floats that look like experts."""
        tensors = {"model.layers.0.mlp.experts.%s_proj%s" % (name, tail): (dtype, shape, bytes(struct.calcsize(kind) * size))
                   for name, out in (("gate_up", 256), ("down", 128))
                   for tail, dtype, kind, shape, size in (("", "F8_E4M3", "b", [2, out, 128], 2 * out * 128),
                                                          ("_scale_inv", "F32", "f", [2, out // 128, 1], 2 * out // 128))}
        config = {"model_type": "qwen3_moe", "num_experts": 2,
                  "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        self.model(tensors, config)
        r = self.run_qconv("--to", "nf4", "--experts", "stacked", "m", "x")
        self.assertEqual(r.returncode, 3, r.stderr)
        self.assertIn(b"no weight to quantize", r.stderr)

    def test_kept(self):
        """Rules name a stack as they name any weight."""
        _, fused = self.both()
        out = self.made("o", "--to", "nf4", "--experts", "stacked", "--keep", "*layers.1.mlp.experts.*", "r")
        self.assertEqual(out[UP], fused[UP])
        self.assertIn(UP.replace(".1.", ".0.") + STATE, out)


def turned(shape, body):
    """A stack of matrices of 16 bits, each the other way round."""
    experts, rows, cols = shape
    out = bytearray()
    for e in range(experts):
        matrix = memoryview(body)[2 * e * rows * cols:2 * (e + 1) * rows * cols].cast("H")
        out += b"".join(bytes(matrix[c::cols]) for c in range(cols))
    return "BF16", [experts, cols, rows], bytes(out)


class Turned(Mixture):
    """16-bit stacks as [experts, in, out]: the codes are those of the same experts one by one, and go back to stacks."""

    def both(self, kind="llama4_text", **shapes):
        path = "feed_forward.experts" if kind == "llama4_text" else "mlp.experts"
        released, fused = self.layers(path, "gate_proj", "up_proj", "down_proj", **shapes)
        fused = {name.replace("mlp.", path.split(".")[0] + ".") if "experts" in name else name:
                 turned(*t[1:]) if "experts" in name else t for name, t in fused.items()}
        self.config = {"model_type": kind, "num_local_experts": 3, "num_experts": 3, "torch_dtype": "bfloat16"}
        other = {"model.layers.0.self_attn.q_proj.weight": ("BF16", [96, 96], mk.random_bytes("BF16", [96, 96], self.rng))}
        self.model({**released, **other}, self.config, name="r", shard_bytes=60000)
        self.model({**fused, **other}, self.config, name="f", shard_bytes=60000)
        return released, fused

    def test_each_becomes_the_other(self):
        for kind in ("llama4_text", "qwen3_vl_moe"):
            released, fused = self.both(kind)
            for form in (FORMS["nf4"], ["--to", "nf4"], ["--to", "int8"], ["--to", "int4", "--block-size", "32"],
                         ["--to", "int8", "--format", "compressed-tensors"], ["--to", "int8", "--block-size", "64"]):
                out = self.made("o", *form, "f")
                self.assertEqual(out, self.made("separate", *form, "r"), form)
                self.ok("verify", "-q", "o", "--against", "f")
                back = self.made("back", "--to", "bf16", "o")
                self.assertEqual({n: t[:2] for n, t in back.items() if "experts" in n},
                                 {n: t[:2] for n, t in fused.items() if "experts" in n})
                one = self.made("one", "--to", "bf16", "--experts", "separate", "o")
                for name, (dtype, shape, body) in self.stacks(one).items():
                    self.assertEqual(back[name], turned(shape, body), name)
                for source in ("o", "f") if "int4" not in form else ("o",):
                    self.ok("verify", "-q", "back" if source == "o" else "o", "--against", source)
            self.assertEqual(self.made("a", "--to", "bf16", "r"), self.made("b", "--to", "bf16", "f"))
            self.ok("verify", "-q", "a", "--against", "r")

    def test_a_matrix_that_is_missing(self):
        """No stack is made of experts of which one, or all, lack a matrix."""
        released, _ = self.both()
        for left_out in (".experts.0.down_proj", ".experts.2.up_proj", "down_proj"):
            self.model({n: t for n, t in released.items() if left_out not in n}, self.config, name="q")
            self.fails(3, "--to", "bf16", "--incomplete", "q", "x", has=["not all alike"])

    def stacks(self, separate):
        """The stacks, [experts, out, in], of which these are the experts."""
        out = {}
        for layer in (0, 1):
            path = next(n for n in separate if "layers.%d." % layer in n and ".experts.0." in n).partition("0.gate")[0]
            path = path.partition("0.down")[0]
            each = [[separate["%s%d.%s_proj.weight" % (path, e, m)] for m in ("gate", "up", "down")] for e in range(3)]
            inner, hidden = each[0][0][1]
            out[path + "gate_up_proj"] = ("BF16", [3, 2 * inner, hidden], b"".join(g[2] + u[2] for g, u, _ in each))
            out[path + "down_proj"] = ("BF16", [3, hidden, inner], b"".join(d[2] for _, _, d in each))
        return out

    def test_tiles(self):
        """Matrices of several tiles and frames, read in parts of columns or in whole ones, by one thread and by three; the
        source also compressed."""
        for form, shapes in (("nf4", {"inner": 4224, "hidden": 640}), ("int8", {"inner": 192, "hidden": 11008})):
            self.both(experts=1, layers=(0,), **shapes)
            wanted = self.made("wanted", "--to", form, "r")
            self.ok("-q", "--force", "--to", "keep", "f", "z")
            for threads, source in (("1", "f"), ("3", "f"), ("3", "z")):
                self.assertEqual(self.made("o", "--to", form, "--threads", threads, source), wanted, shapes)
            back = [self.made("back", "--to", "bf16", "--threads", threads, "o") for threads in ("1", "3")]
            self.assertEqual(*back)
            one = self.made("one", "--to", "bf16", "--experts", "separate", "o")
            path = "model.layers.0.feed_forward.experts."
            gate, up, down = (one["%s0.%s_proj.weight" % (path, m)] for m in ("gate", "up", "down"))
            self.assertEqual(back[0][path + "down_proj"], turned([1, *down[1]], down[2]))
            self.assertEqual(back[0][path + "gate_up_proj"],
                             turned([1, 2 * shapes["inner"], shapes["hidden"]], gate[2] + up[2]))

    def test_plan(self):
        """Experts of a model that is known by its id are counted as codes: 4.5 bits of each, and 4 GB that stay."""
        planned = json.loads(self.ok("plan", "--json", "--to", "nf4", "--no-double-quant", "Llama-4-Scout-17B-16E-Instruct"))
        self.assertAlmostEqual(planned["weight_bytes"] / (108641793536 * 4.5 / 8), 1, delta=0.06)

    def test_alternating_rows(self):
        """gpt-oss': gate and up alternate, so there are stacks alone, with and without the option."""
        _, fused = self.both("gpt_oss")
        for more in (["--to", "nf4", "--experts", "separate"], ["--to", "int4", "--block-size", "32"]):
            r = self.run_qconv(*more, *PLAIN, "--force", "f", "kept")
            self.assertEqual(r.returncode, 4)
            self.assertIn("--experts stacked quantizes them to nf4 and int8", r.stderr.decode())
            self.assertEqual(mk.read_checkpoint(self.path("kept"))[UP], fused[UP])
        planned = json.loads(self.ok("plan", "--json", "--no-double-quant", "f"))
        straight = {name: turned(*t[1:]) for name, t in fused.items() if "experts" in name}
        for form in ("absmax", "nf4"):
            out = self.made("o", *FORMS[form], "f")
            self.assertEqual(self.made("s", *FORMS[form], "--experts", "stacked", "f"), out)
            self.assertEqual(planned["weight_bytes"], sum(len(t[2]) for t in out.values()))
            self.assertEqual(oracle.state_of(out[UP + STATE])["shape"], [3, 128, 96])
            self.ok("verify", "-q", "o", "--against", "f")
            r = self.run_qconv("validate", "o", "--against", "f")
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertNotIn(b"not compared", r.stdout + r.stderr)
        codes, scales = oracle.nf4(mk.decode("BF16", straight[DOWN][2]), 64)
        out = self.made("o", *FORMS["absmax"], "--experts", "stacked", "f")
        self.assertEqual(out[DOWN], ("U8", [len(codes), 1], codes))
        self.assertEqual(out[DOWN + ".absmax"], ("F32", [len(scales)], struct.pack("<%df" % len(scales), *scales)))
        back = self.made("back", "--to", "bf16", "o")
        self.assertEqual(back[DOWN][1], fused[DOWN][1])
        self.ok("verify", "-q", "back", "--against", "o")
        kept = self.made("k", "--to", "nf4", "--experts", "stacked", "--keep", "*layers.1.mlp.experts.*", "f")
        self.assertEqual(kept[UP], fused[UP])

    def test_refused(self):
        _, fused = self.both()
        self.fails(3, "--to", "nf4", "--experts", "stacked", "f", "x", has=["no place for a stack of codes", "--to bf16"])
        self.made("o", "--to", "nf4", "--keep", "*q_proj*", "f")
        self.fails(3, "--to", "bf16", "o", "x", has=["nothing but experts is quantized", "--experts separate"])
        self.both("qwen3_vl_moe", inner=96)
        r = self.run_qconv("--to", "nf4", *PLAIN, "f", "square")
        self.assertEqual(r.returncode, 4)
        self.assertIn("not known for this model type and shape", r.stderr.decode())
        self.made("o", "--to", "nf4", "r")
        self.fails(3, "--to", "bf16", "o", "x", has=["square", "--experts separate"])
        large = {name: ("BF16", t[1], b"\x80\x7e" * (len(t[2]) // 2)) if "down" in name else t for name, t in fused.items()}
        self.both()
        self.model({**large, "model.layers.0.self_attn.q_proj.weight": ("BF16", [96, 96], bytes(96 * 96 * 2))},
                   self.config, name="large")
        self.made("o", "--to", "nf4", "large")
        self.fails(3, "-q", "--to", "fp16", "o", "x", has=["down_proj.weight': the weight at row", "too large for F16; use --to bf16"])


class Continued(FaultCase):
    """Experts of a stack lie in several files of the source. A conversion that dies goes on to the same bytes."""

    def command(self, form, threads=2):
        return [*FORMS[form], *PLAIN, "--experts", "stacked", "--threads", str(threads), self.model_of(form), "o"]

    def model_of(self, form):
        if not os.path.isdir(self.path("m")):
            rng = random.Random(5)
            tensors = {"model.embed_tokens.weight": ("BF16", [64, 256], bytes(64 * 512))}
            for layer in range(3):
                for e in range(4):
                    for matrix in ("gate_proj", "up_proj", "down_proj"):
                        tensors["model.layers.%d.mlp.experts.%d.%s.weight" % (layer, e, matrix)] = (
                            "BF16", [256, 256], mk.random_bytes("BF16", [256, 256], rng))
            mk.write_checkpoint(self.path("m"), tensors, config={"model_type": "qwen3_moe"}, shard_bytes=400000)
        return self.path("m")

    def test_killed(self):
        for form in ("nf4", "int8"):
            went_on = 0
            wanted = self.wanted(form)[0]
            for moment in self.moments(form, 6, 7):
                r = self.faulty("-q", *self.command(form), signal="%d:9" % moment)
                self.assertIn(r.returncode, (0, -signal.SIGKILL), r.stderr)
                r = self.faulty("-q", "--json", *self.command(form))
                self.assertEqual((r.returncode, r.stderr), (0, b""))
                self.assertEqual(tree_digest(self.path("o")), wanted, (form, moment))
                went_on += json.loads(r.stdout).get("continued") is not None
                os.rename(self.path("o"), self.path("old-%s-%d" % (form, moment)))
            self.assertGreater(went_on, 0)

    def test_other_options(self):
        """The other form is another output, and does not go on with this one."""
        moment = self.moments("nf4", 4, 3)[2]
        r = self.faulty("-q", *self.command("nf4"), signal="%d:9" % moment)
        self.assertEqual(r.returncode, -signal.SIGKILL)
        changed = [a if a != "stacked" else "separate" for a in self.command("nf4")]
        r = self.run_qconv("-q", *changed)
        self.assertEqual(r.returncode, 2, r.stderr)
        self.assertIn("--experts", r.stderr.decode())


if __name__ == "__main__":
    unittest.main()
