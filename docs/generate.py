"""Writes docs/options.md, the reference of every config key, from the schema."""

from pathlib import Path

from ebft.config.reference import Option, option_groups

PAGE = Path(__file__).parent / "options.md"
INTRODUCTION = """\
# Config keys

Generated from the schema by `make docs`; change the declarations in `src/ebft/config/`, not this page.

Keys of sections are written with dots, as in overrides on the command line: `ebft train run.yaml ebft.stride=4`.
`N` is a position in a list, counted from 0. A key without a value is unset. Unknown keys are errors.
"""


def render() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION]
    for title, options in option_groups().items():
        rows = "\n".join(_row(option) for option in options)
        parts.append(f"## {title}\n\n| key | type | default | meaning |\n| --- | --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


def _row(option: Option) -> str:
    cells = (f"`{option.key}`", option.type, f"`{option.default}`", option.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"Wrote {PAGE}")
