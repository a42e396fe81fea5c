"""What is peculiar to the in-process coordinator: whose directory it is, and what damage to it costs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from baftd.checkpoint.commit import Policy
from baftd.coordination.inprocess import InProcessCoordinator
from baftd.daemon.state_files import JournalFiles
from baftd.errors import UsageError


def coordinator(path: Path) -> InProcessCoordinator:
    return InProcessCoordinator(path, policy=Policy(), files=JournalFiles(), random_bits=lambda: 1, clock=lambda: 0.0)


async def begin(path: Path, node: str = "node-a", incarnation: str = "a" * 32) -> None:
    opened = coordinator(path)
    await opened.start(node, "1" * 32, lambda job, news: None)
    try:
        plan = await opened.plan("gpt", [], world=1, fresh=True)
        expected = (await opened.history("gpt")).epoch
        await opened.open_epoch("gpt", incarnation, plan, world=1, expected=expected)
    finally:
        await opened.close()


def test_another_coordinator_s_or_node_s_directory_is_refused(tmp_path: Path) -> None:
    asyncio.run(begin(tmp_path))
    with pytest.raises(UsageError, match="belongs to node 'node-a', this is node 'node-b'"):
        asyncio.run(begin(tmp_path, node="node-b"))
    owner = tmp_path / "gpt" / "coordinator.json"
    found = json.loads(owner.read_text())
    assert found["coordinator"] == "in-process"
    owner.write_text(json.dumps({**found, "coordinator": "redis://db"}))
    with pytest.raises(UsageError, match="redis://db coordinates it"):
        asyncio.run(begin(tmp_path))


@pytest.mark.parametrize("damage", ["{", "", "[]", '{"coordinator": 3}'])
def test_a_damaged_owner_file_loses_nothing(tmp_path: Path, damage: str) -> None:
    asyncio.run(begin(tmp_path))
    (tmp_path / "gpt" / "coordinator.json").write_text(damage)
    asyncio.run(begin(tmp_path, incarnation="b" * 32))

    async def epoch() -> int:
        opened = coordinator(tmp_path)
        await opened.start("node-a", "1" * 32, lambda job, news: None)
        found = (await opened.history("gpt")).epoch
        await opened.close()
        return found

    assert asyncio.run(epoch()) == 2


def test_records_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    asyncio.run(begin(tmp_path))
    files = JournalFiles()
    opened = files.open_log(tmp_path / "gpt" / "history")
    opened.log.append({"k": "epoch", "token": [2, "short"], "world": 1, "parent": None}, {"no": "kind"}, sync=True)
    opened.log.close()
    asyncio.run(begin(tmp_path, incarnation="b" * 32))
