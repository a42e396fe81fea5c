"""The copying thread under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer, without Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import baft_client

SOURCES = Path(baft_client.__file__).parent
PROGRAM = Path(__file__).with_name("engine_torture.c")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_race_and_no_stray_access(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "torture"
    names = ("_worker.c", "_windows.c", "_bulk.c", "_isa_base.c", "_isa_avx2.c", "_isa_avx512.c")
    parts = [SOURCES / name for name in names]
    built = subprocess.run(
        ["gcc", "-g", "-O1", "-std=gnu11", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined",
         f"-I{SOURCES}", str(PROGRAM), *map(str, parts), "-o", str(program)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if "cannot find" in built.stderr:
        pytest.skip(f"this gcc has no -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), "30"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    assert not done.stderr
