"""Cross-entropies of a causal LM in chunks of scored positions, so that the logits of all tokens are never in memory.

The head is applied to the positions that have a target only. Values and gradients equal the model's own loss.

B  rows   S  tokens   T  first tokens of each row   R  scored positions   D  hidden size   K  targets of each position
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from transformers import PreTrainedModel

from ebft.data.transforms.rows import IGNORE
from ebft.errors import ModelError
from ebft.models.causal_lm import backbone_name, backbone_of, evaluating
from ebft.models.sharding import is_sharded
from ebft.prefix.forward import head_of, run_wrapped
from ebft.prefix.logps import Head, grad_of_logits, token_logps
from ebft.prefix.parity import compare
from ebft.prefix.sampling import Softmax, slices, tiles

_LOSS_TYPES = (None, "ForCausalLM")
_CHECKED = (2, 9)  # rows and tokens that are compared with the model's own logits


def why_not_in_chunks(causal_lm: PreTrainedModel) -> str | None:
    """Why a model's own loss is not the cross-entropy of its head's logits alone; None if it is.

    transformers' decoder-only models call `self.loss_function` with the logits, and some add terms to it.
    """
    name, config = type(causal_lm).__name__, causal_lm.config.get_text_config()
    names = inspect.unwrap(type(causal_lm).forward).__code__.co_names
    is_of_transformers = type(causal_lm).__module__.startswith("transformers.models.")
    if not is_of_transformers or "loss_function" not in names or getattr(config, "loss_type", None) not in _LOSS_TYPES:
        return f"{name} has a loss of its own"
    if getattr(config, "output_router_logits", False):
        return f"the loss of {name} has a term for the router"
    if getattr(config, "z_loss_coefficient", 0):
        return f"the loss of {name} has a term for large logits"
    try:
        backbone_name(causal_lm)
    except ModelError as error:
        return str(error)
    return None


def summed_cross_entropy(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor, scored: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of targets (B, T) at the positions `scored` (B, T), in float32.

    `model` has taken programs (`ebft.prefix.forward.take_programs`); `inputs` go to its forward, without labels.
    """

    def forward(causal_lm: PreTrainedModel) -> Tensor:
        states, head = _states(causal_lm, inputs)[:, : scored.shape[1]][scored], head_of(causal_lm)
        unchanged = lambda tensor: tensor
        with saved_tensors_hooks(unchanged, unchanged):  # offloading has hooks for what backward needs
            if not (torch.is_grad_enabled() and head.trained) or is_sharded(causal_lm):
                return -token_logps(states, targets[scored][:, None], head, 1.0).sum()
            return SumInForward.apply(states, targets[scored][:, None], head, *head.trained)

    return run_wrapped(model, forward)


def weighted_cross_entropy(
    outputs: Any, labels: Tensor, num_items_in_batch: Any = None, *, alpha: float | None = None, k: int = 2
) -> Tensor:
    """The mean of weighted cross-entropies, with logits (B, S, V) and labels (B, S), divided by `num_items_in_batch`.

    The weight of a token is its probability, or with `alpha`, the entropy of the softmax of the `k` largest logits to
    this power. It has no gradient.
    """
    learned = labels[:, 1:].ne(IGNORE)
    logits = outputs["logits"][:, :-1][learned].float()
    losses = F.cross_entropy(logits, labels[:, 1:][learned], reduction="none")
    if alpha is None:
        weights = (-losses.detach()).exp()
    else:
        largest = logits.detach().topk(min(k, logits.shape[-1])).values
        weights = torch.distributions.Categorical(logits=largest).entropy() ** alpha
    count = learned.sum() if num_items_in_batch is None else num_items_in_batch
    return (weights * losses).sum() / count


@torch.no_grad()
def token_cross_entropies(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor, scored: Tensor) -> Tensor:
    """Return the cross-entropies (B, T, K) of targets (B, T, K), zero where `scored` (B, T) is false, in float32."""

    def forward(causal_lm: PreTrainedModel) -> Tensor:
        states = _states(causal_lm, inputs)[:, : scored.shape[1]][scored]
        losses = -token_logps(states, targets[scored], head_of(causal_lm), 1.0)
        return losses.new_zeros(targets.shape).masked_scatter_(scored[..., None], losses)

    return run_wrapped(model, forward)


def check_chunks(model: nn.Module, causal_lm: PreTrainedModel) -> None:
    """Raise ModelError if the cross-entropies in chunks differ from the model's own logits, on a few tokens.

    `model` is `causal_lm` as it is wrapped for training; with several processes, all must call this.
    """
    vocabulary, generator = causal_lm.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, _CHECKED, generator=generator).to(causal_lm.device)
    inputs, targets = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids[:, 1:, None]
    with evaluating(model):
        expected = model(**inputs, use_cache=False).logits[:, :-1].float().log_softmax(-1).gather(-1, targets)
        ours = -token_cross_entropies(model, inputs, targets, torch.ones_like(ids[:, 1:], dtype=torch.bool))
    compare(causal_lm, "log-probabilities in chunks", (ours - expected).abs(), "Set chunked_cross_entropy: false.")


def _states(causal_lm: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """The last hidden states: (B, S, D)."""
    return backbone_of(causal_lm)(**{**inputs, "use_cache": False})[0]


class SumInForward(torch.autograd.Function):
    """The sum of cross-entropies, whose gradients are computed with it, so that backward does not run the head again.

    Backward multiplies them with the factor that it receives. Gradients of weights are summed over chunks in float32,
    as a single matrix product does. They are handed on rather than copied, so backward can run once.
    """

    @staticmethod
    def forward(ctx, states, targets, head: Head, *trained):
        total = states.new_zeros((), dtype=torch.float32)
        grad_states = torch.empty_like(states)
        grads = [torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) for weight in trained]
        for rows in slices(len(states), head.rows_per_chunk(states.device)):
            x = states[rows].detach().requires_grad_()
            with torch.enable_grad():
                logits = head.logits(x)
            losses, grad_logits = _with_gradient(logits.detach(), targets[rows])
            total += losses
            found = torch.autograd.grad(logits, (x, *trained), grad_logits, allow_unused=True)
            grad_states[rows] = found[0]
            for so_far, part in zip(grads, found[1:]):
                if part is not None:
                    so_far += part
        ctx.gradients = [grad_states, *(grad.to(weight.dtype) for grad, weight in zip(grads, trained))]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_states, *grads = (each.mul_(grad.to(each.dtype)) for each in ctx.gradients)
        ctx.gradients = None
        return grad_states, None, None, *grads


def _with_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropies of targets (R, 1), and their gradients (R, V); the softmax is freed on return."""
    total, grad = logits.new_zeros((), dtype=torch.float32), torch.empty_like(logits)
    for rows in tiles(logits):
        softmax, tokens = Softmax(logits[rows], 1.0), targets[rows]
        logps = softmax.logps(tokens)
        total -= logps.sum()
        grad[rows] = grad_of_logits(softmax.probabilities, tokens, -torch.ones_like(logps), 1.0)
    return total, grad
