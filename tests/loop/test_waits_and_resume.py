import asyncio

import pytest

from posttrain.errors import ConfigError, RunAborted, WaitExpired
from posttrain.loop.resume import changed_keys, check_changes
from posttrain.loop.waits import Waits, run_together


def test_an_expired_wait_names_owner_deadline_key_and_the_other_waits():
    waits = Waits()

    async def main():
        other = asyncio.create_task(waits.bounded(asyncio.sleep(5), name="weights of version 3", owner="weight plane", timeout=5))
        await asyncio.sleep(0)
        try:
            await waits.bounded(
                asyncio.sleep(5),
                name="completions of step 4",
                owner="rollout engine hf",
                timeout=0.01,
                key="rollout.generate_timeout_s",
            )
        finally:
            other.cancel()

    with pytest.raises(WaitExpired, match="waited 0.01 s for completions of step 4") as caught:
        asyncio.run(main())
    text = str(caught.value)
    assert "owner: rollout engine hf" in text and "waits for weight plane: weights of version 3 (0.0 of 5 s)" in text
    assert "the chain of waits ends at rollout engine hf" in text and "completions of step 4 (0.0 of 0.01 s, over)" in text
    assert "rollout.generate_timeout_s" in text and isinstance(caught.value, TimeoutError)
    assert not waits.open


def test_the_first_failing_loop_ends_the_others_and_is_raised_itself():
    ended = []

    async def waiting():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waiting")

    async def failing():
        await asyncio.sleep(0)
        raise RunAborted("stop")

    with pytest.raises(RunAborted, match="stop"):
        asyncio.run(run_together(waiting(), failing()))
    assert ended == ["waiting"]


def test_changed_keys_sees_values_lists_and_absent_keys():
    old = {"rl": {"steps": 3, "objective": {"name": "grpo"}}, "environments": [{"name": "a"}]}
    new = {"rl": {"steps": 5, "objective": {"name": "grpo", "clip_low": 0.1}}, "environments": [{"name": "b"}]}
    assert [k for k, _, _ in changed_keys(old, new)] == ["environments", "rl.objective.clip_low", "rl.steps"]


def test_what_ended_a_run_for_want_of_a_budget_may_be_raised_on_resume():
    old = {"rl": {"dynamic_sampling_max_extra_rollouts": 1, "data": {"max_bad_rows": 0}, "min_informative_groups": 3}}
    more = {"rl": {"dynamic_sampling_max_extra_rollouts": 4, "data": {"max_bad_rows": 5}, "min_informative_groups": 3}}
    more["rl"]["dynamic_sampling_on_budget_exhausted"] = "proceed"
    assert check_changes(old, more)[0] == "rl.data.max_bad_rows: 0 → 5" and len(check_changes(old, more)) == 3
    with pytest.raises(ConfigError, match="rl.min_informative_groups: 3 → 2"):
        check_changes(old, {"rl": {**old["rl"], "min_informative_groups": 2}})


def test_a_resume_explains_allowed_changes_and_refuses_the_rest_at_once():
    old = {"rl": {"steps": 3, "lr_scheduler": {"name": "cosine"}}, "seed": 0, "rollout": {"temperature": 1.0}}
    longer = {"rl": {"steps": 9, "lr_scheduler": {"name": "cosine"}}, "seed": 0, "rollout": {"temperature": 1.0}}
    notes = check_changes(old, longer)
    assert notes[0] == "rl.steps: 3 → 9" and "cosine" in notes[1]
    other = {**longer, "seed": 1, "rollout": {"temperature": 0.5}}
    with pytest.raises(ConfigError, match="cannot change") as caught:
        check_changes(old, other)
    assert "seed: 0 → 1" in str(caught.value) and "rollout.temperature: 1.0 → 0.5" in str(caught.value)


def test_a_loop_that_ends_as_cancelled_has_not_done_its_work():
    async def cancelled():
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        await asyncio.sleep(1)

    async def others():
        await asyncio.Event().wait()

    with pytest.raises(RunAborted, match="was cancelled"):
        asyncio.run(run_together(cancelled(), others()))
