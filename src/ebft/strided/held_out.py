"""How a policy does on held-out documents, in one fixed feature space: cross-entropy, feature matching, alignment.

Training rewards may be whitened by each group's own samples; here features are normalised and unwhitened, the
rollouts are drawn at temperature 1, and the feature-matching loss is the unbiased estimate, so that numbers of two
models compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext

from torch import Tensor
from transformers import PreTrainedModel

from ebft.features import FeatureNetwork
from ebft.models.causal_lm import evaluating
from ebft.monitor.metrics import MeanMetrics
from ebft.rewards import alignment_rewards, cfm_loss, diversity_rewards, unbiased_cfm_loss, whiten
from ebft.strided.embed import embed_blocks
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.policy import prepare
from ebft.strided.rollout import DocumentNoise, sample_rollouts

METRICS = ("alignment", "diversity", "cfm_loss", "cfm_loss_plugin", "cfm_loss_whitened", "ce_loss")


def held_out_metrics(
    causal_lm: PreTrainedModel,
    network: FeatureNetwork,
    batches: Iterable[dict[str, Tensor]],
    *,
    block_options: dict[str, int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    tokens_per_pass: int | None = None,
    accelerator=None,
) -> dict[str, float]:
    """Means over every block (feature metrics) and token (cross-entropy) of the batches, and of all ranks.

    Returns `ce_loss` and `perplexity` of the reference text; `alignment` and `diversity` (scaled by 2 as in training);
    `cfm_loss` (unbiased), `cfm_loss_plugin` (eq. 2 with sample means) and `cfm_loss_whitened` (plug-in, whitened by
    each group's samples: not comparable between models). Each document draws the same noise in every call with the
    same seed. At least two samples are drawn per block, as an unbiased estimate needs them.
    """
    block_options = {**block_options, "n_samples_per_prompt": max(2, block_options["n_samples_per_prompt"])}
    prepare(causal_lm)
    metrics, noise = MeanMetrics(), DocumentNoise(seed)
    for name in METRICS:  # a rank without documents still takes part in the sums
        metrics.add(name, 0.0, 0.0)
    autocast = accelerator.autocast if accelerator is not None else nullcontext
    device = next(causal_lm.parameters()).device
    for inputs in batches:
        documents = Documents.from_inputs({name: value.to(device) for name, value in inputs.items()})
        layout = StridedLayout.place(documents, **block_options)
        with evaluating(causal_lm), autocast():
            drawn = noise.draw(documents, layout, step=0)
            rollouts = sample_rollouts(
                causal_lm,
                documents,
                layout,
                temperature=temperature,
                top_p=top_p,
                noise=drawn,
                text_gradient=False,
                tokens_per_pass=tokens_per_pass,
            )
            phi, phi_ref = embed_blocks(network, documents, layout, rollouts.tokens, tokens_per_pass=tokens_per_pass)
        metrics.add("ce_loss", -rollouts.text_logps.sum(), documents.ce_mask.sum())
        _add_feature_metrics(metrics, phi, phi_ref)
    means = metrics.drain(accelerator)
    if "cfm_loss" not in means:
        raise ValueError("there is nothing to evaluate on: the held-out set has no batches")
    return {**means, "perplexity": math.exp(min(means.get("ce_loss", math.nan), 700.0))}


def _add_feature_metrics(metrics: MeanMetrics, phi: Tensor, phi_ref: Tensor) -> None:
    values = {
        "alignment": alignment_rewards(phi, phi_ref).mean(-1),
        "diversity": diversity_rewards(phi).mean(-1),
        "cfm_loss": unbiased_cfm_loss(phi, phi_ref),
        "cfm_loss_plugin": cfm_loss(phi, phi_ref),
        "cfm_loss_whitened": cfm_loss(*whiten(phi, phi_ref)),
    }
    for name, value in values.items():
        metrics.add(name, value.sum(), value.numel())
