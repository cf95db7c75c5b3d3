"""The keys of a run config that do not depend on the method, in groups."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from ebft.config.axolotl import CarriedOverKeys
from ebft.config.options import EBFTSection
from ebft.config.section import Section
from ebft.config.tool_keys import EvaluationKeys, RayKeys
from ebft.config.trl import TRLSection
from ebft.data.keys import DataKeys, StreamKeys, StreamSettings
from ebft.methods import METHODS
from ebft.models.keys import AdapterKeys, AttentionKeys, ModelKeys, ModelSettings
from ebft.run.keys import CheckpointKeys, HardwareKeys, HubKeys, LengthKeys, OptimizerKeys, ReportingKeys
from ebft.serving.keys import VLLMSection

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
        """The host and port that the trainer connects to: those of `trl:`, or else those of `vllm:`."""
        host, port = self.trl.vllm_server_host, self.trl.vllm_server_port
        return (self.vllm.host if host is None else host, self.vllm.port if port is None else port)
