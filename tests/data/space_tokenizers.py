"""Tokenizers that put a space before the first word of a text, built as SentencePiece tokenizers are converted."""

SCHEMES = ("normalizer", "first", "always")  # the first and the last also add it after special tokens
_WORDS = ["▁", "[", "]", "\n", ".", "c", "b", "H", "i", "▁c", "▁b", "Hi", "▁Hi", "x", "▁x"]
_MERGES = [("▁", "c"), ("▁", "b"), ("H", "i"), ("▁", "Hi"), ("▁", "x")]


def space_tokenizer(scheme, template=None, special=("<unk>", "<s>", "</s>")):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*special, *_WORDS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, _MERGES, unk_token="<unk>"))
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template
    )
