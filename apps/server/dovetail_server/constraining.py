"""Conversion of a request's `Demand` to sampling parameters, once its prompt is known."""

from __future__ import annotations

import dataclasses

from dovetail.front.chat import ChatOptions
from dovetail.front.tokenizer import TokenizedText
from dovetail.sampling_params import SamplingParams
from dovetail.structured import Structured
from dovetail_server.exchange import Exchange
from dovetail_server.parsers.call_rules import call_rule
from dovetail_server.parsers.think import THINK, THINK_MARKS
from dovetail_server.protocol.decoding import unsupported
from dovetail_server.protocol.structured import CallDemand, Demand


def constrained(exchange: Exchange, params: SamplingParams, demand: Demand, rule: Structured | None = None) -> SamplingParams:
    """Return the parameters with a rule, by default the demanded one. Raises `RequestError`."""
    rule = rule or demand.rule
    if rule is None:
        return params
    exchange.renamed = {**exchange.renamed, "structured": demand.param}
    return exchange.check(dataclasses.replace(params, structured=rule))


def constrained_chat(
    exchange: Exchange, params: SamplingParams, demand: Demand, options: ChatOptions, prompt: TokenizedText
) -> tuple[SamplingParams, TokenizedText]:
    """Return the parameters with the rule of a chat answer, and its prompt. Reasoning stays unconstrained: the rule begins after it. If the prompt
    leaves it open whether the model reasons first, the mark that begins reasoning is appended.

    Raises `RequestError`, and `HttpError` if the model's format of tool calls can't be constrained.
    """
    rule = demand.rule if demand.calls is None else _rule_of_calls(exchange, demand.param, demand.calls, options)
    if rule is not None and rule.after is None and _reasons_first(exchange, options, prompt):
        rule = dataclasses.replace(rule, after=THINK_MARKS[1])
        if not prompt.text.rstrip().endswith(THINK):
            begun = f"{THINK}\n"
            ids = exchange.engine.tokenizer.encode(begun, special_tokens=False)
            prompt = TokenizedText(prompt.text + begun, [*prompt.token_ids, *ids])
    return constrained(exchange, params, demand, rule), prompt


def _rule_of_calls(exchange: Exchange, param: str, calls: CallDemand, options: ChatOptions) -> Structured:
    parsing = exchange.server.parsing
    parser = parsing.names(options.chat_template).tool_parser
    if parser is None:
        reason = "no tool parser fits the model's chat template, so the format of its calls is unknown (set one with --tool-parser)"
        raise unsupported(param, reason)
    template = parsing.template(options.chat_template)
    try:
        return Structured(structural_tag=call_rule(parser, template, calls.tools, required=calls.required, single=calls.single))
    except ValueError as error:  # including `RequestError`
        raise unsupported(param, str(error)) from None


def _reasons_first(exchange: Exchange, options: ChatOptions, prompt: TokenizedText) -> bool:
    """Return True if the answer begins with reasoning: the prompt has opened it; or the template could disable it, and wasn't asked to; or the
    server's settings name a reasoning parser."""
    parsing, text = exchange.server.parsing, prompt.text.rstrip()
    if parsing.names(options.chat_template).reasoning_parser is None or options.continue_final_message:
        return False
    if text.endswith(THINK_MARKS):
        return text.endswith(THINK)
    variables = dict(options.chat_template_kwargs or {})
    if False in (variables.get("enable_thinking"), variables.get("thinking")):
        return False
    return parsing.expects_reasoning or "enable_thinking" in parsing.template(options.chat_template)
