"""The benchmark of the shared prompt, as a user runs it, at the size of a test."""

import json

from benchmarks.shared_prompt import main


def test_both_sides_run_and_have_the_same_gradients(tmp_path, capsys):
    output = tmp_path / "result.json"
    main(["--tiny", "--preset", "7m", "--repeats", "1", "--output", str(output)])
    result = json.loads(output.read_text(encoding="utf-8"))
    [row] = result["shapes"]
    assert row["gradient_difference"] < 1e-3
    for name in ("seconds", "rollout_seconds"):
        assert set(row[name]) == {"shared prompt", "TRL's rows"} and min(row[name].values()) > 0
    assert {"commit", "device", "torch", "transformers", "dtype"} <= set(result["card"])
    assert "x as fast" in capsys.readouterr().out
