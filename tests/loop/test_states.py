"""States of plug-ins in checkpoints: a resumed run equals the uninterrupted one, and what does not fit is refused or said.

The algorithm and the environment are those of the page on writing plug-ins, word for word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import posttrain
from posttrain import Hook
from posttrain.errors import DataError, PluginError
from posttrain.loop import checkpoint
from posttrain.loop.controller import Controller
from posttrain.loop.states import load, save, training_keepers
from posttrain.plugins import resolve
from posttrain.plugins.state import Keeper, SavedState, plain, source_digest
from posttrain.testing import AlgorithmContract, EnvContract
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.tracking.metrics import read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "write-a-plugin.md"
STEADY = ("step", "reward/mean", "loss", "grad_norm", "tokens/trained", "hook/Best/best")


class Best(Hook):
    """The best reward of the run so far."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.best = 0.0

    def metrics(self, groups):
        self.best = max([self.best, *(t.reward for group in groups for t in group.trajectories)])
        return {"best": self.best}

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and the files of the page; any answer with a 1 is right, so that random weights are right at times."""
    folder = tmp_path_factory.mktemp("states")
    write_tiny_model(folder / "model")
    for block in re.findall(r"^```python\n(# (?:running|rising)\.py\n.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE):
        (folder / block.partition("\n")[0][2:]).write_text(block)
    easy = "from rising import Rising\n\nclass Easy(Rising):\n    def compute_reward(self, state):\n"
    (folder / "easy.py").write_text(easy + "        return float('1' in state.completion)\n")
    return folder


@pytest.fixture(scope="module")
def start(site: Path) -> Callable[..., Any]:
    def run(resume: Any = None, hooks: Any = None, algorithm: str = "running.py:Running", **settings: Any) -> Any:
        hooks = [Best()] if hooks is None else hooks
        if resume is not None:
            return posttrain.train(resume=resume, hooks=hooks, **settings)
        return posttrain.train(
            model=str(site / "model"), environments=[{"name": f"{site}/easy.py:Easy"}], hooks=hooks, run_dir=site,
            **{
                "rl": {"steps": 4, "group_size": 4, "batch_per_replica": 16}, "rl.objective.name": f"{site}/{algorithm}",
                "rollout": {"max_tokens": 8, "max_model_len": 64, "reward_workers": 1}, "rl.discard_group_zero_advantage": False,
                "rl.optimizer.lr": 0.01, "validation.prompts": 4, "checkpoint.every": 2, "checkpoint.keep_last": None,
                "grid": {"threads": 1}, "tracking": {"display": "none"}, **settings,
            },
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def whole(start: Callable[..., Any]) -> Path:
    """An undisturbed run of four steps."""
    return start().run  # type: ignore[no-any-return]


@pytest.fixture
def crashed(start: Callable[..., Any], site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that died after its third step; its last checkpoint is of step 2."""

    class Crash(BaseException):
        pass

    async def dying(self: Controller, admitted: Any) -> Any:
        if admitted.batch.step == 4:
            await self.checkpoints.written()
            raise Crash
        return await original(self, admitted)

    original, before = Controller._train, set(site.iterdir())
    monkeypatch.setattr(Controller, "_train", dying)
    with pytest.raises(Crash):
        start()
    monkeypatch.undo()
    (run,) = [path for path in set(site.iterdir()) - before if (path / "config.yaml").exists()]
    return run


def rows(run: Path) -> list[Any]:
    return [[row[key] for key in STEADY] for row in read_metrics(run)]


def last(run: Path) -> checkpoint.Checkpoint:
    return checkpoint.find(run / "checkpoints")[-1]


def states(run: Path) -> dict[str, Any]:
    return {saved.name.rpartition(":")[2]: saved.state for saved in last(run).plugin_states()}


def weights(run: Path) -> bytes:
    return (last(run).policy / "model.safetensors").read_bytes()


def test_a_crashed_run_with_states_resumes_to_the_same_bits(start, whole: Path, crashed: Path) -> None:
    assert start(resume=crashed).steps_done == 2
    assert rows(crashed) == rows(whole) and weights(crashed) == weights(whole)
    assert states(crashed) == states(whole) and set(states(whole)) == {"Running", "Easy", "Best"}
    assert states(whole)["Running"]["count"] == 64 and states(whole)["Easy"]["right"] >= 20 and states(whole)["Best"]["best"] == 1


@pytest.mark.parametrize("forgets", ["running.py:Running", "easy.py:Easy"])
def test_without_its_state_the_rest_is_another_run(start, site, whole: Path, crashed: Path, forgets: str, monkeypatch) -> None:
    """That the test above can fail: each of the two states decides how the run goes on."""
    cls = resolve("envs" if "Easy" in forgets else "algorithms", f"{site}/{forgets}")
    monkeypatch.setattr(cls, "load_state_dict", lambda self, state: None)
    start(resume=crashed)
    assert rows(crashed)[:2] == rows(whole)[:2] and rows(crashed) != rows(whole) and weights(crashed) != weights(whole)


