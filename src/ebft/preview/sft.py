"""Rows of SFT: the labels of the collated batch."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.collator import DocumentCollator
from ebft.data.transforms.rows import IGNORE
from ebft.preview.view import Part, RowView, TokenTexts, counted


class SFTView:
    """Shows a row with `input_ids` and `labels`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts = TokenTexts(tokenizer)
        self.collator = DocumentCollator(tokenizer.pad_token_id)

    def __call__(self, row: dict[str, Any]) -> RowView:
        batch = self.collator([row])
        learned = batch["labels"][0].ne(IGNORE)
        learned[0] = False  # the loss compares labels with the predictions of the token before
        tokens = self.texts.tokens(batch["input_ids"][0].tolist(), learned.tolist())
        if "pieces" in row:  # of a stream
            facts = [("documents", f"{row['pieces']:,}"), counted(tokens)]
        else:
            facts = [("prompt", f"{row['prompt_length']:,} tokens"), counted(tokens)]
        return RowView([Part("row", tokens, facts)])
