"""What `ebft config --check` says about a dataset's `type`, and that built-in ones cost no heavy import."""

import subprocess
import sys

import pytest

from ebft.config.data import BUILT_IN_TRANSFORMS
from ebft.config.transforms import check_transform
from ebft.errors import DataError

MODES = {
    "tokens": [{"rl": None}, {"rl": "ebft", "ebft": {"mode": "strided"}}],
    "prompts": [{"rl": "grpo"}, {"rl": "ebft"}],
}
NAMES = [(f"{name}.{key}", rows) for name, functions in BUILT_IN_TRANSFORMS.items() for key, rows in functions.items()]


@pytest.mark.parametrize(("name", "rows"), NAMES)
def test_built_in_transforms_fit_their_modes(make, name, rows):
    for keys in MODES[rows]:
        check_transform(name, make(**keys))
    other = "prompts" if rows == "tokens" else "tokens"
    for keys in MODES[other]:
        with pytest.raises(DataError, match=f"datasets.type: '{name}' gives rows of .* trains on rows of"):
            check_transform(name, make(**keys))


@pytest.mark.parametrize(
    ("keys", "name", "message"),
    [
        ({"rl": None}, "ebft_opencode", r"plain fine-tuning \(rl is not set\) trains on rows of input_ids and labels"),
        (MODES["tokens"][1], "ebft_opencode", "strided mode trains on rows of input_ids and labels. Use ebft_pretrain"),
        ({"rl": "grpo"}, "completion", "rl: grpo trains on rows of prompt and ground_truth. Use ebft_opencode"),
        ({"rl": "ebft"}, "completion", "structured mode .* trains on rows of prompt and ground_truth"),
        ({"rl": "ebft"}, "ebft_reasoning.transfrom", "It has transform, transform_answer_only, transform_split"),
        ({"rl": "ebft"}, "ebft_opencoed.transform", "no such module here.*Did you mean 'ebft_opencode'"),
    ],
)
def test_what_cannot_be_used_says_why(make, keys, name, message):
    with pytest.raises(DataError, match=message):
        check_transform(name, make(**keys))


def test_checking_imports_nothing_heavy():
    code = """
import sys
from ebft.config import RunConfig
from ebft.config.transforms import check_transform
from ebft.errors import DataError
config = RunConfig.from_dict({"base_model": "m", "rl": "ebft", "datasets": [{"path": "d", "type": "ebft_opencode"}]})
check_transform("ebft_opencode.transform", config)
for name in ("ebft_opencode.transfrom", "ebft_opencoed.transform", "completion"):
    try:
        check_transform(name, config)
    except DataError:
        continue
    sys.exit(f"{name} was taken")
sys.exit(sorted({"torch", "transformers", "datasets", "ebft.data"} & set(sys.modules)) or 0)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
