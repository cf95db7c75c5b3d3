import json
import os

import pytest
import typer
import yaml
from typer.testing import CliRunner

from ebft.printed import without_secrets, without_secrets_in_text
from ebft.run.config.schema import RunConfig
from ebft.run.reporting import model_card, recorded
from ebft.tools.cli import app
from ebft.tools.console import polite
from ebft.tools.dashboard.report import report


def test_values_of_secret_options():
    values = {
        "hub_token": "hf_x", "api-key": "k", "pad_token": "<pad>", "special_tokens": {"eos_token": "<e>"},
        "url": "http://me:pw@host/x", "nested": [{"password": "p", "a": 1}], "unset_secret": None, "kept": 1.5,
    }  # fmt: skip
    found = without_secrets(values)
    assert found["special_tokens"] == {"eos_token": "<e>"} and found["pad_token"] == "<pad>" and found["kept"] == 1.5
    assert found["url"] == "http://(removed)@host/x" and found["unset_secret"] is None
    kept = {"num_tokens": 12, "budget.generated_tokens": 12, "trl.max_new_tokens": 12, "single_pass": 1}
    kept |= {"ebft.rollout_tokens_per_pass": 12, "evaluation.pass_at": 1, "tokenizer_config": "x"}
    assert without_secrets(kept) == kept
    assert found["hub_token"] == found["api-key"] == found["nested"][0]["password"] == "(removed)"


@pytest.mark.parametrize("name", [
    "AWS_SESSION_TOKEN", "NGC_TOKEN", "bearer_token", "Authorization", "WANDB_API_KEY", "MY_KEY", "PASSPHRASE", "pwd",
    "auth", "cookie", "GITHUB_PAT", "CLIENT_SECRET", "GOOGLE_CREDENTIALS", "token"])  # fmt: skip
