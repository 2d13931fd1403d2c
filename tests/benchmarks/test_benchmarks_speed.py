"""The speed comparison: what is counted, which rates stand beside each other, and when it refuses to measure."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import report
import speed
from speed import PEERS, SETTINGS, Peer, Setting, Time

OWN = Setting("ppo_continuous", "--own", "one", 1000)
EQUAL = Setting("sac", "--equal", "one", 1000, equal=True)


@pytest.fixture(autouse=True)
def peers(monkeypatch):
    monkeypatch.setitem(PEERS, "one", Peer("sac"))
    monkeypatch.setitem(PEERS, "eight", Peer("a2c", 8, '{"n_steps": 5}'))


def a_time(who: str, what: str, threads: int, kind: str, seconds: float, asked: int = 1000, repeat: int = 1) -> Time:
    return Time(who, what, "Hopper-v4", threads, kind, repeat, asked, asked, seconds, 1.0, 0.0)


def test_equal_settings_stand_beside_the_peer_with_as_many_threads():
    # ours with one thread, cold: 1000/{10, 50, 20} s → median 50 steps/s
    times = [a_time("ours", "equal", 1, "cold", seconds) for seconds in (10.0, 50.0, 20.0)]
    times += [a_time("ours", "equal", 1, "warm", 10.0), a_time("ours", "equal", 2, "cold", 8.0)]
    times += [a_time("ours", "equal", 2, "warm", 5.0)]
    times += [a_time("sb3", "one", 1, "", 40.0), a_time("sb3", "one", 2, "", 20.0)]
    times += [a_time("sb3", "one", 2, "", 1.0, asked=500)]  # other steps are another matter
    times += [a_time("sbx", "one", 2, "cold", 10.0), a_time("sbx", "one", 2, "warm", 4.0)]
    one, two = speed.rows(times, {"equal": EQUAL})
    assert (one["threads"], one["cold"], one["warm"]) == (1, 50.0, 100.0)
    assert one["sb3"] == {"threads": 1, "cold": 25.0, "ratio_cold": 2.0, "warm": 25.0, "ratio_warm": 4.0}
    assert "sbx" not in one
    assert (two["threads"], two["cold"], two["warm"]) == (2, 125.0, 200.0)
    assert two["sb3"] == {"threads": 2, "cold": 50.0, "ratio_cold": 2.5, "warm": 50.0, "ratio_warm": 4.0}
    assert two["sbx"] == {"threads": 2, "cold": 100.0, "ratio_cold": 1.25, "warm": 250.0, "ratio_warm": 0.8}


def test_ours_by_default_stands_beside_the_peers_best_number_of_threads():
    times = [a_time("ours", "own", 0, "cold", 10.0), a_time("ours", "own", 0, "warm", 5.0)]
    times += [a_time("sb3", "one", 1, "", 40.0), a_time("sb3", "one", 2, "", 50.0)]
    (row,) = speed.rows(times, {"own": OWN, "equal": EQUAL})
    assert row["sb3"] == {"threads": 1, "cold": 25.0, "ratio_cold": 4.0, "warm": 25.0, "ratio_warm": 8.0}
    assert speed.rows(times[:1], {"own": OWN}) == []  # nothing is said before both of ours are there


def test_time_of_a_process_counts_its_children_and_gives_its_output():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))']); print('done')"
    output, seconds, cpu, other = speed.timed([sys.executable, "-c", code], {})
    assert output == "done\n" and 0 < cpu and 0 < seconds < 60
    assert other is None or other >= 0
    with pytest.raises(ValueError, match="exit code 1: ZeroDivisionError"):
        speed.timed([sys.executable, "-c", "1/0"], {})


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot confine a process")
def test_a_process_can_be_confined_to_some_cores():
    core = min(os.sched_getaffinity(0))
    code = "import os, time; time.sleep(0.5); print(*os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
    assert speed.timed([sys.executable, "-c", code], speed.thread_variables(1), [core])[0] == f"{core} 1\n"


def test_measurements_alternate_with_a_fresh_cache_for_each_cold_run(tmp_path, monkeypatch):
    order, caches = [], []

    def ours(name, env, steps, repeat, cache, kind, threads):
        order.append(f"{name} {threads} {kind}")
        caches.append((kind, cache, list(cache.iterdir())))
        (cache / "compiled").touch()
        return Time("ours", name, env, threads, kind, repeat, steps, steps, 1.0, 1.0, 0.0)

    def peer(who, key, env, steps, repeat, threads, python, cache, kind):
        order.append(f"{who} {key} {threads} {kind}".strip())
        if who == "sbx":
            assert python == "/sbx/python"
            caches.append((kind, cache, list(cache.iterdir())))
            (cache / "compiled").touch()
        return Time(who, key, env, threads, kind, repeat, steps, steps, 4.0, 1.0, 0.5 if repeat == 2 else 0.0)

    monkeypatch.setattr(speed, "time_ours", ours)
    monkeypatch.setattr(speed, "time_peer", peer)
    monkeypatch.setattr(speed, "installed", lambda python, *packages: {})
    eight = Setting("a2c", "", "eight", 1000, equal=True)
    settings = {"own": OWN, "equal": EQUAL, "eight": eight}
    record = speed.measure(settings, [1, 2], 2, tmp_path / "s.json", [0, 1], "/sbx/python")
    once = ["own 0 cold", "own 0 warm"]  # and its peer with one thread and with two, which "equal" shares
    once += [f"{who} one {n}{kind}" for n in (1, 2) for who, kind in (("sb3", ""), ("sbx", " cold"), ("sbx", " warm"))]
    once += ["equal 1 cold", "equal 1 warm", "equal 2 cold", "equal 2 warm"]
    once += ["eight 1 cold", "eight 1 warm", "sb3 eight 1", "eight 2 cold", "eight 2 warm", "sb3 eight 2"]
    assert order == once * 2  # SBX has no A2C
    assert all((kind == "cold") == (found == []) for kind, _, found in caches)
    assert json.loads((tmp_path / "s.json").read_text()) == json.loads(json.dumps(record))
    text = speed.table([record])
    assert (
        "| ppo_continuous | own | Hopper-v4 | default | 1,000 | 1,000 | 250 (1 threads) | 4.00 | 4.00 | 250 |" in text
    )
    assert "| sac | equal | Hopper-v4 | 2 | 1,000 | 1,000 | 250 | 4.00 | 4.00 | 250 | 250 | 4.00 | 4.00 |" in text
    assert "| a2c | eight | Hopper-v4 | 1 | 1,000 | 1,000 | 250 | 4.00 | 4.00 | – | – | – | – |" in text
    assert '`eight`: defaults; the peer: A2C {"n_steps": 5}, 8 environments.' in text
    assert f"16 of {len(order)} measurements were disturbed" not in text  # 8 of the second repeat are ours
    assert f"**8 of {len(order)} measurements were disturbed" in text
    assert text.count("`equal`:") == 1


def test_the_front_page_has_one_table_of_all_records_ppos_own_and_links_to_the_others(tmp_path):
    readme = tmp_path / "README.md"
    assert report.speed_block(tmp_path / "speed", readme) == ""
    folder = tmp_path / "speed"
    folder.mkdir()
    (folder / "hopper.json").write_text('{"times": []}')
    (folder / "hopper.md").write_text("an earlier table\n")
    assert report.speed_block(folder, readme) == "an earlier table\n"
    for name in ("llm", "models"):
        (folder / f"{name}.json").write_text('{"times": []}')
        (folder / f"{name}.md").write_text("its own page")
    times = [a_time("ours", "own", 0, "cold", 10.0), a_time("ours", "own", 0, "warm", 5.0)]
    for name, started, cpu in (("sac", 9, "A CPU"), ("trpo", 3, "A CPU"), ("dqn", 1, "B CPU")):
        content = {
            "started": f"2026-01-0{started}T00:00:00+00:00",
            "times": [{"other_cores": None}],
            "rows": speed.rows(times, {"own": OWN}),
            "machine": {"cpu": cpu, "system": "Linux"},
            "commit": f"{started}123456789abcdef",
            "dirty": False,
            "versions": {"torch": "2.13.0"},
            "repeats": 1,
            "cores": [0, 1],
        }
        (folder / f"{name}.json").write_text(json.dumps(content))
        (folder / f"{name}.md").write_text("its own page")
    block = report.speed_block(folder, readme)
    assert block.count("| ppo_continuous | own | Hopper-v4 | default | 100 | 200 | – | – | – |") == 2
    assert "9123456789ab" in block and "1123456789ab" in block and "3123456789ab" not in block  # measured again
    assert block.count("| algorithm |") == 1 and "its own page" not in block
    links = "Other measurements: [llm](speed/llm.md), [models](speed/models.md).\n"
    assert block.endswith(f"\n\nan earlier table\n\n\n{links}")
    (folder / "trpo.json").write_text("{")
    with pytest.raises(ValueError, match=r"trpo.json: damaged"):
        report.speed_block(folder, readme)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_name_flags_that_exist_and_peers_that_are_known(name):
    setting = SETTINGS[name]
    script = speed.ROOT / "algos" / f"{setting.algorithm}.py"
    text = script.read_text()
    words = [word for word in shlex.split(setting.flags) if word.startswith("--")]
    for word in words:
        field = word.removeprefix("--").replace("-", "_")
        assert f"    {field}: " in text or field == "num_envs", (name, word)
    peer = PEERS[setting.peer]
    assert isinstance(json.loads(peer.settings), dict)
    assert not setting.equal or words


def test_the_interpreter_of_another_package_is_asked_for_its_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: object())
    assert speed.installed(sys.executable, "pytest", "no-such-package") == {"pytest": pytest.__version__}
    with pytest.raises(ValueError, match="is not a Python interpreter that works"):
        speed.installed(str(tmp_path / "python"), "pytest")
    with pytest.raises(ValueError, match="has no sbx-rl; pip install sbx-rl there"):
        speed.check_installed({}, sys.executable)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--settings", "fast"], "known are default"),
        (["--steps", "0"], "at least 1"),
        (["--threads", "1", "0"], "at least 1"),
        (["--cores", "100000"], "only"),
        (["--sbx-python", "/no/python"], "/no/python"),
    ],
)
def test_bad_command_lines_are_one_line_and_exit_code_2(capsys, monkeypatch, words, told):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit) as stop:
        speed.main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1


def test_nothing_is_measured_while_something_else_runs_or_without_the_peer(capsys, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit):
        speed.main([])
    assert "load average 1.50: something else runs here" in capsys.readouterr().err
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: None if name == "sb3_contrib" else object())
    with pytest.raises(SystemExit):
        speed.main(["--settings", "trpo_equal"])
    assert "sb3-contrib is not installed: pip install -c constraints.txt -e '.[peers]'" in capsys.readouterr().err


def test_the_commands_are_those_that_the_scripts_understand(tmp_path, monkeypatch):
    """Ours and the peer's process, replaced by one that notes what it was asked."""
    asked = []

    def timed(command, variables, cores=None):
        asked.append((command, variables, cores))
        if "--run-dir" in command:
            run_dir = Path(command[command.index("--run-dir") + 1])
            (run_dir / "policy").mkdir(parents=True)
            (run_dir / "policy" / "policy.safetensors").touch()
            (run_dir / "summary.json").write_text('{"global_step": 1024}')
        return "a warning\n2048\n", 2.0, 1.0, 0.0

    monkeypatch.setattr(speed, "timed", timed)
    mine = speed.time_ours("sac_equal", "Hopper-v4", 1000, 3, tmp_path, "cold", 2)
    assert (mine.asked, mine.steps, mine.threads, mine.steps_per_second) == (1000, 1024, 2, 512.0)
    command, variables, _ = asked[0]
    assert command[-4:] == ["--threads", "2", "--env-threads", "2"] and "--q-learning-rate" in command
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path) and variables["OMP_NUM_THREADS"] == "2"
    peer = speed.time_peer("sb3", "eight", "Hopper-v4", 1000, 3, 1, "python", tmp_path, "")
    assert (peer.steps, peer.who, peer.what) == (2048, "sb3", "eight")
    words = asked[1][0][2:]
    assert words[words.index("--settings") + 1] == '{"n_steps": 5}' and words[words.index("--num-envs") + 1] == "8"
    if hasattr(os, "sched_getaffinity"):
        speed.time_peer("sbx", "one", "Hopper-v4", 1000, 3, 1, "python", tmp_path, "warm")
        _, variables, cores = asked[2]
        assert len(cores) == 1 and variables["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path)
