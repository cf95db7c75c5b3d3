"""The one place where the study measures a model: on its task's documents, in the base model's feature space."""

from pathlib import Path
from typing import Any

import settings
from sizes import Size


def measure(model: Path, output: Path, size: Size, task: str) -> dict[str, Any]:
    """{"metrics": {name: value}, "intervals": {name: [low, high]}} of the model in the folder `model`."""
    import ebft

    config = ebft.load_config(settings.config_file("evaluation"), settings.evaluation_overrides(output, size, task))
    found = ebft.evaluate(config, models=[str(model)]).to_dict()["models"][0]
    return {"metrics": found["metrics"], "intervals": found["intervals"]}
