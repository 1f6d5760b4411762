"""Episodes of several turns in the loop: who asks the engine when, what ends an episode, and real runs that are reproducible."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_runs import start
from test_batches import PlainPacker
from test_rollouts import Bytes

from posttrain.data.dataset import Draw
from posttrain.data.environment import Environment
from posttrain.loop import pending
from posttrain.loop.rollouts import Rollouts
from posttrain.rollout.scoring import Scorer
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import ROW, read_rollouts, to_groups
from posttrain.types import Completion, Group, Request, Sampling, Trajectory

GAMES = Path(__file__).parent / "turn_games.py"


class Count(Environment):
    """Counts the turns down from what the row says."""

    max_turns = 5

    def dataset(self, split: Any) -> Any:
        return []

    def format_prompt(self, task: Any) -> Any:
        return "go"

    async def env_response(self, state: Any) -> Any:
        await asyncio.sleep(state.task.get("waits", 0))
        if state.task.get("fails"):
            raise ValueError("no board")
        return None if state.turn > state.task["turns"] else [{"role": "user", "content": state.task.get("says", "on")}]

    async def compute_reward(self, state: Any) -> float:
        return float(state.turn)


class Engine:
    """Says `ok`; remembers each call, and stops what is aborted."""

    def __init__(self, hangs: bool = False) -> None:
        self.calls: list[list[Request]] = []
        self.aborted: list[str] = []
        self._hangs, self._stopped = hangs, asyncio.Event()

    async def generate(self, requests: Any) -> Any:
        self.calls.append(list(requests))
        for request in requests:
            for index in range(request.n):
                if self._hangs and "@" in request.id:
                    await self._stopped.wait()
                    yield Completion(request.id, index, [111], [-0.1], [0], "aborted")
                else:
                    yield Completion(request.id, index, [111, 107], [-0.1, -0.2], [len(self.calls)] * 2, "stop")

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._stopped.set()


def draws(*tasks: dict[str, Any]) -> list[Draw]:
    return [Draw(index, 0, "count", f"r{index}", task) for index, task in enumerate(tasks)]


def play(engine: Engine, asked: list[Draw], *, n: int = 2, in_step: bool = True, limit: int = 64, **env: Any) -> list[Group]:
    environments = {"count": Count()}

    async def work() -> list[Group]:
        scorer = Scorer(environments, env_timeout_s=env.get("env_timeout_s", 5.0))
        made = Rollouts(engine, Bytes(), environments, scorer, limit, 0, in_step=in_step)  # type: ignore[arg-type]
        if "abort_after" not in env:
            return await made.run(asked, n=n, sampling=Sampling(4))
        running = asyncio.ensure_future(made.run(asked, n=n, sampling=Sampling(4)))
        await asyncio.sleep(env["abort_after"])
        await made.abort(asked[0])
        return await asyncio.wait_for(running, 5)

    return asyncio.run(work())


def test_in_step_all_that_go_on_are_asked_in_one_call_in_order() -> None:
    engine = Engine()
    groups = play(engine, draws({"turns": 2, "waits": 0.03}, {"turns": 1}, {"turns": 2}))
    assert [[(r.id.split("/")[0][0], r.n) for r in call] for call in engine.calls] == [
        [("0", 2), ("1", 2), ("2", 2)], [("0", 1), ("0", 1), ("1", 1), ("1", 1), ("2", 1), ("2", 1)],
        [("0", 1), ("0", 1), ("2", 1), ("2", 1)],
    ]  # fmt: skip
    assert [[t.reward for t in g.trajectories] for g in groups] == [[3.0, 3.0], [2.0, 2.0], [3.0, 3.0]]
    assert groups[1].trajectories[0].weight_versions == [1, 1, -1, -1, 2, 2]


def test_freely_each_is_asked_for_as_soon_as_it_can_be() -> None:
    engine = Engine()
    play(engine, draws({"turns": 1, "waits": 0.05}, {"turns": 3}), n=1, in_step=False)
    assert [call[0].id for call in engine.calls[1:]] == ["1:count:r1/0@1", "1:count:r1/0@2", "1:count:r1/0@3", "0:count:r0/0@1"]
    assert [call[0].priority for call in engine.calls] == [0, -1, -2, -3, -1], "who has been at it longer goes first"


def test_every_turn_of_every_sample_has_noise_of_its_own_which_depends_on_its_place_alone() -> None:
    seeds = []
    for in_step in (True, False):
        engine = Engine()
        play(engine, draws({"turns": 2}, {"turns": 2}), in_step=in_step)
        seeds.append({request.id: request.seed for call in engine.calls for request in call})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == len(seeds[0])


def test_what_ends_an_episode_is_said() -> None:
    engine = Engine()
    asked = draws({"turns": 9}, {"turns": 9, "says": "x" * 60}, {"turns": 0}, {"turns": 1, "fails": True})
    most, context, done, failed = (g.trajectories[0] for g in play(engine, asked, n=1))
    assert (most.info["stop_reason"], most.reward, len(most.turns)) == ("max_turns", 5.0, 9)
    assert most.messages[-1]["content"] == "on", "what it said last is among the messages, though no token of it"
    assert (context.info["stop_reason"], context.truncated, context.reward) == ("context", True, 1.0)
    assert context.mask == [True, True]
    assert (done.info["stop_reason"], done.reward) == ("done", 1.0)
    assert failed.reward is None and failed.info["cause"] == "env_raised" and "no board" in failed.info["error"]


@pytest.mark.parametrize("in_step", [True, False])
def test_an_answer_that_takes_too_long_leaves_the_sample_out(in_step: bool) -> None:
    (group,) = play(Engine(), draws({"turns": 1, "waits": 9}), env_timeout_s=0.1, in_step=in_step)
    assert {t.info["cause"] for t in group.trajectories} == {"env_timeout"}
    assert "rollout.env_timeout_s" in group.trajectories[0].info["error"]


@pytest.mark.parametrize("waits, hangs", [(9.0, False), (0.0, True)], ids=["in the environment", "in the engine"])
def test_an_abort_ends_an_episode_wherever_it_is(waits: float, hangs: bool) -> None:
    engine = Engine(hangs=hangs)
    (group,) = play(engine, draws({"turns": 3, "waits": waits}), in_step=False, abort_after=0.2)
    assert {t.finish_reason for t in group.trajectories} == {"aborted"} and {t.reward for t in group.trajectories} == {None}
    if hangs:
        assert {"0:count:r0/0@1", "0:count:r0/1@1"} <= set(engine.aborted)


def test_an_engine_that_loses_a_later_turn_ends_the_run() -> None:
    class Loses(Engine):
        async def generate(self, requests: Any) -> Any:
            async for done in super().generate([r for r in requests if r.id != "0:count:r0/1@1"]):
                yield done

    with pytest.raises(Exception, match="no completion for 1 sample"):
        play(Loses(), draws({"turns": 2}))


# --- rows of split episodes -------------------------------------------------------------------------------------------


def split() -> Trajectory:
    def row(name: str, version: int, **info: Any) -> Trajectory:
        return Trajectory([7, 2], [3, 4], [True] * 2, [-0.1, -0.2], [version] * 2, "stop", 1.0, {}, "0:e:r", name, "e", info=info)

    last = row("0:e:r/0", 2)
    last.earlier = [row("0:e:r/0#0", 1, **{ROW: 0})]
    return last


def test_a_split_episode_comes_back_from_rollout_files_and_checkpoints(tmp_path: Path) -> None:
    from posttrain.tracking.rollouts import write_rollouts

    group = Group("0:e:r", {"id": "r"}, [split(), split()])
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts", 1, [group], advantages={"0:e:r/0": 0.5, "0:e:r/0#0": 0.5})
    rows = read_rollouts(tmp_path)
    assert [row["sample_id"] for row in rows] == ["0:e:r/0#0", "0:e:r/0"] * 2 and {row["advantage"] for row in rows} == {0.5}
    (back,) = to_groups(rows)
    assert len(back.trajectories) == 2
    assert [[r.weight_versions for r in t.rows] for t in back.trajectories] == [[[1, 1], [2, 2]]] * 2
    plain = pending._trajectory(json.loads(json.dumps(pending._plain(split()))))
    assert plain == split()


def test_the_rows_of_a_split_episode_train_with_its_advantage_and_count_as_rows() -> None:
    from posttrain import build_objective
    from posttrain.loop.batches import make_batch
    from posttrain.loop.cohort import Cohort
    from posttrain.loop.staleness import staleness_metrics

    other = Trajectory([7, 2], [3], [True], [-0.1], [2], "stop", 0.0, {}, "0:e:r", "0:e:r/1", "e")
    objective = build_objective("grpo", group_size=2)
    batch = make_batch(Cohort(3, [], [Group("0:e:r", {}, [split(), other])]), objective, PlainPacker(), discard_tied=True)
    assert [(row.id, round(row.advantage, 3), row.reward, row.prefix) for row in batch.rows] == [
        ("0:e:r/0#0", 0.707, 1.0, 0), ("0:e:r/0", 0.707, 1.0, 0), ("0:e:r/1", -0.707, 0.0, 2),
    ]  # fmt: skip
    assert batch.metrics["train/effective_batch"] == 3 and batch.metrics["tokens/generated"] == 5
    assert staleness_metrics([split()], 3)["staleness/max"] == 1.0


# --- real runs --------------------------------------------------------------------------------------------------------


def game(name: str, **options: Any) -> str:
    return f"environments=[{{name: '{GAMES}:{name}', label: game, options: {{operations: ['+'], largest: 19, test_size: 80}}}}]"


SIZES = ("rollout.max_model_len=64", "rl.steps=3", "validation.prompts=0")


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("outputs"))


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    return Path(start(root, game("Again"), *SIZES).run)


STEADY = ("step", "reward/mean", "loss", "grad_norm", "tokens/trained", "rollout/turns/mean")


def steady(run: Path) -> list[tuple[Any, ...]]:
    return [tuple(row.get(key) for key in STEADY) for row in read_metrics(run)]


def test_a_run_of_several_turns_trains_what_was_sampled(whole: Path) -> None:
    rows = [row for step in (1, 2, 3) for row in read_rollouts(whole, step)]
    turns = Counter(sum(turn["role"] == "model" for turn in row["turns"]) for row in rows)
    assert turns[1] and turns[3] and max(turns) == 3
    for row in rows:
        assert all((version == row["step"] - 1) == own for version, own in zip(row["weight_versions"], row["mask"], strict=True))
        assert (row["reward"] > 0) == (row["info"]["stop_reason"] == "done")
    assert all(row["policy/ratio_min"] > 1 - 1e-4 for row in read_metrics(whole)), "engine and trainer agree, turn by turn"


def test_it_is_reproducible_to_the_bit_whenever_the_environment_answers(root: Path, whole: Path) -> None:
    """The answers come on the event loop after random times, and with training running ahead."""
    late = start(root, game("Late"), *SIZES).run
    assert steady(Path(late)) == steady(whole)
    assert [r["token_ids"] for r in read_rollouts(late, 3)] == [r["token_ids"] for r in read_rollouts(whole, 3)]


def test_it_goes_on_from_a_checkpoint_with_episodes_that_wait_for_their_batch(root: Path) -> None:
    ahead = (game("Late"), *SIZES, "rollout.max_async_rollout=1", "checkpoint.every=1")
    run = Path(start(root, *ahead).run)
    before = steady(run)
    start(root, resume=run / "checkpoints" / "step_1")
    assert steady(run) == before


def test_in_order_of_arrival_every_turn_has_the_version_that_sampled_it(root: Path) -> None:
    run = start(root, game("Late"), *SIZES, "rollout.max_async_rollout=1", "loop.commit_order=arrival", "rl.steps=4").run
    rows = [row for step in range(1, 5) for row in read_rollouts(run, step)]
    assert all((v >= 0) == own for row in rows for v, own in zip(row["weight_versions"], row["mask"], strict=True))
    assert {row["staleness/max"] for row in read_metrics(run)} <= {0.0, 1.0}


def test_a_failing_environment_leaves_out_the_sample_and_nothing_else(root: Path) -> None:
    run = start(root, game("Broken"), *SIZES).run
    rows = [row for step in (1, 2, 3) for row in read_rollouts(run, step)]
    errors = Counter(row["info"].get("error", "").split(":")[0] for row in rows)
    assert errors["ValueError"] and errors["TypeError"] and errors[""]
    assert all((row["reward"] is None) == ("error" in row["info"]) for row in rows)


def test_one_episode_is_shown_token_by_token(whole: Path) -> None:
    from io import StringIO

    from rich.console import Console

    from posttrain.tracking.episode_table import show_episode

    rows = [row for row in read_rollouts(whole, 2) if sum(turn["role"] == "model" for turn in row["turns"]) > 1]
    out = StringIO()
    show_episode(whole, rows[0]["sample_id"], 2, spell=lambda ids: f"t{ids[0]}", console=Console(file=out, width=100))
    lines = [line.split() for line in out.getvalue().splitlines()]
    tokens = [line for line in lines if line and line[0].isdigit()]
    ids = [*rows[0]["prompt_ids"], *rows[0]["token_ids"]]
    assert [int(line[1]) for line in tokens] == ids and [line[2] for line in tokens] == [f"'t{i}'" for i in ids]
    trained = [len(line) > 4 and line[4] == "yes" and line[5] == "1" for line in tokens]
    assert trained == [False] * len(rows[0]["prompt_ids"]) + rows[0]["mask"]
    with pytest.raises(Exception, match="there is no sample 'x'"):
        show_episode(whole, "x")
