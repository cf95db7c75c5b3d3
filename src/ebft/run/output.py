"""The output folder: its lock, the files in it that runs wrote, and the final model. Do not import torch.

All files that no run wrote are neither moved nor replaced. The files of the final model are listed in
`ebft_final.json`, which a run writes when it starts; its step is added when all files are there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from ebft import errors, machine, run_files
from ebft.files import ADAPTER_CONFIG, CHECKSUMS, RUN_FILE, STAGING, STATE, checksum, publish_files, write_text
from ebft.run.config.schema import RunConfig
from ebft.run.reporting import write_model_card
from ebft.run_files import CARD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ebft.trainer import OverTrainer

MARK = "ebft_final.json"  # step (null if not complete), files with sizes, and checksums of the model card
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_STAGED = re.compile(r"final|push|rehearsal|checkpoint-\d+(\.old)?")
_ALWAYS = (
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_model*.safetensors"),
    *(ADAPTER_CONFIG, "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", STATE, "training_args.bin", RUN_FILE),
)  # of the final model of any run; without the files of single tokenizers and the code of single models


def check_own(config: RunConfig) -> None:
    """Raise ConfigError if the output folder has files that the run would move or replace, and that no run wrote."""
    folder = Path(config.output_dir)
    named = config.resume_from_checkpoint
    resumes = config.auto_resume_from_checkpoints or named is not None
    with errors.doing(f"reading output_dir: {folder}"):
        found = _foreign(folder, config.adapter is None, resumes) if folder.is_dir() else []
    found = [name for name in found if named is None or os.path.realpath(folder / name) != os.path.realpath(named)]
    if not found:
        return
    names, others = errors.some_of(found), any(_CHECKPOINT.fullmatch(name) for name in found)
    advice = " To continue from a checkpoint of another program, set resume_from_checkpoint to it." if others else ""
    raise errors.ConfigError(
        f"output_dir: {folder} contains {names}, which this run would replace or move, and which no run has written "
        f"there. Set output_dir to a new folder, such as {folder / 'ebft-out'}, or move the files away.{advice}"
    )


def claim(folder: Path) -> None:
    """Begin a list of the final model's files, so that others' are recognised; warn of a README.md of others."""
    if not machine.is_main_process():
        return
    if not _mark(folder):
        write_mark(folder, None, {}, [])
    if not owns_card(folder):
        errors.warn(
            f"{folder / CARD} was not written by a run, or was edited, so it is kept and no model card is written."
        )


def write_mark(folder: Path, step: int | None, files: dict[str, int], cards: Iterable[int]) -> None:
    """Write the list of the files of the final model, and of the checksums that its card may have."""
    write_text(folder / MARK, json.dumps({"step": step, "files": files, "cards": [*cards]}, indent=2) + "\n")


def _mark(folder: Path) -> dict[str, Any]:
    return run_files.read_object(folder / MARK) or {}


def listed(folder: Path) -> dict[str, int]:
    """The files of the final model in `folder`, with their sizes, also of one that is not complete."""
    return _mark(folder).get("files", {})


def final_step(folder: Path) -> int | None:
    """The step of the final model in `folder`; None if there is none or if files are missing or truncated."""
    mark = _mark(folder)
    try:
        complete = all((folder / name).stat().st_size == size for name, size in mark["files"].items())
        return mark["step"] if complete else None
    except (OSError, KeyError):
        return None


def cards(folder: Path) -> list[int]:
    """The checksums that the model card of the final model in `folder` may have."""
    return _mark(folder).get("cards", [])


def owns_card(folder: Path) -> bool:
    """Whether README.md in `folder` is the card of a run and was not edited, or does not exist."""
    card = folder / CARD
    return not os.path.lexists(card) or (card.is_file() and checksum(card) in cards(folder))


def final_files(folder: Path) -> list[Path]:
    """All files of the final model of an earlier run in `folder`, its model card as the last one, but not the list."""
    found = [path for name in sorted(listed(folder)) if (path := folder / name).is_file()]
    return [*found, folder / CARD] if found and (folder / CARD).is_file() and owns_card(folder) else found


def _foreign(folder: Path, writes_config: bool, resumes: bool) -> list[str]:
    """The names of files that a run would replace or move, and that no run has listed or written."""
    has_mark, known = bool(_mark(folder)), listed(folder)
    names = [*_ALWAYS, "config.json"] if writes_config else _ALWAYS
    records = {run_files.RUN, run_files.START, run_files.METRICS, run_files.HEALTH}
    records |= {path.name for path in run_files.rollout_files(folder)}
    found = []
    for path in sorted(folder.iterdir()):
        name = path.name
        if _CHECKPOINT.fullmatch(name):
            inside = {each.name for each in path.iterdir()} if path.is_dir() else {"a file"}
            is_own = not inside or bool(inside & {RUN_FILE, CHECKSUMS, *([STATE] if resumes or has_mark else [])})
        elif name == STAGING:
            is_folder = path.is_dir() and not path.is_symlink()
            is_own = is_folder and all(_STAGED.fullmatch(each.name) for each in path.iterdir())
        elif name == run_files.PREVIOUS:
            is_own = path.is_dir()
        elif name == run_files.EVALUATION:  # also of `ebft evaluate` before a run, as the report is
            is_own = "models" in (run_files.read_object(path) or {})
        elif name == run_files.REPORT:
            is_own = run_files.is_report(path)
        elif name in records:
            is_own = has_mark
        else:
            is_own = name in known or not any(fnmatch(name, pattern) for pattern in names)
        found += [] if is_own else [name]
    return found


LOCK = ".ebft.lock"


@contextmanager
def output_lock(output_dir: Path) -> Iterator[None]:
    """Hold the lock of `output_dir` on the main process; the operating system releases it when the process dies.

    Raises ConfigError if another run holds it. A file system without locks is a warning: a lock that is only a file, as
    filelock would use there, remains when a process is killed, and then keeps every later run on other machines out.
    """
    if not machine.is_main_process():
        yield
        return
    lock = FileLock(output_dir / LOCK, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        run = run_files.read_run(output_dir)
        owner = f" (process {run.get('pid')} on {run.get('host')})" if run_files.state_of(run) == "running" else ""
        raise errors.ConfigError(
            f"output_dir: {output_dir} is used by another run{owner}. Choose another one."
        ) from None
    except (OSError, NotImplementedError) as error:
        errors.warn(f"output_dir: {output_dir} cannot be locked ({error}), so another run in it would not be detected.")
        yield
        return
    try:
        yield
    finally:
        lock.release()


def wait_until_free(output_dir: Path, seconds: float) -> None:
    """Wait for a run that is being killed to release the lock of `output_dir`, for at most `seconds`."""
    lock = FileLock(output_dir / LOCK, fallback_to_soft=False)
    with suppress(Timeout, OSError, NotImplementedError):  # reported by `output_lock`
        lock.acquire(timeout=seconds)
        lock.release()


def save_final(config: RunConfig, trainer: OverTrainer, metrics: Mapping[str, float]) -> None:
    """Save model, tokenizer, trainer state and model card in the output folder, then mark them as complete.

    Files of the final model of an earlier run are replaced or deleted. After an interruption, the model is not marked
    as complete. Raises SaveError if the files cannot be written.
    """
    from ebft.transformers_internals import save_final_weights

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
    """Move the model from `staged` to the output folder; meanwhile, both the old and the new files are listed."""
    paths = [path for path in sorted(staged.rglob("*")) if path.is_file() and path.name != CARD]  # which may be edited
    files, before = {str(path.relative_to(staged)): path.stat().st_size for path in paths}, listed(output_dir)
    others = [name for name in files if name not in before and os.path.lexists(output_dir / name)]
    if others:
        raise errors.SaveError(
            f"{output_dir} contains {', '.join(others)}, which the run has not written and does not replace. The model "
            f"is complete in {staged}, up to the next run in this folder: move it to another one."
        )
    if not owns_card(output_dir):
        (staged / CARD).unlink()
    card = [checksum(staged / CARD)] if (staged / CARD).is_file() else []
    write_mark(output_dir, None, before | files, [*cards(output_dir), *card])
    publish_files(staged, output_dir, [path for name in before if (path := output_dir / name).is_file()])
    write_mark(output_dir, step, files, card)


_ROWS = 8  # that are read to find whether replies end with the token


def declare_end_of_turn(
    config: RunConfig, model: Any, tokenizer: PreTrainedTokenizerBase, rows: Any
) -> list[Callable[[Path], None]]:
    """Add the end of turn that `rows` teach to the generation config, which is saved with a full model.

    For an adapter, the tokenizer's end of sequence is added too, as transformers does for a full model, and the list
    that is returned has a function that saves the generation config in its folder, for `ebft merge-lora`. Other
    programs do not read it there, so there is one warning, unless the tokenizer has the token as end of sequence.
    """
    from ebft.data.rendering import ChatTemplate
    from ebft.models.causal_lm import unwrap_adapter
    from ebft.models.pretrained import GENERATION_CONFIG

    causal_lm = unwrap_adapter(model)
    if config.streaming or not causal_lm.can_generate() or causal_lm.generation_config is None:
        return []
    settings = causal_lm.generation_config
    found = settings.eos_token_id
    known = [found] if isinstance(found, int) else list(found or [])
    end = ChatTemplate(tokenizer, kwargs=config.chat_template_kwargs).end_of_turn_id
    eos = tokenizer.eos_token_id
    first = range(min(_ROWS, len(rows)))
    is_taught = end not in (None, *known) and any(_is_taught(rows[index], end, {*known, eos}) for index in first)
    added = [end] if is_taught else []
    if config.adapter is not None and eos not in (None, *known, *added):
        added.append(eos)
    if not added:
        return []
    settings.eos_token_id = [*known, *added]
    if config.adapter is None:
        return []
    if is_taught and end != eos:
        token = tokenizer.convert_ids_to_tokens(end)
        errors.warn(
            f"special_tokens.eos_token: the chat template ends replies with {token}, which is not an end-of-sequence "
            "token of the base model, so generate() does not stop there with an adapter, except after ebft merge-lora "
            f"and in ebft inference. Set special_tokens.eos_token: {token}, which is saved with the tokenizer."
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
