"""EBFTTrainer against the naive oracle, loss and gradients, and what its options change."""

import copy

import pytest
import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ebft import AsyncEBFTConfig, EBFTConfig, EBFTTrainer
from ebft.errors import ModelError, NonFiniteLossError
from ebft.structured import RolloutGRPOConfig, RolloutGRPOTrainer
from ebft.structured.rollouts.sampling import Completion
from tests.strided.families import tiny_model
from tests.structured import oracle
from tests.structured.conftest import chat_model, lora

USER = lambda text: {"role": "user", "content": text}
ASSISTANT = lambda text: {"role": "assistant", "content": text}


def rows(multi_turn=True):
    """Prompts and references of unequal lengths; some conversations go on for one or two turns."""
    later = [[], [USER("more"), ASSISTANT("some more")], [USER("a"), ASSISTANT("b"), USER("c"), ASSISTANT("dd")]]
    return Dataset.from_list(
        [
            {
                "prompt": [USER("say " + "word " * (i % 4) + str(i))],
                "ground_truth": "it is " + "so " * (1 + i % 3) + str(i),
                **({"remaining_turns": later[i % 3]} if multi_turn else {}),
            }
            for i in range(12)
        ]
    )


def arguments(folder, config_class=EBFTConfig, **changes):
    settings = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "max_completion_length": 12,
        "temperature": 0.7,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "loss_type": "grpo",
    }
    return config_class(output_dir=str(folder), **{**settings, **changes})


def make(policy, tokenizer, folder, dataset=None, **changes):
    dataset = rows() if dataset is None else dataset
    return EBFTTrainer(policy, arguments(folder, **changes), train_dataset=dataset, processing_class=tokenizer)


