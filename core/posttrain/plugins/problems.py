"""The ways in which a selected plug-in can fail, each with owner, file and the command that fixes it.

plugin-not-installed · plugin-dependency · plugin-import · plugin-type · plugin-api · plugin-options · plugin-capability, and
plugin-ambiguous for names that clash.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from posttrain.errors import PluginError
from posttrain.plugins.discovery import ALLOW_VARIABLE, PluginInfo, discover, installed, normalised
from posttrain.plugins.kinds import Kind, supported_apis
from posttrain.plugins.known import elsewhere

ANCHOR = "troubleshooting.md#plug-ins"
_LIBRARY = Path(traceback.__file__).parent
_DISTRIBUTION_OF = {  # modules whose distribution has another name
    "yaml": "PyYAML",
    "PIL": "pillow",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "bs4": "beautifulsoup4",
    "psycopg2": "psycopg2",
    "OpenSSL": "pyOpenSSL",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
}


def not_installed(kind: Kind, ref: str, where: str = "") -> PluginError:
    """No visible plug-in has this name."""
    known = discover(kind.name)
    hidden = [info for info in installed(kind.name) if ref in (info.name, info.full_name) and info not in known]
    if hidden:
        return PluginError(
            f"{kind.noun} {ref!r} ({hidden[0].owner}) is hidden by {ALLOW_VARIABLE}",
            where=where,
            code="plugin-not-installed",
            fix=f"add {hidden[0].name} to {ALLOW_VARIABLE}, or unset it",
            anchor=ANCHOR,
        )
    names = sorted({info.name for info in known})
    if brings := elsewhere(kind.name, ref):
        return PluginError(
            f"{kind.noun} {ref!r} is not installed; {brings[0]} brings it",
            cause=f"installed: {', '.join(names) or 'none'}",
            where=where,
            code="plugin-not-installed",
            anchor=ANCHOR,
            fix=brings[1],
        )
    near = nearest(ref, names)
    owner = next((info.owner for info in known if info.name == near), "")
    return PluginError(
        f"no {kind.noun} named {ref!r} is installed" + (f"; did you mean {near!r} ({owner})?" if near else ""),
        cause=f"installed: {', '.join(names) or 'none'}",
        where=where,
        code="plugin-not-installed",
        anchor=ANCHOR,
        fix="choose one of these, pip install the distribution that brings it, or give package.module:attribute",
    )


def ambiguous(kind: Kind, ref: str, found: Iterable[PluginInfo], where: str = "") -> PluginError:
    """Several distributions bring the same name."""
    found = list(found)
    return PluginError(
        f"{kind.noun} {ref!r} is ambiguous: {' and '.join(info.owner for info in found)} both bring it",
        fix=f"write {' or '.join(info.full_name for info in found)}",
        where=where,
        code="plugin-ambiguous",
        anchor=ANCHOR,
    )


def import_failed(kind: Kind, ref: str, target: str, info: PluginInfo | None, exc: BaseException, where: str = "") -> PluginError:
    """The module of a plug-in could not be imported: a dependency is missing, or the import raised."""
    name = subject(kind, ref, info)
    at = location(exc, target)
    missing = missing_dependency(exc, target)
    if missing:
        return PluginError(
            f"{name} {'is installed but ' if info else ''}needs {missing!r}, which is missing",
            cause=f"{at}: {exc}",
            where=where,
            fix=install_command(missing, info),
            code="plugin-dependency",
            anchor=ANCHOR,
        )
    module = target.partition(":")[0]
    absent = isinstance(exc, ModuleNotFoundError) and exc.name is not None and (module + ".").startswith(exc.name + ".")
    return PluginError(
        f"{name} cannot be imported" + (f": there is no module {exc.name!r}" if absent else ""),  # type: ignore[attr-defined]
        cause=f"{at}: {type(exc).__name__}: {exc}",
        where=where,
        code="plugin-import",
        anchor=ANCHOR,
        fix=_import_fix(info, absent, module),
    )


def wrong_type(
    kind: Kind, ref: str, info: PluginInfo | None, got: str, file: str = "", where: str = "", *, fix: str = ""
) -> PluginError:
    """The plug-in is there, but it is not a subclass of its base class, or cannot be constructed as one."""
    subclass = f"make it a concrete subclass of {(kind.base or '').replace(':', '.')}"
    return PluginError(
        f"{subject(kind, ref, info)} {got}",
        cause=file,
        where=where,
        fix=fix or subclass + (", or a zero-argument function that returns one" if kind.factory else ""),
        code="plugin-type",
        anchor=ANCHOR,
    )


def bad_options(
    kind: Kind, ref: str, info: PluginInfo | None, fault: tuple[str, str], file: str = "", where: str = ""
) -> PluginError:
    """The nested `Options` is no dataclass that can be read and checked; `fault` says what is wrong and how to mend it."""
    return PluginError(
        f"{subject(kind, ref, info)} {fault[0]}", cause=file, where=where, fix=fault[1], code="plugin-options", anchor=ANCHOR
    )


def bad_capability(
    kind: Kind, ref: str, info: PluginInfo | None, fault: tuple[str, str], file: str = "", where: str = ""
) -> PluginError:
    """The plug-in needs, provides or lacks something that is no capability; `fault` says what is wrong and how to mend it."""
    return PluginError(
        f"{subject(kind, ref, info)} {fault[0]}", cause=file, where=where, fix=fault[1], code="plugin-capability", anchor=ANCHOR
    )


def wrong_api(kind: Kind, ref: str, info: PluginInfo | None, api: object, file: str = "", where: str = "") -> PluginError:
    """The plug-in was written for another version of its contract."""
    newer = isinstance(api, int) and api > max(supported_apis())
    spoken = " and ".join(map(str, supported_apis()))
    name = info.distribution if info else "the plug-in"
    cause = f"its api is too {'new' if newer else 'old'}"
    return PluginError(
        f"{subject(kind, ref, info)} is written for api {api!r}, this posttrain speaks {spoken}",
        cause=f"{file}: {cause}" if file else cause,
        fix="pip install --upgrade posttrain" if newer else f"pip install --upgrade {name}",
        where=where,
        code="plugin-api",
        anchor=ANCHOR,
    )


def subject(kind: Kind, ref: str, info: PluginInfo | None) -> str:
    """The plug-in and who it is from, as in a sentence."""
    return f"{kind.noun} {ref!r}" + (f" ({info.owner})" if info else "")


def missing_dependency(exc: BaseException, target: str) -> str | None:
    """The top-level module that a failed import lacked, unless it is the plug-in's own."""
    if not isinstance(exc, ModuleNotFoundError) or not exc.name:
        return None
    own = target.partition(":")[0].partition(".")[0]
    top = exc.name.partition(".")[0]
    return None if top == own else top


