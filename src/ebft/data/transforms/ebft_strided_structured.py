"""Prompt/completion rows: `{input, output}` -> `{input_ids, labels, prompt_length}`.

Prompt and completion are tokenised separately, so no token spans the boundary and `prompt_length` is exact; nothing is
inserted between them. The completion ends with EOS. Other supported column names are in `pairs.PAIRS`.
`ebft.mask_thinking_ce` removes the labels of thinking blocks in the completion. `transform_prompts` returns
`{prompt, ground_truth}`, both as text, for structured mode and `rl: grpo`: the same tokens, without a chat template.
"""

from ebft.data.thinking import thinking_spans, token_mask
from ebft.data.transforms.pairs import prompt_and_completion
from ebft.data.transforms.rows import encode, segments_row, without_labels
from ebft.errors import DataError


def transform(cfg, **kwargs):
    """Transform for rows with a prompt and a reference completion."""
    train_on_inputs = cfg.train_on_inputs
    mask_thinking = cfg.ebft.mask_thinking_ce

    def transform_fn(example, tokenizer=None):
        prompt, completion = prompt_and_completion(example)
        if not completion.strip():
            return segments_row([(encode(tokenizer, prompt, special=True), False), ([], True)], False)
        prompt_ids = _without_eos(tokenizer, encode(tokenizer, prompt, special=True))
        completion_ids = encode(tokenizer, completion, special=False)
        row = segments_row([(prompt_ids, False), (_with_eos(tokenizer, completion_ids), True)], train_on_inputs)
        if not mask_thinking:
            return row
        thought = token_mask(tokenizer, completion, thinking_spans(completion))
        masked = [False] * len(prompt_ids) + thought
        return without_labels(row, masked + [False] * (len(row["labels"]) - len(masked)))  # its EOS is trained on

    return transform_fn, {"remove_columns": "__all__"}


def transform_prompts(cfg, **kwargs):
    """Transform for rows whose prompt is continued as plain text."""

    def transform_fn(example, tokenizer=None):
        prompt, completion = prompt_and_completion(example)
        return {"prompt": prompt, "ground_truth": completion}

    return transform_fn, {"remove_columns": "__all__"}


def _with_eos(tokenizer, ids: list[int]) -> list[int]:
    """A reference ends with EOS, so that the model learns where to stop."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token to end a completion with. Set special_tokens.eos_token.")
    return ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def _without_eos(tokenizer, ids: list[int]) -> list[int]:
    """Some tokenizers end every text with EOS, but a prompt is continued."""
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
