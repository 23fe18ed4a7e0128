"""Trains an FSDP2 model on several ranks, and resumes after a kill, also with another number of ranks.

Run it with `torchrun --nproc_per_node 4 examples/fsdp_train.py DIRECTORY`, kill one of its processes, and run it again
with `--nproc_per_node 2`. If one process gets SIGTERM or SIGUSR1, all processes save and end. It needs no GPU.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import modelstate as ms

STEPS, SAVE_EVERY, BATCH = 60, 5, 32


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the part of this rank of a batch. The batch depends only on the step, so a resumed run gets the same."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 16, generator=generator)
    targets = inputs.sin().sum(1, keepdim=True)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return inputs[rank::ranks], targets[rank::ranks]


def main(directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Dropout(0.05), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    torch.manual_seed(dist.get_rank())  # the dropout of each rank drops other elements

    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": ms.RNG()}
    deadline = ms.Deadline(hours=None)  # no time limit: a signal to any rank ends the run
    loop = ms.resumable(directory, objects, steps=STEPS, save_every=SAVE_EVERY, keep=3, deadline=deadline)
    for step in loop:
        inputs, targets = batch(step)
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step} of {dist.get_world_size()} ranks: loss {float(mean):.6f}", flush=True)
    if dist.get_rank() == 0:
        print(f"from step {loop.start} to {loop.done}: {loop.stopped or 'all steps are done'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", help="the directory of the checkpoints; it is created")
    main(parser.parse_args().directory)
