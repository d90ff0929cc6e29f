"""Plants faults in the product, one at a time, and records which tests find them.

    python -m tools.seeded_faults --list                            # the 100 faults of seed 0
    python -m tools.seeded_faults --out faults.json                 # tries each; called again, it goes on
    python -m tools.seeded_faults --out faults.json --seconds 3000  # begins no run after this time

A fault is one changed operator, constant, branch or call. Faults are spread evenly over the
packages, and the seed decides which. All are tried in three stages, each against the tests that
follow, up to the first failure; a stage skips the faults that one before it has found:

1. quick tests of the files that name the fault's module, its functions or its classes,
2. the other quick tests of its package, first those of files that name a module that imports it,
3. slow tests, those of the files of stage 1 first.

Limits are in CPU seconds, so that other programs on the machine change no verdict. A run that
exceeds `--cpu-seconds` has not found its fault. A test that takes more than TEST_CPU_S, or waits
for more than IDLE_S without using a processor, has. At the end all tests that found a fault run
without one: those that fail have found nothing.

The file is changed in place and restored, so the tool needs a checkout without changes.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from tests.budget import descendants_cpu_s

ROOT = Path(__file__).parents[1]
STAGES = ("quick tests that name it", "quick tests of its package", "slow tests")
MOST_NAMING = 12  # test files that name a module
RUN_CPU_S = 120.0
TEST_CPU_S = 60.0  # of a quick test, which has 0.5, and of most slow ones
IDLE_S = 120.0
IDLE_CPU_S = 0.5  # at most, of processes that only wait
LOOKS_EVERY_S = 0.5
COMPARED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
COMPUTED = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "+",
}
WITHOUT_TESTS_ON_A_CPU = ("kernels", "triton", "flash", "ray_", "templates")
TESTS = {  # of packages whose tests aren't in tests/<last part of the name> alone
    "dovetail": ["config", "front", "structured", "test_*.py"],
    "dovetail.api": ["api", "engine", "schedulers"],
    "dovetail.base": ["test_*.py", "config", "registry", "cli", "models"],
    "dovetail.compat": ["e2e"],
    "dovetail.engine": ["engine", "e2e"],
    "dovetail.front": ["front", "e2e"],
    "dovetail.gguf": ["models", "hostile"],
    "dovetail.nn": ["nn", "models"],
    "dovetail.request": ["api", "front", "e2e", "engine"],
    "dovetail.testing": ["testing", "conformance"],
    "dovetail_executors": ["executors", "runtime", "e2e"],
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A replacement in one line of a file."""

    package: str
    path: str
    line: int
    begin: int  # columns, in characters
    end: int
    kind: str
    new: str

    def apply(self) -> str:
        """Return the file's text with the fault."""
        lines = (ROOT / self.path).read_text(encoding="utf-8").splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.begin] + self.new + line[self.end :]
        return "".join(lines)

    def __str__(self) -> str:
        old = (ROOT / self.path).read_text(encoding="utf-8").splitlines()[self.line - 1]
        return f"{self.path}:{self.line} {self.kind}: {old[self.begin : self.end]} -> {self.new}"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of tests with a fault."""

    profile: str
    end: str  # "failed", "passed", "stuck", "CPU limit", or the status of a process that crashed
    failed: list[str]
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Tried:
    """A fault and its runs, one for each stage so far."""

    fault: Fault
    runs: list[Run]

    @property
    def found(self) -> bool:
        return bool(self.runs) and self.runs[-1].end not in ("passed", "CPU limit")


def packages() -> dict[str, list[Path]]:
    """Return the files of each package; subpackages of the core are packages of their own."""
    found: dict[str, list[Path]] = {}
    for folder in (ROOT / "core", *(ROOT / "plugins").iterdir(), *(ROOT / "apps").iterdir()):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts
            if any(word in "/".join(parts) for word in WITHOUT_TESTS_ON_A_CPU):
                continue
            inside_core = parts[0] == "dovetail" and len(parts) > 2
            found.setdefault(".".join(parts[: 1 + inside_core]), []).append(path)
    return dict(sorted(found.items()))


def faults_of(package: str, path: Path) -> Iterator[Fault]:
    """Yield every possible fault of a file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    name = str(path.relative_to(ROOT))
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inner = [node for statement in function.body for node in ast.walk(statement)]
        for node in inner:
            for line, begin, end, kind, new in _changes(node):
                if lines[line - 1].isascii():  # columns of `ast` are bytes
                    yield Fault(package, name, line, begin, end, kind, new)


