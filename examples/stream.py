"""A text as it comes, from an engine in this process."""

import pyspec

with pyspec.Engine.load("demo") as engine:
    # Each delta has the tokens that one round committed: with drafts, several. The last event is a pyspec.Done.
    for delta in engine.stream("Once upon a time", max_tokens=60, seed=1):
        print(delta.text, end="", flush=True)
    print()
    timings = delta.timings  # of Done
    print(
        f"{timings.predicted_n} tokens in {timings.n_rounds} rounds, {timings.draft_n_accepted} of {timings.draft_n} drafts accepted"
    )
