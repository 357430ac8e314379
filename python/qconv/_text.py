"""Texts as windows of token ids: what `eval` measures with and `calibrate` lets pass through a model.

A text is one sequence; a file of ids has a sequence in each line. Each sequence is cut by itself into windows of
`context` tokens that do not overlap, of which the last may be shorter. What the tokenizer puts in front of a text stands
in front of every window, inside its context; what it puts behind is left out. A window predicts every token but those in
front, or without such tokens every one but its first; one that predicts nothing is left out."""
from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch

from ._library import Reader
from .errors import InputError, QconvWarning, RunError, UsageError

CONTEXT = 2048
DEFAULT = "default"
StrPath = Union[str, "os.PathLike[str]"]


def spread(lengths: Sequence[int], most: int) -> List[int]:
    """Numbers of windows that have at most `most` tokens together, but at least one window: those that hold the middle of
    equal shares of the text."""
    if sum(lengths) <= most:
        return list(range(len(lengths)))
    keep = max(most * len(lengths) // sum(lengths), 1)
    while True:
        kept = sorted({int((k + 0.5) * len(lengths) / keep) for k in range(keep)})
        if keep == 1 or sum(lengths[i] for i in kept) <= most:
            return kept
        keep -= 1


@dataclass
class Windows:
    """Windows of a text.

    ids        LongTensor [windows, longest]; a shorter one is filled up with its last token
    lengths    tokens of each, with those in front
    sequences  the sequence that each is cut from, from 0
    first      the first position of a window that is predicted: 1 or more
    tokens     of the text, without those in front
    kind       of the tokenizer, or "ids"
    digest     32 hexadecimal digits of the text's bytes and those of --inputs
    context    the most tokens that a window could have
    causal     whether a token sees only those before it, so that shorter windows need no mask
    inputs     further arguments of forward, whose rows belong to sequences"""
    ids: torch.Tensor
    lengths: List[int]
    sequences: List[int]
    first: int
    tokens: int
    kind: str
    digest: str
    context: int
    causal: bool = True
    halves: bool = False  # the encoder reads the first half of a window, and the decoder the second
    inputs: Dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        return int(self.ids.shape[1])

    def of(self, numbers: Sequence[int]) -> "Windows":
        return replace(self, ids=self.ids[list(numbers)], lengths=[self.lengths[n] for n in numbers],
                       sequences=[self.sequences[n] for n in numbers])

    def heads(self, size: int) -> "Windows":
        """The first tokens of each, at most so many."""
        return replace(self, ids=self.ids[:, :size], lengths=[min(n, size) for n in self.lengths])

    def beside(self, other: "Windows") -> "Windows":
        """These, and then those of another text for the same model."""
        return replace(self, ids=_padded([*self.ids, *other.ids]), lengths=self.lengths + other.lengths,
                       sequences=self.sequences + other.sequences)

    def batch(self, numbers: Sequence[int], config: Any, times: int = 1
              ) -> Tuple[Dict[str, torch.Tensor], List[torch.Tensor]]:
        """(arguments of forward, masks) of these windows. The rows are filled up, with the first window, to a prime that is
        no other size of the model, nor so many times itself, because a stream tells the batch by its size. A mask, BoolTensor [rows, tokens], says
        which tokens are the text's: of what the model reads, and last of what it answers to."""
        numbers = list(numbers)
        prime, taken = max(len(numbers), 5), {*_integers(config), self.longest}
        while {prime, times * prime} & taken or any(prime % d == 0 for d in range(2, int(prime ** 0.5) + 1)):
            prime += 1
        rows = numbers + [numbers[0]] * (prime - len(numbers))
        lengths = [self.lengths[n] for n in rows]
        true = [n if i < len(numbers) else 0 for i, n in enumerate(lengths)]
        inputs: Dict[str, torch.Tensor] = {}
        if self.halves:
            front = [n // 2 for n in lengths]
            pieces = [[self.ids[n, :f] for n, f in zip(rows, front)],
                      [self.ids[n, f:whole] for n, f, whole in zip(rows, front, lengths)]]
            inputs["input_ids"], inputs["decoder_input_ids"] = (_padded(p) for p in pieces)
            masks = [_mask([n // 2 for n in true], inputs["input_ids"].shape[1]),
                     _mask([n - n // 2 for n in true], inputs["decoder_input_ids"].shape[1])]
            seen = _mask(front, inputs["input_ids"].shape[1])
        else:  # an encoder may have its inputs from a file, such as input_features
            inputs["decoder_input_ids" if self._read_elsewhere() else "input_ids"] = self.ids[rows]
            masks = [_mask(true, self.longest)]
            seen = _mask(lengths, self.longest)
        if not self.causal and not self._read_elsewhere() and not bool(seen.all()):
            inputs["attention_mask"] = seen.long()
        for name, value in self.inputs.items():
            inputs[name] = self._rows_of(name, value, rows)
        return inputs, masks

    def _read_elsewhere(self) -> bool:
        return any(n in ("input_features", "input_values") for n in self.inputs)

    def _rows_of(self, name: str, value: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        count = max(self.sequences) + 1
        if value.dim() == 0 or value.shape[0] % count:
            raise InputError("'%s' of --inputs has the shape %s; expected rows for %d sequences of the text" % (
                name, list(value.shape), count))
        each = value.shape[0] // count
        return torch.cat([value[self.sequences[r] * each:(self.sequences[r] + 1) * each] for r in rows])


def _mask(lengths: Sequence[int], width: int) -> torch.Tensor:
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


def _padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of ids, each filled up with its last one."""
    width = max(len(r) for r in rows)
    return torch.stack([torch.cat([r, (r[-1:] if len(r) else r.new_zeros(1)).expand(width - len(r))]) for r in rows])


def _integers(config: Any) -> Iterable[int]:
    values: List[Any] = [config.to_dict()]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, (list, tuple)):
            values += value
        elif isinstance(value, int):
            yield value


# ---- what a text is ----


def windows(text: StrPath, model: StrPath, *, tokenizer: Optional[StrPath] = None, context: Optional[int] = None,
            max_tokens: Optional[int] = None, inputs: Optional[StrPath] = None, beside: Optional[StrPath] = None,
            config: Any = None, vocabulary: Optional[int] = None, paragraphs: bool = False) -> Windows:
    """The windows of a text for the checkpoint in the folder `model`.

    text        a file in UTF-8, of ids if its name ends in ".ids", or "default", the bundled text
    tokenizer   a tokenizer.json or a folder that has one; None: that of `model`, or else of the folder `beside`
    context     tokens of a window; None: 2048, or what the model was made for
    max_tokens  read so many at the most, from the beginning
    inputs      a .safetensors file with further arguments of forward, with rows for each sequence
    config      of transformers; None: read from `model`
    vocabulary  what ids are below; None: that of the config
    paragraphs  the windows of a text are its paragraphs, and longer ones are cut, with all that the tokenizer puts in front
                and behind: what an encoder of sentences reads

    Raises UsageError (a context that predicts nothing, or is longer than the model's), InputError (no such text, no
    tokenizer, ids that are not in the vocabulary, too few tokens)."""
    if config is None:
        from ._loading import config_of
        config = config_of(Path(model), {})
    own = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = vocabulary or int(getattr(own, "vocab_size", None) or 1 << 62)
    name, data = os.fspath(text), content_of(text)
    length = context_of(own, context)
    if name.endswith(".ids"):
        try:
            sequences = parse_ids(data, vocabulary, max_tokens)
        except InputError as error:
            raise InputError("%s: %s" % (name, error)) from None
        kind, front, back = "ids", [], []
    else:
        kind, front, back, sequences = _encoded(name, data, [f for f in (model, beside) if f is not None], tokenizer,
                                                vocabulary, paragraphs)
        sequences, back = [s[:max_tokens or None] for s in sequences], back if paragraphs else []
    extra, digest = {}, hashlib.blake2b(data, digest_size=16)  # type: Dict[str, torch.Tensor], Any
    if inputs is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
        try:
            extra = load_file(inputs)
        except (OSError, SafetensorError) as error:
            raise InputError("%s: no safetensors file with arguments of the model: %s" % (
                os.fspath(inputs), str(error).splitlines()[0])) from None
        digest.update(Path(inputs).read_bytes())
    rows, of = cut(sequences, front, length, name, back)
    longest = max(len(r) for r in rows)
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    elsewhere = any(n in ("input_features", "input_values") for n in extra)
    ids = torch.tensor([r + r[-1:] * (longest - len(r)) for r in rows])
    return Windows(ids, [len(r) for r in rows], of, max(len(front), 1), sum(map(len, sequences)), kind,
                   digest.hexdigest(), length, causal=is_causal(config), halves=encoder_decoder and not elsewhere, inputs=extra)


def is_causal(config: Any) -> bool:
    """Does no token see those behind it? Encoder-decoders and models that fill in masks do not count, unless they say that
    they are decoders."""
    from transformers.models.auto import modeling_auto

    from ._loading import class_of
    if getattr(config, "is_encoder_decoder", False):
        return False
    if type(config) in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING.keys():
        return bool(getattr(config, "is_decoder", False))
    return type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.keys() or bool(
        class_of(config, Path(".")).can_generate())


def context_of(config: Any, asked: Optional[int]) -> int:
    """Tokens of a window: asked, or 2048 or the model's limit. config: of the text's model."""
    most = next((int(getattr(config, n)) for n in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
                 if isinstance(getattr(config, n, None), int) and getattr(config, n) > 0), None)
    if most is not None and str(getattr(config, "model_type", "")).replace("-", "").find("roberta") >= 0:
        most -= int(getattr(config, "pad_token_id", 1) or 0) + 1  # places begin behind that of padding
    if asked is not None and most is not None and asked > most:
        if not any(getattr(config, n, None) for n in ("rope_parameters", "rope_theta", "rope_scaling")):
            raise UsageError("--context %d is longer than the %d places that the model has" % (asked, most))
        warnings.warn("--context %d is longer than the %d tokens that the model was made for" % (asked, most), QconvWarning,
                      stacklevel=2)
    return asked if asked is not None else min(CONTEXT, most or CONTEXT)


def content_of(text: StrPath) -> bytes:
    if os.fspath(text) == DEFAULT:
        return lzma.decompress((Path(__file__).parent / "calibration_text.xz").read_bytes())
    try:
        return Path(text).read_bytes()
    except FileNotFoundError:
        raise RunError("%s: there is no such text; give a file of text, or 'default' for the bundled one"
                       % os.fspath(text)) from None


# ---- ids ----


def parse_ids(data: bytes, vocabulary: int, max_tokens: Optional[int] = None) -> List[List[int]]:
    """Reads a file of ids: a sequence in each line, ids below `vocabulary` in decimal, with spaces or tabs between them.
    Empty lines do not count. Raises InputError with line and column, from 1 and in bytes."""
    out: List[List[int]] = []
    left = max_tokens or len(data) + 1
    for number, line in enumerate(data.split(b"\n"), 1):
        line = line[:-1] if line.endswith(b"\r") else line
        ids: List[int] = []
        for word in re.finditer(rb"[^ \t]+", line):
            if left == 0:
                break
            text, at, why = word.group(), word.start(), None
            digits = re.match(rb"\d*", text).group()  # type: ignore[union-attr]
            if len(digits) > 1 and digits.startswith(b"0"):
                why = "a token id has no leading zeros"
            elif len(digits) > 18 or digits and int(digits) >= vocabulary:
                why = "token id %s%s is not in the vocabulary of %d" % (
                    digits[:24].decode(), "..." if len(digits) > 24 else "", vocabulary)
            elif len(digits) < len(text):
                byte, at = text[len(digits)], at + len(digits)
                why = "expected a decimal token id, found %s" % (
                    "'%c'" % byte if 0x20 < byte < 0x7f else "the byte 0x%02x" % byte)
            if why:
                raise InputError("line %d, column %d: %s" % (number, at + 1, why))
            ids.append(int(digits))
            left -= 1
        if ids:
            out.append(ids)
        if left == 0:
            break
    return out


def cut(sequences: Sequence[List[int]], front: List[int], context: int, name: str,
        back: Sequence[int] = ()) -> Tuple[List[List[int]], List[int]]:
    """(windows, the sequence of each)."""
    first = max(len(front), 1)
    least = first + 1 + len(back)
    if context < least:
        raise UsageError("--context %d predicts nothing; expected at least %d, the tokens that begin each window and one "
                         "more" % (context, least))
    room = context - len(front) - len(back)
    rows, of = [], []
    for number, ids in enumerate(sequences):
        for at in range(0, len(ids), room):
            row = [*front, *ids[at:at + room], *back]
            if len(row) > first:
                rows.append(row)
                of.append(number)
    if not rows:
        tokens = sum(map(len, sequences))
        raise InputError("%s: %d token%s in %d sequence%s are too few to predict one; expected a sequence of at least %d" % (
            name, tokens, "s" * (tokens != 1), len(sequences), "s" * (len(sequences) != 1), 1 if front else 2))
    return rows, of


# ---- tokenizers ----


def _encoded(name: str, data: bytes, folders: Sequence[StrPath], asked: Optional[StrPath],
             vocabulary: int, paragraphs: bool) -> Tuple[str, List[int], List[int], List[List[int]]]:
    """(the tokenizer's kind, what it puts in front of a text and behind, the ids of the text or of its paragraphs)."""
    path = _tokenizer_file(folders, asked)
    if path is None and vocabulary == 256:
        return "bytes", [], [], [list(data)]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("%s: byte %d is no UTF-8; expected a text in UTF-8, or FILE.ids with token ids" % (
            name, error.start)) from None
    own = _tokenizer(path, folders)
    parts = [p for p in re.split(r"\n\s*\n", text) if p.strip()] if paragraphs else [text]
    whole = [own.encode(p, add_special_tokens=False).ids for p in parts]
    bare, dressed = own.encode("a", add_special_tokens=False).ids, own.encode("a").ids
    at = next((i for i in range(len(dressed) - len(bare) + 1) if dressed[i:i + len(bare)] == bare), 0)
    wrong = next((i for ids in whole for i in ids if i >= vocabulary), None)
    if wrong is not None:
        raise InputError("%s: the tokenizer gives the token %d, which is not in the model's vocabulary of %d" % (
            name, wrong, vocabulary))
    said = json.loads(own.to_str())
    model = said.get("model") or {}
    kind = str(model.get("type") or "unknown")
    if kind == "BPE" and model.get("byte_fallback"):
        kind = "BPE with byte fallback"
    elif kind == "BPE" and "ByteLevel" in json.dumps([said.get("pre_tokenizer"), said.get("decoder")]):
        kind = "byte-level BPE"
    return kind, dressed[:at], dressed[at + len(bare):], whole


def _tokenizer_file(folders: Sequence[StrPath], asked: Optional[StrPath]) -> Optional[Path]:
    for place in [asked] if asked is not None else folders:
        path = Path(place)
        path = path / "tokenizer.json" if path.is_dir() else path
        if path.is_file():
            return path
    if asked is not None:
        raise InputError("%s: there is no tokenizer.json" % os.fspath(asked))
    return None


def is_read(model: StrPath, tokenizer: Optional[StrPath], config: Any) -> bool:
    """Is there a tokenizer.json for texts, or none needed?"""
    return _tokenizer_file([model], tokenizer) is not None or \
        getattr(config.get_text_config(), "vocab_size", None) == 256


def _tokenizer(path: Optional[Path], folders: Sequence[StrPath]) -> Any:
    if path is None:
        import transformers
        for folder in folders:
            try:
                return transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer
            except (OSError, ValueError, KeyError, ImportError, AttributeError):
                continue
        raise InputError("%s has no tokenizer that transformers reads; expected one there or with --tokenizer, or a text of "
                         "token ids (FILE.ids)" % os.fspath(folders[0]))
    import tokenizers
    try:
        own = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        Reader.check_beside(path)
        raise InputError("%s: the tokenizer cannot be read: %s" % (path, str(error).splitlines()[0])) from None
    own.no_truncation()
    own.no_padding()
    return own
