"""`ebft inference` as a command."""

import json
import shutil

from typer.testing import CliRunner

from ebft.run.config.schema import load_config
from ebft.run.reporting import description
from ebft.tools.cli import app
from ebft.tools.inference import models, sampling
from tests.cli.conftest import TERMINAL, flat
from tests.inference.conftest import config_file, folders

__all__ = ["config_file", "folders"]
OPTIONS = ("--max-new-tokens", "8", "--temperature", "0")


def greedy(folder, prompt, base=False):
    sampler = sampling.Sampler(models.model_in_folder(str(folder)), sampling.SamplingOptions(8, 0.0))
    return sampler.text(sampler.reply_ids(prompt, base)[0])


def test_a_prompt_from_the_command_line_and_from_standard_input(folders, config_file, ebft):
    chat = [{"role": "user", "content": "say 3"}]
    expected = {base: greedy(folders["adapter"], chat, base) for base in (False, True)}
    assert expected[False] != expected[True]
    for source in (folders["adapter"], config_file()):
        assert ebft("inference", source, "--prompt", "say 3", *OPTIONS).stdout.strip("\n") == expected[False]
        assert ebft("inference", source, "--prompt", "say 3", "--base", *OPTIONS).stdout.strip("\n") == expected[True]
    piped = CliRunner(env=TERMINAL).invoke(app, ["inference", str(folders["adapter"]), *OPTIONS], input="say 3\n")
    assert piped.stdout.strip("\n") == expected[False]


def test_a_prompt_is_continued_as_text_if_the_model_was_trained_on_text(folders, config_file, ebft, tmp_path):
    """By the config, or by the run.json of a folder."""
    of_text = config_file(datasets=[{"path": "unused", "type": "ebft_strided_structured.transform"}])
    run = shutil.copytree(folders["adapter"], tmp_path / "run")
    (run / "run.json").write_text(json.dumps(description(load_config(of_text))))
    text, answer = (greedy(folders["adapter"], asked) for asked in ("say 3", [{"role": "user", "content": "say 3"}]))
    assert text != answer
    for source in (of_text, run):
        result = ebft("inference", source, "--prompt", "say 3", *OPTIONS)
        assert result.stdout.strip("\n") == text and "as plain text" in result.stderr
        assert ebft("inference", source, "--prompt", "say 3", "--chat", *OPTIONS).stdout.strip("\n") == answer


def scored(ebft, source, *more):
    arguments = ("--prompt", "say 3", "--reference", "it is 3", "--samples", "3", "--seed", "1", *OPTIONS[:2])
    result = ebft("inference", source, *arguments, *more)
    assert result.exit_code == 0, result.output
    return flat(result.stdout), flat(result.stderr)


def test_a_folder_is_scored_with_the_settings_of_its_run(folders, config_file, ebft, tmp_path):
    """The same rewards as with the config; without run.json, the defaults are used and reported."""
    config = config_file()
    expected, settings = scored(ebft, config)
    assert "Reward settings: feature_layers: [0.5]" in settings and "(from the config)" in settings
    run = tmp_path / "run"
    for folder in (run, run / "checkpoint-3"):  # the final model and a checkpoint
        shutil.copytree(folders["adapter"], folder)
    plain, settings = scored(ebft, run)
    assert plain != expected and "feature_layers: [0.25, 0.5, 0.75]" in settings
    assert f"(defaults: {run} has no run.json of its run." in settings
    (run / "run.json").write_text(json.dumps(description(load_config(config))))
    for folder in (run, run / "checkpoint-3"):
        found, settings = scored(ebft, folder)
        assert found == expected and "diversity_coef: 0.5" in settings and f"(from {run / 'run.json'})" in settings
