"""The engine in a process of its own: the program's side, and the engine's side."""
