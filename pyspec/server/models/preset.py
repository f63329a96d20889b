"""llama-server's INI of models: a section for each, whose keys are flags. `[*]` has what all of them share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyspec.errors import ConfigError

SHARED = "*"
MOST_BYTES = 1 << 20
OWN = ("load-on-startup", "stop-timeout", "pin", "park", "dedup-cache-models")
"""Keys that are no flags of a model's server: they tell the router what to do with it."""
ON, OFF = ("1", "true", "on", "yes", "enabled"), ("0", "false", "off", "no", "disabled")


@dataclass(frozen=True)
class Setting:
    """A line: `key = value`."""

    key: str
    value: str
    line: int


@dataclass(frozen=True)
class Preset:
    """A file's sections in order, `[*]` among them."""

    path: Path
    sections: Mapping[str, tuple[Setting, ...]]

    def error(self, line: int, what: str) -> ConfigError:
        """The error for a line."""
        return ConfigError(f"{self.path}:{line}: {what}")

    def own(self, name: str) -> dict[str, Setting]:
        """The router's own keys of a section, over those of `[*]`."""
        both = (*self.sections.get(SHARED, ()), *self.sections.get(name, ()))
        return {setting.key: setting for setting in both if setting.key in OWN}

    def flags(self, name: str) -> list[Setting]:
        """The other keys of a section: flags."""
        return [setting for setting in self.sections.get(name, ()) if setting.key not in OWN]

    def switch(self, setting: Setting) -> bool:
        """The value of a switch. Raises ConfigError."""
        if setting.value.lower() not in (*ON, *OFF):
            raise self.error(setting.line, f"{setting.key} is {setting.value!r}; want 1 or 0")
        return setting.value.lower() in ON


def read_preset(path: Path) -> Preset:
    """Read a file. Raises ConfigError with the line."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--models-preset {path} can not be read: {e}") from e
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"--models-preset {path} is larger than {MOST_BYTES >> 20} MiB")
    sections: dict[str, list[Setting]] = {}
    preset, current = Preset(path, {}), ""
    for n, written in enumerate(text.splitlines(), 1):
        line = written.strip()
        if not line or line[0] in "#;":
            continue
        if found := re.fullmatch(r"\[\s*([^]]*[^]\s])\s*\]\s*(?:[#;].*)?", line):
            current = found[1]
            if current in sections:
                raise preset.error(n, f"there are two sections [{current}]")
            sections[current] = []
            continue
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            raise preset.error(n, f"{line[:60]!r} is no section and no `key = value`")
        key = key.strip().lstrip("-")
        key = key if key.isupper() else key.replace("_", "-")
        if key == "version":  # of the format; there is one
            continue
        if not current:
            raise preset.error(n, f"{key!r} stands before the first section")
        sections[current].append(Setting(key, _plain(value.strip()), n))
    return Preset(path, {name: tuple(lines) for name, lines in sections.items()})


def _plain(value: str) -> str:
    """A value without the comment behind it and the quotes around it."""
    if quoted := re.fullmatch(r"""(["'])(.*?)\1(?:\s+[#;].*)?""", value):
        return quoted[2]
    return re.sub(r"(?:^|\s+)[#;].*", "", value)
