"""HealthCallback: checks the table of conditions during training, and reports each one once."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainerCallback

from ebft.errors import NonFiniteLossError, warn
from ebft.files import append_line
from ebft.health import rules
from ebft.health.rules import Log, Sighting
from ebft.run_files import HEALTH

STRIDED, STRUCTURED, GRPO, SFT, PREFERENCES = "strided", "structured", "grpo", "sft", "preferences"
COMPLETIONS = (STRUCTURED, GRPO)
SAMPLED = (STRIDED, STRUCTURED, GRPO)
ALL = (STRIDED, STRUCTURED, GRPO, SFT, PREFERENCES)
# A resumed run continues with the learning rate of its checkpoint.
_SLOWER = (
    "start a new run with a smaller learning_rate, for example from the weights of an earlier checkpoint "
    "(lora_model_dir or base_model); resuming would keep the learning rate"
)


class Condition(NamedTuple):
    """One row of the table: `when` states `rule` in words; `healthy` is the usual range of the metrics."""

    name: str
    meaning: str
    metrics: tuple[str, ...]
    methods: tuple[str, ...]
    when: str
    rule: Callable[[Log], Sighting | None]
    remedy: str
    healthy: str


CONDITIONS = (
    Condition(
        "non-finite values",
        "A logged metric is NaN or infinite. Training stops before an update with a non-finite loss or gradient.",
        ("all metrics except rewards/NAME/mean and rewards/NAME/std",),
        ALL,
        "any value is NaN or infinite (grad_norm with fp16: three in a row)",
        rules.non_finite,
        f"Check the documents of that step for empty or corrupted text, set bf16: true instead of fp16, or {_SLOWER}.",
        "finite",
    ),
    Condition(
        "samples become identical",
        "Mode collapse: the rollouts of a prompt or anchor are becoming copies of each other.",
        ("ebft/diversity",),
        SAMPLED,
        "the distance to the diversity of identical samples (2, or 2/n with whitening and n samples) is less than a "
        "third of what it was at the start",
        rules.samples_alike,
        f"Increase ebft.diversity_coef or the temperature and resume from a checkpoint before this step, or {_SLOWER}.",
        "about as at the start; mean-pooled features without whitening give 1.2 to 1.8 before any training",
    ),
    Condition(
        "entropy collapse",
        "The policy has become almost deterministic, so samples no longer explore.",
        ("entropy",),
        SAMPLED,
        "below a tenth of its start, or below 0.01",
        rules.entropy_collapse,
        "Increase the temperature, sample more completions per prompt, or add a KL term (trl.beta); with strided mode, "
        f"increase ebft.diversity_coef. Or {_SLOWER}.",
        "0.05 to 0.5 for chat models on verifiable tasks; 1 to 4 for base models on text",
    ),
    Condition(
        "diversity term dominates",
        "The penalty for similar samples outweighs the alignment with the reference, and the reward does not recover.",
        ("ebft/mean_reward",),
        SAMPLED,
        "below -0.9 in 20 logs, and not above its start",
        rules.diversity_dominates,
        "Reduce ebft.diversity_coef, increase ebft.alignment_coef, or set ebft.use_whitening: true.",
        "rising; it may start negative",
    ),
    Condition(
        "low alignment",
        "The features of samples have nothing in common with those of their references.",
        ("ebft/alignment",),
        SAMPLED,
        "below 0.1 in 20 logs",
        rules.low_alignment,
        "Try other ebft.feature_layers or another ebft.embed_method, and check that references belong to their "
        "prompts.",
        "0.3 to 1.9, rising",
    ),
    Condition(
        "no signal",
        "Nothing is learned from rewards: those of the samples of a group, or all advantages, are equal, or there is "
        "no gradient at all.",
        ("frac_reward_zero_std", "ebft/advantages_std", "grad_norm"),
        ALL,
        "frac_reward_zero_std above 0.99 in 20 logs, ebft/advantages_std 0 in 10 logs, or grad_norm 0 in 20 logs",
        rules.no_signal,
        "Test the reward function on its own with completions of different quality, increase the temperature or the "
        "number of samples (trl.num_generations, ebft.n_samples_per_prompt), and use prompts that are neither always "
        "nor never solved. For SFT, check that labels are not all masked.",
        "frac_reward_zero_std below 0.8; grad_norm above 0",
    ),
    Condition(
        "reward always zero",
        "A reward function has returned 0 for every completion.",
        ("rewards/NAME/mean",),
        COMPLETIONS,
        "exactly 0 in the first 20 logs",
        rules.reward_always_zero,
        "Call the reward function with known completions, check that the columns it reads are in the dataset, and read "
        "the completions (ebft show).",
        "above 0.15 within 20 steps",
    ),
    Condition(
        "cross-entropy diverges",
        "The model assigns less probability to the reference text than at the start: it is being damaged.",
        ("ebft/ce_loss", "loss (SFT)", "eval_ce_loss"),
        ALL,
        "three times the first value (and 3 above it) in 3 logs, or above the start by more than 0.3, 10% and five "
        "standard errors; held out: above the first evaluation by more than 0.3 and 10%, twice in a row",
        rules.cross_entropy_diverges,
        f"With EBFT, increase ebft.ce_coef. Or {_SLOWER} (by a factor of 2 to 10, or with warmup_steps).",
        "falling",
    ),
    Condition(
        "loss spikes",
        "Single batches have a far larger loss than those around them, and their gradients disturb the model.",
        ("ebft/ce_loss", "loss (SFT)"),
        ALL,
        "in 3 of 50 logs more than twice the median of the 5 logs before and the 5 after, and more than 0.5 and five "
        "standard deviations above it",
        rules.loss_spikes,
        "Look for malformed or unusually long documents with `ebft preprocess --debug`, keep max_grad_norm at 1.0 or "
        f"below, increase gradient_accumulation_steps or warmup_steps, set bf16: false to compare, or {_SLOWER}.",
        "within the noise of its neighbours",
    ),
    Condition(
        "feature matching diverges",
        "The features of samples move away from those of the references: the opposite of the objective.",
        ("ebft/cfm_loss", "eval_cfm_loss"),
        SAMPLED,
        "without whitening above 1.5 times the start and five standard errors; above 100; held out: above 1.5 times "
        "the first evaluation, twice in a row",
        rules.cfm_diverges,
        f"Use more samples or larger batches, increase ebft.ce_coef, or {_SLOWER}.",
        "falling, below 10",
    ),
    Condition(
        "overfitting",
        "The model fits the training text better and other text worse.",
        ("eval_ce_loss", "ebft/ce_loss", "loss (SFT)"),
        ALL,
        "the held-out cross-entropy rose in three successive evaluations by more than 2%, while that of training fell",
        rules.overfitting,
        "Train for fewer steps or epochs, keep the best checkpoint (load_best_model_at_end: true), or start a "
        "new run with a larger weight_decay or lora_dropout, a smaller lora_r, or more data.",
        "close to the training cross-entropy",
    ),
    Condition(
        "unstable gradient",
        "Gradients have grown far beyond those of the start; updates are mostly noise, even if they are clipped.",
        ("grad_norm",),
        ALL,
        "above 10 and above five times its start",
        rules.unstable_gradient,
        f"Keep max_grad_norm at 1.0 or below, increase gradient_accumulation_steps, or {_SLOWER}.",
        "0.1 to 3 for EBFT, up to 10 for SFT",
    ),
    Condition(
        "off-policy drift",
        "Completions were sampled from weights that differ from the policy being trained.",
        ("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/min", "clip_ratio/region_mean"),
        COMPLETIONS,
        "difference above 1, smallest ratio below 0.01 with a difference above 0.1, or more than 30% of the ratios "
        "clipped",
        rules.off_policy,
        "Send weights to the server more often (trl.vllm_sync_interval), reduce trl.prefetch_depth or "
        "trl.num_iterations, or mask stale samples (trl.off_policy_mask_threshold: 0.5). If the difference is large "
        f"from the first step, the server serves another model or precision. Or {_SLOWER}.",
        "difference below 0.1, smallest ratio above 0.1, clipped ratios below 0.1",
    ),
    Condition(
        "far from the reference model",
        "The policy has moved far from the reference model of the KL term.",
        ("kl",),
        COMPLETIONS,
        "above 2",
        rules.far_from_reference,
        f"Increase trl.beta, or {_SLOWER}.",
        "0 to 0.5",
    ),
    Condition(
        "rejected completions preferred",
        "The policy has moved towards the rejected completions: labels may be swapped, or updates are too large.",
        ("rewards/margins",),
        (PREFERENCES,),
        "below 0, and below its start by more than five standard errors, in 20 logs",
        rules.rejected_preferred,
        f"Check with `ebft preprocess --debug` that chosen and rejected are not swapped. Or {_SLOWER}.",
        "rising; it starts at 0 with a reference model",
    ),
    Condition(
        "truncated completions",
        "Most completions are cut at the maximum length, so their rewards are those of unfinished texts.",
        ("completions/clipped_ratio",),
        COMPLETIONS,
        "above 0.8",
        rules.truncation,
        "Increase trl.max_completion_length (and ebft.gt_length_multiplier with references), set "
        "trl.generation_kwargs.stop_token_ids for the model's end-of-turn tokens, or exclude truncated completions "
        "(trl.mask_truncated_completions: true).",
        "below 0.3",
    ),
    Condition(
        "length is rewarded",
        "Completions keep growing and longer ones get higher rewards, which suggests that length alone is rewarded.",
        ("completions/mean_length", "reward"),
        COMPLETIONS,
        "lengths above 1.5 times their start, and a correlation above 0.5 between the changes of length and reward "
        "from log to log (30 to 50 logs)",
        rules.length_rewarded,
        "Read completions with high rewards (ebft show), make the reward independent of length, or "
        "limit trl.max_completion_length.",
        "depends on the task",
    ),
)


_SAVED_AS = "Health"  # among the `stateful_callbacks` of trainer_state.json
_NON_FINITE = CONDITIONS[0]


class HealthCallback(TrainerCallback):
    """Warns when the logged metrics show that a run fails, and writes `health.jsonl` in the output folder.

    Each of `CONDITIONS` is reported once, on the main process, with the step since which it holds and
    what to try: as a warning, and as a JSON line with the keys time (ISO 8601, UTC), step, since, name, message and
    remedy. A new run replaces the file of an earlier one; a resumed run continues with the metrics and reports of its
    checkpoint. For any transformers Trainer; `samples` (per prompt or anchor) and `use_whitening`, which determine the
    diversity of identical samples, are read from the trainer's arguments if they are not given.
    """

    def __init__(self, samples: int | None = None, use_whitening: bool | None = None) -> None:
        self._given: dict[str, Any] = {"samples": samples, "whitened": use_whitening}
        self._log = Log(**self._given)
        self.reported: set[str] = set()  # names of conditions

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log = self._log_of(args, state)
        self.reported = set(state.stateful_callbacks.get(_SAVED_AS, {}).get("reported", ()))
        if state.is_world_process_zero and state.global_step == 0:
            (Path(args.output_dir) / HEALTH).unlink(missing_ok=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:  # the latter: totals at the end
            return
        self._log.add(state.global_step, logs)
        for condition in CONDITIONS:
            if condition.name not in self.reported and (sighting := condition.rule(self._log)) is not None:
                self._report(condition, sighting, args, state)

    def unresolved(self, args: Any, state: Any) -> list[str]:
        """The names of the reported conditions that still hold for the newest values of the metrics in `state`."""
        reported = state.stateful_callbacks.get(_SAVED_AS, {}).get("reported", ())
        log = self._log_of(args, state)
        log.names = frozenset(log.series)  # not only the newest entry's, which may be an evaluation
        return [each.name for each in CONDITIONS if each.name in reported and each.rule(log) is not None]

    def failed(self, error: NonFiniteLossError, args: Any, state: Any) -> None:
        """Write the condition for the error that ended training; its message is printed elsewhere."""
        if state.is_world_process_zero and _NON_FINITE.name not in self.reported:
            self.reported.add(_NON_FINITE.name)
            step = state.global_step + 1  # the one that was not completed
            self._write(_NON_FINITE, step, step, str(error), args.output_dir)

    def _log_of(self, args: Any, state: Any) -> Log:
        options = vars(args)
        samples = options.get("num_generations") or options.get("n_samples_per_prompt")
        found = {"samples": samples, "whitened": options.get("use_whitening")}
        given = {name: value for name, value in self._given.items() if value is not None}
        log = Log(**(found | given), fp16=args.fp16)
        for entry in state.log_history:
            if "train_runtime" not in entry:  # totals at the end
                log.add(entry["step"], entry)
        return log

    def _report(self, condition: Condition, sighting: Sighting, args: Any, state: Any) -> None:
        self.reported.add(condition.name)
        state.stateful_callbacks[_SAVED_AS] = {"reported": sorted(self.reported)}
        message = f"{sighting.saw}. {condition.meaning}"
        warn(
            f"{condition.name} since step {sighting.since} (seen at step {state.global_step}): {message} To try: "
            f"{condition.remedy} (health: false turns these checks off)"
        )
        self._write(condition, state.global_step, sighting.since, message, args.output_dir)

    def _write(self, condition: Condition, step: int, since: int, message: str, folder: str) -> None:
        line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "step": step, "since": since}
        line |= {"name": condition.name, "message": message, "remedy": condition.remedy}
        path = Path(folder) / HEALTH
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, json.dumps(line, ensure_ascii=False))
        except OSError as error:
            warn(f"{path} cannot be written ({error}).")