def distribution_of(module: str) -> str:
    """The likely distribution of an absent top-level module."""
    return _DISTRIBUTION_OF.get(module, module)


def install_command(module: str, info: PluginInfo | None) -> str:
    """What to type for an absent module: the owner's requirement or extra when it names one."""
    spec, extra = _required(module, info) or (distribution_of(module), "")
    if extra and info:
        return f"pip install '{info.distribution}[{extra}]'"
    return f"pip install {spec}" if spec == distribution_of(module) else f"pip install '{spec}'"


def extra_of(module: str, info: PluginInfo) -> str:
    """The extra of the plug-in's distribution that an absent module belongs to; "" when it belongs to none."""
    return (_required(module, info) or ("", ""))[1]


def _required(module: str, info: PluginInfo | None) -> tuple[str, str] | None:
    """The requirement of the owner that brings a module, and the extra that it is of, "" for none."""
    for requirement in _requirements(info) if info else ():
        spec, _, marker = (part.strip() for part in requirement.partition(";"))
        name = re.match(r"[\w.-]+", spec)
        if name is not None and normalised(name[0]) == normalised(distribution_of(module)):
            extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", marker)
            return spec, extra[1] if extra else ""
    return None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a typo most likely meant."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def _requirements(info: PluginInfo) -> list[str]:
    try:
        return metadata.requires(info.distribution) or []
    except metadata.PackageNotFoundError:
        return []


def location(exc: BaseException, target: str) -> str:
    """`file.py:3` where the plug-in's import failed: the deepest line that is not of Python's own library."""
    if isinstance(exc, SyntaxError) and exc.filename:
        return f"{exc.filename}:{exc.lineno}"
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [i for i, frame in enumerate(frames) if Path(frame.filename) == Path(__file__).with_name("resolution.py")]
    frames = [frame for frame in frames[ours[-1] + 1 if ours else 0 :] if "importlib" not in frame.filename]  # type: ignore[assignment]
    frames = [frame for frame in frames if Path(frame.filename).parent != _LIBRARY] or frames  # type: ignore[assignment]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else target


def _import_fix(info: PluginInfo | None, absent: bool, module: str) -> str:
    if info is None:
        top = module.partition(".")[0]
        return f"check the path (form: package.module:attribute), or make {top!r} importable (PYTHONPATH, pip install -e)"
    if absent:
        return f"its entry point names a module that its files lack: pip install --force-reinstall {info.distribution}"
    return f"pip install --upgrade {info.distribution}, or tell its authors; details: posttrain plugins doctor {info.name}"
