"""The comparison of the server's log-probabilities with the trainer's, and the copies of published weights."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from ebft.errors import RolloutError
from ebft.structured import RolloutGRPOConfig
from ebft.structured.rollouts import server as server_module
from ebft.structured.rollouts.adapters import AdapterSync
from ebft.structured.rollouts.server import Difference, SamplingCheck, ServerRollouts
from ebft.structured.rollouts.turns import Sampling
from tests.structured.conftest import chat_model, lora


def test_differences_are_over_scored_tokens():
    trainer = torch.tensor([[-1.0, -2.0, 5.0], [-0.5, -1.0, -3.0]])
    server = torch.tensor([[-1.5, -2.0, 0.0], [-0.4, float("nan"), -1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found = Difference.of(trainer, server, mask, lambda sums: sums)
    deltas = [0.5, 0.0, -0.1, -2.0]
    assert found.tokens == 4
    assert found.mean == pytest.approx(sum(map(abs, deltas)) / 4)
    assert found.ratio_mean == pytest.approx(sum(map(math.exp, deltas)) / 4)
    assert found.ratio_max == pytest.approx(math.exp(0.5))
    assert Difference.of(trainer, server, torch.zeros_like(mask), lambda sums: sums).mean == 0.0


def found(mean, tokens=300):
    return Difference(mean, 1.0, 1.0, tokens)


@pytest.mark.parametrize(("floor", "given", "warn", "stop"), [
    (1e-6, (None, None), 0.05, 0.2), (0.04, (None, None), 0.12, 0.4), (None, (None, None), 0.15, 0.5),
    (0.1, (0.01, 0.02), 0.01, 0.02),
])  # fmt: skip
def test_limits_follow_the_difference_before_training(floor, given, warn, stop):
    check = SamplingCheck("the server", floor, *given)
    assert (check.warn, check.stop) == pytest.approx((warn, stop))
    with warnings.catch_warnings(action="error"):
        check.check_limits(found(0.99 * warn), "v1", 3)
    with pytest.warns(UserWarning, match="Step 3: the server should have sampled this batch from v1"):
        check.check_limits(found(1.01 * warn), "v1", 3)
    with warnings.catch_warnings(action="error"):  # once
        check.check_limits(found(1.01 * warn), "v1", 4)
    with pytest.raises(RolloutError, match=r"Step 5: .* differ from the trainer's by .* nats .*vllm_logp_diff_stop"):
        check.check_limits(found(1.01 * stop), "v1", 5)


def test_an_evaluation_does_not_move_the_steps_at_which_weights_are_sent(monkeypatch, tmp_path):
    monkeypatch.setattr(server_module, "check_server", lambda *args, **kwargs: ({"id": "base"}, 1e-6))
    args = RolloutGRPOConfig(output_dir=str(tmp_path), use_vllm=True, report_to="none", vllm_sync_interval=4)
    state, sent = SimpleNamespace(global_step=0), []
    transfer = SimpleNamespace(sync_weights=lambda: sent.append(state.global_step))
    of_policy = {"accelerator": SimpleNamespace(gather=None), "scorer": SimpleNamespace(scores_truncated=True)}
    trainer = SimpleNamespace(args=args, model=None, processing_class=None, state=state, **of_policy)
    server = ServerRollouts(trainer, Sampling(1.0), transfer=transfer)
    for state.global_step in range(10):
        server.sync_weights()
        if state.global_step == 6:
            server.sync_weights(at_once=True)
    assert sent == [0, 4, 6, 8]


def test_weights_that_fit_better_are_named():
    check = SamplingCheck("the server", 0.01, None, None)
    with pytest.raises(RolloutError, match="sampled from v1, not from v2: .* by 0.03"):
        check.check_others(found(0.03), "v2", 7, {"base": found(0.04), "v1": found(0.01)})
    check.check_others(found(0.03), "v2", 7, {"v1": found(0.016)})  # both differ by noise
    check.check_others(found(0.0009), "v2", 7, {"v1": found(0.0)})  # rounding
    check.check_others(found(0.03, tokens=100), "v2", 7, {"v1": found(0.01, tokens=100)})


class Server:
    """A client whose server has the adapters that it was told to load, or does not."""

    address = "http://server"

    def __init__(self, loads=lambda name, path: {name: path}):
        self.loads, self.adapters = loads, {}

    def load_adapter(self, name, path):
        self.adapters |= self.loads(name, path)

    def unload_adapter(self, name):
        self.adapters.pop(name, None)

    def models(self):
        return [{"id": name, "root": path} for name, path in self.adapters.items()]


def test_the_model_takes_the_weights_of_a_version_and_gets_its_own_back(chat_tokenizer, tmp_path):
    model = lora(chat_model(chat_tokenizer))
    sync = AdapterSync(Server(), model, Accelerator(cpu=True), str(tmp_path))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    versions, values = [], []
    for step in range(3):
        for parameter in trained:
            parameter.data.add_(1.0)
        versions.append(sync.publish(step))
        values.append([parameter.clone() for parameter in trained])
    assert sync.kept == [versions[2], versions[1]]  # in the same order on all processes
    with pytest.raises(RuntimeError, match="in the block"), sync.weights_of(versions[1]):
        assert all(torch.equal(now, then) for now, then in zip(trained, values[1]))
        raise RuntimeError("in the block")
    assert all(torch.equal(now, then) for now, then in zip(trained, values[2]))
    sync.hold(versions[2])
    for step in (3, 4):
        versions.append(sync.publish(step))
    assert sync.kept == [versions[2], versions[4], versions[3]]
    sync.close()
    assert sync.kept == []


@pytest.mark.parametrize(("loads", "found"), [
    (lambda name, path: {}, "does not list it"), (lambda name, path: {name: "/x"}, "lists it with the files in /x"),
])  # fmt: skip
def test_an_adapter_that_the_server_does_not_list_is_an_error(chat_tokenizer, tmp_path, loads, found):
    sync = AdapterSync(Server(loads), lora(chat_model(chat_tokenizer)), Accelerator(cpu=True), str(tmp_path))
    with pytest.raises(RolloutError, match=f"reports that it loaded the adapter .*, but {found}"):
        sync.publish(0)
    assert not list((tmp_path / "vllm_adapters").glob("*/*"))


TRUNCATED = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}]
CHANGED = [{"repetition_penalty": 1.1}, {"regex": "a+"}, {"extra": {"logit_bias": {1: 2.0}}}]


@pytest.mark.parametrize("changes", [{}, {"extra": {"stop": ["x"]}}, {"top_k": -1}, *TRUNCATED, *CHANGED], ids=str)
def test_limits_apply_where_the_trainer_scores_what_was_sampled(changes):
    sampling = Sampling(0.7, **changes)
    assert bool(sampling.unscored(truncated=True)) == (changes in CHANGED)
    assert bool(sampling.unscored(truncated=False)) == (changes in CHANGED + TRUNCATED)
