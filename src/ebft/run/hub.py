"""Publishing to the model Hub: access is checked before training, the final model is pushed after it."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ebft.errors import ConfigError, SaveError, cause
from ebft.over_trainer.pushing import commit, pushed_files

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

_WHEN = {
    "end": "model, tokenizer and model card at the end",
    "every_save": "model, tokenizer and model card at every save and at the end",
    "checkpoint": "the same and the newest checkpoint, with its optimizer state, at every save",
    "all_checkpoints": "the same and every checkpoint, with its optimizer state",
}


def check_hub(config: RunConfig) -> None:
    """Create the repository `hub_model_id` on the main process, and print what will be pushed to it.

    Raises ConfigError if that fails. An existing repository that is public gives a warning, unless
    hub_private_repo is false.
    """
    if not config.hub_model_id or os.environ.get("RANK", "0") != "0":
        return
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        name = api.create_repo(config.hub_model_id, private=config.hub_private_repo, exist_ok=True).repo_id
        is_private = api.repo_info(name).private
    except Exception as error:  # the client's transport errors have no common public base class
        raise ConfigError(
            f"hub_model_id: {config.hub_model_id!r} cannot be created or reached on the Hub ({cause(error)}). Log in "
            "with `hf auth login`, correct the id, or remove hub_model_id to keep the model on this machine."
        ) from error
    print(f"Hub: {name} ({'private' if is_private else 'public'}), {_WHEN[config.hub_strategy]}", file=sys.stderr)
    if config.hub_private_repo and not is_private:
        warnings.warn(
            f"hub_model_id: the repository {name} exists already and is public, so everyone can read what is pushed. "
            "Make it private in its settings, choose another id, or set hub_private_repo: false.",
            stacklevel=2,
        )


def push(config: RunConfig, names: list[str], card: str, tokenizer: object = None) -> None:
    """Push the final model: those of the files `names` in the output folder that belong to a model, and its card.

    Raises SaveError, with the command that pushes by hand, if that fails.
    """
    folder = Path(config.output_dir)
    files = {path.name: path for path in pushed_files(folder, names, tokenizer)}
    try:
        commit(config.hub_model_id, files, "End of training", card)
    except Exception as error:  # the client's transport errors have no common public base class
        words = ["hf", "upload", config.hub_model_id, str(folder), "."]
        included = [word for name in files for word in ("--include", name)]
        raise SaveError(
            f"The model is saved in {folder}, but it was not pushed to {config.hub_model_id} ({cause(error)}). To push "
            f"it, run the same command again with auto_resume_from_checkpoints=true, which does not train again, or: "
            f"{shlex.join([*words, *included])}"
        ) from error
