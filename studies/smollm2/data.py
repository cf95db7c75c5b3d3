"""The data: translation_PART.jsonl for every part, of which no two share a catalog or an English text.

Messages of French catalogs in wheels of the package index, which are read as they are. Parts are `train` and `warm`
(for the warm start), `validation`, `test`, on which models are measured, and `long`, test documents that are long
enough for long rollouts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cells import HERE, ROWS, TINY_ROWS, Study, config_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.presets import train_tokenizer
from ebft.tools.quickstart import smollm2 as catalogs
from ebft.tools.quickstart.run import fingerprint
from ebft.tools.quickstart.smollm2 import Wheel

Row = dict[str, Any]

MOST_OF_A_FILE = {"train": 16, "warm": 16, "validation": 2, "test": 2, "long": 2}  # rows of one source file
MOST_OF_A_PACKAGE = 0.5  # of the rows of a part; a package is the first part of a file's path
PROMPT, SHORTEST, LONGEST, LONG = 96, 16, 72, 64  # tokens: most of a prompt; of a completion; above it, it is long

# Applications with a French translation: the part that they belong to, wheel, version, checksum, licence.
APPLICATIONS = """
train pretix 2026.8.0 a78932e698778d873530d67f25a57c28d1c09b1bfb1a22ec817c00d90397db85 AGPL-3.0
train indico 3.2.9 194d2e31ccaabd2b9af7809e67d60d942faee35a6b4de36f0c2c280a32ed84c3 MIT
train pretalx 2025.2.2 39e99ae2c8ad4a6a17d2ee022fc52369a0ac398762cac537de7833c664828440 AGPL-3.0
train plone.app.locales 7.0.4 de96a5d0dc1fe5ab540fa6f993805c09da80a9518aa7a309e8cd1f433e3ae6aa GPL-2.0
train horizon 27.0.0 8a981dae4fb6626e71553aa185f6e429b0b1efb86b04b0a72c3b18ee04f1f990 Apache-2.0
train wagtail 8.0.1 1e6ad5c7891a54efce1400e168298b5a2cc343b642cee89c31bf5ec30c98b26c BSD-3-Clause
validation sphinx 9.0.4 5bebc595a5e943ea248b99c13814c1c5e10b3ece718976824ffa7959ff95fffb BSD-2-Clause
validation django-oscar 4.2.1 adbb95ea0130859c204cc6fb221052d6d437ecbaa90800e8418a809f72645e9c BSD-3-Clause
test spyder 6.1.8 4da836742a7138c93392a8a0bd1a5ff40002cf92d217ef0e7bed11b522322f90 MIT
test ckan 2.12.0 3b41cb4860286813fbcd18c57341e96edba266e2e492aeea92c4e03ce9e2934e AGPL-3.0
test Django 5.2.19 5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00 BSD-3-Clause
test django-allauth 65.21.1 7bdf018c9f3f0a32c80677f84e7777272d9c833b180bd6734314c4831c802a9e MIT
"""


def make_data(study: Study) -> dict[str, str]:
    """Make the data, and the base model of `tiny`, unless they are there; the fingerprints of the measured parts.

    Raises ValueError where the stored results were measured on other documents.
    """
    from ebft import load_config
    from ebft.models.pretrained import load_tokenizer

    folder, new = study.output / "data", study.output / "data.new"
    if study.is_tiny and not Path(study.base_model, "config.json").exists():
        tokenizer = train_tokenizer(HERE / "tiny" / "train.po", 512)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
        tokens = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
        tokenizer.save_pretrained(study.base_model)
        LlamaForCausalLM(LlamaConfig(**shape, **tokens, max_position_embeddings=1024)).save_pretrained(study.base_model)
    if not folder.exists():
        tokenizer = load_tokenizer(load_config(config_file("sft"), [f"base_model={study.base_model}"]))
        parts = translations(study, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
        for part, rows in parts.items():
            write_rows(new / f"translation_{part}.jsonl", rows)
        new.rename(folder)
    names = [f"translation_{part}" for part in ("validation", "test", "long")]
    made_from = {name: fingerprint((folder / f"{name}.jsonl").read_text(encoding="utf-8")) for name in names}
    stored = study.results / "documents.json"
    if not stored.exists():
        sources = {name: [row["file"] for row in read_rows(folder / f"{name}.jsonl")] for name in names}
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps({"made_from": made_from, "sources": sources}, indent=1), encoding="utf-8")
    known = json.loads(stored.read_text(encoding="utf-8"))["made_from"]
    if others := [name for name in names if known[name] != made_from[name]]:
        raise ValueError(
            f"{', '.join(others)} in {folder}: other documents than the ones of the results in {study.results}. "
            "Move the folder away to make them again, or keep results of your own: --results FOLDER"
        )
    return made_from


def translations(study: Study, count: Callable[[str], int]) -> dict[str, list[Row]]:
    """Messages of the applications of each part; an English text that two have stays with the first of the two."""
    found: dict[str, list[Row]] = {}
    seen: set[str] = set()
    for part in ("test", "validation", "train"):
        if study.is_tiny:
            files = [(part, {"fr.po": (HERE / "tiny" / f"{part}.po").read_text(encoding="utf-8")})]
        else:
            wheels = [Wheel(*fields) for of, *fields in map(str.split, APPLICATIONS.split("\n")[1:-1]) if of == part]
            files = [(wheel.name, catalogs.french(wheel)) for wheel in wheels]
        rows = [row for application in files for row in catalogs.rows(*application)]
        found[part] = list({row["input"]: row for row in rows if row["input"] not in seen}.values())
        seen |= {row["input"] for row in rows}
    prompt, longest, long = (160, 160, 24) if study.is_tiny else (PROMPT, LONGEST, LONG)
    fits = lambda row: count(row["input"]) <= prompt and SHORTEST <= count(row["output"]) <= longest
    of_long = [row for row in found["test"] if count(row["output"]) > long]
    return chosen_parts({**{part: list(filter(fits, rows)) for part, rows in found.items()}, "long": of_long}, study)


def chosen_parts(found: dict[str, list[Row]], study: Study) -> dict[str, list[Row]]:
    """As many rows of every part as the study has; the first of the training rows are the warm start's."""
    chosen, rows = {}, dict(zip(MOST_OF_A_FILE, TINY_ROWS if study.is_tiny else ROWS))
    for part in ("validation", "test", "long"):
        chosen[part] = spread(found[part], rows[part], MOST_OF_A_FILE[part])
        # Batches of documents of like lengths have little padding.
        chosen[part].sort(key=lambda row: len(row.get("input", "")) + len(row.get("output", "")))
    trained = spread(found["train"], rows["train"] + rows["warm"], MOST_OF_A_FILE["train"])
    warm = len(trained) * rows["warm"] // (rows["train"] + rows["warm"])
    files = list(dict.fromkeys(row["file"] for row in trained))  # whole files, so that the two share none
    number_of = lambda file: hashlib.blake2b(file.encode(), digest_size=8).digest()
    order = {file: number for number, file in enumerate(sorted(files, key=number_of))}
    trained.sort(key=lambda row: order[row["file"]])
    while 0 < warm < len(trained) and trained[warm]["file"] == trained[warm - 1]["file"]:
        warm += 1
    return {**chosen, "warm": trained[:warm], "train": trained[warm:]}


def spread(rows: list[Row], wanted: int, most: int) -> list[Row]:
    """`wanted` rows, at most `most` of a file and half of a package, in an order that only texts decide."""
    of_file: dict[str, int] = {}
    of_package: dict[str, int] = {}
    chosen = []
    text = lambda row: (row.get("input", "") + row.get("text", "")).encode()
    for row in sorted(rows, key=lambda row: hashlib.blake2b(text(row), digest_size=8).hexdigest()):
        file, package = row["file"], row["file"].partition("/")[0]
        if of_file.get(file, 0) < most and of_package.get(package, 0) < max(1, MOST_OF_A_PACKAGE * wanted):
            of_file[file] = of_file.get(file, 0) + 1
            of_package[package] = of_package.get(package, 0) + 1
            chosen.append(row)
    return chosen[:wanted]


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_rows(path: Path, rows: list[Row]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
