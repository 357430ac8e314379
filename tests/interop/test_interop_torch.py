"""PyTorch checkpoints, saved here by torch itself in every form it has.

qconv must make of a .bin checkpoint what it makes of the same model as safetensors, byte for byte,
and must give the tensors that torch.load gives. The seed of the random part is printed; QC_SEED
repeats it.
"""
import json
import os
import random
import shutil
import tempfile
import unittest
import warnings
from pathlib import Path

import interop_support as s
import safetensors.torch
import torch

warnings.filterwarnings("ignore", category=UserWarning)  # about protocols, by torch.load
STREAM = {"_use_new_zipfile_serialization": False}
HOW = {"zip": {}, "stream": STREAM, "zip, protocol 4": {"pickle_protocol": 4},
       "zip, protocol 5": {"pickle_protocol": 5}, "stream, protocol 3": {"pickle_protocol": 3, **STREAM}}
OLD = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32,
       torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64]
# Without a storage class of their own: torch saves them as a stream, but cannot load that.
NEW = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
SEED = int(os.environ.get("QC_SEED", random.SystemRandom().randrange(1 << 32)))


def load(path, label):
    """torch's safe loader reads protocol 2 and 3 only; the files were saved here or are our own."""
    return torch.load(path, weights_only="protocol 4" not in label and "protocol 5" not in label)


def folder_bytes(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes()
            for p in sorted(Path(folder).rglob("*")) if p.is_file() and p.name != "qconv.json"}


class Torch(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(dir=s.SCRATCH))
        self.addCleanup(shutil.rmtree, self.folder)

    def same_folder(self, mine, other, label):
        a, b = folder_bytes(mine), folder_bytes(other)
        self.assertEqual(sorted(a), sorted(b), label)
        for name in a:
            self.assertTrue(a[name] == b[name], f"{label}: {name}")

    def as_from_safetensors(self, model):
        """A real model: one .bin or several, in both containers."""
        source = s.model_path(model)
        state = safetensors.torch.load_file(source / "model.safetensors")
        for shards in (1, 3):
            for label in ("zip", "stream"):
                m = self.folder / "m"
                shutil.copytree(source, m)
                (m / "model.safetensors").unlink()
                self.save_shards(m, state, shards, HOW[label])
                for form in (["--to", "nf4"], ["--to", "int8"],
                             ["--to", "nf4", "--max-shard-size", "300KB"]):
                    s.qconv(*form, "-q", m, self.folder / "a")
                    s.qconv(*form, "-q", source, self.folder / "b")
                    self.same_folder(self.folder / "a", self.folder / "b",
                                     f"{model}, {shards} {label}, {form}")
                    s.qconv("verify", "-q", self.folder / "a")
                    shutil.rmtree(self.folder / "a")
                    shutil.rmtree(self.folder / "b")
                shutil.rmtree(m)

    def test_kjv_llama(self):
        self.as_from_safetensors("kjv-llama")

    def test_tinystories(self):
        self.as_from_safetensors("tinystories")

    def test_minilm(self):
        self.as_from_safetensors("minilm")

    def save_shards(self, folder, state, shards, how):
        if shards == 1:
            torch.save(state, folder / "pytorch_model.bin", **how)
            return
        names = list(state)
        weight_map = {}
        for i in range(shards):
            file = f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
            part = names[i::shards]
            torch.save({n: state[n] for n in part}, folder / file, **how)
            weight_map |= {n: file for n in part}
        total = sum(t.numel() * t.element_size() for t in state.values())
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))

    def random_state(self, rng, dtypes):
        state = {}
        for i in range(rng.randrange(1, 30)):
            dtype = rng.choice(dtypes)
            shape = [rng.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(rng.randrange(0, 5))]
            numel = 1
            for d in shape:
                numel *= d
            bits = torch.randint(0, 2 if dtype == torch.bool else 256,
                                 (max(numel, 1) * torch.empty(0, dtype=dtype).element_size() + 64,),
                                 dtype=torch.uint8)
            whole = bits[: bits.numel() // 16 * 16].view(dtype)
            at = rng.randrange(0, whole.numel() - numel + 1) if rng.random() < 0.5 else 0
            t = whole[at : at + numel].reshape(shape)
            kind = rng.randrange(4)
            if kind == 0 and dtype.is_floating_point and dtype in OLD:
                t = torch.nn.Parameter(t, requires_grad=rng.random() < 0.5)
            elif kind == 1:
                t = t.clone()
            state[rng.choice(["a", "model.layers.%d" % i, "\u00e9\u6f22", "x" * 300]) + str(i)] = t
            if rng.random() < 0.2:
                state[f"again{i}"] = t
        return state

    def test_random_tensors(self):
        s.note(f"seed {SEED}")
        rng = random.Random(SEED)
        torch.manual_seed(SEED)
        path = self.folder / "x.bin"
        for i in range(60):
            label, how = rng.choice(list(HOW.items()))
            state = self.random_state(rng, OLD if "stream" in label else OLD + NEW)
            wrap = rng.choice([None, "state_dict", "model"])
            torch.save({wrap: state, "epoch": i} if wrap else state, path, **how)
            loaded = load(path, label)
            loaded = loaded[wrap] if wrap else loaded
            s.qconv("--to", "keep", "--compress", "none", "-q", path, self.folder / "o")
            mine = safetensors.torch.load_file(self.folder / "o" / "model.safetensors")
            self.assertEqual(sorted(mine), sorted(loaded), (SEED, i, label))
            for name, t in loaded.items():
                t = t.detach()
                self.assertEqual((mine[name].dtype, mine[name].shape), (t.dtype, t.shape),
                                 (SEED, i, label, name))
                self.assertTrue(
                    torch.equal(mine[name].contiguous().flatten().view(torch.uint8),
                                t.clone().contiguous().flatten().view(torch.uint8)),
                    (SEED, i, label, name))
            shutil.rmtree(self.folder / "o")

    def test_golden_files_still_load(self):
        """tests/data/torch is what torch makes of it too."""
        data = s.ROOT / "tests" / "data" / "torch"
        for path in sorted(data.glob("*.bin")):
            if path.stem == "new_dtypes_legacy":
                continue
            loaded = load(path, path.stem.replace("protocol", "protocol "))
            for key in ("state_dict", "model", "module"):
                if isinstance(loaded.get(key), dict):
                    loaded = loaded[key]
            want = safetensors.torch.load_file(path.with_suffix(".safetensors"))
            loaded = {n: t for n, t in loaded.items() if torch.is_tensor(t)}
            self.assertEqual(sorted(loaded), sorted(want), path.name)
            for name, t in loaded.items():
                self.assertEqual((t.dtype, t.shape), (want[name].dtype, want[name].shape))

    def test_what_torch_refuses_is_refused(self):
        """weights_only=True is torch's own list of what may be loaded; ours is shorter."""
        folder = s.ROOT / "tests" / "data" / "torch" / "refused"
        refused = 0
        for path in sorted(folder.glob("*.bin")):
            try:
                torch.load(path, weights_only=True)
            except Exception:
                refused += 1
                with self.assertRaises(AssertionError, msg=path.name):
                    s.qconv("inspect", path)
        self.assertGreater(refused, 10)


if __name__ == "__main__":
    s.main()
