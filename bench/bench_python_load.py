#!/usr/bin/env python3
"""qconv.load beside transformers + bitsandbytes on the CPU: time to load, and to make a token.

usage: PYTHONPATH=python:... bench_python_load.py --qconv PROGRAM --library LIBQCONV --scratch DIR --output JSON
                                                  [--rounds N] [--rows]

A random Llama of half a billion weights is converted to NF4 (compressed), and unpacked. Every figure is of a process of
its own that has imported everything before the clock starts. In each round all contenders take their turn. "cold" asks
the kernel to drop the files from its cache first, which a file system may not do. Loading is over when a model has
given the logits of one token, because from_pretrained only maps files. cpu_s is processor time, which other processes on
the machine change little; all contenders have as many threads as OMP_NUM_THREADS says. --rows times products alone: libqconv's way
against the restored weight in torch, by rows of x (ops.RESTORED_ABOVE).
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CONFIG = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, vocab_size=32000, num_attention_heads=16,
              num_key_value_heads=8, max_position_embeddings=512, architectures=["LlamaForCausalLM"])
ROWS = (64, 128, 256, 512)
TOKENS = 8


def make(folder):
    import torch
    import transformers
    torch.manual_seed(1)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16)
    numbers = torch.randn((1 << 20) + 7).to(torch.bfloat16) * 0.02
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.view(-1)[:] = numbers.repeat(-(-p.numel() // numbers.numel()))[:p.numel()]
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def child(kind, folder):
    """Loads and says how long it took, then how long a token takes."""
    import torch
    import transformers
    transformers.utils.logging.disable_progress_bar()
    if kind == "transformers":
        import bitsandbytes.nn.modules  # noqa: F401
        from transformers.models.llama import modeling_llama  # noqa: F401
        started = clocks()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        import qconv._loading
        from transformers.models.llama import modeling_llama  # noqa: F401
        started = clocks()
        model = qconv.load(folder, dtype=torch.bfloat16)
    ids = torch.tensor([[1]])
    with torch.no_grad():
        model(input_ids=ids)
    load = [b - a for a, b in zip(started, clocks())]
    status = Path("/proc/self/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10
    ids = torch.arange(8)[None]
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    started = clocks()
    model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    token = [(b - a) / TOKENS for a, b in zip(started, clocks())]
    print(json.dumps({"load_s": load[0], "load_cpu_s": load[1], "token_s": token[0], "token_cpu_s": token[1],
                      "peak_bytes": peak}))


def clocks():
    return time.perf_counter(), time.process_time()


def drop(folder):
    for path in Path(folder).iterdir():
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows_table():
    """{rows: median ratio of torch's processor time with the restored weight to libqconv's}, NF4 [4096, 1024], bfloat16."""
    import torch
    from qconv import ops
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(-128, 128, (4096 * 1024 // 2,), generator=g, dtype=torch.int8)
    weight = (codes, torch.rand(4096 * 1024 // 64, generator=g), torch.linspace(-1, 1, 16), None, None)
    numbers, out, asked = ("nf4", 4096, 1024, 64, 0, 0.0), {}, ops.RESTORED_ABOVE
    for rows in ROWS:
        x, ratios = torch.randn(rows, 1024, generator=g).bfloat16(), []
        for _ in range(7):
            times = []
            for above in (1 << 30, 0):
                ops.RESTORED_ABOVE = above
                started = time.process_time()
                ops.linear(x, *weight, None, *numbers)
                times.append(time.process_time() - started)
            ratios.append(times[1] / times[0])
        out[rows] = round(statistics.median(ratios), 3)
    ops.RESTORED_ABOVE = asked
    return out


def summarize(result, seen):
    """Medians, and ratios to transformers'."""
    for name, states in seen.items():
        result[name] = {state: {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
                        for state, runs in states.items()}
    base = result["transformers"]
    result["ratios"] = {f"{name}_{state}_{key}": round(result[name][state][key] / base[state][key], 3)
                        for name in ("qconv", "qconv_plain") for state in ("warm", "cold")
                        for key in ("load_s", "load_cpu_s", "token_s", "token_cpu_s", "peak_bytes")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--qconv", type=Path)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        return child(*arguments.child)
    os.environ["QCONV_LIBRARY"] = str(arguments.library.resolve())
    model, out, plain = (arguments.scratch / name for name in ("model", "out", "plain"))
    result = {"model": CONFIG}
    if not plain.exists():
        make(model)
        subprocess.run([arguments.qconv, "--to", "nf4", "-q", "--force", model, out], check=True)
        subprocess.run([arguments.qconv, "unpack", "-q", "--force", out, plain], check=True)
    result["bytes"] = {f.name: sum(p.stat().st_size for p in f.iterdir()) for f in (out, plain)}
    contenders = {"qconv": ("qconv", out), "qconv_plain": ("qconv", plain), "transformers": ("transformers", plain)}
    seen = {name: {state: [] for state in ("warm", "cold")} for name in contenders}
    for _ in range(arguments.rounds):
        for name, (kind, folder) in contenders.items():
            for state in ("cold", "warm"):
                if state == "cold":
                    drop(folder)
                done = subprocess.run([sys.executable, __file__, "--child", kind, str(folder)], capture_output=True,
                                      text=True, check=True)
                seen[name][state].append(json.loads(done.stdout.splitlines()[-1]))
                print(name, state, seen[name][state][-1], flush=True)
    summarize(result, seen)
    import torch
    import transformers
    import bitsandbytes
    result["with"] = {"torch": torch.__version__, "transformers": transformers.__version__,
                      "bitsandbytes": bitsandbytes.__version__, "threads": torch.get_num_threads(),
                      "cpu": torch.backends.cpu.get_cpu_capability(), "rounds": arguments.rounds}
    if arguments.rows:
        result["restored_over_libqconv"] = rows_table()
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
