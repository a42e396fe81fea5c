"""Numpy jobs that go on with another number of ranks, and with other parts: real daemon, one process a rank."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baft_client import ArrayCheckpointer, Part, attach_arrays
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import FormatError, LayoutError, UsageError
from baftd.wire.messages import Declare, Restored, Resume, ResumePlan, Seal, WireToken
from tests.checkpoint.reshard_cases import Held, entry_of, tensor_of
from tests.client.test_saved_shards import slot_of
from tests.support.daemon import ROOT, Daemon, RunDirs
from tests.support.trainer import INCARNATION, Places, places
from tests.support.zygote import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as found:
        yield found


class Starts:
    """Starts of a job: all its ranks, to the end of each."""

    def __init__(self, dirs: RunDirs, zygote: Zygote) -> None:
        self.dirs, self.zygote = dirs, zygote
        self.number = 0

    def run(self, world: int, *, steps: int = 2, **options: Any) -> list[dict[str, Any]]:
        """What each rank said."""
        self.number += 1
        arguments = [json.dumps({"steps": steps, **options})]
        with ExitStack() as stack:
            ranks = []
            for rank in range(world):
                env = self.dirs.environ(connect_timeout="20 s")
                env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "BAFTD_INCARNATION": f"{self.number:032x}"}
                env["OPENBLAS_NUM_THREADS"] = "1"
                log = stack.enter_context((self.dirs.base / f"rank-{self.number}-{rank}.log").open("ab"))
                ranks.append(
                    self.zygote.start(
                        "tests.support.array_job", arguments, env=env, cwd=ROOT, stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE, stderr=log,
                    )
                )  # fmt: skip
            said = []
            for process in ranks:
                assert process.stdout is not None
                with process.stdout as output:
                    lines = output.read().splitlines()
                process.wait(60)
                assert lines, "a rank ended without a word: see its log"
                said.append(json.loads(lines[-1]))
        return said

    def go_on(self, world: int, step: int, *, reshard: bool = True, **options: Any) -> list[dict[str, Any]]:
        """A start that must find `step`, every element of it right, and commit two more."""
        said = self.run(world, resume={"reshard": reshard}, **options)
        assert [one.get("step") for one in said] == [step] * world, said
        assert [one["wrong"] for one in said] == [[]] * world
        assert [one["committed"] for one in said] == [step + 2] * world
        return said


def test_ranks_come_and_go(run_dirs: RunDirs, zygote: Zygote) -> None:
    """4 ranks, then the same 4, 2, 1, 3, and 3 with other parts."""
    with Daemon(run_dirs):
        starts = Starts(run_dirs, zygote)
        starts.go_on(4, 0, reshard=False)
        same = starts.go_on(4, 2)
        assert [one["extra"] for one in same] == [{"lr": 0.5, "seed": rank} for rank in range(4)]
        assert all(one["not_carried"] == [] for one in same), "where nothing changed everything is put back"
        refused = starts.run(2)
        assert all("resume(reshard=True)" in one["text"] and "4 ranks" in one["text"] for one in refused), refused
        for world, step in ((2, 4), (1, 6)):
            for one in starts.go_on(world, step):
                assert one["extra"] == {"lr": 0.5}
                assert one["not_carried"] == ["seed"]
        alone = starts.go_on(3, 8)
        assert [one["extra"]["seed"] for one in alone] == [0] * 3, "of one rank all is equal"
        other = starts.run(3, swapped=True)
        assert {one["error"] for one in other} == {"ModelMismatch"}
        assert "resume(reshard=True) cuts them anew" in other[0]["text"]
        swapped = starts.go_on(3, 10, swapped=True)
        assert {one["not_carried"][0] for one in swapped} == {"seed"}
        plain = starts.go_on(3, 12, swapped=True, reshard=False)
        assert [one["extra"]["seed"] for one in plain] == [0, 1, 2]


# ---------------------------------------------------------------------------------------------- one process


@pytest.fixture
def where() -> Iterator[Places]:
    with places() as found:
        yield found


def attach(where: Places, arrays: dict[str, Any], **options: Any) -> ArrayCheckpointer:
    return attach_arrays("job", arrays, settings=where.settings(), incarnation=INCARNATION, **options)


def saved_by_two(directory: Path, small: Any = None) -> Callable[[Resume], ResumePlan]:
    """A plan of two ranks that have a row of `w` each, and an `own` that differs."""
    whole = tensor_of("w", "F64", (2, 3), 1)
    slots = []
    for rank in range(2):
        own = entry_of(tensor_of("own", "F64", (2,), rank), Held(((0, 2),), False))
        entries = [entry_of(whole, Held(((rank, rank + 1), (0, 3)), False)), (bare(own[0]), own[1])]
        slots.append(slot_of(directory, rank, 2, entries, small).said)
    token = WireToken(2, INCARNATION)
    return lambda _: ResumePlan(token=token, step=7, updates=7, epoch=1, world=2, shards=slots, tier="memory")


def bare(entry: TensorEntry) -> TensorEntry:
    """Without its ranges: the rank's own."""
    return replace(entry, global_shape=None, ranges=None)


