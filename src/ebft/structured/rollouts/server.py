"""Rollouts from a vLLM server, directly or through agents that sample from it.

The server's weights are kept up to date, and its samples are compared with the trainer's, first before training.
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ebft.errors import RolloutError, warn
from ebft.models.causal_lm import evaluating, unwrap_adapter
from ebft.structured.rollouts.adapters import AdapterSync, Version
from ebft.structured.rollouts.client import ModelNotServed, VLLMClient
from ebft.structured.rollouts.turns import Completion, Rollout, Sampling

_COMPARED_TOKENS = 256  # tokens that are scored in addition to the loss


class ServerRollouts:
    """Connects to the server, checks it, and synchronises its weights every `args.vllm_sync_interval` steps.

    An adapter is published under a new name each time. Without an adapter, `transfer`, TRL's VLLMGeneration, updates
    all weights in place. `failure` returns why the server failed permanently, or None. Raises RolloutError if the
    server is unavailable or does not match.
    """

    def __init__(
        self, trainer: Any, sampling: Sampling, failure: Callable[[], str | None] = lambda: None, transfer: Any = None
    ) -> None:
        args, self._model, self._sampling, self._transfer = trainer.args, trainer.model, sampling, transfer
        self._trainer, self._gather = trainer, trainer.accelerator.gather
        self._is_scored = not sampling.unscored(truncated=trainer.scorer.scores_truncated)
        self.client: VLLMClient = VLLMClient(
            args.vllm_server_host, args.vllm_server_port, args.vllm_server_timeout, failure=failure
        )
        weakref.finalize(self, self.client.close)
        compares = transfer is None
        entry, floor = check_server(self.client, self._model, trainer.processing_class, sampling, compares)
        name = f"the vLLM server at {self.client.address}"
        self._check = SamplingCheck(name, floor, args.vllm_logp_diff_warn, args.vllm_logp_diff_stop)
        self._identified: Version | None = None  # the last version whose samples were compared with other versions
        self.max_model_len: int | None = entry.get("max_model_len")
        self._base_model = entry["id"]
        of_policy = (self._model, trainer.accelerator, args.output_dir)
        self._adapters = AdapterSync(self.client, *of_policy) if transfer is None else None
        self._synced_at: int | None = None

    def sync_weights(self, at_once: bool = False) -> None:
        """Update the server's weights if due, or, with `at_once`, if outdated. TRL calls this before rollouts."""
        step, interval = self._trainer.state.global_step, 1 if at_once else self._trainer.args.vllm_sync_interval
        # At multiples of the interval, which an evaluation in between does not move.
        last = self._synced_at
        if last is not None and last <= step and last // interval == step // interval:
            return
        if self._adapters is not None:
            atexit.register(self.reset)  # remove the adapters from the server if the interpreter exits before reset()
            self._adapters.publish(step)
        else:
            self._transfer.sync_weights()
        self._synced_at = step

    @property
    def weights_step(self) -> int:
        """The optimizer step of the weights that are currently used for sampling."""
        return self._synced_at if self._synced_at is not None else 0

    def backend(self) -> VLLMBackend:
        """Return a backend that samples from the weights of the last sync, even after later ones, until `release`."""
        version = self._adapters.current if self._adapters is not None else None
        if version is not None:
            self._adapters.hold(version)
        return VLLMBackend(self.client, self._sampling, self._base_model, self._adapters, version)

    def check_samples(
        self, inputs: dict[str, Tensor], version: Version | None, weights_step: int, score: Callable[[int], Tensor]
    ) -> Difference:
        """Compare the log-probabilities of a batch that was sampled from `version`, with weights of `weights_step`.

        `score(rows)` returns the trainer's log-probabilities of the first rows, (rows, C), under the model's weights at
        that time. A batch from outdated weights is compared on few rows, under a copy of these weights. The first batch
        of each version is also compared with the base model and other versions. Raises RolloutError if the server
        sampled from other weights, on all processes.
        """
        step, server = self._trainer.state.global_step, inputs["sampling_per_token_logps"]
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        enough = (mask.sum(-1).cumsum(0) >= _COMPARED_TOKENS).nonzero()
        compared = int(enough[0]) + 1 if len(enough) else len(mask)  # the first rows
        is_outdated = weights_step != step
        if is_outdated or "old_per_token_logps" not in inputs:
            with self._adapters.weights_of(version) if is_outdated and version else nullcontext():
                own = score(compared)
        else:
            own = inputs["old_per_token_logps"]
        difference = lambda logps: Difference.of(logps, server[: len(logps)], mask[: len(logps)], self._gather)
        found = difference(own)
        name = "the transferred weights" if version is None else _name(version)
        if version is not None and version != self._identified:
            self._identified = version
            # What the server may have used instead of `version`.
            kept = {_name(other): partial(self._adapters.weights_of, other) for other in self._adapters.kept}
            weights = {"the base model without an adapter": self._model.disable_adapter} | kept
            others = {}
            for other, active in weights.items():
                if other != name:
                    with active():
                        others[other] = difference(score(compared))
            self._check.check_others(difference(own[:compared]), name, step, others)
        if self._is_scored and not (is_outdated and version is None):
            self._check.check_limits(found, name, step)
        return found

    def release(self, backend: VLLMBackend) -> None:
        """Release the weights of `backend`, which must not be used for sampling any more."""
        if backend.version is not None:
            self._adapters.release(backend.version)

    def reset(self) -> None:
        """Remove all adapters from the server; the next rollouts start with a sync."""
        atexit.unregister(self.reset)
        if self._adapters is not None:
            self._adapters.close()
        self._synced_at = None


