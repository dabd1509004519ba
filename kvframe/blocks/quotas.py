"""Quotas: what each tenant may have of a pool. A tenant is a salt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from kvframe.errors import SpecError

Tenant = str | None  # the salt


def share_of(share: float, whole: int) -> int:
    """So much of `whole`, rounded down: 0.29 of 100 is 29, though the floating-point product is a little less."""
    return math.floor(share * whole + 1e-9)


def _a_share(quota: object, attribute: Any, value: float) -> None:
    if not 0 <= value <= 1:
        raise SpecError(
            spec="Quota", field=attribute.name, value=value, rule="must be a share of the pool, from 0 to 1"
        )


@attrs.frozen(kw_only=True)
class Quota:
    """What one tenant may have, as shares of the pool.

    Args:
        running: blocks that its running requests and its pins hold, shared ones counted once.
        cached: blocks that are cached for it and that nobody holds.

    Raises:
        SpecError: a share is not from 0 to 1.
    """

    running: float = attrs.field(default=1.0, validator=_a_share)
    cached: float = attrs.field(default=1.0, validator=_a_share)


@attrs.frozen(kw_only=True)
class Quotas:
    """The quotas of all tenants.

    Args:
        default: of each tenant that is not named, and of all requests without a salt together.
        named: by salt.
    """

    default: Quota = attrs.field(factory=Quota)
    named: Mapping[str, Quota] = attrs.field(factory=dict)

    def of(self, tenant: Tenant) -> Quota:
        """A tenant's quota."""
        return self.default if tenant is None else self.named.get(tenant, self.default)

    @property
    def bounds_cached(self) -> bool:
        """Whether any tenant may not have the whole pool cached."""
        return any(quota.cached < 1 for quota in (self.default, *self.named.values()))
