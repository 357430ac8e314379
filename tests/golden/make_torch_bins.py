#!/usr/bin/env python3
"""Makes tests/data/torch: small files as torch.save writes them, each beside its twin.

usage: make_torch_bins.py OUT          (needs torch, safetensors, numpy)

NAME.bin is what torch.save wrote, NAME.safetensors the same tensors by the safetensors library;
refused/NAME.bin must not be read, and tests/unit/formats/unit_torch_file.c says with which words. README.md
records the versions. Not reproducible byte for byte: torch writes random ids and addresses into
its files. Pickles that run something when loaded are among them; they would only print.
"""
import argparse
import collections
import io
import json
import os
import pathlib
import pickle
import sys
import tarfile
import warnings
import zipfile

import numpy
import safetensors
import safetensors.torch
import torch

warnings.simplefilter("ignore")
OUT = pathlib.Path(sys.argv[1])


def values(dtype, *shape, start=1):
    n = 1
    for d in shape:
        n *= d
    v = torch.arange(start, start + n)
    if dtype == torch.bool:
        return (v % 3 == 0).reshape(shape)
    return (v.to(torch.float32) / 4).to(dtype).reshape(shape) if dtype.is_floating_point else (
        (v * 7 % 128).to(dtype).reshape(shape))


def save(name, state, twin=None, **how):
    torch.save(state, OUT / (name + ".bin"), **how)
    tensors = {k: v.detach().clone().contiguous()
               for k, v in (state if twin is None else twin).items() if torch.is_tensor(v)}
    safetensors.torch.save_file(tensors, OUT / (name + ".safetensors"), {"format": "pt"})


def refused(name, what, **how):
    torch.save(what, OUT / "refused" / (name + ".bin"), **how)


OLD = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32,
       torch.int16, torch.int8, torch.uint8, torch.bool]
NEW = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
       torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64]


def of_dtypes(dtypes):
    state = collections.OrderedDict()
    for i, dtype in enumerate(dtypes):
        name = str(dtype).removeprefix("torch.")
        state[f"layer.{i}.{name}"] = values(dtype, 2, 3)
    return state


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.proj = torch.nn.Linear(4, 5)
        self.lm_head = torch.nn.Linear(4, 6, bias=False)
        self.register_buffer("position_ids", torch.arange(7).reshape(1, 7))


