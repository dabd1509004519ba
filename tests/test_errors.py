"""Errors: fields first, a text made from them, a stable kind, and a way through pickle and JSON."""

import copy
import importlib
import json
import pickle
import pkgutil

import attrs
import pytest

import kvframe
from kvframe.errors import (
    BufferMemoryError,
    HookError,
    InsufficientMemoryError,
    KVFrameError,
    LayoutError,
    MergeError,
    MissingDependencyError,
    MissingFieldError,
    MissingPluginError,
    MissingScalesError,
    ModelConfigError,
    NotDivisibleError,
    PlanError,
    PluginLoadError,
    SpecError,
    UnknownCacheDTypeError,
    UnknownLayerKindError,
    UnknownPluginError,
    UsageError,
    nearest,
)

# The kinds that machines are promised (`error.kind` of the command line).
KINDS = {
    "invalid_config",
    "missing_field",
    "unknown_layer_type",
    "not_divisible",
    "insufficient_memory",
    "missing_scales",
    "missing_plugin",
    "unknown_plugin",
    "plugin_load",
    "spec_conflict",
    "spec_invalid",
    "layout",
    "unknown_cache_dtype",
    "usage",
}
# Kinds of errors that planning a config never ends with.
OTHER_KINDS = {
    "missing_dependency": "a part that needs an extra was imported without it",
    "blocks": "a wrong call to the block manager",
    "invalid_plan": "a stored plan that cannot be read",
    "ranks_disagree": "ranks that made different plans",
    "conformance": "a plugin that fails the conformance kit",
    "event_sink": "a sink of events that cannot be opened or written",
    "stream": "a stream of requests for the simulator that cannot be read",
}


def subclasses(cls=KVFrameError):
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


def importable_modules():
    for module in pkgutil.walk_packages(kvframe.__path__, "kvframe."):
        try:
            importlib.import_module(module.name)
        except MissingDependencyError:  # torch is an extra
            continue


importable_modules()
ERRORS = sorted(
    (cls for cls in subclasses() if cls.__module__.startswith("kvframe.")), key=lambda cls: cls.__qualname__
)
SAMPLES = {
    "str": "text",
    "int": 1234567,
    "Any": "value",
    "str | None": "perhaps",
    "int | None": 7654321,
    "Sequence[str]": ("one", "two"),
    "Sequence[int]": (3, 5),
    "Mapping[str, Any]": {"key": 9},
    "Mapping[str, Any] | None": {"message": "why"},
    "Mapping[str, str]": {"name": "reason"},
    "Mapping[str, Sequence[str]]": {"512": ("layer.0", "layer.2"), "1024": ("layer.1",)},
    "Mapping[str, Mapping[str, Sequence[int]]]": {"what": {"value": (0, 1)}},
}


def samples(cls):
    """One with every field given, and one with its required fields alone."""
    given = {field.name: SAMPLES[str(field.type)] for field in attrs.fields(cls)}
    required = {field.name for field in attrs.fields(cls) if field.default is attrs.NOTHING}
    return cls(**given), cls(**{name: given[name] for name in required})


ALL = [
    pytest.param(error, id=f"{type(error).__name__}-{n}")
    for cls in ERRORS
    for n, error in enumerate(samples(cls))
]


def test_every_error_is_found():
    assert {SpecError, UsageError, HookError, MissingPluginError} < set(ERRORS)


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_an_error_has_a_known_kind_and_a_fitting_builtin(cls):
    assert cls.kind in KINDS | OTHER_KINDS.keys()
    builtin = [
        base
        for base in cls.__mro__
        if base.__module__ == "builtins" and base not in (Exception, BaseException, object)
    ]
    assert builtin, "a fitting builtin lets `except ValueError` work"
    assert cls.__doc__
    assert "kind" not in {field.name for field in attrs.fields(cls)}


def test_every_kind_that_is_promised_is_some_errors():
    assert {cls.kind for cls in ERRORS} >= KINDS
    assert not OTHER_KINDS.keys() & KINDS


