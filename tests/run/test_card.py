import pytest
import yaml

from ebft.catalog import MODELS, mark_fetched
from ebft.config.schema import RunConfig
from ebft.run.output import model_card

KEYS = {
    "base_model": "some/model",
    "datasets": [{"path": "some/data", "type": "completion"}, {"path": __file__, "type": "completion"}],
}


def test_an_ebft_card_says_what_was_done():
    config = RunConfig.from_dict(
        {**KEYS, "rl": "ebft", "ebft": {"mode": "strided", "stride": 4}, "adapter": "lora", "lora_r": 8,
         "lora_alpha": 16, "lora_target_linear": True, "output_dir": "out/my-run"}
    )  # fmt: skip
    card = model_card(config, {"ebft/alignment": 0.5, "eval_ce_loss": 2.0, "train_runtime": 9.0})
    header = yaml.safe_load(card.split("---")[1])
    assert header == {
        "base_model": "some/model",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["ebft"],
        "datasets": ["some/data"],
    }
    assert "# my-run" in card and "a LoRA adapter for `some/model`" in card
    assert "| `ebft.stride` | `4` |" in card and "`ebft.top_p`" not in card
    assert "| `eval_ce_loss` | 2 |" in card and "train_runtime" not in card
    assert "jelassi2026matching" in card


def test_a_plain_card_cites_nothing():
    card = model_card(RunConfig.from_dict(KEYS), {})
    assert "all weights of `some/model`" in card and "cross-entropy" in card
    assert "jelassi" not in card and "## Results" not in card


def test_a_grpo_card_names_its_rewards():
    config = RunConfig.from_dict(
        {**KEYS, "rl": "grpo", "trl": {"reward_funcs": ["verifier.parses", "feature_matching"]}}
    )
    card = model_card(config, {"reward": 0.25})
    assert "GRPO on the rewards `verifier.parses`, `feature_matching`" in card and "| `reward` | 0.25 |" in card
    assert yaml.safe_load(card.split("---")[1])["tags"] == ["grpo"]


def test_a_value_stays_in_its_cell():
    modules = r"model\.layers\.(1|2)\..*"
    adapter = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_modules": modules}
    card = model_card(RunConfig.from_dict({**KEYS, **adapter, "chat_template": "{% if a %}\n{{ a | trim }}"}), {})
    config = card.split("## Config")[1]
    assert r"| `lora_target_modules` | `model\.layers\.(1\|2)\..*` |" in config
    assert r"| `chat_template` | `{% if a %}\n{{ a \| trim }}` |" in config


def test_a_qlora_card_names_its_adapter():
    adapter = {"adapter": "qlora", "load_in_4bit": True, "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
    assert "a QLoRA adapter for `some/model`" in model_card(RunConfig.from_dict({**KEYS, **adapter}), {})


@pytest.mark.parametrize("by_name", [True, False])
def test_the_card_of_a_fetched_model_names_its_origin_and_licence(by_name, tmp_path, monkeypatch):
    cache = tmp_path / "home" / "cache" / "smollm2"
    cache.mkdir(parents=True)
    (cache / "model.safetensors").touch()
    mark_fetched(cache, MODELS["smollm2-135m"])
    monkeypatch.setattr("ebft.data.locate.fetched_folder", lambda name: cache if name == "smollm2-135m" else None)
    card = model_card(RunConfig.from_dict({**KEYS, "base_model": "smollm2-135m" if by_name else str(cache)}), {})
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and header["license"] == "apache-2.0"
    assert "all weights of `smollm2-135m` (HuggingFaceTB/SmolLM2-135M-Instruct, apache-2.0, from " in card
    assert "cache" not in card


def test_paths_and_servers_of_the_machine_are_not_in_the_card(tmp_path, monkeypatch):
    home = tmp_path / "someone"
    for name in ("model", "rows"):
        (home / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    keys = {"output_dir": f"{home}/out", "dataset_prepared_path": "~/stored", "base_model": f"{home}/model"}
    entries = [{"path": path, "type": "completion"} for path in (f"{home}/rows", "/mnt/data/x.jsonl", "some/data")]
    texts = {"chat_template": "{# of /srv/team/templates/ours.jinja, https://example.org/a/b #}{{ messages }}</s>"}
    server = {"mlflow_tracking_uri": "http://inside:5000", "hub_model_id": "me/private"}
    held_out = {"test_datasets": [{"path": f"{home}/rows/held-out.jsonl", "type": "completion"}]}
    card = model_card(RunConfig.from_dict({**KEYS, **keys, "datasets": entries, **texts, **server, **held_out}), {})
    assert not [part for part in (str(tmp_path), "/mnt", "/srv", "inside", "~/", "me/private") if part in card]
    header = yaml.safe_load(card.split("---")[1])
    assert "base_model" not in header and header["datasets"] == ["some/data"]  # paths are not valid there
    assert "all weights of `model`" in card and "- `rows`, split" in card and "| `out` |" in card
    assert "ours.jinja, https://example.org/a/b" in card and "</s>" in card and "held-out.jsonl" in card
