"""The preference methods: DPO, IPO, KTO, ORPO and SimPO (`rl: dpo` and so on), whose losses TRL computes.

They compare completions that are part of the data, pairs of a chosen and a rejected one, or single ones with a label.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ebft.catalog import adapted_head, adapted_heads
from ebft.config.section import Section
from ebft.data.transforms import PreferenceColumns
from ebft.errors import warn
from ebft.machine import Machine
from ebft.methods.method import Method, MethodConfig, class_at


class BetaKeys(Section):
    """The key of all preference methods."""

    rl_beta: float | None = Field(None, gt=0)
    """Preference methods: strength of the reference model in the loss (tau of IPO), or the factor of the
    log-probabilities with simpo, whose paper uses 2 to 10. If unset, TRL's default, 0.1."""


class ReferenceKeys(BetaKeys):
    """Keys of the methods with a reference model."""

    precompute_ref_log_probs: bool = False
    """dpo, ipo, kto: compute the log-probabilities of the reference model before training, which saves the memory of
    the reference model."""


# Columns of a mapping that only one kind of rows has.
_OF_KIND = {
    "preferences": ("field_chosen", "field_rejected", "chosen_format", "rejected_format"),
    "labelled": ("field_completion", "field_label", "completion_format"),
}


class PreferenceMethod(Method):
    """A loss that compares completions that are part of the data."""

    rows = "preferences"
    view = "PreferenceView"
    copy_name = "reference model"
    can_be_compared = False
    unsupported = {
        "sample_packing": "chosen and rejected completions are separate sequences",
        "group_by_length": "a row has several sequences",
        "train_on_inputs": "only completions are compared",
        "torch_compile": "it is not tested with TRL's losses",
    }
    idle = ("ebft", "trl", "vllm", "evaluation")
    has_reference: ClassVar[bool] = True
    metrics = ("loss", "rewards/accuracies", "rewards/margins")
    data: ClassVar[str] = "pairs of a chosen and a rejected completion"
    own: ClassVar[dict[str, str]] = {}  # arguments of its own -> their keys

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        others = next(names for kind, names in _OF_KIND.items() if kind != self.rows)
        for entry in (*config.datasets, *config.test_datasets):
            given = entry.type.model_fields_set if isinstance(entry.type, PreferenceColumns) else ()
            for name in [name for name in others if name in given]:
                yield f"datasets.type.{name} is not read by {self.name}, which trains on {self.data}. Remove it."
        # TRL multiplies with the weight of the head itself, without its adapter.
        new = self.has_reference and config.adapter and config.lora_model_dir is None
        for head in adapted_heads(config.lora_target_modules) if new else ():
            yield (
                f"lora_target_modules: {config.lora_target_modules!r} selects {head}, which is not supported by "
                f"{self.name}: TRL uses its weight without adapter. Leave it out."
            )
        sharded = config.fsdp or config.fsdp_config
        if self.has_reference and config.adapter and config.lora_modules_to_save and sharded:
            yield f"lora_modules_to_save is not supported with fsdp by {self.name}: it is not tested. Remove one."

    def problems(self, config: MethodConfig) -> Iterator[str]:
        yield from super().problems(config)
        if config.adapter and config.lora_model_dir is not None and self.has_reference:
            head = adapted_head(config.lora_model_dir)
            if head is not None:
                yield (
                    f"lora_model_dir: {config.lora_model_dir} adapts {head}, whose weight {self.name} uses without "
                    "adapter. Merge it (ebft merge-lora), and set base_model to the result."
                )

    def problems_here(self, config: MethodConfig, machine: Machine) -> Iterator[str]:
        if self.has_reference and config.precompute_ref_log_probs and machine.processes > 1:
            yield "precompute_ref_log_probs: true is not supported with several processes. Remove it."

    def resolve(self, config: MethodConfig) -> None:
        super().resolve(config)
        if config.adapter and config.lora_dropout:
            warn(f"lora_dropout: no effect with {self.name}, in which TRL disables dropout.")

    def copies_model(self, config: MethodConfig) -> bool:
        return self.has_reference and not config.precompute_ref_log_probs

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        """Rows fit into `sequence_len`, so TRL cuts nothing."""
        arguments = {"beta": config.rl_beta, "max_length": config.sequence_len}
        arguments |= {name: getattr(config, key) for name, key in self.own.items()}
        if self.has_reference:
            arguments["precompute_ref_log_probs"] = config.precompute_ref_log_probs
            arguments["activation_offloading"] = config.activation_offloading
            arguments["router_aux_loss_coef"] = 0.0  # TRL would take the model's
        return arguments

    def build_trainer(self, config: MethodConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.preferences.trainers import without_router_loss

        without_router_loss(model)
        if not self.has_reference:
            return super().build_trainer(config, model, tokenizer, server, **common)
        from ebft.models.causal_lm import frozen_copy

        is_new_adapter = config.adapter is not None and config.lora_model_dir is None
        needs_copy = config.adapter is None and not config.precompute_ref_log_probs
        reference = frozen_copy(model) if needs_copy else None  # before TRL changes the model's forward
        return class_at(self.trainer)(model, is_new_adapter=is_new_adapter, ref_model=reference, **common)


Loss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
_SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")


class DPOKeys(ReferenceKeys):
    """Keys of `rl: dpo`."""

    dpo_loss_type: Loss | Annotated[list[Loss], Field(min_length=1)] | None = None
    """Loss of TRL's DPOTrainer, or a list of losses that are added. If unset, sigmoid."""
    dpo_loss_weights: list[float] | None = None
    """Weight of each loss of dpo_loss_type, if it is a list. If unset, 1 for each."""
    dpo_label_smoothing: float | None = Field(None, ge=0, lt=0.5)
    """Probability that a label is wrong, for dpo_loss_type: robust, exo_pair, aot and aot_unpaired. If unset, 0."""
    dpo_use_weighting: bool = False
    """Weight pairs by the probability that the policy gives them (WPO)."""


class DPO(PreferenceMethod):
    """DPOTrainer with the losses of `dpo_loss_type`."""

    name = "rl: dpo"
    tag = "dpo"
    keys = DPOKeys
    offloads_activations = True
    arguments = "trl:DPOConfig"
    trainer = "ebft.preferences.trainers:DPOTrainer"
    own = {"loss_weights": "dpo_loss_weights", "label_smoothing": "dpo_label_smoothing"}
    own |= {"use_weighting": "dpo_use_weighting"}

    def summary(self, config: MethodConfig) -> str:
        return f"direct preference optimization (loss {', '.join(_losses(config))})"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        losses = _losses(config)
        if config.dpo_label_smoothing and not set(losses) & set(_SMOOTHED):
            yield (
                f"dpo_label_smoothing has no effect with dpo_loss_type: {', '.join(losses)}. Remove it, or use one of "
                f"{', '.join(_SMOOTHED)} (robust is the sigmoid loss with noisy labels)."
            )

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        return super().own_arguments(config) | {"loss_type": _losses(config)}


def _losses(config: MethodConfig) -> list[str]:
    given = config.dpo_loss_type or "sigmoid"
    return [given] if isinstance(given, str) else given


class IPO(DPO):
    """The squared distance of the difference of mean log-ratios to 1 / (2 rl_beta)."""

    name = "rl: ipo"
    tag = "ipo"
    title = "identity preference optimization (IPO)"
    summary = Method.summary

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from PreferenceMethod.conflicts(self, config)
        for key in ("dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing"):
            if getattr(config, key) is not None:
                yield f"{key} is incompatible with rl: ipo, whose loss is fixed. Remove it, or set rl: dpo."

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        return super().own_arguments(config) | {"loss_type": ["ipo"]}


class KTOKeys(ReferenceKeys):
    """Keys of `rl: kto`."""

    kto_desirable_weight: float | None = Field(None, ge=0)
    """Weight of the losses of desirable completions. If unset, 1."""
    kto_undesirable_weight: float | None = Field(None, ge=0)
    """Weight of the losses of undesirable completions. If unset, 1."""


class KTO(PreferenceMethod):
    """KTOTrainer, whose KL term pairs the rows of a batch."""

    name = "rl: kto"
    tag = "kto"
    title = "Kahneman-Tversky optimization (KTO)"
    rows = "labelled"
    keys = KTOKeys
    offloads_activations = True
    metrics = ("loss", "rewards/margins")
    data = "completions with a label"
    arguments = "trl:KTOConfig"
    trainer = "ebft.preferences.trainers:KTOTrainer"
    unsupported = PreferenceMethod.unsupported | {"curriculum_sampling": "batches are drawn at random"}
    own = {"desirable_weight": "kto_desirable_weight", "undesirable_weight": "kto_undesirable_weight"}

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        for key in ("micro_batch_size", "eval_batch_size"):
            if getattr(config, key) == 1:
                yield f"{key}: 1 is not supported by rl: kto, whose KL term compares rows of a batch. Set at least 2."


class ORPOKeys(BetaKeys):
    """Keys of `rl: orpo`."""

    orpo_alpha: float | None = Field(None, gt=0)
    """orpo: weight of the odds-ratio loss; another name of rl_beta with this method."""


class ORPO(PreferenceMethod):
    """The cross-entropy on chosen texts and an odds-ratio loss, with ORPOTrainer of trl.experimental."""

    name = "rl: orpo"
    tag = "orpo"
    title = "odds ratio preference optimization (ORPO)"
    keys = ORPOKeys
    has_reference = False
    arguments = "ebft.preferences.experimental:orpo.ORPOConfig"
    trainer = "ebft.preferences.experimental:ORPOTrainer"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.orpo_alpha is not None and config.rl_beta not in (None, config.orpo_alpha):
            yield "orpo_alpha and rl_beta are two names of the same weight with rl: orpo. Keep one."

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        found = super().own_arguments(config)
        return found if config.orpo_alpha is None else found | {"beta": config.orpo_alpha}


class SimPOKeys(BetaKeys):
    """Keys of `rl: simpo`."""

    simpo_gamma: float | None = Field(None, ge=0)
    """simpo: target margin between chosen and rejected. If unset, TRL's default, 0.5."""
    cpo_alpha: float = Field(0.0, ge=0, description="simpo: weight of the cross-entropy on chosen completions.")


class SimPO(PreferenceMethod):
    """CPOTrainer of trl.experimental with the loss of SimPO."""

    name = "rl: simpo"
    tag = "simpo"
    title = "simple preference optimization (SimPO)"
    keys = SimPOKeys
    has_reference = False
    arguments = "ebft.preferences.experimental:cpo.CPOConfig"
    trainer = "ebft.preferences.experimental:CPOTrainer"
    own = {name: name for name in ("simpo_gamma", "cpo_alpha")}

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        return super().own_arguments(config) | {"loss_type": "simpo"}
