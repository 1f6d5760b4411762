"""Entries of `evals`: strict like everything, with what they take over from the environments that train."""

import pytest

from posttrain.config.load import load_config
from posttrain.errors import ConfigError, PosttrainError
from posttrain.loop.resume import check_changes

BASE = "experiment=arithmetic_grpo"


def evals(*overrides: str) -> list[dict]:  # type: ignore[type-arg]
    return load_config([BASE, *overrides]).tree["evals"]  # type: ignore[no-any-return]


def test_a_name_alone_is_an_eval_of_what_trains_under_that_name() -> None:
    (entry,) = evals("evals=[arithmetic]")
    assert entry["options"]["largest"] == 19 and entry["label"] == "arithmetic" and entry["split"] == "test"
    assert entry["before"] and entry["after"] and entry["every"] == 0 and entry["samples"] == 1


def test_a_label_of_an_entry_that_trains_names_it_and_options_make_another() -> None:
    found = evals("environments.0.label=sums", "evals=[sums, {name: arithmetic, label: wide, options: {}}]")
    assert (found[0]["name"], found[0]["label"], found[0]["options"]["largest"]) == ("arithmetic", "sums", 19)
    assert found[1]["options"]["largest"] is None


def test_a_resolved_config_is_read_again_as_it_is(tmp_path) -> None:  # type: ignore[no-untyped-def]
    overrides = [BASE, "evals=[arithmetic, {name: arithmetic, label: h, split: holdout, prompts: 4, samples: 4, k: [1, 2]}]"]
    loaded = load_config(overrides)
    (tmp_path / "config.yaml").write_text(loaded.yaml())
    assert load_config(config_file=tmp_path / "config.yaml").config.evals == loaded.config.evals


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{name: arithmetic, samples: 4, k: [1, 4]}", ["evals[0].k", "pass@4", "more than 4", "set samples=8"]),
        ("{name: arithmetic, k: [1]}", ["evals[0].k", "the accuracy is pass@1"]),
        ("{name: arithmetic, samples: 4, k: [0]}", ["evals[0].k", "each k is at least 1"]),
        ("{name: arithmetic, samples: 4, temperature: 0.0}", ["evals[0].samples", "greedy completions", "all the same"]),
        ("{name: arithmetic, max_tokens: 4000}", ["evals[0].max_tokens", "no room for a prompt"]),
        ("{name: arithmetic, before: false, after: false}", ["evals[0]", "never due"]),
        ("{name: arithmetic, label: a/b}", ["evals[0].label", "cannot name a file"]),
        ("{name: arithmetic, every: -1}", ["evals[0].every", "at least 0"]),
        ("{name: arithmetic, top_p: 0.0}", ["evals[0].top_p"]),
        ("{name: arithmetic, split: holdout}", ["evals[0].prompts", "prompts=N"]),
        ("{name: countdown, split: holdout, prompts: 3}", ["evals[0].split", "nothing trains on this environment"]),
        ("{name: arithmetic, split: validation}", ["evals[0].split", "test | train | holdout"]),
        ("{name: arithmetic, sample: 4}", ["evals[0].sample: unknown key", "did you mean evals[0].samples?"]),
        ("{name: arithmetic, options: {larges: 4}}", ["evals[0].options.larges: unknown key", "evals[0].options.largest"]),
        ("{name: arithmetic, weight: 2.0}", ["evals[0].weight", "leave it out: an eval asks each of its prompts"]),
        ("{name: arithmetic, num_samples: 4}", ["the key here is prompts"]),
        ("{name: arithmetic, pass_k: [4]}", ["the key here is k"]),
        ("{name: arithmetic, separate_eval_samples: true}", ["split=holdout"]),
        ("{name: arithmetic, eval_every: 4}", ["the key here is every"]),
        ("{name: arithmetc}", ["did you mean 'arithmetic'", "evals[0].name"]),
        ("arithmetic, arithmetic", ["evals[1].label", "also what evals[0] is called", "evals.1.label=NAME"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(entry: str, expected: list[str]) -> None:
    with pytest.raises(PosttrainError) as caught:
        evals(f"evals=[{entry}]")
    assert caught.value.exit_code == 2
    for text in expected:
        assert text in str(caught.value)


def test_a_name_that_two_entries_share_is_asked_back() -> None:
    entries = ("{name: arithmetic, label: a, options: {largest: 9}}", "{name: arithmetic, label: b, options: {largest: 19}}")
    two = f"environments=[{', '.join(entries)}]"
    with pytest.raises(ConfigError, match=r"name one by its label \(a, b\)"):
        evals(two, "evals=[arithmetic]")
    assert evals(two, "evals=[b]")[0]["options"]["largest"] == 19


def test_completions_that_come_with_the_data_cannot_be_evaluated() -> None:
    with pytest.raises(ConfigError, match="nothing is generated with rollout.engine=none"):
        load_config(["experiment=preference_dpo", "evals=[arithmetic]"])


@pytest.mark.parametrize(
    ("flat", "hint"),
    [
        ("eval_every=10", "evals (the key every of an entry)"),
        ("eval_before_training=true", "evals (the key before of an entry"),
        ("eval_after_training=true", "evals (the key after of an entry"),
        ("eval_num_servers=1", "evals run on the run's own engines"),
    ],
)
def test_flat_keys_of_others_lead_to_the_entries(flat: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        evals(flat)
    assert hint in str(caught.value)


def test_evals_may_change_in_a_resume() -> None:
    before, after = load_config([BASE]).tree, load_config([BASE, "evals=[arithmetic]"]).tree
    assert any(line.startswith("evals") for line in check_changes(before, after))
