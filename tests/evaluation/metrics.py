"""Functions that configs of these tests name: a transform to prompts, and downstream metrics."""


def prompt_rows(cfg, **kwargs):
    def transform_fn(example, tokenizer=None):
        return {"prompt": example["input"], "ground_truth": example["output"]}

    return transform_fn, {"remove_columns": "__all__"}


def length(prompt, completions, row):
    assert prompt == row["input"]
    (completion,) = completions
    return len(completion)


def even_rows(prompt, completions, row):
    return None if row["number"] % 2 else True


def reward(prompt, completions, row):
    return 100.0


def curve_of(prompt, completions, row):
    return 1.0
