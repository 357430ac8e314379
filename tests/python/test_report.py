#!/usr/bin/env python3
"""qconv.report and `python -m qconv report`: facts are those that the C program printed, pages show them."""
import importlib
import json
import math
import os
import pty
import random
import re
import shutil
import subprocess
import sys
import unittest
import unittest.mock
import warnings
from xml.etree import ElementTree

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cli"))
from output_case import OutputCase  # noqa: E402
from qconv_case import QCONV, ROOT  # noqa: E402
from test_documented import members, page as docs_page, section  # noqa: E402

PACKAGE = os.path.join(ROOT, "python")
sys.path.insert(0, PACKAGE)
os.environ["QCONV_PROGRAM"] = QCONV
import make_checkpoint as mk  # noqa: E402
import moments  # noqa: E402
import qconv  # noqa: E402
from qconv import _program  # noqa: E402

facts = importlib.import_module("qconv._report_facts")
draw = importlib.import_module("qconv.report")

GOLDEN = os.path.join(ROOT, "tests", "golden", "report")
MODEL = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
HELDOUT = os.path.join(ROOT, "tests", "data", "kjv-llama", "heldout.txt")
Q = "model.layers.%d.self_attn.q_proj.weight"
UP = "model.layers.%d.mlp.up_proj.weight"
# Ends a tag, an attribute and a style, begins a script, hides and turns what follows.
EVIL = "</style><script>alert(1)</script>\" onload='x' & \u202e\x1b[31m{{}}%s]]>"
# What must never be asked for.
OUTSIDE = re.compile(r"<script|<link|<img|@import|\bsrc=|url\((?!#)|https?://")


class Names(unittest.TestCase):
    def test_kinds(self):
        for names, want in (
                (["model.layers.0.self_attn.q_proj.weight", "model.layers.12.self_attn.q_proj.weight",
                  "model.layers.3.mlp.experts.17.up_proj.weight_packed", "lm_head.weight"],
                 ["self_attn.q_proj", "self_attn.q_proj", "mlp.experts.*.up_proj", "lm_head"]),
                (["model.text.layers.0.q.weight", "model.vision.blocks.1.q.weight"],
                 ["text.layers.*.q", "vision.blocks.*.q"]),
                (["0", "1.weight", "a1.b2.weight"], ["*", "*", "a1.b2"]), (["w.weight"], ["w"])):
            self.assertEqual(facts.kind_names(names), want)

    def test_layers_and_places(self):
        for name, want in (("model.layers.12.mlp.experts.3.up.weight", 12), ("7.weight", 7), ("h1.x2y.weight", None),
                           ("a.99999999999999999999.b", None), ("", None)):
            self.assertEqual(facts.layer_of(name), want)
        self.assertEqual(facts.place_of(4 * 15 - 1, [4, 3, 5]), [3, 2, 4])
        self.assertEqual(facts.place_of(0, []), [])

    def test_order(self):
        names = ["a.10.b", "a.9.b", "a.9", "b", "a.x", "a.\u00e9", "a10", "a010x", "a2"]
        self.assertEqual(sorted(names, key=facts.natural),
                         ["a.9", "a.9.b", "a.10.b", "a.x", "a.\u00e9", "a2", "a10", "a010x", "b"])

    def test_globs(self):
        for glob, name, want in (("*.layers.1.*", "m.layers.1.q", True), ("*.layers.1.*", "m.layers.11.q", False),
                                 ("a?c", "abc", True), ("[!a]b", "cb", True), ("[a-c]", "b", True), ("[]]", "]", True),
                                 ("[", "[", True), ("a\\*", "a*", True), ("a\\*", "ab", False), ("a.c", "abc", False)):
            self.assertEqual(facts.glob_matches(glob, name), want, (glob, name))

    def test_sizes(self):
        self.assertEqual([_program.size(n) for n in (0, 999, 1000, 36e9, 9.996e6, 999.6e6, 2.5e12)],
                         ["0 bytes", "999 bytes", "1.00 KB", "36.0 GB", "10.0 MB", "1.00 GB", "2.50 TB"])

    def test_escaping(self):
        text = draw.esc(EVIL + "\ud800\u2028\x00")
        self.assertNotRegex(text, "[<>\"'\x00-\x1f\u202e\u2028\ud800]")
        self.assertEqual(draw.esc("a<b>&\u00e9"), "a&lt;b&gt;&amp;\u00e9")