def _changes(node: ast.AST) -> Iterator[tuple[int, int, int, str, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        yield from _between(node.left, node.comparators[0], COMPARED[type(node.ops[0])])
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield from _between(node.left, node.right, COMPUTED[type(node.op)])
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield (node.lineno, node.col_offset, _end(node), "constant", str(value))
    elif isinstance(node, ast.If) and node.test.lineno == node.test.end_lineno:
        yield (node.test.lineno, node.test.col_offset, node.test.col_offset, "branch", "not ")
    elif (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call | ast.Await)
        and node.lineno == node.end_lineno
    ):
        yield (node.lineno, node.col_offset, _end(node), "call", "pass")


def _between(left: ast.expr, right: ast.expr, new: str) -> Iterator[tuple[int, int, int, str, str]]:
    if (
        left.end_lineno == right.lineno
        and left.end_lineno is not None
        and left.end_col_offset is not None
    ):
        yield (left.end_lineno, left.end_col_offset, right.col_offset, "operator", f" {new} ")


def _end(node: ast.expr | ast.stmt) -> int:
    return node.end_col_offset if node.end_col_offset is not None else node.col_offset


def parses(fault: Fault) -> bool:
    try:
        ast.parse(fault.apply())
    except SyntaxError:
        return False
    return True


def choose(count: int, seed: int) -> list[Fault]:
    """Choose faults, as many of each package as of any other."""
    chance = random.Random(seed)
    of_packages = packages()
    chosen: list[Fault] = []
    while len(chosen) < count:
        for package, paths in of_packages.items():
            path = chance.choice(paths)
            candidates = [fault for fault in faults_of(package, path) if fault not in chosen]
            if not candidates or len(chosen) == count:
                continue
            kind = chance.choice(sorted({fault.kind for fault in candidates}))
            fault = chance.choice([fault for fault in candidates if fault.kind == kind])
            if parses(fault):
                chosen.append(fault)
    return chosen


def tests_of(package: str) -> list[Path]:
    """Return the test files of a package."""
    folders = TESTS.get(package, [package.rpartition(".")[2].removeprefix("dovetail_")])
    found: list[Path] = []
    for folder in folders:
        for path in sorted((ROOT / "tests").glob(folder)):
            found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return found


def tests_that_name(fault: Fault) -> list[Path]:
    """Return up to MOST_NAMING test files that import the fault's module, or are of its package and
    name what the module defines. Of a module that no test imports, those that import one that uses
    it.

    Files that import the module come first, those named after it before others; then those that
    name the functions and classes around the fault most often.
    """
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    importing = _importing(fault.path, tests) or _importing_users(fault.path, tests)
    own = set(tests_of(fault.package))
    around, others = _defined(fault)
    ranks = {}
    for path in tests:
        named = (_count(around, _text(path)), _count(others, _text(path)))
        if path in importing or (path in own and any(named)):
            ranks[path] = (importing.get(path, 0), path in own, *named)
    return sorted(ranks, key=ranks.__getitem__, reverse=True)[:MOST_NAMING]


def _importing(module_file: str, paths: Sequence[Path]) -> dict[Path, int]:
    """Return 2 for files that are named after a module of the product, 1 for others that import
    it."""
    parts = Path(module_file).with_suffix("").parts
    begin = next(index for index, part in enumerate(parts) if part.startswith("dovetail"))
    module = ".".join(parts[begin:]).removesuffix(".__init__")
    parent, _, name = module.rpartition(".")
    imported = re.compile(
        rf"\b{re.escape(module)}\b|from {re.escape(parent)} import [^\n]*\b{name}\b"
    )
    # most files don't have the name at all, which is found much sooner
    found = {path: 1 for path in paths if name in _text(path) and imported.search(_text(path))}
    return found | {path: 2 for path in paths if path.name == f"test_{name}.py"}


def _importing_users(module_file: str, paths: Sequence[Path]) -> dict[Path, int]:
    """Return `_importing` of the product's modules that import a module."""
    product = [path for of_package in packages().values() for path in of_package]
    found: dict[Path, int] = {}
    for user in _importing(module_file, product):
        found |= _importing(str(user.relative_to(ROOT)), paths)
    return found


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _defined(fault: Fault) -> tuple[set[str], set[str]]:
    """Return the public functions and classes of a module: those around a fault, and others at its
    top level."""
    tree = ast.parse((ROOT / fault.path).read_text(encoding="utf-8"))
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    around = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, definitions)
        and node.lineno <= fault.line <= (node.end_lineno or node.lineno)
    }
    top = {node.name for node in tree.body if isinstance(node, definitions)}
    return _public(around), _public(top - around)