def accepted():
    torch.manual_seed(1)
    module = Small()
    save("dtypes", of_dtypes(OLD))
    save("new_dtypes", of_dtypes(NEW))
    save("dtypes_legacy", of_dtypes(OLD), _use_new_zipfile_serialization=False)
    save("new_dtypes_legacy", of_dtypes(NEW), _use_new_zipfile_serialization=False)
    save("module", module.state_dict())
    save("module_legacy", module.state_dict(), _use_new_zipfile_serialization=False)
    save("module_protocol4", module.state_dict(), pickle_protocol=4)
    save("module_protocol5", module.state_dict(), pickle_protocol=5)
    save("module_legacy_protocol4", module.state_dict(), pickle_protocol=4,
         _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    save("module_no_crc", module.state_dict())
    torch.serialization.set_crc32_options(True)
    save("parameters", dict(module.named_parameters()))
    frozen = torch.nn.Parameter(values(torch.float16, 3), requires_grad=False)
    frozen.note = "an attribute"  # makes it _rebuild_parameter_with_state
    save("parameter_with_state", {"a": frozen, "b": torch.nn.Parameter(torch.ones(2))})
    save("shapes", {"scalar": values(torch.float32), "none": torch.empty(0),
                    "no rows": torch.empty(0, 5), "no columns": torch.empty(5, 0),
                    "ones": values(torch.float32, 1, 1, 1), "eight": values(torch.int8, *[2] * 8),
                    "deep": values(torch.float16, 2, 1, 3, 1), "\u00fc\u6f22 \U0001f600": torch.ones(1)})
    # A dimension of 1 may have any stride.
    save("loose_strides", {"row": torch.arange(6.0).reshape(6, 1).t(),
                           "column": torch.arange(12.0).reshape(3, 4)[:, :1][1:2],
                           "expanded": torch.arange(3.0).expand(1, 3)})
    shared = torch.arange(24.0)
    views = {"whole": shared, "head": shared[:10], "tail": shared[7:], "rows": shared.view(6, 4)[2:4],
             "again": shared}
    save("views", views)
    save("views_legacy", views, _use_new_zipfile_serialization=False)
    module.lm_head.weight = module.embed_tokens.weight
    save("tied", module.state_dict())
    save("tied_legacy", module.state_dict(), _use_new_zipfile_serialization=False)
    one = torch.ones(3)
    save("same_tensor", {"a": one, "b": one})
    state = module.state_dict()
    beside = {"epoch": 3, "lr": 1e-3, "big": 1 << 100, "minus": -5, "name": "x", "none": None,
              "flags": [True, False], "pair": (1, 2, 3, 4), "bytes?": "b", "device":
              torch.device("cpu"), "dtype": torch.bfloat16, "size": torch.Size([2, 3]),
              "nested": {"a": {"b": [{}]}}}
    save("wrapped", {"state_dict": state, **beside}, twin=state)
    save("wrapped_model", {"model": state}, twin=state)
    save("wrapped_legacy", {"epoch": 1, "module": state}, twin=state,
         _use_new_zipfile_serialization=False)
    save("entries_beside", {**state, **beside})
    save("empty", {})
    save("empty_legacy", {}, _use_new_zipfile_serialization=False)
    save("many", {f"t.{i}": values(torch.int8, 3, start=i) for i in range(300)},
         _use_new_zipfile_serialization=False)


class Runs:
    """Something that would run when unpickled."""

    def __init__(self, what, *args):
        self.call = what, args

    def __reduce__(self):
        return self.call


def rewritten(name, source, change):
    """A zip archive whose entries went through change({name: bytes}) -> [(name, bytes, method)]."""
    with zipfile.ZipFile(OUT / (source + ".bin")) as z:
        entries = {i.filename: z.read(i) for i in z.infolist()}
    with zipfile.ZipFile(OUT / "refused" / (name + ".bin"), "w") as z:
        for entry, data, method in change(entries):
            z.writestr(zipfile.ZipInfo(entry), data, method)


def not_accepted():
    square = torch.arange(6.0).reshape(2, 3)
    refused("transposed", {"fine": square, "weight": square.t()})
    refused("transposed_legacy", {"weight": square.t()}, _use_new_zipfile_serialization=False)
    refused("expanded", {"weight": torch.arange(3.0).expand(4, 3)})
    refused("every_other", {"weight": torch.arange(8.0)[::2]})
    refused("conjugate", {"weight": torch.ones(2, dtype=torch.complex64).conj()})
    refused("complex128", {"weight": torch.ones(2, dtype=torch.complex128)})
    refused("sparse", {"weight": square.to_sparse()})
    refused("nine_dims", {"weight": torch.ones([1] * 9)})
    refused("meta", {"weight": torch.ones(2, device="meta")})
    refused("whole_module", torch.nn.Linear(2, 2))
    refused("one_tensor", square)
    refused("a_list", [square])
    refused("number_as_name", {7: square})
    refused("deep", {"a": {"b": {"weight": square}}})
    refused("two_models", {"model": {"a": square}, "state_dict": {"b": square}})
    module = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(module.parameters())
    adam.state = {p: {"step": 1, "exp_avg": torch.ones_like(p)} for p in module.parameters()}
    refused("training", {"model": module.state_dict(), "optimizer": adam.state_dict()})
    refused("namespace", {"weight": square, "args": argparse.Namespace(lr=1)})
    refused("numpy_scalar", {"weight": square, "loss": numpy.float64(1)})
    refused("a_set", {"weight": square, "names": {"a"}})
    echo = ("echo pickle ran",)
    refused("system", {"weight": square, "x": Runs(os.system, *echo)})
    refused("system_legacy", Runs(os.system, *echo), _use_new_zipfile_serialization=False)
    refused("system_protocol4", Runs(os.system, *echo), pickle_protocol=4)
    refused("eval", Runs(eval, "print('pickle ran')"))
    refused("getattr", Runs(getattr, "", "join"))
    refused("popen", {"state_dict": {"weight": square, "x": Runs(os.popen, *echo)}})
    zipped = lambda e: [(n, d, zipfile.ZIP_STORED) for n, d in e.items()]
    rewritten("compressed", "module",
              lambda e: [(n, d, zipfile.ZIP_DEFLATED) for n, d in e.items()])
    rewritten("big_endian", "module",
              lambda e: zipped({**e, "module/byteorder": b"big"}))
    rewritten("script", "module", lambda e: zipped({**e, "module/constants.pkl": b"\x80\x02)."}))
    rewritten("no_pickle", "module",
              lambda e: zipped({n: d for n, d in e.items() if not n.endswith(".pkl")}))
    rewritten("two_pickles", "module", lambda e: zipped({**e, "b/data.pkl": b"\x80\x02}."}))
    rewritten("storage_missing", "module",
              lambda e: zipped({n: d for n, d in e.items() if n != "module/data/1"}))
    rewritten("storage_short", "module",
              lambda e: zipped({**e, "module/data/1": e["module/data/1"][:-1]}))
    rewritten("text_behind", "module",
              lambda e: zipped({**e, "module/data.pkl": e["module/data.pkl"] + b"N."}))
    with open(OUT / "refused" / "plain_pickle.bin", "wb") as f:
        pickle.dump({"weight": [1.0]}, f, protocol=2)
    with tarfile.open(OUT / "refused" / "tar.bin", "w") as t:
        info = tarfile.TarInfo("sys_info")
        info.size = 2
        t.addfile(info, io.BytesIO(b"\x80\x02"))


def sharded():
    folder = OUT / "sharded"
    folder.mkdir(exist_ok=True)
    torch.manual_seed(2)
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight",
             "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
    shapes = [(40, 64), (64, 96), (96, 64), (64,), (40, 64)]
    state = {n: torch.randn(s).to(torch.float16) for n, s in zip(names, shapes)}
    parts = [names[:2], names[2:]]
    weight_map = {}
    for i, part in enumerate(parts):
        file = f"pytorch_model-{i + 1:05d}-of-{len(parts):05d}.bin"
        torch.save({n: state[n] for n in part}, folder / file)
        weight_map |= {n: file for n in part}
    total = sum(t.numel() * t.element_size() for t in state.values())
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
              "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
              "vocab_size": 40, "tie_word_embeddings": False, "torch_dtype": "float16"}
    for name, data in [("pytorch_model.bin.index.json",
                        {"metadata": {"total_size": total}, "weight_map": weight_map}),
                       ("config.json", config)]:
        (folder / name).write_text(json.dumps(data, indent=2) + "\n")
    safetensors.torch.save_file(state, OUT / "sharded.safetensors", {"format": "pt"})


def main():
    (OUT / "refused").mkdir(parents=True, exist_ok=True)
    accepted()
    not_accepted()
    sharded()
    (OUT / "README.md").write_text(f"""# Files of torch.save

Made by `tests/golden/make_torch_bins.py` with torch {torch.__version__.split("+")[0]}, safetensors
{safetensors.__version__}, numpy {numpy.__version__} and Python {sys.version.split()[0]}. `NAME.bin` and `NAME.safetensors`
hold the same tensors; the files in `refused/` must not be read, and some of them would run a
harmless `echo` if Python's unpickler loaded them.
""")
    for path in OUT.rglob("*.safetensors"):
        path.chmod(0o644)


main()
