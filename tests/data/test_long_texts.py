"""Long texts have the tokens of the whole text, with tokenizers of all kinds."""

import random
import sysconfig
import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ebft.data import tokens
from ebft.data.tokens import token_ids, token_ranges
from ebft.data.transforms.rows import encode
from ebft.errors import DataError

STDLIB = Path(sysconfig.get_paths()["stdlib"])
CODE = "".join((STDLIB / name).read_text() for name in ("argparse.py", "textwrap.py", "calendar.py"))
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
GPT4 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
SPECIAL = ["<s>", "</s>", "<unk>"]
BYTE_LEVEL = {"model": "BPE", "pre": pre_tokenizers.ByteLevel(add_prefix_space=False)}
SENTENCEPIECE = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS = {
    "byte-level": BYTE_LEVEL,
    "byte-level with NFC": BYTE_LEVEL | {"norm": normalizers.NFC()},
    "byte-level with a space before": {"model": "BPE", "pre": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "GPT-4": {
        "model": "BPE",
        "pre": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GPT4), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    },
    "digits": {
        "model": "BPE",
        "pre": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    },
    "SentencePiece BPE": {"model": "BPE", "norm": SENTENCEPIECE},
    "Metaspace BPE": {"model": "BPE", "pre": pre_tokenizers.Metaspace()},
    "Metaspace unigram": {"model": "Unigram", "pre": pre_tokenizers.Metaspace(), "norm": normalizers.NFKC()},
    "unigram without words": {"model": "Unigram", "norm": normalizers.Replace(" ", "▁")},
    "BERT": {
        "model": "WordPiece",
        "pre": pre_tokenizers.BertPreTokenizer(),
        "norm": normalizers.BertNormalizer(lowercase=True),
    },
    "stripped": BYTE_LEVEL | {"norm": normalizers.Sequence([normalizers.Strip(), normalizers.NFKC()])},
    "parts of seven characters": {"model": "BPE", "pre": pre_tokenizers.FixedLength(7)},
    "byte-level parts of seven characters": {
        "model": "BPE",
        "pre": pre_tokenizers.Sequence([pre_tokenizers.FixedLength(7), pre_tokenizers.ByteLevel(use_regex=False)]),
    },
}


def made(kind: str) -> PreTrainedTokenizerFast:
    parts = KINDS[kind]
    tokenizer = Tokenizer(models.Unigram() if parts["model"] == "Unigram" else getattr(models, parts["model"])(
        unk_token="<unk>"))  # fmt: skip
    tokenizer.normalizer, tokenizer.pre_tokenizer = parts.get("norm"), parts.get("pre")
    options = {"vocab_size": 600, "special_tokens": SPECIAL, "show_progress": False, "initial_alphabet": ALPHABET}
    if parts["model"] == "Unigram":
        options |= {"unk_token": "<unk>", "initial_alphabet": []}
    text = CODE[:60_000]
    tokenizer.train_from_iterator(
        text.split() if kind == "SentencePiece BPE" else [text[at : at + 500] for at in range(0, len(text), 500)],
        getattr(trainers, {"BPE": "BpeTrainer"}.get(parts["model"], f"{parts['model']}Trainer"))(**options),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    found.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True), AddedToken("two words", normalized=False)])
    return found


def mixed_text() -> str:
    """Code with accents as separate characters, CJK, emoji, runs of spaces and digits, long words and added tokens."""
    draw = random.Random(0)
    odd = ["naïve café", "日本語のテキスト\n次の行", "👩‍👩‍👧 ok", " " * 90, "1234567890" * 5, "x" * 700]
    odd += ["a  <mask>  b", "two words", "</s>", "\r\n\t", "don't we'll", "ﬁne ①", "\xa0"]
    parts = [CODE[at : at + draw.randrange(20, 300)] + draw.choice(odd) for at in range(0, 60_000, 200)]
    return unicodedata.normalize("NFD", "".join(parts))


def whole(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)


@pytest.fixture
def small(monkeypatch):
    """Windows are so small that a text has many; returns a list with the number of characters of each."""
    monkeypatch.setattr(tokens, "LONGEST", 6000)
    monkeypatch.setattr("ebft.data.transforms.rows.LONGEST", 6000)
    monkeypatch.setattr(tokens, "_CONTEXT", 1000)
    sizes: list[int] = []
    monkeypatch.setattr(tokens, "_check_memory", sizes.append)
    return sizes


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


def test_a_real_tokenizer(smollm2_dir, small):
    tokenizer, text = AutoTokenizer.from_pretrained(smollm2_dir), mixed_text() + "<|im_start|>user\nhi<|im_end|>" * 400
    assert token_ids(tokenizer, text) == whole(tokenizer, text)["input_ids"] and len(small) > 20


@pytest.mark.parametrize("part", ["ab", " ", '{"a":1,"b":[2,3]},', "\n", "日"])
def test_texts_without_words(part, small):
    tokenizer, text = made("byte-level"), part * 30_000
    assert token_ids(tokenizer, text) == whole(tokenizer, text)["input_ids"]


@pytest.mark.parametrize("kind", ["byte-level with NFC", "GPT-4", "BERT", "stripped"])
@pytest.mark.parametrize("end", ["。\n", "!\n", "🙂\n", "，", "का\n"])
def test_texts_without_latin_letters(kind, end, small):
    tokenizer, draw = made(kind), random.Random(0)
    text = "".join("".join(draw.choices("日本語字文", k=draw.randrange(20, 90))) + end for _ in range(600))
    assert token_ids(tokenizer, text) == whole(tokenizer, text)["input_ids"] and len(small) > 3
    assert max(small) == 6000


def test_a_window_with_few_tokens(small):
    tokenizer, text = made("BERT"), "Hello world." + "\n" * 9000 + "word " * 3000
    assert token_ids(tokenizer, text) == whole(tokenizer, text)["input_ids"]


def test_memory_is_bounded_and_what_needs_more_is_refused(monkeypatch):
    tokenizer, sizes = made("GPT-4"), []
    check = tokens._check_memory
    monkeypatch.setattr(tokens, "_check_memory", lambda size: sizes.append(size) or check(size))
    text = CODE * 5
    assert token_ids(tokenizer, text) == whole(tokenizer, text)["input_ids"]
    assert len(text) > 2 * tokens.LONGEST and max(sizes) == tokens.LONGEST
    monkeypatch.setattr("os.sysconf", lambda name: 2**13)  # 64 MiB
    with pytest.raises(DataError, match=r"have to be tokenised at once.* has 0 GiB. Split the row into several"):
        token_ids(tokenizer, "x" * 600_000)
