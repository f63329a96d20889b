"""What the loop asks before it decides: lengths of drafts, costs, the order of requests, who makes room."""
