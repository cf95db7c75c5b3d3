"""User code that fails: transforms, reward functions, plugins, metrics and tools. The error shows where it failed."""

from typing import Any

from tests.bad_input.cases import GRPO, Case, bad, entry, good

OK_TRANSFORM = """
def transform(cfg, **kwargs):
    def step(example, tokenizer=None):
        {body}
        ids = tokenizer(example["text"])["input_ids"]
        return {{"input_ids": ids, "labels": list(ids)}}
    return step, {{"remove_columns": "__all__"}}
"""
PARALLEL = {"reward_num_workers": 2}


def transform(name: str, body: str, *expect: str, ok: bool = False, **config: Any) -> Case:
    """A transform with these lines for each row."""
    text = OK_TRANSFORM.format(body=body.replace("\n", "\n        "))
    make = good if ok else bad
    return make(f"transform: {name}", *expect, files={"own.py": text}, config=entry(type="own.transform") | config)


def module(name: str, text: str, *expect: str, **rest: Any) -> Case:
    """A module with a transform that cannot be imported or used."""
    return bad(f"module: {name}", *expect, files={"own.py": text}, config=entry(type="own.transform"), **rest)


def reward(name: str, body: str, *expect: str, ok: bool = False, trl: dict | None = None, warns: tuple[str, ...] = (),
           why: str = "", **config: Any) -> Case:  # fmt: skip
    """A reward function with this body."""
    text = "import math\n\n\ndef score(prompts, completions, **columns):\n    " + body.replace("\n", "\n    ") + "\n"
    trl = GRPO["trl"] | (trl or {})
    make = good if ok else bad
    name = f"reward: {name}{' in workers' if 'reward_num_workers' in trl else ''}"
    rest = {"warns": warns, "why": why} if ok else {}
    return make(name, *expect, files={"my_rewards.py": text}, config={**GRPO, "trl": trl, **config}, trains=True,
                **rest)  # fmt: skip


def plugin(name: str, body: str, *expect: str, **rest: Any) -> Case:
    text = "from transformers import TrainerCallback\n\n\nclass Own(TrainerCallback):\n    " + body + "\n"
    return bad(f"plugin: {name}", *expect, files={"own.py": text}, config={"plugins": ["own.Own"]}, **rest)


def metric(name: str, body: str, *expect: str) -> Case:
    text = f"def metric(prompt, completions, row):\n    {body}\n"
    return bad(f"metric: {name}", *expect, files={"own.py": text}, command="evaluate run.yaml",
               config={**GRPO, "evaluation": {"metrics": ["own.metric"]}, "val_set_size": 1})  # fmt: skip


RAISES = 'raise KeyError("missing")'


TRANSFORMS = [
    transform("raises", RAISES, "own.py", "line 4", "row 0", "KeyError", "missing"),
    transform("exits with 0", "import sys; sys.exit(0)", "own.py, line 4", "row 0", "it called sys.exit(0) ("),
    transform("returns floats", 'return {"input_ids": [1.5] * 20, "labels": [1] * 20}', "row 0", "input_ids"),
    transform("token ids past the vocabulary", 'return {"input_ids": [10**6] * 20, "labels": [10**6] * 20}',
              "row 0", "vocabulary"),
    *(transform(f"prompt_length {value}", f'ids = [1] * 20; return {{"input_ids": ids, "labels": ids, '
                f'"prompt_length": {value}}}', "row 0", "prompt_length", "own")
      for value in ("21", "1.5")),
    transform("exits in two processes", "import sys; sys.exit(0)", "own.py", "line 4", "exit", dataset_num_proc=2),
    transform("returns NumPy arrays",
              'import numpy as np; ids = np.arange(20); return {"input_ids": ids, "labels": ids}', ok=True),
]  # fmt: skip

MODULES = [
    bad("module: not there", "datasets", "nowhere", config=entry(type="nowhere.transform")),
    module("syntax error", "def transform(cfg:\n    pass\n", "own.py", "line 1", "SyntaxError"),
    module("transform_fn takes one argument", "def transform(cfg, **kw): return (lambda row: row), {}\n", "own",
           "tokenizer"),
]  # fmt: skip

LEFT_BEHIND = [
    reward("changes its lists", "prompts.clear()\nprompts += 'ab'\ncompletions[0][0]['content'] = 'x'\n"
           "columns['completion_ids'][0].clear()\ncolumns['ground_truth'][:] = [None] * 2\n"
           "return [float(n) for n in range(len(prompts))]", ok=True, why="each function gets copies"),
]  # fmt: skip

REWARDS = [
    reward("raises", RAISES, "my_rewards.py", "line 5", "KeyError", "score"),
    reward("raises", RAISES, "my_rewards.py", "line 5", "KeyError", "score", trl=PARALLEL),
    reward("exits with 0", "import sys; sys.exit(0)", "my_rewards.py", "line 5", "exit", "score", trl=PARALLEL),
    reward("yields without end", "while True:\n    yield 1.0", "score", "more than 2"),
    reward("returns too few", "return [1.0] * (len(prompts) - 1)", "score", "completions", trl=PARALLEL),
    reward("returns NaN", "return [math.nan] * len(prompts)", "score", "nan"),
    reward("returns a tensor", "import torch\nreturn torch.arange(len(prompts)).float()", ok=True),
    good("reward: a coroutine", config=GRPO, trains=True, files={
        "my_rewards.py": "async def score(prompts, **kw):\n    return [float(n) for n, _ in enumerate(prompts)]\n"}),
]  # fmt: skip

PLUGINS = [
    plugin("raises in training", "def on_train_begin(self, *a, **k): raise KeyError('missing')", "own.py", "line 5",
           "missing", trains=True),
    bad("plugin: of axolotl, with its base class", "No module named 'axolotl'", "needs no base class here",
        config={"plugins": ["own.Own"]}, files={
            "own.py": "from axolotl.integrations.base import BasePlugin\n\n\nclass Own(BasePlugin): ...\n"}),
    metric("returns text", "return 'good'", "metric returned 'good'", "finite number"),
]  # fmt: skip

CASES = [*TRANSFORMS, *MODULES, *REWARDS, *LEFT_BEHIND, *PLUGINS]
