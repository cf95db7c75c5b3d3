"""On-policy self-distillation (`rl: sdft`): the method of TRL that, like EBFT, needs references and no verifier."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ebft.config import rules
from ebft.config.section import Section
from ebft.config.trl import SamplingKeys
from ebft.errors import DataError, doing
from ebft.methods.grpo import sampled_as, whole_groups
from ebft.methods.method import EvaluationSampling, Method, MethodConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebft.data.load import LoadedRows
    from ebft.machine import Machine
    from ebft.methods.views import RowView

PROMPT, CONTEXT = "prompt", "privileged_context"


class Distillation(Section):
    """The section `sdft:`, arguments of TRL's SDFTConfig."""

    teacher_model_kind: Literal["base", "live"] = "base"
    """The teacher: base, the model before training; live, the model that is trained."""
    teacher_prompt_template: str = f"{{{PROMPT}}}\n\n{{{CONTEXT}}}"
    """The teacher's prompt, with {prompt}, of messages the last one, and {privileged_context}, the reference. {prompt}
    can be there twice, as in a solved example before the prompt of a base model."""
    distillation_mode: Literal["topk_logits", "full_logits", "sampled_token"] = "topk_logits"
    """Tokens that distributions are compared at: the most likely, all, or the sampled one."""
    distillation_alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Divergence: 0 for KL(teacher, student), 1 for KL(student, teacher), between for mixtures."""
    distillation_topk: Annotated[int, Field(ge=1)] = 100
    """Number of tokens of topk_logits; the probability of the others is left out."""
    num_loss_tokens_to_skip: Annotated[int, Field(ge=0)] = 0
    """Number of tokens at the start of a completion that are not trained on."""


class SDFTKeys(Section):
    """The key of self-distillation."""

    sdft: Distillation = Field(default_factory=Distillation, description="Self-distillation (rl: sdft).")


_NOT_READ = {"generation_batch_size", "chat_template_kwargs", "vllm_guided_decoding_regex"}
_SAMPLING = tuple(name for name in SamplingKeys.model_fields if name not in _NOT_READ)


class SDFT(Method):
    """SDFTTrainer on rows of prompts, whose references the teacher reads."""

    name = "rl: sdft"
    tag = "sdft"
    title = "on-policy self-distillation (SDFT) from a teacher that reads the references"
    metrics = ("loss",)
    rows = "prompts"
    keys = SDFTKeys
    copy_name = "teacher"
    unsupported = dict.fromkeys(
        ("deepspeed", "fsdp", "torch_compile", "group_by_length", "activation_offloading"), "it is not tested there"
    )
    idle = ("vllm",)
    arguments = "ebft.distillation:SDFTConfig"
    trainer = "ebft.distillation:SDFTTrainer"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.trl.use_vllm:
            yield f"trl.use_vllm: true is not supported by {self.name}, which samples with generate(). Remove it."
        if config.adapter and config.lora_model_dir is not None and config.sdft.teacher_model_kind == "base":
            yield (
                f"lora_model_dir: with {self.name}, the teacher would be the base model without this adapter. Merge it "
                "(ebft merge-lora) and set base_model to the result, or set sdft.teacher_model_kind: live."
            )
        template = config.sdft.teacher_prompt_template
        with doing(f"reading sdft.teacher_prompt_template {template!r:.80}"):
            fields = [field for _, *field in Formatter().parse(template) if field[0] is not None]
        if {name for name, *_ in fields} != {PROMPT, CONTEXT} or any(spec or how for _, spec, how in fields):
            yield f"sdft.teacher_prompt_template must contain {{{PROMPT}}} and {{{CONTEXT}}}, and no other braces."
        skipped, longest = config.sdft.num_loss_tokens_to_skip, config.trl.max_completion_length
        if skipped >= longest:
            yield (
                f"sdft.num_loss_tokens_to_skip: {skipped} leaves nothing of completions of up to {longest} tokens "
                "(trl.max_completion_length). Reduce it."
            )

    def resolve(self, config: MethodConfig) -> None:
        rules.follow_samples(config.ebft, config.trl)
        read = rules.samples_in_effect(config.ebft, config.trl)
        idle = [f"ebft.{key}" for key in sorted(config.ebft.model_fields_set - read)]
        others = config.trl.model_fields_set - {*_SAMPLING, "chat_template_kwargs", "use_vllm"}
        idle += [f"trl.{key}" for key in sorted(others)]
        idle += ["log_rollouts: all"] if config.log_rollouts == "all" else []
        idle += [f"{key}: true" for key in ("sample_packing", "train_on_inputs") if getattr(config, key)]
        mode = config.sdft.distillation_mode
        if mode != "topk_logits" and "distillation_topk" in config.sdft.model_fields_set:
            idle.append(f"sdft.distillation_topk with distillation_mode: {mode}")
        self.warn_of_idle(config, *idle)

    def problems(self, config: MethodConfig) -> Iterator[str]:
        size, steps, group = config.micro_batch_size, config.gradient_accumulation_steps, config.trl.num_generations
        yield from rules.groups(size, steps, group, rules.in_config, "gradient_accumulation_steps")
        if config.eval_batch_size is not None and config.eval_batch_size % group:
            yield f"eval_batch_size: {config.eval_batch_size} is not a multiple of trl.num_generations: {group}."

    def problems_here(self, config: MethodConfig, machine: Machine) -> Iterator[str]:
        if machine.processes > 1:
            yield f"{self.name} is not supported with several processes, where it is not tested. Start one process."

    def sampling(self, config: MethodConfig) -> EvaluationSampling:
        return sampled_as(config.trl)

    def samples_per_group(self, config: MethodConfig) -> int:
        return config.trl.num_generations

    def copies_model(self, config: MethodConfig) -> bool:
        return config.sdft.teacher_model_kind == "base"

    def keeps_logits(self, config: MethodConfig) -> bool:
        return True

    def check_rows(self, config: MethodConfig, rows: LoadedRows) -> None:
        """Raise DataError for rows that TRL would train on in another way than the other methods, or not at all."""
        for part, data in (("training", rows.train), ("held-out", rows.evaluation or [])):
            for number, row in enumerate(data):
                problem, prompt = None, row["prompt"]
                if row.get("remaining_turns"):
                    problem = "has several turns, but only the first would be trained on. Use a transform of one reply"
                elif not isinstance(prompt, str) and prompt[-1]["role"] != "user":
                    problem = f"has a prompt that ends with {prompt[-1]['role']!r}; the teacher's must end with 'user'"
                if problem is not None:
                    raise DataError(f"{part} row {number} {problem} ({self.name}).")

    def row_view(self, config: MethodConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.distillation import teacher_prompt
        from ebft.methods.views import PromptView

        view = PromptView(tokenizer, config.chat_template_kwargs, compares=True)

        def with_teacher(row: dict[str, Any]) -> RowView:
            shown, reference = view(row), row["ground_truth"]
            read = teacher_prompt(config.sdft.teacher_prompt_template, row["prompt"], reference)
            prompt = view({**row, "prompt": read, "ground_truth": None}).parts[0]
            return replace(shown, parts=[*shown.parts, replace(prompt, title="prompt of the teacher")])

        return with_teacher

    def steps_per_epoch(self, config: MethodConfig, machine: Machine, rows: int) -> int:
        """Each prompt has `num_generations` rows of a batch."""
        per_step = config.micro_batch_size * config.gradient_accumulation_steps // config.trl.num_generations
        return max(1, math.ceil(rows / max(1, per_step)))

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        trl = config.trl
        found = {name: getattr(trl, name) for name in _SAMPLING} | config.sdft.model_dump()
        return found | whole_groups(config) | {"shuffle_dataset": not config.curriculum_sampling}

    def build_trainer(self, config: MethodConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        kwargs = config.chat_template_kwargs
        return super().build_trainer(config, model, tokenizer, server, template_kwargs=kwargs, **common)
