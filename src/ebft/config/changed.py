"""What a config sets differently from the defaults."""

from collections.abc import Iterator
from typing import Any

from ebft.config.section import Section


def changed_keys(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every option whose value is not its default; lists of entries as plain data."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        if isinstance(value, Section):
            yield from changed_keys(value, f"{prefix}{name}.")
        elif value != default:
            yield prefix + name, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Section):
        return dict(changed_keys(value))
    return value
