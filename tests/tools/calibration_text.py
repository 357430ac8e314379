#!/usr/bin/env python3
"""Makes python/qconv/calibration_text.xz, the text that qconv calibrates with by default.

usage: calibration_text.py FOLDER OUT.xz [SENTENCES]

SENTENCES (bench/sentences.txt) gets sentences of the same books and manuals that the text does not
have, one a line, for measuring embeddings.

Every source is in the public domain, or was written for this file (calibration_own.txt beside this
script, under the project's licence); docs/calibration.md lists them. They come from Debian
packages, which apt-get downloads into FOLDER if they are not there yet. Each source is cut at
paragraphs into pieces of a few thousand characters, some of them are taken, at equal distances,
and the sources are shuffled like cards: any beginning of the text has something of each.
"""
import bz2
import gzip
import lzma
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = ["r-cran-janeaustenr", "dict-devil", "jargon-text", "miscfiles", "docutils-doc",
            "python3-docutils", "libsqlite3-dev", "liblzma-dev", "tzdata", "metamath-databases",
            "fortunes-zh"]
PIECE = 2400  # characters, about
UNFIT = re.compile(r"n[i]gg|n[e]gro|squaw|savages|\bjews?\b|hebrew", re.I)


def unpack(folder):
    """Folder of each package's files."""
    places = {}
    for name in PACKAGES:
        place = folder / "x" / name
        if not place.is_dir():
            if not list(folder.glob(name + "_*.deb")):
                subprocess.run(["apt-get", "download", "-q", name], cwd=folder, check=True)
            place.mkdir(parents=True)
            deb = sorted(folder.glob(name + "_*.deb"))[-1]
            subprocess.run(["dpkg", "-x", str(deb), str(place)], check=True)
        places[name] = place
    return places


def text_of(path):
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def austen(place):
    """Novels as lines in R's lazy-load database: records of a length, a letter that names the
    compression, and a serialized object, in which a string is its flags, length and bytes."""
    data = (place / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    books, at = [], 0
    while at + 5 < len(data):
        best = None
        if data[at + 4:at + 5] in (b"2", b"Z"):
            unzip = bz2.BZ2Decompressor() if data[at + 4:at + 5] == b"2" else \
                lzma.LZMADecompressor()
            best, begin = unzip, at + 5
        else:
            best, begin = zlib.decompressobj(), at + 4
        raw = best.decompress(data[begin:])
        at = len(data) - len(best.unused_data)
        lines, i = [], 0
        mark = re.compile(rb"\x00\x04\x00\x09|\x00\x00\x80\x09|\x00\x00\x00\x09")
        while True:
            m = mark.search(raw, i)
            if not m:
                break
            (n,) = struct.unpack(">i", raw[m.end():m.end() + 4])
            if n < 0 or n > 4096:
                i = m.start() + 1
                continue
            lines.append(raw[m.end() + 4:m.end() + 4 + n].decode("utf-8", "replace"))
            i = m.end() + 4 + n
        if len(lines) > 1000:
            books.append("\n".join(lines))
    return books


def join_lines(text):
    """Paragraphs as one line each, as most text of today has them."""
    return re.sub(r"(?<=[^\n])\n(?=[^\n\s])", " ", text)


def mathematics(text):
    """Comments of a Metamath database with the statements behind them."""
    out = []
    for m in re.finditer(r"\$\(\s+(.*?)\s+\$\)\s*(\S+ \$[ap] .*?) \$[=.]", text, re.S):
        words = re.sub(r"\s+", " ", re.sub(r"\([^()]* by [^()]*\)", "", m.group(1))).strip()
        if len(words) > 120:
            out.append(words + "\n  " + re.sub(r"\s+", " ", m.group(2)))
    return "\n\n".join(out)


def pieces(text, size=PIECE):
    """Cut at empty lines; longer paragraphs at their ends of line. No tables of contents."""
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text.replace("\r", "")))
    out, now = [], ""
    for part in text.split("\n\n"):
        if UNFIT.search(part):
            continue
        now = now + "\n\n" + part if now else part
        while len(now) > 2 * size and "\n" in now[size:]:
            cut = now.index("\n", size)
            out.append(now[:cut])
            now = now[cut + 1:]
        if len(now) >= size:
            out.append(now)
            now = ""
    return [p.strip("\n") for p in out if len(p) > 14 * (p.count("\n\n") + 1) * 2]


