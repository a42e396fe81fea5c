"""The object that a training loop holds: boundaries, fences, resume and finish."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch

from baft_client.saved import SavedShards
from baft_client.session import Session
from baft_client.source import Counters, OutcomeKind
from baft_torch import _rng
from baft_torch._agreement import Agreement
from baft_torch._common import Common
from baft_torch._extra import ExtraState
from baft_torch._hooks import UpdateHooks
from baft_torch._loader import LoaderState
from baft_torch._observe import PipelineObserver
from baft_torch._reshard import plan_reshard
from baft_torch._restore import differences, load
from baft_torch._state import TrainingState
from baft_torch._tensors import is_dtensor
from baft_torch._waits import Waits
from baftd.errors import BaftError, FormatError, ModelMismatch, UsageError
from baftd.telemetry import get_logger

__all__ = ["Checkpointer"]

FORMAT = 1
"""Of the small state that this adapter writes."""


class Checkpointer:
    """Made by `attach`. Use it as a context manager: left normally it finishes the job, left by an exception every
    slot stays for the next start.

    Call `resume()` once, then `step()` at each boundary: after the update, the schedulers and `zero_grad()`. No
    trouble with a snapshot reaches the training loop, unless `strict`: then the next call raises it.
    """

    def __init__(
        self,
        session: Session,
        state: TrainingState,
        optimizers: Sequence[Any],
        loader: LoaderState | None,
        extra: ExtraState,
        group: Any = None,
        *,
        schedule: Any = None,
    ) -> None:
        self._session = session
        self._state = state
        self._loader = loader
        self._extra = extra
        self._generators = {**(loader.generators() if loader else {}), **extra.generators()}
        self._optimizers = list(optimizers)
        self._agreement = Agreement(group, world=session.world, timeout=session.settings.rendezvous_timeout)
        self._not_carried: tuple[str, ...] = ()
        self._step: int | None = None
        self._since_resume = 0
        self._begun = False
        self._updates_at_boundary = 0
        self._fenced_by_hand = False
        self._pending: BaftError | None = None
        self._said: set[str] = set()
        self._log = get_logger("torch").bind(job=session.job, rank=session.rank)
        self._closed = False
        self._fenced = False
        self._hooks = UpdateHooks(optimizers, self._before_update)
        self.waits = Waits(
            session.windows,
            session.recorder,
            modules=state.models.given,
            params=[param for each in optimizers for group in each.param_groups for param in group["params"]],
            pipeline=schedule is not None,
            device=state.on_device,
        )
        """Windows around what the training thread waits for. An observer of a pipeline's schedule tells it more."""
        try:
            self._observer = None if schedule is None else PipelineObserver.attach(schedule, session, self.waits)
        except BaseException:
            self.waits.close()
            self._hooks.remove()
            raise
        if loader is not None:
            loader.watch(self.waits)
        for name, nbytes in state.large_buffers():
            self._log.warning(
                "large_buffer", name=name, bytes=nbytes,
                note="copied at the boundary, while training waits; stable=[pattern] moves it to the windows if it "
                "does not change between two updates",
            )  # fmt: skip

    # ------------------------------------------------------------ what a loop calls

    def resume(
        self, *, fresh: bool = False, takeover: bool = False, reshard: bool = False, timeout: float | None = None
    ) -> int:
        """Meet all ranks, load the newest checkpoint that every rank can have, and return the first step to run.

        0: the job begins. `fresh`: begin at 0 whatever is known. `takeover`: do not wait for a predecessor that still
        runs. `reshard`: the saved ranks may have been others, or laid out in another way: tensors are cut anew for this
        layout, and `not_carried` names what belonged to the saved ranks alone. Where nothing has changed it does
        nothing, so it may always be given. Give it on all ranks.

        Raises NothingRestorable, Unreachable, TryAgain, RankError, ModelMismatch, VerificationFailed.
        """
        if self._step is not None:
            raise UsageError("resume() was called twice.")
        resumed = self._session.resume(fresh=fresh, takeover=takeover, reshard=reshard, timeout=timeout)
        if resumed.image is not None or resumed.shards is not None:
            try:
                self._state.models.shard()
                if resumed.shards is not None:
                    self._load_shards(resumed.shards)
                else:
                    self._load(resumed.image)
            except Exception as problem:
                with suppress(BaftError):  # it says of all ranks what this one knows better
                    self._session.restored(ok=False, reason=str(problem) or type(problem).__name__)
                raise
        self._session.restored(ok=True)
        self._step = resumed.step
        self._hooks.updates = self._updates_at_boundary = resumed.updates
        return resumed.step

    def step(self) -> None:
        """The boundary: the state of step k is complete, and no part of step k + 1 has begun."""
        self._raise_pending()
        if self._step is None:
            raise UsageError("step() was called before resume().", hint="Call ckpt.resume() once, before the loop.")
        if self._loader is not None:
            self._loader.disarm()
        self._step += 1
        self._since_resume += 1
        try:
            self._boundary()
        except BaftError as problem:
            self._trouble(problem)
        self._raise_pending()

    def fence(self) -> None:
        """Say that the next statement may change parameters or optimizer state. Attached optimizers say so
        themselves; an update by other means (a captured graph, an optimizer without hooks) needs this call."""
        self._before_update()
        self._fenced_by_hand = True
        self._raise_pending()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For code that swaps weights and puts them back (evaluation with averaged ones): the snapshot under way is
        completed first, and none begins within."""
        self._before_update()
        with self._session.paused():
            yield
        self._raise_pending()

    def save(self, *, durable: bool = True, timeout: float | None = None) -> str:
        """Make the state of the last boundary durable now; returns its directory. Call it on all ranks, right after
        `step()`. `durable=False` waits for the commit in memory only, and returns "".

        Raises UsageError without a durable tier, Degraded where the step was skipped, Unreachable without a daemon.
        """
        self._force(timeout)
        return self._session.save(durable=durable, timeout=timeout).path

    def finish(self, timeout: float | None = None) -> None:
        """The job is done: make its last step durable, where there is a durable tier, and then free the slots."""
        if self._step is not None:
            self._force(timeout)
            self._session.finish(timeout)

    def close(self) -> None:
        """Take hooks away and leave the daemon; slots stay. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        if self._observer is not None:
            self._observer.detach()
        self._hooks.remove()
        self.waits.close()
        if self._loader is not None:
            self._loader.disarm()
            self._loader.unwatch()
        self._session.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
            else:
                self._session.leave(f"{kind.__name__}: {value}"[:1000])
        finally:
            self.close()

    # ------------------------------------------------------------ what a loop may ask

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._session.job

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._session.rank

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._session.world

    @property
    def incarnation(self) -> str:
        """128 bits, in hexadecimal, that tell this start of the job from every other."""
        return self._session.incarnation

    @property
    def steps(self) -> int:
        """Boundaries passed since the job began; 0 before `resume()`."""
        return self._step or 0

    @property
    def updates(self) -> int:
        """Updates begun since the job began, of all attached optimizers together."""
        return self._hooks.updates

    @property
    def not_carried(self) -> tuple[str, ...]:
        """After a `resume(reshard=True)` into another layout: small state that differed among the ranks that saved it,
        so that no rank of the new layout could have it, and that begins anew ("rng.torch", "dataloader",
        "extra.<name>", "modules.<name>"). Empty otherwise."""
        return self._not_carried

    @property
    def counters(self) -> Counters:
        """What has been copied, sealed, skipped and torn."""
        return self._session.counters

    # ------------------------------------------------------------ boundary and fence

    def _boundary(self, *, force: bool = False) -> None:
        assert self._step is not None
        session, hooks = self._session, self._hooks
        if not force:  # a fence would say that the state changes, and a step that is still open is dead with that
            self._fence_quietly()
        if self._fenced_by_hand and not hooks.hooked:
            hooks.updates += 1  # an update of which only ckpt.fence() tells
        interrupted, moved = hooks.inside, hooks.updates != self._updates_at_boundary
        self._updates_at_boundary = hooks.updates
        self._fenced_by_hand = self._begun = self._fenced = False
        hooks.forget()
        self.waits.boundary()
        due = force or session.due(self._step)
        if not due and not session.undeclared:
            session.pass_by(self._step)
            return
        reason = self._unready(interrupted, moved)
        if reason and not due:
            session.pass_by(self._step)
            return
        if reason:
            self._skip(reason)
            return
        try:
            sources = self._state.refresh()
            small = self._small() if due else self._small_in_between()
        except BaftError as problem:
            self._skip(str(problem), problem)
            return
        except Exception as problem:  # noqa: BLE001  raised by a state_dict() of the user's
            where = traceback.extract_tb(problem.__traceback__)[-1]
            what = f"reading the state failed at {where.filename}:{where.lineno}: {type(problem).__name__}: {problem}"
            self._skip(what, UsageError(what))
            return
        outcome = session.boundary(
            self._step, hooks.updates, sources, small, recheck=self._state.identities, force=force
        )
        self._begun = outcome.kind is OutcomeKind.BEGAN

    def _unready(self, interrupted: bool, moved: bool) -> str:
        """Why the state is not that of a boundary; empty if it is."""
        if interrupted:
            return "an optimizer's update began and did not end"
        if self._hooks.updates == 0 and self._optimizers:
            return "no update yet: the optimizer's tensors are not known"
        if not moved and self._gradients_alive():
            return "gradients of an unfinished accumulation are alive: ckpt.step() belongs after zero_grad()"
        return ""

    def _gradients_alive(self) -> bool:
        """Whether a gradient exists that is not zero. After an update gradients may be alive because the loop clears
        them at its beginning; without one they are the sum of micro-batches that a resumed run would lack."""
        groups = [group for each in self._optimizers for group in each.param_groups]
        grads = [param.grad for group in groups for param in group["params"] if param.grad is not None]
        return any(_holds_something(grad) for grad in grads)

    def _before_update(self) -> None:
        """An update is about to begin. Called from hooks in the user's loop: raises nothing."""
        self.waits.fence()
        self._fence_quietly()

    def _fence_quietly(self) -> None:
        """Complete the snapshot under way, and say that the windows of this step are over. Raises nothing."""
        if self._fenced and not self._begun:
            return
        self._begun, self._fenced = False, True
        try:
            outcome = self._session.fence(self._hooks.updates)
        except BaftError as problem:  # strict: of an earlier call, so this one has fenced nothing yet
            self._trouble(problem)
            with suppress(BaftError):
                self._session.fence(self._hooks.updates)
            return
        late = outcome.reason.startswith("late")  # nothing changed: the copy took too long
        if outcome.kind is OutcomeKind.TORN and not late and not self._hooks.hooked:
            self._say_once(
                "no_hook",
                f"{outcome.name or 'the state'} changed and no optimizer's hook had fired: call ckpt.fence() before "
                "code that changes weights",
            )

    def _force(self, timeout: float | None) -> None:
        """Make sure that the state of the last boundary is sealed, whatever the cadence."""
        if self._since_resume and not self._session.taken(self.steps):
            self._session.reach(timeout)
            self._boundary(force=True)
        self._fence_quietly()
        self._raise_pending()

    def _small(self) -> dict[str, Any]:
        small = self._state.small()
        small["format"] = FORMAT
        # The loader comes first: asking some for their state draws random numbers.
        if self._loader is not None:
            small["loader"] = self._loader.state()
        small["extra"] = self._extra.state()
        small["rng"] = _rng.capture(self._generators)
        return small

    def _small_in_between(self) -> dict[str, Any]:
        """The same where the cadence takes no snapshot: a run that is not resumed would not be asked at this step, and
        both must draw the same random numbers."""
        before = _rng.capture(self._generators)
        try:
            return self._small()
        finally:
            _rng.restore(before, self._generators)

    # ------------------------------------------------------------ restore

    def _load(self, image: Any) -> None:
        """What this rank saved, as it is."""
        small = _known_format(image.small)
        if (self._loader is None) != ("loader" not in small):
            had = "a" if "loader" in small else "no"
            raise ModelMismatch(f"the checkpoint was saved with {had} data loader attached, and this run differs.")
        load(image, self._state, small)
        self._extra.load(small.get("extra", {}))
        put_back = self._put_back(small["rng"])
        if self._loader is None:
            put_back()
        else:
            self._loader.load(small["loader"], put_back)
        image.verify_rest()

    def _load_shards(self, shards: SavedShards) -> None:
        """What other ranks saved, or these in another layout, cut for this rank."""
        smalls = {rank: _known_format(shards.small(rank)) for rank in range(shards.world)}
        mine = smalls.get(self.rank)
        same = shards.world == self.world and mine is not None and self._fits(shards.image(self.rank), mine)
        if self._agreement.all(same):
            self._load(shards.image(self.rank))
            return
        plan = plan_reshard(
            shards,
            smalls,
            self._state,
            rank=self.rank,
            extra=self._extra.names,
            loader=self._loader is not None,
            agreement=self._agreement,
        )
        plan.apply(self._state)
        for sentence in plan.said:
            self._say_once("reshard", sentence)
        self._load_common(plan.common)
        self._say_not_carried(shards, plan.common)

    def _fits(self, image: Any, small: Mapping[str, Any]) -> bool:
        """Whether this rank is laid out as the one was that saved `image`."""
        self._state.rebuild()
        return (
            (self._loader is None) == ("loader" not in small)
            and set(small.get("extra", {})) == self._extra.names
            and not differences(image, self._state, small)
        )

    def _load_common(self, common: Common) -> None:
        """The small state that all saved ranks agreed on."""
        self._extra.load(common.extra, partly=True)

        def put_back() -> None:
            # What is not carried keeps the numbers that it has at this moment.
            now = _rng.capture(self._generators)
            carried = {**common.rng}
            if "generators" in carried:
                carried["generators"] = {**now.get("generators", {}), **carried["generators"]}
            self._put_back({**now, **carried})()

        if self._loader is None or common.loader is None:
            put_back()
        else:
            self._loader.load(common.loader, put_back)

    def _say_not_carried(self, shards: SavedShards, common: Common) -> None:
        self._not_carried = common.not_carried
        reasons = defaultdict(list)
        for name in common.not_carried:
            reasons[common.why[name]].append(name)
        for why, names in reasons.items():
            # All ranks have read the same; only which modules have states of their own may differ.
            shared = self.rank != 0 and not any(name.startswith("modules.") for name in names)
            (self._log.info if shared else self._log.warning)(
                "not_carried",
                step=shards.step,
                names=",".join(names),
                note=f"saved by {shards.world} ranks, loaded by {self.world}: each {why}, and begins anew",
            )

    def _put_back(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        def put_back() -> None:
            for sentence in _rng.restore(dict(saved), self._generators):
                self._say_once("random_numbers", sentence)

        return put_back

    # ------------------------------------------------------------ trouble

    def _skip(self, reason: str, problem: BaftError | None = None) -> None:
        assert self._step is not None
        self._session.skip(self._step, reason)
        self._say_once("skipped", reason)
        if problem is not None and self._session.strict:
            self._pending = problem

    def _trouble(self, problem: BaftError) -> None:
        self._say_once(problem.code, str(problem))
        if self._session.strict:
            self._pending = problem

    def _say_once(self, event: str, reason: str) -> None:
        """One warning for each kind of reason: numbers in it do not make it another one."""
        kind = "".join(c for c in f"{event} {reason}" if not c.isdigit())
        if kind not in self._said:
            self._said.add(kind)
            self._log.warning(event, step=self._step, reason=reason)

    def _raise_pending(self) -> None:
        problem, self._pending = self._pending, None
        if problem is not None:
            raise problem


def _known_format(small: Any) -> dict[str, Any]:
    """Small state that this adapter can read; FormatError for another."""
    if not isinstance(small, dict) or small.get("format") != FORMAT:
        known = small.get("format") if isinstance(small, dict) else type(small).__name__
        raise FormatError(f"the small state of the checkpoint has format {known!r}, this adapter reads {FORMAT}.")
    return small


def _holds_something(grad: torch.Tensor) -> bool:
    """Whether the part of a gradient that this rank holds is not all zero. Asks no other rank."""
    local = grad._local_tensor if is_dtensor(grad) else grad
    return local.layout is not torch.strided or bool(local.count_nonzero())


def optimizers_of(value: Any) -> list[Any]:
    """The optimizers that attach() was given: one, or several in a list or dict. UsageError for anything else."""
    if isinstance(value, Mapping):
        value = list(value.values())
    found = list(value) if isinstance(value, Sequence) else [value]
    for optimizer in found:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer, so it fires no hook.",
                hint="Derive it from torch.optim.Optimizer, or put its tensors into a module and call ckpt.fence() "
                "before each update.",
            )
    if len({id(optimizer) for optimizer in found}) != len(found):
        raise UsageError("one optimizer was given to attach() twice.")
    return found
