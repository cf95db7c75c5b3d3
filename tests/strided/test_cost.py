"""The step has the shape it promises: how many tokens go through each layer, and how many rows through the head."""

import time
import timeit

import pytest
import torch
from torch import nn

from ebft.models.causal_lm import decoder_layers, is_reused
from ebft.prefix.forward import ATTENTION, ROWS, STATES
from tests.strided.families import tiny_model
from tests.strided.test_exactness import distinct_beginnings, make_trainer, unequal_batch


def count_tokens(layers):
    """Tokens that each layer multiplies its weights by; what is replayed is multiplied once."""
    counts = [0] * len(layers)

    def counter(index):
        def hook(module, args, output):
            counts[index] += 0 if is_reused(output) else output.shape[:-1].numel()

        return hook

    for i, layer in enumerate(layers):
        projection = layer.self_attn.q_proj
        linear = projection if isinstance(projection, nn.Linear) else projection.base_layer
        linear.register_forward_hook(counter(i))
    return counts


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("single_pass", [True, False])
@pytest.mark.parametrize("g", [1, 4])
def test_tokens_of_each_layer_and_rows_of_the_head(g, single_pass, merge, tmp_path):
    """Padding and missing blocks cost nothing; the head sees what is sampled from or scored, and tokens of the text."""
    model = tiny_model("llama")
    options = {"stride": 4, "generate_max_len": g, "feature_layers": [0.25, 0.5], "temperature": 0.2, "ce_coef": 0.0}
    trainer = make_trainer(model, tmp_path, single_pass=single_pass, merge_rollouts=merge, **options)
    policy = count_tokens(decoder_layers(model))
    features = count_tokens(decoder_layers(trainer.feature_network.causal_lm))
    rows = []
    model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    out = trainer.compute_loss(trainer.model, unequal_batch()[0], return_outputs=True)[1]
    n, per_row = 3, out.block_mask.sum(1).tolist()
    assert per_row == ([5, 4, 3] if g == 4 else [6, 4, 3])
    blocks, generated = sum(per_row), {}
    for steps in (g - 1, g):
        generated[steps] = distinct_beginnings(out, steps) if merge else n * blocks * steps
    assert not merge or generated[g] < 0.9 * n * blocks * g
    passes = 1 if single_pass else 2
    assert policy == [passes * (27 + 22 + 13 + generated[g - 1])] * 4
    # Depth int(0.5 * 4) = 2: the upper half never runs.
    assert features == [27 + 22 + 13 + generated[g]] * 2 + [0, 0]
    assert sum(rows) == passes * (blocks + generated[g - 1]) + 26 + 15 + 12


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way", "length", "most"), [
    ("qwen3_5_text", STATES, 512, 3), ("qwen3", ROWS, 128, 60),
])  # fmt: skip
def test_what_other_ways_cost(family, way, length, most, tmp_path):
    """Seconds of a step on one document, by the way that a model takes and by attention to a shared prefix."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "max_position_embeddings": 512}
    options = {"stride": 8, "context_length": 8, "generate_max_len": 8, "n_samples_per_prompt": 4}
    inputs, seconds = {"input_ids": torch.arange(length)[None] % 87 + 3}, {}
    for name, taken in (("qwen3", ATTENTION), (family, way)):
        model = tiny_model(name, **sizes, layer_types=None)
        trainer = make_trainer(model, tmp_path / taken, single_pass=False, merge_rollouts=False, **options)
        model.way = trainer.feature_network.causal_lm.way = taken
        step = lambda trainer=trainer, model=model: trainer.compute_loss(model, inputs).backward()
        seconds[taken] = min(timeit.repeat(step, timer=time.process_time, number=1, repeat=2))
    ratio = seconds[way] / seconds[ATTENTION]
    print(f"{way}, {length} tokens: {ratio:.2f} times the {seconds[ATTENTION]:.2f} s of {ATTENTION}")
    assert ratio < most
