# SPDX-License-Identifier: Apache-2.0
"""What a worker counts beyond vLLM's own metrics."""

from collections import Counter

from vllm.logger import init_logger

# vLLM prints loggers below its own name only.
logger = init_logger("vllm.ddtree")

CHAIN_REQUESTS = "vllm:ddtree_chain_requests_total"


class ChainRequests:
    """Requests whose drafts have to form a chain, by reason.

    A request counts each time it enters the batch, that is again after a preemption.
    Workers have no way into the server's Prometheus registry: read the numbers with
    ``collective_rpc("ddtree_metrics")``. Each reason is logged once.
    """

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        self.by_reason[reason] += 1
        if self.by_reason[reason] == 1:
            logger.info(
                "Method 'ddtree' verifies chains instead of trees for requests "
                "that use %s.",
                reason,
            )

    def values(self) -> dict[str, dict[str, int]]:
        return {CHAIN_REQUESTS: dict(self.by_reason)}
