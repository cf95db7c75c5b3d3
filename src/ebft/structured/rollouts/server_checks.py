"""Whether a server samples from the trainer's weights: its model before training, its samples in each batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ebft.errors import RolloutError
from ebft.models.causal_lm import evaluating, unwrap_adapter
from ebft.structured.rollouts.client import VLLMClient
from ebft.structured.rollouts.turns import Sampling

_TEXT = "def add(a, b):\n    return a + b\n\n# Every token counts: 3.14159, naïve, 東京."
_TOKENS = 32  # number of sampled tokens to compare
# Tolerance of the mean difference of log-probabilities between server and trainer, in nats. Different dtypes (bfloat16
# and float32) and quantisation cause up to about 0.1; a different model differs by more than 1, one of the same family
# by tenths.
_SAME_NAME, _OTHER_NAME = 0.25, 0.05


def check_server(
    client: VLLMClient,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    base_model: str,
    *,
    compare_weights: bool,
) -> tuple[dict[str, Any], float | None]:
    """Check the server and return the entry of its base model. Raises RolloutError if it does not match the trainer.

    With `compare_weights`, the server samples some tokens from its base model, and their log-probabilities are compared
    with those of `model`, with its adapter disabled, at the same temperature. Their mean absolute difference is
    returned too, or None.
    """
    client.wait_until_up()
    entry = client.base_model()
    served = entry.get("root") or entry["id"]
    who = f"The vLLM server at {client.address} serves {served}, and this run trains {base_model}"
    theirs, ours = client.tokenize(entry["id"], _TEXT), tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    if theirs != ours:
        raise RolloutError(
            f"{who}: their tokenizers differ (a test text is encoded to different ids, {len(theirs)} and {len(ours)} "
            "tokens). Start the server with the config of this run: `ebft vllm-serve CONFIG`."
        )
    _check_vocabulary(client, entry["id"], tokenizer, sampling, who)
    if not compare_weights:
        return entry, None
    probe = replace(sampling, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, regex=None, extra={})
    [completion] = client.complete(entry["id"], [ours], [_TOKENS], replace(probe, end_ids=frozenset()))
    tempered, plain = (_logps(model, ours, completion.ids, t) for t in (probe.temperature, 1.0))
    sampled = torch.tensor(completion.logps, dtype=torch.float64)
    difference = (sampled - tempered).abs().mean().item()
    limit = _SAME_NAME if _same_place(served, base_model) else _OTHER_NAME
    if difference <= limit:
        return entry, difference
    if probe.temperature != 1.0 and (sampled - plain).abs().mean().item() <= limit:
        raise RolloutError(
            f"The vLLM server at {client.address} reports log-probabilities at temperature 1, but this run requires "
            f"them at its sampling temperature {probe.temperature}. Start the server with --logprobs-mode "
            "processed_logprobs, as `ebft vllm-serve` does."
        )
    raise RolloutError(
        f"{who}: they are different models. The log-probabilities of {_TOKENS} sampled tokens differ by "
        f"{difference:.2f} nats on average (tolerance: {limit}). Start the server with the config of this run: `ebft "
        "vllm-serve CONFIG`."
    )


def _check_vocabulary(
    client: VLLMClient, model: str, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, who: str
) -> None:
    """Raise RolloutError if the server's model has no embedding for the last token id of the tokenizer."""
    try:
        client.complete(model, [[len(tokenizer) - 1]], [1], sampling)
    except RolloutError as error:
        if "vocabulary" not in str(error):
            raise
        raise RolloutError(
            f"{who}, whose tokenizer has {len(tokenizer)} tokens, more than the vocabulary of the server's model. "
            "Tokens added by special_tokens are not in the base model. Save a base model that contains them, and use "
            "it for training and serving."
        ) from error


def _logps(model: Any, prompt_ids: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """Return the log-probabilities of `ids` after the prompt under the base model, at a temperature, in float64."""
    causal_lm = unwrap_adapter(model)
    tokens = torch.tensor([prompt_ids + ids], device=next(causal_lm.parameters()).device)
    with evaluating(model), model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
        logits = causal_lm(input_ids=tokens).logits[0, len(prompt_ids) - 1 : -1].double().cpu()
    logps = (logits / temperature).log_softmax(-1)
    return logps.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)


def _same_place(first: str, second: str) -> bool:
    paths = [Path(name).expanduser() for name in (first, second)]
    return first == second or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))


