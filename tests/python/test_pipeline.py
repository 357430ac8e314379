#!/usr/bin/env python3
"""Pipelines of diffusers: the package walks their parts, with the program that $QCONV names."""
import json
import os
import random
import shutil
import subprocess
import sys
import unittest
import warnings
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cli"))
from output_case import OutputCase, PLAIN, tree  # noqa: E402
from qconv_case import QCONV, ROOT  # noqa: E402
import make_checkpoint as mk  # noqa: E402

PACKAGE = os.path.join(ROOT, "python")
sys.path.insert(0, PACKAGE)
os.environ["QCONV_PROGRAM"] = QCONV
import qconv  # noqa: E402
from qconv import _command, _pipeline  # noqa: E402

STEM = "diffusion_pytorch_model"
COPIED = ("README.md", "image_encoder/config.json", "image_encoder/model.safetensors", "model_index.json",
          "scheduler/scheduler_config.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors")


class Case(OutputCase):
    def setUp(self):
        super().setUp()
        before = os.getcwd()
        os.chdir(self.dir)
        self.addCleanup(os.chdir, before)
        caught = warnings.catch_warnings()
        caught.__enter__()
        self.addCleanup(caught.__exit__, None, None, None)
        warnings.simplefilter("ignore", qconv.QconvWarning)
        self.pipeline()

    def save(self, folder, names, stem=STEM, cls="FluxTransformer2DModel", variant="", shards=1, dtype="BF16", seed=1):
        """A part as diffusers saves it, in files of its own names."""
        rng = random.Random(seed)
        tensors = {n: (dtype, [64, 64], mk.random_bytes(dtype, [64, 64], rng)) for n in names}
        os.makedirs(folder, exist_ok=True)
        own = {"_class_name": cls} if stem == STEM else {"model_type": cls, "architectures": [cls]}
        self.write(folder + "/config.json", json.dumps(own, indent=2) + "\n")
        index = {}
        for i in range(shards):
            file = stem + ("." + variant if variant else "") + \
                ("-%05d-of-%05d" % (i + 1, shards) if shards > 1 else "") + ".safetensors"
            mk.write_safetensors(os.path.join(folder, file), {n: tensors[n] for n in sorted(names)[i::shards]})
            index.update({n: file for n in sorted(names)[i::shards]})
        if shards > 1:
            self.write("%s/%s.safetensors.index.json" % (folder, stem), json.dumps({"metadata": {}, "weight_map": index}))

    def pipeline(self):
        self.save("m/transformer", ["blocks.%d.to_q.weight" % i for i in range(3)], shards=2)
        self.save("m/text_encoder", ["encoder.0.q_proj.weight"], stem="model", cls="t5")
        self.save("m/vae", ["conv.weight"], cls="AutoencoderKL")
        self.save("m/vae", ["conv.weight"], cls="AutoencoderKL", dtype="F16", variant="fp16")
        self.save("m/image_encoder", ["q_proj.weight"], stem="model", variant="fp16", cls="clip_vision_model")
        os.mkdir("m/scheduler")
        self.write("m/scheduler/scheduler_config.json", "{}")
        self.write("m/README.md", "text")
        mk.write_safetensors("m/all-in-one.safetensors", {"x": ("U8", [1], b"x")})
        self.write("m/model_index.json", json.dumps({
            "_class_name": "FluxPipeline", "_diffusers_version": "0.42.1", "scheduler": ["diffusers", "X"],
            "text_encoder": ["transformers", "T5"], "text_encoder_2": [None, None],
            "transformer": ["diffusers", "Flux"], "vae": ["diffusers", "AutoencoderKL"],
            "image_encoder": ["transformers", "CLIPVisionModelWithProjection"], "force_zeros": True}, indent=2))

    def refuses(self, kind, words, call, *places, **options):
        with self.assertRaises(kind) as raised:
            call(*places, **options)
        for text in [words] if isinstance(words, str) else words:
            self.assertIn(text, str(raised.exception))


