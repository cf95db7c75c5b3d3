"""The reward of sampled replies against a reference, as in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ebft.data.messages import Message
from ebft.errors import ConfigError, DataError
from ebft.inference.sampling import Sampler
from ebft.structured.reward import FeatureMatchingReward

MOST_SAMPLES = 256  # which are generated as one batch


@dataclass(frozen=True)
class ScoredReplies:
    """Samples of one prompt, with their rewards and the terms of the rewards."""

    texts: list[str]
    ids: list[list[int]]
    rewards: list[float]
    alignment: list[float]  # in the space of the reward: whitened with use_whitening
    diversity: list[float]
    cfm: float


class Scorer:
    """Samples replies and scores them with `FeatureMatchingReward`, whose feature network is the base model."""

    def __init__(self, sampler: Sampler, samples: int) -> None:
        if not 1 <= samples <= MOST_SAMPLES:
            raise ConfigError(f"samples: invalid value {samples!r:.100}; expected an integer from 1 to {MOST_SAMPLES}.")
        if samples > 1 and sampler.options.temperature == 0:
            raise ConfigError("temperature: 0 gives equal samples, whose rewards are equal too. Set samples: 1.")
        self._sampler, self._samples = sampler, samples

    @cached_property
    def reward(self) -> FeatureMatchingReward:
        """The reward, with the feature settings of the config, or their defaults."""
        loaded = self._sampler.loaded
        model = loaded.tuned if loaded.shares_base else loaded.base
        options = {**loaded.reward, "feature_device": None}  # the model is where the feature network is
        return FeatureMatchingReward(
            model, loaded.tokenizer, self._samples, chat_template_kwargs=loaded.template, copy=False, **options
        )

    def __call__(
        self,
        prompt: str | list[Message],
        reference: str,
        base: bool = False,
        on_token: Callable[[], None] | None = None,
    ) -> ScoredReplies:
        """Sample replies to a prompt and score them against a reference text; see `Sampler.reply_ids`."""
        n = self._samples
        self._check_length(prompt, reference)
        ids = self._sampler.reply_ids(prompt, base, n, on_token=on_token)
        rewards = self.reward([prompt] * n, completion_ids=ids, ground_truth=[reference] * n)
        match = self.reward.last
        return ScoredReplies(
            [self._sampler.text(reply) for reply in ids],
            ids,
            rewards,
            match.alignment.flatten().tolist(),
            match.diversity.flatten().tolist(),
            match.cfm.item(),
        )

    def _check_length(self, prompt: str | list[Message], reference: str) -> None:
        """Raise DataError if the feature network has fewer positions than the prompt and the reference have tokens."""
        positions = self._sampler.positions
        if positions is None:
            return
        self._sampler.prompt_ids(prompt)
        self._sampler.check_length(reference, "reference")
        row = self.reward.renderer.of_row({"prompt": prompt, "ground_truth": reference})
        length = len(row.prompt_ids) + len(row.reference_ids)
        if length > positions:
            raise DataError(
                f"The prompt and the reference have {length} tokens, but the model has {positions} positions. Use "
                "shorter ones."
            )
