"""Output folders, checkpoints to resume from, and servers that do not work, and ones that do."""

import json
from typing import Any

from tests.bad_input.cases import ROWS, TEXT, Case, bad, good


def folder(name: str, value: str, *expect: str, **rest: Any) -> Case:
    return bad(f"output_dir: {name}", "output_dir", *expect, config={"output_dir": value}, **rest)


def resume(name: str, files: dict[str, Any], *expect: str, at: str = "out/checkpoint-1", **rest: Any) -> Case:
    config = {"resume_from_checkpoint": at, "max_steps": 2}
    return bad(f"checkpoint: {name}", *expect, config=config, files=files, **rest)


STATE = json.dumps({"global_step": 1, "log_history": []})
KEYS = json.dumps({"rl": "ebft", "ebft.mode": "strided", "adapter": None, "optimizer": "adamw_torch_fused",
                   "base_model": "model"})  # fmt: skip

FOLDERS = [
    folder("a file", "rows.jsonl", unchanged=("rows.jsonl",)), folder("below a file", "rows.jsonl/out"),
    folder("the base model", "model", "base_model", unchanged=("model/model.safetensors",)),
    folder("the base model through a link", "link", "base_model",
           files={"link": lambda path: path.symlink_to("model")}),
    folder("empty", "", command="train run.yaml"), folder("blank", "  ", command="train run.yaml"),
    bad("output_dir: NUL", "null", config={"output_dir": "a\0b"}), folder("long name", "a" * 300),
    bad("output_dir: the adapter that is continued", "output_dir", "lora_model_dir",
        config={"adapter": "lora", "lora_model_dir": "old", "output_dir": "old"},
        files={"old/adapter_config.json": "{}"}, unchanged=("old/adapter_config.json",)),
    folder("a model of somebody else", "theirs", "config.json", "tokenizer.json", "no run has written",
           files={"theirs/config.json": "{}", "theirs/tokenizer.json": "{}", "theirs/model.safetensors": "x"},
           unchanged=("theirs/model.safetensors",)),
    folder("the folder of the data", "texts", "datasets.0.path", "data_files", files={"texts/a.txt": TEXT},
           command="train run.yaml datasets.0.path=texts"),
    bad("output_dir: in the folder of held-out data", "output_dir", "test_datasets.0.path",
        config={"output_dir": "texts/out", "test_datasets": [{"path": "texts", "type": "ebft_pretrain.transform"}]},
        files={"texts/a.txt": TEXT}),
    folder("checkpoint of a user", "out", "checkpoint-1", "resume_from_checkpoint",
           files={"out/checkpoint-1/notes.txt": "mine"}, unchanged=("out/checkpoint-1/notes.txt",)),
    bad("evaluate: --output is another file", "data.json", "not the result", files={"data.json": "{}"},
        config={"val_set_size": 1}, command="evaluate run.yaml --output data.json"),
    bad("quickstart: a project", "data", "summary.json",
        files={"project/data/train.jsonl": ROWS, "project/summary.json": "{}"}, command="quickstart --output project",
        unchanged=("project/data/train.jsonl",)),
]  # fmt: skip

CHECKPOINTS = [
    resume("not there", {}, "resume_from_checkpoint", "out/checkpoint-1"),
    resume("an empty folder", {"out/checkpoint-1/x": ""}, "trainer_state.json"),
    resume("no optimizer", {"out/checkpoint-1/trainer_state.json": STATE}, "no weights"),
    resume("state is not JSON", {"out/checkpoint-1/trainer_state.json": "{", "out/checkpoint-1/ebft_run.json": KEYS},
           "trainer_state.json"),
]  # fmt: skip

SERVERS = [
    bad("server: nobody listens", "9",
        config={"ebft": {"mode": "structured"}, "micro_batch_size": 2, "chat_template": "chatml", "adapter": "lora",
                "lora_r": 2, "lora_alpha": 4, "lora_target_linear": True,
                "trl": {"num_generations": 2, "use_vllm": True, "vllm_mode": "server", "vllm_server_port": 9,
                        "vllm_server_timeout": 1},
                "datasets": [{"path": "pairs.jsonl", "type": "ebft_opencode.transform"}]}),
    bad("server: interpreter", "vllm.python", command="vllm-serve run.yaml vllm.python=./nothing"),
]  # fmt: skip

VALID = [
    good("output_dir: new folders", config={"output_dir": "a/b/c"}),
    good("output_dir: home", config={"output_dir": "~/runs"}, absent=("~",), unchanged=("runs",)),
    good("output_dir: a project", config={"output_dir": "."}, files={"README.md": "mine", "config.json.bak": "{}"},
         trains=True, unchanged=("README.md",), warns=("README.md was not written by a run", "no model card"),
         why="a README.md is kept, and nothing else of a project is replaced"),
    good("output_dir: a project, with an adapter", files={"config.json": "{}"}, unchanged=("config.json",),
         config={"output_dir": ".", "adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_linear": True},
         why="adapters have no config.json"),
    good("output_dir: next to the files of the data", config={"output_dir": "texts/out"}, files={"texts/a.txt": TEXT},
         command="train run.yaml datasets.0.path=texts datasets.0.data_files=a.txt",
         why="only the files in data_files are read"),
    good("output_dir: other folders named as checkpoints",
         files={"out/checkpoint-best/x": "", "out/checkpoint-a-5/x": ""},
         unchanged=("out/checkpoint-best/x", "out/checkpoint-a-5/x"), why="checkpoints are named checkpoint-N"),
]  # fmt: skip

CASES = [*FOLDERS, *CHECKPOINTS, *SERVERS, *VALID]
