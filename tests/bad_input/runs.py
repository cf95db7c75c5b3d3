"""Odd configs, output folders that hold other things, servers, user code that fails, and valid ones like them."""

from typing import Any

from tests.bad_input.cases import ROWS, TEXT, Case, bad, entry, good

CHECK = "config --check run.yaml"
CONFIGS = [
    bad("folder", "folder.yaml", files={"folder.yaml/a": "x"}, command="config --check folder.yaml"),
    bad("an empty type, which means the default columns", "rows.jsonl", "row 0", "Set field_instruction",
        config={"datasets": [{"path": "rows.jsonl", "type": {}}]}),
    good("an environment variable, which can be the name of a folder", command=CHECK,
         config={"output_dir": "${HOME}/out", "vllm": {"env": {"HF_TOKEN": "$HF_TOKEN"}}},
         warns=("output_dir: '${HOME}/out'", "vllm.env.HF_TOKEN: '$HF_TOKEN'", "but not here")),
    good("a fraction that holds out one document, and rows longer than the data",
         config={"val_set_size": 1e-9, "micro_batch_size": 10_000, "sequence_len": 10**6}),
    good("more workers than cores", config={"dataloader_num_workers": 99}),
]  # fmt: skip

OLD = {"adapter": "lora", "lora_model_dir": "old", "output_dir": "old"}
FOLDERS = [
    bad("below a file", "output_dir", config={"output_dir": "rows.jsonl/out"}),
    bad("the adapter that is continued", "output_dir", "lora_model_dir", config=OLD,
        files={"old/adapter_config.json": "{}"}, unchanged=("old/adapter_config.json",)),
    bad("evaluate: --output is another file", "data.json", "not the result", files={"data.json": "{}"},
        config={"val_set_size": 1}, command="evaluate run.yaml --output data.json"),
    bad("quickstart: a project", "data", "summary.json", command="quickstart --output project",
        files={"project/data/train.jsonl": ROWS, "project/summary.json": "{}"},
        unchanged=("project/data/train.jsonl",)),
    bad("no checkpoint", "resume_from_checkpoint", config={"resume_from_checkpoint": "out/checkpoint-1"}),
    good("home", config={"output_dir": "~/runs"}, absent=("~",), unchanged=("runs",)),
    good("next to the files of the data", config={"output_dir": "texts/out"}, files={"texts/a.txt": TEXT},
         command="train run.yaml datasets.0.path=texts datasets.0.data_files=a.txt"),
]  # fmt: skip

STEP = """
def transform(cfg, **kwargs):
    def step(example, tokenizer=None):
        {}
        ids = tokenizer(example["text"])["input_ids"]
        return {{"input_ids": ids, "labels": list(ids)}}
    return step, {{"remove_columns": "__all__"}}
"""


def module(name: str, text: str, *expect: str, make: Any = bad, **config: Any) -> Case:
    """A module with a transform."""
    return make(f"transform: {name}", *expect, files={"own.py": text}, config=entry(type="own.transform") | config)


def returns(name: str, ids: str, *expect: str, more: str = "", **rest: Any) -> Case:
    """A transform that returns these ids for each row."""
    body = f'ids = {ids}; return {{"input_ids": ids, "labels": [1] * 20{more}}}'
    return module(name, STEP.format(body), *expect, **rest)


EXITS = STEP.format("import sys; sys.exit(0)")
AXOLOTL = "from axolotl.integrations.base import BasePlugin\n\n\nclass Own(BasePlugin): ...\n"
USER_CODE = [
    module("exits with 0", EXITS, "own.py, line 4"),
    module("exits in two processes", EXITS, "own.py, line 4", dataset_num_proc=2),
    returns("half of a token", "[1] * 20", "Float value 1.5", more=', "prompt_length": 1.5'),
    returns("NumPy arrays", '__import__("numpy").arange(20)', make=good),
    bad("transform: not there", "nowhere", config=entry(type="nowhere.transform")),
    module("syntax error", "def transform(cfg:\n    pass\n", "SyntaxError"),
    module("transform_fn takes one argument", "def transform(cfg, **kw): return (lambda row: row), {}\n", "tokenizer"),
    bad("plugin: of axolotl, with its base class", "No module named 'axolotl'", config={"plugins": ["own.Own"]},
        files={"own.py": AXOLOTL}),
]  # fmt: skip

CASES = [*CONFIGS, *FOLDERS, *USER_CODE]
