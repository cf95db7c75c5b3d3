"""What a whole step of `ebft train` takes beside its loss and gradients: data, optimizer, logging."""

from __future__ import annotations

import contextlib
import io
import json
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from accelerate import Accelerator

import ebft
from benchmarks.measuring import timed
from benchmarks.presets import OPTIONS, Preset, build_model, train_tokenizer
from ebft.run.config.schema import RunConfig
from ebft.strided import StridedEBFTTrainer

WARM_UP = 2  # steps that are left out


def train_overhead(preset: Preset, dtype: str, length: int, steps: int, folder: Path) -> dict[str, float]:
    """Medians of whole steps of `ebft.train`, and of their losses and gradients (`inside`), after the first two."""
    starts: list[float] = []
    inside: list[float] = []
    compute_loss, backward = StridedEBFTTrainer.compute_loss, Accelerator.backward

    def timed_loss(self, *args, **kwargs):
        starts.append(time.perf_counter())
        loss, seconds = timed(lambda: compute_loss(self, *args, **kwargs), self.accelerator.device)
        inside.append(seconds)
        return loss

    def timed_backward(self, *args, **kwargs):
        inside[-1] += timed(lambda: backward(self, *args, **kwargs), self.device)[1]

    said = io.StringIO()  # its log lines are not those of the benchmark
    with (
        patch.object(StridedEBFTTrainer, "compute_loss", timed_loss),
        patch.object(Accelerator, "backward", timed_backward),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        ebft.train(_config(preset, dtype, length, steps, folder))
    whole = [after - before for before, after in zip(starts, starts[1:])][WARM_UP:]
    inside = inside[WARM_UP:-1]
    ratio = median(w / i for w, i in zip(whole, inside))
    return {"length": length, "steps": len(whole), "whole": median(whole), "inside": median(inside), "ratio": ratio}


def library() -> list[str]:
    """The texts of the standard library's modules."""
    return [path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]


def write_texts(folder: Path, texts: list[str]) -> Path:
    """A JSONL file of texts."""
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return folder / "texts.jsonl"


def _config(preset: Preset, dtype: str, length: int, steps: int, folder: Path) -> RunConfig:
    """A run on text of the standard library from the preset's model, both saved in `folder`."""
    base, texts = folder / "base", library()
    data = write_texts(folder, [text[: 16 * length] for text in texts if len(text) > 16 * length])  # some a token
    train_tokenizer(data, preset.shape["vocab_size"]).save_pretrained(base)
    # Without an adapter, which is the config's to make.
    build_model(replace(preset, lora_rank=None), getattr(torch, dtype), length).save_pretrained(base)
    adapter = {"adapter": "lora", "lora_r": preset.lora_rank, "lora_target_linear": True}
    return RunConfig.from_dict(
        {
            "base_model": str(base),
            "rl": "ebft",
            "ebft": {"mode": "strided", **OPTIONS},
            "datasets": [{"path": str(data), "type": "ebft_pretrain.transform"}],
            "sequence_len": length,
            "micro_batch_size": 1,
            "max_steps": steps,
            "learning_rate": 1e-5,
            "bf16": dtype == "bfloat16",
            "save_strategy": "no",
            "output_dir": str(folder / "out"),
            **(adapter | {"lora_alpha": 2 * preset.lora_rank} if preset.lora_rank else {}),
        }
    )
