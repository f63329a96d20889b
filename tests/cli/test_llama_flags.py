"""Every flag of llama-server is honoured, ignored with a word, or refused with the reason; none is read as another."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from sampling import few

from pyspec.cli import main
from pyspec.cli.flags import FlagCommand, LlamaFlag, elsewhere, honoured_flags, llama_flags
from pyspec.cli.options import EngineChoice
from pyspec.errors import PyspecError

TEXT = (Path(__file__).parent / "llama_server_flags.txt").read_text(encoding="utf-8")
LINES = [line.split() for line in TEXT.splitlines() if not line.startswith("#")]
NAMES = [word for line in LINES for word in line if not word.startswith("$")]
ENV = {word: words[-1][1:] for words in LINES if words[-1].startswith("$") for word in words[:-1]}
FLAGS = list(dict.fromkeys(llama_flags().values()))
HONOURED = {name: flag for flag in honoured_flags() for name in flag.names}
VALUES = ("3", "1")


class Loaded(PyspecError):
    """Raised in place of a load, with its parameters."""

    exit_code = 99


@pytest.fixture(autouse=True)
def no_load(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Settings as they reach the server and the engine."""
    seen: dict[str, object] = {}

    def serve(load: object, settings: object, ready: object, sockets: object) -> None:
        seen["server"] = settings
        raise Loaded("loaded")

    def check(self: EngineChoice, np: int = 0) -> None:
        seen["engine"] = self

    monkeypatch.setattr("pyspec.server.http.listen.listen", lambda settings: [])
    monkeypatch.setattr("pyspec.server.http.serve.run", serve)
    monkeypatch.setattr(EngineChoice, "check", check)
    return seen


def server() -> FlagCommand:
    command = main.get_command(click.Context(main), "server")
    assert isinstance(command, FlagCommand)
    return command


def own() -> dict[str, click.Option]:
    command = server()
    around = click.Context(command, help_option_names=["-h", "--help"])
    options = [p for p in command.get_params(around) if isinstance(p, click.Option)]
    return {name: option for option in options for name in (*option.opts, *option.secondary_opts)}


def call(*args: str, **env: str) -> Result:
    result = CliRunner().invoke(main, ["server", "demo", *args], env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


def given(flag: LlamaFlag, name: str) -> list[str]:
    kind = flag.takes.rstrip(",?").split("|")[0]
    first = VALUES[0] if kind in ("", "whole", "number") else kind
    return [name, *(first, *VALUES[1:])[: flag.n_value]]


def test_the_table_has_every_spelling_of_llama_server():
    assert len(NAMES) == 412 and sorted(set(NAMES) - set(llama_flags()) - set(HONOURED)) == []


def test_the_table_has_the_environment_variables_of_llama_server():
    for name in NAMES:
        flag, env = (HONOURED | llama_flags())[name], ENV.get(name, "")
        if env.startswith("LLAMA_ARG_") and not name.startswith(("--no-", "-no-")):
            assert flag.env == env, name


def test_what_is_honoured_is_an_option_of_the_server_and_nothing_else_is():
    ours = own() | {"--usage": None}
    assert sorted(HONOURED.keys() - ours.keys()) == []
    assert sorted(name for name in set(NAMES) & ours.keys() if name not in HONOURED) == []
    assert [flag for flag in honoured_flags() if not set(NAMES) & set(flag.names)] == []
    assert sorted(llama_flags().keys() & ours.keys()) == []


IGNORED = [f for f in FLAGS if f.fate == "ignored"]


@pytest.mark.parametrize("flag", few(IGNORED, *IGNORED[::6]), ids=lambda f: f.names[0])
def test_an_ignored_flag_is_taken_with_its_values_and_says_why_it_changes_nothing(flag: LlamaFlag):
    for name in flag.names:
        result = call(*given(flag, name), "--log-format", "json")
        assert result.exit_code == Loaded.exit_code, result.output
        assert f"{name} has no effect: " in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-fa", "maybe"], "-fa: 'maybe' is not on, off or auto"),
        (["--flash-attn=maybe"], "--flash-attn: 'maybe' is not on, off or auto"),
        (["--poll", "abc"], "--poll: 'abc' is not a whole number"),
        (["--poll"], "--poll: a value is missing: a whole number"),
        (["-ts", "3,x"], "-ts: 'x' is not a number"),
        (["-ts", "3,"], "-ts: '' is not a number"),
        (["--defrag-thold", "0.1.2"], "--defrag-thold: '0.1.2' is not a number"),
        (["--numa", "all"], "--numa: 'all' is not distribute, isolate or numactl"),
        (["-lm", "ram"], "-lm: 'ram' is not auto, none, mmap, mlock, mmap+mlock or dio"),
        (["-mmdev"], "-mmdev: a value is missing"),
    ],
    ids=" ".join,
)
def test_an_ignored_flag_refuses_values_that_llama_server_refuses(args: list[str], said: str):
    result = call(*args)
    assert result.exit_code == 2 and result.stderr.endswith(f"Error: {said}\n")


