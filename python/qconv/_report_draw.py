"""What pages are made of: texts that are escaped, numbers, tables, and drawings in SVG.

A page is one file without scripts or anything from outside, well-formed XML, for light and dark, wide and narrow
screens and print. What it draws stands in a table or in a text beside it, too. Positions across a drawing are
percentages, so that nothing in it is scaled and its text has one size at any width.
"""
from __future__ import annotations

import html
import math
import os
import re
from typing import Iterable, List, Optional, Sequence, Tuple, Union

from ._program import version

# ---- text, numbers and tables ------------------------------------------------------------------------------

COLOURS = 8  # of series, in Okabe and Ito's palette, which colour-blind readers can tell apart
MARKS = ("&#9679;", "&#9632;", "&#9650;", "&#9670;", "&#9675;", "&#9633;")  # of forms, beside a colour
with open(os.path.join(os.path.dirname(__file__), "report.css"), encoding="utf-8") as _file:
    STYLE = _file.read()
Cell = Union[str, Tuple[str, str]]  # markup, or markup and the class of its cell


def esc(text: object) -> str:
    """A text of somebody's file as markup: nothing in it ends a tag, an attribute or the document, hides, or turns the
    direction of what follows."""
    return html.escape(re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f"
                               "\ufeff\ufff9-\uffff\ud800-\udfff\U000e0000-\U000e007f]", "?", str(text)))


def size(n: float, unit: str = "bytes") -> str:
    """"36.0 GB", by thousands, as the program writes it."""
    if n < 1000:
        return "%d %s" % (n, unit)
    for unit in ("KB", "MB", "GB", "TB", "PB"):
        n /= 1000.0
        if n < 999.5 or unit == "PB":
            break
    return "%.*f %s" % (2 if n < 9.995 else 1 if n < 99.95 else 0, n, unit)


def count(n: float) -> str:
    """"1,507,008", or "70.6 billion"."""
    return "{:,}".format(n) if n < 1e7 else "%.3g million" % (n / 1e6) if n < 999.5e6 else "%.4g billion" % (n / 1e9)


