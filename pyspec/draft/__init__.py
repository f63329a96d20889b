"""Drafters by name. To add one: a module with a class that satisfies `Drafter`, a line here, and its row in the tests."""

DRAFTERS = {
    "dflash": "pyspec.draft.dflash",
    "mtp": "pyspec.draft.mtp",
    "ngram": "pyspec.draft.ngram",
}
