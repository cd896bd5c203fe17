# SPDX-License-Identifier: Apache-2.0
"""Debugging: tensor-parallel ranks must build, walk and commit the same tree."""

import torch
from vllm.distributed import get_tp_group


class RankCheck:
    """Compares checksums of tensors across the tensor-parallel group.

    Ranks that disagree on a tree would take different tokens, and soon different
    shapes: wrong output, then a hang. The comparison waits for the device.
    """

    def __init__(self) -> None:
        self.group = get_tp_group()

    def compare(self, what: str, *tensors: torch.Tensor) -> None:
        """Stop when the tensors, integers or bits of floats, differ on any rank.

        Raises:
            RuntimeError: they differ; the message names the ranks.

        """
        own = torch.stack([_checksum(tensor) for tensor in tensors])
        if self.group.world_size == 1:
            return
        # 16 bits at a time are exact as floats, which every backend can gather.
        gathered = self.group.all_gather(own.view(torch.int16).float(), dim=0)
        sums = gathered.view(self.group.world_size, -1)
        differs = (sums != sums[0]).any(dim=1).nonzero().flatten().tolist()
        if differs:
            raise RuntimeError(
                f"ddtree_check_ranks: the {what} of ranks {differs} differs from rank "
                "0's. Ranks must see the same draft scores; report this with the "
                "model and the tensor-parallel size."
            )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A position-dependent sum of the elements, modulo 2**64."""
    values = tensor.contiguous().flatten()
    if values.is_floating_point():
        values = values.float().view(torch.int32)
    values = values.long()
    weights = torch.arange(1, values.shape[0] + 1, device=values.device)
    return (values * (weights * 0x9E3779B97F4A7C1 + 1)).sum()
