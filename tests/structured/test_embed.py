"""Shared prompts: embeddings of every model family equal those of one forward per sequence."""

import pytest
import torch

from ebft.features import FeatureNetwork
from ebft.structured.reward import embed_continuations, shares_prompts
from tests.strided.families import FAMILIES, RUNNING_STATE, VOCAB, for_oracle, tiny_model
from tests.structured import oracle

LAYERS = [0.25, 0.5, 1.0]


def compare(model):
    model.eval()
    generator = torch.Generator().manual_seed(3)
    draw = lambda count: torch.randint(3, VOCAB, (count,), generator=generator).tolist()
    prompt, continuations = draw(23), [draw(count) for count in (5, 1, 17, 0, 9)]
    for method in ("last_token", "mean_pooling", "completion_mean", "concat"):
        network = FeatureNetwork(model, LAYERS, method)
        found = embed_continuations(network, prompt, continuations)
        wanted = torch.stack(
            [oracle.embedding(for_oracle(model), prompt, ids, LAYERS, method) for ids in continuations]
        )
        assert (found - wanted).abs().max() < 1e-5


FAST = ("llama", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "bloom", "gpt_neo", "phimoe", "deepseek_v3", "llama4_text")
FAST += ("qwen3_5_text", "mamba2")


def marked(families):
    return [family if family in FAST else pytest.param(family, marks=pytest.mark.slow) for family in families]


@pytest.mark.parametrize("family", marked(FAMILIES))
def test_attention_families_share_the_prompt(family):
    model = tiny_model(family)
    assert shares_prompts(model)
    compare(model)


@pytest.mark.parametrize("family", marked(RUNNING_STATE))
def test_running_states_are_not_shared(family):
    model = tiny_model(family)
    assert not shares_prompts(model)
    compare(model)


def test_the_prompt_runs_once():
    model = tiny_model("llama").eval()
    seen = []
    network = FeatureNetwork(model, LAYERS, "last_token")
    network.causal_lm.model.embed_tokens.register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    embed_continuations(network, list(range(3, 43)), [[5, 6], [7], [8, 9, 10]])
    assert seen == [(1, 40), (3, 3)]


def test_nothing_but_empty_continuations():
    model = tiny_model("llama").eval()
    found = embed_continuations(FeatureNetwork(model, LAYERS, "completion_mean"), [4, 5, 6], [[], []])
    wanted = oracle.embedding(model, [4, 5, 6], [], LAYERS, "completion_mean")
    assert (found - wanted).abs().max() < 1e-6
