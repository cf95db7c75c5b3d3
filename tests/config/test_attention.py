import pytest

from ebft.errors import ConfigError


@pytest.mark.parametrize(("keys", "expected"), [
    *(({flag: True, **more}, value)
      for flag, value in (("flash_attention", "flash_attention_2"), ("flex_attention", "flex_attention"),
                          ("sdp_attention", "sdpa"), ("eager_attention", "eager"))
      for more in ({}, {"attn_implementation": value})),
    ({"flash_attention": False}, None), ({"xformers_attention": False}, None),
    ({"flash_attention": False, "flex_attention": True}, "flex_attention"),
    ({"xformers_attention": False, "sdp_attention": True}, "sdpa"),  # another name of the same kernels
    ({"attn_implementation": "flex"}, "flex_attention"),
    ({"attn_implementation": "kernels-community/flash-attn2"}, "kernels-community/flash-attn2"),
])  # fmt: skip
def test_flags_are_other_names(make, keys, expected):
    assert make(**keys).attn_implementation == expected
    assert not [key for key in keys if key != "attn_implementation" and make(**keys).model_dump()[key] is not None]


@pytest.mark.parametrize(("keys", "message"), [
    ({"flash_attention": True, "flex_attention": True}, "attn_implementation"),
    ({"sdp_attention": True, "attn_implementation": "eager"}, "attn_implementation"),
    ({"flash_attention": False, "attn_implementation": "flash_attention_2"}, "attn_implementation"),
    ({"xformers_attention": True, "attn_implementation": "eager"},
     "xformers_attention: true, attn_implementation: eager"),
    ({"attn_implementation": "quick"}, "'eager'"),
])  # fmt: skip
def test_contradictions_name_attn_implementation(make, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(**keys)


def test_xformers_is_replaced_with_a_warning(make):
    with pytest.warns(UserWarning, match="so attn_implementation: sdpa is used"):
        assert make(xformers_attention=True).attn_implementation == "sdpa"
