"""Settings of an evaluation: the `evaluation:` section, with unset values taken from the options of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebft.errors import ConfigError
from ebft.structured.rollouts.turns import ReferenceLimit

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


@dataclass(frozen=True)
class Settings:
    """Settings shared by all models of an evaluation."""

    samples: int
    pass_at: list[int]
    temperature: float
    max_new_tokens: int
    by_reference: ReferenceLimit | None  # limit of a completion by its reference's length; None: no such limit
    batch_size: int  # number of rows, each with all of its samples
    seed: int

    @classmethod
    def of(cls, config: RunConfig) -> Settings:
        """Return the settings of a config; raises ConfigError if a k of pass@k exceeds the number of samples."""
        wanted, of_run = config.evaluation, config.method.sampling(config)
        samples = wanted.samples or max(2, of_run.samples)
        pass_at = sorted(set(wanted.pass_at or [1, samples]))
        if pass_at[-1] > samples:
            raise ConfigError(
                f"evaluation.pass_at: pass@{pass_at[-1]} requires at least as many samples, got {samples}. Increase "
                "evaluation.samples, or reduce evaluation.pass_at."
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
