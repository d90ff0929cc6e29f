"""A server of the demo model for all tests of routes, and faked engines for those that script what
comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import openai
import pytest

from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import demo_tokenizer, serving_in_threads
from tests.small_model import small_demo


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The URL of a server of a small model."""
    config = {"model": small_demo(), "max_num_seqs": 16}
    settings = ServerSettings(served_model_name=("demo",))
    with serving_in_threads(config, settings) as url:
        yield url


@pytest.fixture(scope="session")
def openai_client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    """Return Anthropic's client, whose import takes a second, more than a test has."""
    return import_module("anthropic")


@pytest.fixture
def fake() -> Callable[..., FakeEngine]:
    """Makes a `FakeEngine` with the demo model's tokenizer; call it in an event loop."""

    def make(*pieces: str, **options: Any) -> FakeEngine:
        return FakeEngine(demo_tokenizer(), pieces or ("Hello", ",", " world"), **options)

    return make


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of tests marked `anyio`."""
    return "asyncio"
