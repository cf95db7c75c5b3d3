"""What is used of libraries without being part of their public interface, and is looked for in the libraries."""
# A private name that is not listed fails too: everything that touches one is in these files.

import ast
import functools
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import transformers
import trl
from peft.tuners import tuners_utils
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.bloom import modeling_bloom
from transformers.models.codegen import modeling_codegen
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gptj import modeling_gptj
from trl.generation.vllm_generation import VLLMGeneration

from ebft.distillation import SDFTTrainer
from ebft.preferences.experimental import CPOTrainer, ORPOTrainer, PreparedBatches
from ebft.preferences.trainers import DPOTrainer, HasReference, KeepsMetrics, KTOTrainer
from ebft.reward_models import ProcessRewardTrainer, RewardModelTrainer
from ebft.sft.trainer import SFTTrainer
from ebft.strided import StridedEBFTTrainer
from ebft.structured import AsyncEBFTTrainer, EBFTTrainer, RolloutGRPOTrainer
from ebft.structured.trl import OverTRL
from ebft.trainer import KeepsLogs, MeansOverRows, OverTrainer

ROOT = Path(__file__).parents[1] / "src" / "ebft"
OF_PREFERENCES = (DPOTrainer, KTOTrainer, ORPOTrainer, CPOTrainer)
TRAINERS = (SFTTrainer, RewardModelTrainer, ProcessRewardTrainer, StridedEBFTTrainer, RolloutGRPOTrainer, EBFTTrainer,
            AsyncEBFTTrainer, SDFTTrainer, *OF_PREFERENCES)  # fmt: skip
# Private names of the libraries' trainers that several of our classes read, set, call or override, and their meaning.
SHARED = {
    "_get_num_items_in_batch": "(batches, device) -> what the loss is normalised by",
    "_get_train_sampler": "(dataset) -> the order of the rows of an epoch",
    "_logs": 'what the table of completions shows: {"advantages": a deque with one number per completion}',
    "_metrics": "{mode: {name: [values]}}, whose means are logged",
    "_prepare_dataset": "(dataset, tokenizer, arguments, name) -> rows of token ids",
    "_prepare_inputs": "the inputs of a micro-batch; shuffles the rows of a generation batch in training",
    "_step": "micro-batches trained on",
    "_total_train_tokens": "the tokens of all batches of training, which are logged",
}


def shared(*names: str) -> dict[str, str]:
    return {name: SHARED[name] for name in names}


