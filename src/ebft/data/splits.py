"""Splits and slices such as `train[:1%]`, `train[10:20]` or `train+test` of a local dataset."""

from datasets import Dataset, ReadInstruction, concatenate_datasets

from ebft.errors import DataError

DEFAULT_SPLIT = "train"


def take_split(parts: dict[str, Dataset], spec: str, source: str) -> Dataset:
    """The rows that `spec` selects from the named splits in `parts`.

    Slices work as in the datasets library: percentages are rounded to the nearest row, bounds past the end are clipped.
    Raises DataError for an unknown split, a malformed slice or a slice without rows.
    """
    sizes = {name: len(part) for name, part in parts.items()}
    try:
        spans = ReadInstruction.from_spec(spec).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"{source}: invalid split {spec!r}: {error}. Available splits: {', '.join(sizes)}. "
            "Slices are written train[:100], train[10:20] or train[:1%]."
        ) from error
    # A slice from past the end is not clipped by the datasets library.
    ranges = [(span.splitname, range(*slice(span.from_, span.to).indices(sizes[span.splitname]))) for span in spans]
    chosen = [parts[name].select(rows) for name, rows in ranges if len(rows)]
    if len(chosen) < len(ranges):
        held = ", ".join(f"{name} has {size} rows" for name, size in sizes.items())
        part = "" if len(ranges) == 1 else "a part of "
        raise DataError(f"{source}: {part}split {spec!r} selects no rows ({held}). Widen the slice.")
    return concatenate_datasets(chosen) if len(chosen) > 1 else chosen[0]
