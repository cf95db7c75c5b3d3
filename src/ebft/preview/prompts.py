"""Rows of prompts: the token ids of the prompt and of the references of all turns."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.conversation import Conversation, Renderer
from ebft.preview.roles import Roles, runs
from ebft.preview.view import Part, RowView, TokenTexts, counted, printable
from ebft.structured.references import labelled_reference

LONGEST = 400  # characters of a column that are shown
_SHOWN = ("prompt", "remaining_turns")


class PromptView:
    """Shows a row with `prompt` and, if completions are compared with it, the reference in `ground_truth`.

    `ce_coef` is the weight of the cross-entropy on references, None for methods without it; `note` is shown with every
    prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict[str, Any] | None,
        compares: bool,
        ce_coef: float | None = None,
        mask_thinking: bool = False,
        note: str | None = None,
    ) -> None:
        self.texts, self.renderer = TokenTexts(tokenizer), Renderer(tokenizer, chat_template_kwargs)
        self.roles = Roles(tokenizer)
        self.compares, self.ce_coef, self.mask_thinking = compares, ce_coef, mask_thinking
        self.notes = [] if note is None else [("note", note)]

    def __call__(self, row: dict[str, Any]) -> RowView:
        reference = row.get("ground_truth")
        compares = self.compares and isinstance(reference, str)
        conversation = self.renderer.of_row(row, compares)
        prompt = conversation.prompt_ids
        kind = "text" if isinstance(row["prompt"], str) else f"{len(row['prompt'])} messages"
        facts = [("kind", kind), ("tokens", f"{len(prompt):,}"), *self.notes]
        roles = runs(["prompt"] * len(prompt))
        parts = [Part("prompt", self.texts.tokens(prompt, [False] * len(prompt)), facts, roles=roles)]
        if compares or len(conversation.turns) > 1:
            parts += self._turns(conversation)
        shown = _SHOWN + (("ground_truth",) if compares else ())
        return RowView(parts, [(name, _short(value)) for name, value in row.items() if name not in shown])

    def _turns(self, conversation: Conversation) -> list[Part]:
        """A part for the reference of each turn, and for what is given before it."""
        ids, counts = labelled_reference(conversation, mask_thinking=self.mask_thinking)
        learned = [bool(count) and self.ce_coef is not None for count in counts]
        tokens = self.texts.tokens(ids, learned)
        parts, start = [], 0
        last = len(conversation.turns)
        for number, turn in enumerate(conversation.turns, start=1):
            if number > 1:
                given = tokens[start : start + len(turn.lead_ids)]
                roles = self.roles.of_gap(turn.lead_ids)
                parts.append(Part(f"given before turn {number}", given, [("tokens", f"{len(given):,}")], roles=roles))
                start += len(given)
            stop = len(tokens) if number == last else start + len(turn.reference_ids)
            title = "reference" if last == 1 else f"reference of turn {number}"
            roles = self.roles.of_completion([], ids[start:stop], "reference")
            parts.append(Part(title, tokens[start:stop], self._facts(tokens[start:stop]), roles=roles))
            start = stop
        return parts

    def _facts(self, tokens: list[Any]) -> list[tuple[str, str]]:
        if self.ce_coef is None:
            return [("tokens", f"{len(tokens):,}"), ("cross-entropy", "none with this method")]
        idle = [] if self.ce_coef else [("ebft.ce_coef", "0: the cross-entropy is not trained on")]
        return [counted(tokens), *idle]


def _short(value: Any) -> str:
    text = printable(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."