def test_what_cannot_be_cut_is_named_before_anything_changes(where: Places, tmp_path: Path) -> None:
    with where.daemon() as scripted:
        scripted.plan = saved_by_two(tmp_path)
        arrays = {"w": np.zeros((2, 3)), "own": np.zeros(2), "head": np.zeros(4), "tail": np.zeros(3)}
        parts = {"w": Part((2, 3), ((0, 2), (0, 3))), "head": Part((8,), ((4, 8),)), "tail": Part((4, 3), ((1, 4),))}
        ckpt = attach(where, arrays, parts=parts)
        with pytest.raises(LayoutError) as caught:
            ckpt.resume(reshard=True)
        for words in (
            "tensor 'own' [0:2] of rank 0: each of ranks 0, 1 saved one of its own",
            "tensor 'head' [4:8] of rank 0: nobody saved it",
            "tensor 'tail' [0:1, 1:3] of rank 0: nobody saved it",
            "tensor 'tail' [1:2, 0:1] of rank 0: nobody saved it",
            "attach_arrays(parts=...); to say it now, go on with the ranks that saved",
        ):
            assert words in str(caught.value)
        assert not any(array.any() for array in arrays.values())
        (answer,) = scripted.wait_for(Restored)
        assert not answer.ok
        assert answer.reason.startswith("LayoutError: ")
        ckpt.close()


def test_whole_arrays_are_put_together_and_the_loop_goes_on(where: Places, tmp_path: Path) -> None:
    with where.daemon() as scripted:
        scripted.plan = saved_by_two(tmp_path)
        array = np.zeros((2, 3))
        seen: list[dict[str, Any]] = []
        with attach(where, {"w": array}, load_extra=seen.append) as ckpt:
            # Another rank of this start said reshard: one that says so speaks for all.
            assert ckpt.resume() == 7
            assert array.tobytes() == tensor_of("w", "F64", (2, 3), 1).data.tobytes()
            assert seen == [{}]
            assert ckpt.not_carried == ("rank",)
            with ckpt.update():
                array += 1
            ckpt.step()
        assert scripted.wait_for(Seal)[-1].step == 8


def test_images_that_are_not_what_they_claim_are_told(where: Places, tmp_path: Path) -> None:
    with where.daemon() as scripted:
        for small, words in (([1, 2], "the small state of rank 0 is a list"), (None, "2 images came for step 7 of 3")):
            plan = saved_by_two(tmp_path, small)(Resume(job="job", rank=0))
            if small is None:
                plan.world = 3
            scripted.plan = lambda _, plan=plan: plan  # type: ignore[misc]
            ckpt = attach(where, {"w": np.zeros((2, 3))})
            with pytest.raises(FormatError, match=words):
                ckpt.resume(reshard=True)
            ckpt.close()
        told = scripted.wait_for(Restored, count=2)
        assert all(answer.reason.startswith("FormatError: ") and not answer.ok for answer in told)


def test_parts_must_fit_their_arrays(where: Places) -> None:
    with pytest.raises(UsageError, match=r"parts names \['x'\], which are not among"):
        attach(where, {"w": np.zeros(3)}, parts={"x": Part((3,), ((0, 3),))})
    with pytest.raises(UsageError, match=r"tensor 'w' cannot be declared: .* cut a part of shape \(2,\), not \(3,\)"):
        attach(where, {"w": np.zeros(3)}, parts={"w": Part((3,), ((0, 2),))})
    with pytest.raises(UsageError, match="declared 2 times, once without ranges"):
        attach(where, {"w": np.zeros(3), "v": np.zeros(2)}, parts={"v": Part((3,), ((0, 2),), name="w")})


def test_a_rank_says_its_stage_and_coordinates(where: Places) -> None:
    with where.daemon() as scripted, attach(where, {"w": np.zeros(3)}) as ckpt:
        ckpt.session.stages, ckpt.session.coordinates = (1, 3), {"dp": 2}
        ckpt.resume()
        ckpt.step()
        (declared,) = scripted.wait_for(Declare)
        assert (declared.stages, declared.coordinates) == ([1, 3], {"dp": 2})
