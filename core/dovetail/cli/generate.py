"""`dovetail generate`: complete one prompt, streamed to the terminal, or a file of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dovetail.cli import completion
from dovetail.cli.settings import RequiredSource, Settings, load_config
from dovetail.cli.streams import echo_json, read_text
from dovetail.errors import ConfigError, RequestError, shown

if TYPE_CHECKING:
    from dovetail.cli.prompts import Prompt
    from dovetail.config.engine import EngineConfig
    from dovetail.front.llm_engine import LLMEngine
    from dovetail.request.outputs import RequestOutput

MAX_LORA_RANK = 64  # of --lora, unless the config says
FAILED = ("error", "rejected")  # with one of these finish reasons the exit code is 1


def generate(
    source: RequiredSource,
    prompt: Annotated[
        str | None, typer.Argument(help='The text to go on from; "-" reads it from standard input.')
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            help='JSONL, "-" for standard input: a string a line, or an object with prompt, '
            "messages or prompt_token_ids, "
            "any sampling parameter, extra, predicted_tokens, and id."
        ),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="The file has a prompt a line, as it stands, instead of JSON."
        ),
    ] = False,
    settings: Settings = [],  # noqa: B006 typer makes a list of its own
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate, at most.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.  [default: the model's]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep this many of the likeliest tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[list[str], typer.Option(help="End before this text. May be repeated.")] = [],  # noqa: B006
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='The answer is JSON that follows the JSON Schema in this file; "-" reads standard '
            "input.",
        ),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="The whole answer matches this regular expression.")
    ] = None,
    choice: Annotated[
        list[str],
        typer.Option(help="The answer is this text, or another --choice. May be repeated."),
    ] = [],  # noqa: B006
    param: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE",
            help="Any other sampling parameter, extra or predicted_tokens; the value is YAML. May "
            "be repeated.",
            autocompletion=completion.params,
        ),
    ] = [],  # noqa: B006
    lora: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=PATH",
            help="Compute with the LoRA adapter in this directory; it turns the config's "
            "`adapters` on.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="The prompt is a user's message, for the model's chat template."
        ),
    ] = False,
    image: Annotated[
        list[str],
        typer.Option(
            metavar="FILE",
            help="An image: with --chat before the text, otherwise in the place of a placeholder "
            "in it. May be repeated.",
        ),
    ] = [],  # noqa: B006
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each finished request.")
    ] = False,
    trace_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a trace of steps and requests, for ui.perfetto.dev: the observer perfetto.",
        ),
    ] = None,
) -> None:
    """Complete a prompt, or a file of prompts."""
    _check_source(prompt, prompts_file, plain=plain, has_images=bool(image))
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
    }
    params |= _params(param)
    if rule := _rule(json_schema, regex, choice):
        if params.get("structured") is not None:
            raise ConfigError(
                f"--{next(iter(rule)).replace('_', '-')} and --param structured contradict each "
                f"other: an answer follows one rule"
            )
        params["structured"] = rule
    prompts = (
        _one_prompt(prompt, params)
        if prompt is not None
        else _file_of_prompts(str(prompts_file), plain, params)
    )
    if chat or image:
        prompts = [_with_images(one, image, chat=chat) for one in prompts]
    config = load_config(source, settings)
    if trace_out is not None:
        config = _traced(config, trace_out)
    if lora is not None:
        config, prompts = _adapted(config, prompts, lora)
    from dovetail.front.llm_engine import LLMEngine

    with _loading_bars() as progress:
        engine = LLMEngine.from_config(config, progress=progress)
    with engine:
        prompts = _with_chats_rendered(engine, prompts)
        stream = prompts_file is None and not as_json and prompts[0].params.n == 1
        finished = _stream(engine, prompts[0]) if stream else _run(engine, prompts, as_json)
    if not finished:
        raise typer.Exit(1)


def _check_source(
    prompt: str | None, prompts_file: str | None, *, plain: bool, has_images: bool
) -> None:
    """Raise `ConfigError` unless there is one prompt, or a file that the options fit."""
    if (prompt is None) == (prompts_file is None):
        raise ConfigError("give one prompt, or --prompts-file")
    if plain and prompts_file is None:
        raise ConfigError("--plain says how to read a --prompts-file, and there is none")
    if has_images and prompts_file is not None:
        raise ConfigError(
            "--image is for one prompt: in a --prompts-file, messages have images of their own"
        )


def _with_images(prompt: Prompt, images: list[str], *, chat: bool) -> Prompt:
    """Return the prompt with images in files, as a conversation if `chat`."""
    from dovetail.cli.prompts import as_chat

    if chat:
        return as_chat(prompt, images)
    data = {"prompt": prompt.prompt, "multi_modal_data": {"image": images}}
    return prompt._replace(prompt=data)


def _traced(config: EngineConfig, path: Path) -> EngineConfig:
    """Return the config with the observer `perfetto` added."""
    from dovetail.config.engine import EngineConfig
    from dovetail.registry.plugin import NAMESPACE

    observer = {"name": f"{NAMESPACE}:perfetto", "path": str(path)}
    return EngineConfig.load_with(
        config, {"observers": [*config.observers, observer]}, origin="--trace-out"
    )


def _adapted(
    config: EngineConfig, prompts: list[Prompt], text: str
) -> tuple[EngineConfig, list[Prompt]]:
    """Return the config with adapters, and the prompts with the one given as name=path. Raises
    `ConfigError`."""
    from dovetail.config.engine import EngineConfig
    from dovetail.request.lora import LoRARequest

    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(f"--lora: expected name=path, got {shown(text)}")
    if config.adapters is None:
        config = EngineConfig.load_with(
            config, {"adapters": {"slots": 1, "max_rank": MAX_LORA_RANK}}, origin="--lora"
        )
    adapter = LoRARequest(name, 1, path)
    return config, [
        prompt._replace(fields={**prompt.fields, "lora_request": adapter}) for prompt in prompts
    ]


def _rule(json_schema: Path | None, regex: str | None, choice: list[str]) -> dict[str, Any]:
    """Return the rule of the answer, empty if there is none. Raises `ConfigError` for several."""
    given = {"json_schema": json_schema, "regex": regex, "choice": choice or None}
    rules = {name: value for name, value in given.items() if value is not None}
    if len(rules) > 1:
        names = [f"--{name.replace('_', '-')}" for name in rules]
        raise ConfigError(
            f"{' and '.join(names)} contradict each other: an answer follows one rule"
        )
    if json_schema is not None:
        rules["json_schema"] = read_text(str(json_schema), "--json-schema")
    return rules


def _params(settings: list[str]) -> dict[str, Any]:
    """Return the `--param key=value`s. Raises `ConfigError` for one that isn't known."""
    from dovetail.base.where import unknown_key
    from dovetail.base.yaml_source import parse_yaml
    from dovetail.cli.prompts import FIELD_KEYS, PARAMS_KEYS
    from dovetail.request.sampling_params import BEAM_NAMES, BEAM_SEARCH

    params = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--param: expected key=value, got {shown(text)}")
        if key not in (known := (*PARAMS_KEYS, *FIELD_KEYS)):
            raise ConfigError(
                f"--param: {key}: "
                f"{BEAM_SEARCH if key in BEAM_NAMES else unknown_key(key, known, 'sampling parameter')}"
            )
        params[key] = parse_yaml(value, "--param").value
    return params


