"""Specs as plain data: the family's name, the constructor's fields, and the geometry that must come out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframe.errors import KVFrameError, PlanFormatError
from kvframe.plain import canonical, check_keys, fields_from_plain, fields_to_plain
from kvframe.plugins import PluginHost
from kvframe.serialise.providers import families_by_name, label, providers_to_plain


class SpecTable:
    """The distinct specs of a plan as plain data, numbered in order of first use."""

    def __init__(self, host: PluginHost) -> None:
        self._host = host
        self._numbers: dict[str, int] = {}
        self.plain: list[dict[str, Any]] = []

    @property
    def families(self) -> set[str]:
        """Names of the families of the specs so far."""
        return {spec["family"] for spec in self.plain}

    def number(self, spec: Any) -> int:
        """The number of a spec, a new one if it is.

        Raises:
            MissingPluginError: no plugin has a family for it.
            PlanFormatError: reading would not give the same spec.
        """
        family = self._host.family(spec)
        if family.spec_type is not type(spec):
            rule = f"cannot be written: its class has no family of its own, and {family.name!r} makes another"
            raise PlanFormatError(path=type(spec).__name__, value=spec, rule=rule)
        plain = {"family": family.name, "fields": fields_to_plain(spec), "geometry": _geometry(spec)}
        key = canonical(plain)
        if key not in self._numbers:
            self._check_comes_back(spec, plain)
            self._numbers[key] = len(self.plain)
            self.plain.append(plain)
        return self._numbers[key]

    def _check_comes_back(self, spec: Any, plain: dict[str, Any]) -> None:
        path = type(spec).__name__
        providers = providers_to_plain("families", {plain["family"]}, self._host)
        read = spec_from_plain(plain, path, self._host, providers)
        if read != spec:
            raise PlanFormatError(path=path, value=spec, rule=f"would be read as {read!r}")


def _geometry(spec: Any) -> dict[str, Any]:
    """Bytes of one layer's page, and [H, N, C]: head slots, states, bytes of a cell; None for raw pages."""
    cell = [spec.num_heads, spec.num_states, spec.state_content_size_bytes] if spec.has_layer_views else None
    return {"page_bytes": spec.page_size_bytes, "shape": cell}


def spec_from_plain(plain: Any, path: str, host: PluginHost, providers: Mapping[str, Any]) -> Any:
    """The spec that `SpecTable` wrote.

    Args:
        plain: the plain data.
        path: where it stands, for messages.
        host: the plugins that know the family, or one that took its place.
        providers: family name to who brought it when the plan was made.

    Raises:
        PlanFormatError: a key or value is not of the family's spec, or the spec's pages would have another geometry.
        SpecError: a value breaks a rule of the spec.
    """
    check_keys(plain, ("family", "fields", "geometry"), path)
    name, fields = plain["family"], plain["fields"]
    if not isinstance(name, str) or name not in providers:
        raise PlanFormatError(path=f"{path}.family", value=name, rule="must be one of $.providers.families")
    cls = families_by_name(host)[name].spec_type
    try:
        spec = cls(**fields_from_plain(cls, fields, f"{path}.fields"))
        written, geometry = fields_to_plain(spec), _geometry(spec)
    except KVFrameError:
        raise
    except Exception as error:  # a plugin's class may do anything with values that it did not expect
        rule = f"{cls.__name__} cannot be made of it: {type(error).__name__}: {error}"
        raise PlanFormatError(path=f"{path}.fields", value=fields, rule=rule) from error
    changed = {key: value for key, value in written.items() if value != fields[key]}
    if changed:
        rule = f"is not how {cls.__name__} writes it: {changed}"
        raise PlanFormatError(path=f"{path}.fields", value=fields, rule=rule)
    if geometry != plain["geometry"]:
        rule = f"the plan was made by {label(providers[name])}, and the {name!r} in use computes {geometry}"
        raise PlanFormatError(path=f"{path}.geometry", value=plain["geometry"], rule=rule)
    return spec
