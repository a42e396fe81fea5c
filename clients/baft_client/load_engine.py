"""Which copy engine a process gets, and that none outlives the interpreter."""

from __future__ import annotations

import atexit
import weakref
from typing import Literal

from baft_client import native_engine
from baft_client.engine import CopyEngine, EngineHooks
from baft_client.python_engine import PythonEngine
from baftd.errors import UsageError
from baftd.memory.control import ControlPage
from baftd.telemetry.log import get_logger

__all__ = ["load_engine"]

_log = get_logger("client")

_said_python = False


def load_engine(
    control: ControlPage | None,
    *,
    prefer: Literal["auto", "native", "python"] = "auto",
    nice: int = 0,
    hooks: EngineHooks | None = None,
) -> CopyEngine:
    """Start an engine gated by `control` (None: by a private page).

    "auto" takes the native one where the extension was built, else the Python one, which says so once;
    "native" raises UsageError where it was not built. `nice` is added to the thread's niceness (native only).
    """
    global _said_python
    if prefer not in ("auto", "native", "python"):
        raise UsageError(f"no such engine: {prefer!r}.", hint="Set engine to auto, native or python.")
    if prefer == "native" and not native_engine.AVAILABLE:
        raise UsageError(
            f"the native copy engine was not built: {native_engine.WHY_NOT}.",
            hint="Install a C compiler and libxxhash-dev and install baftd again, or set engine to auto.",
        )
    if hooks is not None and hooks.hold and control is None:
        raise UsageError("EngineHooks(hold=True) needs a control page: its hold_at says where to stop.")
    engine: CopyEngine
    if native_engine.AVAILABLE and prefer != "python":
        engine = native_engine.NativeEngine(control, nice=nice, hooks=hooks)
    else:
        if prefer == "auto" and not _said_python:
            _said_python = True
            _log.warning(
                "python_engine",
                why=native_engine.WHY_NOT,
                note="copies in a Python thread, slowly while the trainer computes in Python",
                next="install a C compiler and libxxhash-dev, then install baftd again",
            )
        engine = PythonEngine(control, hooks=hooks)
    _engines.add(engine)
    return engine


_engines: weakref.WeakSet[CopyEngine] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Join every copying thread while the tensors it reads still exist."""
    for engine in list(_engines):
        engine.stop()
