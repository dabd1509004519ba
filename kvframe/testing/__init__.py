"""The conformance kit: named checks that any family and any plugin must pass, for pytest and for `kvframe check`.

In a plugin's tests:

    import kvframe.testing

    class TestMySpec(kvframe.testing.SpecConformance):
        family = "my_family"
        examples = [MySpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")]
"""

from kvframe.testing.catalogue import FAMILY_CHECKS, PLUGIN_CHECKS
from kvframe.testing.outcome import (
    FAILED,
    PASSED,
    SKIPPED,
    Check,
    ConformanceError,
    NotApplicable,
    Outcome,
    expect,
    run,
)
from kvframe.testing.subject import PluginSubject, Subject, isolated_host
from kvframe.testing.suite import PluginConformance, SpecConformance

__all__ = [
    "FAILED",
    "FAMILY_CHECKS",
    "PASSED",
    "PLUGIN_CHECKS",
    "SKIPPED",
    "Check",
    "ConformanceError",
    "NotApplicable",
    "Outcome",
    "PluginConformance",
    "PluginSubject",
    "SpecConformance",
    "Subject",
    "expect",
    "isolated_host",
    "run",
]
