# SPDX-License-Identifier: Apache-2.0
"""Drafts once with DFlash, then builds the most probable tree of the draft."""

import copy
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_ddtree.config import DDTreeSpeculativeConfig
from vllm_ddtree.draft_head import DraftHead
from vllm_ddtree.kv_commit import KVCommitter
from vllm_ddtree.model_state import TreeModelState
from vllm_ddtree.ops.ancestors import compute_ancestors
from vllm_ddtree.ops.build import build_tree
from vllm_ddtree.ops.commit import path_index
from vllm_ddtree.ops.verify_inputs import restore_positions
from vllm_ddtree.rank_check import RankCheck
from vllm_ddtree.state import TreeState
from vllm_ddtree.trace import TraceRecorder


class DDTreeSpeculator(DFlashSpeculator):
    """A DFlash speculator whose drafts are trees (arXiv 2604.12989).

    vLLM's ``num_speculative_tokens`` is the tree's budget; this class drafts the
    checkpoint's own block, whatever the budget is: a DFlash drafter's quality
    depends on its number of mask tokens.
    """

    _speculator_name = "DDTree"
    vllm_config: VllmConfig

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        spec_config = vllm_config.speculative_config
        assert isinstance(spec_config, DDTreeSpeculativeConfig)
        super().__init__(_with_draft_block(vllm_config), device)
        self.req_states = req_states
        self.budget = spec_config.num_speculative_tokens
        schedule = spec_config.num_speculative_tokens_per_batch_size or []
        self.budgets = {self.budget, *(nodes for *_, nodes in schedule)}
        self.temper_drafts = spec_config.ddtree_temper_drafts
        self.keep_spine = spec_config.ddtree_keep_spine
        self.state = TreeState(
            self.max_num_reqs, self.budget, self.num_speculative_steps, device
        )
        # What the runner stores and feeds to the target: node tokens in tree order.
        self.draft_tokens = torch.zeros(
            self.max_num_reqs, self.budget, dtype=torch.int64, device=device
        )
        self.max_nodes = torch.full(
            (self.max_num_reqs,), self.budget, dtype=torch.int32, device=device
        )
        self.committer: KVCommitter | None = None
        self.trace = TraceRecorder()
        self.rank_check = RankCheck() if spec_config.ddtree_check_ranks else None

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        self.draft_head = DraftHead(model)
        return model

    def get_target_model_state_cls(self, cls: type[ModelState]) -> type[ModelState]:
        """The model state that prepares and verifies this speculator's trees.

        Raises:
            ValueError: the target needs another one than vLLM's default.

        """
        if cls is not DefaultModelState:
            raise ValueError(
                "Speculative method 'ddtree' does not support targets with their own "
                f"model state ({cls.__name__}) yet; use method 'dflash'."
            )
        return type("TreeModelState", (TreeModelState,), {"speculator": self})

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        # Capture sizes count the target's tokens; the draft's are the same numbers
        # of requests.
        config = copy.copy(self.vllm_config)
        compilation = copy.copy(config.compilation_config)
        sizes = compilation.cudagraph_capture_sizes or []
        num_reqs = {-(-size // (nodes + 1)) for size in sizes for nodes in self.budgets}
        compilation.cudagraph_capture_sizes = [
            n * self.num_query_per_req for n in sorted(num_reqs)
        ]
        compilation.max_cudagraph_capture_size = max(
            compilation.cudagraph_capture_sizes, default=0
        )
        config.compilation_config = compilation
        self.vllm_config = config
        super().init_cudagraph_manager(cudagraph_mode)

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        return min(num_reqs * (self.budget + 1), self.max_num_tokens)

    def prepare_context_anchor(
        self, input_batch: InputBatch, num_rejected: torch.Tensor
    ) -> None:
        """Commit the walk before the draft reads its context.

        From here on the batch is what a chain's would be: the accepted rows come
        first, at consecutive positions, and the last `num_rejected` are void.
        """
        self.trace.record(input_batch, self.state)
        walk, self.state.walk = self.state.walk, None
        if walk is None:
            return
        if self.rank_check is not None:
            self.rank_check.compare("walk", walk.path, walk.num_sampled)
        assert self.committer is not None
        self.committer.commit(input_batch, walk)
        restore_positions(
            input_batch.positions,
            input_batch.query_start_loc,
            input_batch.cu_num_logits,
            self.budget,
        )
        num_tokens = input_batch.num_tokens
        index = path_index(
            walk.path,
            walk.num_sampled,
            input_batch.query_start_loc,
            input_batch.cu_num_logits,
            num_tokens,
        )
        self.hidden_states[:num_tokens] = self.hidden_states[index]

    def propose(
        self, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        draft_tokens = super().propose(input_batch, *args, **kwargs)
        if self.rank_check is not None and not kwargs.get("dummy_run", False):
            tree, slots = self.state.tree, input_batch.idx_mapping
            self.rank_check.compare(
                "tree", draft_tokens, tree.parents[slots], tree.scores[slots]
            )
        return draft_tokens

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        hidden_states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        num_sample = num_reqs * self.num_speculative_steps
        # [num_reqs], negative for padding
        slots = self.sample_idx_mapping[: num_sample : self.num_speculative_steps]
        known = slots.clamp(min=0)
        temperature = None
        if self.temper_drafts:
            temperature = self.temperature[known]
            temperature = temperature.repeat_interleave(
                self.num_speculative_steps, output_size=num_sample
            )
        tokens, log_probs = self.draft_head.top_k(
            hidden_states[self.sample_indices[:num_sample]], temperature, self.budget
        )
        self._build_tree(
            tokens.view(num_reqs, self.num_speculative_steps, -1),
            log_probs.view(num_reqs, self.num_speculative_steps, -1),
            slots,
            known,
        )

    def _build_tree(
        self,
        # [num_reqs, num_draft_steps, k]
        tokens: torch.Tensor,
        # [num_reqs, num_draft_steps, k]
        log_probs: torch.Tensor,
        # [num_reqs] negative for padding
        slots: torch.Tensor,
        # [num_reqs] the same, padding 0
        known: torch.Tensor,
    ) -> None:
        num_reqs = slots.shape[0]
        state = self.state
        # The first drafted position is the length so far. A path of depth d and its
        # bonus token make d + 1 more tokens.
        seq_lens = self.sample_pos[: num_reqs * self.num_speculative_steps]
        seq_lens = seq_lens[:: self.num_speculative_steps]
        max_rank, max_seq_len = state.limits[:, known]
        max_depth = max_seq_len - seq_lens - 1
        build_tree(
            tokens,
            log_probs,
            state.tree,
            slots,
            self.max_nodes[:num_reqs],
            max_depth.clamp(min=0).int(),
            max_rank,
            self.keep_spine,
        )
        compute_ancestors(state.tree, slots)
        # Padding nodes are fed to the target too: any valid token will do.
        self.draft_tokens[:num_reqs] = state.tree.tokens[known].clamp(min=0)


def _with_draft_block(vllm_config: VllmConfig) -> VllmConfig:
    """The configuration a DFlash speculator of the checkpoint's block expects."""
    spec_config = copy.copy(vllm_config.speculative_config)
    assert isinstance(spec_config, DDTreeSpeculativeConfig)
    spec_config.num_speculative_tokens = spec_config.num_draft_steps
    # A schedule trims trees, never the draft block.
    spec_config.num_speculative_tokens_per_batch_size = None
    vllm_config = copy.copy(vllm_config)
    vllm_config.speculative_config = spec_config
    return vllm_config
