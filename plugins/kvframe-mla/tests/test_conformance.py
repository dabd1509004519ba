"""kvframe's conformance kit, run on this plugin's families and on the plugin as a whole."""

from kvframe.testing import PluginConformance, SpecConformance


class TestPlugin(PluginConformance):
    plugin = "kvframe-mla"


class TestMLA(SpecConformance):
    family = "mla"


class TestSlidingWindowMLA(SpecConformance):
    family = "sliding_window_mla"
