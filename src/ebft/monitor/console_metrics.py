"""Console output: one line for each log of the trainer, with the EBFT terms, the progress and the losses."""

from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback

from ebft.printed import printable

# Label, metric, format, desired direction (^ up, v down).
_TERMS = (
    ("align", "alignment", "+.3f", "^"),
    ("divers", "diversity", "+.3f", "v"),
    ("cfm", "cfm_loss", ".3f", "v"),
    ("reward", "mean_reward", "+.3f", "^"),
)
_OF_PREFERENCES = (
    ("accuracy", "rewards/accuracies", ".3f", "^"),
    ("margin", "rewards/margins", "+.3f", "^"),
)
_TOKENS_PER_S = "throughput/generated_tokens_per_s"


class ConsoleMetrics(TrainerCallback):
    """Prints each log of the main process as a single line.

    `ebft reward | align +0.412 ^ | divers +0.023 v | cfm 4.231 v | reward +0.389 ^ | step 10/100 | loss 0.1234 |
    grad_norm 1.5000 | 1,234 tok/s`, and for an evaluation `held out | ...` with the metrics `eval_...`.
    """

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        line = format_logs(logs, state.global_step, state.max_steps)
        if line:
            tqdm.write(printable(line))  # does not interfere with a progress bar


class ProgressBar(ProgressCallback):
    """The progress bar of transformers without its output of logs, which `ConsoleMetrics` prints."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        pass


def format_logs(logs: dict[str, float], step: int, max_steps: int) -> str | None:
    """Return the console line of a log of training or evaluation, or None for a log without metrics of either."""
    logs = {name: value for name, value in logs.items() if value is not None}  # TRL: no reward in this interval
    for held_out, loss_prefix, term_prefix in ((True, "eval_", "eval_"), (False, "", "ebft/")):
        terms = [_term(logs[term_prefix + term[1]], *term) for term in _TERMS if term_prefix + term[1] in logs]
        losses, has_features = _losses(logs, loss_prefix), bool(terms)
        compared = [(logs[loss_prefix + term[1]], *term) for term in _OF_PREFERENCES if loss_prefix + term[1] in logs]
        terms += [_term(*term) for term in compared]
        if held_out and "eval_reward" in logs:
            # The policy loss is always about 0, so it is not informative.
            losses = [loss for loss in losses if not loss.startswith("loss ")]
        terms += _rewards(logs, loss_prefix)
        if terms or losses:
            # Not titled reward: held-out features are not whitened, and the feature-matching loss is unbiased.
            title = "held out" if held_out else "ebft reward" if has_features else _title(terms, bool(compared))
            return " | ".join([title, *terms, _progress(step, max_steps), *losses, *_rate(logs)])
    return None


def _title(terms: list[str], compares: bool) -> str:
    return "preference" if compares else "reward" if terms else "loss"


def _term(value: float, label: str, metric: str, spec: str, wanted: str) -> str:
    return f"{label} {round(value, 3) + 0.0:{spec}} {wanted}"  # + 0.0 avoids -0.000


def _rewards(logs: dict[str, float], prefix: str) -> list[str]:
    """Return the total reward and its parts, unless the feature-matching reward is the only one."""
    names = [key for key in logs if key.startswith(f"{prefix}rewards/") and key.endswith("/mean")]
    parts = {key.removeprefix(f"{prefix}rewards/").removesuffix("/mean"): logs[key] for key in names}
    if not parts or list(parts) == ["feature_matching"]:
        return []
    total = [f"total reward {logs[prefix + 'reward']:+.3f} ^"] if prefix + "reward" in logs else []
    return total + [f"{name} {value:+.3f}" for name, value in parts.items() if name != "feature_matching"]


def _losses(logs: dict[str, float], prefix: str) -> list[str]:
    keys = ("loss", "ce_loss", "accuracy", "grad_norm")
    return [f"{key} {logs[prefix + key]:.4f}" for key in keys if prefix + key in logs]


def _progress(step: int, max_steps: int) -> str:
    return f"step {step}/{max_steps}" if max_steps > 0 else f"step {step}"


def _rate(logs: dict[str, float]) -> list[str]:
    return [f"{logs[_TOKENS_PER_S]:,.0f} tok/s"] if _TOKENS_PER_S in logs else []
