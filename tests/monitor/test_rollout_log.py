"""The log of rollouts: what both modes write, and a folder that cannot be written."""

import copy
import json
import warnings
from importlib import resources

import pytest
import torch
from datasets import Dataset

from ebft.monitor.run_files import RolloutLog
from ebft.run_files import ROLLOUTS
from tests.strided.families import tiny_model
from tests.strided.test_trainer import make as make_strided
from tests.structured.conftest import chat_model, lora
from tests.structured.trainers import make as make_structured


def entries(folder):
    return [json.loads(line) for line in (folder / ROLLOUTS).read_text(encoding="utf-8").splitlines()]


def test_strided_rollouts_are_those_of_the_step(tmp_path):
    trainer = make_strided(tmp_path, tiny_model("llama"), max_steps=2, log_completions=True)
    outputs, loss = [], trainer.compute_loss

    def keep(model, inputs, **kwargs):
        found = loss(model, inputs, True, **kwargs)
        outputs.append((inputs, found[1]))
        return found[0]

    trainer.compute_loss = keep
    trainer.train()
    found, checked = entries(tmp_path), 0
    assert {entry["step"] for entry in found} == {1, 2}
    for inputs, output in outputs:
        for number, mask in enumerate(output.block_mask):
            if not mask.any():
                continue
            entry = found.pop(0)
            real = inputs["input_ids"][number][inputs["attention_mask"][number].bool()].tolist()
            assert entry["document"] == real
            assert [block["anchor"] for block in entry["blocks"]] == output.anchors[number][mask].tolist()
            for b, block in enumerate(entry["blocks"]):
                assert block["reference"] == real[block["anchor"] :][: output.rollouts.shape[-1]]
                for n, sample in enumerate(block["samples"]):
                    assert sample["completion"] == output.rollouts[number, n, b].tolist()
                    for name in ("alignment", "diversity", "rewards", "advantages"):
                        assert sample[name] == pytest.approx(getattr(output, name)[number, n, b].item())
                    checked += 1
    assert found == [] and checked > 20


def test_prompts_with_tool_calls_are_printed(chat_tokenizer, tmp_path, capsys):
    """Arrow gives each message the keys of all others, and TRL's table of completions reads `tool_calls: None`."""
    tokenizer = copy.copy(chat_tokenizer)
    tokenizer.chat_template = (resources.files("trl") / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    called = {"function": {"name": "add", "arguments": '{"a": 2}'}}
    calls = {"role": "assistant", "content": None, "tool_calls": [called]}
    answered = [[], [calls, {"role": "tool", "content": "2"}]]
    prompts = [[{"role": "user", "content": f"add {number}"}, *answered[number % 2]] for number in range(12)]
    rows = Dataset.from_list([{"prompt": prompt, "ground_truth": "two"} for prompt in prompts])
    keys = {"log_completions": True, "max_steps": 1, "per_device_train_batch_size": 8}
    model = lora(chat_model(tokenizer, max_position_embeddings=4096))
    make_structured(model, tokenizer, tmp_path, rows, **keys).train()
    assert "add(a=2)" in capsys.readouterr().out
    assert {len(entry["prompt"]) for entry in entries(tmp_path)} == {1, 3}


def test_structured_rollouts_with_their_rewards(chat_tokenizer, tmp_path):
    trainer = make_structured(lora(chat_model(chat_tokenizer)), chat_tokenizer, tmp_path, log_completions=True)
    received = []
    trainer.scored_rollouts.hooks.append(lambda rollouts, rewards: received.append((rollouts, rewards)))
    trainer.train()
    found = entries(tmp_path)
    n, last = trainer.num_generations, [entry for entry in found if entry["step"] == 2]
    assert len(found) == 2 * len(last) and {entry["staleness"] for entry in found} == {0}
    assert {(entry["step"], entry["weights_step"]) for entry in found} == {(1, 0), (2, 1)}
    replies = [sample["replies"] for entry in last for sample in entry["samples"]]
    assert replies == [chat_tokenizer.batch_decode(rollout.replies) for rollout in trainer.rollouts]
    assert [entry for entries, _ in received for entry in entries] == found
    match = trainer.feature_reward.last
    torch.testing.assert_close(received[-1][1], match.rewards.flatten())
    of = lambda value: torch.tensor([[value(sample) for sample in entry["samples"]] for entry in last])
    torch.testing.assert_close(of(lambda sample: sample["rewards"]["feature_matching"]), match.rewards)
    for name in ("alignment", "diversity"):
        torch.testing.assert_close(of(lambda sample, name=name: sample[name]), getattr(match, name))
    advantages = of(lambda sample: sample["advantage"])
    assert advantages.shape[1] == n and advantages.std() > 0
    assert all({"prompt", "ground_truth"} <= entry.keys() for entry in last)
    assert any("remaining_turns" in entry for entry in last)


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "run" / ROLLOUTS).mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "run"):
        log = RolloutLog(folder)
        with pytest.warns(UserWarning, match="cannot be written .*, so it lacks rollouts"):
            log.write([{"step": 0}])
        with warnings.catch_warnings(action="error"):
            log.write([{"step": 1}])
