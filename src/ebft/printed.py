"""What is printed, or written to files: without control characters and secrets, whatever happens to the reader."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderHook
from rich.segment import Segment

BROKEN_PIPE = 128 + 13  # as shells report a command that SIGPIPE ended
# Characters that change the order in which the following text is displayed, with their names.
_SHOWN = {  # the symbols of control characters, and the names of directions
    **{code: chr(0x2400 + code) for code in range(32)},
    127: "\u2421",
    **dict(zip(range(0x202A, 0x202F), ("<LRE>", "<RLE>", "<PDF>", "<LRO>", "<RLO>"))),
    **dict(zip(range(0x2066, 0x206A), ("<LRI>", "<RLI>", "<FSI>", "<PDI>"))),
}
_UNLIMITED = 100_000  # characters in a line: tables are as wide as their cells
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` with control characters as visible symbols; a completion must not control the terminal.

    Characters that override the direction of text are replaced by their names, such as `<RLO>`.
    """
    return _UNPRINTABLE.sub(lambda found: _SHOWN.get(ord(found[0]), "\ufffd"), text)


def duration(seconds: float) -> str:
    """A duration such as 45s, 3m20s, 2h05m or 3d04h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    for small, big, unit in ((60, 60, "ms"), (3600, 24, "hm"), (86400, 10**9, "dh")):
        if seconds < small * big:
            part = small // 60 if unit != "dh" else 3600
            return f"{seconds // small}{unit[0]}{seconds % small // part:02d}{unit[1]}"
    return f"over {10**9}d"  # from damaged times


def all_printable(value: Any) -> Any:
    """`value` with the texts of its lists and mappings as `printable` shows them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [all_printable(item) for item in value]
    return {key: all_printable(item) for key, item in value.items()} if isinstance(value, dict) else value


def printable_json(text: str) -> str:
    """JSON with control characters in its strings as escapes, which readers convert back."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(text: object = "", err: bool = False) -> None:
    """Print a line with control characters as visible symbols, to stderr if `err`."""
    print(printable(str(text)), file=sys.stderr if err else sys.stdout, flush=True)


def safe_console(**options: Any) -> Console:
    """A console of rich that prints control characters in texts as visible symbols; its styles are unchanged."""
    made = Console(**options)
    made.push_render_hook(_Printable())
    return made


def print_table(table: RenderableType) -> None:
    """Print a table to stdout: as wide as the terminal, and whole where the output goes to a file or a pipe."""
    width = None if sys.stdout.isatty() else _UNLIMITED
    safe_console(soft_wrap=False, width=width).print(table)


class _Printable(RenderHook):
    def process_renderables(self, renderables: list[RenderableType]) -> list[RenderableType]:
        return list(map(_Filtered, renderables))


class _Filtered(NamedTuple):
    renderable: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class OutputError(BaseException):
    """The standard output of a command cannot be written, and the command has no other result."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"The standard output cannot be written: {error.strerror}.")
        self.is_broken_pipe = error.errno == errno.EPIPE


_goes_on = False  # whether the command that runs has another result than what it prints


def go_on_without_output() -> None:
    """Discard what cannot be printed from now on, with one warning, instead of raising OutputError."""
    global _goes_on
    _goes_on = True


def open_streams() -> None:
    """Replace sys.stdout and sys.stderr with streams that do not raise OSError."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by the shell: in this order, each gets its own descriptor back
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r", closefd=False))
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        buffer = getattr(stream, "buffer", None)
        if not isinstance(getattr(buffer, "raw", buffer), io.FileIO):  # unbuffered, it has no `raw`
            continue
        stream.flush()
        raw = _Lasting(number, "w", closefd=False)
        # Names of files and texts can contain characters that the encoding of the terminal lacks.
        made = io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),
            errors="backslashreplace",
            **{option: getattr(stream, option) for option in ("encoding", "line_buffering", "write_through")},
        )
        setattr(sys, name, made)


class _Lasting(io.FileIO):
    """A stream of the process that is discarded from the first error on, such as a closed pipe."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            # What libraries and processes write to the descriptor directly is lost, too.
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, self.fileno())
            os.close(null)
            os.set_inheritable(self.fileno(), True)
            if self.fileno() == 1 and not _goes_on:
                raise OutputError(error) from None
            if self.fileno() == 1:
                say(f"Warning: {OutputError(error)} The command continues without it.", err=True)
            return len(memoryview(data).cast("B"))


