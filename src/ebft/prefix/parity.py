"""Comparison of passes in which sequences share a prefix with the plain model, whose features may not allow it.

Results must also depend on a token's position in its sequence, not on its index in the pass. A pass contains many
sequences in one row, and an architecture may use the index in this row once it exceeds a constant of its config, as
Llama 4 in transformers scales the queries of tokens from index `floor_scale` on. Short passes do not show this, so a
sequence is run at the start of a pass and again after as many tokens as the largest such constant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ebft.errors import EBFTError, ModelError
from ebft.models.causal_lm import decoder_layers, first_layers
from ebft.prefix.attention import HINT, PromptLayout, SuffixPass
from ebft.prefix.forward import backbone_states, most_tokens, run_wrapped

# In nats. In full precision, the largest difference is compared, which comes from the order of summation. In lower
# precision, the median: a near-tie in a router may send single tokens to another expert, whereas an error in the
# layout affects all tokens.
TOLERANCES = 5e-3, 0.15


@contextmanager
def refusing(causal_lm: PreTrainedModel, what: str = "strided attention", hint: str = HINT) -> Iterator[None]:
    """Convert any error raised by the model into a ModelError that includes its cause: it does not run with `what`."""
    try:
        yield
    except (EBFTError, torch.OutOfMemoryError, torch.AcceleratorError):  # not of the model
        raise
    except Exception as error:
        raise ModelError(
            f"{type(causal_lm).__name__} does not run with {what} ({type(error).__name__}: {error}). {hint}"
        ) from error


_CAUSE = f"The architecture depends on more than attention to a prefix, or adds noise in training mode. {HINT}"


def compare(
    causal_lm: PreTrainedModel,
    what: str,
    differences: Tensor,
    cause: str = _CAUSE,
    tolerances: tuple[float, float] = TOLERANCES,
    compared_with: str = "those of the plain model",
) -> None:
    """Raise ModelError if the differences, in nats for log-probabilities, exceed what the order of summation causes.

    The error names `what` differs from what, and ends with the `cause`. `tolerances`: in full and in lower precision.
    """
    difference, tolerance = difference_and_tolerance(causal_lm, what, differences, tolerances)
    if not difference <= tolerance:
        raise ModelError(
            f"{type(causal_lm).__name__}: {what} differ from {compared_with} by {difference:.2g} "
            f"(tolerance: {tolerance:g}). {cause}"
        )


def difference_and_tolerance(
    causal_lm: PreTrainedModel, what: str, differences: Tensor, tolerances: tuple[float, float] = TOLERANCES
) -> tuple[float, float]:
    """Return the difference that the precision of the model allows to compare, and the largest that it explains.

    Raises ModelError if it is not finite.
    """
    # Whether matrix products have less precision than float32.
    autocast = torch.is_autocast_enabled(causal_lm.device.type)
    # `allow_tf32` cannot be read once `fp32_precision` was set, as transformers does.
    tf32 = causal_lm.device.type != "cpu" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    is_half = causal_lm.dtype in (torch.bfloat16, torch.float16) or autocast
    rough = is_half or getattr(causal_lm, "is_quantized", False) or tf32
    difference = (differences.median() if rough else differences.max()).item()
    if not math.isfinite(difference):
        raise ModelError(
            f"{type(causal_lm).__name__}: the {what} are not finite in {causal_lm.dtype}. Use torch_dtype: float32."
        )
    return difference, tolerances[rough]


_NUMBER = re.compile("idx|index|number|layer_id|layer_num")  # attributes with the number of a layer
_CONSTANT = re.compile("scale|chunk|window|position|context|length|block", re.I)
# Sequences are not longer than these, and transformers computes embeddings of positions from position_ids.
_LIMITS = {"max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "max_length"}
_LARGEST = 2**14  # larger constants are not tested, which would take much memory
_OTHERS, _COMPARED = 256, 12  # tokens of each other sequence, and of the compared sequence
# Of L2-normalised states. The same kernels compute both copies in one pass, so that lower precision adds little.
_TOLERANCES = 1e-3, 4e-3


def check_distant_tokens(causal_lm: PreTrainedModel) -> None:
    """Raise ModelError if a short sequence has other states after many other sequences in the same pass.

    The model must be prepared, in eval mode, without gradients. Nothing is run if the config has no constant that
    could matter. Runs the decoder's first layers only, as many as contain every kind of its layers.
    """
    config = causal_lm.config.get_text_config()
    constants = _constants(config.to_dict())
    if not constants:
        return
    length = min(filter(None, (_OTHERS, getattr(config, "max_position_embeddings", None), most_tokens(causal_lm))))
    others = [length] * -(-max(constants.values()) // length)
    is_setting = lambda name, value: isinstance(value, (bool, int, str)) and not _NUMBER.search(name)
    settings = lambda module: [(k, v) for k, v in sorted(vars(module).items()) if is_setting(k, v)]
    kinds = [[(type(part).__name__, settings(part)) for part in layer.modules()] for layer in decoder_layers(causal_lm)]
    count = max(kinds.index(kind) for kind in kinds) + 1  # the first layers that contain every kind
    with first_layers(causal_lm, count):
        first, last = (F.normalize(states.float(), dim=-1) for states in _states_of_both(causal_lm, others))
    listed = ", ".join(f"{name}: {value}" for name, value in constants.items())
    cause = (
        "It computes something from the index of a token in the pass, where many sequences follow each other, instead "
        f"of its position in the sequence (position_ids). Its config has {listed}. {HINT}"
    )
    what = f"states of a sequence after {sum(others)} tokens of other sequences in the same pass"
    compare(causal_lm, what, (first - last).norm(dim=-1), cause, _TOLERANCES, "those at the start of the pass")


def _constants(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of tokens in a config, also in its dictionaries such as `rope_parameters`, by name."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _constants(value)
            continue
        is_number = isinstance(value, (int, float)) and 1 < value <= _LARGEST
        if is_number and _CONSTANT.search(name) and name not in _LIMITS:
            found[name] = int(value)
    return found


def _states_of_both(causal_lm: PreTrainedModel, others: list[int]) -> tuple[Tensor, Tensor]:
    """Return the last hidden states (tokens, D) of a short sequence, before and after other sequences."""
    generator, vocabulary = torch.Generator().manual_seed(0), causal_lm.config.get_text_config().vocab_size
    draw = lambda count: torch.randint(0, vocabulary, (count,), generator=generator)
    compared, between = draw(min(_COMPARED, *others)), draw(sum(others))
    tokens = torch.cat([compared, between, compared]).to(causal_lm.device)
    prompts = [len(compared), *others, len(compared)]
    run = SuffixPass(PromptLayout(prompts, [[] for _ in prompts], tokens.device))
    states = run_wrapped(causal_lm, lambda model: backbone_states(model, tokens, run))
    return states[: len(compared)], states[-len(compared) :]
