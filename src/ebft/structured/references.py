"""Token ids of references, with a mask of the tokens included in the cross-entropy."""

from __future__ import annotations

from ebft.data.conversation import Conversation
from ebft.errors import DataError


def labelled_reference(conversation: Conversation, *, mask_thinking: bool) -> tuple[list[int], list[int]]:
    """Return the ids of the reference after the prompt, each reply with its end token, and their mask (0 or 1).

    The mask is 1 for replies and their end tokens, and 0 for the turns between them and, with `mask_thinking`, for
    thinking blocks. Raises DataError if the tokenizer cannot tell which tokens are thinking.
    """
    ids: list[int] = []
    counts: list[int] = []
    for number, turn in enumerate(conversation.turns):
        if number:  # the tokens before a reply start with the end of the previous reply
            ids += turn.lead_ids
            counts += [int(index < turn.ended) for index in range(len(turn.lead_ids))]
        ids += turn.reference_ids
        thinking = [False] * len(turn.reference_ids)
        if mask_thinking:
            if turn.thinking is None:
                raise DataError(
                    "ebft.mask_thinking_ce needs a tokenizer with offset mapping to find the tokens of thinking. Use a "
                    "fast tokenizer (one with a tokenizer.json)."
                )
            thinking = turn.thinking
        counts += [int(not inside) for inside in thinking]
    end = conversation.end_id
    return (ids, counts) if end is None else ([*ids, end], [*counts, 1])
