"""The keys of a run config that do not depend on the method, in groups; checks of FSDP2 and DeepSpeed.

The keys of evaluation, of training through Ray and of the method are declared here, others in `config/keys/`,
in a file for each folder that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ebft.config.axolotl import CarriedOverKeys
from ebft.config.keys.data import DataKeys, StreamKeys, StreamSettings
from ebft.config.keys.models import AdapterKeys, AttentionKeys, FSDPKeys, ModelKeys, ModelSettings
from ebft.config.keys.run import CheckpointKeys, HardwareKeys, HubKeys, LengthKeys, OptimizerKeys, ReportingKeys
from ebft.config.keys.serving import VLLMSection
from ebft.config.options import MAX_TEMPERATURE, MAX_TOKENS, MIN_TEMPERATURE, EBFTSection
from ebft.config.section import NotBlank, Section, Steps
from ebft.config.trl import TRLSection
from ebft.errors import ConfigError, MissingPackageError, doing
from ebft.methods import METHODS

SHARDED = "SHARDED_STATE_DICT"
_WORDS = ("full_shard", "shard_grad_op", "auto_wrap", "offload")


def fsdp_problems(config: BaseConfig) -> Iterator[str]:
    """What contradicts `fsdp` and `fsdp_config`."""
    if not (config.fsdp or config.fsdp_config):
        return
    details = config.fsdp_config or FSDPKeys()
    unknown = [word for word in _words(config) if word not in _WORDS]
    if unknown:
        yield f"fsdp: {unknown[0]!r} is not supported. Set fsdp: true, or choose from {', '.join(_WORDS)}."
    if details.state_dict_type == SHARDED and config.save_only_model:
        yield f"save_only_model: true is incompatible with fsdp_config.state_dict_type: {SHARDED}. Remove one."
    if config.save_only_model and config.load_best_model_at_end:
        yield "save_only_model and load_best_model_at_end cannot both be set with fsdp. Remove one."


def fsdp_arguments(config: BaseConfig) -> dict[str, Any]:
    """The arguments of transformers for a sharded run: one switch, and options without the prefix `fsdp_`."""
    if not config.fsdp:
        return {}
    others = {"version", "final_state_dict_type", "activation_checkpointing"}
    details = (config.fsdp_config or FSDPKeys()).model_dump(exclude=others, exclude_unset=True, exclude_none=True)
    words = _words(config)
    if "offload" in words:
        details.setdefault("cpu_offload", True)
    if "shard_grad_op" in words:
        details.setdefault("reshard_after_forward", False)
    return {"fsdp": True, "fsdp_config": details or None}


def _words(config: BaseConfig) -> list[str]:
    given = config.fsdp
    return given.split() if isinstance(given, str) else given if isinstance(given, list) else []


FETCH = "deepspeed_configs"  # the name of the configs in `ebft fetch`


def shipped_configs() -> dict[str, Path]:
    """The configs that are part of the package, by name."""
    return {path.stem: path for path in sorted(Path(str(files("ebft") / FETCH)).glob("*.json"))}


def deepspeed_settings(deepspeed: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """The DeepSpeed config that `deepspeed` names or is."""
    if deepspeed is None or isinstance(deepspeed, dict):
        return deepspeed
    with doing(f"reading deepspeed: {deepspeed}, a JSON file or one of {', '.join(shipped_configs())}"):
        return json.loads(shipped_configs().get(deepspeed, Path(deepspeed)).read_text(encoding="utf-8"))


def zero_stage(config: BaseConfig) -> Any:
    """The stage of ZeRO that a run uses; 0 without DeepSpeed."""
    zero = (deepspeed_settings(config.deepspeed) or {}).get("zero_optimization", {})
    return zero.get("stage", 0) if isinstance(zero, dict) else None


def check_deepspeed(config: BaseConfig) -> None:
    """Raise ConfigError for a DeepSpeed config that cannot be used by the run."""
    if config.deepspeed is None:
        return
    if zero_stage(config) == 3 and config.uses_server and config.adapter is not None:
        raise ConfigError("deepspeed: ZeRO-3 sends no adapter to a vLLM server. Use fsdp or zero2, or no trl.use_vllm.")
    if find_spec("deepspeed") is None:
        raise MissingPackageError("deepspeed requires the package deepspeed: pip install 'ebft[deepspeed]'.")


# Allowed values of `rl`: those in ebft.methods.
if TYPE_CHECKING:
    RL = str
else:
    RL = Literal[tuple(dict.fromkeys(rl for rl, _ in METHODS if rl))]


# Trainers of TRL and axolotl that are no values of `rl`.
_ELSEWHERE = {
    **dict.fromkeys(("reward", "reward_trainer"), "reward_model: true"),
    **dict.fromkeys(("prm", "prm_trainer"), "process_reward_model: true"),
    "gspo": "rl: grpo with trl.importance_sampling_level: sequence",
    "rloo": "rl: grpo with trl.scale_rewards: none, or rl: ebft with ebft.advantage_estimator: rloo",
}


class MethodKeys(Section):
    """The training method and its sections."""

    rl: RL | None = None
    """Training method. ebft: energy-based fine-tuning; grpo: TRL's GRPO with `trl.reward_funcs`; gdpo: grpo with each
    reward normalised on its own; sdft: TRL's on-policy self-distillation; dpo, ipo, kto, orpo, simpo: preference
    methods of TRL; unset: SFT with the cross-entropy loss."""
    reward_model: bool = False
    """Train a reward model, which gives a text one score, on pairs of a chosen and a rejected reply."""
    process_reward_model: bool = False
    """Train a process reward model, which classifies each step of a reply."""
    ebft: EBFTSection = Field(default_factory=EBFTSection, description="Options of energy-based fine-tuning.")
    trl: TRLSection = Field(default_factory=lambda: TRLSection.model_validate({}))
    """Options of structured mode and of GRPO."""
    vllm: VLLMSection = Field(default_factory=lambda: VLLMSection.model_validate({}))
    """Options of the vLLM server that generates completions."""

    @field_validator("rl", mode="before")
    @classmethod
    def _is_no_trainer(cls, value: Any) -> Any:
        if there := _ELSEWHERE.get(str(value)):
            raise ValueError(f"rl: {value} is {there} here. Set that in place of it.")
        return value


Strategy = Literal["no", "steps", "epoch"]
Count = Annotated[int, Field(ge=1)]


class EvaluationSection(Section):
    """The section `evaluation:`, which is used by `ebft evaluate`."""

    metrics: list[str] = Field(default_factory=list)
    """User-defined metrics, module.function(prompt, completions, row) -> float (None: does not apply), evaluated on
    sampled and on greedy completions; called with one completion at a time."""
    samples: Annotated[int, Field(ge=2, le=MAX_TOKENS)] | None = None
    """Number of samples per group; if unset, ebft.n_samples_per_prompt or trl.num_generations, at least 2."""
    pass_at: list[Count] | None = Field(None, min_length=1)
    """Values of k for pass@k, each at most the number of samples; if unset, 1 and the number of samples."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] | None = None
    """Sampling temperature; if unset, 1 for rows of tokens and trl.temperature for prompts."""
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Maximum number of tokens of a full completion; if unset, trl.max_completion_length, and with rl: ebft also the
    limit by the longest reference (ebft.adaptive_max_tokens)."""
    documents: Count | None = Field(None, description="Evaluate on the first N documents; if unset, on all.")
    bootstrap: int = Field(1000, ge=0, le=MAX_TOKENS)
    """Number of bootstrap resamples for the confidence intervals; 0 disables intervals."""
    confidence: float = Field(0.95, gt=0, lt=1, description="Confidence level of the intervals.")
    per_document: bool = False
    """Include per-document values in the JSON: the sum of each metric, and the number of tokens, blocks or prompts it
    is over."""

    def counts(self, samples: int) -> tuple[int, list[int]]:
        """The number of samples of a group, `samples` in a run, and the values of k for pass@k. Raises ConfigError if a
        k exceeds the number of samples."""
        samples = self.samples or max(2, samples)
        pass_at = sorted(set(self.pass_at or [1, samples]))
        if pass_at[-1] > samples:
            raise ConfigError(
                f"evaluation.pass_at: {pass_at[-1]} is more than the samples, {samples} (evaluation.samples)."
            )
        return samples, pass_at


# dtypes of weights -> dtypes of the inputs that they can be multiplied with, None for the model's dtype.
_ACTIVATIONS = {
    "int8": (None, "int8"),
    "int4": (None, "int8", "float8_e4m3fn"),
    "float8_e4m3fn": (None, "float8_e4m3fn"),
    "ternary": (None, "int8"),
}
_GROUPED = (("int8", None), ("int4", None), ("int4", "int8"))  # dtypes of weights and inputs that have a group size


class QuantizationSection(Section):
    """The section `quantization:`, which is used by `ebft quantize`."""

    weight_dtype: Literal["int8", "int4", "float8_e4m3fn", "ternary"] = "int8"
    """dtype of the weights of linear layers; int4 without activation_dtype requires a GPU. ternary (see qat) rounds
    to values of the dtype of the model, and inputs are not quantised."""
    activation_dtype: Literal["int8", "float8_e4m3fn"] | None = None
    """dtype that the inputs of linear layers are quantised to while the model runs; float8_e4m3fn requires a GPU. If
    unset, inputs are not quantised."""
    group_size: Annotated[int, Field(ge=2)] | None = None
    """Number of weights with the same scale, for int4, and for int8 without activation_dtype. If unset, 32 for int4,
    and one row for int8."""
    quantize_embedding: bool = False
    """Also quantise the embeddings, to int8 or int4; inputs of the model are tokens."""

    @model_validator(mode="after")
    def _has_kernels(self) -> QuantizationSection:
        weights, inputs, problem = self.weight_dtype, self.activation_dtype, None
        known = " or ".join(name for name in _ACTIVATIONS[weights] if name)
        if inputs not in _ACTIVATIONS[weights]:
            problem = f"activation_dtype: {inputs} is not supported with {{}}. Set it to {known}, or remove it."
        elif self.group_size is not None and (weights, inputs) not in _GROUPED:
            also = f" and activation_dtype: {inputs}" if inputs else ""
            problem = f"group_size has no effect with {{}}{also}, whose scales are fixed. Remove it."
        elif self.quantize_embedding and weights not in ("int8", "int4"):
            problem = "quantize_embedding is not supported with {}. Remove it, or set weight_dtype: int8."
        if problem:
            raise ValueError(f"quantization.{problem.format(f'weight_dtype: {weights}')}")
        return self


class EvaluationKeys(Section):
    """When the model is evaluated on held-out data, and which metrics are used."""

    eval_strategy: Strategy | None = None
    """When to evaluate; if unset, steps if eval_steps is set, otherwise epoch."""
    eval_steps: Steps | None = None
    """Number of steps between evaluations, or a fraction of all training steps if less than 1."""
    eval_on_start: bool = False
    """Also evaluate before the first step, so that later evaluations compare with the base model."""
    evals_per_epoch: Annotated[int, Field(ge=0)] | None = None
    """Number of evaluations per epoch, or per run if it is shorter; 0 is the same as eval_strategy: no."""
    early_stopping_patience: Count | None = None
    """Stop training after this number of evaluations without a better metric_for_best_model."""
    load_best_model_at_end: bool | None = None
    """Load the best checkpoint at the end of training. If unset, true with early_stopping_patience, if checkpoints are
    saved at evaluations: save_steps is a multiple of eval_steps, or both happen every epoch."""
    metric_for_best_model: str | None = None
    """Held-out metric used to select the best checkpoint; if unset, cfm_loss with rl: ebft, reward with rl: grpo,
    otherwise loss."""
    greater_is_better: bool | None = None
    """Whether higher values of that metric are better; if unset, determined from the metric."""
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection, description="Options of `ebft evaluate`.")
    quantization: QuantizationSection = Field(default_factory=QuantizationSection)
    """Options of `ebft quantize`."""


_KINDS = ("CPU", "GPU")


class RayKeys(Section):
    """Launching through Ray Train."""

    use_ray: bool = False
    """Train in workers of Ray Train: of the cluster at RAY_ADDRESS, or else of a local Ray that `ebft train` starts.
    output_dir and the data must be on a file system that all workers share."""
    ray_num_workers: int = Field(1, ge=1, le=100_000)
    """Number of Ray workers, each of which is one training process."""
    ray_run_name: Annotated[NotBlank, Field(pattern=r"^[\w.-]+$")] | None = None
    """Name of the run in Ray, also of its folder in output_dir/ray. If unset, Ray generates one."""
    ray_max_failures: int = Field(0, ge=0)
    """Number of times that the workers are restarted, from the newest complete checkpoint, after one of them failed or
    was killed."""
    resources_per_worker: dict[NotBlank, Annotated[float, Field(ge=0)]] | None = None
    """Resources that Ray reserves for each worker, such as {GPU: 1, CPU: 4}; a worker trains on one GPU or none. If
    unset, one GPU if Ray has GPUs, otherwise one CPU."""

    @field_validator("resources_per_worker")
    @classmethod
    def _as_ray_names_them(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name in value or {}:
            if name not in _KINDS and name.upper() in _KINDS:
                raise ValueError(f"resources_per_worker: {name} is written {name.upper()} in Ray.")
        if (value or {}).get("GPU", 0) not in (0, 1):
            raise ValueError("resources_per_worker: GPU must be 1 or 0: a worker is one process. See ray_num_workers.")
        return value


# The groups of keys, in the order of the help and the reference page.
GROUPS: dict[str, type[Section]] = {
    "Method": MethodKeys,
    "Model": ModelKeys,
    "Attention": AttentionKeys,
    "Adapter": AdapterKeys,
    "Data": DataKeys,
    "Streams": StreamKeys,
    "Optimizer": OptimizerKeys,
    "Batches and length": LengthKeys,
    "Precision, memory, processes": HardwareKeys,
    "Ray": RayKeys,
    "Checkpoints": CheckpointKeys,
    "Evaluation": EvaluationKeys,
    "Logs and trackers": ReportingKeys,
    "Hub": HubKeys,
    "Accepted without effect": CarriedOverKeys,
}


class BaseConfig(  # groups in reverse order: pydantic lists the fields of the last base class first
    CarriedOverKeys,
    HubKeys,
    ReportingKeys,
    EvaluationKeys,
    CheckpointKeys,
    RayKeys,
    HardwareKeys,
    LengthKeys,
    OptimizerKeys,
    StreamSettings,
    ModelSettings,
    MethodKeys,
):
    """All keys apart from those that single methods declare."""

    @property
    def server_address(self) -> tuple[str, int]:
        """The host and port that the trainer connects to, from `trl:`, or else from `vllm:`."""
        host, port = self.trl.vllm_server_host, self.trl.vllm_server_port
        return (self.vllm.host if host is None else host, self.vllm.port if port is None else port)
