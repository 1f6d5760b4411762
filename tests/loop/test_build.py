"""What a run refuses while it is built, before a model loads."""

import pytest

from posttrain.config.load import load_config
from posttrain.errors import ConfigError
from posttrain.loop.build import build_environments

ENV = """
from posttrain.data.environment import Environment

class Single(Environment):
    def dataset(self, split): return []
    def compute_reward(self, state): return 0.0

class Guessing(Single):
    def env_response(self, state): return [{"role": "user", "content": "higher"}]
"""


@pytest.fixture
def environments(tmp_path):
    (tmp_path / "turns.py").write_text(ENV)

    def build(*names):
        listed = ", ".join(f"{{name: '{tmp_path}/turns.py:{name}'}}" for name in names)
        return build_environments(load_config(["experiment=arithmetic_grpo", f"environments=[{listed}]"]).config)

    return build


def test_an_environment_of_several_turns_is_refused_by_name(environments):
    assert len(environments("Single")) == 1
    with pytest.raises(ConfigError, match=r"environment '.*Guessing' .* multi-turn episodes are not driven yet") as caught:
        environments("Single", "Guessing")
    assert caught.value.where == "environments[1].name" and "Guessing overrides env_response" in caught.value.cause
    assert "single-turn" in caught.value.fix
