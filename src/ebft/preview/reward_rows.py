"""Rows of reward models: both texts of a pair, or a row with the classes of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.transforms.rows import IGNORE
from ebft.preview.roles import Roles, role_steps
from ebft.preview.view import Part, RowView, TokenTexts


class ComparisonView:
    """Shows the chosen and the rejected text of a pair, which have no labels, and its margin."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts, self.padding = TokenTexts(tokenizer), tokenizer.pad_token_id
        self.roles = Roles(tokenizer)

    def __call__(self, row: dict[str, Any]) -> RowView:
        sides = {name: row[f"{name}_ids"] for name in ("chosen", "rejected")}
        parts = [self._part(name, ids, other) for (name, ids), other in zip(sides.items(), [*sides.values()][::-1])]
        if "margin" in row:
            parts[0].facts.append(("margin", f"{row['margin']:g}"))
        return RowView(parts)

    def _part(self, name: str, ids: list[int], other: list[int]) -> Part:
        scored = max((index for index, token in enumerate(ids) if token != self.padding), default=0)
        facts = [
            ("length", f"{len(ids):,} tokens"),
            ("scored at", f"token {scored}, {self.texts.texts(ids)[scored]!r}"),
        ]
        roles = self.roles.of_pair(ids, other, f"{name} reply")
        return Part(name, self.texts.tokens(ids, [False] * len(ids)), facts, roles=roles)


class StepView:
    """Shows a row in which the last token of each step has its class as its label."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts = TokenTexts(tokenizer)

    def __call__(self, row: dict[str, Any]) -> RowView:
        ids, labels = row["input_ids"], row["labels"]
        plain = self.texts.tokens(ids, [False] * len(ids))
        tokens = [replace(token, label=label) for token, label in zip(plain, labels, strict=True)]
        steps = [label for label in labels if label != IGNORE]
        facts = [("length", f"{len(ids):,} tokens"), ("classes of steps", ", ".join(map(str, steps)))]
        return RowView([Part("row", tokens, facts, roles=role_steps(labels))])
