"""Commands that only read a config import no package that takes long, so that they answer at once."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAVY = ("torch", "transformers", "pandas", "datasets", "trl", "peft", "accelerate", "numpy", "pyarrow", "gguf",
         "ebft.data.load")  # fmt: skip
RUN = """
import os, sys
from ebft.tools.cli import app, main

def run(function, words, **arguments):
    sys.argv = ["ebft", *words]
    try:
        function(**arguments)
    except SystemExit as stop:
        assert not stop.code, words
    assert not (found := set({heavy}) & set(sys.modules)), f"{{words}} imports {{', '.join(sorted(found))}}"

for words in {commands}:
    run(main, words)
os.environ["_EBFT_COMPLETE"] = "complete_bash"
for words in ("train run.yaml ebft.str", "show . --sort al", "quantize . --type i", "evaluate run.yaml --model smol"):
    os.environ |= {{"COMP_WORDS": f"ebft {{words}}", "COMP_CWORD": str(len(words.split()))}}
    run(app, [], prog_name="ebft")
"""
# Keys whose values are known to transformers, PyTorch or TRL.
CHECKED = """
base_model: some/model
datasets: [{path: some/data, type: chat_template}]
optimizer: sgd
lr_scheduler: cosine
report_to: none
bf16: true
attn_implementation: sdpa
"""
TRL = "trl: {loss_type: dapo, reward_funcs: [feature_matching]}\n"
METHODS = {
    "sft": ("chat_template", "torch_compile: true\ntorch_compile_mode: default\n"),
    "dpo": ("chat_template.default", "rl: dpo\ndpo_loss_type: [sigmoid, sft]\n"),
    "grpo": ("ebft_chat_multiturn.transform", "rl: grpo\nmicro_batch_size: 8\n" + TRL),
}


def test_help_lists_completion_and_checks_of_configs_import_nothing_heavy(tmp_path):
    """Of every example, and of configs with names that other packages know."""
    paths = sorted(EXAMPLES.glob("*.yaml"))
    assert len(paths) > 20
    for method, (kind, keys) in METHODS.items():
        paths.append(tmp_path / f"{method}.yaml")
        paths[-1].write_text(CHECKED.replace("chat_template}", f"{kind}}}") + keys)
    commands = [[command, "--help"] for command in ("config", "train", "vllm-serve", "fetch")]
    commands += [["--help"], ["fetch"], *(["config", "--check", str(path)] for path in paths)]
    code = RUN.format(commands=commands, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-5:] == ["ebft.stride=", "alignment", "int8", "int4", "smollm2-135m"]
