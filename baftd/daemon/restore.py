"""From what is there to verified images in slots: inventories, the restore plan, fetching, walking back.

The order matters: the epoch is opened (which fences every older start) before any shard is fetched; a shard that then
turns out to be bad is quarantined, the plan is made again, and the epoch gets an older parent. Only when every rank's
image lies verified in a slot of its node is the plan announced.

A start that may reshard reads from all ranks that saved: the images of ranks that it does not have are brought as well.
So does one from a checkpoint of which each byte was saved by one rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from baftd.checkpoint.facts import EpochFacts, Held, Inventory, ShardFacts, Source, Tier
from baftd.checkpoint.history import BadSource
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.orders import ReceiveSlot, RefuseGrant
from baftd.checkpoint.recovery import RestorePlan
from baftd.checkpoint.shard import small_room_for
from baftd.daemon.context import Context
from baftd.daemon.digesting import NO_PLACE, shard_of_fetch
from baftd.daemon.job import JobOnNode
from baftd.errors import BaftError, Degraded, Fenced, FormatError, NoRoom, UsageError, VerificationFailed
from baftd.memory import preflight
from baftd.memory.header import SlotHeader, SlotState
from baftd.memory.slot_file import IMAGE_OFFSET, file_size
from baftd.storage.interface import DurableCheckpoint, FileSink
from baftd.wire.messages import RankImage, SlotImage

__all__ = ["Brought", "Restorer", "durable_inventory", "read_durable"]

Told = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)"""

_FARTHEST_FIRST: tuple[Tier, ...] = ("durable", "peer", "memory")


@dataclass(frozen=True)
class Brought:
    """A restore plan whose images lie verified in slots."""

    token: Token
    plan: RestorePlan
    images: dict[int, SlotImage] = field(default_factory=dict)
    """By rank, of all ranks that saved; empty when the job begins afresh."""
    passed_over: tuple[str, ...] = ()
    reshard: bool = False
    """The start may have another world or layout."""

    @property
    def together(self) -> bool:
        """Whether every rank is given all images."""
        return self.reshard or self.plan.divided

    def shards(self) -> list[RankImage]:
        """What every rank is given beside its own image."""
        return [RankImage(rank, image) for rank, image in sorted(self.images.items())] if self.together else []

    def tier(self, rank: int) -> Tier | None:
        """Where a rank's state comes from: from the durable tier if any part of it does."""
        held = self.plan.sources.values() if self.together else filter(None, [self.plan.sources.get(rank)])
        tiers = {one.source.tier for one in held}
        return next((tier for tier in _FARTHEST_FIRST if tier in tiers), None)


def _capacity(held: Held) -> int:
    """Of a slot for a shard that is fetched: in slots images have more room for small state than in files."""
    return held.shard.image_length + small_room_for(1 << 19)


async def read_durable(context: Context, job: str) -> Inventory | None:
    """What the durable tier holds of a job; None where there is no tier, or it cannot be read (which is logged)."""
    tier = context.tier
    if tier is None:
        return None
    history = await context.coordinator.history(job)
    try:
        found, fence = await context.workers.urgent(lambda: (list(tier.list(job)), _fence(context, job)))
    except (BaftError, OSError) as error:
        # A directory that cannot be read must not keep a job from what lies in memory.
        context.log.warning("durable_unreadable", job=job, why=str(error))
        return None
    forgotten = fence if fence is not None and history.find(fence.epoch) is None else None
    return durable_inventory(found, forgotten, context.node)


def _fence(context: Context, job: str) -> Token | None:
    assert context.tier is not None
    try:
        return context.tier.newest_token(job)
    except FormatError as error:
        context.log.warning("fence_damaged", job=job, why=str(error))
        return None


