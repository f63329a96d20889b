"""Stage 3: write the trained target and drafter as GGUF (arch `qwen35` with one nextn block, arch `dflash`)."""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from model import Config, Drafter, Target, is_matrix

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def add(w, name, t, quant=False):
    a = t.detach().float().cpu().contiguous().numpy()
    if quant:
        w.add_tensor(
            name,
            gguf.quants.quantize(a, gguf.GGMLQuantizationType.Q8_0),
            raw_dtype=gguf.GGMLQuantizationType.Q8_0,
        )
    else:
        w.add_tensor(name, a)


def add_tokenizer(w, path, c):
    tj = json.loads(Path(path).read_text())
    vocab = sorted(tj["model"]["vocab"].items(), key=lambda kv: kv[1])
    toks, kinds = [t for t, _ in vocab], [gguf.TokenType.NORMAL] * len(vocab)
    for t in tj["added_tokens"]:
        if t["id"] < len(toks):
            toks[t["id"]] = t["content"]
        else:
            toks.append(t["content"])
            kinds.append(0)
        kinds[t["id"]] = gguf.TokenType.UNUSED if "unused" in t["content"] else gguf.TokenType.CONTROL
    assert len(toks) == c.vocab
    ids = {t: i for i, t in enumerate(toks)}
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list(toks)
    w.add_token_types([int(k) for k in kinds])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tj["model"]["merges"]])
    w.add_eos_token_id(ids["<|im_end|>"])
    w.add_pad_token_id(ids["<|endoftext|>"])
    w.add_bos_token_id(ids["<|endoftext|>"])
    w.add_add_bos_token(False)
    w.add_mask_token_id(ids["<|mask|>"])
    w.add_chat_template(TEMPLATE)
    assert ids["<|mask|>"] == c.mask_id


def add_general(w, name, text, size):
    w.add_name(name)
    w.add_author("pyspec")
    w.add_license("Apache-2.0")
    w.add_description(text)
    w.add_size_label(size)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)


BLOCK = {
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "post_attention_norm.weight",
    "ffn.gate.weight": "ffn_gate.weight",
    "ffn.up.weight": "ffn_up.weight",
    "ffn.down.weight": "ffn_down.weight",
}
GDN = {
    "mix.qkv.weight": "attn_qkv.weight",
    "mix.gate.weight": "attn_gate.weight",
    "mix.alpha.weight": "ssm_alpha.weight",
    "mix.beta.weight": "ssm_beta.weight",
    "mix.conv": "ssm_conv1d.weight",
    "mix.A_log": "ssm_a",
    "mix.dt_bias": "ssm_dt.bias",
    "mix.norm.weight": "ssm_norm.weight",
    "mix.out.weight": "ssm_out.weight",
}
ATTN = {
    "mix.q.weight": "attn_q.weight",
    "mix.k.weight": "attn_k.weight",
    "mix.v.weight": "attn_v.weight",
    "mix.o.weight": "attn_output.weight",
    "mix.q_norm.weight": "attn_q_norm.weight",
    "mix.k_norm.weight": "attn_k_norm.weight",
}
DRAFT = {
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate.weight": "ffn_gate.weight",
    "ffn.up.weight": "ffn_up.weight",
    "ffn.down.weight": "ffn_down.weight",
    "q.weight": "attn_q.weight",
    "k.weight": "attn_k.weight",
    "v.weight": "attn_v.weight",
    "o.weight": "attn_output.weight",
    "q_norm.weight": "attn_q_norm.weight",
    "k_norm.weight": "attn_k_norm.weight",
}


def target_names(c):
    """torch parameter name -> GGUF tensor name."""
    out = {
        "embed.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "head.weight": "output.weight",
    }
    for i in range(c.layers):
        for a, b in {**BLOCK, **(ATTN if (i + 1) % c.interval == 0 else GDN)}.items():
            out[f"blocks.{i}.{a}"] = f"blk.{i}.{b}"
    for a, b in {**BLOCK, **ATTN}.items():
        out[f"mtp.block.{a}"] = f"blk.{c.layers}.{b}"
    for a, b in {
        "enorm.weight": "enorm",
        "hnorm.weight": "hnorm",
        "head_norm.weight": "shared_head_norm",
        "eh_proj.weight": "eh_proj",
    }.items():
        out[f"mtp.{a}"] = f"blk.{c.layers}.nextn.{b}.weight"
    return out


