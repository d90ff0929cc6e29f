"""Plants faults in the product, one at a time, and records which tests find them.

    python -m tools.seeded_faults --list                            # the 100 faults of seed 0
    python -m tools.seeded_faults --out faults.json                 # tries each against its package's tests
    python -m tools.seeded_faults --out faults.json --seconds 3000  # stops in time; called again, it goes on
    python -m tools.seeded_faults --out faults.json --covered quick.coverage slow.coverage

A fault is one changed operator, constant, branch or call. Faults are spread evenly over the
packages, and the seed decides which. Each is tried against the quick tests of the files that name
its module, then of its package, and against the slow ones if those don't find it. The file is changed in place and restored, so it needs
a checkout without changes. A run that times out counts as found.

With `--covered`, the tests that run the fault's line are tried first, of all packages; those of its
own before others. The two files are made beforehand, by `coverage run -m pytest -p no:xdist` with
`dynamic_context = test_function`, in the same checkout. Only if they don't find the fault are all
tests of the package tried: coverage doesn't see other processes, nor some tests in this one.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN_LIMIT_S = 600.0
MOST_NAMING = 12  # test files that name a module
PROFILES = ("quick", "slow")
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
    "dovetail.compat": ["e2e"],
    "dovetail.engine": ["engine", "e2e"],
    "dovetail.front": ["front", "e2e"],
    "dovetail.nn": ["nn", "models"],
    "dovetail_executors.runtime": ["runtime", "e2e"],
    "dovetail.testing": ["testing", "conformance"],
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


def tests_of(package: str) -> list[str]:
    folders = TESTS.get(package, [package.rpartition(".")[2].removeprefix("dovetail_")])
    found = (sorted((ROOT / "tests").glob(folder)) for folder in folders)
    return [str(path) for paths in found for path in paths]


def tests_that_name(fault: Fault) -> list[str]:
    """Return the test files that name the fault's module, those of its package first, MOST_NAMING at
    most."""
    parts = Path(fault.path).with_suffix("").parts
    begin = next(index for index, part in enumerate(parts) if part.startswith("dovetail"))
    module = ".".join(parts[begin:]).removesuffix(".__init__")
    parent, _, name = module.rpartition(".")
    named = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(parent)} import [^\n]*\b{name}\b")
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if named.search(path.read_text(encoding="utf-8"))
    ]
    own = tuple(tests_of(fault.package))
    return sorted(files, key=lambda file: not file.startswith(own))[:MOST_NAMING]


def tests_that_run(fault: Fault, data_file: Path) -> list[str]:
    """Return the tests that run the fault's line, those of its package first."""
    from coverage import CoverageData

    data = CoverageData(str(data_file))
    data.read()
    contexts = data.contexts_by_lineno(str(ROOT / fault.path)).get(fault.line, [])
    found = {test_of(context) for context in contexts} - {""}
    own = tuple(tests_of(fault.package))
    return sorted(found, key=lambda test: (not test.startswith(own), test))


def test_of(context: str) -> str:
    """Return the pytest name of the test `package.module.function`, or `package.module.Class.method`;
    empty if it isn't a test's."""
    parts = context.split(".")
    for count in range(len(parts) - 1, 0, -1):
        path = ROOT.joinpath(*parts[:count]).with_suffix(".py")
        if path.exists():
            return "::".join([str(path), *parts[count:]])
    return ""


def finds(fault: Fault, profile: str, tests: list[str]) -> dict[str, object]:
    """Run tests with the fault."""
    path = ROOT / fault.path
    original = path.read_text(encoding="utf-8")
    environ = {**os.environ, "DOVETAIL_TEST_PROFILE": profile, "DOVETAIL_TEST_BUDGET": "off"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    begun = time.monotonic()
    path.write_text(fault.apply(), encoding="utf-8")
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
            check=False,
        )
        status: int | None = done.returncode
        failed = [
            line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
        ][:1]
    except subprocess.TimeoutExpired:
        status = None
        failed = ["timed out"]
    finally:
        path.write_text(original, encoding="utf-8")
    return {
        "profile": profile,
        "found": status not in (0, 5),
        "tests": len(tests),
        "by": failed,
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no fault after this time"
    )
    parser.add_argument(
        "--covered",
        nargs=2,
        type=Path,
        metavar=("QUICK", "SLOW"),
        help="coverage of the quick and of the slow tests",
    )
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
    results = json.loads(args.out.read_text()) if args.out.exists() else []
    end = time.monotonic() + args.seconds
    for fault in faults[len(results) :]:
        if time.monotonic() > end:
            break
        runs: list[dict[str, object]] = []
        covered = args.covered or (None, None)
        for profile, data_file in zip(PROFILES, covered, strict=True):
            running = tests_that_run(fault, data_file) if data_file is not None else []
            run = finds(fault, profile, running) if running else None
            if run is None or not run["found"]:
                run = finds(fault, profile, [*tests_that_name(fault), *tests_of(fault.package)])
            runs.append(run)
            if runs[-1]["found"]:
                break
        results.append({"fault": asdict(fault), "runs": runs})
        args.out.write_text(json.dumps(results, indent=1))
        print(
            f"{'found' if runs[-1]['found'] else 'missed'} by {runs[-1]['profile']} "
            f"{runs[-1]['by']}: {fault}",
            flush=True,
        )
    quick = sum(bool(result["runs"][0]["found"]) for result in results)
    either = sum(bool(result["runs"][-1]["found"]) for result in results)
    print(
        f"of {len(results)} faults, the tests find {either}: quick ones {quick}, "
        f"{100 * quick / max(1, either):.0f} % of them"
    )


if __name__ == "__main__":
    main()
