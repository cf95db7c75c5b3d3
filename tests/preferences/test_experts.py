"""Preference methods of a mixture of experts have no load-balancing loss."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from tests.preferences.runs import TRAINERS, write_inputs
from tests.preferences.test_losses import loss_of, trainer_of
from tests.structured.conftest import SIZES, make_chat_tokenizer


def write_experts(folder, **settings):
    """Replace the model of `write_inputs` with a Mixtral."""
    torch.manual_seed(1)
    tokenizer = make_chat_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {**SIZES, "max_position_embeddings": 512, "num_key_value_heads": 1, "num_local_experts": 4}
    config = MixtralConfig(vocab_size=len(tokenizer), **ids, **sizes, **settings)
    MixtralForCausalLM(config).save_pretrained(folder / "model")


@pytest.mark.parametrize("method", TRAINERS)
def test_the_loss_has_no_term_for_the_router(method, tmp_path):
    write_inputs(tmp_path)
    found = []
    for settings in ({"router_aux_loss_coef": 0.0}, {"router_aux_loss_coef": 100.0, "output_router_logits": True}):
        write_experts(tmp_path, **settings)
        trainer = trainer_of(method, tmp_path, adapter=False, torch_dtype="float32")
        found.append(loss_of(trainer, [trainer.train_dataset[index] for index in range(4)]))
        assert "aux_loss" not in trainer.logged("eval")
    assert found[0] == found[1]
