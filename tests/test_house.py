"""The house rules that can be checked: names, file lengths, imports, no pickle, warnings are errors, cheap imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import ROOT, RunDirs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FRAMEWORKS = ("torch", "torchdata", "mindspore", "tensorflow", "jax")

TOP = {"baftd", "adapters", "clients", "tests", "scripts", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}


def tracked() -> list[str]:
    """Files under version control; skips where this is no checkout."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Top-level names of all packages that a file imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_tests_look_into_live_directories_with_look_for() -> None:
    """`Path.rglob` raises when a directory goes while it looks, and a daemon removes directories at any time."""
    live = re.compile(r"\b(shm|durable|state|base)\)?\.rglob\(")
    assert [str(path) for path in python_files("tests") if live.search(path.read_text())] == []


def test_top_level_names() -> None:
    names = {name.partition("/")[0] for name in tracked()}
    assert {name for name in names if not name.startswith(".")} <= TOP
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_a_file_is_a_concept() -> None:
    too_long = []
    for name in tracked():
        if name.endswith((".py", ".c", ".h", ".sh")):
            lines = (ROOT / name).read_text().count("\n")
            if lines > 600:
                too_long.append(f"{name}: {lines}")
    assert too_long == []


def test_no_paths_of_one_machine() -> None:
    wrong = []
    for name in tracked():
        path = ROOT / name
        if path.suffix in (".py", ".c", ".h", ".sh", ".md", ".toml", ".txt", "") and name != "tests/test_house.py":
            text = path.read_text(errors="replace")
            wrong += [f"{name}: {match[0]}" for match in re.finditer(r"/(?:work|farm|root|home/\w+)/\w+", text)]
    assert wrong == []


def test_nothing_that_is_sent_or_stored_is_executed() -> None:
    wrong = {}
    for path in python_files("baftd", "clients", "adapters"):
        bad = imports_of(path) & {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
        text = path.read_text()
        if "recv_pyobj" in text or "send_pyobj" in text or re.search(r"(?<![\w.])(?:eval|exec)\(", text):
            bad.add("a call that executes data")
        if re.search(r"torch\.load\((?!.*weights_only=True)", text):
            bad.add("torch.load without weights_only")
        if bad:
            wrong[str(path.relative_to(ROOT))] = bad
    assert wrong == {}


def test_no_framework_below_the_adapters() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in python_files("baftd", "clients")
        if (found := imports_of(path) & set(FRAMEWORKS))
    }
    assert wrong == {}


def test_the_import_contracts_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {contract["id"] for contract in project["tool"]["importlinter"]["contracts"]}
    wanted = {
        "purity", "formats", "rooms", "rooms-above", "daemon", "cli", "client", "adapters", "frameworks", "no-code"
    }  # fmt: skip
    assert contracts >= wanted
    assert project["tool"]["mypy"]["strict"] is True


@pytest.mark.parametrize("module", ["baftd", "baftd.daemon.service", "baft_torch.adapter", "baft_client.session"])
def test_warnings_raised_in_our_packages_are_errors(module: str) -> None:
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn_explicit("ours", UserWarning, "file.py", 1, module=module)


@pytest.mark.filterwarnings("ignore:theirs")
def test_a_filter_of_a_test_comes_first() -> None:
    warnings.warn_explicit("theirs", UserWarning, "file.py", 1, module="baftd.errors")


def test_exit_codes_of_the_error_tree() -> None:
    from baftd import errors

    drawn = dict(re.findall(r"[├└]── (\w+) +(\d+)  ", errors.__doc__ or ""))
    assert {name: str(getattr(errors, name).exit_code) for name in drawn} == drawn
    codes = [getattr(errors, name).code for name in errors.__all__ if name != "error_class"]
    assert len(codes) == len(set(codes))


LOADED = """
import sys, time
begin = time.perf_counter()
{statement}
took = time.perf_counter() - begin
print(took, *sorted(name for name in sys.modules if "." not in name))
"""


def loaded_by(statement: str, dirs: RunDirs) -> tuple[float, set[str]]:
    """Best time of three starts in seconds, and the top-level modules that were loaded."""
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", LOADED.format(statement=statement)],
            env=dirs.environ(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        words = done.stdout.splitlines()[-1].split()
        runs.append((float(words[0]), set(words[1:])))
    return min(run[0] for run in runs), runs[0][1]


HELP = """
import contextlib, io
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    from baftd.cli.main import main
    main(["--help"])
"""


def test_importing_baftd_costs_nothing(run_dirs: RunDirs) -> None:
    took, modules = loaded_by("import baftd", run_dirs)
    assert took < 0.05
    assert modules.isdisjoint({*FRAMEWORKS, "numpy", "zmq", "msgspec", "rich"})


def test_help_is_fast(run_dirs: RunDirs) -> None:
    took, modules = loaded_by(HELP, run_dirs)
    assert took < 0.4  # 0.03 on an idle machine
    assert modules.isdisjoint({*FRAMEWORKS, "numpy", "zmq", "msgspec", "rich", "asyncio"})


def test_no_framework_is_loaded_by_daemon_or_client(run_dirs: RunDirs) -> None:
    statement = "import baftd.daemon.service, baft_client.session, baftd.cli.start, baftd.cli.status"
    assert loaded_by(statement, run_dirs)[1].isdisjoint(FRAMEWORKS)


def test_the_largest_number_is_written_once() -> None:
    """`baftd.limits.LARGEST`: what each room said by itself differed by one."""
    wanted = re.compile(r"(1\s*<<|2\s*\*\*)\s*53|900719925474099[12]")
    found = [str(path.relative_to(ROOT)) for path in python_files("baftd", "clients", "adapters")
             if wanted.search(path.read_text())]  # fmt: skip
    assert found == ["baftd/limits.py"]
