"""The reference as text to be learned: which of its tokens the cross-entropy counts."""

from __future__ import annotations

from ebft.data.conversation import Conversation, Prompt, Renderer, end_length
from ebft.data.thinking import thinking_spans, token_mask


def labelled_reference(
    conversation: Conversation, renderer: Renderer, prompt: Prompt, *, mask_thinking: bool
) -> tuple[list[int], list[int]]:
    """Ids of the whole reference after the prompt, each reply with its end token, and 1 for the ids that count.

    Replies and their end tokens count, the turns between them do not, nor, with `mask_thinking`, do thinking blocks.
    """
    ids: list[int] = []
    counts: list[int] = []
    for number, turn in enumerate(conversation.turns):
        if number:
            # What leads to a reply begins with the end of the reply before it.
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
