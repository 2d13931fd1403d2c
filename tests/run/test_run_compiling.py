import shutil
from types import SimpleNamespace

import torch

from cleanrl_zoo.run.compiling import _guards_that_can_fail, compile_function, resolve_compile


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


def test_which_conditions_are_tested_at_each_call(monkeypatch):
    """Those on tensors, whatever they belong to; of the others none on a global name or on torch's own layers."""

    def guard(kind, is_global, is_layer):
        source = SimpleNamespace(is_unspecialized_builtin_nn_module=lambda: is_layer)
        return SimpleNamespace(guard_type=kind, is_global=is_global, orig_guard=SimpleNamespace(source=source))

    kinds = [(kind, *flags) for kind in ("TENSOR_MATCH", "EQUALS_MATCH") for flags in ((0, 0), (1, 0), (0, 1))]
    kept = _guards_that_can_fail([guard(*kind) for kind in kinds])
    assert kept == [True, True, True, True, False, False]
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: asked.append(settings["options"]) or function)
    compile_function(len, True)
    assert asked[0]["guard_filter_fn"] is _guards_that_can_fail


def test_compiled_code_sees_new_shapes_flags_and_parameters():
    """What is not looked at again are global names and the settings of torch's own layers, and nothing else."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.factor = torch.nn.Linear(1, 1, bias=False), 2.0

        def forward(self, x):
            return self.factor * self.layer(x)

    net = Twice()
    net.layer.weight.data.fill_(1.0)
    function = compile_function(lambda net, x, plus: net(x) + 1 if plus else net(x), True)
    x = torch.ones(1, 1)
    with torch.no_grad():
        assert function(net, x, False).tolist() == [[2.0]]
        assert function(net, torch.ones(2, 1), False).tolist() == [[2.0], [2.0]]
        assert function(net, x, True).tolist() == [[3.0]]
        net.layer.weight.data.fill_(5.0)
        assert function(net, x, False).tolist() == [[10.0]]
        net.layer = torch.nn.Linear(1, 1, bias=False)
        net.layer.weight.data.fill_(7.0)
        assert function(net, x, False).tolist() == [[14.0]]
        net.factor = 3.0
        assert function(net, x, False).tolist() == [[21.0]]
        net.layer = torch.nn.Linear(2, 3, bias=False)
        assert function(net, torch.ones(1, 2), False).shape == (1, 3)
        net.layer = net.layer.double()
        assert function(net, torch.ones(1, 2, dtype=torch.float64), False).dtype == torch.float64
    assert function(net, torch.ones(1, 2, dtype=torch.float64), False).requires_grad
    net.layer.weight.requires_grad_(False)
    assert not function(net, torch.ones(1, 2, dtype=torch.float64), False).requires_grad