def drafter_names(c):
    out = {
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight",
    }
    for i in range(c.d_layers):
        for a, b in DRAFT.items():
            out[f"layers.{i}.{a}"] = f"blk.{i}.{b}"
    return out


def stored(name, t):
    return -t.exp() if name.endswith("A_log") else t


def write_target(path, model, c, tok):
    w = gguf.GGUFWriter(path, "qwen35")
    add_general(
        w,
        "pyspec demo",
        "A tiny chat model with an MTP block, trained from scratch on generated text; the embedded default of pyspec.",
        size="21M",
    )
    k = "qwen35."
    w.add_block_count(c.layers + 1)
    w.add_uint32(k + "nextn_predict_layers", 1)
    w.add_context_length(c.ctx)
    w.add_embedding_length(c.n)
    w.add_feed_forward_length(c.ffn)
    w.add_head_count(c.heads)
    w.add_head_count_kv(c.kv_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.eps)
    w.add_uint32(k + "full_attention_interval", c.interval)
    w.add_rope_dimension_count(c.rot)
    w.add_array(k + "rope.dimension_sections", [11, 11, 10, 0])
    w.add_rope_freq_base(c.rope_base)
    w.add_uint32(k + "ssm.conv_kernel", c.conv)
    w.add_uint32(k + "ssm.state_size", c.state)
    w.add_uint32(k + "ssm.group_count", c.k_heads)
    w.add_uint32(k + "ssm.time_step_rank", c.v_heads)
    w.add_uint32(k + "ssm.inner_size", c.v_heads * c.state)
    w.add_vocab_size(c.vocab)
    add_tokenizer(w, tok, c)
    sd, names = model.state_dict(), target_names(c)
    assert set(sd) == set(names), set(sd) ^ set(names)
    for a, b in names.items():
        add(w, b, stored(a, sd[a]), is_matrix(a, sd[a]))
    finish(w)


def write_drafter(path, model, c, tok):
    w = gguf.GGUFWriter(path, "dflash")
    add_general(
        w,
        "pyspec demo dflash",
        "DFlash drafter of the pyspec demo model; shares the target's embedding and head.",
        size="5M",
    )
    k = "dflash."
    w.add_block_count(c.d_layers)
    w.add_context_length(c.ctx)
    w.add_embedding_length(c.n)
    w.add_feed_forward_length(c.d_ffn)
    w.add_head_count(c.d_heads)
    w.add_head_count_kv(c.d_kv_heads)
    w.add_key_length(c.d_head_dim)
    w.add_value_length(c.d_head_dim)
    w.add_layer_norm_rms_eps(c.eps)
    w.add_rope_freq_base(c.rope_base)
    w.add_array(k + "rope.dimension_sections", [c.d_head_dim // 2, 0, 0, 0])
    w.add_uint32(k + "block_size", c.block)
    w.add_array(k + "target_layers", [t + 1 for t in c.taps])
    w.add_vocab_size(c.vocab)
    add_tokenizer(w, tok, c)
    sd, names = model.state_dict(), drafter_names(c)
    assert set(sd) == set(names), set(sd) ^ set(names)
    for a, b in names.items():
        add(w, b, sd[a], is_matrix(a, sd[a]))
    finish(w)


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def read_gguf(path, model, names):
    """Load a GGUF written above back into a torch module (dequantized)."""
    r = {t.name: t for t in gguf.GGUFReader(path).tensors}
    sd = {}
    for a, b in names.items():
        x = torch.from_numpy(np.array(gguf.quants.dequantize(r[b].data, r[b].tensor_type)))
        sd[a] = (-x).log() if a.endswith("A_log") else x.reshape(model.state_dict()[a].shape)
    model.load_state_dict(sd)
    return model


def load(model, path):
    """Fill a module from a checkpoint of train.py or train_dflash.py."""
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model"])
    return model


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--target")
    p.add_argument("--drafter")
    p.add_argument("--tokenizer", default="tokenizer.json")
    p.add_argument("--out", required=True)
    a = p.parse_args()
    c = Config()
    if a.target:
        write_target(f"{a.out}/pyspec-demo.gguf", load(Target(c), a.target), c, a.tokenizer)
    if a.drafter:
        write_drafter(f"{a.out}/pyspec-demo-dflash.gguf", load(Drafter(c), a.drafter), c, a.tokenizer)


if __name__ == "__main__":
    main()
