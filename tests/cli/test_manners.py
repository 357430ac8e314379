"""Streams, exit codes and progress of the commands that work. Interruption: test_survive.py."""
import json
import os
import pathlib
import resource
import shutil
import subprocess
import unittest

from qconv_case import QCONV, SANITIZED, QconvCase
import make_checkpoint as mk


class Manners(QconvCase):
    scale = "absmax"

    def setUp(self):
        super().setUp()
        mk.write_model(self.path("m"), mk.load_model("Llama-3.1-8B"), layers=2, scale=64, seed=1)

    def test_summary(self):
        text = self.ok("--to", "nf4", "m", "o")
        lines = text.split("\n")
        self.assertEqual(lines[0], "converted m -> o as nf4, compressed (.safetensors.zst)")
        plain = self.ok("--to", "nf4", "--compress", "none", "m", "p")
        self.assertEqual(plain.split("\n")[0], "converted m -> p as nf4")
        for word in ["size", "bits", "tensors", "worst", "time"]:
            self.assertRegex(text, r"(?m)^  %s +\S" % word)
        self.assertRegex(text, r"\d\.\d\d s, [\d.]+ .B/s in, [\d.]+ .B/s out")

    def test_summary_ends_with_the_next_step(self):
        """Copied to a shell as it is, from a folder with any name."""
        for out in ["o", "my out", "it's $HOME", "a\nb", "-x", "o/"]:
            text = self.ok("--to", "nf4", "--scale", "search", "--force", "--", "m", out)
            self.assertIn("  loads in  qconv.load, vLLM with qconv's plug-in; as plain files in "
                          "transformers 4 and 5 with bitsandbytes\n", text)
            lines = text.split("\n")
            self.assertIn("    import qconv", lines)
            seen = []
            exec(next(t for t in lines if "qconv.load(" in t).strip(),
                 {"qconv": type("Q", (), {"load": seen.append})})
            self.assertEqual(seen, [out])
            serve = next(t for t in lines if t.strip().startswith("vllm "))
            code = "vllm() { printf '%%s\\n' \"$@\"; }\n%s" % serve  # as a shell reads it
            r = subprocess.run(["bash", "-c", code], stdout=subprocess.PIPE, check=True)
            self.assertEqual(r.stdout.decode().replace("./-x", "-x"), "serve\n%s\n" % out)
            line = next(t for t in lines if " unpack " in t)
            r = subprocess.run(["bash", "-c", line], cwd=self.dir, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
            self.assertEqual((r.returncode, r.stderr), (0, b""), (out, line))
            self.assertTrue(os.path.exists(self.path(out.rstrip("/") + "-plain", "model.safetensors")))
            python = next(t for t in text.split("\n") if ".from_pretrained(" in t).strip()
            seen = []
            exec(python, {"AutoModelForCausalLM": type("M", (), {"from_pretrained": seen.append})})
            self.assertEqual(os.path.normpath(seen[0]), os.path.normpath(out) + "-plain")
            shutil.rmtree(self.path(out.rstrip("/") + "-plain"))
        text = self.ok("--to", "nf4", "--compress", "none", "m", "p")
        self.assertIn("  loads in  transformers 4 and 5 with bitsandbytes, qconv.load, vLLM with qconv's plug-in\n",
                      text)
        self.assertIn('from_pretrained("p")', text)
        self.assertIn('qconv.load("p")', text)
        self.assertNotIn("unpack", text)

    def test_what_to_do_is_said(self):
        """Names of modules, a budget in another spelling, weights without a config.json, a download
        that is not whole."""
        self.fails(2, "--to", "nf4", "--dry-run", "--keep", "*.self_attn.q_proj", "m",
                   has="matches no tensor, but modules; did you mean '*.self_attn.q_proj.weight'?")
        self.fails(2, "--to", "nf4", "--keep", "model.nrom.weight", "m", "o", has="did you mean 'model.norm.weight'?")
        self.ok("-q", "--to", "nf4", "--vram", "2x40G", "m", "fitted")
        for same in ("2x40GB", "2 x 40 gb"):
            self.assertIn("is complete already", self.ok("--to", "nf4", "--vram", same, "m", "fitted"))
        os.mkdir(self.path("bare"))
        shutil.copy(self.path("m", "model.safetensors"), self.path("bare"))
        for to in ("nf4", "bf16"):
            text = self.ok("--compress", "none", "--force", "--to", to, "bare", "o")
            self.assertIn("  loads in  nothing, because there is no config.json\n", text)
            self.assertNotIn("from_pretrained", text)
        os.rename(self.path("bare", "model.safetensors"), self.path("bare", "model.safetensors.incomplete"))
        self.fails(3, "--to", "nf4", "--dry-run", "bare",
                   has="but model.safetensors.incomplete, which is not whole: download it again")

    def test_unpacked_in_place(self):
        """What another folder would get, also where the files were on their way when it stopped; a
        damaged output stays as it is."""
        def holds(folder):
            return {name: pathlib.Path(self.path(folder, name)).read_bytes()
                    for name in sorted(os.listdir(self.path(folder)))}

        self.ok("--to", "nf4", "m", "o")
        self.ok("unpack", "o", "plain")
        packed, plain = holds("o"), holds("plain")
        shard, = set(plain) - set(packed)
        shutil.copytree(self.path("o"), self.path("damaged"))
        with open(self.path("damaged", shard + ".zst"), "r+b") as f:
            f.seek(len(packed[shard + ".zst"]) // 2)
            f.write(b"damaged")
        before = holds("damaged")
        self.assertEqual(self.run_qconv("unpack", "damaged").returncode, 4)
        self.assertEqual(holds("damaged"), before)
        self.fails(2, "unpack", "o", "--device", "cpu", has="DIR is missing")
        # Two of the moments in which it can stop: all is staged, and half of it has moved.
        for moved in (False, True):
            folder, staged = self.path("stopped"), self.path("stopped", ".qconv-partial")
            shutil.copytree(self.path("o"), folder)
            os.mkdir(staged)
            for name in plain:
                shutil.copy(self.path("plain", name), staged)
            if moved:
                os.rename(os.path.join(staged, shard), os.path.join(folder, shard))
                os.remove(os.path.join(folder, shard + ".zst"))
                os.remove(os.path.join(folder, "qconv.json"))
            self.ok("unpack", "stopped")
            self.assertEqual(holds("stopped"), plain)
            shutil.rmtree(folder)
        self.ok("unpack", "o")
        self.assertEqual(holds("o"), plain)
        self.assertIn(b"o has plain files already", self.run_qconv("unpack", "o").stderr)

    def test_forms_of_qconv_only(self):
        """Said once, before the work, in every command that leads there."""
        own = ["--to", "int8", "--block-size", "64"]
        for args in [[*own, "m", "o"], [*own, "--dry-run", "m"], ["plan", *own, "m", "--vram", "8GB"]]:
            r = self.run_qconv(*args)
            self.assertEqual((r.returncode, r.stderr.count(b"only qconv reads this form (int8-block)")),
                             (0, 1), r.stderr)
            self.assertIn(b"--to int8 without --block-size makes what it loads", r.stderr)
            loads = json.loads(self.ok("--json", *args) if args[0] != "plan" else
                               self.ok(*args, "--json"))["loads"]
            self.assertEqual((loads["form"], loads["transformers"], loads["instead"]),
                             ("int8-block", [], "--to int8 without --block-size"))
        text = self.ok(*own, "--force", "m", "o")
        self.assertIn("  loads in  qconv.load, vLLM with qconv's plug-in\n", text)
        self.assertIn('qconv.load("o")', text)
        self.assertIn("    vllm serve o\n", text)
        self.assertNotIn("from_pretrained", text)
        self.assertRegex(text, r"--to bf16 --compress none o o-bf16\n")
        for args in [["--to", "nf4", "--dry-run", "m"], ["--to", "bf16", "--force", "m", "o"]]:
            r = self.run_qconv(*args)
            self.assertEqual((r.returncode, r.stderr), (0, b""))
            self.assertIn(b"transformers 4 and 5", r.stdout)

    def test_forms_of_transformers_4_only(self):
        """Numbered experts and Falcon, said before the work with what helps; and F32 beside a
        config.json of 16 bit."""
        def model(folder, tensors, **config):
            os.makedirs(self.path(folder), exist_ok=True)
            mk.write_safetensors(self.path(folder, "model.safetensors"), {
                name: (dtype, shape, mk.encode(dtype, [0.5] * (shape[0] * shape[-1] if len(shape) > 1
                                                               else shape[0])))
                for name, (dtype, shape) in tensors.items()})
            with open(self.path(folder, "config.json"), "w") as f:
                json.dump(config, f)

        layer = "model.layers.0."
        q, w = layer + "self_attn.q_proj.weight", "BF16"
        expert = layer + "block_sparse_moe.experts.%d.w1.weight"
        model("moe", {q: (w, [64, 64]), **{expert % i: (w, [64, 96]) for i in range(2)}},
              model_type="mixtral")
        model("falcon", {"transformer.h.0.mlp.dense_h_to_4h.weight": (w, [256, 64])},
              model_type="falcon")
        norm = layer + "input_layernorm."
        model("phi", {q: (w, [64, 64]), norm + "weight": ("F32", [64]), norm + "bias": ("F32", [64])},
              model_type="phi", dtype="bfloat16")
        experts, falcon, rest = b"75% of what is quantized", b"no quantized Falcon", b"add --rest bf16"
        for to in ("nf4", "int8"):
            for name, want in (("moe", experts), ("falcon", falcon), ("phi", rest)):
                for args in (["--dry-run", "--to", to, name], ["--force", "--to", to, name, "o"]):
                    r = self.run_qconv(*args)
                    self.assertEqual((r.returncode, r.stderr.count(want)), (0, 1), r.stderr)
                    only = b" in transformers 4 with bitsandbytes"
                    after = b" (5 after import qconv)" if name == "moe" else b""
                    self.assertEqual(only + after + b"\n" in r.stdout, name != "phi", r.stdout)
        # What it advises, and what has no such trouble, gets no such warning.
        for args in (["--keep", "*.experts.*", "moe"], ["--rest", "bf16", "phi"]):
            r = self.run_qconv("--dry-run", "--to", "nf4", *args)
            self.assertEqual((r.returncode, r.stderr.count(b"transformers 5")), (0, 0), r.stderr)
        r = self.run_qconv("--dry-run", "--to", "bf16", "moe")
        self.assertEqual((r.returncode, r.stderr), (0, b""))

    def test_quiet_is_silent(self):
        for args in [["-q", "--to", "nf4", "m", "o"], ["verify", "-q", "o"],
                     ["unpack", "-q", "o", "p"]]:
            r = self.run_qconv(*args)
            self.assertEqual((r.returncode, r.stdout, r.stderr), (0, b"", b""), args)
        # What was asked for is said all the same.
        for args in [["plan", "-q", "m", "--vram", "8GB"], ["inspect", "-q", "o"], ["hardware", "-q"],
                     ["validate", "-q", "o", "--against", "m"],
                     ["--to", "nf4", "-q", "--dry-run", "m"]]:
            r = self.run_qconv(*args)
            self.assertEqual((r.returncode, r.stdout != b"", r.stderr), (0, True, b""), args)

    def test_verbose(self):
        quantized = 14
        for flag, lines in [("-v", 1), ("-vv", 1 + quantized)]:
            r = self.run_qconv(flag, "--to", "nf4", "m", "o" + flag)
            self.assertEqual((r.returncode, r.stderr.count(b"\n")), (0, lines), r.stderr)
            self.assertRegex(r.stderr, rb"\Aqconv: \d+ tensors become \d+ in 1 shard; model type "
                                       rb"llama; threads \d+, code path \w+, quantizing on \w+[^\n]*\n")
        self.assertRegex(r.stderr, rb"\nqconv: model\.\S+: nf4, relative MSE \S+, largest error ")
        for args in [["verify", "-v", "o-v"], ["unpack", "-v", "o-v", "p"]]:
            r = self.run_qconv(*args)
            self.assertEqual((r.returncode, r.stderr.count(b"\n")), (0, 1), r.stderr)
        r = self.run_qconv("inspect", "-v", "none")
        self.assertRegex(r.stderr, rb" \[\w+\.c:\d+\]\n\Z")

    def test_quiet_json_speaks(self):
        for args in [["-q", "--json", "--to", "int8", "m", "o"], ["verify", "-q", "--json", "o"],
                     ["unpack", "-q", "--json", "o", "p"], ["inspect", "-q", "--json", "p"],
                     ["-q", "--json", "--dry-run", "--to", "nf4", "m"]]:
            r = self.run_qconv(*args)
            self.assertEqual((r.returncode, r.stderr), (0, b""), args)
            self.assertIsInstance(json.loads(r.stdout), dict, args)

    def test_nothing_on_stderr_of_a_short_run(self):
        r = self.run_qconv("--to", "nf4", "m", "o")
        self.assertEqual((r.returncode, r.stderr), (0, b""))

    def test_report_agrees_with_inspect(self):
        for to, more in [("nf4", []), ("nf4", ["--no-double-quant", "--block-size", "128"]),
                         ("int8", []), ("int8", ["--block-size", "64"]), ("bf16", []),
                         ("nf4", ["--compress", "none", "--rest", "fp16"])]:
            report = json.loads(self.ok("--json", "--force", "--to", to, *more, "m", "o"))
            seen = json.loads(self.ok("inspect", "--json", "o"))
            total = seen["totals"]
            self.assertEqual(total["tensor_bytes"], report["bytes_out"])
            self.assertEqual(total["file_bytes"], report["bytes_stored"])
            self.assertEqual(len(seen["files"]), report["shards"])
            self.assertAlmostEqual(total["bits_per_weight"], report["bits_per_weight"])
            self.assertEqual(seen["manifest"]["to"], to)
            for name in ["nf4", "int8", "int8-block"]:
                if name in report["schemes"]:
                    self.assertEqual(total["by_scheme"][name]["weights"],
                                     report["schemes"][name]["weights"])
                    self.assertEqual(total["by_scheme"][name]["bytes"],
                                     report["schemes"][name]["bytes_out"])
            worst = [t for t in seen["tensors"] if "rel_mse" in t]
            if to in ("nf4", "int8"):
                self.assertEqual(max(t["rel_mse"] for t in worst), report["worst"]["rel_mse"])
            else:
                self.assertEqual((worst, report["worst"]), ([], None))

    def test_inspect_of_an_output(self):
        self.ok("--to", "nf4", "--keep", "*.o_proj.*", "m", "o")
        text = self.ok("inspect", "o")
        self.assertIn("o: qconv output, model type llama\n", text)
        self.assertRegex(text, r"(?m)^  made by   qconv [\d.]+, --to nf4, block size 64, double "
                               r"quantization, zstd level 1$")
        self.assertIn("  rule      keep *.o_proj.*\n", text)
        self.assertRegex(text, r"q_proj\.weight .* nf4 b64 dq +\d\.\d{3}e-\d\d +\d\.\d{3}e-\d\d\n")
        self.assertRegex(text, r"o_proj\.weight +BF16 .* linear\n")

    def test_dry_run_writes_nothing(self):
        before = sorted(os.listdir(self.dir))
        text = self.ok("--to", "nf4", "--dry-run", "m", "o")
        self.assertIn("dry run: m -> o as nf4\n", text)
        self.assertIn("dry run: m as nf4\n", self.ok("--to", "nf4", "--dry-run", "m"))
        self.assertEqual(sorted(os.listdir(self.dir)), before)

    def test_bar_on_a_terminal(self):
        try:
            import pty
        except ImportError:
            self.skipTest("no pty")
        for args, wanted in [([], True), (["--progress", "never"], False), (["-q"], False)]:
            master, slave = pty.openpty()
            # By absmax there is no warning behind the bar.
            p = subprocess.Popen([QCONV, "--to", "nf4", "--scale", "absmax", "--threads", "1",
                                  *args, "m", "o"],
                                 cwd=self.dir, stderr=slave, stdout=subprocess.DEVNULL,
                                 env=dict(os.environ, TERM="xterm"))
            self.assertEqual(p.wait(timeout=60), 0)
            os.close(slave)
            text = b""
            while True:
                try:
                    piece = os.read(master, 65536)
                except OSError:
                    break
                if not piece:
                    break
                text += piece
            os.close(master)
            self.assertEqual(b"converting" in text, wanted, (args, text))
            self.assertEqual(text.endswith(b"\r\x1b[K"), wanted, (args, text))


@unittest.skipIf(SANITIZED, "stacks and addresses are the sanitizer's as well")
class Limits(QconvCase):
    """Under limits that leave no room for a thread, memory or a stack: the work is done, or there is
    one sentence that says what was missing and an exit code. Never a signal."""
    scale = "absmax"

    def setUp(self):
        super().setUp()
        mk.write_model(self.path("m"), mk.load_model("Llama-3.1-8B"), layers=1, scale=64, seed=1)
        self.ok("-q", "--to", "nf4", "m", "o")

    def limited(self, kind, kib, *args):
        r = subprocess.run([QCONV, *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                           stdin=subprocess.DEVNULL, cwd=self.dir, env={}, timeout=60,
                           preexec_fn=lambda: resource.setrlimit(kind, (kib << 10, kib << 10)))
        note = (args, kib, r.returncode, r.stderr)
        self.assertIn(r.returncode, (0, 1), note)
        if r.returncode:
            self.assertRegex(r.stderr, rb"\Aqconv: [^\n]+\n\Z", note)
            self.assertNotIn(b"fault of qconv", r.stderr, note)
        return r

    COMMANDS = [["--help"], ["hardware"], ["inspect", "o"], ["verify", "o"],
                ["verify", "o", "--against", "m"], ["plan", "m", "--vram", "1GB"],
                ["validate", "o", "--against", "m"],
                ["unpack", "--force", "o", "u"], ["--force", "--to", "nf4", "m", "p"],
                ["--force", "--to", "auto", "--vram", "2GB", "m", "p"]]

    def test_stack(self):
        for kib in (32, 48, 64, 96, 200, 1000):
            for args in self.COMMANDS:
                self.assertEqual(self.limited(resource.RLIMIT_STACK, kib, *args).returncode, 0)

    def test_addresses(self):
        """From where the program itself is loaded; what is below is ld.so's to say."""
        def is_loaded(kib):
            return subprocess.run(
                [QCONV, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={}, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS,
                                                              (kib << 10, kib << 10))).returncode == 0
        least, threads = 10000, 0
        while not is_loaded(least):
            least += 2000
        for kib in [least + more for more in (2000, 4000, 8000, 12000, 16000, 22000, 50000)]:
            for args in self.COMMANDS:
                r = self.limited(resource.RLIMIT_AS, kib, *args)
                threads += b" could not be started: " in r.stderr
        self.assertGreater(threads, 0)


if __name__ == "__main__":
    unittest.main()
