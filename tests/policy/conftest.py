"""Tiny models and random rows; one thread, on which tiny tensors run fastest."""

from __future__ import annotations

import importlib.util
import random
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config.schema import ModelConfig, OptimizerConfig, RLConfig, RolloutConfig, RunConfig
from posttrain.objective.objective import build_objective
from posttrain.policy import policy as policy_file
from posttrain.policy.policy import Policy
from posttrain.policy.rows import Row


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(kind: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Any:
    """A random two-layer causal LM of a transformers family, on two or four heads of 8."""
    import transformers

    shape = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(**shape | options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    for parameter in model.parameters():  # norms and biases too, so that nothing is trivially one or zero
        parameter.data += 0.1 * torch.randn(parameter.shape, dtype=dtype)
    return widen_norms(model)


def widen_norms(model: Any) -> Any:
    """transformers computes norms in float32, whatever the dtype; the tolerances of these tests need float64."""
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = types.MethodType(_wide_norm, norm)
    return model


def _wide_norm(norm: Any, states: torch.Tensor) -> torch.Tensor:
    scale = norm.weight + 1 if "Gemma" in type(norm).__name__ else norm.weight
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return scale * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps)


def make_rows(sizes: Sequence[int], *, seed: int = 0, vocabulary: int = 61, longest: int = 9) -> list[Row]:
    """Groups of random rows with one prompt each; a completion has untrained tokens inside, as tool output has."""
    draw = random.Random(seed)
    rows = []
    for group, size in enumerate(sizes):
        prompt = [draw.randrange(3, vocabulary) for _ in range(draw.randint(2, 8))]
        for sample in range(size):
            length = draw.randint(1, longest)
            completion = [draw.randrange(3, vocabulary) for _ in range(length)]
            mask = [draw.random() < 0.8 for _ in range(length)]
            mask[draw.randrange(length)] = True
            logprobs = [-draw.random() * 5 if trained else 0.0 for trained in mask]
            row = Row(
                input_ids=prompt + completion, mask=[False] * len(prompt) + mask, prefix=len(prompt),
                rollout_logprobs=[0.0] * len(prompt) + logprobs, advantage=draw.gauss(0, 1), reward=float(sample % 2),
                baseline=0.5, group=f"g{group}", id=f"g{group}/{sample}",
            )  # fmt: skip
            rows.append(row)
    return rows


@pytest.fixture
def tiny() -> Any:
    return make_model


@pytest.fixture
def rows_of_groups() -> Any:
    return make_rows


@pytest.fixture
def make_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Policy over a tiny model that it loads from a folder; `rl` and `rollout` are changes to the defaults."""

    load = policy_file.load_causal_lm
    monkeypatch.setattr(policy_file, "load_causal_lm", lambda *args, **options: widen_norms(load(*args, **options)))

    def build(
        objective: str = "grpo", *, model: Any = None, rl: dict[str, Any] | None = None, temperature: float = 1.0, **options: Any
    ) -> Policy:
        dtype = (rl or {}).get("master_dtype", "float64")
        folder = tmp_path / "model"
        if not folder.exists():
            (make_model("Llama") if model is None else model).to(getattr(torch, dtype)).save_pretrained(folder)
        changes = {
            "steps": 4, "group_size": 4, "batch_per_replica": 16, "master_dtype": dtype, "param_dtype": dtype,
            "optimizer": OptimizerConfig(lr=1e-2, impl="forloop"),
        } | (rl or {})  # fmt: skip
        config = RunConfig(
            model=ModelConfig(name_or_path=str(folder)), rl=RLConfig(**changes), rollout=RolloutConfig(temperature=temperature)
        )
        n_mini = config.rl.batch_per_replica // (config.rl.mini_batch_per_replica or config.rl.batch_per_replica)
        built = build_objective(objective, group_size=config.rl.group_size, n_mini=n_mini, temperature=temperature, **options)
        return Policy(config, str(folder), built)

    return build


@pytest.fixture(scope="module")
def rank_processes() -> Any:
    """The module `rank_processes.py`, whose objects travel between the tests and the ranks."""
    spec = importlib.util.spec_from_file_location("rank_processes", Path(__file__).with_name("rank_processes.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules["rank_processes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ranks(rank_processes: Any) -> Iterator[Any]:
    """Four processes for the cases of a module; `ranks.case(model, mesh, …)` makes a case."""
    with rank_processes.RankProcesses(4) as processes:
        yield processes


@pytest.fixture(scope="module")
def uneven_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes models whose shards are uneven: 61 tokens, and 5 rows of the gate, of which four ranks hold 2, 2, 1 and 0."""
    root = tmp_path_factory.mktemp("models")

    def write(*, kind: str = "Llama", tied: bool = True, dtype: str = "float64", **options: Any) -> Path:
        folder = root / f"{kind}-{tied}-{dtype}"
        if not folder.exists():
            shape = {"intermediate_size": 5, "tie_word_embeddings": tied} | options
            made = make_model(kind, dtype=getattr(torch, dtype), **shape)
            made.save_pretrained(folder)
        return folder

    return write
