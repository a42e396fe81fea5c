"""How a step survives the loss of a node, and what that costs: the modes side by side, and the cheapest. Pure.

    replicas   every rank saves all it holds: windows are filled with replicas, nothing is sent (but small states)
    peer       each byte is saved once, and copied to `copies` other nodes
    parity     each byte is saved once; groups of nodes keep the exclusive or of their shards: as much is sent as for
               one copy (every byte leaves its node once), less memory is needed, one loss a group is survived
    none       each byte is saved once, and is lost with its node
    auto       the cheapest of the first three that survives the loss of any one node

The cost of a mode is the larger of two shares: load / window bytes of the fullest rank, and bytes to send / bytes that
can be sent, of the busiest node, per step. Over 1 a snapshot at every step does not fit, and takes as many steps.

Where windows or network are not known (nothing measured yet), costs of replicas and of copies cannot be compared. Of
those that do not cost more than a step, as far as is known, "auto" then takes replicas where they need no more memory
than copies, else copies. Peer and parity send the same: peer goes first, since a lost node is read back from one other
and not from a group; parity is for nodes without the memory for copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from baftd.checkpoint.layout import Layout
from baftd.checkpoint.savers import Assignment, divide, everyone
from baftd.checkpoint.slot_memory import NodeMemory, memory_per_node, room_problem, said_bytes
from baftd.checkpoint.survival import FixedRedundancy, Protection, Survival, parity_groups, ring, survivability
from baftd.errors import UsageError

__all__ = [
    "MODES",
    "Choice",
    "FixedRedundancy",
    "NodeMemory",
    "Offer",
    "Protection",
    "Redundancy",
    "Survival",
    "choose",
    "memory_per_node",
    "parity_groups",
    "ring",
    "room_problem",
    "survivability",
]

Redundancy: TypeAlias = Literal["replicas", "peer", "parity", "none", "auto"]

MODES: tuple[FixedRedundancy, ...] = ("replicas", "peer", "parity", "none")


@dataclass(frozen=True)
class Offer:
    """One mode for one job.

    window_fill: load / window bytes of the fullest rank; infinite where a rank without a window must save something;
        0 where windows are not known.
    network_bytes: that the busiest node sends a step. network_fill: divided by what it can send; 0 if not known.
    survives: the loss of any one node leaves the step whole in memory. problem: why the mode will not do; empty if it
    will.
    """

    mode: FixedRedundancy
    assignment: Assignment
    protection: Protection
    survival: Survival
    memory: Mapping[str, NodeMemory]
    window_fill: float
    network_bytes: int
    network_fill: float
    problem: str

    @property
    def survives(self) -> bool:
        """Whether the loss of any one node leaves the step whole in memory."""
        return self.survival.survives_any(1)

    @property
    def cost(self) -> float:
        """The larger of both fills: 0.5 leaves half of the scarcer resource free, 2 takes two steps a snapshot."""
        return max(self.window_fill, self.network_fill)

    @property
    def node_memory(self) -> int:
        """Bytes that the fullest node needs."""
        return max((one.total for one in self.memory.values()), default=0)


@dataclass(frozen=True)
class Choice:
    """The mode to use and why. `offers`: all modes, for comparison, in the order of `MODES`. why: a few words; reason:
    with the costs that were compared."""

    offer: Offer
    offers: tuple[Offer, ...]
    why: str
    reason: str

    @property
    def mode(self) -> FixedRedundancy:
        """The mode to use."""
        return self.offer.mode


def choose(
    layout: Layout,
    node_of_rank: Mapping[int, str],
    *,
    wanted: Redundancy = "auto",
    window_bytes: Mapping[int, int] | None = None,
    network_bytes: int | None = None,
    memory: int | None = None,
    durable: bool = False,
    copies: int = 1,
    group: int = 4,
    small_copies: int = 1,
    small_room: int = 1 << 20,
    most: int = 2,
    slots: int | None = None,
    before: Mapping[str, NodeMemory] | None = None,
) -> Choice:
    """The offers of all modes, and the one that is wanted; of "auto" the cheapest that survives any one node's loss.

    window_bytes: that each rank can copy in its windows in a step; None: not known. network_bytes: that a node can
    send a step; 0: nothing but small states; None: not known. memory: bytes of shared memory that each node may use;
    None: any. copies, group, small_copies: see `Protection.of`. most: sets of lost nodes that the survivals look at.
    slots: of each rank, see `slots_per_rank`. before: what the running generation takes of each node's memory.

    Where nothing survives the loss of a node, "auto" takes "none" and the reason says why. Raises UsageError for an
    unknown mode, and what `divide` and `survivability` raise.
    """
    if wanted != "auto" and wanted not in MODES:
        raise UsageError(f"redundancy {wanted!r} is unknown.", hint=f"Choose one of {', '.join(MODES)} or auto.")
    if copies < 1 or small_copies < 0:
        raise UsageError(f"{copies} copies on other nodes make no sense; 1 or more do.")
    nodes = sorted(set(node_of_rank.values()))
    assignments = {"all": everyone(layout, window_bytes), "divided": divide(layout, window_bytes)}
    offers = []
    for mode in MODES:
        assignment = assignments["all" if mode == "replicas" else "divided"]
        protection = Protection.of(mode, nodes, copies=copies, group=group, small_copies=small_copies)
        survival = survivability(assignment, node_of_rank, protection, most=max(most, 1), durable=durable)
        need = memory_per_node(
            assignment, node_of_rank, protection, durable=durable, small_room=small_room, slots=slots, before=before
        )
        sent = _sent(assignment, node_of_rank, protection)
        offers.append(
            Offer(
                mode,
                assignment,
                protection,
                survival,
                need,
                window_fill=_window_fill(assignment),
                network_bytes=sent,
                network_fill=0.0 if network_bytes is None or not sent else _ratio(sent, network_bytes),
                problem=_problem(mode, survival, need, memory, sent, network_bytes),
            )
        )
    if wanted != "auto":
        offer = next(one for one in offers if one.mode == wanted)
        but = f"; but {offer.problem}" if offer.problem else ""
        return Choice(offer, tuple(offers), "as asked for", f"as asked for{but}")
    good = [offer for offer in offers if not offer.problem and offer.mode != "none"]
    if not good:
        why = "nothing survives the loss of a node"
        problems = "; ".join(f"{offer.mode}: {offer.problem}" for offer in offers if offer.mode != "none")
        return Choice(offers[-1], tuple(offers), why, f"{why} ({problems})")
    best, why = _best(good, window_bytes is not None, network_bytes is not None)
    costs = ", ".join(_said_cost(offer, window_bytes is not None, network_bytes is not None) for offer in good)
    late = f"; more than a step holds: a snapshot takes {best.cost:.1f} steps" if best.cost > 1 else ""
    return Choice(best, tuple(offers), why, f"{why} ({costs}){late}")


def _best(good: list[Offer], windows: bool, network: bool) -> tuple[Offer, str]:
    """The mode to take of those that survive a node's loss, and why. windows, network: whether they are known."""
    cheapest = min(good, key=lambda offer: (offer.cost, MODES.index(offer.mode)))
    why = "the cheapest that survives the loss of any one node"
    fitting = [offer for offer in good if offer.cost <= 1]
    replicas = next((offer for offer in fitting if offer.mode == "replicas"), None)
    copies = next((offer for offer in fitting if offer.mode != "replicas"), None)
    if (windows and network) or replicas is None or copies is None:
        return cheapest, why
    unknown = " and ".join(what for what, known in (("windows", windows), ("network", network)) if not known)
    unknown += " is" if windows else " are"
    if replicas.node_memory <= copies.node_memory:
        why = f"survives the loss of any one node in no more memory than {copies.mode}"
        return replicas, f"{why}, and sends nothing; {unknown} not known"
    return copies, f"survives the loss of any one node in less memory than replicas; {unknown} not known"


