"""convert --vram: shards cut at devices, the placement in the manifest, device_map.json, and what
reads one device alone: unpack --device and the example of docs/reading.md."""
import json
import os
import subprocess
import unittest

from output_case import PLAIN, STAGING, OutputCase, tree
from qconv_case import ROOT
import make_checkpoint as mk

MODEL = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
THREE = ["--vram", "3x2GB", "--context", "256"]


def names_in(path):
    """Names of the tensors of a plain safetensors file."""
    with open(path, "rb") as f:
        n = int.from_bytes(f.read(8), "little")
        return set(json.loads(f.read(n))) - {"__metadata__"}


def manifest_of(folder):
    with open(os.path.join(folder, "qconv.json"), encoding="utf-8") as f:
        return json.load(f)


def module_device(device_map, tensor):
    """The value of the one prefix of the map that holds this tensor."""
    found = [v for k, v in device_map.items() if tensor == k or tensor.startswith(k + ".")]
    assert len(found) == 1, (tensor, found)
    return "cuda:%d" % found[0] if isinstance(found[0], int) else found[0]


class Vram(OutputCase):
    def placed(self, out, *args):
        self.ok("-q", "--to", "nf4", *THREE, *args, MODEL, self.path(out))
        return manifest_of(self.path(out))

    def test_every_device_has_shards_of_its_own(self):
        m = self.placed("out", *PLAIN)
        self.ok("-q", "--to", "nf4", *PLAIN, MODEL, self.path("whole"))
        with open(self.path("out", "device_map.json"), encoding="utf-8") as f:
            device_map = json.load(f)
        names = [d["name"] for d in m["placement"]["devices"]]
        self.assertEqual(names, ["cuda:0", "cuda:1", "cuda:2"])
        seen = set()
        for shard in m["shards"]:
            tensors = names_in(self.path("out", shard["name"]))
            self.assertTrue(tensors)
            self.assertFalse(tensors & seen)
            seen |= tensors
            for t in tensors:
                self.assertEqual(module_device(device_map, t), names[shard["device"]], t)
        self.assertEqual({s["device"] for s in m["shards"]}, {0, 1, 2})
        # Where a tensor lies changes nothing in it.
        self.assertEqual(mk.read_checkpoint(self.path("out")),
                         mk.read_checkpoint(self.path("whole")))
        self.assertEqual(manifest_of(self.path("whole"))["version"], 1)
        self.assertNotIn("placement", manifest_of(self.path("whole")))
        self.assertFalse(os.path.exists(self.path("whole", "device_map.json")))

    def test_predicted_bytes_are_the_written_ones(self):
        for more in [[], ["--max-shard-size", "100KB"]]:
            plan = json.loads(self.ok("--to", "nf4", *THREE, *more, "--dry-run", "--json", MODEL))
            for how in [PLAIN, []]:
                m = self.placed("out", *how, *more, "--force")
                self.assertEqual([(s["name"], s["content_bytes"]) for s in m["shards"]],
                                 [(s["name"], s["bytes"]) for s in plan["shards"]])
                names = [d["name"] for d in m["placement"]["devices"]]
                self.assertEqual([names[s["device"]] for s in m["shards"]],
                                 [s["device"] for s in plan["shards"]])
                for i, d in enumerate(m["placement"]["devices"]):
                    mine = [s for s in m["shards"] if s["device"] == i]
                    self.assertEqual(d["shard_bytes"], sum(s["content_bytes"] for s in mine))
                    self.assertEqual(d["tensor_bytes"], sum(
                        t["end"] - t["begin"] for t in m["tensors"]
                        if m["shards"][t["shard"]]["device"] == i))
                if how:
                    for s in plan["shards"]:
                        self.assertEqual(os.path.getsize(self.path("out", s["name"])), s["bytes"])
            by_name = {t["name"]: t["device"] for t in plan["tensors"]}
            for t in m["tensors"]:
                if "source" in t:
                    self.assertEqual(names[m["shards"][t["shard"]]["device"]],
                                     by_name[t["source"]["name"]])
            if more:
                self.assertGreater(len(m["shards"]), 5)
            else:
                self.assertEqual(len(m["shards"]), 3)

    def test_the_dry_run_has_a_column(self):
        lines = self.ok("--to", "nf4", *THREE, "--dry-run", MODEL).split("\n")
        self.assertIn("device", lines[0].split())
        head = [line for line in lines if line.startswith("lm_head.weight")]
        self.assertIn("cuda:2", head[0].split())
        self.assertNotIn("device", self.ok("--to", "nf4", "--dry-run", MODEL).split("\n")[0])

    def test_the_manifest_says_what_was_asked_for(self):
        self.ok("-q", "--to", "int8", "--vram", "24GB+16GB+cpu:64GB", "--margin", "0.8", "--context",
                "100", "--batch", "2", "--kv-dtype", "fp32", MODEL, self.path("out"))
        m = manifest_of(self.path("out"))
        p = m["placement"]
        self.assertEqual(m["version"], 2)
        devices = p.pop("devices")
        self.assertEqual(p, {"vram": "24GB+16GB+cpu:64GB", "margin": 0.8, "context": 100,
                             "batch": 2, "images": 1, "kv_bits": 32, "mla_expanded": False})
        self.assertEqual([d["name"] for d in devices], ["cuda:0", "cuda:1", "cpu"])
        self.assertEqual(devices[2], {"name": "cpu", "tensor_bytes": 0, "shard_bytes": 0})
        self.ok("-q", "verify", self.path("out"))
        # A device without anything is one all the same.
        self.ok("-q", "unpack", "--device", "cpu", self.path("out"), self.path("cpu"))
        self.assertEqual(sorted(tree(self.path("cpu"))),
                         ["model.safetensors.index.json", "qconv.json"])
        self.ok("-q", "verify", self.path("cpu"))

    def test_threads_do_not_matter(self):
        self.placed("one", "--threads", "1", "--max-shard-size", "60KB")
        self.placed("many", "--threads", "7", "--max-shard-size", "60KB")
        self.assert_same("one", "many")

    def test_what_spills_lies_in_shards_of_its_own(self):
        for mb in range(501, 560):
            args = ["--to", "nf4", "--vram", "%dMB+cpu:64GB" % mb, "--margin", "1", "--context", "64"]
            r = self.run_qconv(*args, "--dry-run", "--json", MODEL)
            if r.returncode == 0:
                plan = json.loads(r.stdout.decode())
                if {s["device"] for s in plan["shards"]} == {"cuda:0", "cpu"}:
                    break
        else:
            self.fail("no size spills a part")
        self.ok("-q", *args, *PLAIN, MODEL, self.path("out"))
        m = manifest_of(self.path("out"))
        with open(self.path("out", "device_map.json"), encoding="utf-8") as f:
            device_map = json.load(f)
        self.assertIn("cpu", device_map.values())
        for s in m["shards"]:
            for t in names_in(self.path("out", s["name"])):
                self.assertEqual(module_device(device_map, t), ["cuda:0", "cpu"][s["device"]])

    def test_what_does_not_fit_is_refused_before_anything_is_written(self):
        for more in [[], ["--dry-run"]]:
            self.fails(4, "--to", "nf4", "--vram", "2x500MB", *more, MODEL, self.path("out"),
                       has=["does not fit --vram 2x500MB with --to nf4: it is short by ", " on cuda:",
                            "; 'qconv plan' shows what would fit"])
            self.assert_nothing("out")
        self.fails(2, "--to", "nf4", "--vram", "2x", MODEL, self.path("out"))
        self.assert_nothing("out")

    def test_a_device_map_of_the_source_is_replaced(self):
        mk.write_checkpoint(self.path("m"), {
            "model.layers.0.mlp.up_proj.weight": ("BF16", [64, 64], bytes(8192))},
            config={"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64,
                    "num_attention_heads": 1, "intermediate_size": 64, "vocab_size": 1})
        self.write("m/device_map.json", '{"": "somewhere"}')
        self.ok("-q", "--to", "nf4", "--vram", "2GB", "--incomplete", "m", "out")
        with open(self.path("out", "device_map.json"), encoding="utf-8") as f:
            self.assertNotIn("somewhere", f.read())
        listed = [f["path"] for f in manifest_of(self.path("out"))["files"]]
        self.assertIn("device_map.json", listed)
        self.ok("-q", "--to", "nf4", "--incomplete", "m", "plain")
        self.assertFalse(os.path.exists(self.path("plain", "device_map.json")))

    def test_everything_fits_in_16_bit(self):
        self.ok("-q", "--to", "auto", "--vram", "2x2GB", *PLAIN, MODEL, self.path("out"))
        self.assertEqual({t["scheme"] for t in manifest_of(self.path("out"))["tensors"]}, {"keep"})
        self.ok("-q", "verify", self.path("out"))


