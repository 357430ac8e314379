"""qconv's files in other people's tools: zstd, safetensors, xxhash; and in no tool at all.

What docs/format.md says of digests, sizes, frames and the manifest is worked out here from the page
alone, with Python's json and struct and the packages xxhash and safetensors.
"""
import json
import struct
import subprocess
import unittest

import bitsandbytes
import interop_support as s
import numpy as np
import safetensors.torch
import xxhash

bitsandbytes.nn.modules.has_avx512bf16 = lambda: False  # see interop_support.quiet

MIB = 1 << 20
CASES = [("kjv-llama", "nf4-double", ()), ("kjv-llama", "int8", ()),
         ("kjv-llama", "nf4-double", ("--max-shard-size", "200KB")),
         ("tinystories", "nf4-double", ()), ("minilm", "nf4", ()),
         ("minilm", "int8", ("--max-shard-size", "9MB")), ("minilm", "int8", ())]


def digest(data):
    return xxhash.xxh3_128_hexdigest(data)


def root(data, piece_bytes):
    """Section 4 of docs/format.md."""
    pieces = [data[i : i + piece_bytes] for i in range(0, len(data), piece_bytes)]
    digests = [xxhash.xxh3_128_digest(p) for p in pieces]
    if len(digests) == 1:
        return digests[0].hex()
    return digest(b"".join(digests))


