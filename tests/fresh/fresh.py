#!/usr/bin/env python3
"""What a machine sees that has never seen qconv: a minimal Debian by mmdebstrap, and in it

  docker      the lines of the Dockerfile, one after the other, and then what its entry point does
  bootstrap   ./bootstrap.sh run, the same again, ./bootstrap.sh test

usage: fresh.py [docker] [bootstrap]      both by default; must be root, takes the network and 3 GB of disk

$QCONV_FRESH_DIR is a folder for it (default: a temporary one); the minimal Debian is kept there as
debian.tar and taken again. $QCONV_FRESH_MIRROR is Debian's mirror. $QCONV_FRESH_CA names certificates
that the network needs. Exit: 0, 1 (something failed) or 77 (it cannot be run here, with the reason).
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIRROR = os.environ.get("QCONV_FRESH_MIRROR", "http://deb.debian.org/debian")
CA = os.environ.get("QCONV_FRESH_CA")
# A clean environment: nothing of this machine but what its network needs.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root",
               "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
# In namespaces of its own, so that nothing stays mounted and no process is left.
INSIDE = """mount -t proc proc "$1/proc" && mount --rbind /sys "$1/sys" && mount --rbind /dev "$1/dev" &&
    cd "$1" && exec chroot . /bin/sh -ec "cd '$2'; $3" """


def skip(why):
    print("fresh: SKIPPED: " + why)
    sys.exit(77)


def source_files():
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"], check=True,
                           stdout=subprocess.PIPE).stdout.decode().split("\0")
    return [n for n in names if n and (ROOT / n).is_file()]


class Machine:
    """A fresh Debian in a folder."""

    def __init__(self, folder, name):
        self.root, self.environment, self.folder = folder / name, dict(ENVIRONMENT), "/"
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        subprocess.run(["tar", "-xf", folder / "debian.tar", "-C", self.root], check=True)
        shutil.copyfile("/etc/resolv.conf", self.root / "etc/resolv.conf")
        if CA:
            shutil.copyfile(CA, self.root / "etc/ca.crt")
            self.environment["PIP_CERT"] = "/etc/ca.crt"

    def put_source(self, to):
        for name in source_files():
            (self.root / to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / to / name, follow_symlinks=False)

    def run(self, command):
        started = time.monotonic()
        done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", INSIDE, "sh",
                               self.root, self.folder, command], env=self.environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        words = " ".join(command.split())
        print("fresh: %s: %.0f s: %s" % (self.root.name, time.monotonic() - started, words[:150]), flush=True)
        if done.returncode:
            print(done.stdout[-6000:])
            print("fresh: FAILED: exit %d: %s" % (done.returncode, words))
            sys.exit(1)
        return done.stdout


# ---- the Dockerfile ----


def instructions(text):
    """(word, rest) of each instruction; lines that end in a backslash go on."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip():
            word, rest = line.split(None, 1)
            yield word, rest.strip()


def run_dockerfile(folder):
    """Runs the stages, each on a machine of its own, as docker build without arguments does. Returns the
    last machine and its entry point."""
    machines, machine, entry = {}, None, None
    for word, rest in instructions((ROOT / "Dockerfile").read_text()):
        if word == "ARG" and machine:
            name, value = rest.split("=")
            machine.environment[name] = value
        elif word == "FROM":
            name = rest.split(" AS ")[1] if " AS " in rest else "last"
            machine = machines[name] = Machine(folder, name)
        elif word == "ENV":
            name, value = rest.split("=", 1)
            machine.environment[name] = value
        elif word == "COPY" and rest.startswith("--from="):
            other, source, to = re.fullmatch(r"--from=(\w+) /(\S+) /(\S+)", rest).groups()
            shutil.copytree(machines[other].root / source, machine.root / to)
        elif word == "COPY":
            machine.put_source(re.fullmatch(r"\. /(\S+)", rest).group(1))
        elif word == "RUN":
            machine.run(rest)
        elif word == "ENTRYPOINT":
            entry = shlex.join(json.loads(rest))
        elif word != "ARG":
            raise SystemExit("fresh: %s is not known here" % word)
    return machine, entry


def docker(folder):
    machine, entry = run_dockerfile(folder)
    shutil.copytree(ROOT / "tests/data/kjv-llama/model", machine.root / "data/model")
    machine.folder = "/data"
    machine.run("! command -v gcc cc cmake")
    print(machine.run(entry + " --version").strip())
    print(machine.run(entry + " --to nf4 model out"))
    print(machine.run("python -W error -c 'import qconv; print(qconv.verify(\"out\", \"model\").quantized)'").strip())


def bootstrap(folder):
    machine = Machine(folder, "bootstrap")
    machine.put_source("source")
    machine.folder = "/source"
    for command in ["./bootstrap.sh run", "./bootstrap.sh run", "./bootstrap.sh test"]:
        print("\n".join(machine.run(command).splitlines()[-12:]))


def main():
    wanted = sys.argv[1:] or ["docker", "bootstrap"]
    if os.geteuid() != 0:
        skip("it must be root, because it makes a Debian and enters it")
    for program in ["mmdebstrap", "unshare", "git"]:
        if not shutil.which(program):
            skip(program + " is not installed")
    kept = os.environ.get("QCONV_FRESH_DIR")
    folder = Path(kept or tempfile.mkdtemp(prefix="qconv-fresh-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not (folder / "debian.tar").exists():
            made = subprocess.run(["mmdebstrap", "--quiet", "--mode=root", "--variant=apt", "bookworm",
                                   folder / "making.tar", MIRROR])
            if made.returncode:
                skip("mmdebstrap made no Debian (no network?)")
            os.rename(folder / "making.tar", folder / "debian.tar")
        for name in wanted:
            {"docker": docker, "bootstrap": bootstrap}[name](folder)
    finally:
        if not kept:
            shutil.rmtree(folder)
    print("fresh: passed: " + ", ".join(wanted))


if __name__ == "__main__":
    main()
