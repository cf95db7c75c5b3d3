import dataclasses
import pickle
from dataclasses import dataclass

from ebft.config.options import EBFTSection, StridedOptions
from ebft.config.rules import validate_options
from ebft.config.section import section_of_options
from ebft.run.config.schema import RunConfig
from tests.config.conftest import MINIMAL


@dataclass
class Base:
    before: int = 1


@dataclass
class Options(StridedOptions, Base):
    after: int = 2

    def __post_init__(self):
        validate_options(StridedOptions, self)


def test_a_class_with_options_has_their_fields_defaults_and_help():
    declared = {field.name: field for field in dataclasses.fields(StridedOptions)}
    found = {field.name: field for field in dataclasses.fields(Options)}
    assert set(found) == {"before", "after", *declared}
    for name, info in section_of_options(StridedOptions).model_fields.items():
        assert getattr(Options(), name) == info.get_default(call_default_factory=True)
        assert found[name].metadata["help"] == info.description != ""
    assert Options().feature_layers is not Options().feature_layers


def test_the_trainer_config_and_the_yaml_section_have_the_same_defaults(tmp_path):
    from ebft.strided import StridedEBFTConfig

    defaults, config = dataclasses.asdict(StridedOptions()), StridedEBFTConfig(output_dir=str(tmp_path), use_cpu=True)
    assert defaults == {name: getattr(config, name) for name in defaults}
    assert defaults.items() <= EBFTSection().model_dump().items()
    assert Options(feature_layers=(0, 1)).feature_layers == [0.0, 1.0]  # converted values are written back
    loaded = RunConfig.from_dict({**MINIMAL, "rl": "ebft", "ebft": {"mode": "strided", "stride": 3}})
    assert pickle.loads(pickle.dumps(loaded)) == loaded  # to be sent to another process
