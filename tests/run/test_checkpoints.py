"""Which checkpoint a run resumes from, and which it refuses."""

import pytest

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.run.checkpoints import find_checkpoint


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
