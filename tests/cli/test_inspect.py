"""qconv inspect on every kind of input."""
import json
import os
import shutil
import struct
import subprocess
import unittest

from qconv_case import QCONV, QconvCase
import make_checkpoint as mk

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 12}
Q = "model.layers.%d.self_attn.q_proj"


def f32(shape, value=0.5):
    return ("F32", shape, struct.pack("<f", value) * mk.numel(shape))


def bf16(shape):
    return ("BF16", shape, b"\x80\x3f" * mk.numel(shape))


def state_json(shape, nested):
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape}
    if nested:
        state.update({"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25})
    return ("U8", [len(json.dumps(state))], json.dumps(state).encode())


def bnb_nf4(module, rows, cols, nested=True):
    """A weight as bitsandbytes stores it; 64 divides rows * cols."""
    n = rows * cols
    w = module + ".weight"
    t = {w: ("U8", [n // 2, 1], b"\x77" * (n // 2)),
         w + ".quant_map": f32([16]),
         w + ".quant_state.bitsandbytes__nf4": state_json([rows, cols], nested)}
    if nested:
        t[w + ".absmax"] = ("U8", [n // 64], bytes(n // 64))
        t[w + ".nested_absmax"] = f32([-(-n // 64 // 256)])
        t[w + ".nested_quant_map"] = f32([256])
    else:
        t[w + ".absmax"] = f32([n // 64])
    return t


def bnb_int8(module, rows, cols):
    return {module + ".weight": ("I8", [rows, cols], bytes(rows * cols)),
            module + ".SCB": f32([rows]),
            module + ".weight_format": ("U8", [], b"\x00")}


def quantized_config(**bnb):
    return dict(LLAMA, quantization_config=dict({"quant_method": "bitsandbytes"}, **bnb))


class Inspect(QconvCase):
    def checkpoint(self, tensors, config=LLAMA, **more):
        mk.write_checkpoint(self.path("m"), tensors, config=config, **more)
        return self.path("m")

    def inspect(self, path):
        return json.loads(self.ok("inspect", "--json", path))

    def by_name(self, path):
        return {t["name"]: t for t in self.inspect(path)["tensors"]}

    def plain(self):
        return self.checkpoint({
            "model.embed_tokens.weight": bf16([100, 64]),
            Q % 10 + ".weight": bf16([64, 64]),
            Q % 2 + ".weight": bf16([64, 64]),
            "model.norm.weight": f32([64]),
            "position_ids": ("I64", [4], bytes(32)),
        })


class Kinds(Inspect):
    def test_directory(self):
        text = self.ok("inspect", self.plain())
        self.assertIn("model type llama\n", text)
        self.assertRegex(text, r"(?m)^model\.norm\.weight +F32 +\[64\] +256 B +norm$")
        self.assertRegex(text, r"(?m)^model\.embed_tokens\.weight +BF16 +\[100, 64\] +12\.8 KB "
                               r"+embedding$")
        self.assertLess(text.index(Q % 2), text.index(Q % 10))
        self.assertIn("total: 14,656 weights in 5 tensors", text)
        self.assertIn("1 integer tensor is not counted as weights", text)
        for line in text.split("\n"):
            self.assertEqual(line, line.rstrip())

    def test_directory_json(self):
        j = self.inspect(self.plain())
        self.assertEqual(j["model_type"], "llama")
        self.assertTrue(j["known_type"] and j["is_directory"])
        self.assertIsNone(j["manifest"])
        self.assertEqual([f["name"] for f in j["side_files"]], ["config.json"])
        self.assertEqual(j["files"][0]["tensor_bytes"], 12800 + 2 * 8192 + 256 + 32)
        total = j["totals"]
        self.assertEqual(total["weights"], 6400 + 2 * 4096 + 64)
        self.assertEqual(total["integer_tensors"], 1)
        self.assertEqual(total["tensor_bytes"], 29472)
        self.assertEqual(total["by_dtype"]["BF16"], {"tensors": 3, "weights": 14592,
                                                     "bytes": 29184})
        self.assertEqual(total["by_scheme"], {"plain": {"tensors": 5, "weights": 14656,
                                                        "bytes": 29472}})
        self.assertAlmostEqual(total["bits_per_weight"], 29472 * 8 / 14656)
        self.assertEqual([t["name"] for t in j["tensors"]][1:3], [Q % 2 + ".weight",
                                                                  Q % 10 + ".weight"])
        self.assertEqual(j["tensors"][1], {"name": Q % 2 + ".weight", "dtype": "BF16",
                                           "shape": [64, 64], "bytes": 8192,
                                           "file": "model.safetensors", "role": "linear",
                                           "scheme": None})

    def test_single_file(self):
        self.plain()
        j = self.inspect(self.path("m", "model.safetensors"))
        self.assertFalse(j["is_directory"])
        self.assertEqual(len(j["tensors"]), 5)
        text = self.ok("inspect", self.path("m", "model.safetensors"))
        self.assertIn(": one file, model type llama\n", text)

    def test_shards(self):
        self.checkpoint({"w%d" % i: bf16([64, 64]) for i in range(12)}, shard_bytes=20000)
        j = self.inspect(self.path("m"))
        self.assertGreater(len(j["files"]), 3)
        self.assertEqual(sum(f["tensors"] for f in j["files"]), 12)
        self.assertEqual([t["name"] for t in j["tensors"]], ["w%d" % i for i in range(12)])

    def test_scalar_and_empty_tensors(self):
        self.checkpoint({"s": ("F32", [], bytes(4)), "e": ("F32", [0, 3], b"")})
        t = self.by_name(self.path("m"))
        self.assertEqual((t["s"]["shape"], t["e"]["shape"], t["e"]["bytes"]), ([], [0, 3], 0))
        self.assertIn("[]", self.ok("inspect", self.path("m")))

    def test_no_config(self):
        self.checkpoint({"a.weight": bf16([4, 4])}, config=None)
        j = self.inspect(self.path("m"))
        self.assertIsNone(j["model_type"])
        self.assertFalse(j["known_type"])

    @unittest.skipUnless(shutil.which("zstd"), "no zstd")
    def test_compressed_file(self):
        self.plain()
        with open(self.path("m", "model.safetensors"), "rb") as f:
            content = f.read()
        frames, entries = b"", b""
        for piece in [content[:1000], content[1000:]]:
            frame = subprocess.run(["zstd", "-c", "--content-size",
                                    "--stream-size=%d" % len(piece)], input=piece,
                                   stdout=subprocess.PIPE, check=True).stdout
            frames += frame
            entries += struct.pack("<II", len(frame), len(piece))
        table = entries + struct.pack("<IBI", 2, 0, 0x8F92EAB1)
        whole = frames + struct.pack("<II", 0x184D2A5E, len(table)) + table
        plain = self.inspect(self.path("m"))
        for path in [self.path("x.safetensors.zst"), self.path("m", "model.safetensors.zst")]:
            with open(path, "wb") as f:
                f.write(whole)
        j = self.inspect(self.path("x.safetensors.zst"))
        self.assertTrue(j["files"][0]["compressed"])
        self.assertEqual(j["files"][0]["file_bytes"], len(whole))
        self.assertEqual(len(j["tensors"]), 5)
        os.remove(self.path("m", "model.safetensors"))
        j = self.inspect(self.path("m"))
        self.assertTrue(j["files"][0]["compressed"])
        self.assertEqual([{k: v for k, v in t.items() if k != "file"} for t in j["tensors"]],
                         [{k: v for k, v in t.items() if k != "file"} for t in plain["tensors"]])
        self.assertIn("model.safetensors.zst", self.ok("inspect", self.path("m")))


class Quantized(Inspect):
    def test_bitsandbytes_nf4(self):
        tensors = {"model.embed_tokens.weight": bf16([100, 64])}
        tensors.update(bnb_nf4(Q % 0, 64, 128))
        tensors.update(bnb_nf4(Q % 1, 64, 128, nested=False))
        self.checkpoint(tensors, quantized_config(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
        t = self.by_name(self.path("m"))
        w = t[Q % 0 + ".weight"]
        self.assertEqual((w["dtype"], w["shape"], w["bytes"]), ("U8", [4096, 1], 4096))
        self.assertEqual((w["scheme"], w["logical_shape"], w["logical_dtype"]),
                         ("nf4", [64, 128], "BF16"))
        self.assertEqual((w["block_size"], w["double_quant"]), (64, True))
        state = [s for s in t.values() if s.get("state_of") == w["name"]]
        self.assertEqual(len(state), 5)
        self.assertEqual(w["bytes_with_state"], 4096 + sum(s["bytes"] for s in state))
        self.assertFalse(t[Q % 1 + ".weight"]["double_quant"])
        total = self.inspect(self.path("m"))["totals"]
        self.assertEqual(total["weights"], 6400 + 2 * 8192)
        self.assertEqual(total["integer_tensors"], 0)
        self.assertEqual(total["state_tensors"], 8)
        self.assertEqual(total["by_scheme"]["nf4"]["weights"], 2 * 8192)
        self.assertEqual(sum(s["bytes"] for s in total["by_scheme"].values()),
                         total["tensor_bytes"])
        text = self.ok("inspect", self.path("m"))
        self.assertRegex(text, r"(?m)^%s\.weight +U8 +\[64, 128\] .* nf4 b64 dq$" % (Q % 0))
        self.assertRegex(text, r"(?m)^%s\.weight +U8 +\[64, 128\] .* nf4 b64$" % (Q % 1))
        self.assertNotIn("absmax", text)
        self.assertIn("8 state tensors are counted", text)
        text = self.ok("inspect", "-v", self.path("m"))
        self.assertIn("weight.nested_absmax", text)
        self.assertRegex(text, r"(?m)^%s\.weight +U8 +\[4096, 1\] " % (Q % 0))

    def test_bitsandbytes_int8(self):
        tensors = bnb_int8(Q % 0, 64, 128)
        self.checkpoint(tensors, quantized_config(load_in_8bit=True))
        w = self.by_name(self.path("m"))[Q % 0 + ".weight"]
        self.assertEqual((w["scheme"], w["logical_shape"]), ("int8", [64, 128]))
        self.assertEqual(w["bytes_with_state"], 64 * 128 + 64 * 4 + 1)
        self.assertNotIn("block_size", w)
        total = self.inspect(self.path("m"))["totals"]
        self.assertAlmostEqual(total["bits_per_weight"], (8192 + 257) * 8 / 8192)

    def test_mxfp4(self):
        p = "model.layers.0.mlp.experts.gate_up_proj"
        self.checkpoint({p + "_blocks": ("U8", [2, 8, 3, 16], bytes(768)),
                         p + "_scales": ("U8", [2, 8, 3], bytes(48))},
                        {"model_type": "gpt_oss", "num_hidden_layers": 1})
        t = self.by_name(self.path("m"))
        self.assertEqual((t[p + "_blocks"]["scheme"], t[p + "_blocks"]["logical_shape"]),
                         ("mxfp4", [2, 8, 96]))
        self.assertEqual(t[p + "_scales"]["state_of"], p + "_blocks")
        total = self.inspect(self.path("m"))["totals"]
        self.assertEqual(total["bits_per_weight"], 4.25)

    def test_forms_that_are_not_read_can_be_listed(self):
        self.checkpoint({Q % 0 + ".qweight": ("I32", [8, 64], bytes(2048)),
                         Q % 0 + ".scales": ("F16", [1, 64], bytes(128))})
        j = self.inspect(self.path("m"))
        self.assertEqual(len(j["tensors"]), 2)
        self.checkpoint({Q % 0 + ".weight": ("F8_E4M3", [64, 64], bytes(4096)),
                         Q % 0 + ".weight_scale_inv": f32([1, 1])})
        self.assertEqual(len(self.inspect(self.path("m"))["tensors"]), 2)


class Wrong(Inspect):
    def test_missing(self):
        self.fails(3, "inspect", "no-such", has="no-such")

    def test_empty_directory(self):
        os.mkdir(self.path("m"))
        self.fails(3, "inspect", self.path("m"))

    def test_not_safetensors(self):
        self.write("x.safetensors", "version https://git-lfs.github.com/spec/v1\n" + "x" * 100)
        self.fails(3, "inspect", self.path("x.safetensors"))

    def test_short_file(self):
        self.plain()
        full = self.path("m", "model.safetensors")
        with open(full, "r+b") as f:
            f.truncate(os.path.getsize(full) - 5)
        self.fails(3, "inspect", self.path("m"), has="5 are missing")
        self.fails(3, "inspect", "--json", full, has="5 are missing")

    def test_names_with_control_characters(self):
        self.checkpoint({"a\x1b[31m\nb": bf16([2, 2])})
        self.assertIn("a?[31m?b", self.ok("inspect", self.path("m")))
        self.assertIn("a\x1b[31m\nb", self.by_name(self.path("m")))

    def test_bad_manifest_is_a_warning(self):
        self.plain()
        with open(self.path("m", "qconv.json"), "w") as f:
            f.write("{}")
        r = self.run_qconv("inspect", "--json", self.path("m"))
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn(b"qconv.json", r.stderr)
        self.assertEqual(len(json.loads(r.stdout)["warnings"]), 1)
        self.assertEqual(self.run_qconv("inspect", "-q", self.path("m")).stderr, b"")

    def test_closed_pipe(self):
        self.plain()
        p = subprocess.run("set -o pipefail; '%s' inspect '%s' | true" % (QCONV, self.path("m")),
                           shell=True, executable="/bin/bash", stderr=subprocess.PIPE)
        self.assertEqual((p.returncode, p.stderr), (0, b""))


if __name__ == "__main__":
    unittest.main()
