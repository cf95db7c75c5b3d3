"""The quickstart of a real model: SmolLM2-135M-Instruct learns to translate French messages of programs.

The text is the French catalogs of open-source programs, with their English originals, read from pinned wheels of the
package index. The model is measured on another program than those that it is trained on, and no message is in both.
In its rows, `input` is `English: TEXT\\nFrench:`, a plain format whose completion ends with its line, `output` is
` TEXT\\n`, and `file` is the source file of the message, which is the unit of the intervals.
Prompts have at most MOST_PROMPT tokens and translations OUTPUT_TOKENS, so that a step of training takes seconds on two
cores.
"""

import ast
import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebft.errors import FetchError, ModelError
from ebft.machine import bfloat16_is_fast
from ebft.models.pretrained import load_tokenizer
from ebft.run.config.schema import load_config
from ebft.tools.fetch import fetch_model, fetch_wheel
from ebft.tools.quickstart.run import CONFIGS, Phases, Run, console, fingerprint, make_once, moved, own_copy

PROMPT = "English: {}\nFrench:"
FEWEST_WORDS = 4
MARKUP = re.compile(r"<[a-zA-Z/!][^>]*>|&[a-z]+;|\{%|\{\{|\$\{|```|https?://|\[\[|\]\(")
PLACEHOLDER = re.compile(r"%\([^)]*\)[sdr]|%[sdr]|\{[^}]*\}|\$\w+")
MOST_PLACEHOLDERS = 2


@dataclass(frozen=True)
class Wheel:
    """A file of the package index, by version and checksum."""

    name: str
    version: str
    sha256: str
    licence: str


def french(wheel: Wheel) -> dict[str, str]:
    """Path in the wheel -> text, of its French gettext catalogs."""
    with zipfile.ZipFile(fetch_wheel(wheel.name, wheel.version, wheel.sha256)) as archive:
        names = [name for name in sorted(archive.namelist()) if name.endswith(".po")]
        found = [name for name in names if {"fr", "fr_FR"} & set(Path(name).parts)]
        return {name: archive.read(name).decode("utf-8") for name in found}


@dataclass
class Message:
    """One entry of a .po file."""

    english: str = ""
    french: str = ""
    places: list[str] = field(default_factory=list)  # of its source, as file:line
    default: str = ""  # the English text, where the id is a name (Zope's `Default: "..."`)
    is_usable: bool = True  # neither fuzzy nor obsolete nor a plural


def messages(text: str) -> Iterator[Message]:
    """The entries of a .po file, which blank lines separate."""
    for block in re.split(r"\n\s*\n", text):
        message, target, default = Message(), "", []
        for line in block.split("\n"):
            line = line.strip()
            if line.startswith("#:"):
                message.places += line[2:].split()
            elif line.startswith("#."):
                default.append(line[2:].strip())
            elif line.startswith(("#,", "#~", "#|")):
                message.is_usable &= not (line.startswith("#~") or "fuzzy" in line)
            elif line.startswith(("msgid_plural", "msgstr[")):
                message.is_usable = False
            elif line.startswith(("msgctxt", "msgid", "msgstr")):
                target, _, line = line.partition(" ")
            if line.startswith('"'):
                text = ast.literal_eval(line)
                message.english += text if target == "msgid" else ""
                message.french += text if target == "msgstr" else ""
        found = re.search(r'Default: "(.*)"', " ".join(default))
        message.default = found.group(1).replace('\\"', '"') if found else ""
        if message.english:
            yield message


def row_of(message: Message, app: str, catalog: str) -> dict[str, Any] | None:
    """The message as a row; None where it is no plain sentence of both languages."""
    english, french = (message.default or message.english).strip(), message.french.strip()
    if not message.is_usable or len(english.split()) < FEWEST_WORDS or not french or english == french:
        return None
    if any("\n" in text or "\t" in text or MARKUP.search(text) for text in (english, french)):
        return None
    if len(PLACEHOLDER.findall(english)) > MOST_PLACEHOLDERS:
        return None
    place = message.places[0].rpartition(":")[0] or message.places[0] if message.places else catalog
    return {"input": PROMPT.format(english), "output": f" {french}\n", "app": app, "file": f"{app}/{place}"}


