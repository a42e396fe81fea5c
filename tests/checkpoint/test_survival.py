"""What lost nodes break: the smallest sets against all sets, by a simulation of bytes that really move and vanish."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.layout import Layout, LayoutBuilder
from baftd.checkpoint.savers import Assignment, divide, everyone
from baftd.checkpoint.survival import FixedRedundancy, Protection, Survival, parity_groups, ring, survivability
from baftd.errors import UsageError

FIXED: list[FixedRedundancy] = ["replicas", "peer", "parity", "none"]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Layout, dict[int, str]]:
    """Replicated ranges on random ranks, and random nodes for these."""
    world = draw(st.integers(1, 7))
    builder = LayoutBuilder(world)
    for number in range(draw(st.integers(1, 4))):
        ranks = draw(st.sets(st.integers(0, world - 1), min_size=1))
        builder.add(f"t{number}", "F32", (50,), {rank: [((0, 50),)] for rank in ranks})
    node = st.sampled_from(["a", "b", "c", "d", "e"])
    return builder.build(), {rank: draw(node) for rank in range(world)}


class Cluster:
    """Tokens that stand for the ranges and small states in each node's memory, and what is left of them."""

    def __init__(self, made: Assignment, node_of_rank: dict[int, str], protection: Protection) -> None:
        self.nodes = sorted(set(node_of_rank.values()))
        self.protection = protection
        self.shards: dict[str, set[str]] = {node: set() for node in self.nodes}
        self.wanted: set[str] = set()
        for number, one in enumerate(made.classes):
            for rank in one.taken:
                token = f"class {number}" if made.mode == "all" else f"class {number} of rank {rank}"
                self.shards[node_of_rank[rank]].add(token)
                self.wanted.add(token)
        for rank, node in node_of_rank.items():
            self.shards[node].add(f"small {rank}")
            self.wanted.add(f"small {rank}")

    def left(self, lost: set[str], *, own: bool = False) -> set[str]:
        """Tokens that can be had without the lost nodes; `own`: from own slots alone."""
        there: set[str] = set()
        for node in self.nodes:
            if node not in lost:
                there |= self.shards[node]
                continue
            if own:
                continue
            small = {token for token in self.shards[node] if token.startswith("small")}
            for peer in self.protection.peers.get(node, ()):
                there |= self.shards[node] if peer not in lost else set()
            for peer in self.protection.small_copies.get(node, ()):
                there |= small if peer not in lost else set()
            for group in self.protection.groups:
                if node in group and len(group) > 1 and sum(other in lost for other in group) == 1:
                    there |= self.shards[node]
        return there

    def broken(self, lost: set[str]) -> bool:
        return not self.wanted <= self.left(lost)


def made_by(mode: FixedRedundancy, layout: Layout) -> Assignment:
    return everyone(layout) if mode == "replicas" else divide(layout)


