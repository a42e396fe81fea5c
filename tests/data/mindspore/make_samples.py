"""Make the samples of this directory anew. Needs MindSpore, which the project and its tests do not.

    python3.11 -m venv VENV && VENV/bin/pip install mindspore==2.10.0 numpy==1.26.4 protobuf==7.36.2
    VENV/bin/python make_samples.py OUT [case ...]          a few seconds for each rank of each case

MindSpore cannot run semi-automatic parallel training on a CPU, but it can *compile* it for any rank of any world, which
writes strategy and group files: with the check of the device target taken out (a pointer of its library set to null),
the compilation ended before the backend, and group sizes read off the names of groups. None of this is public.

For each case OUT/<case>/ gets
    strategy_<ranks>.ckpt (or .json)   the strategy files, equal ones once ("0-3": those of ranks 0 to 3)
    merged.ckpt (or .json)             with pipeline stages: the same merged by merge_pipeline_strategys
    group_<rank>.pb                    the group file of each rank
    layout.txt                         what MindSpore says, `<ranks> L <name> <entry of parameter_layout_dict>` and
                                       `<ranks> R <name> <groups of ranks that hold one slice>` (from
                                       get_parameter_redundancy)
    slices.json                        what MindSpore's own functions cut out of whole tensors that hold 0, 1, 2, ...:
                                       {tensor: {"shape", "load": {box: ranks}, "transform": "same" or as "load"}}
    "load" is `_load_tensor_by_layout` with the layout that the rank's own compilation gave, groups from its group file;
    "transform" is `transform_checkpoints` from one whole checkpoint to the merged strategy file, read back.
Raw output of the compilations is left in OUT/.raw/<case>/, and used again where it is there.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {
    # name: (data parallel, model parallel, pipeline stages, options)
    "dp1mp1pp4": (1, 1, 4, {}),
    "dp2mp2": (2, 2, 1, {}),
    "dp2mp2_opt_shard2": (2, 2, 1, {"opt": True, "shard": 2}),
    "dp2mp2pp2_json": (2, 2, 2, {"json": True}),
    "dp4pp2_opt_all": (4, 1, 2, {"opt": True}),
    "dp4pp2_zero1": (4, 1, 2, {"opt": True, "level": "level1"}),
    "dp4pp2_zero2": (4, 1, 2, {"opt": True, "level": "level2"}),
    "dp4mp2_opt_shard3": (4, 2, 1, {"opt": True, "shard": 3}),
    "dp4mp2_opt_shard2": (4, 2, 1, {"opt": True, "shard": 2}),
    "dp2mp4_opt_all": (2, 4, 1, {"opt": True}),
    "dp2mp4_opt_shard4": (2, 4, 1, {"opt": True, "shard": 4}),
    "dp2mp2_of8_opt_shard2": (2, 2, 1, {"world": 8, "opt": True, "shard": 2}),
    "dp8_opt_shard4": (8, 1, 1, {"opt": True, "shard": 4}),
    "dp2mp2pp2_opt_all_zero1": (2, 2, 2, {"opt": True, "level": "level1"}),
    "dp2mp4pp2": (2, 4, 2, {}),
    "dp4mp2pp2_opt_shard2": (4, 2, 2, {"opt": True, "shard": 2}),
    "dp2mp2_threshold": (2, 2, 1, {"opt": True, "threshold": 1}),
    "dp1mp4_manual": (1, 4, 1, {"manual": True}),
    "dp1mp4_manual_json": (1, 4, 1, {"manual": True, "json": True}),
    "dp2mp2_nested": (2, 2, 1, {"nested": True}),
    "dp2mp2_nested_json": (2, 2, 1, {"nested": True, "json": True}),
    "dp2mp2pp2_tied": (2, 2, 2, {"tied": True}),
}
HIDDEN, VOCABULARY, OUTPUTS = 16, 32, 6


def world_of(case: str) -> int:
    dp, mp, pp, options = CASES[case]
    return int(options.get("world", dp * mp * pp))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the samples anew; needs MindSpore 2.10.0.")
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--rank", type=int, default=-1, help="compile for this rank only (the script calls itself)")
    parser.add_argument("--pack", action="store_true", help="cut whole tensors, write the samples (it calls itself)")
    given = parser.parse_args()
    for case in given.cases or CASES:
        raw = (given.out / ".raw" / case).resolve()
        if given.rank >= 0:
            compile_rank(case, given.rank, raw)
        elif given.pack:
            pack(case, raw, given.out / case)
        else:
            raw.mkdir(parents=True, exist_ok=True)
            for rank in range(world_of(case)):
                if not (raw / f"layout_rank{rank}.txt").exists():
                    call(case, given.out, "--rank", str(rank))
            call(case, given.out, "--pack")


def call(case: str, out: Path, *more: str) -> None:
    """Run one part in a process of its own: MindSpore keeps global state."""
    command = [sys.executable, str(Path(__file__).resolve()), str(out.resolve()), case, *more]
    rank = more[1] if more[0] == "--rank" else "0"
    with tempfile.TemporaryDirectory() as scratch:  # a failed compilation writes into the current directory
        environment = {
            **os.environ,
            "GLOG_v": "3",
            "RANK_ID": rank,
            "RANK_SIZE": str(world_of(case)),
            "MS_DEV_PRECOMPILE_ONLY": "1",
            "GROUP_INFO_FILE": str(out.resolve() / ".raw" / case / f"group_rank{rank}.pb"),
        }
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
    failed = "" if done.returncode == 0 else f" FAILED\n{done.stdout[-500:]}\n{done.stderr[-900:]}"
    print(case, *more, failed, flush=True)


def compile_rank(case: str, rank: int, out: Path) -> None:
    """Compile the network for one rank; write its strategy file, group file and layout."""
    import mindspore as ms
    import mindspore.graph.api as api
    import mindspore.ops.operations.comm_ops as comm_ops
    import mindspore.parallel._auto_parallel_context as context_module
    import mindspore.train._utils as train_utils
    from mindspore.parallel._auto_parallel_context import auto_parallel_context
    from mindspore.parallel.strategy import enable_save_strategy_online

    _dp, _mp, pp, options = CASES[case]
    world = world_of(case)
    ms.set_context(mode=ms.GRAPH_MODE)
    library = ctypes.CDLL(os.path.join(os.path.dirname(ms.__file__), "lib", "libmindspore_core.so"))
    ctypes.c_void_p.in_dll(library, "_ZN9mindspore9MsContext6seter_E").value = None

    def set_device_num(self: object, number: int) -> None:
        self._context_handle.set_hccl_test_avaible(True)  # type: ignore[attr-defined]
        self._context_handle.set_device_num(number)  # type: ignore[attr-defined]

    def group_size(group: str | None = "hccl_world_group") -> int:
        match = re.match(r"(\d+)-", group or "")  # groups of the parallel pass are called "<size>-<hash>"
        return int(match[1]) if match else world

    context_module._AutoParallelContext.set_device_num = set_device_num
    comm_ops.get_group_size = group_size
    comm_ops.get_rank = lambda group="hccl_world_group": rank % group_size(group)
    train_utils.get_group_size = group_size
    train_utils.get_rank = lambda: rank
    init_context = api._init_auto_parallel_context

    def init_auto_parallel_context(net: object) -> None:
        init_context(net)
        auto_parallel_context()._context_handle.set_hccl_test_avaible(True)

    api._init_auto_parallel_context = init_auto_parallel_context
    ms.set_context(device_target="Ascend")
    ending = "json" if options.get("json") else "ckpt"
    settings: dict[str, object] = {
        "parallel_mode": "semi_auto_parallel",
        "device_num": world,
        "global_rank": rank,
        "pipeline_stages": pp,
        "full_batch": True,
        "enable_parallel_optimizer": bool(options.get("opt")),
        "group_ckpt_save_file": str(out / f"group_rank{rank}.pb"),
        "strategy_ckpt_config": {
            "save_file": str(out / f"strategy_rank{rank}.{ending}"),
            "only_trainable_params": False,
        },
    }
    if options.get("opt"):
        optimizer: dict[str, object] = {
            "parallel_optimizer_threshold": options.get("threshold", 0),
            "optimizer_weight_shard_size": options.get("shard", -1),
        }
        if "level" in options:
            optimizer["optimizer_level"] = options["level"]
        settings["parallel_optimizer_config"] = optimizer
    ms.set_auto_parallel_context(**settings)
    auto_parallel_context()._context_handle.set_hccl_test_avaible(True)
    enable_save_strategy_online()
    step, inputs = network(case)
    step.compile(*inputs)
    layouts = step.parameter_layout_dict
    lines = [f"L {name} {layout}" for name, layout in layouts.items()]
    lines += [f"R {name} {groups}" for name, groups in train_utils.get_parameter_redundancy(layouts).items()]
    (out / f"layout_rank{rank}.txt").write_text("\n".join(lines) + "\n")


def network(case: str) -> tuple:
    """The training cell of a case, and its inputs: an embedding, layers of two matrices, a head, AdamWeightDecay."""
    import mindspore as ms
    import numpy as np
    from mindspore import Parameter, Tensor, nn, ops
    from mindspore.common.initializer import initializer
    from mindspore.nn.wrap.cell_wrapper import PipelineCell, _TrainGradAccuStepCell

    dp, mp, pp, options = CASES[case]

    def parameter(*shape: int) -> Parameter:
        return Parameter(initializer("normal", list(shape), ms.float32))

    class Linear(nn.Cell):
        def __init__(self, inputs: int, outputs: int, cut: str) -> None:
            super().__init__()
            self.weight = parameter(outputs, inputs)
            self.bias = parameter(outputs)
            product = {
                "none": ((dp, 1), (1, 1)), "columns": ((dp, 1), (mp, 1)), "rows": ((dp, mp), (1, mp)),
            }[cut]  # fmt: skip
            self.product = ops.MatMul(transpose_b=True).shard(product)
            self.add = ops.Add().shard(((dp, mp), (mp,)) if cut == "columns" else ((dp, 1), (1,)))

        def construct(self, x):
            return self.add(self.product(x, self.weight), self.bias)

    class Layer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first = Linear(HIDDEN, 4 * HIDDEN, "columns")
            self.relu = ops.ReLU().shard(((dp, mp),))
            self.second = Linear(4 * HIDDEN, HIDDEN, "rows")
            self.add = ops.Add().shard(((dp, 1), (dp, 1)))

        def construct(self, x):
            return self.add(x, self.second(self.relu(self.first(x))))

    class Nested(nn.Cell):
        """A weight whose rows are cut by two dimensions of the device matrix at once."""

        def __init__(self) -> None:
            super().__init__()
            layout = ms.parallel.Layout((dp, mp), ("dp", "mp"))
            both = (layout(("dp", "mp"), "None"), layout(("dp", "mp"), "None"))
            turned = (layout("None", ("mp", "dp")), layout("None", ("mp", "dp")))
            vector = (layout(("dp", "mp")), layout(("dp", "mp")))
            self.left = parameter(HIDDEN, HIDDEN)
            self.right = parameter(HIDDEN, HIDDEN)
            self.turned = parameter(HIDDEN, HIDDEN)
            self.other = parameter(HIDDEN, HIDDEN)
            self.vector = parameter(HIDDEN)
            self.vector2 = parameter(HIDDEN)
            self.multiply = ops.Mul().shard(both)
            self.multiply_turned = ops.Mul().shard(turned)
            self.multiply_vector = ops.Mul().shard(vector)
            self.product = ops.MatMul().shard(((dp, 1), (1, 1)))
            self.product2 = ops.MatMul().shard(((dp, 1), (1, 1)))
            self.add = ops.Add().shard(((dp, 1), (1,)))

        def construct(self, x):
            x = self.product(x, self.multiply(self.left, self.right))
            x = self.product2(x, self.multiply_turned(self.turned, self.other))
            return self.add(x, self.multiply_vector(self.vector, self.vector2))

    class Unembed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.product = ops.MatMul(transpose_b=True).shard(((dp, 1), (1, 1)))
            self.head = Linear(VOCABULARY, OUTPUTS, "none")

        def construct(self, x, table):
            return self.head(self.product(x, table))

    class Embed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.gather = ops.Gather().shard(((1, 1), (dp,)))

        def construct(self, table, tokens):
            return self.gather(table, tokens, 0)

    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = parameter(VOCABULARY, HIDDEN)
            self.embed = Embed()
            layers = [Nested()] if options.get("nested") else [Layer() for _ in range(max(2, pp))]
            self.layers = nn.CellList(layers)
            self.scale = parameter(HIDDEN)
            self.small = parameter(1)
            self.multiply = ops.Mul().shard(((dp, 1), (1,)))
            self.shift = ops.Add().shard(((dp, 1), (1,)))
            self.tied = bool(options.get("tied"))
            self.head = Unembed() if self.tied else Linear(HIDDEN, OUTPUTS, "none")
            for index, layer in enumerate(self.layers):
                layer.pipeline_stage = min(index * pp // len(layers), pp - 1)
            self.embed.pipeline_stage = 0
            self.head.pipeline_stage = pp - 1
            if self.tied:
                self.embedding.add_pipeline_stage(pp - 1)

        def construct(self, tokens):
            x = self.embed(self.embedding, tokens)
            for layer in self.layers:
                x = layer(x)
            x = self.shift(self.multiply(x, self.scale), self.small)
            if self.tied:
                return self.head(x, self.embedding)
            return self.head(x)

    class Manual(nn.Cell):
        """An embedding whose rows are cut by hand into unequal parts, one for each column of the input."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = parameter(VOCABULARY, HIDDEN)
            self.gather = ops.Gather().shard(((mp, 1), (1, mp)))
            self.gather.add_prim_attr("manual_split", (4, 10, 12, 6))
            self.reshape = ops.Reshape()
            self.head = Linear(4 * HIDDEN, OUTPUTS, "rows")

        def construct(self, tokens):
            return self.head(self.reshape(self.gather(self.embedding, tokens, 0), (2, 4 * HIDDEN)))

    class Loss(nn.Cell):
        def __init__(self, net: nn.Cell) -> None:
            super().__init__()
            self.net = net
            self.subtract = ops.Sub().shard(((dp, 1), (dp, 1)))
            self.square = ops.Square().shard(((dp, 1),))
            self.mean = ops.ReduceMean().shard(((dp, 1),))

        def construct(self, tokens, wanted):
            return self.mean(self.square(self.subtract(self.net(tokens), wanted)))

    micro = 4 if pp > 1 else 1
    rows = dp * micro * 2
    tokens = Tensor(np.zeros((rows, 4) if options.get("manual") else (rows,), np.int32))
    wanted = Tensor(np.zeros((rows, OUTPUTS), np.float32))
    net = Manual() if options.get("manual") else Net()
    loss = Loss(net)
    parameters = net.trainable_params()
    if pp > 1:
        loss = PipelineCell(loss, micro)
    optimizer = nn.AdamWeightDecay(parameters, 1e-3)
    step = _TrainGradAccuStepCell(loss, optimizer) if pp > 1 else nn.TrainOneStepCell(loss, optimizer)
    step.set_train()
    return step, (tokens, wanted)


