import pytest

from ebft.errors import ConfigError


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("flash_attention", "flash_attention_2"),
        ("flex_attention", "flex_attention"),
        ("sdp_attention", "sdpa"),
        ("eager_attention", "eager"),
    ],
)
def test_a_flag_is_another_name(make, flag, value):
    assert make(**{flag: True}).attn_implementation == value
    assert make(**{flag: True, "attn_implementation": value}).attn_implementation == value
    assert make(**{flag: False}).attn_implementation is None
    assert make(**{flag: True}).model_dump()[flag] is None


def test_false_beside_another_true(make):
    assert make(flash_attention=False, flex_attention=True).attn_implementation == "flex_attention"


@pytest.mark.parametrize(
    "keys",
    [
        {"flash_attention": True, "flex_attention": True},
        {"sdp_attention": True, "attn_implementation": "eager"},
        {"flash_attention": False, "attn_implementation": "flash_attention_2"},
    ],
)
def test_contradictions_name_attn_implementation(make, keys):
    with pytest.raises(ConfigError, match="attn_implementation"):
        make(**keys)


def test_xformers_is_replaced_with_a_warning(make):
    with pytest.warns(UserWarning, match="so attn_implementation: sdpa is used"):
        assert make(xformers_attention=True).attn_implementation == "sdpa"
    with pytest.raises(ConfigError, match="xformers_attention: true, attn_implementation: eager"):
        make(xformers_attention=True, attn_implementation="eager")
    assert make(xformers_attention=False).attn_implementation is None


def test_other_names_of_transformers(make):
    assert make(attn_implementation="flex").attn_implementation == "flex_attention"
    kernel = "kernels-community/flash-attn2"
    assert make(attn_implementation=kernel).attn_implementation == kernel


def test_an_unknown_implementation(make):
    with pytest.raises(ConfigError, match="'eager'"):
        make(attn_implementation="quick")
