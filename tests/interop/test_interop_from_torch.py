"""`qconv.from_torch` on what torch saves here, in every form it has: the tensors are those that torch.load gives, and
the program makes of the result what it makes of the same model as safetensors. The seed of the random part is printed;
QC_SEED repeats it."""
import argparse
import gc
import json
import os
import random
import shutil
import tempfile
import unittest
import warnings
import weakref
from pathlib import Path
from unittest import mock

import interop_support as s
import safetensors.torch
import torch

import qconv

warnings.filterwarnings("ignore", category=UserWarning)
STREAM = {"_use_new_zipfile_serialization": False}
HOW = {"zip": {}, "stream": STREAM, "stream, protocol 3": {"pickle_protocol": 3, **STREAM}}
OLD = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
       torch.uint8, torch.bool, torch.complex64]
# Without a storage class of their own: torch saves them as a stream, but cannot load that.
NEW = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
       torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
SEED = int(os.environ.get("QC_SEED", random.SystemRandom().randrange(1 << 32)))


def bytes_of(t):
    t = t.detach().clone().contiguous()
    return t.flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b""


def folder_bytes(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(Path(folder).rglob("*"))
            if p.is_file() and p.name != "qconv.json"}


def values(dtype, *shape):
    n = 1
    for d in shape:
        n *= d
    width = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (n * width,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.lm_head = torch.nn.Linear(4, 6, bias=False)
        self.register_buffer("position_ids", torch.arange(7).reshape(1, 7))
        self.lm_head.weight = self.embed_tokens.weight


class Runs:
    """Something that would run when unpickled."""

    def __init__(self, what, *args):
        self.call = what, args

    def __reduce__(self):
        return self.call


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(dir=s.SCRATCH))
        self.addCleanup(shutil.rmtree, self.folder)
        self.made = 0

    def model(self, state, config=None, name="pytorch_model.bin", **how):
        """A folder with the state as one file."""
        folder = self.folder / f"m{self.made}"
        self.made += 1
        folder.mkdir()
        torch.save(state, folder / name, **how)
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    def holds(self, out, state, label=""):
        """The safetensors of a folder hold these tensors, bit for bit."""
        got = {}
        for path in sorted(Path(out).glob("*.safetensors")):
            self.assertEqual(s.SafetensorsFile(path).metadata, {"format": "pt"})
            got |= safetensors.torch.load_file(path)
        self.assertEqual(sorted(got), sorted(state), label)
        for name, t in state.items():
            self.assertEqual((got[name].dtype, got[name].shape), (t.dtype, t.shape), (label, name))
            self.assertEqual(bytes_of(got[name]), bytes_of(t), (label, name))

    def written(self, source, state, label="", **more):
        out = self.folder / f"o{self.made}"
        self.made += 1
        done = qconv.from_torch(source, out)
        self.holds(out, state, label)
        self.assertEqual(done.tensors, len(state), label)
        self.assertEqual(done.bytes, sum(t.numel() * t.element_size() for t in state.values()), label)
        return out, done

    def refused(self, source, words, kind=qconv.InputError):
        before = sorted(os.listdir(self.folder))
        with self.assertRaises(kind) as raised:
            qconv.from_torch(source, self.folder / "refused")
        self.assertIn(words, str(raised.exception))
        self.assertNotIn("\n", str(raised.exception))
        self.assertEqual(sorted(os.listdir(self.folder)), before)


