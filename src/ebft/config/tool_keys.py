"""Config keys of evaluation, during training and by `ebft evaluate`, and of training through Ray."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ebft.config.options import MAX_TEMPERATURE, MAX_TOKENS, MIN_TEMPERATURE
from ebft.config.section import NotBlank, Section
from ebft.errors import ConfigError

Strategy = Literal["no", "steps", "epoch"]
Steps = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class EvaluationSection(Section):
    """The section `evaluation:`, which is used by `ebft evaluate`."""

    metrics: list[str] = Field(
        default_factory=list,
        description="User-defined metrics, module.function(prompt, completions, row) -> float (None: does not apply), "
        "evaluated on sampled and on greedy completions; called with one completion at a time.",
    )
    samples: Annotated[int, Field(ge=2, le=MAX_TOKENS)] | None = Field(
        None,
        description="Number of samples per group; if unset, ebft.n_samples_per_prompt or trl.num_generations, at "
        "least 2.",
    )
    pass_at: list[Count] | None = Field(
        None,
        min_length=1,
        description="Values of k for pass@k, each at most the number of samples; if unset, 1 and the number of "
        "samples.",
    )
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] | None = Field(
        None, description="Sampling temperature; if unset, 1 for rows of tokens and trl.temperature for prompts."
    )
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None,
        description="Maximum number of tokens of a full completion; if unset, trl.max_completion_length, and with "
        "rl: ebft also the limit by the reference's length (ebft.adaptive_max_tokens).",
    )
    documents: Count | None = Field(None, description="Evaluate on the first N documents; if unset, on all.")
    bootstrap: int = Field(
        1000,
        ge=0,
        le=MAX_TOKENS,
        description="Number of bootstrap resamples for the confidence intervals; 0 disables intervals.",
    )
    confidence: float = Field(0.95, gt=0, lt=1, description="Confidence level of the intervals.")
    per_document: bool = Field(
        False,
        description="Include per-document values in the JSON: the sum of each metric, and the number of tokens, blocks "
        "or prompts it is over.",
    )

    def counts(self, samples: int) -> tuple[int, list[int]]:
        """The number of samples of a group, of which a run has `samples`, and the values of k for pass@k.

        Raises ConfigError if a k exceeds the number of samples.
        """
        samples = self.samples or max(2, samples)
        pass_at = sorted(set(self.pass_at or [1, samples]))
        if pass_at[-1] > samples:
            raise ConfigError(
                f"evaluation.pass_at: pass@{pass_at[-1]} requires at least as many samples, got {samples}. Increase "
                "evaluation.samples, or reduce evaluation.pass_at."
            )
        return samples, pass_at


class EvaluationKeys(Section):
    """When the model is evaluated on held-out data, and which metrics are used."""

    eval_strategy: Strategy | None = Field(
        None, description="When to evaluate; if unset, steps if eval_steps is set, otherwise epoch."
    )
    eval_steps: Steps | None = Field(
        None, description="Number of steps between evaluations, or a fraction of all training steps if less than 1."
    )
    eval_on_start: bool = Field(
        False,
        description="Also evaluate before the first step, so that later evaluations compare with the base model.",
    )
    evals_per_epoch: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Number of evaluations per epoch; 0 is the same as eval_strategy: no."
    )
    early_stopping_patience: Count | None = Field(
        None,
        description="Stop training after this number of evaluations without a better metric_for_best_model.",
    )
    load_best_model_at_end: bool | None = Field(
        None,
        description="Load the best checkpoint at the end of training. If unset, true with early_stopping_patience, if "
        "checkpoints are saved at evaluations: save_steps is a multiple of eval_steps, or both happen every epoch.",
    )
    metric_for_best_model: str | None = Field(
        None,
        description="Held-out metric used to select the best checkpoint; if unset, cfm_loss with rl: ebft, "
        "reward with rl: grpo, otherwise loss.",
    )
    greater_is_better: bool | None = Field(
        None, description="Whether higher values of that metric are better; if unset, determined from the metric."
    )
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection, description="Options of `ebft evaluate`.")


_KINDS = ("CPU", "GPU")


class RayKeys(Section):
    """Launching through Ray Train."""

    use_ray: bool = Field(
        False,
        description="Train in workers of Ray Train: of the cluster at RAY_ADDRESS, or else of a local Ray that `ebft "
        "train` starts. output_dir and the data must be on a file system that all workers share.",
    )
    ray_num_workers: int = Field(
        1, ge=1, le=100_000, description="Number of Ray workers, each of which is one training process."
    )
    ray_run_name: Annotated[NotBlank, Field(pattern=r"^[\w.-]+$")] | None = Field(
        None, description="Name of the run in Ray, also of its folder in output_dir/ray. If unset, Ray generates one."
    )
    ray_max_failures: int = Field(
        0,
        ge=0,
        description="Number of times that the workers are restarted, from the newest complete checkpoint, after one of "
        "them failed or was killed.",
    )
    resources_per_worker: dict[NotBlank, Annotated[float, Field(ge=0)]] | None = Field(
        None,
        description="Resources that Ray reserves for each worker, such as {GPU: 1, CPU: 4}; a worker trains on one GPU "
        "or none. If unset, one GPU if Ray has GPUs, otherwise one CPU.",
    )

    @field_validator("resources_per_worker")
    @classmethod
    def _as_ray_names_them(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name in value or {}:
            if name not in _KINDS and name.upper() in _KINDS:
                raise ValueError(f"resources_per_worker: {name} is written {name.upper()} in Ray.")
        if (value or {}).get("GPU", 0) not in (0, 1):
            raise ValueError(
                f"resources_per_worker: invalid value GPU: {value['GPU']:g}; expected 1 or 0, because each worker is "
                "one process, which trains on one GPU. Use ray_num_workers for more."
            )
        return value