@pytest.mark.parametrize("error", ALL)
def test_the_text_is_made_from_the_fields(error):
    text = str(error)
    assert text
    assert "{" not in text.replace("{'", "")
    assert "  " not in text
    assert not text.endswith("..")


@pytest.mark.parametrize("error", ALL)
def test_fields_are_complete(error):
    fields = error.fields()
    assert fields == {field.name: getattr(error, field.name) for field in attrs.fields(type(error))}
    assert str(type(error)(**fields)) == str(error)


@pytest.mark.parametrize("error", ALL)
def test_an_error_goes_through_pickle_and_copy(error):
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert (again.fields(), str(again)) == (error.fields(), str(error))


@pytest.mark.parametrize("error", ALL)
def test_an_error_goes_through_json(error):
    printed = json.loads(json.dumps(error.as_dict()))
    assert printed.keys() == {"kind", "type", "message", "fields"}
    assert (printed["kind"], printed["type"]) == (error.kind, type(error).__name__)
    assert printed["message"] == str(error)
    assert printed["fields"].keys() == error.fields().keys()


@pytest.mark.parametrize("error", ALL)
def test_an_error_can_be_raised_and_carries_a_traceback(error):
    with pytest.raises(type(error)) as caught:
        raise error
    assert caught.value.__traceback__ is not None


def test_a_class_without_a_text_says_so():
    @attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
    class SilentError(KVFrameError):
        value: int

    with pytest.raises(TypeError, match="SilentError must say what happened: define __str__"):
        str(SilentError(value=1))


