"""SDFTTrainer: TRL's trainer of on-policy self-distillation (Shenfeld et al. 2026, arXiv 2601.19897).

The student samples completions of prompts; the teacher, the model before training, has read the reference too, and the
loss is the divergence of the two at each token of the completion. TRL's trainer is in `trl.experimental`.
"""

from __future__ import annotations

import logging
import warnings
from heapq import nlargest
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import Sampler

from ebft.data.conversation import Renderer
from ebft.errors import DataError
from ebft.models.causal_lm import backbone_of, end_token_ids, frozen_copy, positions_of, unknown_ids, unwrap_adapter
from ebft.models.pretrained import disable_dropout
from ebft.structured.config import STOPS, check_generation_kwargs, check_rows
from ebft.structured.rollouts.local import only_config
from ebft.structured.trl import EpochSampler, positions_from_mask
from ebft.trainer import KeepsLogs

with warnings.catch_warnings(action="ignore", category=UserWarning):  # of TRL, on import; the documentation says it
    from trl.experimental import sdft
    from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder

SDFTConfig = sdft.SDFTConfig
_LONGEST = 32  # rows whose length is checked before training


def teacher_prompt(template: str, prompt: Any, reference: str) -> Any:
    """Return the prompt, text or messages, that the teacher reads in place of `prompt`."""
    trainer = SimpleNamespace(args=SimpleNamespace(teacher_prompt_template=template))
    return DemonstrationTeacherContextBuilder(trainer).select_generation_prompts([prompt], [reference])[0]


class SDFTTrainer(KeepsLogs, sdft.SDFTTrainer):
    """TRL's SDFTTrainer on rows `prompt` and `ground_truth`, which are rendered as for the other methods.

    `template_kwargs`: arguments of the chat template. Prompts are not cut; one that is too long for the model with its
    completion is a DataError. A completion ends with a token that ends a reply, or one of `stop_token_ids` in
    `args.generation_kwargs`; ConfigError for keys that do not fit the loss. Sampling reads nothing of the model's
    generation config, and there is no dropout.
    """

    _rows: list[dict[str, Any]]  # of the batch that is being prepared
    _held_out: list[tuple[float, int]]  # the loss and the number of completions of the batches of an evaluation

    def __init__(
        self,
        model: nn.Module,
        *,
        args: SDFTConfig,
        train_dataset: Dataset,
        processing_class: Any,
        eval_dataset: Dataset | None = None,
        template_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.renderer: Renderer = Renderer(processing_class, template_kwargs)
        options = dict(args.generation_kwargs or {})
        check_generation_kwargs(options, use_vllm=False)
        for name, rows in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if rows is not None:
                check_rows(name, rows, args, needs_reference=True)
        disable_dropout(model)
        args.distillation_topk = min(args.distillation_topk, unwrap_adapter(model).config.get_text_config().vocab_size)
        ends = end_token_ids(model, {*self.renderer.template.end_ids, *options.pop(STOPS, ())})
        unknown = list(unknown_ids(model, processing_class)) or None
        args.generation_kwargs = {"suppress_tokens": unknown} | options | {"eos_token_id": sorted(ends)}
        args.max_prompt_length = None  # rows fit into sequence_len
        # TRL warns that an adapter may be older than the run, with which `rl: sdft` has no teacher `base`.
        logging.getLogger(sdft.SDFTTrainer.__module__).setLevel(logging.ERROR)
        super().__init__(
            model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self.eos_token_ids: list[int] = sorted(ends)
        for scored in self.computing_models():
            backbone_of(unwrap_adapter(scored)).register_forward_pre_hook(positions_from_mask, with_kwargs=True)
        for name, rows in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            self._check_positions(name, rows or [])

    def _check_positions(self, name: str, rows: Any) -> None:
        """Raise DataError for a row with most characters whose longest prompt has no room for a completion."""
        limit = positions_of(self.model)
        size = lambda numbered: len(str(numbered[1]["prompt"])) + len(numbered[1]["ground_truth"])
        for number, row in nlargest(_LONGEST, enumerate(rows), key=size) if limit is not None else []:
            self._rows = [{**row, "privileged_context": row["ground_truth"]}]
            read = self.teacher_context_builder.select_generation_prompts([row["prompt"]], [row["ground_truth"]])
            longest = max(len(self._tokenize_prompts(prompts)[0]) for prompts in ([row["prompt"]], read))
            if longest + self.max_completion_length > limit:
                raise DataError(
                    f"{name}, row {number}: {longest} tokens of the teacher and a completion exceed {limit} positions. "
                    "Reduce sequence_len or max_completion_length, or shorten teacher_prompt_template."
                )

    def _setup_teacher_model(self) -> None:
        if isinstance(self.model, PeftModel) or self.args.teacher_model_kind == "live":
            super()._setup_teacher_model()
        else:  # TRL would load it again from where the model is from
            self.teacher_model = self.accelerator.prepare_model(frozen_copy(self.model), evaluation_mode=True)

    def computing_models(self) -> list[nn.Module]:
        """Return the student, and the teacher if it is not the student without its adapter."""
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        return [self.model] if teacher is self.model else [self.model, teacher]

    # Rollouts

    def _prepare_training_batch(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor | Any]:
        self._rows = [{**row, "privileged_context": row["ground_truth"]} for row in inputs]
        batch = super()._prepare_training_batch(self._rows)
        if self.model.training:
            sampled = int(batch["raw_completion_lengths"].sum())
            self.budget.add(documents=len(inputs) // self.num_generations, generated_tokens=sampled)
        return batch

    def _tokenize_prompts(self, prompts: list[Any]) -> list[list[int]]:
        """Return the token ids of the prompts of the current rows, of the student or of the teacher."""
        pairs = zip(prompts, self._rows, strict=True)
        return [self.renderer.prompt_ids(prompt, self.renderer.template_of(row)) for prompt, row in pairs]

    def _generate(self, prompt_ids: list[list[int]]) -> Any:
        with only_config(unwrap_adapter(self.model), self.generation_config):
            return super()._generate(prompt_ids)

    def _forward_logits(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's, in float32: in bfloat16, a small divergence is no more than rounding, and may be below 0."""
        return super()._forward_logits(*args, **kwargs).float()

    # Evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with torch.random.fork_rng():  # completions of an evaluation must not change training after it
            torch.manual_seed(self.args.seed)
            return super().evaluate(*args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().prediction_step(model, inputs, *args, **kwargs)
        self._held_out.append((found[0].item(), len(self._rows)))
        for values in self._metrics["eval"].values():  # whose means are logged
            values += values[-1:] * (len(self._rows) - 1)
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Return transformers' result with the loss as a mean over completions.

        transformers counts the rows, which are there once for each completion.
        """
        self._held_out = []
        output = super().evaluation_loop(*args, **kwargs)
        total = sum(loss * count for loss, count in self._held_out)
        name = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        output.metrics[name] = total / sum(count for _, count in self._held_out)
        return output

    # Resuming

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochSampler(super()._get_train_sampler(dataset))
