"""Malformed data files and dataset entries, and valid ones that look unusual; training stops before its first step."""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from tests.bad_input.cases import ROWS, TEXT, Case, bad, entry, good
from tests.bad_input.models import Evil

GOOD_LINE = json.dumps({"text": TEXT * 2}) + "\n"


def rows(
    name: str, content: Any, *expect: str, file: str = "d.jsonl", template: str | None = None, **keys: Any
) -> Case:
    """A file that cannot be read; the error names it."""
    config = entry(path=file, **keys) | ({"chat_template": template} if template else {})
    return bad(name, file, *expect, config=config, files={file: content})


def dataset(name: str, *expect: str, files: Any = None, **changes: Any) -> Case:
    """A dataset entry that does not work."""
    return bad(name, *expect, config=entry(**changes), files=files or {})


def parquet(path: Path) -> None:
    Dataset.from_dict({"text": [TEXT]}).to_parquet(path)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(Evil(str(path.parent / "pwned"))))


def saved(path: Path) -> None:
    """A folder of save_to_disk whose Arrow file is damaged."""
    Dataset.from_list(ROWS).save_to_disk(path)
    for file in path.glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:50])


PAIR = {"type": "ebft_strided_structured.transform"}
SFT = {"rl": None, "ebft": None}
STREAM = SFT | {"streaming": True}
STRUCTURED = {"ebft": {"mode": "structured"}, "trl": {"num_generations": 2, "max_completion_length": 4},
              "micro_batch_size": 2, "chat_template": "chatml"}  # fmt: skip


def both(name: str, content: Any, *expect: str, file: str = "d.jsonl", **keys: Any) -> list[Case]:
    """A file that cannot be read, neither at once nor as a stream."""
    config = entry(path=file, type="completion", **keys)
    return [bad(f"{name}{suffix}", file, *expect, config=config | others, files={file: content})
            for suffix, others in (("", SFT), (" in a stream", STREAM))]  # fmt: skip


def cut_arrow(path: Path) -> None:
    table = Dataset.from_dict({"text": [TEXT] * 400}).data.table
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    path.write_bytes(path.read_bytes()[:9000])


READ_IN_TWO_WAYS = [
    *both("a key twice", GOOD_LINE + '{"text": "a b c d e f", "text": "b"}\n', "line 2", "'text' occurs 2 times"),
    *both("compressed JSON lines", gzip.compress(GOOD_LINE.encode())),
    *both("only a header", "text\n", file="d.csv"),
    *both("a late byte", b"text\n" + b"a b c\n" * 3000 + b"caf\xe9\n", "utf-8", file="d.csv"),
    *both("cut off arrow", cut_arrow, "Arrow", file="d.arrow"),
]  # fmt: skip

FILES = [
    rows("null in json", "null", file="d.json"), rows("mixed types", [{"text": "a"}, {"text": 5}], "text"),
    rows("half of a pair", GOOD_LINE + '{"text": "\\ud83d"}\n', "surrogates"),
    dataset("damaged save_to_disk", "saved", path="saved", files={"saved": saved}),
]  # fmt: skip

REPLIED = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there, you."}]}]
COMPARED = [{"messages": REPLIED[0]["messages"][:1], "chosen": "Hello there.", "rejected": "No."}]
BODY = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}\n"
FAILING = {"{{ 1 // 0 }}": "modulo by zero", "{{ 'a' | nothing }}": "No filter named 'nothing'",
           "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion"}  # fmt: skip
TYPES = {"chat_template": SFT, "ebft_strided_chat.transform": {}, "chat_template.default": SFT | {"rl": "dpo"},
         "ebft_chat_multiturn.transform": STRUCTURED}  # fmt: skip
TEMPLATES = [
    bad(f"template with {text} in {type}", said, files={
        "c.jsonl": COMPARED if "default" in type else REPLIED, "t.jinja": BODY + text},
        config=TYPES[type] | {"datasets": [{"path": "c.jsonl", "type": type}], "chat_template": "t.jinja"})
    for number, (text, said) in enumerate(FAILING.items()) for type in (["chat_template"] if number else TYPES)
]  # fmt: skip

