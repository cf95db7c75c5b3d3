"""Scoring of completions in the loss: one forward pass in which prompts are shared, or TRL's padded rows."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from ebft.errors import ModelError
from ebft.models.causal_lm import unwrap_adapter
from ebft.prefix.policy import HINT, most_tokens, prepare
from ebft.prefix.sampling import Truncation
from ebft.structured.over_trl import OverTRL
from ebft.structured.padding import check_padding
from ebft.structured.parity import check_parity
from ebft.structured.shared_prompt import Padded, Rows, put_back, score_completions


class SharedPromptScoring(OverTRL):
    """GRPOTrainer whose completions share their prompts; models that do not allow it are scored in TRL's rows.

    `shares_prompts`: which of the two is used. `reference_logps`: the references of the micro-batch whose loss is being
    computed, if it was scored with shared prompts, see `Rows.references`.
    """

    shares_prompts: bool
    keeps_groups: bool
    reference_logps: tuple[Tensor, Tensor | None] | None
    _most_tokens: int | None = None
    _has_warned = False

    def prepare_sharing(self) -> None:
        """Decide whether completions share their prompts, and prepare the models for it.

        Raises ModelError for models that neither share prompts nor give exact results with padded rows.
        """
        self._share_if_possible()
        if not self.shares_prompts:
            args = self.args
            samples = not (args.use_vllm or args.uses_server)
            check_padding(unwrap_adapter(self.model), as_trained=args.disable_dropout, samples=samples)

    def _share_if_possible(self) -> None:
        self.shares_prompts = self.keeps_groups = self.args.shared_prefix
        if not self.shares_prompts:
            return
        try:
            causal_lm = unwrap_adapter(self.model)
            check_parity(causal_lm, as_trained=self.args.disable_dropout)
            if self.ref_model is not None:
                prepare(self.ref_model)
            self._most_tokens = most_tokens(causal_lm)
        except ModelError as error:
            self.shares_prompts = self.keeps_groups = False
            cause = str(error).replace(HINT, "").strip().rstrip(".")
            message = f"Prompts are computed once per completion, because they cannot be shared: {cause}."
            warnings.warn(message, stacklevel=2)

    @property
    def scores_truncated(self) -> bool:
        """Whether completions are scored under the distribution that top-k, top-p and min-p leave, in every batch."""
        return self.shares_prompts and self._most_tokens is None

    def score(
        self, model: nn.Module, prompts: Padded, completions: Padded, with_entropies: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Score completions, and the references of the loss, in one forward pass that computes each prompt once."""
        if not self.shares_prompts:
            return None
        inputs = self.inputs_of_loss or {}
        references = (inputs["reference_ids"], inputs["reference_mask"]) if "reference_ids" in inputs else None
        rows = Rows.of(prompts, completions, references)
        if self._are_too_long(rows):
            return None
        scores = score_completions(
            model,
            rows.prompts,
            temperature=self.temperature,
            truncation=Truncation.of(self.args.top_k, self.args.top_p, self.args.min_p),
            with_entropies=with_entropies,
            entropy_gradient=self.has_entropy_bonus,
            score_prompts=references is not None and not self.model.training,
        )
        if references is not None:
            self.reference_logps = rows.references(scores, references[0])
        found = (put_back(x, rows.completion_index, completions[0]) for x in scores[:2] if x is not None)
        return tuple(found) if with_entropies else (*found, None)

    def _are_too_long(self, rows: Rows) -> bool:
        """Whether rotary frequencies depend on the length of a sequence, in the rows of any process."""
        if self._most_tokens is None:
            return False
        longer = torch.tensor([float(rows.longest > self._most_tokens)], device=self.args.device)
        if not self.accelerator.reduce(longer, "sum").item():
            return False
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Prompts are computed once per completion for sequences of more than {self._most_tokens} tokens, "
                "because the model's rotary frequencies change at this length.",
                stacklevel=2,
            )
        return True
