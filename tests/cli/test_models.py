"""Every released checkpoint of tests/data/models: its plan to the byte, from header-only files, and
conversions of scaled-down versions with values in them."""
import json
import os
import shutil
import sys
import time
import unittest

from output_case import OutputCase
import make_checkpoint as mk

TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def constants(dtype, shape, to):
    """Bytes of a quantized weight's tensors that do not depend on how many weights it has: what the
    `sizes` of a pattern file leave out."""
    if to == "int8":
        return 1  # weight_format
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": TORCH[dtype],
                        "shape": shape, "nested_blocksize": 256, "nested_dtype": "float32",
                        "nested_offset": 0})
    return 16 * 4 + 256 * 4 + len(state) - 1 + 24


def weight_bytes(shape, to):
    n = mk.numel(shape)
    if to == "int8":
        return n + 4 * (n // shape[-1])
    blocks = -(-n // 64)
    return n // 2 + blocks + 4 * -(-blocks // 256)


class DryRun(OutputCase):
    def test_sizes(self):
        """Bytes and counts of every model equal those worked out beside its pattern file."""
        for name in mk.model_names():
            model = mk.load_model(name)
            mk.write_model(self.path(name), model, shard_bytes=5 * 10 ** 9)
            rows = list(mk.model_rows(model))
            linear = {n for n, _, _, role in rows if role == "linear"}
            for to in ("nf4", "int8"):
                begin = time.monotonic()
                text = self.ok("--dry-run", "--json", "--to", to, "--rest", "bf16", name)
                seconds = time.monotonic() - begin
                print("%s --to %s: %d tensors planned in %.2f s"
                      % (name, to, len(rows), seconds), file=sys.stderr)
                self.check(model, rows, linear, to, json.loads(text))
            if name.startswith("gpt-oss"):
                self.check_requantized(name, model, rows, linear)
            shutil.rmtree(self.path(name))

    def check(self, model, rows, linear, to, plan):
        where = (model["hf_id"], to)
        tensors = {t["name"]: t for t in plan["tensors"]}
        self.assertEqual(set(tensors), {r[0] for r in rows}, where)
        self.assertTrue(plan["known_type"], where)
        quantized = {n for n, t in tensors.items() if t["scheme"] == to}
        self.assertEqual(quantized, linear, where)
        self.assertEqual(plan["skip_modules"], ["classifier", "lm_head", "qa_outputs", "score"],
                         where)
        self.assertEqual(plan["weights_quantized"],
                         sum(mk.numel(s) for n, _, s, _ in rows if n in linear), where)
        left_out = 0
        for name, dtype, shape, role in rows:
            t = tensors[name]
            self.assertEqual((t["dtype"], t["shape"]), (dtype, list(shape)))
            self.assertEqual(t["bytes_before"], mk.tensor_bytes(dtype, shape))
            if name in linear:
                extra = constants(dtype, list(shape), to)
                self.assertEqual(t["bytes_after"], weight_bytes(shape, to) + extra, where)
                left_out += extra
            elif role == "buffer":
                left_out += t["bytes_after"]
        sizes = model["sizes"]
        self.assertEqual(plan["tensor_bytes"] - left_out, sizes.get(to + " mxfp4=keep", sizes[to]),
                         where)
        self.assertEqual(plan["tensor_bytes"], sum(t["bytes_after"] for t in tensors.values()))
        self.assertEqual(plan["source_bytes"], model["total_bytes"])
        self.assertEqual(plan["file_bytes"], sum(s["bytes"] for s in plan["shards"]))
        count = len(plan["shards"])
        used = [0] * count
        for t in tensors.values():
            used[t["shard"]] += t["bytes_after"]
        for shard, size in zip(plan["shards"], used):
            self.assertLessEqual(size, 5 * 10 ** 9, where)
            # What is left is the header, a few hundred bytes a tensor at most.
            self.assertGreater(shard["bytes"], size)
            self.assertLess(shard["bytes"] - size, 1000 * 6 * len(tensors))
        self.assertEqual(count, len([u for u in used if u]))

    def check_requantized(self, name, model, rows, linear):
        """Experts, too: the `sizes` of the whole model, and the constants of each weight."""
        blocks = {n: [s[0], s[1], s[2] * 32] for n, _, s, role in rows if role == "mxfp4_blocks"}
        scales = {r[0] for r in rows if r[3] == "mxfp4_scales"}
        for to in ("nf4", "int8"):
            plan = json.loads(self.ok("--dry-run", "--json", "--requantize", "--to", to, name))
            tensors = {t["name"]: t for t in plan["tensors"]}
            self.assertEqual(set(tensors), {r[0] for r in rows} - scales)
            left_out = 0
            for n, t in tensors.items():
                self.assertEqual(t["scheme"], to if n in linear or n in blocks else "keep", n)
                if t["scheme"] != "keep":
                    shape = blocks.get(n, t["shape"])
                    extra = constants("BF16", shape, to)
                    self.assertEqual(t["bytes_after"], weight_bytes(shape, to) + extra, n)
                    left_out += extra
            self.assertEqual(plan["tensor_bytes"] - left_out, model["sizes"][to])
        plan = json.loads(self.ok("--dry-run", "--json", "--to", "bf16", name))
        self.assertEqual(plan["tensor_bytes"], model["sizes"]["bf16"])

    def test_pickle_only(self):
        """deepseek-llm-7b-chat was released as files of torch.save only, which the Python package writes anew."""
        model = mk.load_model("deepseek-llm-7b-chat")
        os.mkdir(self.path("m"))
        mk.write_json(self.path("m", "config.json"), mk.model_config(model))
        for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "training_args.bin"):
            self.write("m/" + name, "PK\3\4")
        self.write("m/pytorch_model.bin.index.json", "{}")
        told = ["m has no .safetensors file, but what torch.save wrote: 'pytorch_model-00001-of-00002.bin'",
                "index.json'; 'python -m qconv from-torch m OUT' writes safetensors from it"]
        for model in ("m", "m/pytorch_model.bin.index.json"):
            for args in [["--to", "nf4", model, "o"], ["--dry-run", "--to", "int8", model], ["inspect", model],
                         ["plan", "--vram", "24GB", model]]:
                self.assertNotIn("training_args", self.fails(3, *args, has=told))
        os.mkdir(self.path("p"))
        for name in ("x.bin", "x.pt", "x.pth", "x.ckpt"):
            self.write("p/" + name, "PK\3\4")
            self.fails(3, "inspect", "p/" + name, has="p/%s is a file of torch.save; 'python -m qconv from-torch p/%s "
                       "OUT' writes safetensors from it" % (name, name))
        self.fails(3, "inspect", "p", has="but what torch.save wrote: 'x.bin', 'x.ckpt', 'x.pt', 'x.pth'")
        self.assert_nothing("o")

    def test_pickles_beside(self):
        """What trainers save beside the weights, and the weights again, are neither read nor copied."""
        mk.write_model(self.path("m"), mk.load_model("Llama-3.1-8B"), layers=1, scale=64)
        for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.bin", "x.pkl"):
            self.write("m/" + name, "a pickle")
        r = self.run_qconv("--to", "nf4", "m", "o")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn(b"3 Python pickles are not copied: 'scheduler.bin', 'training_args.bin', 'x.pkl'", r.stderr)
        self.assertEqual(sorted(os.listdir(self.path("o"))), ["config.json", "model.safetensors.zst", "qconv.json"])


class Small(OutputCase):
    """Two layers, two experts, small dimensions, random values."""

    replaces = True

    def test_conversions(self):
        for name in mk.model_names():
            model = mk.load_model(name)
            mk.write_model(self.path("m"), model, layers=2, experts=2, scale=64, seed=7,
                           shard_bytes=300000)
            rows = list(mk.model_rows(model, 2, 2, 64))
            source = mk.read_checkpoint(self.path("m"))
            linear = {r[0] for r in rows if r[3] == "linear"}
            self.assertGreater(len(linear), 0)
            for form in [["--to", "nf4"], ["--to", "int8"], ["--to", "int8", "--block-size", "64"]]:
                self.check(name, form, source, linear)
            shutil.rmtree(self.path("m"))

    def check(self, name, form, source, linear):
        where = (name, form)
        self.ok("-q", *form, "--max-shard-size", "200KB", "m", "o")
        answer = json.loads(self.ok("verify", "--json", "o"))
        self.assertTrue(answer["ok"], where)
        planned = json.loads(self.ok("--dry-run", "--json", *form, "--max-shard-size", "200KB", "m"))
        self.ok("-q", "unpack", "--force", "o", "u")
        self.assertEqual({s["name"]: s["bytes"] for s in planned["shards"]},
                         {n: os.path.getsize(self.path("u", n)) for n in os.listdir(self.path("u"))
                          if n.endswith(".safetensors")}, where)
        out = mk.read_checkpoint(self.path("u"))
        for tensor, value in source.items():
            if tensor not in linear:
                self.assertEqual(out[tensor], value, (where, tensor))
            else:
                self.assertEqual(out[tensor][0], "U8" if form[1] == "nf4" else "I8")
        derived = {"nf4": 5, "int8": 2 if len(form) == 2 else 4}[form[1]]
        self.assertEqual(len(out), len(source) + derived * len(linear), where)
        # And back: every tensor that was there has its shape again, stacks of experts that of
        # transformers in 16 bit.
        back = self.convert("--to", "bf16", "o", "back")
        shapes = {}
        for n, t in source.items():
            if n.endswith("_blocks"):
                e, rows, groups, _ = t[1]
                shapes[n[:-len("_blocks")]] = [e, groups * 32, rows]
            elif not n.endswith("_scales"):
                shapes[n] = t[1]
        self.assertEqual({n: t[1] for n, t in back.items()}, shapes, where)
        for tensor in linear:
            a, b = mk.decode(*source[tensor][::2]), mk.decode("BF16", back[tensor][2])
            error = sum((x - y) ** 2 for x, y in zip(a[:5000], b)) / sum(x * x for x in a[:5000])
            self.assertLess(error, 0.012 if form[1] == "nf4" else 0.0003, (where, tensor))


if __name__ == "__main__":
    unittest.main()