# --- the texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            SpecError(spec="FullAttentionSpec", field="block_size", value=0, rule="must be at least 1"),
            "FullAttentionSpec.block_size = 0: must be at least 1.",
        ),
        (
            MergeError(field="window", layers={"512": ["a", "c"], "1024": ["b"]}, rule="must be equal"),
            "layers cannot share one spec: must be equal. window: 512 in a, c; 1024 in b.",
        ),
        (
            PlanError(reason="no page fits", layers=list("abcde"), values={"page": 5}, advice="Use BLHNC"),
            "no page fits. Layers: a, b, c, d, …. page: 5. Use BLHNC.",
        ),
        (PlanError(reason="no page fits"), "no page fits."),
        (
            LayoutError(layout="LHBNC", reason="pages differ", would_work=["LBHNC", "BLHNC"]),
            "layout LHBNC: pages differ. Layouts that would work: LBHNC, BLHNC.",
        ),
        (
            InsufficientMemoryError(
                needed_bytes=11 << 30,
                available_bytes=8 << 30,
                max_model_len=131072,
                largest_fitting_len=101344,
            ),
            "one request of 131,072 tokens needs 11.00 GiB of KV cache, 8.00 GiB are available in pool 'device' "
            "after the null block. The largest length that fits is 101,344 tokens. "
            "Lower --max-model-len, raise --memory, or shard with --tensor-parallel-size.",
        ),
        (
            InsufficientMemoryError(
                needed_bytes=65536, available_bytes=0, max_model_len=1, largest_fitting_len=0, pool="host"
            ),
            "one request of 1 tokens needs 65,536 bytes of KV cache, 0 bytes are available in pool 'host' "
            "after the blocks it reserves. Not even one token fits. "
            "Lower --max-model-len, or raise the budget of pool 'host'.",
        ),
        (
            UnknownCacheDTypeError(name="fp8_e4m4", known=["fp8_e4m3", "auto"]),
            "unknown cache dtype 'fp8_e4m4'. Did you mean 'fp8_e4m3'? Known: auto, fp8_e4m3.",
        ),
        (
            UnknownCacheDTypeError(name="octave", known=["auto"]),
            "unknown cache dtype 'octave'. Known: auto.",
        ),
        (
            ModelConfigError(
                file="config.json", field="num_hidden_layers", value=0, rule="must be at least 1"
            ),
            "config.json: num_hidden_layers = 0: must be at least 1.",
        ),
        (MissingFieldError(file="c.json", field="head_dim"), "c.json: field 'head_dim' is missing."),
        (
            MissingFieldError(file="c.json", field="head_dim", rule="not derivable"),
            "c.json: field 'head_dim' is missing: not derivable.",
        ),
        (
            NotDivisibleError(
                file="c.json", field="heads", value=6, divisor=4, rule="one must divide the other"
            ),
            "c.json: heads = 6 cannot be split over 4 ranks: one must divide the other.",
        ),
        (
            MissingPluginError(wanted="layer kind 'mla'", distribution="kvframe-mla"),
            "model needs layer kind 'mla', provided by kvframe-mla: pip install kvframe-mla",
        ),
        (
            MissingPluginError(wanted="a family for spec 'X'", needed_by="plan"),
            "plan needs a family for spec 'X', which no installed plugin provides. See `kvframe plugins`.",
        ),
        (
            MissingPluginError(wanted="layer kind 'mla'", distribution="kvframe-mla", reason="it is broken"),
            "model needs layer kind 'mla', provided by kvframe-mla, which was set aside: it is broken. "
            "See `kvframe plugins`",
        ),
        (
            MissingPluginError(
                wanted="layer kind 'mla'", distribution="kvframe-mla", reason="it is old", remedy="upgrade it"
            ),
            "model needs layer kind 'mla', provided by kvframe-mla, which was set aside: it is old. "
            "To use it, upgrade it",
        ),
        (
            MissingDependencyError(module="kvframe.views", needs="torch", extra="torch"),
            "kvframe.views needs torch, which is not installed: pip install 'kvframe[torch]'",
        ),
        (
            BufferMemoryError(pool="host", memory="pinned memory", wanted_bytes=4096),
            "pool 'host' wants 4,096 bytes of pinned memory. Lower --memory, or free what else holds it.",
        ),
        (
            UnknownPluginError(unknown=["mlaa"], found=["mla", "kvframe-mla"], source="KVFRAME_PLUGINS"),
            "KVFRAME_PLUGINS names plugins that are not installed: mlaa. Did you mean 'mla'? "
            "Installed: kvframe-mla, mla.",
        ),
        (
            UnknownPluginError(unknown=["x"], found=[], source="KVFRAME_PLUGINS"),
            "KVFRAME_PLUGINS names plugins that are not installed: x. Installed: none.",
        ),
        (
            PluginLoadError(failures={"a (a 1.0)": "ImportError: x", "b": "y"}),
            "plugins were set aside and KVFRAME_STRICT is set: a (a 1.0): ImportError: x; b: y.",
        ),
        (
            HookError(hook="kvframe_layouts", plugin="a (a 1.0)", reason="raised ValueError: x"),
            "hook kvframe_layouts of plugin a (a 1.0): raised ValueError: x.",
        ),
        (
            UsageError(option="--memory", value="1 parsec", rule="is no size"),
            "--memory 1 parsec: is no size.",
        ),
        (UsageError(option="--memory", value=None, rule="is needed"), "--memory: is needed."),
    ],
)
def test_the_text_says_what_where_and_what_to_do(error, text):
    assert str(error) == text


def test_an_unknown_layer_kind_is_named_with_its_place_and_what_is_near():
    error = UnknownLayerKindError(
        file="config.json",
        field="layer_types",
        value="sliding_atention",
        layer=3,
        known=["sliding_attention", "mla"],
    )
    assert str(error) == (
        "config.json: layer 3 is of unknown kind 'sliding_atention' (field 'layer_types'). "
        "Did you mean 'sliding_attention'? Known kinds: mla, sliding_attention. "
        "A plugin can bring more: see `kvframe plugins`."
    )


def test_missing_scales_name_the_dtype_and_the_choices():
    text = str(MissingScalesError(cache_dtype="fp8_e4m3"))
    assert all(word in text for word in ("fp8_e4m3", "--scale-policy", "computed", "unit"))


@pytest.mark.parametrize(("name", "near"), [("slidng", "sliding"), ("mla", "mla"), ("zzz", None), ("", None)])
def test_the_nearest_known_name(name, near):
    assert nearest(name, ["sliding", "mla", "mamba"]) == near