def pack(case: str, raw: Path, out: Path) -> None:
    """Cut whole tensors by MindSpore's own functions, and write the samples: everything that is equal only once."""
    out.mkdir(parents=True, exist_ok=True)
    strategies: dict[bytes, list[int]] = {}
    lines: dict[str, list[int]] = {}
    ending = "json" if CASES[case][3].get("json") else "ckpt"
    for rank in range(world_of(case)):
        strategies.setdefault((raw / f"strategy_rank{rank}.{ending}").read_bytes(), []).append(rank)
        (out / f"group_{rank}.pb").write_bytes((raw / f"group_rank{rank}.pb").read_bytes())
        for line in (raw / f"layout_rank{rank}.txt").read_text().splitlines():
            lines.setdefault(line, []).append(rank)
    for content, ranks in strategies.items():
        (out / f"strategy_{said(ranks)}.{ending}").write_bytes(content)
    (out / "layout.txt").write_text("".join(f"{said(ranks)} {line}\n" for line, ranks in lines.items()))
    options = CASES[case][3]
    # The JSON form has split shapes for dimensions that are cut twice, and MindSpore's own tools cannot read that.
    transformed = {} if options.get("nested") and options.get("json") else by_transform(case, raw, out)
    loaded = by_load(case, raw)
    tensors = []
    for name in sorted(loaded.keys() | transformed.keys()):
        one = {"shape": (loaded.get(name) or transformed[name])["shape"]}
        for key, found in (("load", loaded), ("transform", transformed)):
            boxes: dict[str, list[int]] = {}
            for rank, box in found.get(name, {"ranks": {}})["ranks"].items():
                boxes.setdefault(",".join(f"{start}:{stop}" for start, stop in box), []).append(int(rank))
            one[key] = {box: said(ranks) for box, ranks in boxes.items()}
        if one["transform"] == one["load"]:
            one["transform"] = "same"
        tensors.append(f"{json.dumps(name)}: {json.dumps(one)}")
    (out / "slices.json").write_text("{\n" + ",\n".join(tensors) + "\n}\n")


