"""baftd for PyTorch: a snapshot of the training state at every step.

    with baft_torch.attach(model, optimizer, job="gpt", dataloader=loader, extra={"lr": scheduler}) as ckpt:
        for step in range(ckpt.resume(), steps):
            loss = train(...)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
            ckpt.step()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from baft_client.session import Session
from baft_torch._checkpointer import Checkpointer, optimizers_of
from baft_torch._cuda import CudaCopier
from baft_torch._extra import ExtraState
from baft_torch._group import identify
from baft_torch._layout import Declared, JobLayout, LayoutSource
from baft_torch._loader import LoaderState
from baft_torch._models import ModelLike, ModelTree
from baft_torch._state import TrainingState
from baftd.checkpoint.mesh import ParallelDescription
from baftd.errors import UsageError
from baftd.telemetry import get_logger

if TYPE_CHECKING:
    from baftd.settings import Settings

__all__ = ["Checkpointer", "Declared", "ParallelDescription", "attach"]


def attach(
    model: ModelLike,
    optimizer: Any,
    *,
    job: str,
    schedule: Any = None,
    dataloader: Any = None,
    extra: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world: int | None = None,
    strict: bool | None = None,
    audit: int | None = None,
    stable: Sequence[str] = (),
    group: Any = None,
    parallel: str | ParallelDescription | None = None,
    names: Callable[[str], str] | None = None,
    layout: LayoutSource | None = None,
    settings: Settings | None = None,
) -> Checkpointer:
    """Attach a training run to the daemon of this node. Call it on every rank, after the model is wrapped and the
    optimizer made.

    model: a module, or a list or dict of them (pipeline stages, a generator and its critic); plain, DDP, or sharded
        by `fully_shard`. optimizer: one torch.optim.Optimizer, or several.
    schedule: of torch.distributed.pipelining; its stages name the tensors, and its waits are windows to copy in.
        What observes them is taken away by close().
    dataloader: with state_dict() and load_state_dict(), such as StatefulDataLoader. extra: LR schedulers, GradScaler,
        generators, dicts of data.
    rank, world: checked against process group and launcher; read from them when left out.
    strict: raise at the next call what is otherwise only logged (None: as in the settings). audit: compare every byte
        of every N-th snapshot at its fence. stable: patterns of buffers that do not change between updates.
    group: process group whose ranks are the job's ranks (None: the default group, if there is one).

    Which tensors are replicas, and which are parts of one whole, is read from DTensors, DistributedDataParallel and the
    schedule. What they do not say, these do; a tensor of which nobody speaks belongs to its rank alone:
    parallel: degrees such as "tp=2,pp=2,dp=2,order=tp-cp-ep-dp-pp" (None: as in the settings). Plain parameters are
        read by the attributes that Megatron puts on them (tensor_model_parallel, partition_dim, partition_stride;
        allreduce=False for experts); with pp > 1 give the list of this rank's model chunks, or schedule=.
    names: from a name as it is saved ("model.stage1.layers.0.weight") to one that means the same tensor on every rank
        ("model.layers.8.weight"), so that another number of stages or experts a rank can be started from it.
    layout: {pattern of names: "replicated", "own", or (global shape, ranges)}, or a function of name and tensor that
        returns one of these or None. It is asked first.

    Raises UsageError and its kin (UnsupportedTensor, StateTreeError, RankError, JobNameError, SettingsError,
    LayoutError).
    """
    optimizers = optimizers_of(optimizer)
    loader = None if dataloader is None else LoaderState(dataloader)
    extras = ExtraState(extra)
    identity = identify(group, rank, world)
    session = Session.attach(
        job,
        rank=identity.rank,
        world=identity.world,
        incarnation=identity.incarnation,
        settings=settings,
        strict=strict,
        framework="torch",
        audit=audit,
    )
    try:
        told = JobLayout(session.rank, session.world, _degrees(parallel, session), names, layout)
        models = ModelTree(model, schedule, world=session.world, layout=told)
        state = TrainingState(models, optimizers, stable)
        session.stages, session.coordinates = models.stages, models.coordinates()
        for name, remark, count in state.remarks():
            get_logger("torch").bind(job=session.job, rank=session.rank).warning(
                "own_tensors", name=name, tensors=count, note=f"saved as this rank's own: {remark}"
            )
        if state.on_device:
            session.device = CudaCopier(state.device_tensor)
        return Checkpointer(session, state, optimizers, loader, extras, group, schedule=schedule)
    except BaseException:
        session.close()
        raise


def _degrees(parallel: str | ParallelDescription | None, session: Session) -> ParallelDescription | None:
    """What attach(parallel=) or the setting says; UsageError where it makes no sense or does not fit the ranks."""
    given = session.settings.parallel if parallel is None else parallel
    if isinstance(given, ParallelDescription):
        return given
    if not isinstance(given, str):
        raise UsageError(
            f"attach(parallel=) is a {type(given).__name__}.", hint='Write it as "tp=2,pp=2,dp=2", or leave it out.'
        )
    try:
        return ParallelDescription.parse(given, session.world) if given else None
    except UsageError as error:
        if parallel is not None:
            raise
        raise UsageError(
            error.message, hint=f"{error.hint} It is the setting `parallel` (BAFTD_PARALLEL or baftd.toml).".lstrip()
        ) from None
