"""qconv verify from outside: damage of all kinds is exit 4 and is named; what is whole is exit 0.
(unit_verify_flips.c flips and cuts every byte of a small output.)"""
import json
import os
import random
import shutil
import struct
import unittest

from output_case import OutputCase, PLAIN, seek_table, tree, write_sealed, xxh3_128
from qconv_case import SANITIZED
import make_checkpoint as mk

L = "model.layers.%d."


def model(seed):
    rng = random.Random(seed)
    t = {"model.embed_tokens.weight": ("BF16", [64, 96])}
    for i in range(4):
        for name, shape in [("self_attn.q_proj", [96, 96]), ("self_attn.v_proj", [96, 96]),
                            ("mlp.up_proj", [160, 96])]:
            t[L % i + name + ".weight"] = ("BF16", shape)
        t[L % i + "input_layernorm.weight"] = ("BF16", [96])
    return {n: (d, s, mk.random_bytes(d, s, rng)) for n, (d, s) in t.items()}


class Verify(OutputCase):
    FORMS = [["--to", "nf4", "--max-shard-size", "20KB"],
             ["--to", "int8", "--max-shard-size", "45KB", *PLAIN],
             ["--to", "int8", "--block-size", "64", "--max-shard-size", "45KB"]]

    def setUp(self):
        super().setUp()
        self.model(model(1))
        self.write("m/tokenizer.json", "{}" * 50)

    def outputs(self):
        """An output of each form, at o."""
        for form in self.FORMS:
            self.ok("-q", *form, "m", "o")
            yield form
            self.ok("-q", "verify", "o")
            shutil.rmtree(self.path("o"))

    def damaged(self, *has):
        """verify says exit 4 in one line that names what is in `has`; the JSON agrees."""
        line = self.fails(4, "verify", "-q", "o", has=has)
        r = self.run_qconv("verify", "-q", "--json", "o")
        self.assertEqual(r.returncode, 4)
        if "qconv.json" not in line:
            answer = json.loads(r.stdout)
            self.assertFalse(answer["ok"])
            self.assertGreater(answer["problems"], 0)
            for text in has:
                self.assertIn(text, answer["first_problem"]["what"] + " " +
                              answer["first_problem"]["why"])
        return line

    def shards(self):
        return sorted(n for n in os.listdir(self.path("o")) if ".safetensors" in n and
                      not n.endswith(".index.json"))

    def manifest(self):
        with open(self.path("o", "qconv.json")) as f:
            return json.load(f)

    def test_whole(self):
        for form in self.outputs():
            text = self.ok("verify", "o")
            self.assertEqual(text.count("\n"), 1)
            answer = json.loads(self.ok("verify", "--json", "o"))
            m = self.manifest()
            self.assertEqual((answer["ok"], answer["problems"], answer["first_problem"]),
                             (True, 0, None))
            self.assertEqual(answer["tensors"], len(m["tensors"]))
            self.assertEqual(answer["shards"], len(self.shards()))
            self.assertEqual(answer["stored_bytes"], sum(
                os.path.getsize(self.path("o", n)) for n in self.shards()))
            for threads in ("1", "2", "9"):
                self.ok("verify", "-q", "--threads", threads, "o")

    def test_missing_files(self):
        for form in self.outputs():
            for name in tree(self.path("o")):
                os.rename(self.path("o", name), self.path("aside"))
                if name == "qconv.json":
                    self.fails(3, "verify", "o", has=["qconv.json", "not finished"])
                else:
                    self.damaged(name, "missing")
                os.rename(self.path("aside"), self.path("o", name))

    def test_truncated_and_extended(self):
        for form in self.outputs():
            for name, body in tree(self.path("o")).items():
                others = (body[:-1], body[:len(body) // 2], b"", body + b"\0", body + body)
                for other in others[::3 if SANITIZED else 1]:
                    with open(self.path("o", name), "wb") as f:
                        f.write(other)
                    line = self.damaged(name)
                    if name != "qconv.json":
                        self.assertIn("expected %d bytes, found %d" % (len(body), len(other)), line)
                with open(self.path("o", name), "wb") as f:
                    f.write(body)

    def test_swapped_shards(self):
        for form in self.outputs():
            a, b = self.shards()[1:3]
            self.swap_files(a, b)
            self.damaged(a)
            self.swap_files(a, b)

    def swap_files(self, a, b):
        os.rename(self.path("o", a), self.path("aside"))
        os.rename(self.path("o", b), self.path("o", a))
        os.rename(self.path("aside"), self.path("o", b))

    def test_shard_of_another_model(self):
        """Same shapes, same sizes where nothing is compressed: only the bytes tell."""
        self.model(model(9), name="n")
        self.write("n/tokenizer.json", "{}" * 50)
        for form in self.outputs():
            self.ok("-q", *form, "n", "p")
            name = self.shards()[1]
            shutil.copyfile(self.path("p", name), self.path("o", name))
            self.damaged(name[:-4] if name.endswith(".zst") else name)
            # The whole of another output but for its manifest, and its manifest alone.
            shutil.rmtree(self.path("o"))
            self.ok("-q", *form, "m", "o")
            keep = tree(self.path("o"))["qconv.json"]
            shutil.copyfile(self.path("p", "qconv.json"), self.path("o", "qconv.json"))
            self.damaged("model")
            shutil.rmtree(self.path("o"))
            os.rename(self.path("p"), self.path("o"))
            with open(self.path("o", "qconv.json"), "r+b") as f:
                theirs = f.read()
                f.seek(0)
                f.write(keep)
                f.truncate()
            self.damaged("model")
            with open(self.path("o", "qconv.json"), "wb") as f:
                f.write(theirs)

    def places(self, name):
        """[(tensor, begin, end)] in the shard's file: its data or its frames."""
        m = self.manifest()
        number = [s["name"] for s in m["shards"]].index(
            name[:-4] if name.endswith(".zst") else name)
        head = m["shards"][number]["header_bytes"]
        for t in m["tensors"]:
            if t["shard"] != number:
                continue
            if name.endswith(".zst"):
                yield t["name"], t["stored_offset"], t["stored_offset"] + t["stored_bytes"]
            else:
                yield t["name"], head + t["begin"], head + t["end"]

    def test_swapped_tensors(self):
        """Two tensors of one shape have changed places: each alone is flawless."""
        for form in self.outputs():
            swaps = 0
            for name in self.shards():
                with open(self.path("o", name), "rb") as f:
                    body = f.read()
                if name.endswith(".zst"):
                    # The seek table is what gives the places their length.
                    frames, _ = seek_table(self.path("o", name))
                    self.assertEqual({f[0] for f in frames} - {0},
                                     {b for _, b, e in self.places(name) if e > b})
                rows = [p for p in self.places(name) if "quant_map" not in p[0]]
                for (ta, a, ea), (tb, b, eb) in zip(rows, rows[1:]):
                    if ea - a != eb - b or ea == a or body[a:ea] == body[b:eb]:
                        continue
                    other = bytearray(body)
                    other[a:ea], other[b:eb] = body[b:eb], body[a:ea]
                    with open(self.path("o", name), "wb") as f:
                        f.write(other)
                    self.damaged("'%s'" % ta)
                    swaps += 1
                with open(self.path("o", name), "wb") as f:
                    f.write(body)
            self.assertGreater(swaps, 0, form)

    def test_the_first_bad_tensor_is_named(self):
        """Of several, the one that comes first in file order, whatever the threads."""
        for form in self.outputs():
            name = self.shards()[2]
            rows = [p for p in self.places(name) if p[2] > p[1]]
            picks = [rows[i] for i in (1, 3, len(rows) - 1)]
            with open(self.path("o", name), "r+b") as f:
                body = f.read()
                for tensor, begin, end in picks:
                    at = (begin + end) // 2
                    f.seek(at)
                    f.write(bytes([body[at] ^ 4]))
            for threads in ("1", "2", "5"):
                r = self.run_qconv("verify", "-q", "--threads", threads, "o")
                self.assertEqual(r.returncode, 4)
                self.assertIn(b"'%s'" % picks[0][0].encode(), r.stderr)
                self.assertIn(b"and more", r.stderr)
            r = self.run_qconv("verify", "-q", "--json", "o")
            self.assertEqual(json.loads(r.stdout)["problems"], 3)
            r = self.run_qconv("unpack", "-q", "o", "u")
            self.assertEqual(r.returncode, 4)
            self.assertIn(picks[0][0].encode(), r.stderr)
            self.assert_nothing("u")
            with open(self.path("o", name), "wb") as f:
                f.write(body)

    def test_frames_that_lie(self):
        """A shard made anew with the same content but other frames is not what was written."""
        if not shutil.which("zstd"):
            self.skipTest("no zstd program")
        self.ok("-q", *self.FORMS[0], "m", "o")
        self.ok("-q", *self.FORMS[0], "--compress", "zstd:9", "m", "p")
        name = self.shards()[0]
        shutil.copyfile(self.path("p", name), self.path("o", name))
        self.damaged(name[:-4])

    def test_plain_twin(self):
        """Of a compressed shard: what the manifest lists is what is read, whatever other loaders would take, and
        verify compares the two."""
        for more in ([], ["--max-shard-size", "20KB"]):
            self.ok("-q", "--to", "nf4", *more, "m", "o")
            self.ok("-q", "--to", "nf4", *more, *PLAIN, "m", "plain")
            self.ok("-q", "--to", "bf16", *PLAIN, "o", "right")
            name = self.shards()[0][:-len(".zst")]
            shutil.copyfile(self.path("plain", name), self.path("o", name))
            self.assertEqual(self.warned("-q", "verify", "o"), "")
            with open(self.path("o", name), "r+b") as f:
                f.seek(-100, os.SEEK_END)
                f.write(b"\x77" * 50)
            self.damaged("tensor '", " in %s" % name, "not those that were written")
            self.ok("-q", "--to", "bf16", *PLAIN, "o", "read")
            self.assertEqual(tree(self.path("read")), tree(self.path("right")))
            self.write("o/" + name, "")
            self.damaged(name, "found 0")
            for folder in ("o", "plain", "right", "read"):
                shutil.rmtree(self.path(folder))

    def test_index_that_lies(self):
        """It is hashed like any other file."""
        for form in self.outputs():
            path = self.path("o", "model.safetensors.index.json")
            with open(path) as f:
                text = f.read()
            a, b = "model-00001-of", "model-00002-of"
            with open(path, "w") as f:
                f.write(text.replace(a, "?").replace(b, a).replace("?", b))
            self.damaged("model.safetensors.index.json")
            with open(path, "w") as f:
                f.write(text)

    def test_not_an_output(self):
        self.fails(3, "verify", "m", has="qconv.json")
        self.fails(3, "verify", "nowhere", has="nowhere")
        self.fails(3, "verify", "m/config.json", has="a file")
        os.mkdir(self.path("empty"))
        self.fails(3, "verify", "empty", has="qconv.json")

    def test_manifest_that_is_no_manifest(self):
        self.ok("-q", "--to", "nf4", "m", "o")
        for text in ["", "{}", "[]", "null", "\0" * 100, "{" * 100000, '{"format": "qconv"}',
                     self.manifest_without_digest()]:
            self.write("o/qconv.json", text)
            self.fails(4, "verify", "o", has="qconv.json")
            self.fails(4, "unpack", "o", "u", has="qconv.json")
            self.assert_nothing("u")

    def manifest_without_digest(self):
        m = self.manifest()
        m.pop("manifest_xxh3_128")
        return json.dumps(m, indent=2) + "\n"


class Names(OutputCase):
    def test_one_limit(self):
        """What would be too long to be read back is refused before the work, and what is written is read."""
        made = len(".quant_state.bitsandbytes__nf4")
        for length, code in ((4000 - made, 0), (4000 - made + 1, 3), (4000, 3), (4001, 3), (5000, 3)):
            name = "model.layers.0." + "x" * (length - len("model.layers.0..weight")) + ".weight"
            self.model({name: ("BF16", [64, 64], bytes(2 * 64 * 64))})
            with self.subTest(length=length):
                if code:
                    self.fails(3, "-q", "--to", "nf4", "m", "o", has="at most 4000 are allowed")
                    self.assert_nothing("o")
                else:
                    self.ok("-q", "--to", "nf4", "m", "o")
                    self.ok("-q", "verify", "o")
                    self.ok("-q", "--to", "bf16", "o", "back")
                    shutil.rmtree(self.path("o"))
            shutil.rmtree(self.path("m"))


class Headers(OutputCase):
    """A manifest whose digest fits but that says something else than the headers of the shards."""
    NORM = "model.layers.%d.input_layernorm.weight"

    def setUp(self):
        super().setUp()
        tensors = model(3)
        tensors["model.layers.1.nothing"] = ("F32", [0], b"")
        self.model(tensors)

    def cases(self, m):
        """(what the manifest is changed to, what must be named)"""
        rows = {t["name"]: t for t in m["tensors"]}
        a, b = rows[self.NORM % 0], rows[self.NORM % 1]

        def swap_norms():
            a["name"], b["name"] = b["name"], a["name"]
            a["source"]["name"], b["source"]["name"] = a["name"], b["name"]

        def lose():
            m["tensors"].remove(rows["model.layers.1.nothing"])

        def gain():
            at = m["tensors"].index(rows["model.layers.1.nothing"])
            m["tensors"].insert(at, dict(m["tensors"][at], name="model.layers.1.added"))

        def move():
            """Two tensors of different sizes that lie side by side have changed places."""
            i = next(i for i, t in enumerate(m["tensors"]) if t["shard"] == 0 and
                     t["end"] - t["begin"] != m["tensors"][i + 1]["end"] - t["end"] > 0)
            x, y = m["tensors"][i:i + 2]
            size = x["end"] - x["begin"]
            y["begin"], y["end"] = x["begin"], y["end"] - size
            x["begin"], x["end"] = y["end"], y["end"] + size
            if "stored_offset" in x:
                y["stored_offset"] = x["stored_offset"]
                x["stored_offset"] += y["stored_bytes"]
            m["tensors"][i:i + 2] = y, x

        yield swap_norms, "input_layernorm.weight' is"
        yield lambda: a.update(dtype="F16"), "is BF16 [96] from byte"
        yield lambda: a.update(shape=[48, 2]), "the manifest says BF16 [48, 2] from byte"
        yield lambda: a.update(name="x"), "not in the"
        yield lambda: a.update(name="zz" * 2000), "not in the"
        yield lose, "'model.layers.1.nothing' is in the header, but not in the manifest"
        yield gain, "'model.layers.1.added' is in the manifest, but not in the header"
        yield move, "the manifest says"

    def test_every_reader(self):
        for form in (["--to", "nf4"], ["--to", "int8", *PLAIN],
                     ["--to", "nf4", "--max-shard-size", "20KB"]):
            self.ok("-q", *form, "m", "o")
            path = self.path("o", "qconv.json")
            with open(path) as f:
                text = f.read()
            m = json.loads(text)
            write_sealed(path, m)
            self.ok("-q", "verify", "o")
            self.ok("-q", "inspect", "o")
            plain, indexed = PLAIN[0] in form, len(m["shards"]) > 1
            for i, (_, says) in enumerate(self.cases(m)):
                m = json.loads(text)
                list(self.cases(m))[i][0]()
                write_sealed(path, m)
                where = "header of model", ".safetensors: " if plain else ".safetensors.zst: "
                scan = [says, *where]
                if "nothing" in says or "added" in says:
                    scan = ["it lists"] if indexed else scan
                elif not plain and says == "the manifest says":
                    scan = ["its frames are not those the manifest lists"]
                for command in (["verify", "o"], ["verify", "o", "--against", "m"],
                                ["unpack", "o", "u"]):
                    self.fails(4, *command, "-q", has=scan)
                self.assert_nothing("u")
                for command in (["inspect", "o"], ["validate", "o", "--against", "m"],
                                ["plan", "o", "--vram", "1GB"], ["--to", "bf16", "o", "p"]):
                    self.fails(3, *command, "-q", has=[says, *where])
                self.assert_nothing("p")
            shutil.rmtree(self.path("o"))

    def test_another_spelling(self):
        """A header with other metadata, white space and order of members says the same."""
        self.ok("-q", "--to", "int8", *PLAIN, "m", "o")
        with open(self.path("o", "qconv.json")) as f:
            m = json.load(f)
        with open(self.path("o", "model.safetensors"), "rb") as f:
            data = f.read()
        said = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + said])
        rows = {n: dict(reversed(t.items())) for n, t in header.items() if n != "__metadata__"}
        text = json.dumps(dict(sorted(rows.items()), __metadata__={"by": "hand"})).encode()
        head = struct.pack("<Q", len(text)) + text
        with open(self.path("o", "model.safetensors"), "wb") as f:
            f.write(head + data[8 + said:])
        m["shards"][0].update(content_bytes=len(head) + len(data) - 8 - said,
                              header_bytes=len(head), header_xxh3_128=xxh3_128(head))
        write_sealed(self.path("o", "qconv.json"), m)
        self.ok("-q", "verify", "o")
        self.ok("-q", "verify", "o", "--against", "m")
        self.ok("-q", "unpack", "o", "u")
        self.ok("-q", "inspect", "o")


if __name__ == "__main__":
    unittest.main()