@pytest.mark.parametrize("key", ["env", "vllm.env"])
def test_variables_of_a_mapping_of_the_environment(name, key):
    values = {key: {name: "x", "PATH": "/bin", "TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "5"}}
    kept = {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "5"}
    assert without_secrets(values) == {key: {name: "(removed)", **kept}}


@pytest.mark.parametrize(("text", "shown"), [
    ("https://user:p@ss/word@host/x", "https://(removed)@host/x"),
    ("https://u:p/w@host", "https://(removed)@host"),
    ("https://token@host/a@b", "https://(removed)@host/a@b"),
    ("postgres://u:p?w@host/db", "postgres://(removed)@host/db"),
    ("user:secret@proxy:3128", "(removed)@proxy:3128"),
    ("to `user:a/b@host` failed", "to `(removed)@host` failed"),
    ("https://h/x?token=abc&split=1&X-Amz-Signature=9f#top", "https://h/x?token=(removed)&split=1&X-Amz-Signature=(removed)#top"),
    ("https://h/?sig=a%2Fb&AWSAccessKeyId=c", "https://h/?sig=(removed)&AWSAccessKeyId=(removed)"),
    ("hf_abcdefghijklmnopqrstuvwxyz012345", "(removed)"),
    ("ghp_abcdefghijklmnop and gho_abcdefghijklmnop", "(removed) and (removed)"),
    ("key sk-proj-abcDEF0123456789", "key (removed)"),
    ("Authorization: Bearer abcdefgh", "Authorization: Bearer (removed)"),
    ("env HF_TOKEN=abc vllm", "env HF_TOKEN=(removed) vllm"),
    ("'vllm.env.NGC_TOKEN='abc'", "'vllm.env.NGC_TOKEN='(removed)'"),
    ("hub_token=abc wandb.api_key=\"d e", "hub_token=(removed) wandb.api_key=\"(removed) e"),
    ("wandb_v1_abcdefghij0123456789 AIzaSyA-abcdefghij0123456789", "(removed) (removed)"),
    ("https://hooks.slack.com/services/T0/B0/x", "https://hooks.slack.com/services/(removed)"),
    ("a -----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY----- b", "a (removed) b"),
    *((text, text) for text in (
    "https://host:80/a?split=x&max_tokens=5", "hf://datasets/a/b@main/c.jsonl", "git@host:me/x.git", "a@b.org",
    "/data/hf_checkpoints/run", "x/sk-learn", "{% for m in messages %}{{ bos_token + m }}", "C:/data",
    "ValueError: no text", "pad_token=<pad>", "expected key=value", "num_tokens=5", 
    "npm_config_registry=x", "pypi-mirror-of-our-company", "https://host/@scope/x")),
])  # fmt: skip
def test_secrets_in_text(text, shown):
    assert without_secrets_in_text(text) == shown


@pytest.mark.parametrize("override", [
    "vllm.env.NGC_TOKEN={}", "vllm.env.NGC_TOKEN=[{}]", "vllm.env={{auth: [{}]}}", "vllm.env='hf_abcdefghijkl{}'",
    "hub_token={}", "vllm.env.NGC_TOKEN='{}", "mlflow_tracking_uri=http://me:{}@host", "vllm=http://u:{}@h",
    "datasets.0.path=https://u:{}@h/x.jsonl", "wandb_name=sk-proj-abcDEF01{}", "chat_template_kwargs.api_key={}",
    "datasets.0.path=[https://u:{}@h]", "vllm.env.NGC_TOKEN.x={}", "deepspeed={{wandb: {{api_key: {}}}}}",
])  # fmt: skip
def test_checks_of_configs_do_not_print_secrets(override, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("base_model: m\ndatasets: [{path: rows.jsonl, type: completion}]\n")
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["config", "--check", str(file), override.format("SEKRIT")])
    assert "SEKRIT" not in done.output and isinstance(done.exception, SystemExit | None)
    if done.exit_code == 0:
        assert "(removed)" in done.stdout and "are shown as (removed); the run uses their values" in done.stdout


KEYS = {
    "base_model": "some/model",
    "datasets": [{"path": "https://me:SEKRIT/0@host/d.jsonl?token=SEKRIT1&a=1", "type": "completion"}],
    "rl": "ebft",
    "vllm": {"env": {"NGC_TOKEN": "SEKRIT2", "KEPT": "kept"}},
    "wandb_name": "hf_abcdefghijklmnopqrstuvwxyzSEKRIT3",
    "special_tokens": {"pad_token": "<pad>"},
    "budget": {"generated_tokens": 77},
}


def test_the_model_card_has_no_secrets():
    card = model_card(RunConfig.from_dict(KEYS), {})
    assert "SEKRIT" not in card
    assert "| `special_tokens.pad_token` | `<pad>` |" in card and "| `budget.generated_tokens` | `77` |" in card
    assert "kept" not in card and "`https://(removed)@host/d.jsonl?token=(removed)&a=1`" in card  # no servers
    assert "datasets" not in yaml.safe_load(card.split("---")[1])  # the Hub accepts its own ids alone


def test_the_files_of_a_run_have_no_secrets(tmp_path):
    config = RunConfig.from_dict({**KEYS, "output_dir": str(tmp_path)})
    with pytest.raises(OSError), recorded(config):
        raise OSError("no answer from https://me:SEKRIT/4@host?key=SEKRIT5, Bearer SEKRIT6x")
    run = (tmp_path / "run.json").read_text()
    assert "SEKRIT" not in run and "SEKRIT" not in report(tmp_path)
    assert json.loads(run)["config"]["special_tokens"]["pad_token"] == "<pad>"
    assert "no answer from https://(removed)@host?key=(removed)" in json.loads(run)["error"]
    assert os.listdir(tmp_path).count("report.html") == 1


def test_tracebacks(monkeypatch, capsys):
    monkeypatch.setenv("EBFT_DEBUG", "1")

    def fail():
        raise OSError("https://user:password@host is not there")

    with pytest.raises(typer.Exit):
        polite(fail)()
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "https://(removed)@host" in printed and "password" not in printed
