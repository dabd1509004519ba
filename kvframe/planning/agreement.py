"""One plan for all ranks of a `torch.distributed` group, or one error for all of them.

Every rank tells the others its memory, its layers and its plugins, as JSON. Then each computes the plan of all ranks,
which is a pure function of what was told, and their fingerprints are compared. torch is imported when it is called.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvframe.config import DEVICE, KVCacheConfig
from kvframe.discovery import ACTIVE
from kvframe.engine import EngineConfig
from kvframe.errors import (
    AgreementError,
    InsufficientMemoryError,
    KVFrameError,
)
from kvframe.planning.attempt import OPTIMAL
from kvframe.planning.cost import Limits
from kvframe.planning.exchange import gather, rank_in
from kvframe.planning.plan import Plan, plan
from kvframe.planning.ranks import RankBudget
from kvframe.planning.versions import versions
from kvframe.plugins import PluginHost, load_plugins
from kvframe.serialise import fingerprint
from kvframe.serialise.providers import providers_to_plain
from kvframe.serialise.specs import SpecTable, spec_from_plain

ABSENT = "not in use"

Offer = Mapping[str, Any]
"""What one rank tells the others: budgets, layers and specs, settings, versions, reasons, error."""


@attrs.frozen(kw_only=True)
class Agreement:
    """What every rank of the group ends with.

    Args:
        plan: the plan of all pipeline stages.
        stage: this rank's stage. Ranks with the same layers are one stage.
        fingerprint: of the whole plan, the same on every rank.
    """

    plan: Plan
    stage: int
    fingerprint: str

    @property
    def config(self) -> KVCacheConfig:
        """This rank's config."""
        return self.plan.configs[self.stage]


def agree(
    specs: Mapping[str, Any],
    *,
    engine: EngineConfig,
    memory: int,
    pools: Mapping[str, int] | None = None,
    group: Any = None,
    host: PluginHost | None = None,
    layout: str | None = None,
    strategy: str = OPTIMAL,
    limits: Limits | None = None,
    exact: bool = False,
) -> Agreement:
    """Plan together with the other ranks; every rank of the group must call it.

    Ranks that hold the same layers are one pipeline stage, of which the rank with the least memory decides. Of pools
    beside the device's, the rank with the least decides for all stages.

    Args:
        specs: this rank's layers to their specs.
        engine: the limits; equal on all ranks.
        memory: bytes for the cache on this rank.
        pools: bytes on this rank of the pools beside the device's, by name; the same names on all ranks.
        group: a process group of `torch.distributed` with the backend gloo or nccl; None: all ranks.
        host: the plugins; None: the installed ones.
        layout, strategy, limits, exact: as for `kvframe.planning.plan`; equal on all ranks.

    Raises:
        AgreementError: plugins, versions or settings differ, a rank cannot tell its layers, or no plan is possible;
            the same on all ranks, naming the ranks and the reason.
        MissingDependencyError: torch is not installed.
        UsageError: there is no process group, or this process is not in it.
    """
    rank, limits = rank_in(group), limits or Limits()
    budgets = {DEVICE: memory, **(pools or {})}
    settings = {"layout": layout, "strategy": strategy, "exact": exact, "pools": sorted(budgets)}
    settings |= attrs.asdict(engine)
    settings |= {f"limits.{name}": value for name, value in attrs.asdict(limits).items()}
    told = gather(json.dumps(_offer(specs, budgets, host, settings)), group)
    offers: list[Offer] = [json.loads(text) for text in told]
    _check(offers)
    host = host or load_plugins()
    made: Plan | None = None
    failure: Exception | None = None
    try:
        ranks, stages = _stages(offers, host)
        made = plan(
            {layer: spec for stage in stages for layer, spec in stage.specs.items()},
            engine=engine,
            memory=[stage.memory for stage in stages],
            pools={name: min(offer["budgets"][name] for offer in offers) for name in pools or {}},
            host=host,
            layout=layout,
            strategy=strategy,
            stages=[list(stage.specs) for stage in stages],
            limits=limits,
            exact=exact,
        )
        mark = _fingerprint(made, host)
    except Exception as error:  # whatever it is, the other ranks wait for an answer
        failure, mark = error, _said(error)
    _check_marks(gather(mark, group))
    if made is None or failure is not None:
        raise _refusal(failure, offers) from failure
    return Agreement(plan=made, stage=ranks[rank], fingerprint=mark)


# --- what a rank tells ---


def _offer(
    specs: Mapping[str, Any],
    budgets: Mapping[str, int],
    host: PluginHost | None,
    settings: Mapping[str, Any],
) -> Offer:
    """What this rank tells. What goes wrong here is told too: the other ranks wait for an answer."""
    offer: dict[str, Any] = {
        "settings": {
            name: json.dumps(value, sort_keys=True, default=repr) for name, value in settings.items()
        },
        "error": None,
    }
    try:
        host = host or load_plugins()
        table = SpecTable(host)
        offer["versions"] = versions(host)
        offer["set_aside"] = {r.distribution or r.name: r.reason for r in host.records if r.status != ACTIVE}
        offer["layers"] = [[layer, table.number(spec)] for layer, spec in specs.items()]
        offer["specs"] = table.plain
        offer["families"] = providers_to_plain("families", table.families, host)
        offer["budgets"] = {name: operator.index(nbytes) for name, nbytes in budgets.items()}
    except Exception as error:
        offer["error"] = _said(error)
    return offer


