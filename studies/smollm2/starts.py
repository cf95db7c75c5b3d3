"""What all cells share, made once: the base model of `tiny`, the data, and a warm start for each task."""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import project
import settings
import sources
import stored
from cells import TASKS
from corpus import PARTS, token_counter, write_corpus
from job import without_paths
from rows import read_rows, write_rows
from scale import WARM_THREADS, Scale
from settings import Place

from ebft.tools.quickstart.run import console, fingerprint, make_once

MAKERS = [
    *(project.HERE / f"{name}.py" for name in ("corpus", "rows", "python_code", "sources", "verifiers")),
    project.ROOT / "src" / "ebft" / "tools" / "quickstart" / "catalogs.py",
]


def make_data(place: Place, scale: Scale, results: Path) -> tuple[Place, dict[str, str]]:
    """Base model and data; the fingerprints of both, by the names of files ("base" is the model's)."""
    data = place.output / "data"
    if scale.is_tiny:
        place = Place(place.output, str(place.output / "base"))
        make_once(place.output / "base", [scale.shape, scale.vocab_size], lambda: make_tiny(place, scale))
    made_from = [path.read_text(encoding="utf-8") for path in MAKERS]
    made_from += [sys.version, [version(name) for name in sources.PACKAGES if not scale.is_tiny]]
    console.print("[bold]Data: installed Python sources, French catalogs")
    make_once(data, [*made_from, str(scale)], lambda: write_corpus(data, scale, token_counter(tokenizer_of(place))))
    names = [f"{task}_{part}" for task in TASKS for part in PARTS]
    found = {name: fingerprint((data / f"{name}.jsonl").read_text(encoding="utf-8")) for name in names}
    write_documents(data, results, found)
    return place, {**found, "base": weights_fingerprint(place)}


def write_documents(data: Path, results: Path, made_from: dict[str, str]) -> None:
    """The source of every document that models are measured on, which intervals need, and how many rows there are."""
    names = [f"{task}_{part}" for task in TASKS for part in ("validation", "test", "long")]
    sources_of = {name: [row["file"] for row in read_rows(data / f"{name}.jsonl")] for name in names}
    rows = {path.stem: len(read_rows(path)) for path in sorted(data.glob("*.jsonl"))}
    copies = near_copies(read_rows(data / "raw_train.jsonl"), read_rows(data / "raw_test.jsonl"))
    found = {"rows": rows, "made_from": {name: made_from[name] for name in sources_of}, "sources": sources_of}
    found["near_copies"] = copies
    if stored.read(results / "documents.json") != found:
        stored.write_json(results / "documents.json", found)


def near_copies(train: list[dict[str, Any]], test: list[dict[str, Any]]) -> list[int]:
    """The numbers of the test pieces that share more than half of their longer lines with training, as licences do."""
    lines = lambda row: [line.strip() for line in row["text"].splitlines() if len(line.strip()) > 25]
    known = {line for row in train for line in lines(row)}
    shares = [[line in known for line in lines(row)] for row in test]
    return [number for number, share in enumerate(shares) if sum(share) > len(share) / 2]


def make_warm(place: Place, scale: Scale, task: str, made_from: dict[str, str]) -> None:
    """The adapter of a task's warm start: SFT on rows that nothing else is trained on."""
    from ebft import load_config, train

    mark = [made_from["base"], made_from[f"{task}_warm"], without_paths("sft"), scale.warm_steps]
    config = load_config(settings.config_file("sft"), settings.warm_overrides(place, scale, task))
    console.print(f"[bold]Warm start: SFT, {task}")

    def make() -> None:
        import torch

        stored.empty_unless(place.warm(task), fingerprint(mark), "training.txt")
        threads = torch.get_num_threads()
        torch.set_num_threads(WARM_THREADS)
        try:
            train(config)
        finally:
            torch.set_num_threads(threads)

    make_once(place.warm(task), mark, make)


def make_tiny(place: Place, scale: Scale) -> None:
    """A tokenizer and random weights for `tiny`."""
    from python_code import python_files

    from ebft.tools.quickstart.tiny import save_random_model

    texts = place.output / "base" / "texts.jsonl"
    write_rows(texts, [{"text": text} for text in python_files(scale.max_files).values()])
    save_random_model(place.output / "base", texts, scale, positions=1024)


def tokenizer_of(place: Place) -> Any:
    """The base model's tokenizer."""
    from ebft import load_config
    from ebft.models.tokenizer import load_tokenizer

    return load_tokenizer(load_config(settings.config_file("sft"), [f"base_model={place.base_model}"]))


def weights_fingerprint(place: Place) -> str:
    """Of the base model's weights in bfloat16, in which they are used, whatever type they are stored in."""
    import torch

    from ebft import load_config
    from ebft.models.load import load_base_model

    config = load_config(settings.config_file("sft"), [f"base_model={place.base_model}"])
    found = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(load_base_model(config, tokenizer_of(place)).state_dict().items()):
        found.update(name.encode())
        found.update(weight.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return found.hexdigest()
