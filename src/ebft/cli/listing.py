"""The config schema as text for the terminal."""

from collections.abc import Iterator

from rich.padding import Padding
from rich.text import Text

from ebft.config.reference import option_groups


def key_overview() -> str:
    """All top-level keys, one paragraph per group, for --help."""
    groups = option_groups(nested=False)
    lines = [f"{title}: {', '.join(option.key for option in options)}" for title, options in groups.items()]
    return "\n\n".join(["Config keys (run `ebft config` for descriptions):", *lines])


def option_listing(search: str = "") -> Iterator[Text | Padding]:
    """Every key with its type, default and description; with `search`, only the keys that contain it."""
    for title, options in option_groups().items():
        found = [option for option in options if search in option.key]
        if found:
            yield Text(f"\n{title}", style="bold underline")
        for option in found:
            yield Text.assemble((option.key, "bold cyan"), f" = {option.default}  ", (option.type, "dim"))
            yield Padding(Text(option.description), (0, 0, 0, 4))
