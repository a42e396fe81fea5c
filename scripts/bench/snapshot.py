"""What a snapshot costs: copying, the time training is held, the durable write, the restore, the daemon's own needs."""

from __future__ import annotations

from pathlib import Path

from _copying import copying
from _report import Report, arguments
from _training import training

MIB = 1 << 20


def main() -> None:
    """Measure, print, exit 0: a goal not met is printed as not met."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="directory on the disk to measure")
    parser.add_argument("--only", choices=["copying", "training"], help="one half of the figures")
    options = parser.parse_args()
    quick: bool = options.quick
    report = Report("snapshot")
    if options.only != "training":
        copying(report, nbytes=(32 if quick else 1024) * MIB, rounds=3 if quick else 15)
    if options.only != "copying":
        training(
            report,
            nbytes=24 * MIB if quick else 10**9,
            rounds=3 if quick else 12,
            durable_rounds=2 if quick else 8,
            work=0.05 if quick else 1.0,
            idle=0.4 if quick else 10.0,
            disk=options.disk,
        )
    if quick:
        report.note("--quick: sizes and rounds are too small for the figures to mean anything")
    report.print(as_json=options.json)


if __name__ == "__main__":
    main()
