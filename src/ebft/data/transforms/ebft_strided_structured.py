"""Prompt/completion rows: `{input, output}` -> `{input_ids, labels, prompt_length}`.

Nothing is inserted between prompt and completion. Other supported column names are in `pairs.PAIRS`.
`transform_prompts` returns `{prompt, ground_truth}`, both as text, for structured mode and `rl: grpo`: the same tokens,
without a chat template.
"""

from ebft.data.transforms.pairs import pair_prompts, pair_tokens, prompt_and_completion


def transform(cfg, **kwargs):
    """Transform for rows with a prompt and a reference completion."""
    return pair_tokens(cfg, prompt_and_completion)


def transform_prompts(cfg, **kwargs):
    """Transform for rows whose prompt is continued as plain text."""
    return pair_prompts(prompt_and_completion)
