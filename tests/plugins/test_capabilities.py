"""What parts need of each other: each capability with and without somebody who provides it, the table, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.config.fit import algorithm_needs, offers, refuse_misfits, selected
from posttrain.config.load import LoadedConfig
from posttrain.config.schema import Plugin, RLConfig, RunConfig
from posttrain.errors import ConfigError, PluginError
from posttrain.objective import build_objective
from posttrain.plugins import discover, load, resolve
from posttrain.plugins.capabilities import (
    CAPABILITIES,
    SIGNS,
    Declared,
    Part,
    capability_fault,
    declared,
    misfit,
    misfits,
)
from posttrain.plugins.doctor import look
from posttrain.plugins.kinds import KINDS

ROLES = sorted({role for one in CAPABILITIES.values() for role in one.of})
ASKED = [(name, role) for name, one in CAPABILITIES.items() for role in one.of]
FILE = """
from posttrain import Environment, Hook
from posttrain.rollout.hf import HFEngine
from posttrain_datapackers.decoder_only import DecoderOnlyPacker

class Plain(Environment):
    def dataset(self, split): return []
    def compute_reward(self, state): return 0.0
class Guessing(Plain):
    def env_response(self, state): return [{"role": "user", "content": "higher"}]
class Pictures(Plain):
    needs = ("images",)
class Graded(Plain):
    lacks = ("binary_rewards",)
class OfTwo(Plain):
    needs = ("groups",)
class Wrong(Plain):
    def __init__(self, options=None):
        super().__init__(options)
        self.needs = ("imgaes",)
class Watching(Hook):
    needs = ("partial_rollouts",)
    def run_start(self): pass
class Whole(HFEngine):
    lacks = ("partial_rollouts",)
class Wide(Hook):
    needs = ("tensor_parallel",)
    def run_start(self): pass
class Closed(DecoderOnlyPacker):
    lacks = ("multi_turn",)
"""
SUMS = ["experiment=arithmetic_grpo"]


def part(role: str, name: str = "other", **said: tuple[str, ...]) -> Part:
    return Part(role, name, "some 1.0", f"key.{role}.{name}", Declared(**said))


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("need", "role"), ASKED)
def test_a_need_is_met_by_who_provides_it_and_by_nobody_else(need: str, role: str) -> None:
    asks, silent, cannot = part("hooks", "asks", needs=(need,)), part(role), part(role, lacks=(need,))
    assert misfits([asks, part(role, provides=(need,))]) == []
    (found,) = misfits([asks, cannot])
    assert (found.need, found.by, found.of, found.where) == (need, asks, cannot, cannot.where)
    assert bool(misfits([asks, silent])) != CAPABILITIES[need].assumed  # what is assumed, only a no denies
    one_of_two = misfits([asks, part(role, "can", provides=(need,)), cannot])
    assert [one.of for one in one_of_two] == [cannot], "every part of the role is asked"
    assert misfits([asks]) == [], "a role without a part is not judged"


ANY = st.lists(
    st.builds(
        part,
        st.sampled_from([*ROLES, "config", "hooks"]),
        st.sampled_from("abc"),
        needs=st.lists(st.sampled_from(list(CAPABILITIES)), max_size=4, unique=True).map(tuple),
        provides=st.lists(st.sampled_from(list(CAPABILITIES)), max_size=4, unique=True).map(tuple),
    ),
    max_size=7,
    unique_by=lambda one: one.where,
)


@given(ANY, st.randoms())
@settings(max_examples=200, deadline=None)
def test_nothing_depends_on_the_order_and_every_unmet_need_is_told_once(parts: list[Part], random: Any) -> None:
    found = misfits(parts)
    shuffled = random.sample(parts, len(parts))
    assert misfits(shuffled) == found == misfits(parts + parts)
    told = {(one.by, one.need, one.of) for one in found}
    unmet = {
        (by, need, of)
        for by, of in itertools.product(parts, parts)
        for need in by.declared.needs
        if of.role in CAPABILITIES[need].of and need not in of.declared.provides and not CAPABILITIES[need].assumed
    }
    assert told == unmet and len(found) == len(told)
    if found:
        assert str(misfit(found)) == str(misfit(misfits(shuffled)))


def test_every_capability_can_be_asked_for_and_says_what_to_do() -> None:
    for name, one in CAPABILITIES.items():
        assert one.name == name and one.meaning and one.of
        assert set(one.of) <= {*KINDS, "grid", "run", "config"}
        assert all(fix or name in ("old_logprobs", "reference") for fix in one.of.values()), name  # a run always has these two
    said = {name for signs in SIGNS.values() for _, name in signs.values()}
    assert said <= set(CAPABILITIES)


# --- the table --------------------------------------------------------------------------------------------------------

TABLE = """\
the selected parts do not fit together: 3 needs are not met
  cause: need            needed by                              not provided by                            provided by
         binary_rewards  algorithm 'nft' (posttrain 0.1.0)      environment 'essays' (lab-envs 2.0)        arithmetic, countdown
           fix: environments[1].name: use an environment whose rewards are 0 or 1, or an algorithm that takes any reward, \
