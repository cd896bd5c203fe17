# SPDX-License-Identifier: Apache-2.0
"""Brings the target's model state to a vLLM that does not ask the speculator."""

from torch import nn
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

from vllm_ddtree.hooks import patcher, registry
from vllm_ddtree.speculator import DDTreeSpeculator


class PluginSpeculator(DDTreeSpeculator):
    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        if not patcher.exists(registry.TARGET_MODEL_STATE.native):
            # vLLM asks a model for its state's class, if the model has an opinion.
            base = resolve_model_state_cls(self.vllm_config, target_model)
            cls = self.get_target_model_state_cls(base)
            target_model.get_model_state_cls = lambda: cls
        return model
