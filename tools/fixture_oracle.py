"""Run llama.cpp and save what it computes; started by make_fixtures.py with a Python that has llama_cpp.

Only the low-level functions are used, because the high-level class cannot switch off the extra weight layouts. With
them llama.cpp takes AMX kernels, which fault (SIGSEGV at ldtilecfg) on some virtual machines that announce AMX, and
which also round differently. Everything runs on the CPU with two threads and without flash attention.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path

import llama_cpp as llama
import numpy as np

KV_TYPES = {"f32": 0, "f16": 1}
TRUNK, MTP = 0, 1
CHAIN = 4
Pointer = ctypes.c_void_p
# these two are exported under C++ names only
_set_nextn = llama.llama_cpp._lib["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
_set_nextn.argtypes, _set_nextn.restype = [Pointer, ctypes.c_bool, ctypes.c_bool], None
_get_nextn = llama.llama_cpp._lib["_Z30llama_get_embeddings_nextn_ithP13llama_contexti"]
_get_nextn.argtypes, _get_nextn.restype = [Pointer, ctypes.c_int32], ctypes.POINTER(ctypes.c_float)


def load(path: Path) -> Pointer:
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.use_extra_bufts = False
    parameters.load_mtp = True
    model = llama.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    return model


class Context:
    """One llama.cpp context with room for `size` positions of sequence 0; every row asks for its outputs."""

    def __init__(self, model: Pointer, size: int, kv: str, kind: int = TRUNK) -> None:
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = size
        parameters.n_threads = parameters.n_threads_batch = 2
        parameters.flash_attn_type = 0
        parameters.type_k = parameters.type_v = KV_TYPES[kv]
        parameters.ctx_type = kind
        parameters.embeddings = kind == TRUNK
        self._context = llama.llama_init_from_model(model, parameters)
        if not self._context:
            raise SystemExit("llama.cpp cannot make a context")
        self._kind = kind
        if kind == MTP:
            _set_nextn(self._context, True, True)
        self._hidden = llama.llama_model_n_embd(model)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def decode(self, tokens: np.ndarray, start: int, hidden: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (T,) at positions start.. -> logits (T, V) and post-norm hidden (T, n), both float32."""
        count = len(tokens)
        ids = np.ascontiguousarray(tokens, dtype=np.int32)
        positions = np.arange(start, start + count, dtype=np.int32)
        sequence = (ctypes.c_int32 * 1)(0)
        batch = llama.llama_batch()
        batch.n_tokens = count
        batch.token = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.pos = positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.n_seq_id = (ctypes.c_int32 * count)(*[1] * count)
        rows = (ctypes.POINTER(ctypes.c_int32) * count)(
            *[ctypes.cast(sequence, ctypes.POINTER(ctypes.c_int32))] * count
        )
        batch.seq_id = rows
        batch.logits = (ctypes.c_int8 * count)(*[1] * count)
        if hidden is not None:
            carried = np.ascontiguousarray(hidden, dtype=np.float32)
            batch.embd = carried.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        code = llama.llama_decode(self._context, batch)
        if code != 0:
            raise SystemExit(f"llama_decode returned {code}")
        return self._rows(llama.llama_get_logits_ith, self._vocab, count), self._rows(
            _get_nextn if self._kind == MTP else llama.llama_get_embeddings_ith, self._hidden, count
        )

    def _rows(self, getter: object, width: int, count: int) -> np.ndarray:
        return np.stack([np.ctypeslib.as_array(getter(self._context, i), (width,)).copy() for i in range(count)])

    def clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def close(self) -> None:
        llama.llama_free(self._context)


