"""--scale search and refit: scales of least squared error in files that every reader knows.

What the best scales are is tested beside the search (unit_scale_search.c); here that convert puts
them where they belong: the same bytes whatever does the work, codes that are the nearest ones for
the scales that a reader will have, and errors that are those of the written file."""
import json
import math
import os
import random
import shutil
import unittest

from output_case import OutputCase, PLAIN, tree
from qconv_case import ROOT
import make_checkpoint as mk
import numbers_oracle as oracle
import test_forms as forms

BUNDLED = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
L = "model.layers.0."
Q = L + "self_attn.q_proj.weight"
UP = L + "mlp.up_proj.weight"
METHODS = ["search", "refit"]
FORMS = [
    ["nf4"],
    ["nf4", "--block-size", "32"],
    ["nf4", "--no-double-quant"],
    ["nf4", "--block-size", "4096"],
    ["int8"],
    ["int8", "--block-size", "64"],
    ["int8", "--block-size", "128", "--no-double-quant"],
]
STATES = {"nf4": ".quant_state.bitsandbytes__nf4", "int8": ".quant_state.qconv__int8"}


def scales_of(out, name):
    """Block scales as a reader has them."""
    tensor = out[name + ".absmax"]
    if tensor[0] == "F32":
        return mk.decode("F32", tensor[2])
    state = [oracle.state_of(out[name + s]) for s in STATES.values() if name + s in out][0]
    table = mk.decode("F32", out[name + ".nested_quant_map"][2])
    groups = mk.decode("F32", out[name + ".nested_absmax"][2])
    return [oracle.f32(oracle.f32(table[c] * groups[i // oracle.GROUP]) + state["nested_offset"])
            for i, c in enumerate(tensor[2])]


def read_back(out, name, form, count, cols):
    """-> values in float32, as loaders dequantize; the scale of each."""
    size = int(form[form.index("--block-size") + 1]) if "--block-size" in form else 64
    if form[0] == "nf4":
        scales = scales_of(out, name)
        return (oracle.nf4_values(out[name][2], scales, size, count, "F32"),
                [scales[i // size] for i in range(count)])
    codes = mk.decode("I8", out[name][2])
    if "--block-size" in form:
        scales = scales_of(out, name)
        return (oracle.int8_block_values(codes, scales, size, "F32"),
                [scales[i // size] for i in range(count)])
    scb = mk.decode("F32", out[name[:-len("weight")] + "SCB"][2])
    return (oracle.int8_row_values(codes, scb, cols, "F32"),
            [scb[i // cols] for i in range(count)])


class Scale(OutputCase):
    def setUp(self):
        super().setUp()
        self.rng = random.Random(11)

    def random(self, dtype, shape):
        return dtype, shape, mk.random_bytes(dtype, shape, self.rng)

    def errors(self, out):
        """Relative squared error by name, as the manifest states it."""
        return {t["name"]: t["rel_mse"] for t in self.json_of(out, "qconv.json")["tensors"] if "rel_mse" in t}

    def check_errors(self, row, x, got, note):
        """Of the manifest, against values: as close as quant_ops.h promises."""
        errors = [abs(a - b) for a, b in zip(x, got)]
        root = math.sqrt(sum(e * e for e in errors) / sum(a * a for a in x))
        self.assertAlmostEqual(math.sqrt(row["rel_mse"]), root, delta=2.0 ** -22, msg=note)
        self.assertAlmostEqual(row["max_err"], max(errors), delta=1e-6 * max(errors), msg=note)
        self.assertAlmostEqual(errors[row["max_err_index"]], max(errors),
                               delta=1e-6 * max(errors), msg=note)

    def of_every_kind(self):
        """More than a step, odd ends, fewer weights than a block or a group, all dtypes."""
        return {UP: self.random("BF16", [131, 2101]),
                L + "mlp.down_proj.weight": self.random("F32", [19, 901]),
                Q: self.random("F16", [33, 129]),
                L + "self_attn.k_proj.weight": self.random("BF16", [3, 5]),
                L + "self_attn.o_proj.weight": self.random("F64", [300, 67]),
                "model.norm.weight": self.random("F32", [64])}


class Bytes(Scale):
    def test_frames_are_whole_groups(self):
        """A weight of several frames, which workers make side by side; its sample is shared."""
        some = self.rng.randbytes(1 << 16)
        codes = bytes(b & 0xBF for b in some) * 152  # FP8: quick to make, much to search
        shape = [3100, 3200]
        self.model({UP: ("F8_E4M3", shape, codes[:mk.numel(shape)]),
                    UP + "_scale_inv": ("F32", [25, 25], mk.encode("F32", [1e-3] * 625))},
                   config=forms.DEEPSEEK)
        for block in (64, 4096):
            args = ["--to", "int8", "--block-size", str(block), "--scale", "search", "m"]
            self.ok("-q", *PLAIN, *args, "one", "--force", "--threads", "1")
            self.ok("-q", *PLAIN, *args, "four", "--force", "--threads", "4")
            self.assert_same("one", "four", block)
            row = [t for t in self.json_of("one", "qconv.json")["tensors"] if t["name"] == UP][0]
            self.assertEqual(row["piece_bytes"] % (block * oracle.GROUP), 0)
            self.assertLess(row["piece_bytes"], mk.numel(shape))


class Files(Scale):
    def test_same_form_and_size(self):
        """Nothing but codes, scales and offsets differs from absmax."""
        self.model(self.of_every_kind())
        for form in FORMS:
            plain = self.convert("--force", "--to", *form, "--scale", "absmax", "m", "a")
            sizes = {n: len(b) for n, b in tree(self.path("a")).items() if n != "qconv.json"}
            for method in METHODS:
                found = self.convert("--force", "--to", *form, "--scale", method, "m", "s")
                self.assertEqual({n: t[:2] for n, t in found.items()},
                                 {n: t[:2] for n, t in plain.items()})
                self.assertEqual({n: len(b) for n, b in tree(self.path("s")).items()
                                  if n != "qconv.json"}, sizes)
                self.assertTrue(found[UP][2] != plain[UP][2], (form, method))
                for name, tensor in found.items():
                    if name.endswith(tuple(STATES.values())):
                        a, s = oracle.state_of(plain[name]), oracle.state_of(tensor)
                        a.pop("nested_offset", None)
                        if form[0] == "nf4":  # scales of both signs: there is no mean to take away
                            self.assertEqual(s.get("nested_offset", 0), 0)
                        s.pop("nested_offset", None)
                        self.assertEqual(a, s)
                    elif name.endswith(("quant_map", "norm.weight", "weight_format")):
                        self.assertEqual(tensor, plain[name], name)
                self.assertEqual(tree(self.path("a"))["config.json"],
                                 tree(self.path("s"))["config.json"])

    def test_errors_are_those_of_the_file(self):
        """And every code is the nearest one for the scale that a reader has."""
        tensors = {Q: self.random("F32", [70, 301]), L + "self_attn.k_proj.weight": (
            "F64", [3, 7], mk.encode("F64", [0.01 * i - 0.1 for i in range(21)]))}
        self.model(tensors)
        for k, form in enumerate(FORMS):
            out = self.convert("--force", "--to", *form, "--scale", METHODS[k % 2], "m", "o")
            for name, (dtype, shape, body) in tensors.items():
                x = oracle.floats(dtype, body)
                got, scale = read_back(out, name, form, len(x), shape[1])
                row = [t for t in self.json_of("o", "qconv.json")["tensors"] if t["name"] == name][0]
                self.check_errors(row, x, got, (form, name))
                self.check_nearest(x, got, scale, form)

    def check_nearest(self, x, got, scale, form):
        rows = form == ["int8"]
        for a, b, s in zip(x, got, scale):
            a = oracle.f16(a) if rows else a
            if form[0] == "nf4":
                least = min(abs(a - oracle.f32(oracle.f32(c) * s)) for c in oracle.NF4_CODE)
            else:
                at = max(-127, min(127, round(a / s * 127))) if s else 0
                least = abs(a - at * s / 127)
            self.assertLessEqual(abs(a - b), least + 1e-6 * abs(s), (form, a, b, s))

    def test_manifest_inspect_and_summary(self):
        self.model({Q: self.random("BF16", [64, 64]), UP: self.random("BF16", [64, 64])})
        for method in ["absmax"] + METHODS:
            args = ["--to", "nf4", "--keep", "*up_proj*", "--scale", method, "--force", "m", "o"]
            head = self.ok(*args).split("\n")[0]
            tail = "" if method == "absmax" else ", scale " + method
            self.assertEqual(head, "converted m -> o as nf4%s, compressed (.safetensors.zst)" % tail)
            self.assertEqual(json.loads(self.ok("--json", *args))["scale"], method)
            self.assertEqual(self.json_of("o", "qconv.json")["options"]["rules"],
                             ["keep *up_proj*"] + ([tail[2:]] if tail else []))
            self.assertEqual(self.json_of("o", "qconv.json")["version"], 1)
            made = self.ok("inspect", "o").split("\n")[1]
            self.assertIn("double quantization%s, zstd" % tail, made)
            facts = json.loads(self.ok("inspect", "--json", "o"))["manifest"]
            self.assertEqual((facts["scale"], facts["rules"]), (method, ["keep *up_proj*"]))
        self.ok("-q", "--force", "--to", "bf16", "m", "o")
        self.assertIsNone(json.loads(self.ok("inspect", "--json", "o"))["manifest"]["scale"])
        for to in ("bf16", "fp16", "keep"):
            self.usage("--to", to, "--scale", "search", "m", "p",
                       has="--scale does not go with --to %s, which quantizes nothing" % to)

    def test_back_to_16_bit(self):
        """qconv's own reader, from the compressed output."""
        values = self.random("BF16", [50, 130])
        self.model({Q: values})
        for form in FORMS:
            self.ok("-q", "--force", "--to", *form, "--scale", "search", "m", "z")
            out = self.convert("--force", "--to", *form, "--scale", "search", "m", "o")
            back = self.convert("--force", "--to", "bf16", "z", "b")
            got, _ = read_back(out, Q, form, 6500, 130)
            self.assertEqual(back, {Q: ("BF16", [50, 130], mk.encode("BF16", got))}, form)


class Errors(Scale):
    def test_less_than_absmax(self):
        """The bundled model: each weight, in every form; refit not above search."""
        for form in FORMS:
            found = {}
            for method in ["absmax"] + METHODS:
                self.ok("-q", "--force", *PLAIN, "--to", *form, "--scale", method, BUNDLED, "o")
                found[method] = self.errors("o")
            names = sorted(found["absmax"])
            self.assertGreater(len(names), 10)
            for n in names:
                self.assertLess(found["search"][n], found["absmax"][n], (form, n))
                self.assertLessEqual(found["refit"][n], found["search"][n] * (1 + 1e-9), (form, n))
            mean = {m: sum(e.values()) / len(e) for m, e in found.items()}
            if form == ["nf4"]:
                self.assertLess(mean["search"], 0.86 * mean["absmax"])

    def test_auto_measures_with_the_search(self):
        self.model({Q: self.random("BF16", [128, 128]), UP: self.random("BF16", [256, 128])},
                   config={"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "intermediate_size": 256, "vocab_size": 16})
        chosen = {}
        for method in ("absmax", "search"):
            r = json.loads(self.ok("--json", "--force", "--to", "auto", "--schemes", "nf4",
                                   "--vram", "4GB", "--context", "16", "--scale", method,
                                   "--explain", "--incomplete", *PLAIN, "m", "o"))
            chosen[method] = {g["name"]: g["relative_errors"] for g in r["auto"]["groups"]}
            for name, e in self.errors("o").items():
                group = [g for g in chosen[method] if g in name or name.startswith(g)] or \
                    list(chosen[method])
                self.assertAlmostEqual(chosen[method][group[0]]["nf4"], e, delta=0.03 * e)
        for name, e in chosen["search"].items():
            self.assertLess(e["nf4"], chosen["absmax"][name]["nf4"])


class Sources(Scale):
    """Where weights come from does not change what is made of them."""

    def pair(self, one, one_config, other, other_config, rename=str, skip=()):
        for form in (["nf4"], ["nf4", "--no-double-quant"], ["int8"],
                     ["int8", "--block-size", "32"]):
            got = []
            for i, (tensors, config) in enumerate([(one, one_config), (other, other_config)]):
                shutil.rmtree(self.path("m%d" % i), ignore_errors=True)
                self.model(tensors, config, name="m%d" % i)
                out = self.convert("--force", "--to", *form, "--scale", "search", "m%d" % i, "o")
                got.append({(rename(n) if i else n): t[2] for n, t in out.items()
                            if ".quant_state." not in n and not n.endswith(skip)})
                offsets = [oracle.state_of(t).get("nested_offset") for n, t in sorted(out.items())
                           if ".quant_state." in n]
                got.append(offsets)
            self.assertEqual(got[0], got[2], form)
            self.assertEqual(got[1], got[3], form)

    def test_conv1d(self):
        """Stored transposed: as the turned weight of a Linear."""
        rows, cols = 259, 70
        values = mk.decode("F32", self.random("F32", [rows, cols])[2])
        turned = [values[r * cols + c] for c in range(cols) for r in range(rows)]
        self.pair({"h.0.attn.c_attn.weight": ("F32", [cols, rows], mk.encode("F32", turned))},
                  {"model_type": "gpt2"},
                  {Q: ("F32", [rows, cols], mk.encode("F32", values))}, {"model_type": "llama"},
                  lambda n: n.replace(L + "self_attn.q_proj", "h.0.attn.c_attn"))

    def test_fp8(self):
        tensors, values = forms.fp8(self.rng, Q, [130, 200], [128, 128])
        self.pair(tensors, forms.DEEPSEEK, {Q: ("F32", [130, 200], mk.encode("F32", values))},
                  {"model_type": "llama"})

    def test_mxfp4(self):
        """A stack of experts, quantized anew: groups run across experts, as blocks do not."""
        name = L + "mlp.experts.down_proj"
        tensors, values = forms.mxfp4(self.rng, name, 3, 50, 96)
        self.model(tensors, {"model_type": "gpt_oss"})
        for form in (["nf4"], ["int8", "--block-size", "32"], ["int8"]):
            out = self.convert("--force", "--requantize", "--to", *form, "--scale", "search", "m",
                               "o")
            if form == ["int8"]:
                scb = mk.decode("F32", out[name + ".SCB"][2])
                got = oracle.int8_row_values(mk.decode("I8", out[name][2]), scb, 96, "F32")
            else:
                got, _ = read_back(out, name, form, len(values), 96)
            row = [t for t in self.json_of("o", "qconv.json")["tensors"] if "rel_mse" in t][0]
            self.check_errors(row, values, got, form)

    def test_not_finite(self):
        """The sentence of absmax, wherever the weight lies, sampled or not."""
        shape = [700, 131]
        for value, dtype in ((float("nan"), "F32"), (float("inf"), "BF16"), (1e300, "F64")):
            for at in (0, 40000, mk.numel(shape) - 1):
                values = [0.01 * (i % 7 - 3) for i in range(mk.numel(shape))]
                values[at] = value
                shutil.rmtree(self.path("m"), ignore_errors=True)
                self.model({Q: (dtype, shape, mk.encode(dtype, values))})
                for form in (["nf4"], ["int8"], ["int8", "--block-size", "64"]):
                    lines = [self.fails(3, "-q", "--to", *form, "--scale", method, "--threads",
                                        "1", "m", "o", has="row %d, column %d " % divmod(at, 131))
                             for method in ["absmax"] + METHODS]
                    self.assertEqual(len(set(lines)), 1, lines)
                    self.assert_nothing("o")


class Straddling(Scale):
    """A reader that takes the scale of another block makes more of signs than of sizes."""

    def test_rows_that_are_no_whole_blocks(self):
        said = "rows of 96 weights are not whole blocks of 64"
        for form, cols, warned in ((["nf4"], 96, 1), (["nf4", "--scale", "refit"], 96, 1),
                                   (["nf4", "--scale", "absmax"], 96, 0), (["nf4"], 128, 0),
                                   (["nf4", "--block-size", "32"], 96, 0), (["nf4"], 90, 0),
                                   (["int8"], 96, 0)):
            self.model({Q: self.random("BF16", [64, cols]), UP: self.random("BF16", [64, cols])})
            r = self.run_qconv("--to", *form, "m", "o")
            self.assertEqual(r.returncode, 0, r.stderr)
            line = r.stderr.decode()
            self.assertEqual(line.count(said), warned, (form, cols, line))
            if warned:
                self.assertIn("and others", line)
            shutil.rmtree(self.path("o"))


if __name__ == "__main__":
    unittest.main()
