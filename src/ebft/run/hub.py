"""Publishing to the model Hub: access is checked before training, the upload follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebft.dashboard.files import LOG, PREVIOUS, RUN, START
from ebft.durable import STAGING
from ebft.errors import ConfigError
from ebft.run.lock import LOCK

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


def check_hub(config: RunConfig) -> None:
    """Create the repository `hub_model_id`, which is needed at the end of the run. Raises ConfigError on failure."""
    if not config.hub_model_id:
        return
    from huggingface_hub import create_repo

    try:
        create_repo(config.hub_model_id, private=config.hub_private_repo, exist_ok=True)
    except Exception as error:  # the client's transport errors have no common public base class
        raise ConfigError(
            f"hub_model_id: {config.hub_model_id!r} cannot be created or reached on the Hub ({error}). Log in with "
            "`hf auth login`, correct the id, or remove hub_model_id to keep the model on this machine."
        ) from error


def push(config: RunConfig) -> None:
    """Upload the output folder without its checkpoints, its log and the state of this process."""
    from huggingface_hub import upload_folder

    ignored = ["checkpoint-*", "runs/*", f"{STAGING}/*", f"{PREVIOUS}/*", RUN, START, LOG, LOCK]
    upload_folder(repo_id=config.hub_model_id, folder_path=config.output_dir, ignore_patterns=ignored)