# Those of each of our classes: its own with their meaning, and those of SHARED.
OF_TRAINERS: dict[type, dict[str, str]] = {
    OverTrainer: {
        **shared("_get_train_sampler"),
        "_determine_best_metric": "(metrics, trial) updates best_metric and best_global_step of the state",
        "_evaluate": "(trial, ignored keys) evaluates within training -> metrics",
        "_finalize_training": "(...) logs the summary, loads the best model, deletes checkpoints (save_total_limit: 1)",
        "_get_grad_norm": "(model, grad_norm) -> the gradient norm of a step, before clipping",
        "_get_output_dir": "(trial) -> the folder that checkpoint-<step> is created in",
        "_globalstep_last_logged": "the step of the last log",
        "_init_training_state": "(...) sets the trainer state, from a checkpoint if there is one",
        "_load_best_model": "() when training ends, with load_best_model_at_end",
        "_load_from_checkpoint": "(folder, model) loads weights; of adapters in subfolders, these alone",
        "_load_optimizer_and_scheduler": "(checkpoint) when training resumes",
        "_load_rng_state": "(checkpoint) before the first step that is trained after resuming",
        "_maybe_log_save_evaluate": "(...) logs, evaluates and saves after a step and after an epoch",
        "_finish_current_push": "waits for the upload of a checkpoint, at the end of training",
        "_push_from_checkpoint": "(folder) uploads it",
        "_issue_warnings_after_load": "(load_result) logs missing and unexpected weights of a checkpoint",
        "_run_epoch": "(*, epoch, train_dataloader, ...) trains one epoch",
        "_save": "(folder, state_dict=) writes model, tokenizer and arguments; with no weights, all but these",
        "_save_checkpoint": "(model, trial) writes checkpoint-<step>",
        "_save_optimizer_and_scheduler": "(folder) on every process, unless only the model is saved",
        "_save_rng_state": "(folder) on every process, unless only the model is saved",
        "_total_loss_scalar": "the sum of losses that were logged since the run was started or resumed",
        "_tr_loss": "the sum of losses since the last log",
    },
    KeepsLogs: shared("_metrics", "_total_train_tokens"),  # those that the trainer has
    SFTTrainer: shared("_prepare_inputs"),
    **dict.fromkeys((MeansOverRows, KeepsMetrics), shared("_get_num_items_in_batch")),
    HasReference: {
        "_precompute_ref_logps": "(dataset, name, batch size) -> rows with log-probabilities of the reference model",
    },
    DPOTrainer: shared("_prepare_dataset"),
    KTOTrainer: shared("_get_train_sampler", "_prepare_dataset"),
    PreparedBatches: {
        "_stored_metrics": "{mode: {name: [values]}}, whose means are logged, of the trainers of trl.experimental",
    },
    StridedEBFTTrainer: shared("_get_num_items_in_batch", "_prepare_inputs"),
    EBFTTrainer: shared("_get_num_items_in_batch"),
    OverTRL: {
        "_buffered_inputs": "the micro-batches of a generation batch; None before the first",
        "_calculate_rewards": "(rows, ...) -> rewards (completions, functions)",
        "_compute_loss": "(model, inputs) -> the policy's loss",
        "_entropy_bonus_enabled": "whether the loss has an entropy term",
        "_generate": "(prompts) -> token ids second, mask of sampled ones third, completions, log-probabilities",
        "_generate_and_score_completions": "(rows) -> the inputs of the loss; gives rollout_func the prompts alone",
        "_generate_single_turn": "(token ids of prompts, ...) -> (token ids, log-probabilities or None) of completions",
        "_get_eval_sampler": "(dataset) -> the order of the rows of an evaluation, each repeated for its completions",
        "_get_per_token_logps_and_entropies": "(model, ids, mask, length, ...) -> what the loss needs",
        "_last_loaded_step": "the step whose weights the sampler has; -1 for none",
        "_pending_metrics": "what reward functions logged: {name: values}",
        "_tokenizer": "the tokenizer inside processing_class",
        **shared("_get_num_items_in_batch", "_get_train_sampler", "_logs", "_metrics", "_prepare_inputs", "_step"),
    },
    RewardModelTrainer: shared("_metrics"),
    SDFTTrainer: {
        "_forward_logits": "(model, ...) -> the logits of student or teacher in the loss, over the temperature",
        "_generate": "(token ids of prompts) -> (those, token ids of completions)",
        "_prepare_training_batch": "(rows) -> the inputs of the loss, sampled, with the lengths of completions",
        "_setup_teacher_model": "sets teacher_model, the model itself with an adapter, which is disabled for it",
        "_tokenize_prompts": "(prompts of the student, or of the teacher) -> token ids",
        **shared("_get_train_sampler", "_metrics"),
    },
}
SEAM = ROOT / "transformers_internals.py"
# Names of TRL's modules that are not in its documented interface.
OF_TRL = {
    "trl.experimental": ("cpo", "orpo", "sdft"),
    "trl.experimental.sdft.sdft_trainer": ("DemonstrationTeacherContextBuilder",),
    "trl.models": ("get_act_offloading_ctx_manager", "unwrap_model_for_generation"),
    "trl.trainer": ("grpo_trainer",),
    "trl.trainer.grpo_trainer": ("create_model_from_path",),  # of the reference model, for beta
    "trl.trainer.kto_trainer": ("DataCollatorForUnpairedPreference",),
    "trl.trainer.utils": ("FusedCausalLMOutput", "RepeatSampler", "pad"),
}
OTHERS = [  # (owner, private name, meaning), used in transformers_internals.py
    (VLLMGeneration, "_iter_named_params", "() -> names and weights that are sent to vLLM"),
    (transformers.PreTrainedModel, "_is_stateful", "whether layers keep a running state"),
    (transformers.PreTrainedModel, "_supports_attention_backend", "whether attention functions are looked up"),
    (revert_weight_conversion, "_weight_conversions", "the conversions that saving reverts"),
    (transformers.PretrainedConfig, "_attn_implementation", "the name that attention functions are looked up by"),
    (modeling_bloom.BloomAttention, "_reshape", "(fused projection) splits it into heads"),
    (modeling_falcon.FalconAttention, "_split_heads", "(fused projection) splits it into heads"),
    (modeling_gptj.GPTJAttention, "(_attn|attention_interface)", "(query, key, value, mask) attends"),
    (modeling_codegen.CodeGenAttention, "(_attn|attention_interface)", "(query, key, value, mask) attends"),
    (modeling_gpt_neo.GPTNeoSelfAttention, "_attn", "(query, key, value, mask) attends"),
    (transformers.Trainer, "_load_from_checkpoint", "(folder) loads its weights"),
    (tuners_utils.BaseTunerLayer, "_disable_adapters", "whether a layer leaves its adapter out"),
    (transformers.TrainingArguments, "_n_gpu", "GPUs of one process; 1 keeps DataParallel away"),
]
IMPORT = re.compile(r"^\s*from ((?:transformers|trl)\.[\w.]+) import (\([^)]*\)|[^\n]+)", re.MULTILINE)


