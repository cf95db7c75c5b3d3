"""Prompt/completion rows for structured mode: `{input, output}` -> `{prompt, ground_truth}`, the prompt one user turn.

Other column names are those of `pairs.PAIRS`.
"""

from ebft.data.transforms.pairs import prompt_and_completion


def transform(cfg, **kwargs):
    """Transform for rows with a prompt and a reference completion."""

    def transform_fn(example, tokenizer=None):
        prompt, completion = prompt_and_completion(example)
        return {"prompt": [{"role": "user", "content": prompt}], "ground_truth": completion}

    return transform_fn, {"remove_columns": "__all__"}
