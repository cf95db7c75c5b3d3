"""What training a reward model and training a process reward model have in common."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ebft.config.section import Section
from ebft.errors import ConfigError
from ebft.fetch.catalog import as_folder, is_gguf
from ebft.methods.method import EvaluationSampling, Method

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


CLASSES = 2  # of steps, such as wrong and correct


class HeadKeys(Section):
    """The keys of both kinds of reward models."""

    num_labels: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Number of outputs of the head: 1 with reward_model; with process_reward_model, the number of "
        f"classes of a step, by default {CLASSES}.",
    )


class Classifier(Method):
    """A method that trains a decoder with a head of a few outputs in place of the vocabulary."""

    can_be_compared = False
    generates_text = False

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        for key in ("load_in_4bit", "load_in_8bit", "deepspeed", "sample_packing", "group_by_length"):
            if getattr(config, key):
                yield f"{key} is not supported with {self.name}. Remove it."
        file = config.model_name
        if is_gguf(file):
            yield f"{file} is a GGUF file, which is not supported with {self.name}. {as_folder(file)}"
        if config.budget.generated_tokens is not None:
            yield f"budget.generated_tokens has no effect with {self.name}, which samples no tokens. Remove it."

    def resolve(self, config: RunConfig) -> None:
        """One warning for what other methods read."""
        idle = [name for name in ("trl", "vllm", "evaluation") if name in config.model_fields_set]
        idle = ["ebft"] * bool(config.ebft.model_fields_set) + idle
        idle += ["train_on_inputs"] * config.train_on_inputs
        if idle:
            warnings.warn(f"{', '.join(idle)}: no effect with {self.name}.", stacklevel=2)

    def sampling(self, config: RunConfig) -> EvaluationSampling:
        raise ConfigError(
            f"ebft evaluate compares language models; {self.name} trains a model that generates no text. Its loss and "
            "accuracy on held-out rows are logged in training: set test_datasets or val_set_size, with eval_strategy."
        )
