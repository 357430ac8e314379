#!/usr/bin/env python3
"""What calibrating with one kind of text does on others, and what a share of the bundled text mends.

    calibration_texts.py make FOLDER [--packages FOLDER] [--stories TOKENIZER.json]
    calibration_texts.py measure MODEL TEXTS OUT.json --calibrate COMMAND --search COMMAND [OPTION]...
    calibration_texts.py table OUT.json

`make` writes texts to calibrate and to judge with: from Debian packages, the licences and Python of
this system, tests/data and generators with fixed seeds. With the tokenizer of tinystories-656k, the stories
of tests/accuracy judge, too. For that model itself tinystories_calibration.ids and tinystories.ids of
tests/accuracy were put beside them as calibrate-stories.ids and judge-stories.ids.

`measure` quantizes MODEL, a Llama, with each `calibrate-*` of the folder TEXTS and judges each on every
`judge-*`: mean KL divergence from MODEL over that of the search. COMMAND has {model}, {out}, {mix} and {text},
which is a file of token ids, one window a line. Beside each text stand the relative rank that the program finds,
the share that it mixes in by itself (`auto`), and what it says of its own windows of the bundled text. Forward
passes are llama_numpy's, which reads outputs that are not compressed. What OUT.json has already is not measured
again. As in bench/results/calibration_mix.json, with --judge-tokens 4096:

    --search 'qconv {model} {out} --to nf4 --scale search --compress none'
    --calibrate 'python -m qconv calibrate {model} {out} --to nf4 --text {text} --mix {mix} --compress none
                 --calibration-context 256 --calibration-tokens 16384 --quiet'

bench/results/calibration_texts.json is of the C program that still read texts, where this script mixed them and
took the ranks: more kinds of texts, and shares from 0 to 0.75.
"""
from __future__ import annotations

import argparse
import base64
import hashlib
import json
import lzma
import random
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Iterator

import numpy as np

import llama_numpy as lm
from result_page import json_text, table as markdown

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "tools"))

BUNDLED = ROOT / "python" / "qconv" / "calibration_text.xz"
KJV = ROOT / "tests" / "data" / "kjv-llama"
PACKAGES = ("r-cran-janeaustenr", "fortunes-de", "fortunes-it", "perl-modules-5.36")
BYTES = 65536  # of a text: 16,384 tokens and more, whatever the tokenizer
LICENCES = Path("/usr/share/common-licenses")
CONTEXT = 256


