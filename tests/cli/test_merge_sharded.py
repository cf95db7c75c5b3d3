"""`ebft merge-sharded`: the merged model, the warning about pickle files, and an error that leaves nothing."""

from tests.cli.conftest import plain
from tests.export.test_sharded import parts  # noqa: F401  a fixture


def test_parts_of_a_sharded_model_are_merged(ebft, parts, tmp_path):  # noqa: F811
    result = ebft("merge-sharded", parts, "--output", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert f"Merged model saved in {tmp_path / 'merged'}" in result.stdout and "21 weights" in result.stdout
    assert "is a pickle file" in plain(result.stderr)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    failed = ebft("merge-sharded", parts, "--max-shard-size", "many")
    assert failed.exit_code == 1 and "'many'" in failed.stderr and not (parts / "merged").exists()
