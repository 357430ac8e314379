"""qconv's kernels for GPUs on tensors of the CPU: libqconv_cuda.so of build/shim runs them there, in host memory.

start() puts streams of that library in the place of torch's. Its streams do nothing until somebody waits, so outside a
capture every call is waited for before its temporary tensors are gone; a GPU's allocator orders them by streams.
"""
import contextlib
import ctypes
import os

from qconv import _cuda, _gpu, _library


class Streams:
    """In the place of _gpu.Runtime. The current stream is the last one that on_stream() chose."""

    def __init__(self):
        self.current, self.kept = [self.made()], []

    @staticmethod
    def made():
        stream = ctypes.c_void_p()
        call("qc_cuda_stream_create", ctypes.byref(stream))
        return stream.value

    @contextlib.contextmanager
    def on_stream(self, stream):
        self.current.append(stream)
        yield
        self.current.pop()

    def stream(self, index):
        return self.current[-1]

    def device(self):
        return 0

    def on(self, index):
        raise AssertionError("there is one device")

    def memory(self, count, device):
        """A graph keeps what was allocated as it was captured."""
        tensor, at = _gpu.Runtime.memory(count, device)
        tensor.fill_(0xff)
        if capturing(self.stream(0)):
            self.kept.append(tensor)
        return tensor, at

    def reaches(self, device):
        return True

    def release(self):
        pass


def call(name, *arguments):
    error = _library.Error()
    function = getattr(_cuda.library(), name)
    _library.check(function(*arguments, ctypes.byref(error)), error)


def capturing(stream):
    number = ctypes.c_ulonglong()
    call("qc_cuda_capture_of", ctypes.byref(number), stream)
    return number.value


def start():
    """Needs QCONV_CUDA_LIBRARY. Returns the Streams."""
    ctypes.CDLL(os.environ["QCONV_CUDA_LIBRARY"], mode=ctypes.RTLD_GLOBAL)  # fake_cublas looks for it
    library, pointer = _cuda.library(), ctypes.c_void_p
    for name, arguments in {"qc_cuda_stream_create": 1, "qc_cuda_capture_begin": 1, "qc_cuda_capture_end": 2,
                            "qc_cuda_graph_launch": 2}.items():
        getattr(library, name).argtypes = [pointer] * (arguments + 1)
    library.qc_cuda_graph_destroy.argtypes = [pointer]
    streams = _gpu.runtime = Streams()
    for name, stream_at in {"qc_matmul_run_planned": 6, "qc_matmul_run_experts": 6, "qc_cuda_dequantize": 8}.items():
        setattr(library, name, waited_for(getattr(library, name), stream_at))
    return streams


def waited_for(function, stream_at):
    def then_wait(*arguments):
        status = function(*arguments)
        if not status and not capturing(arguments[stream_at]):
            call("qc_cuda_stream_synchronize", arguments[stream_at])
            status = _cuda.library().qc_matmul_check(_gpu._gpus[0].handle, arguments[-1])
        return status
    return then_wait


class Graph:
    """What is put on a stream in between, to run again."""

    def __init__(self, streams, stream=None):
        self.streams, self.stream, self.graph = streams, stream or streams.made(), ctypes.c_void_p()

    def __enter__(self):
        call("qc_cuda_capture_begin", self.stream)
        self.chosen = self.streams.on_stream(self.stream)
        self.chosen.__enter__()
        return self

    def __exit__(self, *exc):
        self.chosen.__exit__(*exc)
        call("qc_cuda_capture_end", ctypes.byref(self.graph), self.stream)

    def replay(self, wait=True):
        call("qc_cuda_graph_launch", self.graph, self.stream)
        if wait:
            call("qc_cuda_stream_synchronize", self.stream)
