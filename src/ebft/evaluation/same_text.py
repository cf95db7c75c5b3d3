"""Which documents have the same text, regardless of the columns and the format that the text is stored in."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Columns and keys of messages whose values are not text of the document.
_NOT_TEXT = frozenset({"id", "_id", "uuid", "file", "url", "role", "from"})


def texts_of(row: Mapping[str, Any]) -> frozenset[str]:
    """The texts of a row, nested ones included, without differences of white space.

    Texts that are JSON objects or lists, such as the lines that some transforms parse, count as their content. A row
    without text, such as one of token ids, is one text of all its values.
    """
    found = frozenset(_texts(row))
    if found:
        return found
    values = {name: value for name, value in row.items() if value is not None}
    return frozenset([json.dumps(values, sort_keys=True, default=str)])


def _texts(value: Any, parses: bool = True) -> Iterator[str]:
    if isinstance(value, str):
        text = " ".join(value.split())
        nested = _parsed(value) if parses and text[:1] in ("{", "[") else None
        if nested is not None:
            yield from _texts(nested, parses=False)
        elif text:
            yield text
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in _NOT_TEXT:
                yield from _texts(item, parses)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, parses)


def _parsed(text: str) -> dict | list | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None


class TextIndex:
    """Finds which of `documents`, each the texts of `texts_of`, have the same text as another row.

    Two documents are the same if all texts of one are in the other, and are at least half of its characters, so that
    additional columns do not matter.
    """

    def __init__(self, documents: list[frozenset[str]]) -> None:
        self._documents = documents
        self._with: dict[str, list[int]] = defaultdict(list)
        for number, texts in enumerate(documents):
            for text in texts:
                self._with[text].append(number)
        # Each document is looked up by its text that the fewest others have, since many may share a system prompt.
        self._known_by: dict[str, list[int]] = defaultdict(list)
        for number, texts in enumerate(documents):
            self._known_by[min(texts, key=lambda text: (len(self._with[text]), -len(text)))].append(number)

    def __len__(self) -> int:
        return len(self._documents)

    def same_as(self, texts: frozenset[str]) -> Iterable[int]:
        """The numbers of the documents with the same text as a row with these texts."""
        larger = {number for text in texts for number in self._known_by.get(text, ())}
        found = {number for number in larger if _is_most(self._documents[number], texts)}
        if all(text in self._with for text in texts):
            rarest = min((self._with[text] for text in texts), key=len)
            found |= {number for number in rarest if _is_most(texts, self._documents[number])}
        return found


def _is_most(part: frozenset[str], whole: frozenset[str]) -> bool:
    return part <= whole and 2 * sum(map(len, part)) >= sum(map(len, whole))
