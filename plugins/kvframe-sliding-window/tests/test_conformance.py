"""kvframe's conformance kit, run on this plugin's families and on the plugin as a whole."""

from kvframe.testing import PluginConformance, SpecConformance


class TestPlugin(PluginConformance):
    plugin = "kvframe-sliding-window"


class TestSlidingWindow(SpecConformance):
    family = "sliding_window"
