#!/usr/bin/env python3
"""Convert a model of any size end to end, from weights that are made up.

  bench_scale.py --work DIR [--model ID] [--shard-bytes N] [--punch auto|always|never]
                 [--json FILE] [-- OPTIONS OF qconv...]

`bench_model write` writes the checkpoint to DIR/model, qconv converts it into DIR/out, and every shard that it finishes is read back at once: its seek table must
cover the file, its frames must decompress with the right checksums (zstd -t) and their content must
be as long as planned. Where the disk is too small for the output (auto) the blocks of a shard that
was read back are given back: a hole, the size stays.

Recorded: peak memory of qconv (the kernel's figure), and when each shard was finished the wall and
processor seconds since the one before and memory, so that what grows shows; planned bytes against
written ones. Exit code 1 if anything differs.
"""
import argparse
import json
import os
import platform
import queue
import shutil
import statistics
import struct
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
STAGING = ".qconv-partial"
SKIPPABLE, SEEKABLE = 0x184D2A5E, 0x8F92EAB1
FOOTER = struct.Struct("<IBI")
SPARE_BYTES = 4 << 30


def seek_table(path):
    """(stored bytes of all frames, content bytes, frames) of a finished shard, or None."""
    size = os.path.getsize(path)
    if size < FOOTER.size:
        return None
    with open(path, "rb") as f:
        f.seek(size - FOOTER.size)
        frames, flags, magic = FOOTER.unpack(f.read(FOOTER.size))
        entry = 12 if flags & 0x80 else 8
        table = 8 + frames * entry + FOOTER.size
        if magic != SEEKABLE or table > size:
            return None
        f.seek(size - table)
        raw = f.read(table)
    if struct.unpack_from("<II", raw) != (SKIPPABLE, table - 8):
        return None
    stored = content = 0
    for i in range(frames):
        a, b = struct.unpack_from("<II", raw, 8 + i * entry)
        stored += a
        content += b
    return (stored, content, frames) if stored + table == size else None


def cpu_seconds(pid):
    with open("/proc/%d/stat" % pid) as f:
        words = f.read().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid):
    """Bytes now and at most, None once the process ended."""
    found = {}
    with open("/proc/%d/status" % pid) as f:
        for line in f:
            if line.startswith(("VmRSS:", "VmHWM:")):
                found[line[:5]] = int(line.split()[1]) << 10
    return found.get("VmRSS"), found.get("VmHWM")


class Watch:
    """Sees shards become whole, checks them, and gives their blocks back."""

    def __init__(self, out, shards, punch):
        self.out, self.shards, self.punch = out, shards, punch
        self.rows, self.faults = {}, []
        self.queue = queue.Queue()
        # A daemon, so that an error of the main thread ends the program.
        self.thread = threading.Thread(target=self.check_all, daemon=True)
        self.thread.start()

    def path_of(self, name):
        for folder in (os.path.join(self.out, STAGING), self.out):
            path = os.path.join(folder, name + ".zst")
            if os.path.exists(path):
                return path
        return None

    def look(self, pid, begin):
        for index, shard in enumerate(self.shards):
            if index in self.rows:
                continue
            path = self.path_of(shard["name"])
            found = None
            try:
                found = path and seek_table(path)
                size = path and os.path.getsize(path)
            except FileNotFoundError:  # moved to its place just now
                continue
            if not found:
                continue
            try:
                rss, peak = resident(pid)
                cpu = cpu_seconds(pid)
            except (FileNotFoundError, ProcessLookupError):
                rss = peak = cpu = None
            self.rows[index] = {"shard": index + 1, "at_s": round(time.monotonic() - begin, 2),
                                "cpu_at_s": cpu, "resident_bytes": rss, "peak_bytes": peak,
                                "frames": found[2], "file_bytes": size,
                                "content_bytes": found[1], "planned_bytes": shard["bytes"]}
            if found[1] != shard["bytes"]:
                self.faults.append("%s: %d bytes planned, %d written" %
                                   (shard["name"], shard["bytes"], found[1]))
            self.queue.put(index)

    def opened(self, name):
        """The shard, which may move to its place while it is looked for."""
        for _ in range(500):
            try:
                return open(self.path_of(name), "r+b")
            except (FileNotFoundError, TypeError):
                time.sleep(0.01)
        raise FileNotFoundError(name)

    def check_all(self):
        for index in iter(self.queue.get, None):
            # Its descriptor stays when the file moves.
            with self.opened(self.shards[index]["name"]) as f:
                r = subprocess.run(["nice", "zstd", "-q", "-t", "--no-progress"], stdin=f,
                                   stderr=subprocess.PIPE)
                if r.returncode != 0:
                    self.faults.append("%s: %s" % (f.name, r.stderr.decode(errors="replace")))
                if self.punch:
                    size = str(os.fstat(f.fileno()).st_size)
                    fd = "/proc/self/fd/%d" % f.fileno()
                    subprocess.run(["fallocate", "--punch-hole", "--offset", "0", "--length", size,
                                    fd], check=True, pass_fds=[f.fileno()])

    def finish(self):
        self.queue.put(None)
        self.thread.join()


def rates(rows, source_bytes):
    """Per shard in the order of finishing: seconds since the one before, and GB/s of source."""
    ordered = sorted(rows.values(), key=lambda r: r["at_s"])
    at, cpu_at = 0.0, 0.0
    for row in ordered:
        row["source_bytes"] = source_bytes[row["shard"] - 1]
        row["seconds"] = round(row["at_s"] - at, 2)
        at = row["at_s"]
        if row["cpu_at_s"] is not None:
            row["cpu_s"] = round(row["cpu_at_s"] - cpu_at, 2)
            cpu_at = row["cpu_at_s"]
            if row["cpu_s"] > 0:
                row["source_gb_per_cpu_s"] = round(row["source_bytes"] / 1e9 / row["cpu_s"], 3)
        if row["seconds"] > 0:
            row["source_gb_per_s"] = round(row["source_bytes"] / 1e9 / row["seconds"], 3)
    return ordered