def _public(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def _count(names: set[str], text: str) -> int:
    return len(re.findall(rf"\b(?:{'|'.join(sorted(names))})\b", text)) if names else 0


def tests_of_stage(fault: Fault, stage: int) -> list[Path]:
    naming = tests_that_name(fault)
    others = [path for path in tests_of(fault.package) if path not in naming]
    of_users = _importing_users(fault.path, others)
    others.sort(key=lambda path: of_users.get(path, 0), reverse=True)
    return [naming, others, [*naming, *others]][stage]


def run_tests(profile: str, tests: Sequence[str], cpu_limit_s: float, *options: str) -> Run:
    """Run tests in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    environ = {**os.environ, "DOVETAIL_TEST_PROFILE": profile, "DOVETAIL_TEST_BUDGET": "off"}
    with TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end, cpu_s = watch(process, output, cpu_limit_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        failed = re.findall(
            r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output.read(), re.MULTILINE
        )
    if not end:
        endings = {0: "passed", 1: "failed", 2: "failed", 5: "passed"}  # 5: there were no tests
        end = endings.get(process.returncode, f"exit status {process.returncode}")
    return Run(profile, end, failed, round(cpu_s, 1))


def watch(process: subprocess.Popen[bytes], output: IO[str], limit_s: float) -> tuple[str, float]:
    """Wait for pytest to end, or to reach a limit.

    Return the limit, empty if pytest ended, and the CPU seconds that it took.
    """
    cpu_s = 0.0
    written = 0
    written_at_s = 0.0  # CPU seconds, at the end of the last test
    used_at_s = 0.0  # likewise, when the processes were last seen to use a processor
    used_at = time.monotonic()
    end = ""
    while not end:
        try:
            process.wait(LOOKS_EVERY_S)
        except subprocess.TimeoutExpired:
            cpu_s = descendants_cpu_s(os.getpid())
        else:
            return "", cpu_s
        size = os.fstat(output.fileno()).st_size
        if size != written:
            written = size
            written_at_s = cpu_s
        if cpu_s - used_at_s > IDLE_CPU_S:
            used_at_s = cpu_s
            used_at = time.monotonic()
        if cpu_s - written_at_s > TEST_CPU_S or time.monotonic() - used_at > IDLE_S:
            end = "stuck"
        elif cpu_s > limit_s:
            end = "CPU limit"
    return end, cpu_s


def try_fault(fault: Fault, stage: int, cpu_limit_s: float) -> Run:
    """Run the tests of a stage with the fault, up to the first failure."""
    profile = STAGES[stage].partition(" ")[0]
    tests = [str(path.relative_to(ROOT)) for path in tests_of_stage(fault, stage)]
    if not tests:
        return Run(profile, "passed", [], 0.0)
    path = ROOT / fault.path
    original = path.read_text(encoding="utf-8")
    path.write_text(fault.apply(), encoding="utf-8")
    try:
        return run_tests(profile, tests, cpu_limit_s, "-x")
    finally:
        path.write_text(original, encoding="utf-8")


def failing_without_faults(results: list[Tried]) -> set[str]:
    """Return those of the tests that found a fault which fail without one, too."""
    failing: set[str] = set()
    for profile in ("quick", "slow"):
        tests = {
            test
            for tried in results
            for run in tried.runs
            if run.profile == profile
            for test in run.failed
        }
        if tests:
            failing |= set(run_tests(profile, sorted(tests), math.inf).failed)
    return failing


def read(path: Path, faults: list[Fault]) -> list[Tried]:
    """Return the results so far, in the order of the faults."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    runs = {Fault(**tried["fault"]): [Run(**run) for run in tried["runs"]] for tried in kept}
    return [Tried(fault, runs.get(fault, [])) for fault in faults]


def try_all(results: list[Tried], out: Path, cpu_limit_s: float, end: float) -> None:
    """Take each fault through the stages, until `end` on the monotonic clock."""
    for stage, name in enumerate(STAGES):
        for tried in results:
            if tried.found or len(tried.runs) > stage:
                continue
            if time.monotonic() > end:
                return
            run = try_fault(tried.fault, stage, cpu_limit_s)
            tried.runs.append(run)
            out.write_text(json.dumps([asdict(each) for each in results], indent=1))
            print(f"{name}: {run.end} {run.failed} in {run.cpu_s} CPU s: {tried.fault}", flush=True)


def summary(results: list[Tried], failing: set[str]) -> str:
    """Return counts of the faults that were tried, and the missed ones in lines of their own."""
    tried = [each for each in results if each.runs]
    wrong = [each for each in tried if failing.intersection(each.runs[-1].failed)]
    found = [each for each in tried if each.found and each not in wrong]
    quick = [each for each in found if each.runs[-1].profile == "quick"]
    missed = [each for each in tried if not each.found]
    lines = [
        f"{len(tried)} faults tried, {len(found)} found; {len(quick)} of these, "
        f"{100 * len(quick) / max(1, len(found)):.0f} %, by quick tests"
    ]
    lines += [f"found by a test that fails without it: {each.fault}" for each in wrong]
    lines += [
        f"not found in {sum(run.cpu_s for run in each.runs):.0f} CPU s and {len(each.runs)} of "
        f"{len(STAGES)} stages ({', '.join(run.end for run in each.runs)}): {each.fault}"
        for each in missed
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after these")
    parser.add_argument("--cpu-seconds", type=float, default=RUN_CPU_S, help="limit of each run")
    args = parser.parse_args()
    faults = choose(args.count, args.seed)
    if args.list or args.out is None:
        print("\n".join(map(str, faults)))
        return
    changed = subprocess.run(["git", "diff", "--quiet"], cwd=ROOT, check=False).returncode
    if changed:
        raise SystemExit(
            "the checkout has changes: commit them first, since files are changed and restored"
        )
    results = read(args.out, faults)
    try_all(results, args.out, args.cpu_seconds, time.monotonic() + args.seconds)
    print(summary(results, failing_without_faults(results)))


if __name__ == "__main__":
    main()
