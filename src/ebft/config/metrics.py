"""Which held-out metrics a run measures, and which of them decides what the best checkpoint is."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

# What evaluation measures in strided mode (`ebft.strided.held_out`); the first decides unless told otherwise.
STRIDED_METRICS = (
    "cfm_loss",
    "cfm_loss_plugin",
    "cfm_loss_whitened",
    "ce_loss",
    "perplexity",
    "alignment",
    "diversity",
)
# What evaluation measures in structured mode (`ebft.structured.trainer`), and with GRPO.
STRUCTURED_METRICS = (*STRIDED_METRICS, "reward", "loss")
GRPO_METRICS = ("reward", "loss")
PLAIN_METRICS = ("loss",)


def held_out_metrics(config: "RunConfig") -> tuple[str, ...]:
    """Names of the metrics that the run's evaluation gives, without their prefix `eval_`."""
    if config.is_structured:
        return STRUCTURED_METRICS if config.rl == "ebft" else GRPO_METRICS
    return STRIDED_METRICS if config.is_strided else PLAIN_METRICS


def best_metric(config: "RunConfig") -> str:
    """The metric of the best checkpoint: as asked for, else the first that is measured."""
    return config.metric_for_best_model or held_out_metrics(config)[0]
