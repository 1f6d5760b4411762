"""`experiment=`: catalogs imported one by one, E15 in its documented words, quarantine, inheritance."""

from __future__ import annotations

import subprocess
import sys

import pytest

from posttrain.config import load_config
from posttrain.config.catalog import load_catalog, names_in_source
from posttrain.errors import ConfigError, MissingConfigException, PluginError


def catalog(fake_distribution, name: str, text: str, **options) -> None:
    module = name.replace("-", "_")
    fake_distribution(name, points={"posttrain.experiments": {name: module}}, files={f"{module}.py": text}, **options)
    sys.modules.pop(module, None)


@pytest.fixture
def skipped(fake_distribution) -> None:
    """Four modules that need absent distributions, one of them twice the same."""
    catalog(
        fake_distribution,
        "lab-a",
        "import lerobot.data\nEXPERIMENTS = {'robot': {}}\n",
        requires=["lerobot>=0.3; extra == 'robots'"],
    )
    catalog(fake_distribution, "lab-b", "import psycopg2.extras\nEXPERIMENTS = {'from_db': {'defaults': ['toy_grpo']}}\n")
    catalog(fake_distribution, "lab-c", "import zarr\nEXPERIMENTS = {'arrays': {}}\n")
    catalog(fake_distribution, "lab-d", "import zarr.core\nEXPERIMENTS = dict(arrays2={})\n")


def test_the_warning_counts_modules_and_lists_distributions(skipped) -> None:
    (warning,) = [line for line in load_catalog().warnings if line.startswith("skipped")]
    assert warning == "skipped 4 experiment module(s) needing absent optional dependencies ['lerobot', 'psycopg2', 'zarr']"
    assert warning in load_config(["experiment=toy_grpo"]).notes


def test_e15_names_the_distribution_that_brings_it_back(skipped) -> None:
    with pytest.raises(MissingConfigException) as caught:
        load_config(["experiment=robot"])
    exc = caught.value
    assert exc.message == "MissingConfigException: Could not load 'experiment/robot'" and exc.code == "E15"
    assert "lab_a (lab-a 1.0) defines it and was skipped: it needs lerobot" in exc.cause
    assert exc.fix == "pip install 'lab-a[robots]'"
    assert "skipped 4 experiment module(s)" in exc.__notes__[0]


def test_e15_through_inheritance(skipped, fake_distribution) -> None:
    catalog(fake_distribution, "heir", "EXPERIMENTS = {'mine': {'defaults': ['from_db']}}\n")
    with pytest.raises(MissingConfigException, match="Could not load 'experiment/from_db'") as caught:
        load_config(["experiment=mine"])
    assert "'mine' inherits from it" in caught.value.cause and "psycopg2" in caught.value.cause


def test_e15_of_a_missing_parent_and_of_a_typo() -> None:
    with pytest.raises(MissingConfigException, match="Could not load 'experiment/toy_gone'") as caught:
        load_config(["experiment=toy_orphan"])
    assert "'toy_orphan' inherits from it" in caught.value.cause
    with pytest.raises(MissingConfigException) as caught:
        load_config(["experiment=toy_gpro"])
    assert "did you mean toy_grpo" in caught.value.fix


def test_other_failures_are_quarantined_and_raised_when_selected(fake_distribution) -> None:
    catalog(fake_distribution, "broken", "EXPERIMENTS = {'mine': {}}\nraise RuntimeError('boom')\n")
    catalog(fake_distribution, "heir", "EXPERIMENTS = {'child': {'defaults': ['mine']}}\n")
    (warning,) = [line for line in load_catalog().warnings if "broken" in line]
    assert warning.startswith("quarantined broken (broken 1.0): ") and "RuntimeError: boom" in warning and "\n" not in warning
    assert load_config(["experiment=toy_grpo"]).config.rl.steps == 5
    for name in ("mine", "child"):
        with pytest.raises(PluginError, match="cannot be imported") as caught:
            load_config([f"experiment={name}"])
        assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "text", ["x = 1", "EXPERIMENTS = []", "EXPERIMENTS = {'a': 3}", "EXPERIMENTS = {'a': {'defaults': 'b'}}"]
)
def test_a_module_that_is_no_catalog_is_quarantined(fake_distribution, text) -> None:
    catalog(fake_distribution, "odd", text)
    assert any("quarantined odd (odd 1.0)" in line for line in load_catalog().warnings)


def test_a_cycle_is_told_as_one() -> None:
    with pytest.raises(ConfigError, match="toy_cycle → toy_cycle_b → toy_cycle"):
        load_config(["experiment=toy_cycle"])


def test_a_diamond_is_applied_once_in_order(fake_distribution) -> None:
    catalog(
        fake_distribution,
        "diamond",
        "EXPERIMENTS = {'left': {'defaults': ['toy_grpo'], 'seed': 1, 'name': 'left'},"
        "'right': {'defaults': ['toy_grpo'], 'seed': 2}, 'both': {'defaults': ['left', 'right', '_self_']}}",
    )
    config = load_config(["experiment=both"]).config
    assert (config.seed, config.name, config.rl.steps) == (2, "left", 5)


def test_the_same_name_in_two_catalogs_names_both(fake_distribution) -> None:
    catalog(fake_distribution, "twin", "EXPERIMENTS = {'toy_grpo': {}}")
    with pytest.raises(ConfigError, match="is ambiguous: .*(toys|twin).* and .*(toys|twin).* define it"):
        load_config(["experiment=toy_grpo"])


def test_names_are_read_without_importing(skipped) -> None:
    assert names_in_source("lab_b") == ["from_db"] and names_in_source("lab_d") == []


def test_the_unreadable_modules_are_mentioned(skipped) -> None:
    with pytest.raises(MissingConfigException) as caught:
        load_config(["experiment=arrays2"])
    assert "it may be in lab_d" in caught.value.cause and "which could not be read" in caught.value.cause


def test_catalogs_load_no_torch() -> None:
    code = "import sys; from posttrain.config.catalog import load_catalog; load_catalog(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
