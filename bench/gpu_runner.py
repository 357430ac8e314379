"""What the steps of gpu_run.sh run with: time limits, logs, results that survive a kill, and a search
for what the machine has. Standard library only."""
import glob
import io
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SKIPPED, OUT_OF_TIME, FOUND, INTERRUPTED = 77, 124, 99, 130
LOG_BYTES = 1 << 20     # of each log, its end
FILE_BYTES = 16 << 20   # of each result
LOGS_EVERY = 5          # seconds, within a step
SOURCES = ("CHANGELOG.md", "CMakeLists.txt", "CMakePresets.json", "LICENSE", "README.md", "base",
           "bench", "cmake", "convert", "docs", "formats", "kernels", "quant", "tests")


class Skip(Exception):
    """Why a step is left out."""


# ---- files -----------------------------------------------------------------------------------------

def replace(path, data):
    """Write a file. Whenever the program is killed, either the old file is there or the new one."""
    with open(path + ".part", "wb") as f:
        f.write(data)
    os.replace(path + ".part", path)


def json_bytes(value):
    return (json.dumps(value, indent=1) + "\n").encode()


def end_of(path, most):
    """The last bytes of a file, with a first line that says how many are missing."""
    with open(path, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - most))
        data = f.read(most)
    return data if size <= most else b"[%d bytes before this left out]\n" % (size - most) + data


def last_line(path):
    """What a program said last, or None."""
    lines = end_of(path, 2000).decode(errors="replace").split("\n")
    said = [line for line in lines if line.strip() and not line.startswith(("$ ", "[exit code"))]
    return said[-1].strip()[:300] if said else None


def same_file(a, b):
    if not os.path.isfile(a) or not os.path.isfile(b) or os.path.getsize(a) != os.path.getsize(b):
        return False
    with open(a, "rb") as f, open(b, "rb") as g:
        while True:
            x, y = f.read(1 << 20), g.read(1 << 20)
            if x != y:
                return False
            if not x:
                return True


def copy_sources(root, to):
    """A copy of the tree in which only a file that has changed gets a new time. A machine may be
    given the whole tree anew for each call, and building from this copy does not build it again."""
    wanted = set()
    for name in SOURCES:
        top = os.path.join(root, name)
        walk = os.walk(top) if os.path.isdir(top) else [(root, [], [name])]
        for folder, folders, names in walk:
            folders[:] = [f for f in folders if f != "__pycache__"]
            for n in names:
                source = os.path.join(folder, n)
                path = os.path.join(to, os.path.relpath(source, root))
                wanted.add(path)
                if os.path.isfile(source) and not same_file(source, path):
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    shutil.copyfile(source, path)
                    shutil.copymode(source, path)
    for folder, _, names in os.walk(to):
        for n in names:
            if os.path.join(folder, n) not in wanted:
                os.remove(os.path.join(folder, n))


# ---- processes -------------------------------------------------------------------------------------

def descendants(pid):
    """All processes below one."""
    below = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as f:
                said = f.read()
        except OSError:
            continue
        below.setdefault(int(said.rpartition(")")[2].split()[1]), []).append(int(said.split()[0]))
    found, todo = [], [pid]
    while todo:
        children = below.get(todo.pop(), [])
        found += children
        todo += children
    return found


def kill_below(pid, itself):
    """Kill what a process has started, and perhaps the process itself. What is started here stays in
    our own group, so that killing the group leaves nothing behind that would go on using the GPU."""
    pids = [pid] if itself else []
    if itself:
        os.kill(pid, signal.SIGSTOP)  # it starts nothing more
    for p in pids + descendants(pid):
        try:
            os.kill(p, signal.SIGKILL)
        except ProcessLookupError:
            pass


def ask(command):
    """What a command says, or None."""
    try:
        r = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                           stdin=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return r.stdout.strip() if r.returncode == 0 else None


# ---- what the machine has --------------------------------------------------------------------------

