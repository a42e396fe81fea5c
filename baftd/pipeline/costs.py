"""What a second of copying costs the step: first a guess, then what is measured, each weighed by its error. Pure.

Three sources, for a second inside windows and one outside of them:

    a guess           before anything was measured
    operations        what operations lose beside a copy (`interference.py`): known after some steps
    pairs of steps    what steps lose in all (`overhead.py`), less what the training thread was seen to be held

Beside it a snapshot costs something however little is copied: the daemon verifies and commits it, threads are woken.
Only pairs see that.

Each is a normal value with its error. Guess and operations give their mean, weighed by 1 / error^2, so that a handful
of steps overrules any guess; the result is held for uncertain by what operations cannot see. Pairs come last and see
everything, but only the sum of all; what they say is shared out by how uncertain each part is (the gain of a Kalman
filter with one observation). When another rung is taken pairs begin anew; what was known then is the guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import hypot, sqrt

from baftd.pipeline.interference import SecondCost
from baftd.pipeline.ladder import SecondCosts

__all__ = ["Belief", "Paired", "believe"]

MODEL_ERROR = 0.3
"""Part by which the cost at operations may be wrong: it knows no messages, and takes ranks that are slowed together for
slowed alike."""
FADES = 256
"""Steps."""
LEAST_ERROR = 0.01
"""Seconds per second."""
PAIRED_ERROR = 5e-4
"""Part of a step: the least error of what pairs say."""


@dataclass(frozen=True)
class Belief:
    """Seconds that a step loses by a second of copying inside and outside of windows, and how uncertain they are.

    The guess: a gated copy of 1 GB a rank on two busy cores cost 0.13, an ungated one 0.4; where the device computes
    elsewhere, nothing."""

    inside: float = 0.05
    inside_error: float = 0.1
    outside: float = 0.15
    outside_error: float = 0.25
    fixed: float = 0.0
    """Seconds that a snapshot costs besides."""
    fixed_error: float = 2e-3

    @property
    def costs(self) -> SecondCosts:
        """To plan with: copying speeds nothing up, whatever noise says."""
        return SecondCosts(max(0.0, self.inside), max(0.0, self.outside), max(0.0, self.fixed))

    def carried(self) -> Belief:
        """As a guess for another rung: no surer than the first one was, since another rung copies otherwise."""
        guess = Belief()
        return Belief(
            self.inside,
            max(guess.inside_error, self.inside_error),
            self.outside,
            max(guess.outside_error, self.outside_error),
            self.fixed,
            max(guess.fixed_error, self.fixed_error),
        )

    def faded(self, steps: int) -> Belief:
        """The same so many steps later: by half every `FADES` steps it is the first guess again, or what was dear once
        would never be tried again."""
        guess, worth = Belief(), 0.5 ** (max(0, steps) / FADES)
        return replace(
            self,
            inside=guess.inside + worth * (self.inside - guess.inside),
            outside=guess.outside + worth * (self.outside - guess.outside),
            fixed=guess.fixed + worth * (self.fixed - guess.fixed),
        )


@dataclass(frozen=True)
class Paired:
    """What pairs of steps say: seconds a snapshot costs beyond what is known of it, the error, and the seconds of
    copying inside and outside of windows behind it."""

    seconds: float
    error: float
    inside: float
    outside: float


def believe(
    guess: Belief, inside: SecondCost | None, outside: SecondCost | None, paired: Paired | None, step: float
) -> Belief:
    """The guess, the operations and the pairs, put together."""
    inner, inner_error = _with(guess.inside, guess.inside_error, inside)
    outer, outer_error = _with(guess.outside, guess.outside_error, outside)
    fixed, fixed_error = guess.fixed, guess.fixed_error
    if paired is not None:
        noise = max(paired.error, PAIRED_ERROR * step) ** 2
        through_inner, through_outer = inner_error**2 * paired.inside, outer_error**2 * paired.outside
        all_of_it = through_inner * paired.inside + through_outer * paired.outside + fixed_error**2 + noise
        surprise = paired.seconds - inner * paired.inside - outer * paired.outside - fixed
        gain_inner, gain_outer, gain_fixed = (
            one / all_of_it for one in (through_inner, through_outer, fixed_error**2)
        )
        inner += gain_inner * surprise
        outer += gain_outer * surprise
        fixed += gain_fixed * surprise
        inner_error *= sqrt(max(0.0, 1 - gain_inner * paired.inside))
        outer_error *= sqrt(max(0.0, 1 - gain_outer * paired.outside))
        fixed_error *= sqrt(max(0.0, 1 - gain_fixed))
    return Belief(inner, inner_error, outer, outer_error, fixed, fixed_error)


def _with(value: float, error: float, seen: SecondCost | None) -> tuple[float, float]:
    """A value, and what was seen of it at operations."""
    if seen is None:
        return value, error
    other = seen.error**2 + LEAST_ERROR**2
    weight = error**2 / (error**2 + other)
    value += weight * (seen.value - value)
    return value, hypot(error * sqrt(1 - weight), MODEL_ERROR * value)
