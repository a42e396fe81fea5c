"""MindSpore's group-info files, read without MindSpore: communication groups, and who can restore whom.

A rank writes one with `GROUP_INFO_FILE` in its environment, or `group_ckpt_save_file`: protobuf
`mindspore.straspb.ParallelGroupMap` (node_strategy.proto of MindSpore 2.10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baftd.errors import FormatError
from baftd.formats.protobuf import Field, read_message

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GroupFile", "parse_groups"]

MAX_FILE = 64 << 20
MAX_NAME = 1024
MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class GroupFile:
    """The groups of one rank.

    groups: ranks by group name ("<number of ranks>-<hash>"), in the order of the group.
    restore_ranks: ranks whose checkpoint can stand in for this rank's, itself among them (`ckpt_restore_rank_list`).
    unknown: fields that this version does not know.
    """

    source: str
    groups: Mapping[str, tuple[int, ...]]
    restore_ranks: tuple[int, ...]
    unknown: tuple[Field, ...]


def parse_groups(data: bytes, source: str) -> GroupFile:
    """Parse the content of a group file. `source` names it in errors.

    Raises FormatError, naming file and place, for anything that is not a whole and consistent group file.
    """
    if not data:
        raise FormatError(f"{source}: an empty file is no group file.")
    if len(data) > MAX_FILE:
        raise FormatError(f"{source}: {len(data)} bytes are too many for a group file ({MAX_FILE} at most).")
    message = read_message(data, source, "ParallelGroupMap")
    groups: dict[str, tuple[int, ...]] = {}
    for item in message.many(1, "parallel_group_item"):
        name = item.text(1, "group_name", MAX_NAME)
        ranks = item.one(2, "parallel_group_ranks").numbers(1, "dim", MAX_RANKS)
        problem = _problem(ranks)
        if name in groups:
            problem = "it is there twice"
        size = name.partition("-")[0]
        if not problem and "-" in name and size.isdecimal() and len(size) < 8 and int(size) != len(ranks):
            problem = f"its name says {size} ranks, and it has {len(ranks)}"
        if problem:
            item.refuse(f"group {name!r}: {problem}")
        groups[name] = ranks
    restore = message.one(2, "ckpt_restore_rank_list")
    restore_ranks = restore.numbers(1, "dim", MAX_RANKS)
    problem = _problem(restore_ranks)
    if problem:
        restore.refuse(problem)
    return GroupFile(source, groups, restore_ranks, message.unknown(frozenset({1, 2})))


def _problem(ranks: tuple[int, ...]) -> str:
    """What is wrong with a list of ranks; empty if nothing is."""
    if len(set(ranks)) != len(ranks):
        return f"a rank is in the list {list(ranks)[:64]} twice"
    if any(rank >= MAX_RANKS for rank in ranks):
        return f"rank {max(ranks)} is out of range"
    return ""
