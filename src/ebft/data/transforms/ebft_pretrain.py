"""Raw text for strided mode: `{text}` -> `{input_ids, attention_mask, labels}`, every token a label.

The text is the column that the entry's `field` names, else `text`, else `content`, else `question`, followed by
`answer` where the row has one, else `prompt` and `answer` (the columns that the paper's authors give raw code and pairs
in). Special tokens are the tokenizer's own (a BOS where it
adds one). Documents longer than `sequence_len` are later cut into consecutive windows, so no text is lost; only the
first window starts with BOS.
"""

from ebft.data.transforms.rows import encode, first_present, text_of, text_row


def transform(cfg, dataset, **kwargs):
    """Transform for a column of raw text."""
    columns = [dataset.field] if dataset.field else ["text", "content", "question"]

    def transform_fn(example, tokenizer=None):
        is_pair = not dataset.field and "answer" in example
        readable = [*columns, "prompt"] if is_pair else columns
        column = first_present(example, readable, "text", "Name it with the entry's `field`.")
        text = text_of(example, column)
        if column in ("question", "prompt") and is_pair:
            text += text_of(example, "answer")
        return text_row(encode(tokenizer, text, special=True) if text.strip() else [])

    return transform_fn, {"remove_columns": "__all__"}
