"""One loss and its gradients under FSDP2 and without: `torchrun sharded_run.py LORA`, for test_distributed.py."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ebft.models.causal_lm import decoder_layers, unwrap_adapter
from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from tests.strided.families import tiny_model
from tests.strided.short_run import documents
from tests.strided.test_exactness import BASE, unequal_batch, with_lora


def trainer_of(lora):
    model = tiny_model("llama")
    sizes = {"per_device_eval_batch_size": 3, "disable_tqdm": True}
    args = StridedEBFTConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], **BASE, **sizes)
    return StridedEBFTTrainer(model=with_lora(model) if lora else model, args=args)


def main(lora):
    dist.init_process_group("gloo")
    inputs, _ = unequal_batch()
    plain, sharded = trainer_of(lora), trainer_of(lora)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in decoder_layers(unwrap_adapter(sharded.model)):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded.model, mesh=mesh)
    sharded.is_fsdp_enabled = True  # what accelerate's plugin would have told the Trainer
    losses = [trainer.compute_loss(trainer.model, inputs) for trainer in (plain, sharded)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    compared = 0
    for (name, ours), (_, theirs) in zip(sharded.model.named_parameters(), plain.model.named_parameters()):
        if theirs.grad is not None and theirs.grad.norm() > 1e-6:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, atol=1e-6, rtol=1e-4, msg=name)
            compared += 1
    assert compared > 20
    # Seven rows in batches of three: both ranks evaluate the last row.
    wanted, found = (trainer.evaluate(documents(11)[4:]) for trainer in (plain, sharded))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    dist.barrier()
    os._exit(0)  # all is compared; threads that FSDP2 leaves over gloo abort the interpreter's exit now and then


if __name__ == "__main__":
    main(sys.argv[1] == "1")
