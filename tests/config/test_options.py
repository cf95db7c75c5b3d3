import dataclasses
import pickle
from typing import get_type_hints

from ebft import EBFTConfig
from ebft.config.options import EBFTSection, RewardOptions, RewardOptionTypes, StridedOptions
from ebft.config.section import section_of_options
from ebft.run.config.schema import RunConfig
from ebft.strided import StridedEBFTConfig
from tests.config.conftest import MINIMAL


def test_the_trainer_config_and_the_yaml_section_have_the_same_defaults_and_help(tmp_path):
    make = lambda **keys: StridedEBFTConfig(output_dir=str(tmp_path), use_cpu=True, **keys)
    defaults, config = dataclasses.asdict(StridedOptions()), make()
    found = {field.name: field for field in dataclasses.fields(StridedEBFTConfig)}
    for name, info in section_of_options(StridedOptions).model_fields.items():
        assert found[name].metadata["help"] == info.description != ""
    assert get_type_hints(RewardOptionTypes) == get_type_hints(RewardOptions)
    assert config.logging_steps == EBFTConfig(str(tmp_path), report_to=[], use_cpu=True).logging_steps == 10
    assert config.feature_layers is not make().feature_layers
    assert defaults == {name: getattr(config, name) for name in defaults}
    assert defaults.items() <= EBFTSection().model_dump().items()
    assert make(feature_layers=(0, 1)).feature_layers == [0.0, 1.0]  # converted values are written back
    loaded = RunConfig.from_dict({**MINIMAL, "rl": "ebft", "ebft": {"mode": "strided", "stride": 3}})
    assert pickle.loads(pickle.dumps(loaded)) == loaded  # to be sent to another process
