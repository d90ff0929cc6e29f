"""Discovery and loading: a bad plugin is recorded with its name, and all others work."""

from __future__ import annotations

import sys

import pytest

from dovetail.registry.loader import find_plugins
from dovetail.registry.plugin import PluginFailure
from dovetail.registry.registry import Registry
from tests.registry.fakes import Site, components, scheduler

BROKEN = {  # what is wrong -> (source, phase, what the error says)
    "import error": ("import there_is_no_such_module", "import", "there_is_no_such_module"),
    "syntax error": ("def", "import", "invalid syntax"),
    "exit on import": ("import sys; sys.exit(3)", "import", "SystemExit: 3"),
    "own exception class": (
        "class Odd(BaseException): ...\nraise Odd('odd')",
        "import",
        "Odd: odd",
    ),
    "no hooks": ("x = 1", "hooks", "implements no hook"),
    "unmarked hook": ("def dovetail_components(): return []", "hooks", "not marked with @hookimpl"),
    "unknown hook": (
        "from dovetail.api import hookimpl\n@hookimpl\ndef dovetail_component(): return []",
        "hooks",
        "dovetail_component",
    ),
    "unknown argument": (
        "from dovetail.api import hookimpl\n@hookimpl\ndef dovetail_components(x): return []",
        "hooks",
        "x",
    ),
    "hook that raises": (
        "from dovetail.api import hookimpl\n@hookimpl\ndef dovetail_components(): 1/0",
        "declare",
        "ZeroDivisionError",
    ),
    "hook that exits": (
        "from dovetail.api import hookimpl\n@hookimpl\ndef dovetail_components(): raise SystemExit",
        "declare",
        "SystemExit",
    ),
    "generator that raises": (
        "from dovetail.api import hookimpl\n@hookimpl\ndef dovetail_components():\n    raise "
        "OSError('disk')\n    yield",
        "declare",
        "disk",
    ),
    "returns nothing": (
        "from dovetail.api import hookimpl\n@hookimpl\ndef dovetail_components(): pass",
        "declare",
        "returned None",
    ),
    "returns a string": (
        "from dovetail.api import hookimpl\n@hookimpl\ndef dovetail_components(): return 'fair'",
        "declare",
        "expected an iterable",
    ),
    "not a spec": (
        "from dovetail.api import hookimpl\n@hookimpl\ndef dovetail_components(): return [1]",
        "declare",
        "expected a ComponentSpec",
    ),
    "bad kind": (components('kind="policy", name="x", target="a:B"'), "declare", "'policy'"),
    "bad name": (components(scheduler("Fair!")), "declare", "lower case"),
    "bad target": (components(scheduler(target="fair.Fair")), "declare", "package.module:Class"),
    "bad requirement": (components(scheduler(requires=("torch >= ",))), "declare", "torch >= "),
    "one bad of two": (
        components(scheduler("good"), scheduler("bad", api="new")),
        "declare",
        "'new'",
    ),
    "twice the same": (components(scheduler("fair"), scheduler("fair")), "declare", "twice"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_plugin_is_recorded_and_the_rest_go_on(site: Site, what: str) -> None:
    source, phase, says = BROKEN[what]
    site.install("dovetail-broken", "2.5", modules={"broken_plugin": source})
    site.install_scheduler("dovetail-fair")
    registry = Registry.discover()
    (failure,) = failures_of(registry, "dovetail-broken")
    assert (failure.origin.id, failure.origin.version, failure.phase) == (
        "dovetail-broken/main",
        "2.5",
        phase,
    )
    assert says in failure.reason
    assert [
        c.qualified_name for c in registry.components("scheduler") if not c.origin.built_in
    ] == ["dovetail-fair:fair"]


def test_interrupt_is_no_failure(site: Site) -> None:
    site.install("dovetail-broken", modules={"broken_plugin": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        Registry.discover()


def test_output_on_import_is_kept_and_not_printed(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = "import sys\nprint('hello')\nprint('world', file=sys.stderr)\n"
    site.install("dovetail-loud", modules={"loud": noise + components(scheduler())})
    site.install("dovetail-louder", modules={"louder": noise + "1/0"})
    registry = Registry.discover()
    assert (
        next(p.output for p in registry.plugins if p.origin.distribution == "dovetail-loud")
        == "hello\nworld\n"
    )
    assert failures_of(registry, "dovetail-louder")[0].output == "hello\nworld\n"
    assert capsys.readouterr() == ("", "")


def test_log_handler_made_on_import_works_afterwards(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install(
        "dovetail-logs",
        modules={
            "logs": "import sys\nstream = sys.stderr\nprint('kept', file=stream)\n"
            + components(scheduler())
        },
    )
    Registry.discover()
    print("seen", file=sys.modules["logs"].stream)
    assert capsys.readouterr().err == "seen\n"


def test_malformed_metadata_is_a_failure_of_that_distribution(site: Site) -> None:
    site.install(
        "dovetail-broken",
        modules={"a": ""},
        raw_entry_points="[dovetail.plugins]\nthis is no entry point\n",
    )
    site.install(
        "dovetail-bad-value",
        modules={"b": ""},
        raw_entry_points="[dovetail.plugins]\nx = not a module!\n",
    )
    site.install(
        "dovetail-twice", modules={"c": ""}, raw_entry_points="[dovetail.plugins]\nx = c\nx = d\n"
    )
    registry = Registry.discover()
    for name, phase in (
        ("dovetail-broken", "find"),
        ("dovetail-bad-value", "import"),
        ("dovetail-twice", "find"),
    ):
        assert [failure.phase for failure in failures_of(registry, name)] == [phase], name


def test_nameless_distribution_is_a_failure(site: Site) -> None:
    site.install("dovetail-broken", modules={"a": ""})
    (site.path / "dovetail_broken-1.0.dist-info" / "METADATA").write_text("Version: 1.0\n")
    assert any(
        failure.phase == "find" and "Name" in str(failure.error)
        for failure in find_plugins().failures
    )


def test_finding_imports_nothing_and_is_sorted_and_deduplicated(
    site: Site, tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install(
        "Dovetail_B",
        modules={"plugin_b": "raise AssertionError"},
        entry_points={"z": "plugin_b", "a": "plugin_b"},
    )
    site.install("dovetail-a", modules={"plugin_a": "raise AssertionError"})
    shadowed = Site(site.path / "older")
    shadowed.path.mkdir()
    shadowed.install("dovetail-a", "0.1", modules={"plugin_a": ""})
    monkeypatch.setattr(sys, "path", [*sys.path, str(shadowed.path)])
    found = [
        (p.origin.id, p.origin.version)
        for p in find_plugins().plugins
        if p.origin.distribution in ("dovetail-a", "dovetail-b")
    ]
    assert found == [("dovetail-a/main", "1.0"), ("dovetail-b/a", "1.0"), ("dovetail-b/z", "1.0")]
    assert "plugin_a" not in sys.modules


def test_same_component_in_two_plugins_of_a_distribution_is_refused(site: Site) -> None:
    source = components(scheduler())
    site.install(
        "dovetail-twice",
        modules={"one": source, "two": source},
        entry_points={"one": "one", "two": "two"},
    )
    (failure,) = failures_of(Registry.discover(), "dovetail-twice")
    assert failure.origin.entry_point == "two"
    assert "scheduler 'fair' is offered by dovetail-twice/one" in str(failure.error)


def test_an_object_can_be_a_plugin(site: Site) -> None:
    source = f"""
from dovetail.api import ComponentSpec, hookimpl
class Plugin:
    @hookimpl
    def dovetail_components(self):
        return [ComponentSpec({scheduler()})]
plugin = Plugin()
"""
    site.install("dovetail-object", modules={"o": source}, entry_points={"o": "o:plugin"})
    assert Registry.discover().resolve("scheduler", "dovetail-object:fair")


def failures_of(registry: Registry, distribution: str) -> list[PluginFailure]:
    return [failure for failure in registry.failures if failure.origin.distribution == distribution]
