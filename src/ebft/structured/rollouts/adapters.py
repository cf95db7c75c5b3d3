"""Bringing the policy's LoRA adapter to a vLLM server: every version under its own name, in its own folder.

A name and a folder are never used twice, so the server can serve no stale cache for them, and a folder appears under
its name only when it is complete.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from ebft.errors import RolloutError
from ebft.structured.rollouts.client import VLLMClient

_FOLDER = "vllm_adapters"


@dataclass(frozen=True)
class Version:
    """One state of the policy on the server: its name there, its folder, and the optimizer step it was taken at."""

    name: str
    path: str
    step: int


class AdapterSync:
    """Publishes versions of a PEFT model's adapter, and takes back those that nobody samples from any more.

    All processes call `publish` together; the main one saves, loads and deletes. Each holds the versions that it still
    samples from, for itself. Names hold an id of this run, so what an earlier run left on the server does not matter.
    """

    def __init__(self, client: VLLMClient, model: Any, accelerator: Any, output_dir: str) -> None:
        self._client, self._model, self._accelerator = client, model, accelerator
        self._root = Path(output_dir).absolute() / _FOLDER
        self._run: str | None = None
        self._held: Counter[Version] = Counter()
        self._live: list[Version] = []
        self.current: Version | None = None

    def publish(self, step: int) -> Version:
        """Save the adapter as of optimizer step `step`, have the server load it, and make it the current one."""
        outcome: list[Any] = [None]
        if self._accelerator.is_main_process:
            try:
                outcome = [self._publish(step)]
            except Exception as error:  # whatever it is: the other processes wait for word of it
                outcome = [_told(error, self._root)]
        broadcast_object_list(outcome)  # a failure on the main process ends every process
        if isinstance(outcome[0], RolloutError):
            raise outcome[0]
        self.current = outcome[0]
        held = set(gather_object([version for version, count in self._held.items() if count > 0]))
        for version in [version for version in self._live if version not in held]:
            self._live.remove(version)
            if self._accelerator.is_main_process:
                self._forget(version)
        self._live.append(self.current)
        return self.current

    def reload(self, version: Version) -> None:
        """Load a version again that the server has lost; its folder is there as long as it is current or held."""
        self._client.load_adapter(version.name, version.path)

    def hold(self, version: Version) -> None:
        """Keep a version on the server until it is released; it goes when the next one is published after that."""
        self._held[version] += 1

    def release(self, version: Version) -> None:
        """Undo one `hold`."""
        self._held[version] -= 1

    def close(self) -> None:
        """Take everything back; errors of a server that is gone already do not matter then."""
        for version in list(self._live):
            if self._accelerator.is_main_process:
                self._forget(version)
        self._live.clear()
        self._held.clear()
        self.current = None
        if self._run is not None and self._accelerator.is_main_process:
            shutil.rmtree(self._root / self._run, ignore_errors=True)
            if self._root.is_dir() and not any(self._root.iterdir()):
                self._root.rmdir()
        self._run = None

    def _publish(self, step: int) -> Version:
        if self._run is None:
            self._run = f"ebft-{uuid.uuid4().hex[:8]}"
        name = f"{self._run}-step-{step}-{len(self._live)}-{uuid.uuid4().hex[:4]}"
        final = self._root / self._run / name
        partial = final.with_name(f"{name}.partial")
        try:
            self._model.save_pretrained(str(partial), selected_adapters=["default"])
            os.replace(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        try:
            self._client.load_adapter(name, str(final))
        except BaseException:
            shutil.rmtree(final, ignore_errors=True)
            raise
        return Version(name, str(final), step)

    def _forget(self, version: Version) -> None:
        """Unload first, delete then: whoever samples from it would have it loaded again."""
        self._client.unload_adapter(version.name)
        shutil.rmtree(version.path, ignore_errors=True)


def _told(error: Exception, root: Path) -> RolloutError:
    if isinstance(error, RolloutError):
        return RolloutError(
            f"{error} The adapter lies in {root}: the server must be able to read that folder under the same path, run "
            "with LoRA enabled (`ebft vllm-serve` does), and take adapters of this rank (--max-lora-rank)."
        )
    if not isinstance(error, OSError):
        return RolloutError(f"The adapter cannot be saved for vLLM ({type(error).__name__}: {error}).")
    return RolloutError(
        f"The adapter for vLLM cannot be written to {root} ({error}). Free space or set output_dir to a folder that "
        "can be written; then go on with resume_from_checkpoint."
    )
