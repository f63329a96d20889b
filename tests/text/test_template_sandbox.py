"""Hostile templates: each costs its own process, never the parent's time, memory or files."""

import os
import resource
import subprocess
import sys
import threading
import time

import pytest
from waiting import lives, wait_for

import pyspec.text.template as template_module
from pyspec.errors import RequestError
from pyspec.text.template import CHATML, ChatTemplate

USER = [{"role": "user", "content": "x"}]

HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "folded power": "{{ 9 ** (9 ** 9) }}",
    "repeat": "{{ 'a' * 10**9 }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "long output": "{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}",
    "doubling": "{% set n = namespace(x='a' * 99) %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "join": "{% set n = namespace(x=['a' * 1000000]) %}{{ (n.x * 1000) | join }}",
    "indent": "{{ messages | tojson(indent=100000000) }}",
    "list": "{{ range(99999) | map('string') | map('center', 40000) | list }}",
    "range": "{{ range(10**12) | list }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "nesting": "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "import": "{% include '/etc/passwd' %}",
    "change": "{{ messages.append(1) }}",
    "huge refusal": "{{ raise_exception('a' * 10**7) }}",
}


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_soon_and_costs_the_parent_nothing(name, monkeypatch):
    monkeypatch.setattr(template_module, "TIME_S", 1.0)  # spares the tests' time
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with pytest.raises(RequestError) as e:
        ChatTemplate(HOSTILE[name]).render(USER)
    assert time.monotonic() - began < 60  # 1 s is the template's; the rest is a loaded machine's
    assert len(str(e.value)) < 1200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.slow
def test_a_template_works_again_after_its_process_was_killed(monkeypatch):
    monkeypatch.setattr(template_module, "TIME_S", 1.0)
    template = ChatTemplate(
        "{% if messages[0].content == 'die' %}{{ 'a' * 10**9 }}{% endif %}"
        "{% if messages[0].content == 'hang' %}"
        + HOSTILE["loops"]
        + "{% endif %}{{ messages[0].content }}"
    )
    for content in ("die", "hang"):
        with pytest.raises(RequestError):
            template.render([{"role": "user", "content": content}])
        assert template.render(USER) == "x"


def test_a_closed_template_has_no_process_and_renders_again():
    template = ChatTemplate(CHATML)
    text = template.render([{"role": "user", "content": "Hi"}])
    process = template._renderer.process
    assert process is not None and process.poll() is None
    template.close()
    assert process.poll() is not None
    template.close()
    assert template.render([{"role": "user", "content": "Hi"}]) == text
    assert template._renderer.process is not process


def test_attributes_of_python_are_out_of_reach():
    for source in (
        "{{ messages.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__dict__ }}",
    ):
        try:
            text = ChatTemplate(source).render(USER)
        except RequestError:
            continue
        assert text == ""


def test_threads_get_their_own_answers():
    template, answers = ChatTemplate(CHATML), {}

    def work(i: int) -> None:
        for n in range(20):
            content = f"{i}-{n}-" + "y" * (i * 30000)
            answers[i, n] = f"user\n{content}<|im_end|>" in template.render(
                [{"role": "user", "content": content}]
            )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 160 and all(answers.values())


def test_messages_larger_than_a_pipe_go_through():
    content = "\U0001f642" * 1_000_000
    assert (
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": content}])
        == content
    )


def test_descriptors_above_1023_are_no_obstacle():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert ChatTemplate("{{ messages[0].content }}").render(USER) == "x"
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_forked_child_does_not_talk_to_its_parent_s_process():
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(USER) == "x"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if template.render([{"role": "user", "content": "child"}]) == "child" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert template.render(USER) == "x"


RENDER = """
from pyspec.text.template import ChatTemplate
template = ChatTemplate("{{ messages[0].content }}")
template.render([{"role": "user", "content": "x"}])
print(template._renderer.process.pid, flush=True)
"""


@pytest.mark.parametrize("end", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_outlives_its_parent(end):
    done = subprocess.run(
        [sys.executable, "-c", RENDER + end], capture_output=True, text=True, timeout=60
    )
    wait_for(lambda: not lives(int(done.stdout)), 10)


def test_the_parent_imports_neither_jinja2_nor_torch():
    code = "import sys, pyspec.text.template, pyspec.text.stream; print({'jinja2', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_a_module_in_the_working_directory_is_not_run(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert ChatTemplate("{{ messages[0].content }}").render(USER) == "x"
