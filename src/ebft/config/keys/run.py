"""Config keys of a run: optimizer, batches, precision, memory, processes, checkpoints, logs, the Hub."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ebft.config.keys.data import SeedKeys
from ebft.config.keys.models import FSDPKeys, PrecisionKeys
from ebft.config.options import RolloutLogOption
from ebft.config.section import NotBlank, Section, Steps, paths, section_of_options
from ebft.errors import warn

MAX_ROWS = 1_000_000  # per batch
MAX_RATE = 1e6  # of learning rates; some optimizers take large ones
MAX_STEPS, MAX_EPOCHS = 10**9, 1_000_000
MAX_WORKERS = 4096
Degree = Annotated[int, Field(ge=1, le=MAX_WORKERS)]
# Keys of learning rates of single parameters.
RATE_KEYS = ("lr_groups", "embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio", "loraplus_lr_embedding")


class LearningRateGroup(Section):
    """One element of `lr_groups:`."""

    name: NotBlank = Field(description="Name of the group, for the reader of the config.")
    modules: Annotated[list[NotBlank], Field(min_length=1)]
    """Parts of names; the group has the trained parameters whose names contain one of them."""
    lr: Annotated[float, Field(gt=0, le=MAX_RATE)] = Field(description="Peak learning rate of the group.")


class OptimizerKeys(Section):
    """Optimizer and learning-rate schedule."""

    learning_rate: float = Field(1e-5, gt=0, le=MAX_RATE, description="Peak learning rate.")
    optimizer: str = Field("adamw_torch_fused", description="Name as in transformers' `optim`, or muon.")
    optim_args: dict[NotBlank, bool | int | float | NotBlank] | None = None
    """Additional arguments of the optimizer, such as r for schedule_free_adamw."""
    lr_scheduler: str = "cosine"
    """Name of the learning-rate schedule, as in transformers' `lr_scheduler_type`."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Additional arguments of the schedule, such as min_lr_rate for cosine_with_min_lr."""
    cosine_min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Last learning rate of lr_scheduler: cosine, as a fraction of learning_rate (cosine_with_min_lr in
    transformers)."""
    warmup_steps: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Number of warmup steps of the learning rate, or a fraction of the training steps. If unset, warmup_ratio is
    used."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction of the training steps used for warmup. If unset, no warmup."""
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    max_grad_norm: float = Field(1.0, ge=0)
    """Maximum gradient norm, for gradient clipping; 0 disables clipping."""
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Beta1 of Adam: decay rate of the first moment estimates.")
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Beta2 of Adam: decay rate of the second moment estimates."""
    adam_epsilon: float = Field(1e-8, gt=0, description="Epsilon of Adam, for numerical stability.")
    lr_groups: Annotated[list[LearningRateGroup], Field(min_length=1)] | None = None
    """Parameters with learning rates of their own; the first element that applies is used."""
    embedding_lr: Annotated[float, Field(gt=0, le=MAX_RATE)] | None = None
    """Peak learning rate of the input embedding and the output layer, if they are trained."""
    embedding_lr_scale: Annotated[float, Field(gt=0)] | None = None
    """The same, as a multiple of learning_rate."""
    loraplus_lr_ratio: Annotated[float, Field(gt=0)] | None = None
    """LoRA+: learning rate of the adapter's matrices B, and of vectors such as the magnitudes of DoRA, as a multiple of
    learning_rate."""
    loraplus_lr_embedding: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of adapters of embeddings with loraplus_lr_ratio. If unset, 1e-6."""
    neftune_noise_alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale of the noise that NEFTune adds to token embeddings in training (SFT only)."""

    @field_validator("optim_args", mode="before")
    @classmethod
    def _optim_args_as_text(cls, value: Any) -> Any:
        """Accept transformers' form, `name=value,name=value`."""
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.replace(" ", "").split(",")]
        is_whole = all(name and equals and text for name, equals, text in pairs)
        return {name: text for name, _, text in pairs} if is_whole else value


class BudgetSection(Section):
    """The section `budget:`. It does not affect the learning-rate schedule."""

    documents: int | None = Field(None, ge=1)
    """Maximum number of documents to train on, including repetitions (prompts, if full completions are sampled)."""
    generated_tokens: int | None = Field(None, ge=1, description="Maximum number of tokens to sample.")
    flops: float | None = Field(None, gt=0)
    """Maximum number of FLOPs in matrix products over all processes, for example 1e18."""


