"""A trained reward model as a reward of GRPO: its rewards are its scores of prompt and completion."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOTrainer

from ebft import RunConfig, errors, files, load_config, structured, train
from ebft.run.checks import check_runnable
from ebft.structured.reward import load_reward_model
from tests.golden.runs import LORA
from tests.reward_models.conftest import config_of


@pytest.fixture(scope="module")
def reward_dirs(model_dir, tmp_path_factory):
    """The folders of a full reward model, of an adapter, and of a process reward model."""
    found = {}
    for name, kind, keys in (("full", "outcome", {}), ("lora", "outcome", LORA), ("process", "process", {})):
        folder = tmp_path_factory.mktemp(name)
        train(config_of(kind, model_dir, folder, **keys))
        found[name] = folder / "out"
    return found


def grpo(model_dir, folder, rewards, prompts=("Say yes", "Say something else")) -> RunConfig:
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"messages": p}) + "\n" for p in map(chat, prompts)))
    values = {"base_model": str(model_dir), "rl": "grpo",
              "trl": {"reward_funcs": rewards, "num_generations": 2, "max_completion_length": 4},
              "datasets": [{"path": str(folder / "prompts.jsonl"), "type": "ebft_chat_multiturn.transform"}],
              "sequence_len": 64, "micro_batch_size": 4, "max_steps": 2, "logging_steps": 1, "save_strategy": "no",
              "torch_dtype": "float32", "output_dir": str(folder / "grpo")}  # fmt: skip
    (folder / "grpo.yaml").write_text(json.dumps(values))
    with warnings.catch_warnings(action="ignore"):
        return load_config(folder / "grpo.yaml")


def chat(text) -> list[dict]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]


def test_the_folder_of_an_adapter_with_new_tokens(model_dir, tmp_path):
    new = {"tokens": ["<new>", "<newer>"], "resize_token_embeddings_to_32x": True}
    with warnings.catch_warnings(action="ignore"):
        trained = train(config_of("outcome", model_dir, tmp_path, **LORA, **new)).trainer.model.eval()
        loaded = load_reward_model(str(tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.get_input_embeddings().num_embeddings % 32 == 0 > len(tokenizer) % -32
    ids = torch.tensor([tokenizer("<new>yes<newer>")["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, trained(ids).logits, atol=1e-5)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_rewards_are_the_scores_of_prompt_and_completion(kind, reward_dirs, model_dir, tmp_path, monkeypatch):
    scored = []
    calculate = structured.RolloutGRPOTrainer._calculate_rewards

    def spy(self, rows, prompts, completions, *others, **kwargs):
        rewards = calculate(self, rows, prompts, completions, *others, **kwargs)
        scored.extend(zip(prompts, completions, rewards[:, 0].tolist()))
        return rewards

    monkeypatch.setattr(structured.RolloutGRPOTrainer, "_calculate_rewards", spy)
    metrics = train(grpo(model_dir, tmp_path, [str(reward_dirs[kind])])).metrics
    assert len(scored) == 8
    model = AutoModelForSequenceClassification.from_pretrained(reward_dirs[kind], num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(reward_dirs[kind])
    for prompt, completion, reward in scored:
        text = tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert reward == pytest.approx(model(ids).logits.item(), rel=1e-4, abs=1e-6)
    last = [reward for _, _, reward in scored[-4:]]
    assert len(set(last)) > 1
    assert metrics["rewards/out/mean"] == pytest.approx(sum(last) / 4, rel=1e-4)


def test_an_infinite_score_stops_training(reward_dirs, model_dir, tmp_path, monkeypatch):
    """TRL's advantages of it are 0: the step would change nothing without a word."""
    calculate = GRPOTrainer._calculate_rewards
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda *given: calculate(*given).add(1).mul(torch.inf))
    with pytest.raises(errors.NonFiniteLossError, match="loss is nan"):
        train(grpo(model_dir, tmp_path, [str(reward_dirs["full"])]))


def test_models_that_cannot_give_rewards_are_refused_before_anything_is_loaded(reward_dirs, model_dir, tmp_path):
    config, two = json.loads((reward_dirs["full"] / "config.json").read_text()), tmp_path / "two"
    two.mkdir()
    for labels in ({"0": "a", "1": "b"}, None):  # transformers does not write its default of two
        (two / "config.json").write_text(json.dumps(config | {"id2label": labels}))
        with pytest.raises(errors.ConfigError, match="because it is not a classifier with one output"):
            check_runnable(grpo(model_dir, tmp_path, [str(two)]))
    for folder in (reward_dirs["process"], model_dir):
        with pytest.raises(errors.ConfigError, match=f"trl.reward_funcs: {folder} cannot give rewards"):
            check_runnable(grpo(model_dir, tmp_path, [str(folder)]))
    check_runnable(grpo(model_dir, tmp_path, [str(reward_dirs["full"])]))


def test_training_continues_from_a_reward_model_or_its_adapter(reward_dirs, make):
    steps = {"learning_rate": 1e-12, "max_steps": 1, "torch_dtype": "float32"}
    trained = AutoModelForSequenceClassification.from_pretrained(reward_dirs["full"])
    model = train(make("outcome", base_model=str(reward_dirs["full"]), **steps)).trainer.model
    torch.testing.assert_close(model.score.weight, trained.score.weight)
    saved = load_file(reward_dirs["lora"] / files.ADAPTER_WEIGHTS[0])["base_model.model.score.weight"]
    model = train(make("outcome", **LORA, lora_model_dir=str(reward_dirs["lora"]), **steps)).trainer.model
    torch.testing.assert_close(model.base_model.model.score.modules_to_save["default"].weight.data, saved)
    with pytest.raises(errors.ModelError, match="do not have the shapes of the model: score.bias"):
        train(make("process", base_model=str(reward_dirs["process"]), num_labels=3))
