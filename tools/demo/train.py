"""Stage 1: train the target with its MTP block.

Loss = cross-entropy of the trunk (assistant tokens and raw text) + 0.2 x MTP first step + 0.1 x MTP chained second step.
Half of the rows use the MTP row layout with a leading (x_0, zero hidden) row and half the layout without it, so that the block works in
runtimes of either convention. Every batch row starts at the start of a conversation.
"""

import argparse
import glob
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import Config, Target

EOT = 4088


class Rows:
    """All shards on the device; rows of `length` tokens that start at a conversation."""

    def __init__(self, pattern, length, device, eot=EOT):
        parts = [
            torch.from_numpy(np.fromfile(f, dtype=np.uint16).astype(np.int32))
            for f in sorted(glob.glob(pattern))
        ]
        self.data = torch.cat(parts).to(device)
        starts = ((self.data & 0x7FFF) == eot).nonzero().squeeze(1) + 1
        self.starts = starts[starts < len(self.data) - length - 1]
        self.off = torch.arange(length, device=device)

    def __call__(self, n, gen=None):
        i = torch.randint(len(self.starts), (n,), device=self.data.device, generator=gen)
        return self.data[self.starts[i][:, None] + self.off].long()


def ce(h, w, labels, weight):
    """Mean cross-entropy where weight is 1."""
    logits = F.linear(h, w.to(h.dtype)).float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (loss * weight.flatten()).sum() / weight.sum().clamp_min(1)


def losses(model, raw, head_ce):
    """raw (B, T + 3) ids with loss bits -> trunk, mtp step 1, mtp step 2 losses."""
    ids, bit = raw & 0x7FFF, (raw >> 15).float()
    B, T = ids.shape[0], ids.shape[1] - 3
    h = model(ids[:, :T])
    l0 = head_ce(h, model.head.weight, ids[:, 1 : T + 1], bit[:, 1 : T + 1])
    zero_first = (torch.arange(B, device=ids.device) % 2 == 0)[:, None]
    pick = lambda k: torch.where(zero_first, ids[:, k : T + k], ids[:, k + 1 : T + k + 1])
    wt = lambda k: torch.where(zero_first, bit[:, k : T + k], bit[:, k + 1 : T + k + 1])
    hs = torch.where(zero_first[..., None], F.pad(h, (0, 0, 1, -1)), h)
    pos = torch.arange(T, device=ids.device)
    m1 = model.mtp(model.embed(pick(0)), hs, pos)
    l1 = head_ce(m1, model.head.weight, pick(1), wt(1))
    m2 = model.mtp(model.embed(pick(1)), m1, pos)
    l2 = head_ce(m2, model.head.weight, pick(2), wt(2))
    return l0, l1, l2


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--data", required=True, help="glob of token shards")
    p.add_argument("--out", required=True)
    p.add_argument(
        "--seconds",
        type=float,
        default=420,
        help="time budget of the training loop; the schedule follows it",
    )
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--warmup", type=int, default=200)
    p.add_argument("--init", help="continue from this GGUF")
    p.add_argument("--compile", type=int, default=1)
    p.add_argument("--graph", type=int, default=1, help="replay the whole step as one CUDA graph")
    a = p.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    dev, c = "cuda", Config()
    model = Target(c)
    if a.init:
        from export import read_gguf, target_names

        read_gguf(a.init, model, target_names(c))
    model.to(dev)
    if a.compile:
        for b in [*model.blocks, model.mtp.block]:
            b.compile(dynamic=False)
        head_ce = torch.compile(ce, dynamic=False)
    else:
        head_ce = ce
    rows = Rows(a.data, a.length + 3, dev)
    mats = [
        q for n, q in model.named_parameters() if q.ndim == 2 and "embed" not in n and "conv" not in n
    ]
    ids_m = {id(q) for q in mats}
    rest = [q for q in model.parameters() if id(q) not in ids_m]
    lr = torch.tensor(a.lr, device=dev)
    opt = torch.optim.AdamW(
        [{"params": mats, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        capturable=True,
        foreach=True,
    )
    raw = rows(a.batch)
    out = torch.zeros(3, device=dev)

    def step():
        opt.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            parts = losses(model, raw, head_ce)
        (parts[0] + 0.2 * parts[1] + 0.1 * parts[2]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        out.copy_(torch.stack(parts).detach())

    t0 = time.time()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    lr.fill_(1e-5)
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    print(
        f"compiled in {time.time() - t0:.1f} s, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, {len(rows.data) / 1e6:.0f} M tokens",
        flush=True,
    )
    run = step
    if a.graph:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            step()
        run = g.replay
        print(f"captured at {time.time() - t0:.1f} s", flush=True)
    log, t0, i, total = [], time.time(), 0, None
    acc = torch.zeros(3, device=dev)
    while True:
        if i == 30:
            torch.cuda.synchronize()
            t1 = time.time()
        if i == 60:
            torch.cuda.synchronize()
            per = (time.time() - t1) / 30
            total = i + max(1, int((a.seconds - (time.time() - t0)) / per))
            print(
                f"{per * 1e3:.1f} ms/step, {a.batch * a.length / per / 1e6:.2f} M tok/s, {total} steps",
                flush=True,
            )
        frac = i / (total or 10**6)
        if total and i >= total:
            break
        lr.fill_(
            a.lr * min(1.0, (i + 1) / a.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * frac)))
        )
        raw.copy_(rows(a.batch))
        run()
        acc += out
        i += 1
        if i % 100 == 0:
            m = (acc / 100).tolist()
            acc.zero_()
            log.append([i, round(time.time() - t0, 1), *[round(x, 4) for x in m]])
            if i % 500 == 0 or i == 100:
                print(
                    "step {}  {:.0f} s  trunk {:.4f}  mtp1 {:.4f}  mtp2 {:.4f}".format(*log[-1]),
                    flush=True,
                )
    torch.cuda.synchronize()
    sec = time.time() - t0
    torch.save({"config": asdict(c), "model": model.state_dict()}, f"{a.out}/target.pt")
    Path(f"{a.out}/train_log.json").write_text(
        json.dumps(
            {
                "steps": i,
                "seconds": round(sec, 1),
                "tokens": i * a.batch * a.length,
                "batch": a.batch,
                "length": a.length,
                "lr": a.lr,
                "columns": ["step", "seconds", "trunk", "mtp1", "mtp2"],
                "log": log,
            }
        )
    )
    print(f"done: {i} steps, {sec:.0f} s, {i * a.batch * a.length / 1e6:.0f} M tokens", flush=True)


if __name__ == "__main__":
    main()
