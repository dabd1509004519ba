"""kvframe's conformance kit, run on the plugin as a whole: it brings cache dtypes and no family."""

from kvframe.testing import PluginConformance


class TestPlugin(PluginConformance):
    plugin = "kvframe-turboquant"
