"""Long texts have the tokens of the whole text, with tokenizers of all kinds."""

import random
import sysconfig
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ebft.data import tokens
from ebft.data.tokens import token_ids, token_ranges
from ebft.data.transforms.rows import encode

STDLIB = Path(sysconfig.get_paths()["stdlib"])
CODE = "".join((STDLIB / name).read_text() for name in ("argparse.py", "textwrap.py", "calendar.py"))
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
GPT4 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
INNER_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLIT_AS_GPT4 = pre_tokenizers.Split(Regex(GPT4), "isolated")
SENTENCEPIECE = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
STRIPPED = normalizers.Sequence([normalizers.Strip(), normalizers.NFKC()])
KINDS = {  # the model, the pre-tokeniser and the normaliser
    "byte-level": ("BPE", BYTES, None),
    "GPT-4": ("BPE", pre_tokenizers.Sequence([SPLIT_AS_GPT4, INNER_BYTES]), None),
    "SentencePiece BPE": ("BPE", None, SENTENCEPIECE),
    "Metaspace BPE": ("BPE", pre_tokenizers.Metaspace(), None),
    "Metaspace unigram": ("Unigram", pre_tokenizers.Metaspace(), normalizers.NFKC()),
    "unigram without words": ("Unigram", None, normalizers.Replace(" ", "▁")),
    "BERT": ("WordPiece", pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(lowercase=True)),
    "stripped": ("BPE", BYTES, STRIPPED),
    "parts of seven characters": ("BPE", pre_tokenizers.Sequence([pre_tokenizers.FixedLength(7), INNER_BYTES]), None),
}


@cache
def made(kind: str) -> PreTrainedTokenizerFast:
    model, pre_tokenizer, normalizer = KINDS[kind]
    options = {"vocab_size": 600, "special_tokens": ["<s>", "</s>", "<unk>"], "show_progress": False}
    if model == "Unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(**options, unk_token="<unk>", initial_alphabet=[])
    else:
        tokenizer = Tokenizer(getattr(models, model)(unk_token="<unk>"))
        trainer = trainers.BpeTrainer if model == "BPE" else trainers.WordPieceTrainer
        trainer = trainer(**options, initial_alphabet=ALPHABET)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    text = CODE[: 20_000 if model == "Unigram" else 60_000]
    words = text.split() if kind == "SentencePiece BPE" else [text[at : at + 500] for at in range(0, len(text), 500)]
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)])
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    found.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True), AddedToken("two words", normalized=False)])
    return found


def mixed_text() -> str:
    """Code with accents as separate characters, CJK, emoji, runs of spaces and digits, long words and added tokens."""
    draw = random.Random(0)
    odd = ["naïve café", "日本語のテキスト\n次の行", "👩‍👩‍👧 ok", " " * 90, "1234567890" * 5, "x" * 700]
    odd += ["a  <mask>  b", "two words", "</s>", "\r\n\t", "don't we'll", "ﬁne ①", "\xa0"]
    parts = [CODE[at : at + draw.randrange(20, 300)] + draw.choice(odd) for at in range(0, 40_000, 200)]
    return unicodedata.normalize("NFD", "".join(parts))


def whole(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)


@pytest.fixture
def small(monkeypatch):
    """Windows are so small that a text has many; returns a list with the number of characters of each."""
    monkeypatch.setattr(tokens, "LONGEST", 6000)
    monkeypatch.setattr(tokens, "_CONTEXT", 1000)
    return watched(monkeypatch)


def watched(monkeypatch):
    sizes, build = [], tokens._Window.__init__
    spied = lambda self, *args: build(self, *args) or sizes.append(self.stop - self.start)
    monkeypatch.setattr(tokens._Window, "__init__", spied)
    return sizes


@pytest.mark.first(3)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_characters_are_those_of_the_whole_text(kind, small):
    tokenizer, text = made(kind), mixed_text()
    expected = whole(tokenizer, text)
    assert token_ids(tokenizer, text) == expected["input_ids"]
    assert (len(small) > 3) == (kind != "unigram without words" and "seven" not in kind)
    assert token_ranges(tokenizer, text) == expected["offset_mapping"]
    for given in (text, "<s>" + text + "</s>"):
        inner = whole(tokenizer, given)["input_ids"]
        inner = [*([0] if inner[0] else []), *inner, *([1] if inner[-1] != 1 else [])]
        assert encode(tokenizer, given, special=True) == inner


@pytest.mark.parametrize("part", ["ab", " ", '{"a":1,"b":[2,3]},', "\n", "日"])
def test_texts_without_words(part, small):
    tokenizer, text = made("byte-level"), (part * 30_000)[:60_000]
    assert token_ids(tokenizer, text) == whole(tokenizer, text)["input_ids"]


@pytest.mark.parametrize("kind", ["GPT-4", "BERT", "stripped"])
def test_texts_without_latin_letters(kind, small):
    for end in ("。\n", "!\n", "🙂\n", "，", "का\n"):
        tokenizer, draw = made(kind), random.Random(0)
        text = "".join("".join(draw.choices("日本語字文", k=draw.randrange(20, 90))) + end for _ in range(400))
        small.clear()
        assert token_ids(tokenizer, text) == whole(tokenizer, text)["input_ids"] and len(small) > 3
        assert max(small) == 6000


def test_memory_is_bounded(monkeypatch):
    tokenizer, sizes, text = made("GPT-4"), watched(monkeypatch), CODE * 5
    assert token_ids(tokenizer, text) == whole(tokenizer, text)["input_ids"]
    assert len(text) > 2 * tokens.LONGEST and max(sizes) == tokens.LONGEST
