"""Training with prepared rows gives what training without them gives."""

import pytest

from ebft import train


def losses(result):
    keys = ("loss", "grad_norm", "eval_ce_loss", "eval_cfm_loss", "reward")
    return [{key: entry[key] for key in keys if key in entry} for entry in result.trainer.state.log_history]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["packed", "structured"])
def test_losses_are_the_same(make, tmp_path, capsys, method):
    base = tmp_path / "prepared"
    direct = losses(train(make(method)))
    assert not base.exists()
    lines = []
    for _ in range(2):
        capsys.readouterr()
        assert losses(train(make(method, dataset_prepared_path=str(base)))) == direct
        lines += [line for line in capsys.readouterr().err.splitlines() if "prepared rows" in line]
    folder = next(path for path in base.iterdir() if path.is_dir())
    assert [line.partition(" ")[0] for line in lines] == ["Stored", "Using"]
    assert all(f"prepared rows in {folder}: " in line and " for evaluation" in line for line in lines)
