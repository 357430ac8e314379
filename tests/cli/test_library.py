"""libqconv and libqconv_cuda as another language calls them: by their symbols and the structs of the
headers, as the Python package has them. A weight is read from an output, dequantized, cut, and multiplied on
the CPU and, where $QCONV_CUDA_LIBRARY names a library whose kernels run on the CPU, there as well.

$QCONV_LIBRARY is libqconv.so. A library with sanitizers cannot be loaded, and everything is skipped."""
import array
import ctypes
import json
import math
import os
import re
import struct
import subprocess
import sys
import unittest
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p

from qconv_case import QCONV, ROOT, SANITIZED, QconvCase

sys.path.insert(0, os.path.join(ROOT, "python"))
from qconv import _cuda, _library  # noqa: E402

LIBRARY = os.environ.get("QCONV_LIBRARY", os.path.join(ROOT, "build", "libqconv.so"))
CUDA = os.environ.get("QCONV_CUDA_LIBRARY", "")
MODEL = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
OK, USAGE, INPUT, SHAPE, DEVICE = 0, 5, 6, 9, 13
NF4 = 0
AUTO, GEMV = 0, 1
NAME = "model.layers.0.self_attn.q_proj.weight"  # [hidden, hidden]
STRUCTS = _library._STRUCTS | _cuda._STRUCTS


class Cuts(Structure):
    _fields_ = [(n, c_uint64) for n in ("rows", "cols", "rows_in_place")]


def members_of(structs):
    """Of ctypes' structs what tests/golden/interface.txt says of those of the headers."""
    for name, s in structs.items():
        yield "struct %s %d" % (name, ctypes.sizeof(s))
        for member in (field[0] for field in s._fields_):
            at = getattr(s, member)
            yield "struct %s.%s %d %d" % (name, member, at.offset, at.size)


class Library:
    """Calls that return a status: one other than 0 is a Failed with the message."""

    class Failed(Exception):
        def __init__(self, status, message):
            super().__init__(message)
            self.status = status

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)

    def get(self, name, kind, *args):
        function = getattr(self.lib, name)
        function.restype = kind
        return function(*args)

    def call(self, name, *args):
        err = _library.Error()
        status = self.get(name, c_int, *args, byref(err))
        if status != OK:
            raise self.Failed(status, err.msg.decode())


def at(memory, offset=0):
    return ctypes.addressof(memory) + offset