def durable_inventory(found: list[DurableCheckpoint], fence: Token | None, node: str) -> Inventory:
    """What a durable tier holds, as recovery wants it.

    `fence`: the newest token that was opened there, if nobody else remembers its epoch (the state directory was lost).
    It is taken to have begun from the newest complete checkpoint before it, and the next epoch lies above it.
    """
    shards: list[Held] = []
    epochs: dict[int, EpochFacts] = {}
    bad: list[tuple[CheckpointId, int, str]] = []
    highest = 0
    for checkpoint in found:
        highest = max(highest, checkpoint.checkpoint.step)
        if checkpoint.token is not None and checkpoint.world:
            epochs.setdefault(checkpoint.token.epoch, EpochFacts(checkpoint.token, checkpoint.world, checkpoint.parent))
        if checkpoint.state != "complete" or checkpoint.token is None:
            bad.append((checkpoint.checkpoint, 0, f"durable: {checkpoint.state}: {checkpoint.reason}"))
            continue
        for part in checkpoint.parts:
            shard = ShardFacts(
                token=checkpoint.token,
                rank=part.rank,
                world=checkpoint.world,
                step=checkpoint.checkpoint.step,
                updates=checkpoint.updates,
                tree_digest=part.tree_digest,
                root_digest=part.root_digest,
                image_length=part.nbytes,
                plan=part.plan,
            )
            shards.append(Held(shard, Source("durable", "", part.to_fields())))
    if fence is not None and fence.epoch not in epochs:
        whole = [c for c in found if c.state == "complete" and c.token is not None and c.token.epoch < fence.epoch]
        newest = max(whole, key=lambda c: c.checkpoint, default=None)
        parent = newest.checkpoint if newest is not None else None
        epochs[fence.epoch] = EpochFacts(fence, newest.world if newest is not None else 1, parent, revision=-1)
    return Inventory(node, NO_PLACE, tuple(shards), tuple(epochs.values()), highest, tuple(bad))