def unpack(folder: Path) -> dict[str, Path]:
    """Folder of each package's files; apt-get downloads what is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {}
    for name in PACKAGES:
        place = folder / "x" / name
        if not place.is_dir():
            if not list(folder.glob(name + "_*.deb")):
                subprocess.run(["apt-get", "download", "-qq", name], cwd=folder, check=True)
            place.mkdir(parents=True)
            subprocess.run(["dpkg", "-x", str(sorted(folder.glob(name + "_*.deb"))[-1]), str(place)], check=True)
        places[name] = place
    return places


def bundled_text(path: Path) -> str:
    return lzma.decompress(path.read_bytes()).decode()


def unseen(texts: list[str], bundled: str) -> str:
    """Paragraphs of which the bundled text has none, from the middle of each text."""
    known = set(" ".join(bundled.split()).split(". "))
    out = []
    for text in texts:
        text = text[len(text) // 2:]
        out.append("\n\n".join(p for p in text[:BYTES].split("\n\n")
                               if not any(s in known for s in " ".join(p.split()).split(". ") if len(s) > 30)))
    return "\n\n".join(out)


def fortunes(place: Path, language: str, names: tuple[str, ...]) -> str:
    folder = place / "usr/share/games/fortunes" / language
    texts = [(folder / n).read_bytes() for n in names]
    return "\n".join(t.decode("utf-8", "replace").replace("\n%\n", "\n\n") for t in texts)


def access_log(count: int) -> Iterator[str]:
    """Lines as a web server writes them."""
    r = random.Random(1)
    hosts = ["%d.%d.%d.%d" % tuple(r.randrange(1, 255) for _ in range(4)) for _ in range(40)]
    pages = ["/", "/index.html", "/favicon.ico", "/robots.txt", "/login", "/api/v1/items", "/static/app.js",
             "/static/site.css", "/images/logo.png", "/search?q=shoes&page=2"]
    agents = ["Mozilla/5.0 (X11; Linux x86_64; rv:109.0) Gecko/20100101 Firefox/115.0", "curl/7.88.1",
              "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0.0.0"]
    second = 0
    for _ in range(count):
        second += r.randrange(4)
        yield '%s - - [12/Mar/2024:%02d:%02d:%02d +0000] "%s %s HTTP/1.1" %d %d "-" "%s"' % (
            r.choice(hosts), second // 3600 % 24, second // 60 % 60, second % 60, r.choice(["GET"] * 6 + ["POST"]),
            r.choice(pages), r.choice([200] * 8 + [304, 404, 500]), r.randrange(200, 60000), r.choice(agents))


def system_log(count: int) -> Iterator[str]:
    """Lines as the services of a system write them."""
    r = random.Random(2)
    units = ["Daily apt download activities", "Rotate log files", "Network Time Synchronization",
             "User Manager for UID"]
    second = 0
    for _ in range(count):
        second += r.randrange(30)
        n = r.randrange(300, 32000)
        what = r.choice([
            "sshd[%d]: Failed password for invalid user admin from 10.%d.%d.7 port %d ssh2" % (
                n, n % 200, n % 77, n + 9000),
            "systemd[1]: Started %s." % r.choice(units), "systemd[1]: %s: Deactivated successfully." % r.choice(units),
            "kernel: [%d.%06d] eth0: link is up, 1000 Mbps, full duplex" % (second, n),
            "cron[%d]: (root) CMD (run-parts --report /etc/cron.hourly)" % n,
            "kernel: [%d.%06d] Out of memory: Killed process %d (java) total-vm:%dkB" % (second, n, n // 2, n * 211)])
        yield "Mar %2d %02d:%02d:%02d server %s" % (3 + second // 86400, second // 3600 % 24, second // 60 % 60,
                                                     second % 60, what)


def numbers(count: int) -> Iterator[str]:
    """Numbers with commas between them."""
    r = random.Random(3)
    return ("%d,%.3f,%.5f,%d,%s" % (i, r.gauss(20, 5), r.random(), r.randrange(10000), r.choice("ABC"))
            for i in range(count))


def passages(prose: str) -> dict[str, str]:
    """Texts of few words, of few characters, and of one passage again and again."""
    r = random.Random(5)
    fruit = ["apple", "pear", "plum", "cherry", "grape", "melon", "fig", "date", "lemon", "lime"]
    texts = {"repeat%d" % n: (prose[5000:5000 + n] + "\n\n") * (BYTES // n + 1) for n in (300, 1000)}
    texts["base64"] = base64.encodebytes(r.randbytes(BYTES)).decode()
    texts["digits"] = "".join(r.choice("0123456789") for _ in range(BYTES))
    texts["json"] = "\n".join(json.dumps({
        "id": i, "user": r.choice(fruit), "action": r.choice(["login", "logout", "view", "buy", "search"]),
        "price": round(r.random() * 100, 2), "tags": r.sample(fruit, 3), "ok": r.random() < 0.9})
        for i in range(900))
    texts["lists"] = "\n".join(" ".join(r.sample(fruit, 5)) for _ in range(3000))
    texts["upper"] = prose.upper()
    return texts


def make(folder: Path, packages: Path, bundled: Path, stories: Path | None) -> None:
    from calibration_text import austen
    at = unpack(packages)
    perl = at["perl-modules-5.36"] / "usr/share/perl/5.36.0"
    python = Path(sysconfig.get_path("stdlib"))
    story = (KJV / "heldout.txt").read_text()
    line = '10.0.0.7 - - [12/Mar/2024:06:25:24 +0000] "GET /index.html HTTP/1.1" 200 5120\n'

    def licences(*names: str) -> str:
        return "\n".join((LICENCES / n).read_text() for n in names)

    prose = unseen(austen(at["r-cran-janeaustenr"]), bundled_text(bundled))
    texts = {
        "calibrate-prose": prose,
        "calibrate-law": licences("GPL-3", "GFDL-1.3", "LGPL-2.1"),
        "calibrate-code": "\n".join((python / n).read_text() for n in ("argparse.py", "tarfile.py")),
        "calibrate-log": "\n".join(access_log(1000)),
        "calibrate-german": fortunes(at["fortunes-de"], "de", ("zitate",)),
        "calibrate-table": "\n".join(numbers(4000)),
        "calibrate-two": "ab" * (BYTES // 2),
        "calibrate-line": line * (BYTES // len(line) + 1),
        "calibrate-bible": story[:100000],
        "judge-bible": story[-70000:],
        "judge-law": licences("MPL-2.0", "Apache-2.0", "Artistic", "CC0-1.0"),
        "judge-code": "\n".join((perl / n).read_text() for n in ("Getopt/Long.pm", "File/Temp.pm")),
        "judge-log": "\n".join(system_log(1500)),
        "judge-italian": fortunes(at["fortunes-it"], "it", ("leggi",)),
    }
    texts.update(("calibrate-" + name, text) for name, text in passages(prose).items())
    if stories:
        import tokenizers
        coder = tokenizers.Tokenizer.from_file(str(stories))
        lines = (ROOT / "tests" / "accuracy" / "tinystories.ids").read_text().splitlines()
        texts["judge-stories"] = "\n\n".join(coder.decode([int(x) for x in line.split()]) for line in lines)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        data = text.encode()[:BYTES].decode(errors="ignore")
        (folder / (name + ".txt")).write_text(data)
        print("%-20s %6d bytes" % (name, len(data.encode())))


def spread(windows: np.ndarray, count: int) -> np.ndarray:
    """So many of the windows, at equal distances."""
    return windows[((np.arange(count) + 0.5) * len(windows) / max(1, count)).astype(int)]


class Tokens:
    """Windows of token ids of texts, [windows, CONTEXT] int64, of at most `most` tokens."""

    def __init__(self, model: Path, config: dict[str, Any]):
        self.coder = None
        if config["vocab_size"] != 256:
            import tokenizers
            self.coder = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))

    def windows(self, text: bytes, most: int, name: str = "") -> np.ndarray:
        if name.endswith(".ids"):
            lines = [[int(x) for x in line.split()] for line in text.decode().splitlines()]
            width = min(CONTEXT, min(len(x) for x in lines))
            ids = np.array([x[i:i + width] for x in lines for i in range(0, len(x) - width + 1, width)])
            return ids[:most // width]
        if self.coder:
            flat = np.array(self.coder.encode(text.decode(), add_special_tokens=False).ids)
        else:
            flat = np.frombuffer(text, np.uint8).astype(np.int64)
        cut = flat[:flat.size // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
        count = min(len(cut), most // CONTEXT)
        return spread(cut, count)


def write_ids(path: Path, windows: Any) -> None:
    path.write_text("".join(" ".join(map(str, w)) + "\n" for w in windows))


class Judge:
    """Mean KL divergence from the original over a text's windows."""

    def __init__(self, config: dict[str, Any], weights: dict[str, np.ndarray], windows: np.ndarray):
        self.config, self.windows = config, windows
        self.original = self.logs(weights)

    def logs(self, weights: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [lm.forward(self.config, weights, self.windows[i:i + 8]).astype(np.float32)
                for i in range(0, len(self.windows), 8)]

    def kl(self, weights: dict[str, np.ndarray]) -> float:
        parts = zip(self.original, self.logs(weights))
        total = sum(float((np.exp(p.astype(np.float64)) * (p.astype(np.float64) - q)).sum()) for p, q in parts)
        return total / self.windows.size


def quantize(command: str, model: Path, out: Path, text: Path | None, mix: str) -> tuple[dict[str, Any], Any]:
    """The weights that the command writes, dequantized, and what they were calibrated with."""
    if out.exists():
        shutil.rmtree(out)
    words = [w.format(model=model, out=out, text=text, mix=mix) for w in shlex.split(command)]
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit("calibration_texts: '%s' fails: %s" % (" ".join(words), done.stderr.strip()))
    return lm.read_weights(out), json.loads((out / "qconv.json").read_text())["options"].get("calibrate")


def digest(windows: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(w, "<u4").tobytes() for w in windows)).hexdigest()[:16]


