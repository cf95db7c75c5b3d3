"""What loading data reads, with or without a stream, and the two spellings of a stream: both become `datasets`."""

from typing import Any, Self

from pydantic import GetJsonSchemaHandler, model_validator

from ebft.config.section import or_null
from ebft.data.keys import DatasetEntry, DataSettings
from ebft.data.streaming.keys import StreamKeys

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
