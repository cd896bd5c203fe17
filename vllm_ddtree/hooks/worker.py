# SPDX-License-Identifier: Apache-2.0
"""Loaded by vLLM in every worker of a ddtree engine, before the worker is built."""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_ddtree.hooks import patcher

patcher.install("worker")
register_backend(
    AttentionBackendEnum.CUSTOM, "vllm_ddtree.attention.TreeAttentionBackend"
)


class WorkerExtension:
    """vLLM's ``worker_extension_cls``: methods for ``collective_rpc``."""

    model_runner: Any

    def ddtree_metrics(self) -> dict[str, dict[str, int]]:
        """Counters of this worker: metric -> label -> count."""
        return self.model_runner.speculator.state.chain_requests.values()

    def ddtree_start_trace(self) -> None:
        """Record the tree and the accepted path of every step from now on."""
        self.model_runner.speculator.trace.start()

    def ddtree_stop_trace(self) -> list[dict[str, Any]]:
        """Stop recording and return the traces, `vllm_ddtree.trace.TreeTrace`."""
        return self.model_runner.speculator.trace.stop()
