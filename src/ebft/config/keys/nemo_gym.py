"""The keys `nemo_gym_*` of the config."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from ebft.config.section import Section

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
