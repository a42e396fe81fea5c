"""`baftd plan`: what it prints of layouts whose numbers can be worked out by hand, and when it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from baftd.checkpoint.layout import Layout, LayoutBuilder, RankPlace
from baftd.checkpoint.ranges import whole
from baftd.wire.messages import LayoutReply, LayoutRequest, RankLayout
from tests.support.cli import Cli, Serve
from tests.support.daemon import ROOT

MIB = 1 << 20

TWO_STAGES = {
    "world": 4,
    "order": ["pp", "dp"],
    "axes": {"pp": 2, "dp": 2},
    "tensors": [
        {"name": "layer.{i}", "each": {"i": 2}, "along": {"i": "pp"}, "shape": [1024, 1024], "dtype": "F32"},
        {"name": "tied", "shape": [512, 1024], "dtype": "F32"},
    ],
}
"""Each stage: 4 MiB on two data-parallel ranks, and 2 MiB that all four hold."""


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    path = tmp_path / "two-stages.json"
    path.write_text(json.dumps(TWO_STAGES))
    return path


def test_bytes_before_and_after(cli: Cli, declared: Path) -> None:
    code, found = cli.json("plan", "--layout", str(declared), "--ranks-per-node", "2")
    assert code == 0
    assert found["kind"] == "plan"
    assert (found["world"], found["nodes"], found["tensors"]) == (4, 2, 3)
    assert found["bytes"] == {"unique": 10 * MIB, "held": 24 * MIB, "saved": 10 * MIB}
    assert [(row["stages"], row["ranks"]) for row in found["stages"]] == [([0], 2), ([1], 2)]
    for row in found["stages"]:
        assert row["held"] == {"least": 6 * MIB, "median": 6 * MIB, "most": 6 * MIB}
        assert row["divided"] == {"least": 5 * MIB // 2, "median": 5 * MIB // 2, "most": 5 * MIB // 2}
    assert [(row["axes"], row["holders"], row["ranks"], row["copy"]) for row in found["savers"]] == [
        (["dp"], 2, 2, 4 * MIB),
        (["dp", "pp"], 4, 4, 2 * MIB),
        (["dp"], 2, 2, 4 * MIB),
    ]
    for row, each in zip(found["savers"], (2 * MIB, MIB // 2, 2 * MIB), strict=True):
        assert row["each"] == {"least": each, "median": each, "most": each}
    assert found["commit_plan"]["parts"] == 8


def test_the_table(cli: Cli, declared: Path) -> None:
    code, out, err = cli("plan", "--layout", str(declared), "--ranks-per-node", "2", "--durable")
    assert (code, err) == (0, "")
    assert "declaration two-stages.json, 4 ranks, on 2 nodes\n" in out
    assert "3 tensors of 10.0 MiB; on all ranks together 24.0 MiB, 2.40 times as much" in out
    assert re.search(r"^0-1 +4 +6\.00 MiB +2\.50 MiB$", out, re.MULTILINE)
    assert re.search(r"^0-1 +2 ranks along dp +4 +8\.00 MiB +2\.00 MiB$", out, re.MULTILINE)
    assert re.search(r"^0 and 1 +4 ranks along dp x pp +4 +2\.00 MiB +512 KiB$", out, re.MULTILINE)
    assert "redundancy: peer, the cheapest that survives the loss of any one node" in out
    assert "whether that fits is not known (--window-bytes)" in out
    assert "  any one node: whole, from copies on other nodes" in out
    assert "  any 2 nodes together: lost in memory; the newest durable step remains" in out


def test_replicas_where_each_lies_on_a_node_of_its_own(cli: Cli, declared: Path) -> None:
    # Ranks 0 and 1 hold the same: on nodes of their own, each node's loss leaves the other.
    given = ("plan", "--layout", str(declared), "--ranks-per-node", "1", "--redundancy", "replicas")
    code, found = cli.json(*given, "--lose", "3")
    assert code == 0
    assert found["redundancy"]["mode"] == "replicas"
    assert found["notes"] == [
        "this version runs jobs of one node: what is sent to other nodes here is planned for a later one"
    ]
    assert "\ncommit plan: 3 parts for every byte, 4 for the ranks' small states\n" in cli(*given)[1]
    assert found["survival"]["sets"] == {"breaking": 2, "breaking_small_state": 4}
    assert found["bytes"]["saved"] == 24 * MIB
    assert found["survival"]["any"] == {"1": True, "2": False, "3": False}
    assert found["survival"]["breaking"] == [["node-0", "node-1"], ["node-2", "node-3"]]
    assert found["survival"]["sentences"][0] == "any one node: whole, from the other replicas"
    assert found["survival"]["sentences"][1] == (
        "node-0 and node-1 together; node-2 and node-3 together: lost in memory; "
        "nothing remains, there is no durable tier"
    )
    nodes = found["memory"]["nodes"]
    assert nodes["node-0"]["slots"] >= 3 * 6 * MIB


def test_windows_and_network_that_do_not_hold_a_step(cli: Cli, declared: Path) -> None:
    given = ("plan", "--layout", str(declared), "--ranks-per-node", "2", "--redundancy", "peer")
    _, found = cli.json(*given, "--window-bytes", "1 MiB", "--network-bytes", "2 MiB")
    assert found["windows"] == {"bytes": MIB, "needed": 5 * MIB // 2, "fullest_rank": 0, "steps": 3}
    assert found["network"] == {"bytes": 2 * MIB, "needed": 5 * MIB, "steps": 3}
    code, out, _ = cli(*given, "--window-bytes", "1 MiB", "--network-bytes", "2 MiB")
    assert code == 0
    assert 'can copy 1.00 MiB: a snapshot takes 3 steps (interval = "3 steps")' in out
    assert "a node must send 5.00 MiB for a step and can send 2.00 MiB: one step of 3 reaches other nodes" in out
    _, out, _ = cli(*given, "--window-bytes", "10 MiB", "--network-bytes", "10 MiB")
    assert "can copy 10.0 MiB: fits, 25% full" in out
    assert "every step fits" in out


def test_memory_that_is_not_there_is_refused_with_the_number(cli: Cli, declared: Path) -> None:
    given = ("plan", "--layout", str(declared), "--ranks-per-node", "2", "--redundancy", "peer")
    code, out, err = cli(*given, "--node-memory", "20 MiB")
    assert code == 5
    assert "memory: own slots " in out  # the table is there nevertheless
    assert re.search(r"slots do not fit: node node-\d needs own slots .* MiB of shared memory, and 20\.0 MiB are", err)
    assert "Give it more shared memory, spread the job over more nodes (--ranks-per-node) or take " in err
    assert re.search(r"take --redundancy none \([\d.]+ MiB\)\.\n$", err)
    code, found = cli.json(*given, "--node-memory", "20 MiB")
    assert code == 5
    assert found["refused"]["code"] == "no_room"
    assert found["memory"]["fits"] is False
    most = max(node["total"] for node in found["memory"]["nodes"].values())
    assert found["memory"]["missing"] == most - 20 * MIB
    code, found = cli.json(*given, "--node-memory", str(most) + " B")
    assert (code, found["memory"]["fits"], found["memory"]["missing"]) == (0, True, 0)


def test_auto_takes_what_fits_and_refuses_when_nothing_does(cli: Cli, declared: Path) -> None:
    given = ("plan", "--layout", str(declared), "--ranks-per-node", "1")
    _, found = cli.json(*given)
    needs = {offer["mode"]: offer["node_memory"] for offer in found["redundancy"]["offers"]}
    assert needs["parity"] < needs["peer"] < needs["replicas"]
    assert found["redundancy"]["mode"] == "peer"
    code, found = cli.json(*given, "--node-memory", f"{needs['peer'] - 1} B")
    assert (code, found["redundancy"]["mode"]) == (0, "parity")
    _, out, _ = cli(*given)
    assert (
        "redundancy: peer, survives the loss of any one node in less memory than replicas; windows and network are not "
        "known\n"
    ) in out
    code, found = cli.json(*given, "--node-memory", f"{needs['none']} B")
    assert (code, found["redundancy"]["mode"]) == (0, "none")
    code, out, err = cli(*given, "--node-memory", f"{needs['none'] - 1} B")
    assert code == 5
    assert "MiB of node memory missing" in out
    assert "Give it more shared memory or spread the job over more nodes (--ranks-per-node)." in err


def test_the_fullest_of_nodes_is_what_counts(cli: Cli, declared: Path) -> None:
    """Three ranks on one node, one on the other."""
    for mode in ("replicas", "peer", "parity", "none"):
        given = ("plan", "--layout", str(declared), "--ranks-per-node", "3", "--redundancy", mode)
        _, found = cli.json(*given)
        nodes = {node: need["total"] for node, need in found["memory"]["nodes"].items()}
        assert nodes["node-0"] != nodes["node-1"]
        offered = {offer["mode"]: offer["node_memory"] for offer in found["redundancy"]["offers"]}
        assert offered[mode] == max(nodes.values()) == nodes[found["memory"]["fullest_node"]]


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (6, "node-0 and node-1 together; node-2 and node-3 together; node-4 and node-5 together: lost"),
        (8, "node-0 and node-1 together; node-2 and node-3 together; node-4 and node-5 together; or 1 other set: lost"),
        (2, "any 2 nodes together: lost"),
    ],
)
def test_the_first_three_sets_are_named(cli: Cli, tmp_path: Path, world: int, words: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"world": world, "tensors": [{"name": "w", "shape": [world], "dtype": "F32"}]}))
    given = ("--ranks-per-node", "1", "--redundancy", "parity", "--group", "2")
    _, out, _ = cli("plan", "--layout", str(path), *given)
    assert f"\n  {words} in memory; nothing remains" in out


def test_what_is_not_known_is_null(cli: Cli, declared: Path) -> None:
    given = ("plan", "--layout", str(declared), "--ranks-per-node", "1")
    _, found = cli.json(*given)
    for offer in found["redundancy"]["offers"]:
        assert (offer["window_fill"], offer["network_fill"]) == (None, None)
    assert "0%" not in found["redundancy"]["reason"]
    assert (found["windows"]["steps"], found["network"]["steps"]) == (None, None)
    _, found = cli.json(*given, "--window-bytes", "12 MiB", "--network-bytes", "5 MiB")
    offers = {offer["mode"]: offer for offer in found["redundancy"]["offers"]}
    assert (offers["replicas"]["window_fill"], offers["replicas"]["network_fill"]) == (0.5, 0.0)
    assert (offers["peer"]["window_fill"], offers["peer"]["network_fill"]) == (0.2083, 0.5)
    _, found = cli.json(*given, "--network-bytes", "0B")
    assert found["redundancy"]["mode"] == "replicas"
    offers = {offer["mode"]: offer for offer in found["redundancy"]["offers"]}
    assert offers["peer"]["network_fill"] is None
    assert offers["peer"]["problem"] == "the network carries nothing but small states"


def test_a_set_within_a_named_one_is_not_named_again(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"world": 3, "tensors": [{"name": "w", "shape": [8], "dtype": "F32", "ranks": {
        "0": "0:4", "1-2": "4:8"}}]}))  # fmt: skip
    given = ("plan", "--layout", str(path), "--ranks-per-node", "1", "--redundancy", "replicas", "--lose", "3")
    _, found = cli.json(*given)
    left = "nothing remains, there is no durable tier"
    assert found["survival"]["sentences"] == [
        f"node-0: lost in memory; {left}",
        f"node-1 and node-2 together: lost in memory; {left}",
    ]
    assert ["node-0", "node-1"] in found["survival"]["breaking_small_state"]


def test_a_bidirectional_pipeline_is_one_row_for_each_pair_of_stages(cli: Cli, tmp_path: Path) -> None:
    only = ((0, [0, 3]), (1, [1, 2]), (2, [1, 2]), (3, [0, 3]))
    declared = {
        "world": 4,
        "axes": {"pp": 4},
        "stages": {"0": [0, 3], "1": [1, 2], "2": [2, 1], "3": [3, 0]},
        "tensors": [
            *({"name": f"w{n}", "shape": [9 + n, 8], "dtype": "F32", "only": {"pp": at}} for n, at in only),
            {"name": "tied", "shape": [8], "dtype": "F32"},
        ],
    }
    path = tmp_path / "chimera.json"
    path.write_text(json.dumps(declared))
    _, found = cli.json("plan", "--layout", str(path), "--show-ranks", ":")
    assert [(row["stages"], row["ranks"]) for row in found["stages"]] == [([0, 3], 2), ([1, 2], 2)]
    assert [row["stages"] for row in found["savers"]] == [[[0, 3]], [[0, 3], [1, 2]], [[1, 2]]]
    assert [rank["stages"] for rank in found["ranks"]] == [[0, 3], [1, 2], [2, 1], [3, 0]]
    _, out, _ = cli("plan", "--layout", str(path))
    assert re.search(r"^0\+3, 1\+2 +2 ranks along pp ", out, re.MULTILINE)
    assert re.search(r"^0\+3 and 1\+2 +4 ranks along pp ", out, re.MULTILINE)


def test_losses_of_three_nodes_are_named(cli: Cli, declared: Path) -> None:
    given = ("plan", "--layout", str(declared), "--ranks-per-node", "1", "--redundancy", "peer", "--copies", "2")
    code, out, _ = cli(*given, "--lose", "3")
    assert code == 0
    assert "  any 2 nodes: whole, from copies on other nodes" in out
    assert "  any 3 nodes together: lost in memory; nothing remains" in out


def test_one_node_survives_nothing_and_says_so(cli: Cli, declared: Path) -> None:
    code, out, _ = cli("plan", "--layout", str(declared))
    assert code == 0
    assert "redundancy: none, as nothing else will do: see above" in out
    assert "  the node: lost in memory; nothing remains, there is no durable tier" in out
    assert "note: " not in out


def test_ranks_and_shares(cli: Cli, declared: Path) -> None:
    code, out, _ = cli("plan", "--layout", str(declared), "--show-ranks", "1:3", "--rank", "3")
    assert code == 0
    assert re.search(r"^ *1 +node-0 +0 +dp=1 pp=0 +6\.00 MiB +2\.50 MiB +2\.50 MiB$", out, re.MULTILINE)
    assert re.search(r"^ *2 +node-0 +1 +dp=0 pp=1 ", out, re.MULTILINE)
    assert not re.search(r"^ *0 +node-0 ", out, re.MULTILINE)
    assert re.search(r"^rank 3 saves 2\.50 MiB in \d ranges$", out, re.MULTILINE)
    _, found = cli.json("plan", "--layout", str(declared), "--show-ranks", ":", "--rank", "3")
    assert [row["rank"] for row in found["ranks"]] == [0, 1, 2, 3]
    assert sum(share["bytes"] for share in found["rank"]["shares"]) == 5 * MIB // 2
    assert {share["tensor"] for share in found["rank"]["shares"]} <= {"layer.1", "tied"}


def test_a_saved_layout_gives_the_same_plan(cli: Cli, declared: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.layout"
    _, before = cli.json("plan", "--layout", str(declared), "--save-layout", str(path))
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    _, after = cli.json("plan", "--layout", str(path))
    assert after.pop("source") == "layout job.layout, 4 ranks"
    assert before.pop("source") == "declaration two-stages.json, 4 ranks"
    assert after == before


def test_a_restore_onto_another_layout(cli: Cli, declared: Path, tmp_path: Path) -> None:
    path = tmp_path / "one-stage.json"
    path.write_text(json.dumps({**TWO_STAGES, "world": 2, "axes": {"pp": 1, "dp": 2}}))
    given = ("plan", "--layout", str(declared), "--onto", str(path))
    code, out, _ = cli(*given)
    assert code == 0
    assert "a restore onto declaration one-stage.json, 2 ranks:" in out
    assert "  each of 2 ranks reads 10.0 MiB, out of 4 shards of up to 10.0 MiB together" in out
    assert "  of each shard 5.00 MiB are read, by all ranks together" in out
    _, found = cli.json(*given)
    assert found["restore"]["read"] == {"least": 10 * MIB, "median": 10 * MIB, "most": 10 * MIB}
    assert found["restore"]["sources"]["most"] == 4
    path.write_text(json.dumps({**TWO_STAGES, "tensors": [{"name": "new", "shape": [4], "dtype": "F32"}]}))
    code, _, err = cli(*given)
    assert code == 2
    assert "tensor 'new' [0:4] of rank 0" in err


def test_what_ranks_have_for_themselves_is_taken_over_only_if_it_is_equal(cli: Cli, tmp_path: Path) -> None:
    files = []
    for world in (4, 2):
        private = [{"name": f"own.{n}", "shape": [8], "dtype": "F32", "private": True} for n in range(world)]
        shared = {"name": "w", "shape": [64], "dtype": "F32"}
        files.append(tmp_path / f"{world}.json")
        files[-1].write_text(json.dumps({"world": world, "tensors": [shared, *private]}))
    given = ("plan", "--layout", str(files[0]), "--onto")
    code, found = cli.json(*given, str(files[1]))
    assert (code, found["restore"]["own"]) == (0, ["own.0", "own.1"])
    assert found["restore"]["read"]["most"] == 256 + 2 * 32
    _, out, _ = cli(*given, str(files[0]))
    assert "of their own have the same bytes: own.0, own.1, own.2 and 1 more\n" in out
    _, out, _ = cli("plan", "--layout", str(files[1]), "--onto", str(files[1]), "--rank", "0")
    assert out.endswith("have the same bytes: own.0, own.1\n")


def staged(path: Path, stages: int, names: list[str]) -> str:
    """A pipeline whose names carry the stage, as the PyTorch adapter makes them."""
    layers = [
        {"name": name, "shape": [4, 4], "dtype": "F32", "only": {"pp": at * stages // len(names)}}
        for at, name in enumerate(names)
    ]
    path.write_text(json.dumps({"world": stages, "axes": {"pp": stages}, "tensors": layers}))
    return str(path)


def test_names_of_other_stages_are_the_same_tensors(cli: Cli, tmp_path: Path) -> None:
    four = [f"{kind}stage{n}.{n}.w" for n in range(4) for kind in ("model.", "optim.0.")]
    two = [f"{kind}stage{n // 2}.{n}.w" for n in range(4) for kind in ("model.", "optim.0.")]
    plain = [f"{kind}{n}.w" for n in range(4) for kind in ("model.", "optim.0.")]
    files = {
        "four": staged(tmp_path / "four.json", 4, four),
        "two": staged(tmp_path / "two.json", 2, two),
        "plain": staged(tmp_path / "plain.json", 1, plain),
    }
    for old, new in (("four", "two"), ("two", "four"), ("four", "plain"), ("plain", "two"), ("four", "four")):
        code, found = cli.json("plan", "--layout", files[old], "--onto", files[new])
        assert code == 0
        assert found["restore"]["read"]["most"] == 8 * 64 // {"four": 4, "two": 2, "plain": 1}[new]


def test_names_that_repeat_in_each_stage(cli: Cli, tmp_path: Path) -> None:
    four = staged(tmp_path / "four.json", 4, [f"model.stage{n}.0.w" for n in range(4)])
    code, found = cli.json("plan", "--layout", four, "--onto", four)
    assert (code, found["restore"]["read"]["most"]) == (0, 64)
    two = staged(tmp_path / "two.json", 2, [f"model.stage{n}.0.w" for n in range(2)])
    code, _, err = cli("plan", "--layout", four, "--onto", two)
    assert code == 2
    assert "could all be meant" in err
    # A module that is called so by itself: rank 0 is of stage 0.
    own = staged(tmp_path / "own.json", 1, ["model.stage7.w"])
    code, _, err = cli("plan", "--layout", own, "--onto", staged(tmp_path / "own2.json", 1, ["model.w"]))
    assert code == 2
    assert "'model.w' [0:4, 0:4] of rank 0" in err


def test_a_large_preset_prints_few_lines(cli: Cli) -> None:
    given = ("--preset", "gpt-175b", "--tp", "8", "--pp", "16", "--dp", "16", "--window-bytes", "2GiB")
    code, out, err = cli("plan", *given)
    assert (code, err) == (0, "")
    assert (
        "gpt-175b (174.6 billion parameters), tp 8 x dp 16 x pp 16, 2048 ranks, "
        "on 256 nodes of up to 8 ranks (supposed: --ranks-per-node)\n"
    ) in out
    assert len(out.splitlines()) < 40
    assert re.search(r"^1-14 +1792 +17\.7 GiB +1\.11 GiB$", out, re.MULTILINE)


def test_presets_are_listed(cli: Cli) -> None:
    code, out, _ = cli("plan", "--preset", "list")
    assert code == 0
    assert re.search(r"^mixtral-8x7b +32 +4096 +32 +8 +46,702,792,704$", out, re.MULTILINE)
    _, found = cli.json("plan", "--preset", "list")
    assert found["presets"]["gpt-175b"]["layers"] == 96


def test_the_readme_shows_what_is_printed(cli: Cli) -> None:
    found = re.search(r"```\n\$ baftd (plan [^\n]*)\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    code, out, _ = cli(*found[1].split())
    assert code == 0
    assert out.rstrip("\n") == found[2], "run the command and paste what it prints"


# ---------------------------------------------------------------- a running job


def running(world: int = 2, **changes: Any) -> LayoutReply:
    builder = LayoutBuilder(world)
    for rank in range(world):
        builder.place(RankPlace(rank, stages=(0,), coordinates={"dp": rank}))
    builder.add("model.w", "F32", (256, 1024), {rank: (whole((256, 1024)),) for rank in range(world)})
    reply: dict[str, Any] = {
        "job": "gpt",
        "epoch": 3,
        "world": world,
        "layout": builder.build().encode(),
        "ranks": [
            RankLayout(rank=rank, node="here", small_room=MIB, image_bytes=3 * MIB, slots=3) for rank in range(world)
        ],
        "slots": 3,
        "durable": True,
    }
    return LayoutReply(**{**reply, **changes})


def test_of_a_running_job(cli: Cli, serve: Serve) -> None:
    server = serve({LayoutRequest: running()})
    code, found = cli.json("plan", "--job", "gpt")
    assert code == 0
    assert found["source"] == "job gpt, epoch 3, 2 ranks"
    assert server.received[0].job == "gpt"
    assert list(found["memory"]["nodes"]) == ["here"]
    assert found["memory"]["limit"] is not None  # what /dev/shm of this machine has
    assert found["survival"]["durable"] is True
    assert found["bytes"] == {"unique": MIB, "held": 2 * MIB, "saved": MIB}


@pytest.mark.parametrize(
    ("slots", "durable", "mode", "expected"),
    [
        (4, True, "replicas", 4),  # 3 and 4 are what "auto" has without and with a durable tier
        (3, False, "replicas", 3),
        (3, False, "peer", 4),
        (8, True, "none", 8),
        (8, False, "peer", 8),
    ],
)
def test_slots_of_a_running_job(cli: Cli, serve: Serve, slots: int, durable: bool, mode: str, expected: int) -> None:
    serve({LayoutRequest: running(slots=slots, durable=durable)})
    given = ("plan", "--job", "gpt", "--shm-dir", "/nowhere", "--ranks-per-node", "1", "--redundancy", mode)
    _, found = cli.json(*given)
    saved = MIB // 2 if mode in ("peer", "none") else MIB
    assert found["memory"]["nodes"]["node-0"]["slots"] // (saved + MIB) == expected


def test_of_a_job_without_durable_tier_and_elsewhere(cli: Cli, serve: Serve) -> None:
    serve({LayoutRequest: running()})
    code, found = cli.json("plan", "--job", "gpt", "--no-durable", "--shm-dir", "/nowhere", "--ranks-per-node", "1")
    assert code == 0
    assert found["memory"]["limit"] is None
    assert found["survival"]["durable"] is False
    assert found["nodes"] == 2


def test_of_a_job_that_is_not_whole(cli: Cli, serve: Serve) -> None:
    serve({LayoutRequest: running(layout=b"", problem="rank 1 has declared nothing.", missing=[1], ranks=[])})
    code, _, err = cli("plan", "--job", "gpt")
    assert code == 1
    assert "job gpt has no whole layout: rank 1 has declared nothing. Ranks that have declared nothing here: 1." in err


def test_a_layout_of_the_wire_is_the_one_that_is_planned(cli: Cli, serve: Serve, tmp_path: Path) -> None:
    reply = running()
    serve({LayoutRequest: reply})
    path = tmp_path / "job.layout"
    code, _, _ = cli("plan", "--job", "gpt", "--save-layout", str(path))
    assert code == 0
    assert Layout.decode(path.read_bytes()) == Layout.decode(reply.layout)
