# SPDX-License-Identifier: Apache-2.0
"""With a vLLM it does not know, the plugin says so once and changes nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "tests" / "assets" / "tiny-qwen3"

WARNING = (
    "Speculative method 'ddtree' is not available: it needs vLLM 0.32.0, but vllm "
    "9.9.9+cpu is installed. Run 'pip install vllm==0.32.0'."
)

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm_ddtree.hooks import patcher

engine = dict(model=sys.argv[1], dtype="float32", enforce_eager=True, max_num_seqs=1,
              max_model_len=128)
speculative = dict(model=sys.argv[2], num_speculative_tokens=7)
try:
    LLM(**engine, speculative_config={"method": "ddtree", **speculative})
    refused = None
except ValueError as error:
    refused = str(error)
llm = LLM(**engine, speculative_config={"method": "dflash", **speculative})
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
(output,) = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params, use_tqdm=False)
tokens = list(output.outputs[0].token_ids)
owned = [hook.id for hook in patcher.HOOKS for site in hook.bind_sites
         if hasattr(patcher.resolve(site)[2], patcher.OWNER_ATTRIBUTE)]
print(json.dumps({"refused": refused, "tokens": tokens, "owned": owned}))
"""


def test_one_warning_and_everything_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "vllm-9.9.9+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9+cpu\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(PAIR / "target"), str(PAIR / "draft")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert "ddtree" in report["refused"] and "dflash" in report["refused"]
    assert len(report["tokens"]) == 8
    assert report["owned"] == []
    log = result.stdout + result.stderr
    assert log.count(WARNING) == 1
    assert log.count("'ddtree' is not available") == 1