@functools.cache
def private_names(owner: type) -> set[str]:
    """Private names that the source of a class uses on `self` or `super()`, or defines."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner)))):
        if isinstance(node, ast.Attribute):
            value = node.value
            is_self = isinstance(value, ast.Name) and value.id == "self"
            is_super = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "super"
            found |= {node.attr} if is_self or is_super else set()
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def library_names(owner: type) -> set[str]:
    """The private names of the classes of libraries that a class derives from."""
    bases = [base for base in owner.__mro__ if base.__module__.partition(".")[0] in ("transformers", "trl")]
    return set().union(*map(private_names, bases))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_private_names_of_trainers_are_those_that_are_listed(trainer):
    there = library_names(trainer)
    for owner in ours(trainer):
        listed = OF_TRAINERS.get(owner, {})
        gone = {name: meaning for name, meaning in listed.items() if name not in there and owner is not KeepsLogs}
        assert not gone, f"{owner.__name__} relies on what trl {trl.__version__} does not have: {gone}"
        used = private_names(owner) & there
        assert used == listed.keys() & there, f"{owner.__name__}: used or listed alone: {used ^ listed.keys()}"


def ours(trainer: type) -> list[type]:
    """The classes of this package that a trainer consists of."""
    return [owner for owner in trainer.__mro__ if owner.__module__.partition(".")[0] == "ebft"]


def imported(path: Path) -> dict[str, set[str]]:
    """What a file imports from modules within transformers and TRL, by module."""
    found: dict[str, set[str]] = {}
    for module, names in IMPORT.findall(path.read_text(encoding="utf-8")):
        wanted = {name.strip() for name in names.partition("#")[0].strip("() \n").split(",") if name.strip()}
        found.setdefault(module, set()).update(wanted)
    return found


@pytest.mark.parametrize(("module", "names"), [*OF_TRL.items(), *imported(SEAM).items()])
def test_undocumented_names_of_modules_are_there(module, names):
    found = importlib.import_module(module)
    gone = [name for name in names if not hasattr(found, name)]
    assert not gone, f"{module} of transformers {transformers.__version__}, trl {trl.__version__} has no {gone}"


@pytest.mark.parametrize(("owner", "name", "meaning"), OTHERS, ids=lambda value: getattr(value, "__name__", None))
def test_private_names_used_elsewhere_are_there(owner, name, meaning):
    assert re.search(rf"\b{name}\b", inspect.getsource(owner)), f"{owner.__name__} has no {name}: {meaning}"


def test_undocumented_names_are_imported_in_one_file_alone():
    documented = {"transformers.integrations"}
    for path in ROOT.rglob("*.py"):
        for module, wanted in imported(path).items():
            if path == SEAM or module in documented:
                continue
            unlisted = wanted - set(OF_TRL.get(module, ()))
            assert not unlisted, f"{path}: import {sorted(unlisted)} of {module} in transformers_internals.py"


def test_what_is_private_in_other_objects_is_touched_in_one_file_alone():
    # Of torch's own private names two are used, `Module._modules` and `Tensor._version`, `_replace` of named tuples is
    # public, and operators have names of
    # their own. `os._exit`, `sys._current_frames`, `torch.cuda.memory._record_memory_history` and `_dump_snapshot` are
    # documented.
    others = r"self\b|cls\b|mkldnn\b|aten\b|os\._exit\b|sys\._current_frames\b|memory\."
    private = re.compile(rf"\b(?!{others})[a-z]\w*\._(?!modules\b|version\b|replace\b)[a-z]\w*")
    for path in ROOT.rglob("*.py"):
        if path not in (SEAM, ROOT / "tools/doctor/fake.py"):  # a device of PyTorch
            found = [line for line in path.read_text(encoding="utf-8").splitlines() if private.search(line)]
            assert not found, f"{path}: {found}"
