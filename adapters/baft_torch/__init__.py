"""baftd for PyTorch: a snapshot of the training state at every step.

    with baft_torch.attach(model, optimizer, job="gpt", dataloader=loader, extra={"lr": scheduler}) as ckpt:
        for step in range(ckpt.resume(), steps):
            loss = train(...)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
            ckpt.step()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from baft_client.session import Session
from baft_torch._checkpointer import Checkpointer, optimizers_of
from baft_torch._cuda import CudaCopier
from baft_torch._extra import ExtraState
from baft_torch._group import identify
from baft_torch._loader import LoaderState
from baft_torch._models import ModelLike, ModelTree
from baft_torch._state import TrainingState

if TYPE_CHECKING:
    from baftd.settings import Settings

__all__ = ["Checkpointer", "attach"]


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
    settings: Settings | None = None,
) -> Checkpointer:
    """Attach a training run to the daemon of this node. Call it on every rank, after the model is wrapped and the
    optimizer made.

    model: a module, or a list or dict of them (pipeline stages, a generator and its critic); plain, DDP, or sharded
        by `fully_shard`. optimizer: one torch.optim.Optimizer, or several.
    schedule: of torch.distributed.pipelining; its stages name the tensors. dataloader: with state_dict() and
        load_state_dict(), such as StatefulDataLoader. extra: LR schedulers, GradScaler, generators, dicts of data.
    rank, world: checked against process group and launcher; read from them when left out.
    strict: raise at the next call what is otherwise only logged (None: as in the settings). audit: compare every byte
        of every N-th snapshot at its fence. stable: patterns of buffers that do not change between updates.
    group: process group whose ranks are the job's ranks (None: the default group, if there is one).

    Raises UsageError and its kin (UnsupportedTensor, StateTreeError, RankError, JobNameError, SettingsError).
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
        state = TrainingState(ModelTree(model, schedule, world=session.world), optimizers, stable)
        if state.on_device:
            session.device = CudaCopier(state.device_tensor)
        return Checkpointer(session, state, optimizers, loader, extras)
    except BaseException:
        session.close()
        raise
