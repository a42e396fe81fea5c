"""Which rank of how many this process is, and which start of the job it belongs to.

Rank and world size are what the launcher says in the environment, checked against each other; they are never
guessed. A rank taken for 0 by mistake would write over another rank's checkpoint.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baftd.checkpoint.identity import MAX_WORLD, check_incarnation
from baftd.errors import RankError

__all__ = ["INCARNATION_VARIABLE", "LAUNCHERS", "RankInfo", "draw_incarnation", "find_incarnation", "find_rank"]

INCARNATION_VARIABLE = "BAFTD_INCARNATION"


@dataclass(frozen=True)
class Launcher:
    """Variables of one launcher. The first name that is set counts; `outer` may start another launcher."""

    name: str
    rank: tuple[str, ...]
    world: tuple[str, ...]
    outer: bool = False
    """It commonly starts one process a node which launches the ranks: what it says then is not the rank."""
    inner: str = ""
    """A variable that proves that this launcher started this very process."""


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), inner="TORCHELASTIC_RUN_ID"),
    Launcher("Open MPI", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), inner="OMPI_COMM_WORLD_RANK"),
    Launcher("MVAPICH", ("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",), inner="MV2_COMM_WORLD_RANK"),
    Launcher("MPICH or Intel MPI", ("PMI_RANK",), ("PMI_SIZE",), inner="PMI_RANK"),
    Launcher("Horovod", ("HOROVOD_RANK",), ("HOROVOD_SIZE",), inner="HOROVOD_RANK"),
    Launcher("MindSpore", ("RANK_ID", "MS_NODE_ID"), ("RANK_SIZE", "MS_WORKER_NUM"), inner="MS_NODE_ID"),
    Launcher("Slurm", ("SLURM_PROCID",), ("SLURM_NTASKS", "SLURM_NPROCS"), outer=True),
)
"""Checked in this order; all that are set must agree, but for an outer launcher of the one that started us."""


@dataclass(frozen=True)
class RankInfo:
    """This process among those of its job."""

    rank: int
    world: int
    source: str
    """Where the numbers came from, for the log: "torchrun (RANK, WORLD_SIZE)", "attach(rank=, world=)" ..."""
    launched: bool
    """False: nothing said so, rank 0 of 1 was assumed."""


def find_rank(environ: Mapping[str, str], *, rank: int | None = None, world: int | None = None) -> RankInfo:
    """Rank and world size from the arguments, else from the launcher's variables, else rank 0 of 1.

    Args:
        environ: variables of the process.
        rank: given by the caller; needs `world` too.
        world: number of ranks, given by the caller.

    Raises:
        RankError: only one of the two is given or set, a value is no number or out of range, launchers disagree.
    """
    if rank is not None or world is not None:
        if rank is None or world is None:
            missing, given = ("rank", f"world={world}") if rank is None else ("world", f"rank={rank}")
            raise RankError(f"attach() was given {given} but no {missing}.", hint=f"Give {missing}= as well.")
        return _checked(rank, world, "attach(rank=, world=)", launched=True)
    found = [answer for launcher in LAUNCHERS if (answer := _ask(launcher, environ)) is not None]
    if not found:
        return RankInfo(rank=0, world=1, source="no launcher variable is set", launched=False)
    inner = [launcher for launcher, _ in found if launcher.inner and launcher.inner in environ]
    if inner:
        found = [(launcher, info) for launcher, info in found if not launcher.outer]
        if inner[0].name == "torchrun":  # mpirun and msrun start torchrun, never the other way round
            found = [(launcher, info) for launcher, info in found if launcher is inner[0]]
    first = found[0][1]
    for _, other in found[1:]:
        if (other.rank, other.world) != (first.rank, first.world):
            raise RankError(
                f"the environment disagrees about this process: {first.source} says rank {first.rank} of "
                f"{first.world}, {other.source} says rank {other.rank} of {other.world}.",
                hint="Unset the variables that a launcher left behind, or give attach(rank=, world=).",
            )
    return first


def _ask(launcher: Launcher, environ: Mapping[str, str]) -> tuple[Launcher, RankInfo] | None:
    rank_name = next((name for name in launcher.rank if environ.get(name, "").strip()), None)
    world_name = next((name for name in launcher.world if environ.get(name, "").strip()), None)
    if launcher.name == "MindSpore":
        if environ.get("MS_ROLE", "MS_WORKER") != "MS_WORKER":
            raise RankError(
                f"this process is no rank: MS_ROLE is {environ['MS_ROLE']}.", hint="Attach in the worker processes."
            )
        if rank_name == "MS_NODE_ID" and not environ["MS_NODE_ID"].strip().isdecimal():
            rank_name = None  # a free name: the rank is known to MindSpore's group only
    if rank_name is None and world_name is None:
        return None
    if rank_name is None or world_name is None:
        have = rank_name or world_name
        lack = " or ".join(launcher.world if world_name is None else launcher.rank)
        if launcher.outer and rank_name is None:
            return None  # SLURM_NTASKS alone describes an allocation, not this process
        raise RankError(
            f"the environment is incomplete: {launcher.name} sets {have}={environ[have or '']} but {lack} is missing.",
            hint="Set it, or give attach(rank=, world=); a rank is never taken for 0.",
        )
    numbers = []
    for name in (rank_name, world_name):
        text = environ[name].strip()
        if not text.isascii() or not text.isdecimal():
            raise RankError(
                f"{name}={environ[name]!r} is not a whole number from 0 on (of {launcher.name}).",
                hint="Correct it, or give attach(rank=, world=).",
            )
        numbers.append(int(text))
    source = f"{launcher.name} ({rank_name}, {world_name})"
    return launcher, _checked(numbers[0], numbers[1], source, launched=True)


def _checked(rank: int, world: int, source: str, *, launched: bool) -> RankInfo:
    if not 1 <= world <= MAX_WORLD:
        raise RankError(f"a world of {world} ranks makes no sense ({source}).", hint=f"Use 1 to {MAX_WORLD}.")
    if not 0 <= rank < world:
        raise RankError(
            f"rank {rank} is not one of 0 to {world - 1} ({source}).", hint="Ranks count from 0 over all nodes."
        )
    return RankInfo(rank=rank, world=world, source=source, launched=launched)


def draw_incarnation(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """128 random bits in hexadecimal: a new start of a job."""
    return random_bytes(16).hex()


def find_incarnation(
    environ: Mapping[str, str],
    world: int,
    *,
    given: str | None = None,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> str:
    """Which start of the job this is: `given` (broadcast by an adapter), the variable, or drawn for a single rank.

    Raises:
        RankError: several ranks and nothing that they share; no launcher variable tells one start from the next.
        UsageError: not 32 lower-case hexadecimal digits.
    """
    if environ.get(INCARNATION_VARIABLE):
        return check_incarnation(environ[INCARNATION_VARIABLE].strip())
    if given is not None:
        return check_incarnation(given)
    if world == 1:
        return draw_incarnation(random_bytes)
    raise RankError(
        f"{world} ranks must agree which start of the job this is, and nothing tells them.",
        hint=f"Set {INCARNATION_VARIABLE} to the output of `openssl rand -hex 16` for all ranks, new at each start of "
        "the job; or attach after the framework's process group exists.",
    )
