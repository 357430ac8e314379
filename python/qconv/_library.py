"""libqconv.so through ctypes: what the package needs of its C interface, with exceptions.

The functions are those of <qconv/device_reader.h> and <qconv/qconv.h>, which say what each one checks and promises. Pointers are integers here (data_ptr() of a tensor); whoever passes one keeps
the memory alive.
"""
import ctypes as c
import functools
import os
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional

from . import errors

# base/dtype.h, in its order.
DTYPES = ("BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 U32 "
          "F32 C64 F64 I64 U64").split()
# quant/quant_weights.h, in its order.
FORMS = ("nf4", "int8", "int8-block", "w4a16", "w8a16", "w8a8", "w2a16", "w3a16", "w5a16", "w6a16", "w7a16")
MAX_DIMS = 8
USAGE = 5  # the status that a callback returns for an exception of its own


class Error(c.Structure):
    _fields_ = [("code", c.c_int), ("msg", c.c_char * 512), ("file", c.c_char_p), ("line", c.c_int)]


class ReaderTensor(c.Structure):
    _fields_ = [("name", c.c_char_p), ("scheme", c.c_char_p), ("dtype", c.c_int), ("ndim", c.c_uint),
                ("dims", c.c_uint64 * MAX_DIMS), ("bytes", c.c_uint64), ("shard", c.c_char_p), ("index", c.c_size_t)]


class ReaderDevice(c.Structure):
    _fields_ = [("name", c.c_char_p), ("tensors", c.POINTER(ReaderTensor)), ("tensor_count", c.c_size_t),
                ("tensor_bytes", c.c_uint64), ("stored_bytes", c.c_uint64), ("shard_count", c.c_size_t),
                ("max_piece_bytes", c.c_size_t)]


PLACE = c.CFUNCTYPE(c.c_void_p, c.c_void_p, c.POINTER(ReaderTensor))
DONE = c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(ReaderTensor), c.c_void_p, c.POINTER(Error))
STOPPED = c.CFUNCTYPE(None, c.c_void_p)


class ReaderOptions(c.Structure):
    _fields_ = [("threads", c.c_uint), ("skip_digests", c.c_int), ("place", PLACE), ("pieces", c.c_void_p),
                ("done", DONE), ("stopped", STOPPED), ("ctx", c.c_void_p)]


class ReaderSlice(c.Structure):
    _fields_ = [(name, c.c_uint64) for name in ("row_bytes", "first_row", "rows", "first_byte", "bytes")]


class Form(c.Structure):
    _fields_ = [("ops", c.c_void_p), ("block_elems", c.c_uint32), ("cols", c.c_uint64), ("nested", c.c_int32),
                ("offset", c.c_float), ("code_map", c.c_void_p), ("scale_dtype", c.c_int)]


class Weights(c.Structure):
    _fields_ = [("form", Form), ("rows", c.c_uint64), ("codes", c.c_void_p), ("absmax", c.c_void_p),
                ("absmax_codes", c.c_void_p), ("nested_absmax", c.c_void_p), ("nested_map", c.c_void_p),
                ("nested_block", c.c_uint32)]


class WeightsPart(c.Structure):
    _fields_ = [(name, c.c_uint64) for name in ("row", "rows", "col", "cols")]


class WeightsRead(c.Structure):
    _fields_ = [("read", WeightsPart), ("skip", c.c_uint64), ("block_elems", c.c_uint32), ("nested_block", c.c_uint32),
                *[(name, c.c_uint64) for name in ("code_bytes", "scales", "nested_scales")]]


class MatmulIo(c.Structure):
    _fields_ = [("x", c.c_void_p), ("x_dtype", c.c_int), ("m", c.c_uint64), ("ldx", c.c_uint64), ("y", c.c_void_p),
                ("y_dtype", c.c_int), ("ldy", c.c_uint64), ("bias", c.c_void_p)]


class ValuesOptions(c.Structure):
    _fields_ = [("experts", c.c_int), ("adapter_count", c.c_uint32), ("adapters", c.POINTER(c.c_char_p)),
                ("adapter_scales", c.POINTER(c.c_double))]


class ValuesTensor(c.Structure):
    _fields_ = [("name", c.c_char_p), ("stored_as", c.c_char_p), ("dtype", c.c_int), ("ndim", c.c_uint),
                ("dims", c.c_uint64 * MAX_DIMS)]


