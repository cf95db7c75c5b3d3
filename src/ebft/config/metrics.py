"""Which held-out metrics a run measures, and which of them decides what the best checkpoint is."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

_CROSS_ENTROPY = ("ce_loss", "perplexity", "ce_loss_all", "perplexity_all")
# Of `ebft.scores.feature_scores`; the first decides unless told otherwise.
_FEATURES = ("cfm_loss", "cfm_loss_plugin", "cfm_loss_whitened", "alignment", "diversity")
_GRPO = ("reward", "loss")
_PLAIN = ("loss", *_CROSS_ENTROPY)


def held_out_metrics(config: "RunConfig") -> tuple[str, ...]:
    """Names of the metrics that the run's evaluation gives, without their prefix `eval_`."""
    if config.is_strided:
        return (*_FEATURES, *_CROSS_ENTROPY, *_pass_at(max(2, config.ebft.n_samples_per_prompt)))
    if config.is_structured:
        ours = (*_FEATURES, *_CROSS_ENTROPY, *_pass_at(config.trl.num_generations)) if config.rl == "ebft" else ()
        return (*ours, *_GRPO)
    return _PLAIN


def _pass_at(samples: int) -> tuple[str, ...]:
    return tuple(f"{name}_pass@{k}" for k in (1, samples) for name in ("alignment", "reward"))


def best_metric(config: "RunConfig") -> str:
    """The metric of the best checkpoint: as asked for, else the first that is measured."""
    return config.metric_for_best_model or held_out_metrics(config)[0]
