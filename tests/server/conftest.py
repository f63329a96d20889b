from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from server_client import App
from server_fakes import FakeEngine
from server_live import Live, running

from pyspec.server.app import create_app
from pyspec.server.http.serve import bind
from pyspec.server.settings import Limits, ServerSettings

if TYPE_CHECKING:  # each imports for seconds
    import anthropic
    import openai


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    return serve()


@pytest.fixture
def gpt(serve: Callable[..., Live]) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of a server."""
    import openai

    url = f"{serve().url}/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture
def claude(serve: Callable[..., Live]) -> Iterator[anthropic.Anthropic]:
    """Anthropic's."""
    import anthropic

    with anthropic.Anthropic(base_url=serve().url, api_key="unused", max_retries=0) as found:
        yield found


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
def app(engine: FakeEngine) -> App:
    return App(create_app(engine, ServerSettings()))


@pytest.fixture
def serve(engine: FakeEngine) -> Iterator[Callable[..., Live]]:
    """Start a server for `engine`; called with the settings' limits. All are stopped at the end."""
    with ExitStack() as started:

        def start(limits: Limits | None = None) -> Live:
            settings = ServerSettings(port=0, limits=limits or Limits(drain_s=0.2))
            sock = bind(settings)
            found = started.enter_context(running(create_app(engine, settings), settings, [sock]))
            return Live(engine, *found, sock.getsockname()[1])

        yield start
