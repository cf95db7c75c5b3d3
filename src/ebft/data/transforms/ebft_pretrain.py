"""Raw text for strided mode: `{text}` -> `{input_ids, attention_mask, labels}`, with every token as a label.

The text is the column given by the entry's `field`, else `text`, else `content`, else `question` followed by `answer`
if the row has one, else `prompt` and `answer` (the columns of the paper authors' datasets of raw code and pairs).
Special tokens are those that the tokenizer adds (such as BOS). Documents longer than `sequence_len` are later cut into
consecutive windows, so no text is lost; only the first window starts with BOS.
"""

from ebft.data.transforms.rows import encode, first_present, text_of, text_row


def transform(cfg, dataset, **kwargs):
    """Transform for a column of raw text."""
    columns = [dataset.field] if dataset.field else ["text", "content", "question"]

    def transform_fn(example, tokenizer=None):
        is_pair = not dataset.field and "answer" in example
        readable = [*columns, "prompt"] if is_pair else columns
        hint = "Set `field` of the entry to its name, or use the columns question and answer, or prompt and answer."
        column = first_present(example, readable, "text", hint)
        text = text_of(example, column)
        if column in ("question", "prompt") and is_pair:
            text += text_of(example, "answer")
        return text_row(encode(tokenizer, text, special=True) if text.strip() else [])

    return transform_fn, {"remove_columns": "__all__"}
