"""Token ids of references, with a mask of the tokens included in the cross-entropy."""

from __future__ import annotations

from ebft.data.conversation import Conversation, Prompt, Renderer, end_length
from ebft.data.thinking import thinking_spans, token_mask


def labelled_reference(
    conversation: Conversation, renderer: Renderer, prompt: Prompt, *, mask_thinking: bool
) -> tuple[list[int], list[int]]:
    """Return the ids of the reference after the prompt, each reply with its end token, and their mask (0 or 1).

    The mask is 1 for replies and their end tokens, and 0 for the turns between them and, with `mask_thinking`, for
    thinking blocks.
    """
    ids: list[int] = []
    counts: list[int] = []
    for number, turn in enumerate(conversation.turns):
        if number:
            # The tokens before a reply start with the end of the previous reply.
            ids += turn.lead_ids
            ended = end_length(turn.lead_ids, renderer.end_ids())
            counts += [int(index == ended - 1) for index in range(len(turn.lead_ids))]
        ids += turn.reference_ids
        counts += _counted(turn.reference, len(turn.reference_ids), renderer, mask_thinking)
    end = renderer.end_id(prompt)
    return (ids, counts) if end is None else ([*ids, end], [*counts, 1])


def _counted(reference: str, length: int, renderer: Renderer, mask_thinking: bool) -> list[int]:
    if not mask_thinking:
        return [1] * length
    thinking = token_mask(renderer.tokenizer, reference, thinking_spans(reference))
    return [int(not inside) for inside in thinking[:length]]
