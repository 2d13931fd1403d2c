import json
import math

import pytest

from cleanrl_zoo.run.metrics import METRICS, MetricLog
from cleanrl_zoo.run.progress import LANGUAGE, Progress, duration


def read_tensorboard(folder) -> list[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    rows = []
    for path in sorted(folder.glob("events*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else value.tensor.float_val[0]
                rows.append((event.step, value.tag, number))
    return rows


def test_rows_reach_jsonl_and_tensorboard(tmp_path):
    log = MetricLog(tmp_path)
    log.write(10, {"losses/entropy": 1.5, "charts/SPS": 100.0})
    log.write(20, {"losses/entropy": math.nan})  # nothing was measured: no entry
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"global_step": 10, "losses/entropy": 1.5, "charts/SPS": 100.0}, {"global_step": 20}]
    assert read_tensorboard(tmp_path / "tensorboard") == [(10, "losses/entropy", 1.5), (10, "charts/SPS", 100.0)]


def test_resuming_cuts_what_came_after_the_checkpoint(tmp_path):
    log = MetricLog(tmp_path)
    log.write(10, {"losses/entropy": 1.0})
    offset = log.flush()
    log.write(20, {"losses/entropy": 9.0})
    log.close()
    log = MetricLog(tmp_path, offset)
    log.write(20, {"losses/entropy": 2.0})
    log.close()
    assert [(s, v) for s, _, v in read_tensorboard(tmp_path / "tensorboard")] == [(10, 1.0), (20, 2.0)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_an_unknown_tag_raises(tmp_path):
    log = MetricLog(tmp_path)
    with pytest.raises(KeyError, match="losses/entrpoy"):
        log.write(1, {"losses/entrpoy": 0.0})
    log.close()


def test_every_metric_has_unit_and_definition():
    assert all(unit and definition for unit, definition in METRICS.values())


def test_progress_does_not_flood_a_file(capsys):
    progress = Progress("x", 1_000_000)
    for step in range(10_000):
        progress.update(step, None)
    assert capsys.readouterr().err == ""
    progress.written -= 31
    progress.update(500_000, 12.345)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "500,000/1,000,000" in err and "return 12.3" in err and "\r" not in err


def test_progress_fits_the_terminal_and_leaves_out_its_end(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for columns, there, missing in ((40, "return 12.3", "left"), (80, "left", "ppo"), (120, "ppo", "\n")):
        monkeypatch.setenv("COLUMNS", str(columns))
        progress = Progress("ppo_continuous Hopper-v4 seed 1", 1_000_000)
        progress.update(2048, None)
        progress.written -= 1
        progress.update(500_000, 12.345)
        err = capsys.readouterr().err
        assert len(err) < columns + 4 and there in err and missing not in err


def test_the_rate_leaves_out_the_first_iteration():
    """It compiles: with 100 s for it and 10 s for the next 1,000 steps the rate is 100 steps a second, not 18."""
    progress = Progress("x", 10_000)
    progress.started -= 110
    progress.update(1_000, None)
    progress._base = (1_000, progress._base[1] - 10)
    assert progress.steps_per_second(2_000) == pytest.approx(100, rel=0.01)


def test_a_closed_stderr_does_not_stop_the_run(monkeypatch):
    class Closed:
        def isatty(self):
            return False

        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())
    Progress("x", 10).message("nobody reads this")


@pytest.mark.parametrize("seconds, text", [(5.9, "5s"), (61, "1m01s"), (3661, "1h01m")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_a_language_model_counts_tokens_and_is_judged_by_rewards(capsys):
    progress = Progress("grpo addition seed 1", 1_000, words=LANGUAGE)
    progress.update(10, None)
    progress.written -= 31
    progress.update(500, 0.1234)
    err = capsys.readouterr().err
    assert "500/1,000  reward 0.123" in err and "tokens/s" in err


def test_the_main_rank_alone_speaks(capsys):
    Progress("x", 10, silent=True).message("nothing")
    assert capsys.readouterr().err == ""


def test_rewards_have_tags_of_their_own(tmp_path):
    log = MetricLog(tmp_path)
    log.write(1, {"rewards/correct": 0.5})
    with pytest.raises(KeyError, match="reward/correct"):
        log.write(2, {"reward/correct": 0.5})
    log.close()
