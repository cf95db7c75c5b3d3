"""Keys of the config about held-out data: when training measures on it, and what `ebft evaluate` measures."""

from typing import Annotated, Literal

from pydantic import Field

from ebft.config.section import Section

Strategy = Literal["no", "steps", "epoch"]
Steps = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class EvaluationSection(Section):
    """The section `evaluation:`, which `ebft evaluate` reads."""

    metrics: list[str] = Field(
        default_factory=list,
        description="Functions of your own, module.function(prompt, completions, row) -> float (None: does not apply), "
        "measured on sampled and on greedy completions; called with one completion at a time.",
    )
    samples: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Samples per group; unset is ebft.n_samples_per_prompt or trl.num_generations."
    )
    pass_at: list[Count] | None = Field(
        None, min_length=1, description="The k of pass@k, each at most the samples; unset is 1 and all samples."
    )
    temperature: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Sampling temperature; unset is 1 for token rows, and trl.temperature for prompts."
    )
    max_new_tokens: Count | None = Field(
        None,
        description="Most tokens of a full completion; unset is trl.max_completion_length, and the limit by the "
        "reference's length too with rl: ebft (ebft.adaptive_max_tokens).",
    )
    documents: Count | None = Field(None, description="Documents to measure on, the first ones; unset is all.")
    bootstrap: int = Field(
        1000, ge=0, description="Resamples of the documents for the confidence intervals; 0 leaves intervals out."
    )
    confidence: float = Field(0.95, gt=0, lt=1, description="Confidence level of the intervals.")
    per_document: bool = Field(
        False,
        description="Put each document's part of the metrics into the JSON: its sum, and over how many tokens, blocks "
        "or prompts.",
    )


class EvaluationKeys(Section):
    """When the model is evaluated on held-out data, and on what."""

    eval_strategy: Strategy | None = Field(
        None, description="When to evaluate; unset is steps where eval_steps is set, else epoch."
    )
    eval_steps: Steps | None = Field(None, description="Steps between two evaluations, or a share of the run.")
    evals_per_epoch: Count | None = Field(None, description="Evaluations per epoch.")
    load_best_model_at_end: bool = Field(False, description="End with the checkpoint that evaluated best.")
    metric_for_best_model: str | None = Field(
        None,
        description="Held-out metric that decides which is best; unset is cfm_loss with rl: ebft, "
        "reward with rl: grpo, else loss.",
    )
    greater_is_better: bool | None = Field(
        None, description="Whether a higher value of that metric is better; unset knows it."
    )
    evaluation: EvaluationSection = Field(
        default_factory=EvaluationSection, description="What `ebft evaluate` measures, and how."
    )
