"""Layout of documents and blocks: documents are concatenated without padding, followed by all rollouts.

B   documents of the batch    S  tokens of all documents together    K  turns of a document
M   blocks of all documents   N  rollouts per block   G  tokens per rollout   NB  blocks of the longest document
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ebft.anchors import BlockOptions, row_anchors
from ebft.machine import copy_to

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Documents:
    """A batch of concatenated documents, without padding. The fields are on the host, since layouts are made there.

    host_tokens (S,) long; lengths (B,) long; prompt_length (B,) long, 0 for text without a prompt; turns (B, K, 2)
    long: start and end of each turn that contains blocks, in the order of the document, (0, 0) for documents with
    fewer; ce_mask (S,) bool: tokens predicted by the cross-entropy term (never the first of a document). On `device`,
    in one copy: tokens (S,), positions (S,), and predicted: the indices of the tokens in ce_mask.
    """

    host_tokens: Tensor
    lengths: Tensor
    prompt_length: Tensor
    turns: Tensor
    ce_mask: Tensor
    device: torch.device

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, Any], device: torch.device | None = None) -> Documents:
        """Read `input_ids` (rows, tokens) and optionally the other inputs, for passes on `device` (default: theirs).

        These are `attention_mask`, `labels` and `position_ids` (rows, tokens), `prompt_length` (B,), `turn_spans`
        (B, K, 2). A row is a single document, padded on either side. With `position_ids`, a row may contain several
        documents; a new one starts wherever the positions return to 0. `prompt_length` has one value per document;
        without it, a leading run of masked labels (-100) is the prompt. Blocks and cross-entropy are restricted to the
        turns: their start and end positions within the document, filled up with (0, 0) in documents with fewer turns. A
        document without any is a single turn, from `prompt_length` to its end. Inputs on a device are read on the host,
        which waits for it. Raises ValueError for inconsistent inputs.
        """
        device = inputs["input_ids"].device if device is None else device
        inputs = {name: values.cpu() for name, values in inputs.items() if isinstance(values, Tensor)}
        input_ids = inputs["input_ids"].long()
        given = {name: inputs.get(name) for name in ("attention_mask", "labels", "position_ids")}
        mask = torch.ones_like(input_ids) if given["attention_mask"] is None else given["attention_mask"]
        real = mask.bool()
        if mask.max() > 1:
            raise ValueError(
                f"attention_mask must contain only 0 and 1, got {int(mask.max())}. With several documents in a row, "
                "pass position_ids"
            )
        if (real.int().diff(dim=1) > 0).sum(1).add(real[:, 0]).max() > 1:
            raise ValueError("attention_mask has gaps: padding must be at the start or end of a row")
        lengths = real.sum(1) if given["position_ids"] is None else _packed_lengths(given["position_ids"], real)
        labels = given["labels"]
        target = torch.ones_like(input_ids[real]).bool() if labels is None else labels[real].ne(IGNORE_INDEX)
        tokens = input_ids[real]
        position = _positions(lengths, len(tokens))
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
        prompt_length = inputs.get("prompt_length")
        if prompt_length is None:
            # Masked labels at the start of each document; its length if all are masked.
            first = torch.where(target, position, lengths[document])
            prompt_length = torch.zeros_like(lengths).scatter_reduce(0, document, first, "amin", include_self=False)
        prompt_length = prompt_length.long().reshape(-1)
        if prompt_length.shape != lengths.shape or bool((prompt_length < 0).any()):
            raise ValueError(f"prompt_length must be one value, at least 0, per document, got {prompt_length.tolist()}")
        turns = _turns(inputs.get("turn_spans"), prompt_length, lengths)
        starts, ends = turns[document].unbind(-1)  # (S, K)
        in_turn = ((position[:, None] >= starts) & (position[:, None] < ends)).any(1)
        return cls(tokens, lengths, prompt_length, turns, target & in_turn & (position > 0), device)

    @cached_property
    def host_positions(self) -> Tensor:
        """`positions`, on the host."""
        return _positions(self.lengths, len(self.host_tokens))

    @cached_property
    def _on_device(self) -> list[Tensor]:
        return copy_to(self.device, self.host_tokens, self.host_positions, self.ce_mask.nonzero().squeeze(1))

    @property
    def tokens(self) -> Tensor:
        """The tokens of all documents: (S,)."""
        return self._on_device[0]

    @property
    def positions(self) -> Tensor:
        """Position of every token within its document: (S,)."""
        return self._on_device[1]

    @property
    def predicted(self) -> Tensor:
        """Indices of the tokens in `ce_mask` among the S tokens, ascending."""
        return self._on_device[2]

    def anchors(self, options: BlockOptions) -> list[list[range]]:
        """Return the anchors of each turn of each document."""
        tokens = self.host_tokens.numpy()
        ends = [0, *self.lengths.cumsum(0).tolist()]
        return [
            row_anchors(tokens[start:end], turns, options)
            for start, end, turns in zip(ends, ends[1:], self.turns.tolist())
        ]

    def to(self, device: torch.device | str) -> Documents:
        """Return the same documents for passes on another device."""
        return self if torch.device(device) == self.device else replace(self, device=torch.device(device))

    def between(self, first: int, stop: int, scored: int = 0) -> Documents:
        """Return documents [first, stop), with `ce_mask` set to False for the first `scored` tokens."""
        ends = [0, *self.lengths.cumsum(0).tolist()]
        tokens = slice(ends[first], ends[stop])
        ce_mask = self.ce_mask[tokens].clone()
        ce_mask[:scored] = False
        per_document = (values[first:stop] for values in (self.lengths, self.prompt_length, self.turns))
        return Documents(self.host_tokens[tokens], *per_document, ce_mask, self.device)


def _positions(lengths: Tensor, total: int) -> Tensor:
    """Return the concatenated positions 0, ..., length - 1 of each document, `total` in number: (S,)."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(total) - starts.repeat_interleave(lengths)


