"""Going on with a conversion: what continues, what refuses and says which, what is made again."""
import json
import os
import random
import shutil
import struct
import subprocess
import unittest

from output_case import AT_CALL, OutputCase, PLAIN, STAGING, at_call, tree
from qconv_case import QCONV
import make_checkpoint as mk

Q = "model.layers.%d.self_attn.q_proj.weight"
JOURNAL = "journal-00001-of-00001"
SMALL, LARGE = [64, 64], [512, 512]


class ContinueCase(OutputCase):
    """Four small weights and a large one; no file may grow to what the large one takes, so a run
    of one thread stops behind the small ones."""

    def setUp(self):
        super().setUp()
        rng = random.Random(11)
        self.tensors = {Q % i: ("BF16", SMALL if i < 4 else LARGE,
                                mk.random_bytes("BF16", SMALL if i < 4 else LARGE, rng))
                        for i in range(5)}
        self.tensors["model.norm.weight"] = ("F32", [64], mk.random_bytes("F32", [64], rng))
        self.config = {"model_type": "llama", "hidden_size": 64}
        self.model(self.tensors, config=self.config, shard_bytes=20000)
        self.write("m/tokenizer.json", "{}")

    def partial(self, *args, left=STAGING):
        r = subprocess.run(["sh", "-c", 'ulimit -f 100; exec "$@"', "sh", QCONV, "-q", "--threads",
                            "1", *args], cwd=self.dir, stderr=subprocess.PIPE)
        self.assertEqual(r.returncode, 1, r.stderr)
        self.assertIn(b"the same command continues", r.stderr)
        self.assertIn(left, os.listdir(self.path(args[-1])))
        return int(r.stderr.split(b" tensors are done")[0].split()[-3])

    def reference(self, *args):
        self.ok("-q", *args, "m", "reference")
        want = tree(self.path("reference"))
        shutil.rmtree(self.path("reference"))
        return want

    def go_on(self, *args, **more):
        return json.loads(self.ok("-q", "--json", *args, **more))["continued"]

    def staged(self, end=".zst"):
        return sorted(self.path("o", STAGING, n) for n in os.listdir(self.path("o", STAGING))
                      if n.endswith(end))