class Index(Case):
    def some(self, chance, depth=0):
        """Any value of JSON, with much of what an index has."""
        kind = chance.randrange(9 if depth < 3 else 6)
        if kind > 6:
            return {self.name(chance): self.some(chance, depth + 1) for _ in range(chance.randrange(5))}
        if kind == 6:
            return [self.some(chance, depth + 1) for _ in range(chance.randrange(4))]
        return [None, True, chance.randrange(-9, 1 << 70), "diffusers", self.name(chance), 0.5][kind]

    @staticmethod
    def name(chance):
        return chance.choice(["vae", "transformer", "../x", "/etc", "", ".", "_class_name", "a/b", "a\\b", "\n", "vae\0"])

    def test_any_text(self):
        """model_index.json may be anything: it is refused, or names parts in the folder."""
        chance = random.Random(36)
        texts = [json.dumps(self.some(chance)) for _ in range(2000)]
        texts += [json.dumps({"vae": self.some(chance)}) for _ in range(500)]
        texts += ["", "{", "[" * 100000, '[["a"]]', "\ufeff{}", json.dumps({"p%d" % i: ["diffusers", "X"] for i in range(200000)})]
        taken = 0
        for text in texts:
            self.write("m/model_index.json", text)
            with self.subTest(text=text[:80]):
                try:
                    source = _pipeline.Source("m")
                    taken += 1
                except qconv.InputError:
                    continue
                for part in source.with_weights:
                    self.assertIn(part, ("vae", "transformer", "text_encoder", "image_encoder"))
        self.assertGreater(taken, 100)


