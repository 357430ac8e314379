"""Ids of qconv's tokenizers against the `tokenizers` package: small ones trained here in the
configurations of Llama 2, Llama 3, Mistral and Qwen, and the real files of the models at hand."""
import itertools
import random
import tempfile
import unittest
from pathlib import Path

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

import interop_support as s

IDS_TOOL = s.BUILD / "ids_tool"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

TEXTS = [
    "", " ", "  ", "\n", "\t\t", "a", " a", "a ", "  a  b   c    ", "Hello, world!",
    "I'll we'RE don'T it's 'S 'LL o'\u017f x've", "1234567890 12 3.14 1,000,000 \u0664\u0665 \u00bd",
    "caf\u00e9 cafe\u0301 \u1e69 s\u0323\u0307 \u212b \uac00 \u1100\u1161 \ufb01 \u0344",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155 "
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u03b3\u03b5\u03b9\u03ac \u0645\u0631\u062d\u0628\u0627 "
    "\u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f x\U0001f600y",
    "\u0001\u0002\x7f\u0085\u00a0\u00ad\u180e\u200b\u2028\u2029\u3000\ufeff\ufffd\U0010ffff",
    "a\u00a0b\u2003c\u3000d\u0085e\u180ef\x0bg\x0ch\x1ci", "line\r\nline\n\n\n  line\r\r x\n \n  y",
    " " * 100 + "x" + " " * 333, "a" * 1000, "ab" * 700 + "\n" * 50, "\u2581 \u2581\u2581x \u2581",
    "<s>", "</s> <s>a<s> b", "<unk>x <unk>", "a <pad>b<pad>  c  <pad> d", "<|tag|> x<|tag|>y",
    "\u0130stanbul \u01c5 \u1e9e\u00df \u03a3\u03a3 \u00c9COLE na\u00efve a\u0338b \u300c\u6f22\u5b57\u300d\U00020000x [MASK] [mask] [CLS]x",
    "one_word word, oneword one\u00e9", "word word.word wordy _word \u00e9word",
    "<0x41> <0xFF> \u00ff\u00fe", "def f(x):\n    return x**2  # ok\n", "x=(1+2)*[3]/{4}\\^`~$%&@#",
]


def texts():
    pool = "".join(TEXTS) + "    \n\n\t'"
    rng = random.Random(4)
    more = ["".join(rng.choice(pool) for _ in range(rng.randint(1, 80))) for _ in range(400)]
    corpus = (s.ROOT / "tests/data/kjv-llama/heldout.txt").read_text()
    return TEXTS + more + [corpus[:20000], corpus[:3000].replace("\n", " ") * 3]


def lines():
    corpus = (s.ROOT / "tests/data/kjv-llama/heldout.txt").read_text()[:60000].splitlines()
    return corpus + TEXTS * 3


def byte_level(pattern, normalizer=None, ignore_merges=False, prefix=False):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        t.normalizer = normalizer
    if pattern:
        t.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)])
    else:
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(lines(), trainers.BpeTrainer(
        vocab_size=700, special_tokens=[], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t


def sentencepiece(normalizer, pre=None, **more):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer, trained = normalizer, trainers.BpeTrainer(
        vocab_size=900, show_progress=False, limit_alphabet=90,
        special_tokens=["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256)], **more)
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # for training only
    t.train_from_iterator(lines(), trained)
    t.pre_tokenizer = pre
    return t


def bos(t, token):
    t.post_processor = processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing(
        single=token + " $A", special_tokens=[(token, t.token_to_id(token))])])
    return t


LEGACY = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]


def llama2():
    return bos(sentencepiece(normalizers.Sequence(LEGACY)), "<s>")


def llama2_pairs():
    """As after save_pretrained of a tokenizer with legacy=False."""
    return sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False))


def metaspace_always():
    return sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="always"))


def gemma():
    return sentencepiece(normalizers.Replace(" ", "\u2581"),
                         pre_tokenizers.Split(" ", "merged_with_previous"))


def llama3():
    t = byte_level(LLAMA3, ignore_merges=True)
    t.add_special_tokens(["<|begin_of_text|>", "<|tag|>"])
    return bos(t, "<|begin_of_text|>")


def qwen2():
    t = byte_level(QWEN2, normalizers.NFC())
    t.add_special_tokens(["<|tag|>"])
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    return t


