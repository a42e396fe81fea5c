"""What `baftd plan` found: worked out once, then printed for people or for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import ceil, comb, isinf
from typing import TYPE_CHECKING, Any

from baftd.cli.plan_rows import (
    SaverRow,
    StageRow,
    merged_saver_rows,
    merged_stage_rows,
    saver_rows,
    share_rows,
    stage_rows,
    stages_of,
)
from baftd.cli.plan_sources import Source
from baftd.cli.render import print_table, say, size
from baftd.errors import NoRoom

if TYPE_CHECKING:
    from baftd.checkpoint.commit_plan import CommitPlan
    from baftd.checkpoint.redundancy import Choice, Offer, Redundancy
    from baftd.checkpoint.savers import Assignment

__all__ = ["Plan", "document", "print_plan"]

_SETS_IN_JSON = 1000
_SETS_SHOWN = 3
_ONE_NODE = "this version runs jobs of one node: what is sent to other nodes here is planned for a later one"
_FROM = {
    "replicas": "from the other replicas",
    "peer": "from copies on other nodes",
    "parity": "from the parity of its group",
    "none": "from memory",
}


@dataclass(frozen=True)
class Plan:
    """A layout, the choice that was made for it, and what is said of it."""

    source: Source
    nodes: tuple[str, ...]
    choice: Choice
    commit: CommitPlan
    divided: Assignment
    wanted: Redundancy
    window_bytes: int | None
    network_bytes: int | None
    node_memory: int | None
    lose: int
    stages: list[StageRow]
    savers: list[SaverRow]
    nodes_are: str
    """Said behind their number: that they are a guess."""

    @staticmethod
    def of(
        source: Source,
        nodes: tuple[str, ...],
        *,
        wanted: Redundancy,
        window_bytes: int | None,
        network_bytes: int | None,
        node_memory: int | None,
        durable: bool,
        copies: int,
        group: int,
        lose: int,
        slots: int | None = None,
        nodes_are: str = "",
    ) -> Plan:
        """Choose a mode, prove that it saves every byte, and count. Sizes are bytes: window_bytes of each rank a step,
        network_bytes of each node a step, node_memory of each node; None where nothing is known. slots: of each rank,
        where they are set to a number."""
        from baftd.checkpoint.commit_plan import CommitPlan
        from baftd.checkpoint.redundancy import choose

        layout = source.layout
        choice = choose(
            layout,
            dict(enumerate(nodes)),
            wanted=wanted,
            window_bytes=None if window_bytes is None else dict.fromkeys(range(layout.world), window_bytes),
            network_bytes=network_bytes,
            memory=node_memory,
            durable=durable,
            copies=copies,
            group=group,
            small_room=max(source.small_bytes.values(), default=1 << 20),
            most=max(1, lose),
            slots=slots,
        )
        divided = next(offer.assignment for offer in choice.offers if offer.assignment.mode == "divided")
        chosen = choice.offer.assignment
        return Plan(
            source=source,
            nodes=nodes,
            choice=choice,
            commit=CommitPlan.of(chosen),  # proves that every byte is saved
            divided=divided,
            wanted=wanted,
            window_bytes=window_bytes,
            network_bytes=network_bytes,
            node_memory=node_memory,
            lose=lose,
            stages=stage_rows(layout, divided, chosen),
            savers=saver_rows(layout, chosen),
            nodes_are=nodes_are,
        )

    @property
    def offer(self) -> Offer:
        """The mode that was chosen."""
        return self.choice.offer

    @property
    def notes(self) -> list[str]:
        """What the plan reckons with, but cannot be had yet."""
        return [_ONE_NODE] if len(set(self.nodes)) > 1 else []

    def fullest_node(self) -> str:
        """The node whose slots need most."""
        memory = self.offer.memory
        return max(memory, key=lambda node: (memory[node].total, node))

    def refusal(self) -> NoRoom | None:
        """Why the slots do not fit, if they do not."""
        from baftd.checkpoint.redundancy import room_problem

        if self.node_memory is None:
            return None
        problem = room_problem(self.offer.memory, self.node_memory)
        if not problem:
            return None
        need = self.offer.node_memory
        ways = ["give it more shared memory", "spread the job over more nodes (--ranks-per-node)"]
        most = {offer.mode: offer.node_memory for offer in self.choice.offers}
        best = min(most, key=lambda mode: most[mode])
        if most[best] < need:
            ways.append(f"take --redundancy {best} ({size(most[best])})")
        advice = _listed(ways, "or")
        return NoRoom(
            f"slots do not fit: {problem}.",
            hint=f"{advice[0].upper()}{advice[1:]}.",
            missing=need - self.node_memory,
        )


# ---------------------------------------------------------------- for people


def print_plan(plan: Plan, ranks: range, rank: int | None, *, bubbles: bool = False) -> None:
    """Print everything: a table of stages, savers and modes, and sentences. bubbles: what fits into them follows."""
    layout = plan.source.layout
    nodes = len(set(plan.nodes))
    say(f"{plan.source.words}, on {nodes} node{'s' * (nodes != 1)}{plan.nodes_are}")
    times = layout.held_bytes / layout.unique_bytes if layout.unique_bytes else 1.0
    say(
        f"{len(layout.tensors)} tensors of {size(layout.unique_bytes)}; on all ranks together "
        f"{size(layout.held_bytes)}, {times:.2f} times as much"
    )
    print()
    rows = [[stages, str(count), *rest] for stages, count, *rest in merged_stage_rows(plan.stages)]
    columns = ["stages", "ranks", "a rank holds", "divided among replicas"]
    print_table(columns, rows, right=columns[1:])
    print()
    saved = [[stages, held, str(count), *rest] for stages, held, count, *rest in merged_saver_rows(plan.savers)]
    columns = ["stages", "held by", "savers", "one copy", "each saves"]
    print_table(columns, saved, right=columns[2:])
    print()
    _print_modes(plan)
    print()
    say(f"redundancy: {plan.choice.mode}, {_said_reason(plan)}")
    for line in (_said_windows(plan, bubbles), _said_network(plan), _said_memory(plan), _said_commit(plan)):
        say(line)
    say("when nodes are lost:")
    for sentence in survival_sentences(plan):
        say(f"  {sentence}")
    for note in plan.notes:
        say(f"note: {note}")
    if len(ranks):
        print()
        _print_ranks(plan, ranks)
    if rank is not None:
        print()
        shares = share_rows(layout, plan.offer.assignment, rank)
        say(f"rank {rank} saves {size(plan.offer.assignment.bytes_of(rank))} in {len(shares)} ranges")
        print_table(
            ["tensor", "range", "size"], [[name, where, size(nbytes)] for name, where, nbytes in shares], right=["size"]
        )


def _print_modes(plan: Plan) -> None:
    rows = []
    for offer in plan.choice.offers:
        copies = offer.assignment.bytes_of(offer.assignment.fullest)
        rows.append(
            [
                f"{offer.mode}{' *' if offer.mode == plan.choice.mode else ''}",
                size(copies),
                _percent(offer.window_fill) if plan.window_bytes is not None else "-",
                size(offer.network_bytes),
                _percent(offer.network_fill) if plan.network_bytes is not None else "-",
                size(offer.node_memory),
                "yes" if offer.survives else "no",
                _said_problem(plan, offer),
            ]
        )
    columns = ["mode", "a rank copies", "of windows", "a node sends", "of network", "node memory", "one node lost"]
    print_table([*columns, "but"], rows, right=columns[1:6])


def _print_ranks(plan: Plan, ranks: range) -> None:
    layout = plan.source.layout
    rows = []
    for rank in ranks:
        place = layout.place(rank)
        at = "" if place is None else " ".join(f"{axis}={value}" for axis, value in sorted(place.coordinates.items()))
        stages = "+".join(map(str, stages_of(layout, rank))) or "-"
        held, divided = layout.bytes_of(rank), plan.divided.bytes_of(rank)
        saved = plan.offer.assignment.bytes_of(rank)
        rows.append([str(rank), plan.nodes[rank], stages, at or "-", size(held), size(divided), size(saved)])
    columns = ["rank", "node", "stages", "at", "holds", "divided", "saves"]
    print_table(columns, rows, right=["rank", "holds", "divided", "saves"])


def _said_problem(plan: Plan, offer: Offer) -> str:
    """Why a mode will not do; short, since the row has the numbers."""
    if plan.node_memory is not None and offer.node_memory > plan.node_memory:
        return f"{size(offer.node_memory - plan.node_memory)} of node memory missing"
    return offer.problem


def _said_reason(plan: Plan) -> str:
    if plan.wanted == "auto" and plan.choice.mode == "none":
        return "as nothing else will do: see above"
    return plan.choice.why


def _percent(fill: float) -> str:
    return "no window" if isinf(fill) else f"{fill:.0%}"


def _said_windows(plan: Plan, bubbles: bool) -> str:
    assignment = plan.offer.assignment
    most = f"{size(assignment.bytes_of(assignment.fullest))} a step (rank {assignment.fullest})"
    if plan.window_bytes is None:
        if bubbles:
            return f"windows: a rank must copy up to {most}; what bubbles hold of that is said below"
        return f"windows: a rank must copy up to {most}; whether that fits is not known (--window-bytes)"
    can = f"a rank must copy up to {most} and can copy {size(plan.window_bytes)}"
    if plan.offer.window_fill <= 1:
        return f"windows: {can}: fits, {plan.offer.window_fill:.0%} full"
    steps = ceil(plan.offer.window_fill)
    return f"windows: {can}: a snapshot takes {steps} steps (interval = \"{steps} steps\")"


def _said_network(plan: Plan) -> str:
    sent = plan.offer.network_bytes
    if not sent:
        return "network: nothing but small states is sent to other nodes"
    if plan.network_bytes is None:
        return f"network: a node must send {size(sent)} for a step; whether it can is not known (--network-bytes)"
    can = f"a node must send {size(sent)} for a step and can send {size(plan.network_bytes)}"
    if plan.offer.network_fill <= 1:
        return f"network: {can}: every step fits"
    if isinf(plan.offer.network_fill):
        return f"network: {can}"
    return f"network: {can}: one step of {ceil(plan.offer.network_fill)} reaches other nodes"


def _said_memory(plan: Plan) -> str:
    node = plan.fullest_node()
    need = plan.offer.memory[node]
    parts = " + ".join(f"{what} {size(nbytes)}" for what, nbytes in need.parts())
    total = f" = {size(need.total)}" if len(need.parts()) > 1 else ""
    limit = "" if plan.node_memory is None else f" of {size(plan.node_memory)}"
    return f"memory: {parts}{total}{limit} on the fullest node ({node})"


def _said_commit(plan: Plan) -> str:
    parts = sum(part.kind == "ranges" for part in plan.commit.parts)
    small = len(plan.commit.parts) - parts
    return f"commit plan: {parts} part{'s' * (parts != 1)} for every byte, {small} for the ranks' small states"


def survival_sentences(plan: Plan) -> list[str]:
    """What is left when nodes are lost: first how many of them are survived, then the sets that break a step."""
    survival = plan.offer.survival
    nodes = len(survival.nodes)
    said = []
    whole = [number for number in range(1, plan.lose + 1) if survival.survives_any(number)]
    if whole:
        which = "any one node" if whole[-1] == 1 else f"any {whole[-1]} nodes"
        said.append(f"{which}: whole, {_FROM[plan.choice.mode]}")
    ranges = set(survival.breaking)
    left = "the newest durable step remains" if survival.durable else "nothing remains, there is no durable tier"
    small = [one for one in survival.small if not _within(one, ranges)]
    for lost, what in (
        (survival.breaking, "lost in memory"),
        (small, "small state of a rank (RNG, data position) lost in memory"),
    ):
        for number in sorted({len(one) for one in lost if len(one) <= plan.lose}):
            sets = [one for one in lost if len(one) == number]
            said.append(f"{_said_sets(sets, number, nodes)}: {what}; {left}")
    return said


def _within(lost: frozenset[str], sets: set[frozenset[str]]) -> bool:
    """Whether one of `sets` is lost with `lost`."""
    if lost in sets:
        return True
    if 1 << len(lost) > len(sets):
        return any(one < lost for one in sets)
    return any(frozenset(some) in sets for count in range(1, len(lost)) for some in combinations(lost, count))


def _said_sets(sets: list[frozenset[str]], number: int, nodes: int) -> str:
    """Sets of `number` nodes in words, the first few by name."""
    together = " together" if number > 1 else ""
    if len(sets) == comb(nodes, number):
        return ("the node" if nodes == 1 else "any one node") if number == 1 else f"any {number} nodes together"
    named = "; ".join(_listed(sorted(one), "and") + together for one in sets[:_SETS_SHOWN])
    rest = len(sets) - _SETS_SHOWN
    other = ("node" if number == 1 else "set") + "s" * (rest > 1)
    return f"{named}; or {rest} other {other}" if rest > 0 else named


def _listed(words: Sequence[str], last: str) -> str:
    """ "a", "a and b", "a, b and c"."""
    return f" {last} ".join([*([", ".join(words[:-1])] if words[:-1] else []), words[-1]])


# ---------------------------------------------------------------- for programs


def document(plan: Plan, ranks: range, rank: int | None, refusal: NoRoom | None) -> dict[str, Any]:
    """The same as one document. Sizes are bytes; a stage is a list, since a rank may hold several."""
    layout = plan.source.layout
    offer = plan.offer
    needs = {node: {**asdict(memory), "total": memory.total} for node, memory in offer.memory.items()}
    breaking, small = (
        sorted((sorted(one) for one in sets if len(one) <= plan.lose), key=lambda one: (len(one), one))
        for sets in (offer.survival.breaking, offer.survival.small)
    )
    found: dict[str, Any] = {
        "source": plan.source.words,
        "world": layout.world,
        "nodes": len(set(plan.nodes)),
        "tensors": len(layout.tensors),
        "layout_digest": layout.digest().hex(),
        "commit_plan": {"parts": len(plan.commit.parts), "digest": plan.commit.digest.hex()},
        "bytes": {"unique": layout.unique_bytes, "held": layout.held_bytes, "saved": offer.assignment.total},
        "stages": [asdict(row) for row in plan.stages],
        "savers": [asdict(row) for row in plan.savers],
        "redundancy": {
            "mode": plan.choice.mode,
            "reason": plan.choice.reason,
            "offers": [_offer(plan, one) for one in plan.choice.offers],
        },
        "windows": {
            "bytes": plan.window_bytes,
            "needed": offer.assignment.bytes_of(offer.assignment.fullest),
            "fullest_rank": offer.assignment.fullest,
            "steps": _steps(offer.window_fill) if plan.window_bytes is not None else None,
        },
        "network": {
            "bytes": plan.network_bytes,
            "needed": offer.network_bytes,
            "steps": _steps(offer.network_fill) if plan.network_bytes is not None else None,
        },
        "memory": {
            "limit": plan.node_memory,
            "fullest_node": plan.fullest_node(),
            "fits": refusal is None,
            "missing": 0 if refusal is None else refusal.missing,
            "nodes": needs,
        },
        "survival": {
            "durable": offer.survival.durable,
            "any": {str(count): offer.survival.survives_any(count) for count in range(1, plan.lose + 1)},
            "breaking": breaking[:_SETS_IN_JSON],
            "breaking_small_state": small[:_SETS_IN_JSON],
            "sets": {"breaking": len(breaking), "breaking_small_state": len(small)},  # of which the first are listed
            "sentences": survival_sentences(plan),
        },
    }
    if plan.notes:
        found["notes"] = plan.notes
    if refusal is not None:
        found["refused"] = {"code": refusal.code, "message": refusal.message, "hint": refusal.hint}
    if len(ranks):
        found["ranks"] = [_rank(plan, one) for one in ranks]
    if rank is not None:
        shares = share_rows(layout, offer.assignment, rank)
        found["rank"] = {
            **_rank(plan, rank),
            "shares": [{"tensor": name, "range": where, "bytes": nbytes} for name, where, nbytes in shares],
        }
    return found


def _offer(plan: Plan, offer: Offer) -> dict[str, Any]:
    return {
        "mode": offer.mode,
        "needed": offer.assignment.bytes_of(offer.assignment.fullest),
        "saved": offer.assignment.total,
        "window_fill": _fill(offer.window_fill, plan.window_bytes),
        "network_bytes": offer.network_bytes,
        "network_fill": _fill(offer.network_fill, plan.network_bytes),
        "node_memory": offer.node_memory,
        "survives_one_node": offer.survives,
        "problem": offer.problem,
    }


def _fill(fill: float, limit: int | None) -> float | None:
    """A share of what there is; None: it is not known, or there is nothing to share."""
    return None if limit is None or isinf(fill) else round(fill, 4)


def _steps(fill: float) -> int | None:
    """Steps that a snapshot takes; None: it never gets done."""
    return None if isinf(fill) else max(1, ceil(fill))


def _rank(plan: Plan, rank: int) -> dict[str, Any]:
    layout = plan.source.layout
    place = layout.place(rank)
    return {
        "rank": rank,
        "node": plan.nodes[rank],
        "stages": list(stages_of(layout, rank)),
        "coordinates": {} if place is None else dict(place.coordinates),
        "holds": layout.bytes_of(rank),
        "divided": plan.divided.bytes_of(rank),
        "saves": plan.offer.assignment.bytes_of(rank),
    }
