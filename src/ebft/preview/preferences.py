"""Rows of preference methods: each completion after its prompt, with the tokens that the loss scores."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.preview.roles import Roles
from ebft.preview.view import Part, RowView, TokenTexts


class PreferenceView:
    """Shows a row with `prompt_ids`, and `chosen_ids` and `rejected_ids`, or `completion_ids` and `label`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts, self.roles = TokenTexts(tokenizer), Roles(tokenizer)

    def __call__(self, row: dict[str, Any]) -> RowView:
        names = [name for name in ("chosen", "rejected", "completion") if f"{name}_ids" in row]
        columns = [("label", str(row["label"]).lower())] if "label" in row else []
        return RowView([self._part(name, row["prompt_ids"], row[f"{name}_ids"]) for name in names], columns)

    def _part(self, title: str, prompt: list[int], completion: list[int]) -> Part:
        scored = [False] * len(prompt) + [True] * len(completion)
        if not prompt:
            scored[0] = False  # nothing predicts the first token
        tokens = self.texts.tokens(prompt + completion, scored)
        roles = self.roles.of_completion(prompt, completion, "completion")
        facts = [("prompt", f"{len(prompt):,} tokens"), ("scored", f"{sum(scored):,} of {len(scored):,} tokens")]
        return Part(title, tokens, facts, roles=roles)
