"""Rows of SFT: the labels of the collated batch."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.joining import JoiningCollator
from ebft.data.transforms.rows import IGNORE
from ebft.preview.roles import Roles
from ebft.preview.view import Part, RowView, Token, TokenTexts, counted


class SFTView:
    """Shows a row with `input_ids` and `labels`, or each document of a packed row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts, self.roles = TokenTexts(tokenizer), Roles(tokenizer)
        self.collator = JoiningCollator(tokenizer.pad_token_id)

    def __call__(self, row: dict[str, Any]) -> RowView:
        batch = self.collator([row])
        learned = batch["labels"][0].ne(IGNORE)
        learned[0] = False  # the loss compares labels with the predictions of the token before
        tokens = self.texts.tokens(batch["input_ids"][0].tolist(), learned.tolist())
        if "pieces" in row:  # of a stream
            return RowView([Part("row", tokens, [("documents", f"{row['pieces']:,}"), counted(tokens)])])
        documents = row.get("documents", [row])
        parts, start = [], 0
        for number, document in enumerate(documents, 1):
            title = f"document {number} of {len(documents)}" if "documents" in row else "row"
            part = tokens[start : start + len(document["input_ids"])]
            facts = [_beginning(part, document["prompt_length"]), counted(part)]
            parts.append(Part(title, part, facts, roles=self.roles.of_document(document)))
            start += len(part)
        return RowView(parts)


def _beginning(tokens: list[Token], length: int) -> tuple[str, str]:
    """The number of tokens before the last turn, as a fact; they are a prompt if none of them is trained on."""
    is_trained = any(token.label != IGNORE for token in tokens[:length])
    return "before the last turn" if is_trained else "prompt", f"{length:,} tokens"