def test_values_of_ignored_flags_are_read_as_llama_server_reads_them():
    args = "-fa off -fa auto -fa -1 -fa 1 -fa -ts 3/1,0.5 --poll 50 -sps 1E-1"
    assert call(*args.split(), "-lm", "mmap+mlock").exit_code == Loaded.exit_code
    result = call(LLAMA_ARG_FLASH_ATTN="maybe")
    assert result.exit_code == 2 and "LLAMA_ARG_FLASH_ATTN: 'maybe' is not" in result.stderr
    assert call(LLAMA_ARG_FLASH_ATTN="").exit_code == Loaded.exit_code
    assert call(LLAMA_ARG_MMPROJ="").exit_code == Loaded.exit_code, "set to nothing is not set"
    assert call(LLAMA_ARG_MMPROJ_URL="a.gguf").exit_code == 2


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.fate == "refused"], ids=lambda f: f.names[0])
def test_a_refused_flag_says_why(flag: LlamaFlag):
    for name in flag.names:
        result = call(*given(flag, name))
        assert result.exit_code == 2
        assert result.stderr.endswith(f"Error: {name}: {flag.why}\n")
    if flag.env:
        result = call(**{flag.env: VALUES[0]})
        assert result.exit_code == 2 and f"{flag.env}: {flag.why}" in result.stderr


def test_a_value_that_asks_for_what_happens_anyway_is_not_refused():
    assert call("--pooling", "none").exit_code == Loaded.exit_code
    assert call("--pooling", "mean").exit_code == 2


