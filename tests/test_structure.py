"""The house rules: where imports may point, one room per concept, files that a student reads to the end."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cleanrl_zoo"
SOURCES = sorted(p for folder in ("cleanrl_zoo", "algos", "benchmarks") for p in (ROOT / folder).rglob("*.py"))
ALGOS = sorted((ROOT / "algos").glob("*.py"))
ROOMS = ("core", "data", "envs", "llm", "nn", "run")
ALLOWED = {room: {"core", room} for room in ROOMS} | {"core": {"core"}, "zoo": {"core", "nn", "envs", "zoo"}}
ALLOWED["sb3"] = {"nn", "envs", "zoo"}  # another package's policies, brought into the zoo


def imported_rooms(path: Path) -> set[str]:
    """The parts of cleanrl_zoo that a file imports: `core`, `zoo`, ..."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            names = [node.module or ""]
            if node.module == "cleanrl_zoo":
                names = [f"cleanrl_zoo.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            assert name.split(".")[0] != "algos", f"{path}: nothing imports algos"
            if name.startswith("cleanrl_zoo."):
                rooms.add(name.split(".")[1])
    return rooms


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_only_to_the_left(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert imported_rooms(path) <= ALLOWED.get(part, set())


@pytest.mark.parametrize("path", ALGOS, ids=lambda p: p.name)
def test_an_algorithm_file_is_short_or_says_why(path):
    text = path.read_text()
    header = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) <= 300 or "longer than" in header


@pytest.mark.parametrize("path", ALGOS, ids=lambda p: p.name)
def test_an_algorithm_file_keeps_the_order(path):
    """Header, Args, networks, collect, update, main; the header names its run line."""
    tree = ast.parse(path.read_text())
    assert f"python algos/{path.name}" in (ast.get_docstring(tree) or "")
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    order = [name for name in names if name in ("Args", "collect", "update", "main")]
    assert order == ["Args", "collect", "update", "main"]


def defined_functions() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return found


@pytest.mark.parametrize(
    "name", ["gae", "clipped_surrogate", "normalize", "aggregate", "save_checkpoint", "make_vec", "mlp"]
)
def test_a_concept_has_one_room(name):
    assert len(defined_functions()[name]) == 1


def test_no_second_gae():
    """The recursion over time lives in core/returns.py: nobody else multiplies γ by λ."""
    pattern = re.compile(r"gamma\s*\*\s*(args\.)?(gae_)?lambda")
    assert {p.name for p in SOURCES if pattern.search(p.read_text())} <= {"returns.py"}


def test_no_pickle_is_loaded():
    """Neither anywhere nor in a file of torch's, unless only tensors are let in."""
    pattern = re.compile(
        r"pickle\.loads?\(|(?<!safetensors\.)torch\.load\((?!.*weights_only=True\))|allow_pickle\s*=\s*True|"
        r"import pickle|cloudpickle|weights_only\s*=\s*False"
    )
    assert [p for p in SOURCES if pattern.search(p.read_text())] == []


def test_every_public_function_of_the_package_has_a_docstring():
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                if not ast.get_docstring(node):
                    missing.append(f"{path.name}:{node.name}")
    assert missing == []
