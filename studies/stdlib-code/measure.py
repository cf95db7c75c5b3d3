"""The one place where the study measures a model: on its task's documents, in the base model's feature space."""

from pathlib import Path
from typing import Any

import settings
from sizes import Size

CURVES = ("cfm_loss", "rollout_nll_base")


def measure(model: Path, output: Path, size: Size, task: str, part: str) -> dict[str, Any]:
    """What `ebft evaluate` finds of the model in the folder `model`, on the test or the validation part of its task.

    `metrics` and `per_document` are those of its JSON, `rollouts` has points [token, value] of CURVES. pass@N is the
    name at every size of what `ebft evaluate` calls by its number of samples.
    """
    from ebft import evaluate, load_config

    config = load_config(settings.config_file("evaluation"), settings.evaluation_overrides(output, size, task, part))
    found = evaluate(config, models=[str(model)]).to_dict()
    samples, of_model = found["settings"]["samples"], found["models"][0]
    named = lambda values: {name.replace(f"_pass@{samples}", "_pass@N"): value for name, value in values.items()}
    return {
        "metrics": named(of_model["metrics"]),
        "per_document": named(of_model["per_document"]),
        "rollouts": {name: [[p["x"], p["value"]] for p in of_model["curves"][name]] for name in CURVES},
        "samples": samples,
    }
