"""Rows of prompts as conversations of token ids, and the lengths that limit their replies."""

from __future__ import annotations

from typing import Any

from ebft.data.conversation import Conversation, Renderer
from ebft.data.rendering import REPLY, ROW_KWARGS, TOOLS
from ebft.errors import DataError
from ebft.models.causal_lm import unwrap_adapter
from ebft.structured.over_trl import OverTRL
from ebft.structured.reward import FeatureMatchingReward
from ebft.structured.rollouts.server_rollouts import ServerRollouts
from ebft.structured.rollouts.turns import Limits, ReferenceLimit

Row = dict[str, Any]
CONVERSATION = ("prompt", "ground_truth", "remaining_turns", TOOLS, REPLY, ROW_KWARGS)


class HasConversations(OverTRL):
    """A trainer that renders its rows; `server` is the one that generates, if any, and has a maximum length too."""

    renderer: Renderer
    server: ServerRollouts | None

    def conversations(self, rows: list[Row]) -> list[Conversation]:
        """Return the rows' prompts and references as token ids; the adjacent samples of a group share one object."""
        found: list[Conversation] = []
        for index, row in enumerate(rows):
            if index and all(rows[index - 1].get(key) == row.get(key) for key in CONVERSATION):
                found.append(found[-1])
            else:
                found.append(self._conversation(row))
        return found

    def _conversation(self, row: Row) -> Conversation:
        # With GRPO, ground_truth may be whatever a reward function accepts.
        compares = self._compares_references()
        conversation = self.renderer.of_row(row, compares)
        positions, length = self._positions(), len(conversation.prompt_ids) + len(conversation.reference_ids) + 1
        if positions is not None and length > positions and conversation.turns[0].reference_ids:
            raise DataError(
                f"a prompt of {len(conversation.prompt_ids)} tokens and its reference of "
                f"{len(conversation.reference_ids)} tokens plus the end token exceed the model's "
                f"max_position_embeddings ({positions}). Remove such rows."
            )
        return conversation

    def _compares_references(self) -> bool:
        """Whether a reward compares completions with their references, which must then fit the model."""
        return any(isinstance(func, FeatureMatchingReward) for func in self.reward_funcs)

    def _positions(self) -> int | None:
        return getattr(unwrap_adapter(self.model).config.get_text_config(), "max_position_embeddings", None)

    def _limits(self) -> Limits:
        lengths = [self._positions(), self.server.max_model_len if self.server is not None else None]
        return Limits(
            self.max_completion_length,
            self._reference_limit(),
            min((length for length in lengths if length is not None), default=None),
        )

    def _reference_limit(self) -> ReferenceLimit | None:
        """Return how references limit the length of completions; None, since GRPO does not require references."""
        return None
