#!/usr/bin/env python3
"""qconv report: the page and its JSON, held against the files themselves."""
import collections
import json
import math
import os
import pty
import random
import re
import shutil
import subprocess
import unittest
from xml.etree import ElementTree

from qconv_case import QCONV, ROOT
from output_case import OutputCase
from test_documented import members, page, section
import make_checkpoint as mk

MODEL = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
HELDOUT = os.path.join(ROOT, "tests", "data", "kjv-llama", "heldout.txt")
Q = "model.layers.%d.self_attn.q_proj.weight"
UP = "model.layers.%d.mlp.up_proj.weight"
# What must never be asked for; the name of SVG's namespace is no address.
OUTSIDE = re.compile(r"<script|<link|<img|@import|\bsrc=|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)")


class Report(OutputCase):
    replaces = True

    def weight(self, dtype, shape, seed=1):
        return dtype, shape, mk.random_bytes(dtype, shape, random.Random(seed))

    def small(self, name="m", layers=3, seed=1):
        tensors = {"model.embed_tokens.weight": self.weight("BF16", [32, 64], seed),
                   "model.norm.weight": self.weight("BF16", [64], seed)}
        for i in range(layers):
            tensors[Q % i] = self.weight("BF16", [64, 64], seed * 100 + 2 * i)
            tensors[UP % i] = self.weight("BF16", [128, 64], seed * 100 + 2 * i + 1)
        return self.model(tensors, name=name)

    def json(self, *args, **more):
        return json.loads(self.ok("report", *args, "--json", **more))

    def page(self, *args, **more):
        """The page's text and its tree."""
        text = self.ok("report", *args, **more)
        self.assertIsNone(OUTSIDE.search(text))
        self.assertIn('name="viewport"', text)
        root = ElementTree.fromstring(text[text.index("\n"):])
        self.check_page(root)
        return text, root

    @staticmethod
    def words(element):
        return " ".join(" ".join(element.itertext()).split())

    def table(self, tree, head):
        """Rows of the table whose head begins with these texts."""
        for t in tree.iter("table"):
            rows = [[self.words(c) for c in r] for r in t.iter("tr")]
            if rows[0][:len(head)] == head:
                return rows[1:]
        self.fail("no table %r" % head)

    # ---- numbers -----------------------------------------------------------------------------

    def test_codes(self):
        """Counts are those of the files, also of an odd number of weights and of int8."""
        self.model({Q % 0: self.weight("BF16", [33, 65]), Q % 1: self.weight("F32", [7, 96]),
                    UP % 0: self.weight("F16", [40, 64])})
        for to in ("nf4", "int8"):
            stored = self.convert("--to", to, "m", to)
            got = self.json(to)
            sums = collections.Counter()
            for name in (Q % 0, Q % 1, UP % 0):
                _, shape, data = stored[name]
                if to == "int8":
                    sums.update(v - 256 if v > 127 else v for v in data)
                    continue
                codes = [c for b in data for c in (b >> 4, b & 15)]
                sums.update(codes[:{Q % 0: 33 * 65}.get(name, len(codes))])
            form = got["forms"][0]
            self.assertEqual(form["codes"], [sums[i] for i in (range(16) if to == "nf4"
                                                               else range(-128, 128))])
            self.assertEqual(sum(form["codes"]), form["elements"])
            self.assertEqual([sum(k["codes"]) for k in got["kinds"]],
                             [k["elements"] for k in got["kinds"]])
            shares = [c / form["elements"] for c in form["codes"]]
            self.assertAlmostEqual(form["entropy"], -sum(p * math.log2(p) for p in shares if p))
            self.assertAlmostEqual(sum(form["expected"]), 1.0)
            self.assertAlmostEqual(form["distance"], sum(
                abs(a - b) for a, b in zip(shares, form["expected"])) / 2)
            self.assertLess(form["distance"], 0.05 if to == "nf4" else 0.2)  # of 5,000 values

    def test_errors(self):
        """Those of the manifest; sums, order and medians follow from them."""
        self.small()
        self.ok("-q", "--to", "nf4", "m", "o")
        with open(self.path("o", "qconv.json"), encoding="utf-8") as f:
            text = f.read()
        got = self.json("o")
        self.assertEqual((got["errors_from"], got["errors_missing"], got["compared"]),
                         ("manifest", None, None))
        inspected = {t["name"]: t for t in json.loads(self.ok("inspect", "o", "--json"))["tensors"]
                     if "rel_mse" in t}
        self.assertEqual({w["name"]: (w["rel_mse"], w["max_err"]) for w in got["weights"]},
                         {n: (t["rel_mse"], t["max_err"]) for n, t in inspected.items()})
        for w in got["weights"]:
            at = w["max_at"][0] * w["shape"][1] + w["max_at"][1]
            self.assertIn('"max_err_index": %d' % at, text)
            self.assertAlmostEqual(w["sqnr"], -10 * math.log10(w["rel_mse"]))
        errors = sorted(w["rel_mse"] for w in got["weights"])
        form = got["forms"][0]
        self.assertAlmostEqual(form["median"], (errors[2] + errors[3]) / 2)
        self.assertEqual((form["least"], form["most"]), (errors[0], errors[-1]))
        self.assertAlmostEqual(form["mean"], sum(
            w["rel_mse"] * w["shape"][0] for w in got["weights"]) / (3 * 64 + 3 * 128))
        kind = {k["kind"]: k for k in got["kinds"]}["mlp.up_proj"]
        worst = max((w for w in got["weights"] if "up_proj" in w["name"]),
                    key=lambda w: w["rel_mse"])
        self.assertEqual((kind["most"], kind["most_of"]), (worst["rel_mse"], worst["name"]))
        rows = self.table(self.page("o")[1], ["weight", "relative MSE"])
        self.assertEqual([r[0] for r in rows],
                         [w["name"] for w in sorted(got["weights"], key=lambda w: -w["rel_mse"])])

    def test_sizes(self):
        self.small()
        self.ok("-q", "--to", "nf4", "m", "o")
        got = self.json("o")["sizes"]
        inspected = json.loads(self.ok("inspect", "o", "--json"))["totals"]
        for ours, theirs in (("tensor_bytes", "tensor_bytes"), ("file_bytes", "file_bytes"),
                             ("elements", "weights"), ("bits_per_weight", "bits_per_weight")):
            self.assertEqual(got[ours], inspected[theirs])
        self.assertEqual(got["source_file_bytes"],
                         os.path.getsize(self.path("m", "model.safetensors")))
        self.assertEqual(got["unquantized_bytes"], 2 * got["elements"])
        self.assertAlmostEqual(got["quantized_bits_per_weight"],
                               8 * got["quantized_bytes"] / got["quantized_elements"])
        self.assertEqual(got["quantized_bytes"] - got["scale_bytes"],
                         got["quantized_elements"] // 2)

    def test_does_not_depend(self):
        """on threads, compression, or the instruction set."""
        self.small()
        self.ok("-q", "--to", "nf4", "m", "o")
        self.ok("-q", "unpack", "o", "u")
        want = None
        for args, env in ((["o"], {}), (["o", "--threads", "3"], {}), (["u"], {}),
                          (["o", "--threads", "1"], {"QCONV_ISA": "scalar"})):
            got = self.json(*args, env=env)
            del got["seconds"], got["path"], got["sizes"]["file_bytes"]
            del got["made"]["command_line"]  # says --compress
            want = want or got
            self.assertEqual(got, want, args)

    # ---- against the source ------------------------------------------------------------------

    def test_against(self):
        self.small()
        self.ok("-q", "--to", "nf4", "--scale", "absmax", "m", "o")
        got, manifest = self.json("o", "--against", "m"), self.json("o")
        self.assertEqual(got["errors_from"], "source")
        self.assertEqual((got["compared"]["faults"], got["compared"]["hashes_checked"],
                          got["compared"]["equal"], got["compared"]["quantized"]), (0, True, 2, 6))
        for a, b in zip(got["weights"], manifest["weights"]):
            self.assertAlmostEqual(a["rel_mse"] / b["rel_mse"], 1, delta=1e-4)
            self.assertEqual((a["max_at"], a["fault"]), (b["max_at"], None))
            self.assertAlmostEqual(a["rel_mse"] / a["expected_mse"], 1, delta=1e-3)
        text, _ = self.page("o", "--against", "m")
        self.assertIn("Compared with m", re.sub(r"<.*?>", "", text))

    def test_without_a_manifest(self):
        self.small()
        self.ok("-q", "--to", "nf4", "m", "o")
        self.ok("-q", "unpack", "o", "u")
        os.remove(self.path("u", "qconv.json"))
        got = self.json("u")
        self.assertEqual((got["errors_from"], got["made"], got["sizes"]["source_file_bytes"]),
                         ("none", None, None))
        self.assertIn("--against", got["errors_missing"])
        self.assertEqual({w["rel_mse"] for w in got["weights"]}, {None})
        text, tree = self.page("u")
        self.assertIn("there is no manifest", text)
        self.assertEqual(len(self.table(tree, ["form", "weights"])), 1)
        got = self.json("u", "--against", "m")
        self.assertEqual((got["errors_from"], got["errors_missing"]), ("source", None))
        self.assertTrue(all(w["rel_mse"] > 0.005 for w in got["weights"]))
        self.assertFalse(got["compared"]["hashes_checked"])
        self.page("u", "--against", "m")

    def test_another_model(self):
        """The page is written, says so, and the exit code is 4."""
        self.small()
        self.small("other", seed=7)
        self.ok("-q", "--to", "nf4", "m", "o")
        r = self.run_qconv("report", "o", "--against", "other", "--html", "p.html")
        self.assertEqual(r.returncode, 4, r.stderr)
        with open(self.path("p.html"), encoding="utf-8") as f:
            text = f.read()
        ElementTree.fromstring(text[text.index("\n"):])
        self.assertIn("This is not other", text)
        r = self.run_qconv("report", "o", "--against", "other", "--json")
        self.assertEqual(r.returncode, 4)
        got = json.loads(r.stdout)
        self.assertGreater(got["compared"]["faults"], 0)
        self.assertTrue(any(w["fault"] for w in got["weights"]))

    def test_what_was_not_compared_has_no_error(self):
        """Weights of other shapes: their error is not known, which is not 0."""
        self.small()
        self.ok("-q", "--to", "nf4", "m", "o")
        r = self.run_qconv("report", "o", "--against", MODEL, "--json")
        self.assertEqual(r.returncode, 4, r.stderr)
        got = json.loads(r.stdout)
        self.assertEqual({w["rel_mse"] for w in got["weights"]}, {None})
        self.assertEqual({f["mean"] for f in got["forms"]}, {None})
        r = self.run_qconv("report", "o", "--against", MODEL, "--html", "p.html")
        self.assertEqual(r.returncode, 4, r.stderr)
        with open(self.path("p.html"), encoding="utf-8") as f:
            text = f.read()
        self.assertIn("the error of 6 of 6 weights is not known", text)
        self.assertNotIn("inf dB", text)

    # ---- the page ----------------------------------------------------------------------------

    def test_page(self):
        for to, *more in (("nf4",), ("int8",), ("nf4", "--no-double-quant", "--block-size", "32"),
                          ("nf4", "--scale", "search")):
            out = "o" + "".join(more)
            self.ok("-q", "--to", to, *more, MODEL, out)
            text, tree = self.page(out)
            titles = [self.words(h) for h in tree.iter("h2")]
            self.assertEqual(titles, ["Size", "Memory per device", "Error of the weights",
                                      "Error over the layers", "Worst weights", "Codes",
                                      "Not quantized, and why", "Perplexity and KL divergence",
                                      "Speed of the kernels",
                                      "How it was made, and how to check it"])
            links = {a.get("href")[1:] for a in tree.iter("a")}
            self.assertEqual(links, {h.get("id") for h in tree.iter("h2")})
            self.assertEqual(len(self.table(tree, ["layer", "mlp.down_proj"])), 4)
            self.assertEqual([r[0] for r in self.table(tree, ["what", "why"])],
                             ["head", "embedding", "norm"])
            self.assertEqual(text.count("Not measured."), 2)
            self.assertNotIn("nan", text)
            self.assertNotIn("inf<", text)
            codes = self.table(tree, ["code"])
            rows = {r[0]: [float(v) for v in r[1:]] for r in codes if r[0] != "its value"}
            for row in rows.values():
                self.assertAlmostEqual(sum(row), 100, delta=0.2)
            self.assertIn("normal weights", rows)
            self.assertIn("--scale search" if "--scale" in more else "--to %s" % to, text)
            # Drawings have as many marks as the table has numbers, and a name for who cannot see.
            for svg in tree.iter("{http://www.w3.org/2000/svg}svg"):
                self.assertTrue(svg.get("aria-label"))

    def test_mixture(self):
        """Forms are told apart by marks, not by colour alone."""
        self.ok("-q", "--to", "auto", "--vram", "1.45MB", "--cuda-context", "0", "--context", "16",
                MODEL, "o")
        got = self.json("o")
        self.assertGreater(len(got["forms"]), 2)
        self.assertEqual(sum(f["weights"] for f in got["forms"]), len(got["weights"]))
        text, tree = self.page("o")
        marks = [r[0][0] for r in self.table(tree, ["form", "mean"])]
        self.assertEqual(len(set(marks)), len(marks))
        for row in self.table(tree, ["layer", "mlp.down_proj"]):
            for cell in row[1:]:
                self.assertIn(cell[-1], marks)

    def test_devices(self):
        self.ok("-q", "--to", "nf4", "--vram", "1GB+1GB", MODEL, "o")
        got = self.json("o")
        self.assertEqual([d["name"] for d in got["devices"]], ["cuda:0", "cuda:1"])
        self.assertEqual(sum(d["tensor_bytes"] for d in got["devices"]),
                         got["sizes"]["tensor_bytes"])
        _, tree = self.page("o")
        self.assertEqual([r[0] for r in self.table(tree, ["device", "weights"])],
                         ["cuda:0", "cuda:1"])

    def test_names_are_escaped(self):
        evil = 'model.layers.0.<script>&"\'x.q_proj.weight'
        self.model({evil: self.weight("BF16", [64, 64]),
                    'a<b>&"c': self.weight("BF16", [8])}, config={"model_type": '<i>&"'})
        self.ok("-q", "--to", "nf4", "m", "o", "--quantize", "model.*")
        text, tree = self.page("o")
        self.assertIn(evil, [r[0] for r in self.table(tree, ["weight"])])
        self.assertNotIn("<i>", text)
        self.assertEqual(self.json("o")["weights"][0]["name"], evil)

    def test_rules(self):
        self.ok("-q", "--to", "nf4", "--keep", "*.layers.1.*", MODEL, "o")
        left = {(l["role"], l["why"]): l["tensors"] for l in self.json("o")["not_quantized"]}
        self.assertEqual(left[("linear", "--keep *.layers.1.*")], 7)
        self.assertIn("--keep '*.layers.1.*'", self.json("o")["made"]["command_line"])
        text, _ = self.page("o")
        self.assertIn("--keep '*.layers.1.*'", text)

    def test_many_weights(self):
        """A mixture of experts: over a thousand weights, one page below 1 MB."""
        model = mk.load_model("DeepSeek-V2.5")
        mk.write_model(self.path("m"), model, layers=5, experts=100, scale=64, seed=3)
        self.ok("-q", "--to", "nf4", "m", "o")
        text, tree = self.page("o")
        self.assertGreater(len(self.json("o")["weights"]), 1000)
        self.assertLess(len(text), 1 << 20)
        self.assertEqual(len(self.table(tree, ["weight", "relative MSE"])), 20)
        self.assertIn("mlp.experts.*.up_proj", text)

    def test_names_without_order(self):
        """Kinds and layers that are as many as weights: the page stays small."""
        tensors = {"a%d.%d.weight" % (i, i): self.weight("BF16", [4, 16], i) for i in range(700)}
        self.model(tensors)
        self.ok("-q", "--to", "nf4", "m", "o", "--quantize", "*")
        text, tree = self.page("o")
        self.assertLess(len(text), 1 << 19)
        self.assertIn("too many kinds and layers", text)
        self.assertEqual(len(self.table(tree, ["kind", "mean"])), 200)
        self.assertEqual(len(self.json("o")["kinds"]), 700)

    # ---- results of others -------------------------------------------------------------------

    EVAL = {"command": "eval", "path": "o", "against": "m", "text": "a<b>.txt",
            "model_type": "llama", "tokenizer": "bytes", "device": "cpu", "tokens": 1000,
            "windows": 4, "context": 256, "predicted": 996, "perplexity": 19.32,
            "perplexity_error": 0.5, "base_perplexity": 18.205, "base_perplexity_error": 0.4,
            "difference": 1.115, "difference_error": 0.06, "log_ratio": 0.0594,
            "log_ratio_error": 0.003, "kl_mean": 0.0644, "kl_error": 0.0021, "kl_median": 0.03,
            "kl_99": 0.5, "kl_max": 2.5, "top1": 0.91, "top1_error": 0.009,
            "probability_rms": 0.05, "seconds": 1.5}

    def test_eval_file(self):
        self.small()
        self.ok("-q", "--to", "nf4", "m", "o")
        self.write("e.json", json.dumps(self.EVAL))
        text, tree = self.page("o", "--eval", "e.json")
        rows = {r[0]: r[1] for r in self.table(tree, ["measure", "value"])}
        self.assertEqual(rows["perplexity"], "19.32 \u00b1 0.5")
        self.assertEqual(rows["KL divergence, mean"], "0.0644 \u00b1 0.0021 nats")
        self.assertEqual(rows["same first choice"], "91 \u00b1 0.9%")
        self.assertIn("a&lt;b&gt;.txt", text)
        got = self.json("o", "--eval", "e.json")
        of_encoders = [a + b for a in ("distance", "cosine") for b in ("_mean", "_99", "_max")]
        self.assertEqual(got["eval"], self.EVAL | dict.fromkeys(of_encoders))  # the file is older than those
        alone = {k: None if k in ("against",) or self.of_pair(k) else v
                 for k, v in self.EVAL.items()}
        self.write("e.json", json.dumps(alone))
        _, tree = self.page("o", "--eval", "e.json")
        self.assertEqual([r[0] for r in self.table(tree, ["measure", "value"])], ["perplexity"])
        for bad in ("{}", "[]", "{", json.dumps(dict(self.EVAL, perplexity="x"))):
            self.write("e.json", bad)
            self.fails(3, "report", "o", "--eval", "e.json", has="e.json")
        self.fails(1, "report", "o", "--eval", "none.json", has="none.json")

    @staticmethod
    def of_pair(key):
        return key.startswith(("base_", "difference", "log_", "kl_", "top1", "probability"))

    def bench(self):
        def spread(v):
            return {"median": v, "p10": v, "p90": v, "samples": 3}
        rows = [{"model": "A<B", "layer": "up", "n": n, "k": 64, "count": 1, "m": m,
                 "scheme": "nf4", "path": "gemv", "repacked": False, "error": 0.0,
                 "us": spread(10.0 * m), "dense_us": spread(30.0 * m), "ratio": spread(3.0),
                 "bytes": 1, "gbps": 5.0, "tflops": 1.0, "floor_us": 1.0, "of_roof": 0.5,
                 "rotation": None, "dense_rotation": None} for n in (999, 128) for m in (1, 16)]
        return {"command": "bench", "program": "qconv 0.4.0", "dtype": "fp16", "seed": 1,
                "forced_path": None, "device": {"name": "A <GPU>"},
                "roof": {"copy_gbps": spread(4000.0), "gemm_tflops": None},
                "kernels": [], "rows": rows, "layers": [], "left_out": 0, "seconds": 1.0}

    def test_bench_file(self):
        self.small()
        self.ok("-q", "--to", "nf4", "m", "o")
        self.write("b.json", json.dumps(self.bench()))
        text, tree = self.page("o", "--bench", "b.json")
        rows = self.table(tree, ["layer", "scheme"])
        self.assertEqual([r[0] for r in rows], ["A<B, up (in OUT)", "A<B, up"])
        self.assertEqual(rows[0][2:], ["128 \u00d7 64", "3.00\u00d7 10 \u00b5s",
                                       "3.00\u00d7 160 \u00b5s"])
        got = self.json("o", "--bench", "b.json")["bench"]
        self.assertEqual((got["device"], got["copy_gbps"], got["gemm_tflops"]),
                         ("A <GPU>", 4000.0, None))
        self.assertEqual([r["here"] for r in got["rows"]], [False, False, True, True])
        self.assertEqual((got["complete"], got["failed"]), (True, 0))
        self.write("b.json", json.dumps(dict(self.bench(), complete=False, failed=[{"what": "x"}])))
        got = self.json("o", "--bench", "b.json")["bench"]
        self.assertEqual((got["complete"], got["failed"]), (False, 1))
        page = "".join(self.page("o", "--bench", "b.json")[1].itertext())
        self.assertIn("The run ended before all was measured", page)
        self.assertIn("1 of its results were wrong or could not be had", page)
        bad = self.bench()
        bad["rows"][1]["us"] = {"median": -1.0}
        for text in ("{}", "[]", "nonsense", json.dumps(bad),
                     json.dumps({"command": "bench", "device": {}})):
            self.write("b.json", text)
            self.fails(3, "report", "o", "--bench", "b.json", has=["--bench", "b.json"])

    def test_damaged_results(self):
        """Whatever a file of --eval or --bench holds: a page, or one sentence with its name."""
        self.small(layers=1)
        self.ok("-q", "--to", "nf4", "m", "o")
        rng = random.Random(5)
        for option, good in (("--eval", json.dumps(self.EVAL)), ("--bench", json.dumps(self.bench()))):
            values = re.findall(r": ([^,{}\[\]]+)", good)
            for i in range(60):
                at = rng.randrange(len(good))
                text = (good[:at] + rng.choice('",:{}[]0-9eE.x') + good[at + 1:] if i % 2 else
                        good.replace(": " + rng.choice(values), ": " + rng.choice(
                            ["null", "-1", "1e308", "[]", "{}", '"x"', "true", "1e-320"]), 1))
                self.write("r.json", text)
                r = self.run_qconv("report", "o", option, "r.json")
                self.assertIn(r.returncode, (0, 3), (text, r.stderr))
                if r.returncode:
                    self.assertIn(b"r.json", r.stderr)
                else:
                    ElementTree.fromstring(r.stdout[r.stdout.index(b"\n"):])

    def test_text(self):
        """Perplexity measured in the same run is that of eval."""
        self.ok("-q", "--to", "nf4", MODEL, "o")
        with open(HELDOUT, "rb") as f:
            text = f.read(600)
        self.write("t.ids", "".join(" ".join(map(str, text[i:i + 100])) + "\n"
                                    for i in range(0, len(text), 100)))
        args = ["--against", MODEL, "--text", "t.ids"]
        want = json.loads(self.ok("eval", "o", *args, "--json", timeout=120))
        got = self.json("o", *args, timeout=120)["eval"]
        del want["seconds"], got["seconds"]
        self.assertEqual(got, want)
        _, tree = self.page("o", *args, timeout=120)
        rows = {r[0]: r[1] for r in self.table(tree, ["measure", "value"])}
        self.assertEqual(rows["perplexity"].split()[0], "%.5g" % want["perplexity"])

    # ---- files and manners -------------------------------------------------------------------

    def test_terminal(self):
        self.small()
        self.ok("-q", "--to", "nf4", "m", "o")
        ours, theirs = pty.openpty()
        try:
            for args, code in ((["o"], 2), (["o", "--html", "p.html"], 0)):
                r = subprocess.run([QCONV, "report"] + args, stdout=theirs, cwd=self.dir,
                                   stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60)
                self.assertEqual(r.returncode, code, r.stderr)
                self.assertIn(b"--html" if code else b"qconv: the page is in p.html\n", r.stderr)
        finally:
            os.close(ours)
            os.close(theirs)
        with open(self.path("p.html"), "rb") as f:
            self.assertEqual(f.read(), self.run_qconv("report", "o").stdout)
        self.assertEqual(self.run_qconv("report", "-q", "o", "--html", "q.html").stderr, b"")

    def test_never_replaces_what_is_read(self):
        self.small()
        self.ok("-q", "--to", "nf4", "m", "o")
        self.ok("-q", "unpack", "o", "u")
        self.write("b.json", json.dumps(self.bench()))
        before = {d: os.path.getmtime(self.path(d, "config.json")) for d in ("o", "u", "m")}
        for path in ("o/qconv.json", "o/config.json", "u/model.safetensors"):
            self.usage("report", path.split("/")[0], "--html", path, command="report",
                       has=["--html", "only read"])
        for path in ("m/model.safetensors", "m/config.json"):
            self.usage("report", "o", "--against", "m", "--html", path, command="report",
                       has=["--html", "only read"])
        self.usage("report", "o", "--bench", "b.json", "--html", "b.json", command="report",
                   has=["--html", "--bench"])
        self.usage("report", "o", "--html", "m", command="report", has="folder")
        self.fails(1, "report", "o", "--html", "none/p.html", has="--html")
        self.assertEqual(before, {d: os.path.getmtime(self.path(d, "config.json"))
                                  for d in ("o", "u", "m")})
        self.ok("verify", "o")
        self.write("p.html", "old")
        self.assertEqual(self.ok("report", "o", "--html", "p.html"), "")
        self.assertEqual(sorted(n for n in os.listdir(self.dir) if "html" in n), ["p.html"])

    def test_wrong_inputs(self):
        self.small()
        self.fails(3, "report", "m", has="quantized")
        self.fails(3, "report", "none", has="none")
        self.ok("-q", "--to", "nf4", "m", "o")
        for args in (["--eval", "e", "--text", "t"], ["--context", "64"]):
            self.usage("report", "o", *args, command="report")
        shutil.copytree(self.path("o"), self.path("bad"))
        with open(self.path("bad", "qconv.json"), "r+b") as f:
            f.seek(40)
            f.write(b"#")
        text, _ = self.page("bad")
        self.assertIn("Note:", text)

    def test_documented(self):
        """Every member is in docs/report.md, and nothing else is promised there."""
        self.ok("-q", "--to", "nf4", "--vram", "1GB+1GB", MODEL, "o")
        self.write("b.json", json.dumps(self.bench()))
        got = self.json("o", "--against", MODEL, "--bench", "b.json")
        text = section(page("report.md"), "`qconv report --json`")
        printed = members(got, set())
        self.assertEqual(sorted(printed - set(re.findall(r"`([^`]+)`", text))), [])
        for row in re.findall(r"^\| (`.*?) \|", text, re.M):
            for name in re.findall(r"`(\w+)`", row):
                self.assertIn(name, printed)
        for line in re.findall(r"^(?:Each of `not_quantized`|Members of `bench`).*?\n\n|\Z", text,
                               re.M | re.S):
            for name in re.findall(r"`(\w+)`", line):
                self.assertIn(name, printed)


if __name__ == "__main__":
    unittest.main()
