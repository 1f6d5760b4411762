"""What a worker says of a plug-in that the driver has: the same errors, with the node. That they cross Ray: test_ray_host."""

from __future__ import annotations

import pickle
import socket
from typing import Any

import pytest

from posttrain.errors import PluginError
from posttrain.placement.host import PluginRef, check_plugin

GOOD = '''
from posttrain.objective import PolicyGradient


class Mine(PolicyGradient):
    """Mine."""

    def advantages(self, rewards, groups, trained):
        raise NotImplementedError
'''
WANTED = PluginRef("algorithms", "mine", "acme-rl", "1.0")
POINTS = {"posttrain.algorithms": {"mine": "acme_worker:Mine"}}
BROKEN = {
    "import absent_words\n" + GOOD: ("plugin-dependency", "is installed but needs 'absent_words'"),
    "MOUNTED = {}['data']\n" + GOOD: ("plugin-import", "cannot be imported"),
    GOOD.replace("(PolicyGradient)", ""): ("plugin-type", "not a subclass of Algorithm"),
    GOOD.replace('"""Mine."""', "api = 9"): ("plugin-api", "is written for api 9"),
    GOOD.replace('"""Mine."""', "class Options: size: int = 3"): ("plugin-options", "Options that are not a dataclass"),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "acme_worker", raising=False)


@pytest.mark.parametrize("source", BROKEN)
def test_broken_on_a_worker_is_the_error_of_the_driver_with_the_node(source: str, posttrain_plugins: Any) -> None:
    code, message = BROKEN[source]
    posttrain_plugins.install("acme-rl", files={"acme_worker.py": source}, points=POINTS, version="1.0")
    with pytest.raises(PluginError, match=message) as caught:
        check_plugin(WANTED)
    assert caught.value.code == code and caught.value.where.startswith(f"node {socket.gethostname()}")
    assert "(acme-rl 1.0)" in caught.value.message and "on every node" in caught.value.fix
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (sent.message, sent.where, sent.fix, sent.code) == message_of(caught.value)


def message_of(error: PluginError) -> tuple[str, str, str, str]:
    return error.message, error.where, error.fix, error.code


def test_absent_on_a_worker_is_told_from_another_version(posttrain_plugins: Any) -> None:
    with pytest.raises(PluginError, match="no algorithm named 'mine' is installed") as caught:
        check_plugin(WANTED)
    assert caught.value.code == "plugin-not-installed" and "on every node" in caught.value.fix
    posttrain_plugins.install("acme-rl", files={"acme_worker.py": GOOD}, points=POINTS, version="1.1")
    with pytest.raises(PluginError, match="is acme-rl 1.1 on node .*, and 1.0 on the driver") as caught:
        check_plugin(WANTED)
    assert caught.value.fix == "pip install acme-rl==1.0 on every node"
    check_plugin(PluginRef("algorithms", "mine", "acme-rl", "1.1"))
