"""What training processes say while they train: declare, begin, seal, skip, save, finish, leave."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from baftd.checkpoint.cutting import cut_entry
from baftd.checkpoint.facts import Record, token_from, token_record
from baftd.checkpoint.identity import Token
from baftd.checkpoint.image import ImageLayout, plan_image
from baftd.checkpoint.shard import TensorEntry, small_room_for
from baftd.daemon.clients import Client
from baftd.daemon.context import Context
from baftd.daemon.division import Divisions
from baftd.daemon.job import JobOnNode, wire_cadence, wire_token
from baftd.daemon.said_schedules import schedule_record, schedule_said
from baftd.daemon.said_steps import check_step, is_near
from baftd.daemon.waiting import Waiters
from baftd.errors import BaftError, Degraded, Fenced, FormatError, NoRoom, RankError, UsageError, VerificationFailed
from baftd.memory import preflight
from baftd.memory.control import ControlPage
from baftd.memory.slot_file import IMAGE_OFFSET, file_size
from baftd.wire.messages import (
    Ack,
    Begin,
    Cadence,
    Declare,
    Declared,
    Entry,
    Fence,
    Finish,
    Grant,
    Leave,
    Save,
    ScheduleSaid,
    Seal,
    Share,
    Skip,
    SlotPlace,
    Timings,
    WireToken,
)

__all__ = ["Trainer", "layout_record", "to_entry"]

TOUCH_RATE = 256 << 20
"""Bytes a second at which the pages of further slots are touched at least, while ranks train in the first."""
AT_ONCE = 64 << 20
"""Bytes of slots that are touched before `Declared` is sent; of more only the first slot is."""
TELL_AGAIN = 1.0
"""Seconds for which a rank may go by another cadence than the job's until it is told again: word of it may be on its
way."""


def to_entry(entry: Entry) -> TensorEntry:
    """A declared entry as the pure core has it."""
    return TensorEntry(
        name=entry.name,
        dtype=entry.dtype,
        shape=tuple(entry.shape),
        nbytes=entry.nbytes,
        kind=entry.kind,
        global_shape=None if entry.global_shape is None else tuple(entry.global_shape),
        ranges=None if entry.ranges is None else tuple((start, stop) for start, stop in entry.ranges),
        aliases=tuple(entry.aliases),
        strides=None if entry.strides is None else tuple(entry.strides),
    )


def layout_record(
    client: Client,
    token: Token,
    layout: ImageLayout,
    slots: Iterable[int],
    stages: Iterable[int] = (),
    coordinates: Mapping[str, int] = MappingProxyType({}),
    *,
    held: int = 0,
    schedule: ScheduleSaid | None = None,
) -> Record:
    """The journal's record of a declared layout: what a daemon that was restarted needs to go on granting, and to say
    who holds what (the tensors stand in the headers of the slots' images)."""
    record: Record = {
        "k": "layout",
        "rank": client.rank,
        "token": token_record(token),
        "world": client.world,
        "tree": layout.tree_digest,
        "room": layout.small_room,
        "capacity": layout.capacity,
        "slots": list(slots),
        "stages": list(stages),
        "axes": dict(coordinates),
        "stable": sum(one.nbytes for one in layout.placements if one.entry.kind == "stable"),
    }
    if held:
        record["held"] = held
    if schedule is not None:
        record["schedule"] = schedule_record(schedule)
    if layout.plan:
        record["plan"] = layout.plan
    return record


class Trainer:
    """Answers the messages of training processes that have a token."""

    def __init__(self, context: Context, waiters: Waiters) -> None:
        self._context = context
        self._waiters = waiters
        self._divisions = Divisions(context)

    # ------------------------------------------------------------------ who may speak

    def admit(self, job: JobOnNode, client: Client, token: WireToken | None, rank: int) -> Token:
        """The sender's token, if it may write. Raises `Fenced` (the client is told) or `RankError`."""
        if rank != client.rank:
            raise RankError(
                f"{client} of job {job.name} speaks for rank {rank}.", hint="This is a fault of the client."
            )
        if token is None:
            raise UsageError(f"{client} of job {job.name} has no token: it has not resumed.")
        said = Token(token.epoch, token.incarnation)
        current = job.token
        if current is None or said.epoch > current.epoch:
            raise UsageError(f"epoch {said.epoch} of job {job.name} is not known on node {self._context.node}.")
        if said != current:
            reason = f"epoch {current.epoch} of job {job.name} has taken over"
            self._context.server.send(client.peer, Fence(token=wire_token(current), reason=reason))
            raise Fenced(f"{client} of epoch {said.epoch} may write nothing: {reason}.")
        client.token = said
        return said

    # ------------------------------------------------------------------ layout

    async def declare(self, job: JobOnNode, client: Client, message: Declare) -> None:
        """Plan the image, make the slots, grant the first one.

        Raises TryAgain where replicated ranges are to be divided and not all ranks have declared what they hold.
        """
        token = self.admit(job, client, message.token, message.rank)
        workers = self._context.workers
        room = small_room_for(message.small_bytes)
        held = [to_entry(entry) for entry in message.entries]
        division = await self._divisions.agree(job, client, token, held, message.uncut)
        plan = b"" if division is None else division.plan
        cuts = () if division is None else division.cuts[client.rank]

        def plan_it() -> ImageLayout:
            entries = held if not plan else [cut_entry(held[cut.entry], cut.ranges)[0] for cut in cuts]
            return plan_image(entries, room, job=job.name, rank=client.rank, world=client.world, plan=plan, held=held)

        layout = await workers.urgent(plan_it)
        job.files.layouts[layout.tree_digest] = layout
        async with self._context.provisioning:
            taken = job.granted_to_others(job.writer_of(client), client.rank)
            order = (job, client.rank, layout, taken, job.restored_slots(), message.numa_node)
            try:
                slots, fresh = await workers.urgent(self._lay_out, *order)
            except NoRoom:
                # First what this rank itself has no use for, slots of the layout that it leaves or another world's; and
                # what was left of ranks that have not laid out theirs: they make it anew if it is what they need.
                self.admit(job, client, message.token, message.rank)
                keep = {client.rank: self._fitting(job, client.rank, layout, taken)}
                for rank in [rank for rank in job.core.tables if rank in keep or not job.declared(rank)]:
                    job.apply(job.core.shed(rank, job.writer_of(client), keep.get(rank, [])))
                try:
                    slots, fresh = await workers.urgent(self._lay_out, *order)
                except NoRoom as short:
                    make_room = self._context.make_room
                    need = short.missing or self._context.slots * file_size(layout.capacity)
                    if make_room is None or not await make_room(need):
                        raise
                    slots, fresh = await workers.urgent(self._lay_out, *order)
        self.admit(job, client, message.token, message.rank)  # a newer start may have come in the meantime
        record = layout_record(
            client, token, layout, slots, message.stages, message.coordinates,
            held=sum(entry.nbytes for entry in held if entry.kind == "stable") if plan else 0,
            schedule=message.schedule,
        )  # fmt: skip
        job.remember_layout(client.rank, record)
        self._divisions.tell(job, token, plan)
        grants: list[Grant] = []
        writer = job.writer_of(client)
        # A slot whose pages are not touched yet would make the training process wait at its first fence: it is given
        # to the core when it is ready.
        ready = [slot for slot in slots if slot not in fresh]
        job.apply(
            job.core.declare(
                client.rank, writer, token, world=client.world, tree_digest=layout.tree_digest, slots=ready
            ),
            keep_grants=grants,
        )
        client.state = "training"
        self._pace(job, client.rank, record)
        capacity = file_size(layout.capacity) - IMAGE_OFFSET
        reply = Declared(
            id=message.id,
            token=message.token,
            plan_generation=job.layout_generation(),
            control_path=job.arena.control_path(client.rank),
            slots=[SlotPlace(slot, job.arena.slot_path(client.rank, slot), capacity) for slot in slots],
            small_room=room,
            grants=grants,
            cadence=self.cadence(job, message.token),
            plan=plan,
            shares=[Share(cut.entry, None if cut.ranges is None else list(cut.ranges)) for cut in cuts],
        )
        self._context.server.send(client.peer, reply)
        job.log.info(
            "declared", rank=client.rank, tensors=len(held), bytes=layout.capacity, slots=len(slots),
            plan=plan.hex()[:8] or None,
        )  # fmt: skip
        for slot in fresh:
            await workers.touching(self._prefault, job, client.rank, slot, message.numa_node)
            if job.closed or job.layouts.get(client.rank) != record:
                return  # laid out anew, or over
            job.apply(job.core.lay_slots(client.rank, [slot]))

    def declare_again(self, job: JobOnNode, client: Client) -> bool:
        """After a restart of the daemon or a reconnect: what the process had declared still holds. False: unknown."""
        record = job.layouts.get(client.rank)
        if record is None or client.token is None or token_from(record["token"]) != client.token:
            return False
        present = job.files.find(client.rank)
        slots = [int(slot) for slot in record["slots"] if int(slot) in present]
        if len(slots) < len(record["slots"]) or int(record["world"]) != client.world:
            return False
        if self._divisions.outdated(job, client):
            return False
        writer = job.writer_of(client)
        job.apply(
            job.core.declare(
                client.rank, writer, client.token, world=client.world, tree_digest=record["tree"], slots=slots
            )
        )
        self._pace(job, client.rank, record)
        return True

    def _pace(self, job: JobOnNode, rank: int, record: Record) -> None:
        """Plan for a rank what it has declared."""
        try:
            said = schedule_said(record.get("schedule"))
        except FormatError as error:  # of a damaged journal
            job.log.warning("schedule_not_known", rank=rank, why=str(error))
            said = None
        capacity = int(record["capacity"])
        job.pacing.declared(
            rank,
            token_from(record["token"]),
            nbytes=int(record.get("stable", capacity)),
            most=capacity,
            held_bytes=int(record.get("held", 0)),
            said=said,
        )

    def cadence(self, job: JobOnNode, token: WireToken) -> Cadence:
        """Which steps are snapshot, as the job's coordinator has decided."""
        view = job.view
        if view is None:
            return Cadence(token=token, from_step=0, every=self._context.settings.first_interval)
        return wire_cadence(view.cadence, token)

    def _fitting(self, job: JobOnNode, rank: int, layout: ImageLayout, taken: set[int]) -> list[int]:
        """Slots of a former layout that serve as well: large enough, and not so large that memory is wasted. One that a
        process of an older start may still write to is given to nobody, however long that lives."""
        capacity = file_size(layout.capacity) - IMAGE_OFFSET
        present = job.files.find(rank).items()
        most = capacity + capacity // 4 + (1 << 20)
        found = [slot for slot, room in present if capacity <= room <= most and slot not in taken]
        return found[: self._context.slots]

    def _lay_out(
        self,
        job: JobOnNode,
        rank: int,
        layout: ImageLayout,
        taken: set[int],
        restored: Mapping[tuple[int, int], int],
        numa_node: int,
    ) -> tuple[list[int], list[int]]:
        """(slots of the layout, those of them whose pages are not touched yet). The first free one is touched."""
        settings, count = self._context.settings, self._context.slots
        slots = self._fitting(job, rank, layout, taken)
        missing = count - len(slots)
        if missing:
            size = file_size(layout.capacity)
            held = sum(size for place, size in restored.items() if place not in {(rank, slot) for slot in slots})
            headroom = preflight.check(settings.shm_dir, own=missing * size, reserve=settings.memory_reserve, held=held)
            for warning in headroom.warnings:
                job.log.warning("memory", why=warning)
        fresh: list[int] = []
        for slot in range(job.files.next_index(rank), job.files.next_index(rank) + missing):
            try:
                job.files.create(rank, slot, layout.capacity, numa_node)
            except BaseException:
                for made in fresh:
                    job.files.remove(rank, made)
                raise
            fresh.append(slot)
        control = job.arena.control_path(rank)
        if not os.path.exists(control):
            ControlPage.create(control, rank=rank).close()
            job.arena.let_in(control)
        at_once = len(fresh) if missing * file_size(layout.capacity) <= AT_ONCE else 1
        for slot in fresh[:at_once]:
            job.files.get(rank, slot).prefault(numa_node=numa_node)
        return slots + fresh, fresh[at_once:]

    def _prefault(self, job: JobOnNode, rank: int, slot: int, numa_node: int) -> None:
        workers, refused = self._context.workers, job.counters["no_slot"]
        try:
            file = job.files.get(rank, slot)
            with workers.work("touch", file.size, within=file.size / TOUCH_RATE) as work:

                def pace(nbytes: int) -> None:
                    if job.counters["no_slot"] > refused:
                        work.hurry()  # a rank has found none
                    work(nbytes)

                file.prefault(cancel=workers.cancel.is_set, numa_node=numa_node, pace=pace)
        except (BaftError, OSError) as error:  # the first snapshot into it touches the pages instead
            job.log.warning("not_prefaulted", rank=rank, slot=slot, why=str(error))

    # ------------------------------------------------------------------ every step

    def begin(self, job: JobOnNode, client: Client, message: Begin) -> None:
        """The slot is being filled."""
        token = self.admit(job, client, message.token, message.rank)
        check_step(job, client, message.step, "begin")
        self._passed(job, client, message.step)
        writer = job.writer_of(client)
        job.apply(job.core.begin(client.rank, writer, token, message.step, message.slot, message.generation))

    def seal(self, job: JobOnNode, client: Client, message: Seal) -> None:
        """The slot holds the state of a step."""
        token = Token(message.token.epoch, message.token.incarnation)
        believed = is_near(job, client, message.step)
        if believed:
            self._passed(job, client, message.step)
        rank, slot, generation = client.rank, message.slot, message.generation
        writer = job.writer_of(client)
        if not job.is_granted(writer, rank, slot, generation):
            # Said again after a reconnect, or never granted: the core knows which, and the slot may hold another step.
            self.admit(job, client, message.token, message.rank)
            return
        try:
            shard, digested = job.files.sealed(rank, slot, generation, message.digests)
            if (shard.token, shard.step, shard.updates) != (token, message.step, message.updates):
                raise FormatError(f"slot {slot} of rank {rank} holds step {shard.step}, not {message.step}.")
        except (FormatError, VerificationFailed, OSError) as error:
            job.counters.add("torn")
            job.log.warning("seal_refused", rank=rank, step=message.step, why=str(error))
            if believed:
                job.apply(job.core.skip(rank, writer, token, message.step, str(error), slot, generation))
            else:
                job.apply(job.core.give_up(rank, writer, slot, generation))
            raise VerificationFailed(str(error)) from error
        if not believed:
            self._passed(job, client, message.step)  # however far it is: the slot's header says the same
        job.counters.add("sealed")
        job.training.held_ms.append(message.held_ms)
        job.training.sealed(message.step)
        job.log.debug("sealed", rank=rank, step=message.step, bytes=shard.image_length, held_ms=message.held_ms)
        job.apply(job.core.seal(rank, writer, shard, slot, generation, digested=digested))
        job.mark_verified(rank, slot, generation)
        self.admit(job, client, message.token, message.rank)

    def skip(self, job: JobOnNode, client: Client, message: Skip) -> None:
        """No snapshot of the step from this rank."""
        token = Token(message.token.epoch, message.token.incarnation)
        writer = job.writer_of(client)
        try:
            check_step(job, client, message.step, "skip")
        except FormatError:
            if message.slot is not None:
                job.apply(job.core.give_up(client.rank, writer, message.slot, message.generation))
            self.admit(job, client, message.token, message.rank)
            raise
        self._passed(job, client, message.step)
        job.counters.add("torn" if message.torn else "skipped")
        repeated = job.training.skipped(client.rank, message.step, message.reason)
        say = job.log.debug if repeated else job.log.info  # a fast job that skips every step must not fill the log
        say("skipped", rank=client.rank, step=message.step, torn=message.torn, why=message.reason)
        job.apply(
            job.core.skip(client.rank, writer, token, message.step, message.reason, message.slot, message.generation)
        )
        self.admit(job, client, message.token, message.rank)

    def timings(self, job: JobOnNode, client: Client, message: Timings) -> None:
        """What a rank did between two boundaries."""
        token = self.admit(job, client, message.token, message.rank)
        self._check_cadence(job, client, token, message.cadence)
        try:
            job.pacing.timings(client, token, message)
        except FormatError:
            job.counters.add("timings_refused")
            raise
        self._divisions.reconsider(job)

    def _check_cadence(self, job: JobOnNode, client: Client, token: Token, known: tuple[int, int, int]) -> None:
        """Word of a cadence may be lost, and nothing else ever shows it: a rank that goes on without is told again."""
        view, now = job.view, self._context.clock()
        if view is None or view.token != token or not known[1]:
            return
        cadence = view.cadence
        if known == (cadence.from_step, cadence.every, cadence.probe):
            client.outdated = None
        elif client.outdated is None or client.outdated[0] != cadence:
            client.outdated = (cadence, now)
        elif now - client.outdated[1] >= TELL_AGAIN:
            client.outdated = (cadence, now)
            job.counters.add("cadences_told_again")
            job.log.debug("cadence_told_again", rank=client.rank, went_by=known, every=cadence.every)
            self._context.server.send(client.peer, self.cadence(job, wire_token(token)))

    def _passed(self, job: JobOnNode, client: Client, step: int) -> None:
        client.step = max(client.step, step)
        client.state = "training"
        if client.token is not None and client.token == job.token:
            job.pace.boundary(step, self._context.clock())

    # ------------------------------------------------------------------ now and then

    async def save(self, job: JobOnNode, client: Client, message: Save) -> None:
        """Make the newest committed step, at least this one, durable now."""
        await job.caught_up()
        token = self.admit(job, client, message.token, message.rank)
        view, table = job.view, job.core.tables.get(client.rank)
        committed = view.committed if view is not None else None
        reached = committed is not None and committed.epoch == token.epoch and committed.step >= message.step
        if not reached and (table is None or message.step not in table.held(token)):
            raise Degraded(
                f"step {message.step} of rank {client.rank} has no snapshot, so it cannot be made durable "
                f"({job.training.last_skip or 'it was not taken'})."
            )
        self._waiters.want(job, client.peer, message.id, message.step, finish=False)
        try:
            await self._context.coordinator.want_durable(job.name, token, message.step)
        except BaftError:
            self._waiters.drop(job, client.peer, message.id)
            raise
        self._waiters.settle(job)

    async def finish(self, job: JobOnNode, client: Client, message: Finish) -> None:
        """The rank is done."""
        await job.caught_up()
        token = self.admit(job, client, message.token, message.rank)
        client.state = "finished"
        self._waiters.want(job, client.peer, message.id, message.step, finish=True)
        try:
            await self._context.coordinator.finish(job.name, token, client.rank, message.step)
        except BaftError:
            self._waiters.drop(job, client.peer, message.id)
            raise

    def leave(self, job: JobOnNode, client: Client, message: Leave) -> None:
        """The rank ends without finishing: its slots stay."""
        client.state = "left"
        job.client_died(client)  # as far as its slots go: it fills none any more
        job.log.info("left", rank=client.rank, pid=client.pid, why=message.reason)
        self._context.server.send(client.peer, Ack(id=message.id))
