"""`pyspec completion`: shell completion of commands, flags and models."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

HOW = {
    "bash": 'eval "$(pyspec completion bash)", in ~/.bashrc',
    "zsh": 'eval "$(pyspec completion zsh)", in ~/.zshrc',
    "fish": "pyspec completion fish > ~/.config/fish/completions/pyspec.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(HOW)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a completion script for bash, zsh or fish.

    Example: eval "$(pyspec completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    made = kind(ctx.find_root().command, {}, "pyspec", "_PYSPEC_COMPLETE")
    click.echo(f"# {HOW[shell]}\n{made.source_template % made.source_vars()}")
