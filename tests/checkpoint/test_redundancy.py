"""Which mode survives a node's loss at what cost, and the memory that slots need."""

from __future__ import annotations

import pytest

from baftd.checkpoint.image import plan_image
from baftd.checkpoint.layout import Layout, LayoutBuilder
from baftd.checkpoint.ranges import Box
from baftd.checkpoint.redundancy import MODES, Choice, Offer, choose
from baftd.checkpoint.savers import divide, everyone
from baftd.checkpoint.shard import TensorEntry
from baftd.checkpoint.slot_memory import NodeMemory, memory_per_node, room_problem, said_bytes, slot_bytes
from baftd.checkpoint.survival import Protection
from baftd.errors import UsageError

MIB = 1 << 20
NODES = {rank: f"node{rank // 2}" for rank in range(8)}
"""Four nodes of two ranks."""


def data_parallel(rows: int = 4096, *, sharded: bool = False) -> Layout:
    """Eight replicas of 4 MiB; with `sharded` 8 MiB of moments are cut among them."""
    builder = LayoutBuilder(8)
    builder.add("model", "F32", (rows, 256), {rank: [((0, rows), (0, 256))] for rank in range(8)})
    if sharded:
        cut = rows // 4
        held: dict[int, list[Box]] = {rank: [((rank * cut, rank * cut + cut), (0, 256))] for rank in range(8)}
        builder.add("moments", "F32", (rows * 2, 256), held)
    return builder.build()


def offer(choice: Choice, mode: str) -> Offer:
    return next(one for one in choice.offers if one.mode == mode)


def windows(nbytes: int) -> dict[int, int]:
    return dict.fromkeys(range(8), nbytes)


def test_replicas_while_windows_hold_them() -> None:
    choice = choose(data_parallel(), NODES, window_bytes=windows(8 * MIB), network_bytes=MIB)
    assert choice.mode == "replicas"
    assert [one.mode for one in choice.offers] == list(MODES)
    replicas, peer = offer(choice, "replicas"), offer(choice, "peer")
    assert (replicas.window_fill, replicas.network_fill, replicas.cost) == (0.5, 0.0, 0.5)
    assert peer.window_fill == 0.0625
    assert peer.network_bytes == MIB  # a quarter of the model lies on each node
    assert peer.network_fill == 1.0
    assert choice.reason.startswith(
        "the cheapest that survives the loss of any one node (replicas 50% of the windows and 0% of the network, "
        "peer 6% of the windows and 100% of the network"
    )


