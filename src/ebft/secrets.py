"""Removing passwords, tokens and keys from what is written to files or shown: errors, configs, reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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


def without_secrets(value: Any, key: str = "") -> Any:
    """`value` as JSON, with the values of keys such as `hub_token` replaced, and texts without their secrets.

    In mappings named `env` or `headers`, and for names in capitals, every name that may be one of a secret counts.
    """
    if isinstance(value, Mapping):
        in_environment = key.rpartition(".")[2].lower() in _ENVIRONMENTS
        return {str(name): _value_of(str(name), item, in_environment) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, key) for item in value]
    if isinstance(value, str):
        return without_secrets_in_text(value)
    return value if isinstance(value, int | float | None) else without_secrets_in_text(str(value))


def value_without_secrets(key: str, value: Any) -> Any:
    """The value of a dotted key as `without_secrets` shows it; a key in a mapping such as `vllm.env` has a parent."""
    section, _, last = key.rpartition(".")
    return without_secrets({last: value}, section)[last]


def _value_of(name: str, value: Any, in_environment: bool) -> Any:
    last = name.rpartition(".")[2]
    is_secret = is_secret_variable(last, value) if in_environment or last.isupper() else _OPTION.search(last)
    return REMOVED if is_secret and value is not None else without_secrets(value, name)