def measure(args: argparse.Namespace) -> None:
    config = json.loads((args.model / "config.json").read_text())
    weights = lm.read_weights(args.model)
    weights.setdefault("model.embed_tokens.weight", weights.get("lm_head.weight"))
    cut = Tokens(args.model, config)
    scratch = Path(tempfile.mkdtemp(prefix="calibration-texts-"))

    def read(kind: str, most: int) -> dict[str, np.ndarray]:
        found = sorted(args.texts.glob(kind + "-*"))
        return {f.stem[len(kind) + 1:]: cut.windows(f.read_bytes(), most, f.name) for f in found}

    bundled = cut.windows(bundled_text(args.bundled).encode(), args.tokens)
    own = {"bundled": bundled, **read("calibrate", args.tokens)}
    judged = {k: Judge(config, weights, w) for k, w in read("judge", args.judge_tokens).items()}
    found, _ = quantize(args.search, args.model, scratch / "out", None, "0")
    search = {k: j.kl(found) for k, j in judged.items()}
    label = args.model.name if args.model.name != "model" else args.model.parent.name
    report: dict[str, Any] = {
        "context": CONTEXT, "tokens": args.tokens, "judge_tokens": args.judge_tokens, "search": search,
        "judged": {k: digest(j.windows) for k, j in judged.items()}, "texts": {}}
    result = json.loads(args.out.read_text()) if args.out.exists() else {"models": {}}
    before = result["models"].setdefault(label, report)
    if {**before, "texts": 0} != {**report, "texts": 0}:
        raise SystemExit("calibration_texts: %s has another measurement of %s; "
                         "remove it to measure anew" % (args.out, label))
    report = before
    for name, windows in own.items():
        if args.only and name not in args.only:
            continue
        row = report["texts"].setdefault(
            name, {"windows": len(windows), "digest": digest(windows), "shares": {}, "own": {}})
        if row["digest"] != digest(windows):
            raise SystemExit("calibration_texts: %s has another text %s" % (args.out, name))
        for mix in args.mixes.split(","):
            if mix in row["shares"] or mix == "0" and row.get("auto") == 0:
                continue
            write_ids(scratch / "text.ids", windows)
            found, said = quantize(args.calibrate, args.model, scratch / "out", scratch / "text.ids", mix)
            if mix == "auto":
                row["relative_rank"], row["auto"] = said["relative_rank"], said["mix"]
            row["shares"][mix] = {k: round(j.kl(found) / search[k], 4) for k, j in judged.items()}
            row["own"][mix] = round(said["judged_calibrated"] / said["judged_search"], 4)
            print(name, row["relative_rank"], mix, row["shares"][mix], row["own"][mix], flush=True)
            args.out.write_text(json_text(result) + "\n")
    shutil.rmtree(scratch)


