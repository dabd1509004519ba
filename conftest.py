"""Settings of all tests, the core's and the plugins'."""

from hypothesis import settings

settings.register_profile("kvframe", deadline=None)  # no test is timed: machines differ
settings.load_profile("kvframe")