_ERROR = c.POINTER(Error)
_FUNCTIONS = {
    "qc_version": (c.c_char_p, []),
    "qc_abi_size": (c.c_size_t, [c.c_char_p]),
    "qc_status_exit_code": (c.c_int, [c.c_int]),
    "qc_reader_open": (c.c_int, [c.POINTER(c.c_void_p), c.c_char_p, _ERROR]),
    "qc_reader_close": (None, [c.c_void_p]),
    "qc_reader_device_count": (c.c_size_t, [c.c_void_p]),
    "qc_reader_device_at": (c.POINTER(ReaderDevice), [c.c_void_p, c.c_size_t]),
    "qc_reader_load": (c.c_int, [c.c_void_p, c.c_size_t, c.POINTER(ReaderOptions), _ERROR]),
    "qc_reader_check_file": (c.c_int, [c.c_void_p, c.c_char_p, c.c_char_p, c.c_size_t, _ERROR]),
    "qc_reader_shards_open": (c.c_int, [c.POINTER(c.c_void_p), c.c_void_p, c.c_size_t, _ERROR]),
    "qc_reader_shards_close": (None, [c.c_void_p]),
    "qc_reader_read": (c.c_int, [c.c_void_p, c.c_size_t, c.POINTER(ReaderSlice), c.c_void_p, _ERROR]),
    "qc_values_open": (c.c_int, [c.POINTER(c.c_void_p), c.c_char_p, c.POINTER(ValuesOptions), _ERROR]),
    "qc_values_close": (None, [c.c_void_p]),
    "qc_values_count": (c.c_size_t, [c.c_void_p]),
    "qc_values_at": (c.POINTER(ValuesTensor), [c.c_void_p, c.c_size_t]),
    "qc_values_read": (c.c_int, [c.c_void_p, c.c_size_t, c.c_uint64, c.c_uint64, c.c_void_p, c.c_int, _ERROR]),
    "qc_form_ops_of": (c.c_void_p, [c.c_int]),
    "qc_weights_check": (c.c_int, [c.POINTER(Weights), c.c_uint64, c.c_uint64, c.c_uint64, _ERROR]),
    "qc_weights_dequantize": (c.c_int, [c.POINTER(Weights), c.c_uint64, c.c_uint64, c.c_void_p, c.c_int, c.c_uint,
                                        _ERROR]),
    "qc_weights_read_of": (c.c_int, [c.POINTER(Weights), c.POINTER(WeightsPart), c.POINTER(WeightsRead), _ERROR]),
    "qc_cpu_matmul_create": (c.c_int, [c.POINTER(c.c_void_p), c.c_uint, _ERROR]),
    "qc_cpu_matmul_destroy": (None, [c.c_void_p]),
    "qc_cpu_matmul_run": (c.c_int, [c.c_void_p, c.POINTER(Weights), c.POINTER(MatmulIo), _ERROR]),
}


INTERFACE = "0.5"  # major and minor of the version whose structs stand above
_STRUCTS = {"qc_error": Error, "qc_form": Form, "qc_matmul_cpu_io": MatmulIo, "qc_reader_device": ReaderDevice,
            "qc_reader_options": ReaderOptions, "qc_reader_slice": ReaderSlice, "qc_reader_tensor": ReaderTensor,
            "qc_values_options": ValuesOptions, "qc_values_tensor": ValuesTensor, "qc_weights": Weights,
            "qc_weights_part": WeightsPart, "qc_weights_read": WeightsRead}


def find_library(name: str = "libqconv.so", variable: str = "QCONV_LIBRARY") -> Path:
    """The package's own library, else the file that the variable names, else that of a build tree."""
    here = Path(__file__).resolve().parent
    asked = os.environ.get(variable)
    places = [*sorted((here / "lib").glob(f"{name}*")), *([Path(asked)] if asked else []),
              here.parents[1] / "build" / name]
    for place in places:
        if place.is_file():
            return place
    tried = ", ".join(map(str, [here / "lib", *places]))
    raise errors.ProgramError(f"{name} is in none of these places: {tried}; install the package anew, or set "
                              f"{variable} to the file")


def opened(path: Path, functions: dict) -> c.CDLL:
    try:
        found = c.CDLL(str(path))
        for name, (result, arguments) in functions.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as e:
        raise errors.ProgramError(f"{path} cannot be used: {e}") from None
    return found