def roberta():
    t = byte_level(None, prefix=True)
    t.add_special_tokens(["<s>", "</s>"])
    t.post_processor = processors.RobertaProcessing(("</s>", t.token_to_id("</s>")),
                                                    ("<s>", t.token_to_id("<s>")))
    return t


def added():
    t = llama2()
    t.add_tokens([AddedToken("<pad>", lstrip=True, rstrip=True, normalized=False),
                  AddedToken("word", single_word=True, normalized=False),
                  AddedToken("one", single_word=True), AddedToken("one_word"),
                  AddedToken("  ", normalized=False), AddedToken("    ", normalized=False)])
    return t


def digits():
    t = byte_level(None)
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(use_regex=True)])
    return t


def compat():
    return byte_level(LLAMA3, normalizers.Sequence([
        normalizers.NFKC(), normalizers.Replace(Regex(r"\s{2,}"), " ")]))


def unknown(fuse):
    t = Tokenizer(models.BPE({"<unk>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")],
                             unk_token="<unk>", fuse_unk=fuse))
    return t


def wordpiece(most=100, prefix="##", **normalizing):
    t = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=most,
                                   continuing_subword_prefix=prefix))
    t.normalizer, t.pre_tokenizer = normalizers.BertNormalizer(**normalizing), pre_tokenizers.BertPreTokenizer()
    t.train_from_iterator(lines(), trainers.WordPieceTrainer(
        vocab_size=900, limit_alphabet=200, show_progress=False, continuing_subword_prefix=prefix,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    t.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[
        (name, t.token_to_id(name)) for name in ("[CLS]", "[SEP]")])
    return t


TOKENIZERS = [llama2, llama2_pairs, metaspace_always, gemma, llama3, qwen2, roberta, added, digits,
              compat]


class Ids(unittest.TestCase):
    def check(self, t, path=None, note=None):
        with tempfile.TemporaryDirectory(dir=s.SCRATCH) as folder:
            if path is None:
                path = Path(folder) / "tokenizer.json"
                t.save(str(path))
            for specials in (False, True):
                want = texts()
                got = s.run(IDS_TOOL, path, "specials" if specials else "plain",
                            data="\0".join(want).encode()).decode().split("\n")[:-1]
                self.assertEqual(len(got), len(want))
                for text, line in zip(want, got):
                    mine = [int(i) for i in line.split()]
                    self.assertEqual(mine, t.encode(text, add_special_tokens=specials).ids,
                                     (note, specials, text[:200]))

    def test_trained(self):
        for make in TOKENIZERS:
            with self.subTest(make.__name__):
                self.check(make(), note=make.__name__)

    def test_behaviors(self):
        for behavior, invert in itertools.product(
                ["isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"],
                (False, True)):
            t = byte_level(None)
            t.pre_tokenizer = pre_tokenizers.Sequence([
                pre_tokenizers.Split(Regex(r"\s|[a-d]|\p{Lu}+"), behavior, invert),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
            with self.subTest(behavior=behavior, invert=invert):
                self.check(t, note=behavior)

    def test_wordpiece(self):
        for settings in ({}, dict(lowercase=False), dict(lowercase=False, strip_accents=True),
                         dict(strip_accents=False), dict(clean_text=False, handle_chinese_chars=False),
                         dict(most=6), dict(prefix="", clean_text=False)):
            with self.subTest(**settings):
                self.check(wordpiece(**settings), note=settings)

    def test_unknown(self):
        for fuse in (False, True):
            self.check(unknown(fuse))

    def test_real_files(self):
        for name in ("kjv-llama", "tinystories", "minilm"):
            with self.subTest(name):
                path = s.model_path(name) / "tokenizer.json"
                t = Tokenizer.from_file(str(path))
                t.no_padding()
                t.no_truncation()
                self.check(t, path, name)

    def test_pairs_and_strings(self):
        """merges as "a b", as older files have them."""
        import json
        t = llama3()
        data = json.loads(t.to_str())
        data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
        with tempfile.TemporaryDirectory(dir=s.SCRATCH) as folder:
            path = Path(folder) / "tokenizer.json"
            path.write_text(json.dumps(data))
            self.check(t, path)


if __name__ == "__main__":
    s.main()
