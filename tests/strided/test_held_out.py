"""Held-out metrics against the naive oracle, and their independence of batching."""

import copy
from types import SimpleNamespace

import pytest
import torch

from ebft import anchors, features
from ebft.data.documents import DocumentCollator
from ebft.prefix.forward import prepare
from ebft.strided.held_out import held_out_metrics
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.rollout import DocumentNoise, sample_rollouts
from tests.strided import families, oracle, short_run, test_exactness
from tests.structured import conftest

OPTIONS = {"stride": 5, "context_length": 4, "generate_max_len": 4, "n_samples_per_prompt": 3,
           "min_completion_prefix": 1, "end_ids": tuple(test_exactness.ENDS), "max_length": None}  # fmt: skip
LAYERS = [0.25, 0.75]
ROWS = [row for row in short_run.documents() if len(row["input_ids"]) > 15][:5]
CHATS = [
    {"input_ids": [*range(3, 32), 2], "prompt_length": 21, "turn_spans": [(4, 12), (14, 17), (21, 30)]},
    {"input_ids": [*range(40, 20, -1)], "prompt_length": 3, "turn_spans": [(3, 15)]},
]


def metrics_of(model, rows, batch_size, seed=2, tokens_per_pass=None):
    network = features.FeatureNetwork(model, LAYERS, "last_token")
    batches = [DocumentCollator(0)(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    given = {"block_options": anchors.BlockOptions(**OPTIONS), "seed": seed, "tokens_per_pass": tokens_per_pass}
    return held_out_metrics(model, network, batches, **given)


@pytest.mark.parametrize("rows", [ROWS, CHATS + ROWS[:1]], ids=["texts", "chats"])
def test_every_metric_by_the_oracle(rows):
    model = conftest.lora(families.tiny_model("llama"))
    plain = copy.deepcopy(model).eval()
    found = metrics_of(model, rows, 2)
    o = SimpleNamespace(feature_layers=LAYERS, embed_method="last_token", ends=test_exactness.ENDS, **OPTIONS)
    noise = DocumentNoise(2)
    sums = {"alignment": [], "diversity": [], "cfm_loss": [], "cfm_loss_plugin": [], "ce_loss": []}
    for row in rows:
        single = Documents.from_inputs(DocumentCollator(0)([row]))
        layout = StridedLayout.place(single, anchors.BlockOptions(**OPTIONS))
        with torch.no_grad():
            drawn = noise.draw(single, layout, 0)
            rollouts = sample_rollouts(prepare(model.eval()), single, layout, temperature=1.0, noise=drawn).tokens
        ids, prompt = torch.tensor(row["input_ids"]), row["prompt_length"]
        turns = row.get("turn_spans", [(prompt, len(ids))])
        for b, (a, end) in enumerate(oracle.blocks_of(ids, turns, o)):
            drawn = [rollouts[b, j, : oracle.stopped(rollouts[b, j].tolist(), o)] for j in range(3)]
            x = torch.stack([oracle.block_feature(plain, torch.cat([ids[:a], sample]), a, o) for sample in drawn])
            y = oracle.block_feature(plain, ids[:end], a, o)
            pairs = [x[j] @ x[k] for j in range(3) for k in range(3) if j != k]
            sums["alignment"].append(2 * (x @ y).mean())
            sums["diversity"].append(2 * sum(pairs) / 6)
            sums["cfm_loss"].append(y @ y - 2 * (x @ y).mean() + sum(pairs) / 6)
            sums["cfm_loss_plugin"].append((x.mean(0) - y).square().sum())
        with torch.no_grad():
            logp = oracle.plain_logits(plain, ids).log_softmax(-1)
        sums["ce_loss"] += [-logp[i - 1, ids[i]] for start, end in turns for i in range(max(start, 1), end)]
    for name, values in sums.items():
        assert found[name] == pytest.approx(torch.stack(values).mean().item(), abs=1e-4), name
    assert found["perplexity"] == pytest.approx(torch.tensor(found["ce_loss"]).exp().item(), rel=1e-5)
    assert found["cfm_loss_whitened"] > 0


def test_batching_and_seed():
    model = families.tiny_model("qwen3")
    found = metrics_of(model, ROWS, 1)
    for other in (metrics_of(model, ROWS, 5), metrics_of(model, ROWS, 5, tokens_per_pass=12)):
        assert other == pytest.approx(found, abs=1e-5, rel=1e-5)
    assert found["cfm_loss"] != metrics_of(model, ROWS, 1, seed=3)["cfm_loss"]
    with pytest.raises(ValueError, match="the held-out set is empty"):
        metrics_of(model, [], 1)
