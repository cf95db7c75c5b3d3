"""The run config: one class with the type, default, bounds and description of every key."""

import os
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationError, create_model, field_validator, model_validator

from ebft.config.axolotl import CarriedOverKeys
from ebft.config.checks import keys
from ebft.config.options import EBFTSection
from ebft.config.section import Section
from ebft.config.tool_keys import EvaluationKeys, RayKeys
from ebft.config.trl import TRLSection
from ebft.config.validation_errors import raise_config_error
from ebft.data.keys import DataKeys, StreamKeys, StreamSettings
from ebft.data.transforms import RequiredRows
from ebft.methods import METHODS, Method, own_keys, selected_method
from ebft.models.keys import AdapterKeys, AttentionKeys, ModelKeys, ModelSettings
from ebft.run.keys import CheckpointKeys, HardwareKeys, HubKeys, LengthKeys, OptimizerKeys, ReportingKeys
from ebft.serving.keys import ServerSettings, VLLMSection

# Allowed values of `rl`: those in ebft.methods.
if TYPE_CHECKING:
    RL = str
else:
    RL = Literal[tuple(dict.fromkeys(rl for rl, _ in METHODS if rl))]


class MethodKeys(Section):
    """The training method and its sections."""

    rl: RL | None = Field(
        None,
        description="Training method. ebft: energy-based fine-tuning; grpo: TRL's GRPO with `trl.reward_funcs`; "
        "gdpo: grpo with each reward normalised on its own; dpo, ipo, kto, orpo, simpo: preference methods of TRL; "
        "unset: SFT with the cross-entropy loss.",
    )
    reward_model: bool = Field(
        False,
        description="Train a reward model, which gives a text one score, on pairs of a chosen and a rejected reply.",
    )
    process_reward_model: bool = Field(
        False, description="Train a process reward model, which classifies each step of a reply."
    )
    ebft: EBFTSection = Field(default_factory=EBFTSection, description="Options of energy-based fine-tuning.")
    trl: TRLSection = Field(
        default_factory=lambda: TRLSection.model_validate({}), description="Options of structured mode and of GRPO."
    )
    vllm: VLLMSection = Field(
        default_factory=lambda: VLLMSection.model_validate({}),
        description="Options of the vLLM server that generates completions.",
    )

    @field_validator("reward_model", mode="before")
    @classmethod
    def _is_no_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(
                f"reward_model: invalid value {value!r}; expected true or false. To use a reward model as a reward of "
                "rl: grpo, set trl.reward_funcs to its folder or Hub id."
            )
        return value


if TYPE_CHECKING:
    from ebft.methods.dpo import DPOKeys
    from ebft.methods.kto import KTOKeys
    from ebft.methods.orpo import ORPOKeys, SimPOKeys
    from ebft.methods.reward_models import RewardKeys
    from ebft.nemo_gym.keys import NemoGymKeys

    class OwnKeys(NemoGymKeys, RewardKeys, DPOKeys, KTOKeys, ORPOKeys, SimPOKeys): ...
else:
    # Keys that individual methods declare.
    OwnKeys = create_model("OwnKeys", __base__=own_keys() or Section)

# The groups of keys, in the order of the help and the reference page.
GROUPS: dict[str, type[Section]] = {
    "Method": MethodKeys,
    "Method-specific keys": OwnKeys,
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


class RunConfig(  # groups in reverse order: pydantic lists the fields of the last base class first
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
    OwnKeys,
    MethodKeys,
):
    """The config of a run, created by `load_config` or `RunConfig.from_dict`.

    After validation, `attn_implementation` is the only attention key that is set (None: the model's default).
    """

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Create a config from nested dicts and lists. Raises ConfigError that lists each invalid key's dotted path."""
        try:
            return cls.model_validate(_paths_as_text(values))
        except ValidationError as error:
            raise_config_error(error, cls)

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        keys.refuse_contradictions(self)
        keys.resolve(self)
        return self

    @property
    def method(self) -> Method:
        """The training method of this run, a class in `ebft.methods`."""
        return selected_method(self)

    @property
    def required_rows(self) -> RequiredRows:
        """The rows that the method trains on, with the options that loading them depends on."""
        return RequiredRows(
            kind=self.method.rows,
            method=self.method.name,
            needs_reference=self.method.needs_reference,
            block=self.ebft if self.method.samples_blocks else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    @property
    def uses_server(self) -> bool:
        """Whether completions come from a vLLM server in a separate process."""
        return self.method.rows == "prompts" and self.trl.use_vllm and self.trl.vllm_mode != "colocate"

    @property
    def manages_server(self) -> bool:
        """Whether training starts and stops that server."""
        return self.uses_server and self.trl.vllm_mode == "managed"

    @property
    def server_address(self) -> tuple[str, int]:
        """The host and port that the trainer connects to: those of `trl:`, or else those of `vllm:`."""
        host, port = self.trl.vllm_server_host, self.trl.vllm_server_port
        return (self.vllm.host if host is None else host, self.vllm.port if port is None else port)

    @property
    def server_settings(self) -> ServerSettings:
        """The server to start, on the port of `vllm:` if that is set, or else the one that the trainer connects to."""
        port = self.vllm.port if "port" in self.vllm.model_fields_set else self.server_address[1]
        depth, agents = self.trl.prefetch_depth, self.nemo_gym_enabled and self.nemo_gym_multi_turn
        return ServerSettings(self, self.vllm, port, self.seed, depth, agents)


def _paths_as_text(value: Any) -> Any:
    """`value` with pathlib paths, at any depth, converted to strings, as the schema requires."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {key: _paths_as_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_paths_as_text(item) for item in value]
    return value
