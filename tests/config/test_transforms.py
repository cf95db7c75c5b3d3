"""What `ebft config --check` says about a dataset's `type`."""

import pytest

from ebft.data.transforms import TRANSFORMS, built_in, check_transform
from ebft.errors import DataError
from tests.config.conftest import warned

MODES = {"tokens": [{"rl": None}, {"rl": "ebft", "ebft": {"mode": "strided"}}],
         "prompts": [{"rl": "grpo"}, {"rl": "ebft"}], "comparisons": [{"reward_model": True}],
         "steps": [{"process_reward_model": True}]}  # fmt: skip
NAMES = [(name, found.rows[0]) for name, found in TRANSFORMS.items() if not {*found.rows} & {"preferences", "labelled"}]
TWINS = {name: found.twin for name, found in TRANSFORMS.items() if found.twin}


def test_built_in_transforms_fit_their_modes(make):
    for name, rows in NAMES:
        for keys in MODES[rows]:
            check_transform(name, make(**keys).required_rows)
        for keys in MODES["prompts" if rows == "tokens" else "tokens"]:
            with pytest.raises(DataError, match=f"datasets.type: '{name}' returns rows of .* trains on rows of"):
                check_transform(name, make(**keys).required_rows)


@pytest.mark.parametrize("name, section", [(name, "datasets") for name in TWINS] + [("ebft_opencode", "test_datasets")])
def test_a_counterpart_stands_in_with_one_warning(make, name, section):
    (given,) = TRANSFORMS[built_in(name)].rows
    for keys in MODES["prompts" if given == "tokens" else "tokens"]:
        entries = [{"path": path, "type": name} for path in ("a", "b")]
        first = {} if section == "datasets" else {"datasets": [{"path": "c", "type": "own.transform"}]}
        config, messages = warned(make, **first, **{section: entries}, **keys)
        used = TWINS[built_in(name)]
        assert [entry.type for entry in getattr(config, section)] == [used, used]
        messages = [text for text in messages if ".type: " in text]
        assert len(messages) == 1 and messages[0].startswith(f"{section}.type: {name} is replaced with {used}: ")
        assert " trains on rows of " in messages[0]
        check_transform(used, config.required_rows)
    for keys in MODES[given]:
        assert [entry.type for entry in getattr(make(**first, **{section: entries}, **keys), section)] == [name, name]
