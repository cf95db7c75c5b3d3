"""Why rows are prepared although others are stored: what differs from the most similar ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebft.prepared.store import RECORD


def closest_difference(base: Path, inputs: dict[str, Any]) -> list[str]:
    """The names of what differs between `inputs` and the stored rows in `base` with the fewest differences.

    Empty if there are no stored rows.
    """
    found = [differences(stored, inputs) for stored in _stored_inputs(base)]
    return min(found, key=lambda names: (len(names), names), default=[])


def differences(stored: dict[str, Any], inputs: dict[str, Any]) -> list[str]:
    """The settings that differ, and which of data, transforms, tokenizer and code do."""
    before, now = stored.get("settings", {}), inputs["settings"]
    settings = [key for key in {**now, **before} if (key in before, before.get(key)) != (key in now, now.get(key))]
    return settings + [name for name in inputs if name != "settings" and stored.get(name) != inputs[name]]


def _stored_inputs(base: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(base.glob(f"[!.]*/{RECORD}")):
        try:
            inputs = json.loads(path.read_text(encoding="utf-8"))["inputs"]
        except (OSError, ValueError, TypeError, KeyError):  # damaged rows explain nothing
            continue
        if isinstance(inputs, dict):
            yield inputs
