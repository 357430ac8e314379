"""What walks over folders of models share: files that are copied, and an output that appears as a whole."""
from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from typing import Iterator, List

from .errors import InputError, UsageError


def files_below(folder: str) -> List[str]:
    """The files of a folder as sorted relative paths with '/', links to files among them."""
    found = []
    for where, folders, names in os.walk(folder):
        folders.sort()
        found += [os.path.relpath(os.path.join(where, name), folder).replace(os.sep, "/") for name in names]
    return sorted(name for name in found if os.path.isfile(os.path.join(folder, name)))


def check_links(folder: str, names: List[str]) -> None:
    """Refuses links out of a folder, which somebody else made: what they lead to must not be handed on. In the
    hub's cache snapshots/REVISION is full of links to ../../blobs, and all of it counts as one folder."""
    inside = os.path.realpath(folder)
    if os.path.basename(os.path.dirname(inside)) == "snapshots":
        inside = os.path.dirname(os.path.dirname(inside))
    for name in names:
        if not os.path.realpath(os.path.join(folder, name)).startswith(inside.rstrip(os.sep) + os.sep):
            raise InputError("%s: '%s' is a link that leads out of the folder, so a file from elsewhere would be "
                             "copied; put the file itself there" % (folder, name))


def check_outside(source: str, out: str) -> None:
    """Refuses an output inside its source, which is only read."""
    within, target = os.path.realpath(source), os.path.realpath(out)
    if os.path.isdir(within) and (target + os.sep).startswith(within.rstrip(os.sep) + os.sep):
        raise UsageError("%s is inside its source %s, which is only read; choose another OUT" % (out, source))


def copy(source: str, target: str) -> None:
    """Copies the bytes of a file to a new name, which appears when they are on the disk."""
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    shutil.copyfile(source, target + ".tmp")
    sync(target + ".tmp")
    os.replace(target + ".tmp", target)


def write_text(path: str, text: str) -> None:
    """Writes a file whole or not at all, on the disk and with the permissions that open() would give it."""
    handle, name = tempfile.mkstemp(prefix=".qconv-", dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(text.encode())
            os.fchmod(f.fileno(), 0o666 & ~umask())
            f.flush()
            os.fsync(f.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def staged(out: str) -> Iterator[str]:
    """A folder to fill, which becomes `out` at the end of the block; an error or Ctrl-C removes it. `out` may be an
    empty folder already."""
    if os.path.lexists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise UsageError("%s is not %s; choose another OUT" % (out, "empty" if os.path.isdir(out) else "a folder"))
    target = os.path.realpath(out)
    parent = os.path.dirname(target)
    os.makedirs(parent, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=".%s." % os.path.basename(target), dir=parent)
    try:
        yield folder
        mask = umask()
        for name in files_below(folder):
            os.chmod(os.path.join(folder, name), 0o666 & ~mask)
            sync(os.path.join(folder, name))
        os.chmod(folder, 0o777 & ~mask)
        os.rename(folder, target)
        sync(parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
