"""`python -m tests.simulation --seed N --trace`: replay a seed. Without a seed: run many."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.run import simulate


def main() -> int:
    """Run one seed with its trace, or a range of seeds; exit 1 when an invariant was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed")
    parser.add_argument("--trace", action="store_true", help="print every event of it")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run without --seed (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        outcome = simulate(arguments.seed, trace=arguments.trace)
        print("\n".join(outcome.trace))
        print(f"seed {outcome.seed}: {outcome.events} events, {outcome.commits} commits, {outcome.runs} starts")
        print(outcome.violation or "no violation")
        return int(bool(outcome.violation))
    began = time.perf_counter()
    bad, events, commits, starts = [], 0, 0, 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        outcome = simulate(seed)
        events, commits, starts = events + outcome.events, commits + outcome.commits, starts + outcome.runs
        if outcome.violation:
            bad.append(outcome)
            print(f"seed {seed}: {outcome.violation}")
    took = time.perf_counter() - began
    print(
        f"{arguments.seeds} seeds in {took:.1f} s ({arguments.seeds / took:.0f} a second), {events} events, "
        f"{commits} commits, {starts} starts, {len(bad)} violations"
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
