"""Config keys of datasets, of the length of rows and of seeds, and the rows that a run requires."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ebft.config.options import EBFTSection
from ebft.config.section import NotBlank, Section, paths
from ebft.nemo_gym.keys import MESSAGES, TRANSFORM

MAX_SEED = 2**32 - 1  # the largest seed that NumPy accepts
# input_ids and labels; prompt and ground_truth; chosen_ids and rejected_ids; input_ids and the labels of steps.
Rows = Literal["tokens", "prompts", "comparisons", "steps"]

# Modules of `ebft.data.transforms` for the `type` of a dataset, with their functions and the rows that each returns. A
# module name alone means its `transform`.
BUILT_IN_TRANSFORMS: dict[str, dict[str, Rows]] = {
    "ebft_pretrain": {"transform": "tokens"},
    "ebft_strided_structured": {"transform": "tokens", "transform_prompts": "prompts"},
    "ebft_strided_chat": {"transform": "tokens"},
    "ebft_opencode": {"transform": "prompts", "transform_strided": "tokens"},
    "ebft_chat_multiturn": {
        "transform": "prompts",
        "transform_last_turn": "prompts",
        "transform_all_turns": "prompts",
    },
    "ebft_reasoning": {
        "transform": "prompts",
        "transform_answer_only": "prompts",
        "transform_split_thinking": "prompts",
        "transform_strided": "tokens",
    },
    "completion": {"transform": "tokens"},
    "chat_template": {"transform": "tokens"},
    "nemo_gym": {"transform": "prompts"},
    "bradley_terry": {"chat_template": "comparisons"},
    "stepwise_supervised": {"transform": "steps"},
}

# Transforms that return the other kind of rows from the same columns, with the same turns trained on. They are used if
# a run needs that kind, so that one dataset works with every method.
EQUIVALENT_TRANSFORMS: dict[str, str] = {
    "ebft_strided_structured.transform": "ebft_strided_structured.transform_prompts",
    "ebft_strided_structured.transform_prompts": "ebft_strided_structured.transform",
    "ebft_opencode.transform": "ebft_opencode.transform_strided",
    "ebft_opencode.transform_strided": "ebft_opencode.transform",
    "ebft_strided_chat.transform": "ebft_chat_multiturn.transform_last_turn",
    "ebft_chat_multiturn.transform_last_turn": "ebft_strided_chat.transform",
    "ebft_chat_multiturn.transform": "chat_template.transform",
    "ebft_chat_multiturn.transform_all_turns": "chat_template.transform",
    "chat_template.transform": "ebft_chat_multiturn.transform_all_turns",
    "ebft_reasoning.transform": "ebft_reasoning.transform_strided",
    "ebft_reasoning.transform_strided": "ebft_reasoning.transform",
}


Files = NotBlank | Annotated[list[NotBlank], Field(min_length=1)]


class StepKeys(Section):
    """Keys of an entry of steps (`type: stepwise_supervised`)."""

    step_separator: Annotated[str, Field(min_length=1)] = Field(
        "\n", description="stepwise_supervised: text after each step, whose last token is classified."
    )
    max_completion_length: Annotated[int, Field(ge=1)] | None = Field(
        None, description="stepwise_supervised: number of tokens of the steps that are kept. If unset, all of them."
    )
    train_on_last_step_only: bool = Field(
        False, description="stepwise_supervised: only the last step of a row has a label."
    )


class DatasetEntry(StepKeys):
    """One element of `datasets:` or `test_datasets:`."""

    path: NotBlank = Field(description="Hub id, file, folder, or builder name (json, text, ...) of the data.")
    type: NotBlank = Field(
        description="Transform that converts rows to tokens or prompts, for example ebft_pretrain.transform or "
        "your_module.transform."
    )
    name: str | None = Field(None, description="Configuration (subset) of a Hub dataset.")
    split: NotBlank = Field("train", description="Split to read; can be a slice such as train[:1%].")
    data_files: Files | dict[str, Files] | None = Field(None, description="Files to read within `path`.")
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = Field(
        None, description="Format of local files. If unset, inferred from the file extension."
    )
    revision: str | None = Field(None, description="Hub revision of the dataset.")
    field: str | None = Field(
        None, description="Column to read, for transforms of raw text and of chats; `a.b` is the key b in column a."
    )
    field_messages: str | None = Field(
        None,
        description="The same as field, for chats. responses_create_params.input with type: chat_template selects "
        "nemo_gym.transform, in which all messages are the prompt.",
    )
    message_field_role: Literal["role"] = Field("role", description="Key of a message's role.")
    message_field_content: Literal["content"] = Field("content", description="Key of a message's content.")

    _entry_path = paths("path")

    @model_validator(mode="after")
    def _steps_have_a_reader(self) -> "DatasetEntry":
        defaults = {key: field.default for key, field in StepKeys.model_fields.items()}
        given = sorted(key for key, default in defaults.items() if getattr(self, key) != default)
        module = self.type.partition(".")[0]
        if given and module in BUILT_IN_TRANSFORMS and module != "stepwise_supervised":
            raise ValueError(f"{', '.join(given)}: not read by type: {self.type}, only by stepwise_supervised.")
        return self

    @model_validator(mode="after")
    def _one_name_of_field(self) -> "DatasetEntry":
        if self.field_messages is None:
            return self
        if self.field not in (None, self.field_messages):
            raise ValueError("field and field_messages are two names of the same key. Keep one of them.")
        self.field = self.field_messages
        if self.field == MESSAGES and self.type in ("chat_template", "chat_template.transform"):
            self.type = TRANSFORM
        return self


class DataKeys(Section):
    """Training and evaluation data."""

    datasets: list[DatasetEntry] = Field(min_length=1, description="Training data, one entry per source.")
    test_datasets: list[DatasetEntry] = Field(default_factory=list, description="Held-out data, one entry per source.")
    val_set_size: Annotated[float, Field(ge=0, lt=1)] | Annotated[int, Field(ge=1)] = Field(
        0.0,
        description="Documents to hold out of the training data: a fraction if below 1, otherwise a number. They are "
        "selected before unusable documents are dropped, so that every method holds out the same ones.",
    )
    dataset_prepared_path: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Folder for prepared rows, those of `ebft preprocess` and of earlier runs. Training reads the rows "
        "that were prepared from the same data, transforms, tokenizer and settings; if there are none, it prepares and "
        "stores them. If unset, rows are prepared in every run and not stored.",
    )
    dataset_num_proc: int = Field(1, ge=1, description="Number of processes for preparing the data.")
    shuffle_merged_datasets: bool = Field(True, description="Shuffle the rows after all sources are joined.")
    sequence_len: int = Field(
        512,
        ge=2,
        description="Maximum number of tokens per row. Longer rows of tokens are cut; prompts that are longer with "
        "their reference are dropped.",
    )
    sample_packing: bool = Field(
        False,
        description="Strided mode: pack several short documents into one row of up to sequence_len tokens, which "
        "counts as one row of micro_batch_size. Documents do not attend to each other.",
    )
    train_on_inputs: bool = Field(False, description="Include prompt tokens in the cross-entropy.")


class SeedKeys(Section):
    """Random seeds."""

    seed: int = Field(
        42, ge=0, le=MAX_SEED, description="Random seed of weight initialisation, sampling and data order."
    )
    data_seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(
        None, description="Random seed of the data order. If unset, seed."
    )


@dataclass(frozen=True)
class RequiredRows:
    """The rows that a method trains on."""

    kind: Rows
    method: str  # its name, for messages
    needs_reference: bool  # whether every row of prompts must have one
    block: EBFTSection | None  # options of the blocks, if every row must have room for one
    chat_template_kwargs: dict[str, Any] | None  # for rendering prompts


class DataSettings(DataKeys, SeedKeys):
    """Every key that loading data reads (transforms may read any key of a run), and the rows to load."""

    @property
    @abstractmethod
    def required_rows(self) -> RequiredRows:
        """The rows that the run's method trains on."""
