# SPDX-License-Identifier: Apache-2.0
"""Time device work by replaying CUDA graphs; on a CPU by calling it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

# Calls captured into one graph: the launch of the graph itself becomes negligible.
CALLS_PER_REPLAY = 16
NUM_REPLAYS = 60


@dataclass(frozen=True)
class Timing:
    """Microseconds per call, over replays."""

    median_us: float
    p10_us: float
    p90_us: float
    num_replays: int

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> "Timing":
        if len(microseconds) == 1:
            (only,) = microseconds
            return cls(only, only, only, 1)
        deciles = quantiles(microseconds, n=10, method="inclusive")
        return cls(median(microseconds), deciles[0], deciles[-1], len(microseconds))

    @property
    def spread(self) -> str:
        return f"{self.p10_us:.1f} - {self.p90_us:.1f}"


def time_calls(
    run: Callable[[int], object], device: torch.device, num_replays: int = NUM_REPLAYS
) -> Timing:
    """Time `run(i)`, which does the work on input set i of as many as it likes.

    On a GPU, CALLS_PER_REPLAY calls with i = 0, 1, ... are one CUDA graph, and the
    graph is replayed back to back behind a busy device, so that no host time counts.
    On a CPU there is no graph: such times only show that the command works.
    """
    if device.type == "cpu":
        return _time_on_cpu(run, num_replays)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(CALLS_PER_REPLAY):
            run(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS_PER_REPLAY):
            run(i)
    graph.replay()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
    torch.cuda._sleep(10_000_000)
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return Timing.of(
        [
            1e3 * events[i].elapsed_time(events[i + 1]) / CALLS_PER_REPLAY
            for i in range(num_replays)
        ]
    )


def _time_on_cpu(run: Callable[[int], object], num_replays: int) -> Timing:
    run(0)
    samples = []
    for i in range(num_replays):
        started = time.perf_counter()
        run(i)
        samples.append(1e6 * (time.perf_counter() - started))
    return Timing.of(samples)


def num_input_sets(bytes_per_set: int, device: torch.device) -> int:
    """Input sets to rotate so that no call finds its inputs in the L2 cache."""
    if device.type == "cpu":
        return 2
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = -(-2 * cache_bytes // max(bytes_per_set, 1))
    return min(max(wanted, 2), CALLS_PER_REPLAY)


def copy_bandwidth(device: torch.device, num_replays: int = NUM_REPLAYS) -> float:
    """Bytes per second of a device-to-device copy, read and written ones counted."""
    num_bytes = 1 << (20 if device.type == "cpu" else 29)
    source = torch.zeros(2, num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy(i: int) -> None:
        target[i % 2].copy_(source[i % 2])

    timing = time_calls(copy, device, min(num_replays, 10))
    return 2 * num_bytes / (timing.median_us * 1e-6)


def launch_floor(device: torch.device, num_replays: int = NUM_REPLAYS) -> Timing:
    """What the smallest kernel costs in a graph: no operation can take less."""
    number = torch.zeros(1, device=device)
    return time_calls(lambda i: number.add_(1), device, num_replays)
