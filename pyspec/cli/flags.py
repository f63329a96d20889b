"""Parsing of flags: long names before short ones, llama-server's flags by a table, help in groups.

An option of pyspec that llama-server has, too, says so (`GroupedOption.llama`). `llama_flags.toml` lists each other flag of llama-server as
ignored or refused, with the reason. Flags that would change a text are never ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import click

TABLE = Path(__file__).with_name("llama_flags.toml")
OTHERS = "Other"  # group of options without one
LATE = (
    "Default sampling", "Slots, context and cache", "Drafts", "Device", "Memory of GPU and host", "Longer contexts", OTHERS,
)  # fmt: skip
"""Groups that many commands share: help lists them behind a command's own."""
EVERYWHERE = ("-h --help --usage", "--version", "-v --verbose --log-verbose")
"""Flags of llama-server that every command has."""
ATTACHED = re.compile(r"-[a-zA-Z]-?[0-9][0-9.]*")  # -t4
OFF = ("", "0", "false", "off", "no")
EMPTY = (None, "", (), False)  # defaults that help does not show
# read elsewhere, or in deploy/
OURS = ("PYSPEC_CACHE", "PYSPEC_SHARE_GPU", "PYSPEC_NAME")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class LlamaFlag:
    """A flag of llama-server: its spellings, its number of values, and its support."""

    names: tuple[str, ...]
    fate: Literal["honoured", "ignored", "refused"]
    why: str = ""
    n_value: int = 0
    env: str = ""
    harmless: tuple[str, ...] = ()
    takes: str = ""  # values of an ignored flag, as in the table

    def error(self, name: str) -> str:
        """The message for a user who gave the flag under this name."""
        return f"{name}: {self.why}"

    def fault(self, name: str, values: Sequence[str]) -> str:
        """Why llama-server would not take these values, "" if it would."""
        said = _said(self.takes)
        if len(values) < self.n_value:
            return (
                "" if self.takes.endswith("?") else f"{name}: a value is missing{said and f': {said}'}"
            )
        parts = re.split("[,/]", values[0]) if self.takes.endswith(",") else values[:1]
        wrong = next((part for part in parts if self.takes and not _is_of(part, self.takes)), None)
        return "" if wrong is None else f"{name}: {wrong!r} is not {said}"


@cache
def _table() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@cache
def elsewhere() -> dict[str, str]:
    """Flags of other programs, and what to use instead."""
    return {name: said for names, said in _table()["elsewhere"].items() for name in names.split()}


@cache
def llama_flags() -> dict[str, LlamaFlag]:
    """The spellings of llama-server that pyspec has no option for, with their flags."""
    found = _table()
    flags = []
    for fate in ("ignored", "refused"):
        for group in found[fate]:
            more = {"why": group["why"], "harmless": tuple(group.get("harmless", ()))}
            for n_value, kind in enumerate(("switches", "values", "pairs")):
                listed = group.get(kind, ())
                flags += [_flag(text, fate, n_value=n_value, **more) for text in listed]
    return {name: flag for flag in flags for name in flag.names}


def honoured_flags() -> list[LlamaFlag]:
    """The flags of llama-server that `pyspec server` has options for."""
    from pyspec.cli import command_of  # imports the command, which imports this module

    flags = [LlamaFlag(tuple(names.split()), "honoured") for names in EVERYWHERE]
    for option in command_of("server").params:
        if isinstance(option, GroupedOption) and option.llama is not None:
            names = (*option.opts, *option.secondary_opts)
            flags.append(LlamaFlag(names, "honoured", env=_variable(option.llama)))
    return flags


def _variable(name: str) -> str:
    return name and f"LLAMA_ARG_{name}"


