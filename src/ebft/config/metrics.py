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
PLAIN_METRICS = ("loss",)


def held_out_metrics(config: "RunConfig") -> tuple[str, ...]:
    """Names of the metrics that the run's evaluation gives, without their prefix `eval_`."""
    return STRIDED_METRICS if config.is_strided else PLAIN_METRICS


def best_metric(config: "RunConfig") -> str:
    """The metric of the best checkpoint: as asked for, else `cfm_loss` in strided mode and `loss` otherwise."""
    return config.metric_for_best_model or held_out_metrics(config)[0]
