"""From draws to scored groups, with an engine and a scorer that need no model."""

import asyncio

import pytest

from posttrain.data.dataset import Draw
from posttrain.data.environment import Environment, episode
from posttrain.data.packer import DataPacker
from posttrain.data.special_tokens import SpecialTokens
from posttrain.errors import DataError, PackerError
from posttrain.loop.rollouts import Rollouts
from posttrain.types import Completion, Reward, Sampling


class Echo(Environment):
    """Asks for what the row says, in the form that the row names."""

    def dataset(self, split):
        return []

    def format_prompt(self, task):
        return task["ask"]

    def compute_reward(self, state):
        return 0.0


class Bytes(DataPacker):
    """A packer of bytes: a text, or the text of its messages; ids pass as they are. BOS is 1."""

    get_policy_input = policy_compute_max_len = policy_collate_fn = None

    def __init__(self):
        super().__init__()
        self.special_tokens = SpecialTokens(prefix=(1,))

    def get_rollout_input(self, prompt):
        if isinstance(prompt, str):
            return {"prompt_ids": [1, *prompt.encode()]}
        return {"prompt_ids": [1, *prompt[0]["content"].encode()] if isinstance(prompt[0], dict) else list(prompt)}

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()


class Engine:
    async def generate(self, requests):
        for request in requests:
            for index in range(request.n):
                yield Completion(request.id, index, [111, 107], [-0.1, -0.2], [0, 0], "stop")


class Scorer:
    """Keeps what it is asked to score."""

    def __init__(self):
        self.states = []

    async def score(self, env, state):
        self.states.append(state)
        return Reward(1.0)


def rollouts(packer=None, scorer=None):
    return Rollouts(Engine(), packer, {"echo": Echo()}, scorer or Scorer(), 32, 0)


def run(made, task):
    return asyncio.run(made.run([Draw(0, 0, "echo", "r0", task)], n=2, sampling=Sampling(4)))


def test_e12_without_a_packer():
    with pytest.raises(PackerError, match="Rollouts requires a DataPacker at construction") as caught:
        rollouts(None)
    assert caught.value.code == "E12"


@pytest.mark.parametrize("ask", ["hi", [{"role": "user", "content": "hi"}], [1, 104, 105]], ids=["text", "messages", "ids"])
def test_the_scorer_sees_the_episode_that_posttrain_score_makes(ask):
    scorer = Scorer()
    (group,) = run(rollouts(Bytes(), scorer), {"ask": ask})
    assert [t.prompt_ids for t in group.trajectories] == [[1, 104, 105]] * 2 and group.rewards == [1.0, 1.0]
    alone = episode(Echo(), {"ask": ask}, "ok")
    for state in scorer.states:
        assert (state.prompt, state.messages, state.completion) == (alone.prompt, alone.messages, alone.completion)


@pytest.mark.parametrize(("ask", "cause"), [([1, 1, 104], "twice"), ([104], "miss")])
def test_e13_for_prompt_ids_of_any_packer(ask, cause):
    with pytest.raises(PackerError, match="packer tokenizer adds special tokens") as caught:
        run(rollouts(Bytes()), {"ask": ask})
    assert cause in caught.value.cause


def test_a_row_that_the_environment_cannot_ask_about_is_named():
    with pytest.raises(DataError, match="environment 'echo' cannot ask about row 'r0'") as caught:
        run(rollouts(Bytes()), {"question": "hi"})
    assert "KeyError: 'ask'" in caught.value.cause