def test_a_damaged_state_is_refused_before_anything_is_cut(start, crashed: Path) -> None:
    file = last(crashed).path / checkpoint.LOOP_FILE
    content = json.loads(file.read_text())
    (entry,) = [entry for entry in content["plugins"] if entry["kind"] == "algorithms"]
    entry["state"]["count"] += 1
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="cannot be read") as caught:
        start(resume=crashed)
    assert "the state of algorithm" in caught.value.cause and "running.py:Running" in caught.value.cause
    assert len(read_metrics(crashed)) == 3 and not list(crashed.glob("*.superseded"))
    entry.pop("digest")
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="cannot be read"):
        start(resume=crashed)


LATE = """
from running import Running

class Late(Running):
    "Gives no state from the third step on."

    def state_dict(self):
        if self.count > 32:
            raise RuntimeError("the store is closed")
        return super().state_dict()

class Never(Running):
    def state_dict(self):
        return {"seen": {1, 2}}

class Half(Running):
    load_state_dict = None
"""


def test_a_state_that_cannot_be_saved_names_its_owner_and_older_checkpoints_stay(start, site: Path) -> None:
    (site / "late.py").write_text(LATE)
    with pytest.raises(PluginError, match=r"the state of algorithm '.*' \(late.py:Late\) cannot be saved") as caught:
        start(algorithm="late.py:Late")
    error = caught.value
    assert (error.code, error.where, error.exit_code) == ("plugin-state", "rl.objective.name", 2)
    assert re.fullmatch(r"\S+/late\.py:9: RuntimeError: the store is closed", error.cause)
    run = error.run_dir  # type: ignore[attr-defined]
    assert [c.step for c in checkpoint.find(run / "checkpoints")] == [2] and not list((run / "checkpoints").glob("tmp_*"))
    assert last(run).plugin_states()[0].state["count"] == 32


@pytest.mark.parametrize(
    ("name", "message"),
    [("Never", r"state_dict\(\)\['seen'\] is a set, not text"), ("Half", "has state_dict and no load_state_dict")],
)
def test_what_can_never_be_saved_is_told_before_the_model_loads(start, site, name: str, message: str, monkeypatch) -> None:
    from posttrain.policy.policy import Policy

    monkeypatch.delattr(Policy, "__init__")
    (site / "late.py").write_text(LATE)
    with pytest.raises(PluginError, match=message):
        start(algorithm=f"late.py:{name}")


# --- what a resume compares ---------------------------------------------------------------------------------------------


