#!/usr/bin/env python3
"""Calibrates a few layers of a Llama of 8B's width with made-up weights, and says what each part takes.

  calibrate_scale.py measure --work DIR [--layers N] [--tokens N] [--context N] [--vocabulary N] [--width N]
                             [--json FILE] [-- OPTIONS OF calibrate...]
  calibrate_scale.py count --work DIR [--json FILE]
  calibrate_scale.py table [--json FILE]

`measure` writes a checkpoint in bf16 and a text of random ids into DIR, runs `python -m qconv calibrate --to nf4` under
/usr/bin/time, once its files have left the page cache, and records for each part the seconds and the processor
seconds of both processes, the peaks of memory beside what was announced, and the bytes read. The package and the
program are those of PYTHONPATH and QCONV_PROGRAM. Weights are normal random numbers and ids are drawn evenly, so times
and bytes mean something, and errors do not. --width divides all of 8B's widths, to try the script.

`clocked` is what `measure` runs: the command with clocks around its parts.

`count` asks the command's own --dry-run what a Llama of 8B and one of 70B take, whose checkpoints it writes as files
with holes, and divides operations and bytes by rates of GPUs: those of an H200 were measured (bench/results/gpu-h200-*.json),
and others are published rates times the share of its published rates that the H200 reached. `table` puts both into
docs/theory/calibration.md.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable
from unittest import mock

from result_page import json_text, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
LLAMA_8B = {"hidden": 4096, "inside": 14336, "heads": 32, "kv_heads": 8, "layers": 32, "vocabulary": 128256}
LLAMA_70B = {"hidden": 8192, "inside": 28672, "heads": 64, "kv_heads": 8, "layers": 80, "vocabulary": 128256}


# ---- a model and a text ----


def make_model(folder: Path, shape: dict[str, int], holes: bool = False) -> None:
    """A Llama of this shape: bf16, one file a layer. holes: files have a header only, and their full size."""
    import torch
    from safetensors.torch import save_file
    hidden, inside, kv = shape["hidden"], shape["inside"], shape["hidden"] // shape["heads"] * shape["kv_heads"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inside,
        "num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"],
        "num_hidden_layers": shape["layers"], "vocab_size": shape["vocabulary"], "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1}))
    layer = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
             "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inside, hidden), "mlp.up_proj": (inside, hidden),
             "mlp.down_proj": (hidden, inside), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    files = [{"model.layers.%d.%s.weight" % (i, n): s for n, s in layer.items()} for i in range(shape["layers"])]
    files.append({"model.embed_tokens.weight": (shape["vocabulary"], hidden), "model.norm.weight": (hidden,),
                  "lm_head.weight": (shape["vocabulary"], hidden)})
    index: dict[str, str] = {}
    for number, shapes in enumerate(files):
        name = "model-%05d-of-%05d.safetensors" % (number + 1, len(files))
        index.update({n: name for n in shapes})
        if holes:
            write_holes(folder / name, shapes)
            continue
        draw = torch.Generator().manual_seed(number)
        save_file({n: torch.ones(s, dtype=torch.bfloat16) if len(s) == 1
                   else (torch.randn(s, generator=draw) * 0.02).bfloat16() for n, s in shapes.items()}, folder / name,
                  metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def make_text(path: Path, tokens: int, context: int, vocabulary: int) -> None:
    import torch
    ids = torch.randint(2, vocabulary, (tokens // context, context), generator=torch.Generator().manual_seed(7))
    path.write_text("".join(" ".join(map(str, row)) + "\n" for row in ids.tolist()))


def leave_cache(folder: Path) -> None:
    """What is read of these files from now on comes from the disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- clocks ----


