"""From the options of `kvframe plan` to a plan and the numbers that are printed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvframe.cli.model import ScaleChoice, length_of, load_model
from kvframe.engine import EngineConfig
from kvframe.errors import UsageError
from kvframe.models import ModelSpecs, encoder_positions, inspect_model, read_config
from kvframe.planning import Limits, Plan, plan
from kvframe.planning.inverse import largest_len, memory_for_requests
from kvframe.planning.pools import requests_at
from kvframe.plugins import PluginHost


@attrs.frozen(kw_only=True)
class PlanRequest:
    """What the command line asks for: the model's specs, the engine's limits, and the options."""

    model: ModelSpecs
    engine: EngineConfig
    host: PluginHost
    options: dict[str, Any]
    warnings: tuple[str, ...]

    @classmethod
    def read(
        cls, path: Path, host: PluginHost, options: dict[str, Any], extras: Mapping[str, Any]
    ) -> PlanRequest:
        """Read the model with the options.

        Args:
            path: the config.json, or its folder.
            host: the plugins.
            options: kvframe's own options by name.
            extras: the plugins' options by name.

        Raises:
            KVFrameError: the config or an option cannot be right.
        """
        source = read_config(path)
        length = length_of(source, options["max_model_len"])
        caching = not options["no_prefix_caching"]
        model = load_model(
            source,
            host,
            cache_dtype=options["cache_dtype"],
            state_dtype=options["state_dtype"],
            tensor_parallel_size=options["attention_tp"] or options["tensor_parallel_size"],
            block_size=options["block_size"],
            longest=length,
            caching=caching,
        )
        scales = ScaleChoice(in_checkpoint=options["scales_in_checkpoint"], policy=options["scale_policy"])
        engine = EngineConfig(
            max_model_len=length,
            max_in_flight_tokens=options["in_flight_tokens"],
            max_encoder_tokens=encoder_positions(source) or 0,
            max_num_seqs=options["max_num_seqs"],
            tp=options["tensor_parallel_size"],
            attention_tp=options["attention_tp"] or options["tensor_parallel_size"],
            dcp=options["dcp"],
            state_cache_mode="align" if caching else "none",
            prefix_caching=caching,
            extras=extras,
        )
        warnings = (*model.warnings, *scales.check(host.cache_dtypes.get(options["cache_dtype"])))
        return cls(model=model, engine=engine, host=host, options=options, warnings=warnings)

    def plan(self, memory: int, length: int | None = None) -> Plan:
        """The plan with so many bytes on each rank, and requests of up to `length` tokens."""
        engine = self.engine if length is None else self.engine.with_max_model_len(length)
        return plan(
            self.model.specs,
            engine=engine,
            memory=memory,
            pools={"host": self.options["host_memory"]} if self.options["host_memory"] is not None else {},
            host=self.host,
            layout=self.options["layout"],
            strategy=self.options["strategy"],
            stages=_stages(self.model, self.options["pipeline_layers"]),
            kinds=self.model.kinds,
            limits=Limits(
                structural_share=self.options["max_structural_share"],
                slab_bytes=self.options["max_slab"],
                groups=self.options["max_groups"],
            ),
            exact=self.options["exact"],
        )

    def answer(self) -> tuple[Plan, str]:
        """The plan that was asked for, and where its memory comes from."""
        if self.options["requests"]:
            wanted, length = self.options["requests"], self._length
            if any(self.options[name] is not None for name in ("memory", "gpu_memory")):
                raise UsageError(
                    option="--requests", value=wanted, rule="asks for the memory: leave --memory out"
                )
            memory = memory_for_requests(self.plan, wanted, lambda made: self.requests_by_pool(made, length))
            return self.plan(memory), f"--requests {wanted:,} of {length:,} tokens"
        memory, source = budget(self.options)
        if not self.options["fit_max_model_len"]:
            return self.plan(memory), source
        length = largest_len(lambda tokens: self.plan(memory, tokens), self.engine.max_model_len)
        return self.plan(memory, length or None), source

    def requests(self, made: Plan, length: int) -> int:
        """Requests of `length` tokens that fit at once beside the null block, in every pool."""
        return min(self.requests_by_pool(made, length).values(), default=0)

    def requests_by_pool(self, made: Plan, length: int) -> dict[str, int]:
        """The same by pool."""
        return requests_at(made.config, engine=self.engine, host=self.host, length=length)

    @property
    def _length(self) -> int:
        return int(self.options["mean_len"] or self.engine.max_model_len)

    def result(self, made: Plan) -> dict[str, Any]:
        """Everything that `--json` prints of the model and the plan."""
        facts = inspect_model(self.model, self.host)
        sizes = facts["bytes"]
        result = {
            "layers": facts["layers"],
            "kv_heads_total": dict(self.model.kv_heads_total),
            "kv_heads_per_rank": dict(self.model.kv_heads_per_rank),
            "bytes_per_token": sizes["bytes_per_token_before_any_window_is_full"],
            "bytes_per_token_growth": sizes["bytes_per_token_growth_after_all_windows_are_full"],
            "bytes_per_token_per_layer": sizes["bytes_per_token_per_layer"],
            "constant_bytes_per_sequence": sizes["constant_bytes_per_sequence"],
            **made.report.as_dict(),
        }
        if self.options["max_num_seqs"] or self.options["mean_len"]:
            result["requested"] = self._requested(made)
        return result

    def _requested(self, made: Plan) -> dict[str, Any]:
        wanted = self.options["max_num_seqs"]
        answer: dict[str, Any] = {"max_num_seqs": wanted}
        lengths = {"max_model_len": made.report.max_model_len}
        if self.options["mean_len"]:
            lengths["mean_len"] = answer["mean_len"] = self.options["mean_len"]
        for name, length in lengths.items():
            answer[f"at_{name}"] = self.requests(made, length)
            if wanted:
                answer[f"fits_at_{name}"] = answer[f"at_{name}"] >= wanted
        return answer


def budget(options: dict[str, Any]) -> tuple[int, str]:
    """Bytes for the cache on one rank, and where the number comes from.

    Raises:
        UsageError: neither or both of --memory and --gpu-memory, or nothing is left.
    """
    memory, device, weights, reserve = (options[k] for k in ("memory", "gpu_memory", "weights", "reserve"))
    if (memory is None) == (device is None):
        both = ", not both" if memory is not None else " (or --requests)"
        rule = f"give the cache's memory, or the device's with --gpu-memory and --weights{both}"
        raise UsageError(option="--memory", value=None, rule=rule)
    if memory is not None:
        if weights is not None or reserve:
            raise UsageError(option="--weights and --reserve", value=None, rule="they go with --gpu-memory")
        return memory, "--memory"
    if weights is None:
        raise UsageError(option="--weights", value=None, rule="is needed with --gpu-memory")
    left = device - weights - reserve
    if left <= 0:
        rule = f"leaves {left:,} bytes of --gpu-memory {device:,} after --reserve {reserve:,}"
        raise UsageError(option="--weights", value=f"{weights:,}", rule=rule)
    return left, "--gpu-memory less --weights and --reserve"


def _stages(model: ModelSpecs, counts: tuple[int, ...] | None) -> list[list[str]]:
    """Names of the caches that each pipeline stage holds, for layer counts a stage.

    Raises:
        UsageError: the counts do not add up to the model's layers.
    """
    if not counts:
        return []
    total = model.num_layers
    if sum(counts) != total:
        text = ",".join(map(str, counts))
        raise UsageError(
            option="--pipeline-layers", value=text, rule=f"must add up to the model's {total} layers"
        )
    stages: list[list[str]] = [[] for _ in counts]
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    for name in model.specs:
        stages[stage_of[model.indices[name]]].append(name)
    return stages