PLACES = [
    bad("a pickle", "d.pkl", config=entry(path="d.pkl"), files={"d.pkl": pickled}, absent=("pwned",)),
    dataset("missing file", "nothing.jsonl", path="nothing.jsonl"),
    dataset("NUL in the path", "run.yaml", "NUL", path="a\0b"),
    dataset("a pattern as path", "*.jsonl", "data_files: '*.jsonl'", path="d/*.jsonl", files={"d/a.jsonl": ROWS}),
    dataset("a variable in a path", "'$DATA/d.jsonl'", "not replaced", path="$DATA/d.jsonl"),
    dataset("a line break in a path", "rows.jsonl", "line break", path="rows.jsonl\n"),
    dataset("device", "/dev/zero", path="/dev/zero", ds_type="text"),
    bad("test_datasets broken", "b.jsonl", config={"test_datasets": [{"path": "b.jsonl", "type": "completion"}]},
        files={"b.jsonl": "{"}),
]  # fmt: skip

ROWS_OF_CHATS = [
    rows("no chat template", [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
         "chat_template", type="ebft_strided_chat.transform"),
    rows("pair without output", [{"input": "a"}], "output", "row 0", **PAIR),
]  # fmt: skip

# Names that are patterns, and that match the name of another file, which cannot be read.
NAMES = {"a[1]": "a1", "star*": "star1", "a b#%41": "a bA"}
LITERAL = [
    good(f"{name!r} as the name of a {extension} file{' in a stream' if keys is STREAM else ''}",
         config=entry(path=f"{name}/{name}.{extension}", type="completion") | keys,
         files={f"{name}/{name}.{extension}": content, f"{name}/{other}.{extension}": "x,y\n1,2,3\n"})
    for number, (name, other) in enumerate(NAMES.items())
    for place, (extension, content, keys) in enumerate((
        ("jsonl", ROWS, SFT), ("jsonl", ROWS, STREAM), ("csv", f'text\n"{TEXT}"\n', SFT),
        ("csv", f'text\n"{TEXT}"\n', STREAM), ("parquet", parquet, SFT)))
    if (number + place) % 2 == 0
] + [
    good("brackets in every path", trains=True, unchanged=("out[1]/adapter_model.safetensors",),
         files={"m[1]": lambda path: path.symlink_to("model"), "t[1].jinja": "{{ messages[0].content }}"},
         config=entry(path="rows.jsonl", type="completion") | SFT | {
             "base_model": "m[1]", "output_dir": "out[1]", "save_strategy": "steps", "save_steps": 1,
             "chat_template": "t[1].jinja", "dataset_prepared_path": "p[1]", "adapter": "lora", "lora_r": 2,
             "lora_alpha": 4, "lora_target_linear": True}),
]  # fmt: skip

VALID = [
    good("name of a local file", config=entry(name="main"), warns=("name: main has no effect", "rows.jsonl is on")),
    good("NaN in another column, as Python writes it", config=entry(path="d.jsonl"),
         files={"d.jsonl": json.dumps({"text": TEXT * 2, "score": float("nan")})}),
    *(good(name, config=entry(path="d.csv"), files={"d.csv": text}) for name, text in (
        ("NUL in a text", "text\n" + "a b c d \0 e f g h i j k l\n" * 2),
        ("fewer fields than columns", "text,b\n" + "a b c d e f g h i j k l\n" * 2))),
    *(good(name, config=entry(path="d.jsonl", type="completion") | STREAM, files={"d.jsonl": text})
      for name, text in (("stream: rows of other columns", GOOD_LINE + '{"other": "a"}\n' + GOOD_LINE),
                         ("stream: a null", GOOD_LINE + "null\n" + GOOD_LINE))),
]  # fmt: skip

CASES = [*TEMPLATES, *READ_IN_TWO_WAYS, *FILES, *PLACES, *ROWS_OF_CHATS, *LITERAL, *VALID]
