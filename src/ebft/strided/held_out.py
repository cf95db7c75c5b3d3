"""Metrics of a policy on held-out documents, in a fixed feature space: cross-entropy, feature matching, alignment.

Training rewards may be whitened with each group's own samples. Here, features are normalised but not whitened, the
rollouts are sampled at temperature 1, and the feature-matching loss is the unbiased estimate, so that the metrics of
different models are comparable.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per rollout
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.anchors import BlockOptions
from ebft.features import FeatureNetwork
from ebft.models.causal_lm import evaluating, positions_of
from ebft.prefix.forward import prepare
from ebft.rewards import unbiased_cfm_loss
from ebft.scores import CURVE, Scores, curve_lengths, feature_score_names, feature_scores
from ebft.strided.layout import IGNORE_INDEX, Documents, StridedLayout, mask_of
from ebft.strided.loss import embed_prefixes, score
from ebft.strided.rollout import DocumentNoise, Rollouts, sample_rollouts


@dataclass
class HeldOutMeasure:
    """Samples and scores held-out documents and accumulates the sums of each document in `scores`.

    `ce_loss` is computed over the tokens of `Documents.ce_mask`, or, with `counts_all_labels`, over every label,
    including labels of prompts and earlier turns; `ce_loss_all` over every token that has a predecessor. The other
    metrics are `ebft.scores.feature_scores`, over blocks. At least two samples are drawn per block, because
    the unbiased estimate requires them. With the same seed, a document always uses the same sampling noise. `pass_at`
    defaults to 1 and the number of samples. `curves` adds metrics by position in a rollout and keeps the rewards of
    the individual samples in `scores.samples`.
    """

    causal_lm: PreTrainedModel
    network: FeatureNetwork
    block_options: BlockOptions
    temperature: float = 1.0
    seed: int = 0
    tokens_per_pass: int | None = None
    alignment_coef: float = 1.0
    diversity_coef: float = 1.0
    pass_at: list[int] | None = None
    curves: bool = False
    counts_all_labels: bool = False
    autocast: Callable[[], AbstractContextManager] = nullcontext
    scores: Scores = field(default_factory=Scores)

    def __post_init__(self) -> None:
        samples = max(2, self.block_options.n_samples_per_prompt)
        options = replace(self.block_options, n_samples_per_prompt=samples)
        self.block_options = options.within(positions_of(self.causal_lm))
        self.pass_at = self.pass_at or [1, samples]
        self._noise = DocumentNoise(self.seed)
        prepare(self.causal_lm, may_run_rows=True)
        for name in ["ce_loss", "ce_loss_all", *feature_score_names(samples, self.pass_at)]:
            self.scores.add(name, [], [])  # a rank without documents still participates in the reductions

    def add(self, inputs: dict[str, Tensor], ids: Iterable[int]) -> None:
        """Score a batch whose documents have the identifiers `ids`; at least one must be long enough for a block."""
        device = next(self.causal_lm.parameters()).device
        documents = Documents.from_inputs(inputs, device)
        layout = StridedLayout.place(documents, self.block_options)
        whole = replace(documents, ce_mask=documents.host_positions > 0)
        with evaluating(self.causal_lm), self.autocast():
            rollouts = sample_rollouts(
                self.causal_lm,
                whole,
                layout,
                temperature=self.temperature,
                noise=self._noise.draw(documents, layout, step=0),
                text_gradient=False,
                tokens_per_pass=self.tokens_per_pass,
            )
            lengths = curve_lengths(layout.generate_max_len) if self.curves else [layout.generate_max_len]
            embedded = embed_prefixes(
                self.network, whole, layout, rollouts.tokens, lengths, tokens_per_pass=self.tokens_per_pass
            )
        ids = torch.tensor(list(ids))
        nll_S = rollouts.text_logps.new_zeros(len(whole.tokens)).index_put_((whole.predicted,), -rollouts.text_logps)
        if self.counts_all_labels:
            labels = inputs["labels"][inputs["attention_mask"].bool()].cpu()
            documents = replace(documents, ce_mask=whole.ce_mask & labels.ne(IGNORE_INDEX))
        document_S, host_nll_S = ids.repeat_interleave(documents.lengths), nll_S.cpu()
        for name, mask in (("ce_loss", documents.ce_mask), ("ce_loss_all", whole.ce_mask)):
            self.scores.add(name, document_S[mask].tolist(), host_nll_S[mask])
        blocks = [int(ids[d]) for d, row in enumerate(layout.anchors) for _ in row]
        weights, computed_in = (self.alignment_coef, self.diversity_coef), self.network.computed_in
        found = feature_scores(*embedded[-1], *weights, pass_at=self.pass_at, computed_in=computed_in)
        self.scores.add_all(found, blocks)
        if self.curves:
            self.scores.keep_samples(*embedded[-1], *weights)
            for length, (phi, phi_ref) in zip(lengths, embedded):
                self.scores.add(f"{CURVE}/cfm_loss/{length}", blocks, unbiased_cfm_loss(phi, phi_ref))
            self._add_positions(nll_S, documents, layout, rollouts, blocks)

    def _add_positions(
        self, nll_S: Tensor, documents: Documents, layout: StridedLayout, rollouts: Rollouts, blocks: list[int]
    ) -> None:
        """Add the cross-entropy at each position of a block, at temperature 1, until the block ends. It is computed for
        the reference, and for the rollouts under both the policy and the base model."""
        logps = rollouts.logps
        if self.temperature != 1:
            with evaluating(self.causal_lm):
                logps = self._logps(self.causal_lm, documents, layout, rollouts.tokens)
        with self.network.frozen() as base:
            by_base = self._logps(base, documents, layout, rollouts.tokens)
        index = layout.reference_index()
        of_references = mask_of(layout.lengths(documents.tokens[index]), index.shape[-1])
        of_rollouts = mask_of(layout.lengths(rollouts.tokens), index.shape[-1])
        found = {
            "reference_nll": (nll_S[index][:, None], of_references[:, None]),
            "rollout_nll": (-logps, of_rollouts),
            "rollout_nll_base": (-by_base, of_rollouts.to(by_base.device)),
        }
        for name, (values_MNG, is_token_MNG) in found.items():
            totals_GM, counts_GM = ((values_MNG * is_token_MNG).sum(1).T, is_token_MNG.sum(1).T)
            for t, (total_M, count_M) in enumerate(zip(totals_GM, counts_GM)):
                self.scores.add(f"{CURVE}/{name}/{t}", blocks, total_M, count_M)

    def _logps(self, model: nn.Module, documents: Documents, layout: StridedLayout, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (M, N, G) of the rollouts at temperature 1, on the model's device."""
        device = next(model.parameters()).device
        with self.autocast():
            logps, _ = score(
                model,
                documents.to(device),
                layout.to(device),
                tokens.to(device),
                temperature=1.0,
                text_gradient=False,
                apply_dropout=False,
                tokens_per_pass=self.tokens_per_pass,
            )
        return logps


def held_out_metrics(
    causal_lm: PreTrainedModel,
    network: FeatureNetwork,
    batches: Iterable[dict[str, Tensor]],
    *,
    accelerator=None,
    copies: Callable[[], int] = lambda: 1,
    **settings,
) -> dict[str, float]:
    """Return the means over all blocks (feature metrics) and tokens (cross-entropy) of the batches, over all ranks.

    `copies` returns the number of ranks that evaluate the current batch. `settings` are the arguments of
    HeldOutMeasure; `block_options` is required. Raises ValueError if there are no batches.
    """
    autocast = accelerator.autocast if accelerator is not None else nullcontext
    measure = HeldOutMeasure(causal_lm, network, autocast=autocast, **settings)
    for number, inputs in enumerate(batches):
        measure.add(inputs, [number] * len(Documents.from_inputs(inputs).lengths))
        measure.scores.divide(number, copies())
    means = measure.scores.means(accelerator)
    if "cfm_loss" not in means:
        raise ValueError("cannot evaluate: the held-out set is empty")
    return means