def show(path: Path) -> None:
    """Prints a table for each model: the share of search's divergence on each text that judges, of each text and
    mixture; the largest of them in front, and what the program itself says."""
    for name, report in json.loads(path.read_text())["models"].items():
        judged = sorted(report["judged"])
        rows = []
        for text, row in sorted(report["texts"].items(), key=lambda item: -item[1]["relative_rank"]):
            for mix, cells in sorted(row["shares"].items(), key=lambda item: (item[0] == "auto", item[0])):
                shown = "%.2f, the rule's" % row["auto"] if mix == "auto" else mix
                rows.append([text, "%.2f" % row["relative_rank"], shown, "**%.2f**" % max(cells.values()),
                             "%.2f" % row["own"][mix] if "own" in row else "", *("%.3f" % cells[k] for k in judged)])
        print("%s\n\n%s\n" % (name, markdown(("text", "relative rank", "mix", "worst", "own", *judged), rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bundled", type=Path, default=BUNDLED, help="the bundled text, in xz")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("make")
    one.add_argument("folder", type=Path)
    one.add_argument("--packages", type=Path, help="where Debian packages are or come")
    one.add_argument("--stories", type=Path, help="the tokenizer.json of tinystories-656k")
    two = commands.add_parser("measure")
    two.add_argument("model", type=Path)
    two.add_argument("texts", type=Path)
    two.add_argument("out", type=Path)
    two.add_argument("--calibrate", required=True)
    two.add_argument("--search", required=True)
    two.add_argument("--mixes", default="auto,0", help="the first is auto (default: auto,0)")
    two.add_argument("--tokens", type=int, default=16384)
    two.add_argument("--judge-tokens", type=int, default=8192)
    two.add_argument("--only", nargs="*", help="these texts only")
    three = commands.add_parser("table")
    three.add_argument("result", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        show(args.result)
    elif args.command == "make":
        make(args.folder, args.packages or args.folder / "packages", args.bundled, args.stories)
    else:
        measure(args)


if __name__ == "__main__":
    main()
