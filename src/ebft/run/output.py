"""The final model in the output folder, marked as complete when all of its files are there, its card, and the lock."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import ModelCardData
from transformers import PreTrainedTokenizerBase

from ebft.catalog import pinned_model
from ebft.config.reference import changed_keys
from ebft.config.schema import RunConfig
from ebft.data.locate import looks_local
from ebft.data.rendering import ChatTemplate
from ebft.errors import ConfigError, SaveError
from ebft.files import STAGING, STATE, checksum, publish_files, write_text
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.pretrained import GENERATION_CONFIG
from ebft.processes import is_main_process
from ebft.run.own_files import cards, listed, owns_card, write_mark
from ebft.run_files import CARD, read_run, state_of
from ebft.secrets import without_secrets, without_secrets_in_text
from ebft.trainer import OverTrainer
from ebft.transformers_internals import save_final_weights


def save_final(config: RunConfig, trainer: OverTrainer, metrics: Mapping[str, float]) -> None:
    """Save model, tokenizer, trainer state and model card in the output folder, then mark them as complete.

    Files of the final model of an earlier run are replaced or deleted. After an interruption, the model is not marked
    as complete. Raises SaveError if the files cannot be written.
    """
    output_dir = Path(config.output_dir)
    staged = output_dir / STAGING / "final"
    saves = trainer.args.should_save
    with trainer.saving(output_dir, staged):
        if saves:
            shutil.rmtree(staged, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        save_final_weights(trainer, str(staged))
        trainer.accelerator.wait_for_everyone()
        if saves:
            trainer.state.save_to_json(str(staged / STATE))
            for write in trainer.into_model:
                write(staged)
            write_model_card(config, metrics, staged)
            _publish(staged, output_dir, trainer.state.global_step)
            shutil.rmtree(output_dir / STAGING, ignore_errors=True)


def _publish(staged: Path, output_dir: Path, step: int) -> None:
    """Move the complete model from `staged` to the output folder, where it replaces files of a final model only.

    While the files are moved, both the old and the new ones are listed, so that a run that was killed knows them.
    """
    paths = [path for path in sorted(staged.rglob("*")) if path.is_file() and path.name != CARD]  # which may be edited
    files, before = {str(path.relative_to(staged)): path.stat().st_size for path in paths}, listed(output_dir)
    others = [name for name in files if name not in before and os.path.lexists(output_dir / name)]
    if others:
        raise SaveError(
            f"{output_dir} contains {', '.join(others)}, which the run has not written and does not replace. The model "
            f"is complete in {staged}, up to the next run in this folder: move it to another one."
        )
    if not owns_card(output_dir):
        (staged / CARD).unlink()
    card = [checksum(staged / CARD)] if (staged / CARD).is_file() else []
    write_mark(output_dir, None, before | files, [*cards(output_dir), *card])
    publish_files(staged, output_dir, [path for name in before if (path := output_dir / name).is_file()])
    write_mark(output_dir, step, files, card)


# Prefixes of the metrics in the card: speed, memory and schedule are not results of the model.
_RESULTS = ("ebft/", "entropy", "eval_", "loss", "reward", "train_loss")
_ADAPTERS = {"lora": "LoRA", "qlora": "QLoRA"}
# Options that name servers and accounts.
_OF_MACHINES = ("vllm.", "trl.vllm_server_", "hub_", "wandb_", "mlflow_", "comet_", "trackio_", "nemo_gym_")
_PATH = re.compile(r"(?<![\w/:.~<])~?(?:/[\w.@+%-]+)+/(?=[\w.@+%-])")  # an absolute path up to its last part
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def write_model_card(config: RunConfig, metrics: Mapping[str, float], folder: Path) -> None:
    """Write README.md into `folder`."""
    (folder / CARD).write_text(model_card(config, metrics), encoding="utf-8")


def model_card(config: RunConfig, metrics: Mapping[str, float]) -> str:
    """The card as Markdown with the hub's YAML header."""
    parts = [_header(config), _summary(config), _config(config), _results(metrics)]
    if config.method.citation:
        parts.append(f"## Citation\n\n```bibtex\n{config.method.citation}\n```")
    return _PATH.sub("", "\n\n".join(part for part in parts if part)) + "\n"


def _public(value: Any) -> Any:
    """`value` with the last parts of the absolute paths in it, since the names of folders are private."""
    if isinstance(value, str):
        return Path(value).name if os.path.isabs(value) or value.startswith("~") else value
    if isinstance(value, list):
        return [_public(item) for item in value]
    return {key: _public(item) for key, item in value.items()} if isinstance(value, dict) else value


def _on_hub(name: str) -> bool:
    """Whether `name` can be an id of the Hub, which refuses cards with others in their header."""
    return _HUB_ID.fullmatch(name) is not None and not os.path.exists(name) and not looks_local(name)


def _header(config: RunConfig) -> str:
    fetched = pinned_model(config.base_model)
    base = config.base_model if fetched is None else fetched[1].hub_id
    header = ModelCardData(
        base_model=base if _on_hub(base) else None,
        license=None if fetched is None else fetched[1].license,
        library_name="peft" if config.adapter else "transformers",
        pipeline_tag=config.method.pipeline_tag,
        tags=[config.method.tag],
        datasets=[each.path for each in config.datasets if _on_hub(each.path) and not each.data_files] or None,
    )
    return f"---\n{header.to_yaml()}\n---"


