"""What snapshots cost a training step: baftd with its whole daemon, against no checkpoint and against peers.

Every job interleaves its contestants at random in one run and pairs each step with its neighbours; see
_overhead_analysis.py for the rules. Which steps are baftd's its own daemon decides, with one probe in two steps.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _overhead_analysis import Overhead, Series, gap_errors, inside_share, measured_gaps
from _overhead_run import Job, Record, run_job
from _report import Report, arguments, median

from baftd.pipeline.events import EventKind
from baftd.pipeline.operations import StageTimes, Times
from baftd.pipeline.schedules import build
from baftd.pipeline.simulate import simulate

MB = 10**6
SETTLE = 60
"""Steps at the beginning that do not count: the daemon learns the windows and makes up its mind."""
PEERS = ("clone", "copy", "torch_save", "dcp_default", "dcp_thread", "dcp_process", "dlrover", "ungated")
SLEEP: dict[str, Any] = {
    "kind": "sleep", "schedule": "Schedule1F1B", "micro": 8, "batch": 4, "forward": 0.02, "backward": 0.04
}  # fmt: skip
MATMUL: dict[str, Any] = {
    "kind": "matmul", "schedule": "Schedule1F1B", "micro": 4, "batch": 256, "width": 1024, "layers": 4
}  # fmt: skip
SPIN = {**SLEEP, "kind": "spin", "micro": 4, "forward": 0.03, "backward": 0.06}
AUTO = {"interval": "auto", "overhead_probe": "2 steps"}


@dataclass(frozen=True)
class Case:
    """One job whose overhead is a figure."""

    figure: str
    ranks: int
    spec: dict[str, Any]
    state: int
    goal: float
    share: float
    """Of the time of a full run."""
    how: str
    peers: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()


CASES = (
    Case("overhead_sleep_200mb_percent", 4, SLEEP, 200 * MB, 0.5, 0.16, "4 stages 1F1B that sleep", PEERS),
    Case("overhead_sleep_500mb_percent", 4, SLEEP, 500 * MB, 0.5, 0.08, "the same", ("clone", "copy")),
    Case("overhead_matmul_300mb_percent", 2, MATMUL, 300 * MB, 1.0, 0.25, "2 stages of matrix products", ("ungated",)),
    Case("overhead_matmul_1gb_percent", 2, MATMUL, 1000 * MB, 1.0, 0.25, "the same", ("ungated",)),
    Case("overhead_gil_percent", 2, SPIN, 300 * MB, 1.0, 0.06, "2 stages that hold the interpreter's lock"),
    Case("overhead_interleaved_percent", 4, {**SLEEP, "schedule": "ScheduleInterleaved1F1B", "forward": 0.01,
         "backward": 0.02}, 200 * MB, 1.0, 0.06, "4 ranks with 2 chunks each, interleaved 1F1B"),
    Case("overhead_zero_bubble_percent", 4, {**SLEEP, "schedule": "ScheduleInterleavedZeroBubble", "forward": 0.01,
         "backward": 0.01}, 200 * MB, 1.0, 0.06, "4 ranks with 2 chunks each, interleaved zero bubble"),
    Case("overhead_durable_percent", 4, SLEEP, 200 * MB, 1.0, 0.06, "4 stages that sleep, durable writes all the time",
         settings=(("durable_every", "1 step"), ("durable_keep", "1"))),
)  # fmt: skip


def progress(text: str) -> None:
    """A line for whoever waits."""
    print(text, file=sys.stderr, flush=True)


class Bench:
    """All jobs of one run of the benchmark."""

    def __init__(self, report: Report, *, seconds: float, disk: Path, quick: bool) -> None:
        self.report = report
        self.seconds = seconds
        self.disk = disk
        self.quick = quick
        self.settle = 4 if quick else SETTLE
        self.held: list[float] = []
        self.inside: list[float] = []
        self.at_fence: list[float] = []

    def case(self, case: Case) -> None:
        """Run a job and add its figures."""
        spec, state, peers = dict(case.spec), case.state, case.peers
        if self.quick:
            spec |= {"forward": 0.004, "backward": 0.008, "width": 128, "layers": 1}
            state, peers = 4 * MB, tuple(name for name in case.peers if name in ("ungated", "copy"))
        job = Job(
            name=case.figure.removeprefix("overhead_").removesuffix("_percent").replace("_", "-"),
            ranks=case.ranks, spec={**spec, "state": state}, seconds=self.seconds * case.share,
            contestants=peers, none_weight=max(1, len(peers)), settle=self.settle,
            settings={**AUTO, **dict(case.settings)},
        )  # fmt: skip
        progress(f"{case.figure}: {job.seconds:.0f} s")
        record = run_job(job, self.disk)
        series = Series.of(record.ranks, self.settle)
        interval = record.pacing[-1].interval if record.pacing else 1
        rung = record.pacing[-1].rung if record.pacing else "unknown"
        self._ours(case, series, record, interval, rung)
        for name, why in record.absent.items():
            self.report.note(f"absent: {name}: {why}")
        if case.peers:
            self._peers(case, series, peers)
        if case.spec is SLEEP and not case.settings:
            self.held += series.held_ms
            self.inside += inside_share(record.ranks, record.events, self.settle)
            self.at_fence.append(_at_fence(record))

    def _ours(self, case: Case, series: Series, record: Record, interval: int, rung: str) -> None:
        step, scatter = series.baseline()
        overhead = series.ours(interval)
        counts = {mode: series.modes.count(mode) for mode in sorted(set(series.modes))}
        why = record.pacing[-1].why if record.pacing else "the daemon said nothing"
        self.report.note(
            f"{case.figure}: step {step * 1e3:.0f} ms, plain steps scatter by {scatter:.1%}, steps {counts}, "
            f"{series.dropped} dropped; rung {rung}, interval {interval}: {why}"
        )
        if overhead is None:
            self.report.note(f"{case.figure}: too few clean steps to say anything; run longer on a quieter machine")
            return
        how = f"{case.how}; {case.state // MB} MB a rank, interval {interval}, rung {rung}, n={overhead.pairs}"
        self._add(case.figure, overhead, case.goal, how)
        name = {"overhead_matmul_1gb_percent": ("interval_matmul_1gb_steps", 3.0),
                "overhead_zero_bubble_percent": ("interval_zero_bubble_steps", None)}.get(case.figure)  # fmt: skip
        if name is not None:
            self.report.add(name[0], (float(interval), 0.0), unit="steps", goal=name[1], better="lower",
                            how=f"chosen by the daemon (rung {rung})")  # fmt: skip

    def _add(self, name: str, overhead: Overhead, goal: float | None, how: str) -> None:
        self.report.add(name, (overhead.value, overhead.error), unit="%", goal=goal, better="lower", how=how)

    def _peers(self, case: Case, series: Series, peers: tuple[str, ...]) -> None:
        label = case.figure.removeprefix("overhead_").removesuffix("_percent")
        for name in peers:
            overhead = series.peer(name)
            if overhead is None:
                continue
            at = "" if label == "sleep_200mb" else f"_{label}"
            self._add(f"peer_{name}{at}_percent", overhead, None, f"{name} at every step, n={overhead.pairs}")
            contended = case.figure.startswith("overhead_matmul")
            if name == "ungated" and contended and overhead.value - 2 * overhead.error <= case.goal:
                self.report.note(
                    f"{case.figure} is not discriminating: an ungated copy costs {overhead.value:.2f} ± "
                    f"{overhead.error:.2f} % here, which does not clearly fail the goal"
                )

    def windows(self) -> None:
        """Figures of the sleeping runs that are no overheads."""
        if self.held:
            self.report.add("held_ms", median(self.held), unit="ms", goal=1.0, better="lower",
                            how="training thread held per snapshot, begin + seal + fence, sleeping runs")  # fmt: skip
        if self.inside:
            share = statistics.fmean(self.inside)
            error = statistics.pstdev(self.inside) / len(self.inside) ** 0.5
            self.report.add("inside_window_percent", (100 * share, 100 * error), unit="%", goal=99.0, better="higher",
                            how="bytes copied while the rank computed nothing, by the benchmark's record")  # fmt: skip
            self.report.add("at_fence_percent", (100 * max(self.at_fence), 0.0), unit="%", goal=0.0, better="lower",
                            how="bytes that a fence had to wait for, sleeping runs")  # fmt: skip
        else:
            self.report.note("inside_window_percent: the daemon's trace has no copies of the sleeping runs")

    # -------------------------------------------------------------------------------- gaps

    def gaps(self, kind: str) -> None:
        """Predict gaps from operation times taken at 2 stages and 4 micro-batches, then measure them."""
        base = dict(SLEEP if kind == "sleep" else MATMUL)
        goal = 4.0 if kind == "sleep" else 10.0
        if self.quick:
            base |= {"forward": 0.004, "backward": 0.008, "width": 128, "layers": 1}
        times: dict[tuple[bool, float], StageTimes] = {}
        taken = [[1.0, 1.5], [1.5, 1.0], [0.75, 1.0]] if kind == "sleep" else [[1.0, 1.5], [1.5, 1.0]]
        for uneven in taken[:2] if self.quick else taken:
            record = self._gap_job(f"times-{kind}-{uneven[0]:g}", base, 2, 4, uneven)
            for rank, factor in enumerate(uneven):
                times[rank == 0, factor] = _stage_times(record.ranks[rank]["operations"], skip=4 * 8)
        errors: list[float] = []
        for ranks, uneven in self._gap_cases(kind)[: 1 if self.quick else None]:
            record = self._gap_job(f"gaps-{kind}-{uneven[0]:g}-{ranks}", base, ranks, 8, uneven)
            # The first stage has no gradient of its input to compute, so that it is its own kind of stage.
            places = [(place == 0, factor) for place, factor in enumerate(uneven)]
            stages = [times.get((first, factor)) or times[not first, factor] for first, factor in places]
            timeline = simulate(build("Schedule1F1B", ranks, 8), Times(tuple(stages)))
            predicted = []
            for rank in range(ranks):
                # The record has no reductions: there is nothing to reduce in these jobs.
                seen = [one for one in timeline.operations[rank] if one.operation.kind is not EventKind.REDUCE]
                edges = [0.0, *(t for one in seen for t in (one.begin, one.end)), timeline.period]
                predicted.append([float(edges[i + 1]) - float(edges[i]) for i in range(0, len(edges), 2)])
            found = gap_errors(predicted, measured_gaps(record.ranks, 3), least=float(times[True, 1.0].forward) / 4)
            middle = statistics.median(found)
            self.report.note(f"gaps, {kind}, {ranks} stages {uneven}: {len(found)} gaps, median error {middle:.1f} %")
            errors += found
        self.report.add(f"gap_error_{kind}_percent", median(errors), unit="%", goal=goal, better="lower",
                        how="gaps predicted from operation times at p=2 m=4, against measured")  # fmt: skip

    def _gap_cases(self, kind: str) -> list[tuple[int, list[float]]]:
        if kind == "sleep":
            return [(4, [1.0, 1.0, 1.0, 1.0]), (4, [1.0, 1.5, 1.0, 0.75])]
        return [(2, [1.0, 1.0]), (2, [1.5, 1.0])]

    def _gap_job(self, name: str, base: dict[str, Any], ranks: int, micro: int, uneven: list[float]) -> Record:
        progress(name)
        spec = {**base, "micro": micro, "uneven": uneven, "state": MB}
        steps = 10 if self.quick else 40
        return run_job(Job(name.replace(".", "-"), ranks, spec, seconds=90.0, steps=steps, settings=None), self.disk)


def _stage_times(operations: list[list[Any]], skip: int) -> StageTimes:
    """Median seconds of a stage's operations, the first `skip` left out."""
    by_kind = {kind: [e - b for what, _, _, b, e in operations[skip:] if what == kind] for kind in ("F", "B")}
    return StageTimes(forward=statistics.median(by_kind["F"]), backward=statistics.median(by_kind["B"]))


