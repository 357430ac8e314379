"""Runs the interoperability checks in each environment and adds up the counts.

usage: stage.py --build BUILD_DIR --environment ENVIRONMENT_DIR [NAME...]

An environment is a set of package folders that goes before the virtual environment's own; NAME
picks some. Two run at a time, the long ones first, each on half of the processors and printed when it is
done. Environments with the same folders are forks of one Python (forks.py). Last line:
"interop: N passed, N failed, N skipped". Exit code 0, 1 (something failed) or 77 (nothing ran).
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = {
    "compressed-transformers5": (["transformers5"], "test_interop_compressed.py"),
    "transformers5": (["transformers5"], "test_interop_checkpoints.py"),
    "transformers4": (["transformers4"], "test_interop_checkpoints.py"),
    "zoo-transformers5": (["transformers5"], "test_interop_zoo.py"),
    "wheel": (["wheel"], "test_interop_wheel.py"),
    "vllm": (["transformers5"], "test_interop_vllm.py"),
    "zoo-transformers4": (["transformers4"], "test_interop_zoo.py"),
    "forms-transformers4": (["transformers4"], "test_interop_forms.py"),
    "forms-transformers5": (["transformers5"], "test_interop_forms.py"),
    "training": (["training", "transformers5"], "test_interop_training.py"),
    "quantizers-bitsandbytes50": (["transformers5"], "test_interop_quantizers.py"),
    "quantizers-bitsandbytes49": (["bitsandbytes49"], "test_interop_quantizers.py"),
    "placement-transformers5": (["transformers5"], "test_interop_placement.py"),
    "placement-transformers4": (["transformers4"], "test_interop_placement.py"),
    "auto-transformers5": (["transformers5"], "test_interop_auto.py"),
    "auto-transformers4": (["transformers4"], "test_interop_auto.py"),
    "next-transformers5": (["transformers5"], "test_interop_next_steps.py"),
    "next-transformers4": (["transformers4"], "test_interop_next_steps.py"),
    "against": (["transformers5"], "test_interop_against.py"),
    "from-torch": (["transformers5"], "test_interop_from_torch.py"),
    "files": (["transformers5"], "test_interop_files.py"),
    "diffusers": (["diffusers", "transformers5"], "test_interop_diffusers.py"),
    "caches-transformers5": (["transformers5"], "test_interop_caches.py"),
    "caches-transformers4": (["transformers4"], "test_interop_caches.py"),
    "packed": (["transformers5"], "test_interop_packed.py"),
    "compressed-transformers4": (["transformers4"], "test_interop_compressed.py"),
    "stream-transformers5": (["transformers5"], "test_interop_stream.py"),
    "stream-transformers4": (["transformers4"], "test_interop_stream.py"),
    "eval-transformers5": (["transformers5"], "test_interop_eval.py"),
    "eval-transformers4": (["transformers4"], "test_interop_eval.py"),
    "calibrate-transformers5": (["transformers5"], "test_interop_calibrate.py"),
    "calibrate-transformers4": (["transformers4"], "test_interop_calibrate.py"),
    "calibrate-plan": (["transformers5"], "test_interop_calibrate_plan.py"),
    "importance-transformers5": (["transformers5"], "test_interop_importance.py"),
    "importance-transformers4": (["transformers4"], "test_interop_importance.py"),
    "calibrate-types-transformers5": (["transformers5"], "test_interop_calibrate_types.py"),
    "calibrate-types-transformers4": (["transformers4"], "test_interop_calibrate_types.py"),
    "load-transformers5": (["transformers5"], "test_interop_load.py"),
    "load-transformers4": (["transformers4"], "test_interop_load.py"),
    "moe-transformers5": (["transformers5"], "test_interop_moe.py"),
    "moe-transformers4": (["transformers4"], "test_interop_moe.py"),
    "forged-transformers5": (["transformers5"], "test_interop_forged.py"),
    "forged-transformers4": (["transformers4"], "test_interop_forged.py"),
    "known-transformers5": (["transformers5"], "test_interop_known.py"),
    "known-transformers4": (["transformers4"], "test_interop_known.py"),
    "types": (["transformers5"], "test_interop_types.py"),
    "operators": (["transformers5"], "test_interop_operators.py"),
    "gpu-operators": (["transformers5"], "test_interop_gpu_operators.py"),
    "adapters": (["training", "transformers5"], "test_interop_adapters.py"),
    "lora": (["training", "transformers5"], "test_interop_lora.py"),
}
NOISE = re.compile(r"triton not found|gemm_4bit_forward|FutureWarning|torch\._check_is_size")


class Forks:
    """A Python that has imported the packages of some folders."""

    def __init__(self, folders, arguments):
        environment = dict(os.environ)
        environment |= {
            "PYTHONPATH": os.pathsep.join(str(arguments.environment / f) for f in folders),
            "QCONV_BUILD": str(arguments.build),
            "QCONV_VLLM_ENV": os.environ.get("QCONV_VLLM_ENV", str(arguments.environment / "vllm")),
            "HF_HUB_OFFLINE": "1",  # nothing is fetched while checking
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "KINETO_LOG_LEVEL": "99",  # torch's profiler is chatty
            "DS_ACCELERATOR": "cpu",  # deepspeed would look for a compiler otherwise
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",
            # Threads of two environments on the same processors would wait for each other.
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)),
        }
        self.process = subprocess.Popen([sys.executable, "forks.py"], cwd=HERE, text=True,
                                        env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def run(self, script, scratch):
        """(exit status, seconds of processors, what the script printed)"""
        log = Path(scratch, "log")
        print(script, scratch, log, file=self.process.stdin, flush=True)
        status, used = self.process.stdout.readline().split()
        return int(status), float(used), log.read_text(errors="replace")


IDLE = {}  # folders -> Forks that run nothing


def run(name, arguments):
    started = time.monotonic()
    folders, script = ENVIRONMENTS[name]
    idle = IDLE.setdefault(tuple(folders), [])
    forks = idle.pop() if idle else Forks(folders, arguments)
    with tempfile.TemporaryDirectory(prefix="qconv-interop-") as scratch:
        status, used, printed = forks.run(script, scratch)
    idle.append(forks)
    counts, lines = None, []
    for line in printed.splitlines():
        if m := re.match(r"counts: (\d+) (\d+) (\d+)$", line):
            counts = [int(n) for n in m.groups()]
        elif not NOISE.search(line):
            lines.append(line)
    if counts is None or (status != 0 and counts[1] == 0):
        counts = [0, 1, 0]  # it fell over before or after counting
    head = f"\n--- {name}"
    tail = "--- {}: {} passed, {} failed, {} skipped, {:.0f} s, of processors {:.0f} s".format(
        name, *counts, time.monotonic() - started, used)
    print("\n".join([head, *lines, tail]), flush=True)
    return counts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(ENVIRONMENTS)
    if unknown:
        parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    if not shutil.which("zstd"):
        print("interop: FAILED: the program zstd is missing")
        return 1
    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(lambda name: run(name, arguments), arguments.names or ENVIRONMENTS))
    total = [sum(column) for column in zip(*counts)]
    print("interop: {} passed, {} failed, {} skipped".format(*total))
    return 1 if total[1] else 0 if total[0] else 77


sys.exit(main())