class Mean:
    """Something with a state."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def state_dict(self) -> Mapping[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


class Renamed(Mean):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["total"]


class Owned(Keeper):
    """A keeper of a distribution that need not be installed."""

    def __init__(self, kind: str, name: str, value: Any = None, owner: tuple[str, str] = ("acme-rl", "1.0")) -> None:
        super().__init__(kind, name, Mean(1.0) if value is None else value)
        self.owner = owner  # type: ignore[misc]


ALGORITHM, ENV, HOOK = (Owned(*who) for who in (("algorithms", "mean"), ("envs", "sums"), ("hooks", "best")))
SAVED: list[SavedState] = save([ALGORITHM, ENV], [HOOK], {"best": {"value": 1.0}})


def resumed(*now: Keeper, saved: list[SavedState] = SAVED) -> tuple[dict[str, Any], list[str]]:
    training = [one for one in now if one.kind != "hooks"]
    return load(training, [one for one in now if one.kind == "hooks"], saved, Path("step_2"))


def test_every_part_that_training_depends_on_is_asked() -> None:
    config = posttrain.load_config(["experiment=arithmetic_grpo"]).config
    (environment,) = config.environments
    objective: Any = SimpleNamespace(name="grpo", algorithm=Mean())
    parts: tuple[Any, ...] = (objective, {environment.name: Mean()}, Mean())
    found = training_keepers(config, *parts)
    assert [(keeper.kind, keeper.name) for keeper in found] == [
        ("algorithms", "grpo"), ("envs", environment.name), ("datapackers", "Mean")
    ]  # fmt: skip
    objective.algorithm = object()
    assert [keeper.kind for keeper in training_keepers(config, *parts)] == ["envs", "datapackers"]


def test_what_fits_is_taken_without_a_word() -> None:
    algorithm, env = Owned("algorithms", "mean", Mean()), Owned("envs", "sums", Mean())
    assert resumed(algorithm, env, HOOK) == ({"best": {"value": 1.0}}, [])
    assert algorithm.value.value == env.value.value == 1.0


SAME = {"algorithms": ALGORITHM, "envs": ENV, "hooks": HOOK}
OTHERS: dict[str, tuple[Keeper | None, str, str]] = {
    "another version": (Owned("algorithms", "mean", owner=("acme-rl", "2.0")), "said",
                        "algorithm 'mean' (acme-rl 2.0) goes on from the checkpoint, but its state was saved by version 1.0"),
    "another distribution": (Owned("algorithms", "mean", owner=("other", "1.0")), "refused",
                             "that is algorithm 'mean' (acme-rl 1.0)\n      fix: pip install 'acme-rl==1.0'"),
    "it keeps none now": (None, "refused", "algorithm 'mean' (acme-rl 1.0) left a state, and nothing in this run takes it"),
    "it does not take it": (Owned("algorithms", "mean", Renamed()), "refused",
                            f"{__file__}:{Renamed.load_state_dict.__code__.co_firstlineno + 1}: KeyError: 'total'\n"
                            "      fix: correct its load_state_dict"),
    "a newer version does not take it": (Owned("algorithms", "mean", Renamed(), ("acme-rl", "2.0")), "refused",
                                         "fix: pip install 'acme-rl==1.0'"),
    "hook: another version": (Owned("hooks", "best", owner=("acme-rl", "2.0")), "said", "was saved by version 1.0"),
    "hook: another distribution": (Owned("hooks", "best", owner=("other", "1.0")), "said", "that is hook 'best' (acme-rl 1.0)"),
    "hook: not in this run": (None, "said", "hook 'best' (acme-rl 1.0) left a state, and nothing in this run takes it"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_what_differs_is_refused_or_said(what: str) -> None:
    other, outcome, text = OTHERS[what]
    kind = "hooks" if what.startswith("hook") else "algorithms"
    now = [one for one in {**SAME, kind: other}.values() if one is not None]
    if outcome == "said":
        of_hooks, (note,) = resumed(*now)
        assert text in note and ("best" in of_hooks) == ("version" in what)
        return
    with pytest.raises(PluginError) as caught:
        resumed(*now)
    assert text in str(caught.value) and caught.value.code == "plugin-state"


def test_a_state_that_the_checkpoint_lacks_is_refused_and_of_a_hook_said() -> None:
    assert resumed(ENV, ALGORITHM, HOOK, saved=SAVED[:2])[1] == [
        "hook 'best' (acme-rl 1.0) keeps a state, and the checkpoint has none of it"
    ]
    with pytest.raises(PluginError, match="environment 'sums' .* keeps a state, and the checkpoint has none of it"):
        resumed(ENV, ALGORITHM, HOOK, saved=[SAVED[0], SAVED[2]])


def test_everything_is_told_on_one_screen() -> None:
    now = [Owned("algorithms", "mean", Renamed(), ("acme-rl", "1.1")), Owned("envs", "sums", owner=("other", "2.0"))]
    with pytest.raises(PluginError) as caught:
        resumed(*now)
    lines = str(caught.value).splitlines()
    told = [re.sub(" '.*", "", line) for line in lines if line.startswith("  - ")]
    assert told == ["  - algorithm", "  - environment", "  - also: algorithm", "  - also: hook"]
    assert len(lines) <= 24 and isinstance(caught.value.__cause__, KeyError)


def test_a_changed_source_is_said(posttrain_plugins: Any) -> None:
    source = "from posttrain import Hook\nclass Mine(Hook):\n    def state_dict(self): return {}\n    def step_end(self): ...\n"
    points = {"posttrain.hooks": {"mine": "state_source:Mine"}}
    where = posttrain_plugins.install("acme-hooks", files={"state_source.py": source}, points=points, version="1.0")
    keeper = Keeper("hooks", "mine", resolve("hooks", "mine")(), ref="mine")
    assert keeper.owner == ("acme-hooks", "1.0")
    saved = [keeper.saved({})]
    assert load([], [keeper], saved, Path()) == ({"mine": {}}, [])
    (where / "state_source.py").write_text(source + "# better\n")
    assert load([], [keeper], saved, Path())[1] == [], "what runs is what was loaded, whatever the file has become"
    source_digest.cache_clear()  # another process
    assert load([], [keeper], saved, Path())[1] == [
        "hook 'mine' (acme-hooks 1.0) goes on from the checkpoint, but its source is not the one that saved its state"
    ]


@pytest.mark.parametrize(("state", "at"), [({"a": [0, {"b": {1}}]}, "['a'][1]['b'] is a set"), ({"a": {2: 0}}, "has the key 2")])
def test_what_json_cannot_hold_is_named_by_its_place(state: Any, at: str) -> None:
    with pytest.raises(TypeError) as caught:
        plain(state)
    assert at in str(caught.value)


# --- the plug-ins of the page ---------------------------------------------------------------------------------------------


class TestRunning(AlgorithmContract):
    @pytest.fixture
    def objective(self, site: Path) -> Any:
        return posttrain.build_objective(f"{site}/running.py:Running", group_size=4)


class TestRising(EnvContract):
    @pytest.fixture
    def env(self, site: Path) -> Any:
        return posttrain.plugins.load("envs", f"{site}/rising.py:Rising")

    def gold(self, row: Mapping[str, Any]) -> str | None:
        return str(row["answer"])
