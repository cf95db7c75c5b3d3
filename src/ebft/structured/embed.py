"""Embeddings of sequences that share a prompt: the prompt is computed once and its cache is used for all continuations.

P  prompt tokens   K  continuations   C  tokens of the longest continuation   D  feature dimension
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, PreTrainedModel

from ebft.features import FeatureNetwork, pool, token_features
from ebft.models.causal_lm import backbone_of
from ebft.models.sharding import is_sharded
from ebft.over_transformers import DynamicLayer, DynamicSlidingWindowLayer, has_running_state
from ebft.prefix.policy import run_wrapped, take_programs


def embed_continuations(network: FeatureNetwork, prompt_ids: list[int], continuations: list[list[int]]) -> Tensor:
    """Return the embeddings (K, D) of `prompt_ids + continuations[k]`, in float32, on the network's device.

    They equal those of separate forward passes, because padding is on the right only, which causal models do not
    attend to. `mean_pooling` is the mean over all tokens without padding, including the prompt; `completion_mean` the
    mean over the continuation; `concat` the states at one quarter, one half and three quarters of the sequence without
    padding. For an empty continuation, `last_token` and `completion_mean` use the prompt's last token.
    """
    prompt, own = continuation_features(network, prompt_ids, continuations)
    return torch.stack([pool_sequence(prompt, features, network.embed_method) for features in own])


def continuation_features(
    network: FeatureNetwork, prompt_ids: list[int], continuations: list[list[int]]
) -> tuple[Tensor, list[Tensor]]:
    """Return the features of the prompt's tokens, (P, D), and of each continuation's tokens, (its length, D)."""
    lengths = [len(ids) for ids in continuations]
    if not prompt_ids or not shares_prompts(network.causal_lm):
        features, _ = _run(network, _padded([prompt_ids + ids for ids in continuations]), use_cache=False)
        prompt, own = features[0, : len(prompt_ids)], features[:, len(prompt_ids) :]
    else:
        features, cache = _run(network, torch.tensor([prompt_ids]), use_cache=True)
        prompt = features[0]
        if max(lengths) > 0:
            cache.batch_repeat_interleave(len(continuations))
            own, _ = _run(network, _padded(continuations), use_cache=True, cache=cache)
        else:
            own = features[:, :0].expand(len(continuations), -1, -1)
    return prompt, [row[:length] for row, length in zip(own, lengths)]


def shares_prompts(causal_lm: PreTrainedModel) -> bool:
    """Whether several continuations can use the prompt's cache, which excludes layers with a recurrent state."""
    if has_running_state(causal_lm):
        return False
    layers = DynamicCache(config=causal_lm.config.get_text_config()).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def pool_sequence(prompt: Tensor, continuation: Tensor, embed_method: str) -> Tensor:
    """Pool the features (P, D) and (C, D) of a sequence to an L2-normalised embedding, (D,) or (3 D,) for `concat`."""
    if embed_method in ("last_token", "completion_mean"):
        return pool(continuation if len(continuation) else prompt[-1:], embed_method)
    return pool(torch.cat([prompt, continuation]), embed_method)


def _run(
    network: FeatureNetwork, tokens: Tensor, *, use_cache: bool, cache: Cache | None = None
) -> tuple[Tensor, Cache | None]:
    """Return the features (K, tokens, D) of `tokens`, which follow those in `cache`, and the extended cache."""
    arguments = {"input_ids": tokens.to(network.device), "use_cache": use_cache}
    if cache is not None:
        arguments["past_key_values"] = cache
    outputs = []

    def run(causal_lm: PreTrainedModel) -> Tensor:
        outputs.append(backbone_of(causal_lm)(**arguments))
        return outputs[0].last_hidden_state

    def forward(model: nn.Module) -> Tensor:
        if not is_sharded(model):
            return run(network.causal_lm)
        take_programs(model)
        return run_wrapped(model, run)  # gathers the weights

    features = token_features(network.hidden_states(forward))
    return features, outputs[0].past_key_values if use_cache else None


def _padded(rows: list[list[int]]) -> Tensor:
    """Return rows of token ids as one tensor, padded on the right; the padding value does not affect any result."""
    return pad_sequence([torch.tensor(ids, dtype=torch.long) for ids in rows], batch_first=True)