class Convert(Case):
    def test_in_one_go(self):
        done = qconv.convert("m", "o", to="nf4", compress="none")
        self.assertEqual((type(done), done.path, done.out, done.copied), (qconv.Pipeline, "m", "o", COPIED))
        self.assertEqual({n: (type(p), p.out, p.complete_before) for n, p in done.parts.items()}, {
            n: (qconv.Conversion, "o/" + n, False) for n in ("text_encoder", "transformer")})
        self.assertEqual(done.json["parts"]["transformer"], done.parts["transformer"].json)
        found = tree("o")
        self.assertEqual({n for n, data in found.items() if data is not None}, {
            *COPIED, "qconv-pipeline.json", "transformer/config.json", "transformer/qconv.json",
            "transformer/%s.safetensors" % STEM, "text_encoder/config.json", "text_encoder/qconv.json",
            "text_encoder/model.safetensors"})
        source = tree("m")
        for name in COPIED:
            self.assertEqual(found[name], source[name if name != "image_encoder/model.safetensors" else
                                                 "image_encoder/model.fp16.safetensors"], name)
        for part in ("transformer", "text_encoder"):  # as each by itself
            self.ok("-q", "--to", "nf4", *PLAIN, "m/" + part, "alone-" + part)
            self.assertEqual(tree("alone-" + part), tree("o/" + part))

    def test_a_part_that_is_not_there(self):
        shutil.rmtree("m/vae")
        words = "model_index.json names 'vae', and m has no such folder: diffusers does not load the pipeline without"
        with self.assertWarnsRegex(qconv.QconvWarning, words):
            qconv.convert("m", "o", to="nf4")

    def test_continues(self):
        """Interrupted wherever: OUT is no pipeline to a loader, and the same call goes on."""
        qconv.convert("m", "o", to="nf4")
        want = tree("o")
        kept = os.stat("o/transformer/qconv.json").st_ino
        for lost in ("model_index.json", "text_encoder", "vae/config.json"):
            (shutil.rmtree if os.path.isdir("o/" + lost) else os.unlink)("o/" + lost)
            if os.path.exists("o/model_index.json"):
                os.unlink("o/model_index.json")
            again = qconv.convert("m", "o", to="nf4")
            self.assertTrue(again.parts["transformer"].complete_before)
            self.assertEqual(again.parts["text_encoder"].complete_before, lost != "text_encoder")
            self.assertEqual(tree("o"), want, lost)
            self.assertEqual(os.stat("o/transformer/qconv.json").st_ino, kept)
        shutil.rmtree("o")
        for stage in ("copy", "ask"):  # of the second file, of the second part
            real, calls = getattr(_pipeline, stage), []

            def second(*arguments):
                calls.append(arguments)
                if len(calls) == 2:
                    raise KeyboardInterrupt
                return real(*arguments)
            with mock.patch.object(_pipeline, stage, second), self.assertRaises(KeyboardInterrupt):
                qconv.convert("m", "o", to="nf4")
            self.assertFalse(os.path.exists("o/model_index.json"))
        qconv.convert("m", "o", to="nf4")
        self.assertEqual(tree("o"), want)
        os.unlink("o/qconv-pipeline.json")  # without its record OUT is nobody's
        self.refuses(qconv.UsageError, "o is not empty", qconv.convert, "m", "o", to="nf4")

    def test_another_conversion(self):
        """What is there of another model or scheme is not replaced without being told to."""
        qconv.convert("m", "o", to="nf4")
        before = tree("o")
        self.refuses(qconv.UsageError, ["another conversion", "--force"], qconv.convert, "m", "o", to="int8")
        self.save("m/text_encoder", ["encoder.0.q_proj.weight"], stem="model", cls="t5", seed=9)
        self.refuses(qconv.UsageError, ["o/text_encoder", "--force"], qconv.convert, "m", "o", to="nf4")
        self.assertEqual(tree("o"), before)
        qconv.convert("m", "o", to="nf4", force=True)
        self.write("m/README.md", "another text")
        self.refuses(qconv.UsageError, "another conversion", qconv.convert, "m", "o", to="nf4")
        qconv.convert("m", "o", to="nf4", force=True)
        qconv.convert("m", "fresh", to="nf4")
        self.assertEqual(tree("o"), tree("fresh"))
        self.refuses(qconv.UsageError, "has the converted part 'text_encoder', which is now to be copied", qconv.convert,
                     "m", "o", to="nf4", keep="text_encoder", force=True)

    def test_refused_before_the_start(self):
        """Whatever is wrong with the last part is said before the first is converted."""
        mk.write_safetensors("m/transformer/%s-00002-of-00002.safetensors" % STEM,
                             {"blocks.1.to_q.weight": ("I8", [64, 64], bytes(4096))})
        self.refuses(qconv.InputError, "blocks.1.to_q.weight", qconv.convert, "m", "o", to="nf4")
        for options in ({"vram": "24GB"}, {"part": "1/2"}, {"calibrate": "default"}, {"for_": "vllm"}, {"lora": ["x"]},
                        {"drop_mtp": True}, {"recipe": "r.json"}):
            self.refuses(qconv.UsageError, ["--%s is for one model" % list(options)[0].rstrip("_").replace("_", "-"),
                                            "convert the folder of each part by itself"],
                         qconv.convert, "m", "o", to="nf4", **options)
        with mock.patch.dict(os.environ, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}):
            self.refuses(qconv.UsageError, "a Slurm step of several tasks", qconv.convert, "m", "o", to="nf4")
        self.refuses(qconv.UsageError, "inside its source", qconv.dry_run("m", to="keep") and qconv.convert, "m", "m/o",
                     to="keep")
        self.assertEqual(os.listdir(), ["m"])

    def test_choice_of_parts(self):
        qconv.convert("m", "o", to="nf4", compress="none", keep="text_encoder*", quantize="image_encoder")
        found = tree("o")
        self.assertEqual(found["text_encoder/model.safetensors"], tree("m")["text_encoder/model.safetensors"])
        self.assertIn("image_encoder/qconv.json", found)
        qconv.verify("o")
        self.refuses(qconv.UsageError, ["'*to_q*'", "by itself"], qconv.convert, "m", "p", to="nf4", keep="*to_q*")
        self.refuses(qconv.InputError, "--quantize PART", qconv.convert, "m", "p", to="nf4", keep=["t*"])

    def test_variants_of_one_file(self):
        for variant in ("bf16", "fp16"):
            self.save("m/safety_checker", ["w"], stem="model", variant=variant)
        self.refuses(qconv.InputError, "are variants of one file", qconv.convert, "m", "o", to="nf4")

    def test_links_are_not_followed_out(self):
        self.write("secret", "secret")
        os.symlink("../../secret", "m/vae/notes.txt")
        self.refuses(qconv.InputError, ["'vae/notes.txt'", "link"], qconv.convert, "m", "o", to="nf4")

    def test_other_functions(self):
        for call in (lambda: qconv.plan("m", vram="24GB"), lambda: qconv.inspect("m"),
                     lambda: qconv.call("convert", "m", "o", to="nf4")):
            self.refuses(qconv.InputError, ["diffusers pipeline", "'text_encoder', 'transformer', 'vae'"], call)