def compared(of: c.CDLL, path: Path, structs: dict) -> None:
    """Raises where `path` is of another version than the structs that are written down here."""
    version = of.qc_version().decode()
    other = [name for name, struct in structs.items() if of.qc_abi_size(name.encode()) != c.sizeof(struct)]
    if other or not version.startswith(INTERFACE + "."):
        raise errors.ProgramError(f"{path} is of version {version}, and this package is for {INTERFACE}: install both "
                                  "from one version" + (f" ({other[0]} differs)" if other else ""))


@functools.lru_cache(maxsize=None)
def library() -> c.CDLL:
    """The library, opened once and compared with what is written down here."""
    path = find_library()
    found = opened(path, _FUNCTIONS)
    compared(found, path, _STRUCTS)
    return found


def check(status: int, error: Error) -> None:
    """Raises what a status other than OK means, with the library's sentence."""
    if status:
        kind = {**errors.BY_EXIT_CODE, 130: KeyboardInterrupt}.get(library().qc_status_exit_code(status), errors.Error)
        raise kind(error.msg.decode("utf-8", "replace"))


def call(name: str, *arguments) -> None:
    """Calls a function that returns a status and has a qc_error as its last parameter."""
    error = Error()
    check(getattr(library(), name)(*arguments, c.byref(error)), error)


# ---- outputs ------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A tensor of an output. dtype as safetensors spells it; bytes may be 0."""
    name: str
    scheme: str
    dtype: str
    shape: tuple
    bytes: int
    shard: str
    index: int


class Device(NamedTuple):
    """A device of an output ("all" without a placement) and what lies on it."""
    name: str
    tensors: List[Tensor]
    tensor_bytes: int


class _Handle:
    """What the library opened with the function `opens`; close(), or the end of a with block, closes it."""
    closes = ""

    def __init__(self, opens: str, *arguments):
        self._handle = c.c_void_p()
        call(opens, c.byref(self._handle), *arguments)

    def close(self) -> None:
        if self._handle:
            getattr(library(), self.closes)(self._handle)
            self._handle = c.c_void_p()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Reader(_Handle):
    """An output of qconv, compressed or plain. InputError where it is none, CheckError where it is damaged."""
    closes = "qc_reader_close"

    def __init__(self, folder):
        super().__init__("qc_reader_open", os.fsencode(folder))
        self.folder = Path(folder)
        count = library().qc_reader_device_count(self._handle)
        found = [library().qc_reader_device_at(self._handle, i).contents for i in range(count)]
        self.devices = [Device(d.name.decode(), [
            Tensor(t.name.decode(), t.scheme.decode(), DTYPES[t.dtype], tuple(t.dims[:t.ndim]), t.bytes, t.shard.decode(), t.index)
            for t in (d.tensors[i] for i in range(d.tensor_count))], d.tensor_bytes) for d in found]

    def load(self, device: int, place: Callable[[int], int], done: Optional[Callable[[int], None]] = None,
             threads: int = 0, skip_digests: bool = False) -> None:
        """Reads all tensors of a device; that with index i goes to the address place(i). done(i) is called from any
        thread when tensor i is there and its digest is right."""
        raised = []

        def placed(_, tensor):
            try:
                return place(tensor.contents.index)
            except BaseException as e:
                raised.append(e)
                return None

        def finished(_, tensor, __, ___):
            try:
                done(tensor.contents.index)
                return 0
            except BaseException as e:
                raised.append(e)
                return USAGE

        options = ReaderOptions(threads=threads, skip_digests=skip_digests,
                                place=PLACE(placed), done=DONE(finished) if done else DONE())
        try:
            call("qc_reader_load", self._handle, device, c.byref(options))
        except errors.Error:
            if raised:
                raise raised[0] from None
            raise

    def file(self, path: str, skip_digests: bool = False) -> Optional[bytes]:
        """A side file such as config.json, None where there is none. CheckError where its bytes are not those that were
        written, or the manifest does not list it."""
        try:
            content = (self.folder / path).read_bytes()
        except FileNotFoundError:
            return None
        if not skip_digests:
            call("qc_reader_check_file", self._handle, os.fsencode(path), content, len(content))
        return content

    @staticmethod
    def check_beside(path) -> None:
        """Raises CheckError where a file of an output does not have the bytes that were written."""
        folder, name = os.path.split(path)
        if os.path.isfile(os.path.join(folder, "qconv.json")):
            with Reader(folder) as reader:
                try:
                    reader.file(name)
                except errors.CheckError as e:
                    raise errors.CheckError(f"{e}; copy or convert {folder} again") from None

    def shards(self, device: int) -> "Shards":
        return Shards(self, device)


