"""Texts as windows of token ids, and windows as the batch that a model takes (docs/calibration.md)."""
from __future__ import annotations

import hashlib
import lzma
import os
import re
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Union

import torch

from .errors import InputError, UsageError

StrPath = Union[str, "os.PathLike[str]"]
CONTEXT = 2048
BUNDLED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "calibration_text.xz")


@dataclass(frozen=True)
class Windows:
    """ids: int64 [windows, longest], filled up with zeros behind `lengths`. sequences: which line of the text each
    window is of. first: the place of the first token that a window predicts. digest: of the text, 32 hexadecimal digits.
    kind: of tokenizer. tokens: the sum of lengths."""
    ids: torch.Tensor
    lengths: Tuple[int, ...]
    sequences: Tuple[int, ...]
    first: int
    tokens: int
    kind: str
    digest: str

    def taken(self, numbers: Sequence[int]) -> "Windows":
        """Some of them."""
        lengths = tuple(self.lengths[i] for i in numbers)
        return Windows(self.ids[list(numbers), :max(lengths)], lengths, tuple(self.sequences[i] for i in numbers),
                       self.first, sum(lengths), self.kind, self.digest)

    def mask(self) -> torch.Tensor:
        """bool [windows, longest]: the tokens."""
        return torch.arange(self.ids.shape[1])[None] < torch.tensor(self.lengths)[:, None]


