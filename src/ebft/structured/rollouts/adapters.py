"""Sending the policy's LoRA adapter to a vLLM server: every version has a unique name and a separate folder.

Names and folders are never reused, so the server cannot serve a stale cache for them. A folder gets its final name only
when it is complete.
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import Tensor

from ebft.errors import RolloutError, told
from ebft.files import allow_readers
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.sharding import reshard, whole_trained_weights
from ebft.structured.rollouts.client import VLLMClient
from ebft.transformers_internals import name_in_checkpoint

_FOLDER, _PEFT = "vllm_adapters", "base_model.model."


@dataclass(frozen=True)
class Version:
    """A version of the policy's adapter on the server: its name, its folder, and the optimizer step of its weights."""

    name: str
    path: str
    step: int


class AdapterSync:
    """Publishes versions of a PEFT model's adapter, and removes those that are no longer used for sampling.

    All processes must call `publish` together; the main process saves, loads and deletes. Each process holds the
    versions that it still samples from, and a copy of their weights. Names contain an id of this run, so adapters that
    an earlier run left on the server do not conflict.
    """

    def __init__(self, client: VLLMClient, model: Any, accelerator: Any, output_dir: str) -> None:
        self._client, self._model, self._accelerator = client, model, accelerator
        self._root = Path(output_dir).absolute() / _FOLDER
        self._run: str | None = None
        self._held: Counter[Version] = Counter()
        self._live: list[Version] = []
        self._weights: dict[Version, list[Tensor]] = {}
        self._other_names: set[str] = set()
        self._other_names_lock = threading.Lock()
        self.current: Version | None = None

    def publish(self, step: int) -> Version:
        """Save the adapter of optimizer step `step`, load it on the server, and make it the current version.

        Raises RolloutError on all processes if this fails on the main process.
        """
        outcome: list[Any] = [None]
        whole = whole_trained_weights(self._model)
        if self._accelerator.is_main_process:
            try:
                outcome = [self._publish(step, whole)]
            except Exception as error:  # any error: the other processes wait for the outcome
                outcome = [
                    RolloutError(
                        f"The adapter cannot be sent to vLLM: {told(error)}. The server must have access to "
                        f"{self._root} under the same path, run with LoRA enabled (`ebft vllm-serve` enables it), and "
                        "support this adapter's rank (--max-lora-rank)."
                    )
                ]
        broadcast_object_list(outcome)  # a failure on the main process is raised on every process
        if isinstance(outcome[0], RolloutError):
            raise outcome[0]
        previous, self.current = self.current, outcome[0]
        held = set(gather_object([version for version, count in self._held.items() if count > 0]))
        for version in [version for version in self._live if version not in held]:
            self._live.remove(version)
            if self._accelerator.is_main_process:
                self._client.unload_adapter(version.name)
                shutil.rmtree(version.path, ignore_errors=True)  # which may be needed to reload it until then
        self._live.append(self.current)
        self._weights[self.current] = [parameter.detach().clone() for parameter in self._parameters()]
        kept = dict.fromkeys((*self._live, previous))  # in the same order on all processes
        self._weights = {version: self._weights[version] for version in kept if version}
        return self.current

    @property
    def kept(self) -> list[Version]:
        """The versions whose weights are known: those on the server, and the one before the current."""
        return list(self._weights)

    @contextmanager
    def weights_of(self, version: Version) -> Iterator[None]:
        """Within the block, the model has the weights of one of the versions `kept`."""
        trained = [parameter.detach().clone() for parameter in self._parameters()]
        try:
            self._set(self._weights[version])
            yield
        finally:
            self._set(trained)

    def _parameters(self) -> list[Tensor]:
        reshard(self._model)  # a change of gathered parameters would be lost
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def _set(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), weights, strict=True):
            parameter.copy_(value)

    def reload(self, version: Version) -> None:
        """Load a version again that the server has lost; its folder exists as long as it is current or held."""
        self._client.load_adapter(version.name, version.path)

    @contextmanager
    def served_as(self, name: str, version: Version) -> Iterator[None]:
        """Within the block, the server also has `version`, which must be held, under `name`; other blocks wait.

        The adapter is unloaded and loaded under that name, each time with another folder. vLLM's load_inplace would
        leave no moment without the name, but it reads the files again in every step, and ends the server if they are
        deleted meanwhile.
        """
        with self._other_names_lock:
            roots = {entry["id"]: entry.get("root") for entry in self._client.models()}
            if version.name not in roots:
                self.reload(version)  # the server was restarted
            if roots.get(name) != version.path:
                self._other_names.add(name)
                if name in roots:
                    self._client.unload_adapter(name)
                self._client.load_adapter(name, version.path)
                self._check_listed(name, version.path)
            yield

    def hold(self, version: Version) -> None:
        """Keep a version on the server until it is released; the next `publish` after that removes it."""
        self._held[version] += 1

    def release(self, version: Version) -> None:
        """Undo one `hold`."""
        self._held[version] -= 1

    def close(self) -> None:
        """Remove all versions from the server, and their folders; a server that is not running is ignored."""
        if self._run is not None and self._accelerator.is_main_process:
            for name in (*self._other_names, *(version.name for version in self._live)):
                self._client.unload_adapter(name)
            shutil.rmtree(self._root / self._run, ignore_errors=True)
            with suppress(OSError):  # with adapters of another run
                self._root.rmdir()
        for part in (self._other_names, self._live, self._held, self._weights):
            part.clear()
        self.current = self._run = None

    def _publish(self, step: int, whole: dict[str, Tensor] | None) -> Version:
        """Save and load the adapter, with the weights `whole` by name if the model is sharded."""
        if self._run is None:
            self._run = f"ebft-{uuid.uuid4().hex[:8]}"
        name = f"{self._run}-step-{step}-{len(self._live)}-{uuid.uuid4().hex[:4]}"
        final = self._root / self._run / name
        partial = final.with_name(f"{name}.partial")
        weights = partial / SAFETENSORS_WEIGHTS_NAME
        try:
            self._model.save_pretrained(str(partial), selected_adapters=["default"], state_dict=whole)
            base, saved = unwrap_adapter(self._model), load_file(weights)
            served = {_PEFT + name_in_checkpoint(base, key.removeprefix(_PEFT)): saved[key] for key in saved}
            if served.keys() != saved.keys():  # of a multimodal model, which the server has whole
                save_file(served, weights)
            allow_readers(partial)  # the server may run as another user
            os.replace(partial, final)
            self._client.load_adapter(name, str(final))
            self._check_listed(name, str(final))
        except BaseException:
            for folder in (partial, final):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return Version(name, str(final), step)

    def _check_listed(self, name: str, path: str) -> None:
        """Raise RolloutError if the server does not list the adapter, or lists it with the files of another one."""
        roots = [entry.get("root") for entry in self._client.models() if entry["id"] == name]
        if not roots or roots[0] not in (None, path):
            found = f"lists it with the files in {roots[0]}" if roots else "does not list it"
            raise RolloutError(
                f"The vLLM server at {self._client.address} reports that it loaded the adapter {name}, but {found}."
            )