class Case(OutputCase):
    replaces = True

    def setUp(self):
        super().setUp()
        before = os.getcwd()
        os.chdir(self.dir)
        self.addCleanup(os.chdir, before)

    def weight(self, dtype, shape, seed=1):
        return dtype, shape, mk.random_bytes(dtype, shape, random.Random(seed))

    def small(self, name="m", layers=3, seed=1):
        tensors = {"model.embed_tokens.weight": self.weight("BF16", [32, 64], seed),
                   "model.norm.weight": self.weight("BF16", [64], seed)}
        for i in range(layers):
            tensors[Q % i] = self.weight("BF16", [64, 64], seed * 100 + 2 * i)
            tensors[UP % i] = self.weight("BF16", [128, 64], seed * 100 + 2 * i + 1)
        return self.model(tensors, name=name)

    def convert(self, *args):
        self.ok("-q", *args)

    def command(self, *args, code=0, stdout=subprocess.PIPE, **more):
        """Standard output and standard error of `python -m qconv report`."""
        r = subprocess.run([sys.executable, "-B", "-m", "qconv", "report", *args], stdout=stdout, stderr=subprocess.PIPE,
                           stdin=subprocess.DEVNULL, timeout=300, env=dict(os.environ, PYTHONPATH=PACKAGE), **more)
        self.assertEqual(r.returncode, code, r.stderr)
        return (r.stdout or b"").decode(), r.stderr.decode()

    def refused(self, code, *args, has=()):
        out, err = self.command(*args, code=code)
        self.assertEqual((out, err.count("\n"), err[:7]), ("", 1, "qconv: "), err)
        for text in [has] if isinstance(has, str) else has:
            self.assertIn(text, err)

    def check_page(self, text):
        """The tree of a page that asks for nothing."""
        self.assertIsNone(OUTSIDE.search(text))
        self.assertIn('name="viewport"', text)
        self.assertIn("prefers-color-scheme:dark", text)
        root = ElementTree.fromstring(text[text.index("\n"):])
        scrolled = [t for div in root.iter("div") if div.get("class") == "scroll" for t in div.iter("table")]
        self.assertEqual(scrolled, list(root.iter("table")))
        for table in scrolled:
            head, *rows = table.iter("tr")
            self.assertTrue(rows)
            for i, title in enumerate(head):
                self.assertTrue(any("".join(r[i].itertext()) for r in rows), "".join(title.itertext()))
            self.assertEqual({len(r) for r in rows}, {len(head)})
        links = {a.get("href")[1:] for a in root.iter("a")}
        self.assertLessEqual(links, {h.get("id") for h in root.iter("h2")})
        return root

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


