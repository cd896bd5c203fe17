# SPDX-License-Identifier: Apache-2.0
"""Which tokens end a request."""

from vllm import SamplingParams

from vllm_ddtree.stop_tokens import stop_token_ids

EOS = 2


def sampling(*stop: int, ignore_eos: bool = False) -> SamplingParams:
    params = SamplingParams(stop_token_ids=list(stop), ignore_eos=ignore_eos)
    params.update_from_generation_config({"eos_token_id": [EOS, 3]}, EOS)
    return params


def test_the_end_of_sequence_is_one_unless_it_is_ignored() -> None:
    assert stop_token_ids(sampling(9, 5)) == [2, 3, 5, 9]
    assert stop_token_ids(sampling(9, 5, ignore_eos=True)) == [5, 9]
    assert stop_token_ids(None) == []
