import pytest

from ebft.config.checks.processes import check_deepspeed
from ebft.errors import ConfigError, EBFTError
from ebft.run.checks import check_runnable, launched_processes


@pytest.mark.parametrize(("keys", "message"), [
    ({"optimizer": "adamw_torch_fusd"},
     "optimizer: 'adamw_torch_fusd' is not known to transformers. Did you mean adamw_torch"),
    ({"optimizer": "quick"}, "'quick' is not known to transformers"),
    ({"optimizer": "galore_adamw"}, "optimizer: galore_adamw is not supported: its projections cannot be read"),
    ({"optimizer": "schedule_free_adamw"}, "schedule_free_adamw cannot be used: .*Install its dependencies, or leave"),
    ({"optimizer": "adalomo"}, "optimizer: adalomo is not supported: it updates weights during the backward pass"),
    ({"optimizer": "galore_adamw_layerwise"}, "neither accumulated, clipped nor checked"),
    ({"optimizer": "ao_adamw_8bit"}, "ao_adamw_8bit is called adamw_torch_8bit in transformers"),
    ({"optimizer": "ao_adamw_fp8"}, "8 and 4 bits only. Use adamw_torch_8bit"),
    ({"optimizer": "muon"}, "optimizer: muon is not supported: transformers has no optimizer that treats matrices"),
    ({"optimizer": "came_pytorch"}, "came_pytorch is not supported: transformers cannot create CAME"),
    ({"optimizer": "adopt_adamw"}, "cannot create ADOPT. Use adamw_torch_fused"),
    ({"optimizer": "optimi_adamw"}, "transformers creates stable_adamw only"),
    ({"lr_scheduler": "rex"}, "lr_scheduler: rex is not supported: .* Use lr_scheduler: polynomial with"),
    ({"lr_scheduler": "one_cycle"}, "lr_scheduler: one_cycle is not supported: .* Use lr_scheduler: cosine with"),
    ({"optimizer": "grokadamw"}, "its state is not part of checkpoints"),
    ({"optim_args": {"beta3": 0.9}}, "optim_args.beta3 is not read by optimizer: adamw_torch_fused. Remove it"),
    ({"optimizer": "sgd", "optim_args": {"momentum": 0.9, "rank": 4}}, "optim_args.rank is not read by optimizer: sgd"),
    ({"optimizer": "adamw_torch_8bit", "optim_args": {"block_size": 128}},
     "optim_args.block_size is passed on by transformers as text"),
    ({"lr_scheduler": "cosin"}, "lr_scheduler: 'cosin' is not known to transformers. Did you mean cosine"),
    ({"lr_scheduler": "cosine_with_min_lr"}, "is invalid: One of min_lr or min_lr_rate"),
    ({"lr_scheduler_kwargs": {"nope": 1}}, "is invalid: .*nope"),
    ({"report_to": "banana"}, "unknown tracker 'banana'. Choose from"),
    ({"report_to": ["trackio"]}, "report_to: trackio is not installed. Run `pip install trackio`"),
    ({"rl": "ebft", "ebft": {"mode": "strided", "context_length": 500}, "sequence_len": 128},
     "sequence_len to at least 508"),
    ({"datasets": [{"path": "a", "type": "completoin"}]}, "Did you mean 'completion'"),
    ({"datasets": [{"path": "a", "type": "ebft_reasoning.transform_answer_only"}]},
     "SFT .* trains on rows of input_ids and labels"),
    ({"deepspeed": {}}, r"pip install 'ebft\[deepspeed\]'"),
    ({"deepspeed": "zero4"}, "deepspeed: zero4 cannot be read .* one of zero1"),
    ({"sample_packing": True, "group_by_length": True}, "group_by_length groups rows by length, but sample_packing"),
    ({"rl": "ebft", "ebft": {"mode": "strided", "temperature": 1e-45}}, "temperature: 1e-45 is too small"),
    ({"rl": "ebft", "ebft": {"mode": "strided", "single_pass": True}, "gradient_checkpointing": True},
     "ebft.single_pass is incompatible with gradient_checkpointing, which"),
    ({"rl": "ebft", "ebft": {"mode": "strided", "single_pass": True, "rollout_tokens_per_pass": 8}},
     "ebft.single_pass is incompatible with ebft.rollout_tokens_per_pass"),
])  # fmt: skip
def test_what_cannot_be_trained_here_says_why(make, keys, message):
    with pytest.raises(EBFTError, match=message):
        check_runnable(make(**keys))


