"""A short description of training data, by which a resumed run notices that they have changed."""

import json
import zlib
from typing import Any

_READ = 256  # rows whose contents are compared


def describe_rows(rows: Any) -> dict[str, int] | None:
    """The number of rows and a checksum of up to 256 of them, evenly spaced; None for data without a length."""
    try:
        count = len(rows)
    except TypeError:
        return None
    digest = 0
    for index in range(0, count, max(1, -(-count // _READ))):
        digest = zlib.crc32(json.dumps(rows[index], sort_keys=True, default=_plain).encode(), digest)
    return {"rows": count, "checksum": digest}


def difference(saved: dict[str, int], now: dict[str, int]) -> str | None:
    """How the data `now` differ from those described by `saved`; None if they do not."""
    if saved == now:
        return None
    if saved.get("rows") != now["rows"]:
        return f"{now['rows']:,} rows instead of {saved.get('rows'):,}"
    return f"{now['rows']:,} rows as before, with other contents or in another order"


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists, other objects by their type, since their text may contain addresses."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