class Facts(Case):
    """tests/golden/report has what `qconv report --json` printed when it was written in C, without counts of codes and its
    command line."""

    OUTPUTS = {
        "nf4": ["--to", "nf4"], "int8": ["--to", "int8", "--keep", "*.layers.1.*"],
        "int4": ["--to", "int4", "--block-size", "32"], "w8a8": ["--to", "int8", "--format", "compressed-tensors"],
        "auto": ["--to", "auto", "--vram", "1.45MB", "--cuda-context", "0", "--context", "16"],
        "placed": ["--to", "nf4", "--scale", "absmax", "--no-double-quant", "--block-size", "32", "--vram", "1GB+1GB",
                   "--compress", "none"]}

    def same(self, got, want, where):
        if isinstance(want, dict):
            self.assertEqual(list(got), list(want), where)
            for key in want:
                self.same(got[key], want[key], where + "." + key)
        elif isinstance(want, list):
            self.assertEqual(len(got), len(want), where)
            for i, value in enumerate(want):
                self.same(got[i], value, "%s[%d]" % (where, i))
        elif isinstance(want, float) and got is not None:
            self.assertTrue(math.isclose(got, want, rel_tol=1e-12), (where, got, want))
        else:
            self.assertEqual(got, want, where)

    def golden(self, name, *args, **more):
        with open(os.path.join(GOLDEN, name + ".json"), encoding="utf-8") as f:
            want = json.load(f)
        got = qconv.report(*args, **more).json
        # What depends on the version, on zstd and on the clock.
        for value in (got, want):
            del value["seconds"], value["program"], value["sizes"]["file_bytes"]
            (value["made"] or {}).pop("qconv_version", None)
            (value["made"] or {}).pop("options", None)
        self.same(got, want, name)

    def test_golden(self):
        os.symlink(MODEL, "model")
        for name, options in self.OUTPUTS.items():
            self.convert(*options, "model", name)
            self.golden(name, name)
        self.golden("nf4-against", "nf4", against="model")
        self.ok("-q", "unpack", "nf4", "plain")
        os.remove("plain/qconv.json")
        self.golden("plain", "plain")
        self.golden("plain-against", "plain", against="model")
        facts_of = qconv.report("int8").json["made"]["options"]
        self.assertEqual((facts_of["rules"], facts_of["compress"]), (["keep *.layers.1.*"], "zstd"))
        facts_of = qconv.report("nf4").json
        self.assertEqual(facts_of["sizes"]["file_bytes"], os.path.getsize("nf4/model.safetensors.zst"))
        self.assertEqual(facts_of["program"], "qconv " + qconv.version())
        self.assertEqual(json.loads(self.command("nf4", "--json", "--threads", "1")[0])["weights"], facts_of["weights"])

    def test_turned_weights(self):
        """Conv1D lies the other way in MODEL; places are those of OUT."""
        names = ["h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight"]
        self.model({names[0]: self.weight("F32", [64, 192]), names[1]: self.weight("F32", [64, 64], 2),
                    "wte.weight": self.weight("F32", [64, 64], 3)}, config={"model_type": "gpt2", "n_layer": 1})
        self.convert("--to", "int8", "m", "o")
        manifest, source = qconv.report("o").json, qconv.report("o", against="m").json
        self.assertEqual([w["name"] for w in source["weights"]], names)
        for a, b in zip(manifest["weights"], source["weights"]):
            self.assertEqual((a["shape"], a["max_at"]), (b["shape"], b["max_at"]))

    def test_another_model(self):
        """The page is written, says so, and the exit code is 4."""
        self.small()
        self.small("other", seed=7)
        self.convert("--to", "nf4", "m", "o")
        _, err = self.command("o", "--against", "other", "--html", "p.html", code=4)
        self.assertIn("qconv: the page is in p.html\nqconv: o: tensor ", err)
        with open("p.html", encoding="utf-8") as f:
            self.assertIn("This is not other", self.words(self.check_page(f.read())))
        with self.assertRaises(qconv.CheckError) as caught:
            qconv.report("o", against="other")
        got = caught.exception.result.json
        self.assertGreater(got["compared"]["faults"], 0)
        self.assertTrue(any(w["fault"] for w in got["weights"]))
        with self.assertRaises(qconv.CheckError) as caught:
            qconv.report("o", against=MODEL)
        got = caught.exception.result
        self.assertEqual(({w["rel_mse"] for w in got.json["weights"]}, got.json["forms"][0]["mean"]), ({None}, None))
        self.assertIn("the error of 6 of 6 weights is not known", self.words(self.check_page(got.html)))

    def test_damage(self):
        self.small()
        self.convert("--to", "nf4", "--compress", "none", "m", "o")
        with open("o/qconv.json", encoding="utf-8") as f:
            manifest = json.load(f)
        at = manifest["shards"][0]["header_bytes"] + next(t["begin"] for t in manifest["tensors"] if t["name"] == Q % 1)
        with open("o/model.safetensors", "r+b") as f:
            f.seek(at)
            byte = f.read(1)
            f.seek(at)
            f.write(bytes([byte[0] ^ 1]))
        with self.assertRaises(qconv.CheckError) as caught:
            qconv.report("o")
        self.assertIn("The output is damaged", self.words(self.check_page(caught.exception.result.html)))
        with open("o/qconv.json", "r+b") as f:
            f.seek(40)
            f.write(b"#")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = qconv.report("o")
        self.assertIsNone(got.json["made"])
        self.assertIn("Note:", self.words(self.check_page(got.html)))

    def test_wrong_inputs(self):
        self.small()
        self.refused(3, "m", has="no weight in it is quantized")
        self.refused(3, "none", has="none")
        self.convert("--to", "nf4", "m", "o")
        for args, has in ((["--eval", "e", "--text", "t"], "--text"), (["--context", "64"], "--context needs --text"),
                          (["--lora", "a"], "--against"), (["--bench", "b"], "--bench"), (["o"], "o")):
            self.refused(2, "o", *args, has=[has, "qconv report --help"])

    def test_calibrated(self):
        self.convert("--to", "nf4", "--hessians", moments.of_model(MODEL, os.path.abspath("m.safetensors"), True), MODEL, "o")
        got = qconv.report("o").json
        outputs = {w["name"]: w["outputs"] for w in got["weights"] if "outputs" in w}
        inspected = {t["name"]: t["calibrated"] for t in qconv.inspect("o").json["tensors"] if "calibrated" in t}
        self.assertEqual((outputs, len(outputs) > 20), (inspected, True))
        self.assertEqual(got["made"]["calibrate"]["hessians"], "m.safetensors")
        self.assertEqual(len(self.table(self.check_page(qconv.report("o").html), ["kind", "rounded"])), 8)

    def test_documented(self):
        """Every member is in docs/report.md, and nothing else is promised there."""
        self.convert("--to", "nf4", "--vram", "1GB+1GB", MODEL, "o")
        got = qconv.report("o", against=MODEL).json
        text = section(docs_page("report.md"), "`qconv report --json`")
        printed = members(got, set())
        self.assertEqual(sorted(printed - set(re.findall(r"`([^`]+)`", text))), [])
        for row in re.findall(r"^\| (`.*?) \|", text, re.M):
            for name in re.findall(r"`(\w+)`", row):
                self.assertIn(name, printed)


