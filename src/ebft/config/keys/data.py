"""Config keys of datasets, of streams, of the length of rows, of seeds and of NeMo Gym."""

import os
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, PrivateAttr, field_validator, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from ebft.config.section import NotBlank, PromptFormat, Section, ShapeKeys, or_null, paths
from ebft.data.transforms import LABELS, OTHER_TYPES, PROMPTS, PreferenceColumns, RequiredRows

Seconds = Annotated[float, Field(gt=0)]

MESSAGES = "responses_create_params.input"  # where a row has its messages
TRANSFORM = "nemo_gym.transform"
VERIFY, ENVIRONMENT = "nemo_gym_verify", "nemo_gym_env"  # names in trl.reward_funcs


class NemoGymDataset(Section):
    """One element of `nemo_gym_datasets:`."""

    path: str = Field(description="JSONL file of rows, relative to nemo_gym_dir or absolute.")
    server_name: str | None = None
    """Name of the resources server or agent server of these rows, as in NeMo Gym's config. Rows with an agent_ref use
    the server that it names."""
    max_samples: int | None = Field(None, ge=1, description="Read only this many rows, from the start of the file.")


class NemoGymKeys(Section):
    """Rewards and multi-turn rollouts from the servers of NeMo Gym."""

    nemo_gym_enabled: bool = Field(False, description="Train on rows of NeMo Gym, with rewards from its servers.")
    nemo_gym_dir: str = Field("~/Gym", description="Folder of the NeMo Gym repository.")
    nemo_gym_auto_clone: bool | None = None
    """No effect: the repository is never downloaded. Clone it to nemo_gym_dir."""
    nemo_gym_auto_start: bool = True
    """Start the servers of nemo_gym_config_paths with ng_run from nemo_gym_dir/.venv, unless a head server responds at
    nemo_gym_head_port, and stop them at the end of training."""
    nemo_gym_config_paths: list[str] = []
    """Configs of the servers to start with nemo_gym_auto_start, relative to nemo_gym_dir."""
    nemo_gym_datasets: list[NemoGymDataset] = []
    """Training rows. `datasets` can be omitted, or must list the same files."""
    nemo_gym_head_port: int = Field(11000, ge=1, le=65535)
    """Port of NeMo Gym's head server on this machine, which lists its servers."""
    nemo_gym_server_timeout: Seconds = Field(360.0, description="Timeout in seconds for the servers to start.")
    nemo_gym_verify_timeout: Seconds = 30.0
    """Timeout in seconds of a request for the reward of a reply."""
    nemo_gym_run_timeout: Seconds = 300.0
    """Timeout in seconds of the run of an agent (nemo_gym_multi_turn), including all of its turns."""
    nemo_gym_model_name: str | None = None
    """Name of the model in requests for the reward of a reply. If unset, base_model."""
    nemo_gym_multi_turn: bool = False
    """Let NeMo Gym's agent servers run each conversation, with tools. They sample from the vLLM server."""
    nemo_gym_max_turns: int | None = Field(None, ge=1)
    """Maximum number of replies in a conversation. Agents count them: max_steps of each agent in NeMo Gym's config must
    not be larger, or training does not start. If unset, the agents decide."""

    @model_validator(mode="before")
    @classmethod
    def _datasets_from_rows(cls, values: Any) -> Any:
        """Derive `datasets` from `nemo_gym_datasets` if it is omitted."""
        if not isinstance(values, dict) or values.get("nemo_gym_enabled") is not True or values.get("datasets"):
            return values
        rows, folder = values.get("nemo_gym_datasets"), values.get("nemo_gym_dir")
        if not isinstance(rows, list) or not all(
            isinstance(row, dict) and isinstance(row.get("path"), str) for row in rows
        ):
            return values  # reported as an invalid value
        folder = folder if isinstance(folder, str) else cls.model_fields["nemo_gym_dir"].default
        return {**values, "datasets": [{"path": path_in(folder, row["path"]), "type": TRANSFORM} for row in rows]}


