"""The strided EBFT trainer that axolotl 0.19.0 published, from its wheel, for comparison on the same document.

Two files of the wheel are loaded, `strided.py` and `rewards.py`, unchanged. What else they import of axolotl takes
part in no step (training-loop mixins, a logger, kernels that are imported and not called) and is stood in for.
"""

from __future__ import annotations

import copy
import importlib
import logging
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from benchmarks.presets import OPTIONS
from ebft.features import feature_depths

VERSION = "0.19.0"
CACHE = Path(__file__).parent / ".cache"
PACKAGE = "axolotl.core.trainers.ebft"
FILES = ("strided.py", "rewards.py")
MIXINS = ("DistributedParallelMixin", "RngLoaderMixin", "SchedulerMixin")
OPTIMIZER_MIXINS = ("OptimizerInitMixin", "OptimizerMixin")
KERNELS = ("fused_cosine_similarity", "fused_diversity_penalty", "fused_log_softmax_gather", "fused_reinforce_loss")


class NotAvailable(Exception):
    """The published trainer can not be had here; the message says why, in one line."""


def build_trainer(trainer_class: type[Trainer], model: nn.Module, args: TrainingArguments) -> Trainer:
    """The published trainer with the options of the benchmark. Raises NotAvailable where its constructor fails."""
    for name, value in OPTIONS.items():
        setattr(args, f"ebft_{name}", value)
    try:
        if torch.cuda.is_available():
            trainer = trainer_class(model, args, None)
        else:
            trainer = type("WithoutCuda", (trainer_class,), {"__init__": _init_without_cuda})(model, args)
    except Exception as error:
        raise NotAvailable(f"its constructor failed ({type(error).__name__}: {error})") from error
    trainer.state.global_step = 1  # it logs at multiples of logging_steps
    return trainer


def load_trainer(wheel: Path | None = None) -> type[Trainer]:
    """`AxolotlStridedEBFTTrainer` from `wheel`, or else from the package registry. Raises NotAvailable."""
    wheel = wheel or download()
    folder = CACHE / PACKAGE
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in FILES:
                source = archive.read(f"{PACKAGE.replace('.', '/')}/{name}")
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(source)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise NotAvailable(f"{wheel} is no wheel of axolotl {VERSION} ({error})") from error
    with _stand_ins(folder):
        try:
            return importlib.import_module(f"{PACKAGE}.strided").AxolotlStridedEBFTTrainer
        except ImportError as error:
            raise NotAvailable(f"it does not import here ({error})") from error


def download() -> Path:
    """The wheel in the cache, fetched with pip if it is not there yet."""
    if not list(CACHE.glob(f"axolotl-{VERSION}-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
        what = ["--no-deps", "--only-binary", ":all:", "--dest", str(CACHE), f"axolotl=={VERSION}"]
        done = subprocess.run([*pip, *what], capture_output=True, text=True)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise NotAvailable(f"pip can not download it ({lines[-1] if lines else 'no reason given'})")
    return next(CACHE.glob(f"axolotl-{VERSION}-*.whl"))


@contextmanager
def _stand_ins(folder: Path) -> Iterator[None]:
    """Inside the block `axolotl` is these stand-ins, with the two files of `folder` where the wheel has them."""
    parts = PACKAGE.split(".")
    packages = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)] + ["axolotl.utils"]
    modules = {name: ModuleType(name) for name in packages}
    for module in modules.values():
        module.__path__ = []
    modules[PACKAGE].__path__ = [str(folder)]
    contents = {
        f"{PACKAGE}.kernels": dict.fromkeys(KERNELS),
        "axolotl.core.trainers.mixins": {name: type(name, (), {}) for name in MIXINS},
        "axolotl.core.trainers.mixins.optimizer": {name: type(name, (), {}) for name in OPTIMIZER_MIXINS},
        "axolotl.utils.logging": {"get_logger": logging.getLogger},
    }
    for name, content in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "axolotl"}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "axolotl"]:
            del sys.modules[name]
        sys.modules.update(before)


def _init_without_cuda(self: Any, model: nn.Module, args: TrainingArguments) -> None:
    """What the published constructor sets, which itself moves the feature network to a GPU, with dense masks."""
    Trainer.__init__(self, model=model, args=args)
    for name in ("alignment_coef", "diversity_coef", "rl_coef", "top_p"):
        setattr(self, f"ebft_{name}", 1.0)
    self.ebft_ce_coef, self.ebft_min_completion_prefix = 0.0, 0
    self.ebft_advantage_estimator, self.ebft_embed_method = "rloo", "last_token"
    self.ebft_n_samples = OPTIONS["n_samples_per_prompt"]
    for name in ("stride", "context_length", "generate_max_len", "temperature", "use_whitening"):
        setattr(self, f"ebft_{name}", OPTIONS[name])
    self.feature_layer_indices = feature_depths(OPTIONS["feature_layers"], model.config.num_hidden_layers)
    self.use_flex_attention, self._num_heads = False, None
    model.config._attn_implementation = "eager"
    self._share_feature_weights = hasattr(model, "disable_adapter")
    self._feature_device, self._feature_use_flex = torch.device("cpu"), False
    self.feature_network = None if self._share_feature_weights else copy.deepcopy(model).requires_grad_(False).eval()


if __name__ == "__main__":
    try:
        print(download())
    except NotAvailable as reason:
        sys.exit(f"axolotl {VERSION} cannot be had: {reason}")
