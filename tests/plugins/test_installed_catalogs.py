"""Catalogs of others, really installed: found, inherited from, skipped and quarantined, with E15 in its documented words."""

from __future__ import annotations

import sys

import pytest

from posttrain.config.load import load_config

CATALOG_OF = {"preference_dpo": "preference", "arithmetic_nft": "nft"}
WARNING = "skipped 1 experiment module(s) needing absent optional dependencies ['lerobot']"


def test_an_experiment_of_another_package_inherits_from_ours(catalog_site, screen) -> None:
    seen = screen(catalog_site, "train", "experiment=lab_quick", "--cfg", "job")
    assert seen.code == 0 and "  steps: 3\n" in seen.out and "name: arithmetic" in seen.out
    assert f"note: {WARNING}\n" in seen.err and seen.err.count("quarantined lab_faulty (lab-faulty 2.2)") == 1


def test_the_list_names_each_with_its_package_and_warns_once(catalog_site, screen) -> None:
    seen = screen(catalog_site, "experiments", "list")
    line = next(line for line in seen.out.splitlines() if line.startswith("lab_quick "))
    assert " lab_good.recipes (lab-good 2.0) " in line and " arithmetic_grpo " in line and line.endswith("Recipes of a lab.")
    assert seen.err.splitlines() == [
        f"warning: {WARNING}",
        "warning: quarantined lab_faulty (lab-faulty 2.2): SITE/lab_faulty/__init__.py:2: RuntimeError: the disk is not mounted",
    ]


@pytest.mark.parametrize("name", ["robot_grpo", "lab_robot", "lab_orphan", "nobody_knows", "lab_heir"])
def test_what_cannot_be_selected_says_which_package_would_bring_it_back(name, catalog_site, screen, golden, tmp_path) -> None:
    seen = screen(catalog_site, "train", f"experiment={name}")
    assert seen.code == 2 and not (tmp_path / "outputs").exists()
    golden(f"experiment-{name}", seen.err)


@pytest.mark.parametrize("name", CATALOG_OF)
def test_the_shipped_dpo_and_nft_recipes_import_without_any_other_catalog(name, monkeypatch) -> None:
    from posttrain.plugins.discovery import discover

    own = f"posttrain_experiments.{CATALOG_OF[name]}"
    others = {info.module for info in discover("experiments")} - {own}
    assert len(others) >= 4
    for module in others:
        monkeypatch.setitem(sys.modules, module, None)  # its import raises
    monkeypatch.delitem(sys.modules, own, raising=False)
    assert load_config([f"experiment={name}"]).experiment == name
