"""Fills the generated parts of the docs from the code: `python docs/_generate.py` (`--check` only compares).

A page holds a block between two marks; what is between them is replaced:

    <!-- generated: errors E1 E2 -->  …  <!-- end -->       messages, causes and fixes of errors.CATALOGUE
    <!-- generated: error-list -->  …  <!-- end -->         all of them, one section each
    <!-- generated: error-classes -->  …  <!-- end -->      the tree of exceptions
    <!-- generated: exit-codes -->  …  <!-- end -->         exit codes and the error classes that end with them
    <!-- generated: config -->  …  <!-- end -->             every key of config/schema.py
    <!-- generated: not-yet -->  …  <!-- end -->            keys whose feature is not there yet, with the reason
    <!-- generated: shared-options -->  …  <!-- end -->     the options that all token objectives take
    <!-- generated: options grpo -->  …  <!-- end -->       an algorithm's own options
    <!-- generated: plugin-options envs -->  …  <!-- end -->    the options of every plug-in of a kind, one section each
    <!-- generated: other-names -->  …  <!-- end -->        keys of other trainers, and what answers them here
    <!-- generated: hooks -->  …  <!-- end -->              every hook of hooks/specs.py: what it may take, and when it is called
    <!-- generated: capabilities -->  …  <!-- end -->       every capability: what it means and who is asked for it
    <!-- generated: declared -->  …  <!-- end -->           what each built-in plug-in needs and provides
    <!-- generated: laws env -->  …  <!-- end -->           the laws of a contract suite of `posttrain.testing`
    <!-- generated: metrics -->  …  <!-- end -->            every metric of tracking/metric_names.py
    <!-- generated: example first_hour/my_rewards.py score -->  …  <!-- end -->    a file of docs/examples, or one function
    <!-- generated: cli train show -->  …  <!-- end -->     `--help` of commands; without a command, of the program

`llms.txt` is generated from the navigation in mkdocs.yml: every page with its first sentence.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import _config_tables
import yaml
from _markdown import code, prose, table

from posttrain import errors
from posttrain.cli.main import COMMANDS, HELP
from posttrain.hooks import EVENTS, HookSpecs
from posttrain.plugins import KINDS, discover
from posttrain.plugins.capabilities import CAPABILITIES
from posttrain.tracking.metric_names import SECTIONS

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- generated: ([\w-]+)((?: [\w./-]+)*) -->\n).*?(<!-- end -->)", re.DOTALL)


def error_table(*codes: str) -> str:
    rows = []
    for name in codes:
        entry = errors.CATALOGUE[name]
        rows.append((name, code(_fields(entry.text, "{}")), _prose(entry.cause), _prose(entry.fix)))
    return table(("", "Message", "Cause", "Fix"), rows)


def error_list(*_: str) -> str:
    """One section for each documented message, with everything that the error carries."""
    parts = []
    for name, entry in errors.CATALOGUE.items():
        cls = entry.cls
        retryable = entry.retryable or cls.retryable
        lines = [
            f"- **Cause**: {_prose(entry.cause)}",
            f"- **Fix**: {_prose(entry.fix)}",
            f"- **Raised as** {code(cls.__name__)}, which is also a {code(_stdlib(cls))}",
            f"- **Exit code** {cls.exit_code}, {'worth resuming' if retryable else 'not retryable'}",
            f"- **More**: [{_title(entry.anchor)}](../{entry.anchor})",
        ]
        parts.append(f"### {name}\n\n```text\n{_fields(entry.text, '{}')}\n```\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _stdlib(cls: type[errors.PosttrainError]) -> str:
    return next(base.__name__ for base in cls.__mro__ if base.__module__ == "builtins" and base is not Exception)


def _title(anchor: str) -> str:
    """The heading that an anchor of the catalogue leads to."""
    page, _, slug = anchor.partition("#")
    titles = re.findall(r"^#{1,4} (.+)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return next((t for t in titles if slugify(t) == slug), page)


def slugify(title: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", title.lower().strip()).replace(" ", "-")


def _prose(text: str) -> str:
    return "the message gives it" if re.fullmatch(r"\{\w+\}", text) else _fields(prose(text), "*{}*")


def _fields(text: str, form: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: form.format(m[1].upper() if form == "{}" else m[1]), text)


def error_classes(*_: str) -> str:
    rows = [
        (code(cls.__name__), (cls.__doc__ or "").partition("\n")[0], str(cls.exit_code), "yes" if cls.retryable else "no")
        for cls in _subclasses(errors.PosttrainError)
    ]
    return table(("Class", "Meaning", "Exit code", "Retryable"), rows)


def exit_codes(*_: str) -> str:
    meaning = {
        errors.EXIT_OK: "done, also when nothing was left to do",
        errors.EXIT_UNEXPECTED: "unexpected: a bug in posttrain or in a plug-in",
        errors.EXIT_CONFIG: "the configuration or a plug-in cannot work",
        errors.EXIT_DATA: "the data cannot be read or does not fit",
        errors.EXIT_ENGINE: "a model or an engine did not start",
        errors.EXIT_ABORTED: "the run stopped and would stop again in the same way",
        errors.EXIT_RETRYABLE: "the run stopped for a reason that may pass: resume it",
        errors.EXIT_INTERRUPT: "Ctrl-C",
        errors.EXIT_TERMINATED: "SIGTERM",
    }
    classes: dict[int, list[str]] = {}
    for cls in _subclasses(errors.PosttrainError):
        classes.setdefault(cls.exit_code, []).append(code(cls.__name__))
    return table(("Exit code", "Meaning", "Errors"), [(str(c), m, ", ".join(classes.get(c, []))) for c, m in meaning.items()])


def _subclasses(cls: type[errors.PosttrainError]) -> Iterator[type[errors.PosttrainError]]:
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from _subclasses(child)


def cli(*commands: str) -> str:
    os.environ["COLUMNS"] = "100"
    texts = [importlib.import_module(COMMANDS[name]).parser().format_help() for name in commands] or [HELP]
    return "".join(f"```text\n{text.rstrip()}\n```\n" for text in texts)


def hooks(*_: str) -> str:
    rows = [(code(name), ", ".join(map(code, takes)), _when(name)) for name, takes in EVENTS.items()]
    return table(("Hook", "May take", "When, and what it is given"), rows)


def _when(hook: str) -> str:
    return prose(" ".join((inspect.getdoc(getattr(HookSpecs, hook)) or "").split()))


def capabilities(*_: str) -> str:
    nouns = {"grid": "the grid (`grid.*`)", "run": "posttrain itself", "config": "the config"}
    rows = [
        (code(one.name), one.meaning, ", ".join(nouns.get(role) or KINDS[role].noun for role in one.of) + "*" * one.assumed)
        for one in CAPABILITIES.values()
    ]
    return table(("Capability", "What it is", "Asked of"), rows)


def declared(*_: str) -> str:
    cards = [(info, info.card) for kind in KINDS for info in discover(kind) if info.builtin]
    rows = [
        (f"{KINDS[info.kind].noun} {code(info.name)}", ", ".join(map(code, card.needs)), ", ".join(map(code, card.provides)))
        for info, card in cards
        if card.needs or card.provides
    ]
    return table(("Plug-in", "Needs", "Provides"), rows)


def metrics(*_: str) -> str:
    parts = []
    for title, section in SECTIONS.items():
        rows = [(code(m.name), m.unit or "–", m.meaning, m.emitter) for m in section]
        parts.append(f"## {title}\n\n" + table(("Metric", "Unit", "Meaning", "From"), rows))
    return "\n".join(parts)


def example(name: str, function: str = "") -> str:
    """A file of `docs/examples` as a code block, or one function of it; of data the first two rows."""
    path = DOCS / "examples" / name
    text = path.read_text(encoding="utf-8").rstrip()
    if path.suffix == ".jsonl":
        return "```json\n" + "\n".join(text.splitlines()[:2]) + "\n```\n"
    if function:
        nodes = [node for node in ast.parse(text).body if getattr(node, "name", "") == function]
        text = ast.get_source_segment(text, nodes[0]) or ""
    return f"```python\n# {path.name}\n{text}\n```\n"


def laws(suite: str) -> str:
    """The names of a suite's tests, which are sentences."""
    path = DOCS.parent / "core" / "posttrain" / "testing" / f"{suite}_contract.py"
    names = re.findall(r"^    def test_(\w+)\(", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return "".join(f"- {name.replace('_s_', chr(39) + 's_').replace('_', ' ')}\n" for name in names)


GENERATORS: dict[str, Callable[..., str]] = {
    "laws": laws,
    "errors": error_table,
    "error-list": error_list,
    "error-classes": error_classes,
    "exit-codes": exit_codes,
    "config": _config_tables.config,
    "not-yet": _config_tables.not_yet,
    "options": _config_tables.own_options,
    "shared-options": _config_tables.shared_options,
    "plugin-options": _config_tables.plugin_options,
    "other-names": _config_tables.other_names,
    "cli": cli,
    "example": example,
    "hooks": hooks,
    "metrics": metrics,
    "capabilities": capabilities,
    "declared": declared,
}


def regenerate(text: str) -> str:
    """The page with every generated block filled anew. Raises KeyError for a block or a message that does not exist."""
    return BLOCK.sub(lambda m: f"{m[1]}{GENERATORS[m[2]](*m[3].split())}{m[4]}", text)


def pages() -> list[Path]:
    return [*sorted(p for p in DOCS.rglob("*.md") if "examples" not in p.parts), DOCS.parent / "README.md"]


def llms() -> str:
    """`llms.txt`: the pages in the order of the navigation, each with its first sentence."""
    text = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(re.sub(r"!!python/\S+ ", "", text))["nav"]
    entries = [item for entry in nav for item in entry.items()]
    lines = ["# posttrain", "", f"> {_first_sentence(DOCS / 'index.md')}", ""]
    lines += [_line(title, page) for title, page in entries if isinstance(page, str)]
    for title, section in entries:
        if not isinstance(section, str):
            lines += ["", f"## {title}", "", *(_line(*item) for page in section for item in page.items())]
    return "\n".join(lines) + "\n"


def _line(title: str, page: str) -> str:
    return f"- [{title}]({page}): {_first_sentence(DOCS / page)}"


def _first_sentence(page: Path) -> str:
    """The first sentence of prose on a page, without its markup. Raises StopIteration for a page without prose."""
    body = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    paragraph = next(p for p in re.split(r"\n\s*\n", body) if re.match(r"\s*[\w`*\[]", p) and not p.lstrip().startswith("- "))
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=\.)\s(?=\W*[A-Z])", plain)[0].rstrip(":.") + "."


def files() -> list[Path]:
    """Every file with generated parts."""
    return [*(page for page in pages() if BLOCK.search(page.read_text(encoding="utf-8"))), DOCS / "llms.txt"]


def current(path: Path) -> tuple[str, str]:
    """What a file holds, and what it should hold."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text, llms() if path.name == "llms.txt" else regenerate(text)


def main() -> int:
    check = "--check" in sys.argv
    stale = []
    for path in files():
        text, wanted = current(path)
        if text != wanted:
            stale.append(path.relative_to(DOCS.parent))
            if not check:
                path.write_text(wanted, encoding="utf-8")
    print("\n".join(f"{'stale' if check else 'written'}: {path}" for path in stale) or "all pages are current")
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
