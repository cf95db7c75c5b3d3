"""What several processes must agree on: `torchrun two_processes.py FOLDER`, for test_sharded.py."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ebft import errors, structured
from ebft.models import causal_lm, sharding
from ebft.prefix.forward import take_programs
from ebft.structured.rollouts import adapters, turns
from ebft.structured.rollouts import server as server_module
from ebft.structured.rollouts.server import ServerRollouts
from tests.structured.conftest import chat_model, lora, make_chat_tokenizer
from tests.structured.rollouts.test_sampling_check import Server
from tests.structured.short_run import GRPOTrainer, check_held_out, held_out
from tests.structured.trainers import USER, logged, make

TOKENIZER = make_chat_tokenizer()


def of_all(value):
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


@torch.no_grad()
def change(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05)


def random_batch(rank):
    generator = torch.Generator().manual_seed(rank)
    draw = lambda *shape: torch.randint(4, 260, shape, generator=generator)
    lengths = torch.randint(60, 97, (4, 1), generator=generator)
    return {
        "prompt_ids": draw(4, 8),
        "prompt_mask": torch.ones(4, 8, dtype=torch.long),
        "completion_ids": draw(4, 96),
        "completion_mask": (torch.arange(96) < lengths).long(),
    }


@torch.no_grad()
def logps_of(model, batch, count=4):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)[:count]
    logps = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[:, 7:-1]
    return logps.gather(-1, batch["completion_ids"][:count, :, None]).squeeze(-1)


def a_fault_of_one_server_process_stops_all(folder, rank):
    """The log-probabilities that one process receives are wrong; or all are those of the base model."""
    model = lora(chat_model(TOKENIZER))
    client = Server()
    client.close = lambda: None
    server_module.VLLMClient = lambda *args, **kwargs: client
    server_module.check_server = lambda *args, **kwargs: ({"id": "base", "max_model_len": 512}, 1e-6)
    args = structured.RolloutGRPOConfig(output_dir=str(folder / "server"), use_vllm=True, report_to="none")
    policy = {"model": model, "processing_class": TOKENIZER, "accelerator": Accelerator(cpu=True)}
    scorer, state = SimpleNamespace(scores_truncated=True), SimpleNamespace(global_step=3)
    server = ServerRollouts(SimpleNamespace(args=args, scorer=scorer, state=state, **policy), turns.Sampling(1.0))
    server.sync_weights()
    batch, outcomes = random_batch(rank), []
    right = logps_of(model, batch)
    with model.disable_adapter():
        of_base = logps_of(model, batch)
    for sampled in (right, right + float(rank), of_base):
        version, given = server.backend().version, batch | {"sampling_per_token_logps": sampled}
        server._identified = None
        try:
            server.check_samples(given, version, 3, lambda count: logps_of(model, batch, count))
            outcomes.append(None)
        except errors.RolloutError as error:
            outcomes.append(str(error))
    first, second = of_all(outcomes)
    assert first == second and first[0] is None, (first, second)
    assert "differ from the trainer's by 0.5" in first[1], first[1]  # the fault of one of two, on average
    assert "sampled from the base model" in first[2], first[2]
    server.reset()


def a_sharded_adapter_is_sent_whole_and_can_be_exchanged(folder, rank):
    plain, model = (lora(chat_model(TOKENIZER)) for _ in range(2))
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in causal_lm.decoder_layers(causal_lm.unwrap_adapter(model)):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)  # the hardest case: weights remain gathered
    fully_shard(model, mesh=mesh)
    take_programs(model)
    batch = random_batch(0)
    sync = adapters.AdapterSync(Server(), model, Accelerator(cpu=True), str(folder / "sharded"))
    expected = []
    for step in range(2):
        sharding.reshard(model)  # as a backward pass leaves the parameters to the optimizer
        change(model)
        change(plain)
        version = sync.publish(step)
        file = Path(version.path) / "adapter_model.safetensors"
        assert file.stat().st_mode & 0o777 == file.parent.stat().st_mode & 0o666  # the server may be another user
        saved = load_file(file)
        whole = get_peft_model_state_dict(plain)
        assert saved.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(saved[name], value, msg=name)
        expected.append(logps_of(plain, batch))
        torch.testing.assert_close(logps_of(model, batch), expected[-1])
    assert (expected[0] - expected[1]).abs().max() > 0.01
    with sync.weights_of(sync.kept[1]):
        torch.testing.assert_close(logps_of(model, batch), expected[0])
    torch.testing.assert_close(logps_of(model, batch), expected[1])
    sync.close()


def train(folder, reward, **changes):
    dataset = Dataset.from_list([{"prompt": [USER(f"say {i} " + "word " * (i % 4))]} for i in range(16)])
    options = {"gradient_accumulation_steps": 2, "learning_rate": 1e-3, "reward_funcs": reward, **changes}
    trainer = make(chat_model(TOKENIZER), TOKENIZER, folder, dataset, GRPOTrainer, **options)
    batches, after_inputs = [], trainer.after_inputs

    def kept(rows, inputs):
        batches.append((inputs, after_inputs(rows, inputs)))
        return batches[-1][1]

    trainer.after_inputs = kept
    trainer.train()
    return trainer, batches


def groups(inputs):
    """The completions and the advantages of each group."""
    masked = [ids[mask.bool()].tolist() for ids, mask in zip(inputs["completion_ids"], inputs["completion_mask"])]
    advantages = [round(value, 5) for value in inputs["advantages"].tolist()]
    return [(masked[start : start + 4], advantages[start : start + 4]) for start in range(0, len(masked), 4)]


def one_process_replays_its_own_groups(folder, rank):
    """In the second step, the first process has groups with a signal, and the second has none."""

    def reward(completion_ids, trainer_state, **columns):
        silent = trainer_state.global_step == 1 and rank == 1
        return [0.0 if silent else float(sum(ids) % 5) for ids in completion_ids]

    for recompute in (True, False):
        options = {"replay_buffer_size": 8, "replay_recompute_logps": recompute}
        trainer, batches = train(folder / f"replay-{recompute}", reward, **options)
        (first, _), (second, trained_on) = batches
        if rank == 0:
            assert groups(trained_on) == groups(second)
        else:
            assert not second["advantages"].any() and trained_on["advantages"].any()
            assert sorted(groups(trained_on)) == sorted(groups(first))
        tokens = of_all(int(trained_on["completion_mask"].sum()))
        assert trained_on["num_items_in_batch"] == sum(tokens)
        assert logged(trainer, "replayed_groups") == [0, 2]
        weights = of_all(torch.cat([value.flatten() for value in trainer.model.state_dict().values()]))
        assert torch.equal(*weights)


def held_out_rows_count_once(folder, rank):
    """Five groups of four completions do not fill the batches of two processes."""
    for method in ("ebft", "grpo", "gdpo"):
        by_size = []
        for size in (4, 8):
            metrics, expected = held_out(folder / "held-out", method, size)
            check_held_out(metrics, expected)
            by_size.append(metrics)
        for name, value in by_size[0].items():
            assert abs(by_size[1][name] - value) <= 1e-4 * max(1.0, abs(value)), (method, name)


def main(folder):
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    for check in (
        a_fault_of_one_server_process_stops_all,
        a_sharded_adapter_is_sent_whole_and_can_be_exchanged,
        one_process_replays_its_own_groups,
        held_out_rows_count_once,
    ):
        check(Path(folder), rank)
        distributed.barrier()
        if rank == 0:
            print(f"passed: {check.__name__}", flush=True)
    os._exit(0)  # threads that FSDP2 leaves over gloo abort the interpreter's exit now and then


if __name__ == "__main__":
    main(sys.argv[1])