class Restorer:
    """Plans and carries out restores of one daemon."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def inventories(self, job: JobOnNode) -> list[Inventory]:
        """What this node's slots and the durable tier hold. What they prove teaches the coordinator."""
        await job.caught_up()  # what is sealed counts as soon as it is digested
        found = [job.core.inventory()]
        durable = await read_durable(self._context, job.name)
        if durable is not None:
            found.append(durable)
        return found

    async def plan(
        self,
        job: JobOnNode,
        *,
        world: int | None,
        step: int | None = None,
        at_most: int | None = None,
        fresh: bool = False,
        reshard: bool = False,
    ) -> RestorePlan:
        """What a start of the job would go on from; changes nothing but what the coordinator has to learn anyway."""
        inventories = await self.inventories(job)
        for inventory in inventories:
            await self._context.coordinator.join(job.name, inventory)
        saved = {held.shard.rank for inventory in inventories for held in inventory.shards}
        return await self._context.coordinator.plan(
            job.name,
            inventories,
            world=world,
            step=step,
            at_most=at_most,
            fresh=fresh,
            reshard=reshard,
            prefer=dict.fromkeys(saved, self._context.node),
        )

    async def open(
        self,
        job: JobOnNode,
        incarnation: str,
        world: int,
        *,
        fresh: bool = False,
        reshard: bool = False,
        plan: RestorePlan | None = None,
    ) -> tuple[Token, RestorePlan]:
        """Open the epoch of a start, or find the one that it has opened already.

        Raises `NothingRestorable`, `EpochConflict`, `UsageError` for a start that has trained already, or whose world
        is not that of the newest checkpoint (unless `reshard`).
        """
        with job.held():  # until the epoch pins what the plan has chosen
            token, chosen = await self._open(job, incarnation, world, fresh, reshard, plan)
        await self._open_durable(job, token)
        return token, chosen

    async def _open(
        self, job: JobOnNode, incarnation: str, world: int, fresh: bool, reshard: bool, plan: RestorePlan | None
    ) -> tuple[Token, RestorePlan]:
        coordinator = self._context.coordinator
        history = await coordinator.history(job.name)
        head = history.head
        if head is not None and head.token.incarnation == incarnation:
            view = await coordinator.view(job.name)
            if view.begun or head.world != world:
                raise UsageError(
                    f"job {job.name}: incarnation {incarnation[:8]}... has trained already (epoch {head.token.epoch}).",
                    hint="BAFTD_INCARNATION must be new at each start of the job.",
                )
            if head.parent is None:
                return head.token, await self.plan(job, world=world, fresh=True)
            return head.token, await self.plan(job, world=world, at_most=head.parent.step, reshard=reshard)
        chosen = plan or await self.plan(job, world=world, fresh=fresh, reshard=reshard)
        view = await coordinator.open_epoch(job.name, incarnation, chosen, world=world, expected=history.epoch)
        token = view.token
        if token is None or token.incarnation != incarnation:
            raise UsageError(f"job {job.name}: another start has taken over.")
        return token, chosen

    async def _open_durable(self, job: JobOnNode, token: Token) -> None:
        """Fence older tokens in the durable tier, and remove what killed writers left there."""
        tier, workers = self._context.tier, self._context.workers
        if tier is None:
            return
        try:
            await workers.urgent(tier.open_epoch, job.name, token)
            await workers.urgent(tier.sweep, job.name)
        except Fenced:
            raise
        except (BaftError, OSError) as error:  # every durable write fences by itself, before it writes
            job.log.warning("durable_not_fenced", why=str(error))

    async def bring(
        self,
        job: JobOnNode,
        token: Token,
        plan: RestorePlan,
        world: int | None,
        told: Told = lambda *_: None,
        *,
        reshard: bool = False,
    ) -> Brought:
        """Bring the image of every rank that saved into a slot, verified; walk back when one of them is bad.

        Raises `NothingRestorable` when nothing is left, `NoRoom`, `UsageError` when the next older checkpoint is one
        of another world.
        """
        said: list[str] = list(plan.passed_over)
        while plan.checkpoint is not None:
            images, bad = await self._bring_all(job, plan, told)
            if not bad:
                return Brought(token, plan, images, tuple(dict.fromkeys(said)), reshard)
            for source in bad:
                job.counters.add("quarantined")
                job.log.error("bad_source", rank=source.rank, step=plan.step, tier=source.tier, why=source.reason)
                await self._context.coordinator.source_failed(job.name, token, source)
                if source.tier == "memory":
                    job.apply(job.core.damaged(source.rank, source.checkpoint, source.reason))
            plan = await self.plan(job, world=world, at_most=plan.step, reshard=reshard)
            said += plan.passed_over
            await self._context.coordinator.reparent(job.name, token, plan)
        return Brought(token, plan, {}, tuple(dict.fromkeys(said)), reshard)

    async def check_again(self, job: JobOnNode, brought: Brought, rank: int) -> list[BadSource]:
        """What of all that a rank was given is not, on reading it once more, what it was when it was brought."""
        checkpoint = brought.plan.checkpoint
        given = brought.images if brought.together else {rank: brought.images[rank]} if rank in brought.images else {}
        if checkpoint is None:
            return []
        workers = self._context.workers

        async def check(owner: int, image: SlotImage) -> BadSource | None:
            source = brought.plan.sources[owner].source
            slot = int(image.path.rsplit("-", 1)[1])
            try:
                found = await workers.urgent(job.files.verify, owner, slot, workers.cancel)
                if found.root_digest != image.digest:
                    raise VerificationFailed(f"{image.path} does not hold the bytes that were brought there.")
            except Degraded:  # the daemon ends: nothing was found out
                return None
            except (BaftError, OSError) as damage:
                return BadSource(checkpoint, owner, source.tier, source.node, str(damage))
            return None

        found = await asyncio.gather(*(check(owner, image) for owner, image in sorted(given.items())))
        return [bad for bad in found if bad is not None]

    async def _bring_all(
        self, job: JobOnNode, plan: RestorePlan, told: Told
    ) -> tuple[dict[int, SlotImage], list[BadSource]]:
        assert plan.checkpoint is not None
        total = sum(held.shard.image_length for held in plan.sources.values())
        done: dict[int, int] = {}

        def progress(rank: int, count: int) -> None:
            done[rank] = count
            told(f"step {plan.step}", sum(done.values()), total)

        await self._check_room(job, plan)
        ranks = sorted(plan.sources)
        results = await asyncio.gather(
            *(self._bring_one(job, rank, plan.sources[rank], progress) for rank in ranks), return_exceptions=True
        )
        images: dict[int, SlotImage] = {}
        bad: list[BadSource] = []
        for rank, result in zip(ranks, results, strict=True):
            source = plan.sources[rank].source
            if isinstance(result, SlotImage):
                images[rank] = result
            elif isinstance(result, NoRoom) or not isinstance(result, BaftError | OSError):
                raise result
            else:
                bad.append(BadSource(plan.checkpoint, rank, source.tier, source.node, str(result)))
        return images, bad

    async def _check_room(self, job: JobOnNode, plan: RestorePlan) -> None:
        """Whether all that must be fetched fits, before the first byte is. Other jobs' slots make room if need be."""
        held = fetched = 0
        for rank, source in plan.sources.items():
            known = job.core.holding(rank, source.shard.checkpoint)
            if known is not None:
                held += job.files.get(rank, known.index).size
            elif not self._fitting(job, rank, _capacity(source)):
                fetched += file_size(_capacity(source))
        if not fetched:
            return
        settings = self._context.settings

        def check() -> None:
            preflight.check(settings.shm_dir, own=0, held=held, fetched=fetched, reserve=settings.memory_reserve)

        async with self._context.provisioning:
            try:
                check()
            except NoRoom as short:
                make_room = self._context.make_room
                if make_room is None or not await make_room(short.missing):
                    raise
                check()

    def _fitting(self, job: JobOnNode, rank: int, capacity: int) -> list[int]:
        """Slots of the rank that may be overwritten for a fetch and are large enough."""
        rooms, table = job.files.find(rank), job.core.tables.get(rank)
        return [slot.index for slot in table or () if not slot.retired and rooms.get(slot.index, 0) >= capacity]

    async def _bring_one(
        self, job: JobOnNode, rank: int, held: Held, progress: Callable[[int, int], None]
    ) -> SlotImage:
        workers = self._context.workers
        if held.source.tier == "memory":
            slot = int(held.source.place["slot"])
            found = await workers.urgent(job.files.verify, rank, slot, workers.cancel)
            if (found.root_digest, found.tree_digest) != (held.shard.root_digest, held.shard.tree_digest):
                raise VerificationFailed(
                    f"{job.arena.slot_path(rank, slot)} does not hold the bytes that were verified at its seal."
                )
            progress(rank, found.image_length)
            return job.files.image(rank, slot, found)
        known = job.core.holding(rank, held.shard.checkpoint)
        if known is not None and known.shard is not None and known.shard.root_digest == held.shard.root_digest:
            # An earlier attempt has fetched it.
            found = await workers.urgent(job.files.verify, rank, known.index, workers.cancel)
            if found.root_digest == held.shard.root_digest:
                return job.files.image(rank, known.index, found)
        return await self._fetch(job, rank, held, progress)

    async def _fetch(self, job: JobOnNode, rank: int, held: Held, progress: Callable[[int, int], None]) -> SlotImage:
        """A durable shard into a slot, each chunk verified on the way."""
        workers = self._context.workers
        capacity = _capacity(held)
        async with self._context.provisioning:
            order = await self._receive(job, rank, capacity)
        try:
            shard = await workers.urgent(self._fetch_into, job, order, held, progress)
        except BaseException:
            job.apply(job.core.receive_failed(rank, order.slot, order.generation))
            raise
        job.apply(job.core.received(rank, order.slot, order.generation, shard))
        if job.core.holding(rank, shard.checkpoint) is None:
            raise UsageError(f"job {job.name}: another start has taken over while step {shard.step} was fetched.")
        return job.files.image(rank, order.slot, shard)

    async def _receive(self, job: JobOnNode, rank: int, capacity: int) -> ReceiveSlot:
        """A slot that may be overwritten and is large enough; made if there is none."""
        for attempt in range(2):
            usable = self._fitting(job, rank, capacity)
            made: list[int] = []
            if attempt or not usable:
                slot = job.files.next_index(rank)
                settings = self._context.settings
                preflight.check(settings.shm_dir, own=file_size(capacity), reserve=settings.memory_reserve)
                await self._context.workers.urgent(job.files.create, rank, slot, capacity)
                usable = made = [slot]
            ready = job.core.receive(rank, usable, made=made)
            job.apply(ready)
            for order in ready.announce:
                if isinstance(order, ReceiveSlot):
                    return order
                if isinstance(order, RefuseGrant):
                    reason = order.reason
        raise NoRoom(f"job {job.name}: no slot for the shard of rank {rank}: {reason}.")

    def _fetch_into(
        self, job: JobOnNode, order: ReceiveSlot, held: Held, progress: Callable[[int, int], None]
    ) -> ShardFacts:
        tier = self._context.tier
        assert tier is not None
        file = job.files.get(order.rank, order.slot)
        fetched = tier.fetch(
            job.name,
            held.shard.checkpoint,
            order.rank,
            FileSink(file.fd, IMAGE_OFFSET, file.capacity),
            cancel=self._context.workers.cancel,
            progress=lambda count: progress(order.rank, count),
        )
        image, shard = shard_of_fetch(file, held.shard, fetched.digests)
        file.write_header(
            SlotHeader(
                state=SlotState.VERIFIED,
                generation=order.generation,
                token=shard.token,
                job=job.name,
                rank=shard.rank,
                world=shard.world,
                step=shard.step,
                updates=shard.updates,
                image_length=shard.image_length,
                small_length=shard.small_length,
                tree_digest=shard.tree_digest,
                root_digest=shard.root_digest,
            )
        )
        job.files.layouts.setdefault(shard.tree_digest, image)
        return shard