def path_in(folder: str, path: str) -> str:
    """The absolute path of a file that is given relative to `folder`; `~` is the home directory in both."""
    return os.path.abspath(Path(folder).expanduser() / Path(path).expanduser())


MAX_LENGTH = 2**25  # tokens; no model takes more
MAX_SEED = 2**32 - 1  # the largest seed that NumPy accepts
Files = NotBlank | Annotated[list[NotBlank], Field(min_length=1)]


def _same(section: Section, key: str, other: str, value: Any) -> None:
    """Set `key` to the value of `other`, which is another name of it."""
    if value is None:
        return
    if key in section.model_fields_set and getattr(section, key) not in (None, value):
        raise ValueError(f"{key} and {other} are two names of the same key. Keep one.")
    setattr(section, key, value)


class StepKeys(Section):
    """Keys of an entry of steps (`type: stepwise_supervised`)."""

    step_separator: Annotated[str, Field(min_length=1)] = "\n"
    """stepwise_supervised: text after each step, whose last token is classified."""
    max_completion_length: Annotated[int, Field(ge=1)] | None = None
    """stepwise_supervised: number of tokens of the steps that are kept. If unset, all of them."""
    train_on_last_step_only: bool = False
    """stepwise_supervised: only the last step of a row has a label."""


class SourceKeys(Section):
    """Where the rows of a dataset are, which of them are read, and the transform that converts them."""

    path: NotBlank = Field(description="Hub id, file, folder, URL, or builder name (json, text, ...) of the data.")
    type: NotBlank | PreferenceColumns = Field(
        json_schema_extra=lambda schema: schema["anyOf"].append({"type": "object"})
    )
    """Transform that converts rows to tokens or prompts, for example ebft_pretrain.transform or your_module.transform,
    or a mapping with the keys of user_defined; for preference methods, a format such as chat_template.default or
    chatml.intel, or a mapping of columns (field_prompt, field_chosen, field_rejected, prompt_format, ...)."""
    name: str | None = None
    """Configuration (subset) of a dataset of the Hub, or of a folder that is its repository."""
    split: NotBlank = Field("train", description="Split to read; can be a slice such as train[:1%].")
    train_on_split: NotBlank | None = Field(None, description="The same as split.")
    data_files: Files | dict[str, Files] | None = Field(None, description="Files to read within `path`.")
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = None
    """Format of files. If unset, inferred from the file extension."""
    revision: str | None = Field(None, description="Hub revision of the dataset.")
    shards: int | None = Field(None, ge=1)
    """Read one of this many equal parts: each `shards`-th row, starting at `shards_idx`."""
    shards_idx: int = Field(0, ge=0, description="The part to read if shards is set, starting at 0.")
    weight: Annotated[float, Field(gt=0, le=1000)] | None = None
    """How often each training row appears in an epoch; 0.5 is a random half of the documents, 2.5 is all of them twice
    and a random half once more. Rows that are held out are not repeated. streaming: if set for any dataset, documents
    of all of them alternate in the proportion of the weights, and a dataset that ends begins again; otherwise each
    dataset is read to its end before the next. If unset, 1."""
    skip: int = Field(0, ge=0, description="streaming: number of rows at the beginning that are left out.")
    preprocess_shards: int | None = Field(None, ge=1, description="No effect: rows are prepared in batches.")
    trust_remote_code: bool = False
    """No effect: the datasets library runs no code of a dataset."""
    chat_template: NotBlank | None = None
    """The same as chat_template of the config; all datasets must have the same one."""
    field: str | None = None
    """Column to read, for transforms of raw text and of chats; `a.b` is the key b in column a."""
    field_chosen: NotBlank | None = None
    """Column of the preferred completion, for chat_template.default, argilla and argilla_chat."""
    field_rejected: NotBlank | None = Field(None, description="Column of the other completion, see field_chosen.")

    _entry_path = paths("path")


