"""Keys of the config about what a run writes: checkpoints, logs, the hub, trackers."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ebft.config.evaluation import Steps
from ebft.config.section import Section


class CheckpointKeys(Section):
    """Where the run is saved, when, and from where it goes on."""

    output_dir: str = Field("./model-out", description="Folder for checkpoints and the final model.")
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = Field(
        None, description="When to save; unset is steps where save_steps is set, else epoch."
    )
    save_steps: Steps | None = Field(None, description="Steps between two checkpoints, or a share of the run.")
    saves_per_epoch: Annotated[int, Field(ge=1)] | None = Field(None, description="Checkpoints per epoch.")
    save_total_limit: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Checkpoints to keep; unset keeps all."
    )
    save_only_model: bool = Field(False, description="Save no optimizer state, which is smaller but cannot be resumed.")
    resume_from_checkpoint: str | None = Field(None, description="Folder of the checkpoint to go on from.")
    auto_resume_from_checkpoints: bool = Field(
        False, description="Go on from the newest checkpoint in output_dir, if there is one."
    )

    @field_validator("resume_from_checkpoint", mode="before")
    @classmethod
    def _a_folder(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(
                f"resume_from_checkpoint: {str(value).lower()} names no checkpoint. Give its folder, or set "
                "auto_resume_from_checkpoints: true for the newest one."
            )
        return value


class HubKeys(Section):
    """Publishing the model."""

    hub_model_id: str | None = Field(None, description="Hub repository to push the model to; unset pushes nothing.")
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = Field(
        "every_save", description="Which states are pushed."
    )
    hub_private_repo: bool | None = Field(None, description="Create that repository as private.")


class ReportingKeys(Section):
    """Logs and trackers."""

    logging_steps: Steps = Field(1, description="Steps between two log lines, or a share of the run.")
    report_to: str | list[str] | None = Field(
        None, description="Trackers by their transformers names; the use_ keys below add to it."
    )
    use_tensorboard: bool | None = Field(None, description="Write TensorBoard logs.")
    use_wandb: bool | None = Field(None, description="Log to Weights & Biases; unset is on where wandb_project is set.")
    use_trackio: bool | None = Field(None, description="Log to Trackio.")
    trackio_project_name: str | None = Field(None, description="Trackio project.")
    wandb_project: str | None = Field(None, description="Weights & Biases project; setting it turns wandb on.")
    wandb_entity: str | None = Field(None, description="Weights & Biases team or user.")
    wandb_name: str | None = Field(None, description="Name of the run.")
    wandb_run_id: str | None = Field(
        None,
        description="Id of the run, for going on with its curves; also its name where wandb_name is unset.",
    )
    wandb_watch: Literal["gradients", "all", "false", False] | None = Field(
        None, description="What wandb records of the model: gradients, all, or false."
    )
    wandb_log_model: Literal["checkpoint", "end", "false", False] | None = Field(
        None, description="What wandb stores: checkpoint, end, or false."
    )
    wandb_mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="Whether wandb talks to its server."
    )
