"""Models that cannot be served fail before anything is allocated, and say what to do."""

import attrs
import pytest

torch = pytest.importorskip("torch", reason="the bridge needs torch and transformers")
pytest.importorskip("transformers", reason="the bridge needs transformers")

from kvframe import PluginHost, plugins  # noqa: E402
from kvframe.errors import MissingPluginError, UsageError  # noqa: E402
from kvframe_transformers import PagedCache, PoolFullError, planning, storage  # noqa: E402
from kvframe_transformers.roles import read_roles  # noqa: E402


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("mistral", "kvframe-sliding-window"),
        ("llama4", "kvframe-chunked-local"),
        ("deepseek_v3", "kvframe-mla"),
        ("mamba2", "kvframe-mamba"),
        ("bamba", "kvframe-mamba"),
        ("whisper", "kvframe-cross-attention"),
    ],
)
def test_a_kind_without_its_plugin_fails_first_with_the_pip_command(name, distribution, tiny, monkeypatch):
    model = tiny.make(name)
    monkeypatch.setattr(plugins, "entry_points_by_name", dict)  # as if none were installed
    without = PluginHost()
    monkeypatch.setattr(planning, "load_plugins", lambda: without)

    def allocate(*_, **__):
        pytest.fail("memory was allocated")

    monkeypatch.setattr(storage, "allocate", allocate)
    with pytest.raises(MissingPluginError, match=f"pip install {distribution}"):
        PagedCache.for_model(model, "1MiB")


def test_layers_that_the_library_and_kvframe_read_differently_are_refused(tiny):
    model = tiny.make("llama")
    planned = PagedCache.for_model(model, "1MiB")._session.engine.planned
    # a window's blocks die, and transformers would show these layers everything
    kinds = dict.fromkeys(planned.model.kinds, "sliding_attention")
    with pytest.raises(
        UsageError, match="layer 0: transformers keeps 'full_attention' there, kvframe read sliding"
    ):
        read_roles(model.config, attrs.evolve(planned.model, kinds=kinds))


def test_the_error_of_a_full_pool_has_its_numbers_for_machines():
    error = PoolFullError(
        batch=2, length=50, needed={"0-full": 3, "1-ring": 0}, missing=2, largest_fitting_len=9
    )
    assert error.as_dict()["kind"] == "pool_full"
    assert error.fields()["largest_fitting_len"] == 9
    assert str(error).startswith(
        "the pool has no room for 2 sequences of 50 tokens: 2 blocks are missing (asked: 3 of group 0-full). "
        "As it is now it holds 2 sequences of up to 9 tokens."
    )
