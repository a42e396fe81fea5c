"""What a snapshot costs: copying, the time training is held, the durable write, the restore, the daemon's own needs."""

from __future__ import annotations

from _copying import copying
from _report import Report, arguments

MIB = 1 << 20


def main() -> None:
    """Measure, print, exit 0: a goal not met is printed as not met."""
    options = arguments(__doc__ or "").parse_args()
    quick: bool = options.quick
    report = Report("snapshot")
    copying(report, nbytes=(32 if quick else 1024) * MIB, rounds=3 if quick else 15)
    if quick:
        report.note("--quick: sizes and rounds are too small for the figures to mean anything")
    report.print(as_json=options.json)


if __name__ == "__main__":
    main()
