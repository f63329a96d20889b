"""Stage 2b: train the DFlash drafter, and polish the MTP block, on the frozen (Q8_0-rounded) target.

DFlash: random anchors in the replies; a block is [anchor, mask x 7] and sees context keys of positions before the anchor plus itself;
loss = sum_r exp(-(r - 1) / 4) KL(target || drafter) over the fill-in positions r = 1..7.
MTP: three chained steps, KL to the target.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from model import Config, Drafter, Target, quantize_module
from train import Rows


def block_mask(anchors, T, B):
    """(b, N) anchors -> bool mask (b, 1, N * B, T + N * B)."""
    b, N = anchors.shape
    ctx = torch.arange(T, device=anchors.device)[None, None] < anchors.repeat_interleave(B, 1)[..., None]
    blk = torch.arange(N * B, device=anchors.device) // B
    own = (blk[:, None] == blk[None]).expand(b, -1, -1)
    return torch.cat([ctx, own], -1)[:, None]


def kl(h, t, w, weight):
    """Weighted KL between target logits of hidden t and drafter logits of hidden h (rows), plus the argmax match per row."""
    q, p = F.linear(h, w.to(h.dtype)).float(), F.linear(t, w.to(t.dtype)).float()
    lp = p.log_softmax(-1)
    d = (lp.exp() * (lp - q.log_softmax(-1))).sum(-1)
    return (d * weight).sum() / weight.sum().clamp_min(1e-6), (q.argmax(-1) == p.argmax(-1)).float()


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--ckpt", required=True)
    p.add_argument("--data", required=True, help="glob of corpus shards")
    p.add_argument("--gen", required=True, help="glob of shards from generate.py")
    p.add_argument("--out", required=True)
    p.add_argument("--seconds", type=float, default=200)
    p.add_argument("--batch", type=int, default=24)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--anchors", type=int, default=160)
    p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--mtp-lr", type=float, default=6e-4)
    p.add_argument("--warmup", type=int, default=150)
    p.add_argument("--init", help="continue from this drafter GGUF")
    p.add_argument("--compile", type=int, default=1)
    p.add_argument("--graph", type=int, default=1)
    a = p.parse_args()
    torch.manual_seed(2)
    torch.set_float32_matmul_precision("high")
    dev, c = "cuda", Config()
    target, draft = Target(c).to(dev), Drafter(c)
    if a.init:
        from export import drafter_names, read_gguf

        read_gguf(a.init, draft, drafter_names(c))
    draft.to(dev)
    target.load_state_dict(torch.load(a.ckpt, weights_only=True)["model"])
    for n, q in target.named_parameters():
        q.requires_grad_(n.startswith("mtp."))
    keep = {n: q.clone() for n, q in target.mtp.state_dict().items()}
    quantize_module(target)
    target.mtp.load_state_dict(keep)
    kl_f = kl
    if a.compile:
        for m in [*target.blocks, target.mtp.block, *draft.layers]:
            m.compile(dynamic=False)
        kl_f = torch.compile(kl, dynamic=False)
    T, N, B, nb = a.length, a.anchors, c.block, a.batch
    n_gen = nb * 2 // 3
    corpus, gen = Rows(a.data, T + 4, dev), Rows(a.gen, T + 4, dev)
    params = [
        {"params": [q for q in draft.parameters() if q.ndim == 2], "weight_decay": 0.05},
        {"params": [q for q in draft.parameters() if q.ndim < 2], "weight_decay": 0.0},
    ]
    lr_d, lr_m = torch.tensor(1e-5, device=dev), torch.tensor(1e-6, device=dev)
    opt = torch.optim.AdamW(params, lr=lr_d, betas=(0.9, 0.98), capturable=True, foreach=True)
    opt_m = torch.optim.AdamW(
        list(target.mtp.parameters()),
        lr=lr_m,
        betas=(0.9, 0.98),
        weight_decay=0.0,
        capturable=True,
        foreach=True,
    )
    raw, out = torch.zeros(nb, T + 4, dtype=torch.long, device=dev), torch.zeros(2 + 7 + 3, device=dev)
    off = torch.arange(B, device=dev)
    decay = torch.exp(-torch.arange(B - 1, device=dev) / 4.0)

    def refill():
        raw[:n_gen].copy_(gen(n_gen))
        raw[n_gen:].copy_(corpus(nb - n_gen))

    def step():
        opt.zero_grad(set_to_none=False)
        opt_m.zero_grad(set_to_none=False)
        ids, bit = raw & 0x7FFF, (raw >> 15).float()
        w = target.head.weight
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                taps = []
                h = target(ids[:, :T], taps)
                taps = torch.cat(taps, -1)
            # DFlash
            ok = bit[:, :T] * bit[:, 1 : T + 1]
            ok[:, T - B :] = 0
            score, anc = (torch.rand_like(ok) + ok).topk(N, 1)
            pos = (anc[..., None] + off).flatten(1)
            toks = ids.gather(1, pos).view(nb, N, B)
            emb = target.embed(torch.where(off == 0, toks, c.mask_id)).flatten(1, 2)
            y = draft(taps, emb, pos, block_mask(anc, T, B)).view(nb, N, B, -1)[:, :, 1:]
            lab = (anc[..., None] + off[:-1]).flatten(1)
            th = h.gather(1, lab[..., None].expand(-1, -1, h.shape[-1])).view(nb, N, B - 1, -1)
            valid = (
                bit.gather(1, (anc[..., None] + off[1:]).flatten(1)).view(nb, N, B - 1).cumprod(-1)
                * (score > 1)[..., None]
            )
            ld, hit = kl_f(y.flatten(0, 2), th.flatten(0, 2), w, (valid * decay).flatten())
            # MTP, three chained steps; even rows have the leading (x_0, zero) row
            zf = (torch.arange(nb, device=dev) % 2 == 0)[:, None]
            pick = lambda x, k: torch.where(
                zf if x.ndim == 2 else zf[..., None], x[:, k : T - 3 + k], x[:, k + 1 : T - 2 + k]
            )
            prev = torch.where(zf[..., None], F.pad(h, (0, 0, 1, 0))[:, : T - 3], h[:, : T - 3])
            rng, lm, hits = torch.arange(T - 3, device=dev), 0.0, []
            for k in range(3):
                prev = target.mtp(target.embed(pick(ids, k)), prev, rng)
                v = pick(bit, k + 1)
                part, m = kl_f(prev.flatten(0, 1), pick(h, k).flatten(0, 1), w, v.flatten())
                lm = lm + (1.0, 0.8, 0.6)[k] * part
                hits.append(
                    (m * v.flatten())[: (T - 3) * n_gen].sum() / v.flatten()[: (T - 3) * n_gen].sum()
                )
        (ld + lm).backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(target.mtp.parameters(), 1.0)
        opt.step()
        opt_m.step()
        run = (hit.view(nb, N, B - 1) * valid).cumprod(-1)[:n_gen]
        full = valid[:n_gen].cumprod(-1)
        out.copy_(
            torch.cat(
                [
                    torch.stack([ld, lm]),
                    run.sum((0, 1)) / full.sum((0, 1)).clamp_min(1),
                    torch.stack(hits),
                ]
            ).detach()
        )

    t0 = time.time()
    refill()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    print(
        f"compiled in {time.time() - t0:.1f} s, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, gen {len(gen.data) / 1e6:.1f} M tokens",
        flush=True,
    )
    run_step = step
    if a.graph:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            step()
        run_step = g.replay
    log, t0, i, total, acc = [], time.time(), 0, None, torch.zeros_like(out)
    while not total or i < total:
        if i == 30:
            torch.cuda.synchronize()
            t1 = time.time()
        if i == 60:
            torch.cuda.synchronize()
            now = time.time()
            per = (now - t1) / 30
            total = i + max(1, int((a.seconds - (now - t0)) / per))
            print(f"{per * 1e3:.1f} ms/step, {total} steps", flush=True)
        f = min(1.0, (i + 1) / a.warmup) * (
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * i / (total or 10**6)))
        )
        lr_d.fill_(a.lr * f)
        lr_m.fill_(a.mtp_lr * f)
        refill()
        run_step()
        acc += out
        i += 1
        if i % 100 == 0:
            m = [round(x, 4) for x in (acc / 100).tolist()]
            acc.zero_()
            log.append([i, round(time.time() - t0, 1), *m])
            if i % 500 == 0 or i == 100:
                print(
                    f"step {i}  {log[-1][1]:.0f} s  dflash kl {m[0]:.4f}  mtp kl {m[1]:.4f}  accepted prefix {m[2:9]} = {sum(m[2:9]):.2f}  mtp hits {m[9:]}",
                    flush=True,
                )
    torch.cuda.synchronize()
    quantize_module(target.mtp)
    quantize_module(draft)
    torch.save({"model": target.state_dict()}, f"{a.out}/target_final.pt")
    torch.save({"model": draft.state_dict()}, f"{a.out}/drafter.pt")
    Path(f"{a.out}/dflash_log.json").write_text(
        json.dumps(
            {
                "steps": i,
                "seconds": round(time.time() - t0, 1),
                "blocks": i * nb * N,
                "batch": nb,
                "length": T,
                "anchors": N,
                "lr": a.lr,
                "mtp_lr": a.mtp_lr,
                "columns": [
                    "step",
                    "seconds",
                    "dflash_kl",
                    "mtp_kl",
                    *[f"prefix_{k}" for k in range(1, 8)],
                    "mtp1_hit",
                    "mtp2_hit",
                    "mtp3_hit",
                ],
                "log": log,
            }
        )
    )


if __name__ == "__main__":
    main()