def said(ranks: list[int]) -> str:
    """Ranks in short: "0-3", "0,2,4-5"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def layouts_of(path: Path) -> dict[str, tuple]:
    found = {}
    for line in path.read_text().splitlines():
        if line.startswith("L "):
            _, name, layout = line.split(" ", 2)
            found[name] = ast.literal_eval(layout)
    return found


def box_of(part: object, shape: list[int]) -> list[list[int]]:
    """The ranges that a part of the tensor 0, 1, 2, ... covers. It must be one block."""
    import numpy as np

    flat = np.asarray(part).reshape(-1)
    first = np.unravel_index(int(flat.min()), shape) if shape else ()
    last = np.unravel_index(int(flat.max()), shape) if shape else ()
    box = [[int(a), int(b) + 1] for a, b in zip(first, last, strict=True)]
    whole = np.arange(np.prod(shape)).reshape(shape)
    assert np.array_equal(flat, whole[tuple(slice(a, b) for a, b in box)].reshape(-1)), (box, part)
    return box


def by_load(case: str, out: Path) -> dict:
    import mindspore as ms
    import mindspore.parallel._tensor as tensors
    import numpy as np
    from mindspore.train.node_strategy_pb2 import ParallelGroupMap

    pp, world = CASES[case][2], world_of(case)
    found: dict = {}
    for rank in range(world):
        groups = ParallelGroupMap()
        groups.ParseFromString((out / f"group_rank{rank}.pb").read_bytes())
        ranks = {item.group_name: list(item.parallel_group_ranks.dim) for item in groups.parallel_group_item}
        ranks["hccl_world_group"] = list(range(world))
        tensors.get_rank = lambda group, ranks=ranks, rank=rank: ranks[group].index(rank)
        tensors.get_group_size = lambda group, ranks=ranks: len(ranks[group])
        for name, layout in layouts_of(out / f"layout_rank{rank}.txt").items():
            if name.startswith("inputs") or not layout[4]:
                continue  # an input, or cut by hand: "only support uniform split"
            shape = layout[6]
            uncut = shape
            if len(layout[1]) != len(shape):
                # Dimensions cut twice are split in two: layout[7] is the slice in that form, which asks for its whole.
                cuts = tensors._get_tensor_strategy(layout[0], layout[1])
                uncut = [size * parts for size, parts in zip(layout[7], cuts, strict=True)]
            whole = ms.Tensor(np.arange(np.prod(shape), dtype=np.int32).reshape(uncut))
            layout = (*layout[:2], list(layout[7]), *layout[3:6], uncut)
            if layout[5]:
                # A group of the optimizer's sharding: layout[2] may be the slice before it, which would ask for a
                # reshape; an empty one asks for none.
                layout = (*layout[:2], [], *layout[3:])
            part = tensors._load_tensor_by_layout(whole, layout, rank % (world // pp))
            entry = found.setdefault(name, {"shape": shape, "ranks": {}})
            entry["ranks"][str(rank)] = box_of(part.asnumpy(), shape)
    return found


def by_transform(case: str, raw: Path, out: Path) -> dict:
    import mindspore as ms
    import numpy as np
    from mindspore.train import serialization

    serialization._get_available_memory = lambda: None
    pp, world = CASES[case][2], world_of(case)
    ending = "json" if CASES[case][3].get("json") else "ckpt"
    shapes: dict[str, list[int]] = {}
    strategies: dict[int, set[str]] = {}
    for rank in range(world):
        for name, layout in layouts_of(raw / f"layout_rank{rank}.txt").items():
            if not name.startswith("inputs") and layout[4]:
                shapes[name] = layout[6]
                strategies.setdefault(rank // (world // pp), set()).add(name)
    found: dict = {}
    with tempfile.TemporaryDirectory() as scratch:
        files, source, target = Path(scratch, "strategies"), Path(scratch, "source"), Path(scratch, "target")
        files.mkdir()
        (source / "rank_0").mkdir(parents=True)
        for rank in range(world):
            name = f"strategy_rank{rank}.{ending}"
            (files / name).write_bytes((raw / name).read_bytes())
        merged = Path(scratch, f"merged.{ending}")
        ms.merge_pipeline_strategys(str(files), str(merged))
        if pp > 1:
            (out / merged.name).write_bytes(merged.read_bytes())
        whole = [
            {"name": name, "data": ms.Tensor(np.arange(np.prod(shape), dtype=np.int32).reshape(shape))}
            for name, shape in shapes.items()
        ]
        ms.save_checkpoint(whole, str(source / "rank_0" / "whole0.ckpt"))
        ms.transform_checkpoints(str(source), str(target), "cut", None, str(merged))
        for rank in range(world):
            (path,) = (target / f"rank_{rank}").glob("*.ckpt")
            for name, part in ms.load_checkpoint(str(path)).items():
                if name in strategies[rank // (world // pp)]:
                    entry = found.setdefault(name, {"shape": shapes[name], "ranks": {}})
                    entry["ranks"][str(rank)] = box_of(part.asnumpy(), shapes[name])
    return found


if __name__ == "__main__":
    main()
