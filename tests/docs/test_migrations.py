"""The pages on axolotl and TRL, followed step by step with a tiny model and few steps; and the defaults that differ."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ebft.machine import Machine
from ebft.run.config.schema import RunConfig
from ebft.run.trainer import training_kwargs
from tests.config.conftest import MINIMAL
from tests.docs.blocks import ROOT, Block, blocks_of, shell_lines
from tests.reward_models.conftest import model_dir  # noqa: F401 (a fixture)

TINY = {"max_steps=20": "max_steps=1, logging_steps=1", "max_completion_length=32": "max_completion_length=4"}
ON_CPU = "use_cpu=True, bf16=False, "  # as the page says for machines without a GPU


def run(arguments: list[str], folder: Path, status: int = 0) -> str:
    """What a command prints in `folder`; `ebft` and `python` are those of this environment and checkout."""
    program = [sys.executable, "-m", "ebft"] if arguments[0] == "ebft" else [sys.executable]
    paths = f"{ROOT / 'src'}{os.pathsep}{folder}"
    environment = {**os.environ, "PYTHONPATH": paths, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    command = [*program, *arguments[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == status, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def write(block: Block, folder: Path, text: str | None = None) -> Path:
    path = folder / block.title
    path.write_text(block.code if text is None else text, encoding="utf-8")
    return path


def titled(page: Path) -> dict[str, Block]:
    return {block.title: block for block in blocks_of(page) if block.title}


def lines_of(page: Path) -> list[str]:
    return [line.partition(" #")[0].strip() for block in blocks_of(page) for line in shell_lines(block)]


@pytest.mark.slow
def test_from_axolotl(model_dir, tmp_path):  # noqa: F811
    page = ROOT / "docs" / "from-axolotl.md"
    files = titled(page)
    write(files["make_rows.py"], tmp_path)
    run(["python", "make_rows.py"], tmp_path)
    config = write(files["axolotl.yaml"], tmp_path)
    checked, *commands = [shlex.split(line) for line in lines_of(page)]
    verbs = [command[1] for command in (checked, *commands)]
    assert verbs == ["config", "train", "evaluate", "inference", "merge-lora"]
    expected = [block.code.strip() for block in blocks_of(page) if block.language == "text"]

    assert run(checked, tmp_path, status=2).strip() == expected[0]
    lines = files["axolotl.yaml"].code.split("\n")
    (removed,) = files["axolotl.yaml"].highlighted
    assert f"Remove the line `{lines.pop(removed - 1)}`" in page.read_text(encoding="utf-8")
    config.write_text("\n".join(lines), encoding="utf-8")
    said = run(checked, tmp_path)
    for line in expected[1].split("\n"):
        assert line in said
    assert "axolotl.yaml is valid for strided mode" in said

    small = [f"base_model={model_dir}", "max_steps=2", "save_steps=2", "flex_attention=false"]
    small += ["sequence_len=96", "ebft.stride=16"]
    results = [run([*command[:3], *small, *command[3:]], tmp_path) for command in commands]
    assert "step 2/2" in results[0] and "Model saved in outputs/from-axolotl" in results[0]
    models = json.loads((tmp_path / "result.json").read_text())["models"]
    assert len(models) == 2 and {"cfm_loss", "ce_loss"} <= models[1]["metrics"].keys()
    assert results[2].strip()
    assert (tmp_path / "outputs" / "from-axolotl" / "merged" / "model.safetensors").is_file()


def small_script(text: str, model: Path) -> str:
    """A script of the page with the tiny model and few steps; `GRPOConfig` of TRL needs what the page says for CPUs."""
    text = text.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model))
    for long, short in TINY.items():
        text = text.replace(long, short)
    return re.sub(r"(?<!E)(=GRPOConfig\()", rf"\1{ON_CPU}", text)


@pytest.mark.slow
def test_from_trl_in_python(model_dir, tmp_path):  # noqa: F811
    files = titled(ROOT / "docs" / "from-trl.md")
    scripts = ["grpo.py", "grpo_with_features.py", "ebft_run.py", "strided_run.py"]
    for name in scripts:
        write(files[name], tmp_path, small_script(files[name].code, model_dir))
    # One process runs them all: importing TRL takes most of the time.
    program = f"import runpy\nfor name in {scripts}:\n    runpy.run_path(name, run_name='__main__')"
    run(["python", "-c", program], tmp_path)
    for name in ("grpo", "grpo-with-features", "ebft", "strided"):
        assert (tmp_path / "outputs" / name / "checkpoint-1" / "adapter_model.safetensors").is_file(), name
    of_ebft = {"ebft/alignment", "ebft/cfm_loss", "ebft/ce_loss"}
    of_grpo = {"rewards/correct/mean", "rewards/feature_matching/mean", "ebft/mean_reward"}
    for name, expected in (("grpo-with-features", of_grpo), ("ebft", of_ebft), ("strided", of_ebft)):
        state = tmp_path / "outputs" / name / "checkpoint-1" / "trainer_state.json"
        assert expected <= {key for entry in json.loads(state.read_text())["log_history"] for key in entry}, name


@pytest.mark.parametrize(("claim", "key", "given"), [
    ("| warmup, without a key of it | 3% of the steps, at most 100 | none", "warmup_steps", None),
    ("| `eval_on_start` | on if `eval_steps` or `eval_strategy` is set | off", "eval_on_start", False),
    ("with held-out rows and no key of it | none | at the end of every epoch", "eval_strategy", "epoch"),
    ("| `save_total_limit` | 4 | all checkpoints are kept", "save_total_limit", None),
    ("| `logging_steps` | 0.5% of the steps, from 1 to 10 | 1 |", "logging_steps", 1),
    ("| `bf16: auto` on a GPU without it | `fp16: true` | float32", "bf16", False),
    ("| best checkpoint |", "load_best_model_at_end", None),
])  # fmt: skip
def test_a_default_that_differs_from_axolotl(claim, key, given):
    assert claim in (ROOT / "docs" / "from-axolotl.md").read_text(encoding="utf-8")
    config = RunConfig.from_dict({**MINIMAL, "val_set_size": 2, "bf16": "auto"})
    found = training_kwargs(config, Machine(has_accelerator=True, supports_bf16=False), rows=100, has_eval=True)
    assert found.get(key) == given and not found.get("fp16")
