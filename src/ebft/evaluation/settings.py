"""How a config is evaluated: the `evaluation:` section with what it leaves open filled in from the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebft.errors import ConfigError
from ebft.structured.rollouts.turns import ReferenceLimit

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


@dataclass(frozen=True)
class Settings:
    """Everything that all models of an evaluation share."""

    samples: int
    pass_at: list[int]
    temperature: float
    max_new_tokens: int
    by_reference: ReferenceLimit | None  # how the reference limits a completion; None: not at all
    batch_size: int  # rows, each with all of its samples
    seed: int

    @classmethod
    def of(cls, config: RunConfig) -> Settings:
        """The settings of a config; ConfigError where its pass@k asks for more samples than there are."""
        wanted, of_run = config.evaluation, config.method.sampling(config)
        samples = wanted.samples or max(2, of_run.samples)
        pass_at = sorted(set(wanted.pass_at or [1, samples]))
        if pass_at[-1] > samples:
            raise ConfigError(
                f"evaluation.pass_at: pass@{pass_at[-1]} needs as many samples, and there are {samples}. Raise "
                "evaluation.samples, or lower evaluation.pass_at."
            )
        adaptive = of_run.by_reference is not None and wanted.max_new_tokens is None
        return cls(
            samples=samples,
            pass_at=pass_at,
            temperature=wanted.temperature or of_run.temperature,
            max_new_tokens=wanted.max_new_tokens or config.trl.max_completion_length,
            by_reference=ReferenceLimit(*of_run.by_reference) if adaptive else None,
            batch_size=config.eval_batch_size or config.micro_batch_size,
            seed=config.seed,
        )
