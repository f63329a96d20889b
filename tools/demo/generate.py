"""Stage 2a: let the trained target answer generated user turns, as training text for the drafters.

Rows run in lock step, one token per step. A row alternates between forced tokens (the user turns of random conversations) and free
tokens (the target's own replies, greedy for most rows, sampled for the rest). Output shards have the format of data.py.
"""

import argparse
import random
import time
from concurrent.futures import ProcessPoolExecutor

import data
import numpy as np
import torch
from model import Config, Target, quantize_module
from tokenizers import Tokenizer

EOT, IM_END = 4088, 4090


def scripts(job):
    """Forced token buffers (rows, T) and flags that mark the last token of each user segment."""
    seed, rows, T, tok_path = job
    r, tok = random.Random(seed), Tokenizer.from_file(tok_path)
    ids, last = np.zeros((rows, T), np.int16), np.zeros((rows, T), bool)
    for i in range(rows):
        buf, ends, first = [], [], True
        while len(buf) < T:
            sep = "" if first else "\n<|endoftext|>"
            for role, text in data.conversation(r):
                if role == "system":
                    sep += f"<|im_start|>system\n{text}<|im_end|>\n"
                elif role == "user":
                    buf += tok.encode(
                        f"{sep}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
                        add_special_tokens=False,
                    ).ids
                    ends.append(len(buf) - 1)
                    sep = "\n"
            first = False
        ids[i] = buf[:T]
        last[i, [e for e in ends if e < T]] = True
    return ids, last


@torch.no_grad()
def rollout(model, ids, last, temp, T):
    """-> (rows, T) tokens with the loss bit on free tokens."""
    B, dev = ids.shape[0], ids.device
    state = model.new_state(B, T, dev)
    out = torch.zeros(B, T, dtype=torch.int32, device=dev)
    ptr, free = (
        torch.zeros(B, dtype=torch.long, device=dev),
        torch.zeros(B, dtype=torch.bool, device=dev),
    )
    rows, nxt = torch.arange(B, device=dev), None
    for t in range(T):
        forced = ids[rows, ptr].long()
        cur = forced if nxt is None else torch.where(free, nxt, forced)
        out[:, t] = cur.int() | (free.int() << 15)
        now_free = torch.where(free, cur != IM_END, last[rows, ptr])
        ptr = (ptr + (~free).long()).clamp_max(T - 1)
        free = now_free
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model.step(cur, t, state).float()
        noise = -torch.empty_like(logits).exponential_().log()
        nxt = (logits + temp[:, None] * noise).argmax(-1)
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--ckpt", required=True)
    p.add_argument("--tokenizer", default="tokenizer.json")
    p.add_argument("--out", required=True)
    p.add_argument("--rows", type=int, default=4096)
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--workers", type=int, default=14)
    a = p.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    model = Target(Config()).cuda().eval()
    model.load_state_dict(torch.load(a.ckpt, weights_only=True)["model"])
    quantize_module(model)
    for b in model.blocks:
        if b.recurrent:
            b.mix.step = torch.compile(b.mix.step, dynamic=False)
    part = a.rows // 16
    t0, n, k = time.time(), 0, 0
    with ProcessPoolExecutor(a.workers) as pool:
        jobs = lambda k: [
            pool.submit(scripts, (9_000_000 + 1000 * k + j, part, a.length, a.tokenizer))
            for j in range(16)
        ]
        pend = jobs(0)
        while time.time() - t0 < a.seconds or k == 0:
            got, pend = [f.result() for f in pend], jobs(k + 1)
            ids = torch.from_numpy(np.concatenate([x for x, _ in got])).cuda()
            last = torch.from_numpy(np.concatenate([x for _, x in got])).cuda()
            temp = torch.where(torch.arange(len(ids), device="cuda") % 4 == 0, 0.8, 0.0)
            rows = rollout(model, ids, last, temp, a.length).cpu().numpy().astype(np.uint16)
            rows = np.concatenate([np.full((len(rows), 1), EOT, np.uint16), rows], 1)
            rows.tofile(f"{a.out}/gen{k:03d}.bin")
            n, k = n + rows.size, k + 1
            print(
                f"round {k}: {n / 1e6:.1f} M tokens, {(rows >> 15).mean():.2f} free, {time.time() - t0:.1f} s",
                flush=True,
            )
        for f in pend:
            f.cancel()


if __name__ == "__main__":
    main()