class Continues(ContinueCase):
    def test_what_has_no_say_in_the_bytes(self):
        want = self.reference("--to", "nf4")
        form = ["--to", "nf4"]
        for args, more in [(["--threads", "3"], {}), (["--device", "cpu"], {}),
                           ([], {"env": dict(os.environ, QCONV_ISA="scalar")}),
                           (["--force"], {})]:
            done = self.partial(*form, "m", "o")
            found = self.go_on(*form, *args, "m", "o", **more)
            self.assertEqual(found["tensors_kept"], done)
            self.assertEqual(tree(self.path("o")), want)
            shutil.rmtree(self.path("o"))

    def test_moved_and_touched(self):
        want = self.reference("--to", "nf4")
        done = self.partial("--to", "nf4", "m", "o")
        shutil.copytree(self.path("m"), self.path("copy"))
        for name in os.listdir(self.path("copy")):
            os.utime(self.path("copy", name), (10 ** 9, 10 ** 9))
        os.rename(self.path("o"), self.path("elsewhere"))
        shutil.rmtree(self.path("m"))
        found = self.go_on("--to", "nf4", "copy", "elsewhere")
        self.assertEqual(found["tensors_kept"], done)
        self.assertEqual(tree(self.path("elsewhere")), want)

    def test_touched_in_every_form(self):
        """Digests of the source are computed anew as they were the first time."""
        fp8 = {"model_type": "deepseek_v3", "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
        rng = random.Random(4)
        weights = {}
        for i in range(4):
            shape = [130, 140] if i < 3 else [600, 512]
            weights["model.layers.%d.mlp.up_proj.weight" % i] = (
                "F8_E4M3", shape, bytes(rng.choice((0x31, 0xb2, 0x38)) for _ in range(
                    shape[0] * shape[1])))
            weights["model.layers.%d.mlp.up_proj.weight_scale_inv" % i] = (
                "F32", [-(-shape[0] // 128), -(-shape[1] // 128)],
                mk.random_bytes("F32", [-(-shape[0] // 128), -(-shape[1] // 128)], rng))
        gpt2 = {"h.%d.attn.c_attn.weight" % i: ("F32", [48, 33] if i < 3 else [480, 333],
                mk.random_bytes("F32", [48, 33] if i < 3 else [480, 333], rng)) for i in range(4)}
        self.model(weights, config=fp8, name="fp8")
        self.model(gpt2, config={"model_type": "gpt2"}, name="gpt2")
        self.ok("-q", "--to", "nf4", *PLAIN, "m", "q")
        when = 10 ** 9
        for name, form in [("fp8", ["--to", "nf4"]), ("fp8", ["--to", "bf16"]),
                           ("gpt2", ["--to", "int8"]), ("gpt2", ["--to", "nf4"]),
                           ("gpt2", ["--to", "fp16"]), ("q", ["--to", "bf16"]),
                           ("m", ["--to", "fp16"])]:
            self.ok("-q", *form, name, "want")
            done = self.partial(*form, name, "o")
            when += 1
            for n in os.listdir(self.path(name)):
                os.utime(self.path(name, n), (when, when))
            kept = self.go_on(*form, name, "o")["tensors_kept"]
            if name in ("fp8", "q"):  # their scales are in no digest, so they are made again
                self.assertLess(kept, done, (name, form))
            else:
                self.assertEqual(kept, done, (name, form))
            self.assert_same("o", "want")
            shutil.rmtree(self.path("o"))
            shutil.rmtree(self.path("want"))

    @unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
    def test_scales_that_changed(self):
        """A weight is to be made again because of them, and the run that knows it dies."""
        config = {"model_type": "deepseek_v3", "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
        name = "model.layers.%d.mlp.up_proj.weight"
        weights = {}
        for i in range(3):
            shape = [128, 64] if i < 2 else [512, 512]
            weights[name % i] = ("F8_E4M3", shape, b"\x31" * (shape[0] * shape[1]))
            blocks = [-(-n // 128) for n in shape]
            weights[name % i + "_scale_inv"] = (
                "F32", blocks, struct.pack("<f", 0.5) * (blocks[0] * blocks[1]))
        form = ["--to", "bf16", *PLAIN]
        self.model(weights, config=config, name="fp8")
        self.assertEqual(self.partial(*form, "fp8", "o"), 2)
        weights[name % 0 + "_scale_inv"] = ("F32", [1, 1], struct.pack("<f", 0.25))
        self.model(weights, config=config, name="fp8")
        r = subprocess.run([QCONV, "-q", *form, "fp8", "o"], cwd=self.dir, env=dict(
            os.environ, **at_call("write:1", "/model", "kill -9 $PPID")))
        self.assertEqual(r.returncode, -9)
        self.go_on(*form, "fp8", "o")
        self.ok("-q", *form, "fp8", "want")
        self.assert_same("o", "want")

    @unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
    def test_shards_are_open_until_they_are_synced(self):
        """The kernel keeps the news of a failed write as long as somebody has the file open."""
        small = {Q % i: self.tensors[Q % 0] for i in range(6)}
        self.model(small, config=self.config, name="m", shard_bytes=10 ** 9)
        self.ok("-q", "--to", "bf16", "--max-shard-size", "10KB", "m", "o", env=at_call(
            "sync:1", "/model-00001", "ls -l /proc/$PPID/fd | grep -c partial/model-00001 >handles"))
        with open(self.path("handles")) as f:
            self.assertGreater(int(f.read()), 1)

    def test_says_so(self):
        self.partial("--to", "nf4", "m", "o")
        text = self.ok("--to", "nf4", "m", "o")
        self.assertRegex(text, r"\n  continued \d tensors kept, 1 made again\n")
        self.assertNotIn("continued", self.ok("--to", "nf4", "m", "o"))
        self.assertIsNone(self.go_on("--to", "nf4", "m", "o"))

    def test_more_shards_than_handles(self):
        form = ["--to", "nf4", "--max-shard-size", "1B"]
        small = {"model.layers.%d.mlp.up_proj.weight" % i: ("F32", [32, 32], bytes(4096))
                 for i in range(120)}
        self.model({**small, Q % 999: self.tensors[Q % 4]}, config=self.config, name="m",
                   shard_bytes=10 ** 9)
        want = self.reference(*form)
        done = self.partial(*form, "m", "o")
        r = subprocess.run(["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", QCONV, "-q", "--json",
                            "--threads", "3", *form, "m", "o"], cwd=self.dir,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual((r.returncode, r.stderr), (0, b""))
        self.assertEqual(json.loads(r.stdout)["continued"]["tensors_kept"], done)
        self.assertEqual(tree(self.path("o")), want)

    def test_names_that_are_ours(self):
        """Files of the source that are called as those of the staging folder."""
        for name in ["lock", "lock-00001-of-00001", JOURNAL, "sub/lock"]:
            os.makedirs(os.path.dirname(self.path("m", name)), exist_ok=True)
            self.write("m/" + name, name)
        want = self.reference("--to", "nf4")
        self.assertEqual(want[JOURNAL], JOURNAL.encode())
        self.partial("--to", "nf4", "m", "o")
        self.assertEqual(self.go_on("--to", "nf4", "m", "o")["tensors_redone"], 1)
        self.assertEqual(tree(self.path("o")), want)


class Refuses(ContinueCase):
    def refuse(self, code, *args, has=()):
        before = tree(self.path("o"))
        self.fails(code, *args, has=[*has, "--restart", "o"])
        after = tree(self.path("o"))
        self.assertEqual(after, before)

    def test_other_options(self):
        form = ["--to", "nf4"]
        self.partial(*form, "m", "o")
        for other, has in [
                (["--to", "int8"], ["--to was 'nf4' then and is 'int8' now"]),
                ([*form, "--block-size", "128"], ["--block-size", "'128'"]),
                ([*form, "--no-double-quant"], ["--no-double-quant"]),
                ([*form, "--scale", "absmax"], ["--scale", "'search'", "'absmax'"]),
                ([*form, "--rest", "bf16"], ["--rest", "'keep'", "'bf16'"]),
                ([*form, "--compute-dtype", "float32"], ["--compute-dtype", "'float32'"]),
                ([*form, "--compress", "zstd:3"], ["--compress", "'zstd:1'", "'zstd:3'"]),
                ([*form, *PLAIN], ["--compress", "'none'"]),
                ([*form, "--max-shard-size", "10KB"], ["--max-shard-size", "'10000'"]),
                ([*form, "--keep", Q % 0], ["--keep", Q % 0])]:
            self.refuse(2, *other, "m", "o", has=has)
        self.ok("-q", *form, "m", "o")

    def test_restart(self):
        self.partial("--to", "nf4", "m", "o")
        want = self.reference("--to", "int8")
        self.assertIsNone(self.go_on("--to", "int8", "--restart", "m", "o"))
        self.assertEqual(tree(self.path("o")), want)
        # Nothing to give up is fine.
        self.assertIsNone(self.go_on("--to", "int8", "--restart", "m", "o"))
        self.assertEqual(tree(self.path("o")), want)

    def test_restart_that_stops_too(self):
        self.partial("--to", "nf4", "m", "o")
        done = self.partial("--to", "int8", "--restart", "m", "o")
        self.assertEqual(self.go_on("--to", "int8", "m", "o")["tensors_kept"], done)

    def test_other_source(self):
        """Another order of the same names in a header, another config.json. Bytes of weights:
        test_resume.py."""
        self.partial("--to", "nf4", "m", "o")
        path = self.path("m", "model-00001-of-00004.safetensors")
        with open(path, "rb") as f:
            old = f.read()
        length = int.from_bytes(old[:8], "little")
        header = old[8:8 + length]
        body = json.loads(header)
        new = json.dumps(dict(reversed(body.items())), separators=(",", ":")).encode()
        with open(path, "wb") as f:
            f.write(old[:8] + new.ljust(length) + old[8 + length:])
        self.refuse(3, "--to", "nf4", "m", "o", has=["source.1"])
        with open(path, "wb") as f:
            f.write(old)
        config = self.path("m", "config.json")
        with open(config) as f:
            text = f.read()
        with open(config, "w") as f:
            f.write(text.replace("64", "65"))
        self.refuse(3, "--to", "nf4", "m", "o", has=["source.config"])
        with open(config, "w") as f:
            f.write(text)
        self.assertIsNotNone(self.go_on("--to", "nf4", "m", "o"))

    def test_other_source_of_the_same_time(self):
        """Nobody sees it, unless something of it is to be made again."""
        want = self.reference("--to", "nf4")
        self.partial("--to", "nf4", "m", "o")
        old = {}
        for name in os.listdir(self.path("m")):
            path = self.path("m", name)
            if name.endswith(".safetensors") and os.path.getsize(path) < 100000:
                stat = os.stat(path)
                with open(path, "rb") as f:
                    old[name] = (f.read(), stat)
                self.change_byte(path, -1)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        for path in self.staged():
            os.truncate(path, 100)
        self.fails(3, "-q", "--to", "nf4", "m", "o", has=["made again", "tensor 'model.", "--restart"])
        for name, (data, stat) in old.items():
            with open(self.path("m", name), "wb") as f:
                f.write(data)
            os.utime(self.path("m", name), ns=(stat.st_atime_ns, stat.st_mtime_ns))
        self.assertIsNotNone(self.go_on("--to", "nf4", "m", "o"))
        self.assertEqual(tree(self.path("o")), want)

    @unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
    def test_half_moved_and_another_source(self):
        """Its files are in OUT or on their way, and what they were made of is no longer there."""
        for call, file in (("rename:2", "qconv.json"), ("unlink:1", "journal-0")):
            with self.subTest(call=call):
                shutil.rmtree(self.path("o"), ignore_errors=True)
                r = subprocess.run([QCONV, "-q", "--to", "nf4", "m", "o"], cwd=self.dir, env=dict(
                    os.environ, **at_call(call, file, "kill -9 $PPID")))
                self.assertEqual(r.returncode, -9)
                name = max(n for n in os.listdir(self.path("m")) if n.endswith(".safetensors"))
                path = self.path("m", name)
                with open(path, "rb") as f:
                    data = f.read()
                self.change_byte(path, -1)
                self.fails(3, "-q", "--to", "nf4", "m", "o", has=["has changed since", "--restart"])
                with open(path, "wb") as f:  # as it was, at another time
                    f.write(data)
                self.ok("-q", "--to", "nf4", "m", "o")
                self.ok("verify", "-q", "o", "--against", "m")

    @unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
    def test_half_moved_and_lost(self):
        """Only --restart helps, and nothing else is said."""
        r = subprocess.run([QCONV, "-q", "--to", "nf4", "m", "o"], cwd=self.dir, env=dict(
            os.environ, **at_call("rename:2", "qconv.json", "kill -9 $PPID")))
        self.assertEqual(r.returncode, -9)
        moved = [n for n in os.listdir(self.path("o")) if n.endswith(".zst")]
        os.remove(self.path("o", moved[0]))
        line = self.fails(1, "-q", "--to", "nf4", "m", "o", has=[moved[0], "--restart"])
        self.assertNotIn("continues", line)
        self.ok("-q", "--to", "nf4", "--restart", "m", "o")
        self.ok("verify", "o")

    def test_half_moved_and_given_up(self):
        """Files of a dead run in OUT, no manifest: qconv's all the same, whatever comes between."""
        want = self.reference("--to", "int8")
        self.ok("-q", "--to", "nf4", "m", "o")
        os.mkdir(self.path("o", STAGING))
        for name in ["qconv.json", "model.safetensors.zst"]:
            os.rename(self.path("o", name), self.path("o", STAGING, name))
        self.partial("--to", "int8", "--restart", "m", "o")
        self.partial("--to", "nf4", "--restart", "--max-shard-size", "10KB", "m", "o")
        bad = dict(self.tensors)
        bad[Q % 0] = ("BF16", SMALL, b"\xff\x7f" + bytes(2 * 64 * 64 - 2))
        self.model(bad, config=self.config, name="bad")
        self.fails(3, "--to", "nf4", "--restart", "bad", "o", has=["not finite"])
        self.ok("-q", "--to", "int8", "m", "o")
        self.assertEqual(tree(self.path("o")), want)

    def test_unpack_leaves_it_alone(self):
        self.ok("-q", "--to", "nf4", "m", "whole")
        self.partial("--to", "nf4", "m", "o")
        before = tree(self.path("o"))
        self.fails(2, "unpack", "whole", "o", has=["interrupted conversion", "choose another"])
        self.assertEqual(tree(self.path("o")), before)

    def test_a_journal_of_something_else(self):
        self.partial("--to", "nf4", "m", "o")
        with open(self.path("o", STAGING, JOURNAL), "r+b") as f:
            f.write(b"QCJRNL2\n")
        before = tree(self.path("o"))
        self.fails(3, "--to", "nf4", "m", "o", has=[JOURNAL])
        self.assertEqual(tree(self.path("o")), before)
        self.ok("-q", "--to", "nf4", "--restart", "m", "o")

    def test_bad_input_leaves_nothing(self):
        bad = dict(self.tensors)
        bad[Q % 4] = ("BF16", LARGE, b"\xff\x7f" + bytes(2 * 512 * 512 - 2))
        self.model(bad, config=self.config, name="bad", shard_bytes=20000)
        self.fails(3, "--to", "nf4", "--threads", "1", "bad", "o", has=["not finite"])
        self.assert_nothing("o")


if __name__ == "__main__":
    unittest.main()
