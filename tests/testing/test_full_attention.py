"""The one family of the core itself passes the checks that plugins must pass."""

from kvframe.testing import SpecConformance


class TestFullAttention(SpecConformance):
    family = "full_attention"
