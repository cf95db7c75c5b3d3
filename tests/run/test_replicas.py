"""Processes with different configs or rows are refused; what may differ between machines is not."""

import pytest

from ebft.config.section import flat_settings
from ebft.errors import ConfigError
from ebft.run import checks
from ebft.run.checks import check_equal, check_same_everywhere
from tests.config.conftest import make

__all__ = ["make"]

ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]


@pytest.fixture
def digests(make, monkeypatch):
    """`digests(precision, rows, held_out, checkpoint, **keys)`: what a process tells the others."""

    def of(precision="no", rows=ROWS, held_out=None, checkpoint=None, **keys):
        told = []
        monkeypatch.setattr("accelerate.utils.gather_object", lambda found: told.extend(found) or found)
        check_same_everywhere(make(**keys), precision, rows, held_out, checkpoint)
        (found,) = told
        return found

    return of


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"rl": "ebft", "ebft": {"mode": "strided", "stride": 3}}, "ebft.mode, ebft.stride, rl"),
        ({"datasets": [{"path": "some/data", "type": "completion", "split": "test"}]}, "datasets"),
        ({"precision": "bf16"}, "the precision in effect"),
        ({"rows": ROWS[:1]}, "the training rows"),
        ({"rows": [ROWS[0], {"input_ids": [4, 6]}]}, "the training rows"),
        ({"held_out": ROWS}, "the held-out rows"),
        ({"checkpoint": "out/checkpoint-4"}, "the checkpoint to resume from"),
    ],
)
def test_what_must_be_the_same(digests, other, name):
    first = digests()
    with pytest.raises(ConfigError, match=f"rank 1 differs from rank 0 in {name}. Start all processes, on every machi"):
        check_equal([first, digests(**other)])


def test_what_machines_may_have_in_other_places(digests, make):
    data = lambda path: [{"path": path, "type": "completion"}]
    elsewhere = {"base_model": "/b/model", "output_dir": "/b/out", "wandb_name": "b", "datasets": data("/b/two.jsonl")}
    first = digests(checkpoint="/a/checkpoint-4", datasets=data("/data/one.jsonl"))
    check_equal([first, digests(checkpoint="/b/checkpoint-4", **elsewhere)])
    assert {name for name, _ in flat_settings(make())} >= checks._OF_MACHINES
