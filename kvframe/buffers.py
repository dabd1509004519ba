"""The memory of pools: one flat int8 tensor each, of zero bytes, on a device, pinned, or shared between processes.

A buffer is a context manager. Its memory goes back the moment that it is closed and the last view of it is dropped,
never by a garbage collection; a shared buffer's name and a temporary file go with the close.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from kvframe.checks import round_up
from kvframe.errors import BufferMemoryError, HookError, MissingDependencyError, UsageError
from kvframe.plugins import PluginHost

try:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
except ModuleNotFoundError as error:
    raise MissingDependencyError(module="kvframe.buffers", needs="torch", extra="torch") from error

ALIGNMENT = 256  # bytes: what device allocators give, and the widest vector access of kernels
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_SHARED_FOLDER = Path("/dev/shm")


class Buffer:
    """One pool's bytes.

    Args:
        tensor: flat int8.
        pool: the pool's name.
        on_close: called once, when the buffer is closed.
    """

    def __init__(self, tensor: torch.Tensor, pool: str, on_close: Callable[[], object] | None = None) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._on_close = on_close
        self.pool = pool
        self.nbytes: int = tensor.numel()

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, int8 [nbytes].

        Raises:
            UsageError: the buffer is closed.
        """
        if self._tensor is None:
            raise UsageError(option="buffer", value=self.pool, rule="is closed, make its views before")
        return self._tensor

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._tensor is None

    @property
    def released(self) -> bool:
        """Whether the memory has gone back: it is closed, and no view of it is left."""
        return self.closed and bool(self._storage.expired())

    def close(self) -> None:
        """Give the memory back as soon as the last view is dropped. Closing twice does nothing."""
        self._tensor = None
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def allocate(
    host: PluginHost, pool: str, nbytes: int, device: str = "cpu", *, alignment: int = ALIGNMENT
) -> Buffer:
    """The buffer of a pool: the first plugin's that offers one (`kvframe_allocate_buffer`), else plain device memory.

    Args:
        host: the plugins.
        pool: the pool's name.
        nbytes: its size.
        device: a torch device, such as "cpu", "cuda:1" or "meta".
        alignment: the first byte's address is a multiple of it.

    Raises:
        BufferMemoryError: memory is short.
        HookError: a plugin gave something else than a flat int8 tensor of that size.
    """
    _check_size(nbytes, alignment)
    answers = host.call_all("kvframe_allocate_buffer", pool=pool, nbytes=nbytes, device=device)
    for tensor in answers:
        flat = isinstance(tensor, torch.Tensor) and tensor.dtype is torch.int8
        if not flat or tuple(tensor.shape) != (nbytes,) or tensor.stride(0) != 1:
            given = (
                f"{tensor.dtype} of shape {tuple(tensor.shape)}" if hasattr(tensor, "dtype") else repr(tensor)
            )
            raise HookError(
                hook="kvframe_allocate_buffer",
                plugin=f"for pool {pool!r}",
                reason=f"must give a flat int8 tensor of {nbytes} bytes, not {given}",
            )
        return Buffer(tensor, pool)
    return device_buffer(nbytes, device, alignment=alignment, pool=pool)


def device_buffer(
    nbytes: int, device: str = "cpu", *, alignment: int = ALIGNMENT, pool: str = "device"
) -> Buffer:
    """Memory of a device, zeroed. "meta" has a size and no bytes.

    Raises:
        BufferMemoryError: memory is short.
        UsageError: no bytes are asked for, or the alignment is none.
    """
    _check_size(nbytes, alignment)
    if torch.device(device).type == "cpu":
        _check_host_memory(nbytes, pool, "host memory")
    return Buffer(_zeros(nbytes, alignment, pool, f"{device} memory", device=device), pool)


def pinned_buffer(nbytes: int, *, alignment: int = ALIGNMENT, pool: str = "host") -> Buffer:
    """Page-locked host memory, zeroed, which an accelerator copies from and to without the CPU.

    Raises:
        BufferMemoryError: memory is short.
        UsageError: there is no accelerator to lock pages for.
    """
    _check_size(nbytes, alignment)
    if not torch.cuda.is_available():
        raise UsageError(
            option="pinned_buffer",
            value=None,
            rule="needs an accelerator that torch can use; device_buffer gives plain host memory",
        )
    _check_host_memory(nbytes, pool, "pinned host memory")
    return Buffer(_zeros(nbytes, alignment, pool, "pinned host memory", pin_memory=True), pool)


