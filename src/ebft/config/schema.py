"""The whole run config: one class with every key, its type, default, bounds and sentence of help."""

import os
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError, create_model, model_validator

from ebft.config import checks
from ebft.config.carried_over import CarriedOverKeys
from ebft.config.options import EBFTSection
from ebft.config.section import Section
from ebft.config.trl import TRLSection
from ebft.config.validation_errors import raise_config_error
from ebft.data.keys import DataKeys
from ebft.evaluation.keys import EvaluationKeys
from ebft.methods import METHODS, Method, find_method, own_keys
from ebft.models.keys import AdapterKeys, AttentionKeys, ModelKeys
from ebft.run.keys import CheckpointKeys, HardwareKeys, HubKeys, LengthKeys, OptimizerKeys, ReportingKeys
from ebft.serving.keys import VLLMSection

# What `rl` may be: whatever ebft.methods lists.
if TYPE_CHECKING:
    RL = str
else:
    RL = Literal[tuple(dict.fromkeys(rl for rl, _ in METHODS if rl))]


class MethodKeys(Section):
    """What kind of training it is."""

    rl: RL | None = Field(
        None,
        description="ebft: energy-based fine-tuning; grpo: TRL's GRPO on `trl.reward_funcs`; unset: SFT, on the "
        "cross-entropy alone.",
    )
    ebft: EBFTSection = Field(default_factory=EBFTSection, description="Options of energy-based fine-tuning.")
    trl: TRLSection = Field(default_factory=TRLSection, description="Options of structured mode and of GRPO.")
    vllm: VLLMSection = Field(
        default_factory=VLLMSection, description="Options of the server that generates completions."
    )


if TYPE_CHECKING:

    class OwnKeys(Section): ...

else:
    # Keys of single methods, which these declare.
    OwnKeys = create_model("OwnKeys", __base__=own_keys() or Section)

# The groups of keys, in the order in which help and reference page show them.
GROUPS: dict[str, type[Section]] = {
    "Method": MethodKeys,
    "Keys of single methods": OwnKeys,
    "Model": ModelKeys,
    "Attention": AttentionKeys,
    "Adapter": AdapterKeys,
    "Data": DataKeys,
    "Optimizer": OptimizerKeys,
    "Batches and length": LengthKeys,
    "Precision, memory, processes": HardwareKeys,
    "Checkpoints": CheckpointKeys,
    "Evaluation": EvaluationKeys,
    "Logs and trackers": ReportingKeys,
    "Hub": HubKeys,
    "Carried over without effect": CarriedOverKeys,
}


class RunConfig(  # of the groups, the last first: pydantic lists the fields of the last base first
    CarriedOverKeys,
    HubKeys,
    ReportingKeys,
    EvaluationKeys,
    CheckpointKeys,
    HardwareKeys,
    LengthKeys,
    OptimizerKeys,
    DataKeys,
    AdapterKeys,
    AttentionKeys,
    ModelKeys,
    OwnKeys,
    MethodKeys,
):
    """Everything one run needs to know; made by `load_config` or `RunConfig.from_dict`.

    `attn_implementation` alone then says which attention was asked for (None: the model's choice).
    """

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """A config from nested dicts and lists; ConfigError names each wrong key with its dotted path."""
        try:
            return cls.model_validate(_paths_as_text(values))
        except ValidationError as error:
            raise_config_error(error, cls)

    @model_validator(mode="after")
    def _resolve(self) -> "RunConfig":
        checks.refuse_contradictions(self)
        checks.resolve(self)
        return self

    @property
    def method(self) -> Method:
        """How this run trains: `ebft.methods` has one class for each."""
        return find_method(self.rl, self.ebft.mode)

    @property
    def uses_server(self) -> bool:
        """Whether completions come from a vLLM server in a process of its own."""
        return self.method.rows == "prompts" and self.trl.use_vllm and self.trl.vllm_mode != "colocate"


def _paths_as_text(value: Any) -> Any:
    """`value` with pathlib paths, at any depth, as the strings the schema takes."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {key: _paths_as_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_paths_as_text(item) for item in value]
    return value