class Pages(Case):
    EVAL = {"command": "eval", "path": "o", "against": "m", "text": "a<b>.txt", "model_type": "llama",
            "tokenizer": "bytes", "device": "cpu", "tokens": 1000, "windows": 4, "context": 256, "predicted": 996,
            "perplexity": 19.32, "perplexity_error": 0.5, "base_perplexity": 18.205, "base_perplexity_error": 0.4,
            "difference": 1.115, "difference_error": 0.06, "log_ratio": 0.0594, "log_ratio_error": 0.003,
            "kl_mean": 0.0644, "kl_error": 0.0021, "kl_median": 0.03, "kl_99": 0.5, "kl_max": 2.5, "top1": 0.91,
            "top1_error": 0.009, "probability_rms": 0.05, "seconds": 1.5}

    def write_json(self, name, value):
        self.write(name, json.dumps(value))
        return name

    def test_output(self):
        for to, *more in (("nf4",), ("int8",), ("int4", "--block-size", "32"), ("nf4", "--scale", "absmax")):
            self.convert("--force", "--to", to, *more, MODEL, "o")
            got = qconv.report("o")
            tree = self.check_page(got.html)
            self.assertEqual([self.words(h) for h in tree.iter("h2")], [
                "Size", "Memory per device", "Error of the weights", "Error over the layers", "Worst weights",
                "Not quantized, and why", "Perplexity and KL divergence", "How it was made, and how to check it"])
            self.assertEqual(len(self.table(tree, ["layer"])), 4)
            ranked = sorted(got.json["weights"], key=lambda w: -w["rel_mse"])[:20]
            self.assertEqual([r[0] for r in self.table(tree, ["name", "rel mse"])], [w["name"] for w in ranked])
            heat = sorted((float(self.words(c)), int(c.get("class")[1:])) for c in tree.iter("td")
                          if (c.get("class") or "")[:1] == "h")
            self.assertEqual(len(heat), len({(w["kind"], w["layer"]) for w in got.json["weights"]}))
            self.assertEqual([n for _, n in heat], sorted(n for _, n in heat))
            self.assertEqual((heat[0][1], heat[-1][1]), (0, 9))
            self.assertNotRegex(got.html, r"\b(nan|inf|None)\b")
            self.assertIn("Every byte is what was written", got.html)

    def test_mixture(self):
        """Forms have a mark as well as a colour."""
        self.convert("--to", "auto", "--vram", "1.45MB", "--cuda-context", "0", "--context", "16", MODEL, "o")
        tree = self.check_page(qconv.report("o").html)
        marks = [r[0][0] for r in self.table(tree, ["", "form"])]
        self.assertEqual((len(set(marks)), len(marks) > 2), (len(marks), True))
        for row in self.table(tree, ["layer"]):
            for cell in row[1:]:
                self.assertIn(cell[-1], marks)
        self.assertEqual([r[0] for r in self.table(tree, ["name", "tensor bytes"])], ["cuda:0"])

    def test_hostile_names(self):
        """Names of tensors, files and models are text, whatever is in them."""
        evil = "model.layers.0." + EVIL.replace("/", "") + ".q_proj.weight"
        self.model({evil: self.weight("BF16", [64, 64]), "z" + EVIL: self.weight("BF16", [8])},
                   config={"model_type": EVIL, "architectures": [EVIL]})
        self.convert("--to", "nf4", "m", "o", "--quantize", "model.*")
        got = qconv.report("o", against="m")
        self.assertEqual(got.json["weights"][0]["name"], evil)
        shown = re.sub("[\u202e\x1b]", "?", evil)
        self.assertIn(shown, [r[0] for r in self.table(self.check_page(got.html), ["name", "rel mse"])])
        found = dict(self.EVAL, path=EVIL, against=EVIL, text=EVIL, tokenizer=EVIL, device=EVIL)
        self.check_page(qconv.report("o", eval=self.write_json("e.json", found)).html)

    def test_many(self):
        """A thousand experts, and names without any order: pages stay small."""
        mk.write_model("m", mk.load_model("DeepSeek-V2.5"), layers=5, experts=100, scale=64, seed=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.convert("--to", "nf4", "m", "o")
            got = qconv.report("o")
            self.assertGreater(len(got.json["weights"]), 1000)
            self.assertLess(len(got.html), 1 << 20)
            tree = self.check_page(got.html)
            self.assertEqual(len(self.table(tree, ["name", "rel mse"])), 20)
            self.assertIn("mlp.experts.*.up_proj", got.html)
            self.model({"a%d.%d.weight" % (i, i): self.weight("BF16", [4, 16], i) for i in range(700)}, name="odd")
            self.convert("--to", "nf4", "odd", "p", "--quantize", "*")
            got = qconv.report("p")
        self.assertLess(len(got.html), 1 << 19)
        tree = self.check_page(got.html)
        self.assertIn("too many kinds and layers", got.html)
        self.assertEqual((len(self.table(tree, ["kind", "form"])), len(got.json["kinds"])), (200, 700))

    def test_eval(self):
        """What eval found before is on the page; what it finds now (which takes torch) is what evaluate answers."""
        os.symlink(MODEL, "m")
        self.convert("--to", "nf4", "m", "o")
        made = qconv.Evaluation.from_json(self.EVAL)
        with unittest.mock.patch("qconv._report_facts.evaluate", return_value=made) as asked:
            got = qconv.report("o", against="m", text=HELDOUT, max_tokens=512).json["eval"]
        self.assertEqual((got, asked.call_args.args), (self.EVAL, ("o",)))
        self.assertEqual({k: asked.call_args.kwargs[k] for k in ("text", "max_tokens", "against")},
                         {"text": HELDOUT, "max_tokens": 512, "against": "m"})
        got = qconv.report("o", eval=self.write_json("e.json", self.EVAL))
        self.assertEqual(got.json["eval"], self.EVAL)
        rows = [[self.words(c) for c in r] for r in self.check_page(got.html).iter("tr")]
        for row in ["perplexity", "19.32"], ["kl mean", "0.0644"], ["top1", "0.91"], ["text", "a<b>.txt"]:
            self.assertIn(row, rows)
        for bad in ("[]", "nonsense", "{}", '{"command": "plan"}', '{"command": "eval"}',
                    "[" * 5000):
            self.write("e.json", bad)
            with self.assertRaisesRegex(qconv.InputError, "e.json"):
                qconv.report("o", eval="e.json")

    def test_damaged_results(self):
        """Whatever is in a file of an answer: a page, or one sentence with its name."""
        self.small(layers=1)
        self.convert("--to", "nf4", "m", "o")
        rng = random.Random(5)
        text = json.dumps(self.EVAL)
        values = re.findall(r": ([^,{}\[\]]+)", text)
        for i in range(80):
            at = rng.randrange(len(text))
            self.write("r.json", text[:at] + rng.choice('",:{}[]0-9eE.x') + text[at + 1:] if i % 2 else
                       text.replace(": " + rng.choice(values), ": " + rng.choice(
                           ["null", "-1", "1e308", "[]", "{}", '"x"', "true", "1e-320"]), 1))
            try:
                self.check_page(qconv.report("o", eval="r.json").html)
            except qconv.InputError as error:
                self.assertIn("r.json", str(error))

    def test_terminal(self):
        self.small()
        self.convert("--to", "nf4", "m", "o")
        ours, theirs = pty.openpty()
        try:
            _, err = self.command("o", stdout=theirs, code=2)
            self.assertIn("--html FILE", err)
            _, err = self.command("o", "--html", "p.html", stdout=theirs)
            self.assertEqual(err, "qconv: the page is in p.html\n")
        finally:
            os.close(ours)
            os.close(theirs)
        with open("p.html", encoding="utf-8") as f:
            self.assertEqual(self.command("o")[0], f.read())
        self.assertEqual(self.command("o", "-q", "--html", "q.html"), ("", ""))
        self.assertIn("usage: qconv report", self.command("--help")[0])

    def test_never_replaces_what_is_read(self):
        self.small()
        self.convert("--to", "nf4", "m", "o")
        self.write_json("e.json", self.EVAL)
        os.symlink("m", "link")
        before = {d: sorted((n, os.stat(os.path.join(d, n)).st_mtime_ns) for n in os.listdir(d)) for d in ("o", "m")}
        os.mkfifo("pipe")
        for target in ("o/qconv.json", "o/config.json", "m/model.safetensors", "link/config.json", "e.json", "m", "pipe"):
            with self.assertRaisesRegex(qconv.UsageError, "--html: '%s' is there and is no page" % target):
                qconv.report("o", against="m", eval="e.json", html=target)
        self.refused(1, "o", "--html", "none/p.html", has="--html")
        self.assertEqual(before, {d: sorted((n, os.stat(os.path.join(d, n)).st_mtime_ns) for n in os.listdir(d))
                                  for d in ("o", "m")})
        for _ in range(2):
            qconv.report("o", html="o/report.html")
        self.assertEqual(os.stat("o/report.html").st_mode & 0o777, 0o666 & ~self.mask())
        self.assertEqual([n for n in os.listdir("o") if n.startswith(".")], [])
        shutil.rmtree("o")

    @staticmethod
    def mask():
        mask = os.umask(0)
        os.umask(mask)
        return mask


if __name__ == "__main__":
    unittest.main()
