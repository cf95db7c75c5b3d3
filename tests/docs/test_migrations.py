"""The pages on axolotl and TRL, followed step by step with a tiny model and few steps; and what pages claim of keys."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from ebft.config.axolotl import PLUGINS, SINGLE, UNSUPPORTED_IN_DATASETS, UNSUPPORTED_KEYS
from ebft.config.section import PromptFormat
from ebft.errors import EBFTError
from ebft.machine import Machine
from ebft.run.checks import check_runnable
from ebft.run.config.schema import RunConfig
from ebft.run.trainer import training_kwargs
from tests.config.conftest import MINIMAL
from tests.docs.blocks import ROOT, Block, blocks_of, shell_lines

TINY = {"max_steps=20": "max_steps=1, logging_steps=1", "max_completion_length=32": "max_completion_length=4"}
END = "=== end of a command"
ON_CPU = "use_cpu=True, bf16=False, "  # as the page says for machines without a GPU


@pytest.fixture(scope="module")
def chat_model_dir(tmp_path_factory) -> Path:
    """A tiny chat model with a ChatML template."""
    from tests.structured.conftest import chat_model, make_chat_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("chat"), make_chat_tokenizer()
    chat_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(arguments: list[str], folder: Path, status: int = 0) -> str:
    """What a command prints in `folder`; `ebft` and `python` are those of this environment and checkout."""
    program = [sys.executable, "-m", "ebft"] if arguments[0] == "ebft" else [sys.executable]
    paths = f"{ROOT / 'src'}{os.pathsep}{folder}"
    environment = {**os.environ, "PYTHONPATH": paths, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    command = [*program, *arguments[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == status, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def run_all(commands: list[list[str]], folder: Path) -> list[str]:
    """What each of these `ebft` commands prints. One process runs them all: importing torch takes most of the time."""
    lines = (
        "import sys",
        "from ebft.tools.cli import app",
        f"for arguments in {[command[1:] for command in commands]}:",
        "    status = app(arguments, standalone_mode=False)",
        f"    print({END!r}, flush=True)",
        "    if status: sys.exit(status)",
    )
    return run(["python", "-c", "\n".join(lines)], folder).split(END)


def write(block: Block, folder: Path, text: str | None = None) -> Path:
    path = folder / block.title
    path.write_text(block.code if text is None else text, encoding="utf-8")
    return path


def titled(page: Path) -> dict[str, Block]:
    return {block.title: block for block in blocks_of(page) if block.title}


def lines_of(page: Path) -> list[str]:
    return [line.partition(" #")[0].strip() for block in blocks_of(page) for line in shell_lines(block)]


@pytest.mark.slow
def test_from_axolotl(chat_model_dir, tmp_path):
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

    small = [f"base_model={chat_model_dir}", "max_steps=2", "save_steps=2", "flex_attention=false"]
    small += ["sequence_len=96", "ebft.stride=16"]
    results = run_all([[*command[:3], *small, *command[3:]] for command in commands], tmp_path)
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
def test_from_trl_in_python(chat_model_dir, tmp_path):
    files = titled(ROOT / "docs" / "from-trl.md")
    scripts = ["grpo.py", "grpo_with_features.py", "ebft_run.py", "strided_run.py"]
    for name in scripts:
        write(files[name], tmp_path, small_script(files[name].code, chat_model_dir))
    # One process runs them all: importing TRL takes most of the time.
    program = f"import runpy\nfor name in {scripts}:\n    runpy.run_path(name, run_name='__main__')"
    run(["python", "-c", program], tmp_path)
    for name in ("grpo", "grpo-with-features", "ebft", "strided"):
        assert (tmp_path / "outputs" / name / "checkpoint-1" / "adapter_model.safetensors").is_file(), name
    state = tmp_path / "outputs" / "grpo-with-features" / "checkpoint-1" / "trainer_state.json"
    assert {"rewards/correct/mean", "rewards/feature_matching/mean"} <= _logged(state)
    for name in ("ebft", "strided"):
        state = tmp_path / "outputs" / name / "checkpoint-1" / "trainer_state.json"
        assert {"ebft/alignment", "ebft/cfm_loss", "ebft/ce_loss"} <= _logged(state), name


@pytest.mark.slow
def test_from_trl_as_a_config(chat_model_dir, tmp_path):
    page = ROOT / "docs" / "from-trl.md"
    files = titled(page)
    for name in ("grpo.py", "questions.py"):
        write(files[name], tmp_path, small_script(files[name].code, chat_model_dir))
    write(files["run.yaml"], tmp_path)
    rows, *commands = [shlex.split(line) for line in lines_of(page)]
    assert [command[1] for command in commands] == ["train", "train", "evaluate"]
    run(rows, tmp_path)
    small = [f"base_model={chat_model_dir}", "max_steps=1", "trl.max_completion_length=4", "evaluation.samples=2"]
    results = run_all([[*command[:3], *small, *command[3:]] for command in commands], tmp_path)
    assert "Model saved in outputs/config" in results[0]
    assert "Model saved in outputs/config-grpo" in results[1]
    assert "cfm_loss" in results[2] and "is_correct_pass@1" in results[2] and "is_correct_greedy" in results[2]


def _logged(state: Path) -> set[str]:
    return {key for entry in json.loads(state.read_text())["log_history"] for key in entry}


def _outcome(keys: dict) -> str:
    """The error or the warnings of a config, after `ebft config --check` if it loads; "" if there is nothing to say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = RunConfig.from_dict({**MINIMAL, **keys})
            check_runnable(config, elsewhere=True)
        except EBFTError as error:
            return f"refused: {error}"
    return "\n".join(str(warning.message) for warning in caught)


