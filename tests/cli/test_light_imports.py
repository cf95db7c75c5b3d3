"""Commands that only read a config import no package that takes long, so that they answer at once."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAVY = ("torch", "transformers", "pandas", "datasets", "trl", "peft", "accelerate", "numpy", "pyarrow")
RUN = """
import sys
from ebft.tools.cli import main
for words in {commands}:
    sys.argv = ["ebft", *words]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, words
    assert not (found := set({heavy}) & set(sys.modules)), f"{{words}} imports {{', '.join(sorted(found))}}"
"""
# Keys whose values are known to transformers, PyTorch or TRL.
CHECKED = """
base_model: some/model
datasets: [{path: some/data, type: chat_template}]
optimizer: sgd
optim_args: {momentum: 0.9}
lr_scheduler: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
report_to: none
bf16: true
attn_implementation: sdpa
"""
METHODS = {
    "sft": "torch_compile: true\ntorch_compile_mode: default\n",
    "dpo": "rl: dpo\ndpo_loss_type: [sigmoid, sft]\n",
    "grpo": "rl: grpo\nmicro_batch_size: 8\ntrl: {loss_type: dapo, reward_funcs: [feature_matching]}\n",
}


def run(commands):
    code = RUN.format(commands=commands, heavy=HEAVY)
    return subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True)


def test_help_and_checks_of_every_example_import_nothing_heavy():
    checks = [["config", "--check", path.name] for path in sorted(EXAMPLES.glob("*.yaml"))]
    done = run([["--help"], ["config", "--help"], *checks])
    assert len(checks) > 20 and done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("method", METHODS)
def test_a_check_of_names_of_other_packages_does_not_import_them(method, tmp_path):
    kind = {"dpo": "chat_template.default", "grpo": "ebft_chat_multiturn.transform"}.get(method, "chat_template")
    path = tmp_path / "run.yaml"
    path.write_text(CHECKED.replace("chat_template}", f"{kind}}}") + METHODS[method])
    done = run([["config", "--check", str(path)]])
    assert done.returncode == 0, done.stderr[-2000:]
