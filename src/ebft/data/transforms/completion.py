"""Raw text for SFT and continual pretraining: as `ebft_pretrain`, with EOS at the end of each document."""

from ebft.data.transforms import ebft_pretrain
from ebft.data.transforms.rows import text_row


def transform(cfg, dataset, **kwargs):
    """Transform for a column of raw text, including the end of the text."""
    raw_fn, map_kwargs = ebft_pretrain.transform(cfg, dataset=dataset)

    def transform_fn(example, tokenizer=None):
        row = raw_fn(example, tokenizer=tokenizer)
        ids = row["input_ids"]
        if not ids or ids[-1] == tokenizer.eos_token_id or tokenizer.eos_token_id is None:
            return row
        return text_row([*ids, tokenizer.eos_token_id])

    return transform_fn, map_kwargs