@pytest.mark.parametrize(("package", "optimizer", "extra"), [
    ("bitsandbytes", "adamw_8bit", "qlora"), ("torchao", "adamw_torch_8bit", "quantize"),
])  # fmt: skip
def test_a_missing_package_of_an_optimizer_names_the_extra(make, monkeypatch, package, optimizer, extra):
    monkeypatch.setattr(f"transformers.trainer_optimizer.is_{package}_available", lambda: False)
    with pytest.raises(
        ConfigError, match=rf"cannot be used: .*{package}.*Run `pip install 'ebft\[{extra}\]'`, or leave"
    ):
        check_runnable(make(optimizer=optimizer))


@pytest.mark.parametrize("method", [{"rl": "ebft", "ebft": {"mode": "strided"}}, {"rl": "ebft"}, {"rl": "grpo"}])
def test_partitioned_parameters_are_for_sft(make, monkeypatch, method):
    monkeypatch.setattr("ebft.config.checks.processes.find_spec", lambda name: object())
    reward = {"trl": {"reward_funcs": ["os.path.join"]}} if method["rl"] == "grpo" else {}
    for given in ("zero3", "zero3_offload", {"zero_optimization": {"stage": 3}}):
        with pytest.raises(ConfigError, match="ZeRO-3 is only supported by SFT. It partitions .* Use fsdp: true"):
            check_deepspeed(make(**method, **reward, deepspeed=given))
        check_deepspeed(make(deepspeed=given))
    check_deepspeed(make(**method, **reward, deepspeed="zero2"))
    with pytest.raises(ConfigError, match="deepspeed: none.json cannot be read .* one of zero1, zero2, zero3, zero3_"):
        check_runnable(make(deepspeed="none.json"))


@pytest.mark.parametrize("given, message", [
    ("none.json", "none.json cannot be read as JSON"),
    ("nested.json", "nested.json cannot be read as JSON .RecursionError"),
    ({"zero_optimization": {"stage": True}}, "stage must be 0, 1, 2 or 3, got True"),
    ("zero2", "pip install 'ebft.deepspeed.'"),
])  # fmt: skip
def test_a_wrong_deepspeed_config_is_reported_before_a_missing_package(make, monkeypatch, tmp_path, given, message):
    monkeypatch.setattr("ebft.config.checks.processes.find_spec", lambda name: None)
    (tmp_path / "nested.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=message):
        check_deepspeed(make(deepspeed=str(tmp_path / given) if str(given).endswith(".json") else given))


LAUNCHED = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("variables, message", [
    ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc'; expected a number. Start training with ebft train"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; expected a number"),
    ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, as launchers do, but RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, as launchers do, but LOCAL_RANK, RANK, MASTER_ADDR, MASTER_PORT are"),
    ({**LAUNCHED, "RANK": "one"}, "RANK is 'one'"),
])  # fmt: skip
def test_variables_of_launchers(make, monkeypatch, variables, message):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        check_runnable(make())


def test_the_number_of_launched_processes(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert launched_processes() == 2
    for name in LAUNCHED.keys() - {"WORLD_SIZE"}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "1")  # of a job scheduler
    assert launched_processes() == 1


def test_an_output_folder_that_cannot_be(make, tmp_path):
    (tmp_path / "file").write_text("")
    for folder, message in ((tmp_path / "file" / "out", "cannot create .*out because .*file is a file"),
                            ("a\0", r"cannot create 'a.x00', which contains a NUL character")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"output_dir: {message}"):
            check_runnable(make(output_dir=folder))


def test_a_schedule_with_its_arguments_is_accepted(make):
    check_runnable(make(lr_scheduler="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}))
