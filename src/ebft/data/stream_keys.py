"""Config keys of streams of raw text, which are read while training runs."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator

from ebft.config.section import NotBlank, Section, or_null, paths
from ebft.data.keys import DatasetEntry, DataSettings, Files


class StreamEntry(Section):
    """One element of `pretraining_dataset:`, an entry of `datasets:` with `type: completion` in other words."""

    path: NotBlank = Field(description="As in datasets: Hub id, file, folder, URL, or builder name (json, text, ...).")
    name: str | None = Field(None, description="Configuration (subset) of a Hub dataset.")
    split: NotBlank = Field("train", description="Split to read.")
    text_column: NotBlank | None = Field(None, description="The same as datasets.field; if unset, text or content.")
    type: Literal["pretrain", "completion"] = Field(
        "pretrain", description="Both mean type: completion, raw text and the end token."
    )
    weight: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        None,
        description="Share of the documents, relative to the other entries, whose documents then alternate; if no "
        "entry has a weight, each is read to its end before the next.",
    )
    skip: int = Field(0, ge=0, description="Number of rows at the beginning that are left out.")
    data_files: Files | dict[str, Files] | None = Field(None, description="Files to read within `path`.")
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = Field(
        None, description="Format of files. If unset, inferred from the file extension."
    )
    revision: str | None = Field(None, description="Hub revision of the dataset.")
    trust_remote_code: bool = Field(False, description="Only false, as in datasets.")

    _entry_path = paths("path")

    def as_dataset(self) -> DatasetEntry:
        """The same entry as one of `datasets`."""
        values = self.model_dump(exclude={"text_column", "type"}, exclude_unset=True)
        return DatasetEntry(**values, type="completion", field=self.text_column)


def _one_or_more(schema: dict[str, Any]) -> None:
    """A path or a single entry can be given without a list."""
    schema["anyOf"] += [{"type": "string"}, {"type": "object"}]


class StreamKeys(Section):
    """Streams of raw text."""

    pretraining_dataset: Annotated[list[StreamEntry], Field(min_length=1)] | None = Field(
        None,
        description="SFT: streams of raw text to train on instead of datasets: a list of entries, one entry, or a "
        "path. The same as datasets with type: completion and streaming: true.",
        json_schema_extra=_one_or_more,
    )
    streaming: bool = Field(
        False,
        description="SFT: read datasets of type: completion while training runs, instead of preparing all rows before "
        "it. Documents are concatenated, and cut into rows of exactly sequence_len tokens. Needs max_steps.",
    )
    streaming_multipack_buffer_size: int = Field(
        10_000,
        ge=1,
        description="streaming: number of documents that are in memory, and are shuffled together if "
        "shuffle_merged_datasets is true.",
    )
    pretrain_multipack_buffer_size: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The same as streaming_multipack_buffer_size."
    )
    pretrain_multipack_attn: bool = Field(
        True,
        description="streaming: documents of a row do not attend to each other. If false, a row is one text, for "
        "models that cannot keep documents apart.",
    )

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
                "with type: completion, and set streaming: true; or remove one of them."
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
        size = self.pretrain_multipack_buffer_size
        if size is None:
            return self
        if "streaming_multipack_buffer_size" in self.model_fields_set and self.streaming_multipack_buffer_size != size:
            raise ValueError(
                "streaming_multipack_buffer_size and pretrain_multipack_buffer_size are two names of the same key. "
                "Keep one of them."
            )
        self.streaming_multipack_buffer_size, self.pretrain_multipack_buffer_size = size, None
        return self