class LengthKeys(SeedKeys):
    """Batches, epochs, seeds."""

    micro_batch_size: int = Field(1, ge=1, le=MAX_ROWS)
    """Rows per device and forward pass (completions, if full completions are sampled)."""
    gradient_accumulation_steps: int = Field(1, ge=1, le=MAX_ROWS)
    """Number of micro-batches to accumulate gradients for, per optimizer step."""
    batch_size: Annotated[int, Field(ge=1, le=MAX_ROWS)] | None = None
    """micro_batch_size times gradient_accumulation_steps: rows per device and optimizer step. It determines the one of
    these two keys that is not set."""
    eval_batch_size: Annotated[int, Field(ge=1, le=MAX_ROWS)] | None = None
    """Rows per device in evaluation. If unset, micro_batch_size."""
    num_epochs: float = Field(1.0, gt=0, le=MAX_EPOCHS, description="Number of passes over the training data.")
    max_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = Field(
        None,
        json_schema_extra={
            "anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_STEPS}, {"const": -1}, {"type": "null"}]
        },
    )
    """Number of optimizer steps; overrides num_epochs. -1 is the same as unset."""

    budget: BudgetSection = Field(default_factory=BudgetSection)
    """Training ends after the optimizer step that reaches one of these limits. The learning-rate schedule still follows
    max_steps or num_epochs, which end training if no limit is reached first."""

    @field_validator("max_steps", mode="before")
    @classmethod
    def _minus_one_is_unset(cls, value: Any) -> Any:
        return None if value == -1 else value

    @model_validator(mode="after")
    def _batch_size_is_a_product(self) -> "LengthKeys":
        """Replace `batch_size` by the factor that is not given."""
        if (size := self.batch_size) is None:
            return self
        both = ("micro_batch_size", "gradient_accumulation_steps")
        given = [key for key in both if key in self.model_fields_set]
        if len(given) == 1:
            (missing,) = {*both} - {*given}
            setattr(self, missing, max(1, size // getattr(self, given[0])))
        if not given or self.micro_batch_size * self.gradient_accumulation_steps != size:
            product = " times ".join(f"{key}: {getattr(self, key)}" for key in given)
            raise ValueError(
                f"batch_size: {size} is not {product or ' times '.join(both)}. Remove batch_size, or set one of these "
                "keys to a divisor: the other is derived."
            )
        self.batch_size = None
        return self

    group_by_length: bool = Field(False, description="Group rows of similar length into batches.")
    dataloader_num_workers: int = Field(0, ge=0, le=MAX_WORKERS, description="Number of processes that load batches.")
    dataloader_prefetch_factor: Annotated[int, Field(ge=1, le=MAX_ROWS)] | None = None
    """Number of batches that each of these processes loads in advance. If unset, 2."""
    dataloader_pin_memory: bool = Field(True, description="Pin the memory of batches for faster copies to a GPU.")


class CheckpointingKwargs(Section):
    """The section `gradient_checkpointing_kwargs:`."""

    use_reentrant: bool | None = None
    """Use PyTorch's reentrant variant of checkpointing. If unset, PyTorch's default."""


class HardwareKeys(PrecisionKeys):
    """Precision, memory, processes."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    gradient_checkpointing_kwargs: CheckpointingKwargs | None = None
    """Arguments of gradient checkpointing."""
    activation_offloading: bool = False
    """Keep activations in main memory between the forward and the backward pass, with TRL's hooks (GPU; SFT, dpo, ipo,
    kto and reward_model). Results are the same."""
    torch_compile: bool | Literal["auto"] = False
    """Compile the model with torch.compile (SFT only). auto is the same as false."""
    torch_compile_backend: NotBlank | None = Field(None, description="Backend of torch.compile. If unset, inductor.")
    torch_compile_mode: Literal["default", "reduce-overhead", "max-autotune"] | None = None
    """Mode of torch.compile. If unset, PyTorch's default."""

    ddp: bool | None = None
    """false requires a single process."""
    ddp_find_unused_parameters: bool = False
    """Let DDP search for parameters without gradients, as some mixture-of-experts models require."""
    ddp_timeout: int = Field(1800, gt=0, description="Seconds for which processes wait for one with slow rewards.")
    deepspeed: str | dict[str, Any] | None = None
    """DeepSpeed configuration: zero1, zero2, zero3 or another file of `ebft fetch deepspeed_configs`, the path to a
    JSON file, or a mapping."""
    fsdp: bool | str | list[str] | None = None
    """Shard the model with FSDP2: true, or the older words full_shard, shard_grad_op, auto_wrap and offload."""
    fsdp_config: FSDPKeys | None = Field(None, description="Options of FSDP2.")
    dp_shard_size: Degree | None = None
    """Number of processes over which fsdp shards the model: all of them, which this key checks."""
    dp_replicate_size: Degree | None = Field(None, description="1: the sharded model is not replicated.")
    context_parallel_size: Degree | None = Field(None, description="1: sequences are not split over processes.")
    tensor_parallel_size: Degree | None = Field(None, description="1: layers are not split over processes.")
    expert_parallel_size: Degree | None = Field(None, description="1: experts are not split over processes.")

    @field_validator("torch_compile")
    @classmethod
    def _auto_is_off(cls, value: bool | str) -> bool:
        return False if value == "auto" else bool(value)

    _deepspeed_path = paths("deepspeed")


class CheckpointKeys(Section):
    """Saving and resuming."""

    output_dir: NotBlank = Field("./model-out", description="Folder for checkpoints and the final model.")
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    """When to save checkpoints. If unset, steps if save_steps is set, otherwise epoch."""
    save_steps: Steps | None = None
    """Number of steps between checkpoints, or a fraction of the training steps."""
    saves_per_epoch: Annotated[int, Field(ge=0)] | None = None
    """Number of checkpoints per epoch, or per run if it is shorter; 0 is the same as save_strategy: no."""
    save_total_limit: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of checkpoints to keep. If unset, all are kept."""
    save_only_model: bool = False
    """Save checkpoints without optimizer state: they are smaller, but an unfinished run cannot be resumed."""
    resume_from_checkpoint: NotBlank | None = None
    """Folder of the checkpoint to resume from. The method, the adapter and the optimizer must be the same as in its
    run."""
    auto_resume_from_checkpoints: bool = False
    """Resume from the complete checkpoint with the highest step in output_dir, if there is one. Damaged ones are
    skipped with a warning."""

    _run_paths = paths("output_dir", "resume_from_checkpoint")

    @field_validator("resume_from_checkpoint", mode="before")
    @classmethod
    def _a_folder(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(
                f"resume_from_checkpoint: invalid value {str(value).lower()}; expected the folder of a checkpoint. To "
                "resume from the one with the highest step, set auto_resume_from_checkpoints: true."
            )
        return value


class HubKeys(Section):
    """Publishing the model."""

    hub_model_id: str | None = None
    """Hub repository to push the model, its tokenizer and the model card to; no other file of the run is pushed. If
    unset, nothing is pushed."""
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = "every_save"
    """When the model is pushed: only at the end, or also at every save. checkpoint also pushes the newest checkpoint to
    the folder last-checkpoint, and all_checkpoints every one. Checkpoints contain optimizer state, and the state of
    some methods contains completions of the training data."""
    hub_private_repo: bool = True
    """Create the Hub repository as private. An existing one keeps its visibility."""

    _hub_name = paths("hub_model_id")


Step = Annotated[int, Field(ge=1)]


class DashboardSection(Section):
    """The section `tui:`, which may also be true or false."""

    enabled: bool = False
    """Show the dashboard of `ebft train --tui`, if training is started in a terminal. The environment variable
    EBFT_TUI=1 does the same for all configs, and EBFT_TUI=0 the opposite."""

    @model_validator(mode="before")
    @classmethod
    def _without_settings(cls, data: Any) -> Any:
        """Accept the settings of axolotl's dashboard, which this one does not have."""
        if isinstance(data, bool):
            return {"enabled": data}
        others = [f"tui.{key}" for key in data if key != "enabled"] if isinstance(data, dict) else []
        if others:
            warn(f"{', '.join(others)}: no effect: the dashboard has no settings.")
            return {key: value for key, value in data.items() if key == "enabled"}
        return data


if TYPE_CHECKING:

    class _RolloutLog(RolloutLogOption, Section): ...

else:
    _RolloutLog = section_of_options(RolloutLogOption)


class ReportingKeys(_RolloutLog):
    """Logs and trackers."""

    logging_steps: Steps = 1
    """Number of steps between log entries, or a fraction of the training steps."""
    report_to: str | list[str] | None = None
    """Names of the trackers in transformers; the use_ keys below add trackers to it."""
    health: bool = True
    """Check the logged metrics for signs of a failing run, such as mode collapse, no signal or divergence. Each is
    reported once, as a warning and in health.jsonl in output_dir, with what to try."""
    loss_watchdog_threshold: Annotated[float, Field(gt=0)] | None = None
    """Stop training after loss_watchdog_patience logged losses above this value in succession."""
    loss_watchdog_patience: Annotated[int, Field(ge=1)] | None = None
    """Number of logged losses for loss_watchdog_threshold. If unset, 3."""
    profiler_steps: Step | Annotated[list[Step], Field(min_length=1)] | None = None
    """Training steps that are profiled, counted from 1, or their number, starting after profiler_steps_start. The trace
    of each is a file in the folder profiler of output_dir, for chrome://tracing and TensorBoard: operators and memory,
    of the CPU and of a CUDA GPU if there is one, for which a snapshot of its memory is written as well."""
    profiler_steps_start: Annotated[int, Field(ge=0)] | None = None
    """Number of steps before the first profiled one, if profiler_steps is a number. If unset, 0."""
    tui: DashboardSection = Field(DashboardSection(), description="The terminal dashboard of training.")
    plugins: list[str] = []
    """Classes (module.Class) that follow the run: a transformers.TrainerCallback, a class with a method
    on_rollouts_scored(rollouts, rewards), which is called with the rollouts of each training step, or one with hooks of
    axolotl's plugins."""
    plugins_strict: bool = False
    """End the run if a hook of a plugin fails during or after training, in place of a warning. One that fails before
    training, and a method of a TrainerCallback, always ends it."""
    plugin_args: dict[str, Any] = {}
    """Keys of the plugins' own, which are attributes of cfg in their hooks. Those that a plugin declares with
    get_input_args can stand at the top level of the config instead."""
    use_tensorboard: bool | None = Field(None, description="Write TensorBoard logs.")
    use_swanlab: bool | None = Field(None, description="Log to SwanLab, with the key in SWANLAB_API_KEY.")
    swanlab_project: str | None = Field(None, description="SwanLab project (SWANLAB_PROJECT).")
    swanlab_workspace: str | None = Field(None, description="SwanLab workspace (SWANLAB_WORKSPACE).")
    swanlab_mode: Literal["cloud", "local", "offline", "disabled"] | None = None
    """Mode of SwanLab (SWANLAB_MODE)."""
    swanlab_log_model: bool | None = Field(None, description="Copy checkpoints to SwanLab (SWANLAB_LOG_MODEL).")
    swanlab_api_host: str | None = Field(None, description="Address of SwanLab's server (SWANLAB_API_HOST).")
    swanlab_web_host: str | None = Field(None, description="Address of SwanLab's pages (SWANLAB_WEB_HOST).")
    use_wandb: bool | None = None
    """Log to Weights & Biases. If unset, enabled if wandb_project is set."""
    use_trackio: bool | None = Field(None, description="Log to Trackio.")
    trackio_project_name: str | None = Field(None, description="Trackio project.")
    trackio_space_id: str | None = Field(None, description="Hugging Face Space of the Trackio project.")
    use_mlflow: bool | None = Field(None, description="Log to MLflow.")
    mlflow_tracking_uri: str | None = Field(None, description="Server or folder of MLflow (MLFLOW_TRACKING_URI).")
    mlflow_experiment_name: str | None = Field(None, description="Experiment of MLflow (MLFLOW_EXPERIMENT_NAME).")
    hf_mlflow_log_artifacts: bool | None = None
    """Copy checkpoints to MLflow (HF_MLFLOW_LOG_ARTIFACTS)."""
    use_comet: bool | None = Field(None, description="Log to Comet, with the key in COMET_API_KEY.")
    comet_workspace: str | None = Field(None, description="Comet workspace (COMET_WORKSPACE).")
    comet_project_name: str | None = Field(None, description="Comet project (COMET_PROJECT_NAME).")
    comet_experiment_key: str | None = Field(None, description="Comet experiment (COMET_EXPERIMENT_KEY).")
    comet_mode: Literal["create", "get", "get_or_create"] | None = None
    """Whether Comet creates an experiment or continues one (COMET_MODE)."""
    comet_online: bool | None = Field(None, description="false: log to files of Comet (COMET_START_ONLINE).")
    wandb_project: str | None = Field(None, description="Weights & Biases project; setting it enables wandb.")
    wandb_entity: str | None = Field(None, description="Weights & Biases team or user.")
    wandb_name: str | None = Field(None, description="Name of the run.")
    wandb_run_id: str | None = None
    """ID of the run, for resuming its logs. Also the name of the run if wandb_name is unset."""
    wandb_watch: Literal["gradients", "all", "false", False] | None = None
    """What wandb logs about the model: gradients, all, or false."""
    wandb_log_model: str | Literal[False] | None = None
    """When wandb stores the model: checkpoint, end, or false."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = Field(None, description="Mode of wandb.")
