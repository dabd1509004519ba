"""Small plugin distributions, really written to disk: a module and its dist-info, or a wheel of both."""

from __future__ import annotations

import sys
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kvframe import EngineConfig, FullAttentionSpec, PluginHost
from kvframe.discovery import ACTIVE, PluginRecord
from kvframe.planning import plan

# A plugin that brings a kind of layer which keeps every second token, and a spec and a family for it.
GOOD = """
import attrs
import kvframe

CALLS = []


@attrs.frozen(kw_only=True, repr=False)
class Spec(kvframe.AttentionSpec):
    pass


@kvframe.hookimpl
def kvframe_spec_families():
    CALLS.append("kvframe_spec_families")
    return [
        kvframe.SpecFamily(
            name=__name__ + "_family", spec_type=Spec, lifetime=lambda spec: kvframe.Lifetime(block=spec.block_size)
        )
    ]


@kvframe.hookimpl
def kvframe_layer_readers():
    CALLS.append("kvframe_layer_readers")
    return [kvframe.LayerReader(kind=KIND, read=lambda layer: {"attn": layer.attention(Spec)})]


KIND = __name__ + "_attention"
"""


@attrs.frozen(kw_only=True)
class Distribution:
    """A distribution of one module with one entry point.

    Args:
        name: the entry point's name; the others follow from it unless given.
        source: the module's text.
        requires: lines of `Requires-Dist`.
        project: the distribution's name.
        module: the module's name.
        points_to: the entry point's value, unless it is the module.
        version: the distribution's.
    """

    name: str
    source: str = GOOD
    requires: Sequence[str] = ("kvframe>=0,<2",)
    project: str = attrs.field(default=attrs.Factory(lambda self: f"kvtest-{self.name}", takes_self=True))
    module: str = attrs.field(
        default=attrs.Factory(lambda self: f"kvtest_{self.name}".replace("-", "_"), takes_self=True)
    )
    points_to: str | None = None
    version: str = "1.0"

    @property
    def stem(self) -> str:
        """How the names of its files begin."""
        return f"{self.project.replace('-', '_')}-{self.version}"

    def files(self) -> dict[str, str]:
        """Path to text of everything that an installation has."""
        info = f"{self.stem}.dist-info"
        metadata = ["Metadata-Version: 2.1", f"Name: {self.project}", f"Version: {self.version}"]
        metadata += [f"Requires-Dist: {line}" for line in self.requires]
        files = {
            f"{self.module}.py": textwrap.dedent(self.source),
            f"{info}/METADATA": "\n".join(metadata) + "\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": f"[kvframe.plugins]\n{self.name} = {self.points_to or self.module}\n",
        }
        return {**files, f"{info}/RECORD": "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])}

    def unpack(self, folder: Path) -> None:
        """Lay the files into a folder, as an installation has them."""
        for path, text in self.files().items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")

    def wheel(self, folder: Path) -> Path:
        """Write a wheel that pip can install."""
        path = folder / f"{self.stem}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in self.files().items():
                archive.writestr(name, text)
        return path


# --- texts of small plugins ------------------------------------------------------------------------------------------


def hook(name: str, body: str, arguments: str = "", mark: str = "@kvframe.hookimpl") -> str:
    """A plugin with one hook."""
    return f"import kvframe\n\n\n{mark}\ndef {name}({arguments}):\n    {body}\n"


def dtype(name: object) -> str:
    """A plugin with one cache dtype."""
    return hook("kvframe_cache_dtypes", f"return [kvframe.CacheDType(name={name!r})]")


def reader(kind: object) -> str:
    """A plugin with the reader of one layer kind."""
    made = f"kvframe.LayerReader(kind={kind!r}, read=lambda layer: {{}})"
    return hook("kvframe_layer_readers", f"return [{made}]")


def layout(name: str) -> str:
    """A plugin with one layout."""
    body = f"from kvframe.layout import KVCacheLayout; return [KVCacheLayout({name!r}, 'LBHNC')]"
    return hook("kvframe_layouts", body)


def family(
    name: str = "strided", *, replaces: object = None, spec_type: str = "Spec", before: str = ""
) -> str:
    """A plugin with one family.

    Args:
        name: the family's.
        replaces: the family that it takes the place of.
        spec_type: an expression for its spec class; the module defines `Spec`.
        before: statements above it, such as an import.
    """
    return f"""
import attrs
import kvframe
{before}


@attrs.frozen(kw_only=True, repr=False)
class Spec(kvframe.AttentionSpec):
    pass


@kvframe.hookimpl
def kvframe_spec_families():
    return [
        kvframe.SpecFamily(
            name={name!r},
            spec_type={spec_type},
            replaces={replaces!r},
            lifetime=lambda spec: kvframe.Lifetime(block=spec.block_size),
        )
    ]
"""


# --- reading a host --------------------------------------------------------------------------------------------------


def records(host: PluginHost) -> dict[str, PluginRecord]:
    """Records by plugin name."""
    return {record.name: record for record in host.records}


def active(host: PluginHost) -> set[str]:
    """Names of the plugins in use."""
    return {record.name for record in host.records if record.status == ACTIVE}


def check_that_others_work(host: PluginHost, installed: set[str]) -> None:
    """The plugins of this machine and the test's own called "good" are in use, and plan."""
    assert active(host) == installed | {"good"}
    fields: dict[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    specs = {"a": FullAttentionSpec(16, **fields), "b": sys.modules["kvtest_good"].Spec(16, **fields)}
    engine = EngineConfig(max_model_len=1024)
    report = plan(specs, engine=engine, memory=1 << 26, host=host, strategy="engine").report
    # pages of 16 * 2 * 8 * 128 * 2 = 65,536 bytes, two layers in one group: 2**26 / 2**17 blocks, 1024 / 16 a request
    assert (report.num_blocks, report.blocks_per_request_total) == (512, 64)
