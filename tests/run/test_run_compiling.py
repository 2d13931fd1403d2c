import shutil

from cleanrl_zoo.run.compiling import compile_function, resolve_compile


def test_without_a_compiler_the_run_says_so_and_goes_on(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    assert resolve_compile(True, "cpu") is False
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "/nonexistent/g++ was not found" in err
    monkeypatch.setenv("CXX", "/bin/false")
    assert resolve_compile(True, "cpu") is False and "does not work" in capsys.readouterr().err
    assert resolve_compile(False, "cpu") is False and capsys.readouterr().err == ""


def test_the_compiler_is_the_one_that_torch_takes(monkeypatch):
    """Only g++ counts on Linux: another one on the path would pass a check and fail in the first iteration."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "clang++" else None)
    assert resolve_compile(True, "cpu") is False


def test_not_enabled_means_untouched():
    assert compile_function(len, False) is len
