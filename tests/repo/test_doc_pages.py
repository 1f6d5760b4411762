"""Facts of hand-written pages that would otherwise rot: numbers, names, quoted messages."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), flags=re.DOTALL | re.MULTILINE)


def printed(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    return out.getvalue()


def test_batching_prints_what_it_says() -> None:
    (code,), (shown,) = fenced("howto/batching.md", "python"), fenced("howto/batching.md", "text")
    assert printed(code) == shown


WORDS = """
run experiment role replica rank data-cell policy-cell cohort body engine publication bucket epoch lane prompt group
trajectory turn trained-token batch-step optimizer-step informative-group dp_world dp_replicate dp_shard validation
canary actorgroup devicegroup worker replay-cell bucket-plan objective datapacker environment transport catalog version
ledger unscorable ahead-pass
"""


def test_the_glossary_has_every_word_of_the_library() -> None:
    marked = re.findall(r"\*{1,2}(`?[\w -]+`?)\*{1,2}", text("glossary.md"))
    assert set(WORDS.split()) - {word.strip("`").lower().replace(" ", "-") for word in marked} == set()


def test_every_word_of_the_glossary_is_defined_once() -> None:
    heads = [w.lower() for line in text("glossary.md").splitlines() for w in re.findall(r"^\*\*([^*]+)\*\*", line)]
    assert len(heads) == len(set(heads))


def deviations(name: str) -> list[str]:
    """The list in the header of an algorithm, one line for each bullet."""
    source = (ROOT / "plugins" / "algorithms" / "posttrain_algorithms" / f"{name}.py").read_text(encoding="utf-8")
    listed = (ast.get_docstring(ast.parse(source)) or "").partition("Deviations from the paper:\n")[2].partition("\n\n")[0]
    return re.sub(r"\n +", " ", listed).splitlines()


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "reinforce_pp", "cispo", "gspo", "sapo", "dpo"])
def test_a_guide_lists_the_deviations_of_the_algorithm(name: str) -> None:
    expected = deviations(name)
    assert expected and text(f"guides/{name}.md").rstrip().splitlines()[-len(expected) :] == expected


def environment_variables() -> set[str]:
    """Names of variables in the files that look at the environment."""
    found = set()
    for path in (p for part in ("core", "plugins", "experiments") for p in (ROOT / part).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "os.environ" in source or "os.getenv" in source:
            constants = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
            found |= {c for c in constants if re.fullmatch(r"(?!SC_|MAP_)[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", c)}  # sysconf, mmap
    return found


def test_every_environment_variable_is_listed_and_none_that_is_gone() -> None:
    section = text("howto/run-posttrain.md").partition("## Environment variables")[2].partition("\n## ")[0]
    theirs, ours = re.findall(r"^Libraries underneath.*", section, flags=re.DOTALL | re.MULTILINE)[0], environment_variables()
    listed = set(re.findall(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`", section.replace(theirs, "")))
    assert listed == ours


def test_the_script_that_restarts_goes_on_after_75_only(tmp_path: Path) -> None:
    script = next(b for b in re.findall(r"^```sh\n(.*?)^```", text("howto/run-posttrain.md"), flags=re.DOTALL | re.MULTILINE))
    (tmp_path / "train.sh").write_text(script)
    fake = tmp_path / "bin" / "posttrain"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$@" >> calls\nmkdir -p root/run/checkpoints\nexit $(sed -n "$(wc -l < calls)p" codes)\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "PAUSE": "0"}

    def ends_with(*codes: int) -> tuple[int, list[str]]:
        (tmp_path / "calls").unlink(missing_ok=True)
        (tmp_path / "codes").write_text("".join(f"{c}\n" for c in codes))
        done = subprocess.run(["sh", "train.sh", "root", "seed=1"], cwd=tmp_path, env=environment, check=False)
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    first, again = "train --run root seed=1", "train --resume root/run"
    assert ends_with(0) == (0, [first])
    assert ends_with(75, 75, 0) == (0, [first, again, again])
    assert ends_with(75, 5) == (5, [first, again])
    assert ends_with(*[75] * 9) == (75, [first, *[again] * 5])


def test_installation_lists_the_extras_that_exist() -> None:
    section = text("installation.md").partition("\n## Extras\n")[2].partition("\n## ")[0]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", section, flags=re.MULTILINE)) == sorted(extras)


def test_the_dockerfile_copies_what_is_there_and_runs_what_works() -> None:
    (dockerfile,) = fenced("installation.md", "dockerfile")
    lines = [line.split() for line in dockerfile.splitlines()]
    assert lines[0][0] == "FROM" and {words[0] for words in lines[1:]} <= {"RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT"}
    copied = [source for words in lines if words[0] == "COPY" for source in words[1:-1]]
    assert all((ROOT / source).exists() for source in copied)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    needed = {source.split("/")[0] for source in build["dev-mode-dirs"]} | {"requirements", "pyproject.toml", "Makefile"}
    assert needed <= set(copied)


def test_performance_prints_what_it_says() -> None:
    (code,), (shown,) = fenced("performance.md", "python"), fenced("performance.md", "text")
    assert printed(code) == shown


def test_parameters_are_counted_as_the_models_count_them() -> None:
    """The formula of the page leaves out norms and biases: less than a thousandth."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(fenced("performance.md", "python")[0], names)
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = names["models"]["Qwen2.5-0.5B"]
    config = Qwen2Config(
        vocab_size=shape["vocab"], hidden_size=shape["h"], intermediate_size=shape["m"], num_hidden_layers=shape["layers"],
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        counted = sum(p.numel() for p in Qwen2ForCausalLM(config).parameters())
    assert names["memory"](**shape)["parameters (billion)"] == pytest.approx(counted / 1e9, rel=1e-3)


@pytest.mark.parametrize(("bf16", "checkpointing"), [(False, False), (True, False), (False, True)])
def test_activations_are_what_the_page_says(bf16: bool, checkpointing: bool) -> None:
    """Bytes that autograd keeps for each token and layer, measured; autocast's copies of the weights are no activations."""
    hidden, inner, length = 256, 768, 128
    two, four = (saved_bytes(hidden, inner, layers, length, bf16, checkpointing) for layers in (2, 4))
    copies = 2 * (2.5 * hidden**2 + 3 * hidden * inner) / (4 * (length - 1)) if bf16 else 0
    found = (four - two) / 2 - copies
    expected = 4 * hidden if checkpointing else 31 * hidden + 8 * inner if bf16 else 34 * hidden + 16 * inner
    assert found == pytest.approx(expected, rel=0.05)


def saved_bytes(hidden: int, inner: int, layers: int, length: int, bf16: bool, checkpointing: bool) -> float:
    """What one forward of four rows keeps for its backward, per token that it computes, parameters left out."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from posttrain.policy.module import PolicyModule
    from posttrain.policy.rows import Row

    config = Qwen2Config(
        vocab_size=100, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    dtype = torch.bfloat16 if bf16 else None
    module = PolicyModule(Qwen2ForCausalLM(config).eval(), gradient_checkpointing=checkpointing, compute_dtype=dtype)
    half = length // 2
    mask = [False] * half + [True] * half
    packed = module.pack([Row(input_ids=[i % 50 for i in range(length)], mask=mask, rollout_logprobs=[0.0] * length)] * 4)
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, tuple[int, Any]] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(packed)
    return sum(size for size, _ in kept.values()) / sum(forward.input_ids.numel() for forward in packed.forwards)


def test_the_measured_times_of_performance_are_those_of_the_benchmarks() -> None:
    page, measured = text("performance.md"), text("benchmarks.md").replace("**", "")
    times = {*re.findall(r"\b\d+\.\d+ s\b", page), *re.findall(r"\b\d\.\d\d×", page), *re.findall(r"\b\d+(?:\.\d+)?%", page)}
    assert len(times) > 10 and not {time for time in times if time not in measured}
    extra = re.findall(r"^\| \d+ \| [\d.]+× \| ([\d.]+) \|$", page, flags=re.MULTILINE)
    assert len(extra) == 3 and all(f"| {value} |" in measured for value in extra)


PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]*\b|…|\.\.\.")


def quoted_messages(page: str) -> list[str]:
    """What a page quotes as a message: code in a heading, the first cell of a table headed Message, outside generated blocks."""
    found: list[str] = []
    own = re.sub(r"<!-- generated:.*?<!-- end -->", "", text(page), flags=re.DOTALL)
    in_table = False
    for line in own.splitlines():
        in_table = line.startswith("| Message ") or (in_table and line.startswith("|"))
        if in_table and not line.startswith("| Message "):
            found += re.findall(r"^\| `([^`]+)`", line)
        elif re.match(r"^#{2,4} ", line):
            found += re.findall(r"`([^`]+)`", line)
        else:
            found += re.findall(r"^`([^`]{25,})`:", line)
    return found


@cache
def templates() -> list[str]:
    """Every string of the code, the fields of f-strings and of the catalogue as one mark."""
    found = set()
    for path in (p for part in ("core", "plugins", "experiments") for p in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"\{\w+\}", "\0", node.value))
    return sorted(found)


def is_raised(message: str, code: list[str]) -> bool:
    """The fixed parts of a message stand, in this order, in one string of the code."""
    parts = [part.strip() for part in PLACEHOLDER.split(message) if len(part.strip()) > 2] or [message]
    return any(stand_in(parts, template) or stand_in(parts, template.replace("\0", "")) for template in code)


def stand_in(parts: list[str], template: str) -> bool:
    at = 0
    for part in parts:
        at = template.find(part, at) + len(part)
        if at < len(part):
            return False
    return True


@pytest.mark.parametrize("page", ["troubleshooting.md", "howto/custom-datapacker.md", "howto/batching.md"])
def test_every_message_that_a_page_quotes_is_in_the_code(page: str) -> None:
    code, quoted = templates(), quoted_messages(page)
    assert len(quoted) >= 4
    assert not [message for message in quoted if not is_raised(message, code)]


OF_A_CLUSTER = (
    "no Ray cluster can be joined", "Ray could not start a cluster", "Ray did not start on port", "does not have its N nodes",
    "needs Ray, which is not installed", "is installed, this needs", "did not meet the others", "lost the others",
    "no rollout replica is left", "every lane failed", "bundle(s)", "is memory of one machine",
    "attention heads cannot be divided", "worker(s), and the engine has", "would do nothing", "without RAY_ADDRESS",
    "is no intact checkpoint", "ROLE died", "has not answered for N s",
)  # fmt: skip


def test_the_messages_that_a_cluster_is_likely_to_give_are_quoted() -> None:
    quoted = quoted_messages("troubleshooting.md")
    assert [words for words in OF_A_CLUSTER if not any(words in message for message in quoted)] == []


def test_a_message_that_the_code_does_not_have_is_noticed() -> None:
    assert not is_raised("waited N s for NAME to reconsider", templates())
    assert is_raised("waited N s for NAME", templates())


def test_the_causes_of_unscorable_rewards_are_listed() -> None:
    section = text("troubleshooting.md").partition("### All rewards are unscorable")[2].partition("\n### ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))
    source = (ROOT / "core/posttrain/rollout/rewards.py").read_text(encoding="utf-8")
    known = (ast.get_docstring(ast.parse(source)) or "").partition("Causes:")[2]
    assert listed == {name for name in re.findall(r"`(\w+)`", known) if name.islower()} | {"engine"}


def test_the_keys_that_a_resume_may_change_are_listed() -> None:
    from posttrain.loop.resume import MAY_CHANGE

    table = text("reference/checkpoint.md").partition("These keys may change")[2].partition("\nFrom Python")[0]
    listed = re.findall(r"`([\w.]+\.[\w*]+|hooks|evals)`", table)
    assert sorted(key.removesuffix("*") for key in listed) == sorted(MAY_CHANGE)


def test_a_checkpoint_holds_the_files_that_are_listed(ended_run: Path) -> None:
    (step,) = (ended_run / "checkpoints").glob("step_*")
    listed = next(block for block in fenced("reference/checkpoint.md", "text") if block.startswith("checkpoints/step_50"))
    files = {str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()}
    assert files == set(re.findall(r"^    (\S+)", listed, flags=re.MULTILINE))


def test_a_run_directory_holds_what_is_listed(ended_run: Path) -> None:
    listed = set(re.findall(r"^    ([\w.]+)", fenced("reference/checkpoint.md", "text")[0], flags=re.MULTILINE))
    assert {path.name for path in ended_run.iterdir()} - {"run.lock"} == listed