def spread(lengths: Sequence[int], most: int) -> List[int]:
    """Numbers of windows of `most` tokens together: of as many equal shares of the text, the window in the middle."""
    if sum(lengths) <= most:
        return list(range(len(lengths)))
    keep = min(len(lengths), max(1, most // max(lengths)))
    return [int((k + 0.5) * len(lengths) / keep) for k in range(keep)]


def bytes_of(text: StrPath) -> bytes:
    if os.fspath(text) == "default":
        with lzma.open(BUNDLED) as file:
            return file.read()
    try:
        with open(text, "rb") as plain:
            return plain.read()
    except OSError as error:
        raise InputError("%s: %s" % (os.fspath(text), error.strerror)) from None


def lines_of_ids(data: bytes, text: StrPath, vocabulary: int) -> List[List[int]]:
    out = []
    for number, line in enumerate(data.splitlines(), 1):
        for word in line.split():
            if not re.fullmatch(rb"0|[1-9][0-9]*", word) or int(word) >= vocabulary:
                raise InputError("%s: line %d, column %d: expected a decimal token id below %d" % (
                    os.fspath(text), number, line.index(word) + 1, vocabulary))
        out.append([int(word) for word in line.split()])
    return out


class Tokenizer:
    """ids of a text, and what stands in front of and behind each window."""

    def __init__(self, asked: Optional[StrPath], model: StrPath, vocabulary: int) -> None:
        self.front: List[int] = []
        self.back: List[int] = []
        path = os.fspath(asked or model)
        file = path if os.path.isfile(path) else os.path.join(path, "tokenizer.json")
        if os.path.isfile(file):
            from tokenizers import Tokenizer as Fast
            fast = Fast.from_file(file)
            fast.no_truncation()
            fast.no_padding()
            self.encode = lambda text: fast.encode(text, add_special_tokens=False).ids
            self.kind = type(fast.model).__name__
            self._edges(fast.encode("the").ids, self.encode("the"))
        elif vocabulary == 256 and not asked:
            self.encode, self.kind = lambda text: list(text.encode()), "bytes"
        else:
            from transformers import AutoTokenizer
            try:
                slow = AutoTokenizer.from_pretrained(path)
            except (OSError, ValueError) as error:
                raise InputError("%s has no tokenizer; expected one there or with --tokenizer, or a text of token ids "
                                 "(FILE.ids): %s" % (path, str(error).splitlines()[0])) from None
            self.encode = lambda text: slow(text, add_special_tokens=False, verbose=False)["input_ids"]
            self.kind = type(slow).__name__
            self._edges(slow("the")["input_ids"], self.encode("the"))

    def _edges(self, whole: List[int], bare: List[int]) -> None:
        at = next((i for i in range(len(whole)) if whole[i:i + len(bare)] == bare), 0)
        self.front, self.back = list(whole[:at]), list(whole[at + len(bare):])


def windows(text: StrPath, model: StrPath, config: Any, *, tokenizer: Optional[StrPath] = None,
            context: Optional[int] = None, tokens: Optional[int] = None, paragraphs: bool = False) -> Windows:
    """Cuts a text ("default": the bundled one) into windows of `context` tokens (None: 2048, or the model's limit), of
    which those of `tokens` tokens are taken, spread over all of it. What the tokenizer puts in front of a text stands in
    front of every window. paragraphs: each paragraph is a window, as encoders read, with what stands behind as well."""
    data, inner = bytes_of(text), config.get_text_config()
    vocabulary = inner.vocab_size
    limit = getattr(inner, "max_position_embeddings", None)
    size = context or min(CONTEXT, limit if isinstance(limit, int) and limit > 1 else CONTEXT)
    front: List[int] = []
    back: List[int] = []
    if os.fspath(text).endswith(".ids"):
        sequences, kind = lines_of_ids(data, text, vocabulary), "ids"
    else:
        made = Tokenizer(tokenizer, model, vocabulary)
        try:
            whole = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError("%s: no UTF-8 at byte %d" % (os.fspath(text), error.start)) from None
        parts = [p for p in re.split(r"\n\s*\n", whole) if p.strip()] if paragraphs else [whole]
        sequences, kind, front = [made.encode(p) for p in parts], made.kind, made.front
        back = made.back if paragraphs else []
    first, room = len(front) or 1, size - len(front) - len(back)
    if room < 1 or size <= first:
        raise UsageError("windows of %d tokens have no room beside the %d that begin and end each" % (
            size, len(front) + len(back)))
    cut = [(i, front + ids[at:at + room] + back) for i, ids in enumerate(sequences) for at in range(0, len(ids), room)]
    cut = [(i, ids) for i, ids in cut if len(ids) > first]
    if not cut:
        raise InputError("%s: the text is too short to predict one token" % os.fspath(text))
    cut = [cut[i] for i in spread([len(ids) for _, ids in cut], tokens or sum(len(ids) for _, ids in cut))]
    most = max(max(ids) for _, ids in cut)
    if most >= vocabulary:
        raise InputError("%s: the tokenizer gives the token %d, which is not in the model's vocabulary of %d" % (
            os.fspath(text), most, vocabulary))
    lengths = tuple(len(ids) for _, ids in cut)
    whole_ids = torch.zeros(len(cut), max(lengths), dtype=torch.long)
    for row, (_, ids) in zip(whole_ids, cut):
        row[:len(ids)] = torch.tensor(ids)
    return Windows(whole_ids, lengths, tuple(i for i, _ in cut), first, sum(lengths), kind,
                   hashlib.blake2b(data, digest_size=16).hexdigest())


# ---- batches ----------------------------------------------------------------------------------------------------


def integers(value: Any) -> Set[int]:
    """All of a configuration, at any depth."""
    if isinstance(value, dict):
        return set().union(*(integers(v) for v in value.values())) if value else set()
    if isinstance(value, (list, tuple)):
        return set().union(*(integers(v) for v in value)) if value else set()
    return {value} if isinstance(value, int) and not isinstance(value, bool) else set()


def rows_for(count: int, taken: Iterable[int]) -> int:
    """The least prime number of rows, `count` or more, so that neither it nor its double is one of these sizes."""
    rows, sizes = max(count, 5), set(taken)
    while rows in sizes or 2 * rows in sizes or any(rows % d == 0 for d in range(2, int(rows ** 0.5) + 1)):
        rows += 1
    return rows


@dataclass(frozen=True)
class Batch:
    """inputs: arguments of forward, whose tensors have `rows` rows. masks: which tokens count, bool [rows, tokens], for
    each length that states have; the last one is of what is predicted. Rows behind the windows repeat the first one and
    count nowhere."""
    inputs: Dict[str, torch.Tensor]
    masks: Tuple[torch.Tensor, ...]
    rows: int


def batch(w: Windows, config: Any, masked: bool, more: Optional[Dict[str, torch.Tensor]] = None) -> Batch:
    """All windows as one batch. masked: padding is told by an attention_mask, as encoders need it. more: further
    arguments, a row for each sequence of the text. An encoder-decoder's encoder reads the first half of a window and its
    decoder the second, or all of it where `more` has what the encoder reads."""
    length = w.ids.shape[1]
    rows = rows_for(len(w.lengths), integers(config.to_dict()) | {length, length // 2 + 1, (length - 1) // 2})
    order = list(range(len(w.lengths))) + [0] * (rows - len(w.lengths))
    ids, mask = w.ids[order], w.mask()[order]
    counted = mask.clone()
    counted[len(w.lengths):] = False
    extra = {}
    for name, value in (more or {}).items():
        if len(value) <= max(w.sequences):
            raise InputError("--inputs: '%s' has %d rows, and the text has more sequences" % (name, len(value)))
        extra[name] = value[[w.sequences[i] for i in order]]
    if not getattr(config, "is_encoder_decoder", False):
        inputs = {"input_ids": ids, **extra}
        if masked and not bool(mask.all()):
            inputs["attention_mask"] = mask.long()
        return Batch(inputs, (counted,), rows)
    if extra:
        return Batch({"decoder_input_ids": ids, **extra}, (counted,), rows)
    half = length // 2 + (length % 2 == 0)  # lengths differ, as they tell encoder and decoder apart
    inputs = {"input_ids": ids[:, :half], "decoder_input_ids": ids[:, half:]}
    if not bool(mask[:, :half].all()):
        inputs["attention_mask"] = mask[:, :half].long()
    return Batch(inputs, (counted[:, :half], counted[:, half:]), rows)
