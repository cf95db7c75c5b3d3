"""Keys of the config about a run: optimizer, length, precision, memory, processes, checkpoints, logs, the hub."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ebft.config.section import Section
from ebft.evaluation.keys import Steps

MAX_SEED = 2**32 - 1  # the largest that NumPy takes


class OptimizerKeys(Section):
    """How the weights move."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    optimizer: str = Field("adamw_torch_fused", description="Optimizer, by the names of transformers' `optim`.")
    lr_scheduler: str = Field("cosine", description="Schedule, by the names of transformers' `lr_scheduler_type`.")
    lr_scheduler_kwargs: dict[str, Any] | None = Field(
        None, description="Further arguments of the schedule, such as min_lr_rate of cosine_with_min_lr."
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Steps over which the learning rate rises; unset is warmup_ratio."
    )
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Share of the run over which the learning rate rises; unset is none."
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradient norm at which gradients are clipped; 0 is never.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="First decay rate of Adam.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Second decay rate of Adam.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Term that keeps Adam from dividing by zero.")


class BudgetSection(Section):
    """The section `budget:`; the learning-rate schedule does not follow it."""

    documents: int | None = Field(
        None,
        ge=1,
        description="Documents to train on, repetitions included (prompts, where completions are sampled whole).",
    )
    generated_tokens: int | None = Field(None, ge=1, description="Tokens to sample.")
    flops: float | None = Field(
        None, gt=0, description="FLOPs of matrix products to compute, over all processes: 1e18, for example."
    )


class LengthKeys(Section):
    """Batches, epochs, seeds."""

    micro_batch_size: int = Field(
        1, ge=1, description="Rows per device and forward pass; completions, where they are sampled whole."
    )
    gradient_accumulation_steps: int = Field(1, ge=1, description="Forward passes per optimizer step.")
    eval_batch_size: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Rows per device in evaluation; unset is micro_batch_size."
    )
    num_epochs: float = Field(1.0, gt=0, description="Passes over the training data.")
    max_steps: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Optimizer steps; when set, num_epochs does not count; -1 is unset."
    )

    budget: BudgetSection = Field(
        default_factory=BudgetSection,
        description="Ends training with the optimizer step that reaches one of these limits. The learning rate still "
        "follows max_steps or num_epochs, which are the end where no limit is reached before.",
    )

    @field_validator("max_steps", mode="before")
    @classmethod
    def _minus_one_is_unset(cls, value: Any) -> Any:
        return None if value == -1 else value

    seed: int = Field(42, ge=0, le=MAX_SEED, description="Seed of weights, sampling and data order.")
    data_seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(
        None, description="Seed of the data order; unset is seed."
    )
    group_by_length: bool = Field(False, description="Put rows of similar length into one batch.")
    dataloader_num_workers: int = Field(0, ge=0, description="Processes that load batches.")
    dataloader_pin_memory: bool = Field(True, description="Pin batches in memory for faster copies to a GPU.")


class CheckpointingKwargs(Section):
    """The section `gradient_checkpointing_kwargs:`."""

    use_reentrant: bool | None = Field(
        None, description="Which of PyTorch's two checkpointing versions; unset is PyTorch's choice."
    )


class HardwareKeys(Section):
    """Precision, memory, processes."""

    bf16: bool | Literal["auto"] = Field(
        "auto",
        description="bfloat16, weights included (without an adapter, torch_dtype: float32 keeps small updates); auto "
        "is on where the GPU supports it.",
    )
    fp16: bool = Field(False, description="Mixed precision in float16.")
    tf32: bool | None = Field(None, description="TF32 matrix products on Ampere and later; unset is PyTorch's choice.")
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    gradient_checkpointing_kwargs: CheckpointingKwargs | None = Field(
        None, description="Arguments of gradient checkpointing."
    )
    torch_compile: bool = Field(False, description="Compile the model (SFT only).")
    ddp: bool | None = Field(
        None,
        description="true insists on several processes, false on one; unset takes what was launched.",
    )
    ddp_find_unused_parameters: bool = Field(
        False, description="Let DDP look for weights without a gradient, as some mixtures of experts need."
    )
    deepspeed: str | dict[str, Any] | None = Field(None, description="DeepSpeed configuration: a file or a mapping.")
    fsdp: bool | str | list[str] | None = Field(None, description="FSDP options, as transformers reads them.")
    fsdp_config: dict[str, Any] | None = Field(None, description="FSDP details, as transformers reads them.")


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