def test_the_network_where_windows_are_small() -> None:
    choice = choose(data_parallel(), NODES, window_bytes=windows(MIB), network_bytes=100 * MIB)
    assert choice.mode == "peer"
    assert choice.offer.assignment.mode == "divided"
    assert choice.offer.survives
    assert choice.offer.cost == 0.5
    late = choose(data_parallel(), NODES, window_bytes=windows(MIB // 4), network_bytes=100 * MIB)
    assert late.mode == "peer"
    assert late.reason.endswith("more than a step holds: a snapshot takes 2.0 steps")


def test_parity_where_memory_is_scarce() -> None:
    """Both send the same; parity keeps a third of what a copy keeps, in groups of four."""
    layout = data_parallel(16384, sharded=True)
    roomy = choose(layout, NODES, network_bytes=1 << 40)
    assert roomy.mode == "peer"
    peer, parity = offer(roomy, "peer"), offer(roomy, "parity")
    assert peer.network_bytes == parity.network_bytes
    need = max(one.total for one in parity.memory.values())
    assert need < max(one.total for one in peer.memory.values())
    choice = choose(layout, NODES, network_bytes=1 << 40, memory=need)
    assert choice.mode == "parity"
    problem = offer(choice, "peer").problem
    assert problem.startswith("node node")
    assert "own slots" in problem
    assert "copies of other nodes" in problem


def test_a_shard_that_only_one_rank_has_needs_the_network() -> None:
    choice = choose(data_parallel(sharded=True), NODES)
    assert choice.mode == "peer"
    assert offer(choice, "replicas").problem.endswith("has ranges that no other node holds")
    alone = choose(data_parallel(sharded=True), NODES, network_bytes=0)
    assert alone.mode == "none"
    assert alone.reason.startswith("nothing survives the loss of a node (replicas: node node0 has ranges")
    assert "peer: the network carries nothing but small states" in alone.reason


def test_costs_that_are_not_known_are_not_compared() -> None:
    """Replicas on four nodes copy eight times as much: nobody knows whether it fits, but it takes memory."""
    for window, network in ((None, None), (None, MIB), (8 * MIB, None)):
        choice = choose(data_parallel(), NODES, window_bytes=windows(window) if window else None, network_bytes=network)
        assert choice.mode == "peer"
        assert choice.why.startswith("survives the loss of any one node in less memory than replicas; ")
        assert ("of the windows" in choice.reason) == (window is not None)
        assert ("of the network" in choice.reason) == (network is not None)
    assert choose(data_parallel(), NODES).reason.endswith(
        "; windows and network are not known (replicas 4.0 MiB of a rank's windows and no network, peer 512 KiB of a "
        "rank's windows and 1.0 MiB of a node's network, parity 512 KiB of a rank's windows and 1.0 MiB of a node's "
        "network)"
    )
    assert choose(data_parallel(), NODES, window_bytes=windows(4 * MIB)).why.endswith("; network is not known")
    assert choose(data_parallel(), NODES, network_bytes=2 * MIB).why.endswith("; windows are not known")
    # A network that is known to be too slow for every step.
    assert choose(data_parallel(), NODES, network_bytes=MIB // 2).mode == "replicas"
    # Windows that are known to be too small for replicas.
    slow = choose(data_parallel(), NODES, window_bytes=windows(2 * MIB))
    assert (slow.mode, slow.why) == ("peer", "the cheapest that survives the loss of any one node")


def test_replicas_where_they_take_no_more_memory() -> None:
    """Two copies of each range on two nodes: copies on the other node would need as much."""
    builder = LayoutBuilder(8)
    for stage in range(4):
        held: dict[int, list[Box]] = {rank: [((0, 4096), (0, 256))] for rank in (stage, stage + 4)}
        builder.add(f"stage{stage}", "F32", (4096, 256), held)
    choice = choose(builder.build(), {rank: f"node{rank // 4}" for rank in range(8)}, small_room=0)
    assert choice.mode == "replicas"
    assert choice.why == (
        "survives the loss of any one node in no more memory than peer, and sends nothing; windows and network are "
        "not known"
    )


def test_the_busiest_node_is_what_counts() -> None:
    """Three nodes that have 1, 2 and 4 MiB for themselves; one of three nodes without anybody to share with."""
    builder = LayoutBuilder(3)
    for rank in range(3):
        builder.own("mine", "F32", (MIB // 4 << rank,), rank)
    choice = choose(builder.build(), {0: "a", 1: "b", 2: "c"}, copies=2, group=2)
    assert {one.mode: one.network_bytes for one in choice.offers} == {
        "replicas": 0,
        "peer": 2 * 4 * MIB,
        "parity": 4 * MIB,
        "none": 0,
    }
    alone = choose(builder.build(), dict.fromkeys(range(3), "a"))
    assert [one.network_bytes for one in alone.offers] == [0, 0, 0, 0]


def test_a_step_that_just_fits_is_not_late() -> None:
    full = choose(data_parallel(), NODES, window_bytes=windows(4 * MIB), network_bytes=0)
    assert (full.mode, full.offer.cost) == ("replicas", 1.0)
    assert "more than a step holds" not in full.reason


def test_slots_of_the_settings() -> None:
    layout = data_parallel()
    each = slot_bytes(divide(layout), 0, MIB)
    for mode in MODES:
        six = choose(layout, NODES, wanted=mode, slots=6).offer
        assert six.memory["node0"].slots == 2 * 6 * slot_bytes(six.assignment, 0, MIB)
    peer = choose(layout, NODES, wanted="peer", slots=2, durable=True).offer.memory["node0"]
    assert peer == NodeMemory(slots=2 * 2 * each, received=2 * 2 * each)


def test_small_states_need_a_copy_too() -> None:
    choice = choose(data_parallel(), NODES, small_copies=0)
    assert offer(choice, "replicas").problem == "node node0 has small states without a copy"
    assert choice.mode == "peer"  # they travel with the shard


def test_one_node_cannot_survive_itself() -> None:
    choice = choose(data_parallel(), dict.fromkeys(range(8), "only"))
    assert choice.mode == "none"
    assert choice.reason.count("there is only one node") == 3
    assert not choice.offer.survives


def test_what_is_asked_for_is_done_and_its_weakness_named() -> None:
    assert choose(data_parallel(), NODES, wanted="parity").mode == "parity"
    weak = choose(data_parallel(sharded=True), NODES, wanted="replicas")
    assert weak.mode == "replicas"
    assert weak.reason.startswith("as asked for; but node node0 has ranges")
    assert choose(data_parallel(), NODES, wanted="none").reason == "as asked for"
    with pytest.raises(UsageError, match="redundancy 'mirror' is unknown"):
        choose(data_parallel(), NODES, wanted="mirror")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="0 copies"):
        choose(data_parallel(), NODES, copies=0)


def test_a_rank_without_a_window_costs_infinitely_much() -> None:
    layout = data_parallel()
    capacity = {**windows(8 * MIB), 3: 0}
    choice = choose(layout, NODES, window_bytes=capacity, network_bytes=100 * MIB)
    assert offer(choice, "replicas").cost == float("inf")
    assert choice.mode == "peer"  # divided, rank 3 need not save anything
    assert choice.offer.assignment.loads[3] == 0


# ---------------------------------------------------------------- memory


def test_slots_and_places() -> None:
    layout = data_parallel()
    every, once = everyone(layout), divide(layout)
    room = MIB
    all_, shared = slot_bytes(every, 0, room), slot_bytes(once, 0, room)
    replicas = memory_per_node(every, NODES, Protection.of("replicas", NODES.values()))
    assert replicas["node1"] == NodeMemory(slots=2 * 3 * all_, small=2 * 2 * (MIB + 4096))
    durable = memory_per_node(every, NODES, Protection.of("none", NODES.values()), durable=True)
    assert durable["node1"].parts() == (("own slots", 2 * 4 * all_),)
    peer = memory_per_node(once, NODES, Protection.of("peer", NODES.values(), copies=2))
    assert peer["node0"] == NodeMemory(slots=2 * 4 * shared, received=2 * 2 * 2 * shared)
    parity = memory_per_node(once, NODES, Protection.of("parity", NODES.values(), group=4, small_copies=0))
    assert parity["node0"].parity == 2 * -(-2 * shared // 3 // 4096) * 4096
    assert parity["node0"].total == parity["node0"].slots + parity["node0"].parity


def test_both_generations_must_fit_while_laid_out_anew() -> None:
    protection = Protection.of("none", NODES.values())
    first = memory_per_node(divide(data_parallel()), NODES, protection)
    second = memory_per_node(divide(data_parallel(8192)), NODES, protection, before=first)
    assert second["node0"].before == first["node0"].total
    assert second["node0"].total == second["node0"].slots + first["node0"].slots
    third = memory_per_node(divide(data_parallel()), NODES, protection, before=second)
    assert third["node0"].before == second["node0"].slots  # the first is gone by then
    moved = memory_per_node(divide(data_parallel()), dict.fromkeys(range(8), "new"), protection, before=first)
    assert moved["node3"] == NodeMemory(before=first["node3"].slots)


@pytest.mark.parametrize(
    ("nbytes", "needed", "there"),
    [
        (0, "0 KiB", "0 KiB"),
        (1, "1 KiB", "0 KiB"),
        (1025, "2 KiB", "1 KiB"),
        (MIB - 1, "1024 KiB", "1023 KiB"),
        (MIB, "1.0 MiB", "1.0 MiB"),
        (1 << 30, "1.0 GiB", "1.0 GiB"),
        ((1 << 30) + 1, "1.1 GiB", "1.0 GiB"),
    ],
)
def test_sizes_are_rounded_to_the_safe_side(nbytes: int, needed: str, there: str) -> None:
    assert (said_bytes(nbytes), said_bytes(nbytes, up=False)) == (needed, there)


def test_too_little_room_is_told_with_the_number() -> None:
    memory = {"a": NodeMemory(slots=3 * MIB, received=2 * MIB), "b": NodeMemory(slots=MIB)}
    assert room_problem(memory, 5 * MIB) == ""
    assert room_problem(memory, 5 * MIB - 1) == (
        "node a needs own slots 3.0 MiB + copies of other nodes 2.0 MiB = 5.0 MiB of shared memory, and 4.9 MiB are "
        "there"
    )
    assert room_problem(memory, 1000) == (
        "node a needs own slots 3.0 MiB + copies of other nodes 2.0 MiB = 5.0 MiB of shared memory, and 0 KiB are "
        "there (2 of 2 nodes do not have enough)"
    )
    assert room_problem({}, 0) == ""


@pytest.mark.parametrize(
    ("count", "prefix"),
    [
        *((count, "optim.0.model.stage3") for count in (1, 7, 300, 3000)),
        *((300, odd * 40) for odd in ("\u91cd\u307f", '"\\', "\x01", "\U0001f600")),
    ],
    ids=str,
)
def test_the_estimate_of_a_slot_is_above_the_image_and_near_it(count: int, prefix: str) -> None:
    builder = LayoutBuilder(4)
    entries = []
    for number in range(count):
        name = f"{prefix}.decoder.layers.{number}.self_attention.linear_qkv.weight.exp_avg_sq"
        rows = 1024 + number % 3
        held: dict[int, list[Box]] = {rank: [((rank * rows, rank * rows + rows), (0, 1001))] for rank in range(4)}
        builder.add(name, "F32", (4 * rows, 1001), held)
        entries.append(
            TensorEntry(name, "F32", (rows, 1001), rows * 4004, "stable", (4 * rows, 1001), tuple(held[3][0]))
        )
    layout = builder.build()
    for made, plan, said in ((everyone(layout), b"", []), (divide(layout), b"p" * 16, entries)):
        image = plan_image(entries, MIB, job="j" * 64, rank=3, world=4096, plan=plan, held=said)
        estimate = slot_bytes(made, 3, MIB)
        assert image.capacity <= estimate - 4096
        assert estimate - 4096 - image.capacity <= 4096 * 2 + (200 + 8 * len(prefix)) * count * (2 if plan else 1)