such as grpo
         images          environment 'essays' (lab-envs 2.0)    DataPacker 'decoder_only' (posttrain 0.1)  nothing installed
           fix: rl.data.packer: set rl.data.packer to one for vision models
         multi_turn      environment 'a-long-name' (games 1.2)  DataPacker 'decoder_only' (posttrain 0.1)  nothing installed
           fix: rl.data.packer: choose a packer that implements extend(ids, messages), or a single-turn environment
  fix:   do what stands under each line; posttrain plugins list NAME tells what a plug-in needs and provides"""


def test_the_table_is_one_for_all_with_columns_and_a_fix_for_each() -> None:
    parts = [
        Part("algorithms", "nft", "posttrain 0.1.0", "rl.objective.name", Declared(needs=("binary_rewards",))),
        Part("envs", "a-long-name", "games 1.2", "environments[0].name", Declared(needs=("multi_turn",))),
        Part("envs", "essays", "lab-envs 2.0", "environments[1].name", Declared(needs=("images",), lacks=("binary_rewards",))),
        Part("datapackers", "decoder_only", "posttrain 0.1", "rl.data.packer"),
    ]

    def installed(role: str) -> list[Part]:
        names = ("countdown", "arithmetic", "essays") if role == "envs" else ()
        return [part(role, name, provides=("binary_rewards",) if name != "essays" else ()) for name in names]

    exc = misfit(misfits(parts), installed)
    assert str(exc) == TABLE
    assert (exc.code, exc.exit_code) == ("misfit", 2)
    assert [problem.path for problem in exc.problems] == ["environments[1].name", "rl.data.packer", "rl.data.packer"]  # type: ignore[attr-defined]


# --- what plug-ins say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "experiments"])
def test_the_source_tells_what_the_class_says(kind: str) -> None:
    seen = [info for info in discover(kind) if info.builtin and not info.card.missing]
    assert seen
    for info in seen:
        assert info.card.declared == declared(kind, resolve(kind, info.full_name)), info.name


def test_what_the_built_ins_say() -> None:
    def said(kind: str) -> dict[str, Declared]:
        return {info.name: info.card.declared for info in discover(kind) if info.builtin}

    envs, algorithms, packers = said("envs"), said("algorithms"), said("datapackers")
    assert "binary_rewards" in algorithms["nft"].needs and "binary_rewards" not in algorithms["grpo"].needs
    assert all("groups" in one.needs for one in algorithms.values())
    assert [name for name, one in algorithms.items() if "pairs" in one.provides] == ["dpo"]
    assert [name for name, one in envs.items() if "no_sampling" in one.needs] == ["preference"]
    assert packers["decoder_only"].provides == ("multi_turn",) and "pairs" in packers["preference"].provides
    assert "tensor_parallel" in said("engines")["vllm"].provides and "tensor_parallel" not in said("engines")["hf"].provides


@pytest.fixture
def classes(tmp_path: Path) -> Callable[[str], Any]:
    (tmp_path / "fits.py").write_text(FILE)
    return lambda name: f"{tmp_path}/fits.py:{name}"


def test_a_class_adds_to_its_bases_and_an_object_to_its_class(classes) -> None:
    cls = resolve("engines", classes("Whole"))
    assert declared("engines", cls) == Declared((), ("inflight_updates", "rollout_logprobs"), ("partial_rollouts",))
    assert declared("envs", resolve("envs", classes("Guessing"))).needs == ("multi_turn",)
    plain, weighted = load("envs", "countdown"), load("envs", "countdown", format_weight=0.1)
    assert declared("envs", plain).provides == ("binary_rewards",)
    assert declared("envs", weighted) == Declared((), (), ("binary_rewards",))


NAMED = [
    ('needs = ("imagse",)', "needs 'imagse', which is no capability; did you mean 'images'?", "choose of between_processes"),
    ('provides = ("qqqq",)', "provides 'qqqq', which is no capability", "choose of"),
    ('provides = ("images",)', "provides 'images', which is asked of the DataPacker and engine", "remove it from provides"),
    ('lacks = ("tensor_parallel",)', "lacks 'tensor_parallel', which is asked of the engine and the grid", "remove it"),
    ('needs = "images"', "has needs = 'images', not a tuple of names", 'write a tuple: needs = ("images",)'),
    ("provides = (1,)", "has provides = (1,), not a tuple of names", "write a tuple"),
]


@pytest.mark.parametrize(("line", "what", "fix"), NAMED)
def test_a_name_that_is_none_is_refused_when_the_plug_in_is_selected(line, what, fix, fake_distribution) -> None:
    text = f"from posttrain import Environment\nclass Env(Environment):\n    {line}\n"
    text += "    def dataset(self, split): return []\n    def compute_reward(self, state): return 0.0\n"
    module = f"named_{abs(hash(line))}"
    fake_distribution("rl-named", points={"posttrain.envs": {"named": f"{module}:Env"}}, files={f"{module}.py": text})
    with pytest.raises(PluginError) as caught:
        load_config([*SUMS, "environments=[{name: named}]"])
    exc = caught.value
    assert exc.code == "plugin-capability" and what in exc.message and fix in exc.fix and "(rl-named 1.0)" in exc.message
    assert exc.where.startswith("environments[0].name") and exc.cause.endswith(f"{module}.py:2")
    (info,) = [info for info in discover("envs") if info.name == "named"]
    finding = look(info)  # the source tells, too, where it is a tuple of names
    assert finding.problem == (exc.message.partition("(rl-named 1.0) ")[2] if "which is" in what else "")


def test_a_name_that_an_object_says_is_checked_as_well(classes) -> None:
    env = load("envs", classes("Wrong"))
    assert capability_fault("envs", type(env)) is None
    with pytest.raises(PluginError, match=r"needs 'imgaes', which is no capability; did you mean 'images'\?") as caught:
        refuse_misfits(load_config(SUMS).config, {"environments[0].name": env})
    assert caught.value.where == "environments[0].name" and caught.value.code == "plugin-capability"


# --- in a run ---------------------------------------------------------------------------------------------------------


def refused(*overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        load_config([*SUMS, *overrides])
    return [(problem.path, problem.what) for problem in caught.value.problems]  # type: ignore[attr-defined]


def env(classes: Callable[[str], str], name: str) -> str:
    return f"environments=[{{name: '{classes(name)}'}}]"


def hook(classes: Callable[[str], str], name: str) -> str:
    return f"hooks=[{{name: '{classes(name)}'}}]"


def cases() -> Iterator[tuple[str, Callable[[Callable[[str], str]], list[str]], list[tuple[str, str]]]]:
    yield "images", lambda c: [env(c, "Pictures")], [("rollout.engine", "needs images")]
    yield (
        "images, with a packer",
        lambda c: [env(c, "Pictures"), "rl.data.packer=decoder_only"],
        [("rl.data.packer", "needs images"), ("rollout.engine", "needs images")],
    )
    yield (
        "turns that the packer cannot extend",
        lambda c: [env(c, "Guessing"), f"rl.data.packer={c('Closed')}"],
        [("rl.data.packer", "needs multi_turn")],
    )
    yield (
        "graded rewards",
        lambda c: [env(c, "Graded"), "rl.objective.name=nft", "rl.group_size=4"],
        [("environments[0].name", "needs binary_rewards")],
    )
    yield (
        "an engine that aborts nothing",
        lambda c: [hook(c, "Watching"), f"rollout.engine={c('Whole')}"],
        [("rollout.engine", "needs partial_rollouts")],
    )
    yield (
        "several ranks",
        lambda c: [hook(c, "Wide")],
        [("rollout.engine", "needs tensor_parallel"), ("grid.backend", "needs tensor_parallel")],
    )
    yield (
        "weights into another process",
        lambda c: ["rollout.engine=vllm", "weights.transport=inproc"],
        [("weights.transport", "needs between_processes")],
    )
    yield (
        "weights between actors",
        lambda c: ["grid.backend=ray", "weights.transport=inproc"],
        [("weights.transport", "grid.backend=ray needs between_processes")],
    )
    yield "pairs", lambda c: ["rollout.engine=none", "rl.group_size=2"], [
        ("rl.objective.name", "needs pairs"),
        ("environments[0].name", "needs pairs"),
    ]  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), [case[1:] for case in cases()], ids=[case[0] for case in cases()])
def test_what_does_not_fit_is_told_at_its_key_before_anything_starts(overrides, expected, classes) -> None:
    found = refused(*overrides(classes))
    assert len(found) == len(expected)
    for (path, what), (at, says) in zip(found, expected, strict=True):
        assert path == at and says in what


def test_what_is_not_said_is_no_fault(classes) -> None:
    """An environment that says nothing of its rewards may be right for nft; a run sees."""
    load_config([*SUMS, env(classes, "Plain"), "rl.objective.name=nft"])
    load_config([*SUMS, hook(classes, "Watching")])


def test_a_key_that_has_a_problem_already_is_not_told_twice(classes) -> None:
    assert [path for path, _ in refused("rl.group_size=1", env(classes, "OfTwo"))] == ["rl.group_size"]
    with pytest.raises(ConfigError) as caught:
        load_config([*SUMS, "rollout.tensor_parallel_size=2"])
    assert caught.value.code == "E4"  # alone
    found = refused("rollout.tensor_parallel_size=2", "grid.ranks=2", "grid.backend=ray")
    assert ("rollout.engine", "rollout.tensor_parallel_size=2 needs tensor_parallel") in [
        (path, what.partition(" (")[0]) for path, what in found
    ]


def test_groups_that_an_environment_needs(classes) -> None:
    found = refused(env(classes, "OfTwo"), "rl.group_size=1", "rl.objective.name=cispo")
    assert [path for path, _ in found] == ["rl.group_size"]


def test_the_table_stands_among_the_other_problems(classes) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*SUMS, env(classes, "Pictures"), "rl.group_sice=3"])
    text = str(caught.value)
    assert "rl.group_sice: unknown key" in text and "  - the selected parts do not fit together: 1 need is not met" in text
    assert "environment 'fits.py:Pictures'" in text and "rollout.engine: choose an engine that provides it" in text


def test_options_decide_and_a_dry_run_tells(capsys, monkeypatch, tmp_path) -> None:
    """Nothing is read and nothing made: the objects are compared before the data."""
    from posttrain.data import dataset

    monkeypatch.setattr(dataset, "build_sampler", lambda *_: pytest.fail("data was read first"))
    monkeypatch.chdir(tmp_path)
    words = ["experiment=arithmetic_nft", "environments=[{name: countdown, options: {format_weight: 0.1}}]"]
    assert isinstance(load_config(words), LoadedConfig)  # classes alone do not tell
    assert main(["train", "--dry-run", *words]) == 2
    text = capsys.readouterr().err
    assert "binary_rewards  algorithm 'nft' (posttrain " in text and "environment 'countdown' (posttrain " in text
    assert "environments[0].name: use an environment whose rewards are 0 or 1" in text
    assert not list(tmp_path.iterdir())


def test_what_an_algorithm_needs_with_its_options() -> None:
    def needs(name: str, **options: Any) -> set[str]:
        return set(algorithm_needs(build_objective(name, group_size=4, **options).algorithm))

    assert needs("grpo") == set() and needs("grpo", n_mini=2) == {"old_logprobs"}
    assert needs("grpo", kl_coef=0.1) == {"reference"} and needs("dpo") == {"reference"}
    assert needs("grpo", use_tis=True) == needs("grpo", seq_is_masking=True) == {"rollout_logprobs"}
    assert needs("grpo", ppo_clip_ref_logprobs="rollout") == {"rollout_logprobs"}


def test_an_engine_without_logprobs_is_refused_where_they_are_weighed() -> None:
    class Mute(resolve("engines", "hf")):  # type: ignore[misc]
        lacks = ("rollout_logprobs",)

        def __init__(self) -> None:
            pass

    config = load_config([*SUMS, "rl.objective.use_tis=true"]).config
    made = {"rollout.engine": Mute(), "rl.objective.name": build_objective("grpo", group_size=4, use_tis=True).algorithm}
    with pytest.raises(ConfigError, match="needs are not met|need is not met") as caught:
        refuse_misfits(config, made)
    assert "rollout_logprobs" in caught.value.cause and "vllm" in caught.value.cause
    refuse_misfits(config, made | {"rl.objective.name": build_objective("grpo", group_size=4).algorithm})


def test_what_else_would_do_is_read_from_what_is_installed() -> None:
    assert [one.name for one in offers("engines") if "tensor_parallel" in one.declared.provides] == ["vllm"]
    assert "none" in [one.name for one in offers("engines") if "no_sampling" in one.declared.provides]
    assert [one.name for one in offers("grid")] == ["grid.backend=ray"] and list(offers("run")) == []


def test_the_source_tells_it_of_others_whose_base_has_its_short_name(fake_distribution) -> None:
    text = "from posttrain import Engine\nclass Mine(Engine):\n    lacks = ('inflight_updates',)\n"
    fake_distribution("rl-mine", points={"posttrain.engines": {"mine": "short_mine:Mine"}}, files={"short_mine.py": text})
    (info,) = [info for info in discover("engines") if info.name == "mine"]
    assert info.card.declared == Declared((), ("partial_rollouts", "rollout_logprobs"), ("inflight_updates",))


def test_a_length_penalty_makes_rewards_of_0_and_1_something_else() -> None:
    rl = RLConfig(overlong_penalty_factor=0.5, objective=Plugin(name="nft"))
    (found,) = misfits(selected(RunConfig(rl=rl)))
    assert (found.need, found.where) == ("binary_rewards", "rl.overlong_penalty_factor")
    assert str(found.of) == "rl.overlong_penalty_factor=0.5" and "set it to 0" in found.fix
    assert not misfits(selected(RunConfig(rl=RLConfig(objective=Plugin(name="nft")))))
