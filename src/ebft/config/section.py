"""What every part of a run config has in common: strict types, no unknown keys, empty values mean unset."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Section(BaseModel):
    """A group of keys of the config."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _empty_means_unset(cls, data: Any) -> Any:
        """`key:` without a value, as in `wandb_run_id:`, is the same as leaving the key out."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}
