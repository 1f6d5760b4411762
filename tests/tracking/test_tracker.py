"""The tracker as the loop uses it: files, display, summary, advice, resume."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from posttrain.config.schema import TrackingConfig
from posttrain.errors import ConfigError
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.rollouts import rollout_steps
from posttrain.tracking.run_dir import RunDir
from posttrain.tracking.show import show
from posttrain.tracking.tracker import Tracker, cut_after
from posttrain.types import Group

Make = Callable[[str, list[float | None]], Group]
STEP = {"reward/mean": 0.5, "loss": 0.1, "time/step_s": 2.0, "time/rollout_s": 1.0, "time/train_s": 0.5, "tokens/generated": 200}


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=120, height=40, force_terminal=terminal, color_system=None, legacy_windows=False)


def text(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path, "demo")
    made.write_config({"name": "demo"})
    return made


def track(run: RunDir, group: Make, out: Console, steps: int = 3, **config: object) -> None:
    with Tracker(run, TrackingConfig(**config), steps, decode=lambda ids: f"<{ids}>", console=out) as tracker:  # type: ignore[arg-type]
        tracker.validation(0, {"validation/reward/mean": 0.25, "validation/time_s": 1.0})
        for step in range(1, steps + 1):
            with tracker.span("policy", "train", step=step):
                pass
            groups = [group("tied", [1.0, 1.0]), group("live", [0.0, 1.0])]
            tracker.step(step, {**STEP, "reward/mean": step / steps}, groups, {"live/1": 0.7, "live/0": -0.7})
        tracker.validation(steps, {"validation/reward/mean": 0.75, "validation/time_s": 1.0})
        tracker.finish()


def test_lines_mode_prints_one_line_per_step_and_the_summary(run: RunDir, group: Make) -> None:
    out = console()
    track(run, group, out, display="lines")
    lines = text(out).splitlines()
    assert lines[0] == "held-out reward 0.25 before step 1"
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert "100 tokens/s" in lines[1] and "rollout 1 · train 0.5" in lines[1]
    summary = "\n".join(lines[5:])
    assert "Done: 3 of 3 batch steps in 6 s" in summary
    assert "0.25 before → 0.75 after" in summary and "0.333 at the start → 1 at the end" in summary
    assert "rollout 50% · train 25% · sync 0% · other 25%" in summary
    assert str(run.path) in summary


def test_auto_off_a_terminal_does_not_flood(run: RunDir, group: Make) -> None:
    out = console()
    track(run, group, out, steps=200, rollouts_every=0)
    lines = [line for line in text(out).splitlines() if line.startswith("step")]
    assert len(lines) <= 20 and lines[0].startswith("step   1/200") and lines[-1].startswith("step 200/200")
    assert len(read_metrics(run.path)) == 200


def test_live_shows_progress_curve_and_a_sample_of_an_informative_group_then_cleans_up(run: RunDir, group: Make) -> None:
    out = console(terminal=True)
    track(run, group, out, display="live")
    shown = text(out)
    assert "step 3/3" in shown and "▁" in shown and "█" in shown
    assert "live/1 · reward 1 · advantage 0.7" in shown and "<[3, 4, 2]>" in shown
    assert "0.25 before → 0.75 after" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")


def test_an_exception_gives_the_terminal_back_and_keeps_the_files(run: RunDir, group: Make) -> None:
    out = console(terminal=True)
    with pytest.raises(KeyboardInterrupt), Tracker(run, TrackingConfig(display="live"), 5, console=out) as tracker:
        tracker.step(1, STEP, [group("a", [1.0])])
        raise KeyboardInterrupt
    assert "\x1b[?25h" in text(out)
    assert [r["step"] for r in read_metrics(run.path)] == [1]
    assert len(logging.getLogger().handlers) == len([h for h in logging.getLogger().handlers if "driver.log" not in str(h)])


def test_none_prints_nothing(run: RunDir, group: Make) -> None:
    out = console()
    track(run, group, out, display="none")
    assert text(out) == ""


def test_an_uninformative_step_has_a_null_loss_and_its_row(run: RunDir) -> None:
    with Tracker(run, TrackingConfig(display="none"), 2) as tracker:
        tracker.step(1, {"reward/mean": 0.0})
    assert read_metrics(run.path) == [{"step": 1, "loss": None, "reward/mean": 0.0}]


def test_rollouts_every_thins_the_files_but_keeps_first_and_last(run: RunDir, group: Make) -> None:
    track(run, group, console(), steps=7, display="none", rollouts_every=3)
    assert rollout_steps(run.path) == [1, 3, 6, 7]


@pytest.mark.parametrize(("sampled", "said"), [(0.0, 1), (0.25, 0)])
def test_a_zero_before_step_1_and_in_it_is_said_with_advice_that_fits(run: RunDir, sampled: float, said: int) -> None:
    """A model whose likeliest answers are wrong and that is right when it samples learns: no advice."""
    out = console()
    with Tracker(run, TrackingConfig(), 2, console=out) as tracker:
        tracker.validation(0, {"validation/reward/mean": 0.0, "validation/truncated_share": 0.9})
        tracker.step(1, {"reward/mean": sampled})
        tracker.validation(1, {"validation/reward/mean": 0.0})
        tracker.step(2, {"reward/mean": 0.0})
    assert text(out).count("scores 0 on every held-out prompt") == said == text(out).count("rollout.max_tokens")


def test_role_logs_split_by_logger_and_go_nowhere_else(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # of other programs in this process
    with Tracker(run, TrackingConfig(display="none"), 1):
        logging.getLogger("posttrain.policy.policy").info("a step")
        logging.getLogger("somebody.else").info("chatter")
    assert "a step" in (run.logs / "policy.log").read_text() and "chatter" not in (run.logs / "policy.log").read_text()
    driver = (run.logs / "driver.log").read_text()
    assert "a step" in driver and "chatter" in driver
    assert not (run.logs / "rollout.log").exists()
    assert capsys.readouterr() == ("", "")


def test_a_resume_cuts_what_is_past_the_checkpoint_and_keeps_it(run: RunDir, group: Make) -> None:
    track(run, group, console(), steps=4, display="none")
    assert cut_after(run, 2) == {"metrics": 2, "validation": 1, "rollouts": 2}
    assert [r["step"] for r in read_metrics(run.path)] == [1, 2]
    assert [r["step"] for r in read_validation(run.path)] == [0]
    with Tracker(run, TrackingConfig(display="none"), 4) as tracker:
        assert tracker.display.progress.step == 2 and tracker.display.progress.rewards == [0.25, 0.5]
        assert tracker.display.progress.held_out == [(0, 0.25)]
        tracker.step(3, STEP)
        assert tracker.finish().steps == 3


def test_show_prints_parts_and_advantages_with_the_widest_group_first(run: RunDir, group: Make) -> None:
    track(run, group, console(), display="none")
    out = console()
    show(run.path, 2, console=out)
    shown = text(out)
    assert "step 2 of 3 · 4 answers · mean reward 0.667 · held-out 0.25 → 0.75" in shown
    assert "reward 1 · (correct 1) · advantage +0.7 · 3 tokens · stop" in shown
    assert shown.index("toy live") < shown.index("toy tied")


def test_show_survives_control_characters_and_markup_of_the_model(run: RunDir, group: Make) -> None:
    with Tracker(run, TrackingConfig(display="none"), 1, decode=lambda ids: "[bold]\x1b[2Jboo[/nope]") as tracker:
        tracker.step(1, STEP, [group("a", [1.0, None])])
    out = console()
    show(run.path, console=out)
    assert "\x1b" not in text(out) and "[bold]" in text(out) and "[/nope]" in text(out)
    assert "unscorable · exception" in text(out)


def test_show_of_nothing_is_a_clear_error(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rollouts in"):
        show(run.path)
    with pytest.raises(ConfigError, match="there is no run at"):
        show(tmp_path / "absent")


def test_tracking_and_show_work_without_torch() -> None:
    code = (
        "import sys, posttrain.tracking.tracker, posttrain.tracking.show, posttrain.tracking.plot\n"
        "loaded = {'torch', 'vllm', 'ray', 'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plot_draws_a_png(run: RunDir, group: Make, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from posttrain.tracking.plot import plot

    with pytest.raises(ConfigError, match="no rewards to draw"):
        plot(run.path, tmp_path / "out.png")
    track(run, group, console(), display="none")
    plot(run.path, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
