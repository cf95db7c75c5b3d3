"""Where the blocks of a document lie: anchors, block masks, positions and the order of rollout tokens.

B   documents (rows) in the batch     S   padded document length
NB  blocks per row (the longest's)    N   rollouts per block    G  tokens per rollout
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ebft.anchors import count_blocks, first_anchor

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Documents:
    """A batch of documents, real tokens first and padding last, whatever side it came in on.

    input_ids (B, S) long; lengths (B,) real tokens; prompt_length (B,), 0 for text without a prompt;
    ce_mask (B, S) bool: tokens that the cross-entropy term predicts (never position 0, never padding).
    """

    input_ids: Tensor
    lengths: Tensor
    prompt_length: Tensor
    ce_mask: Tensor

    @classmethod
    def from_inputs(cls, inputs: dict[str, Tensor]) -> Documents:
        """Read `input_ids` (B, S) with optional `attention_mask`, `labels`, `prompt_length`.

        Without `prompt_length`, a leading run of masked labels (-100) on real tokens is the prompt.
        """
        input_ids = inputs["input_ids"].long()
        if input_ids.dim() != 2 or input_ids.numel() == 0:
            raise ValueError(f"input_ids must be (batch, tokens) and not empty, got {tuple(input_ids.shape)}")
        mask, labels = inputs.get("attention_mask"), inputs.get("labels")
        mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        if mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask {tuple(mask.shape)} does not fit input_ids {tuple(input_ids.shape)}")
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(f"labels {tuple(labels.shape)} do not fit input_ids {tuple(input_ids.shape)}")
        order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)  # real tokens first, in their order
        lengths = mask.sum(1)
        length = int(lengths.max())
        if length == 0:
            raise ValueError("every token of the batch is padding: attention_mask is all zeros")
        order = order[:, :length]  # columns of padding only cost time
        input_ids = input_ids.gather(1, order)
        position = torch.arange(length, device=input_ids.device)
        real = position < lengths[:, None]
        target = real if labels is None else labels.gather(1, order).ne(IGNORE_INDEX) & real
        prompt_length = inputs.get("prompt_length")
        if prompt_length is None:
            prompt_length = _leading_masked(target, lengths)
        prompt_length = prompt_length.to(device=input_ids.device, dtype=torch.long).reshape(-1)
        if prompt_length.shape != lengths.shape or bool((prompt_length < 0).any()):
            raise ValueError(
                f"prompt_length must hold one number >= 0 per row, got {prompt_length.tolist()} "
                f"for {input_ids.shape[0]} rows"
            )
        # Padding ids may lie outside the vocabulary (-100, say); nothing reads their states.
        input_ids = torch.where(real, input_ids, 0)
        ce_mask = target & (position >= prompt_length[:, None]) & (position > 0)
        return cls(input_ids, lengths, prompt_length, ce_mask)


def _leading_masked(target: Tensor, lengths: Tensor) -> Tensor:
    """Length of the run of masked labels at the start of each row, 0 where all or none are masked."""
    leading = (target.cumsum(1) == 0).sum(1)
    return torch.where(leading < lengths, leading, 0)


@dataclass(frozen=True)
class StridedLayout:
    """The blocks of a batch and how its rollouts are laid out behind the documents.

    anchors (B, NB) long, 0 where masked; block_mask (B, NB) bool, True for real blocks, which come first in a
    row. Rollout tokens are kept block-major, (B, NB, N, T) flattened, so that neighbouring tokens need nearly
    the same prefix; everything handed to users is (B, N, NB, ...).
    """

    anchors: Tensor
    block_mask: Tensor
    num_samples: int
    generate_max_len: int

    @classmethod
    def place(
        cls,
        documents: Documents,
        *,
        stride: int,
        context_length: int,
        generate_max_len: int,
        n_samples_per_prompt: int,
        min_completion_prefix: int = 0,
    ) -> StridedLayout:
        """Anchors `a_b = a_0 + b * stride` for every b with `a_b + generate_max_len <= length`, per row.

        Raises ValueError when no row has room for a block.
        """
        first = first_anchor(documents.prompt_length, context_length, min_completion_prefix)
        blocks = count_blocks(documents.lengths, first, stride, generate_max_len)
        num_blocks = int(blocks.max())
        if num_blocks == 0:
            raise ValueError(
                f"no document of the batch has room for a block: lengths {documents.lengths.tolist()}, first anchors "
                f"{first.tolist()}, generate_max_len {generate_max_len}. Drop rows this short, or lower "
                "context_length, min_completion_prefix or generate_max_len"
            )
        b = torch.arange(num_blocks, device=first.device)
        block_mask = b < blocks[:, None]
        anchors = torch.where(block_mask, first[:, None] + b * stride, 0)
        return cls(anchors, block_mask, n_samples_per_prompt, generate_max_len)

    def to(self, device: torch.device | str) -> StridedLayout:
        """The same layout on another device."""
        return replace(self, anchors=self.anchors.to(device), block_mask=self.block_mask.to(device))

    @property
    def num_blocks(self) -> int:
        return self.anchors.shape[1]

    @property
    def num_generated(self) -> int:
        """Generated tokens in real blocks: the tokens that `rl_loss` is a mean over."""
        return int(self.block_mask.sum()) * self.num_samples * self.generate_max_len

    def rollout_positions(self, first_step: int, steps: int) -> Tensor:
        """Position ids `a_b + t` of tokens t in [first_step, first_step + steps): (B, NB * N * steps)."""
        t = torch.arange(first_step, first_step + steps, device=self.anchors.device)
        position = self.anchors[:, :, None, None] + t
        return position.expand(-1, -1, self.num_samples, -1).flatten(1)

    def reference_positions(self) -> Tensor:
        """Document positions of each block's reference tokens x[a_b : a_b + G): (B, NB, G)."""
        return self.anchors[:, :, None] + torch.arange(self.generate_max_len, device=self.anchors.device)


def generated_token_count(documents: Documents, **block_options) -> int:
    """Generated tokens that a batch will have; 0 where no row has room for a block."""
    n, g = block_options["n_samples_per_prompt"], block_options["generate_max_len"]
    first = first_anchor(
        documents.prompt_length, block_options["context_length"], block_options["min_completion_prefix"]
    )
    return int(count_blocks(documents.lengths, first, block_options["stride"], g).sum()) * n * g
