"""The project's own endpoint as a judge: one model says what another one's answer is worth."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from served import MODEL, Script, on_script

from posttrain.data.environment import EpisodeState
from posttrain.rollout.judge import Judge


def test_the_endpoint_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "open-sesame")

    def say(prompt: str) -> Any:
        return "I say 9." if "four" in prompt else "I say 1."

    async def work(endpoint: Any, engine: Script) -> None:
        options: dict[str, Any] = {"high": 10, "max_tokens": 64, "delay_s": 0.01, "tries": 2}
        judge = Judge(endpoint.base_url, MODEL, "2+2? {completion}", api_key_env="JUDGE_KEY", **options)
        texts = ["four", "x"] * 20
        rewards = await asyncio.gather(*(judge(text, {}, EpisodeState({}, "", seed=n)) for n, text in enumerate(texts)))
        assert [r.total for r in rewards] == [0.9, 0.1] * 20
        assert all(r.sampling.temperature == 0 for r in engine.requests)
        assert (await Judge(endpoint.base_url, MODEL, "{completion}", **options)("a", {})).info["cause"] == "judge_refused"
        wrong = await Judge(endpoint.base_url, "other", "{completion}", api_key_env="JUDGE_KEY", **options)("a", {})
        assert "the model 'other' does not exist; here is 'tiny'" in wrong.info["error"]
        engine.say = lambda prompt: RuntimeError("out of order")
        assert (await judge("a", {})).info["cause"] == "judge_unreachable"

    on_script(tmp_path, say, work, api_key="open-sesame")