def _name(version: Version) -> str:
    return f"the adapter of step {version.step} ({version.name})"


_RELOADS = 3  # attempts per call to reload an adapter that a restarted server has lost


@dataclass(frozen=True)
class VLLMBackend:
    """Samples from `version` of the policy's adapter, or from the server's own model if `version` is None."""

    client: VLLMClient
    sampling: Sampling
    base_model: str
    adapters: AdapterSync | None = None
    version: Version | None = None

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        model = self.base_model if self.version is None else self.version.name
        for _ in range(_RELOADS):
            try:
                return self.client.complete(model, prompts, max_tokens, self.sampling)
            except ModelNotServed:
                if self.version is None:
                    raise
                self.adapters.reload(self.version)
        return self.client.complete(model, prompts, max_tokens, self.sampling)


POLICY = "ebft-policy"  # the name of the policy's current adapter on the server


class Agents(Protocol):
    """Runs conversations with agents."""

    def run(self, rows: list[dict[str, Any]], params: dict[str, Any]) -> list[Rollout]:
        """Return one rollout with its reward per row; blocks until all are complete. Raises RolloutError.

        `params` of requests: the `model`, a version of the adapter, which `POLICY` stands for meanwhile; `temperature`,
        `top_p`, and `max_output_tokens`, the limit of each reply.
        """

    def cancel(self) -> None:
        """Cancel running conversations; the threads that wait for them raise CancelledError."""


def run_agents(agents: Agents, rows: list[dict[str, Any]], backend: VLLMBackend, max_tokens: int) -> list[Rollout]:
    """Return the rollouts of the agents' conversations about some rows.

    Calls wait for each other, since the server has a single adapter under the name that agents request.
    """
    version, sampling = backend.version, backend.sampling
    with backend.adapters.served_as(POLICY, version):
        params = {"model": version.name, "temperature": sampling.temperature, "top_p": sampling.top_p}
        return agents.run(rows, params | {"max_output_tokens": max_tokens})


_TEXT = "def add(a, b):\n    return a + b\n\n# Every token counts: 3.14159, naïve, 東京."
_TOKENS = 32  # number of sampled tokens to compare
# Tolerance of the mean difference of log-probabilities between server and trainer, in nats. Different dtypes (bfloat16
# and float32) and quantisation cause up to about 0.1; a different model differs by more than 1, one of the same family
# by tenths.
_SAME_NAME, _OTHER_NAME = 0.25, 0.05


