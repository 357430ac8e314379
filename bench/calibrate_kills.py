"""One calibration, killed at random moments, ends with the same bytes.

usage: PYTHON bench/calibrate_kills.py [--kills 20] [--seed 1] [--tokens 4096] [MODEL]
                                       [--json bench/results/calibrate_kills.json]

The command runs once undisturbed. Then it runs again and again in another folder. At a moment that is drawn from the
time the shortest run took (with a program, or for Python alone also some time before), Python, the program that it
started, or both are killed with SIGKILL, in turn, and the same command goes on. Whenever it comes to its end, all files
have to be those of the first run (qconv.json but for times), and it begins anew until there were enough kills. Exit
code 1 where they are not.
"""
import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result_page import json_text

ROOT = Path(__file__).resolve().parents[1]
TIMES = ("seconds", "started", "ended")
KINDS = ("python", "program", "both")


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def contents(out):
    """{name: bytes} of an output; qconv.json without times."""
    files = {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}
    files["qconv.json"] = without_times(json.loads(files["qconv.json"]))
    return files


def children(pid):
    """The processes that it started; /proc/PID/task/*/children is not everywhere."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def dead(pid):
    """Is there no such process, or only its end to be fetched?"""
    try:
        return Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def kill(python, kind):
    """Kills these, and waits until both are gone. Returns what was killed: there may be no program yet, or no more."""
    programs = children(python.pid)
    targets = ([python.pid] if kind != "program" or not programs else []) + (programs if kind != "python" else [])
    for pid in targets:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    python.wait()
    while not all(dead(pid) for pid in programs):
        time.sleep(0.05)
    return kind if programs else "python"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "tests/data/kjv-llama/model"))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")])), "OMP_NUM_THREADS": "1"}
    environment.setdefault("QCONV_PROGRAM", str(ROOT / "build/qconv"))
    environment.setdefault("QCONV_LIBRARY", str(ROOT / "build/libqconv.so"))
    work = Path(tempfile.mkdtemp(prefix="calibrate-kills-"))

    def start(out, errors=subprocess.DEVNULL):
        return subprocess.Popen(
            [sys.executable, "-B", "-m", "qconv", "calibrate", "--to=nf4", "--calibration-context=256", "--device=cpu",
             "--calibration-tokens=%d" % arguments.tokens, arguments.model, str(out)], env=environment,
            stdout=subprocess.DEVNULL, stderr=errors)
    draw = random.Random(arguments.seed)
    began = time.monotonic()
    undisturbed = start(work / "whole", None)
    while undisturbed.poll() is None and not children(undisturbed.pid):
        time.sleep(0.05)
    before = time.monotonic() - began  # torch is imported before there is a program
    if undisturbed.wait() != 0:
        sys.exit("the undisturbed run failed")
    seconds = time.monotonic() - began
    expected = contents(work / "whole")
    kills = {kind: 0 for kind in KINDS}
    ends = 0
    different = []
    out = work / "killed"
    while sum(kills.values()) < arguments.kills or len(list(work.iterdir())) > 1:
        killing = sum(kills.values()) < arguments.kills
        run = start(out, None if not killing else subprocess.DEVNULL)
        kind = KINDS[sum(kills.values()) % len(KINDS)]
        moment = draw.uniform(before / 2 if kind == "python" else before, seconds)
        began = time.monotonic()
        while run.poll() is None and (not killing or time.monotonic() < began + moment):
            time.sleep(0.01)
        if run.poll() is None:
            kind = kill(run, kind)
            kills[kind] += 1
            print("killed %s at %.1f s of %.1f" % (kind, moment, seconds), flush=True)
            continue
        if run.returncode != 0:
            sys.exit("a run that was not killed ended with %d" % run.returncode)
        ends += 1
        before *= min(seconds, time.monotonic() - began) / seconds
        seconds = min(seconds, time.monotonic() - began)
        found = contents(out)
        different += [name for name in {*expected, *found} if expected.get(name) != found.get(name)]
        print("end %d: %s" % (ends, ", ".join(different) or "the same bytes"), flush=True)
        for path in work.iterdir():
            if path.name != "whole":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(work)
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        command = "PYTHON bench/calibrate_kills.py --kills %d --seed %d --tokens %d" % (
            arguments.kills, arguments.seed, arguments.tokens)
        arguments.json.write_text(json_text({
            "bench": "calibrate_kills", "command": command, "commit": commit.stdout.strip(),
            "shortest_run_seconds": round(seconds, 1), "kills": kills, "ends": ends, "different": different}) + "\n")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
