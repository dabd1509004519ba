"""The version of the running core, which plugins' requirements are tested against."""

VERSION = "0.1.0"