def rows(app: str, catalogs: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Rows of an application's catalogs, each English text once."""
    seen = set()
    for catalog, text in catalogs.items():
        for message in messages(text):
            row = row_of(message, app, catalog)
            if row is not None and row["input"] not in seen:
                seen.add(row["input"])
                yield row


NAME = "smollm2"
OUTPUT = Path("outputs/quickstart")  # what smollm2.yaml names
CONFIG = CONFIGS / "smollm2.yaml"

# Under licences that permit any use, 22 MB in all.
PROGRAMS = {
    "held_out": (
        Wheel("Django", "5.2.19", "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00", "BSD-3-Clause"),
    ),
    "train": (
        Wheel("horizon", "27.0.0", "8a981dae4fb6626e71553aa185f6e429b0b1efb86b04b0a72c3b18ee04f1f990", "Apache-2.0"),
        Wheel("wagtail", "8.0.1", "1e6ad5c7891a54efce1400e168298b5a2cc343b642cee89c31bf5ec30c98b26c", "BSD-3-Clause"),
    ),
}
MOST_PROMPT, OUTPUT_TOKENS = 60, (8, 40)
GROUPS = 8  # of 8 held-out messages each
TEST = {"groups": 2, "overrides": ["max_steps=2", "micro_batch_size=2", "warmup_steps=1"]}


def prepare_smollm2(phases: Phases, output: Path, seed: int, model: str, scale: str) -> Run:
    """Fetch the model (NAME, a folder or a hub id) and the catalogs, write the rows, and return the run to train."""
    full = scale == "full"
    overrides = [*config_overrides(output, seed, model), *([] if full else TEST["overrides"])]
    config = load_config(CONFIG, overrides)

    with phases.phase("model", "Model: SmolLM2-135M-Instruct" if model == NAME else f"Model: {model}"):
        if model == NAME:
            with without_a_download():
                console.print(f"In {fetch_model(config.base_model)}")
        tokenizer = load_tokenizer(config)

    with phases.phase("data", "Text: French messages of programs, and the same in English"):
        data, tokens = output / "data", fingerprint(tokenizer.get_vocab())
        wheels = [wheel.sha256 for part in PROGRAMS.values() for wheel in part]
        made_from = [wheels, config.base_model, tokens, MOST_PROMPT, OUTPUT_TOKENS]
        with without_a_download():
            make_once(data, made_from, lambda: write_task_rows(data, tokenizer))
    return Run(own_copy(CONFIG, output), overrides, GROUPS if full else TEST["groups"])


@contextmanager
def without_a_download() -> Iterator[None]:
    """Adds to a FetchError, or a ModelError for a missing package, the command that needs no download."""
    try:
        yield
    except (FetchError, ModelError) as error:
        raise type(error)(f"{error}\nWithout a download: ebft quickstart --model tiny") from error


def config_overrides(output: Path, seed: int, model: str) -> list[str]:
    """What smollm2.yaml does not say: another model, output folder or seed, the number type that is fast here."""
    data = {"datasets.0.path": "data/train.jsonl", "test_datasets.0.path": "data/held_out.jsonl"}
    return [
        *([f"base_model={model}"] if model != NAME else []),
        *moved(output, OUTPUT, {**data, "output_dir": "ebft"}),
        *([f"seed={seed}"] if seed else []),
        *([] if bfloat16_is_fast() else ["torch_dtype=float32"]),
    ]


def write_task_rows(folder: Path, tokenizer: Any) -> None:
    """Write train.jsonl and held_out.jsonl with rows {input, output, app, file}."""
    seen: set[str] = set()
    folder.mkdir(parents=True, exist_ok=True)
    for part, wheels in PROGRAMS.items():  # what is held out comes first: its messages are not trained on
        kept = []
        for row in (row for wheel in wheels for row in rows(wheel.name, french(wheel))):
            # With the languages exchanged: the model writes English far better than French.
            english = row["input"].removeprefix("English: ").removesuffix("\nFrench:")
            row |= {"input": f"French: {row['output'].strip()}\nEnglish:", "output": f" {english}\n"}
            if seen & {row["input"], row["output"]}:
                continue
            seen |= {row["input"], row["output"]}
            prompt, translation = (len(tokenizer(row[column]).input_ids) for column in ("input", "output"))
            if prompt <= MOST_PROMPT and OUTPUT_TOKENS[0] <= translation <= OUTPUT_TOKENS[1]:
                kept.append(row)
        # An order that does not follow the files.
        kept.sort(key=lambda row: hashlib.blake2b(row["input"].encode(), digest_size=8).digest())
        names = " and ".join(wheel.name for wheel in wheels)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in kept]
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        console.print(f"{part}.jsonl: {len(kept)} messages of {names}")