class Shards(_Handle):
    """The open shards of one device, of which single tensors or parts of them are read."""
    closes = "qc_reader_shards_close"

    def __init__(self, reader: Reader, device: int):
        self._reader = reader  # it lives as long as this
        super().__init__("qc_reader_shards_open", reader._handle, device)

    def read(self, index: int, address: int, part: Optional[ReaderSlice] = None) -> None:
        """Reads tensor `index` of the device, or a part of it, to an address."""
        call("qc_reader_read", self._handle, index, c.byref(part) if part else None, address)


# ---- quantized weights --------------------------------------------------------------------------


def is_packed(form: str) -> bool:
    """Whether codes are packed from the least significant bit on, and their numbers are not signed."""
    return form.endswith("a16")


def code_bits(form: str) -> int:
    return int(form[1]) if is_packed(form) else 4 if form == "nf4" else 8


def row_bytes(form: str, cols: int) -> int:
    """From the codes of a row to those of the next, where a row begins with a byte, as it does in packed forms: those of
    2, 3, 5, 6 and 7 bits begin with a word of 32 bits."""
    bits = code_bits(form)
    return -(-cols * bits // 32) * 4 if is_packed(form) and bits % 4 else cols * bits // 8


def weight(form: str, rows: int, cols: int, block: int, nested_block: int, nested: bool, offset: float = 0.0) -> Weights:
    """A weight [rows, cols] without arrays. block 0: one scale a row. UsageError or InputError where a number is none of
    libqconv's, which would take its lower bits."""
    if form not in FORMS:
        raise errors.UsageError(f"form is {form!r}; expected one of {', '.join(FORMS)}")
    for what, number, bits in ("rows", rows, 64), ("columns", cols, 64), ("block", block, 32), ("nested_block", nested_block, 32):
        if not 0 <= number < 1 << bits:
            raise errors.InputError(f"{what} is {number}; expected a number below 2^{bits}")
    return Weights(rows=rows, nested_block=nested_block,
                   form=Form(ops=library().qc_form_ops_of(FORMS.index(form)), block_elems=block, cols=cols,
                             nested=nested, offset=offset, scale_dtype=DTYPES.index("F32")))


def weights(form: str, rows: int, cols: int, block: int, codes: int, code_bytes: int, scales: int, scale_count: int,
            code_map: int = 0, nested_absmax: int = 0, nested_count: int = 0, nested_map: int = 0,
            nested_block: int = 0, offset: float = 0.0) -> Weights:
    """A checked description of a weight [rows, cols]. codes to nested_map are addresses; scales is that of floats,
    or of codes of 8 bits where there is a nested_absmax. InputError says what does not fit together."""
    w = weight(form, rows, cols, block, nested_block, bool(nested_absmax), offset)
    w.codes, w.form.code_map = codes, code_map or None
    if nested_absmax:
        w.absmax_codes, w.nested_absmax, w.nested_map = scales, nested_absmax, nested_map
    else:
        w.absmax = scales
    call("qc_weights_check", c.byref(w), code_bytes, scale_count, nested_count)
    return w


def dequantize(w: Weights, first: int, rows: int, out: int, dtype: str, threads: int = 0) -> None:
    """Writes rows [first, first + rows) of a weight to the address out, in F32, F16 or BF16."""
    call("qc_weights_dequantize", c.byref(w), first, rows, out, DTYPES.index(dtype), threads)


class Matmul:
    """Threads that multiply: y = x W^T + bias. One product at a time; others wait for it. threads: 0 for one per
    processor."""

    def __init__(self, threads: int = 0):
        self._handle, self._destroy = c.c_void_p(), None
        call("qc_cpu_matmul_create", c.byref(self._handle), threads)
        self._destroy, self._run = library().qc_cpu_matmul_destroy, library().qc_cpu_matmul_run

    def __del__(self):
        if self._destroy:
            self._destroy(self._handle)

    def run(self, w: Weights, io: MatmulIo) -> None:
        error = Error()
        check(self._run(self._handle, c.byref(w), c.byref(io), c.byref(error)), error)