class Case(QconvCase):
    @classmethod
    def setUpClass(cls):
        cls.qc = Library(LIBRARY)
        ops = cls.qc.get("qc_form_ops_of", c_void_p, NF4)
        cls.nf4 = c_void_p(ops)
        dtype = c_int()
        cls.dtypes = {}
        for name in (b"F32", b"F16", b"BF16"):
            cls.qc.get("qc_dtype_from_name", c_int, name, c_size_t(len(name)), byref(dtype))
            cls.dtypes[name.decode()] = dtype.value

    def read(self, shards, reader, name):
        """A tensor's content, its description."""
        index = c_size_t()
        t = self.qc.get("qc_reader_find_tensor", POINTER(_library.ReaderTensor), reader, name.encode(), None, byref(index))
        self.assertTrue(t, name)
        content = ctypes.create_string_buffer(int(t.contents.bytes) + 64)
        self.qc.call("qc_reader_read", shards, index, None, content)
        return content, t.contents

    def weight(self, out, name):
        """A weight of NF4 with double-quantized scales, and what holds its memory."""
        reader, shards = c_void_p(), c_void_p()
        self.qc.call("qc_reader_open", byref(reader), out.encode())
        self.addCleanup(self.qc.get, "qc_reader_close", None, reader)
        self.qc.call("qc_reader_shards_open", byref(shards), reader, c_size_t(0))
        self.addCleanup(self.qc.get, "qc_reader_shards_close", None, shards)
        parts = {s: self.read(shards, reader, name + s)[0] for s in
                 ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map",
                  ".quant_state.bitsandbytes__nf4")}
        state = json.loads(parts[".quant_state.bitsandbytes__nf4"].value)
        rows, cols = state["shape"]
        w = _library.Weights(rows=rows, codes=at(parts[""]), absmax_codes=at(parts[".absmax"]),
                    nested_absmax=at(parts[".nested_absmax"]), nested_map=at(parts[".nested_quant_map"]),
                    nested_block=state["nested_blocksize"])
        w.form = _library.Form(ops=self.nf4, block_elems=state["blocksize"], cols=cols, nested=1,
                      offset=state["nested_offset"], code_map=at(parts[".quant_map"]))
        blocks = -(-rows * cols // state["blocksize"])
        self.qc.call("qc_weights_check", byref(w), c_uint64(rows * cols // 2), c_uint64(blocks),
                     c_uint64(-(-blocks // state["nested_blocksize"])))
        return w, parts

    def values(self, w, dtype="F32", first=0, rows=None):
        rows = w.rows if rows is None else rows
        out = ctypes.create_string_buffer(int(rows * w.form.cols) * (4 if dtype == "F32" else 2))
        self.qc.call("qc_weights_dequantize", byref(w), c_uint64(first), c_uint64(rows), out,
                     self.dtypes[dtype], 2)
        return out.raw

    def cut(self, w, **part):
        """A slice and its memory, which begins at a multiple of 64."""
        part, size, out = _library.WeightsPart(**part), c_uint64(), _library.Weights()
        self.qc.call("qc_weights_slice_bytes", byref(w), byref(part), byref(size))
        memory = ctypes.create_string_buffer(size.value + 64)
        start = at(memory) + -at(memory) % 64
        self.qc.call("qc_weights_slice", byref(w), byref(part), c_void_p(start), byref(out))
        return out, memory

    def product(self, w, x, m):
        """x [m, cols] and y [m, rows] as arrays of floats."""
        handle = c_void_p()
        y = array.array("f", bytes(4 * m * w.rows))
        self.qc.call("qc_cpu_matmul_create", byref(handle), 2)
        self.addCleanup(self.qc.get, "qc_cpu_matmul_destroy", None, handle)
        io = _library.MatmulIo(x=x.buffer_info()[0], x_dtype=self.dtypes["F32"], m=m, ldx=w.form.cols,
                   y=y.buffer_info()[0], y_dtype=self.dtypes["F32"], ldy=w.rows)
        self.qc.call("qc_cpu_matmul_run", handle, byref(w), byref(io))
        return y

    def converted(self):
        out = self.path("out")
        self.ok("--to", "nf4", "--scale", "absmax", MODEL, out)
        return out


class TestStructs(unittest.TestCase):
    def test_members_are_those_of_the_headers(self):
        """All of them, and each at its place; a size alone does not tell a member that takes the place of
        padding."""
        with open(os.path.join(ROOT, "tests", "golden", "interface.txt")) as f:
            lines = [line.rstrip("\n") for line in f if line.startswith("struct ")]
        for of, structs in (("this file", {"qc_weights_cuts": Cuts}), ("_library.py", _library._STRUCTS),
                            ("_cuda.py", _cuda._STRUCTS)):
            wanted = [line for line in lines if re.split("[ .]", line)[1] in structs]
            self.assertEqual(sorted(members_of(structs)), sorted(wanted), of)


@unittest.skipIf(SANITIZED or not os.path.exists(LIBRARY), "there is no library that Python can load")
class TestLibrary(Case):
    def test_structs_and_version(self):
        for name, struct_ in STRUCTS.items():
            self.assertEqual(self.qc.get("qc_abi_size", c_size_t, name.encode()), ctypes.sizeof(struct_),
                             name)
        self.assertEqual(self.qc.get("qc_abi_size", c_size_t, b"qc_nothing"), 0)
        self.assertEqual(self.qc.get("qc_abi_size", c_size_t, None), 0)
        says = subprocess.run([QCONV, "--version"], stdout=subprocess.PIPE, check=True).stdout.decode()
        self.assertEqual("qconv " + self.qc.get("qc_version", c_char_p).decode(), says.splitlines()[0])

    def test_a_weight_from_its_file_to_a_product(self):
        out = self.converted()

        w, held = self.weight(out, NAME)
        rows, cols = int(w.rows), int(w.form.cols)
        values = self.values(w)
        self.assertEqual(self.values(w, first=3, rows=2), values[12 * cols:20 * cols])
        # Rounded once, to nearest even.
        half = struct.unpack("<%dH" % cols, self.values(w, "BF16", 0, 1))
        for bits, h in zip(struct.unpack("<%dI" % cols, values[:4 * cols]), half):
            self.assertEqual((bits + 0x7fff + (bits >> 16 & 1)) >> 16, h)
        # Rows of another file's half, and columns.
        cuts = Cuts()
        self.qc.call("qc_weights_cuts_of", byref(w), byref(cuts))
        self.assertEqual(cuts.rows, 1)
        for part in ({"row": 8, "rows": rows - 8, "cols": cols}, {"rows": rows, "cols": 64},
                     {"row": 1, "rows": 5, "col": 64, "cols": cols - 64}):
            s, memory = self.cut(w, **part)
            self.assertEqual(self.values(s), b"".join(
                values[4 * (r * cols + part.get("col", 0)):][:4 * part["cols"]]
                for r in range(part.get("row", 0), part.get("row", 0) + part["rows"])), part)
            del memory
        with self.assertRaisesRegex(Library.Failed, "can be cut at multiples of 32 columns"):
            self.cut(w, rows=rows, cols=33)
        # A product of two rows of x, within the 15 bits that they are rounded to.
        x = array.array("f", (math.sin(i) for i in range(2 * cols)))
        y, floats = self.product(w, x, 2), array.array("f", values)
        for m in range(2):
            for r in range(0, rows, 7):
                terms = [a * b for a, b in zip(x[m * cols:(m + 1) * cols], floats[r * cols:(r + 1) * cols])]
                self.assertAlmostEqual(y[m * rows + r], math.fsum(terms),
                                       delta=1e-4 * math.sqrt(math.fsum(t * t for t in terms)) * 8)
        del held

    @unittest.skipUnless(os.environ.get("LIBRARY_EXAMPLE"), "needs the program of the page")
    def test_the_program_of_the_page(self):
        out = self.path("int8")
        self.ok("--to", "int8", MODEL, out)
        says = subprocess.run([os.environ["LIBRARY_EXAMPLE"], out, NAME[:-len(".weight")]],
                              stdout=subprocess.PIPE, check=True).stdout.decode().split()
        reader, shards = c_void_p(), c_void_p()
        self.qc.call("qc_reader_open", byref(reader), out.encode())
        self.qc.call("qc_reader_shards_open", byref(shards), reader, c_size_t(0))
        codes, t = self.read(shards, reader, NAME)
        scales, _ = self.read(shards, reader, NAME.replace("weight", "SCB"))
        rows, cols = t.dims[0], t.dims[1]
        self.assertEqual(len(says), rows)
        for r, word in enumerate(says):
            total = sum(struct.unpack("<%db" % cols, codes.raw[r * cols:(r + 1) * cols]))
            scale = struct.unpack_from("<f", scales.raw, 4 * r)[0]
            self.assertAlmostEqual(float(word), total * scale / 127, delta=1e-4 * scale * cols)
        self.qc.get("qc_reader_shards_close", None, shards)
        self.qc.get("qc_reader_close", None, reader)
        wrong = subprocess.run([os.environ["LIBRARY_EXAMPLE"], out, "none"], stderr=subprocess.PIPE)
        self.assertEqual((wrong.returncode, wrong.stderr), (3, b"there is no none.weight\n"))

    def test_a_slice_of_a_file_is_a_slice_of_the_tensor(self):
        out = self.converted()
        w, held = self.weight(out, NAME)
        reader, shards, index = c_void_p(), c_void_p(), c_size_t()
        self.qc.call("qc_reader_open", byref(reader), out.encode())
        self.qc.call("qc_reader_shards_open", byref(shards), reader, c_size_t(0))
        self.assertTrue(self.qc.get("qc_reader_find_tensor", c_void_p, reader,
                                    NAME.encode(), None, byref(index)))
        self.qc.get("qc_reader_close", None, reader)  # its shards keep what they need
        row = int(w.form.cols) // 2
        got = ctypes.create_string_buffer(2 * row)
        self.qc.call("qc_reader_read", shards, index,
                     byref(_library.ReaderSlice(row_bytes=row, first_row=3, rows=2, bytes=row)), got)
        self.assertEqual(got.raw, held[""].raw[3 * row:5 * row])
        self.qc.get("qc_reader_shards_close", None, shards)

    def test_wrong_calls_are_answered(self):
        w = _library.Weights(rows=4)
        w.form = _library.Form(ops=self.nf4, block_elems=64, cols=64)
        nothing, size, handle = c_void_p(), c_uint64(), c_void_p()
        for status, name, args in (
                (USAGE, "qc_reader_open", (None, b"x")),
                (USAGE, "qc_reader_open", (byref(nothing), None)),
                (INPUT, "qc_reader_open", (byref(nothing), self.dir.encode())),
                (USAGE, "qc_reader_load", (None, c_size_t(0), None)),
                (USAGE, "qc_reader_shards_open", (byref(nothing), None, c_size_t(0))),
                (USAGE, "qc_reader_read", (None, c_size_t(0), None, None)),
                (USAGE, "qc_weights_check", (None, c_uint64(), c_uint64(), c_uint64())),
                (SHAPE, "qc_weights_check", (byref(w), c_uint64(), c_uint64(), c_uint64())),
                (USAGE, "qc_weights_dequantize", (None, c_uint64(), c_uint64(1), None, 0, 1)),
                (USAGE, "qc_weights_slice_bytes", (byref(w), None, byref(size))),
                (USAGE, "qc_cpu_matmul_create", (None, 1)),
                (USAGE, "qc_cpu_matmul_create", (byref(handle), c_uint32(0xffffffff))),
                (USAGE, "qc_cpu_matmul_run", (None, byref(w), None))):
            with self.assertRaises(Library.Failed) as e:
                self.qc.call(name, *args)
            self.assertEqual(e.exception.status, status, (name, str(e.exception)))
            self.assertTrue(str(e.exception), name)
        self.assertFalse(nothing.value or handle.value)


@unittest.skipUnless(CUDA and os.path.exists(CUDA) and not SANITIZED, "no library of kernels on the CPU")
class TestKernels(Case):
    """Products on the shim. QC_SHIM_DEVICES is read when the library is first used."""

    def cuda(self):
        return Library(CUDA)

    def says(self, devices):
        code = "import ctypes, sys\nsys.path.insert(0, %r)\nfrom test_library import *\ntry:\n" \
               "    Library(%r).call('qc_cuda_usable')\n    print('usable')\nexcept Library.Failed as e:\n" \
               "    print(e.status, e)" % (os.path.dirname(os.path.abspath(__file__)), CUDA)
        return subprocess.run([sys.executable, "-B", "-c", code], stdout=subprocess.PIPE, check=True,
                              env=dict(os.environ, QC_SHIM_DEVICES=devices)).stdout.decode().strip()

    def test_what_is_missing_is_said(self):
        self.assertEqual(self.says("sm_80:4:1GiB"), "usable")
        self.assertEqual(self.says("nodriver"), "%d GPUs cannot be used: the NVIDIA driver was not found" % DEVICE)
        self.assertEqual(self.says("none"), "%d GPUs cannot be used: the NVIDIA driver shows no GPU" % DEVICE)
        self.assertEqual(self.says("olddriver"), "%d GPUs cannot be used: the NVIDIA driver is too old: it "
                         "has CUDA 10.2, but this build needs 13.0; install a newer driver" % DEVICE)

    def on_gpu(self, cu, content, stream):
        p = c_void_p()
        cu.call("qc_cuda_malloc", byref(p), c_size_t(len(content)))
        self.addCleanup(cu.get, "qc_cuda_free", None, p)
        cu.call("qc_cuda_to_device", p, content, c_size_t(len(content)), stream)
        cu.call("qc_cuda_stream_synchronize", stream)
        return p

    def planned_product(self, cu, handle, ready, io, path, stream):
        """The name of the path that a plan took."""
        planned = ctypes.create_string_buffer(self.qc.get("qc_abi_size", c_size_t, b"qc_matmul_planned"))
        self.assertGreater(len(planned), 1000)
        pointers = (POINTER(_cuda.MatmulWeights) * 1)(ctypes.pointer(ready))
        cu.call("qc_matmul_plan_product", handle, pointers, byref(io), 1, path, c_uint64(0), planned)
        size = cu.get("qc_matmul_planned_workspace", c_uint64, planned)
        workspace = self.on_gpu(cu, bytes(size), stream) if size else None
        cu.call("qc_matmul_run_planned", handle, planned, pointers, byref(io), workspace, c_uint64(size),
                stream)
        return cu.get("qc_matmul_path_name", c_char_p, cu.get("qc_matmul_planned_path", c_int, planned, 0))

    def test_a_product_is_that_of_the_cpu(self):
        cu, handle, stream = self.cuda(), c_void_p(), c_void_p()
        w, held = self.weight(self.converted(), NAME)
        rows, cols, m = int(w.rows), int(w.form.cols), 2
        cu.call("qc_matmul_create", byref(handle), 0)
        self.addCleanup(cu.get, "qc_matmul_destroy", None, handle)
        cu.call("qc_cuda_use", c_void_p(cu.get("qc_matmul_device", c_void_p, handle)))
        cu.call("qc_cuda_stream_create", byref(stream))
        self.addCleanup(cu.get, "qc_cuda_stream_destroy", None, stream)
        gpu = _library.Weights.from_buffer_copy(w)
        names = {"codes": "", "absmax_codes": ".absmax", "nested_absmax": ".nested_absmax",
                 "nested_map": ".nested_quant_map"}
        for member, name in names.items():
            setattr(gpu, member, self.on_gpu(cu, held[name].raw, stream))
        gpu.form.code_map = self.on_gpu(cu, held[".quant_map"].raw, stream).value
        # Values.
        out = self.on_gpu(cu, bytes(4 * rows * cols), stream)
        back = ctypes.create_string_buffer(4 * rows * cols)
        cu.call("qc_cuda_dequantize", byref(gpu), c_uint64(0), c_uint64(rows), out, self.dtypes["F32"],
                c_uint64(cols), None, None, stream)
        cu.call("qc_cuda_to_host", back, out, c_size_t(len(back)), stream)
        cu.call("qc_cuda_stream_synchronize", stream)
        self.assertEqual(back.raw, self.values(w))
        # A product, planned and run.
        ready = _cuda.MatmulWeights()
        prepared = self.on_gpu(cu, bytes(cu.get("qc_matmul_prepared_bytes", c_uint64, byref(gpu))), stream)
        cu.call("qc_matmul_prepare", handle, byref(gpu), prepared, byref(ready), stream)
        x = [math.floor(math.sin(i) * 64) / 64 for i in range(m * cols)]
        io = _cuda.MatmulIo(m=m, x=self.on_gpu(cu, struct.pack("<%de" % len(x), *x), stream), y=self.on_gpu(
            cu, bytes(2 * m * rows), stream), x_dtype=self.dtypes["F16"], y_dtype=self.dtypes["F16"])
        for path, names in ((AUTO, (b"gemv", b"mma-16816")), (GEMV, (b"gemv",))):
            self.assertIn(self.planned_product(cu, handle, ready, io, path, stream), names)
            y = ctypes.create_string_buffer(2 * m * rows)
            cu.call("qc_cuda_to_host", y, c_void_p(io.y), c_size_t(len(y)), stream)
            cu.call("qc_cuda_stream_synchronize", stream)
            cu.call("qc_matmul_check", handle)
            cpu = self.product(w, array.array("f", x), m)
            for a, b in zip(struct.unpack("<%de" % (m * rows), y.raw), cpu):
                self.assertAlmostEqual(a, b, delta=2e-3 * max(1.0, abs(b)))
        with self.assertRaisesRegex(Library.Failed, "the matmul's handle is NULL"):
            cu.call("qc_matmul_run", None, byref(ready), byref(io), 0, None, c_uint64(0), stream)


if __name__ == "__main__":
    unittest.main()
