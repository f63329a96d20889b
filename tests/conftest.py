"""Tests import each other's helper modules by name; they share only the seed, the choice of slow cases, and the tier of kernels.

PYSPEC_TEST_KERNELS=triton uses that tier in tests that leave the kernels open (make check-gpu KERNELS=triton). PYSPEC_TEST_TIMES=1
writes a line at each test's end, so that an interrupted run shows the passed tests and their times. PYSPEC_TEST_PART=1/3 runs the first of three
parts of the tests, of each of which it has some.
"""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import pytest
import torch

for folder in ("models", "engine", "draft", "constrain", "sample"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
sys.path.insert(0, str(Path(__file__).parent))

from sampling import mark_slow  # noqa: E402

from pyspec.cuda import kernel_context  # noqa: E402
from pyspec.cuda.kernel_context import KernelContext  # noqa: E402
from pyspec.cuda.op import tiers_of  # noqa: E402
from pyspec.errors import BadTemplate  # noqa: E402
from pyspec.text.template import ChatTemplate  # noqa: E402

gc.disable()  # until all tests are collected: thousands of objects come to stay, and each collection passes over them
KERNELS = os.environ.get("PYSPEC_TEST_KERNELS", "auto")
PART = os.environ.get("PYSPEC_TEST_PART", "1/1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before -m looks at the marks."""
    mark_slow(items)
    part, n_part = map(int, PART.split("/"))
    items[:] = [item for item in items if crc32(item.nodeid.encode()) % n_part == part - 1]


def pytest_collection_finish() -> None:
    """Leave the thousands of tests and their modules out of each collection of garbage, and make collections rarer: they were a fifth of
    the tests' time. Tests that look at memory collect by themselves."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if os.environ.get("PYSPEC_TEST_TIMES") and (report.when == "call" or report.outcome != "passed"):
        line = f"{report.outcome} {report.nodeid.rpartition('::')[2]}: {report.duration:.1f} s\n"
        os.write(2, f"\n{line}".encode())  # past pytest's capture


@pytest.fixture(autouse=True, scope="module")
def _caches_of_a_module_end_with_it(request: pytest.FixtureRequest) -> Iterator[None]:
    """The million nodes of a parsed package make each later collection of garbage take seconds, and every engine's end makes one."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()


@pytest.fixture(autouse=True)
def _levels_of_logs_end_with_a_test() -> Iterator[None]:
    """A test that runs a command sets levels and handlers of the process; the next test reads its own log as if it ran first."""
    loggers = [logging.getLogger(name) for name in (None, "pyspec", "huggingface_hub")]
    before = [(log.level, log.handlers[:], log.propagate) for log in loggers]
    yield
    for log, (level, handlers, propagate) in zip(loggers, before, strict=True):
        log.setLevel(level)
        log.handlers[:], log.propagate = handlers, propagate


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """A test that draws from torch's own generator draws the same numbers in every run and order."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(
            0
        )  # the other notes the stack for devices that are not there


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models on a busy machine: a second torch thread waits more than it computes."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.fixture(autouse=True)
def _kernels_as_before() -> Iterator[None]:
    """A test may set this thread's context; the next has its own again."""
    before = kernel_context.current()
    yield
    kernel_context.use(before)


@pytest.fixture(autouse=True, scope="session")
def _templates_are_checked_once() -> Iterator[None]:
    """A load starts a process that checks the chat template, which takes longer than the rest of a tiny model's load. Here the first load
    with a template does; later ones start it at their first chat, unless the template is broken."""
    warm, passed = ChatTemplate.warm, set()

    def warm_once(template: ChatTemplate) -> None:
        key = template.source, template.tool_use and template.tool_use.source
        if key not in passed:
            warm(template)
            with suppress(BadTemplate):
                template.check()
                passed.add(key)

    ChatTemplate.warm = warm_once
    yield
    ChatTemplate.warm = warm


@pytest.fixture(autouse=True, scope="session")
def _kernels() -> Iterator[None]:
    """The requested tier in place of "auto"."""
    if KERNELS == "auto":
        yield
        return
    from pyspec.engine.load import load as loading

    loading.tiers_of = lambda text: tiers_of(KERNELS if text == "auto" else text)
    kernel_context.use(KernelContext(tiers_of(KERNELS)))
    yield
    loading.tiers_of = tiers_of
