"""This module turns what a request demands of its answer's form into parameters: for the routes, once a conversation is a prompt."""

from __future__ import annotations

import dataclasses

from dovetail.front.chat import ChatOptions
from dovetail.front.tokenizer import TokenizedText
from dovetail.sampling_params import SamplingParams
from dovetail.structured import Structured
from dovetail_server.errors import HttpError
from dovetail_server.exchange import Exchange
from dovetail_server.parsers.call_rules import call_rule
from dovetail_server.parsers.think import THINK, THINK_MARKS
from dovetail_server.protocol.structured import CallDemand, Demand


def constrained(exchange: Exchange, params: SamplingParams, demand: Demand) -> SamplingParams:
    """Return the parameters with the rule of a request that isn't a conversation. Raises `RequestError`."""
    if demand.rule is None:
        return params
    exchange.renamed = {**exchange.renamed, "structured": demand.param}
    return exchange.check(dataclasses.replace(params, structured=demand.rule))


def constrained_chat(
    exchange: Exchange, params: SamplingParams, demand: Demand, options: ChatOptions, prompt: TokenizedText
) -> tuple[SamplingParams, TokenizedText]:
    """Return the parameters with the rule of an answer to a conversation, and its prompt. A model that thinks does so first, unconstrained: if its
    prompt leaves it to the model whether it does, the prompt then ends with the mark that begins thoughts.

    Raises `RequestError`, and `HttpError` for calls that the model's format can't be held to.
    """
    rule = demand.rule if demand.calls is None else _rule_of_calls(exchange, demand.calls, options)
    if rule is None:
        return params, prompt
    exchange.renamed = {**exchange.renamed, "structured": demand.param if demand.calls is None else demand.calls.param}
    if rule.after is None and _thinks(exchange, options, prompt):
        rule = dataclasses.replace(rule, after=THINK_MARKS[1])
        if not prompt.text.rstrip().endswith(THINK):
            begun = f"{THINK}\n"
            ids = exchange.engine.tokenizer.encode(begun, special_tokens=False)
            prompt = TokenizedText(prompt.text + begun, [*prompt.token_ids, *ids])
    return exchange.check(dataclasses.replace(params, structured=rule)), prompt


def _rule_of_calls(exchange: Exchange, calls: CallDemand, options: ChatOptions) -> Structured:
    parsing = exchange.server.parsing
    template = parsing.template(options.chat_template)
    parser = parsing.names(options.chat_template).tool_parser
    if parser is None:
        raise _refusal(
            calls.param, "no tool parser fits the model's chat template, so that it isn't known how it writes calls (--tool-parser names one)"
        )
    tools = [(tool.name, tool.schema) for tool in calls.tools]
    try:
        return Structured(structural_tag=call_rule(parser, template, tools, required=calls.required, single=calls.single))
    except ValueError as error:  # a `RequestError` is one, too
        raise _refusal(calls.param, str(error)) from None


def _refusal(param: str, reason: str) -> HttpError:
    return HttpError(400, f"{param}: {reason}", param=param, code="unsupported_parameter")


def _thinks(exchange: Exchange, options: ChatOptions, prompt: TokenizedText) -> bool:
    """True if the answer begins with thoughts: the prompt has begun them, or the template can turn them off and wasn't asked to, or whoever runs the
    server says that the model thinks."""
    parsing, text = exchange.server.parsing, prompt.text.rstrip()
    if parsing.names(options.chat_template).reasoning_parser is None or options.continue_final_message:
        return False
    if text.endswith(THINK_MARKS):
        return text.endswith(THINK)
    asked = dict(options.chat_template_kwargs or {})
    if False in (asked.get("enable_thinking"), asked.get("thinking")):
        return False
    return parsing.expects_reasoning or "enable_thinking" in parsing.template(options.chat_template)