class Models(Case):
    def shards(self, folder, state, count, how):
        if count == 1:
            torch.save(state, folder / "pytorch_model.bin", **how)
            return
        names, weight_map = list(state), {}
        for i in range(count):
            file = f"pytorch_model-{i + 1:05d}-of-{count:05d}.bin"
            torch.save({n: state[n] for n in names[i::count]}, folder / file, **how)
            weight_map |= {n: file for n in names[i::count]}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def as_from_safetensors(self, model):
        source = s.model_path(model)
        state = safetensors.torch.load_file(source / "model.safetensors")
        for count in (1, 3):
            for label in ("zip", "stream"):
                m, out = self.folder / "m", self.folder / "st"
                shutil.copytree(source, m)
                (m / "model.safetensors").unlink()
                self.shards(m, state, count, HOW[label])
                for name in ("training_args.bin", "optimizer.pt", "rng_state.pth", "scheduler.pt", "x.pkl"):
                    (m / name).write_text("a pickle")
                done = qconv.from_torch(m, out)
                names = ["model.safetensors"] if count == 1 else \
                    [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
                self.assertEqual([f["name"] for f in done.files], names)
                others = {n for n in folder_bytes(source) if n != "model.safetensors" and "/." not in "/" + n}
                self.assertEqual(set(folder_bytes(out)), others | set(names) | (
                    {"model.safetensors.index.json"} if count > 1 else set()))
                self.assertEqual(set(done.copied), others)
                self.holds(out, state, f"{model} {count} {label}")
                for form in (["--to", "nf4"], ["--to", "int8", "--max-shard-size", "300KB"]):
                    s.qconv(*form, "-q", out, self.folder / "a")
                    s.qconv(*form, "-q", source, self.folder / "b")
                    a, b = folder_bytes(self.folder / "a"), folder_bytes(self.folder / "b")
                    self.assertEqual(a, b, f"{model}, {count} {label}, {form}")
                shutil.rmtree(m)
                shutil.rmtree(out)

    def test_kjv_llama(self):
        self.as_from_safetensors("kjv-llama")

    def test_minilm(self):
        self.as_from_safetensors("minilm")

    def test_one_shard_in_memory(self):
        """A shard's tensors are gone when the next one is read."""
        seen, load = [], torch.load

        def watched(*args, **named):
            gc.collect()
            self.assertTrue(all(r() is None for r in seen))
            self.assertTrue(named["weights_only"] and named["mmap"])
            state = load(*args, **named)
            seen.extend(weakref.ref(t) for t in state.values())
            return state

        folder = self.folder / "m"
        folder.mkdir()
        self.shards(folder, {f"t{i}": torch.ones(9) * i for i in range(6)}, 3, {})
        with mock.patch.object(torch, "load", watched):
            qconv.from_torch(folder, self.folder / "o")
        self.assertEqual(len(seen), 6)

    def test_index(self):
        state = {"a": torch.ones(2), "b": torch.ones(3)}
        folder = self.folder / "m"
        folder.mkdir()
        self.shards(folder, state, 2, {})
        index = folder / "pytorch_model.bin.index.json"
        one, two = ("pytorch_model-0000%d-of-00002.bin" % i for i in (1, 2))
        for weight_map, words in [
                ({"a": two, "b": one}, f"tensor 'a' is in '{one}', but the index has it in '{two}'"),
                ({"a": one, "c": two}, "tensor 'b' is in"), ({"a": one, "b": two, "c": two}, "'c'"),
                ({"a": one, "b": "gone.bin"}, "1 of the 2 files that it names are missing: 'gone.bin'"),
                ({"a": one, "b": "../x.bin"}, "'../x.bin' is not the name of a file of weights"), ([], "weight_map")]:
            index.write_text(json.dumps({"weight_map": weight_map}))
            self.refused(folder, words)
        index.unlink()
        self.refused(folder, "has 2 files of torch.save, but no index that says what belongs together")

    def test_names(self):
        """Of the files that are read, and of what is made of them."""
        state = {"a": torch.ones(2)}
        for name, made in [("pytorch_model.bin", "model"), ("pytorch_model.fp16.bin", "model"),
                           ("consolidated.00.pth", "model"), ("x.ckpt", "model"), ("adapter_model.bin", "adapter_model"),
                           ("diffusion_pytorch_model.bin", "diffusion_pytorch_model"),
                           ("pytorch_lora_weights.bin", "pytorch_lora_weights")]:
            folder = self.model(state, {"a": 1}, name)
            out, done = self.written(folder, state, name)
            self.assertEqual((done.files[0]["name"], done.copied), (made + ".safetensors", ("config.json",)))
            (folder / "notes.txt").write_text("x")
            self.assertEqual(self.written(folder / name, state)[1].copied, ("config.json",))
            self.assertEqual(qconv.from_torch(folder / name, folder / "o").tensors, 1)  # beside its source
            shutil.rmtree(folder / "o")
        both = self.model(state)
        safetensors.torch.save_file(state, both / "model.safetensors")
        self.refused(both, "has safetensors already, which qconv reads: 'model.safetensors'")

    def test_interrupted(self):
        """Ctrl-C, a failing disk: nothing is left, and the folder that was there stays empty."""
        folder = self.model({"a": torch.ones(2)})
        (self.folder / "o").mkdir()
        for error, kind in [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space"), qconv.RunError)]:
            with mock.patch("safetensors.torch.save_file", side_effect=error), self.assertRaises(kind):
                qconv.from_torch(folder, self.folder / "o")
            self.assertEqual((sorted(os.listdir(self.folder)), os.listdir(self.folder / "o")), (["m0", "o"], []))
        qconv.from_torch(folder, self.folder / "o")
        with self.assertRaisesRegex(qconv.UsageError, "o is not empty"):
            qconv.from_torch(folder, self.folder / "o")


class Tensors(Case):
    def test_shared(self):
        state = Module().state_dict()
        for text, tied in [({"tie_word_embeddings": True}, True), ({"tie_word_embeddings": False}, False), ({}, False),
                           (None, False), ({"text_config": {"tie_word_embeddings": True}}, True)]:
            for how in HOW.values():
                want = {k: v for k, v in state.items() if not tied or k != "lm_head.weight"}
                done = self.written(self.model(state, text, **how), want, text)[1]
                self.assertEqual(done.shared, ({"name": "lm_head.weight", "same_as": "embed_tokens.weight",
                                                "written": not tied},))

    def test_views(self):
        whole = torch.arange(24.0)
        state = {"whole": whole, "head": whole[:10], "tail": whole[7:], "rows": whole.view(6, 4)[2:4], "again": whole,
                 "turned": whole.view(6, 4).t(), "every other": whole[::2], "wide": whole[:1].expand(5, 3),
                 "none": whole[:0], "scalar": whole[3], "loose": whole.view(6, 4)[:, :1],
                 "conjugate": torch.complex(whole, -whole).conj()}
        for how in HOW.values():
            out, done = self.written(self.model(state, **how), state)
            self.assertLess((out / "model.safetensors").stat().st_size, 4000)
            self.assertEqual([x["name"] for x in done.shared], ["whole"])

    def test_many_names_for_one_storage(self):
        whole = torch.zeros(100000)
        self.written(self.model({f"a{i}": whole for i in range(40)}), {f"a{i}": whole for i in range(40)})
        self.refused(self.model({f"a{i}": whole for i in range(80)}), "its 80 tensors share their bytes: expected at "
                     "most 64 times the file's ")

    def test_what_lies_beside(self):
        state = Module().state_dict()
        beside = {"epoch": 3, "lr": 1e-3, "name": "x", "none": None, "flags": [True], "size": torch.Size([2]),
                  "dtype": torch.bfloat16, "nested": {"a": {"b": [{}]}}}
        for where in (None, "state_dict", "model", "module", "model_state_dict"):
            saved = {**state, **beside} if where is None else {where: state, **beside}
            done = self.written(self.model(saved), state, where)[1]
            self.assertEqual({e["entry"] for e in done.left_out}, set(beside))
        self.written(self.model({}), {})
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.note = "an attribute"
        self.written(self.model({"a": parameter}), {"a": parameter})

    def test_random_tensors(self):
        s.note(f"seed {SEED}")
        rng = random.Random(SEED)
        torch.manual_seed(SEED)
        for i in range(40):
            label, how = rng.choice(list(HOW.items()))
            dtypes = OLD if "stream" in label else OLD + NEW
            state = {}
            for k in range(rng.randrange(1, 30)):
                shape = [rng.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(rng.randrange(0, 5))]
                t = values(rng.choice(dtypes), *shape)
                if t.numel() > 3 and rng.random() < 0.3:
                    t = t.flatten()[1:-1]
                state[rng.choice(["a", f"model.layers.{k}", "\u00e9\u6f22", "x" * 300]) + str(k)] = t
                if rng.random() < 0.2:
                    state[f"again{k}"] = t
            self.written(self.model(state, **how), state, (SEED, i, label))


class Refused(Case):
    def test_what_is_no_state_dict(self):
        one = torch.ones(2, 3)
        for what, words in [
                (one, "holds a single tensor; expected a state dict"), ([one], "holds something that is not a dict"),
                ({7: one}, "7 is no name"), ({"__metadata__": one}, "'__metadata__' is no name"),
                ({"a": {"b": {"c": one}}}, "no entry of its dict is a tensor"),
                ({"model": {"a": one}, "state_dict": {"b": one}}, "tensors are in 'state_dict' and in 'model'"),
                ({"w": one.to_sparse()}, "tensor 'w' has no plain values"),
                ({"w": torch.ones(2, device="meta")}, "tensor 'w' has no plain values"),
                ({"w": torch.ones(2, dtype=torch.complex128)}, "tensor 'w' is torch.complex128")]:
            self.refused(self.model(what), words)

    def test_code_is_not_run(self):
        echo, one = ("touch ran",), torch.ones(2)
        for how in HOW.values():
            for what, words in [
                    ({"w": one, "x": Runs(os.system, *echo)}, "system"), (Runs(os.system, *echo), "system"),
                    (Runs(eval, "open('ran', 'w')"), "eval"), (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
                    ({"w": one, "args": argparse.Namespace(lr=1)}, "argparse.Namespace")]:
                self.refused(self.model(what, **how), "torch.load(weights_only=True) refuses it: ")
                self.refused(self.model(what, **how), words)
        self.refused(self.model({"w": one}, pickle_protocol=4), "which is what torch.save writes")
        self.assertFalse(os.path.exists("ran"))

    def test_damaged(self):
        folder = self.model({"w": torch.ones(200)})
        whole = (folder / "pytorch_model.bin").read_bytes()
        for cut in (0, 3, 100, len(whole) - 1):
            (folder / "pytorch_model.bin").write_bytes(whole[:cut])
            self.refused(folder, "pytorch_model.bin: torch.load(weights_only=True) refuses it: ")


if __name__ == "__main__":
    s.main()
