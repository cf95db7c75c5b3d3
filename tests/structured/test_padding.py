"""Models whose layers keep a running state: results must not depend on the padding of prompts."""

import copy

import pytest
import torch

from ebft.errors import ModelError
from ebft.structured.scoring import check_padding
from tests.strided.families import COUNTS_PADDING, RUNNING_STATE, for_oracle, tiny_model
from tests.strided.test_exactness import compare_gradients
from tests.structured import oracle
from tests.structured.trainers import make, one_step

pytestmark = pytest.mark.filterwarnings("ignore:Prompts are computed once per completion:UserWarning")


def model_for(tokenizer, family):
    known = {"vocab_size": len(tokenizer), "eos_token_id": 1, "bos_token_id": None}
    model = tiny_model(family, max_position_embeddings=256, **known)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not name.endswith("A_log"):
                parameter.mul_(0.6)
    return model.eval()


def compare(family, tokenizer, folder, **changes):
    model = model_for(tokenizer, family)
    base, twin = copy.deepcopy(model), copy.deepcopy(model)
    # The load-balancing loss of experts, which TRL adds, is no part of the oracle.
    experts = {"router_aux_loss_coef": 0.0} if hasattr(model.config, "output_router_logits") else {}
    trainer = make(model, tokenizer, folder, ce_coef=0.3, **experts, **changes)
    assert not trainer.shares_prompts
    loss, _, rollouts, batch = one_step(trainer)
    assert len({len(rollout.prompt_ids) for rollout in rollouts}) > 1
    wanted = oracle.loss(twin, for_oracle(base), tokenizer, rollouts, batch, trainer.args)
    assert loss == pytest.approx(wanted.item(), abs=1e-4)
    wanted.backward()
    compare_gradients(trainer.model, twin)


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_loss_and_gradients_are_those_of_single_sequences(family, chat_tokenizer, tmp_path):
    compare(family, chat_tokenizer, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in RUNNING_STATE if name not in ("qwen3_5_text", "nemotron_h")])
def test_every_family(family, chat_tokenizer, tmp_path):
    compare(family, chat_tokenizer, tmp_path)


def test_micro_batches_of_one_row(chat_tokenizer, tmp_path):
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12, "steps_per_generation": 12}
    compare("qwen3_5_text", chat_tokenizer, tmp_path, **sizes)


@pytest.mark.parametrize("family", RUNNING_STATE)
def test_padding_changes_nothing(family):
    model = tiny_model(family).train()
    before = torch.random.get_rng_state()
    check_padding(model)
    assert model.training and torch.random.get_rng_state().equal(before)


@pytest.mark.parametrize("family", COUNTS_PADDING)
def test_states_that_pass_over_padding_are_refused(family):
    with pytest.raises(ModelError, match="padded.*cannot train this model; SFT, which pads on the right, can"):
        check_padding(tiny_model(family))


def test_the_trainer_refuses_them(chat_tokenizer, tmp_path):
    model = model_for(chat_tokenizer, "recurrent_gemma")
    with pytest.raises(ModelError, match="RecurrentGemmaForCausalLM: log-probabilities of a padded row differ"):
        make(model, chat_tokenizer, tmp_path)