KINDS = {
    "whole": ("a whole number", "[-+]?[0-9]+"),
    "number": ("a number", r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"),
    "on": ("on", "on|enabled|true|1"),
    "off": ("off", "off|disabled|false|0"),
    "auto": ("auto", "auto|-1"),
}
"""Values of ignored flags: what an error calls them, and their form. Other words stand for themselves."""


def _kinds(takes: str) -> list[tuple[str, str]]:
    return [KINDS.get(word, (word, re.escape(word))) for word in takes.rstrip(",?").split("|")]


def _is_of(value: str, takes: str) -> bool:
    return any(re.fullmatch(form, value.strip()) for _, form in _kinds(takes))


def _said(takes: str) -> str:
    """The values of a kind in words."""
    *some, last = (name for name, _ in _kinds(takes))
    return f"{', '.join(some)} or {last}" if some else last


def _flag(text: str, fate: Any, **more: Any) -> LlamaFlag:
    words = text.split()
    takes = words.pop()[1:] if words[-1].startswith(":") else ""
    env = _variable(words.pop()[1:]) if words[-1].startswith("$") else ""
    return LlamaFlag(tuple(words), fate, env=env, takes=takes, **more)


class GroupedOption(click.Option):
    """An option that help lists under a heading, with its default.

    said   the default in words
    llama  llama-server has the option, too: its variable without LLAMA_ARG_, "" if it has none; None: it has not
    """

    def __init__(
        self,
        *args: Any,
        group: str = OTHERS,
        said: str = "",
        llama: str | None = None,
        **kwargs: Any,
    ) -> None:
        if "show_default" not in kwargs and not kwargs.get("hidden"):
            kwargs["show_default"] = kwargs.get("default") not in EMPTY
        super().__init__(*args, **kwargs)
        self.group, self.said_default, self.llama = group, said, llama
        self.off_by: tuple[str, ...] = ()  # variables that switch the option off, with any value

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        name = variable_of(self)
        return "0" if name in self.off_by else os.environ[name] if name else None

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        if self.said_default:
            extra["default"] = self.said_default
        return extra


def option_flags(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by each of their spellings."""
    options = (p for p in command.params if isinstance(p, click.Option))
    return {name: p for p in options for name in (*p.opts, *p.secondary_opts)}


def grouped(group: str) -> Callable[..., Callable[[F], F]]:
    """`click.option` for the options of one group."""
    return partial(click.option, cls=GroupedOption, group=group)


def variable_of(param: click.Parameter) -> str:
    """The environment variable that sets a parameter, "" if none does."""
    names = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    off_by = param.off_by if isinstance(param, GroupedOption) else ()
    set_names = (n for n in names if os.environ.get(n) or (n in off_by and n in os.environ))
    return next(set_names, "")


def env_of(ctx: click.Context, param: click.Parameter) -> str:
    """The environment variable that a parameter's value came from, "" if it came from elsewhere."""
    if ctx.get_parameter_source(param.name or "") is not click.core.ParameterSource.ENVIRONMENT:
        return ""
    return variable_of(param) or "environment"


class FlagCommand(click.Command):
    """A command that also understands llama-server's flags. Every option can be set as PYSPEC_NAME in the environment, too."""

    reads_llama_env = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            if isinstance(param, click.Option) and not param.is_eager:
                param.envvar = list(self._env_of(param))

    def _env_of(self, option: click.Option) -> Iterator[str]:
        """Variables of an option in order of precedence: pyspec's, then llama.cpp's, with NO_NAME before NAME."""
        own = _own_env(option)
        llama = [_variable(option.llama)] if isinstance(option, GroupedOption) and option.llama else []
        llama += [FORMER[name] for name in llama if name in FORMER]
        off: list[str] = []
        llama_off: list[str] = []
        if isinstance(option, GroupedOption) and option.secondary_opts:
            off = list(dict.fromkeys((*map(negative_of, own), *_variables(option.secondary_opts))))
            llama_off = list(map(negative_of, llama))
            option.off_by = (*off, *llama_off)
        yield from own
        yield from off
        if self.reads_llama_env:
            yield from llama_off
            yield from llama

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["pyspec.words"] = tuple(args)
        reader = _Reader(self, ctx)
        if ctx.resilient_parsing:  # a shell completes an unfinished line
            with suppress(click.UsageError):
                args = reader.read(args)
            return super().parse_args(ctx, args)
        if self.reads_llama_env:
            reader.check_environment()
        for line in unknown_variables(self):
            ctx.meta.setdefault("pyspec.warnings", []).append(line)
        try:
            return super().parse_args(ctx, reader.read(args))
        except click.BadParameter as e:
            if e.param is not None and (name := env_of(ctx, e.param)):  # the flag was not typed
                e.message += f" ({name} in the environment)"  # type: ignore[misc]  # final only in click's newer types
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(param, "group", OTHERS), []).append(record)
        for title in sorted(groups, key=lambda name: LATE.index(name) if name in LATE else -1):
            with formatter.section(title):
                formatter.write_dl(groups[title])


class LlamaCommand(FlagCommand):
    """A command that replaces one of llama.cpp's: it also reads LLAMA_ARG_NAME. The command line takes precedence."""

    reads_llama_env = True


FORMER = {"LLAMA_ARG_UI": "LLAMA_ARG_WEBUI"}
"""Variables of switches under the names of earlier llama.cpp releases, which compose files still use."""


def negative_of(variable: str) -> str:
    """The variable that switches off the setting of `variable`: LLAMA_ARG_NO_UI for LLAMA_ARG_UI."""
    return re.sub("^(LLAMA_ARG_|PYSPEC_)", r"\1NO_", variable)


def _negative(flag: LlamaFlag) -> LlamaFlag | None:
    """llama-server's flag with the opposite meaning, possibly the same one; None: there is none."""
    names = (f"--no-{name[2:]}" for name in flag.names if name.startswith("--"))
    if not flag.env:
        return None
    return next((llama_flags()[name] for name in names if name in llama_flags()), None)


def variables_of(command: click.Command) -> set[str]:
    """Every environment variable that a command reads."""
    named = (param.envvar for param in command.params if isinstance(param.envvar, list))
    return {name for names in named for name in names}


@cache
def other_variables() -> frozenset[str]:
    """Variables that are no option's: pyspec's, and those of llama-server's flags that it has no option for."""
    flags = [flag for flag in dict.fromkeys(llama_flags().values()) if flag.env]
    negative = (negative_of(flag.env) for flag in flags if _negative(flag) is not None)
    return frozenset((*OURS, *(flag.env for flag in flags), *negative))


def known_variables() -> set[str]:
    """Every environment variable that a command reads, and every one of llama-server."""
    from pyspec.cli import COMMANDS, command_of  # imports the commands, which import this module

    return set(other_variables()).union(*(variables_of(command_of(name)) for name in COMMANDS))


def unknown_variables(command: FlagCommand) -> list[str]:
    """A line about each variable that is named like a setting but sets nothing. Of PYSPEC_ variables only near misses are reported, because other
    programs define some: Kubernetes sets PYSPEC_SERVICE_HOST and the like."""
    prefixes = ("PYSPEC_", "LLAMA_ARG_") if command.reads_llama_env else ("PYSPEC_",)
    own = variables_of(command) | other_variables()
    found = sorted(name for name in os.environ if name.startswith(prefixes) and name not in own)
    if not found:
        return []
    known = known_variables()
    lines = []
    for name in found:
        prefix = next(p for p in prefixes if name.startswith(p))
        near = [prefix + other for other in _near_names(name, prefix, known)]
        if name not in known and (near or prefix != "PYSPEC_"):
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            lines.append(
                _without_variable(name)
                or f"{name} in the environment is not a setting and has no effect{hint}"
            )
    return lines


def _without_variable(name: str) -> str:
    """A line about a variable named like a flag for which llama-server has no variable; "" for others."""
    word = name.removeprefix("LLAMA_ARG_")
    typed = "--" + word.lower().replace("_", "-")
    if word == name:
        return ""
    if any(typed in flag.names for flag in honoured_flags()):
        return f"{name} in the environment has no effect; use PYSPEC_{word}"
    flag = llama_flags().get(typed)
    return (flag and f"{name} in the environment has no effect: {flag.why}") or ""


def _near_names(name: str, prefix: str, known: Iterable[str]) -> list[str]:
    """Names without the prefix that may have been meant: those that start alike, else similar spellings."""
    word = name.removeprefix(prefix)
    others = sorted(other.removeprefix(prefix) for other in known if other.startswith(prefix))
    begun = [o for o in others if len(word) > 2 and o.startswith(word)][:2]
    return begun or get_close_matches(word, others, 1, 0.75)


def _own_env(option: click.Option) -> list[str]:
    if not option.envvar:
        said: Sequence[str] = []
    else:
        said = [option.envvar] if isinstance(option.envvar, str) else option.envvar
    long = [name for name in option.opts if name.startswith("--")] or option.opts[:1]
    return [*_variables(long), *said]


def _variables(spellings: Iterable[str]) -> list[str]:
    """pyspec's variables of an option's spellings."""
    return [f"PYSPEC_{name.strip('-').replace('-', '_').upper()}" for name in spellings]


class _Reader:
    """One command line: pyspec's flags are kept for click, ignored flags are noted, unknown flags are refused with a hint.

    Plain click would read `-sm layer` as `-s m` and take `layer` for the model.
    """

    def __init__(self, command: click.Command, ctx: click.Context) -> None:
        self._ctx = ctx
        options = [p for p in command.get_params(ctx) if isinstance(p, click.Option)]
        self._own = {name: p for p in options for name in (*p.opts, *p.secondary_opts)}
        shown = [p for p in options if not p.hidden]
        self._shown = [name for p in shown for name in (*p.opts, *p.secondary_opts)]

    def check_environment(self) -> None:
        """Check the environment for ignored and refused flags. Raises UsageError."""
        for flag in dict.fromkeys(llama_flags().values()):
            no, negative = negative_of(flag.env), _negative(flag)
            if no in os.environ and negative is not None:
                self._judge(negative, no, [])
                continue  # it takes precedence with any value
            value = os.environ.get(flag.env) if flag.env else None
            if value == "":
                continue  # compose files set variables to nothing
            if value is not None and (flag.n_value or value.lower() not in OFF):
                self._judge(flag, flag.env, [value])

    def read(self, args: Sequence[str]) -> list[str]:
        """The words for click. Raises UsageError, NoSuchOption."""
        kept: list[str] = []
        words = list(args)
        while words:
            word = words.pop(0)
            if word == "--":
                return [*kept, word, *words]
            if not word.startswith("-") or word == "-":
                kept.append(word)
                continue
            name, given, value = self._known(word)
            option = self._own.get(name)
            if option is not None:
                takes = not (option.is_flag or option.count)
                n = option.nargs if takes and not given else 0
                kept += [name, value] if takes and given else [f"{name}{given}{value}", *words[:n]]
                del words[:n]
            else:
                self._foreign(name, [value] if given else None, words)
        return kept

    def _known(self, word: str) -> tuple[str, str, str]:
        """Name, "=" and value of a known flag; `_` in long names is read as `-`, as in llama.cpp."""
        name, given, value = word.partition("=")
        dashed = name.replace("_", "-") if name.startswith("--") else name
        plain = {"--usage": "--help"}.get(name, dashed)
        for spelling in dict.fromkeys((plain, name)):
            if spelling in self._own or spelling in llama_flags():
                return spelling, given, value
        if ATTACHED.fullmatch(word) and (option := self._own.get(word[:2])) and not option.is_flag:
            return word[:2], "=", word[2:]
        raise self._unknown(name)

    def _unknown(self, name: str) -> click.NoSuchOption:
        dashed = name.replace("_", "-")
        near = self._near(dashed)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        if dashed in elsewhere():
            hint = f" {elsewhere()[dashed][0].upper()}{elsewhere()[dashed][1:]}."
        return click.NoSuchOption(name, f"No such option: {name}.{hint}", ctx=self._ctx)

    def _near(self, name: str) -> list[str]:
        """Options that may have been meant: similar spellings first, then those that start alike."""
        bare = {shown.strip("-"): shown for shown in reversed(self._shown)}
        bare = {n.strip("-"): n for n, flag in llama_flags().items() if flag.fate == "ignored"} | bare
        word = name.strip("-")
        near = [other for other in bare if len(word) > 2 and other.startswith(word)]
        near += [other for other in get_close_matches(word, bare, 3, 0.7) if other not in near]
        return [bare[other] for other in near[:3]]

    def _foreign(self, name: str, values: list[str] | None, words: list[str]) -> None:
        flag = llama_flags()[name]
        if values is None:
            n = flag.n_value
            known = self._own.keys() | llama_flags().keys()
            if n == 1 and words and words[0].split("=")[0] in known:
                n = 0  # `-fa` was once a switch
            values = words[:n]
            del words[:n]
        self._judge(flag, name, values)

    def _judge(self, flag: LlamaFlag, name: str, values: Sequence[str]) -> None:
        if flag.fate == "ignored":
            if fault := flag.fault(name, values):
                raise click.UsageError(fault, self._ctx)
            notes = self._ctx.meta.setdefault("pyspec.notes", [])
            notes.append(f"{name} has no effect: {flag.why}")
        elif not values or any(value not in flag.harmless for value in values):
            raise click.UsageError(flag.error(name), self._ctx)


def option(group: str, *names: str, **more: Any) -> Callable[[str], Callable[[F], F]]:
    """The option of a field of `gathered`'s dataclass, without the field's name: `port: Annotated[int, option("Listening", "--port")]`."""
    return partial(grouped(group), *names, **more)


def folding(
    options: Sequence[Callable[[Any], Any]], **made: Callable[[dict[str, Any]], Any]
) -> Callable[[F], F]:
    """Add options to a command, in the order of help. It receives what `made` makes of their values, by name; what that uses it takes out."""

    def decorate(function: F) -> F:
        @wraps(function)
        def folded(**values: Any) -> object:
            for name, make in made.items():
                values[name] = make(values)
            return function(**values)

        command: Any = folded
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def gathered(kind: type[Any]) -> Callable[[F], F]:
    """Add an option for each field of a dataclass, whose note makes it; the command receives `flags`, one such object."""
    hints = get_type_hints(kind, include_extras=True).items()
    options = {name: hint.__metadata__[0](name) for name, hint in hints}
    return folding([*options.values()], flags=lambda values: kind(**{n: values.pop(n) for n in options}))


def commas(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> tuple[str, ...]:
    """Callback of options that may be repeated, or hold several values separated by commas."""
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
