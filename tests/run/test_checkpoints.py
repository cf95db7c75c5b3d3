"""Which checkpoint a run resumes from, and which it refuses."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.run.checkpoints import find_checkpoint
from ebft.run.same_run import SaveRunKeys

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"]}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided"}}


@pytest.fixture
def make(tmp_path):
    """`make(**keys)`: a config whose output_dir is `tmp_path`."""
    required = {"base_model": "some/model", "datasets": [{"path": "some/data", "type": "completion"}]}
    return lambda **keys: RunConfig.from_dict({**required, "output_dir": tmp_path, **keys})


@pytest.fixture
def checkpoint(tmp_path):
    """`checkpoint(step, *files)`: the folder of a complete checkpoint in `tmp_path`, with these empty files."""

    def save(step, *files):
        folder = tmp_path / f"checkpoint-{step}"
        for name in ("trainer_state.json", *files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        return folder

    return save


@pytest.mark.parametrize("auto", [True, False])
def test_a_checkpoint_without_optimizer_state_is_refused(make, checkpoint, auto):
    folder = checkpoint(3, "model.safetensors")
    keys = {"auto_resume_from_checkpoints": True} if auto else {"resume_from_checkpoint": folder}
    with pytest.raises(ConfigError, match="checkpoint-3: it has no optimizer state.*save_only_model.*lora_model_dir"):
        find_checkpoint(make(**keys))


@pytest.mark.parametrize(
    "file", ["optimizer.pt", "optimizer.bin", "optimizer_0/.metadata", "optimizer/.metadata", "global_step3/states.pt"]
)
def test_optimizer_state_may_be_sharded(make, checkpoint, file):
    folder = checkpoint(3, file)
    assert find_checkpoint(make(resume_from_checkpoint=folder)) == str(folder)


def test_a_new_run_beside_checkpoints_of_another_gives_a_warning(make, checkpoint, recwarn):
    checkpoint(7, "optimizer.pt")
    checkpoint(300, "optimizer.pt")
    assert find_checkpoint(make()) is None
    assert [str(warning.message) for warning in recwarn] == [
        f"output_dir: {make().output_dir} has checkpoints of an earlier run, up to checkpoint-300. This run does not "
        "resume from them, but auto_resume_from_checkpoints would later continue from the highest step of both runs. "
        "Set another output_dir, or delete them."
    ]


@pytest.mark.parametrize("auto", [True, False])
def test_a_resumed_run_or_an_empty_folder_gives_no_warning(make, checkpoint, recwarn, tmp_path, auto):
    assert find_checkpoint(make(auto_resume_from_checkpoints=auto)) is None
    folder = checkpoint(300, "optimizer.pt")
    keys = {"auto_resume_from_checkpoints": True} if auto else {"resume_from_checkpoint": folder}
    assert find_checkpoint(make(**keys)) == str(folder)
    assert not list(recwarn)


def save_keys(config, folder):
    state = TrainerState(global_step=int(folder.name.rpartition("-")[2]))
    SaveRunKeys(config).on_save(SimpleNamespace(output_dir=folder.parent), state, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_r": 16}, "lora_r: 16 differs from lora_r: 4 of .*checkpoint-3. Set it to 4, or start a new run in"),
        ({"lora_alpha": 16}, "lora_alpha: 16.0 differs from lora_alpha: 8.0"),
        (
            {"lora_target_modules": ["q_proj"]},
            r'lora_target_modules: \["q_proj"\] differs from .* \["q_proj", "v_proj"',
        ),
        ({"lora_target_modules": None, "lora_target_linear": True}, "lora_target_linear: true differs .*: false"),
        ({"lora_modules_to_save": ["lm_head"]}, r'lora_modules_to_save: \["lm_head"\] differs from .*: null'),
        (dict.fromkeys(LORA), "adapter: null differs from adapter: lora"),
        ({"optimizer": "adafactor"}, "optimizer: adafactor differs from optimizer: adamw_torch_fused"),
        ({"rl": None, "ebft": {}}, "rl: null differs from rl: ebft"),
        ({"ebft": {"mode": "structured"}}, "ebft.mode: structured differs from ebft.mode: strided"),
        ({"lora_r": 16, "optimizer": "adafactor"}, "(?s)optimizer: adafactor.*\n.*lora_r: 16"),
    ],
)
def test_a_changed_setting_is_refused(make, checkpoint, changes, message):
    folder = checkpoint(3, "optimizer.pt")
    save_keys(make(**STRIDED, **LORA), folder)
    with pytest.raises(ConfigError, match=message):
        find_checkpoint(make(**{**STRIDED, **LORA, **changes, "resume_from_checkpoint": folder}))


def test_an_added_adapter_is_refused(make, checkpoint):
    folder = checkpoint(3, "optimizer.pt")
    save_keys(make(), folder)
    with pytest.raises(ConfigError, match="adapter: lora differs from adapter: null") as caught:
        find_checkpoint(make(**LORA, auto_resume_from_checkpoints=True))
    assert "lora_r" not in str(caught.value)


def test_the_length_and_the_order_of_target_modules_may_change(make, checkpoint, recwarn):
    folder = checkpoint(3, "optimizer.pt")
    save_keys(make(**LORA, max_steps=5), folder)
    changes = {
        "lora_target_modules": ["v_proj", "q_proj"],
        "learning_rate": 1e-4,
        "max_steps": 9,
        "micro_batch_size": 2,
        "budget": {"documents": 7},
        "seed": 1,
    }
    assert find_checkpoint(make(**{**LORA, **changes, "resume_from_checkpoint": folder})) == str(folder)
    assert not list(recwarn)


def test_another_base_model_gives_a_warning(make, checkpoint):
    folder = checkpoint(3, "optimizer.pt")
    save_keys(make(), folder)
    with pytest.warns(UserWarning, match="base_model: other/model differs from base_model: some/model of "):
        assert find_checkpoint(make(base_model="other/model", resume_from_checkpoint=folder)) == str(folder)


@pytest.mark.parametrize(
    ("file", "keys", "message"),
    [
        ("adapter_config.json", LORA | {"lora_r": 16}, "lora_r: 16 differs from lora_r: 4"),
        ("adapter_config.json", LORA | {"lora_alpha": 16}, "lora_alpha: 16.0 differs from lora_alpha: 8"),
        ("adapter_config.json", {}, "adapter: null differs from adapter: lora"),
        ("model.safetensors", LORA, "adapter: lora differs from adapter: null"),
        ("adapter_config.json", LORA, None),
        ("adapter_config.json", {"adapter": "lora", "lora_model_dir": "checkpoint-3"}, None),
        ("model.safetensors", {}, None),
        ("adapter_config.json", {"lora_model_dir": "checkpoint-3"}, "adapter: null differs from adapter: lora"),
        ("pytorch_model_fsdp_0/.metadata", LORA, None),  # whether these weights are an adapter is unknown
    ],
)
def test_an_older_checkpoint_is_checked_by_its_files(make, checkpoint, monkeypatch, tmp_path, file, keys, message):
    monkeypatch.chdir(tmp_path)
    folder = checkpoint(3, "optimizer.pt", file)
    if file == "adapter_config.json":
        (folder / file).write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    config = make(**keys, resume_from_checkpoint=folder)
    if message is None:
        assert find_checkpoint(config) == str(folder)
    else:
        with pytest.raises(ConfigError, match=message):
            find_checkpoint(config)


def test_a_file_of_settings_that_cannot_be_read(make, checkpoint):
    folder = checkpoint(3, "optimizer.pt", "ebft_run.json")
    with pytest.raises(ConfigError, match="ebft_run.json cannot be read .* Resume from another checkpoint"):
        find_checkpoint(make(resume_from_checkpoint=folder))
