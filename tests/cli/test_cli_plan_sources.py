"""What `baftd plan` is given: flags that contradict each other, files that are none, and every source it reads."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from pathlib import Path

import pytest

from baftd.cli.main import main
from baftd.cli.plan_sources import whole_numbers
from baftd.errors import UsageError
from tests.support.cli import Cli
from tests.support.daemon import RunDirs
from tests.support.mindspore_samples import DATA, first_sample

GPT = ("plan", "--layers", "4", "--hidden", "64", "--heads", "4", "--vocab", "256", "--seq", "32")

DECLARED = {"world": 2, "axes": {"dp": 2}, "tensors": [{"name": "w", "shape": [8, 8], "dtype": "F32"}]}


@pytest.fixture
def layout(tmp_path: Path) -> str:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(DECLARED))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan",), "nothing to plan for. Give --job, --layout"),
        (("plan", "--tp", "2"), "nothing to plan for"),
        (("plan", "--preset", "gpt-175"), "there is no preset 'gpt-175'. Did you mean gpt-175b?"),
        (("plan", "--layers", "4"), "a model by numbers needs --hidden, --heads, --vocab too"),
        (GPT[:-2], "a model by numbers needs --seq too"),
        ((*GPT, "--tp", "3"), "4 heads do not divide among tp = 3 ranks"),
        ((*GPT, "--pp", "3"), "4 layers do not divide into 3 stages (pp x vpp). Say how many each stage has: "),
        ((*GPT, "--pp", "2", "--stage-layers", "1,2"), "the stages have 3 layers together, but the model has 4"),
        ((*GPT, "--pp", "2", "--stage-layers", "1,x"), "'x' is no number and no NUMBERxTIMES"),
        ((*GPT, "--tp", "2", "--dp", "2", "--world", "8"), "but there are 8 ranks"),
        ((*GPT, "--tp", "4", "--world", "6"), "tp x pp x cp = 4 does not divide 6 ranks"),
        ((*GPT, "--vpp", "2"), "vpp = 2 needs pp of 2 or more"),
        ((*GPT, "--dp", "2", "--ep", "2"), "ep = 2, but the model has no experts"),
        ((*GPT, "--tp", "2", "--etp", "1"), "etp = 1, but the model has no experts"),
        ((*GPT, "--style", "llama"), "--seq counts positions that are learned, but --style llama learns none"),
        (("plan", "--preset", "llama-2-7b", "--seq", "8"), "that are learned, but llama-2-7b learns none"),
        ((*GPT, "--layers", "10001"), "layers is 10001: no transformer has more than 10000"),
        ((*GPT, "--tied"), "unrecognized arguments: --tied. `baftd plan --help` shows what it takes."),
        ((*GPT, "--zero", "4"), "zero = 4 is none of 0, 1, 2 and 3"),
        ((*GPT, "--order", "tp-pp-xx"), "order 'tp-pp-xx' is not made of tp, cp, ep, dp, pp"),
        ((*GPT, "--hidden", "65"), "hidden 65 does not divide into 4 heads"),
        ((*GPT, "--dtype", "Q7"), "--dtype Q7: there is no such type (there is BOOL, U8, "),
        ((*GPT, "--dtype", "bfloat15"), "--dtype bfloat15: there is no such type; did you mean 'BF16'?"),
        ((*GPT, "--stage-layers", ""), "'' is no number and no NUMBERxTIMES"),
        ((*GPT, "--dp", "16", "--copies", "2"), "and besides a rank's own there is 1 (--ranks-per-node)"),
        ((*GPT, "--copies", "2"), "and besides a rank's own there are none (--ranks-per-node)"),
        ((*GPT, "--copies", "2", "--redundancy", "none"), "--copies is of peer, but --redundancy is none"),
        ((*GPT, "--group", "4", "--redundancy", "peer"), "--group is of parity, but --redundancy is peer"),
        (("plan", "--preset", "gpt-1.3b", "--style", "llama"), "--style says how a model by numbers is built"),
        ((*GPT, "--window-bytes", "4"), "'4' has no unit"),
        ((*GPT, "--window-bytes", "0"), "--window-bytes is 0: it must be more"),
        ((*GPT, "--ranks-per-node", "0"), "--ranks-per-node is 0: it must be more"),
        ((*GPT, "--lose", "0"), "--lose is 0: it must be more"),
        ((*GPT, "--lose", "33"), "--lose 33: losses of up to 32 nodes are looked at"),
        ((*GPT, "--copies", "0"), "--copies is 0: it must be more"),
        ((*GPT, "--group", "1"), "a parity group needs 2 nodes or more"),
        ((*GPT, "--dp", "2", "--rank", "2"), "--rank 2 is outside of ranks 0 to 1"),
        ((*GPT, "--dp", "2", "--show-ranks", "2:3"), "--show-ranks 2:3 names no ranks between 0 and 2"),
        ((*GPT, "--dp", "2", "--show-ranks", "1:1"), "--show-ranks 1:1 names no ranks"),
        ((*GPT, "--show-ranks", "3"), "'3' is not A:B"),
        ((*GPT, "--save-layout", "x.toml"), ".toml is for declarations by hand"),
        ((*GPT, "--save-layout", "/nowhere/x"), "--save-layout /nowhere/x cannot be written: No such file"),
        ((*GPT, "--save-layout", ""), "--save-layout: the name of the file is empty"),
        ((*GPT, "--save-layout", "."), "--save-layout . is a directory"),
        ((*GPT, "--shapes", "x"), "--shapes is only read with --mindspore"),
        ((*GPT, "--layers", "-1"), "'-1' is not a whole number"),
        (("plan", "--job", "a/b"), "a/b"),
        (("plan", "--job", "gpt", "--layout", "x"), "not allowed with argument --job"),
        (("plan", "--layout", "/nowhere.toml"), "/nowhere.toml cannot be read: No such file"),
        (("plan", "--mindspore", "/nowhere"), "--mindspore /nowhere cannot be read: No such file"),
    ],
)
def test_contradictions_are_one_sentence(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("baftd: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--tp", "--layers", "--order", "--dtype", "--world"])
def test_a_layout_says_all_of_that_itself(cli: Cli, layout: str, flag: str) -> None:
    code, _, err = cli("plan", "--layout", layout, flag, "2")
    assert code == 2
    assert f"{flag} describes a model by numbers, but --layout says all of that itself" in err


def test_an_error_is_a_document_too(cli: Cli) -> None:
    for given, words in (
        (("--tp", "3"), "4 heads do not divide"),
        (("--window-bytes", "4"), "argument --window-bytes: "),
        (("--tied", "yes"), "unrecognized arguments: --tied yes."),
    ):
        code, found = cli.json(*GPT, *given)
        assert code == 2
        assert found["error"]["code"] == "usage"
        assert found["error"]["exit_code"] == 2
        assert words in found["error"]["message"]


def test_whole_numbers() -> None:
    assert whole_numbers("7, 8x3,7") == (7, 8, 8, 8, 7)
    with pytest.raises(UsageError):
        whole_numbers("")


@pytest.mark.parametrize(
    ("extra", "words", "element"),
    [
        ((), "gpt model", 14),
        (("--dtype", "f32"), "gpt model", 12),
        (("--dtype", "bfloat16"), "gpt model", 14),
        (("--dtype", "fp16"), "gpt model", 14),
        (("--optimizer", "momentum"), "gpt model", 10),
        (("--optimizer", "none"), "gpt model", 2),
    ],
)
def test_a_model_by_numbers(cli: Cli, extra: tuple[str, ...], words: str, element: int) -> None:
    code, found = cli.json(*GPT, "--tp", "2", "--dp", "2", *extra)
    assert code == 0
    assert found["source"].startswith(words)
    layer = (64 * 192 + 192) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64) + 4 * 64
    assert found["bytes"]["unique"] == element * (256 * 64 + 32 * 64 + 4 * layer + 2 * 64)


def test_a_changed_preset(cli: Cli) -> None:
    given = (
        "plan",
        "--preset",
        "mixtral-8x7b",
        "--layers",
        "2",
        "--tp",
        "2",
        "--ep",
        "4",
        "--world",
        "8",
        "--zero",
        "1",
    )
    code, found = cli.json(*given)
    assert code == 0
    assert found["source"] == (
        "mixtral-8x7b with other layers (3.2 billion parameters), tp 2 x dp 4, ep 4, zero 1, 8 ranks"
    )
    _, found = cli.json(*given, "--etp", "1", "--ep", "8")
    assert found["source"].endswith("tp 2 x dp 4, ep 8, etp 1, zero 1, 8 ranks")


def test_a_llama_by_numbers_learns_no_positions(cli: Cli) -> None:
    code, found = cli.json(*GPT[:-2], "--style", "llama", "--kv-heads", "2", "--ffn", "96")
    assert code == 0
    layer = 64 * 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert found["bytes"]["unique"] == 14 * (2 * 256 * 64 + 4 * layer + 64)


def test_nodes_of_a_declaration_are_used(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**DECLARED, "ranks_per_node": 1}))
    assert cli.json("plan", "--layout", str(path))[1]["nodes"] == 2
    assert cli.json("plan", "--layout", str(path), "--ranks-per-node", "2")[1]["nodes"] == 1


def test_names_that_the_terminal_cannot_show(
    run_dirs: RunDirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "\u91cd\u307f\U0001f600\x1b[31m"
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"world": 1, "tensors": [{"name": name, "shape": [2], "dtype": "F32"}]}))
    given = ["plan", "--layout", str(path), "--rank", "0", "--run-dir", str(run_dirs.socket.parent)]
    for encoding in ("ascii", "utf-8"):
        for extra in ([], ["--json"]):
            printed = io.BytesIO()
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding, write_through=True))
            assert main([*given, *extra]) == 0
            out = printed.getvalue().decode(encoding)
            if extra:
                assert json.loads(out)["rank"]["shares"][0]["tensor"] == name
            else:
                assert "\x1b" not in out
                assert ("\\u91cd\\u307f\\U0001f600" if encoding == "ascii" else name[:3]) in out


def test_files_that_are_none(cli: Cli, tmp_path: Path) -> None:
    for name, content, code, words in (
        ("a.layout", b"nonsense", 4, "Declarations end with .toml or .json."),
        ("a.toml", b"\xff", 2, "is not UTF-8 text (byte 0)"),
        ("a.json", b"{", 2, "is not JSON"),
        ("b.toml", b"world = 1", 2, "`tensors` is missing"),
    ):
        (tmp_path / name).write_bytes(content)
        found, _, err = cli("plan", "--layout", str(tmp_path / name))
        assert found == code
        assert name in err
        assert words in err


def test_a_folder_without_strategy_files(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("plan", "--mindspore", str(tmp_path))
    assert code == 2
    assert "has no strategy file. They are called *rank<N>*.ckpt (or .json), one for each rank; or give a merged" in err
    (tmp_path / "a_rank0.ckpt").write_bytes(b"")
    (tmp_path / "b_rank_0.ckpt").write_bytes(b"")
    code, _, err = cli("plan", "--mindspore", str(tmp_path))
    assert "two files of rank 0: a_rank0.ckpt and b_rank_0.ckpt. Put the strategy and group files of one job" in err


def shapes_of(name: str, path: Path) -> str:
    shapes = {tensor: list(shape) for tensor, shape in first_sample(name).shapes.items()}
    bias = shapes["net.head.bias"]
    path.write_text(json.dumps({**shapes, "net.head.bias": {"shape": bias, "dtype": "Float16"}}))
    return str(path)


@pytest.mark.parametrize(("name", "world", "stages"), [("dp2mp2pp2", 8, 2), ("dp2mp2pp1", 4, 1), ("dp1mp1pp4", 4, 4)])
def test_strategy_files_of_mindspore(cli: Cli, tmp_path: Path, name: str, world: int, stages: int) -> None:
    shapes = shapes_of(name, tmp_path / "shapes.json")
    code, found = cli.json("plan", "--mindspore", str(DATA / "first" / name), "--shapes", shapes)
    assert code == 0
    named = f"{stages} stages" if stages > 1 else "1 stage"
    assert found["source"] == f"MindSpore strategy in {name}, {world} ranks, {named}"
    assert [row["stages"] for row in found["stages"]] == [[stage] for stage in range(stages)]
    elements = sum(math.prod(shape) for shape in first_sample(name).shapes.values())
    assert found["bytes"]["unique"] >= 4 * elements - 2 * 8


def test_what_is_missing_among_strategy_files(cli: Cli, tmp_path: Path) -> None:
    """The number of ranks comes from the files: it must not be taken from those that happen to be there."""
    shapes = shapes_of("dp2mp2pp2", tmp_path / "shapes.json")
    folder = tmp_path / "job"
    given = ("plan", "--mindspore", str(folder), "--shapes", shapes)

    def said(*more: str) -> str:
        code, _, err = cli(*given, *more)
        assert code != 0
        return err

    shutil.copytree(DATA / "first" / "dp2mp2pp2", folder)
    for flag in ("--world", "--pp"):
        assert f"{flag} 0: a job has at least one rank" in said(flag, "0")
    (last,) = folder.glob("strategy*rank7.ckpt")
    last.rename(folder / "strategy_7.ckpt")
    err = said()
    assert f"{folder}: rank 7 of 8 has no strategy file (2 stages of 4 ranks by dev_matrix)" in err
    assert "Left out, without rank<N> in the name: strategy_7.ckpt." in err
    for path in folder.glob("group*rank7.pb"):
        path.unlink()
    assert "rank 7 of 8 has no strategy file" in said()
    for path in folder.glob("strategy*rank[456].ckpt"):
        path.unlink()
    assert "rank 4 of 8 has no strategy file" in said()  # as the group files say
    shutil.rmtree(folder)
    shutil.copytree(DATA / "first" / "dp2mp2pp2", folder)
    (other,) = (DATA / "first" / "dp1mp1pp4").glob("strategy*rank0.ckpt")
    (first,) = folder.glob("strategy*rank0.ckpt")
    shutil.copyfile(other, first)
    err = said()
    assert f"{first}: tensor " in err
    assert "cut over 1 devices (dev_matrix [1]), but a stage of rank 0's job has 4" in err


def test_a_merged_strategy_file(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "job.ckpt").write_bytes(first_sample("dp2mp2pp1").files[0])
    shapes = shapes_of("dp2mp2pp1", tmp_path / "shapes.json")
    given = ("plan", "--mindspore", str(folder), "--shapes", shapes)
    code, _, err = cli(*given)
    assert code == 2
    assert "is merged: without group files (*rank<N>*.pb) give --world" in err
    code, found = cli.json(*given, "--world", "4")
    assert code == 0
    _, ranked = cli.json("plan", "--mindspore", str(DATA / "first" / "dp2mp2pp1"), "--shapes", shapes)
    assert found["layout_digest"] == ranked["layout_digest"]


def test_strategy_files_that_do_not_fit(cli: Cli, tmp_path: Path) -> None:
    folder = str(DATA / "first" / "dp2mp2pp1")
    code, _, err = cli("plan", "--mindspore", folder)
    assert code == 2
    assert "binary strategy files have no shapes" in err
    code, _, err = cli("plan", "--mindspore", folder, "--world", "8")
    assert code == 2
    assert "world 8 or 1 stages is wrong" in err
    for content, words in (
        ("[]", "is not a table of shapes"),
        ("{", "is not JSON"),
        ('{"a": "b"}', "`a` is 'b', not a list or a whole number"),
        ('{"a": {"shape": [1], "dtyp": "F32"}}', "there is no key 'dtyp'; did you mean 'dtype'?"),
    ):
        path = tmp_path / "shapes.json"
        path.write_text(content)
        code, _, err = cli("plan", "--mindspore", folder, "--shapes", str(path))
        assert code == 2
        assert words in err
