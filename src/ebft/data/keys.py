"""Config keys of datasets, of the length of rows and of seeds, and the rows that a run requires."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ebft.config.options import EBFTSection
from ebft.config.section import STRICT, NotBlank, Section, paths
from ebft.nemo_gym.keys import MESSAGES, TRANSFORM

MAX_SEED = 2**32 - 1  # the largest seed that NumPy accepts
# input_ids and labels; prompt and ground_truth; prompt, chosen and rejected; or prompt, completion and label.
Rows = Literal["tokens", "prompts", "preferences", "labelled"]

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

# Formats of preference data, in `ebft.data.preferences`, with the rows that each gives: pairs of a chosen and a
# rejected completion, or single completions with a label.
_PAIRS: tuple[Rows, ...] = ("preferences",)
_LABELLED: tuple[Rows, ...] = ("labelled",)
_OF_TEXTS: dict[str, tuple[Rows, ...]] = {
    "default": _PAIRS,
    "intel": (*_PAIRS, *_LABELLED),
    "icr": _PAIRS,
    "argilla": _LABELLED,
    "argilla_chat": (*_PAIRS, *_LABELLED),
    "prompt_pairs": (*_PAIRS, *_LABELLED),
    "ultra": (*_PAIRS, *_LABELLED),
}
USER_DEFINED = "user_defined"  # the name of `type: {field_prompt: ...}`
PREFERENCE_FORMATS: dict[str, tuple[Rows, ...]] = {
    "chat_template.default": _PAIRS,
    "chat_template.argilla_chat": _PAIRS,
    "chat_template.argilla": _PAIRS,
    **{f"chatml.{name}": rows for name, rows in _OF_TEXTS.items()},
    **{f"llama3.{name}": rows for name, rows in _OF_TEXTS.items()},
    "passthrough": (*_PAIRS, *_LABELLED),
    USER_DEFINED: (*_PAIRS, *_LABELLED),
}


class PreferenceColumns(Section):
    """The columns and texts of preference data, as the `type` of a dataset; `{prompt}` is replaced with the column."""

    model_config = {**STRICT, "frozen": True}  # hashable, as names of transforms are

    field_prompt: NotBlank = Field("prompt", description="Column of the prompt.")
    field_system: NotBlank = Field("system", description="Column of the system message, for {system} in prompt_format.")
    field_chosen: NotBlank | None = Field(None, description="Column of the preferred completion; if unset, chosen.")
    field_rejected: NotBlank | None = Field(None, description="Column of the other completion; if unset, rejected.")
    field_completion: NotBlank | None = Field(None, description="rl: kto: column of the text; if unset, completion.")
    field_label: NotBlank | None = Field(None, description="rl: kto: column of true or false; if unset, label.")
    prompt_format: str = Field("{prompt}", description="Text of the prompt, with {prompt} and optionally {system}.")
    chosen_format: str | None = Field(None, description="Text with {chosen}; if unset, the column as it is.")
    rejected_format: str | None = Field(None, description="Text with {rejected}; if unset, the column as it is.")
    completion_format: str | None = Field(None, description="rl: kto: text with {completion}.")

    def __repr__(self) -> str:
        given = ", ".join(f"{name}: {getattr(self, name)!r}" for name in sorted(self.model_fields_set))
        return f"{{{given}}}"

    __str__ = __repr__

    @model_validator(mode="after")
    def _formats_name_their_column(self) -> "PreferenceColumns":
        for name in ("prompt", "chosen", "rejected", "completion"):
            text = getattr(self, f"{name}_format")
            if text is not None and f"{{{name}}}" not in text:
                raise ValueError(f"{name}_format: {text!r} does not contain {{{name}}}. Add it where the text belongs.")
        return self


Files = NotBlank | Annotated[list[NotBlank], Field(min_length=1)]


class DatasetEntry(Section):
    """One element of `datasets:` or `test_datasets:`."""

    path: NotBlank = Field(description="Hub id, file, folder, or builder name (json, text, ...) of the data.")
    type: NotBlank | PreferenceColumns = Field(
        description="Transform that converts rows to tokens or prompts, for example ebft_pretrain.transform or "
        "your_module.transform; for preference methods, a format such as chat_template.default or chatml.intel, or a "
        "mapping of columns (field_prompt, field_chosen, field_rejected, prompt_format, ...)."
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
    field_chosen: NotBlank | None = Field(
        None, description="Column of the preferred completion, for chat_template.default, argilla and argilla_chat."
    )
    field_rejected: NotBlank | None = Field(None, description="Column of the other completion, see field_chosen.")
    message_property_mappings: dict[Literal["role", "content"], NotBlank] | None = Field(
        None, description="Names of a message's keys, such as {role: from, content: value}; see field_chosen."
    )
    message_field_role: Literal["role"] = Field("role", description="Key of a message's role.")
    message_field_content: Literal["content"] = Field("content", description="Key of a message's content.")

    _entry_path = paths("path")

    @model_validator(mode="after")
    def _keys_of_chats_in_pairs(self) -> "DatasetEntry":
        if self.type in [name for name in PREFERENCE_FORMATS if name.startswith("chat_template.")]:
            return self
        for key in ("field_chosen", "field_rejected", "message_property_mappings"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"{key} is only read with type: chat_template.default, chat_template.argilla and "
                    "chat_template.argilla_chat. Remove it, or write the columns as type: {field_prompt: ..., "
                    "field_chosen: ..., field_rejected: ...}."
                )
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
