"""The rounds: admitting requests, launching forwards, choosing tokens, committing them."""