class Clocks:
    """Seconds of each part, without those of parts within it: wall, this process's processors, the program's."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.stack: list[str] = []
        self.program = 0  # its process
        self.at = self.now()
        self.thread = threading.get_ident()

    def now(self) -> list[float]:
        return [time.monotonic(), time.process_time(), processor_seconds(self.program)]

    def turn(self) -> None:
        """What has passed belongs to the part at the top."""
        now = self.now()
        for i in range(3):
            self.parts[self.stack[-1] if self.stack else "other"][i] += max(0.0, now[i] - self.at[i])
        self.at = now

    def on(self, owner: Any, name: str, part: str | Callable[[], str]) -> None:
        own = getattr(owner, name)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return own(*args, **kwargs)
            self.turn()
            self.stack.append(part if isinstance(part, str) else part())
            try:
                return own(*args, **kwargs)
            finally:
                self.turn()
                self.stack.pop()
        setattr(owner, name, clocked)


def processor_seconds(process: int) -> float:
    try:
        words = Path("/proc/%d/stat" % process).read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def status_of(process: int) -> dict[str, int]:
    found = re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/%d/status" % process).read_text())
    return {name: int(value) << 10 for name, value in found}


def read_of(process: int) -> dict[str, int]:
    found = re.findall(r"(\w+): (\d+)", Path("/proc/%d/io" % process).read_text())
    return {name: int(value) for name, value in found if name in ("rchar", "read_bytes")}


class Sampler(threading.Thread):
    """Memory of both processes together, and what the program has read, a few times a second."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__(daemon=True)
        self.clocks, self.over, self.folder = clocks, threading.Event(), ""
        self.together = self.program_peak = 0
        self.program_read: dict[str, int] = {}

    def run(self) -> None:
        while not self.over.wait(0.2):
            try:
                own, other = status_of(os.getpid()), status_of(self.clocks.program)
                self.program_read = read_of(self.clocks.program)
                files = sum(e.stat().st_size for e in os.scandir(self.folder)) if self.folder else 0
            except OSError:
                continue
            self.program_peak = max(self.program_peak, other.get("VmHWM", 0))
            self.together = max(self.together, own["RssAnon"] + other.get("RssAnon", 0) + files)


def clocked(out: str, command: list[str]) -> None:
    from qconv import __main__ as entry
    from qconv import _calibrate_door, _calibrate_layers, _calibrate_moments, _calibrate_run, stream
    clocks = Clocks()
    sampler = Sampler(clocks)
    facts: dict[str, Any] = {"passes": []}
    start, make_door, close = _calibrate_run.Shown.__init__, _calibrate_door.Door.__init__, stream.Stream.close

    def started(self: Any, *args: Any) -> None:
        start(self, *args)
        clocks.program = self.process.pid

    def opened(self: Any) -> None:
        make_door(self)
        sampler.folder = self.folder if self.folder.startswith("/dev/shm") else ""

    def closed(self: Any) -> None:
        facts["passes"].append({"layers": len(self.layers), "loads": self.loads, "read_bytes": self.reads})
        close(self)
    setattr(_calibrate_run.Shown, "__init__", started)
    setattr(_calibrate_door.Door, "__init__", opened)
    setattr(stream.Stream, "close", closed)
    clocks.on(stream.Loader, "load", "reading layers")
    clocks.on(stream.Stream, "backward", "gradients: forward and back")
    clocks.on(_calibrate_moments.Gradients, "add", "gradients: moments")
    clocks.on(_calibrate_moments.Gradients, "flush", "gradients: moments")
    clocks.on(_calibrate_layers.Layers, "visit", "streams")
    clocks.on(_calibrate_layers.Layers, "solve", "moments to the program")
    clocks.on(_calibrate_layers.InputMoments, "add", "moments")
    clocks.on(_calibrate_door.Door, "solve", "solver")
    clocks.on(_calibrate_run, "wait_for", "writing the output")
    sampler.start()
    sys.argv = ["qconv", *command]
    try:
        entry.main()
    finally:
        clocks.turn()
        sampler.over.set()
        own = read_of(os.getpid())
        facts.update(parts={n: {"wall_s": round(v[0], 2), "python_cpu_s": round(v[1], 2), "program_cpu_s": round(v[2], 2)}
                            for n, v in clocks.parts.items()},
                     python_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
                     program_peak_bytes=sampler.program_peak, together_peak_bytes=sampler.together,
                     python_read=own, program_read=sampler.program_read)
        Path(out).write_text(json.dumps(facts))


# ---- measuring ----


def processor() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found.group(1) if found else ""