def num(v: Optional[float], form: str = "%.3g", unit: str = "") -> str:
    """A number; nothing where it is not known."""
    return "" if v is None or not math.isfinite(v) else form % v + unit


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table, which scrolls beside its first column where it is too wide. A title may begin with the class of its
    column: ".name weight". Columns without anything are left out."""
    parts = [c[1:].split(" ", 1) if c.startswith(".") else ["", c] for c in columns]
    heads: List[Tuple[str, str]] = [(title, names) for names, title in parts]
    cells = [[c if isinstance(c, tuple) else (c, "") for c in row] for row in rows]
    shown = [i for i in range(len(heads)) if any(row[i][0] for row in cells)]

    def tag(kind: str, cell: Tuple[str, str], names: str = "") -> str:
        names = (names + " " + cell[1]).strip()
        return "<%s%s>%s</%s>" % (kind, ' class="%s"' % names if names else "", cell[0], kind)
    lines = ["<tr>%s</tr>" % "".join(tag("th", heads[i]) for i in shown)]
    lines += ["<tr>%s</tr>" % "".join(tag("td", row[i], heads[i][1]) for i in shown) for row in cells]
    return '<div class="scroll"><table>\n%s\n</table></div>\n' % "\n".join(lines) if rows else ""


def section(name: str, title: str) -> str:
    return '<h2 id="%s">%s</h2>\n' % (name, title)


def folded(summary: str, inside: str) -> str:
    """What is shown on a click, and in print."""
    return "<details><summary>%s</summary>\n%s</details>\n" % (summary, inside) if inside else ""


def cards(items: Iterable[Optional[Tuple[str, str]]]) -> str:
    """Boxes with a large number and what it is."""
    return '<div class="cards">%s</div>\n' % "\n".join("<div><b>%s</b>%s</div>" % i for i in items if i)


def document(title: str, body: str) -> str:
    return ('<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"/><meta name="viewport" '
            'content="width=device-width, initial-scale=1"/><meta name="color-scheme" content="light dark"/>'
            "<title>%s</title><style>%s</style></head>\n<body>\n%s<p class=\"soft\">Made by qconv %s.</p>\n</body>\n"
            "</html>\n" % (esc(title), STYLE, body, esc(version())))


# ---- drawings. Positions across are percentages, so that text has its size at any width ----------------------

def svg(height: float, label: str, body: str) -> str:
    """A drawing, with what it shows in words for whoever cannot see it."""
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{height:.0f}" role="img" ' \
        f'aria-label="{label}"><desc>{label}</desc>\n{body}</svg>\n'


def rect(names: str, x: float, y: float, width: float, height: float, title: str = "", more: str = "") -> str:
    """A rectangle; x and width are percentages."""
    return '<rect class="%s" x="%.2f%%" y="%.1f" width="%.2f%%" height="%.1f"%s%s' % (
        names, x, y, max(width, 0.0), max(height, 0.0), more, "><title>%s</title></rect>" % title if title else "/>")


def label(x: float, y: float, text: str, anchor: str = "start", names: str = "") -> str:
    return '<text x="%.2f%%" y="%.1f" text-anchor="%s"%s>%s</text>' % (
        x, y, anchor, ' class="%s"' % names if names else "", text)


def keys(names: Sequence[str]) -> str:
    """What the colours of series mean."""
    return "<p>%s</p>\n" % "\n".join('<span class="key s%d"><i></i>%s</span>' % (i % COLOURS, n)
                                     for i, n in enumerate(names))


def stacked(title: str, parts: Sequence[Tuple[str, float]], most: float) -> str:
    """A bar of parts, and what stands above it."""
    x, inside = 0.0, []
    for i, (name, n) in enumerate(parts):
        if n > 0:
            inside.append(rect("fill s%d" % (i % COLOURS), x, 1, 99.6 * n / most, 22, "%s: %s" % (name, size(n))))
            x += 99.6 * n / most
    words = "; ".join("%s %s" % (name, size(n)) for name, n in parts if n > 0)
    return "<figure><figcaption>%s</figcaption>\n%s</figure>\n" % (title, svg(24, words, "\n".join(inside)))


class Axis:
    """The range of values, logarithmic where they differ by a factor of 4."""

    def __init__(self, values: Iterable[float]) -> None:
        seen = [v for v in values if math.isfinite(v)]
        low, high = min(seen, default=0.0), max(seen, default=0.0)
        self.log = low > 0 and high >= low * 4
        room = (high - low) * 0.12 + high * 0.01
        self.low = low / 1.25 if self.log else 0.0 if low <= room else low - room
        self.high = high * 1.25 if self.log else high + room if high > 0 else 1.0

    def share(self, v: float) -> float:
        """Where a value lies, from 0 to 1."""
        if self.log:
            return min(1.0, math.log(v / self.low) / math.log(self.high / self.low)) if v > self.low else 0.0
        return max(0.0, min(1.0, (v - self.low) / (self.high - self.low)))


def names_below(across: Sequence[str], y: float, apart: float, apart_narrow: float) -> List[str]:
    """The names of an axis as far as they have room, in percent of the width: fewer on narrow screens."""
    found, last, last_narrow = [], -100.0, -100.0
    for i, name in enumerate(across):
        x = 100.0 * (i + 0.5) / len(across)
        if name and x - last >= apart:
            narrow = x - last_narrow >= apart_narrow
            found.append(label(x, y, name, "middle", "" if narrow else "more"))
            last, last_narrow = x, x if narrow else last_narrow
    return found


def heat_map(what: str, axis: Axis, across: Sequence[str], rows: Sequence[Tuple[str, Sequence[Optional[float]]]],
             titled: bool) -> str:
    """Kinds one below another, layers from left to right, in a stronger colour where a value is larger; the largest has
    a frame."""
    n, y, inside, frame = len(across), 0.0, [], ""
    largest = max((v for _, values in rows for v in values if v is not None), default=None)
    for name, values in rows:
        inside.append(label(0, y + 13, name, names="ink"))
        for i, v in enumerate(values):
            names = "none" if v is None else "cell"
            more = "" if v is None else ' fill-opacity="%.2f"' % (0.08 + 0.92 * axis.share(v))
            inside.append(rect(names, 100.0 * i / n, y + 18, 100.0 / n, 18,
                               "" if v is None or not titled else "%s, layer %s: %.3g" % (name, across[i], v), more))
            if v is not None and v == largest:
                frame = rect("worst", 100.0 * i / n, y + 18, 100.0 / n, 18)
        y += 40
    inside += names_below(across, y + 12, 3.5, 11)
    ends = [axis.low, axis.high] if not axis.log else [axis.low * 1.25, axis.high / 1.25]
    for i in range(8):
        opacity = ' fill-opacity="%.2f"' % (0.08 + 0.92 * i / 7)
        inside.append(rect("cell", 100 - 4.0 * (8 - i), y + 22, 4, 12, more=opacity))
    inside.append(label(67, y + 32, "%.2g" % ends[0], "end"))
    inside.append(label(100, y + 47, "%.2g" % ends[1], "end"))
    inside.append(label(0, y + 32, "layer") + frame)
    return svg(y + 50, what, "\n".join(inside))