def find_gpus():
    said = ask(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap,pci.bus_id",
                "--format=csv,noheader"])
    found = []
    for line in (said or "").splitlines():
        facts = [f.strip() for f in line.split(",")]
        if len(facts) == 5:
            found.append(dict(zip(("name", "driver", "memory", "compute_capability", "pci"), facts)))
    return found


def cuda_tool(name):
    """Where a program of the toolkit is, or None. It is looked for on the path, beside nvcc and in the
    usual folder."""
    folders = [os.environ.get("PATH", "")]
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc:
        folders.append(os.path.dirname(os.path.realpath(nvcc)))
    folders.append("/usr/local/cuda/bin")
    return shutil.which(name, path=os.pathsep.join(folders))


def nvcc_says():
    """nvcc's own line about its version, or None."""
    said = ask([cuda_tool("nvcc") or "nvcc", "--version"]) or ""
    return next((s.strip() for s in said.splitlines() if "release" in s), None)


def generator():
    """CMake's options for the first Ninja that runs, else for Make. A ninja on the path may be the
    script of a Python package that is no longer there."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        ninja = os.path.join(folder, "ninja")
        if os.access(ninja, os.X_OK) and ask([ninja, "--version"]):
            return ["-G", "Ninja", "-DCMAKE_MAKE_PROGRAM=" + ninja]
    return ["-G", "Unix Makefiles"]


def library_folders():
    """Where CUDA's libraries may be: in toolkits, then in the wheels of this Python."""
    nvcc = cuda_tool("nvcc")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"),
             nvcc and os.path.dirname(os.path.dirname(os.path.realpath(nvcc))), "/usr/local/cuda"]
    folders = [os.path.join(r, name) for r in roots if r
               for name in ("lib64", "targets/%s-linux/lib" % os.uname().machine)]
    sites = [p for p in sys.path if p] + site.getsitepackages() + [site.getusersitepackages()]
    for s in dict.fromkeys(sites):
        folders += sorted(glob.glob(os.path.join(s, "nvidia", "*", "lib")))
    return [f for f in folders if os.path.isdir(f)]


def find_libraries(folders, toolkit):
    """{"libcublas": path, ...}: for each library the first file of the toolkit's version, else the
    newest."""
    wanted = {"libcublas": toolkit, "libcusolver": 12 if toolkit >= 13 else 11, "libcudart": toolkit}
    found = {}
    for name, own in wanted.items():
        files = []
        for folder in folders:
            for path in glob.glob(os.path.join(folder, name + ".so.*")):
                version = re.fullmatch(r"\d+", path.rpartition(".so.")[2])
                if version:
                    files.append((int(version.group()), path))
        if files:
            exact = [path for version, path in files if version == own]
            found[name] = exact[0] if exact else max(files, key=lambda f: f[0])[1]
    return found


def own_environment():
    """For qconv, its tests and its benchmarks alone: where CUDA's libraries and the carried ones are.
    A tool such as nvidia-smi must not see them."""
    release = re.search(r"release (\d+)", nvcc_says() or "")
    folders = library_folders()
    found = find_libraries(folders, int(release.group(1)) if release else 0)
    own = {variable: found[name] for variable, name in
           (("QCONV_LIBCUBLAS", "libcublas"), ("QCONV_LIBCUSOLVER", "libcusolver"))
           if name in found and not os.environ.get(variable)}
    paths = [os.environ.get("QC_RUN_LIBRARIES")] + [os.path.dirname(p) for p in found.values()]
    for folder in folders:  # a wheel's library needs those of the wheels beside it
        wheels = os.path.dirname(os.path.dirname(folder))
        if os.path.basename(wheels) == "nvidia" and any(p.startswith(wheels + os.sep)
                                                        for p in found.values()):
            paths.append(folder)
    if any(paths):
        paths.append(os.environ.get("LD_LIBRARY_PATH"))
        own["LD_LIBRARY_PATH"] = os.pathsep.join(dict.fromkeys(p for p in paths if p))
    return own


