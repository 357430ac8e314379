"""Products of torch's CUDA tensors with qconv's kernels (libqconv_cuda.so).

Each device has a handle, made with the first product. What lives how long:

- A weight is made ready by its first product, which waits for the stream, and is known again by the storages of its
  tensors. What was made is forgotten when one of these dies or one of the tensors is written to, so an address that
  is used again is another weight. (Tensors made under torch.inference_mode count no writes.) That memory is not
  torch's, so no pool of a captured graph ever holds it. It is freed when the next weight is made ready.
- A workspace is torch's memory and belongs to one product: torch orders its use by streams, and within a capture it
  comes from the graph's pool.
- A weight that is first multiplied within a capture is made ready within the graph, each time that it runs, and is not
  kept. So multiply once before you capture, as torch's documentation says as well.
- Plans depend on shapes only and are kept.

Once a weight is ready, nothing here waits for the device.
"""
import ctypes as c
import threading
import warnings
import weakref

import torch

from . import _cuda, _library, errors

PLANS = 1024  # of one shape
WORKSPACE = 256 << 20  # bytes that a product may take to restore a part of its weight in


class Runtime:
    """What is asked of torch. The tests have another one, where kernels run on the CPU."""

    @staticmethod
    def stream(index):
        return torch._C._cuda_getCurrentRawStream(index)

    @staticmethod
    def device():
        return torch.cuda.current_device()

    @staticmethod
    def on(index):
        return torch.cuda.device(index)

    @staticmethod
    def memory(count, device):
        """Bytes that are the current stream's from now on: a tensor, and an address on 256 bytes within it."""
        tensor = torch.empty(count + 255, dtype=torch.uint8, device=device)
        return tensor, -(-tensor.data_ptr() // 256) * 256

    @staticmethod
    def reaches(device):
        """Whether qconv's kernels could work on a device."""
        return device.type == "cuda"

    @staticmethod
    def release():
        torch.cuda.empty_cache()


runtime = Runtime


class Call(threading.local):
    """What a thread's calls of the library write to, made once."""

    def __init__(self):
        self.error, self.io, self.capture = _library.Error(), _cuda.MatmulIo(), c.c_ulonglong()
        self.experts = _cuda.MatmulExpertsIo()
        self.error_at, self.io_at, self.experts_at, self.capture_at = map(
            c.addressof, (self.error, self.io, self.experts, self.capture))
        self.device = None  # that the library knows as this thread's


_call = Call()


def _check(status):
    if status:
        _library.check(status, _call.error)


class Ready:
    """A weight that was made ready."""
    __slots__ = ("memory", "tensor", "ready", "at", "array", "array_at", "versions", "storages", "plans")

    def __init__(self, ready):
        self.ready, self.memory, self.tensor, self.versions, self.storages = ready, 0, None, (), ()
        self.at = c.addressof(ready)
        self.array = (c.c_void_p * 1)(self.at)
        self.array_at = c.addressof(self.array)


def _key(tensors, numbers):
    """Names a weight while its storages live, and how often its tensors were written to."""
    key, versions = [numbers], []
    for t in tensors:
        if t is None:
            key.append(None)
        else:
            key.append((t.untyped_storage()._cdata, t.data_ptr(), t.nbytes, t.is_contiguous()))
            versions.append(0 if t.is_inference() else t._version)
    return tuple(key), versions


class Gpu:
    def __init__(self, index):
        self.index, self.library, self.lock = index, _cuda.library(), threading.Lock()
        self.handle = c.c_void_p()
        _check(self.library.qc_matmul_create(c.addressof(self.handle), index, _call.error_at))
        self.handle = self.handle.value
        self.device = self.library.qc_matmul_device(self.handle)
        said = self.library.qc_matmul_no_gemm(self.handle)
        self.no_gemm = said.decode() if said else None  # why there is no cuBLAS
        self.weights, self.plans = {}, {}
        self.retired = []  # memory of weights that are gone

    # ---- memory that stays -------------------------------------------------------------------

    def allocate(self, count):
        at = c.c_void_p()
        if self.library.qc_cuda_malloc(c.addressof(at), count, _call.error_at):
            runtime.release()  # what torch keeps unused
            _check(self.library.qc_cuda_malloc(c.addressof(at), count, _call.error_at))
        return at.value

    # ---- weights ------------------------------------------------------------------------------

    def ready(self, tensors, numbers, described, stream, capture, device):
        key, versions = _key(tensors, numbers)
        known = self.weights.get(key)
        if known is not None and known.versions == versions:
            return known
        w = described(tensors, numbers)
        make = self.made_experts if isinstance(w, c.Array) else self.made
        if capture:
            return make(w, numbers, stream, device)
        with self.lock:
            while self.retired:
                self.library.qc_cuda_free(self.retired.pop())
            known = self.weights.get(key)  # of another thread, or of what the tensors held before
            if known is not None and known.versions == versions:
                return known
            if known is not None:
                self.forget(key, known.memory)
            made = make(w, numbers, stream)
            made.versions = versions
            made.storages = [weakref.ref(t.untyped_storage(), lambda _, at=made.memory: self.forget(key, at))
                             for t in tensors if t is not None]
            self.weights[key] = made
        return made

    def forget(self, key, memory):
        known = self.weights.get(key)
        if known is not None and known.memory == memory and self.weights.pop(key, None) is known:
            self.retired += [memory] if memory else []

    def made(self, w, numbers, stream, device=None):
        """A weight made ready: kept and complete, or with a device in torch's memory there, in the order of the
        stream."""
        library, at, made = self.library, c.addressof(w), Ready(_cuda.MatmulWeights())
        self.prepared(made, library.qc_matmul_prepared_bytes(at), library.qc_matmul_prepare, (at,), stream, device)
        if device is None:
            made.ready.complete = _cuda.COMPLETE
        form, rows, cols, block = numbers[:4]
        made.plans = self.plans.setdefault((form, rows, cols, block, made.ready.row_bytes), {})
        return made

    def made_experts(self, w, numbers, stream, device=None):
        library, at, made = self.library, c.addressof(w), Ready(_cuda.MatmulExperts())
        self.prepared(made, library.qc_matmul_experts_bytes(at, len(w)), library.qc_matmul_experts_prepare, (at, len(w)),
                      stream, device)
        return made

    def prepared(self, made, count, prepare, weight, stream, device):
        """Calls prepare with count bytes: kept and complete, or on a device in torch's memory there."""
        if device is not None:
            made.tensor, memory = runtime.memory(count, device)
        else:
            memory = made.memory = self.allocate(count)
        try:
            _check(prepare(self.handle, *weight, memory, made.at, stream, _call.error_at))
            if device is None:
                _check(self.library.qc_cuda_stream_synchronize(stream, _call.error_at))
        except errors.Error:
            self.retired += [made.memory] if made.memory else []
            raise

    # ---- products -----------------------------------------------------------------------------

    def plan(self, weight, key):
        """(the plan's memory, its address, bytes of workspace) for what the thread's io says."""
        planned = c.create_string_buffer(_library.library().qc_abi_size(b"qc_matmul_planned"))
        at = c.addressof(planned)

        def made(limit):
            return self.library.qc_matmul_plan_product(self.handle, weight.array_at, _call.io_at, 1, 0, limit, at,
                                                       _call.error_at)

        if made(WORKSPACE):
            _check(made(0))
        if len(weight.plans) >= PLANS:
            weight.plans.clear()
        weight.plans[key] = found = planned, at, self.library.qc_matmul_planned_workspace(at)
        return found

    def begun(self, x, tensors, numbers, described):
        """(the thread's calls, its stream, the weight made ready) of a product on this device."""
        call, stream = _call, runtime.stream(self.index)
        self.use(call)
        _check(self.library.qc_cuda_capture_of(call.capture_at, stream, call.error_at))
        return call, stream, self.ready(tensors, numbers, described, stream, call.capture.value, x.device)

    def linear(self, x, tensors, numbers, described, bias, y):
        """y = x W^T + bias. x [m, cols] with rows that may have gaps, y [m, rows]; all in x's dtype."""
        if runtime.device() != self.index:
            with runtime.on(self.index):
                return self.linear(x, tensors, numbers, described, bias, y)
        call, stream, weight = self.begun(x, tensors, numbers, described)
        io, m, cols = call.io, x.shape[0], x.shape[1]
        io.m, io.x, io.ldx, io.y, io.ldy = m, x.data_ptr(), x.stride(0) if m > 1 else cols, y.data_ptr(), numbers[1]
        io.x_dtype = io.y_dtype = dtype = DTYPES[x.dtype]
        io.bias = None if bias is None else bias.data_ptr()
        key = m, dtype, io.ldx, ((io.x or 0) | 2 * io.ldx) & 15, bias is None
        _, planned, count = weight.plans.get(key) or self.plan(weight, key)
        held, at = runtime.memory(count, x.device) if count else (None, None)
        _check(self.library.qc_matmul_run_planned(self.handle, planned, weight.array_at, call.io_at, at, count, stream,
                                                  call.error_at))
        del held  # until here it was this product's

    def experts(self, x, offsets, x_rows, row_weights, tensors, numbers, described, bias, y):
        """y[row] = (x[x_rows[row]] W^T + bias) row_weights[row] of the expert in whose offsets the row is; x, bias and y
        in one dtype."""
        if runtime.device() != self.index:
            with runtime.on(self.index):
                return self.experts(x, offsets, x_rows, row_weights, tensors, numbers, described, bias, y)
        call, stream, weight = self.begun(x, tensors, numbers, described)
        io, cols = call.experts, x.shape[1]
        io.max_rows, io.x_count, io.offsets = y.shape[0], x.shape[0], offsets.data_ptr()
        io.x_rows, io.row_weights, io.bias = (None if t is None else t.data_ptr() for t in (x_rows, row_weights, bias))
        io.x, io.ldx, io.y, io.ldy = x.data_ptr(), x.stride(0) if len(x) > 1 else cols, y.data_ptr(), numbers[1]
        io.x_dtype = io.y_dtype = DTYPES[x.dtype]
        count = self.library.qc_matmul_experts_workspace(weight.at, io.x_count)
        held, at = runtime.memory(count, x.device)
        _check(self.library.qc_matmul_run_experts(self.handle, weight.at, call.experts_at, 0, at, count, stream,
                                                  call.error_at))
        del held

    def dequantize(self, w, rows, cols, out):
        if runtime.device() != self.index:
            with runtime.on(self.index):
                return self.dequantize(w, rows, cols, out)
        self.use(_call)
        _check(self.library.qc_cuda_dequantize(c.addressof(w), 0, rows, out.data_ptr(), DTYPES[out.dtype], cols, None,
                                               None, runtime.stream(self.index), _call.error_at))

    def use(self, call):
        """Tells the library which device is the thread's. It has a CUDA runtime of its own beside torch's."""
        if call.device != self.index:
            _check(self.library.qc_cuda_use(self.device, call.error_at))
            call.device = self.index


DTYPES = {torch.float32: _library.DTYPES.index("F32"), torch.float16: _library.DTYPES.index("F16"),
          torch.bfloat16: _library.DTYPES.index("BF16")}

_gpus, _making = {}, threading.Lock()


def of(device):
    """The Gpu of a device, made with the first call; None where qconv's kernels cannot be used, which is said once."""
    index = device.index or 0
    gpu = _gpus.get(index, _gpus)
    if gpu is not _gpus:
        return gpu
    with _making:
        if index not in _gpus:
            _gpus[index] = _made(index, device)
    return _gpus[index]


def _made(index, device):
    problem = _cuda.cuda_library().problem
    if problem is None:
        _check(_cuda.library().qc_cuda_capture_of(_call.capture_at, runtime.stream(index), _call.error_at))
        if _call.capture.value:
            raise errors.UsageError(f"the first product on {device} cannot be captured into a graph: multiply once "
                                    "before")
        try:
            gpu = Gpu(index)
            if gpu.no_gemm:
                warnings.warn(f"qconv multiplies integers of compressed-tensors with torch on {device}, and many rows "
                              f"of x without cuBLAS: {gpu.no_gemm}", errors.QconvWarning)
            return gpu
        except errors.DeviceError as e:  # this build has no code for the device
            problem = str(e)
    warnings.warn(f"qconv multiplies with torch on {device}, not with its own kernels: {problem}", errors.QconvWarning)
    return None