class Reading(OutputCase):
    def setUp(self):
        super().setUp()
        for name, how in [("out", []), ("plain", PLAIN)]:
            self.ok("-q", "--to", "nf4", *THREE, *how, "--max-shard-size", "100KB", MODEL,
                    self.path(name))
        self.m = manifest_of(self.path("out"))

    def drop_others(self, out, device):
        """Delete all shards but those of a device; returns the names of its own, plain."""
        m = manifest_of(self.path(out))
        names = [d["name"] for d in m["placement"]["devices"]]
        kept = []
        for s in m["shards"]:
            if names[s["device"]] == device:
                kept.append(s["name"])
            else:
                os.unlink(self.path(out, s["name"] + (".zst" if m["compression"] else "")))
        self.assertTrue(kept)
        return kept

    def test_unpack_of_all_equals_plain(self):
        self.ok("-q", "unpack", "out", "unpacked")
        self.assert_same("unpacked", "plain")

    def test_unpack_of_each_device(self):
        whole, seen = mk.read_checkpoint(self.path("plain")), {}
        for d in self.m["placement"]["devices"]:
            self.ok("-q", "unpack", "--device", d["name"], "out", "part", "--force")
            part = mk.read_checkpoint(self.path("part"))
            self.assertFalse(set(part) & set(seen))
            seen.update(part)
            with open(self.path("part", "model.safetensors.index.json"), encoding="utf-8") as f:
                index = json.load(f)
            self.assertEqual(set(index["weight_map"]), set(part))
            self.assertEqual(index["metadata"]["total_size"], d["tensor_bytes"])
            m = manifest_of(self.path("part"))
            self.assertEqual(m["placement"]["devices"], [d])
            self.assertEqual(sorted(tree(self.path("part"))), sorted(
                [s["name"] for s in m["shards"]] + ["qconv.json", "model.safetensors.index.json"]))
            self.ok("-q", "verify", "part")
        self.assertEqual(seen, whole)

    def test_unpack_needs_only_its_shards(self):
        for out in ["out", "plain"]:
            before = tree(self.path("plain"))
            kept = self.drop_others(out, "cuda:1")
            self.ok("-q", "unpack", "--device", "cuda:1", out, out + "1")
            for name in kept:
                with open(self.path(out + "1", name), "rb") as f:
                    self.assertTrue(f.read() == before[name], name)
            self.fails(4, "-q", "unpack", "--device", "cuda:2", out, "other", has="is missing")
            self.assert_nothing("other")

    def test_unknown_devices_are_named(self):
        self.fails(5, "unpack", "--device", "cuda:7", "out", "part",
                   has="there is no device 'cuda:7' in it, only cuda:0, cuda:1, cuda:2")
        self.assert_nothing("part")
        self.ok("-q", "--to", "nf4", MODEL, "whole")
        self.fails(5, "unpack", "--device", "cuda:0", "whole", "part",
                   has="was made without --vram")
        self.assert_nothing("part")

    def test_verify_tells_of_files_that_are_not_listed(self):
        self.write("plain/notes.txt", "mine")
        r = self.run_qconv("verify", "plain")
        self.assertEqual(r.returncode, 0)
        self.assertIn("'notes.txt' is not in the manifest", r.stderr.decode())
        self.write("plain/more.txt", "mine")
        self.assertIn("'more.txt' and others are not in the manifest",
                      self.run_qconv("verify", "plain").stderr.decode())
        self.assertEqual(self.run_qconv("verify", "out").stderr, b"")

    @unittest.skipUnless(os.environ.get("READING_EXAMPLE"), "run by ctest")
    def test_the_example_of_the_documentation(self):
        example = os.environ["READING_EXAMPLE"]
        device = self.m["placement"]["devices"][1]
        tensors = [t for t in self.m["tensors"] if self.m["shards"][t["shard"]]["device"] == 1]
        for out in ["out", "plain"]:
            self.drop_others(out, "cuda:1")
            r = subprocess.run([example, self.path(out), "cuda:1"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, timeout=60)
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertEqual(r.stdout.decode(), "cuda:1: %d tensors, %d bytes loaded\n" %
                             (len(tensors), device["tensor_bytes"]))
            r = subprocess.run([example, self.path(out), "cuda:0"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, timeout=60)
            self.assertEqual(r.returncode, 4, r.stderr)
            self.assertIn("the shard is missing", r.stderr.decode())

    def test_nothing_is_left_of_a_failed_unpack(self):
        shard = self.m["shards"][0]
        path = self.path("out", shard["name"] + ".zst")
        with open(path, "r+b") as f:
            f.seek(shard["header_stored_bytes"] + 3)
            b = f.read(1)
            f.seek(-1, 1)
            f.write(bytes([b[0] ^ 1]))
        self.fails(4, "-q", "unpack", "--device", "cuda:0", "out", "part", has="tensor '")
        self.assert_nothing("part")
        self.assertFalse(os.path.exists(self.path(STAGING)))
        self.ok("-q", "unpack", "--device", "cuda:2", "out", "part")  # its shards are whole


if __name__ == "__main__":
    unittest.main()
