"""The log of rollouts: what both modes write, and a folder that cannot be written."""

import json

import pytest
import torch
from transformers import TrainerCallback

from ebft import RunFilesCallback
from ebft.run_files import ROLLOUTS, samples_rollouts
from ebft.tools.dashboard.live import LiveRun
from ebft.tools.dashboard.panels import rollouts
from ebft.tools.dashboard.report import report
from tests.strided.families import tiny_model
from tests.strided.test_trainer import make as make_strided
from tests.structured.conftest import chat_model, lora
from tests.structured.trainers import make as make_structured


class StopAfter(TrainerCallback):
    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.steps


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
                assert block["reference"] == real[block["anchor"] :][: output.reference_lengths[number, b]]
                for n, sample in enumerate(block["samples"]):
                    length = int(output.lengths[number, n, b])
                    assert sample["completion"] == output.rollouts[number, n, b, :length].tolist()
                    assert sample["tokens"] == length
                    for name in ("alignment", "diversity", "rewards", "advantages"):
                        assert sample[name] == pytest.approx(getattr(output, name)[number, n, b].item())
                    checked += 1
    assert found == [] and checked > 20


@pytest.mark.parametrize(("options", "steps"), [
    ({"max_steps": 4}, [1, 2, 3, 4]),
    ({"max_steps": 5, "logging_steps": 2, "gradient_accumulation_steps": 2}, [1, 3, 5]),
    ({"max_steps": 250, "logging_steps": 1}, [1, 4]),  # a hundred steps of the run at most
    ({"max_steps": 2, "log_rollouts": "none"}, []),
])  # fmt: skip
def test_few_rollouts_are_evenly_spread(tmp_path, options, steps):
    trainer = make_strided(tmp_path, tiny_model("llama"), **options)
    trainer.add_callback(StopAfter(6))
    trainer.train()
    found = entries(tmp_path) if steps else []
    assert (tmp_path / ROLLOUTS).exists() == bool(steps)
    assert sorted({entry["step"] for entry in found}) == steps
    assert all(len(entry["blocks"]) <= 4 for entry in found) and len(found) <= 2 * len(steps)


def test_the_files_of_a_run_of_a_trainer_in_python(tmp_path):
    trainer = make_strided(tmp_path, tiny_model("llama"), max_steps=2)
    trainer.add_callback(RunFilesCallback())
    for _ in range(2):  # the second run moves the files of the first one away
        trainer.train()
        live = LiveRun(tmp_path)
        live.poll()
        assert live.state == "finished" and live.step == live.max_steps == 2 and live.run["changed"]["max_steps"] == 2
        assert [entry["step"] for entry in live.metrics.history if "loss" in entry] == [1, 2]
        assert trainer.state.log_history[-1]["budget/documents"] == 4  # of this run alone
        assert "No rollouts" not in str(rollouts(live.newest(), 80, live.config)) and live.newest()
        assert samples_rollouts(live.config) and live.config["ebft"]["mode"] == "strided"
        page = report(tmp_path)
        assert "<h3>Rollouts</h3>" in page or "First rollouts" in page
    assert (tmp_path / "previous" / "1").is_dir()


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