def run_mtp(
    model: Pointer, tokens: np.ndarray, logits: np.ndarray, hidden: np.ndarray, kv: str
) -> dict[str, np.ndarray]:
    """Row p pairs token p with the trunk's hidden of p - 1 (zeros for p = 0); then CHAIN greedy steps."""
    context = Context(model, len(tokens) + CHAIN, kv, MTP)
    previous = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])
    mtp_logits, mtp_hidden = context.decode(tokens, 0, previous)
    token, carried, steps = int(logits[-1].argmax()), hidden[-1:], []
    for step in range(CHAIN):
        row, next_hidden = context.decode(np.array([token]), len(tokens) + step, carried)
        steps.append((token, row[0], next_hidden[0]))
        token, carried = int(row[0].argmax()), next_hidden
    context.close()
    names = ("chain_tokens", "chain_logits", "chain_hidden")
    chain = {name: np.stack(column) for name, column in zip(names, zip(*steps, strict=True), strict=True)}
    return {"mtp_logits": mtp_logits, "mtp_hidden": mtp_hidden, **chain}


def command_logits(arguments: argparse.Namespace) -> None:
    """Arrays tokens_0, tokens_1, ... of the input become logits_i and hidden_i, plus the MTP arrays for sequence 0."""
    given = np.load(arguments.input)
    model, found = load(arguments.model), {}
    for index in range(len(given.files)):
        tokens = given[f"tokens_{index}"]
        context = Context(model, len(tokens), arguments.kv)
        width = arguments.chunk or len(tokens)
        parts = [context.decode(tokens[i : i + width], i) for i in range(0, len(tokens), width)]
        logits, hidden = (np.concatenate(column) for column in zip(*parts, strict=True))
        context.close()
        found |= {f"logits_{index}": logits, f"hidden_{index}": hidden}
        if index == 0 and llama.llama_model_n_layer_nextn(model):
            found |= run_mtp(model, tokens, logits, hidden, arguments.kv)
    np.savez(arguments.output, **found)


def command_tokenize(arguments: argparse.Namespace) -> None:
    """A JSON list of texts becomes a JSON list of id lists, with special tokens parsed and no BOS added."""
    parameters = llama.llama_model_default_params()
    parameters.vocab_only = True
    model = llama.llama_model_load_from_file(str(arguments.model).encode(), parameters)
    vocab, found = llama.llama_model_get_vocab(model), []
    for text in json.loads(arguments.input.read_text()):
        data, ids = text.encode(), (ctypes.c_int32 * (len(text.encode()) + 8))()
        count = llama.llama_tokenize(vocab, data, len(data), ids, len(ids), False, True)
        found.append(list(ids[:count]))
    arguments.output.write_text(json.dumps(found))


def command_greedy(arguments: argparse.Namespace) -> None:
    """Plain greedy decoding of a prompts file (one slot, f16 cache): equal answers and tokens/s."""
    model = load(arguments.model)
    context, same, tokens, seconds = Context(model, 512, "f16"), 0, 0, 0.0
    prompts = [json.loads(line) for line in arguments.input.read_text().splitlines()]
    for prompt in prompts:
        context.clear()
        ids, answer, started = prompt["prompt_ids"], [], time.perf_counter()
        logits, _ = context.decode(np.array(ids), 0)
        while (token := int(logits[-1].argmax())) != arguments.stop and len(answer) < len(prompt["answer_ids"]) + 4:
            answer.append(token)
            logits, _ = context.decode(np.array([token]), len(ids) + len(answer) - 1)
        seconds += time.perf_counter() - started
        tokens += len(answer)
        same += answer == prompt["answer_ids"]
    report = {"same": same, "prompts": len(prompts), "tokens": tokens, "tokens_per_second": tokens / seconds}
    arguments.output.write_text(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["logits", "tokenize", "greedy"])
    parser.add_argument("model", type=Path)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--kv", choices=sorted(KV_TYPES), default="f32")
    parser.add_argument("--chunk", type=int, default=0, help="rows in one decode call; 0 means all")
    parser.add_argument("--stop", type=int, default=4090, help="token that ends a greedy answer")
    arguments = parser.parse_args()
    llama.llama_backend_init()
    commands = {"logits": command_logits, "tokenize": command_tokenize, "greedy": command_greedy}
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()
