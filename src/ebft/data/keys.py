"""Keys of the config about datasets and how rows are cut."""

from typing import Annotated, Literal

from pydantic import Field

from ebft.config.section import Section

# Modules of `ebft.data.transforms` that a dataset's `type` may name, with their functions and the rows that each gives:
# tokens (input_ids and labels) or prompts (prompt and ground_truth). A bare module name means its `transform`.
BUILT_IN_TRANSFORMS: dict[str, dict[str, Literal["tokens", "prompts"]]] = {
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
}

# What gives the other kind of rows of the same columns, with the same turns trained on: used where a run needs those,
# so that one dataset serves every method.
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


class DatasetEntry(Section):
    """One element of `datasets:` or `test_datasets:`."""

    path: str = Field(description="Hub name, file, folder, or builder name (json, text, ...) of the data.")
    type: str = Field(
        description="Transform that makes tokens or prompts of rows: ebft_pretrain.transform, your_module.transform."
    )
    name: str | None = Field(None, description="Configuration (subset) of a hub dataset.")
    split: str = Field("train", description="Split to read, slices included: train[:1%].")
    data_files: str | list[str] | dict[str, str | list[str]] | None = Field(
        None, description="Files to read inside `path`."
    )
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = Field(
        None, description="Format of local files; unset reads it from the file name."
    )
    revision: str | None = Field(None, description="Hub revision of the dataset.")
    field: str | None = Field(None, description="Column with the text, for transforms of raw text.")


class DataKeys(Section):
    """Training and evaluation data."""

    datasets: list[DatasetEntry] = Field(min_length=1, description="The training data, one entry per source.")
    test_datasets: list[DatasetEntry] = Field(default_factory=list, description="Held-out data, one entry per source.")
    val_set_size: Annotated[float, Field(ge=0, lt=1)] | Annotated[int, Field(ge=1)] = Field(
        0.0,
        description="Documents held out of the training data: a share below 1, or a number of them. Chosen before "
        "any is dropped as unusable, so that every method holds the same ones out.",
    )
    dataset_num_proc: int = Field(1, ge=1, description="Processes that prepare the data.")
    shuffle_merged_datasets: bool = Field(True, description="Shuffle the rows once all sources are joined.")
    sequence_len: int = Field(
        512, ge=2, description="Tokens at which a row is cut; a prompt with its reference is left out."
    )
    sample_packing: bool = Field(
        False,
        description="Strided mode: put several short documents into one row of up to sequence_len tokens, which then "
        "counts once towards micro_batch_size. No document sees another.",
    )
    train_on_inputs: bool = Field(False, description="Count prompt tokens in the cross-entropy too.")