def _one_prompt(text: str, params: dict[str, Any]) -> list[Prompt]:
    from dovetail.cli.prompts import Prompt, make_params_and_fields

    made, fields = make_params_and_fields(params)
    return [Prompt("0", made, read_text("-", "prompt") if text == "-" else text, fields=fields)]


def _file_of_prompts(name: str, plain: bool, params: dict[str, Any]) -> list[Prompt]:
    from dovetail.cli.prompts import read_plain, read_prompts

    return (read_plain if plain else read_prompts)(
        read_text(name, "--prompts-file").split("\n"), name, params
    )


def _with_chats_rendered(engine: LLMEngine, prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts with messages rendered by the model's chat template. Raises `RequestError`
    naming the request."""
    if all(prompt.messages is None for prompt in prompts):
        return prompts
    from dovetail.front.chat import ChatFrontEnd

    rendered = []
    with closing(
        ChatFrontEnd(
            engine.tokenizer,
            engine.config.limits,
            engine.capacity.max_model_len,
            images=engine.images,
            local=True,
        )
    ) as chat:
        for prompt in prompts:
            try:
                rendered.append(
                    prompt
                    if prompt.messages is None
                    else prompt._replace(prompt=chat.prompt(prompt.messages), messages=None)
                )
            except RequestError as error:
                raise RequestError(f"request {prompt.id}: {error}") from None
    return rendered


def _add(engine: LLMEngine, prompt: Prompt, **changes: Any) -> None:
    """Add a prompt to the engine. Raises `RequestError` naming the request."""
    params = dataclasses.replace(prompt.params, **changes)
    try:
        engine.add_request(prompt.id, prompt.prompt, params, **prompt.fields)
    except RequestError as error:
        raise RequestError(f"request {prompt.id}: {error}") from None


def _outputs(engine: LLMEngine) -> Iterator[RequestOutput]:
    while engine.has_unfinished_requests():
        yield from cast("list[RequestOutput]", engine.step())  # none of these requests pools


def _stream(engine: LLMEngine, prompt: Prompt) -> bool:
    """Print text as it comes. Returns False if the request failed."""
    _add(engine, prompt, output_kind="delta")
    good = True
    for output in _outputs(engine):
        typer.echo("".join(sample.text for sample in output.outputs), nl=output.finished)
        good = _report_failures(output) and good
    return good


def _run(engine: LLMEngine, prompts: list[Prompt], as_json: bool) -> bool:
    """Print each request: as JSON when it is finished, as text in the order of the file. Returns
    False if one failed."""
    from tqdm import tqdm

    for prompt in prompts:
        _add(engine, prompt)
    order = [prompt.id for prompt in prompts]
    good = True
    waiting: dict[str, RequestOutput] = {}
    with tqdm(
        total=len(prompts), desc="requests", unit="req", disable=None if len(prompts) > 1 else True
    ) as bar:
        for output in _outputs(engine):
            good = _report_failures(output) and good
            bar.update()
            if as_json:
                bar.clear()
                echo_json(_as_json(output))
                continue
            waiting[output.request_id] = output
            while order and order[0] in waiting:
                bar.clear()
                _print_text(waiting.pop(order.pop(0)), headed=len(prompts) > 1)
    return good


def _print_text(output: RequestOutput, headed: bool) -> None:
    for sample in output.outputs:
        if headed or len(output.outputs) > 1:
            typer.echo(
                f"--- {output.request_id}"
                + (f" ({sample.index})" if len(output.outputs) > 1 else "")
            )
        typer.echo(sample.text)


def _report_failures(output: RequestOutput) -> bool:
    failures = [sample for sample in output.outputs if sample.finish_reason in FAILED]
    for sample in failures:
        typer.echo(
            f"request {output.request_id}: {sample.finish_reason}: {sample.stop_reason}", err=True
        )
    return not failures


def _as_json(output: RequestOutput) -> dict[str, Any]:
    """Return a finished request as plain values, without those that weren't asked for."""
    samples = []
    for sample in output.outputs:
        shown: dict[str, Any] = {
            "index": sample.index,
            "text": sample.text,
            "token_ids": list(sample.token_ids),
        }
        shown |= {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
        if sample.logprobs is not None:
            shown |= {
                "cumulative_logprob": sample.cumulative_logprob,
                "logprobs": [_logprobs(position) for position in sample.logprobs],
            }
        samples.append(shown)
    shown = {
        "id": output.request_id,
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "outputs": samples,
    }
    shown["cached_tokens"] = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        shown["prompt_logprobs"] = [
            None if position is None else _logprobs(position) for position in output.prompt_logprobs
        ]
    if output.metrics is not None:
        shown["metrics"] = dataclasses.asdict(output.metrics)
    return shown


def _logprobs(position: Any) -> dict[str, Any]:
    return {str(token): dataclasses.asdict(logprob) for token, logprob in position.items()}


@contextmanager
def _loading_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar for each long operation on stderr, if that is a terminal."""
    from tqdm import tqdm

    bars: dict[str, tqdm[Any]] = {}

    def progress(what: str, done: int, total: int) -> None:
        bar = bars.get(what)
        if bar is None:
            bar = bars[what] = tqdm(total=total, desc=what, disable=None, leave=False)
        bar.update(done - bar.n)

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.close()
