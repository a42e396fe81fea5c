"""Rank, world and incarnation come from the launcher, agree, or are an error; they are never guessed."""

from __future__ import annotations

import pytest

from baft_client.identity import INCARNATION_VARIABLE, draw_incarnation, find_incarnation, find_rank
from baftd.errors import RankError, UsageError


def variables(text: str | dict[str, str]) -> dict[str, str]:
    """`A=1 B=2` as an environment."""
    return text if isinstance(text, dict) else dict(pair.split("=", 1) for pair in text.split())


@pytest.mark.parametrize(
    ("environ", "rank", "world", "launcher"),
    [
        ("RANK=3 WORLD_SIZE=8", 3, 8, "torchrun"),
        ("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 TORCHELASTIC_RUN_ID=x", 3, 8, "torchrun"),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", 1, 2, "Open MPI"),
        ("MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2", 1, 2, "MVAPICH"),
        ("PMI_RANK=1 PMI_SIZE=2", 1, 2, "MPICH"),
        ("HOROVOD_RANK=1 HOROVOD_SIZE=2", 1, 2, "Horovod"),
        ("RANK_ID=5 RANK_SIZE=8", 5, 8, "MindSpore"),
        ("MS_NODE_ID=5 MS_WORKER_NUM=8 MS_ROLE=MS_WORKER", 5, 8, "MindSpore"),
        ("RANK_ID=5 MS_WORKER_NUM=8", 5, 8, "MindSpore"),
        ("SLURM_PROCID=2 SLURM_NTASKS=4", 2, 4, "Slurm"),
        ("SLURM_PROCID=2 SLURM_NPROCS=4", 2, 4, "Slurm"),
        # torchrun under srun: one task a node, which starts the ranks
        ("RANK=9 WORLD_SIZE=16 TORCHELASTIC_RUN_ID=x SLURM_PROCID=1 SLURM_NTASKS=2", 9, 16, "torchrun"),
        # mpirun in an allocation: Slurm's variables are those of the batch script
        ("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 SLURM_PROCID=0 SLURM_NTASKS=1", 3, 4, "Open MPI"),
        # torchrun started by mpirun, one a node
        ("RANK=5 WORLD_SIZE=8 TORCHELASTIC_RUN_ID=x OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", 5, 8, "torchrun"),
        # exported by hand, and agreeing
        ("RANK=1 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2", 1, 2, "torchrun"),
        # an allocation says how many tasks there may be, not which one this is
        ("SLURM_NTASKS=4 RANK=0 WORLD_SIZE=1", 0, 1, "torchrun"),
        ({"RANK": " 1 ", "WORLD_SIZE": "2\n"}, 1, 2, "torchrun"),
    ],
)  # fmt: skip
def test_rank_is_what_the_launcher_says(environ: str | dict[str, str], rank: int, world: int, launcher: str) -> None:
    info = find_rank(variables(environ))
    assert (info.rank, info.world, info.launched) == (rank, world, True)
    assert info.source.startswith(launcher)


@pytest.mark.parametrize(
    "environ", [{}, {"PATH": "/bin"}, {"RANK": "", "WORLD_SIZE": ""}, {"SLURM_NTASKS": "4"}, {"MASTER_PORT": "1"}]
)
def test_without_a_launcher_it_is_rank_0_of_1_and_said_so(environ: str | dict[str, str]) -> None:
    info = find_rank(variables(environ))
    assert (info.rank, info.world, info.launched) == (0, 1, False)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ("WORLD_SIZE=8", ["WORLD_SIZE=8", "RANK is missing", "never taken for 0"]),
        ("RANK=3", ["RANK=3", "WORLD_SIZE is missing"]),
        ("OMPI_COMM_WORLD_RANK=3", ["Open MPI", "OMPI_COMM_WORLD_SIZE is missing"]),
        ("RANK_ID=3", ["RANK_SIZE or MS_WORKER_NUM is missing"]),
        ("MS_WORKER_NUM=8", ["RANK_ID or MS_NODE_ID is missing"]),
        ("MS_WORKER_NUM=8 MS_NODE_ID=worker-a", ["RANK_ID or MS_NODE_ID is missing"]),
        ("MS_WORKER_NUM=8 MS_ROLE=MS_SCHED", ["MS_ROLE is MS_SCHED"]),
        ("SLURM_PROCID=0", ["SLURM_NTASKS or SLURM_NPROCS is missing"]),
        ("RANK=three WORLD_SIZE=8", ["RANK='three' is not a whole number"]),
        ("RANK=-1 WORLD_SIZE=8", ["RANK='-1'"]),
        ("RANK=1.0 WORLD_SIZE=8", ["RANK='1.0'"]),
        ({"RANK": "٣", "WORLD_SIZE": "8"}, ["not a whole number"]),
        ("RANK=8 WORLD_SIZE=8", ["rank 8 is not one of 0 to 7"]),
        ("RANK=0 WORLD_SIZE=0", ["world of 0 ranks"]),
        ("RANK=0 WORLD_SIZE=2097152", ["makes no sense"]),
        ("RANK=1 WORLD_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=2", ["disagrees", "torchrun", "Slurm", "rank 0 of 2"]),
        ("RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4", ["disagrees", "of 2", "of 4"]),
    ],
)  # fmt: skip
def test_incomplete_or_disagreeing_is_an_error(environ: str | dict[str, str], words: list[str]) -> None:
    with pytest.raises(RankError) as caught:
        find_rank(variables(environ))
    for word in words:
        assert word in str(caught.value)


def test_arguments_override_the_environment() -> None:
    info = find_rank({"RANK": "3", "WORLD_SIZE": "8"}, rank=1, world=4)
    assert (info.rank, info.world) == (1, 4)
    assert find_rank({"RANK": "nonsense"}, rank=0, world=1).launched
    with pytest.raises(RankError, match="no world"):
        find_rank({}, rank=1)
    with pytest.raises(RankError, match="no rank"):
        find_rank({}, world=2)
    with pytest.raises(RankError, match="rank 4 is not one of 0 to 3"):
        find_rank({}, rank=4, world=4)
    with pytest.raises(RankError):
        find_rank({}, rank=-1, world=4)


def test_incarnation_is_drawn_for_one_rank_and_needed_for_several() -> None:
    drawn = find_incarnation({}, 1)
    assert len(drawn) == 32
    assert drawn != find_incarnation({}, 1), "each start draws anew"
    assert find_incarnation({}, 1, random_bytes=lambda n: b"\x0f" * n) == "0f" * 16
    assert find_incarnation({}, 2, given="ab" * 16) == "ab" * 16
    assert find_incarnation({INCARNATION_VARIABLE: "cd" * 16}, 2) == "cd" * 16
    assert find_incarnation({INCARNATION_VARIABLE: "cd" * 16}, 2, given="ab" * 16) == "cd" * 16, (
        "the variable overrides"
    )
    with pytest.raises(RankError, match=r"2 ranks must agree .*BAFTD_INCARNATION"):
        find_incarnation({}, 2)
    for bad in ("xyz", "AB" * 16, "ab" * 15, "ab" * 17):
        with pytest.raises(UsageError, match="32 lower-case hexadecimal"):
            find_incarnation({INCARNATION_VARIABLE: bad}, 1)
        with pytest.raises(UsageError):
            find_incarnation({}, 2, given=bad)
    assert draw_incarnation(lambda n: bytes(range(n))) == bytes(range(16)).hex()
