"""Models in place of those that llama.cpp's server tests fetch: their shape, a vocabulary that cuts the tests' prompts into as many tokens, and random weights.

What a test expects of a text can not hold for them. What it expects of counts, ends, caches, streams and fields can, and has to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

EMBD, BLOCKS, HEADS, KV_HEADS, FFN, CTX = 64, 5, 8, 4, 172, 2048
MARK = "\u2581"
PIECES = (
    "Bo Fr He Hi Wh ab ac an ap ar as at be bo ca cc co ed el em er ev ey fi fr fu ha hi ho ie il in jo li ll lo mp na nc nd ni no nt "
    "od of on ou ow pi pr pt ra ro ru ry si st te ti tr ut wh ys _F _H _I _T _j _l _m _n _p _t _v _w _y Fra Hel Thi acc ani api art ass "
    "bes bon bou cap cat cci cti eli ell emp ery est eve fro fun how ibo ing lat nac nct not ona ong pit pro rom sis ssi ste tar ted "
    "tem tio tru unc ver wil _He _Hi _Wh _be _bo _me _no _th _tr _ve _wh _wi _yo Fran Hell This bona ctio elie ello empl func nacc ncti "
    "ning onac pita prom romp ssis trun very _Thi _bes _boo _how _mea _not _tem _whi Hello bonac eliev empla funct nctio onacc promp "
    "ssist templ trunc uncti _book _mean _temp"
)
"""Merged from the left or the right by one character each; _ is a space. Found by trying: 18 counts of tokens and of common tokens hold."""
GAP = "<PRE>", "<SUF>", "<MID>"
HELLO = "_Hell _Hello"
"""Of their second model, for which "Hello " is one token."""
CHATML = """\
{%- if tools %}<|im_start|>system
You may call functions, whose signatures are within <tools></tools>:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each call return a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def vocabulary(pieces: str) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and kinds: three special ones, all bytes, single characters, then what they merge to, short ones first."""
    merged = sorted(set(pieces.replace("_", MARK).split()), key=lambda piece: (len(piece), piece))
    single = [MARK, *(chr(c) for c in range(33, 127))]
    kinds = gguf.TokenType
    rows = [("<unk>", 0.0, kinds.UNKNOWN), ("<s>", 0.0, kinds.CONTROL), ("</s>", 0.0, kinds.CONTROL)]
    rows += [(f"<0x{b:02X}>", 0.0, kinds.BYTE) for b in range(256)]
    rows += [(piece, -float(i), kinds.NORMAL) for i, piece in enumerate([*merged, *single])]
    rows += [(mark, 0.0, kinds.CONTROL) for mark in GAP]
    tokens, scores, types = zip(*rows, strict=True)
    return list(tokens), list(scores), [int(t) for t in types]


def weights(n_vocab: int, silent: Sequence[int]) -> dict[str, np.ndarray]:
    """Random; the first dimension is the same for all rows, which is how `silent` tokens are never likely."""
    rng, head = np.random.default_rng(260), EMBD // HEADS

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (gain * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    out = {"token_embd.weight": matrix(n_vocab, EMBD, 4.0), "output_norm.weight": np.ones(EMBD, np.float32)}  # fmt: skip
    out["token_embd.weight"][:, 0] = 2.0
    out["output.weight"] = matrix(n_vocab, EMBD, 1.5)
    out["output.weight"][:, 0] = 0.0
    out["output.weight"][list(silent), 0] = -100.0
    for b in range(BLOCKS):
        block = {
            "attn_q": matrix(EMBD, EMBD),
            "attn_k": matrix(KV_HEADS * head, EMBD),
            "attn_v": matrix(KV_HEADS * head, EMBD),
            "attn_output": matrix(EMBD, EMBD),
            "ffn_gate": matrix(FFN, EMBD),
            "ffn_up": matrix(FFN, EMBD),
            "ffn_down": matrix(EMBD, FFN),
        }
        for name in ("attn_output", "ffn_down"):
            block[name][0] = 0.0
        out |= {f"blk.{b}.{name}.weight": value for name, value in block.items()}
        out |= {
            f"blk.{b}.{name}.weight": np.ones(EMBD, np.float32) for name in ("attn_norm", "ffn_norm")
        }
    return out


def write(path: Path, pieces: str) -> None:
    """A model with this vocabulary."""
    tokens, scores, types = vocabulary(pieces)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(BLOCKS)
    writer.add_context_length(CTX)
    writer.add_embedding_length(EMBD)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(EMBD // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHATML)
    for name, value in weights(
        len(tokens), [*range(3 + 256), *range(len(tokens) - len(GAP), len(tokens))]
    ).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
