"""The step has the shape it promises: how many tokens go through each layer, and how many rows through the head."""

import copy

import pytest
import torch
from torch import nn

from ebft.models.causal_lm import decoder_layers, is_reused
from tests.strided.families import tiny_model
from tests.strided.test_exactness import distinct_beginnings, make_trainer, unequal_batch, with_lora


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


def one_row():
    ids = torch.randint(3, 97, (1, 44), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids}


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("single_pass", [True, False])
@pytest.mark.parametrize("g", [1, 4])
def test_token_forwards_per_layer(g, single_pass, merge, tmp_path):
    model = tiny_model("llama")
    options = {"stride": 4, "context_length": 4, "generate_max_len": g, "feature_layers": [0.25, 0.5]}
    options |= {"single_pass": single_pass, "merge_rollouts": merge}
    trainer = make_trainer(model, tmp_path, temperature=0.2, **options)
    policy = count_tokens(decoder_layers(model))
    features = count_tokens(decoder_layers(trainer.feature_network.causal_lm))
    out = trainer.compute_loss(trainer.model, one_row(), return_outputs=True)[1]
    s, n, nb = 44, 3, out.anchors.shape[1]
    assert nb == (44 - g - 4) // 4 + 1
    generated = [distinct_beginnings(out, steps) if merge else n * nb * steps for steps in (g - 1, g)]
    assert not merge or generated[1] < 0.9 * n * nb * g
    sampling = training = s + generated[0]
    assert policy == [sampling if single_pass else sampling + training] * 4
    # Depth int(0.5 * 4) = 2: the upper half never runs.
    assert features == [s + generated[1]] * 2 + [0, 0]


def test_padding_and_missing_blocks_cost_nothing(tmp_path):
    model = tiny_model("llama")
    trainer = make_trainer(model, tmp_path, merge_rollouts=False)
    counts = count_tokens(decoder_layers(model))
    out = trainer.compute_loss(trainer.model, unequal_batch()[0], return_outputs=True)[1]
    assert out.block_mask.sum(1).tolist() == [4, 2, 2]
    assert counts == [27 + 22 + 13 + 8 * 3 * 3] * 4


def test_adapter_features_stop_at_the_deepest_layer_too(tmp_path):
    model = with_lora(tiny_model("llama"))
    trainer = make_trainer(model, tmp_path, feature_layers=[0.25], merge_rollouts=False)
    counts = count_tokens(decoder_layers(model.get_base_model()))
    out = trainer.compute_loss(trainer.model, one_row(), return_outputs=True)[1]
    n, nb, g = 3, out.anchors.shape[1], 4
    policy = 44 + n * nb * (g - 1)
    assert counts == [policy + 44 + n * nb * g] + [policy] * 3


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("single_pass", [True, False])
def test_head_sees_scored_rows_only(single_pass, merge, tmp_path):
    """One row per sampled distribution, and with a second forward one per scored token; one per token of the text."""
    model = tiny_model("llama")
    options = {"ce_coef": 0.0, "single_pass": single_pass, "merge_rollouts": merge}
    trainer = make_trainer(model, tmp_path, temperature=0.2, **options)
    rows = []
    model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    inputs, _ = unequal_batch()
    out = trainer.compute_loss(trainer.model, inputs, return_outputs=True)[1]
    blocks = int(out.block_mask.sum())  # a row with fewer blocks than the longest costs only its own
    n, g = 3, 4
    sampling = blocks + (distinct_beginnings(out, g - 1) if merge else blocks * n * (g - 1))
    text = 26 + 15 + 12
    assert sum(rows) == (sampling if single_pass else 2 * sampling) + text


def test_rollouts_leave_no_gradient_state(tmp_path):
    """Nothing but the training forward holds an autograd graph, and modes come back as they were."""
    model = tiny_model("gpt2")
    frozen = copy.deepcopy(model.state_dict())
    trainer = make_trainer(model, tmp_path)
    trainer.model.train()
    out = trainer.compute_loss(trainer.model, unequal_batch()[0], return_outputs=True)[1]
    assert trainer.model.training and all(m.training for m in trainer.model.modules())
    assert not any(value.requires_grad for value in vars(out).values())
    assert all(frozen[k].equal(v) for k, v in trainer.model.state_dict().items())