def cpu_name():
    try:
        with open("/proc/cpuinfo") as f:
            return next(s.split(":", 1)[1].strip() for s in f if s.startswith("model name"))
    except (OSError, StopIteration):
        return os.uname().machine


# ---- steps and what they leave ---------------------------------------------------------------------

class Step:
    """One step while it runs: its limit, its log, and its row of summary.json."""

    def __init__(self, run, name, limit):
        self.run, self.name = run, name
        self.end = time.monotonic() + limit
        self.row = {"step": name}
        self.log_path = os.path.join(run.logs, name + ".log")
        self.file = open(self.log_path, "ab")

    def left(self):
        return self.end - time.monotonic()

    def say(self, text):
        self.file.write(text.encode() + b"\n")
        self.file.flush()

    def find(self, **figures):
        """Figures for the summary."""
        with self.run.lock:
            self.row.setdefault("figures", {}).update(figures)
            self.run.save_summary()

    def part(self, name, rc, seconds, **more):
        """Write down that a part of the step has ended."""
        with self.run.lock:
            self.row.setdefault("parts", []).append(
                dict({"name": name, "rc": rc, "seconds": round(seconds, 1)}, **more))
            self.run.save_summary()
            self.run.save_logs(LOGS_EVERY)

    def call(self, command, limit=None, own=False, environment=None, stdout=None, log=None):
        """Exit code of a command, 124 if it had to be killed. It prints to the step's log or, where
        several run at a time, to one that `log` names; its standard output goes to the file `stdout`
        if there is one. `own`: it is a program of ours."""
        limit = min(limit or self.left(), self.left())
        if self.run.stopped:
            raise Skip("interrupted")
        path = os.path.join(self.run.logs, "%s-%s.log" % (self.name, log)) if log else self.log_path
        environment = dict(self.run.own if own else {}, **(environment or {}))
        with open(path, "ab") as out, open(stdout or os.devnull, "wb") as other:
            out.write(("$ %s\n" % " ".join(command)).encode())
            out.flush()
            p = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL,
                                 stdout=other if stdout else out, stderr=out,
                                 env=dict(os.environ, **environment))
            try:
                code = p.wait(timeout=max(limit, 0.1))
            except subprocess.TimeoutExpired:
                kill_below(p.pid, True)
                code = OUT_OF_TIME
                try:
                    p.wait(timeout=5)
                except subprocess.TimeoutExpired:  # it waits for a GPU that does not answer
                    out.write(b"[it could not be killed]\n")
            out.write(b"[exit code %d]\n" % code)
        return code

    def program(self, name, *arguments, **more):
        """Call a program of the build."""
        return self.call([self.run.built(name)] + list(arguments), own=True, **more)

    def under(self, tool, command):
        """A command that runs a program of ours under a tool, which does not see our libraries."""
        return tool + ["env"] + ["%s=%s" % v for v in sorted(self.run.own.items())] + command


