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
        progress.update(step, ())
    assert capsys.readouterr().err == ""
    progress.written -= 31
    progress.update(500_000, [12.345])
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "500,000/1,000,000" in err and "return 12.3" in err and "\r" not in err


def test_progress_fits_the_terminal_and_leaves_out_its_end(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for columns, there, missing in ((40, "return 12.3", "left"), (80, "left", "ppo"), (120, "ppo", "\n")):
        monkeypatch.setenv("COLUMNS", str(columns))
        progress = Progress("ppo_continuous Hopper-v4 seed 1", 1_000_000)
        progress.update(2048, ())
        progress.written -= 1
        progress.update(500_000, [12.345])
        err = capsys.readouterr().err
        assert len(err) < columns + 4 and there in err and missing not in err


def test_the_rate_leaves_out_the_first_iteration(monkeypatch):
    """It compiles: with 100 s for it and 10 s for the next 1,000 steps the rate is 100 steps a second, not 18."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    progress = Progress("x", 10_000)
    for now, step in ((100.0, 1_000), (105.0, 1_500)):  # noqa: B007 - the clock
        progress.update(step, ())
    now = 110.0
    assert progress.steps_per_second(2_000) == pytest.approx(100)


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
    progress.update(10, ())
    progress.written -= 31
    progress.update(500, [0.1234])
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


def sessions(folder) -> dict:
    """What TensorBoard's tab HPARAMS shows of the runs below `folder`, by their names: its own back end's answer."""
    from tensorboard import context
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    runs = plugin_event_multiplexer.EventMultiplexer()
    runs.AddRunsFromDirectory(str(folder))
    runs.Reload()
    provider = data_provider.MultiplexerDataProvider(runs, str(folder))
    own = backend_context.Context(base_plugin.TBContext(data_provider=provider, logdir=str(folder)))
    request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=10, allowed_statuses=[0, 1, 2, 3])
    answer = list_session_groups.Handler(context.RequestContext(), own, "", request).run()
    return {
        group.name: (
            {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()},
            {metric.name.tag: metric.value for metric in group.metric_values},
            group.sessions[0].status,
        )
        for group in answer.session_groups
    }


def write_run(folder, algorithm: str, **args) -> None:
    folder.mkdir()
    run = {"algorithm": algorithm, "args": args, "provenance": {"started": "2026-01-01T00:00:00+00:00"}}
    (folder / "run.json").write_text(json.dumps(run))


def test_tensorboard_shows_flags_beside_the_last_values(tmp_path):
    unknown, success = 0, 1
    write_run(tmp_path / "a", "ppo", seed=1, learning_rate=0.5, compile=True, target_kl=None, hidden=[64, 64])
    write_run(tmp_path / "b", "sac", seed=2, tau=0.005)
    log = MetricLog(tmp_path / "a")
    log.write(10, {"charts/episodic_return": 3.0})
    offset = log.flush()
    log.write(20, {"charts/episodic_return": 9.0})
    log.close()
    other = MetricLog(tmp_path / "b")
    other.write(10, {"losses/qf_loss": 1.0})
    other.close()
    found = sessions(tmp_path)
    flags = {"algorithm": "ppo", "seed": 1.0, "learning_rate": 0.5, "compile": True, "hidden": "[64, 64]"}
    assert found["a/tensorboard"] == (flags, {"charts/episodic_return": 9.0}, unknown)
    assert found["b/tensorboard"] == ({"algorithm": "sac", "seed": 2, "tau": 0.005}, {"losses/qf_loss": 1.0}, unknown)

    log = MetricLog(tmp_path / "a", offset)  # resumed: written anew, flags too, and then finished
    log.write(20, {"charts/episodic_return": 4.0})
    (tmp_path / "a" / "summary.json").write_text("{}")
    log.close()
    assert sessions(tmp_path / "a") == {"tensorboard": (flags, {"charts/episodic_return": 4.0}, success)}