class DatasetEntry(StepKeys, ShapeKeys, SourceKeys):  # pydantic lists the fields of the last base class first
    """One element of `datasets:` or `test_datasets:`."""

    _empty_labels: tuple[str, ...] = PrivateAttr(())  # keys of labels that the config lists without a value

    @model_validator(mode="wrap")
    @classmethod
    def _with_empty_labels(cls, data: Any, build: ModelWrapValidatorHandler["DatasetEntry"]) -> "DatasetEntry":
        entry = build(data)
        if isinstance(data, dict) and not cls.model_fields.keys() <= data.keys():  # a stored config lists all keys
            entry.note_empty_labels(key for key in LABELS[:3] if key in data and data[key] is None)
        return entry

    def note_empty_labels(self, keys: Iterable[str]) -> None:
        """Keep the `keys` of labels that are given without a value; None is also the default of these keys."""
        self._empty_labels = tuple(keys)

    @property
    def empty_labels(self) -> tuple[str, ...]:
        """The keys of labels that are given without a value, which selects the last turn in axolotl."""
        return self._empty_labels

    @model_validator(mode="before")
    @classmethod
    def _format_as_type(cls, data: Any) -> Any:
        """Move prompts that `type` describes, and keys of prompts beside it, to `user_defined`; not preference data. An
        empty `type` means rows of tokens, as in axolotl."""
        if isinstance(data, dict) and data.get("type", "") is None:
            return data | {"type": "tokens"}
        if not isinstance(data, dict) or not isinstance(data.get("type"), dict | str):
            return data
        if isinstance(data["type"], str):
            own = data.keys() & (PromptFormat.model_fields.keys() - ShapeKeys.model_fields.keys())
            if data["type"] not in PROMPTS or (data["type"] == "alpaca" and not own):
                return data
            prompt = PROMPTS[data["type"]] | {key: data[key] for key in own if data[key]}
            return {key: data[key] for key in data.keys() - own} | {"type": "user_defined", "user_defined": prompt}
        if data["type"].keys() & (PreferenceColumns.model_fields.keys() - PromptFormat.model_fields.keys()):
            return data
        if data.get("user_defined") is not None:
            raise ValueError("type is a mapping, and user_defined is also set. Keep one.")
        return {**data, "type": "user_defined", "user_defined": data["type"]}

    @model_validator(mode="after")
    def _some_turns_are_trained_on(self) -> "DatasetEntry":
        if self.roles_to_train == [] and self.message_field_training is None:
            raise ValueError(
                "roles_to_train: [] trains on no turn. List roles (such as assistant), or set message_field_training "
                "to the key of messages that marks the turns to train on."
            )
        return self

    @model_validator(mode="after")
    def _one_name_of_each_key(self) -> "DatasetEntry":
        _same(self, "field", "field_messages", self.field_messages)
        _same(self, "train_on_eos", "train_on_eot", self.train_on_eot)
        _same(self, "split", "train_on_split", self.train_on_split)
        self._same_property("role", self.message_field_role)
        self._same_property("content", self.message_field_content)
        self.type = OTHER_TYPES.get(self.type, self.type)
        if self.field_messages == MESSAGES and self.type in ("chat_template", "chat_template.transform"):
            self.type = TRANSFORM
        return self

    def _same_property(self, key: str, value: str | None) -> None:
        """Add the value of `message_field_*`, another name of a property of messages, to the mapping."""
        given = self.message_property_mappings or {}
        if value is None:
            return
        if given.get(key, value) != value:
            raise ValueError(
                f"message_property_mappings.{key} and message_field_{key} are two names of the same key. Keep one."
            )
        self.message_property_mappings = {**given, key: value}