def one_step(trainer):
    """Loss and gradients of one optimizer step's micro-batches, and the rollouts and rows they were made of."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    batch = next(iter(trainer.get_train_dataloader()))
    trainer._prepare_inputs(batch)
    loss = sum(trainer.compute_loss(trainer.model, inputs) for inputs in trainer._buffered_inputs)
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, trainer._rollouts, batch


def oracle_loss(policy, base, tokenizer, rollouts, batch, args):
    """The same loss, sequence by sequence."""
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    n, rl, nll, counted = args.num_generations, [], [], 0
    for start in range(0, len(rollouts), n):
        group, row = rollouts[start : start + n], batch[start]
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        reference, labelled = [], []
        for message in [ASSISTANT(row["ground_truth"]), *row["remaining_turns"]]:
            text = message["content"]
            if message["role"] == "user":
                text = f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            else:
                text += "<|im_end|>"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            reference += ids
            labelled += [message["role"] == "assistant"] * len(ids)
        phi = []
        for rollout in group:
            assert rollout.prompt_ids == prompt
            ids = rollout.ids[:-1] if rollout.ids[-1] in ends else rollout.ids
            phi.append(oracle.embedding(base, prompt, ids, args.feature_layers, args.embed_method))
        target = oracle.embedding(base, prompt, reference[:-1], args.feature_layers, args.embed_method)
        whitening = args.whitening_space if args.use_whitening else None
        weights = {"alignment_coef": args.alignment_coef, "diversity_coef": args.diversity_coef}
        rewards = oracle.group_rewards(torch.stack(phi), target, whitening=whitening, **weights)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for rollout, advantage in zip(group, advantages):
            logps = oracle.token_logps(policy, prompt, rollout.ids, args.temperature)
            sampled = torch.tensor(rollout.generated, dtype=torch.bool)
            rl.append(-(advantage * torch.exp(logps - logps.detach()))[sampled].mean())
        logps = oracle.token_logps(policy, prompt, reference, 1.0)
        nll.append(-logps[torch.tensor(labelled)].sum())
        counted += sum(labelled)
    return torch.stack(rl).mean() + args.ce_coef * torch.stack(nll).sum() / counted


@pytest.mark.parametrize(
    "changes",
    [
        {"ce_coef": 0.3, "use_whitening": True},
        {"embed_method": "completion_mean", "diversity_coef": 0.5},
        {"ce_coef": 0.1, "embed_method": "concat", "gradient_checkpointing": True},
        {"steps_per_generation": 6, "gradient_accumulation_steps": 6, "per_device_train_batch_size": 2, "ce_coef": 0.2},
    ],
)
def test_loss_and_gradients_are_those_of_single_sequences(chat_tokenizer, tmp_path, changes):
    policy = lora(chat_model(chat_tokenizer))
    trainer = make(policy, chat_tokenizer, tmp_path, **changes)
    loss, gradients, rollouts, batch = one_step(trainer)
    assert len({len(rollout.replies) for rollout in rollouts}) > 1  # conversations of several lengths
    twin, base = lora(chat_model(chat_tokenizer)), chat_model(chat_tokenizer)
    wanted = oracle_loss(twin.eval(), base, chat_tokenizer, rollouts, batch, trainer.args)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), abs=1e-4)
    compared = 0
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            assert F.cosine_similarity(parameter.grad.flatten(), gradients[name].flatten(), dim=0) > 0.9999
            assert (parameter.grad - gradients[name]).abs().max() < 1e-3 * parameter.grad.abs().max()
            compared += 1
    assert compared == len(gradients) > 20


def test_rollouts_reward_and_cross_entropy_share_one_rendering(chat_tokenizer, tmp_path, monkeypatch):
    trainer = make(lora(chat_model(chat_tokenizer)), chat_tokenizer, tmp_path, ce_coef=0.3)
    rendered = []
    conversation_of = type(trainer.renderer)._conversation
    monkeypatch.setattr(
        type(trainer.renderer), "_conversation", lambda *given: rendered.append(given[1:]) or conversation_of(*given)
    )
    *_, batch = one_step(trainer)
    assert len(rendered) == len(batch) // trainer.args.num_generations > 1


# One of each kind: soft-capping, logit scaling, learned positions, sinks, experts, latent attention, running states.
SCORED = ["gemma2", "cohere2", "granite", "opt", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "lfm2"]


@pytest.mark.parametrize("family", SCORED)
def test_every_family_scores_what_it_samples(chat_tokenizer, tmp_path, family):
    def tiny():
        known = {"vocab_size": len(chat_tokenizer), "eos_token_id": 1, "bos_token_id": None}
        sizes = {"n_positions": 256} if family == "gpt2" else {}
        model = tiny_model(family, max_position_embeddings=256, **known, **sizes)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(0.6)
        return model.eval()

    # The load-balancing loss of experts, which TRL adds, is no part of the oracle.
    experts = {"router_aux_loss_coef": 0.0} if hasattr(tiny().config, "output_router_logits") else {}
    trainer = make(tiny(), chat_tokenizer, tmp_path, ce_coef=0.3, **experts)
    loss, _, rollouts, batch = one_step(trainer)
    wanted = oracle_loss(tiny(), tiny(), chat_tokenizer, rollouts, batch, trainer.args)
    assert loss == pytest.approx(wanted.item(), abs=1e-4)


def test_learned_positions_do_not_count_padding(chat_tokenizer, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt2():
        torch.manual_seed(0)
        sizes = {"n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 256, "initializer_range": 0.2}
        ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(chat_tokenizer), **sizes, **ids)).eval()
        return lora(model, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)

    trainer = make(gpt2(), chat_tokenizer, tmp_path, ce_coef=0.3)
    loss, gradients, rollouts, batch = one_step(trainer)
    twin = gpt2()
    base = copy.deepcopy(twin).unload()
    wanted = oracle_loss(twin.eval(), base, chat_tokenizer, rollouts, batch, trainer.args)
    assert loss == pytest.approx(wanted.item(), abs=1e-4)


def test_completions_keep_to_their_own_limits(chat_tokenizer, tmp_path):
    policy = chat_model(chat_tokenizer)
    dataset = rows(multi_turn=False)
    lengths = {}
    for adaptive, floor in ((True, 1), (True, 20), (False, 1)):
        options = {"adaptive_max_tokens": adaptive, "gt_length_floor": floor, "max_completion_length": 25}
        trainer = make(policy, chat_tokenizer, tmp_path, dataset, **options)
        _, _, rollouts, batch = one_step(trainer)
        for rollout, row in zip(rollouts, batch):
            limit = max(floor, -(-3 * len(row["ground_truth"]) // 2)) if adaptive else 25  # one token per byte here
            assert len(rollout.ids) <= min(25, limit)
            lengths.setdefault((adaptive, floor), []).append(len(rollout.ids) / min(25, limit))
    assert all(max(found) == 1.0 for found in lengths.values())  # and the limits are what ended some


def test_references_do_not_limit_the_completions_of_grpo(chat_tokenizer, tmp_path):
    args = arguments(tmp_path, RolloutGRPOConfig, max_completion_length=25)
    spaces = lambda completions, **_: [float(completion.count(" ")) for completion in completions]
    dataset = Dataset.from_list([{"prompt": f"say {number}", "ground_truth": "a"} for number in range(6)])
    trainer = RolloutGRPOTrainer(
        chat_model(chat_tokenizer), spaces, args, train_dataset=dataset, processing_class=chat_tokenizer
    )
    _, _, rollouts, _ = one_step(trainer)
    assert max(len(rollout.ids) for rollout in rollouts) == 25


def test_a_run_evaluates_in_one_space_and_learns(chat_tokenizer, tmp_path):
    policy = lora(chat_model(chat_tokenizer))
    trainer = EBFTTrainer(
        policy,
        arguments(tmp_path, eval_strategy="steps", eval_steps=2, use_whitening=True, per_device_eval_batch_size=4),
        train_dataset=rows(),
        eval_dataset=rows().select(range(3)),
        processing_class=chat_tokenizer,
    )
    trainer.train()
    training, evaluation = trainer.state.log_history[0], trainer.state.log_history[2]
    assert training["ebft/alignment"] - training["ebft/diversity"] == pytest.approx(training["reward"], abs=1e-4)
    assert training["rollouts/wait_s"] > 0 and "rollouts/staleness" not in training
    names = ("alignment", "diversity", "cfm_loss", "cfm_loss_plugin", "cfm_loss_whitened", "ce_loss", "perplexity")
    assert all(f"eval_{name}" in evaluation for name in names)
    assert not any("eval_ebft/" in name for name in evaluation)
    assert evaluation["eval_cfm_loss"] < evaluation["eval_cfm_loss_plugin"]
    with torch.no_grad():
        nll, tokens = 0.0, 0
        for row in trainer.eval_dataset.select(range(1)):
            prompt = chat_tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
            ids = chat_tokenizer(row["ground_truth"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
            nll -= oracle.token_logps(policy, prompt["input_ids"], ids, 1.0).sum().item()
            tokens += len(ids)
    only = trainer.evaluate(trainer.eval_dataset.select(range(1)))
    assert only["eval_ce_loss"] == pytest.approx(nll / tokens, abs=1e-4)


def test_thinking_can_be_left_out_of_the_cross_entropy(chat_tokenizer, tmp_path):
    dataset = Dataset.from_list([{"prompt": [USER("q")], "ground_truth": "<think>so</think>\nyes"}] * 4)
    counts = {}
    for masked in (False, True):
        trainer = make(
            chat_model(chat_tokenizer), chat_tokenizer, tmp_path, dataset, ce_coef=1.0, mask_thinking_ce=masked
        )
        trainer.model.train()
        references = trainer._references([dataset[0]] * 4)
        counts[masked] = references["reference_mask"].sum().item()
        assert references["reference_mask"].any(-1).tolist() == [True, False, False, False]
    assert counts[False] - counts[True] == len("<think>so</think>\n") and counts[True] == len("yes") + 1


def test_groups_without_a_signal_are_skipped(chat_tokenizer, tmp_path):
    def run(skip):
        policy = lora(chat_model(chat_tokenizer))
        before = copy.deepcopy(policy.state_dict())
        args = arguments(tmp_path, RolloutGRPOConfig, skip_zero_advantage_batches=skip, weight_decay=0.0)
        trainer = RolloutGRPOTrainer(
            policy,
            [lambda completions, **_: [1.0] * len(completions)],
            args,
            train_dataset=rows(),
            processing_class=chat_tokenizer,
        )
        trainer.train()
        assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
        return trainer.state.log_history[0]

    assert run(skip=True)["skipped_zero_adv_batches"] == 1.0
    assert "skipped_zero_adv_batches" not in run(skip=False)


def test_cross_entropy_is_a_signal_of_its_own(chat_tokenizer, tmp_path):
    policy = lora(chat_model(chat_tokenizer))
    before = copy.deepcopy(policy.state_dict())
    make(policy, chat_tokenizer, tmp_path, alignment_coef=0.0, diversity_coef=0.0, ce_coef=1.0).train()
    assert any(not torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_other_rewards_see_the_conversation(chat_tokenizer, tmp_path):
    seen = []

    def polite(completions, prompts, ground_truth, topic, **columns):
        seen.extend(zip(prompts, completions, topic))
        return [float(i % 2) for i in range(len(completions))]

    dataset = rows().add_column("topic", [f"t{i}" for i in range(12)])
    trainer = EBFTTrainer(
        lora(chat_model(chat_tokenizer)),
        arguments(tmp_path, max_steps=1, reward_weights=[1.0, 0.25]),
        reward_funcs=polite,
        train_dataset=dataset,
        processing_class=chat_tokenizer,
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["reward"] == pytest.approx(logs["rewards/feature_matching/mean"] + 0.25 * 0.5, abs=1e-4)
    by_topic = {topic: (prompt, completion) for prompt, completion, topic in seen}
    for topic, (prompt, completion) in by_topic.items():
        turns = (0, 1, 2)[int(topic[1:]) % 3]
        assert [message["role"] for message in completion] == ["assistant", *["user", "assistant"] * turns]
        assert prompt[0]["content"].endswith(topic[1:])


def test_dropout_is_off_unless_asked_for(chat_tokenizer, tmp_path):
    with pytest.warns(UserWarning, match="lora_dropout: 0.1 is not applied"):
        make(lora(chat_model(chat_tokenizer), lora_dropout=0.1), chat_tokenizer, tmp_path)


def test_a_gguf_file_is_the_name_of_model_and_tokenizer(tiny_gguf, tmp_path):
    dataset = Dataset.from_list([{"prompt": f"say {i}", "ground_truth": "so " * (1 + i)} for i in range(4)])
    args = arguments(tmp_path, num_generations=2, per_device_train_batch_size=2, max_steps=1)
    trainer = EBFTTrainer(str(tiny_gguf), args, train_dataset=dataset)
    trainer.train()
    trainer.save_model()
    assert trainer.processing_class.eos_token == "<|end|>"
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again.lm_head.weight, trainer.model.lm_head.weight)


def test_a_reward_that_is_not_finite_stops_the_run(chat_tokenizer, tmp_path):
    policy = chat_model(chat_tokenizer)
    trainer = make(policy, chat_tokenizer, tmp_path)
    with torch.no_grad():
        next(trainer.feature_reward.network.causal_lm.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteLossError):
        trainer.train()


def test_the_async_class_prefetches():
    args = AsyncEBFTConfig(output_dir="x", num_generations=4, per_device_train_batch_size=4)
    assert args.async_prefetch and args.uses_server and args.vllm_mode == "server"


def test_the_templates_end_of_turn_ends_a_completion(chat_tokenizer, tmp_path):
    end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")

    class Ended(EBFTTrainer):
        def _backend(self):
            return self

        def generate(self, prompts, max_tokens):
            return [Completion([50 + i % 40, 60, end], None) for i in range(len(prompts))]

    args = arguments(tmp_path, max_steps=1, mask_truncated_completions=True)
    trainer = Ended(
        lora(chat_model(chat_tokenizer)),
        args,
        train_dataset=rows(multi_turn=False),
        processing_class=chat_tokenizer,
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["completions/clipped_ratio"] == 0 and logs["grad_norm"] > 0


def test_held_out_means_do_not_depend_on_the_batch_size(chat_tokenizer, tmp_path):
    from tests.structured.short_run import Trainer  # samples by prompt alone

    dataset, found = rows(multi_turn=False), {}
    for size in (4, 8, 12, 20):
        args = arguments(tmp_path, per_device_eval_batch_size=size)
        trainer = Trainer(chat_model(chat_tokenizer), args, train_dataset=dataset, processing_class=chat_tokenizer)
        found[size] = trainer.evaluate(dataset.select(range(5)))
    for size in (8, 12, 20):
        for name in ("eval_alignment", "eval_cfm_loss", "eval_ce_loss", "eval_diversity"):
            assert found[size][name] == pytest.approx(found[4][name], abs=1e-4), (size, name)


def test_the_cross_entropy_is_a_mean_over_its_own_step(chat_tokenizer, tmp_path):
    """Two optimizer steps on one generation batch, references of very different lengths, no update in between."""
    dataset = Dataset.from_list([{"prompt": f"q{i}", "ground_truth": "ab" * (1 if i % 2 else 20)} for i in range(8)])
    options = {"alignment_coef": 0.0, "diversity_coef": 0.0, "ce_coef": 1.0, "learning_rate": 0.0, "max_steps": 2}
    options["skip_zero_advantage_batches"] = False
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    policy = chat_model(chat_tokenizer)
    trainer = make(policy, chat_tokenizer, tmp_path, dataset, **options, **sizes)
    steps = []
    compute = trainer._compute_loss

    def noted(model, inputs):
        steps.append((inputs["prompt_ids"], inputs["prompt_mask"], inputs["reference_ids"], inputs["reference_mask"]))
        return compute(model, inputs)

    trainer._compute_loss = noted
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step, loss in enumerate(losses):
        nll, count = 0.0, 0
        for prompts, masks, references, counted in steps[2 * step : 2 * step + 2]:
            for prompt, mask, reference, counts in zip(prompts, masks, references, counted):
                ids = reference[: int(counts.sum())].tolist()
                if ids:
                    nll -= oracle.token_logps(policy, prompt[mask.bool()].tolist(), ids, 1.0).sum().item()
                    count += len(ids)
        assert loss == pytest.approx(nll / count, abs=1e-3)
    assert abs(losses[0] - losses[1]) > 1e-3


def test_a_reference_model_with_learned_positions_agrees_with_itself(chat_tokenizer, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(chat_tokenizer), **sizes, **ids)).save_pretrained(tmp_path / "gpt2")
    policy = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    trainer = make(policy, chat_tokenizer, tmp_path, beta=0.1, learning_rate=0.0, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    policy.resize_token_embeddings(len(chat_tokenizer) + 8)
    with pytest.raises(ModelError, match="its saved base model, but the base model has 260 token embeddings"):
        make(policy, chat_tokenizer, tmp_path, beta=0.1)


def test_a_loss_or_reward_that_is_not_finite_says_so(chat_tokenizer, tmp_path):
    trainer = make(chat_model(chat_tokenizer), chat_tokenizer, tmp_path)
    trainer._compute_loss = lambda model, inputs: torch.full((), torch.nan, requires_grad=True)
    with pytest.raises(NonFiniteLossError, match="The loss is nan at step 0, in a batch of prompts that start with"):
        trainer.train()
    infinite = lambda completions, **_: [float("inf")] * len(completions)
    trainer = EBFTTrainer(
        chat_model(chat_tokenizer),
        arguments(tmp_path),
        reward_funcs=infinite,
        train_dataset=rows(),
        processing_class=chat_tokenizer,
    )
    with pytest.raises(NonFiniteLossError, match="is infinite"):
        trainer.train()


def test_resuming_goes_on_with_the_generations_that_were_due(chat_tokenizer, tmp_path):
    def run(steps, **changes):
        seen = []
        sizes = {"gradient_accumulation_steps": 3, "steps_per_generation": 6, "per_device_train_batch_size": 2}
        args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=3, **sizes)
        trainer = EBFTTrainer(
            lora(chat_model(chat_tokenizer)), args, train_dataset=rows(), processing_class=chat_tokenizer
        )
        scored = trainer._generate_and_score_completions
        note = lambda batch: (trainer.state.global_step, sorted({row["ground_truth"] for row in batch}))
        trainer._generate_and_score_completions = lambda batch: seen.append(note(batch)) or scored(batch)
        trainer.train(**changes)
        return seen

    whole = run(6)
    resumed = run(6, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [step for step, _ in whole] == [0, 2, 4]
    assert resumed[0] == (3, whole[1][1]) and resumed[1:] == whole[2:]


def test_a_long_ground_truth_that_no_reward_compares_with(chat_tokenizer, tmp_path):
    long = [{"prompt": f"say {number}", "ground_truth": "a " * 2000} for number in range(6)]
    trainer = RolloutGRPOTrainer(
        chat_model(chat_tokenizer),
        lambda completions, ground_truth, **_: [float(len(truth)) for truth in ground_truth],
        arguments(tmp_path, RolloutGRPOConfig, max_steps=1),
        train_dataset=Dataset.from_list(long),
        processing_class=chat_tokenizer,
    )
    trainer.train()
    assert trainer.state.global_step == 1


def test_several_eval_datasets_are_told_apart(chat_tokenizer, tmp_path):
    trainer = make(lora(chat_model(chat_tokenizer)), chat_tokenizer, tmp_path, per_device_eval_batch_size=4)
    trainer.evaluate({"a": rows().select(range(2)), "b": rows().select(range(2, 5))})
    logged = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    assert {"eval_a_cfm_loss", "eval_b_cfm_loss", "eval_a_ce_loss"} <= set(logged)
    assert "eval_cfm_loss" not in logged and logged["eval_a_ce_loss"] != logged["eval_b_ce_loss"]


def test_evaluating_does_not_change_training(chat_tokenizer, tmp_path):
    def losses(**changes):
        torch.manual_seed(0)
        trainer = EBFTTrainer(
            lora(chat_model(chat_tokenizer)),
            arguments(tmp_path, max_steps=3, per_device_eval_batch_size=4, **changes),
            train_dataset=rows(),
            eval_dataset=rows().select(range(2)),
            processing_class=chat_tokenizer,
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses(eval_strategy="steps", eval_steps=1) == losses()
