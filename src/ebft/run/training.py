"""Training a model from a config.

`train` runs these steps in order: checks, seed, server, tokenizer, datasets, model (with its adapter), trainer,
training or resuming, saving.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import Trainer, TrainerState, set_seed

from ebft.config.user_functions import user_code
from ebft.data.documents import longest_document
from ebft.data.load import LoadedRows
from ebft.errors import ConfigError, NonFiniteLossError, SaveError, doing, shortened, warn
from ebft.files import STATE, check_writable
from ebft.health.callback import HealthCallback
from ebft.health.outcome import training_outcome
from ebft.machine import is_main_process
from ebft.models.adapter_targets import fused_experts
from ebft.models.load import check_sequence_len, load_model, load_model_config, usable_quantisation, weights_dtype
from ebft.models.pretrained import load_tokenizer
from ebft.models.sharding import load_on_first_process, load_whole
from ebft.models.weights import unpacked_size
from ebft.monitor.budget import limit_reached, spent_at
from ebft.monitor.run_files import RunFiles
from ebft.printed import say
from ebft.rewards import whitening_tolerance
from ebft.run import checkpoints
from ebft.run.callbacks import StopOnSignal, StopRequested, TrainingInterrupted, on_any_process, stopped_early
from ebft.run.checkpoints import check_space, rehearse
from ebft.run.checks import check_machine, check_runnable, check_same_everywhere
from ebft.run.config.schema import RunConfig
from ebft.run.output import claim, declare_end_of_turn, final_step, listed, output_lock, save_final
from ebft.run.plugins import Plugins
from ebft.run.prepared_rows import describe, prepare_rows
from ebft.run.reporting import check_hub, method_of, model_card, push, recorded, start_trackers, tracker_environment
from ebft.run.resume_compat import optimizer_keys, run_record, saved_keys, warn_of_changes, write_run_keys
from ebft.run.trainer import build_trainer, planned_steps, this_machine, training_arguments, use_bf16
from ebft.serving.command import device_environment, find_interpreter, server_command
from ebft.serving.server import LOG, VLLMServer, await_ready
from ebft.trainer import OverTrainer
from ebft.trainer.checkpoints import step_in_name
from ebft.transformers_internals import load_weights


@dataclass
class TrainResult:
    """Result of a run: the output folder, the last value of each logged metric, and the trainer."""

    output_dir: str
    metrics: dict[str, float]
    trainer: Trainer

    @property
    def model(self) -> Any:
        """The trained model, with its adapter if it has one."""
        return self.trainer.model

    @property
    def outcome(self) -> str:
        """A few lines on whether the run learned anything."""
        return self.describe_outcome()

    def describe_outcome(self, evaluate: str | None = "ebft evaluate CONFIG") -> str:
        """The outcome, with `evaluate` as the command that compares the trained model with the base model, if any."""
        trainer = self.trainer
        checks = [each for each in trainer.callback_handler.callbacks if isinstance(each, HealthCallback)]
        unresolved = [name for check in checks for name in check.unresolved(trainer.args, trainer.state)]
        has_held_out, strategy = trainer.eval_dataset is not None, trainer.args.eval_strategy
        whitens = bool(getattr(trainer.args, "use_whitening", False))
        return training_outcome(trainer.state.log_history, evaluate, unresolved, has_held_out, strategy, whitens)


def train(config: RunConfig, command: Sequence[str] | None = None) -> TrainResult:
    """Train with the settings of `config` and save model, tokenizer and model card in `config.output_dir`.

    `command` are the words of the command that started the run, if any; they are printed if it is interrupted.

    Raises ConfigError, DataError or ModelError (all ValueError) for user errors, if possible before the model is
    loaded; SaveError if a checkpoint or the model cannot be written; TrainingInterrupted (a KeyboardInterrupt) after
    Ctrl-C or SIGTERM, with a checkpoint of the last completed step. A run whose checkpoint is already at the last step
    is not trained further; its saved model is left unchanged if it is complete.
    """
    return train_until(config, StopOnSignal(command))


def train_until(config: RunConfig, stop: StopOnSignal) -> TrainResult:
    """`train` until it is complete or `stop` is requested."""
    with ExitStack() as run:
        run.enter_context(_interruptible(config, stop))
        _check(config, stop)
        config = usable_quantisation(config)  # what the run records is what it trains
        output_dir = Path(config.output_dir)
        make_output_dir(output_dir)
        run.enter_context(output_lock(output_dir))
        found = checkpoints.find_checkpoints(config)
        claim(output_dir)
        files, server = run.enter_context(recorded(config)), run.enter_context(_services(config))
        plugins = Plugins(config)
        tokenizer, model_config = load_tokenizer(config), load_model_config(config)
        train_data, eval_data = arranged(config, run_rows(config, tokenizer), model_config)
        rows = 0 if config.streaming else len(train_data)
        args = training_arguments(config, rows=rows, has_eval=eval_data is not None)

        completed = completed_run(config, found, rows)
        checkpoint = found.checkpoint() if completed is None else None
        optimizer = optimizer_keys(config, checkpoint)
        record: dict[str, Any] = {}
        if files is not None:
            record = run_record(config, tokenizer, args, files.description["data_digests"])
            warn_of_changes(config, record, completed or checkpoint, is_finished=completed is not None)
            if completed is None:
                files.description["optimizer"] = optimizer
        if this_machine().processes > 1:
            check_same_everywhere(config, args.mixed_precision, train_data, eval_data, checkpoint)

        load_on_first_process(args)
        if not config.method.runs_plain_model:
            load_whole()
        head = config.method.head(config)
        plugins("pre_model_load")
        if is_main_process():
            start_trackers(args.report_to, args.run_name)
            say(f"Loading the model {config.base_model} ...", err=True)
        model = load_model(config, tokenizer, head, plugins)
        into_model = declare_end_of_turn(config, model, tokenizer, train_data)
        if server is not None:
            await_ready(server, config.trl.vllm_server_timeout)
        trainer = build_trainer(config, args, model, tokenizer, train_data, eval_data, server, plugins)
        settings = record if completed is None else saved_keys(completed) or record
        trainer.into_model = [partial(write_run_keys, config, others=settings), *into_model]
        trainer.into_checkpoint = [partial(write_run_keys, config, others=settings | optimizer)]
        trainer.card = lambda: model_card(config, last_metrics(trainer))
        trainer.callback_handler.callbacks.insert(0, checkpoints.PreviousRun(config, trainer, files))
        if files is not None:
            trainer.add_callback(files)

        if completed is None:
            if trainer.is_world_process_zero():
                say(start_summary(config, trainer.model, train_data, eval_data, checkpoint), err=True)
            rehearse(config, trainer)
            check_space(config, trainer, rows, is_resumed=checkpoint is not None)
            train_steps(config, trainer, checkpoint, stop)
        else:
            restore(config, trainer, completed, files, rows)
        metrics = last_metrics(trainer)
        if completed is None or final_step(output_dir) != trainer.state.global_step:
            save(config, trainer, metrics, stop)
        stop.is_complete = True
        if completed is None:
            plugins("post_train", trainer.model)
            plugins("post_train_unload")
        if config.hub_model_id and trainer.is_world_process_zero():
            push_final(config, trainer, stop)
        return TrainResult(output_dir=config.output_dir, metrics=metrics, trainer=trainer)


@contextmanager
def _interruptible(config: RunConfig, stop: StopOnSignal) -> Iterator[None]:
    """Handle signals inside the block; an interruption before or after training raises TrainingInterrupted as well."""
    with stop.listening():
        try:
            yield
        except TrainingInterrupted:
            raise
        except KeyboardInterrupt:
            message = (
                f"The model is saved in {config.output_dir}. Interrupted while the report of the run was written."
                if stop.is_complete
                else "Interrupted before training started; nothing was saved."
            )
            raise TrainingInterrupted(message, stop.signal_number) from None


def _check(config: RunConfig, stop: StopOnSignal) -> None:
    """Raise ConfigError or DataError if the run cannot be trained on this machine or in this folder."""
    if config.use_ray and not stop.is_ray_worker:
        raise ConfigError("use_ray: true needs the command `ebft train`. Run it, or set use_ray: false.")
    folder = Path(config.output_dir)
    if step_in_name(folder) is not None and (folder / STATE).is_file() and final_step(folder) is None:
        raise ConfigError(f"output_dir: {folder} is a checkpoint, whose files a run would replace. Set another one.")
    check_runnable(config)
    check_machine(config, this_machine())


@contextmanager
def _services(config: RunConfig) -> Iterator[VLLMServer | None]:
    """The Hub, trackers, random numbers and servers inside the block; yields the server started for the run."""
    check_hub(config)
    os.environ.update(tracker_environment(config))
    set_seed(config.seed)
    if config.saves_per_epoch is None and config.evals_per_epoch is None:  # otherwise the steps depend on the rows
        training_arguments(config, rows=1, has_eval=bool(config.test_datasets or config.val_set_size))
    with servers(config, config.output_dir) as server:
        if config.uses_server and config.trl.vllm_mode == "server":  # that the user started
            from ebft.structured.rollouts.client import VLLMClient  # runs without a server need no HTTP client

            timeout = config.trl.vllm_server_timeout or config.method.arguments_class().vllm_server_timeout
            with closing(VLLMClient(*config.server_address, timeout)) as client:
                client.wait_until_up()
        yield server


@contextmanager
def servers(config: RunConfig, folder: str) -> Iterator[VLLMServer | None]:
    """The servers of the method inside the block; yields the vLLM server of the run, which only rank 0 starts."""
    with ExitStack() as running:
        running.enter_context(config.method.services(config))
        server = None
        if config.manages_server and is_main_process():
            vllm, gpus = config.vllm, torch.cuda.device_count()
            environment = device_environment(vllm, this_machine().processes, gpus)  # GPUs that do not train
            words = server_command(config.server_settings, find_interpreter(vllm.python), gpus)
            server = running.enter_context(VLLMServer(words, Path(folder) / LOG, environment))
        yield server


def run_rows(config: RunConfig, tokenizer: Any) -> LoadedRows:
    """The rows that a run trains on and is evaluated on, with a line about the folder they are read from, if any."""
    if config.dataset_prepared_path is None or config.streaming:
        return config.method.load_rows(config, tokenizer)
    prepared = prepare_rows(config, tokenizer, Path(config.dataset_prepared_path))
    if is_main_process():
        say(describe(prepared), err=True)
    return prepared.rows


def arranged(config: RunConfig, rows: LoadedRows, model_config: Any) -> tuple[Any, Any]:
    """`rows` as the method's trainer receives them, after checks; of the model's positions only with `model_config`."""
    if model_config is not None:
        longest = longest_document(rows.train, rows.evaluation)
        check_sequence_len(config.sequence_len, model_config, config.base_model, longest)
    config.method.check_rows(config, rows)
    return config.method.arrange(config, rows.train), rows.evaluation


def make_output_dir(folder: str | Path) -> None:
    """Create the output folder, in which files can be created; OSError before anything is loaded."""
    with doing(f"creating output_dir: {shortened(folder, 200)}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        check_writable(Path(folder))


def train_steps(config: RunConfig, trainer: OverTrainer, checkpoint: Path | None, stop: StopOnSignal) -> None:
    """Train, resuming from `checkpoint` if there is one. Raises TrainingInterrupted after Ctrl-C or SIGTERM."""
    stop.follow(trainer)
    try:
        with user_code("training", ConfigError, passes=Exception):  # a callback's sys.exit(0) would look like success
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        is_complete = trainer.state.global_step >= trainer.state.max_steps and not trainer.has_pending_evaluation
        if stop.requested and not is_complete:
            raise StopRequested
    except NonFiniteLossError as error:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, HealthCallback):
                callback.failed(error, trainer.args, trainer.state)
        raise
    except SaveError:
        raise
    except Exception:  # of a callback or an evaluation
        if trainer.load_result():
            save(config, trainer, last_metrics(trainer), stop)
            say(f"The model is saved in {config.output_dir}, although training ended with an error.", err=True)
        raise
    except StopRequested:
        trainer.save_stopped()
        stop.wait_for_others()
        raise _interrupted(config, trainer, stop, checkpoint) from None
    except KeyboardInterrupt:
        raise _interrupted(config, trainer, stop, checkpoint) from None


def _interrupted(
    config: RunConfig, trainer: OverTrainer, stop: StopOnSignal, resumed: Path | None = None, before: str = ""
) -> TrainingInterrupted:
    """The exception with the text `before`, and how to resume a run that was resumed from `resumed`, if any."""
    text = checkpoints.how_to_resume(config, trainer.state.global_step, resumed, stop.command)
    return TrainingInterrupted(before + text, stop.signal_number)


def last_metrics(trainer: Trainer) -> dict[str, float]:
    """The last logged value of each metric, without the epoch and step counters."""
    merged = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    return {name: value for name, value in merged.items() if name not in ("epoch", "step") and value is not None}


def save(config: RunConfig, trainer: OverTrainer, metrics: dict[str, float], stop: StopOnSignal) -> None:
    """Save the final model, the tokenizer, the trainer state and the model card.

    After Ctrl-C or SIGTERM, the model is still saved. Raises TrainingInterrupted if it is not, and NonFiniteLossError
    for weights that are not finite.
    """
    named = trainer.model.named_parameters()
    local = ((name, each.to_local() if hasattr(each, "to_local") else each) for name, each in named)
    found = [name for name, each in local if each.requires_grad and not torch.isfinite(each).all()]
    if on_any_process(trainer.accelerator, bool(found)):
        raise NonFiniteLossError(
            f"Weights are NaN or infinite after the last step{f' (first {found[0]})' if found else ''}, so the final "
            "model was not saved. An earlier checkpoint can be used as base_model or lora_model_dir."
        )
    stop.is_saving_model = True
    try:
        save_final(config, trainer, metrics)
    except KeyboardInterrupt:
        before = "Interrupted while the final model was saved, so it is incomplete. "
        raise _interrupted(config, trainer, stop, before=before) from None
    finally:
        stop.is_saving_model = False


def push_final(config: RunConfig, trainer: OverTrainer, stop: StopOnSignal) -> None:
    """Push the saved model to the Hub, also after a run that was finished before, whose push may have failed."""
    try:
        if stop.requested:
            raise StopRequested
        push(config, [*listed(Path(config.output_dir))], trainer.card(), trainer.processing_class)
    except KeyboardInterrupt:
        message = f"The model is saved in {config.output_dir}, but it was not pushed to {config.hub_model_id}."
        raise TrainingInterrupted(message, stop.signal_number) from None


def start_summary(config: RunConfig, model: nn.Module, train_data: Any, eval_data: Any, checkpoint: Path | None) -> str:
    """Return the summary of a run that starts with `model`, at the step of `checkpoint` if there is one."""
    machine, rows = this_machine(), 0 if config.streaming else len(train_data)
    steps = planned_steps(config, machine, rows)
    epochs = steps / config.method.steps_per_epoch(config, machine, rows)
    length = f"{epochs:.3g} {'epoch' if epochs == 1 else 'epochs'}"
    if config.streaming:
        tokens = config.sequence_len * config.micro_batch_size * config.gradient_accumulation_steps * machine.processes
        length = f"{tokens:,} tokens each"
    resumed = "" if checkpoint is None else f", resumed from {checkpoint.name}"
    gpus = torch.cuda.device_count() if config.device_map is None else 0
    idle = f", one process, on one of {gpus} GPUs" if gpus > 1 else ""
    processes = f", {machine.processes} processes" if machine.processes > 1 else idle
    train = "a stream" if config.streaming else f"{rows:,} training {'row' if rows == 1 else 'rows'}"
    bits = "4 bits" if config.load_in_4bit else "8 bits" if config.load_in_8bit else ""
    dtype = str(weights_dtype(config)).removeprefix("torch.")
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    total = sum(unpacked_size(weight) for weight in model.parameters())
    how = ["random weights"] if config.reinit_weights else []
    how += ["products in float8"] if config.fp8 else []
    if config.qat is not None:
        how.append(f"rounded to {config.qat.weight_dtype} from step {(config.qat.fake_quant_after_n_steps or 0) + 1}")
    held_out = "none held out" if eval_data is None else f"{len(eval_data):,} held out"
    lines = (
        f"Method: {method_of(config)}{processes}",
        ", ".join([f"Model: {config.model_name}, {trained:,} of {total:,} parameters trained, {bits or dtype}", *how]),
        f"Data: {train}, {held_out}",
        f"Steps: {steps:,} ({length}{resumed}); output in {config.output_dir}",
        *([f"Adapter: {_adapter(model)}"] if isinstance(model, PeftModel) else ()),
    )
    return "\n".join(lines) + _whitening(config)


def _whitening(config: RunConfig) -> str:
    """The line about rounding errors in whitening; empty if they are negligible."""
    ebft = config.ebft
    if not (config.method.compares_features(config) and ebft.use_whitening and ebft.whitening_space == "feature"):
        return ""
    dtype = weights_dtype(config)
    if dtype == torch.float32 and config.method.rows == "tokens":  # strided mode embeds in mixed precision
        dtype = torch.bfloat16 if use_bf16(config, this_machine()) else torch.float16 if config.fp16 else dtype
    if torch.finfo(dtype).bits > 16:
        return ""
    return (
        f"\nWhitening: features are computed in {str(dtype).removeprefix('torch.')}, so differences between samples "
        f"below {whitening_tolerance(dtype):.2g} of their size are rounding errors and dropped (docs/paper.md). "
        "Advantages of groups of similar samples differ from their values in float32. ebft.whitening_space: sample "
        "avoids this."
    )


def _adapter(model: PeftModel) -> str:
    """What the adapter changes, by the last parts of names with their numbers, and which experts it does not."""
    last_two = lambda name: ".".join(name.split(".")[-2:])
    counted = lambda names: ", ".join(f"{name} ({count})" for name, count in sorted(Counter(names).items())) or "none"
    modules, parameters = model.targeted_module_names, list(model.targeted_parameter_names)
    adapted = [*(name.rpartition(".")[2] for name in modules), *map(last_two, parameters)]
    kind = model.peft_config["default"].peft_type.value.replace("LORA", "LoRA")
    size = f"{len(modules)} modules" + (f" and {len(parameters)} parameters" if parameters else "")
    whole = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and any(own.requires_grad for own in module.parameters())
    ]
    experts = {name.replace(".base_layer", "").removeprefix("base_model.model.") for name in fused_experts(model)}
    frozen = sorted({last_two(name) for name in experts.difference(parameters)})
    parts = [f"{kind} on {size}: {counted(adapted)}"]
    parts += [f"trained fully: {counted(whole)}"] if whole else []
    parts += [f"fused experts not adapted: {', '.join(frozen)} (lora_target_parameters)"] if frozen else []
    return "; ".join(parts)


def completed_run(config: RunConfig, found: checkpoints.Found, rows: int) -> Path | None:
    """The folder with the weights of the complete run: at or past its last step or its budget. None if there is none.

    It is a checkpoint or, for a run whose last checkpoint was not kept, the output folder. Raises ConfigError if
    output_dir has the results of later steps, which its model would replace.
    """
    newest = found.newest
    if newest is None or _end_of(config, newest, rows) is None:
        return None
    output_dir, step = Path(config.output_dir), checkpoints.step_of(newest)
    last = checkpoints.newest_checkpoint(output_dir)
    later = max(final_step(output_dir) or 0, 0 if last is None else checkpoints.step_of(last))
    if config.resume_from_checkpoint is not None and later > step:
        raise ConfigError(
            f"resume_from_checkpoint: {newest} is past the end of this run, and output_dir: {output_dir} has results "
            f"up to step {later}, which are kept. Set another output_dir, or increase max_steps, num_epochs or budget."
        )
    return newest


def _end_of(config: RunConfig, folder: Path, rows: int) -> str | None:
    """The keys that determine the end of a run that the weights in `folder` have reached; None if they have not."""
    limit = limit_reached(config.budget, spent_at(folder))
    if limit is not None:
        return f"budget.{limit}"
    is_last = checkpoints.step_of(folder) >= planned_steps(config, this_machine(), rows)
    return stopped_early(config, folder) or ("max_steps or num_epochs" if is_last else None)


def restore(config: RunConfig, trainer: OverTrainer, folder: Path, files: RunFiles | None, rows: int) -> None:
    """Restore model and state of a completed run over `rows` rows from its folder, and warn that nothing is trained."""
    step = checkpoints.step_of(folder)
    warn(
        f"Training is already complete: {folder} is at step {step}, at or past the end of this run. Increase "
        f"{_end_of(config, folder, rows)} to continue training."
    )
    output_dir = Path(config.output_dir)
    # The state of the final model has the evaluation at the last step, before which checkpoints are saved.
    of_run = output_dir.resolve() in (folder.resolve(), folder.resolve().parent)
    is_saved = of_run and final_step(output_dir) == step
    state = (output_dir if is_saved else folder) / STATE
    trainer.state = TrainerState.load_from_json(str(state))
    if folder != output_dir:  # which has the best weights
        trainer.find_best_checkpoint(state, folder.parent)
    load_weights(trainer, str(folder))
    trainer.finish_evaluation(str(folder))
    best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    if best is not None and folder != output_dir:
        load_weights(trainer, best)
    if files is not None:
        files.restore(trainer.state)