class Outputs(Case):
    def test_verify_unpack(self):
        qconv.convert("m", "o", to="nf4", compress="none")
        qconv.convert("m", "z", to="nf4")
        done = qconv.unpack("z", "u")
        self.assertEqual({type(p) for p in done.parts.values()}, {qconv.Unpacking})
        self.assertEqual(tree("u"), tree("o"))
        self.assertTrue(qconv.unpack("z", "u").parts)
        found = qconv.verify("z")
        self.assertEqual((sorted(found.parts), found.copied), (["text_encoder", "transformer"], COPIED))
        self.assertTrue(all(type(p) is qconv.Verification and p.ok for p in found.parts.values()))
        against = qconv.verify("z", against="m")
        self.assertTrue(all(type(p) is qconv.Comparison and p.ok for p in against.parts.values()))
        with open("z/vae/%s.safetensors" % STEM, "r+b") as f:
            f.seek(-1, 2)
            f.write(b"\x55")
        self.refuses(qconv.CheckError, "z: vae/" + STEM, qconv.verify, "z")
        self.refuses(qconv.CheckError, "z: vae/" + STEM, qconv.unpack, "z", "u2")
        os.unlink("z/vae/%s.safetensors" % STEM)
        self.refuses(qconv.CheckError, "the file is missing", qconv.verify, "z")
        with open("o/transformer/%s.safetensors" % STEM, "r+b") as f:
            f.seek(-1, 2)
            f.write(b"\x55")
        self.refuses(qconv.CheckError, "o/transformer", qconv.verify, "o")
        shutil.rmtree("o/transformer")
        for call in (qconv.verify, lambda out: qconv.unpack(out, "v")):
            self.refuses(qconv.CheckError, ["'transformer'", "missing"], call, "o")
        self.refuses(qconv.InputError, "m has no qconv-pipeline.json", qconv.verify, "m")

    def test_dry_run(self):
        dry = qconv.dry_run("m", to="nf4")
        self.assertEqual(({type(p) for p in dry.parts.values()}, dry.out, dry.copied), ({qconv.DryRun}, None, COPIED))
        self.assertEqual(os.listdir(), ["m"])


class CommandLine(Case):
    def run_package(self, *arguments):
        return subprocess.run([sys.executable, "-m", "qconv", *arguments], env={**os.environ, "PYTHONPATH": PACKAGE},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_commands(self):
        """They are handed to the walk by the entry point, and print what the program prints of each part."""
        r = self.run_package("--to", "nf4", "--compress", "none", "m", "o")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("m is a diffusers pipeline: 'text_encoder', 'transformer' are converted, everything else (7 files) "
                      "is copied", r.stderr)
        self.assertEqual(r.stdout.count("loads in"), 2)
        qconv.convert("m", "api", to="nf4", compress="none")
        self.assertEqual(tree("o"), tree("api"))
        r = self.run_package("verify", "o", "--against", "m", "-q")
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        self.assertEqual(self.run_package("verify", "o").stdout.count("verified"), 2)
        r = self.run_package("unpack", "o", "u", "--json")
        self.assertEqual(sorted(json.loads(r.stdout)["parts"]), ["text_encoder", "transformer"])
        r = self.run_package("convert", "--dry-run", "--json", "--to=nf4", "--keep", "text*", "m")
        self.assertEqual(list(json.loads(r.stdout)["parts"]), ["transformer"])
        for arguments, code, words in [(["--to", "nf4", "m"], 2, "expected MODEL and OUT"), (["m", "p"], 2, "--to"),
                                       (["--to", "nf5", "m", "p"], 2, "--to"), (["verify", "m"], 3, "qconv-pipeline"),
                                       (["--to", "nf4", "--part", "1/2", "m", "p"], 2, "--part is for one model"),
                                       (["inspect", "m"], 3, "is a diffusers pipeline"),
                                       (["--to", "nf4", "m/vae", "o"], 2, "o")]:
            r = self.run_package(*arguments)
            self.assertEqual((r.returncode, r.stdout, r.stderr.count("\n")), (code, "", 1), r.stderr)
            self.assertIn(words, r.stderr)

    def test_what_is_handed_on(self):
        for argv, want in [(["--to", "nf4", "m", "o"], "convert"), (["m", "o"], "convert"), (["verify", "m"], "verify"),
                           (["convert", "m", "--help"], None), (["inspect", "m"], None), (["m/vae", "m"], None),
                           (["verify", "m/vae", "--against", "m"], None), (["plan", "m", "--vram", "1GB"], None), ([], None)]:
            self.assertEqual((_command.wanted(argv) or [None])[0], want, argv)
        typed, places, rules = _pipeline.split(["convert", "--to", "nf4", "--force", "-q", "a", "--keep=x", "--quantize",
                                                "y", "--keep", "z", "--", "--b"])
        self.assertEqual((typed, places), (["--to=nf4", "--force", "-q"], ["a", "--b"]))
        self.assertEqual(rules, [("keep", "x"), ("quantize", "y"), ("keep", "z")])


if __name__ == "__main__":
    unittest.main()
