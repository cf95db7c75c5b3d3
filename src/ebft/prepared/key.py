"""The key of prepared rows: a hash of everything that determines them."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.config.schema import RunConfig
from ebft.data.sources import source_fingerprint
from ebft.data.transforms.names import built_in, own_transform
from ebft.files import file_hash
from ebft.prepared.settings import row_settings

FORMAT = 1  # of the stored folder
# Entries of tokenizer_config.json about the place that the tokenizer was loaded from.
_PLACE = ("is_local", "local_files_only", "name_or_path")


def row_inputs(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Everything that determines the rows of a run, as JSON: settings, data, transforms, tokenizer, code.

    Raises DataError if a data source or a transform does not exist.
    """
    sources = transform_sources([entry.type for entry in (*config.datasets, *config.test_datasets)])
    inputs = {
        "format": FORMAT,
        "settings": row_settings(config, sources.values()),
        "data": data_fingerprints(config),
        "transforms": {name: _hash(source) for name, source in sorted(sources.items())},
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "code": own_code(),
    }
    return json.loads(json.dumps(inputs, default=str))


def data_fingerprints(config: RunConfig) -> list[dict[str, Any]]:
    """The fingerprint of each source of `datasets` and `test_datasets`."""
    return [source_fingerprint(entry) for entry in (*config.datasets, *config.test_datasets)]


def key_of(inputs: dict[str, Any]) -> str:
    """The key of rows with these inputs: 32 hexadecimal digits."""
    return _hash(json.dumps(inputs, sort_keys=True))[:32]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The hash of each file that saves the tokenizer, and of its chat template and its class."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        found = {path.relative_to(folder).as_posix(): _tokenizer_file(path) for path in paths}
    found["chat template"] = _hash(json.dumps(tokenizer.chat_template))
    source = inspect.getsourcefile(type(tokenizer))
    found["class"] = type(tokenizer).__name__ if source is None else file_hash(Path(source))
    return found


def _tokenizer_file(path: Path) -> str:
    if path.name != "tokenizer_config.json":
        return file_hash(path)
    values = json.loads(path.read_text(encoding="utf-8"))
    return _hash(json.dumps({name: value for name, value in values.items() if name not in _PLACE}, sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


_PACKAGE = Path(__file__).parents[1]
# Files of this package that rows depend on.
_OWN = ("data/**/*.py", "anchors.py", "models/tokenizer.py", "models/tokenizer.py", "models/templates/*.jinja")
_OWN += ("nemo_gym/keys.py",)
_LIBRARIES = ("ebft", "datasets", "transformers", "tokenizers", "jinja2")


def own_code() -> dict[str, str]:
    """The hash of the code of this package that makes rows, and the versions of the libraries that it uses."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in _OWN for path in _PACKAGE.glob(pattern)}):
        found.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {"data loading": found.hexdigest(), **{name: version(name) for name in _LIBRARIES}}


def transform_sources(names: list[str]) -> dict[str, str]:
    """The source of each module that the custom transforms among `names` are defined in or import.

    Modules that are imported by them are included unless they are installed packages, whose changes are not detected.
    Raises DataError if a transform does not exist.
    """
    own = {name: own_transform(name) for name in names if built_in(name) is None}
    return module_sources(
        module for name, function in own.items() for module in {name.rpartition(".")[0], function.__module__}
    )


def module_sources(names: Iterable[str]) -> dict[str, str]:
    """The source of each of these modules, and of those that they import, as in `transform_sources`."""
    sources: dict[str, str] = {}
    for name in names:
        _collect(name, sources)
    return sources


def _collect(name: str, sources: dict[str, str]) -> None:
    """Add the source of a module, and of those that it imports, to `sources`."""
    waiting = [name]
    while waiting:
        name = waiting.pop()
        path = _file_of(name)
        if name in sources or path is None:
            continue
        content = path.read_bytes()
        sources[name] = content.decode("utf-8-sig", errors="backslashreplace")
        if path.suffix == ".py":
            waiting += [other for other in _imported(content, name, path) if _is_local(other)]


def _file_of(name: str) -> Path | None:
    loaded = sys.modules.get(name)
    try:
        origin = loaded.__file__ if isinstance(loaded, ModuleType) else find_spec(name).origin
    except (ImportError, AttributeError, ValueError):  # no such module, or one without a file
        return None
    path = Path(origin) if origin else None
    return path if path is not None and path.is_file() else None


def _imported(source: bytes, name: str, path: Path) -> Iterator[str]:
    """The names of the modules that a source imports; some may be functions. A source with a syntax error has none."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # a module that is not imported when the transform runs
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _is_local(name: str) -> bool:
    """Whether a module is neither of Python, nor of this package, nor installed: by its file, since a name of Python's
    library may be that of a local file."""
    top = name.partition(".")[0]
    if top in ("ebft", "") or _is_installed(_file_of(top)):
        return False
    path = _file_of(name)
    return path is not None and not _is_installed(path)


def _is_installed(path: Path | None) -> bool:
    folders = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return path is not None and any(path.resolve().is_relative_to(folder) for folder in folders)
