"""Which steps are snapshot: one decision of the whole job, and what every node says to it.

A cadence is published for a step that no rank has reached, and carries what holds until then, so one value answers for
every step and a rank that begins late needs no other. A rank that hears of one late all the same has passed steps that
the others take: `missed` names the newest of them, which the rank then reports as skipped. So no step stays open that
only some ranks hold.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cadence", "CadenceProposal", "is_probe"]


def is_probe(step: int, one_in: int) -> bool:
    """Whether `step` is one of those that are left without a snapshot so that steps can be compared: about one in
    `one_in`, spread as if at random, the same on every rank. 0: none is."""
    if one_in < 1:
        return False
    mixed = (step * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % (1 << 64)  # splitmix64's increment and finalizer
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % (1 << 64)
    return (mixed ^ (mixed >> 31)) % one_in == 0


@dataclass(frozen=True)
class Cadence:
    """Job-wide: from `from_step` on, step k is snapshot iff k % every == 0, unless it is a probe."""

    from_step: int
    every: int
    probe: int = 0
    """See `is_probe`."""
    earlier: tuple[Cadence, ...] = ()
    """What holds before `from_step`, oldest first; these have none of their own. The oldest holds from the first step
    on."""

    def at(self, step: int) -> Cadence:
        """The cadence that is in force at `step`."""
        if step >= self.from_step or not self.earlier:
            return self
        return next((one for one in reversed(self.earlier) if one.from_step <= step), self.earlier[0])

    def due(self, step: int) -> bool:
        """Whether `step` is to be snapshot."""
        now = self.at(step)
        return step % now.every == 0 and not is_probe(step, now.probe)

    def missed(self, known: Cadence, reached: int) -> int | None:
        """The newest step, up to `reached`, that this cadence takes and that a rank which knew only `known` left out.

        None: it has left out none since the last that it took, and what came before that one is settled by it."""
        step = reached
        while step > 0:
            now = self.at(step)
            newest = step - step % now.every
            if self.at(newest) is not now:
                step = now.from_step - 1  # nothing is due since then
            elif newest > 0 and not is_probe(newest, now.probe):
                return None if known.due(newest) else newest
            else:
                step = newest - 1
        return None


@dataclass(frozen=True)
class CadenceProposal:
    """The cadence that a node asks for. The longest of all live nodes is the job's."""

    node: str
    every: int
    """Steps from one snapshot to the next, at least 1."""
    probe: int = 0
    """About one step in so many is left out to compare (`is_probe`); 0: none, which a single node may insist on."""
    rank: int = -1
    """The rank of that node which needs so long; -1: no single one."""
    why: str = ""
    """One sentence with numbers, for `baftd status`."""
    step: int = 0
    """Newest boundary that a rank of the node has reached, as far as the node knows; 0: it does not."""
    step_seconds: float = 0.0
    """How long a step takes; 0: unknown. A change is published for a step that is some seconds away."""
