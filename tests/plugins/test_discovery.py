"""Discovery reads metadata and source, never imports, and honours POSTTRAIN_PLUGINS."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from posttrain.errors import ConfigError
from posttrain.plugins import discover
from posttrain.plugins.card import Option, find_source

BOMB = '''"""A file that must not be imported."""
raise RuntimeError("imported")

class Env:
    """Words of five letters.

    More text.
    """

    api = 1

    @dataclass
    class Options(Base):
        words: int = 5  # letters of a word
        mode: Literal["easy", "hard"] = "easy"
        path: str
        tags: list[str] = field(default_factory=list)
        limit: ClassVar[int] = 3

class Base:
    seed: int = 0  # of the draw
'''


def test_built_ins_are_found_by_name() -> None:
    assert {"grpo", "rloo", "dpo"} <= {info.name for info in discover("algorithms")}
    assert {info.full_name for info in discover("engines")} >= {"posttrain/hf", "posttrain/vllm"}


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="algorithms, datapackers, envs"):
        discover("rewards")


def test_the_card_is_read_without_importing(fake_distribution) -> None:
    fake_distribution(
        "rl-words",
        points={"posttrain.envs": {"words": "rl_words.env:Env"}},
        files={"rl_words/__init__.py": "raise SystemExit(9)", "rl_words/env.py": BOMB},
    )
    (info,) = [info for info in discover("envs") if info.name == "words"]
    card = info.card
    assert info.owner == "rl-words 1.0" and not info.builtin
    assert (card.help, card.api, card.complete, card.problem) == ("Words of five letters.", 1, True, "")
    assert card.options == (
        Option("seed", "int", "0", "of the draw"),
        Option("words", "int", "5", "letters of a word"),
        Option("mode", "Literal['easy', 'hard']", "'easy'"),
        Option("path", "str", None),
        Option("tags", "list[str]", "list()"),
    )
    assert not [name for name in sys.modules if name.startswith("rl_words")]


def test_options_are_followed_through_imports_assignments_and_inheritance(fake_distribution) -> None:
    fake_distribution(
        "rl-deep",
        points={"posttrain.envs": {"deep": "rl_deep:Env"}},
        files={
            "rl_deep/__init__.py": "from .env import Final as Env\n",
            "rl_deep/env.py": "import rl_deep.shared as shared\n"
            "class Middle:\n    Options: type = shared.Common\nclass Final(Middle):\n    pass\n",
            "rl_deep/shared.py": "from .base import Base\nclass Common(Base.Options):\n    b: int = 2\n",
            "rl_deep/base.py": "class Base:\n    class Options:\n        a: int = 1\n",
        },
    )
    (info,) = [info for info in discover("envs") if info.name == "deep"]
    assert [option.name for option in info.card.options] == ["a", "b"]
    assert info.card.complete


def test_a_base_class_out_of_reach_makes_the_card_incomplete(fake_distribution) -> None:
    fake_distribution(
        "rl-far",
        points={"posttrain.envs": {"far": "rl_far:Env"}},
        files={"rl_far.py": "from nowhere_at_all import Base\nclass Env:\n    class Options(Base):\n        a: int = 1\n"},
    )
    (info,) = [info for info in discover("envs") if info.name == "far"]
    assert not info.card.complete and info.card.missing == ("nowhere_at_all",)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "there is no source file of module 'rl_broken'"),
        ({"rl_broken.py": "def f(:\n"}, "SyntaxError"),
        ({"rl_broken.py": "x = 1\n"}, "does not define 'Env'"),
    ],
)
def test_the_card_says_what_is_wrong_with_the_source(fake_distribution, files, problem) -> None:
    fake_distribution("rl-broken", points={"posttrain.envs": {"broken": "rl_broken:Env"}}, files=files)
    (info,) = [info for info in discover("envs") if info.name == "broken"]
    assert problem in info.card.problem


def test_source_of_a_submodule_is_found_without_importing_its_package() -> None:
    sys.modules.pop("email.mime.audio", None)
    assert find_source("email.mime.audio").name == "audio.py"
    assert "email.mime.audio" not in sys.modules
    assert find_source("email.mime.nosuch") is None


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, {"one", "two"}),
        ("none", set()),
        ("", set()),
        ("one", {"one"}),
        ("rl-b", {"two"}),
        ("rl_b", set()),
        ("rl-b/two, one", {"one", "two"}),
    ],
)
def test_posttrain_plugins_hides_others_but_never_the_built_ins(fake_distribution, monkeypatch, setting, seen) -> None:
    fake_distribution("rl-a", points={"posttrain.envs": {"one": "rl_a:Env"}}, files={"rl_a.py": "class Env: pass"})
    fake_distribution("rl-b", points={"posttrain.envs": {"two": "rl_b:Env"}}, files={"rl_b.py": "class Env: pass"})
    if setting is not None:
        monkeypatch.setenv("POSTTRAIN_PLUGINS", setting)
    names = {info.name for info in discover("envs")}
    assert names & {"one", "two"} == seen
    assert "arithmetic" in names


def test_plugin_infos_travel() -> None:
    info = discover("algorithms")[0]
    assert pickle.loads(pickle.dumps(info)) == info


def test_looking_imports_nothing_heavy() -> None:
    code = (
        "import sys, posttrain.plugins as p; [i.card for k in p.KINDS for i in p.discover(k)]\n"
        "print({'torch', 'hydra', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
