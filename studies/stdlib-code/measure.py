"""The one place where the study measures a model: on its task's documents, in the base model's feature space."""

from pathlib import Path
from typing import Any

import settings
from sizes import Size


def measure(model: Path, output: Path, size: Size, task: str) -> dict[str, Any]:
    """{"metrics": {name: value}, "intervals": {name: [low, high]}, "samples": N} of the model in the folder `model`.

    pass@N is the name at every size of what `ebft evaluate` calls by its number of samples.
    """
    from ebft import evaluate, load_config

    config = load_config(settings.config_file("evaluation"), settings.evaluation_overrides(output, size, task))
    found = evaluate(config, models=[str(model)]).to_dict()
    samples, of_model = found["settings"]["samples"], found["models"][0]
    named = lambda values: {name.replace(f"_pass@{samples}", "_pass@N"): value for name, value in values.items()}
    return {"metrics": named(of_model["metrics"]), "intervals": named(of_model["intervals"]), "samples": samples}