@given(jobs(), st.sampled_from(FIXED), st.integers(1, 2), st.integers(2, 3), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_the_smallest_sets_say_all(
    job: tuple[Layout, dict[int, str]], mode: FixedRedundancy, copies: int, group: int, small_copies: int
) -> None:
    layout, node_of_rank = job
    made = made_by(mode, layout)
    nodes = sorted(set(node_of_rank.values()))
    protection = Protection.of(mode, nodes, copies=copies, group=group, small_copies=small_copies)
    survival = survivability(made, node_of_rank, protection, most=len(nodes))
    cluster = Cluster(made, node_of_rank, protection)
    sets = [set(lost) for size in range(len(nodes) + 1) for lost in combinations(nodes, size)]
    broken = [lost for lost in sets if cluster.broken(lost)]
    smallest = {frozenset(lost) for lost in broken if not any(other < lost for other in broken)}
    said = {*survival.breaking, *survival.small}
    assert smallest == {one for one in said if not any(other < one for other in said)}
    for lost in sets:
        whole_in_memory = cluster.wanted <= cluster.left(lost, own=True)
        expected = None if lost in broken else "memory" if whole_in_memory else "peer"
        assert survival.tier(lost) == expected
    for count in range(len(nodes) + 1):
        assert survival.survives_any(count) == all(len(lost) != count for lost in broken)


def test_a_durable_tier_is_what_is_left() -> None:
    builder = LayoutBuilder(2)
    builder.own("w", "F32", (4,), 0)
    survival = survivability(
        divide(builder.build()), {0: "a", 1: "b"}, Protection.of("none", "ab"), durable=True, most=1
    )
    assert survival.tier(["a"]) == "durable"
    assert survival.tier([]) == "memory"
    assert survival.breaking == (frozenset("a"),)
    assert survival.small == (frozenset("a"), frozenset("b"))
    with pytest.raises(UsageError, match="only up to 1"):
        survival.survives_any(2)


def big(mode: FixedRedundancy, **placement: int) -> Survival:
    """64 nodes of 8 ranks: 8-fold tensor parallelism within a node, data parallelism over groups of 4 nodes."""
    world = 512
    builder = LayoutBuilder(world)
    for stage in range(16):
        held = {stage * 32 + d * 8 + t: [((t * 8, t * 8 + 8),)] for d in range(4) for t in range(8)}
        builder.add(f"stage{stage}", "F32", (64,), held)
    node_of_rank = {rank: f"n{rank // 8:02}" for rank in range(world)}
    layout = builder.build()
    protection = Protection.of(mode, node_of_rank.values(), **placement)
    return survivability(made_by(mode, layout), node_of_rank, protection, most=4)


def test_large_jobs_are_not_enumerated() -> None:
    replicas = big("replicas", small_copies=3)
    assert len(replicas.breaking) == 16  # the four nodes of each stage
    assert replicas.breaking[0] == {"n00", "n01", "n02", "n03"}
    assert replicas.survives_any(3)
    assert not replicas.survives_any(4)
    assert replicas.tier({"n00", "n05"}) == "peer"  # their small states
    parity = big("parity", group=8)
    assert len(parity.breaking) == 8 * 28  # any two of a group
    assert parity.survives_any(1)
    assert parity.tier({"n00", "n63"}) == "peer"
    assert parity.tier({"n00", "n07"}) is None
    peer = big("peer", copies=2)
    assert len(peer.breaking) == 64
    assert peer.survives_any(2)
    assert peer.breaking[0] == {"n00", "n01", "n02"}


def test_a_set_that_contains_a_smaller_one_says_nothing_new() -> None:
    builder = LayoutBuilder(20)
    for rank in range(12):
        builder.own("mine", "F32", (4,), rank)
    for number, ranks in enumerate([(0, 1), (11, 13), (14, 15), (14, 15, 16), (14, 17, 18)]):
        builder.add(f"shared{number}", "F32", (4,), {rank: [((0, 4),)] for rank in ranks})
    node_of_rank = {rank: f"n{rank:02}" for rank in range(20)}
    survival = survivability(everyone(builder.build()), node_of_rank, Protection.of("none", ()), most=3)
    alone = [frozenset((f"n{rank:02}",)) for rank in range(12)]
    assert survival.breaking == (*alone, frozenset(("n14", "n15")), frozenset(("n14", "n17", "n18")))


def spread_over(world: int) -> Layout:
    builder = LayoutBuilder(world)
    for rank in range(world):
        builder.own("w", "F32", (4,), rank)
    return builder.build()


def test_many_parity_groups_are_found_at_once() -> None:
    nodes = [f"n{number:05}" for number in range(20_000)]
    protection = Protection.of("parity", nodes, group=4)
    assert [protection.group_of(node)[0] for node in nodes[::4]] == nodes[::4]


def test_placement() -> None:
    assert ring(["a", "b", "c"], 2) == {"a": ("b", "c"), "b": ("c", "a"), "c": ("a", "b")}
    assert ring(["a", "b"], 5) == {"a": ("b",), "b": ("a",)}
    assert ring(["a"], 1) == {"a": ()}
    assert ring(["a", "b", "c"]) == {"a": ("b",), "b": ("c",), "c": ("a",)}
    backwards = {rank: f"n{4 - rank}" for rank in range(5)}
    spread = survivability(divide(spread_over(5)), backwards, Protection.of("none", ()))
    assert spread.nodes == ("n0", "n1", "n2", "n3", "n4")
    assert parity_groups(list("abcdefghij"), 4) == (tuple("abc"), tuple("def"), tuple("ghij"))
    assert parity_groups(list("abcde"), 4) == (tuple("ab"), tuple("cde"))
    assert parity_groups(list("abc"), 2) == (tuple("abc"),)  # nobody is left alone
    assert parity_groups(list("abcde"), 2) == (tuple("ab"), tuple("cde"))
    assert parity_groups(["a"], 2) == (("a",),)
    assert Protection.of("parity", "a", group=4).group_of("a") == ("a",)
    with pytest.raises(UsageError, match="a parity group of 1"):
        parity_groups(["a"], 1)
    builder = LayoutBuilder(2)
    builder.own("w", "F32", (4,), 0)
    with pytest.raises(UsageError, match="node of rank 1 is not known"):
        survivability(divide(builder.build()), {0: "a"}, Protection.of("none", "a"))
