"""Whether the installed packages are those that the package's metadata asks for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ebft.doctor.check import Check

_INSTALL = "In a clone of ebft, pip install -c constraints.txt . installs the versions that the tests use."


def check_installation(package: str = "ebft") -> Iterator[Check]:
    """Yield a check for Python, for each required package that is missing or too old or new, and for each extra."""
    yield _python(package)
    required, extras = _requirements(package)
    problems = [(line, found) for line in required if (found := _problem(line)) is not None]
    for line, problem in problems:
        yield Check("error", "packages", f"{line.name}: {problem}. Run pip install '{_wanted(line)}'. {_INSTALL}")
    if not problems:
        yield Check("ok", "packages", f"all {len(required)} required packages are installed with fitting versions")
    for extra, lines in extras.items():
        missing = [line.name for line in lines if _version(line.name) is None]
        wrong = [(line, found) for line in lines if line.name not in missing and (found := _problem(line)) is not None]
        for line, problem in wrong:
            yield Check("warning", f"extra {extra}", f"{line.name}: {problem}. Run pip install '{_wanted(line)}'.")
        if not wrong:
            state = f"not installed ({', '.join(missing)})" if missing else "installed"
            yield Check("ok", f"extra {extra}", state)


def _python(package: str) -> Check:
    wanted, current = metadata(package)["Requires-Python"], ".".join(map(str, sys.version_info[:3]))
    if wanted is not None and current not in SpecifierSet(wanted):
        return Check("error", "python", f"Python {current} is running, but ebft requires {wanted}. Install that.")
    return Check("ok", "python", f"{current} ({sys.executable})")


def _requirements(package: str) -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """The required packages, and those of each extra, except extras that consist of others or are for development."""
    lines = [Requirement(line) for line in requires(package) or []]
    required = [line for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    extras: dict[str, list[Requirement]] = {}
    for extra in metadata(package).get_all("Provides-Extra") or []:
        own = [line for line in lines if line not in required and line.marker.evaluate({"extra": extra})]
        if own and not any(line.name == package for line in own):
            extras[extra] = own
    return required, extras


def _problem(line: Requirement) -> str | None:
    found = _version(line.name)
    if found is None:
        return "not installed"
    if not line.specifier.contains(found, prereleases=True):
        return f"version {found} is installed, but {line.specifier} is required"
    return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _wanted(line: Requirement) -> str:
    return f"{line.name}{line.specifier}"
