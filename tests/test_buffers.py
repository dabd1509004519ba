"""Buffers: flat zeroed bytes of each sort of memory, aligned, given back when closed, refused in bytes when short."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="buffers need torch: pip install 'kvframe[torch]'")

from kvframe import PluginHost, buffers, hookimpl  # noqa: E402
from kvframe.buffers import allocate, device_buffer, file_buffer, pinned_buffer, shared_buffer  # noqa: E402
from kvframe.errors import BufferMemoryError, HookError, UsageError  # noqa: E402

NAME = "kvframe-test-buffers"
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.fixture
def shared():
    with shared_buffer(4096, NAME) as buffer:
        yield buffer


@pytest.mark.parametrize("alignment", [1, 64, 4096, 1 << 21, 576])
def test_device_memory_is_zero_flat_and_aligned(alignment):
    with device_buffer(10_000, alignment=alignment) as buffer:
        tensor = buffer.tensor
        assert (tensor.dtype, tuple(tensor.shape), tensor.stride()) == (torch.int8, (10_000,), (1,))
        assert not tensor.any()
        assert tensor.data_ptr() % alignment == 0


def test_meta_memory_has_a_size_and_no_bytes():
    with device_buffer(1 << 45, "meta") as buffer:
        assert (buffer.tensor.numel(), buffer.tensor.device.type) == (1 << 45, "meta")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=cuda)])
def test_cuda_memory(device):
    with device_buffer(10_000, device, alignment=4096) as buffer:
        assert buffer.tensor.data_ptr() % 4096 == 0
        assert not buffer.tensor.any()
    with pytest.raises(BufferMemoryError, match="cuda memory"):
        device_buffer(1 << 50, device)


def test_pinned_memory():
    if torch.cuda.is_available():
        with pinned_buffer(10_000) as buffer:
            assert buffer.tensor.is_pinned()
    else:
        with pytest.raises(UsageError, match="needs an accelerator"):
            pinned_buffer(10_000)


def test_closing_gives_the_memory_back_with_the_last_view():
    with device_buffer(1_000) as buffer:
        view = buffer.tensor[10:20].view(torch.int16)
        view.fill_(7)
    assert buffer.closed
    assert not buffer.released
    assert view[0] == 7  # a view that somebody still holds stays valid
    del view
    assert buffer.released
    with pytest.raises(UsageError, match="is closed"):
        buffer.tensor  # noqa: B018 - reading it is what fails
    buffer.close()


def test_the_memory_goes_back_when_the_block_ends_by_an_error():
    def fails():
        with device_buffer(1_000) as buffer:
            kept.append(buffer)
            raise LookupError

    kept = []
    with pytest.raises(LookupError):
        fails()
    assert kept[0].closed


@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_are_above_zero(nbytes):
    with pytest.raises(UsageError, match=f"nbytes {nbytes}: must be at least 1 byte"):
        device_buffer(nbytes)


# --- shortage ------------------------------------------------------------------------------------------------------


def test_short_host_memory_is_an_error_in_bytes(monkeypatch):
    monkeypatch.setattr(buffers, "available_host_bytes", lambda: 1_000_000)
    with pytest.raises(BufferMemoryError) as short:
        device_buffer(1_000_001, pool="host")
    assert (short.value.wanted_bytes, short.value.available_bytes) == (1_000_001, 1_000_000)
    assert "pool 'host' wants 1,000,001 bytes of host memory, 1,000,000 are available" in str(short.value)
    assert isinstance(short.value, MemoryError)


def test_what_the_system_does_not_foresee_the_allocator_says(monkeypatch):
    monkeypatch.setattr(buffers, "available_host_bytes", lambda: None)
    with pytest.raises(BufferMemoryError, match=f"wants {1 << 55:,} bytes of cpu memory"):
        device_buffer(1 << 55)


def test_available_host_memory_is_plausible():
    available = buffers.available_host_bytes()
    if sys.platform != "linux":
        pytest.skip("only Linux says how much memory is available")
    assert 1 << 20 < available < 1 << 50


@pytest.mark.parametrize("make", [shared_buffer, file_buffer])
def test_a_full_file_system_is_found_before_anything_is_written(make, tmp_path):
    where = NAME if make is shared_buffer else tmp_path / "pool"
    with pytest.raises(BufferMemoryError, match=f"wants {1 << 55:,} bytes") as short:
        make(1 << 55, where)
    assert 0 < short.value.available_bytes < 1 << 55
    with pytest.raises(UsageError, match="does not exist"):
        make(1, where, create=False)


# --- shared memory and files ---------------------------------------------------------------------------------------


def add_one(name, size):
    with shared_buffer(size, name, create=False) as buffer:
        buffer.tensor.add_(1)


def test_processes_share_memory(shared):
    shared.tensor[100:200] = 41
    worker = multiprocessing.get_context("spawn").Process(target=add_one, args=(NAME, 4096))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert (shared.tensor[100:200] == 42).all()
    assert (shared.tensor[:100] == 1).all()


def test_the_creator_frees_the_name(shared):
    with pytest.raises(UsageError, match="exists already"):
        shared_buffer(10, NAME)
    with shared_buffer(4096, NAME, create=False):
        pass  # an attached buffer leaves the name where it is
    shared_buffer(4096, NAME, create=False).close()
    shared.close()
    with pytest.raises(UsageError, match="does not exist"):
        shared_buffer(4096, NAME, create=False)


def test_attaching_to_less_than_asked_for_is_refused(shared):
    with pytest.raises(UsageError, match="has 4,096 bytes, and 4,097 are asked for"):
        shared_buffer(4097, NAME, create=False)


@pytest.mark.parametrize("name", ["", "a/b"])
def test_shared_names_are_plain(name):
    with pytest.raises(UsageError, match="plain file name"):
        shared_buffer(10, name)


def test_a_file_keeps_what_is_written(tmp_path):
    path = tmp_path / "pool"
    with file_buffer(5_000, path) as buffer:
        assert buffer.tensor.data_ptr() % 4096 == 0
        buffer.tensor[4_999] = 7
    assert path.read_bytes() == bytes(4_999) + b"\x07"
    with file_buffer(5_000, path, create=False) as buffer:
        assert buffer.tensor[4_999] == 7
    with pytest.raises(UsageError, match="exists already"):
        file_buffer(5_000, path)


# --- plugins -------------------------------------------------------------------------------------------------------


def host_with(give):
    @hookimpl
    def kvframe_allocate_buffer(pool, nbytes, device):
        return give(pool, nbytes, device)

    plugin = ModuleType("own-memory")
    plugin.kvframe_allocate_buffer = kvframe_allocate_buffer
    return PluginHost([plugin])


def test_a_plugin_supplies_the_buffer_of_a_pool():
    mine = torch.zeros(100, dtype=torch.int8)
    host = host_with(lambda pool, nbytes, device: mine if pool == "host" else None)
    with allocate(host, "host", 100) as buffer:
        assert buffer.tensor is mine
    with allocate(host, "device", 100) as buffer:
        assert buffer.tensor is not mine
        assert buffer.pool == "device"


@pytest.mark.parametrize("wrong", [torch.zeros(99, dtype=torch.int8), torch.zeros(100), "memory"], ids=str)
def test_a_wrong_buffer_is_the_plugin_s_fault(wrong):
    with pytest.raises(HookError, match=r"kvframe_allocate_buffer.*flat int8 tensor of 100 bytes"):
        allocate(host_with(lambda pool, nbytes, device: wrong), "host", 100)


# --- without torch -------------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import kvframe, kvframe.layout, kvframe.address
kvframe.load_plugins()
for module in ("views", "buffers", "ops"):
    try:
        __import__(f"kvframe.{module}")
    except kvframe.KVFrameError as error:
        assert error.kind == "missing_dependency" and isinstance(error, ImportError)
        assert str(error).startswith(f"kvframe.{module} needs torch"), error
        assert "pip install 'kvframe[torch]'" in str(error)
    else:
        raise SystemExit(f"{module} was imported")
"""


def test_a_missing_torch_is_said_with_the_command_that_helps():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)