def take(texts, total, size=PIECE):
    """Pieces of about `total` bytes in all, at equal distances over the texts."""
    every = [p for t in texts for p in pieces(t, size)]
    count = max(1, round(total / (sum(len(p.encode()) for p in every) / len(every))))
    if count >= len(every):
        return every
    return [every[int((i + 0.5) * len(every) / count)] for i in range(count)]


def sentences(texts, taken, count):
    """So many sentences of each text, at equal distances, none of them taken."""
    flat = re.sub(r"\s+", " ", taken)
    out = []
    for text in texts:
        found = [x.strip() for x in re.split(r"(?<=[.?!])\s+", re.sub(r"\s+", " ", text))]
        found = [x for x in found if 40 <= len(x) <= 240 and x[0].isupper() and x not in flat and
                 not UNFIT.search(x)]
        out += [found[int((i + 0.5) * len(found) / count)] for i in range(count)]
    return "".join(x + "\n" for x in out)


def main():
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    at = unpack(folder)
    docs = at["docutils-doc"] / "usr/share/doc/docutils-doc"
    code = at["python3-docutils"] / "usr/lib/python3/dist-packages/docutils"
    lzma_h = at["liblzma-dev"] / "usr/include/lzma"
    state = at["miscfiles"] / "usr/share/state"
    zones = at["tzdata"] / "usr/share/zoneinfo"
    own = (HERE / "calibration_own.txt").read_text(encoding="utf-8").split("\n%%\n")
    devil = text_of(at["dict-devil"] / "usr/share/dictd/devil.dict.dz")
    jargon = text_of(at["jargon-text"] / "usr/share/doc/jargon-text/jargon.txt.gz")
    poems = re.sub("\x1b\\[\\d*m", "", "\n\n".join(
        text_of(at["fortunes-zh"] / "usr/share/games/fortunes" / f).replace("\n%\n", "\n\n")
        for f in ("tang300", "song100")))
    sources = [
        take([join_lines(b) for b in austen(at["r-cran-janeaustenr"])], 180000),
        take([devil[devil.index("_The Devil's Dictionary_"):]], 45000),
        take([re.sub(r"(?m)^ {3}", "", jargon[len(jargon) // 10:])], 70000),
        take([join_lines(text_of(state / f)) for f in ("us-constitution.gz", "us-declaration.gz")],
             60000),
        take([text_of(docs / f) for f in (
            "FAQ.txt", "docs/dev/policies.txt", "docs/dev/rst/problems.txt",
            "docs/peps/pep-0258.txt", "docs/ref/rst/restructuredtext.txt",
            "docs/ref/rst/directives.txt")], 60000),
        take([text_of(code / f) for f in (
            "core.py", "frontend.py", "nodes.py", "statemachine.py", "parsers/rst/states.py",
            "transforms/references.py", "utils/__init__.py")], 60000),
        take([text_of(at["libsqlite3-dev"] / "usr/include/sqlite3.h")], 35000),
        take([text_of(lzma_h / f) for f in ("base.h", "block.h", "container.h", "index.h")], 20000),
        take([text_of(zones / f) for f in ("zone1970.tab", "iso3166.tab", "tzdata.zi")], 12000,
             1000),
        take([text_of(at["tzdata"] / "usr/share/doc/tzdata/changelog.gz")], 35000),
        take([mathematics(text_of(at["metamath-databases"] / "usr/share/metamath/databases/set.mm"))],
             40000),
        take([poems], 16000, 700),
        [p.strip("\n") for p in own],
    ]
    dealt = [((i + 0.5) / len(s), n, p) for n, s in enumerate(sources) for i, p in enumerate(s)]
    text = "\n\n".join(p for _, _, p in sorted(dealt)) + "\n"
    text = "".join(c for c in text if c in "\n\t" or c >= " ")
    data = text.encode("utf-8")
    if len(sys.argv) > 3:
        manual = "\n".join(text_of(docs / f) for f in ("docs/user/latex.txt", "docs/user/odt.txt",
                                                       "docs/dev/todo.txt"))
        books = "\n".join(austen(at["r-cran-janeaustenr"]))
        Path(sys.argv[3]).write_text(sentences([books, devil, jargon, manual], text, 64),
                                     encoding="utf-8")
    for n, s in enumerate(sources):
        print(f"{n:2d} {len(s):4d} pieces {sum(len(p.encode()) for p in s):7d} bytes")
    out.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(data)} bytes, {out.stat().st_size} compressed")


if __name__ == "__main__":
    main()
