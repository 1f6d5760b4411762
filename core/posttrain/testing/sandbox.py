"""Temporary plug-ins: really installed for one test, as far as discovery can tell, and the only ones beside posttrain's own.

    sandbox.add("envs", "mine", MyEnvironment)                  # a class of the test
    sandbox.install("acme-rl", files={"acme.py": SOURCE}, points={"posttrain.envs": {"mine": "acme:Mine"}})

Each is a distribution of its own in a folder of its own at the front of `sys.path` (and of PYTHONPATH, for other processes).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_SHIM = '''"""{help}"""
from posttrain.plugins.resolution import import_target

{attribute} = import_target({reference!r})
'''


def write_distribution(
    root: Path,
    name: str,
    *,
    version: str = "1.0",
    points: Mapping[str, Mapping[str, str]],
    files: Mapping[str, str],
    requires: Sequence[str] = (),
) -> None:
    """Put a distribution into the folder `root`. points: `{group: {name: "module:attr"}}`; files: `{path: text}`."""
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}", encoding="utf-8")
    groups = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items()) for group, entries in points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


class PluginSandbox:
    """What the fixture `posttrain_plugins` gives. Plug-ins of other distributions are hidden, from its children too."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        self._roots: list[Path] = []
        self._allowed: list[str] = []
        self.allow()

    def add(self, kind: str, name: str, plugin: Any) -> None:
        """Let a class of the test (or a packer's factory) be the plug-in `name` of this kind."""
        from posttrain.plugins.kinds import kind_of
        from posttrain.plugins.objects import References

        module = f"_posttrain_temporary_{kind}_{name}".replace("-", "_").replace("/", "_")
        lines = (getattr(plugin, "__doc__", None) or "").strip().splitlines()
        text = _SHIM.format(help=lines[0] if lines else name, attribute="plugin", reference=References().of(plugin, name))
        points = {kind_of(kind).group: {name: f"{module}:plugin"}}
        self.install(f"temporary-{kind}-{name}", files={f"{module}.py": text}, points=points)

    def install(
        self,
        distribution: str,
        *,
        files: Mapping[str, str],
        points: Mapping[str, Mapping[str, str]],
        version: str = "1.0",
        requires: Sequence[str] = (),
    ) -> Path:
        """Install a distribution (see `write_distribution`). Returns its folder."""
        root = self._folder / f"site-{len(self._roots)}-{distribution}"
        write_distribution(root, distribution, version=version, points=points, files=files, requires=requires)
        self._roots.append(root)
        self._patch.syspath_prepend(str(root))
        self._patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])))
        self.allow(distribution)
        importlib.invalidate_caches()
        return root

    def allow(self, *distributions: str) -> None:
        """Let the plug-ins of these really installed distributions be seen, too."""
        from posttrain.plugins.discovery import ALLOW_VARIABLE

        self._allowed += distributions
        self._patch.setenv(ALLOW_VARIABLE, ",".join(self._allowed) or "none")

    def close(self) -> None:
        """Forget the modules that came from the folders."""
        roots = tuple(str(root) + os.sep for root in self._roots)
        for name, module in list(sys.modules.items()):
            if roots and str(getattr(module, "__file__", None) or "").startswith(roots):
                del sys.modules[name]