REMOVED = "(removed)"
_ENVIRONMENTS = ("env", "environ", "environment", "headers")  # keys of mappings with names that the user chooses
_VARIABLE = re.compile(
    r"TOKEN(?!I[ZS])|KEY|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|BEARER|HEADER|SIGNATURE|(?<![A-Z])(PAT|SIG)(?![A-Z])",
    re.IGNORECASE,
)
_COUNT = re.compile(r"TOKENS", re.IGNORECASE)  # a number of tokens, if the value is a number
# Of options, whose names are known: not special tokens of a tokenizer, numbers of tokens, or passes over the data.
_OPTION = re.compile(
    r"(?<!pad.)(?<!eos.)(?<!bos.)(?<!unk.)(?<!sep.)(?<!cls.)(?<!mask.)token$|(api|access|private|ssh|signing).?keys?$|"
    r"^key$|secret|passw(or)?d|passphrase|(^|_)pwd$|credential|^auth(orization)?$|cookie|bearer|(^|_)pat$",
    re.IGNORECASE,
)
_URL_PARAMETER = r"token(?!s|i[zs])|key|secret|passw|pwd|credential|auth|sig(?![a-z])|signature"
_TEXTS = (
    # User information of a URL, up to the last @: a password may contain @ and /.
    (re.compile(r"(?<=://)(?:[^\s/@:\"'<>]*:[^\s\"'<>]*@|[^\s/@:\"'<>]*@)"), f"{REMOVED}@"),
    (re.compile(r"(?<![^\s\"'<>=(,`])[^\s/@:\"'<>=(,`]+:(?!//)[^\s\"'<>`]*@(?=[\w\[])"), f"{REMOVED}@"),  # no scheme
    (re.compile(rf"(?i)([?&;][^=&;?\s]*(?:{_URL_PARAMETER})[^=&;?\s]*=)[^&;#\s\"'<>`]+"), rf"\1{REMOVED}"),
    (
        re.compile(
            r"\b([A-Z0-9_]{0,60}?(?:TOKEN(?!I[ZS]|S)|KEY|SECRET|PASSW|CREDENTIAL)[A-Z0-9_]{0,60}=[\"']?)[^\s\"'`]+"
        ),
        rf"\1{REMOVED}",
    ),
    # An override, such as hub_token=...
    (
        re.compile(
            r"(?i)\b([\w.-]{0,60}?(?:api_?key|secret(?:_key)?|passw(?:or)?d|(?:hub|auth|access)_token)=[\"']?)[^\s\"'`]+"
        ),
        rf"\1{REMOVED}",
    ),
    (re.compile(r"\b([Bb]earer|BEARER)\s+[\w.~+/=-]{6,}"), rf"\1 {REMOVED}"),
    (re.compile(r"\b(hf_|api_org_|gh[oprsu]_)[A-Za-z0-9]{12,}"), REMOVED),
    (re.compile(r"\b(github_pat_\w{12,}|(glpat|xox[abeprs])-[\w-]{10,}|A[KS]IA[0-9A-Z]{16})"), REMOVED),
    (re.compile(r"(?<![\w-])sk[-_](?=[\w-]*[0-9A-Z])[\w-]{10,}"), REMOVED),
    # Of W&B, NVIDIA, Groq, npm, PyPI, Replicate, Databricks, Google, Azure and Slack.
    (re.compile(r"\b((wandb_v1_|nvapi-|gsk_|AIza|pypi-AgE)[\w-]{20,}|(npm_|r8_)\w{32,}|dapi[0-9a-f]{32})"), REMOVED),
    (re.compile(r"(AccountKey=|SharedAccessKey=|hooks\.slack\.com/services/)[^\s;\"'`]+"), rf"\1{REMOVED}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|\Z)", re.DOTALL), REMOVED),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), REMOVED),  # a JSON Web Token
)


def is_secret_variable(name: str, value: Any = "") -> bool:
    """Whether an environment variable, or a header of a request, contains a secret by its name."""
    is_count = _COUNT.search(name) and re.fullmatch(r"\d{1,9}", str(value))
    return bool(_VARIABLE.search(name)) and not is_count


def without_secrets_in_text(text: str) -> str:
    """`text` without user information and signatures in URLs, and without words that look like access tokens."""
    for pattern, replacement in _TEXTS:
        text = pattern.sub(replacement, text)
    return text


def traced(error: BaseException) -> str:
    """The traceback of an error, without secrets."""
    return without_secrets_in_text("".join(traceback.format_exception(error)))


def without_secrets(value: Any, key: str = "") -> Any:
    """`value` as JSON, with the values of keys such as `hub_token` replaced, and texts without their secrets.

    In mappings named `env` or `headers`, and for names in capitals, every name that may be one of a secret counts.
    """
    if isinstance(value, Mapping):
        in_environment = key.rpartition(".")[2].lower() in _ENVIRONMENTS
        shown = {}
        for name, item in value.items():
            last = str(name).rpartition(".")[2]
            secret = is_secret_variable(last, item) if in_environment or last.isupper() else _OPTION.search(last)
            shown[str(name)] = REMOVED if secret and item is not None else without_secrets(item, str(name))
        return shown
    if isinstance(value, list | tuple):
        return [without_secrets(item, key) for item in value]
    if isinstance(value, str):
        return without_secrets_in_text(value)
    return value if isinstance(value, int | float | None) else without_secrets_in_text(str(value))


def value_without_secrets(key: str, value: Any) -> Any:
    """The value of a dotted key as `without_secrets` shows it; a key in a mapping such as `vllm.env` has a parent."""
    section, _, last = key.rpartition(".")
    return without_secrets({last: value}, section)[last]
