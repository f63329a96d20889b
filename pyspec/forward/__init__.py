"""A forward as data: traced once from plain functions of blocks, rewritten by rules, lowered to launches. See docs/architecture.md."""
