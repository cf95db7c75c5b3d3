"""Rows of strided mode: the documents and the blocks that the trainer places in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ebft.config.options import EBFTSection
from ebft.data.collator import DocumentCollator
from ebft.preview.roles import Roles
from ebft.preview.view import Block, Part, RowView, TokenTexts, counted
from ebft.strided.config import BLOCK_OPTIONS
from ebft.strided.layout import Documents, StridedLayout

CONTEXT = 8  # tokens shown before an anchor


class StridedView:
    """Shows a row, or each document of a packed row, with the collator and the layout of the trainer."""

    def __init__(self, options: EBFTSection, tokenizer: PreTrainedTokenizerBase) -> None:
        self.options, self.texts, self.roles = options, TokenTexts(tokenizer), Roles(tokenizer)
        self.collator = DocumentCollator(tokenizer.pad_token_id, with_prompt_length=True)

    def __call__(self, row: dict[str, Any]) -> RowView:
        documents = Documents.from_inputs(self.collator([row]))
        layout = StridedLayout.place(documents, **{name: getattr(self.options, name) for name in BLOCK_OPTIONS})
        references = documents.tokens[layout.reference_index()].split([len(anchors) for anchors in layout.anchors])
        parts = []
        for number, (start, stop) in enumerate(layout.spans):
            title = "document" if len(layout.spans) == 1 else f"document {number + 1} of {len(layout.spans)}"
            parts.append(
                self._part(
                    title,
                    documents.tokens[start:stop].tolist(),
                    documents.ce_mask[start:stop].tolist(),
                    [turn for turn in documents.turns[number].tolist() if turn[1]],
                    layout.anchors[number],
                    references[number],
                )
            )
        roles = [self.roles.of_document(document) for document in row.get("documents", [row])]
        return RowView([replace(part, roles=own) for part, own in zip(parts, roles, strict=True)])

    def _part(
        self,
        title: str,
        ids: list[int],
        learned: list[bool],
        turns: list[list[int]],
        anchors: list[int],
        references: torch.Tensor,
    ) -> Part:
        """One document; `references` are the tokens of its blocks (blocks, generate_max_len)."""
        tokens = self.texts.tokens(ids, learned, anchors)
        blocks = [
            Block(
                anchor,
                self.texts.joined(ids[max(0, anchor - CONTEXT) : anchor]),
                self.texts.joined(reference.tolist()),
            )
            for anchor, reference in zip(anchors, references)
        ]
        return Part(title, tokens, [*self._facts(turns, anchors), counted(tokens), *self._idle()], blocks)

    def _facts(self, turns: list[list[int]], anchors: list[int]) -> list[tuple[str, str]]:
        options, prompt = self.options, turns[0][0]
        sampled = len(anchors) * options.n_samples_per_prompt * options.generate_max_len
        return [
            ("prompt", f"{prompt:,} tokens" if prompt else "none"),
            *([("turns", ", ".join(self._of_turn(turn, anchors) for turn in turns))] if len(turns) > 1 else []),
            ("first anchor", f"{anchors[0]}" if anchors else "none: too short for a block"),
            ("blocks", f"{len(anchors):,}, stride {options.stride}, {options.generate_max_len} tokens each"),
            ("sampled", f"{sampled:,} tokens: {options.n_samples_per_prompt} rollouts per anchor"),
        ]

    def _of_turn(self, turn: list[int], anchors: list[int]) -> str:
        start, end = turn
        count = sum(start <= anchor < end for anchor in anchors)
        return f"{start}-{end - 1} ({count} block{'s' * (count != 1)})"

    def _idle(self) -> list[tuple[str, str]]:
        return [] if self.options.ce_coef else [("ebft.ce_coef", "0: the cross-entropy is not trained on")]
