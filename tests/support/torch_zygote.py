"""Imports torch once and forks the ranks of test jobs: a start then costs milliseconds, not seconds.

The parent writes one JSON line for each start, {"program": "torch_job", "argv": [...], "env": {...}, "ranks": [{...},
...], "logs": [...]}, and reads one line for each rank, {"rank": 0, "pid": 1234}, and later {"rank": 0, "code": -9}.
Ranks are children of this process: real processes, that die by SIGKILL like any other.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import sys
import traceback
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.pipelining

from tests.support import (
    torch_fault_job,
    torch_job,
    torch_layout_job,
    torch_mesh_job,
    torch_observe_job,
    torch_windows_job,
)

PROGRAMS = {
    "torch_fault_job": torch_fault_job.main,
    "torch_job": torch_job.main,
    "torch_layout_job": torch_layout_job.main,
    "torch_mesh_job": torch_mesh_job.main,
    "torch_observe_job": torch_observe_job.main,
    "torch_windows_job": torch_windows_job.main,
}


def main() -> None:
    """Serve until the input ends."""
    running: dict[int, int] = {}
    with os.fdopen(os.dup(0), "rb", buffering=0) as commands:
        torch.set_num_threads(1)
        say({"ready": True})
        buffered = b""
        while True:
            ready, _, _ = select.select([commands], [], [], 0.01 if running else 1.0)
            if ready:
                data = commands.read(1 << 16)
                if not data:
                    return
                buffered += data
                while b"\n" in buffered:
                    line, buffered = buffered.split(b"\n", 1)
                    running.update(start(json.loads(line)))
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                say({"rank": running.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def start(command: dict[str, Any]) -> dict[int, int]:
    """Fork every rank; their pids, with their ranks."""
    pids = {}
    for rank, (own, log) in enumerate(zip(command["ranks"], command["logs"], strict=True)):
        pid = os.fork()
        if pid == 0:
            run_rank(command, own, log)
        pids[pid] = rank
        say({"rank": rank, "pid": pid})
    return pids


def run_rank(command: dict[str, Any], own: dict[str, str], log: str) -> None:
    """Become a rank; does not return."""
    code = 1
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.environ.clear()
        os.environ.update({**command["env"], **own})
        sys.argv = [command["program"], *command["argv"]]
        faulthandler.dump_traceback_later(45)  # into the log: where a rank hangs that will be ended for it
        PROGRAMS[command["program"]]()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001  whatever it is, it belongs into the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say(message: dict[str, Any]) -> None:
    """One line to the parent."""
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