PROMPTS = {"datasets": [{"path": "a", "type": "ebft_opencode"}], "micro_batch_size": 8}
FALSE = "A key that is not supported may stay in the file without a value, or with the value false."
OF_PLUGINS = "`plugins` of axolotl for kernels, SwanLab and NeMo Gym"
IDLE = "Keys that do not apply produce a"
NEXT = "other `plugins` of axolotl | refused"
DIFFUSION = "`diffusion`, and its plugin | refused: a masked-diffusion model is another class of model"
FLATTENED = "`batch_flattening` with `rl: ebft` and `rl: grpo` | no effect, with a warning"


@pytest.mark.parametrize(("page", "claim", "keys", "outcome"), [
    *(("docs/from-axolotl.md", FALSE, keys, "") for value in (None, False) for keys in (
        {name: value for name in [*UNSUPPORTED_KEYS, *SINGLE] if "." not in name},
        {"trl": {name[4:]: value for name in UNSUPPORTED_KEYS if name.startswith("trl.")}},
        {"datasets": [{**MINIMAL["datasets"][0], **dict.fromkeys(UNSUPPORTED_IN_DATASETS, value)}]})),
    *(("docs/from-axolotl.md", OF_PLUGINS, {"plugins": [f"axolotl.integrations.{name}"]}, "has no effect: ")
      for name in PLUGINS if "nemo" not in name),
    *(("docs/from-axolotl.md", NEXT, {"plugins": [f"axolotl.integrations.{name}"]}, "refused: .*is a plugin for ax")
      for name in ("kd.KDPlugin", "later.UnknownPlugin")),
    *(("docs/from-axolotl.md", DIFFUSION, keys, "refused: .*masked-diffusion models are another class .*sampler")
      for keys in ({"diffusion": {"eps": 0.1}}, {"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]})),
    *(("docs/from-axolotl.md", FLATTENED, {**PROMPTS, **method, "batch_flattening": True}, "batch_flattening has no e")
      for method in ({"rl": "ebft"}, {"rl": "grpo", "trl": {"reward_funcs": ["json.dumps"]}})),
    ("docs/from-axolotl.md", "`model_quantization_config: Mxfp4Config` with `{dequantize: true}` | the same",
     {"model_quantization_config": "Mxfp4Config", "model_quantization_config_kwargs": {"dequantize": True}}, ""),
    ("docs/from-axolotl.md", "No effect with `torch_compile`, with a warning",
     {"torch_compile": True, "activation_offloading": True}, "activation_offloading: true has no effect with torch_co"),
    ("docs/from-axolotl.md", "`trl.use_data_producer` and `vllm.serve_module` are not needed and have",
     {**PROMPTS, "rl": "ebft", "trl": {"use_vllm": True}, "vllm": {"serve_module": "a.b"}}, "vllm.serve_module has no"),
    ("docs/index.md", IDLE, {"trl": {"beta": 0.1}}, "trl: no effect"),
    ("docs/index.md", IDLE, {"freeze_mm_modules": True}, "freeze_mm_modules: True has no effect"),
    ("docs/index.md", "an unknown key is an error", {"learning_rat": 1e-4}, "refused: Unknown key 'learning_rat'"),
    ("docs/commands.md", "trackers", {"use_swanlab": True}, "Needed for training: report_to: swanlab is not installed"),
    ("docs/commands.md", "trackers", {"report_to": "nobody"}, "refused: report_to: unknown tracker 'nobody'"),
    ("docs/commands.md", "Packages that training needs but that are missing here are warnings",
     {"report_to": ["clearml"]}, "Needed for training: report_to: clearml is not installed. Run `pip install clearml`"),
    ("docs/commands.md", "optimizer and schedule", {"lr_scheduler": "rex"}, "refused: lr_scheduler: rex"),
    ("docs/options.md", "overrides num_epochs. -1 is the same as unset", {"max_steps": -1}, ""),
])  # fmt: skip
def test_a_claim_about_keys(monkeypatch, page, claim, keys, outcome):
    monkeypatch.setattr("ebft.run.reporting.find_spec", lambda name: None)
    assert claim in " ".join((ROOT / page).read_text(encoding="utf-8").split())
    said = _outcome(keys)
    assert re.search(outcome, said, re.DOTALL) if outcome else said == ""


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


def test_other_values_that_differ_from_axolotl():
    text = (ROOT / "docs" / "from-axolotl.md").read_text(encoding="utf-8")
    config = RunConfig.from_dict(MINIMAL)
    assert f"| {config.trl.temperature} and `{config.trl.loss_type}`, as for `rl: ebft`" in text
    assert "| `mean_resizing_embeddings` | `false` | `true`" in text and config.mean_resizing_embeddings
    assert "and without input `{instruction}` |" in text
    assert PromptFormat().format == "{instruction}\n\n{input}" and PromptFormat().no_input_format is None
    assert "parts of an epoch, or of a run that is shorter" in text  # tests/config/test_arguments.py


def test_the_metrics_of_axolotl_have_the_same_names():
    names = {"alignment", "diversity", "cfm_loss"}
    for run_, of_mode in (("strided_full", {"rl_loss", "ce_loss", "mean_reward", "advantages_std"}),
                          ("structured_single_turn", {"reward"})):  # fmt: skip
        logged = json.loads((ROOT / "tests" / "golden" / f"{run_}.json").read_text())["steps"][0]
        assert {f"ebft/{name}" for name in names | of_mode} <= logged.keys()


def test_the_page_of_installation_lists_the_extras():
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8").partition("Extras are ")[2].partition(": `pip")[0]
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"`(\w+)`", text)) == declared.keys() - {"gguf", "study", "docs", "dev"}
