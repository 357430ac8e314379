"""Lets PyPI's torch be imported without its CUDA libraries (3 GB that a CPU test never calls).

Run it with the virtual environment's python.

Every library that torch's own libraries need and that is not there is made with the C compiler: it
holds the symbols they want from it, each a function that returns 1. The dynamic linker is content,
and nothing on the CPU calls them. libcudart is small and is asked for the device count on import:
install the real one (nvidia-cuda-runtime).
"""
import os
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wanted(libraries, present):
    """{library: {version node or "": {symbol}}} of what is needed and not there."""
    missing, unversioned = {}, set()
    for library in libraries:
        for name in re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", str(library))):
            # libcuda is the driver: torch opens it by itself where there is one.
            if re.match(r"lib(cu|nv|nccl)", name) and name not in present | {"libcuda.so.1"}:
                missing.setdefault(name, {})
    for library in libraries:
        owner, file = {}, None
        for line in output("readelf", "-VW", str(library)).splitlines():
            if m := re.search(r"Version: .*File: (\S+)", line):
                file = m[1]
            elif (m := re.search(r"Name: (\S+) +Flags", line)) and file:
                owner[m[1]] = file
        for line in output("nm", "-D", "--undefined-only", str(library)).splitlines():
            symbol, _, node = line.split()[-1].replace("@@", "@").partition("@")
            if owner.get(node) in missing:
                missing[owner[node]].setdefault(node, set()).add(symbol)
            elif not node and not symbol.startswith("_"):
                unversioned.add(symbol)
    # A name without a version does not say whose it is, so every library without versions gets it.
    prefixes = ("cu", "nv", "nccl")
    for nodes in missing.values():
        if not nodes:
            nodes[""] = {s for s in unversioned if s.startswith(prefixes)}
    return missing


def make(path, nodes):
    symbols = sorted(set().union(*nodes.values()))
    source = ".text\n" + "".join(f".globl {s}\n.type {s}, %function\n{s}:\n" for s in symbols)
    source += "movl $1, %eax\n" if os.uname().machine == "x86_64" else "mov w0, #1\n"
    source += 'ret\n.section .note.GNU-stack,"",%progbits\n'
    with tempfile.NamedTemporaryFile("w", suffix=".map") as script:
        for node, names in sorted(nodes.items()):
            if node:
                script.write(f"{node} {{ global: {'; '.join(sorted(names))}; }};\n")
        script.flush()
        command = [os.environ.get("CC", "cc"), "-shared", "-nostdlib", f"-Wl,-soname,{path.name}"]
        if "" not in nodes:
            command.append(f"-Wl,--version-script,{script.name}")
        subprocess.run([*command, "-x", "assembler", "-", "-o", str(path)], input=source, text=True,
                       check=True)
    return len(symbols)


def main():
    site = Path(sysconfig.get_path("purelib"))
    libraries = sorted((site / "torch/lib").glob("*.so*"))
    present = {p.name for p in site.glob("nvidia/*/lib/*")} | {p.name for p in libraries}
    for name, nodes in sorted(wanted(libraries, present).items()):
        print(f"stub {name}: {make(site / 'torch/lib' / name, nodes)} symbols")


main()