# Limits of the mean absolute difference in nats: a multiple of the difference that dtypes and kernels cause, which is
# measured before training, and at least a value that is harmless for the loss.
_WARN, _STOP = (3.0, 0.05), (10.0, 0.2)
_UNKNOWN = 0.05  # the difference caused by dtypes and kernels, where it cannot be measured before training
_FITS_BETTER = 0.5  # other weights are the sampled ones if their difference is smaller by this factor
_ROUNDING = 1e-3  # differences below it are not compared with those of other weights
_MIN_TOKENS = 128  # nor are those of fewer tokens, where noise alone can make a difference smaller by this factor


@dataclass(frozen=True)
class Difference:
    """Log-probabilities of the trainer minus those of the server, over the sampled tokens of all processes.

    `mean` is that of absolute differences, in nats; `ratio_mean` and `ratio_max` are of the raw probability ratio.
    """

    mean: float
    ratio_mean: float
    ratio_max: float
    tokens: int

    @classmethod
    def of(cls, trainer: Tensor, server: Tensor, mask: Tensor, gather: Callable[[Tensor], Tensor]) -> Difference:
        """Compare log-probabilities (B, C) where `mask` (B, C) is set; tokens that the server did not score are NaN."""
        delta = (trainer.double() - server.double())[mask.bool() & ~server.isnan()]
        largest = delta.max() if len(delta) else delta.new_tensor(-math.inf)
        sums = torch.stack([delta.abs().sum(), delta.exp().sum(), largest, delta.new_tensor(len(delta))])
        sums = gather(sums.float()).view(-1, 4).double()
        count = max(1.0, sums[:, 3].sum().item())
        total = sums.sum(0)
        return cls((total[0] / count).item(), (total[1] / count).item(), sums[:, 2].max().exp().item(), int(count))


class SamplingCheck:
    """Warns of, and stops at, samples that are not from the weights they should be from.

    `server` names the server in messages. `floor` is the mean difference that was measured before training, None if
    unknown. `warn` and `stop` are limits of the mean difference in nats; None chooses them from `floor`.
    """

    def __init__(self, server: str, floor: float | None, warn: float | None, stop: float | None) -> None:
        floor = _UNKNOWN if floor is None else floor
        self._server = server
        self.warn = max(_WARN[0] * floor, _WARN[1]) if warn is None else warn
        self.stop = max(_STOP[0] * floor, _STOP[1]) if stop is None else stop
        self._has_warned = False

    def check_limits(self, found: Difference, version: str, step: int) -> None:
        """Warn once if the difference exceeds the first limit. Raises RolloutError if it exceeds the second."""
        if found.mean <= self.warn:
            return
        what = (
            f"Step {step}: {self._server} should have sampled this batch from {version}, but the log-probabilities it "
            f"reports differ from the trainer's by {found.mean:.3g} nats on average over {found.tokens} tokens (raw "
            f"ratio: mean {found.ratio_mean:.3g}, maximum {found.ratio_max:.3g})."
        )
        if found.mean > self.stop:
            raise RolloutError(
                f"{what} The limit is {self.stop:.3g} (vllm_logp_diff_stop). The server may have corrupted weights or "
                "sample at another temperature. Restart it with the config of this run (`ebft vllm-serve CONFIG`) and "
                "resume from the last checkpoint."
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{what} The warning limit is {self.warn:.3g} (vllm_logp_diff_warn).", stacklevel=2)

    def check_others(self, found: Difference, version: str, step: int, others: dict[str, Difference]) -> None:
        """Raise RolloutError if the samples fit one of `others`, differences by name, much better than `version`."""
        if found.mean <= _ROUNDING or found.tokens < _MIN_TOKENS:
            return
        best = min((other.mean for other in others.values()), default=math.inf)
        if best >= _FITS_BETTER * found.mean:
            return
        sampled = " or ".join(name for name, other in others.items() if other.mean <= best + _ROUNDING)
        raise RolloutError(
            f"Step {step}: {self._server} should have sampled this batch from {version}, but it sampled from "
            f"{sampled}: the log-probabilities it reports differ by {found.mean:.3g} nats on average from those of the "
            f"former and by {best:.3g} from those of the latter. The server ignored the update or serves a stale copy "
            "of the weights. Restart it, and resume from the last checkpoint."
        )