def header_piece(n):
    count = -(-n // (8 * MIB))
    return n if count <= 1 else (-(-n // count) + 7) // 8 * 8


def files_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes()
            for p in folder.rglob("*") if p.is_file()}


def seek_table(data):
    """[(offset, stored bytes, content bytes)] of the frames, and where the table begins."""
    count, descriptor, magic = struct.unpack("<IBI", data[-9:])
    assert magic == 0x8F92EAB1 and descriptor == 0, (hex(magic), descriptor)
    begin = len(data) - 9 - 8 * count - 8
    skippable, size = struct.unpack("<II", data[begin : begin + 8])
    assert skippable == 0x184D2A5E and size == 9 + 8 * count
    frames, offset = [], 0
    for stored, content in struct.iter_unpack("<II", data[begin + 8 : -9]):
        frames.append((offset, stored, content))
        offset += stored
    assert offset == begin
    return frames, begin


class Files(unittest.TestCase):
    def cases(self):
        for name, form, more in CASES:
            try:
                source = s.model_path(name)
            except unittest.SkipTest as reason:
                s.note(f"SKIPPED: {reason}")
                continue
            plain = s.converted(source, form, *more)
            packed = s.SCRATCH / "packed" / "-".join([name, form, *more])
            if not packed.exists():
                s.qconv(*s.FORMS[form], *more, "-q", source, packed)
            yield f"{name} {form} {' '.join(more)}".strip(), source, plain, packed

    def test_zstd_and_unpack(self):
        """zstd -d, qconv unpack and --compress none: the same files."""
        for label, _, plain, packed in self.cases():
            unpacked = s.SCRATCH / "unpacked" / packed.name
            s.qconv("unpack", "-q", packed, unpacked)
            want, got = files_of(plain), files_of(unpacked)
            self.assertEqual(sorted(want), sorted(got))
            for name in want:
                self.assertTrue(want[name] == got[name], f"{label}: {name}")
            shards = sorted(packed.glob("*.zst"))
            self.assertTrue(shards)
            for shard in shards:
                subprocess.run(["zstd", "-q", "-t", shard], check=True)
                content = subprocess.run(["zstd", "-q", "-d", "-c", shard], check=True,
                                         capture_output=True).stdout
                self.assertTrue(content == want[shard.stem], f"{label}: {shard.name}")
            s.qconv("verify", "-q", packed)
            s.qconv("verify", "-q", unpacked)
            ratio = sum(p.stat().st_size for p in shards) / sum(len(want[p.stem]) for p in shards)
            s.note(f"{label}: {len(shards)} shards, zstd -d equals unpack equals --compress none; "
                   f"compressed to {ratio:.3f}")

    def test_safetensors_writes_the_same(self):
        """Loading a shard and saving it with safetensors gives the same file."""
        for label, _, plain, _ in self.cases():
            for path in sorted(plain.glob("*.safetensors")):
                tensors = safetensors.torch.load_file(path)
                again = safetensors.torch.save(tensors, metadata={"format": "pt"})
                self.assertTrue(again == path.read_bytes(), f"{label}: {path.name}")
                with safetensors.safe_open(path, "pt") as file:
                    self.assertEqual(file.metadata(), {"format": "pt"})

    def test_index(self):
        for label, _, plain, packed in self.cases():
            shards = sorted(p.name for p in plain.glob("*.safetensors"))
            self.assertEqual((plain / "model.safetensors.index.json").exists(), len(shards) > 1)
            if len(shards) == 1:
                self.assertEqual(shards, ["model.safetensors"])
                continue
            index = json.loads((plain / "model.safetensors.index.json").read_text())
            other = (packed / "model.safetensors.index.json").read_text()
            self.assertEqual(index, json.loads(other))
            where = {n: p for p in shards for n in s.SafetensorsFile(plain / p).header}
            self.assertEqual(index["weight_map"], where)
            total = sum(len(s.SafetensorsFile(plain / p).data) for p in shards)
            self.assertEqual(index["metadata"]["total_size"], total)
            for name, shard in where.items():  # a weight and its state in one file
                if ".weight." in name:
                    self.assertEqual(where[name.split(".weight.")[0] + ".weight"], shard)

    def check_manifest(self, folder, source):
        raw = (folder / "qconv.json").read_bytes()
        manifest = json.loads(raw)
        self.assertEqual(raw[-4:], b'"\n}\n')
        self.assertEqual(manifest["manifest_xxh3_128"], digest(raw[:-36]))
        compressed = manifest["compression"] is not None
        count = 0
        for entry in manifest["files"]:
            data = (folder / entry["path"]).read_bytes()
            self.assertEqual((entry["bytes"], entry["xxh3_128"]), (len(data), digest(data)))
            count += 1
        sources = {}
        for entry in manifest["sources"]:
            file = s.SafetensorsFile(source / entry["name"])
            self.assertEqual(entry["bytes"], len(file.header_bytes) + len(file.data))
            self.assertEqual(entry["header_xxh3_128"], digest(file.header_bytes))
            sources |= {n: (e["dtype"], file.tensor_bytes(n)) for n, e in file.header.items()}
            count += 1
        for number, shard in enumerate(manifest["shards"]):
            data = (folder / (shard["name"] + (".zst" if compressed else ""))).read_bytes()
            tensors = [t for t in manifest["tensors"] if t["shard"] == number]
            if compressed:
                self.assertEqual(shard["file_bytes"], len(data))
                self.check_stored(shard, tensors, data)
                data = subprocess.run(["zstd", "-q", "-d", "-c"], input=data, check=True,
                                      capture_output=True).stdout
            self.assertEqual(shard["content_bytes"], len(data))
            header, body = data[: shard["header_bytes"]], data[shard["header_bytes"] :]
            self.assertEqual(shard["header_xxh3_128"], root(header, header_piece(len(header))))
            names = json.loads(header[8:])
            names.pop("__metadata__")
            self.assertEqual(list(names), [t["name"] for t in tensors])
            for t in tensors:
                entry = names[t["name"]]
                self.assertEqual([entry["dtype"], entry["shape"], entry["data_offsets"]],
                                 [t["dtype"], t["shape"], [t["begin"], t["end"]]])
                self.assertEqual(t["xxh3_128"], root(body[t["begin"] : t["end"]], t["piece_bytes"]))
                count += 1
                if t["scheme"] == "state":
                    continue
                origin = t["source"]
                dtype, original = sources[origin["name"]]
                self.assertEqual(dtype, origin["dtype"])
                self.assertEqual(origin["xxh3_128"], root(original, origin["piece_bytes"]))
                count += 1
        return count

    def check_stored(self, shard, tensors, data):
        frames, table = seek_table(data)
        self.assertEqual(shard["table_bytes"], len(data) - table)
        self.assertEqual(shard["table_xxh3_128"], digest(data[table:]))
        content, i = 0, 0
        while content < shard["header_bytes"]:
            content += frames[i][2]
            i += 1
        self.assertEqual(content, shard["header_bytes"])  # the header has frames of its own
        pieces = [data[o : o + n] for o, n, _ in frames[:i]]
        self.assertEqual(shard["header_stored_bytes"], sum(map(len, pieces)))
        self.assertEqual(shard["header_stored_xxh3_128"], self.root_of(pieces))
        for t in tensors:
            left, pieces, offset = t["end"] - t["begin"], [], frames[i][0] if i < len(frames) else 0
            while left > 0:
                o, n, size = frames[i]
                self.assertEqual(size, min(left, t["piece_bytes"]), t["name"])
                pieces.append(data[o : o + n])
                left -= size
                i += 1
            self.assertEqual(left, 0, t["name"])  # no frame of two tensors
            self.assertEqual(t["stored_bytes"], sum(map(len, pieces)))
            self.assertEqual(t["stored_xxh3_128"], self.root_of(pieces))
            if pieces:
                self.assertEqual(t["stored_offset"], offset)
        self.assertEqual(i, len(frames))

    def root_of(self, pieces):
        digests = [xxhash.xxh3_128_digest(p) for p in pieces]
        return digests[0].hex() if len(digests) == 1 else digest(b"".join(digests))

    def test_manifest(self):
        total = 0
        for label, source, plain, packed in self.cases():
            for folder in (plain, packed):
                total += self.check_manifest(folder, source)
        s.note(f"manifest: {total} digests of tensors, sources and files recomputed with xxhash")

    def test_stated_errors(self):
        """rel_mse and max_err of the manifest, against float64 arithmetic on the two files."""
        for label, source, plain, _ in self.cases():
            manifest = json.loads((plain / "qconv.json").read_text())
            tensors, original = s.read_folder(plain), s.read_folder(source)
            checked = 0
            for t in manifest["tensors"]:
                if t["scheme"] not in ("nf4", "int8"):
                    continue
                name = t["name"]
                x = s.as_float32(*original[t["source"]["name"]][::2]).astype(np.float64)
                restored = self.restore(tensors, name, t["scheme"], x.size).astype(np.float64)
                error = np.abs(x - restored)
                rel_mse = np.square(error).sum() / np.square(x).sum()
                self.assertAlmostEqual(t["rel_mse"] / rel_mse, 1, delta=1e-3, msg=name)
                self.assertAlmostEqual(t["max_err"] / error.max(), 1, delta=1e-6, msg=name)
                self.assertAlmostEqual(error[t["max_err_index"]] / error.max(), 1, delta=1e-6)
                checked += 1
            s.note(f"{label}: stated errors of {checked} weights confirmed in float64")

    def restore(self, tensors, name, scheme, count):
        if scheme == "int8":
            dtype, shape, data = tensors[name]
            scb = np.frombuffer(tensors[name.removesuffix("weight") + "SCB"][2], "<f4")
            codes = np.frombuffer(data, np.int8).reshape(shape).astype(np.float32)
            return (codes * scb[:, None] * np.float32(7.874015718698502e-3)).ravel()
        codes = s.unpack_nibbles(np.frombuffer(tensors[name][2], np.uint8), count)
        kind, _, raw = tensors[f"{name}.absmax"]
        absmax = np.frombuffer(raw, "<f4" if kind == "F32" else "u1")
        if kind == "U8":
            state = json.loads(tensors[f"{name}.quant_state.bitsandbytes__nf4"][2])
            absmax = s.restore_scales(
                absmax, np.frombuffer(tensors[f"{name}.nested_absmax"][2], "<f4"),
                np.frombuffer(tensors[f"{name}.nested_quant_map"][2], "<f4"),
                state["nested_offset"])
        code = np.frombuffer(tensors[f"{name}.quant_map"][2], "<f4")
        return code[codes] * np.repeat(absmax, 64)[:count]


if __name__ == "__main__":
    s.main()
