"""Train the 4096-entry byte-level BPE tokenizer (pre-tokenizer `qwen35`) on a text sample from data.py."""

import argparse

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"] + [
    f"<|unused_{i}|>" for i in range(4)
]
QWEN35 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--sample", required=True)
    p.add_argument("--out", default="tokenizer.json")
    p.add_argument("--vocab", type=int, default=4096)
    a = p.parse_args()
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN35), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    # the special tokens come last in the vocabulary, as in the Qwen files
    trainer = trainers.BpeTrainer(
        vocab_size=a.vocab - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train([a.sample], trainer)
    tok.add_special_tokens(SPECIALS)
    assert tok.get_vocab_size() == a.vocab, tok.get_vocab_size()
    tok.save(a.out)


if __name__ == "__main__":
    main()
