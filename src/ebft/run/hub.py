"""Publishing on the model hub: that it can be done is known before training, the upload follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebft.errors import ConfigError

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


def check_hub(config: RunConfig) -> None:
    """Make the repository of `hub_model_id`, which the run needs at its end; ConfigError where that fails."""
    if not config.hub_model_id:
        return
    from huggingface_hub import create_repo

    try:
        create_repo(config.hub_model_id, private=config.hub_private_repo, exist_ok=True)
    except Exception as error:  # the client's transport errors have no common public base
        raise ConfigError(
            f"hub_model_id: {config.hub_model_id!r} cannot be made or reached on the hub ({error}). Log in with "
            "`hf auth login`, correct it, or remove it to keep the model on this machine."
        ) from error


def push(config: RunConfig) -> None:
    """Upload the output folder without its checkpoints."""
    from huggingface_hub import upload_folder

    ignored = ["checkpoint-*", "runs/*"]
    upload_folder(repo_id=config.hub_model_id, folder_path=config.output_dir, ignore_patterns=ignored)