def _at_fence(record: Record) -> float:
    """Part of all bytes that the last look at the daemon says were copied at the fence."""
    if not record.pacing or not record.pacing[-1].ranks:
        return 0.0
    ranks = record.pacing[-1].ranks
    return sum(rank.at_fence for rank in ranks) / max(1, sum(rank.bytes for rank in ranks))


def main() -> None:
    """Measure, print, exit 0: a goal not met is printed as not met. Exit 1 where a job failed."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="directory for durable writes and peers")
    parser.add_argument("--minutes", type=float, default=35.0, help="time of a full run [35]")
    parser.add_argument("--only", default="", help="figures to take, by parts of their names, with commas")
    options = parser.parse_args()
    report = Report("overhead")
    bench = Bench(report, seconds=20.0 if options.quick else options.minutes * 60 - 240, disk=options.disk,
                  quick=options.quick)  # fmt: skip
    wanted = [part for part in options.only.split(",") if part]

    def chosen(name: str) -> bool:
        return not wanted or any(part in name for part in wanted)

    failed = 0
    parts = [(case.figure, partial(bench.case, case)) for case in CASES]
    parts += [(f"gap_error_{kind}_percent", partial(bench.gaps, kind)) for kind in ("sleep", "matmul")]
    for name, take in parts:
        if not chosen(name):
            continue
        known = len(report.figures)
        try:
            take()
        except RuntimeError as error:  # half an hour of figures is not thrown away for one
            failed += 1
            report.note(f"FAILED: {name}: {error}")
            progress(f"{name} failed: {error}")
        for made in report.figures[known:]:
            progress(f"  {made.name} {made.value:.3f} +- {made.se:.3f} {made.unit}")
    bench.windows()
    if options.quick:
        report.note("--quick: sizes and times are too small for the figures to mean anything")
    report.print(as_json=options.json)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