def _packed_lengths(position_ids: Tensor, real: Tensor) -> Tensor:
    """Return the lengths of packed documents, given positions that restart at 0 for each document: (B,)."""
    position = position_ids[real].long()
    row_starts = torch.zeros_like(position, dtype=torch.bool)
    rows = real.sum(1)
    row_starts[(rows.cumsum(0) - rows)[rows > 0]] = True
    begins = row_starts | (position == 0)
    starts = begins.nonzero().squeeze(1)
    lengths = torch.diff(starts, append=starts.new_tensor([len(position)]))
    if not position.equal(_positions(lengths, len(position))):
        raise ValueError("position_ids must be 0, 1, 2, ... within each document of a row")
    return lengths


def _turns(given: Tensor | None, prompt_length: Tensor, lengths: Tensor) -> Tensor:
    """Return the given turns, checked, or a single one for documents without any: (B, K, 2)."""
    whole = torch.stack([prompt_length, lengths], dim=-1)[:, None]
    if given is None:
        return whole
    if given.dim() != 3 or given.shape[0] != len(lengths) or given.shape[2] != 2:
        raise ValueError(f"turn_spans must have the shape ({len(lengths)}, turns, 2), got {tuple(given.shape)}")
    turns = given.long()
    starts, ends = turns.unbind(-1)
    empty = (starts == 0) & (ends == 0)
    within = empty | ((starts >= 0) & (starts < ends) & (ends <= lengths[:, None]))
    in_order = empty[:, 1:] | (~empty[:, :-1] & (starts[:, 1:] >= ends[:, :-1]))
    wrong = ~within.all(1) | ~in_order.all(1)
    if wrong.any():
        document = int(wrong.nonzero()[0])
        raise ValueError(
            f"turn_spans of document {document}, {turns[document].tolist()}, must be pairs (start, end) in order "
            f"within its {int(lengths[document])} tokens, followed only by (0, 0)"
        )
    if turns.shape[1] == 0:
        return whole
    return torch.cat([torch.where(empty.all(1)[:, None, None], whole, turns[:, :1]), turns[:, 1:]], dim=1)


