"""The frozen feature network: hidden states at selected depths, normalised and pooled into one embedding per block.

B  rows   G  tokens per block   D  feature dimension
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ebft.config import rules
from ebft.errors import ModelError
from ebft.models import causal_lm as parts
from ebft.models.load import spare_gpu
from ebft.printed import say


def feature_depths(fractions: list[float], num_layers: int) -> list[int]:
    """Return indices into `hidden_states` for fractions of the depth: `int(f * num_layers)`; 0 is the embedding."""
    return [int(f * num_layers) for f in fractions]


def token_features(hidden_states: list[Tensor]) -> Tensor:
    """Return the features of tokens: their states at each depth, L2-normalised and concatenated, in float32."""
    return torch.cat([F.normalize(states.float(), dim=-1) for states in hidden_states], dim=-1)


def _mean(features: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is not None:
        is_token = torch.arange(features.shape[-2], device=features.device) < lengths.unsqueeze(-1)
        features = torch.where(is_token.unsqueeze(-1), features, 0.0)
    return features.mean(-2)  # of the same direction as the mean of the tokens alone


def _at(places: Callable[[Tensor], tuple[Tensor, ...]], features: Tensor, lengths: Tensor | None) -> Tensor:
    """The features of the tokens at the places of a block, which depend on its length, one after the other."""
    *shape, g, dimension = features.shape
    found = torch.stack(places(torch.full(shape, g, device=features.device) if lengths is None else lengths), -1)
    return features.gather(-2, found.unsqueeze(-1).expand(*found.shape, dimension)).flatten(-2)


# Methods by the names that `ebft.config.options` declares: of a block's features (..., G, D), and the number of its
# tokens (...), the first ones (all if None), to an embedding (..., any dimension), which is normalised afterwards.
POOLING: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "last_token": partial(_at, lambda length: (length - 1,)),
    "mean_pooling": _mean,
    "completion_mean": _mean,
    "concat": partial(_at, lambda length: tuple(length * quarter // 4 for quarter in (1, 2, 3))),
}
# These pool the prompt of a full completion as well.
WITH_PROMPT = ("mean_pooling",)


def pool(features: Tensor, embed_method: str, lengths: Tensor | None = None) -> Tensor:
    """Pool the features of a block's tokens, (..., G, D), to an L2-normalised embedding: (..., D), or (..., 3 D).

    The latter is the shape for `concat`. `lengths` (...): the number of tokens of each block, the first ones; all G if
    None. In strided mode, a block contains generated (or reference) tokens only, so `mean_pooling` and
    `completion_mean` are equal. Raises KeyError for an unknown `embed_method`.
    """
    return F.normalize(POOLING[embed_method](features, lengths), dim=-1)


def pool_sequence(prompt: Tensor, continuation: Tensor, embed_method: str) -> Tensor:
    """Pool the features (P, D) and (C, D) of a sequence to an L2-normalised embedding, (D,) or (3 D,) for `concat`."""
    if embed_method in WITH_PROMPT:
        return pool(torch.cat([prompt, continuation]), embed_method)
    return pool(continuation if len(continuation) else prompt[-1:], embed_method)


class FeatureNetwork:
    """The base model, frozen and in eval mode: the policy with its adapter disabled, or else a copy of the policy.

    `device` is the device of the copy; it is not supported for models with an adapter. None: an idle second GPU if
    there is one (`ebft.models.load.spare_gpu`), or else the device of the policy, also after the policy is moved.
    It must be created before training, because the copy has the current weights. With `copy=False`, `model` is used
    directly, which requires that it is not trained. `network` is another causal LM with the tokens of `model`, which is
    used in place of a copy, with its adapter if it has one.
    """

    def __init__(
        self,
        model: nn.Module,
        feature_layers: list[float],
        embed_method: str,
        device: str | None = None,
        *,
        copy: bool = True,
        network: nn.Module | None = None,
    ):
        self.shares_weights: bool = network is None and hasattr(model, "disable_adapter")
        rules.refuse(rules.feature_device(device, self.shares_weights, rules.in_python))
        is_copy = copy and not self.shares_weights
        self._model = network if network is not None else parts.frozen_copy(model) if is_copy else model
        if is_copy and device is not None:
            self._model.to(device)
        self._followed = weakref.ref(model) if is_copy and device is None else lambda: None
        self.causal_lm: PreTrainedModel = parts.unwrap_adapter(self._model)
        models = parts.unwrap_adapter(model), self.causal_lm
        tokens, known = (each.config.get_text_config().vocab_size for each in models)
        if known < tokens:
            raise ModelError(
                f"feature_network knows {known:,} tokens and the policy {tokens:,}. Their tokens must agree."
            )
        self._place: torch.device | None = None  # where the policy was when the copy followed it
        self.embed_method = embed_method
        self._depths = feature_depths(feature_layers, len(parts.decoder_layers(self.causal_lm)))
        self.computed_in: torch.dtype = torch.float32  # the latest hidden states, see `_precision`

    @property
    def device(self) -> torch.device:
        """The device of the network. Trainers move the policy after its copy was made, which this makes up for."""
        policy = self._followed()
        if policy is not None and (now := next(policy.parameters()).device) not in (self._place, torch.device("meta")):
            self.causal_lm.to(_beside(policy, self.causal_lm))
            self._place = now
        return next(self.causal_lm.parameters()).device

    def hidden_states(self, forward: Callable[[nn.Module], Tensor]) -> list[Tensor]:
        """Return `hidden_states[d]` for each selected depth d, (B, tokens, hidden size) each, without gradients.

        `forward` is called with the network and returns the backbone's last hidden state. Layers above the deepest
        feature layer are removed during the call. Raises ModelError if the hidden states are not 3-dimensional.
        """
        with self.frozen(), _truncated(self.causal_lm, max(self._depths)) as found:
            last = forward(self._model)
        return self._usable([found.get(d, last) for d in self._depths])

    def plain_hidden_states(self, input_ids: Tensor) -> list[Tensor]:
        """Return the same states of plain rows (B, L) from `output_hidden_states`, running all layers."""
        with self.frozen():
            states = self._model(input_ids=input_ids, use_cache=False, output_hidden_states=True).hidden_states
        return self._usable([states[min(d, len(states) - 1)] for d in self._depths], len(states) - 1)

    def _usable(self, states: list[Tensor], depth: int | None = None) -> list[Tensor]:
        """Return the states, and keep the precision in which they were computed. Raises ModelError if the model has
        several streams of states, or `depth` states, which are not as many as its layers."""
        layers, several = len(parts.decoder_layers(self.causal_lm)), any(x.dim() != 3 for x in states)
        if several or depth not in (None, layers):
            has = f"{depth} hidden states for {layers} layers"
            if several:
                has = f"several streams of hidden states (shape {tuple(states[-1].shape)})"
            name = type(self.causal_lm).__name__
            raise ModelError(
                f"{name} has {has}, but EBFT requires models with a single hidden state per token and layer"
            )
        # The dtype with the largest rounding errors: autocast keeps sums, and thus the states, in float32.
        device = states[0].device.type
        autocast = [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
        self.computed_in = max((*(x.dtype for x in states), *autocast), key=lambda dtype: torch.finfo(dtype).eps)
        return states

    @contextmanager
    def frozen(self) -> Iterator[nn.Module]:
        """Yield the network as a language model, in eval mode, without gradients, with its adapter disabled."""
        base = parts.without_adapter(self._model) if self.shares_weights else nullcontext()
        with parts.evaluating(self._model), base:
            yield self._model


def _beside(policy: nn.Module, frozen: nn.Module) -> torch.device:
    """Return the device for the copy of a policy: an idle GPU if the policy is on one GPU, or else its first device."""
    devices = {parameter.device for parameter in policy.parameters()}
    first = next(policy.parameters()).device
    if len(devices) > 1 or first.type != "cuda":
        return first
    spare = spare_gpu(first.index, sum(weight.nbytes for weight in frozen.parameters()))
    if spare is None:
        return first
    say(
        f"The feature network is on the idle GPU {spare}; feature_device: {first} places it beside the policy.",
        err=True,
    )
    return torch.device(spare)


@contextmanager
def _truncated(causal_lm: PreTrainedModel, depth: int) -> Iterator[dict[int, Tensor]]:
    """Run only the first `depth` layers inside the block, and collect `hidden_states[d]` by d."""
    layers = parts.decoder_layers(causal_lm)
    found: dict[int, Tensor] = {}

    def keep_input(module, args, kwargs):
        found[0] = args[0] if args else kwargs["hidden_states"]

    def keep_output(index: int):
        def hook(module, args, output):
            found[index] = output[0] if isinstance(output, tuple) else output

        return hook

    kept = layers[: max(depth, 1)]
    # hidden_states[last] includes the final norm, so it is taken from the backbone's output instead of a hook.
    handles = [layer.register_forward_hook(keep_output(i + 1)) for i, layer in enumerate(kept) if i + 1 < len(layers)]
    handles.append(kept[0].register_forward_pre_hook(keep_input, with_kwargs=True))
    try:
        with parts.first_layers(causal_lm, len(kept)):
            yield found
    finally:
        for handle in handles:
            handle.remove()
