import pytest

from ebft.config.load import load_config
from ebft.errors import ConfigError


def test_values_are_read_as_yaml(write):
    config = load_config(
        write("rl: ebft\nebft:\n  mode: strided\n"),
        ["ebft.stride=4", "learning_rate=1e-5", "ebft.use_whitening=true", "ebft.feature_layers=[0.5]"],
    )
    assert config.ebft.stride == 4 and config.ebft.use_whitening is True
    assert config.learning_rate == 1e-5 and config.ebft.feature_layers == [0.5]


def test_an_element_of_a_list(write):
    config = load_config(write(), ["datasets.0.path=notes.txt", "datasets.1.path=b", "datasets.1.type=completion"])
    assert [entry.path for entry in config.datasets] == ["notes.txt", "b"]


def test_a_whole_list(write):
    config = load_config(write(), ["datasets=[{path: x, type: y.transform}]"])
    assert [(entry.path, entry.type) for entry in config.datasets] == [("x", "y.transform")]


def test_a_section_that_the_file_lacks(write):
    assert load_config(write(), ["special_tokens.pad_token=<pad>"]).special_tokens.pad_token == "<pad>"


def test_nothing_means_unset(write):
    assert load_config(write("max_steps: 5\n"), ["max_steps="]).max_steps is None


def test_a_value_may_hold_an_equals_sign(write):
    assert load_config(write(), ["wandb_name=a=b"]).wandb_name == "a=b"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("stride", ("'stride'; expected key=value", "ebft.stride=4")),
        ("=4", ("expected key=value",)),
        ("base_model.x=1", ("cannot set 'x' in 'some/model'",)),
        ("datasets.7.path=a", ("'7' is not a valid index for a list of length 1",)),
        ("datasets.first.path=a", ("'first'",)),
        ("datasets.².path=a", ("not a valid index for a list of length 1",)),
        ("--learning-rate=1e-4", ("without dashes: learning_rate=1e-4",)),
        ("seed=[", ("not valid YAML", "Quote it")),
        ("ebft.strid=1", ("Unknown key 'ebft.strid'", "'ebft.stride'")),
    ],
)
def test_a_wrong_override_says_what_to_type(write, override, parts):
    with pytest.raises(ConfigError) as caught:
        load_config(write(), [override])
    for part in parts:
        assert part in str(caught.value)


def test_one_text_is_not_a_list_of_overrides(write):
    with pytest.raises(ConfigError, match="must be a list"):
        load_config(write(), "seed=1")
