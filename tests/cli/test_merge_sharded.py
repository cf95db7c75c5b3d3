"""`ebft merge-sharded` as a user runs it."""

from tests.cli.conftest import plain
from tests.export.test_sharded import parts  # noqa: F401  a fixture


def test_the_command(ebft, parts, tmp_path):  # noqa: F811
    result = ebft("merge-sharded", parts, "--output", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert f"Merged model saved in {tmp_path / 'merged'}" in result.stdout and "21 weights" in result.stdout
    assert "is a pickle file" in plain(result.stderr)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    for arguments in ([tmp_path], [parts, "--output", tmp_path / "merged"], [parts, "--max-shard-size", "many"]):
        result = ebft("merge-sharded", *arguments)
        assert result.exit_code == 2 and plain(result.stderr).startswith("Error: ")
