"""For tests that look into qconv's outputs: whole folders, seek tables, frames."""
import ctypes
import hashlib
import json
import os
import shutil
import struct
import subprocess
import tempfile

from qconv_case import QCONV, QconvCase
import make_checkpoint as mk

ISAS = ["scalar", "avx2", "avx512"]
PLAIN = ["--compress", "none"]
# Names that qconv must never leave behind.
STAGING = ".qconv-partial"

# tests/tools/at_call.c as a library, where the build has it.
AT_CALL = os.environ.get("AT_CALL_LIB")


def at_call(call, path="", run=None, count=None):
    """Environment: before the N-th call of a kind ("read:3") on a file whose path holds `path` the
    command `run` is carried out; or the number of such calls is written to the file `count`."""
    env = {"LD_PRELOAD": AT_CALL, "AT_CALL": call}
    # A program built with AddressSanitizer wants its library first.
    env["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    for key, value in (("AT_PATH", path), ("AT_RUN", run), ("AT_COUNT", count)):
        if value:
            env[key] = value
    return env


def tree(path, of=bytes):
    """Relative path -> what `of` makes of the bytes (None for a folder) of everything below path."""
    found = {}
    for folder, dirs, names in os.walk(path):
        for name in dirs:
            found[os.path.relpath(os.path.join(folder, name), path)] = None
        for name in names:
            full = os.path.join(folder, name)
            with open(full, "rb") as f:
                found[os.path.relpath(full, path)] = of(f.read())
    return found


def tree_digest(path):
    """As tree(), a digest for the bytes: for outputs that are large."""
    return tree(path, lambda data: hashlib.blake2b(data).hexdigest())


def seek_table(path):
    """[(stored offset, stored bytes, content bytes)] of a zstd seekable file, and the table's size.

    As the specification of the format has it: a skippable frame at the end, a footer of 9 bytes."""
    with open(path, "rb") as f:
        data = f.read()
    count, descriptor, magic = struct.unpack("<IBI", data[-9:])
    assert magic == 0x8F92EAB1, hex(magic)
    entry = 12 if descriptor & 0x80 else 8
    table = 8 + count * entry + 9
    head, length = struct.unpack("<II", data[-table:len(data) - table + 8])
    assert head == 0x184D2A5E and length == table - 8, (hex(head), length, table)
    frames, at = [], 0
    for i in range(count):
        begin = len(data) - table + 8 + i * entry
        stored, content = struct.unpack("<II", data[begin:begin + 8])
        frames.append((at, stored, content))
        at += stored
    assert at + table == len(data), (at, table, len(data))
    return frames, table


class Xxh128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def xxh3_128(data):
    """Hex digits of the digest, by the library that qconv uses."""
    library = ctypes.CDLL("libxxhash.so.0")
    library.XXH3_128bits.restype = Xxh128
    library.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    h = library.XXH3_128bits(data, len(data))
    return "%016x%016x" % (h.high, h.low)


def write_sealed(path, manifest):
    """A manifest (as json.load has it) with the digest that fits what it says now."""
    manifest["manifest_xxh3_128"] = "0" * 32
    text = (json.dumps(manifest, indent=2) + "\n").encode()
    with open(path, "wb") as f:
        f.write(text[:-36] + xxh3_128(text[:-36]).encode() + text[-4:])


def isa_list():
    """What of ISAS this machine has."""
    have = []
    for isa in ISAS:
        with tempfile.TemporaryDirectory() as d:
            mk.write_checkpoint(d + "/m", {"a.weight": ("F32", [2, 2], bytes(16))})
            r = subprocess.run([QCONV, "-q", "--to", "bf16", d + "/m", d + "/o"],
                               env=dict(os.environ, QCONV_ISA=isa), stderr=subprocess.PIPE)
            if r.returncode == 0:
                have.append(isa)
            elif r.returncode != 5:
                raise AssertionError((isa, r.returncode, r.stderr))
    return have


class OutputCase(QconvCase):
    """Outputs are synced, so the folder lies in memory where there is such a place."""

    def setUp(self):
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.dir = tempfile.mkdtemp(prefix="qconv-cli-", dir=base)
        self.addCleanup(shutil.rmtree, self.dir)

    def model(self, tensors, config=None, name="m", **more):
        config = {"model_type": "llama"} if config is None else config
        mk.write_checkpoint(self.path(name), tensors, config=config, **more)
        return self.path(name)

    def convert(self, *args, **more):
        """qconv -q ARGS; returns the output, plain, as name -> (dtype, shape, bytes)."""
        self.ok("-q", *PLAIN, *args, **more)
        return mk.read_checkpoint(self.path(args[-1]))

    def assert_same(self, a, b, note=None):
        """Two folders hold the same files with the same bytes."""
        one, two = tree(self.path(a)), tree(self.path(b))
        self.assertEqual(sorted(one), sorted(two), note)
        for name in one:
            self.assertTrue(one[name] == two[name], (note, "differs", name))

    def assert_nothing(self, out):
        """A run that failed left nothing of an OUT that was not there before."""
        self.assertFalse(os.path.lexists(self.path(out)),
                         os.path.isdir(self.path(out)) and sorted(tree(self.path(out))))
