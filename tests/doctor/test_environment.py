import json
import sys

from ebft.tools.doctor.environment import relevant_variables


def test_the_text_has_versions_machine_and_devices(ebft, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a1b2c3d4e5")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = ebft("env")
    assert result.exit_code == 0
    for word in ("ebft:", "commit:", "torch:", "trl:", "usable cpus:", "memory (GiB):", "devices:", "driver:"):
        assert word in result.output
    assert "vllm interpreter: not configured" in result.output and "OMP_NUM_THREADS: 1" in result.output
    assert "WANDB_API_KEY: (set, not shown)" in result.output and "HF_TOKEN: (set, not shown)" in result.output
    assert "a1b2c3d4e5" not in result.output and "abcdefghij" not in result.output


def test_a_config_adds_the_interpreter_of_vllm(ebft, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("base_model: m\ndatasets:\n  - {path: d, type: completion}\n")
    for python, vllm in ((sys.executable, "not installed"), ("/no/python", "cannot be run")):
        found = json.loads(ebft("env", path, f"vllm.python={python}", "--json").output)
        assert found["vllm interpreter"]["vllm"] == vllm


def test_secrets_are_hidden():
    given = {"HF_TOKEN": "", "VLLM_MAX_TOKENS": "100", "HTTPS_PROXY": "http://a:secret@proxy:80", "HOME": "/root"}
    shown = {"HF_TOKEN": "(empty)", "VLLM_MAX_TOKENS": "100", "HTTPS_PROXY": "http://(removed)@proxy:80"}
    assert relevant_variables(given) == shown
