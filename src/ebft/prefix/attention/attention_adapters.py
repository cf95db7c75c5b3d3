"""Attention layers that do not use transformers' attention interface, or use the index of a token in the pass instead
of its position: one small adapter for each family.

ALiBi adds a bias to the scores that is linear in the key's position. It is written into three further dimensions of
queries and keys, so that passes need not know of it.

    T  tokens of the pass    H  query heads    K  key heads    D  head dimension
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ebft import transformers_internals as internals
from ebft.errors import ModelError
from ebft.prefix.attention.passes import HINT, MaskPattern, pass_in, prefix_attention


def adapt(module: nn.Module) -> None:
    """Let an attention layer of one of the `ADAPTED` classes, or an indexer of keys, take part in passes."""
    name = type(module).__name__
    if (name in _FORWARD or hasattr(module, "index_topk")) and "forward_of_model" not in module.__dict__:
        module.forward_of_model = module.forward
        module.forward = MethodType(_forward, module)
    if name in _SCALES:
        internals.replace_scores(module, _scores)


def check_adapted(causal_lm: PreTrainedModel) -> None:
    """Raise ModelError if the attention of a model that does not use the interface has no adapter."""
    name = type(causal_lm).__name__
    if not any(type(module).__name__ in FAMILIES for module in causal_lm.modules()):
        raise ModelError(f"{name} does not support the attention interface of transformers. {HINT}")
    if name == "FalconForCausalLM" and causal_lm.config.alibi:
        raise ModelError(f"{name} with alibi: true is not supported: eager attention adds it twice. {HINT}")


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None] | Any:
    if not any(isinstance(each, MaskPattern) for each in (*args, *kwargs.values())):
        return self.forward_of_model(*args, **kwargs)
    if hasattr(self, "index_topk"):  # an indexer selects all keys of sequences no longer than `most_tokens`
        return None
    return _FORWARD[type(self).__name__](self, *args, **kwargs), None


def _scores(self: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple:
    if not isinstance(attention_mask, MaskPattern):
        return internals.plain_scores(self, query, key, value, attention_mask)
    scaling, pattern = _SCALES[type(self).__name__](self, attention_mask)
    output = _attended(self, query, key, value, pattern, scaling, self.attn_dropout.p)
    return output.unflatten(2, (query.shape[1], -1)).transpose(1, 2), None


def _attended(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, pattern: MaskPattern, scaling: float, dropout: float
) -> Tensor:
    """Return the attention (1, T, H * D) of query (1, H, T, D) to key and value (1, K, T, D)."""
    dropout = dropout if module.training else 0.0
    query, key = query.to(value.dtype), key.to(value.dtype)
    return prefix_attention(module, query, key, value, pattern, scaling=scaling, dropout=dropout)[0].flatten(2)


def _with_bias(query: Tensor, key: Tensor, bias: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return query and key (1, H, T, D + 3) whose scaled products contain the bias (H, T) of each key. The bias of the
    query's own position, which a softmax ignores, is subtracted to keep the products small. Two dimensions hold the
    bias, with twice the precision of one."""
    bias = (bias / scaling).unsqueeze(0).unsqueeze(-1)
    high = bias.to(key.dtype)
    ones = torch.ones_like(high)
    key = torch.cat([key, high, (bias - high).to(key.dtype), ones], -1)
    return torch.cat([query, ones, ones, -high], -1), key


def _positions(pattern: MaskPattern) -> Tensor:
    return pass_in({"attention_mask": pattern}).position_ids()[0]


def _bloom(self, hidden_states, residual, *, attention_mask, **kwargs) -> Tensor:
    query, key, value = internals.bloom_heads(self, self.query_key_value(hidden_states))
    mask = torch.ones(1, 2, device=query.device)
    slopes = internals.build_alibi_tensor(mask, self.num_heads, torch.float32).view(-1, 2)[:, 1:]
    bias = (slopes * _positions(attention_mask)).to(hidden_states.dtype).float()
    query, key = _with_bias(query, key, bias, self.inv_norm_factor)
    dropout = self.attention_dropout.p
    output = self.dense(_attended(self, query, key, value, attention_mask, self.inv_norm_factor, dropout))
    return residual + F.dropout(output, self.hidden_dropout, self.training)


def _mpt(self, hidden_states, *, attention_mask, **kwargs) -> Tensor:
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = mixed.unflatten(2, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
    slopes = -internals.build_mpt_alibi_tensor(self.n_heads, 2, device=query.device)[:, 0, :1]
    query, key = _with_bias(query, key, slopes * _positions(attention_mask), self.softmax_scale)
    return self.out_proj(_attended(self, query, key, value, attention_mask, self.softmax_scale, self.attn_dropout_p))


def _falcon(self, hidden_states, alibi, *, attention_mask, position_embeddings, **kwargs) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in internals.falcon_heads(self, self.query_key_value(hidden_states)))
    query, key = internals.apply_rotary_pos_emb(query, key, *position_embeddings)
    # Without dropout of the weights, as in the model.
    return self.dense(_attended(self, query, key, value, attention_mask, self.inv_norm_factor, dropout=0.0))


def _llama4(self, hidden_states, position_embeddings, *, attention_mask, **kwargs) -> Tensor:
    """Layers without rotary embedding scale the queries by their position; the model's own forward by their index."""
    if self.use_rope or not self.attn_temperature_tuning:
        arguments = {"position_embeddings": position_embeddings, "attention_mask": attention_mask, **kwargs}
        return self.forward_of_model(hidden_states, **arguments)[0]
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    steps = ((_positions(attention_mask).float() + 1) / self.floor_scale).floor()
    query = (query * (steps.log1p() * self.attn_scale + 1)[:, None]).to(query.dtype)
    return self.o_proj(_attended(self, query, key, value, attention_mask, self.scaling, self.attention_dropout))


def _gptj(self, pattern: MaskPattern) -> tuple[float, MaskPattern]:
    return 1 / self.scale_attn, pattern


def _gpt_neo(self, pattern: MaskPattern) -> tuple[float, MaskPattern]:
    """GPT-Neo does not scale scores; a local layer attends to the last `window_size` tokens."""
    if self.attention_type == "global":
        return 1.0, pattern
    window = self.config.window_size

    def local(batch, head, query, key):
        return (key <= query) & (key > query - window)

    return 1.0, pattern.keep("local", lambda: MaskPattern(local, pattern.find_pass))


_FORWARD: dict[str, Callable] = {
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
    "FalconAttention": _falcon,
    "Llama4TextAttention": _llama4,
}
_SCALES: dict[str, Callable] = {"GPTJAttention": _gptj, "CodeGenAttention": _gptj, "GPTNeoSelfAttention": _gpt_neo}
ADAPTED = {*_FORWARD, *_SCALES}
# StableLM uses the interface, but does not declare it. Llama 4 declares it.
FAMILIES = {*ADAPTED, "StableLmAttention"} - {"Llama4TextAttention"}
