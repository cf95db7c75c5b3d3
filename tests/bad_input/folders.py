"""Output folders, checkpoints to resume from, and servers that do not work, and ones that do."""

import json
from typing import Any

from tests.bad_input.cases import ROWS, TEXT, Case, bad, good


def folder(name: str, value: str, *expect: str, **rest: Any) -> Case:
    return bad(f"output_dir: {name}", "output_dir", *expect, config={"output_dir": value}, **rest)


def resume(name: str, files: dict[str, Any], *expect: str, at: str = "out/checkpoint-1", **rest: Any) -> Case:
    config = {"resume_from_checkpoint": at, "max_steps": 2}
    return bad(f"checkpoint: {name}", *expect, config=config, files=files, **rest)


KEYS = json.dumps({"rl": "ebft", "ebft.mode": "strided", "adapter": None, "optimizer": "adamw_torch_fused",
                   "base_model": "model"})  # fmt: skip

FOLDERS = [
    folder("below a file", "rows.jsonl/out"),
    folder("the base model", "model", "base_model", unchanged=("model/model.safetensors",)),
    folder("empty", "", command="train run.yaml"),
    bad("output_dir: the adapter that is continued", "output_dir", "lora_model_dir",
        config={"adapter": "lora", "lora_model_dir": "old", "output_dir": "old"},
        files={"old/adapter_config.json": "{}"}, unchanged=("old/adapter_config.json",)),
    folder("a model of somebody else", "theirs", "config.json", "tokenizer.json", "no run has written",
           files={"theirs/config.json": "{}", "theirs/tokenizer.json": "{}", "theirs/model.safetensors": "x"},
           unchanged=("theirs/model.safetensors",)),
    folder("the folder of the data", "texts", "datasets.0.path", "data_files", files={"texts/a.txt": TEXT},
           command="train run.yaml datasets.0.path=texts"),
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
]  # fmt: skip

VALID = [
    good("output_dir: home", config={"output_dir": "~/runs"}, absent=("~",), unchanged=("runs",)),
    good("output_dir: a project", config={"output_dir": "."}, files={"README.md": "mine", "config.json.bak": "{}"},
         trains=True, unchanged=("README.md",), warns=("README.md was not written by a run", "no model card"),
         why="a README.md is kept, and nothing else of a project is replaced"),
    good("output_dir: next to the files of the data", config={"output_dir": "texts/out"}, files={"texts/a.txt": TEXT},
         command="train run.yaml datasets.0.path=texts datasets.0.data_files=a.txt",
         why="only the files in data_files are read"),
    good("output_dir: other folders named as checkpoints",
         files={"out/checkpoint-best/x": "", "out/checkpoint-a-5/x": ""},
         unchanged=("out/checkpoint-best/x", "out/checkpoint-a-5/x"), why="checkpoints are named checkpoint-N"),
]  # fmt: skip

CASES = [*FOLDERS, *CHECKPOINTS, *SERVERS, *VALID]
