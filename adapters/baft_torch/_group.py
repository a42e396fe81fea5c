"""Who this process is in the job: rank, world and incarnation from the framework's own process group."""

from __future__ import annotations

import os
import secrets
from typing import Any, NamedTuple

import torch

from baftd.checkpoint.identity import check_incarnation
from baftd.errors import RankError, UsageError

__all__ = ["Identity", "identify"]


class Identity(NamedTuple):
    """Rank and world (None: to be read from the launcher's variables) and incarnation (None: to be drawn or read)."""

    rank: int | None
    world: int | None
    incarnation: str | None


def identify(group: Any = None, rank: int | None = None, world: int | None = None) -> Identity:
    """Ask the process group, and agree on 128 random bits drawn by its rank 0 (one small broadcast).

    Every rank of the group must call it. Without an initialised group only the arguments are passed on. Raises
    RankError where arguments or the launcher's variables say something else than the group.
    """
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise UsageError("attach(group=) was given a process group, but torch.distributed is not initialised.")
        return Identity(rank, world, None)
    mine, size = dist.get_rank(group), dist.get_world_size(group)
    if mine < 0:
        raise RankError("this process is not a member of the process group given to attach().")
    for what, given, said in (("rank", rank, mine), ("world", world, size)):
        if given is not None and given != said:
            raise RankError(f"attach({what}={given}) disagrees with the process group, which says {what} {said}.")
    if group is None:
        for variable, said in (("RANK", mine), ("WORLD_SIZE", size)):
            value = os.environ.get(variable)
            if value is not None and value.strip() != str(said):
                raise RankError(
                    f"the launcher says {variable}={value}, the process group says {said}.",
                    hint="Give attach(group=) the group whose ranks are the job's ranks.",
                )
    return Identity(mine, size, _agree(dist, group, mine))


def _agree(dist: Any, group: Any, mine: int) -> str:
    override = os.environ.get("BAFTD_INCARNATION")
    own = check_incarnation(override) if override else secrets.token_hex(16)
    device = torch.device("cpu")
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    drawn = torch.tensor(list(bytes.fromhex(own)), dtype=torch.uint8, device=device)
    dist.broadcast(drawn, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    agreed = bytes(drawn.cpu().tolist()).hex()
    if override and override != agreed:
        raise UsageError(
            f"BAFTD_INCARNATION differs between ranks: {override} on rank {mine}, {agreed} on rank 0.",
            hint="Set it to one value on all ranks of a start, or leave it out: the process group agrees on one.",
        )
    return agreed