class Run:
    """A call: where everything is, and the files that it leaves."""

    def __init__(self, word, results, seconds):
        self.word = word
        self.begin = time.monotonic() - float(os.environ.get("QC_RUN_SPENT") or 0)
        self.seconds = float(os.environ.get("QC_RUN_SECONDS") or seconds)
        self.results = os.path.abspath(results)
        self.work = os.path.abspath(os.environ["QC_RUN_WORK"])
        self.build = os.path.abspath(os.environ.get("QC_RUN_BUILD") or os.path.join(self.work, "build"))
        self.shim = bool(os.environ.get("QC_RUN_SHIM"))
        self.logs = os.path.join(self.work, "logs")
        self.steps, self.now, self.stopped, self.complete = [], None, False, False
        self.lock = threading.RLock()
        self.logs_saved = 0
        shutil.rmtree(self.logs, ignore_errors=True)
        os.makedirs(self.logs)
        os.makedirs(self.results, exist_ok=True)
        self.gpu = find_gpus()
        self.own = own_environment()
        self.facts = {
            "call": word, "gpus": self.gpu, "cpu": cpu_name(), "cpus": os.cpu_count(),
            "machine": os.uname().machine, "nvcc": nvcc_says(),
            "commit": os.environ.get("QCONV_COMMIT") or
            ask(["git", "-C", ROOT, "rev-parse", "HEAD"]) or "unknown",
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}

    def left(self):
        return self.seconds - (time.monotonic() - self.begin)

    def into(self, name):
        return os.path.join(self.results, name)

    def at(self, *names):
        return os.path.join(self.work, *names)

    def built(self, name):
        """The path of a program of the build; on the CPU shim they have names of their own."""
        if self.shim:
            name = {"qconv": "qconv_shim", "gpu_graph": "shim_graph", "bench_ceilings":
                    "bench_ceilings_shim", "bench_gpu_load": "bench_gpu_load_shim", "bench_matmul": "bench_matmul_shim"}.get(name, name)
        path = os.path.join(self.build, name)
        if not os.path.exists(path):
            raise Skip("%s was not built" % name)
        return path

    def counts(self):
        failed = sum(s["rc"] not in (0, SKIPPED) for s in self.steps)
        skipped = sum(s["rc"] == SKIPPED for s in self.steps)
        return {"passed": len(self.steps) - failed - skipped, "failed": failed, "left_out": skipped}

    def save_summary(self):
        with self.lock:
            summary = dict(self.facts, seconds=round(time.monotonic() - self.begin, 1),
                           complete=self.complete, running=self.now.name if self.now else None,
                           steps=self.steps, **self.counts())
            if self.now and len(self.now.row) > 1:
                summary["so_far"] = self.now.row
            replace(self.into("summary.json"), json_bytes(summary))

    def save_logs(self, every=0):
        with self.lock:
            if every and time.monotonic() - self.logs_saved < every:
                return
            most = LOG_BYTES
            while True:
                packed = io.BytesIO()
                with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
                    for name in sorted(os.listdir(self.logs)):
                        data = end_of(os.path.join(self.logs, name), most)
                        entry = tarfile.TarInfo("logs/" + name)
                        entry.size, entry.mtime = len(data), int(time.time())
                        tar.addfile(entry, io.BytesIO(data))
                if packed.tell() <= FILE_BYTES:
                    break
                most //= 2
            replace(self.into("logs.tar.gz"), packed.getvalue())
            self.logs_saved = time.monotonic()

    def step(self, name, limit, do):
        """Run do(step), which returns an exit code, and write down what became of it."""
        limit = min(limit, self.left())
        step = self.now = Step(self, name, limit)
        begin, why = time.monotonic(), None
        self.save_summary()
        try:
            if not self.gpu and not self.shim:
                raise Skip("there is no NVIDIA GPU")
            if limit < 3:
                raise Skip("there is no time left")
            code = do(step)
        except Skip as e:
            code, why = SKIPPED, str(e)
        except KeyboardInterrupt:
            code, why = INTERRUPTED, "interrupted"
        except Exception as e:  # the other steps go on
            code, why = 1, "%s: %s" % (type(e).__name__, e)
        for path in glob.glob(self.into("*")):
            if os.path.getsize(path) > FILE_BYTES:
                why = "%s is too large to keep: %d bytes" % (os.path.basename(path),
                                                             os.path.getsize(path))
                os.remove(path)
        if why:
            step.say(why)
        elif code != 0:
            why = last_line(step.log_path)
        step.file.close()
        took = time.monotonic() - begin
        with self.lock:
            step.row.update({"rc": code, "seconds": round(took, 1)}, **({"why": why} if why else {}))
            self.steps.append(step.row)
            self.now = None
            self.save_logs()
            self.save_summary()
        print("%-12s rc %3d  %6.1f s%s" % (name, code, took, "  " + why if why else ""), flush=True)
        parts = [p["rc"] for p in step.row.get("parts", [])]
        if len(parts) > 1:
            print("%12s parts: %d passed, %d failed, %d left out"
                  % ("", parts.count(0), len(parts) - parts.count(0) - parts.count(SKIPPED),
                     parts.count(SKIPPED)), flush=True)
        return code
