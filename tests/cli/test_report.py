from tests.cli.conftest import plain
from tests.dashboard.runs import append, log_line, write_run


def test_a_report_is_written_for_any_run(ebft, tmp_path):
    write_run(tmp_path, step=1)
    append(tmp_path / "metrics.jsonl", log_line(1))
    result = ebft("report", tmp_path)
    assert result.exit_code == 0 and result.stdout.strip() == str(tmp_path / "report.html")
    assert "running, step 1 of 100" in (tmp_path / "report.html").read_text()


def test_what_cannot_be_reported(ebft, tmp_path):
    assert "has none of run.json, metrics.jsonl and rollouts.jsonl" in plain(ebft("report", tmp_path).stderr)
    write_run(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    result = ebft("report", tmp_path, "--evaluation", tmp_path / "other.json")
    assert result.exit_code == 2 and "is not a result of `ebft evaluate --output`" in plain(result.stderr)
    result = ebft("report", tmp_path, "--evaluation", tmp_path / "nope.json")
    assert result.exit_code == 2 and f"the file {tmp_path / 'nope.json'} does not exist" in plain(result.stderr)
    (tmp_path / "report.html").mkdir()
    result = ebft("report", tmp_path)
    assert result.exit_code == 2 and "The report cannot be written" in plain(result.stderr)
