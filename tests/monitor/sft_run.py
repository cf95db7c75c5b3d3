"""SFT of a model on a few short rows, as `ebft train` does it."""

from transformers import TrainingArguments

from ebft.data.documents import DocumentCollator
from ebft.sft.trainer import SFTTrainer


def plain_trainer(folder, model, rows=12, evaluation=None, given=None, **changes):
    """An SFTTrainer over rows, or so many documents of 9 to 14 tokens, two at a time; it takes `given` itself."""
    settings = {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no"}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "prediction_loss_only": True}
    args = TrainingArguments(str(folder), **settings | changes)
    data = [{"input_ids": list(range(3, 12 + i % 6))} for i in range(rows)] if isinstance(rows, int) else rows
    collator = DocumentCollator(0, with_prompt_length=False)
    return SFTTrainer(model, args, collator, train_dataset=data, eval_dataset=evaluation, **given or {})