class DataKeys(Section):
    """Training and evaluation data."""

    datasets: list[DatasetEntry] = Field(min_length=1, description="Training data, one entry per source.")
    test_datasets: list[DatasetEntry] = Field(default_factory=list, description="Held-out data, one entry per source.")
    val_set_size: Annotated[float, Field(ge=0, lt=1)] | Annotated[int, Field(ge=1)] = 0.0
    """Documents to hold out of the training data: a fraction of those with text if below 1, and at least one document;
    otherwise a number. They are selected before unusable documents are dropped, so that every method holds out the same
    ones."""
    dataset_prepared_path: Annotated[str, Field(min_length=1)] | None = None
    """Folder for prepared rows, those of `ebft preprocess` and of earlier runs. Training reads the rows that were
    prepared from the same data, transforms, tokenizer and settings; if there are none, it prepares and stores them. If
    unset, rows are prepared in every run and not stored."""
    dataset_num_proc: int = Field(1, ge=1, le=4096, description="Number of processes for preparing the data.")
    shuffle_merged_datasets: bool = Field(True, description="Shuffle the rows after all sources are joined.")
    curriculum_sampling: bool = False
    """Train on rows in the order of the files, and pack them in it; not with kto."""
    sequence_len: int = Field(512, ge=2, le=MAX_LENGTH)
    """Maximum number of tokens per row. Longer rows of tokens are cut; prompts that are longer with their reference are
    dropped."""
    excess_length_strategy: Literal["truncate", "drop", "raise"] | None = None
    """SFT and strided mode: what happens to rows of more than sequence_len tokens: truncate keeps their beginning, drop
    none of them, and raise stops the run. If unset, text without a prompt is cut into windows, and other rows are
    truncated."""
    min_sample_len: Annotated[int, Field(ge=1)] | None = None
    """SFT and strided mode: rows of fewer tokens are dropped."""
    dataset_exact_deduplication: bool = False
    """Drop rows that are equal to an earlier row after the transform, before documents are held out; the rows of
    test_datasets are compared among themselves."""
    sample_packing: bool = False
    """Strided mode and SFT: pack several short documents into one row of up to sequence_len tokens, which counts as one
    row of micro_batch_size. Documents do not attend to each other."""
    train_on_inputs: bool = Field(False, description="Include prompt tokens in the cross-entropy.")
    roles_to_train: Annotated[list[NotBlank], Field(min_length=1)] | None = None
    """SFT and strided mode: roles of chats whose turns are trained on, unless the dataset sets them. Default:
    assistant."""

    _prepared_path = paths("dataset_prepared_path")


class SeedKeys(Section):
    """Random seeds."""

    seed: int = Field(42, ge=0, le=MAX_SEED)
    """Random seed of weight initialisation, sampling and data order."""
    data_seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """Random seed of the data order. If unset, seed."""


class DataSettings(DataKeys, SeedKeys):
    """Every key that loading data reads (transforms may read any key of a run), and the rows to load."""

    @property
    @abstractmethod
    def required_rows(self) -> RequiredRows:
        """The rows that the run's method trains on."""


