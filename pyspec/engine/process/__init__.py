"""The engine in a process of its own: the side of the program that uses it, and the side that computes."""