def _said(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


def _stages(offers: Sequence[Offer], host: PluginHost) -> tuple[list[int], list[RankBudget]]:
    """The stage of every rank, and the layers and bytes of every stage.

    Raises:
        AgreementError: two ranks hold a layer with different specs, or share some of their layers and not all.
    """
    stages: list[int] = []
    budgets: dict[tuple[str, ...], RankBudget] = {}
    owner: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        specs = _specs(offer, host)
        names = tuple(specs)
        known = budgets.get(names)
        for layer, spec in specs.items():
            first = owner.setdefault(layer, rank)
            if known is None and first != rank:
                reason = f"both hold layer {layer!r}, and not all their layers: ranks share all or none"
                raise AgreementError(ranks=[first, rank], reason=reason)
            if known is not None and known.specs[layer] != spec:
                held = {layer: {repr(known.specs[layer]): [first], repr(spec): [rank]}}
                raise AgreementError(ranks=[rank], reason="holds a layer with another spec", held=held)
        own = offer["budgets"][DEVICE]
        memory = min(own, known.memory if known else own)
        budgets[names] = RankBudget(specs=specs, memory=memory)
        stages.append(list(budgets).index(names))
    return stages, list(budgets.values())


def _specs(offer: Offer, host: PluginHost) -> dict[str, Any]:
    distinct = [spec_from_plain(plain, "specs", host, offer["families"]) for plain in offer["specs"]]
    return {layer: distinct[number] for layer, number in offer["layers"]}


# --- whether ranks agree ---


def _check(offers: Sequence[Offer]) -> None:
    """Ranks plan with the same plugins, told their layers, and want the same.

    Raises:
        AgreementError: they do not.
    """
    for rank, offer in enumerate(offers):
        if "versions" not in offer:
            raise AgreementError(ranks=[rank], reason=f"cannot load its plugins: {offer['error']}")
    _check_equal(
        [_versions_of(offer, offers) for offer in offers],
        reason="has other plugins than the others",
        advice="Install the same distributions and versions on all ranks, and set the same KVFRAME_ variables",
    )
    for rank, offer in enumerate(offers):
        if offer["error"] is not None:
            raise AgreementError(ranks=[rank], reason=f"cannot tell its layers: {offer['error']}")
    _check_equal(
        [offer["settings"] for offer in offers],
        reason="asks for another plan than the others",
        advice="Call agree with the same limits and options on all ranks",
    )


def _versions_of(offer: Offer, offers: Sequence[Offer]) -> dict[str, str]:
    """The version of each distribution that any rank has, or why this rank has none."""
    found = {}
    for name in dict.fromkeys(name for other in offers for name in other["versions"]):
        reason = offer["set_aside"].get(name)
        found[name] = offer["versions"].get(name) or (f"{ABSENT} ({reason})" if reason else ABSENT)
    return found


def _check_marks(marks: Sequence[str]) -> None:
    _check_equal(
        [{"result": mark} for mark in marks],
        reason="computed another plan than the others",
        advice="Compare Python, numpy and the plugins' code on these ranks",
    )


def _check_equal(facts: Sequence[Mapping[str, str]], *, reason: str, advice: str) -> None:
    """All ranks hold the same facts.

    Raises:
        AgreementError: they do not; its ranks are those that hold what the fewest hold.
    """
    held: dict[str, dict[str, list[int]]] = {}
    apart: set[int] = set()
    for name in dict.fromkeys(name for own in facts for name in own):
        values: dict[str, list[int]] = {}
        for rank, own in enumerate(facts):
            values.setdefault(own.get(name, ABSENT), []).append(rank)
        if len(values) > 1:
            held[name] = values
            fewest = min(values.values(), key=_fewest)
            apart |= set(fewest)
    if held:
        raise AgreementError(ranks=sorted(apart), reason=reason, held=held, advice=advice)


def _fewest(ranks: list[int]) -> tuple[int, int]:
    return len(ranks), -ranks[0]


def _refusal(failure: Exception | None, offers: Sequence[Offer]) -> AgreementError:
    """Why no rank gets a plan; where memory is short, it names the rank with the least for its layers."""
    if isinstance(failure, AgreementError):
        return failure
    ranks = [_poorest(offers, failure.pool)] if isinstance(failure, InsufficientMemoryError) else []
    if not isinstance(failure, KVFrameError):
        return AgreementError(ranks=ranks, reason=_said(failure))
    return AgreementError(ranks=ranks, reason=str(failure).rstrip("."), cause=failure.as_dict())


def _poorest(offers: Sequence[Offer], pool: str) -> int:
    """The rank with the least of a pool for its layers, a page of each."""

    def need(offer: Offer) -> float:
        pages = [spec["geometry"]["page_bytes"] for spec in offer["specs"]]
        return float(sum(pages[number] for _, number in offer["layers"]) / max(offer["budgets"][pool], 1))

    return max(range(len(offers)), key=lambda rank: need(offers[rank]))


def _fingerprint(made: Plan, host: PluginHost) -> str:
    """SHA-256 over the fingerprints of all stages; of the one stage's own where there is one."""
    marks = [fingerprint(config, host) for config in made.configs]
    return marks[0] if len(marks) == 1 else hashlib.sha256("".join(marks).encode("ascii")).hexdigest()
