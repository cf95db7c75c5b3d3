"""A method of one's own: a class in one file and a line in the table, with a key, data, arguments and a trainer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

METHOD = '''
from pydantic import Field

from ebft.config.section import Section
from ebft.methods.sft import SFT


class WeightedKeys(Section):
    text_weight: float = Field(1.0, gt=0, description="Weight of the loss.")


class Weighted(SFT):
    """SFT whose loss has a weight."""

    name = "rl: weighted"
    keys = WeightedKeys

    def build_trainer(self, config, model, tokenizer, server, **common):
        trainer = super().build_trainer(config, model, tokenizer, server, **common)
        compute = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: config.text_weight * compute(*args, **kwargs)
        return trainer
'''
RUN = """
import sys, warnings
import ebft.methods
ebft.methods.METHODS["weighted", None] = "weighted:Weighted"
from ebft import load_config, train
from ebft.errors import ConfigError

warnings.simplefilter("ignore")
run = lambda *overrides: train(load_config(sys.argv[1], list(overrides))).metrics["train_loss"]
losses = [run(), run("text_weight=3.0")]
assert abs(losses[1] - 3 * losses[0]) < 1e-3 * losses[1], losses
try:
    load_config(sys.argv[1], ["text_weight=-1"])
except ConfigError as error:
    assert "text_weight: invalid value -1; expected a value greater than 0" in str(error), error
with warnings.catch_warnings(record=True, action="always") as caught:
    load_config(sys.argv[1], ["rl=", "text_weight=3.0"])
    load_config(sys.argv[1], ["ebft.stride=3"])
assert any("text_weight has no effect" in str(warning.message) for warning in caught)
assert any("ebft: no effect with rl: weighted." in str(warning.message) for warning in caught)
"""


@pytest.mark.slow
def test_a_method_is_one_file_and_one_line(tiny_llama_dir, tmp_path):
    (tmp_path / "weighted.py").write_text(METHOD)
    rows = [{"text": f"line {number} of a text that is long enough"} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {"base_model": str(tiny_llama_dir), "rl": "weighted",
              "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "completion"}],
              "special_tokens": {"pad_token": "<|end|>"}, "sequence_len": 32, "max_steps": 1, "save_strategy": "no",
              "output_dir": str(tmp_path / "out")}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "main.py").write_text(RUN)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, str(tmp_path / "main.py"), str(tmp_path / "run.yaml")], capture_output=True,
                          text=True, cwd=root)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
