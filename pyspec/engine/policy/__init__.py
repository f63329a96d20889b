"""The policies that the loop consults: draft lengths, costs, the order of requests, evictions."""
