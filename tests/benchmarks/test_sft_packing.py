"""The benchmark of packing, as a user runs it, at the size of a test."""

import json

from benchmarks.sft_packing import main


def test_all_ways_run_on_the_same_documents(tmp_path, capsys):
    output = tmp_path / "result.json"
    main(["--tiny", "--length", "48", "--documents", "12", "--rows", "4", "--repeats", "1", "--output", str(output)])
    result = json.loads(output.read_text(encoding="utf-8"))
    padded, packed, flattened = result["ways"]
    assert [way["way"] for way in result["ways"]] == ["padded", "sample_packing", "batch_flattening"]
    assert padded["padding"] > packed["padding"] >= flattened["padding"] == 0
    assert min(way["tokens_per_s"] for way in result["ways"]) > 0 and padded["ratio"] == 1
    assert {"commit", "device", "torch", "transformers", "documents"} <= set(result["card"])
    assert "tokens/s" in capsys.readouterr().out
