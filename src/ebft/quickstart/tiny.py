"""The quickstart without a download: a small model of Python code, made here, then fine-tuned on docstrings.

Plain pretraining on source files of the standard library makes the base model; energy-based fine-tuning continues on
the docstrings of files that the base model never saw, and is measured on those of yet other files.
"""

import sys
from pathlib import Path

from ebft.config.load import load_config
from ebft.config.reference import changed_keys
from ebft.quickstart.base_model import save_random_model
from ebft.quickstart.corpus import PARTS, write_corpus
from ebft.quickstart.phases import Phases, make_once
from ebft.quickstart.run import CONFIGS, Run, own_copy, show_command
from ebft.quickstart.scale import SCALES, Scale
from ebft.run.training import train

OUTPUT = Path("outputs/quickstart-tiny")  # what the two configs name


def prepare(phases: Phases, output: Path, seed: int, scale_name: str) -> Run:
    """Write the text, pretrain the base model, and return the run that fine-tunes it."""
    scale = SCALES[scale_name]
    data, init, base = output / "data", output / "init", output / "base"
    base_file, overrides = CONFIGS / "tiny_base.yaml", base_overrides(output, scale)
    config = load_config(base_file, overrides)

    with phases.phase("data", "Text: the source of this machine's Python standard library"):
        made_from = [sys.version, scale.max_files, PARTS]
        make_once(data, made_from, lambda: write_corpus(data, scale.max_files))

    with phases.phase("init", "A tokenizer, and a small Llama with random weights"):
        made_from += [scale.vocab_size, scale.shape, config.sequence_len]
        make_once(init, made_from, lambda: save_random_model(init, data / "base.jsonl", scale, config.sequence_len))

    with phases.phase("base", "Base model: plain pretraining on source code"):
        made_from += [dict(changed_keys(config))]
        show_command(own_copy(base_file, output), overrides)
        make_once(base, made_from, lambda: train(config))

    config_file = own_copy(CONFIGS / "tiny.yaml", output)
    return Run(config_file, ebft_overrides(output, seed, scale), scale.groups, earlier={"base": config})


def base_overrides(output: Path, scale: Scale) -> list[str]:
    """What tiny_base.yaml does not say: another output folder, the test's sizes."""
    moved = [
        f"base_model={output / 'init'}",
        f"datasets.0.path={output / 'data' / 'base.jsonl'}",
        f"output_dir={output / 'base'}",
    ]
    return [*(moved if output != OUTPUT else []), *scale.base_overrides]


def ebft_overrides(output: Path, seed: int, scale: Scale) -> list[str]:
    """What tiny.yaml does not say: another output folder, another seed, the test's sizes."""
    moved = [
        f"base_model={output / 'base'}",
        f"datasets.0.path={output / 'data' / 'ebft.jsonl'}",
        f"test_datasets.0.path={output / 'data' / 'held_out.jsonl'}",
        f"output_dir={output / 'ebft'}",
    ]
    changed = [f"seed={seed}"] if seed else []
    return [*(moved if output != OUTPUT else []), *changed, *scale.ebft_overrides]
