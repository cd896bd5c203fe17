# SPDX-License-Identifier: Apache-2.0
"""Trees and accepted paths of past steps, recorded on request: to look at, to test."""

from dataclasses import asdict, dataclass
from typing import Any

from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_ddtree.state import TreeState


@dataclass(frozen=True)
class TreeTrace:
    """One request's verify step."""

    req_id: str
    # Node i is row i + 1; row 0 is the token the step began with.
    tokens: list[int]
    parents: list[int]
    # Cumulative log-probabilities under the drafter.
    scores: list[float]
    path: list[int]
    """Accepted rows, in order."""


class TraceRecorder:
    """Collects traces while it is on. Recording copies every step to the host."""

    def __init__(self) -> None:
        self._traces: list[TreeTrace] | None = None

    def start(self) -> None:
        self._traces = []

    def stop(self) -> list[dict[str, Any]]:
        """The traces since `start` as plain data; recording ends."""
        traces, self._traces = self._traces or [], None
        return [asdict(trace) for trace in traces]

    def record(self, input_batch: InputBatch, state: TreeState) -> None:
        """Record the step whose walk `state` holds; nothing while off."""
        if self._traces is None or state.walk is None:
            return
        tree = state.tree
        num_rows = input_batch.cu_num_logits.diff().tolist()
        slots = state.tree_slots[: input_batch.num_reqs].tolist()
        num_sampled = state.walk.num_sampled.tolist()
        for req_idx, slot in enumerate(slots):
            if slot < 0:
                continue
            n = min(int(tree.num_nodes[slot]), num_rows[req_idx] - 1)
            self._traces.append(
                TreeTrace(
                    req_id=input_batch.req_ids[req_idx],
                    tokens=tree.tokens[slot, :n].tolist(),
                    parents=tree.parents[slot, :n].tolist(),
                    scores=tree.scores[slot, :n].tolist(),
                    path=state.walk.path[req_idx, : num_sampled[req_idx] - 1].tolist(),
                )
            )