def measure(args: argparse.Namespace) -> None:
    import torch
    import transformers
    shape = dict(LLAMA_8B, layers=args.layers, vocabulary=args.vocabulary)
    for name in ("hidden", "inside", "heads", "kv_heads"):
        shape[name] //= args.width
    work, model, text = args.work, args.work / "model", args.work / "text.ids"
    if not (model / "config.json").exists():
        make_model(model, shape)
    make_text(text, args.tokens, args.context, args.vocabulary)
    leave_cache(model)
    weights = shape["layers"] * (2 * shape["hidden"] ** 2 * (1 + shape["kv_heads"] / shape["heads"])
                                 + 3 * shape["hidden"] * shape["inside"])
    a = torch.randn(2048, 2048)
    float((a @ a)[0, 0])
    begin = time.process_time()
    float((a @ a)[0, 0])
    rate = 2 * 2048 ** 3 / (time.process_time() - begin)
    facts, usage = work / "facts.json", work / "time"
    command = ["calibrate", "--to", "nf4", "--text", str(text), "--calibration-tokens", str(args.tokens),
               "--calibration-context", str(args.context), "--mix", "0", "--device", "cpu", *args.options, str(model), str(work / "out")]
    began = time.monotonic()
    done = subprocess.run(["/usr/bin/time", "-v", "-o", str(usage), sys.executable, __file__, "clocked", str(facts), *command],
                          stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        sys.exit(done.returncode)
    peak = re.search(r"Maximum resident set size \(kbytes\): (\d+)", usage.read_text())
    assert peak
    found = {"shape": shape, "linear_weights": int(weights), "tokens": args.tokens, "context": args.context,
             "operations_per_processor_second": rate, "options": args.options, "processor": processor(), "processors": os.cpu_count(),
             "torch": torch.__version__, "transformers": transformers.__version__,
             "load_average": os.getloadavg()[1], "seconds": round(time.monotonic() - began, 1),
             "time_v_peak_bytes": int(peak.group(1)) << 10,
             "announced": [line for line in done.stderr.splitlines() if "calibrating" in line and "%" not in line],
             **json.loads(facts.read_text())}
    if args.json:
        kept = json.loads(args.json.read_text()) if args.json.exists() else {}
        kept.setdefault("measured", []).append(found)
        args.json.write_text(json_text(kept) + "\n")
    print(json_text(found))


# ---- counting ----

GEMM, FLOAT, TF32, DOUBLE, MEMORY, LINK = "gemm16", "float", "tf32", "double", "memory", "link"
# Published: operations and bytes a second. 16-bit and TF32 without sparsity, double on tensor cores.
PUBLISHED = {
    "H200": {GEMM: 989e12, FLOAT: 67e12, TF32: 494e12, DOUBLE: 67e12, MEMORY: 4.8e12, LINK: 63e9, "bytes": 141e9},
    "A100-80GB": {GEMM: 312e12, FLOAT: 19.5e12, TF32: 156e12, DOUBLE: 19.5e12, MEMORY: 2.04e12, LINK: 31.5e9, "bytes": 85e9},
    "A100-40GB": {GEMM: 312e12, FLOAT: 19.5e12, TF32: 156e12, DOUBLE: 19.5e12, MEMORY: 1.555e12, LINK: 31.5e9, "bytes": 42e9},
}
HOST_COPY = 5e9  # bytes a second of one thread that copies files in memory; assumed
# As convert/gpu/gpu_calibrate.c has them: calculated there, not timed.
FACTOR_SLOWER, WEIGHT_SLOWER, COUPLED, COUPLED_PAIR = 2.0, 1.5, 200 / 16 / 1.5e9, 0.01 / 1.5e9
SWEEPS, BLOCK, SUM_BYTES = 8, 1024, 24
PRIMES = (5, 11, 17, 29, 37, 53, 67)  # rows that a batch is filled up to
CONTEXT_BYTES = 1e9  # of CUDA and its libraries; assumed
ROOM_SQUARES = 32  # bytes for each of n * n of the solver on a GPU, of n inputs (docs/theory/calibration.md)


def rates() -> dict[str, dict[str, float]]:
    """Of each GPU: published rates times the share that the H200 reached, of products in that of its 16-bit product."""
    roof = json.loads((RESULTS / "gpu-h200-bench.json").read_text())["roof"]
    own = PUBLISHED["H200"]
    share = {GEMM: roof["gemm_tflops"]["median"] * 1e12 / own[GEMM], MEMORY: roof["memory_gbps"] * 1e9 / own[MEMORY],
             LINK: roof["to_device_gbps"]["median"] * 1e9 / own[LINK]}
    return {name: {kind: rate * share.get(kind, share[GEMM]) for kind, rate in of.items() if kind != "bytes"}
            for name, of in PUBLISHED.items()}


def sets_of(shape: dict[str, int]) -> list[tuple[int, list[int]]]:
    """(inputs, outputs of each weight) of the sets of a layer."""
    hidden, inside, kv = shape["hidden"], shape["inside"], shape["hidden"] // shape["heads"] * shape["kv_heads"]
    return [(hidden, [hidden, kv, kv]), (hidden, [hidden]), (hidden, [inside, inside]), (inside, [hidden])]


def solver(shape: dict[str, int]) -> dict[str, float]:
    """Operations of a layer, as quant/error_feedback*.c count them, and the seconds of coupled codes on a GPU."""
    out = {"factor": 0.0, "weights": 0.0, "coupled_s": 0.0}
    for n, outputs in sets_of(shape):
        out["factor"] += n ** 3 * (1 / 3 + 2)
        for rows in outputs:
            unit = min(rows, BLOCK)
            out["weights"] += rows * n * (n * (2 + 1 + 2 * SWEEPS + 3) + 2 * unit * (SWEEPS + 3) + min(n, 512) * SWEEPS)
            out["coupled_s"] += SWEEPS * n * unit * (COUPLED + unit * COUPLED_PAIR)
    return out


def seconds_on(rate: dict[str, float], ahead: dict[str, Any], shape: dict[str, int], products: str,
               sum_tokens: int, read_rate: float) -> dict[str, float]:
    """Of each part on one GPU. sum_tokens: whose product is added to the sums in double at once."""
    layers, solve = shape["layers"], solver(shape)
    squares = layers * sum(n * n for n, _ in sets_of(shape))
    weights = layers * sum(n * sum(rows) for n, rows in sets_of(shape))
    sums = 2 * SUM_BYTES * squares * ahead["tokens"] / sum_tokens
    parts = {name: ahead["parts"][name]["operations"] / rate[products] for name in ("gradients", "streams", "moments")}
    parts["moments"] += sums / rate[MEMORY]
    parts["solver: factors"] = layers * solve["factor"] / rate[DOUBLE] * FACTOR_SLOWER
    parts["solver: products"] = layers * solve["weights"] / rate[FLOAT] * WEIGHT_SLOWER
    parts["solver: coupled codes"] = layers * solve["coupled_s"]
    # bf16 is read three times here and once by the program; moments and values go through files in memory.
    handed = 8 * squares + 4 * weights
    parts["reading and handing over"] = 8 * weights / read_rate + (12 * weights + 16 * squares) / rate[LINK] \
        + 2 * handed / HOST_COPY
    return parts


def cards(asked: list[Any], shape: dict[str, int]) -> dict[str, Any]:
    """The bytes of each GPU that the plan counts for the whole text, and how many of its tokens fit. asked: the arguments
    that the plan was made of on this machine."""
    from qconv import _calibrate_plan
    phase, stream, windows, _, back, back_tokens, _, rate = asked
    phase = dict(phase, device_memory=ROOM_SQUARES * shape["inside"] ** 2)
    out = {}
    for gpu, count in (("H200", 1), ("A100-80GB", 1), ("A100-40GB", 1), ("A100-40GB", 2)):
        total = PUBLISHED[gpu]["bytes"]

        def plan_of(number: int, count: int = count, total: float = total) -> Any:
            text = next(p for p in PRIMES if p >= number)
            with mock.patch("torch.cuda.get_device_properties", lambda _: mock.Mock(total_memory=int(total))):
                return _calibrate_plan.foresee(phase, stream, windows, text, min(back, text), back_tokens,
                                               ["cuda:0", "cuda:1"][:count], rate)
        fits = [n for n in (64, 48, 32, 24, 16, 8, 4) if max(plan_of(n).cards.values()) <= total - CONTEXT_BYTES]
        whole = plan_of(64)
        out["%d x %s" % (count, gpu)] = {"card_bytes": list(whole.cards.values()),
                                         "tokens_that_fit": max(fits, default=0) * windows.longest}
    return out


def count(args: argparse.Namespace) -> None:
    import qconv
    from qconv import _calibrate_moments, _calibrate_run
    asked: list[Any] = []
    foresee = _calibrate_run.foresee

    def kept(*given: Any) -> Any:
        asked[:] = given
        return foresee(*given)
    setattr(_calibrate_run, "foresee", kept)
    setattr(_calibrate_run, "check_room", lambda plan: None)  # it is another machine that is to have it
    run = json.loads((RESULTS / "gpu-h200-run.json").read_text())
    read_rate = max(r["read_bytes_per_second"] for f in run["steps"]["convert"]["figures"].values() for r in f["runs"]
                    if r["device"] == "cuda")
    args.work.mkdir(parents=True, exist_ok=True)
    text = args.work / "text.ids"
    make_text(text, 131072, 2048, LLAMA_8B["vocabulary"])
    found: dict[str, Any] = {"rates": rates(), "published": PUBLISHED, "read_bytes_per_second": read_rate,
                             "host_copy_bytes_per_second": HOST_COPY, "models": {}}
    for name, shape in (("8B", LLAMA_8B), ("70B", LLAMA_70B)):
        folder = args.work / name
        make_model(folder, shape, holes=True)
        ahead = qconv.calibrate(folder, to="nf4", text=text, device="cpu", dry_run=True).json["calibration_ahead"]
        own = shape["layers"] * (solver(shape)["factor"] + solver(shape)["weights"])
        if abs(own / ahead["parts"]["solver"]["operations"] - 1) > 0.01:
            sys.exit("%s: %g operations of the solver here, %g in the program" % (
                name, own, ahead["parts"]["solver"]["operations"]))
        outputs = [rows for _, each in sets_of(shape) for rows in each]
        found["models"][name] = {
            "operations": {**{k: v["operations"] for k, v in ahead["parts"].items()}, "all": ahead["operations"]},
            "tokens": ahead["tokens"], "gradient_tokens": ahead["gradient_tokens"], "windows": ahead["windows"],
            "store_bytes": ahead["store"],
            "gradients_bytes": 4 * shape["layers"] * sum(-(-r // BLOCK) * min(r, BLOCK) ** 2 for r in outputs),
            "cards": cards(asked, shape),
            "seconds": {gpu: {products: {k: round(v, 1) for k, v in seconds_on(
                rate, ahead, shape, products, _calibrate_moments.ROWS, read_rate).items()} for products in (FLOAT, TF32)}
                for gpu, rate in rates().items()}}
    if args.json:
        kept_json = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json_text(dict(kept_json, counted=found)) + "\n")
    print(json_text(found))


# ---- the page ----


def hours(seconds: float) -> str:
    return "%.1f min" % (seconds / 60) if seconds < 5400 else "%.1f h" % (seconds / 3600)


def page(results: dict[str, Any]) -> str:
    """What docs/theory/calibration.md has of the results."""
    lines: list[str] = []
    for m in results.get("measured", []):
        layers = m["shape"]["layers"]
        lines += ["Measured: %d layer%s, %d wide, %d inside, %d tokens in windows of %d, all of them backwards, on %d cores with a "
                  "load of %.0f:" % (
                      layers, "s" * (layers > 1), m["shape"]["hidden"], m["shape"]["inside"], m["tokens"], m["context"],
                      m["processors"], m["load_average"]), "",
                  table(("part", "seconds a layer", "of processors a layer"),
                        [(n, "%.1f" % (v["wall_s"] / layers), "%.1f" % ((v["python_cpu_s"] + v["program_cpu_s"]) / layers))
                         for n, v in m["parts"].items() if n != "other"]), ""]
    counted = results["counted"]
    models = counted["models"]
    names = list(next(iter(models.values()))["operations"])
    lines += ["Counted, operations:", "", table(("part", *models), [
        (n, *("%.3g" % m["operations"][n] for m in models.values())) for n in names]), ""]
    lines += ["Counted, time:", ""]
    for name, m in models.items():
        parts = list(m["seconds"]["H200"][TF32])
        rows = [(p, *(hours(m["seconds"][g][TF32][p]) for g in m["seconds"])) for p in parts]
        rows.append(("all", *(hours(sum(m["seconds"][g][TF32].values())) for g in m["seconds"])))
        rows.append(("all, were products in float", *(hours(sum(m["seconds"][g][FLOAT].values())) for g in m["seconds"])))
        lines += [table((name, *m["seconds"]), rows), ""]
    lines += ["Counted, memory of cards:", "", table(("", *("%s: GB, tokens that fit" % n for n in models)), [
        (gpu, *("%s, %s" % (" and ".join("%.0f" % (b / 1e9) for b in m["cards"][gpu]["card_bytes"]),
                            format(m["cards"][gpu]["tokens_that_fit"], ",")) for m in models.values()))
        for gpu in next(iter(models.values()))["cards"]]), ""]
    return "\n".join(lines).rstrip() + "\n"


def write_page(args: argparse.Namespace) -> None:
    path = ROOT / "docs" / "theory" / "calibration.md"
    begin, end = "<!-- scale: begin -->\n", "<!-- scale: end -->"
    before, _, rest = path.read_text().partition(begin)
    path.write_text(before + begin + page(json.loads(args.json.read_text())) + end + rest.partition(end)[2])


def main() -> None:
    if sys.argv[1:2] == ["clocked"]:
        return clocked(sys.argv[2], sys.argv[3:])
    argv, _, options = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("--work", type=Path, required=True)
    one.add_argument("--json", type=Path)
    for name, value in (("layers", 2), ("tokens", 4096), ("context", 256), ("vocabulary", 4096), ("width", 1)):
        one.add_argument("--" + name, type=int, default=value)
    two = commands.add_parser("count")
    two.add_argument("--work", type=Path, required=True)
    two.add_argument("--json", type=Path)
    three = commands.add_parser("table")
    three.add_argument("--json", type=Path, default=RESULTS / "calibrate_scale.json")
    args = parser.parse_args(argv.split())
    args.options = options.split()
    {"measure": measure, "count": count, "table": write_page}[args.command](args)


if __name__ == "__main__":
    main()