def _summary(config: RunConfig) -> str:
    method = config.method.summary(config)
    weights = f"a {_ADAPTERS[config.adapter]} adapter for" if config.adapter else "all weights of"
    data = "\n".join(
        f"- `{_public(entry.path)}`, split `{entry.split}`, as `{entry.type}`" for entry in config.datasets
    )
    return without_secrets_in_text(
        f"# {Path(config.output_dir).name}\n\nThis is {weights} {_base(config)}, trained by {method} with "
        f"`ebft` {version('ebft')}.\n\n## Data\n\n{data}"
    )


def _base(config: RunConfig) -> str:
    """The base model in a sentence: its name, and the origin of a fetched model."""
    fetched = pinned_model(config.base_model)
    if fetched is None:
        return f"`{_public(config.base_model)}`"
    name, model = fetched
    return (
        f"`{name}` ({model.hub_id}, {model.license}, from {Path(model.member).name} in {model.package} {model.version})"
    )


def _config(config: RunConfig) -> str:
    skipped = ("base_model", "datasets")
    shown = [item for item in changed_keys(config) if item[0] not in skipped and not item[0].startswith(_OF_MACHINES)]
    changed = {key: _public(value) for key, value in shown}
    in_cell = lambda value: str(value).replace("|", "\\|").replace("\n", "\\n")  # which would end the cell
    rows = "\n".join(f"| `{key}` | `{in_cell(value)}` |" for key, value in without_secrets(changed).items())
    return (
        "## Config\n\nThe options of the config that differ from their defaults, including options that have no effect "
        f"with this method.\n\n| option | value |\n| --- | --- |\n{rows}"
    )


def _results(metrics: Mapping[str, float]) -> str:
    reported = sorted(item for item in metrics.items() if item[0].startswith(_RESULTS))
    rows = "\n".join(f"| `{name}` | {value:.6g} |" for name, value in reported)
    return f"## Results\n\nLast logged values.\n\n| metric | value |\n| --- | --- |\n{rows}" if rows else ""


LOCK = ".ebft.lock"


@contextmanager
def output_lock(output_dir: Path) -> Iterator[None]:
    """Hold the lock of `output_dir` on the main process; the operating system releases it when the process dies.

    Raises ConfigError if another run holds it. A file system without locks is a warning: a lock that is only a file, as
    filelock would use there, remains when a process is killed, and then keeps every later run on other machines out.
    """
    if not is_main_process():
        yield
        return
    lock = FileLock(output_dir / LOCK, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        run = read_run(output_dir)
        owner = f" (process {run.get('pid')} on {run.get('host')})" if state_of(run) == "running" else ""
        raise ConfigError(
            f"output_dir: {output_dir} is used by another run{owner}. Wait until it has ended, or choose another "
            "folder."
        ) from None
    except (OSError, NotImplementedError) as error:
        warnings.warn(
            f"output_dir: {output_dir} cannot be locked ({error}), so another run in the same folder would not be "
            "detected.",
            stacklevel=3,
        )
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # user code closed the file
            lock.release()


def wait_until_free(output_dir: Path, seconds: float) -> None:
    """Wait for a run that is being killed to release the lock of `output_dir`, for at most `seconds`."""
    lock = FileLock(output_dir / LOCK, fallback_to_soft=False)
    with suppress(Timeout, OSError, NotImplementedError):  # reported by `output_lock`
        lock.acquire(timeout=seconds)
        lock.release()


_ROWS = 8  # that are read to find whether replies end with the token


def declare_end_of_turn(
    config: RunConfig, model: Any, tokenizer: PreTrainedTokenizerBase, rows: Any
) -> list[Callable[[Path], None]]:
    """Add the end of turn that `rows` teach to the generation config, which is saved with a full model.

    For an adapter, the list that is returned has a function that saves the generation config in its folder, for `ebft
    merge-lora`. Other programs do not read it there, so there is one warning, unless the tokenizer has the token as end
    of sequence.
    """
    causal_lm = unwrap_adapter(model)
    if config.streaming or not causal_lm.can_generate() or causal_lm.generation_config is None:
        return []
    settings = causal_lm.generation_config
    found = settings.eos_token_id
    known = [found] if isinstance(found, int) else list(found or [])
    end = ChatTemplate(tokenizer, kwargs=config.chat_template_kwargs).end_of_turn_id
    ends = {*known, tokenizer.eos_token_id}
    first = range(min(_ROWS, len(rows)))
    if end is None or end in known or not any(_is_taught(rows[index], end, ends) for index in first):
        return []
    settings.eos_token_id = [*known, end]
    if config.adapter is None:
        return []
    if end != tokenizer.eos_token_id:
        token = tokenizer.convert_ids_to_tokens(end)
        warnings.warn(
            f"special_tokens.eos_token: the chat template ends replies with {token}, which is not an end-of-sequence "
            "token of the base model, and an adapter has no generation config of its own, so generate() does not stop "
            f"there. Set special_tokens.eos_token: {token}, which is saved with the tokenizer, or pass eos_token_id to "
            "generate(); models of ebft merge-lora and ebft inference stop there anyway.",
            stacklevel=2,
        )
    # Not `save_pretrained`, which refuses combinations that some base models have.
    return [lambda folder: write_text(folder / GENERATION_CONFIG, settings.to_json_string())]


def _is_taught(row: dict[str, Any], end: int, eos: set[int | None]) -> bool:
    """Whether a reply of a row of any method ends with the token `end`."""
    if "documents" in row:  # packed
        return any(_is_taught(document, end, eos) for document in row["documents"])
    if "prompt" in row:  # replies to messages are sampled up to it
        return not isinstance(row["prompt"], str)
    if "labels" in row:
        return end in row["labels"]
    ids = row["chosen_ids"] if "chosen_ids" in row else row["completion_ids"]
    return end in ids and ids[-1] not in eos - {end}  # formats of texts write EOS after it