@dataclass(frozen=True)
class StridedLayout:
    """The blocks of a batch, ordered by document and then by anchor.

    `spans[d]` is the (start, end) of document d among the S tokens; `anchors[d]` lists the anchors of its blocks and
    is empty if the document is too short for a block. `merge_rollouts`: whether tokens that rollouts of a block begin
    in common are computed once. `end_ids`: the tokens that end a text and a rollout. `vocabulary`: as in
    `BlockOptions`. Tensors returned to users are (B, N, NB, ...), see `for_users`.
    """

    spans: list[tuple[int, int]]
    anchors: list[list[int]]
    num_samples: int
    generate_max_len: int
    merge_rollouts: bool
    device: torch.device
    cuda_graphs: bool = False
    end_ids: tuple[int, ...] = ()
    vocabulary: int | None = None

    @classmethod
    def place(cls, documents: Documents, options: BlockOptions) -> StridedLayout:
        """Place the anchors `a_b = a_0 + b * stride` of each turn where it goes on, see `ebft.anchors.turn_anchors`.

        `a_0` follows the start of the turn: no reference reaches into the text after the turn. Raises ValueError if
        every turn is too short for a block.
        """
        lengths, turns = documents.lengths.tolist(), documents.turns.tolist()
        of_turns = documents.anchors(options)
        anchors = [list(chain(*row)) for row in of_turns]
        if not any(anchors):
            several = f", turns {turns}" if documents.turns.shape[1] > 1 else ""
            raise ValueError(
                f"every document of the batch is too short for a block: lengths {lengths}{several}, first anchors "
                f"{[turn.start for row in of_turns for turn in row]}, generate_max_len {options.generate_max_len}. "
                "Remove rows this short, or reduce context_length, min_completion_prefix or generate_max_len"
            )
        ends = torch.tensor(lengths).cumsum(0).tolist()
        spans = [(end - length, end) for end, length in zip(ends, lengths)]
        device = documents.device
        merge = device.type == "cpu" if options.merge_rollouts is None else options.merge_rollouts
        sizes = options.n_samples_per_prompt, options.generate_max_len
        return cls(spans, anchors, *sizes, merge, device, options.cuda_graphs, options.end_ids, options.vocabulary)

    def to(self, device: torch.device | str) -> StridedLayout:
        """Return the same layout on another device."""
        return self if torch.device(device) == self.device else replace(self, device=torch.device(device))

    @cached_property
    def _blocks(self) -> tuple[Tensor, ...]:
        """Anchor, first reference token, document, and number within it of every block: (M,) each."""
        blocks = [
            (anchor, start + anchor, document, number)
            for document, ((start, _), anchors) in enumerate(zip(self.spans, self.anchors))
            for number, anchor in enumerate(anchors)
        ]
        return copy_to(self.device, torch.tensor(blocks).T.contiguous())[0].unbind()

    @property
    def block_anchors(self) -> Tensor:
        """Anchor of every block, as a position within its document: (M,)."""
        return self._blocks[0]

    @property
    def block_index(self) -> Tensor:
        """Index of every block's first reference token among the S tokens: (M,)."""
        return self._blocks[1]

    @property
    def block_document(self) -> Tensor:
        """Document of every block: (M,)."""
        return self._blocks[2]

    @cached_property
    def tokens_beyond(self) -> int:
        """How many tokens after the S tokens the last block would need, if no text ended within it."""
        starts = (start + row[-1] for (start, _), row in zip(self.spans, self.anchors) if row)
        return max(0, max(starts) + self.generate_max_len - self.spans[-1][1])

    @property
    def num_blocks(self) -> int:
        return sum(len(row) for row in self.anchors)

    @cached_property
    def end_tokens(self) -> Tensor:
        return copy_to(self.device, torch.tensor(self.end_ids, dtype=torch.long))[0]

    def lengths(self, tokens: Tensor) -> Tensor:
        """Return the number of tokens up to the first that ends a text, which it includes: (..., G) -> (...)."""
        ends = torch.isin(tokens, self.end_tokens).int()
        return (ends.cumsum(-1) - ends == 0).sum(-1)

    def up_to_end(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Return values of the tokens, (..., G), with 0 after the first that ends a text."""
        return torch.where(mask_of(self.lengths(tokens), tokens.shape[-1]), values, 0.0) if self.end_ids else values

    def reference_index(self) -> Tensor:
        """Return the indices of each block's reference tokens x[a_b : a_b + G) among the S tokens: (M, G).

        Only the first `lengths` tokens belong to the reference; others may be of another turn or document.
        """
        index = self.block_index[:, None] + torch.arange(self.generate_max_len, device=self.device)
        return index.clamp_max(self.spans[-1][1] - 1)

    def block_mask(self) -> Tensor:
        """Return whether each of the NB blocks exists in a document, existing blocks first: (B, NB) bool."""
        return self.for_users(torch.ones_like(self.block_document, dtype=torch.bool))

    def for_users(self, values: Tensor) -> Tensor:
        """Return values of the blocks, (M, ...), as (B, NB, ...), zero-padded for documents with fewer than NB."""
        shape = len(self.anchors), max(len(row) for row in self.anchors)
        return values.new_zeros(*shape, *values.shape[1:]).index_put_(self._blocks[2:], values)


@dataclass(frozen=True)
class Part:
    """A contiguous subset of a batch's blocks (`blocks` among the M), with the documents that they need."""

    documents: Documents
    layout: StridedLayout
    blocks: slice


def split(documents: Documents, layout: StridedLayout, tokens_per_pass: int | None) -> list[Part]:
    """Split the batch into parts of at most `tokens_per_pass` rollout tokens, and at least one block each.

    None returns a single part. Every token marked in `ce_mask` is marked in exactly one part, in the original order.
    """
    size = layout.num_samples * layout.generate_max_len
    most = layout.num_blocks if tokens_per_pass is None else max(1, tokens_per_pass // size)
    if most >= layout.num_blocks:  # whose tensors are on the device already
        return [Part(documents, layout, slice(0, layout.num_blocks))]
    blocks = [(d, a) for d, row in enumerate(layout.anchors) for a in row]
    parts, last = [], -1
    for b in range(0, len(blocks), most):
        chunk = blocks[b : b + most]
        first = min(chunk[0][0], last + 1)  # include documents without blocks
        scored = 0 if last < first else layout.spans[last][1] - layout.spans[last][0]
        last = chunk[-1][0] if b + most < len(blocks) else len(layout.spans) - 1
        offset = layout.spans[first][0]
        spans = [(start - offset, end - offset) for start, end in layout.spans[first : last + 1]]
        anchors = [[a for d, a in chunk if d == document] for document in range(first, last + 1)]
        parts.append(
            Part(
                documents.between(first, last + 1, scored),
                replace(layout, spans=spans, anchors=anchors),
                slice(b, b + len(chunk)),
            )
        )
    return parts


def mask_of(lengths: Tensor, size: int) -> Tensor:
    """Return whether each of `size` tokens is among the first `lengths`: (...) -> (..., size) bool."""
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(-1)