def flatness(rows, key):
    """Median of the last quarter over that of the first, the first and last shards (which are
    embeddings and rests) left out."""
    values = [r[key] for r in rows[1:-1] if key in r]
    n = max(len(values) // 4, 1)
    if len(values) < 4:
        return None
    return round(statistics.median(values[-n:]) / statistics.median(values[:n]), 3)


def cpu_name():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")),
                    platform.processor())


def commit():
    return subprocess.run(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], text=True,
                          capture_output=True).stdout.strip()


def convert(args, options, model, out):
    plan = json.loads(subprocess.run([args.qconv, *options, "--dry-run", "--json", model, out],
                                     stdout=subprocess.PIPE,
                                     check=True).stdout)
    source = [0] * len(plan["shards"])
    for t in plan["tensors"]:
        source[t["shard"]] += t["bytes_before"]
    room = shutil.disk_usage(os.path.dirname(out)).free
    punch = args.punch == "always" or (args.punch == "auto" and
                                       plan["file_bytes"] + SPARE_BYTES > room)
    watch = Watch(out, plan["shards"], punch)
    begin = time.monotonic()
    report = open(os.path.join(args.work, "report.json"), "w+")
    child = subprocess.Popen([args.qconv, *options, "-q", "--json", model, out], stdout=report)
    done = 0
    while not done:
        time.sleep(0.2)
        watch.look(child.pid, begin)
        done, status, usage = os.wait4(child.pid, os.WNOHANG)
    seconds = time.monotonic() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    watch.look(child.pid, begin)
    watch.finish()
    if child.returncode != 0:
        watch.faults.append("qconv: exit code %d" % child.returncode)
    elif len(watch.rows) != len(plan["shards"]):
        watch.faults.append("%d of %d shards were seen" % (len(watch.rows), len(plan["shards"])))
    report.seek(0)
    said = json.load(report) if child.returncode == 0 else {}
    report.close()
    stored = sum(r["file_bytes"] for r in watch.rows.values())
    if said and said["bytes_stored"] != stored:
        watch.faults.append("qconv says %d bytes were stored, the files have %d" %
                            (said["bytes_stored"], stored))
    rows = rates(watch.rows, source)
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "source_bytes": plan["source_bytes"], "tensors": len(plan["tensors"]),
        "planned_bytes": plan["file_bytes"],
        "written_bytes": sum(r["content_bytes"] for r in rows), "stored_bytes": stored,
        "blocks_given_back": punch, "seconds": round(seconds, 1), "cpu_s": round(cpu, 1),
        "source_gb_per_s": round(plan["source_bytes"] / 1e9 / seconds, 3),
        "source_gb_per_cpu_s": round(plan["source_bytes"] / 1e9 / cpu, 3),
        "peak_bytes": usage.ru_maxrss << 10,
        "last_quarter_over_first": {k: flatness(rows, k) for k in
                                    ("source_gb_per_s", "source_gb_per_cpu_s")},
        "faults": watch.faults, "shards": rows,
    }


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--qconv", default=os.path.join(HERE, "..", "build", "qconv"))
    p.add_argument("--maker", default=os.path.join(HERE, "..", "build", "bench_model"))
    p.add_argument("--work", required=True)
    p.add_argument("--model", default="meta-llama/Llama-3.3-70B-Instruct")
    p.add_argument("--shard-bytes", type=int, default=5 * 10 ** 9)
    p.add_argument("--punch", choices=("auto", "always", "never"), default="auto")
    p.add_argument("--keep", action="store_true", help="leave the output")
    p.add_argument("--json", help="add the result to this file, in place of an earlier one of the "
                                  "same model and options")
    p.add_argument("options", nargs="*", default=[])
    args = p.parse_args()
    options = args.options or ["--to", "nf4"]
    args.qconv, args.maker = os.path.abspath(args.qconv), os.path.abspath(args.maker)
    model, out = os.path.join(args.work, "model"), os.path.join(args.work, "out")
    os.makedirs(model, exist_ok=True)
    try:
        subprocess.run([args.maker, "write", "--shard-bytes", str(args.shard_bytes), args.model, model],
                       check=True)
        result = convert(args, options, model, out)
    finally:
        shutil.rmtree(model, ignore_errors=True)
        if not args.keep:
            shutil.rmtree(out, ignore_errors=True)
    name = os.path.basename(os.path.dirname(args.model) if args.model.endswith("config.json")
                            else args.model)
    result = {"model": name, "options": options, "shard_bytes": args.shard_bytes,
              "commit": commit(), "cpu": cpu_name(),
              "processors": len(os.sched_getaffinity(0)), **result}
    short = {k: v for k, v in result.items() if k != "shards"}
    print(json.dumps(short, indent=1))
    if args.json:
        runs = []
        if os.path.exists(args.json):
            with open(args.json) as f:
                runs = json.load(f)["runs"]
        runs = [r for r in runs if (r["model"], r["options"]) != (name, options)] + [result]
        with open(args.json, "w") as f:
            json.dump({"command": "bench/bench_scale.py --work DIR --model ID", "runs": runs}, f,
                      indent=1)
            f.write("\n")
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
