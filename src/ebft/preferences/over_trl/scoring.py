"""Log-probabilities of completions without the logits of a batch, in place of the forward that TRL's trainers call.

The head is applied to scored tokens only, a chunk of them at a time, and no logits are kept for the backward pass.
TRL's own forward scores every token on CPU, and its trainers in trl.experimental keep all logits.

B  rows   S  tokens   R  scored tokens   D  hidden size   V  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from ebft.data.transforms.rows import IGNORE
from ebft.models.causal_lm import backbone_of, unwrap_adapter
from ebft.prefix.head import head_of
from ebft.prefix.logps import choose_tokens, with_gradient
from ebft.prefix.policy import take_programs
from ebft.prefix.softmax import Softmax

# What TRL logs of the distributions at scored tokens, by the name of its output: functions of the softmax and the
# tokens (rows, 1) with values (rows, 1).
STATISTICS: dict[str, Callable[[Softmax, Tensor], Tensor]] = {
    "entropy": lambda softmax, tokens: softmax.entropy(),
    "mean_logits": lambda softmax, tokens: softmax.mean_score(),
    "is_top1": lambda softmax, tokens: softmax.most_likely().eq(tokens),
    "log_sum_sq_probs": lambda softmax, tokens: softmax.log_sum_of_squares(),
}


def score_in_chunks(model: nn.Module, statistics: tuple[str, ...] = ()) -> None:
    """Replace the forward of the causal LM in `model` if it is called with `fused_lm_head`, as TRL's trainers do.

    Must be called after TRL has replaced it. Can be called repeatedly.
    """
    causal_lm = unwrap_adapter(model)
    if "scores_in_chunks" in causal_lm.__dict__:
        return
    take_programs(causal_lm)
    causal_lm.scores_in_chunks = True
    whole = causal_lm.forward

    @wraps(type(causal_lm).forward)
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return score_tokens(self, statistics=statistics, **kwargs) if fused_lm_head else whole(*args, **kwargs)

    causal_lm.forward = MethodType(forward, causal_lm)


def score_tokens(
    causal_lm: PreTrainedModel, labels: Tensor, statistics: tuple[str, ...], **inputs: Any
) -> FusedCausalLMOutput:
    """Return the log-probabilities of `labels` (B, S) and `statistics`, (B, S - 1) each, 0 without a label.

    Must be called inside the forward of the outermost module. `inputs` are those of the model's forward.
    """
    states = backbone_of(causal_lm)(**inputs | {"use_cache": False})[0][:, :-1]
    targets = labels[:, 1:].to(states.device)
    is_scored = targets.ne(IGNORE)
    scored, tokens = states[is_scored], targets[is_scored].unsqueeze(-1)  # (R, D), (R, 1)
    found: dict[str, list[Tensor]] = {name: [] for name in statistics}

    def choose(softmax: Softmax, rows: slice) -> Tensor:
        for name, values in found.items():
            values.append(STATISTICS[name](softmax, tokens[rows]))
        return tokens[rows]

    head = head_of(causal_lm)
    has_gradient = torch.is_grad_enabled() and (states.requires_grad or bool(head.trained))
    slopes = has_gradient and not head.trained
    choices = choose_tokens(scored.detach(), choose, head, 1.0, slopes, None, tokens)
    logps = with_gradient(scored, choices, head, 1.0) if has_gradient else choices.logps

    def by_token(values: Tensor) -> Tensor:
        return values.new_zeros(is_scored.shape).masked_scatter(is_scored, values.squeeze(-1))

    return FusedCausalLMOutput(
        log_probs=by_token(logps),
        label_mask=is_scored,
        **{name: by_token(torch.cat(values)) for name, values in found.items()},
    )
