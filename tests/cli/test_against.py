"""qconv verify OUT --against MODEL: what is MODEL passes in every form; what is not is exit 4, named,
with the tensor of MODEL that fits instead where there is one."""
import json
import os
import random
import re
import shutil
import struct
import unittest

from output_case import OutputCase, PLAIN
from qconv_case import ROOT
import make_checkpoint as mk

L = "model.layers.%d."
Q, K, O = "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.o_proj.weight"
UP = "mlp.up_proj.weight"
NORM = "input_layernorm.weight"
CONFIG = {"model_type": "llama", "num_hidden_layers": 3}
FORMS = [["--to", "nf4"], ["--to", "nf4", "--no-double-quant"], ["--to", "nf4", "--block-size", "32"],
         ["--to", "nf4", "--block-size", "4096"], ["--to", "int8"],
         ["--to", "int8", "--block-size", "64"],
         ["--to", "int8", "--block-size", "1024", "--no-double-quant"], ["--to", "fp16"],
         ["--to", "bf16"], ["--to", "keep"], ["--to", "nf4", "--rest", "fp16"],
         ["--to", "nf4", "--keep", "*.q_proj.*"]]


def tensors(seed, dtype="BF16"):
    rng = random.Random(seed)
    t = {"model.embed_tokens.weight": ("BF16", [64, 128])}
    for i in range(3):
        for name in (Q, K, O):
            t[L % i + name] = (dtype, [128, 128])
        t[L % i + UP] = (dtype, [192, 128])
        t[L % i + NORM] = ("BF16", [128])
    t["model.norm.weight"] = ("F32", [128])
    return {n: (d, s, mk.random_bytes(d, s, rng)) for n, (d, s) in t.items()}


def transposed(t):
    dtype, (rows, cols), body = t
    each = mk.BITS[dtype] // 8
    return dtype, [cols, rows], b"".join(body[(r * cols + c) * each:][:each]
                                         for c in range(cols) for r in range(rows))


class Against(OutputCase):
    def setUp(self):
        super().setUp()
        self.source = tensors(1)
        self.model(self.source, config=CONFIG)

    def is_model(self, *args, out="o", against="m"):
        answer = json.loads(self.ok("verify", "--json", *args, out, "--against", against))
        self.assertTrue(answer["ok"])
        self.assertEqual((answer["problems"], answer["first_problem"]), (0, None))
        return answer

    def is_not(self, *has, out="o", against="m"):
        """Exit 4 in one line that names what is in `has`; the JSON agrees."""
        line = self.fails(4, "verify", "-q", out, "--against", against, has=has)
        r = self.run_qconv("verify", "--json", out, "--against", against)
        self.assertEqual(r.returncode, 4)
        answer = json.loads(r.stdout)
        self.assertFalse(answer["ok"])
        self.assertGreater(answer["problems"], 0)
        return answer, line

    def bare(self, *form, source=None):
        """b: the output without its manifest, as another program would have written it."""
        if source is not None:
            self.model(source, config=CONFIG, name="s")
        shutil.rmtree(self.path("b"), ignore_errors=True)
        self.ok("-q", *form, *PLAIN, "s" if source is not None else "m", "b")
        os.remove(self.path("b", "qconv.json"))
        return mk.read_checkpoint(self.path("b"))

    def row(self, answer, name):
        return next(r for r in answer["rows"] if r["name"] == name)

    def faulty(self, answer):
        return sorted(r["name"] for r in answer["rows"] if r["fault"])


class Floods(Against):
    def test_of_another_model(self):
        """Ten lines of what is missing, the first fault said once; all with -v."""
        more = {"extra.%d.weight" % i: t for i, t in enumerate([self.source[L % 0 + NORM]] * 102)}
        self.model({**self.source, **more}, config=CONFIG, name="other")
        self.ok("-q", "--to", "nf4", "m", "o")
        r = self.run_qconv("verify", "o", "--against", "other")
        text, line = r.stdout.decode(), r.stderr.decode()
        self.assertEqual((r.returncode, text.count("not in OUT: "), line.count("\n")), (4, 10, 1))
        self.assertIn("and 92 more (all with -v)\n", text)
        self.assertIn("o: NOT other: 102 faults\n", text)
        self.assertIn("extra.0.weight", line)
        text = self.run_qconv("verify", "-v", "o", "--against", "other").stdout.decode()
        self.assertEqual((text.count("not in OUT: "), "all with -v" in text), (102, False))