class StreamEntry(Section):
    """One element of `pretraining_dataset:`, an entry of `datasets:` with `type: completion` in other words."""

    path: NotBlank = Field(description="As in datasets: Hub id, file, folder, URL, or builder name (json, text, ...).")
    name: str | None = None
    """Configuration (subset) of a dataset of the Hub, or of a folder that is its repository."""
    split: NotBlank = Field("train", description="Split to read.")
    text_column: NotBlank | None = Field(None, description="The same as datasets.field; if unset, text or content.")
    type: Literal["pretrain", "completion"] = "pretrain"
    """Both mean type: completion, raw text and the end token."""
    weight: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Share of the documents, relative to the other entries, whose documents then alternate; if no entry has a weight,
    each is read to its end before the next."""
    skip: int = Field(0, ge=0, description="Number of rows at the beginning that are left out.")
    data_files: Files | dict[str, Files] | None = Field(None, description="Files to read within `path`.")
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = None
    """Format of files. If unset, inferred from the file extension."""
    revision: str | None = Field(None, description="Hub revision of the dataset.")
    trust_remote_code: bool = Field(False, description="No effect, as in datasets.")

    _entry_path = paths("path")

    def as_dataset(self) -> DatasetEntry:
        """The same entry as one of `datasets`."""
        values = self.model_dump(exclude={"text_column", "type"}, exclude_unset=True)
        return DatasetEntry(**values, type="completion", field=self.text_column)


class StreamKeys(Section):
    """Streams of raw text."""

    pretraining_dataset: Annotated[list[StreamEntry], Field(min_length=1)] | None = Field(
        None, json_schema_extra=lambda schema: schema["anyOf"].extend([{"type": "string"}, {"type": "object"}])
    )
    """SFT: streams of raw text to train on instead of datasets: a list of entries, one entry, or a path. The same as
    datasets with type: completion and streaming: true."""
    streaming: bool = False
    """SFT: read datasets while training runs, instead of preparing all rows before it. Documents are concatenated, and
    with type: completion cut into rows of exactly sequence_len tokens. Needs max_steps."""
    streaming_multipack_buffer_size: int = Field(10_000, ge=1)
    """streaming: number of documents that are in memory, and are shuffled together if shuffle_merged_datasets is
    true."""
    pretrain_multipack_buffer_size: Annotated[int, Field(ge=1)] | None = None
    """The same as streaming_multipack_buffer_size."""
    pretrain_multipack_attn: bool = True
    """streaming: documents of a row do not attend to each other. If false, a row is one text, for models that cannot
    keep documents apart."""

    @field_validator("pretraining_dataset", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        value = {"path": value} if isinstance(value, str) else value
        return [value] if isinstance(value, dict) else value


# Takes the place of `datasets`, which is required, until the entries of `pretraining_dataset` have been checked.
_TO_BE_MOVED = DatasetEntry(path="pretraining_dataset", type="completion")


class StreamSettings(StreamKeys, DataSettings):
    """Every key that loading data reads, prepared or as a stream."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        schema["required"] = [key for key in schema["required"] if key != "datasets"]
        schema["properties"]["datasets"] = or_null(schema["properties"]["datasets"])
        return schema | {"anyOf": [{"required": ["datasets"]}, {"required": ["pretraining_dataset"]}]}

    @model_validator(mode="before")
    @classmethod
    def _instead_of_datasets(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("pretraining_dataset") is None or data.get("datasets") is not None:
            return data
        return {**data, "datasets": [_TO_BE_MOVED]}

    @model_validator(mode="after")
    def _as_datasets(self) -> Self:
        """Move the entries of `pretraining_dataset` to `datasets`, so that there is one list of what is trained on."""
        if self.pretraining_dataset is None:
            return self
        if self.datasets[0] is not _TO_BE_MOVED:
            raise ValueError(
                "pretraining_dataset and datasets are both set. Move the entries of pretraining_dataset to datasets, "
                "with type: completion, and set streaming: true; or remove one."
            )
        if not self.streaming and "streaming" in self.model_fields_set:
            raise ValueError(
                "pretraining_dataset is a stream, but streaming is false. Remove streaming, or rename "
                "pretraining_dataset to datasets, with type: completion, to prepare all rows before training."
            )
        self.datasets = [entry.as_dataset() for entry in self.pretraining_dataset]
        self.pretraining_dataset, self.streaming = None, True
        return self

    @model_validator(mode="after")
    def _one_buffer(self) -> Self:
        key, other = "streaming_multipack_buffer_size", "pretrain_multipack_buffer_size"
        _same(self, key, other, self.pretrain_multipack_buffer_size)
        if self.pretrain_multipack_buffer_size is not None:
            self.pretrain_multipack_buffer_size = None
        return self
