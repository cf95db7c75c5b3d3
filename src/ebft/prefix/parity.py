"""Comparison of passes in which sequences share a prefix with the plain model, whose features may not allow it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft.errors import EBFTError, ModelError
from ebft.prefix.attention import HINT

# In nats. In full precision, the largest difference is compared, which comes from the order of summation. In lower
# precision, the median: a near-tie in a router may send single tokens to another expert, whereas an error in the
# layout affects all tokens.
TOLERANCES = 5e-3, 0.15


@contextmanager
def refusing(causal_lm: PreTrainedModel, what: str = "strided attention", hint: str = HINT) -> Iterator[None]:
    """Convert any error raised by the model into a ModelError that includes its cause: it does not run with `what`."""
    try:
        yield
    except (EBFTError, torch.OutOfMemoryError):
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
    """Raise ModelError if the differences, in nats for log-probabilities, exceed those of the order of summation.

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
    rough = _computes_roughly(causal_lm)
    difference = (differences.median() if rough else differences.max()).item()
    if not math.isfinite(difference):
        raise ModelError(
            f"{type(causal_lm).__name__}: the {what} are not finite. The weights contain NaN or infinite values, or "
            f"the model overflows in {causal_lm.dtype}. Use other weights, or torch_dtype: float32."
        )
    return difference, tolerances[rough]


def _computes_roughly(causal_lm: PreTrainedModel) -> bool:
    """Whether matrix products have less precision than float32: half precision, quantised weights or TF32."""
    autocast = torch.is_autocast_enabled(causal_lm.device.type)
    tf32 = next(causal_lm.parameters()).is_cuda and torch.backends.cuda.matmul.allow_tf32
    is_half = causal_lm.dtype in (torch.bfloat16, torch.float16) or autocast
    return is_half or getattr(causal_lm, "is_quantized", False) or tf32
