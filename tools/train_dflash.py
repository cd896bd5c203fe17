#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a DFlash (block-diffusion) drafter for a small Llama-style model.

    python tools/train_dflash.py generate --target TARGET \\
        --prompts prompts.jsonl.gz --out data.npz
    python tools/train_dflash.py train --target TARGET --data data.npz \\
        --out DRAFTER --seconds 600
    python tools/train_dflash.py eval --target TARGET --draft DRAFTER \\
        --prompts benchmarks/prompts/*.jsonl

The checkpoint has vLLM's format. `generate` and `train` need only PyTorch (with Triton
on CUDA) and safetensors; `eval` needs vLLM (0.32 was used). TARGET is the folder
written by `fetch_target.py`; prompts.jsonl.gz comes from `gen_prompts.py`.

The drafter (vLLM: `vllm/model_executor/models/qwen3_dflash.py`):
  * has the target's frozen token embedding and LM head, and a few Qwen3-style layers of
    its own;
  * turns the hidden states h of chosen target layers into one feature per context
    token, c = RMSNorm(W_fc [h_1; ...; h_n]), and every drafter layer makes context keys
    and values from c;
  * reads a block [last accepted token, mask, mask, ...]: slot j > 0 predicts the token
    at its own position, sees all the context before the block and, without a causal
    mask, the whole block.

Training: documents are packed into rows; in every row many random response positions
become anchors, and each anchor's block is trained on the next tokens with weight
exp(-(j-1)/7). The label is a mixture of the token that the target produced and the
target's own distribution there; since logits are h @ E.T, the mixture needs only the
expected embedding t = a * E[x] + (1 - a) * p @ E, and the loss of a slot is
logsumexp(h @ E.T) - h . t.
"""

import argparse
import glob
import gzip
import json
import math
import os
import time

import numpy as np

BLOCK = 16
NGRAM = 13


def generate(args):
    """Let the target finish the stage-1 user turns, then answer every prompt."""
    started = time.time()
    with gzip.open(args.prompts, "rt") as handle:
        header = json.loads(handle.readline())
        prompts = [json.loads(line) for line in handle][: args.limit or None]
    m = build(args)
    m.torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    engine = Engine(m, args.batch, args.length, header["stop"])
    print(f"engine ready after {time.time() - started:.0f} s", flush=True)
    records, tokens_made = [], 0
    # Chunks keep a partial result useful when the time limit ends the loop.
    for begin in range(0, len(prompts), args.chunk):
        if time.time() - started > args.seconds:
            print(
                f"time limit: stopped at prompt {begin} of {len(prompts)}", flush=True
            )
            break
        chunk = prompts[begin : begin + args.chunk]
        first = [p for p in chunk if p["stage"] == 1]
        turns = engine.run([(p["ids"], args.turn_tokens, 0.9, 4.0) for p in first])
        work, kinds = [], []
        for prompt, turn in zip(first, turns, strict=False):
            if len(turn) > 3 and turn[-1] == header["stop"]:
                work.append(prompt["ids"] + turn[:-1] + header["suffix"])
                kinds.append(prompt["kind"])
        for prompt in chunk:
            if prompt["stage"] == 2:
                work.append(prompt["ids"])
                kinds.append(prompt["kind"])
        temperature = rng.choice([0.0, 0.7, 1.0], size=len(work), p=[0.5, 0.2, 0.3])
        length = rng.choice(
            [args.max_tokens, 2 * args.max_tokens], size=len(work), p=[0.85, 0.15]
        )
        answers = engine.run(
            [
                (ids, int(n), float(t), 1e9)
                for ids, n, t in zip(work, length, temperature, strict=False)
            ]
        )
        for ids, kind, t, answer in zip(
            work, kinds, temperature, answers, strict=False
        ):
            if len(answer) >= 4:
                records.append((ids, answer, t, kind))
                tokens_made += len(answer)
        print(
            f"{begin + len(chunk)} prompts, {tokens_made} response tokens, "
            f"{time.time() - started:.0f} s",
            flush=True,
        )

    names = sorted({kind for *_, kind in records})
    np.savez_compressed(
        args.out,
        tokens=np.concatenate(
            [np.array(p + r, dtype=np.uint16) for p, r, _, _ in records]
        ),
        length=np.array([len(p) + len(r) for p, r, _, _ in records], dtype=np.uint16),
        prompt=np.array([len(p) for p, _, _, _ in records], dtype=np.uint16),
        temperature=np.array([t for _, _, t, _ in records], dtype=np.float16),
        kind=np.array([names.index(k) for *_, k in records], dtype=np.uint8),
        kinds=np.array(names),
    )
    print(
        f"wrote {len(records)} documents after {time.time() - started:.0f} s",
        flush=True,
    )


class Engine:
    """Static-batch sampling from the target: one CUDA graph for a decode step of
    `batch` sequences.
    """

    def __init__(self, m, batch, length, stop):
        torch = m.torch
        self.m, self.batch, self.length, self.stop = m, batch, length, stop

        def new(*shape, dtype=m.dtype):
            return torch.zeros(shape, dtype=dtype, device=m.device)

        self.cache = [
            tuple(new(batch, m.kv_heads, length, m.head_dim) for _ in "kv")
            for _ in range(m.layers_t)
        ]
        self.token, self.pos = (
            new(batch, dtype=torch.int64),
            new(batch, dtype=torch.int64),
        )
        self.scale, self.noise, self.cut = (
            new(batch, dtype=torch.float32) for _ in range(3)
        )
        self.rows = torch.arange(batch, device=m.device)
        self.attention = decode_attention(m) if m.cuda else self.plain_attention
        self.graph = None
        if m.cuda:
            with torch.no_grad():
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        self.step()
                torch.cuda.current_stream().wait_stream(stream)
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.step()

    def plain_attention(self, q, k, v, pos):
        m = self.m
        q = q.view(len(q), m.kv_heads, -1, m.head_dim)
        mask = (m.torch.arange(self.length, device=m.device) <= pos[:, None])[
            :, None, None
        ]
        return m.F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(
            len(q), -1
        )

    def step(self):
        """Read `token` at `pos`, replace it by the sampled next token and advance."""
        m, torch, F = self.m, self.m.torch, self.m.F
        cos, sin = (x[:, 0] for x in m.rope(self.pos[:, None]))
        x = F.embedding(self.token, m.embed)
        for (k_cache, v_cache), (ln1, wq, wk, wv, wo, ln2, gate, up, down) in zip(
            self.cache, m.target_layers, strict=False
        ):
            h = m.rms(x, ln1)
            q = m.rotate(
                F.linear(h, wq).view(self.batch, m.heads, m.head_dim), cos, sin
            )
            k = m.rotate(
                F.linear(h, wk).view(self.batch, m.kv_heads, m.head_dim), cos, sin
            )
            k_cache[self.rows, :, self.pos] = k
            v_cache[self.rows, :, self.pos] = F.linear(h, wv).view(
                self.batch, m.kv_heads, m.head_dim
            )
            x = x + F.linear(self.attention(q, k_cache, v_cache, self.pos), wo)
            x = x + m.mlp(m.rms(x, ln2), gate, up, down)
        z = F.linear(m.rms(x, m.weights["norm.weight"]), m.head).float()
        z = (
            z.masked_fill(z < z.amax(-1, keepdim=True) - self.cut[:, None], -torch.inf)
            * self.scale[:, None]
        )
        gumbel = -torch.empty_like(z).exponential_().log()
        self.token.copy_((z + gumbel * self.noise[:, None]).argmax(-1))
        self.pos.add_(1)

    def prefill(self, id_lists, at):
        m, torch, F = self.m, self.m.torch, self.m.F
        width = -(-max(map(len, id_lists)) // 16) * 16
        ids = torch.zeros(len(id_lists), width, dtype=torch.int64)
        for row, x in enumerate(id_lists):
            ids[row, : len(x)] = torch.tensor(x)
        ids = ids.to(m.device)
        cos, sin = m.rope(torch.arange(width, device=m.device)[None])
        x, rows = F.embedding(ids, m.embed), slice(at, at + len(id_lists))
        for (k_cache, v_cache), (ln1, wq, wk, wv, wo, ln2, gate, up, down) in zip(
            self.cache, m.target_layers, strict=False
        ):
            h = m.rms(x, ln1)
            q = m.rotate(m.split(F.linear(h, wq), m.heads), cos, sin)
            k = m.rotate(m.split(F.linear(h, wk), m.kv_heads), cos, sin)
            v = m.split(F.linear(h, wv), m.kv_heads)
            k_cache[rows, :, :width], v_cache[rows, :, :width] = k, v
            k, v = (t.repeat_interleave(m.heads // m.kv_heads, 1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(out.transpose(1, 2).reshape(len(ids), width, -1), wo)
            x = x + m.mlp(m.rms(x, ln2), gate, up, down)

    def run(self, requests):
        """requests: (ids, max new tokens, temperature, logit cut-off below the best);
        returns the new tokens.
        """
        torch = self.m.torch
        order = sorted(
            range(len(requests)), key=lambda i: (requests[i][1], len(requests[i][0]))
        )
        results = [None] * len(requests)
        with torch.no_grad():
            for begin in range(0, len(order), self.batch):
                part = order[begin : begin + self.batch]
                group = [requests[i] for i in part]
                limit = min(
                    max(r[1] for r in group),
                    self.length - max(len(r[0]) for r in group),
                )
                for at in range(0, len(group), 512):
                    self.prefill([r[0] for r in group[at : at + 512]], at)
                pad = [0] * (self.batch - len(group))

                def put(values, dtype):
                    return torch.tensor(values, dtype=dtype).to(self.m.device)

                self.token.copy_(put([r[0][-1] for r in group] + pad, torch.int64))
                self.pos.copy_(put([len(r[0]) - 1 for r in group] + pad, torch.int64))
                self.scale.copy_(
                    put([1 / r[2] if r[2] else 1 for r in group] + pad, torch.float32)
                )
                self.noise.copy_(
                    put([float(r[2] > 0) for r in group] + pad, torch.float32)
                )
                self.cut.copy_(put([r[3] for r in group] + pad, torch.float32))
                out = torch.zeros(
                    limit, self.batch, dtype=torch.int64, device=self.m.device
                )
                open_ = self.rows < len(group)
                for t in range(limit):
                    self.graph.replay() if self.graph else self.step()
                    out[t] = self.token
                    open_ &= self.token != self.stop
                    if t % 16 == 15 and not bool(open_.any()):
                        break
                for row, i in enumerate(part):
                    results[i] = row
                tokens = out[: t + 1].t().cpu().tolist()
                for row, i in enumerate(part):
                    answer = tokens[row][: requests[i][1]]
                    results[i] = (
                        answer[: answer.index(self.stop) + 1]
                        if self.stop in answer
                        else answer
                    )
        return results


def decode_attention(m):
    """One query token per sequence against its cache, in Triton: a program per sequence
    and KV head.
    """
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        o_ptr,
        pos_ptr,
        length,
        scale,
        KV: tl.constexpr,
        G: tl.constexpr,
        D: tl.constexpr,
        N: tl.constexpr,
    ):
        b, h = tl.program_id(0), tl.program_id(1)
        count = tl.load(pos_ptr + b) + 1
        rows, dims = tl.arange(0, 16), tl.arange(0, D)
        at = ((b * KV + h) * G + rows[:, None]) * D + dims[None, :]
        q = tl.load(q_ptr + at, mask=rows[:, None] < G, other=0.0)
        base = (b * KV + h).to(tl.int64) * length * D
        best = tl.full([16], -float("inf"), tl.float32)
        total = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, D], tl.float32)
        for start in range(0, count, N):
            cols = start + tl.arange(0, N)
            place = base + cols[:, None] * D + dims[None, :]
            k = tl.load(k_ptr + place, mask=cols[:, None] < count, other=0.0)
            v = tl.load(v_ptr + place, mask=cols[:, None] < count, other=0.0)
            s = tl.dot(q, tl.trans(k)) * scale
            s = tl.where(cols[None, :] < count, s, -float("inf"))
            new = tl.maximum(best, tl.max(s, 1))
            p = tl.exp(s - new[:, None])
            old = tl.exp(best - new)
            total = total * old + tl.sum(p, 1)
            acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v)
            best = new
        tl.store(
            o_ptr + at,
            (acc / total[:, None]).to(o_ptr.dtype.element_ty),
            mask=rows[:, None] < G,
        )

    def attention(q, k, v, pos):
        out = m.torch.empty_like(q)
        group = m.heads // m.kv_heads
        kernel[(len(q), m.kv_heads)](
            q,
            k,
            v,
            out,
            pos,
            k.shape[2],
            m.head_dim**-0.5,
            KV=m.kv_heads,
            G=group,
            D=m.head_dim,
            N=64,
            num_warps=2,
        )
        return out.view(len(q), -1)

    return attention


def engine_options(capture_sizes):
    """Full decode graphs without torch.compile on CUDA; eager elsewhere."""
    import torch

    if not torch.cuda.is_available():
        return dict(enforce_eager=True)
    return dict(
        compilation_config=dict(
            mode=0,
            cudagraph_mode="FULL_DECODE_ONLY",
            cudagraph_capture_sizes=capture_sizes,
        )
    )


def windows(tokens):
    """Hash of the NGRAM tokens that start at each place."""
    tokens = np.asarray(tokens, dtype=np.uint64) + np.uint64(1)
    total = np.zeros(max(0, len(tokens) - NGRAM + 1), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for i in range(NGRAM):
            total = total * np.uint64(0x9E3779B97F4A7C15) + tokens[i : i + len(total)]
    return total


def load_documents(paths, excluded=()):
    """(ids, prompt length, temperature) of each document, without duplicates.

    `excluded` holds token lists (evaluation prompts); a document whose prompt shares
    NGRAM tokens in a row with one of them is dropped, except for runs that several of
    the excluded prompts share (instructions, imports).
    """
    hashes, counts = np.unique(
        np.concatenate(
            [np.zeros(0, np.uint64)] + [np.unique(windows(x)) for x in excluded]
        ),
        return_counts=True,
    )
    hashes = hashes[counts <= 2]
    documents, seen, dropped, total = [], set(), 0, 0
    for path in paths:
        data = np.load(path)
        tokens, prompts, temperatures = (
            data["tokens"],
            data["prompt"],
            data["temperature"],
        )
        ends = np.cumsum(data["length"].astype(np.int64))
        found = windows(tokens)
        place = np.minimum(np.searchsorted(hashes, found), max(0, len(hashes) - 1))
        hit = np.concatenate(
            [
                [0],
                np.cumsum(
                    hashes[place] == found if len(hashes) else np.zeros(len(found))
                ),
            ]
        )
        for begin, end, p, t in zip(
            np.concatenate([[0], ends[:-1]]),
            ends,
            prompts.astype(np.int64),
            temperatures,
            strict=False,
        ):
            ids = tokens[begin:end]
            total += 1
            last = min(begin + max(0, p - NGRAM + 1), len(hit) - 1)
            if hit[last] > hit[begin]:
                dropped += 1
                continue
            key = ids.tobytes()
            if key not in seen:
                seen.add(key)
                documents.append((ids, int(p), float(t)))
    print(
        f"{total} documents read, {dropped} overlap an evaluation prompt, "
        f"{total - dropped - len(documents)} are duplicates",
        flush=True,
    )
    return documents


def pack(documents, width, seed):
    """First-fit documents into rows; returns int arrays [rows, width]: ids, pos, doc
    (-1 = padding), resp, greedy.
    """
    order = np.random.default_rng(seed).permutation(len(documents))
    rows, open_rows = [], []
    for index in order:
        n = min(len(documents[index][0]), width)
        for slot, (left, row) in enumerate(open_rows):
            if left >= n:
                row.append(index)
                open_rows[slot] = (left - n, row)
                break
        else:
            rows.append([index])
            open_rows.append((width - n, rows[-1]))
            if len(open_rows) > 64:
                open_rows.sort(key=lambda item: -item[0])
                open_rows.pop()
    shape = (len(rows), width)
    out = {
        name: np.zeros(shape, dtype=np.int32)
        for name in ("ids", "pos", "resp", "greedy")
    }
    out["doc"] = np.full(shape, -1, dtype=np.int32)
    for r, members in enumerate(rows):
        at = 0
        for d, index in enumerate(members):
            ids, prompt, temperature = documents[index]
            ids = ids[: width - at]
            n = len(ids)
            out["ids"][r, at : at + n] = ids
            out["pos"][r, at : at + n] = np.arange(n)
            out["doc"][r, at : at + n] = d
            out["resp"][r, at + prompt : at + n] = 1
            out["greedy"][r, at : at + n] = temperature == 0
            at += n
    return out


def build(args):
    """The target and the drafter as functions, after torch has been imported."""
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    compile_ = (
        (lambda fn: torch.compile(fn, dynamic=False))
        if args.compile
        else (lambda fn: fn)
    )
    use_flex = args.attention == "flex"
    if use_flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    with open(os.path.join(args.target, "config.json")) as handle:
        tc = json.load(handle)
    hidden, heads, kv_heads = (
        tc["hidden_size"],
        tc["num_attention_heads"],
        tc["num_key_value_heads"],
    )
    head_dim = tc.get("head_dim") or hidden // heads
    eps, layers_t = tc["rms_norm_eps"], tc["num_hidden_layers"]
    theta = tc.get("rope_theta") or tc["rope_parameters"]["rope_theta"]
    weights = {}
    for path in glob.glob(os.path.join(args.target, "*.safetensors")):
        weights.update(load_file(path))
    weights = {
        name.removeprefix("model."): w.to(device, dtype) for name, w in weights.items()
    }
    embed = weights["embed_tokens.weight"]
    head = weights.get("lm_head.weight", embed)
    names = [
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    target_layers = [
        [weights[f"layers.{i}.{n}.weight"] for n in names] for i in range(layers_t)
    ]
    inv_freq = theta ** (
        -torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    )

    def rms(x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)

    def rope(pos):
        angle = pos[..., None].float() * inv_freq
        return torch.cat([angle.cos()] * 2, -1)[:, None].to(dtype), torch.cat(
            [angle.sin()] * 2, -1
        )[:, None].to(dtype)

    def rotate(x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def split(x, n):
        return x.view(x.shape[0], x.shape[1], n, head_dim).transpose(1, 2)

    def attend(q, k, v, mask):
        if use_flex:
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=heads != kv_heads)
        else:
            k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    def mlp(x, gate, up, down):
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def target_layer(x, cos, sin, mask, ln1, wq, wk, wv, wo, ln2, gate, up, down):
        h = rms(x, ln1)
        q, k = (
            rotate(split(F.linear(h, w), n), cos, sin)
            for w, n in ((wq, heads), (wk, kv_heads))
        )
        x = x + F.linear(attend(q, k, split(F.linear(h, wv), kv_heads), mask), wo)
        return x + mlp(rms(x, ln2), gate, up, down)

    def context_kv(c, cos, sin, wk, wv, k_norm):
        k = rotate(rms(split(F.linear(c, wk), kv_heads), k_norm), cos, sin)
        return k, split(F.linear(c, wv), kv_heads)

    def draft_layer(
        x,
        c,
        cos,
        sin,
        ccos,
        csin,
        mask,
        ln1,
        wq,
        wk,
        wv,
        wo,
        ln2,
        gate,
        up,
        down,
        q_norm,
        k_norm,
    ):
        h = rms(x, ln1)
        q = rotate(rms(split(F.linear(h, wq), heads), q_norm), cos, sin)
        k = rotate(rms(split(F.linear(h, wk), kv_heads), k_norm), cos, sin)
        v = split(F.linear(h, wv), kv_heads)
        ck, cv = context_kv(c, ccos, csin, wk, wv, k_norm)
        out = attend(q, torch.cat([ck, k], 2), torch.cat([cv, v], 2), mask)
        x = x + F.linear(out, wo)
        return x + mlp(rms(x, ln2), gate, up, down)

    def teacher_chunk(h):
        return F.linear(
            torch.softmax(F.linear(h, head).float(), -1).to(dtype), head.t()
        )

    def loss_chunk(h, t, w):
        z = F.linear(h, head).float()
        lse = torch.logsumexp(z, -1)
        p = torch.exp(z - lse[:, None]).to(dtype)
        loss = ((lse - (h.float() * t.float()).sum(-1)) * w).sum()
        return loss, (F.linear(p, head.t()) - t) * w[:, None].to(dtype)

    target_layer, draft_layer = compile_(target_layer), compile_(draft_layer)
    teacher_chunk, loss_chunk = compile_(teacher_chunk), compile_(loss_chunk)

    def pieces(n):
        """Equal slices of at most 8192 rows (512 on the CPU), so that a compiled
        function sees one shape.
        """
        count = -(-n // (8192 if cuda else 512))
        size = -(-n // count)
        return [slice(i, min(n, i + size)) for i in range(0, n, size)]

    class HeadLoss(torch.autograd.Function):
        """Sum over slots of w * (logsumexp(h E^T) - h.t), a few thousand rows of logits
        at a time.
        """

        @staticmethod
        def forward(ctx, h, t, w):
            grad, total = torch.empty_like(h), 0.0
            for rows in pieces(len(h)):
                part, grad[rows] = loss_chunk(h[rows], t[rows], w[rows])
                total = total + part
            ctx.save_for_backward(grad)
            return total

        @staticmethod
        def backward(ctx, scale):
            (grad,) = ctx.saved_tensors
            return grad * scale.to(grad.dtype), None, None

    def causal_mask(doc):
        rows, width = doc.shape
        if use_flex:

            def mod(b, h, q, k):
                return (k <= q) & (doc[b, q] == doc[b, k])

            return make_mask(
                mod, B=rows, H=None, Q_LEN=width, KV_LEN=width, device=device
            )
        index = torch.arange(width, device=device)
        return ((doc[:, :, None] == doc[:, None, :]) & (index[:, None] >= index))[
            :, None
        ]

    def block_mask(doc, anchor):
        """Queries: blocks of all anchors of a row; keys: the row's context, then the
        same blocks.
        """
        rows, width = doc.shape
        count = anchor.shape[1]
        adoc = doc.gather(1, anchor)
        if use_flex:

            def mod(b, h, q, k):
                block = q // BLOCK
                start = anchor[b, block]
                key = torch.where(k < width, k, 0)
                context = (k < start) & (k < width) & (doc[b, key] == adoc[b, block])
                return context | ((k >= width) & ((k - width) // BLOCK == block))

            return make_mask(
                mod,
                B=rows,
                H=None,
                Q_LEN=count * BLOCK,
                KV_LEN=width + count * BLOCK,
                device=device,
            )
        index = torch.arange(width, device=device)
        context = (index[None, None] < anchor[..., None]) & (
            doc[:, None] == adoc[..., None]
        )
        context = context.repeat_interleave(BLOCK, 1)
        block = torch.arange(count, device=device).repeat_interleave(BLOCK)
        own = (block[:, None] == block[None]).expand(rows, -1, -1)
        return torch.cat([context, own], -1)[:, None]

    make_mask = compile_(create_block_mask) if use_flex else None

    class Model:
        pass

    m = Model()
    m.__dict__.update(
        torch=torch,
        F=F,
        device=device,
        dtype=dtype,
        tc=tc,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        theta=theta,
        eps=eps,
        layers_t=layers_t,
        weights=weights,
        embed=embed,
        head=head,
        cuda=cuda,
    )
    count = args.target_features
    m.layer_ids = [round(1 + i * (layers_t - 4) / (count - 1)) for i in range(count)]

    def run_target(ids, pos, doc):
        """Hidden states after the chosen layers, concatenated, and the final normed
        hidden state.
        """
        with torch.no_grad():
            cos, sin = rope(pos)
            mask, x, features = causal_mask(doc), F.embedding(ids, embed), []
            for i, layer in enumerate(target_layers):
                x = target_layer(x, cos, sin, mask, *layer)
                if i in m.layer_ids:
                    features.append(x)
            return torch.cat(features, -1), rms(x, weights["norm.weight"])

    def expected_embedding(final):
        with torch.no_grad():
            flat = final.reshape(-1, hidden)
            return torch.cat(
                [teacher_chunk(flat[rows]) for rows in pieces(len(flat))]
            ).view_as(final)

    def measure_features(ids, pos, doc):
        """RMS of every feature over ordinary tokens (the first token of a document is
        an outlier).
        """
        features, _ = run_target(ids, pos, doc)
        return (
            features[(doc >= 0) & (pos > 0)]
            .float()
            .pow(2)
            .mean(0)
            .sqrt()
            .clamp_min(1e-3)
        )

    draft_names = [*names, "self_attn.q_norm", "self_attn.k_norm"]

    def init_params(scale):
        torch.manual_seed(args.seed)
        p, inter = {}, args.intermediate or tc["intermediate_size"]
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (inter, hidden),
            "mlp.up_proj": (inter, hidden),
            "mlp.down_proj": (hidden, inter),
        }
        for i in range(args.layers):
            for n in draft_names:
                if n in shapes:
                    w = torch.randn(shapes[n]) * shapes[n][1] ** -0.5
                    if n in ("self_attn.o_proj", "mlp.down_proj"):
                        w = w * (2 * args.layers) ** -0.5
                else:
                    w = torch.ones(
                        head_dim if n.endswith(("q_norm", "k_norm")) else hidden
                    )
                p[f"layers.{i}.{n}.weight"] = w
        p["fc.weight"] = torch.randn(hidden, count * hidden) * (count * hidden) ** -0.5
        p["hidden_norm.weight"] = torch.ones(hidden)
        p["norm.weight"] = torch.ones(hidden)
        if args.init == "target":
            # Start from the target's last layers, with the last feature as context.
            norms = 0
            for i in range(args.layers):
                source = layers_t - args.layers + i
                for n in draft_names:
                    full = f"layers.{source}.{n}.weight"
                    if (
                        full in weights
                        and weights[full].shape == p[f"layers.{i}.{n}.weight"].shape
                    ):
                        p[f"layers.{i}.{n}.weight"] = (
                            weights[full].float().cpu().clone()
                        )
                norms = (
                    norms
                    + weights[f"layers.{source}.input_layernorm.weight"].float().cpu()
                    / args.layers
                )
            last = scale[-hidden:].cpu()
            p["hidden_norm.weight"] = norms * last / last.pow(2).mean().sqrt()
            p["fc.weight"] *= 0.3
            p["fc.weight"][:, -hidden:] += torch.eye(hidden)
        if args.init in ("target", "norm"):
            p["norm.weight"] = weights["norm.weight"].float().cpu().clone()
        p = {k: torch.nn.Parameter(v.to(device, torch.float32)) for k, v in p.items()}
        p["feature_scale"] = scale
        return p

    def weights_for_use(p):
        """`fc` is trained for features of unit RMS; the checkpoint and the forward pass
        use it for raw features.
        """
        return {
            k: v / p["feature_scale"] if k == "fc.weight" else v
            for k, v in p.items()
            if k != "feature_scale"
        }

    def run_draft(p, features, ids, pos, doc, anchor):
        """Final hidden states [rows, anchors, BLOCK, hidden] of the blocks that start
        at `anchor`.
        """
        rows, a = anchor.shape
        w = {k: v.to(dtype) for k, v in weights_for_use(p).items()}
        c = rms(F.linear(features, w["fc.weight"]), w["hidden_norm.weight"])
        block_ids = torch.full((rows, a, BLOCK), args.mask_token, device=device)
        block_ids[..., 0] = ids.gather(1, anchor)
        offset = torch.arange(BLOCK, device=device)
        block_pos = (pos.gather(1, anchor)[..., None] + offset).view(rows, -1)
        x = F.embedding(block_ids.view(rows, -1), embed)
        (cos, sin), (ccos, csin), mask = (
            rope(block_pos),
            rope(pos),
            block_mask(doc, anchor),
        )
        for i in range(args.layers):
            x = draft_layer(
                x,
                c,
                cos,
                sin,
                ccos,
                csin,
                mask,
                *(w[f"layers.{i}.{n}.weight"] for n in draft_names),
            )
        return rms(x, w["norm.weight"]).view(rows, a, BLOCK, hidden)

    def draw_anchors(doc, resp, count, generator=None):
        """Random response positions that have a next token in the same document, in
        ascending order.
        """
        good = (resp[:, :-1] > 0) & (doc[:, 1:] == doc[:, :-1]) & (doc[:, :-1] >= 0)
        score = torch.rand(good.shape, device=device, generator=generator).masked_fill(
            ~good, -1.0
        )
        top, anchor = score.topk(count, 1)
        anchor, order = anchor.sort(1)
        return anchor, (top > 0).gather(1, order)

    def labels(ids, doc, anchor, real):
        """Slot j of a block is labelled by row index anchor + j; `ok` marks the slots
        inside the document.
        """
        width = ids.shape[1]
        index = anchor[..., None] + torch.arange(1, BLOCK, device=device)
        inside = index < width
        index = index.clamp(max=width - 1)
        flat = index.view(len(ids), -1)
        same = doc.gather(1, flat).view_as(index) == doc.gather(1, anchor)[..., None]
        return (
            index,
            ids.gather(1, flat).view_as(index),
            inside & same & real[..., None],
        )

    m.__dict__.update(
        run_target=run_target,
        run_draft=run_draft,
        weights_for_use=weights_for_use,
        measure_features=measure_features,
        expected_embedding=expected_embedding,
        init_params=init_params,
        draw_anchors=draw_anchors,
        labels=labels,
        head_loss=HeadLoss.apply,
        rope=rope,
        rms=rms,
        rotate=rotate,
        split=split,
        mlp=mlp,
        target_layers=target_layers,
    )
    return m


def excluded_prompts(args):
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(args.target)
    texts = []
    for path in args.exclude:
        with open(path) as handle:
            texts += [json.loads(line)["prompt"] for line in handle]
    return [tok(text, add_special_tokens=False)["input_ids"] for text in texts]


def prepare(args, m):
    """Packed training and held-out rows on the device."""
    begun = time.time()
    documents = load_documents(args.data, excluded_prompts(args))
    order = np.random.default_rng(1234).permutation(len(documents))
    held = [documents[i] for i in order[: args.held_out]]
    documents = [documents[i] for i in order[args.held_out :]]
    if args.limit_documents:
        documents = documents[: args.limit_documents]
    packs = []
    for part in (documents, held):
        packed = pack(part, args.width, 0)
        packs.append(
            {
                k: m.torch.from_numpy(v).to(
                    m.device, m.torch.int64 if k in ("ids", "pos") else m.torch.int32
                )
                for k, v in packed.items()
            }
        )
    data = packs[0]
    print(
        f"{len(documents)} documents in {len(data['ids'])} rows of {args.width}, fill "
        f"{(data['doc'] >= 0).float().mean():.3f}, "
        f"response tokens {int(data['resp'].sum())}; {len(held)} held out; "
        f"{time.time() - begun:.0f} s",
        flush=True,
    )
    return packs


def train(args, m=None, packs=None):
    m = m or build(args)
    torch, F = m.torch, m.F
    torch.set_float32_matmul_precision("high")
    data, test = packs or prepare(args, m)
    rows = len(data["ids"])
    few = slice(0, min(8, rows))
    p = m.init_params(
        m.measure_features(data["ids"][few], data["pos"][few], data["doc"][few])
    )
    trained = {k: x for k, x in p.items() if x.requires_grad}
    print(
        f"{sum(x.numel() for x in trained.values()) / 1e6:.2f}M drafter parameters, "
        f"features from layers {m.layer_ids}",
        flush=True,
    )
    matrices = [x for x in trained.values() if x.dim() == 2]
    vectors = [x for x in trained.values() if x.dim() == 1]
    if args.optimizer == "muon":
        opts = [
            torch.optim.Muon(
                matrices,
                lr=args.lr,
                weight_decay=args.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(vectors, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
    else:
        groups = [
            dict(params=matrices, weight_decay=args.weight_decay),
            dict(params=vectors, weight_decay=0.0),
        ]
        opts = [torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=m.cuda)]
    step, spent = 0, 0.0
    if args.state and os.path.exists(args.state):
        state = torch.load(args.state, map_location=m.device)
        for k, v in state["params"].items():
            p[k].data.copy_(v)
        for opt, s in zip(opts, state["opts"], strict=False):
            opt.load_state_dict(s)
        step, spent = state["step"], state["spent"]
        print(f"resumed at step {step} after {spent:.0f} s of training", flush=True)
    torch.manual_seed(args.seed + 17 * step)
    decay = torch.exp(-torch.arange(BLOCK - 1, device=m.device) / args.gamma)

    def batch(source, index):
        return {k: v[index] for k, v in source.items()}

    def forward(b, anchor, real):
        features, final = m.run_target(b["ids"], b["pos"], b["doc"])
        index, label, ok = m.labels(b["ids"], b["doc"], anchor, real)
        h = m.run_draft(p, features, b["ids"], b["pos"], b["doc"], anchor)[:, :, 1:]
        return final, index, label, ok, h

    @torch.no_grad()
    def evaluate(limit):
        """Tokens per step at random anchors (1 + leading hits), separately for greedy
        and sampled documents.
        """
        generator = torch.Generator(m.device).manual_seed(5)
        hits = {0: [], 1: []}
        rows_at_once = min(args.rows, len(test["ids"]))
        for i in range(
            0, min(limit, len(test["ids"]) // rows_at_once * rows_at_once), rows_at_once
        ):
            b = batch(test, slice(i, i + rows_at_once))
            anchor, real = m.draw_anchors(b["doc"], b["resp"], args.anchors, generator)
            _, _, label, ok, h = forward(b, anchor, real)
            guess = torch.cat(
                [
                    F.linear(x, m.head).argmax(-1)
                    for x in h.reshape(-1, m.hidden).split(4096)
                ]
            ).view_as(label)
            full = real & ok[..., -1]
            run = ((guess == label) & ok).long().cumprod(-1)
            greedy = b["greedy"].gather(1, anchor)
            for g in (0, 1):
                hits[g].append(run[full & (greedy == g)].float())
        text = []
        for g, name in ((1, "T=0"), (0, "T>0")):
            if hits[g] and sum(map(len, hits[g])):
                x = torch.cat(hits[g])
                text.append(
                    f"{name} {1 + x.sum(1).mean():.3f} (first {x[:, 0].mean():.3f}, "
                    f"second {x[:, 1].mean():.3f})"
                )
        return ", ".join(text)

    warm_share = 0.03
    began, last_log, run_loss, run_count, permutation, cursor = (
        time.time(),
        time.time(),
        0.0,
        0,
        None,
        0,
    )
    offset, first = spent, True
    while True:
        now = offset + time.time() - began
        if (args.steps and step >= args.steps) or (
            not args.steps
            and (now >= args.seconds or now - offset >= args.call_seconds)
        ):
            break
        share = step / args.steps if args.steps else now / args.seconds
        scale = (
            min(1.0, (share + 1e-3) / warm_share)
            if share < warm_share
            else args.final_lr
            + (1 - args.final_lr)
            * 0.5
            * (1 + math.cos(math.pi * (share - warm_share) / (1 - warm_share)))
        )
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * scale
        if permutation is None or cursor + args.rows > rows:
            permutation, cursor = torch.randperm(rows, device=m.device), 0
        b = batch(data, permutation[cursor : cursor + args.rows])
        cursor += args.rows
        anchor, real = m.draw_anchors(b["doc"], b["resp"], args.anchors)
        final, index, label, ok, h = forward(b, anchor, real)
        with torch.no_grad():
            expected = m.expected_embedding(final)
            flat = (index - 1).view(len(index), -1, 1).expand(-1, -1, m.hidden)
            soft = expected.gather(1, flat).view(*index.shape, m.hidden)
            mix = torch.where(
                b["greedy"].gather(1, anchor) > 0, args.hard_greedy, args.hard_sampled
            )[..., None, None].to(m.dtype)
            goal = mix * F.embedding(label, m.head) + (1 - mix) * soft
            weight = ok.float() * decay
            weight = weight / weight.sum()
        loss = m.head_loss(
            h.reshape(-1, m.hidden), goal.view(-1, m.hidden), weight.view(-1)
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        step += 1
        run_loss, run_count = run_loss + loss.detach(), run_count + 1
        if first:
            print(
                f"first step took {time.time() - began:.1f} s (compilation included)",
                flush=True,
            )
            first = False
        if step % args.log_every == 0:
            value = float(run_loss) / run_count
            each = (time.time() - last_log) / run_count
            report = evaluate(args.eval_rows) if step % args.eval_every == 0 else ""
            memory = (
                f" {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB"
                if m.cuda
                else ""
            )
            print(
                f"step {step} {offset + time.time() - began:.0f} s loss {value:.4f} "
                f"grad {float(norm):.2f} "
                f"lr {args.lr * scale:.2e} {1000 * each:.0f} ms/step{memory} {report}",
                flush=True,
            )
            run_loss, run_count, last_log = 0.0, 0, time.time()
    spent = offset + time.time() - began
    if args.state:
        torch.save(
            dict(
                params={k: v.data for k, v in p.items()},
                opts=[o.state_dict() for o in opts],
                step=step,
                spent=spent,
            ),
            args.state,
        )
    save(args, m, p)
    report = evaluate(10**9)
    print(
        f"stopped at step {step}, {spent:.0f} s, {step * args.rows / rows:.2f} epochs; "
        f"{report}",
        flush=True,
    )
    return report


def save(args, m, p):
    from safetensors.torch import save_file

    os.makedirs(args.out, exist_ok=True)
    tensors = {
        k: v.detach().to(m.torch.bfloat16).cpu().contiguous()
        for k, v in m.weights_for_use(p).items()
    }
    shards, size = [{}], 0
    for k, v in sorted(tensors.items()):
        if args.shard_mib and size + v.numel() * 2 > args.shard_mib << 20:
            shards.append({})
            size = 0
        shards[-1][k] = v
        size += v.numel() * 2
    if len(shards) == 1:
        save_file(
            shards[0],
            os.path.join(args.out, "model.safetensors"),
            metadata={"format": "pt"},
        )
    else:
        files = {}
        for i, shard in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, os.path.join(args.out, name), metadata={"format": "pt"})
            files.update({k: name for k in shard})
        with open(
            os.path.join(args.out, "model.safetensors.index.json"), "w"
        ) as handle:
            json.dump({"metadata": {}, "weight_map": files}, handle)
    config = dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        vocab_size=m.tc["vocab_size"],
        hidden_size=m.hidden,
        intermediate_size=args.intermediate or m.tc["intermediate_size"],
        num_hidden_layers=args.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads,
        head_dim=m.head_dim,
        max_position_embeddings=m.tc["max_position_embeddings"],
        tie_word_embeddings=False,
        rms_norm_eps=m.eps,
        hidden_act="silu",
        attention_bias=False,
        rope_theta=m.theta,
        torch_dtype="bfloat16",
        bos_token_id=m.tc.get("bos_token_id"),
        eos_token_id=m.tc.get("eos_token_id"),
        block_size=BLOCK,
        num_target_layers=m.layers_t,
        layer_types=["full_attention"] * args.layers,
        dflash_config=dict(mask_token_id=args.mask_token, target_layer_ids=m.layer_ids),
    )
    with open(os.path.join(args.out, "config.json"), "w") as handle:
        json.dump(config, handle, indent=2)
        handle.write("\n")


def evaluate(args):
    """Acceptance length and per-position acceptance of `method: dflash` in vLLM."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tok = AutoTokenizer.from_pretrained(args.target)
    sets = {}
    for path in args.prompts:
        with open(path) as handle:
            items = [json.loads(line) for line in handle][: args.limit or None]
        ids = [
            tok.apply_chat_template(
                [{"role": "user", "content": item["prompt"]}],
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
            for item in items
        ]
        sets[os.path.basename(path).removesuffix(".jsonl")] = ids
    spec = dict(
        method="dflash",
        model=args.draft,
        num_speculative_tokens=args.draft_tokens,
        draft_sample_method=args.draft_sample_method,
    )
    llm = LLM(
        args.target,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=args.gpu_memory,
        speculative_config=spec,
        disable_log_stats=False,
        enable_prefix_caching=False,
        seed=0,
        **engine_options(
            [
                (args.draft_tokens + 1) * n
                for n in (1, 2, 4, 8, 16, 32, 64, 128)
                if n <= args.max_num_seqs
            ]
        ),
    )

    def counters():
        found = {}
        for metric in llm.get_metrics():
            if metric.name.startswith("vllm:spec_decode"):
                found[metric.name.removeprefix("vllm:spec_decode_")] = np.array(
                    metric.values if hasattr(metric, "values") else metric.value,
                    dtype=float,
                )
        return found

    results = []
    for temperature in args.temperature:
        for name, ids in sets.items():
            params = SamplingParams(
                temperature=temperature,
                max_tokens=args.max_tokens,
                stop_token_ids=[tok.eos_token_id],
                detokenize=False,
            )
            before, started = counters(), time.time()
            outputs = llm.generate(
                [{"prompt_token_ids": x} for x in ids], params, use_tqdm=False
            )
            after = counters()
            delta = {k: v - before.get(k, 0) for k, v in after.items()}
            drafts = float(delta["num_drafts"])
            rates = [
                round(float(x) / drafts, 3)
                for x in np.atleast_1d(delta["num_accepted_tokens_per_pos"])
            ]
            tokens = sum(len(out.outputs[0].token_ids) for out in outputs)
            results.append(
                dict(
                    set=name,
                    temperature=temperature,
                    prompts=len(ids),
                    tokens=tokens,
                    drafts=int(drafts),
                    acceptance_length=round(
                        1 + float(delta["num_accepted_tokens"]) / drafts, 3
                    ),
                    per_position=rates,
                    seconds=round(time.time() - started, 2),
                )
            )
            print("EVAL " + json.dumps(results[-1]), flush=True)
    if args.out:
        with open(args.out, "w") as handle:
            json.dump(results, handle, indent=1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    g = commands.add_parser(
        "generate", help="target responses for the prompts (PyTorch and Triton)"
    )
    g.add_argument("--prompts", required=True)
    g.add_argument("--out", required=True)
    g.add_argument(
        "--seconds", type=float, default=1e9, help="start no new chunk after this"
    )
    g.add_argument("--chunk", type=int, default=16384)
    g.add_argument("--limit", type=int, default=0)
    g.add_argument("--batch", type=int, default=4096, help="sequences sampled at once")
    g.add_argument(
        "--length",
        type=int,
        default=896,
        help="cache slots per sequence (20 MB each in all)",
    )
    g.add_argument("--turn-tokens", type=int, default=160)
    g.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        help="per response; one in seven may take twice as many",
    )
    g.add_argument("--seed", type=int, default=0)
    g.set_defaults(compile=False, attention="sdpa", target_features=5)

    t = commands.add_parser("train", help="train the drafter (PyTorch)")
    t.add_argument("--data", nargs="+", required=True)
    t.add_argument(
        "--exclude",
        nargs="*",
        default=[],
        help="evaluation prompts (JSONL) to keep out of the training set",
    )
    t.add_argument("--out", required=True)
    t.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="length of the learning-rate schedule, in training time",
    )
    t.add_argument(
        "--call-seconds",
        type=float,
        default=1e9,
        help="stop this call earlier; continue with --state",
    )
    t.add_argument(
        "--state", help="file that carries optimizer state from call to call"
    )
    t.add_argument(
        "--steps", type=int, default=0, help="schedule by steps instead of time"
    )
    t.add_argument("--layers", type=int, default=4)
    t.add_argument("--intermediate", type=int, default=0)
    t.add_argument("--target-features", type=int, default=5)
    t.add_argument(
        "--mask-token",
        type=int,
        default=16,
        help="16 is <empty_output> in SmolLM2's vocabulary",
    )
    t.add_argument("--init", choices=["random", "norm", "target"], default="target")
    t.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    t.add_argument("--lr", type=float, default=6e-4)
    t.add_argument("--final-lr", type=float, default=0.02)
    t.add_argument("--weight-decay", type=float, default=0.01)
    t.add_argument("--gamma", type=float, default=7.0)
    t.add_argument(
        "--hard-greedy",
        type=float,
        default=0.5,
        help="share of the token itself in the label, T=0 documents",
    )
    t.add_argument("--hard-sampled", type=float, default=0.0)
    t.add_argument("--width", type=int, default=1024)
    t.add_argument("--rows", type=int, default=16)
    t.add_argument("--anchors", type=int, default=128)
    t.add_argument("--held-out", type=int, default=600)
    t.add_argument("--limit-documents", type=int, default=0)
    t.add_argument("--attention", choices=["sdpa", "flex"], default="sdpa")
    t.add_argument("--compile", action="store_true")
    t.add_argument("--log-every", type=int, default=100)
    t.add_argument("--eval-every", type=int, default=500)
    t.add_argument("--eval-rows", type=int, default=64)
    t.add_argument("--shard-mib", type=int, default=0)
    t.add_argument("--seed", type=int, default=0)

    e = commands.add_parser("eval", help="acceptance in vLLM")
    e.add_argument("--draft", required=True)
    e.add_argument("--prompts", nargs="+", required=True)
    e.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    e.add_argument("--draft-tokens", type=int, default=BLOCK - 1)
    e.add_argument("--draft-sample-method", default="greedy")
    e.add_argument("--max-tokens", type=int, default=256)
    e.add_argument("--limit", type=int, default=0)
    e.add_argument("--out")

    for sub in (g, t, e):
        sub.add_argument("--target", required=True)
    e.add_argument("--dtype", default="auto")
    e.add_argument("--gpu-memory", type=float, default=0.85)
    e.add_argument("--max-num-seqs", type=int, default=64)
    args = parser.parse_args()
    {"generate": generate, "train": train, "eval": evaluate}[args.command](args)


if __name__ == "__main__":
    main()
