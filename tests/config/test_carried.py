"""Configs of the kinds that axolotl's examples have: each loads, or is refused with the reason."""

import warnings

import pytest

from ebft.config.schema import load_config
from ebft.errors import ConfigError
from tests.config.carried.configs import COMMON, CONFIGS

# The configs that do not load, and what the message says.
REFUSED = {"llama-3 relora": "relora is not supported: ReLoRA merges the adapter",
           "llama-3 loftq": "peft is not supported: LoftQ replaces",
           "llama-3 context parallel": "context_parallel_size: 4 is not supported: sequences are not split",
           "llama-3 vision": "processor_type is not supported: models are trained on text only"}  # fmt: skip


def values_of(name):
    """The keys of a config; those of a later part, and at last its own, replace earlier ones."""
    base_model, parts, own = CONFIGS[name]
    values = {"base_model": base_model}
    for keys in (COMMON, *parts, own):
        plugins = [*values.get("plugins", []), *keys.get("plugins", [])]
        values |= {**keys, **({"plugins": plugins} if plugins else {})}
    return values


def load(name, tmp_path):
    from ruamel.yaml import YAML

    with open(tmp_path / "config.yaml", "w", encoding="utf-8") as file:
        YAML().dump(values_of(name), file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return load_config(tmp_path / "config.yaml"), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in REFUSED])
def test_it_loads_and_every_warning_names_a_key(name, tmp_path):
    config, messages = load(name, tmp_path)
    assert config.method.name.startswith("SFT") and config.base_model == CONFIGS[name][0]
    for message in messages:
        assert message.partition(":")[0].split(",")[0] in values_of(name)


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_it_is_refused_with_the_reason(name, message, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load(name, tmp_path)


def test_most_configs_load():
    assert len(CONFIGS) >= 30 and len(REFUSED) <= 0.2 * len(CONFIGS)
