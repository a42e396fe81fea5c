"""The fence of a job's directory: a file that names the newest token, so that older ones can name nothing more.

`EPOCH-<n>` is made with a hard link, which fails if the name exists: of two incarnations that claim one epoch the
second is refused, on a shared file system too. Where there are no hard links the file is created exclusively and
filled; a crash in between leaves an epoch that belongs to nobody, and the next start takes the one after it.

A writer looks at the fence before it begins and again right before it names anything. One that is stopped between the
second look and the rename can still name a file, but only below `step-<k>.e<its own epoch>`: in a checkpoint that the
newer epoch has either abandoned or branched from, and with bytes that are what they say.
"""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass

from baftd.checkpoint.identity import Token
from baftd.errors import Fenced, FormatError
from baftd.storage.files import FileOps
from baftd.storage.formats import FencePost
from baftd.storage.names import Writer, checkpoint_of, fence_epoch, fence_name
from baftd.storage.small import read_small, write_small

__all__ = ["Fence"]

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})


@dataclass(frozen=True)
class Fence:
    """The fence in one job's directory, `path`. Raises the `OSError`s of the file system."""

    ops: FileOps
    writer: Writer
    job: str
    path: str

    def newest(self) -> Token | None:
        """The newest token; None where no epoch was opened. Raises `FormatError` when its file is damaged."""
        epochs = [epoch for epoch in map(fence_epoch, self._names()) if epoch is not None]
        return self._read(max(epochs)) if epochs else None

    def check(self, token: Token) -> bool:
        """True when `token` is the newest, False when none as new as it was opened; raises `Fenced` if it is older."""
        names = self._names()
        epochs = [epoch for epoch in map(fence_epoch, names) if epoch is not None]
        used = [found.epoch for found in map(checkpoint_of, names) if found is not None]
        newest = max([*epochs, *used], default=0)
        if newest > token.epoch:
            raise Fenced(
                f"job {self.job}: epoch {token.epoch} was overtaken by epoch {newest} in {self.path}; "
                "it may write nothing there any more.",
                hint="A newer start of the job is running: stop this one.",
            )
        if token.epoch not in epochs:
            return False
        try:
            holder = self._read(token.epoch).incarnation
        except FormatError as error:
            holder = f"somebody unknown ({error.message})"
        if holder != token.incarnation:
            raise Fenced(
                f"job {self.job}: epoch {token.epoch} in {self.path} belongs to {holder}, not to {token.incarnation}.",
                hint="Start the job again: it will open the next epoch.",
            )
        return True

    def open(self, token: Token) -> None:
        """Make `token` the newest, durably. Repeating it is harmless. Raises `Fenced` as `check` does."""
        if not self.check(token):
            self._make(token)
            self.check(token)
        self.ops.fsync_directory(self.path)
        for name in self._names():
            epoch = fence_epoch(name)
            if epoch is not None and epoch < token.epoch:
                self._remove(f"{self.path}/{name}")

    def _make(self, token: Token) -> None:
        final = f"{self.path}/{fence_name(token.epoch)}"
        data = FencePost(job=self.job, epoch=token.epoch, incarnation=token.incarnation).encode()
        temporary = f"{self.path}/{self.writer.temporary(fence_name(token.epoch))}"
        try:
            write_small(self.ops, temporary, data)
            try:
                self.ops.link(temporary, final)
            except FileExistsError:
                return  # somebody was faster; the caller looks who
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with contextlib.suppress(FileExistsError):  # as above
                    write_small(self.ops, final, data)
        finally:
            self._remove(temporary)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # never made, or another node was faster
            self.ops.unlink(path)

    def _read(self, epoch: int) -> Token:
        path = f"{self.path}/{fence_name(epoch)}"
        post = FencePost.decode(read_small(self.ops, path, 1 << 16), path)
        if (post.job, post.epoch) != (self.job, epoch):
            raise FormatError(f"{path} is damaged: it is about epoch {post.epoch} of job {post.job}.")
        return Token(post.epoch, post.incarnation)

    def _names(self) -> list[str]:
        return self.ops.listdir(self.path)