def check_server(
    client: VLLMClient, model: Any, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, compare_weights: bool
) -> tuple[dict[str, Any], float | None]:
    """Check the server and return the entry of its base model. Raises RolloutError if it does not match the trainer.

    With `compare_weights`, the server samples some tokens from its base model, and their log-probabilities are compared
    with `model`'s, with its adapter disabled, at the same temperature. Their mean absolute difference is
    returned too, or None.
    """
    client.wait_until_up()
    entry = client.base_model()
    served, base_model = entry.get("root") or entry["id"], unwrap_adapter(model).config.name_or_path
    who = f"The vLLM server at {client.address} serves {served}, and this run trains {base_model}"
    theirs, ours = client.tokenize(entry["id"], _TEXT), tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    if theirs != ours:
        raise RolloutError(f"{who}: their tokenizers differ. Start the server by `ebft vllm-serve CONFIG`.")
    if not compare_weights:
        return entry, None
    probe = replace(sampling, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, regex=None, extra={})
    [completion] = client.complete(entry["id"], [ours], [_TOKENS], replace(probe, end_ids=frozenset()))
    causal_lm, device = unwrap_adapter(model), next(model.parameters()).device
    with evaluating(model), model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
        logits = causal_lm(input_ids=torch.tensor([ours + completion.ids], device=device)).logits[0, len(ours) - 1 : -1]
    logps = (logits.double().cpu() / probe.temperature).log_softmax(-1)
    logps = logps.gather(-1, torch.tensor(completion.ids)[:, None]).squeeze(-1)
    difference = (torch.tensor(completion.logps, dtype=torch.float64) - logps).abs().mean().item()
    paths = [Path(name).expanduser() for name in (served, base_model)]
    is_same = served == base_model or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))
    limit = _SAME_NAME if is_same else _OTHER_NAME
    if difference <= limit:
        return entry, difference
    raise RolloutError(
        f"{who}: they are different models, or log-probabilities are at another temperature: on {_TOKENS} tokens they "
        f"differ by {difference:.2f} nats on average (tolerance {limit}). Start it with the config of this run: `ebft "
        "vllm-serve CONFIG` sets --logprobs-mode processed_logprobs."
    )


# Limits of the mean absolute difference in nats: a multiple of the difference that dtypes and kernels cause, which is
# measured before training, and at least a value that is harmless for the loss.
_WARN, _STOP = (3.0, 0.05), (10.0, 0.2)
_UNKNOWN = 0.05  # the difference caused by dtypes and kernels, where it cannot be measured before training
_FITS_BETTER = 0.5  # other weights are the sampled ones if their difference is smaller by this factor
_ROUNDING = 1e-3  # differences below it are not compared with other weights
_MIN_TOKENS = 128  # nor with fewer tokens, where noise alone can make a difference smaller by this factor


@dataclass(frozen=True)
class Difference:
    """Log-probabilities of the trainer minus the server's, over the sampled tokens of all processes.

    `mean` is the mean of absolute differences, in nats; `ratio_mean` and `ratio_max` are of the raw probability ratio.
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
                f"{what} The limit is {self.stop:.3g} (vllm_logp_diff_stop). Restart it with the config of this run "
                "(`ebft vllm-serve CONFIG`) and resume from the last checkpoint."
            )
        if not self._has_warned:
            self._has_warned = True
            warn(f"{what} The warning limit is {self.warn:.3g} (vllm_logp_diff_warn).")

    def check_others(self, found: Difference, version: str, step: int, others: dict[str, Difference]) -> None:
        """Raise RolloutError if the samples fit one of `others`, differences by name, much better than `version`."""
        if found.mean <= _ROUNDING or found.tokens < _MIN_TOKENS:
            return
        best = min((other.mean for other in others.values()), default=math.inf)
        if best >= _FITS_BETTER * found.mean:
            return
        sampled = " or ".join(name for name, other in others.items() if other.mean <= best + _ROUNDING)
        raise RolloutError(
            f"Step {step}: {self._server} sampled from {sampled}, not from {version}: log-probabilities differ by "
            f"{best:.3g} from the former and by {found.mean:.3g} from the latter. Restart it, and resume training."
        )
