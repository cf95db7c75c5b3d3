"""A second GPU that nothing else uses takes the frozen copy of the model."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ebft.features import FeatureNetwork
from ebft.models.load import spare_gpu
from ebft.run.training import start_summary

GIB = 2**30
IDLE, BUSY, SMALL = (79 * GIB, 80 * GIB), (60 * GIB, 80 * GIB), (8 * GIB, 8 * GIB)


@pytest.mark.parametrize("gpus, taken, found", [
    ([IDLE], 0, None), ([BUSY, IDLE], 0, "cuda:1"), ([IDLE, BUSY], 1, "cuda:0"),
    ([BUSY, SMALL, BUSY, IDLE], 0, "cuda:3"), ([BUSY, IDLE], None, None),
])  # fmt: skip
def test_the_idle_gpu_with_the_most_memory(monkeypatch, gpus, taken, found):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: gpus[index])
    assert spare_gpu(taken, 10 * GIB) == found
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert spare_gpu(taken, 10 * GIB) is None, "each process has a GPU"


class OnGPU(nn.Linear):
    """Parameters that say that they are on a GPU."""

    place = torch.device("cuda:0")

    def parameters(self, recurse=True):
        for _ in range(2):
            yield type("Weight", (), {"device": self.place})()


def test_the_copy_follows_the_policy_unless_a_gpu_is_idle(tiny_llama_dir, monkeypatch, capsys):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    network = FeatureNetwork(model, [0.5], "last_token")
    assert network.device.type == "cpu" and network.causal_lm is not model
    asked = []
    monkeypatch.setattr("ebft.features.spare_gpu", lambda taken, needed: asked.append((taken, needed)) or "meta")
    policy = OnGPU(1, 1)
    monkeypatch.setattr(network, "_followed", lambda: policy)
    assert network.device.type == "meta" and network.device.type == "meta"
    assert asked == [(0, 4 * model.num_parameters())], "asked once, until the policy moves"
    assert "feature_device: cuda:0" in capsys.readouterr().err
    assert FeatureNetwork(model, [0.5], "last_token", "cpu").device.type == "cpu" and len(asked) == 1, "it is set"


def test_the_summary_says_how_many_gpus_a_process_leaves_idle(make_config, monkeypatch):
    for gpus, keys, said in ((2, {}, ", one process, on one of 2 GPUs"), (1, {}, ""), (2, {"device_map": "auto"}, "")):
        config = make_config(max_steps=1, reinit_weights=True, qat={"fake_quant_after_n_steps": 2}, **keys)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        lines = start_summary(config, nn.Linear(1, 1), range(4), None, None).splitlines()
        assert lines[0] == f"Method: SFT (rl is not set){said}"
        assert lines[1].endswith(", float32, random weights, rounded to int8 from step 3")
