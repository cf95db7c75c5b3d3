"""A pretrained model on real conversations: rewards, and a step's loss and gradients, against the naive oracle."""

import copy

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.structured.conftest import lora
from tests.structured.trainers import USER, compare_step, make

pytestmark = pytest.mark.slow
SYSTEM = {"role": "system", "content": "Be brief."}  # shorter than the template's own
QUESTIONS = {
    "2+2?": ("2 + 2 is 4.", [" 4<|im_end|>", "It is five, I think", "2 + 2 is 4.<|im_end|>"]),
    "Name a colour of the rainbow, please.": ("Green", ["Red<|im_end|>", "", "Violet, or indigo"]),
}


@pytest.fixture(scope="module")
def model(smollm2_dir):
    return AutoModelForCausalLM.from_pretrained(smollm2_dir).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return AutoTokenizer.from_pretrained(smollm2_dir)


def test_loss_and_gradients(model, tokenizer, tmp_path):
    rows = [
        {"prompt": [SYSTEM, USER(question)], "ground_truth": truth, "remaining_turns": []}
        for question, (truth, _) in QUESTIONS.items()
    ]
    policy = lora(copy.deepcopy(model))
    twin = copy.deepcopy(policy)
    sizes = {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options = {"max_completion_length": 8, "gt_length_floor": 1, "ce_coef": 0.3, "use_whitening": True}
    trainer = make(policy, tokenizer, tmp_path, Dataset.from_list(rows), temperature=1.0, **sizes, **options)
    _, gradients, theirs = compare_step(trainer, twin, model)
    assert len(theirs) > 400
    scale = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm()
    for name, gradient in theirs.items():
        # Whitened rewards of two samples agree within 1e-3 (above), and gradients are linear in them.
        assert (gradients[name] - gradient).norm() <= 2e-3 * max(gradient.norm(), 0.02 * scale), name