def test_long_names_go_before_short_ones(no_load: dict[str, object]):
    result = call(
        "-sm",
        "layer",
        "-tb",
        "4",
        "-ts",
        "3,1",
        "-td",
        "2",
        "-mg",
        "0",
        "-s",
        "7",
        "-t",
        "2",
        "-fa",
        "-np",
        "3",
    )
    assert result.exit_code == Loaded.exit_code, result.output
    engine, settings = no_load["engine"], no_load["server"]
    assert (engine.choice.model, engine.np, engine.settings["threads"]) == ("demo", 3, 2)
    assert settings.sampling.seed == 7


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--cts-size", "--ctx-size"),
        ("--temprature", "--temperature"),
        ("--thread", "--threads"),
        ("--no-slot", "--no-slots"),
        ("--parralel", "--parallel"),
        ("--spec-draft-max", "--spec-draft-n-max"),
        ("-ctx", "--ctx-size"),
    ],
)
def test_a_misspelt_flag_is_answered_with_the_one_that_was_meant(typed: str, meant: str):
    result = call(typed, "1")
    assert result.exit_code == 2 and typed in result.stderr and meant in result.stderr


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--tensor-parallel-size", "2"], "No such option: --tensor-parallel-size. Here --tp N."),
        (["--max-model-len=4096"], "Here -c N."),
        (["--gpu_memory_utilization", "0.9"], "Not needed: memory is planned before the load"),
        (["--enable-auto-tool-choice"], "Not needed: the dialect is read"),
        (["--verbose-prompt"], "`pyspec tokenize MODEL TEXT` shows"),
        (["--no-contxt-shift"], "Did you mean --no-context-shift"),
        (["--mem-fraction-static", "0.9"], "-np and --cache-ram bound it"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
@pytest.mark.parametrize("command", ["server", "run"])
def test_a_flag_of_another_program_is_answered_with_what_to_use_here(
    command: str, typed: list[str], said: str
):
    result = CliRunner().invoke(main, [command, "demo", *typed])
    assert result.exit_code == 2 and said in result.stderr, result.stderr


def test_what_other_programs_hints_name_exists():
    known = own() | dict.fromkeys(llama_flags())
    for name, said in elsewhere().items():
        assert name not in known, name
        assert [w for w in re.findall(r"(?<![\w-])--?[a-z][\w-]*", said) if w not in known] == [], said


@pytest.mark.parametrize(
    ("args", "settings"),
    [
        ([], {"n_gpu_layers": -1, "fit": "on", "moe_cache_mib": -1, "vram": 0, "override_tensor": ()}),
        (["-ngl", "99", "-ngld", "-1"], {"n_gpu_layers": 99, "draft_n_gpu_layers": -1}),
        (["--gpu-layers", "all", "-ngld", "auto"], {"n_gpu_layers": 2**31 - 1, "draft_n_gpu_layers": -1}),
        (["--n-cpu-moe", "20", "-cmoed"], {"n_cpu_moe": 20, "cpu_moe": False, "draft_cpu_moe": True}),
        (["-ncmoed", "2", "-ncffn", "7", "-cmoe"], {"draft_n_cpu_moe": 2, "n_cpu_ffn": 7, "cpu_moe": True}),
        (["-ot", "a=CPU,b=CUDA0", "-ot", "c=CPU"], {"override_tensor": ("a=CPU", "b=CUDA0", "c=CPU")}),
        (["-otd", r"(?=x)exps=CPU"], {"draft_override_tensor": (r"(?=x)exps=CPU",)}),
        (["-fit", "off", "-fitt", "512,1024", "-fitc", "4096"], {"fit": "off", "fit_target": "512,1024", "fit_ctx": 4096}),
        (["--fit", "enabled", "--moe-cache-mib", "auto"], {"fit": "on", "moe_cache_mib": -1}),
        (["--moe-cache-mib", "0", "--vram", "24G"], {"moe_cache_mib": 0, "vram": 24 << 30}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_what_llama_server_keeps_in_host_memory_is_read_as_it_reads_it(
    args: list[str], settings: dict[str, object], no_load: dict[str, object]
):
    result = call(*args)
    assert result.exit_code == Loaded.exit_code, result.output
    found = no_load["engine"].settings
    assert {name: found[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("variable", "value", "name", "read"),
    [
        ("N_GPU_LAYERS", "12", "n_gpu_layers", 12),
        ("N_CPU_MOE", "3", "n_cpu_moe", 3),
        ("CPU_MOE", "1", "cpu_moe", True),
        ("N_CPU_FFN", "4", "n_cpu_ffn", 4),
        ("OVERRIDE_TENSOR", "exps=CPU,up=CUDA0", "override_tensor", ("exps=CPU", "up=CUDA0")),
        ("FIT", "off", "fit", "off"),
        ("FIT_TARGET", "512", "fit_target", "512"),
        ("FIT_CTX", "512", "fit_ctx", 512),
        ("N_GPU_LAYERS_DRAFT", "all", "draft_n_gpu_layers", 2**31 - 1),
        ("SPEC_DRAFT_N_CPU_MOE", "1", "draft_n_cpu_moe", 1),
        ("SPEC_DRAFT_CPU_MOE", "on", "draft_cpu_moe", True),
    ],
)
def test_and_so_are_its_variables(
    variable: str, value: str, name: str, read: object, no_load: dict[str, object]
):
    assert call(**{f"LLAMA_ARG_{variable}": value}).exit_code == Loaded.exit_code
    assert no_load["engine"].settings[name] == read


def test_what_is_refused_says_what_to_leave_out():
    result = call("--mmproj-url", "https://example.org/a.gguf")
    assert result.exit_code == 2 and "--mmproj takes a file" in result.stderr


def test_config_show_tells_what_has_no_effect():
    result = CliRunner().invoke(main, ["config", "show", "demo", "-ts", "3", "-fa", "on"])
    assert "-ts has no effect" in result.stderr and "-fa has no effect" in result.stderr


def test_help_begins_with_what_belongs_to_the_command():
    def order(command: str, *words: str) -> None:
        text = CliRunner().invoke(main, [command, "--help"], terminal_width=110).stdout
        places = [text.index(f"\n  {word}" if word[0] == "-" else f"\n{word}:\n") for word in words]
        assert places == sorted(places), (command, words, places)

    order(
        "run",
        "Model",
        "-np",
        "-c",
        "Prompt",
        "Default sampling",
        "-n,",
        "--temp",
        "Slots, context and cache",
        "Longer contexts",
        "Other",
    )
    order("fit", "Model", "Plan", "--vram", "Slots, context and cache", "Drafts", "Device")
    order("server", "Model", "Chats", "Listening", "Slots, context and cache", "Other")
    order("bench", "Model", "Workload", "Report", "Slots, context and cache")


@pytest.mark.parametrize("word", ["-xyz", "-smx", "-tt", "-npx"])
def test_no_word_is_taken_apart_into_short_flags(word: str):
    result = call(word)
    assert result.exit_code == 2 and f"No such option: {word}" in result.stderr


@pytest.mark.parametrize(
    ("args", "tp"),
    [
        ([], 1),
        (["--tp", "2"], 2),
        (["-sm", "tensor"], 0),
        (["-sm", "tensor", "--tp", "4"], 4),
        (["--tp", "1", "--split-mode", "tensor"], 1),
        (["-sm", "layer"], 1),
    ],
)
def test_a_model_is_divided_as_llama_server_says_it(
    args: list[str], tp: int, no_load: dict[str, object]
):
    call(*args)
    assert no_load["engine"].settings["tp"] == tp


def test_spellings_llama_cpp_takes_are_taken(no_load: dict[str, object]):
    result = call(
        "--ctx_size", "64", "-t2", "--n_predict=5", "--no-slots", "--temperature", "0", "-dev", "CUDA1"
    )
    assert result.exit_code == Loaded.exit_code, result.output
    engine, settings = no_load["engine"], no_load["server"]
    assert (engine.ctx, engine.settings["threads"], engine.settings["device"]) == (64, 2, "cuda:1")
    assert (settings.max_tokens, settings.slots, settings.sampling.temperature) == (5, False, 0.0)


def test_samplers_and_biases_are_read_as_llama_cpp_writes_them(no_load: dict[str, object]):
    args = (
        "--samplers",
        "top_k;temperature",
        "-l",
        "15+1.5",
        "-l",
        "2-inf",
        "--dry-sequence-breaker",
        "none",
    )
    assert call(*args).exit_code == Loaded.exit_code
    sampling = no_load["server"].sampling
    assert sampling.samplers == ("top_k", "temperature")
    assert sampling.logit_bias == ((15, 1.5), (2, float("-inf")))
    assert sampling.dry_sequence_breakers == ()
    assert call("--sampler-seq", "kt").exit_code == Loaded.exit_code
    assert no_load["server"].sampling.samplers == ("top_k", "temperature")
    assert "is no sampler" in call("--sampler-seq", "kz").stderr
    assert "15043+1" in call("-l", "x").stderr


def test_the_environment_gives_what_the_command_line_does_not(no_load: dict[str, object]):
    env = {
        "LLAMA_ARG_CTX_SIZE": "64",
        "LLAMA_ARG_N_PARALLEL": "2",
        "LLAMA_ARG_ENDPOINT_SLOTS": "0",
        "LLAMA_ARG_MODEL": "other.gguf",
        "LLAMA_API_KEY": "a,b",
        "PYSPEC_QUEUE": "9",
        "PYSPEC_PARALLEL": "5",
    }
    assert call("-c", "128", **env).exit_code == Loaded.exit_code
    engine, settings = no_load["engine"], no_load["server"]
    assert (engine.ctx, engine.np, engine.choice.model) == (128, 5, "demo"), (
        "typed, then PYSPEC_, then LLAMA_ARG_"
    )
    assert engine.settings["queue"] == 9
    assert not settings.slots and settings.api_keys == ("a", "b")


def test_a_wrong_value_from_the_environment_names_its_variable():
    for name, value in (("LLAMA_ARG_N_PARALLEL", "many"), ("PYSPEC_PORT", "99999")):
        result = call(**{name: value})
        assert result.exit_code == 2 and f"({name} in the environment)" in result.stderr
    assert "environment" not in call("-np", "many").stderr


def test_an_ignored_variable_says_so_and_one_that_is_off_says_nothing():
    result = call(LLAMA_ARG_TENSOR_SPLIT="3,1", LLAMA_ARG_CONTEXT_SHIFT="0")
    assert result.exit_code == Loaded.exit_code
    assert "LLAMA_ARG_TENSOR_SPLIT has no effect" in result.stderr
    assert "CONTEXT_SHIFT" not in result.stderr


HAS_OFF = {"--slots": "ENDPOINT_SLOTS", "--ui": "UI", "--prefill-assistant": "PREFILL_ASSISTANT"} | {
    "--cache-prompt": "CACHE_PROMPT", "--skip-chat-parsing": "SKIP_CHAT_PARSING", "--log-jsonl": "LOG_JSONL",
    "--props": "ENDPOINT_PROPS", "--metrics": "ENDPOINT_METRICS",
}  # fmt: skip


def value_of(option: str, **env: str) -> tuple[object, object]:
    result = CliRunner().invoke(main, ["config", "show", "--json", "demo"], env=env)
    assert result.exit_code == 0, result.output
    row = next(row for row in json.loads(result.stdout) if row["flag"] == option)
    return row["value"], row["origin"]


@pytest.mark.parametrize("option", HAS_OFF)
def test_a_variable_with_no_in_it_switches_off_whatever_its_value_is(option: str):
    """As llama-server: it goes before the one without, and behind our own."""
    on, off = f"LLAMA_ARG_{HAS_OFF[option]}", f"LLAMA_ARG_NO_{HAS_OFF[option]}"
    own = option.strip("-").replace("-", "_").upper()
    for value in ("1", "0", "", "false"):
        assert value_of(option, **{off: value, on: "1"}) == (False, off)
        assert value_of(option, **{f"PYSPEC_NO_{own}": value, on: "1"}) == (False, f"PYSPEC_NO_{own}")
    assert value_of(option, **{off: "1", f"PYSPEC_{own}": "1"}) == (True, f"PYSPEC_{own}")


def test_the_variable_of_the_page_has_its_former_name_too():
    for value in ("1", "0", ""):
        assert value_of("--ui", LLAMA_ARG_NO_WEBUI=value) == (False, "LLAMA_ARG_NO_WEBUI")
    assert value_of("--ui", LLAMA_ARG_WEBUI="0") == (False, "LLAMA_ARG_WEBUI")
    assert value_of("--ui", LLAMA_ARG_WEBUI="0", LLAMA_ARG_UI="1") == (True, "LLAMA_ARG_UI")


@pytest.mark.parametrize("command", ["server", "run", "bench", "fit"])
def test_every_long_spelling_of_a_flag_is_a_variable_of_one_option(command: str):
    seen: dict[str, str] = {}
    for param in main.get_command(click.Context(main), command).params:
        if isinstance(param, click.Option) and not param.is_eager:
            for name in (*param.opts, *param.secondary_opts):
                variable = f"PYSPEC_{name.strip('-').replace('-', '_').upper()}"
                if name.startswith("--"):
                    assert variable in param.envvar, name
                    assert seen.setdefault(variable, param.name) == param.name, variable


@pytest.mark.parametrize(
    ("variable", "value", "flag", "read"),
    [
        ("PYSPEC_TEMPERATURE", "0.25", "--temp", 0.25),
        ("PYSPEC_N_PREDICT", "7", "--predict", 7),
        ("PYSPEC_HF_REPO_DRAFT", "a/b", "--spec-draft-hf", "a/b"),
        ("PYSPEC_WEBUI", "0", "--ui", False),
        ("PYSPEC_NO_WEBUI", "0", "--ui", False),
        ("PYSPEC_CORS_ORIGINS", "http://a", "--cors-origin", ["http://a"]),
    ],
)
def test_a_variable_of_any_spelling_is_read(variable: str, value: str, flag: str, read: object):
    assert value_of(flag, **{variable: value}) == (read, variable)


def test_every_switch_with_a_negative_form_has_a_variable_for_it():
    switches = {p.name: p for p in own().values() if p.secondary_opts}
    assert switches and all(any("_NO_" in name for name in p.envvar) for p in switches.values())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("PYSPEC_PARALEL", "is not a setting and has no effect; did you mean PYSPEC_PARALLEL?"),
        ("PYSPEC_CTX", "did you mean PYSPEC_CTX_SIZE?"),
        ("PYSPEC_NO_SLOT", "did you mean PYSPEC_NO_SLOTS?"),
        ("LLAMA_ARG_PARALLEL", "has no effect; use PYSPEC_PARALLEL"),
        ("LLAMA_ARG_N_PARALEL", "did you mean LLAMA_ARG_N_PARALLEL?"),
        ("LLAMA_ARG_QQQ", "LLAMA_ARG_QQQ in the environment is not a setting and has no effect\n"),
        ("LLAMA_ARG_NO_MMAP", "has no effect: files are always mapped"),
        ("LLAMA_ARG_MLOCK", "has no effect: files are always mapped"),
        ("LLAMA_ARG_NO_KV_OFFLOAD", "has no effect: the whole model runs on one device"),
        ("LLAMA_ARG_NO_REPACK", "has no effect: attention and kernels"),
    ],
)
@pytest.mark.parametrize("value", ["8", "0"])
def test_a_variable_that_sets_nothing_is_told_once(name: str, value: str, said: str):
    result = call(**{name: value})
    assert result.exit_code == Loaded.exit_code
    assert said in result.stderr and result.stderr.count(f"{name} ") == 1


@pytest.mark.parametrize(
    "name", ["PYSPEC_SERVICE_HOST", "PYSPEC_PORT_8080_TCP", "PYSPEC_CACHE", "LLAMA_ARG_NO_AGENT"]
)
def test_variables_of_others_are_none_of_our_business(name: str):
    result = call("--log-disable" if "AGENT" in name else "--insecure", **{name: "1"})
    assert result.exit_code == Loaded.exit_code and name not in result.stderr


def test_what_is_refused_as_a_flag_is_refused_as_its_variable():
    result = call(LLAMA_ARG_NO_JINJA="0")
    assert result.exit_code == 2 and "LLAMA_ARG_NO_JINJA: templates are always Jinja" in result.stderr


def test_rope_is_stretched_by_llama_servers_flags_and_variables():
    assert call("--yarn-ext-factor", "-1.0", "--rope-freq-base", "0").exit_code == Loaded.exit_code
    assert call("--rope-scaling", "yarn", LLAMA_ARG_ROPE_SCALE="4").exit_code == Loaded.exit_code
    result = call("--rope-scaling", "longrope")
    assert result.exit_code == 2 and "'longrope' is not one of 'none', 'linear', 'yarn'" in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-t", "-2"], "-t is -2; want a whole number from -1"),
        (["-np", "-2"], "-2 is not in the range"),
        (["--rope-scale", "-2"], "--rope-scale is -2.0; want a number from 0.001"),
        (["--rope-freq-base", "nan"], "--rope-freq-base is nan; want a number from 1"),
        (["--tpot", "-1"], "--tpot is -1.0; want a number from 0 to"),
        (["--replicas", "0"], "--replicas is 0; want a whole number from 1 to 64"),
        (["--temp", "-101"], "--temp is -101"),
        (["-n", "-5"], "-5 is not in the range"),
        (["-dev", "cuda:0,cuda:1"], "runs on one device"),
        (["-ngl", "abc"], "'abc' is not a whole number or auto or all"),
        (["-ngl", "-2"], "-ngl is -2; want a whole number from -1"),
        (["-ngl", "99999999999"], "-ngl is 99999999999; want a whole number from -1 to 2147483647"),
        (["--moe-cache-mib", "9" * 40], "want a whole number from -1 to 16777216"),
        (["-ncmoe", "-1"], "-ncmoe is -1; want a whole number from 0"),
        (["--fit", "auto"], "-fit is 'auto'; want one of on, off"),
        (["-fitt", "1024,"], "-fitt is '1024,'; want MiB as 1024"),
        (["-ot", "exps"], "-ot[0] is 'exps'; want REGEX=CPU or REGEX=CUDA0"),
        (["--moe-cache-mib", "2G"], "'2G' is not a whole number or auto"),
        (["--vram", "24X"], "want an amount of memory such as 24G"),
        (["--chat-template-kwargs", "[1]"], "want a JSON object"),
        (["--tool-call-parser", "hermez"], "'hermez' is not one of"),
        (["--samplers", "top_k;top_q"], "--samplers"),
    ],
)
def test_what_means_nothing_is_refused_with_the_numbers(
    args: list[str], said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()
    result = call(*args)
    assert result.exit_code == 2 and said in result.stderr, result.output


def test_help_shows_groups_and_defaults():
    text = CliRunner().invoke(main, ["server", "--help"], terminal_width=110).stdout
    for group in (
        "Model:",
        "Slots, context and cache:",
        "Device:",
        "Drafts:",
        "Listening:",
        "Chats:",
        "Logs:",
    ):
        assert f"\n{group}\n" in text
    assert "[default: 8080" in text and "[default: 0.95]" in text
