"""Simulation of a plan and its block manager under a stream of requests, on no device.

result = run_case(Case(specs=specs, engine=engine, memory=64 << 30, stream=RandomStream(...)))
"""

from kvframe.simulate.case import Case, GroupResult, Result, run_case
from kvframe.simulate.engine import Pace
from kvframe.simulate.errors import StreamError
from kvframe.simulate.lengths import Lengths, parse_lengths
from kvframe.simulate.streams import Arrival, RandomStream, RecordedStream, mooncake_lines, read_stream
from kvframe.simulate.sweep import run_cases

__all__ = [
    "Arrival",
    "Case",
    "GroupResult",
    "Lengths",
    "Pace",
    "RandomStream",
    "RecordedStream",
    "Result",
    "StreamError",
    "mooncake_lines",
    "parse_lengths",
    "read_stream",
    "run_case",
    "run_cases",
]
