"""A plug-in package to begin with: code, contract test, entry point and README, filled in from `posttrain/templates`.

    write_package("env", "my-sums", Path("."))       # ./my-sums, with the environment `my_sums`

What is written is valid and its tests pass, so that one changes something that works.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from string import Template

from posttrain.errors import ConfigError
from posttrain.plugins.discovery import BUILTIN, PluginInfo, installed
from posttrain.plugins.kinds import KINDS

TEMPLATES = Path(__file__).parents[1] / "templates"


@dataclass(frozen=True, slots=True)
class Draft:
    """A kind of plug-in that a package can be written for.

    kind        in `KINDS`
    suffix      of the class
    selection   what selects it by name, as typed after `posttrain train`
    """

    kind: str
    suffix: str
    selection: str


DRAFTS = {
    "env": Draft("envs", "Env", "'environments=[{name: $name}]'"),
    "algorithm": Draft("algorithms", "Algorithm", "rl.objective.name=$name"),
    "datapacker": Draft("datapackers", "DataPacker", "rl.data.packer=$name"),
    "hook": Draft("hooks", "Hook", "'hooks=[$name]'"),
}


@dataclass(frozen=True, slots=True)
class Package:
    """What was written: its folder, the name to select it by and how, and plug-ins that have that name already."""

    folder: Path
    name: str
    selection: str
    clashes: tuple[PluginInfo, ...]


def write_package(draft: str, name: str, parent: Path) -> Package:
    """Write a package for the plug-in `name` into a new folder of `parent`.

    Raises ConfigError for a name that cannot be a distribution and a module, one that is taken by something that is installed,
    and a folder that exists.
    """
    check_name(name)
    distribution, module = name.replace("_", "-"), name.replace("-", "_")
    folder = parent / distribution
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists", fix="choose another name or --dir, or remove it", code="exists")
    kind = DRAFTS[draft].kind
    for path, text in files(draft, module).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    clashes = tuple(info for info in installed(kind) if info.name == module)
    return Package(folder, module, Template(DRAFTS[draft].selection).substitute(name=module), clashes)


def files(draft: str, module: str) -> dict[str, str]:
    """The files of a package by their path in it."""
    about = DRAFTS[draft]
    noun = KINDS[about.kind].noun
    values = {
        "name": module,
        "module": module,
        "distribution": module.replace("_", "-"),
        "cls": class_name(module, about.suffix),
        "file": draft,
        "group": about.kind,
        "noun": noun,
        "article": "An" if noun[0] in "aeiou" else "A",
        "posttrain": metadata.version(BUILTIN),
        "selection": Template(about.selection).substitute(name=module),
    }
    sources = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        ".gitignore": "gitignore",
        f"src/{module}/__init__.py": "init.py",
        f"src/{module}/{draft}.py": f"{draft}.py",
        f"tests/test_{draft}.py": f"test_{draft}.py",
    }
    texts = {path: (TEMPLATES / f"{source}.tmpl").read_text(encoding="utf-8") for path, source in sources.items()}
    return {path: Template(text).substitute(values) for path, text in texts.items()}


def class_name(module: str, suffix: str) -> str:
    """`my_sums` is `MySumsEnv`, `my_env` is `MyEnv`; never the suffix alone, which base classes are called."""
    name = "".join(part.capitalize() for part in module.split("_"))
    ends = name.lower().endswith(suffix.lower()) and len(name) > len(suffix)
    return name if ends else name + suffix


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` can be a distribution and a module, and is free to be."""
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        wanted = "-".join(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())).lstrip("0123456789-")
        raise ConfigError(
            f"{name!r} cannot name a distribution and a module",
            cause="it must begin with a letter and hold lower-case letters and digits, joined by - or _",
            fix=f"for example {wanted}" if wanted else "for example my-words",
            code="plugin-name",
        )
    module = name.replace("-", "_")
    if taken := _taken(module):
        raise ConfigError(f"the name {name!r} is taken: {taken}", fix=f"for example {name}-rl", code="plugin-name")


def _taken(module: str) -> str:
    """What has this name already, so that a package of the same name would hide it or be hidden; "" for nothing.

    A file of the current folder is no obstacle: it may be what somebody makes a package of.
    """
    if keyword.iskeyword(module):
        return "it is a word of Python"
    if module in sys.stdlib_module_names:
        return "a module of Python's own library has it"
    try:
        owner = metadata.distribution(module.replace("_", "-"))
    except metadata.PackageNotFoundError:
        found = importlib.util.find_spec(module)
        here = (Path.cwd(), Path.cwd() / module)
        elsewhere = found is not None and found.origin is not None and Path(found.origin).parent not in here
        return f"a module {module!r} can be imported here" if elsewhere else ""
    return f"{owner.name} {owner.version} is installed, and pip would replace it"