def _said_cost(offer: Offer, windows: bool, network: bool) -> str:
    copied = f"{offer.window_fill:.0%} of the windows"
    if not windows:
        copied = f"{said_bytes(offer.assignment.bytes_of(offer.assignment.fullest))} of a rank's windows"
    sent = f"{offer.network_fill:.0%} of the network"
    if not network:
        sent = f"{said_bytes(offer.network_bytes)} of a node's network" if offer.network_bytes else "no network"
    return f"{offer.mode} {copied} and {sent}"


def _problem(
    mode: FixedRedundancy,
    survival: Survival,
    need: Mapping[str, NodeMemory],
    memory: int | None,
    sent: int,
    network_bytes: int | None,
) -> str:
    if len(survival.nodes) < 2:
        return "" if mode == "none" else "there is only one node"
    if sent and network_bytes == 0:
        return "the network carries nothing but small states"
    short = "" if memory is None else room_problem(need, memory)
    if short:
        return short
    if mode != "none" and not survival.survives_any(1):
        alone = next(one for one in (*survival.breaking, *survival.small) if len(one) == 1)
        what = "ranges that no other node holds" if alone in survival.breaking else "small states without a copy"
        return f"node {next(iter(alone))} has {what}"
    return ""


def _sent(assignment: Assignment, node_of_rank: Mapping[int, str], protection: Protection) -> int:
    """Bytes of tensors that the busiest node sends a step. Small states are not counted."""
    loads: dict[str, int] = defaultdict(int)
    for rank, nbytes in enumerate(assignment.loads):
        loads[node_of_rank[rank]] += nbytes
    times = {node: len(protection.peers.get(node, ())) for node in loads}
    if protection.mode == "parity":
        times = {node: int(len(protection.group_of(node)) > 1) for node in loads}
    return max((loads[node] * times[node] for node in loads), default=0)


def _window_fill(assignment: Assignment) -> float:
    if assignment.capacity is None:
        return 0.0
    return float("inf") if assignment.windowless else assignment.peak


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("inf")
