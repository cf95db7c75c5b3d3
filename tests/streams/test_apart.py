"""Documents of a row against the same documents one by one: losses, gradients, and models that cannot do it."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from ebft.data.streaming.rows import Position
from ebft.data.transforms.rows import IGNORE
from ebft.errors import ModelError
from ebft.streams.apart import check_apart
from ebft.streams.collator import StreamCollator

COLLATOR = StreamCollator(pad_token_id=0)
# Two rows of 12 tokens: the lengths of their documents.
LENGTHS = [(5, 4, 3), (1, 11)]


def llama(attention):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        use_cache=False,
    )
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def row(ids, lengths):
    starts = {sum(lengths[:number]) for number in range(len(lengths))}
    labels = [IGNORE if place in starts else token for place, token in enumerate(ids)]
    return {"input_ids": ids, "labels": labels, "seq_lengths": list(lengths), "position": Position(), "pieces": 1}


def rows():
    generator = torch.Generator().manual_seed(1)
    return [row(torch.randint(0, 64, (12,), generator=generator).tolist(), lengths) for lengths in LENGTHS]


def naive_loss(model, rows):
    """The mean negative log-likelihood of all tokens but the first of each document, one document at a time."""
    losses = []
    for each in rows:
        start = 0
        for length in each["seq_lengths"]:
            ids = torch.tensor(each["input_ids"][start : start + length])
            start += length
            if length > 1:
                logits = model(input_ids=ids[None]).logits[0, :-1].float()
                losses.append(F.cross_entropy(logits, ids[1:], reduction="none"))
    return torch.cat(losses).mean()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_have_the_loss_and_the_gradients_of_separate_ones(attention):
    model = llama(attention)
    batch = COLLATOR(rows())
    assert "attention_mask" not in batch and batch["position_ids"][0].tolist() == [*range(5), *range(4), *range(3)]
    inputs = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    loss, expected = model(**inputs).loss, naive_loss(model, rows())
    torch.testing.assert_close(loss, expected)
    ours, theirs = gradients(model, loss), gradients(model, expected)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


def test_a_flat_batch_has_the_same_loss():
    model = llama("sdpa")
    batch = StreamCollator(pad_token_id=0, flatten=True)(rows())
    assert batch["input_ids"].shape == (1, 24)
    inputs = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    torch.testing.assert_close(model(**inputs).loss, naive_loss(model, rows()))


def test_a_transformer_passes_the_check():
    check_apart(llama("sdpa"), COLLATOR)


def test_a_recurrent_model_is_refused():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False)
    with pytest.raises(ModelError, match="MambaForCausalLM does not keep .* Set pretrain_multipack_attn: false"):
        check_apart(MambaForCausalLM(config), COLLATOR)


def test_empty_rows_of_steps_before_make_an_empty_batch():
    assert COLLATOR([{}, {}]) == {}


def test_held_out_rows_are_padded():
    batch = COLLATOR([{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "prompt_length": 0}, {"input_ids": [4]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]] and "position" not in batch
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]] and "prompt_length" not in batch


def test_a_model_without_positions_is_refused():
    class Plain(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, use_cache=None):
            raise AssertionError("not called")

    with pytest.raises(ModelError, match="Plain does not accept the positions of several documents"):
        check_apart(Plain(llama("sdpa").config), COLLATOR)