class Whole(Against):
    def test_every_form(self):
        searched = [f + ["--scale", "search"] for f in FORMS if f[1] in ("nf4", "int8")]
        for form in FORMS + searched:
            self.scale = "absmax" if form in FORMS else None
            self.ok("-q", *form, "m", "o")
            self.ok("-q", "unpack", "o", "u")
            one = self.is_model()
            self.assertTrue(one["manifest"])
            self.assertEqual(one["source_digests"], len(one["rows"]), form)
            self.assertEqual(self.is_model(out="u")["rows"], one["rows"], form)
            os.remove(self.path("u", "qconv.json"))
            bare = self.is_model(out="u")
            self.assertEqual((bare["manifest"], bare["source_digests"]), (False, 0))
            self.assertEqual(bare["rows"], one["rows"], form)
            kinds = {k: sum(r["kind"] == k for r in one["rows"]) for k in
                     ("equal", "cast", "quantized")}
            self.assertEqual(kinds, {k: one[k] for k in kinds})
            for r in one["rows"]:
                if r["kind"] != "quantized":
                    continue
                self.assertEqual(r["misplaced"], 0, r)
                if form in searched:
                    self.assertLess(r["ratio"], 1.03, (form, r))
                else:
                    self.assertEqual(r["ratio"], 1.0, (form, r))
            for name in "ou":
                shutil.rmtree(self.path(name))

    def test_types(self):
        for dtype in ("F64", "F32", "F16"):
            source = tensors(2, dtype)
            self.model(source, config=CONFIG, name="t")
            for form in (["--to", "nf4"], ["--to", "int8"], ["--to", "int8", "--block-size", "64"],
                         ["--to", "bf16"]):
                self.ok("-q", *form, "t", "o")
                self.is_model(against="t")
                os.remove(self.path("o", "qconv.json"))
                shutil.rmtree(self.path("o"))

    def test_cast_before_quantizing(self):
        """A loader casts F32 to what it computes in, and the state says so."""
        wide = tensors(3, "F32")
        narrow = {n: t if t[0] != "F32" or "norm" in n else
                  ("BF16", t[1], mk.encode("BF16", mk.decode("F32", t[2]))) for n, t in wide.items()}
        self.model(wide, config=CONFIG)
        self.bare("--to", "nf4", source=narrow)
        self.is_model(out="b")
        self.bare("--to", "int8", source=narrow)
        self.fails(4, "verify", "-q", "b", "--against", "m")

    def test_conv1d(self):
        rng = random.Random(4)
        name = "h.0.attn.c_attn.weight"
        source = {name: ("F32", [96, 288], mk.random_bytes("F32", [96, 288], rng)),
                  "h.0.ln_1.weight": ("F32", [96], mk.random_bytes("F32", [96], rng))}
        self.model(source, config={"model_type": "gpt2"})
        for form in (["--to", "nf4"], ["--to", "int8"], ["--to", "int8", "--block-size", "32"]):
            self.ok("-q", *form, "m", "o")
            answer = self.is_model()
            self.assertEqual(self.row(answer, name)["shape"], [288, 96])
            self.assertEqual(answer["source_digests"], 2)
            self.ok("-q", "--to", "bf16", "o", "back")
            answer = self.is_model(out="back", against="o")
            self.assertGreater(answer["cast"], 0)
            self.assertTrue(all(m["explained"] for m in answer["missing"]))
            shutil.rmtree(self.path("o"))
            shutil.rmtree(self.path("back"))

    def test_coded_rows(self):
        """FP8 to int8 with searched scales: rows are looked at twice, the first of a step, too."""
        rng = random.Random(0)
        name, shape = L % 0 + UP, [200, 1000]
        some = rng.randbytes(mk.numel(shape))
        codes = bytes((b - (b & 0x7F == 0x7F)) & 0xBF for b in some)  # the largest is rare
        self.model({name: ("F8_E4M3", shape, codes),
                    name + "_scale_inv": ("F32", [2, 8], mk.encode("F32", [1e-3] * 16))},
                   config={"model_type": "deepseek_v3",
                           "quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                                                   "weight_block_size": [128, 128]}})
        self.scale = None
        for scale in ("search", "absmax"):
            self.ok("-q", "--force", "--to", "int8", "--scale", scale, "m", "o")
            row = self.row(self.is_model(), name)
            self.assertEqual(row["searched"] > 0.9 * row["scales"], scale == "search")

    def test_text(self):
        self.ok("-q", "--to", "nf4", "m", "o")
        text = self.ok("verify", "o", "--against", "m")
        self.assertIn("o: is m: 17 tensors, 12 quantized, 0 cast, 5 equal", text)
        self.assertNotIn(NORM, text)
        self.assertIn(L % 2 + NORM, self.ok("verify", "-v", "o", "--against", "m"))
        self.assertEqual(self.ok("verify", "-q", "o", "--against", "m"), "")


class FewValues(Against):
    """Weights of which absmax leaves (next to) nothing, and searched scales a little."""
    SHAPE = [96, 128]

    def values(self, *of):
        rng = random.Random(8)
        return [rng.choice(of) for _ in range(mk.numel(self.SHAPE))]

    def make(self, dtype, values, shape=None):
        self.model({L % 0 + UP: (dtype, shape or self.SHAPE, mk.encode(dtype, values))})

    def test_searched(self):
        self.scale = None
        spike = self.values(1e-3, -1e-3)
        spike[77] = 50.0
        forms = FORMS[:7] + [["--to", "nf4", "--block-size", "4096", "--no-double-quant"]]
        for values in (self.values(0.03, 0.0, -0.03), self.values(0.0123, -0.0123),
                       self.values(0.0317, -0.0317), [0.5] * mk.numel(self.SHAPE), spike,
                       [x * 1e-30 for x in self.values(1.0, 0.0, -1.0)],
                       [x * 1e30 for x in self.values(1.0, 0.0, -1.0)]):
            self.make("F32", values)
            for form in forms:
                for scale in ("search", "refit"):
                    if form == ["--to", "int8"] and max(values) > 65504:
                        continue
                    shutil.rmtree(self.path("o"), ignore_errors=True)
                    self.ok("-q", *PLAIN, *form, "--scale", scale, "m", "o")
                    with self.subTest(form=form, scale=scale, values=values[:3]):
                        self.is_model()
                        os.remove(self.path("o", "qconv.json"))
                        if values is not spike:  # one block in many is no search without a manifest
                            self.is_model()

    def test_few_weights(self):
        self.scale = None
        for shape, values in (([1, 1], [0.3]), ([1, 2], [2.5, 1.4]), ([2, 3], [1, 5, 4, 3, 2, 2.5]),
                              ([3, 1], [0.02, 200.0, -0.01]), ([9, 1], [-0.7] * 9)):
            self.make("F32", values, shape)
            for form in FORMS[:7]:
                self.ok("-q", "--force", *form, "--scale", "search", "m", "o")
                with self.subTest(form=form, values=values):
                    self.is_model()

    def test_one_block_of_others(self):
        """The search leaves all scales but one within what double quantization rounds."""
        self.scale = None
        values = self.values(0.03, 0.0, -0.03)
        rng = random.Random(9)
        values[:64] = [rng.gauss(0, 0.01) for _ in range(64)]
        self.make("F32", values)
        self.ok("-q", "--to", "nf4", "--scale", "search", "m", "o")
        row = self.is_model()["rows"][0]
        self.assertLess(row["searched"], row["scales"] / 64)
        # of an output that says absmax, or nothing, it is a fault
        self.ok("-q", "unpack", "o", "u")
        os.remove(self.path("u", "qconv.json"))
        self.is_not("not the largest value", out="u")

    def test_larger_than_needed(self):
        """Codes that are the nearest ones for scales of twice the size: a poor output still."""
        self.scale = "absmax"
        rng = random.Random(10)
        self.make("F32", [rng.gauss(0, 0.02) for _ in range(mk.numel(self.SHAPE))])
        self.ok("-q", *PLAIN, "--to", "int8", "--block-size", "64", "--no-double-quant", "m", "b")
        os.remove(self.path("b", "qconv.json"))
        name, file = L % 0 + UP, self.path("b", "model.safetensors")
        out = mk.read_checkpoint(self.path("b"))
        x = mk.decode("F32", mk.read_checkpoint(self.path("m"))[name][2])
        scales = [2 * s for s in mk.decode("F32", out[name + ".absmax"][2])]
        codes = [round(v / scales[i // 64] * 127) for i, v in enumerate(x)]
        out[name] = ("I8", out[name][1], mk.encode("I8", codes))
        out[name + ".absmax"] = ("F32", out[name + ".absmax"][1], mk.encode("F32", scales))
        mk.write_safetensors(file, out)
        answer, _ = self.is_not("its error is", out="b")
        self.assertAlmostEqual(answer["rows"][0]["ratio"], 2.0, delta=0.1)


class Planted(Against):
    FORMS = [["--to", "nf4"], ["--to", "int8"], ["--to", "int8", "--block-size", "64"]]

    def planted(self, change, *has, faulty, forms=FORMS):
        """An output of a source with `change` made to it is not m, in every form."""
        for form in forms:
            source = dict(self.source)
            change(source)
            self.bare(*form, source=source)
            answer, line = self.is_not(*has, out="b")
            self.assertEqual(self.faulty(answer), sorted(faulty), form)
            yield form, answer, line

    def test_swapped_q_and_k(self):
        def change(s):
            s[L % 1 + Q], s[L % 1 + K] = s[L % 1 + K], s[L % 1 + Q]
        for _, answer, _ in self.planted(change, L % 1 + K, "other values",
                                         "'%s' of MODEL fits" % (L % 1 + Q),
                                         faulty=[L % 1 + Q, L % 1 + K]):
            self.assertEqual(self.row(answer, L % 1 + Q)["fits"], L % 1 + K)
            self.assertGreater(self.row(answer, L % 1 + Q)["error"], 1.2)

    def test_transposed(self):
        def change(s):
            s[L % 0 + O] = transposed(s[L % 0 + O])
        for _ in self.planted(change, L % 0 + O, "transposed' of MODEL fits", faulty=[L % 0 + O]):
            pass

    def test_wrong_order_of_layers(self):
        moved = {0: 1, 1: 2, 2: 0}

        def change(s):
            for i, j in moved.items():
                for name in (Q, K, O, UP, NORM):
                    s[L % i + name] = self.source[L % j + name]
        for _, answer, _ in self.planted(change, "layers.",
                                         faulty=[L % i + n for i in moved
                                                 for n in (Q, K, O, UP, NORM)]):
            for i in moved:
                fits = self.row(answer, L % i + UP)["fits"]
                self.assertIn(fits, (L % moved[i] + UP, None))

    def test_shard_of_another_model(self):
        other = tensors(77)
        for form in self.FORMS:
            self.model(self.source, config=CONFIG, name="one", shard_bytes=200000)
            self.model(other, config=CONFIG, name="two", shard_bytes=200000)
            for m in ("one", "two"):
                self.ok("-q", *form, *PLAIN, "--max-shard-size", "60KB", m, "o" + m)
                os.remove(self.path("o" + m, "qconv.json"))
            shards = sorted(n for n in os.listdir(self.path("oone")) if n.startswith("model-"))
            self.assertGreater(len(shards), 1)
            shutil.copy(self.path("otwo", shards[1]), self.path("oone", shards[1]))
            answer, _ = self.is_not("other values", out="oone")
            held = mk.read_safetensors(self.path("oone", shards[1]))[0]
            self.assertEqual(self.faulty(answer), sorted(
                r["name"] for r in answer["rows"] if r["name"] in held))
            for name in ("oone", "otwo", "one", "two"):
                shutil.rmtree(self.path(name))

    def test_fine_tuned(self):
        """A weight that differs by a hundredth of its size leaves an error that is barely larger,
        and codes that are not those of MODEL."""
        rng = random.Random(5)
        name = L % 2 + UP

        def change(s):
            values = mk.decode("BF16", s[name][2])
            s[name] = ("BF16", s[name][1],
                       mk.encode("BF16", [v + rng.gauss(0, 2e-4) for v in values]))
        for form, answer, _ in self.planted(change, name, "codes are not those of the weights in MODEL",
                                            faulty=[name]):
            row = self.row(answer, name)
            self.assertGreater(row["misplaced"], 100, form)
            self.assertLess(row["ratio"], 1.05 if "nf4" in form else 3)

    def test_one_weight_changed(self):
        """The largest of a row: one part in 256 more."""
        name = L % 0 + UP

        def change(s):
            body = bytearray(s[name][2])
            words = struct.unpack("<%dH" % (len(body) // 2), body)
            at = max(range(128), key=lambda i: words[i] & 0x7FFF)
            struct.pack_into("<H", body, 2 * at, words[at] + 1)
            s[name] = (s[name][0], s[name][1], bytes(body))
        for _ in self.planted(change, name, faulty=[name],
                              forms=[["--to", "nf4", "--no-double-quant", "--scale", "absmax"],
                                     ["--to", "int8", "--scale", "absmax"]]):
            pass

    def test_with_a_manifest(self):
        """The digests of the sources tell it, whatever the errors say."""
        changed = dict(self.source)
        body = bytearray(changed[L % 1 + Q][2])
        body[1000] ^= 1
        changed[L % 1 + Q] = (changed[L % 1 + Q][0], changed[L % 1 + Q][1], bytes(body))
        self.model(changed, config=CONFIG, name="m2")
        for form in FORMS:
            self.ok("-q", *form, "m", "o")
            answer, _ = self.is_not(L % 1 + Q, "MODEL has changed since, or it is another model",
                                    against="m2")
            self.assertEqual(self.faulty(answer), [L % 1 + Q])
            shutil.rmtree(self.path("o"))


class Damaged(Against):
    """Single bytes of files without a manifest; of scales by absmax, which are known to a bit."""
    scale = "absmax"

    def flip(self, name, at, bit):
        path = self.path("b", "model.safetensors")
        with open(path, "rb") as f:
            n = struct.unpack("<Q", f.read(8))[0]
            begin = 8 + n + json.loads(f.read(n))[name]["data_offsets"][0]
        self.change_byte(path, begin + at, bit)

    def test_one_scale(self):
        """Any bit of a scale that is not below what its form can hold of the largest value."""
        name = L % 1 + Q
        for form, part, bits in (
                (["--to", "nf4", "--no-double-quant"], ".absmax", range(8, 32)),
                (["--to", "int8"], "SCB", range(8, 32)),
                (["--to", "int8", "--block-size", "64", "--no-double-quant"], ".absmax",
                 range(8, 32)),
                (["--to", "nf4"], ".nested_absmax", range(20, 32)),
                (["--to", "nf4"], ".quant_map", range(32))):
            self.bare(*form)
            tensor = name[:-6] + part if part == "SCB" else name + part
            for bit in bits:
                at = bit // 8 + (0 if part == ".nested_absmax" else 4)
                self.flip(tensor, at, 1 << bit % 8)
                with self.subTest(form=form, part=part, bit=bit):
                    answer, _ = self.is_not(name, out="b")
                    self.assertEqual(self.faulty(answer), [name])
                self.flip(tensor, at, 1 << bit % 8)
            self.is_model(out="b")

    def test_searched_scales(self):
        """They may be any, but their codes are the nearest for them."""
        name = L % 1 + Q
        self.scale = "search"
        for form, part, places in ((["--to", "nf4"], ".nested_absmax", [(2, 0x40), (3, 1)]),
                                   (["--to", "nf4"], ".absmax", [(0, 0x40), (100, 0x40)]),
                                   (["--to", "nf4", "--no-double-quant"], ".absmax", [(6, 0x40)]),
                                   (["--to", "int8"], "SCB", [(6, 0x40), (7, 1)])):
            self.bare(*form)
            self.is_model(out="b")
            tensor = name[:-6] + part if part == "SCB" else name + part
            for at, bit in places:
                self.flip(tensor, at, bit)
                answer, _ = self.is_not(name, out="b")
                self.assertEqual(self.faulty(answer), [name])
                self.flip(tensor, at, bit)

    def test_nan(self):
        name = L % 1 + Q
        self.bare("--to", "nf4", "--no-double-quant")
        self.flip(name + ".absmax", 2, 0x80)
        self.flip(name + ".absmax", 3, 0x7F)
        self.is_not(name, out="b")
        # and in MODEL, where it is quantized all the same
        self.bare("--to", "nf4")
        body = bytearray(self.source[name][2])
        struct.pack_into("<H", body, 2 * (128 * 5 + 7), 0x7FC0)
        self.model(dict(self.source, **{name: ("BF16", [128, 128], bytes(body))}), config=CONFIG)
        self.is_not(name, "row 5, column 7 is not finite", out="b")

    def test_plain_tensors(self):
        name = L % 2 + NORM
        for form in (["--to", "nf4"], ["--to", "fp16"], ["--to", "nf4", "--rest", "fp16"]):
            self.bare(*form)
            self.flip(name, 2 * 77, 1)
            answer, _ = self.is_not(name, "element 77", out="b")
            self.assertEqual(self.faulty(answer), [name])

    def test_with_a_manifest(self):
        self.ok("-q", "--to", "nf4", "m", "o")
        shard = next(n for n in os.listdir(self.path("o")) if n.endswith(".zst"))
        self.change_byte(self.path("o", shard), os.path.getsize(self.path("o", shard)) // 2, 4)
        self.is_not("tensor", out="o")
        os.truncate(self.path("o", shard), 1000)
        self.is_not(shard, "expected", out="o")
        os.remove(self.path("o", shard))
        self.is_not(shard, "missing", out="o")


class Documented(Against):
    def test_members(self):
        """Every member is in docs/verify.md, and nothing else is promised there."""
        with open(os.path.join(ROOT, "docs", "verify.md"), encoding="utf-8") as f:
            text = f.read().split("## `qconv verify --against --json`")[1]
        top, rows = text.split("Each of `rows`:")
        self.ok("-q", "--to", "nf4", "m", "o")
        answer = self.is_model()
        members = [set(), set()]
        for i, part in enumerate((top, rows)):
            for line in part.splitlines():
                if line.startswith("| `"):
                    members[i] |= set(re.findall("`(\\w+)`", line.split("|")[1]))
        self.assertEqual(members[0], set(answer))
        self.assertEqual(members[1], set().union(*answer["rows"]))


class Names(Against):
    def test_missing_and_extra(self):
        name = L % 1 + UP
        less = {n: t for n, t in self.source.items() if n != name}
        self.bare("--to", "nf4", source=less)
        answer, _ = self.is_not(name, "MODEL has it, but OUT does not", out="b")
        self.assertEqual(answer["missing"], [{"name": name, "explained": None}])
        self.model(less, config=CONFIG, name="less")
        self.bare("--to", "nf4")
        answer, _ = self.is_not(name, "MODEL has no tensor of this name", out="b", against="less")
        self.assertEqual(self.faulty(answer), [name])
        self.ok("-q", "--to", "nf4", "m", "o")
        self.is_not(name, "'%s' is not in MODEL" % name, against="less")

    def test_shapes(self):
        name = L % 1 + UP
        wide = dict(self.source, **{name: transposed(self.source[name])})
        self.bare("--to", "nf4", source=wide)
        answer, _ = self.is_not(name, "[128, 192]", "[192, 128]", out="b")
        # What was not compared has no figures, neither 0 nor infinite ones.
        rows = {r["name"]: r for r in answer["rows"]}
        self.assertNotIn("error", rows[name])
        self.assertIn("error", rows[L % 0 + UP])
        text = self.run_qconv("verify", "b", "--against", "m").stdout.decode()
        self.assertIn("1 tensor with faults, then those farthest from MODEL:", text)
        listed = [l.split()[0] for l in text.split("farthest from MODEL:\n")[1].splitlines() if l.strip()]
        listed = [n for n in listed if n in rows]
        self.assertEqual(listed[0], name)
        ratios = [int(rows[n]["ratio"] * 1000 + 0.5) for n in listed[1:]]
        self.assertGreater(len(ratios), 2)
        self.assertEqual(ratios, sorted(ratios, reverse=True))
        line = next(l for l in text.splitlines() if l.split()[:1] == [name])
        self.assertNotIn("0.00000", line)
        self.assertNotIn(" inf", text)

    def test_tied_head_and_buffers(self):
        source = dict(self.source, **{"lm_head.weight": self.source["model.embed_tokens.weight"],
                                      "model.layers.0.self_attn.rotary_emb.inv_freq":
                                      ("F32", [4], bytes(16))})
        self.model(source, config=dict(CONFIG, tie_word_embeddings=True), name="tied")
        self.bare("--to", "nf4")
        answer = self.is_model(out="b", against="tied")
        self.assertEqual([m["name"] for m in answer["missing"]],
                         ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
        self.assertTrue(all(m["explained"] for m in answer["missing"]))
        self.model(source, config=dict(CONFIG, tie_word_embeddings=False), name="untied")
        self.is_not("lm_head.weight", out="b", against="untied")

    def test_no_checkpoint(self):
        self.ok("-q", "--to", "nf4", "m", "o")
        os.mkdir(self.path("empty"))
        self.fails(3, "verify", "o", "--against", "empty", has="empty")
        self.fails(3, "verify", "o", "--against", "nothing", has="nothing")
        self.fails(3, "verify", "empty", "--against", "m", has="empty")
        self.fails(2, "verify", "o", "--against", has="--against")


if __name__ == "__main__":
    unittest.main()
