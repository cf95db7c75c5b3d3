"""Padded rows, of models with a running state or learned positions: results must not depend on the padding."""

import copy

import pytest
import torch

from ebft.errors import ModelError
from ebft.structured.scoring import check_padding
from tests.strided.families import COUNTS_PADDING, RUNNING_STATE, for_oracle, tiny_model
from tests.strided.test_exactness import compare_gradients
from tests.structured.trainers import compare_step

pytestmark = pytest.mark.filterwarnings("ignore:Prompts are computed once per completion:UserWarning")
ONE_ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12, "steps_per_generation": 12}
FAST = ["qwen3_5_text", "nemotron_h"]


def model_for(tokenizer, family):
    known = {"vocab_size": len(tokenizer), "eos_token_id": 1, "bos_token_id": None}
    known["n_positions" if family == "gpt2" else "max_position_embeddings"] = 256
    model = tiny_model(family, **known)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not name.endswith("A_log"):
                parameter.mul_(0.6)
    return model.eval()


@pytest.mark.first(1)
@pytest.mark.parametrize(("family", "changes"), [
    *((family, {}) for family in FAST),
    ("qwen3_5_text", ONE_ROW),
    ("gpt2", {"shared_prefix": False}),  # learned positions, which padding would shift
    *(pytest.param(family, {}, marks=pytest.mark.slow) for family in RUNNING_STATE if family not in FAST),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_single_sequences(family, changes, chat_tokenizer, build):
    model = model_for(chat_tokenizer, family)
    base, twin = copy.deepcopy(model), copy.deepcopy(model)
    # The load-balancing loss of experts, which TRL adds, is no part of the oracle.
    experts = {"router_aux_loss_coef": 0.0} if hasattr(model.config, "output_router_logits") else {}
    trainer = build(model, ce_coef=0.3, **experts, **changes)
    assert not trainer.shares_prompts
    rollouts, *_ = compare_step(trainer, twin, for_oracle(base))
    assert len({len(rollout.prompt_ids) for rollout in rollouts}) > 1
    compare_gradients(trainer.model, twin)


@pytest.mark.parametrize("family", RUNNING_STATE)
def test_padding_changes_nothing(family):
    model = tiny_model(family).train()
    before = torch.random.get_rng_state()
    check_padding(model)
    assert model.training and torch.random.get_rng_state().equal(before)


@pytest.mark.parametrize("family", COUNTS_PADDING)
def test_states_that_pass_over_padding_are_refused(family, chat_tokenizer, build):
    with pytest.raises(ModelError, match="padded.*cannot train this model; SFT, which pads on the right, can"):
        check_padding(tiny_model(family))
    if family == "recurrent_gemma":
        with pytest.raises(ModelError, match="RecurrentGemmaForCausalLM: log-probabilities of a padded row differ"):
            build(model_for(chat_tokenizer, family))
