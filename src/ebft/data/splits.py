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
    chosen = [parts[span.splitname].select(range(span.from_, span.to)) for span in spans]
    rows = concatenate_datasets(chosen) if len(chosen) > 1 else chosen[0]
    if not len(rows):
        held = ", ".join(f"{name} has {size} rows" for name, size in sizes.items())
        raise DataError(f"{source}: split {spec!r} selects no rows ({held}). Widen the slice.")
    return rows
