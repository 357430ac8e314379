"""qconv on PyTorch checkpoints: tests/data/torch, written by torch itself.

Nothing here needs torch; what it would say of the results is in tests/interop/test_interop_torch.py.
"""
import json
import os
import shutil
import struct
import unittest
import zipfile

from output_case import PLAIN, OutputCase, tree
from qconv_case import ROOT
import make_checkpoint as mk

DATA = os.path.join(ROOT, "tests", "data", "torch")
SHARDED = os.path.join(DATA, "sharded")
FORMS = [["--to", "nf4"], ["--to", "int8"], ["--to", "bf16"], ["--to", "nf4", *PLAIN],
         ["--to", "int8", "--block-size", "64", "--max-shard-size", "10KB"]]


class Convert(OutputCase):
    def both(self):
        """b: the sharded .bin model; s: the same as safetensors."""
        shutil.copytree(SHARDED, self.path("b"))
        os.mkdir(self.path("s"))
        shutil.copy(os.path.join(SHARDED, "config.json"), self.path("s"))
        shutil.copy(os.path.join(DATA, "sharded.safetensors"), self.path("s", "model.safetensors"))

    def test_same_as_from_safetensors(self):
        self.both()
        for i, form in enumerate(FORMS):
            self.ok("-q", *form, "b", "ob%d" % i)
            self.ok("-q", *form, "s", "os%d" % i)
            a, b = tree(self.path("ob%d" % i)), tree(self.path("os%d" % i))
            sources = [json.loads(t.pop("qconv.json"))["sources"] for t in (a, b)]
            self.assertEqual(a, b, form)
            self.assertEqual([s["name"] for s in sources[0]],
                             ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"])
            for s in sources[0]:
                self.assertEqual(s["bytes"], os.path.getsize(self.path("b", s["name"])))
            self.ok("-q", "verify", "ob%d" % i)

    def test_threads_and_runs_agree(self):
        self.both()
        self.ok("-q", "--to", "nf4", "--threads", "1", "b", "one")
        self.ok("-q", "--to", "nf4", "--threads", "7", "b", "seven")
        self.assertEqual(tree(self.path("one")), tree(self.path("seven")))

    def test_dry_run_and_inspect(self):
        self.both()
        plans = []
        for m in "bs":
            text = self.ok("--dry-run", "--to", "nf4", "--json", m)
            plans.append(json.loads(text))
        for p in plans:
            p.pop("model", None)
            p.pop("source", None)
        self.assertEqual(plans[0].get("tensors"), plans[1].get("tensors"))
        facts = json.loads(self.ok("inspect", "--json", "b"))
        names = ["pytorch_model-0000%d-of-00002.bin" % i for i in (1, 2)]
        self.assertEqual([f["name"] for f in facts["files"]], names)
        for f in facts["files"]:
            self.assertEqual(f["file_bytes"], os.path.getsize(self.path("b", f["name"])))
            self.assertFalse(f["compressed"])
        self.assertEqual(sum(f["tensors"] for f in facts["files"]), 5)
        self.assertFalse(os.path.exists(self.path("o")))

    def test_nothing_of_torch_in_the_output(self):
        self.both()
        for name in ["training_args.bin", "optimizer.pt", "rng_state.pth", "x.pkl"]:
            self.write("b/" + name, "a pickle")
        self.write("b/tokenizer.json", "{}")
        r = self.run_qconv("--to", "nf4", "b", "o")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn(b"2 Python pickles are not copied: 'training_args.bin', 'x.pkl'", r.stderr)
        self.assertEqual(sorted(os.listdir(self.path("o"))),
                         ["config.json", "model.safetensors.zst", "qconv.json", "tokenizer.json"])

    def test_tied(self):
        os.mkdir(self.path("m"))
        shutil.copy(os.path.join(DATA, "tied.bin"), self.path("m", "pytorch_model.bin"))
        for tied, names in [(True, {"embed_tokens.weight"}),
                            (False, {"embed_tokens.weight", "lm_head.weight"})]:
            mk.write_json(self.path("m", "config.json"), {"tie_word_embeddings": tied})
            out = "o%d" % tied
            r = self.run_qconv("--to", "bf16", *PLAIN, "m", out)
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertIn(b"under another name" if tied else b"under another name", r.stderr)
            tensors, _ = mk.read_safetensors(self.path(out, "model.safetensors"))
            self.assertEqual({n for n in tensors if n.endswith("s.weight") or "head" in n}, names)

    def test_values(self):
        """Every accepted file by its path; the tensors come out as in its twin."""
        for name in sorted(os.listdir(DATA)):
            if not name.endswith(".bin"):
                continue
            self.ok("-q", "--to", "keep", *PLAIN, os.path.join(DATA, name), "o")
            if name.startswith("empty"):
                got = {}
            else:
                got, _ = mk.read_safetensors(self.path("o", "model.safetensors"))
            want, _ = mk.read_safetensors(os.path.join(DATA, name[:-4] + ".safetensors"))
            self.assertEqual(got, want, name)
            shutil.rmtree(self.path("o"))


class Refused(OutputCase):
    def test_hostile(self):
        """Refused in one line, nothing run, nothing written."""
        folder = os.path.join(DATA, "refused")
        for name in sorted(os.listdir(folder)):
            for args in [["--to", "nf4"], ["inspect"], ["--dry-run", "--to", "int8"]]:
                paths = [os.path.join(folder, name)] + (["o"] if args[0] == "--to" else [])
                line = self.fails(3, *args, *paths, has=name)
                self.assertNotIn("pickle ran", line)
            self.assert_nothing("o")
        for name, what in [("system", "posix.system"), ("eval", "__builtin__.eval"),
                           ("popen", "os.popen"), ("whole_module", "torch.nn.modules")]:
            self.fails(3, "inspect", os.path.join(folder, name + ".bin"),
                       has=["the pickle calls '" + what, "never runs code"])

    def test_shard_with_code(self):
        shutil.copytree(SHARDED, self.path("m"))
        shutil.copy(os.path.join(DATA, "refused", "system.bin"),
                    self.path("m", "pytorch_model-00002-of-00002.bin"))
        self.fails(3, "--to", "nf4", "m", "o",
                   has=["pytorch_model-00002-of-00002.bin", "posix.system"])
        self.assert_nothing("o")

    def test_cut_off(self):
        shutil.copytree(SHARDED, self.path("m"))
        path = self.path("m", "pytorch_model-00001-of-00002.bin")
        with open(path, "r+b") as f:
            f.truncate(os.path.getsize(path) - 1)
        self.fails(3, "--to", "nf4", "m", "o", has="no end record")
        self.assert_nothing("o")

    def test_many_names_for_one_storage(self):
        """Some names may share a weight; thousands would fill a disk from next to nothing."""
        def text(s):
            return b"X" + struct.pack("<I", len(s)) + s.encode()

        def write(path, names, rows):
            def number(n):
                return b"J" + struct.pack("<i", n)
            tensor = (b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") +
                      b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(64 * rows) +
                      b"tQK\0(" + number(rows) + b"K\x40t(K\x40K\x01t\x89"
                      b"ccollections\nOrderedDict\n)RtR")
            entries = b"".join(text("layers.%d.weight" % i) + tensor for i in range(names))
            with zipfile.ZipFile(path, "w") as z:
                z.writestr("m/data.pkl", b"\x80\x02}(" + entries + b"u.")
                z.writestr("m/data/0", bytes(256 * rows))

        write(self.path("tied.bin"), 40, 1000)
        self.ok("-q", "--to", "nf4", "tied.bin", "o")
        write(self.path("hostile.bin"), 2500, 20000)
        for args in (["plan", "--vram", "cpu:8GB"], ["inspect"], ["--dry-run", "--to", "nf4"]):
            self.fails(3, *args, "hostile.bin",
                       has=["hostile.bin: its 2500 tensors share their bytes: expected at most 64 "
                            "times the file's ", " bytes, found 12800000000"])

    def test_older_archives(self):
        """Before torch 2.1 nothing told the byte order; other entries beside are nothing to us."""
        shutil.copytree(SHARDED, self.path("new"))
        shutil.copytree(SHARDED, self.path("old"))
        for name in os.listdir(self.path("old")):
            if not name.endswith(".bin"):
                continue
            with zipfile.ZipFile(self.path("new", name)) as a, \
                    zipfile.ZipFile(self.path("old", name), "w") as b:
                b.writestr("a note", "without a folder")
                for i in a.infolist():
                    if not i.filename.endswith("/byteorder"):
                        b.writestr(i.filename, a.read(i))
        for m in ("new", "old"):
            self.ok("-q", "--to", "nf4", m, "of_" + m)
        new, old = tree(self.path("of_new")), tree(self.path("of_old"))
        self.assertNotEqual(new.pop("qconv.json"), old.pop("qconv.json"))  # digests of the pickles
        self.assertEqual(new, old)

    def test_not_finite(self):
        """A NaN in a .bin is refused as one in safetensors is."""
        shutil.copytree(SHARDED, self.path("m"))
        name = "pytorch_model-00001-of-00002.bin"
        with zipfile.ZipFile(self.path("m", name)) as z:
            entry = [i for i in z.infolist() if i.filename.endswith("/data/1")][0]
            at = entry.header_offset
        with open(self.path("m", name), "r+b") as f:
            f.seek(at)
            head = f.read(30)
            n, extra = struct.unpack("<HH", head[26:30])
            f.seek(at + 30 + n + extra)
            f.write(b"\x00\x7e")
        self.fails(3, "--to", "nf4", "m", "o", has="model.layers.0.mlp.down_proj.weight")
        self.assert_nothing("o")


if __name__ == "__main__":
    unittest.main()
