"""Group files of MindSpore: real ones, and what is refused."""

from __future__ import annotations

import random

import pytest

from baftd.errors import FormatError
from baftd.formats.mindspore_groups import parse_groups
from tests.formats.test_protobuf import encoded, varint
from tests.support.mindspore_samples import FIRST, NAMES, Sample, first_sample, sample

ALL = [*(first_sample(name) for name in FIRST), *(sample(name) for name in NAMES)]


@pytest.mark.parametrize("job", ALL, ids=lambda job: job.name)
def test_real_files_name_ranks_of_the_own_stage(job: Sample) -> None:
    devices = job.world // job.stages
    for rank, content in job.groups.items():
        file = parse_groups(content, "f")
        assert rank in file.restore_ranks
        assert not file.unknown
        for ranks in (*file.groups.values(), file.restore_ranks):
            assert {member // devices for member in ranks} == {rank // devices}
            assert list(ranks) == sorted(ranks)
        for name, layout in job.layouts[rank].items():
            if layout[5] and not layout[5].endswith("_world_group"):
                assert rank in file.groups[layout[5]], name


def test_the_values_of_one_file() -> None:
    file = parse_groups(first_sample("dp2mp2pp2").groups[5], "f")
    assert file.restore_ranks == (5, 7)
    assert sorted(file.groups.values()) == [(4, 5), (4, 5, 6, 7), (5, 7)]


def test_cut_off_at_every_byte_and_with_every_bit_flipped() -> None:
    data = first_sample("dp2mp2pp2").groups[5]
    for length in range(len(data)):
        with pytest.raises(FormatError, match=r"^f: "):  # the list of replicas stands at the end
            parse_groups(data[:length], "f")
    chance = random.Random(4)
    for at in range(len(data)):
        for _ in range(3):
            damaged = bytearray(data)
            damaged[at] ^= 1 << chance.randrange(8)
            try:
                parse_groups(bytes(damaged), "f")
            except FormatError as error:
                assert str(error).startswith("f: ")  # noqa: PT017


def _group(name: bytes, *ranks: int) -> bytes:
    return encoded(1, 2, encoded(1, 2, name) + encoded(2, 2, encoded(1, 2, b"".join(map(varint, ranks)))))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "an empty file"),
        (_group(b"2-1", 0, 1), "ckpt_restore_rank_list is missing"),
        (_group(b"3-1", 0, 1) + encoded(2, 2, b""), "'3-1': its name says 3 ranks, and it has 2"),
        (_group(b"2-1", 0, 1) * 2 + encoded(2, 2, b""), "'2-1': it is there twice"),
        (_group(b"2-1", 1, 1) + encoded(2, 2, b""), "is in the list .* twice"),
        (encoded(2, 2, encoded(1, 0, 1 << 63)), "out of range"),
        (encoded(1, 2, encoded(2, 2, b"")) + encoded(2, 2, b""), "group_name is missing"),
    ],
)
def test_what_is_no_group_file_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        parse_groups(data, "some name")
    assert str(caught.value).startswith("some name: ")


def test_groups_without_a_size_in_their_name_and_new_fields_are_kept() -> None:
    file = parse_groups(_group(b"world", 0, 1) + encoded(2, 2, encoded(1, 0, 0)) + encoded(7, 0, 1), "f")
    assert file.groups == {"world": (0, 1)}
    assert file.restore_ranks == (0,)
    assert [field.number for field in file.unknown] == [7]
