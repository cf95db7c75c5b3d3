import pytest
import yaml

from ebft.catalog import MODELS, mark_fetched
from ebft.run.config.schema import RunConfig
from ebft.run.reporting import model_card

ROWS = [{"path": "some/data", "type": "completion"}, {"path": __file__, "type": "completion"}]
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
CITED = "jelassi2026matching"


def card_of(metrics=None, **keys):
    """The card, and its header."""
    card = model_card(RunConfig.from_dict({"base_model": "some/model", "datasets": ROWS, **keys}), metrics or {})
    return card, yaml.safe_load(card.split("---")[1])


def test_an_ebft_card_says_what_was_done():
    keys = {"rl": "ebft", "ebft": {"mode": "strided", "stride": 4}, **LORA, "lora_target_linear": True}
    metrics = {"ebft/alignment": 0.5, "eval_ce_loss": 2.0, "train_runtime": 9.0}
    card, header = card_of(metrics, **keys, output_dir="out/my-run")
    assert header.pop("datasets") == ["some/data"] and header.pop("tags") == ["ebft"]
    assert header == {"base_model": "some/model", "library_name": "peft", "pipeline_tag": "text-generation"}
    for text in ("# my-run", "a LoRA adapter for `some/model`", "| `ebft.stride` | `4` |", "| `eval_ce_loss` | 2 |"):
        assert text in card
    assert "`ebft.top_p`" not in card and "train_runtime" not in card and CITED in card


@pytest.mark.parametrize("by_name", [True, False])
def test_the_card_of_a_fetched_model_names_its_origin_and_licence(by_name, tmp_path, monkeypatch):
    cache = tmp_path / "home" / "cache" / "smollm2"
    cache.mkdir(parents=True)
    (cache / "model.safetensors").touch()
    mark_fetched(cache, MODELS["smollm2-135m"])
    monkeypatch.setattr("ebft.catalog.fetched_folder", lambda name: cache if name == "smollm2-135m" else None)
    card, header = card_of(base_model="smollm2-135m" if by_name else str(cache))
    assert header["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and header["license"] == "apache-2.0"
    assert "all weights of `smollm2-135m` (HuggingFaceTB/SmolLM2-135M-Instruct, apache-2.0, from " in card
    assert "cache" not in card


def test_paths_and_servers_of_the_machine_are_not_in_the_card(tmp_path, monkeypatch):
    home = tmp_path / "someone"
    for name in ("model", "rows"):
        (home / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    keys = {"output_dir": f"{home}/out", "dataset_prepared_path": "~/stored", "base_model": f"{home}/model"}
    keys["datasets"] = [{"path": path, "type": "completion"} for path in (f"{home}/rows", "/mnt/x.jsonl", "some/data")]
    keys["chat_template"] = "{# of /srv/team/templates/ours.jinja, https://example.org/a/b #}{{ messages }}</s>"
    keys |= {"mlflow_tracking_uri": "http://inside:5000", "hub_model_id": "me/private"}
    card, header = card_of(**keys, test_datasets=[{"path": f"{home}/rows/held-out.jsonl", "type": "completion"}])
    assert not [part for part in (str(tmp_path), "/mnt", "/srv", "inside", "~/", "me/private") if part in card]
    assert "base_model" not in header and header["datasets"] == ["some/data"]  # paths are not valid there
    assert "all weights of `model`" in card and "- `rows`, split" in card and "| `out` |" in card
    assert "ours.jinja, https://example.org/a/b" in card and "</s>" in card and "held-out.jsonl" in card