def shared_buffer(nbytes: int, name: str, *, create: bool = True, pool: str = "host") -> Buffer:
    """Memory that several processes see under one name, page aligned.

    The process that creates it owns the name and frees it on closing; the others attach with `create=False`. On Linux
    the name is also that of a `multiprocessing.shared_memory.SharedMemory`.

    Raises:
        BufferMemoryError: memory is short.
        UsageError: the name is taken, or with `create=False` absent or smaller.
    """
    folder = _SHARED_FOLDER if _SHARED_FOLDER.is_dir() else Path(tempfile.gettempdir())
    if not name or "/" in name:
        raise UsageError(option="shared_buffer name", value=repr(name), rule="must be a plain file name")
    return _mapped(folder / name, nbytes, create=create, temporary=create, pool=pool, memory="shared memory")


def file_buffer(
    nbytes: int, path: str | os.PathLike[str], *, create: bool = True, pool: str = "host"
) -> Buffer:
    """A file mapped into memory, page aligned; what is written stays in the file.

    Raises:
        BufferMemoryError: the file system is full.
        UsageError: the file exists already, or with `create=False` is absent or smaller.
    """
    return _mapped(Path(path), nbytes, create=create, temporary=False, pool=pool, memory="file storage")


def _mapped(path: Path, nbytes: int, *, create: bool, temporary: bool, pool: str, memory: str) -> Buffer:
    _check_size(nbytes, 1)
    if create:
        _reserve(path, nbytes, pool, memory)
    elif not path.is_file() or path.stat().st_size < nbytes:
        size = f"has {path.stat().st_size:,} bytes" if path.is_file() else "does not exist"
        raise UsageError(option="buffer", value=str(path), rule=f"{size}, and {nbytes:,} are asked for")
    tensor = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.int8)
    return Buffer(tensor, pool, (lambda: path.unlink(missing_ok=True)) if temporary else None)


def _reserve(path: Path, nbytes: int, pool: str, memory: str) -> None:
    """A new file whose bytes exist: a full file system is found here, not when a kernel writes."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except FileExistsError:
        raise UsageError(option="buffer", value=str(path), rule="exists already") from None
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, nbytes)
        else:
            os.truncate(handle, nbytes)
    except OSError as error:
        path.unlink()
        if error.errno not in _NO_ROOM:
            raise
        room = os.statvfs(path.parent)
        raise BufferMemoryError(
            pool=pool,
            memory=f"{memory} ({path.parent})",
            wanted_bytes=nbytes,
            available_bytes=room.f_bavail * room.f_frsize,
        ) from error
    finally:
        os.close(handle)


def _zeros(nbytes: int, alignment: int, pool: str, memory: str, **where: Any) -> torch.Tensor:
    try:
        # Allocators promise less than a plan may ask for, so the start is moved up to the next multiple.
        whole = torch.zeros(nbytes + alignment, dtype=torch.int8, **where)
    except (RuntimeError, MemoryError) as error:  # torch says "no memory" with several classes
        if isinstance(error, torch.cuda.OutOfMemoryError) or "alloc" in str(error):
            raise BufferMemoryError(pool=pool, memory=memory, wanted_bytes=nbytes) from error
        raise
    start = round_up(whole.data_ptr(), alignment) - whole.data_ptr()
    return whole[start : start + nbytes]


def _check_size(nbytes: int, alignment: int) -> None:
    for option, value in (("nbytes", nbytes), ("alignment", alignment)):
        if value < 1:
            raise UsageError(option=option, value=value, rule="must be at least 1 byte")


def _check_host_memory(nbytes: int, pool: str, memory: str) -> None:
    # An operating system that promises more than it has would kill the process later instead.
    available = available_host_bytes()
    if available is not None and nbytes > available:
        raise BufferMemoryError(pool=pool, memory=memory, wanted_bytes=nbytes, available_bytes=available)


def available_host_bytes() -> int | None:
    """Host memory that can be had without swapping, in bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
