"""libqconv_cuda.so through ctypes: the kernels for GPUs, where the package was built with them (docs/library.md).

The functions are those of <qconv/qconv_cuda.h>. Nothing here takes torch; _gpu.py multiplies tensors with it.
"""
import ctypes as c
import functools
from typing import NamedTuple, Optional

from . import _library, errors

COMPLETE = 1  # QC_MATMUL_WEIGHTS_COMPLETE


class MatmulWeights(c.Structure):
    _fields_ = [("w", _library.Weights), ("exponent", c.c_void_p), ("row_bytes", c.c_uint64),
                ("part", _library.WeightsPart), ("complete", c.c_int)]


class MatmulIo(c.Structure):
    _fields_ = [("m", c.c_uint64), ("x", c.c_void_p), ("x_dtype", c.c_int), ("ldx", c.c_uint64), ("y", c.c_void_p),
                ("y_dtype", c.c_int), ("ldy", c.c_uint64), ("bias", c.c_void_p), ("act", c.c_int), ("gate", c.c_void_p),
                ("ldg", c.c_uint64), ("residual", c.c_void_p), ("ldr", c.c_uint64)]


class MatmulExperts(c.Structure):
    _fields_ = [("table", c.c_void_p), ("form", _library.Form), ("rows", c.c_uint64), ("count", c.c_uint32),
                ("repacked", c.c_int)]


class MatmulExpertsIo(c.Structure):
    _fields_ = [("max_rows", c.c_uint64), ("offsets", c.c_void_p), ("x_rows", c.c_void_p), ("row_weights", c.c_void_p),
                ("x_count", c.c_uint64), ("x", c.c_void_p), ("x_dtype", c.c_int), ("ldx", c.c_uint64),
                ("y", c.c_void_p), ("y_dtype", c.c_int), ("ldy", c.c_uint64), ("bias", c.c_void_p)]


_AT, _SIZE = c.c_void_p, c.c_uint64  # pointers are integers here
_FUNCTIONS = {
    "qc_cuda_build": (c.c_char_p, []),
    "qc_cuda_usable": (c.c_int, [_AT]),
    "qc_cuda_use": (c.c_int, [_AT, _AT]),
    "qc_cuda_malloc": (c.c_int, [_AT, c.c_size_t, _AT]),
    "qc_cuda_free": (None, [_AT]),
    "qc_cuda_stream_synchronize": (c.c_int, [_AT, _AT]),
    "qc_cuda_capture_of": (c.c_int, [_AT, _AT, _AT]),
    "qc_cuda_dequantize": (c.c_int, [_AT, _SIZE, _SIZE, _AT, c.c_int, _SIZE, _AT, _AT, _AT, _AT]),
    "qc_matmul_create": (c.c_int, [_AT, c.c_int, _AT]),
    "qc_matmul_device": (_AT, [_AT]),
    "qc_matmul_no_gemm": (c.c_char_p, [_AT]),
    "qc_matmul_check": (c.c_int, [_AT, _AT]),
    "qc_matmul_prepared_bytes": (_SIZE, [_AT]),
    "qc_matmul_prepare": (c.c_int, [_AT, _AT, _AT, _AT, _AT, _AT]),
    "qc_matmul_plan_product": (c.c_int, [_AT, _AT, _AT, c.c_uint, c.c_int, _SIZE, _AT, _AT]),
    "qc_matmul_planned_path": (c.c_int, [_AT, c.c_uint]),
    "qc_matmul_planned_workspace": (_SIZE, [_AT]),
    "qc_matmul_path_name": (c.c_char_p, [c.c_int]),
    "qc_matmul_experts_bytes": (_SIZE, [_AT, c.c_uint]),
    "qc_matmul_experts_prepare": (c.c_int, [_AT, _AT, c.c_uint, _AT, _AT, _AT, _AT]),
    "qc_matmul_experts_workspace": (_SIZE, [_AT, _SIZE]),
    "qc_matmul_run_experts": (c.c_int, [_AT, _AT, _AT, c.c_int, _AT, _SIZE, _AT, _AT]),
    "qc_matmul_run_planned": (c.c_int, [_AT, _AT, _AT, _AT, _AT, _SIZE, _AT, _AT]),
}
_STRUCTS = {"qc_matmul_weights": MatmulWeights, "qc_matmul_io": MatmulIo, "qc_matmul_experts": MatmulExperts,
            "qc_matmul_experts_io": MatmulExpertsIo}


class CudaLibrary(NamedTuple):
    """qconv's kernels for GPUs. path: of libqconv_cuda.so, "" where there is none. build: what it was built with and
    for, like "CUDA 13.0: sm_80 sm_90". problem: why it is not used, in a sentence; None where it is."""
    path: str
    build: str
    problem: Optional[str]


@functools.lru_cache(maxsize=None)
def library() -> c.CDLL:
    """The library, opened once. ProgramError says why there is none that fits."""
    path = _library.find_library("libqconv_cuda.so", "QCONV_CUDA_LIBRARY")
    base = _library.library()  # libqconv_cuda.so is linked with it
    found = _library.opened(path, _FUNCTIONS)
    _library.compared(base, path, _STRUCTS)
    versioned = getattr(c.CDLL(None), "dlvsym", None)
    if versioned:
        versioned.restype, versioned.argtypes = _AT, [_AT, c.c_char_p, c.c_char_p]
        if not versioned(found._handle, b"qc_matmul_run_planned", f"QCONV_{_library.INTERFACE}".encode()):
            raise errors.ProgramError(f"{path} is not of version {_library.INTERFACE}, which this package is for: "
                                      "install both from one version")
    return found


@functools.lru_cache(maxsize=None)
def cuda_library() -> CudaLibrary:
    """Says whether products on GPUs take qconv's own kernels, and if not, why. It asks the NVIDIA driver, once."""
    path = build = ""
    try:
        path = str(_library.find_library("libqconv_cuda.so", "QCONV_CUDA_LIBRARY"))
        build = library().qc_cuda_build().decode()
        error = _library.Error()
        _library.check(library().qc_cuda_usable(c.byref(error)), error)
    except errors.Error as e:
        return CudaLibrary(path, build, str(e))
    return CudaLibrary(path, build, None)
