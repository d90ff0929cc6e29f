"""Public façade for programs on top of the engine: servers, batch jobs, clusters, simulations.

Dovetail's own applications import only these names, `dovetail.api`, `dovetail.request`, the fakes
of `dovetail.testing`, and the top level. A program that only generates text needs
`dovetail.AsyncLLMEngine` instead.

A server may run its front ends, which read requests and write text, apart from the engine:

```text
front end                                              engine's process
Intake(info.intake, …).check(prompt, params) -> Entered ──▶ Admission.admit(…) -> LiveRequest
OutputBuilder, IncrementalText: text         ◀── Delivery ── EngineCore
```

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.base import lazy_names

if TYPE_CHECKING:
    from dovetail.base.bounded_json import JsonBounds, WrongJsonError, excess_of, read_json
    from dovetail.base.checks import among, did_you_mean, unicode_error
    from dovetail.base.where import Where, explain, unknown_key
    from dovetail.base.yaml_source import parse_yaml, read_settings
    from dovetail.cli.prompts import FIELD_KEYS, PARAMS_KEYS, fields_of, make_params, parse_json
    from dovetail.cli.settings import RequiredSource, RequiredSources, Settings, load_config
    from dovetail.cli.streams import OutputError, discard, read_text
    from dovetail.config.limits import Limits
    from dovetail.engine.constraint import Constraint
    from dovetail.engine.core import EngineCore
    from dovetail.engine.finish import Finish, TokenWatcher
    from dovetail.engine.flight import Delivery
    from dovetail.engine.live_request import LiveRequest
    from dovetail.engine.tiers.stats import TierStats
    from dovetail.front.adapters import RequestedAdapter
    from dovetail.front.admission import Admission, CheckedRequest
    from dovetail.front.assembly import Assembly, assemble
    from dovetail.front.chat import ChatFrontEnd, ChatOptions
    from dovetail.front.component_tokenizer import ComponentTokenizer
    from dovetail.front.detokenizer import IncrementalText, byte_pieces
    from dovetail.front.engine_args import flag_of, flag_value
    from dovetail.front.engine_info import groups_in_words, ranks_in_words
    from dovetail.front.engine_thread import Unread
    from dovetail.front.grammars import AnswerRule
    from dovetail.front.intake import ENABLE, Entered, Intake
    from dovetail.front.intake_facts import IntakeFacts
    from dovetail.front.media.facts import IMAGES_AT_ONCE, MediaFacts
    from dovetail.front.media.prompts import ImagePrompt, ImagePrompts, MediaPrompt
    from dovetail.front.media.sources import ImageSource, image_of_base64, image_of_text
    from dovetail.front.outputs import EngineOutput, OutputBuilder, RequestGroup, by_sample
    from dovetail.front.pooling import PoolingIntake, ScorePlan, paired
    from dovetail.front.prompts import PROMPT_COST, Prompt, PromptSource, content_of, cuts
    from dovetail.front.request_checks import (
        at_most,
        check_counts,
        check_name,
        check_prompt_chars,
        check_template_chars,
    )
    from dovetail.front.token_texts import speller, texts_of_prompt, unwritten
    from dovetail.front.tokenizer import TokenizedText, Tokenizer
    from dovetail.front.vllm_args import ARGUMENTS, is_given, translated
    from dovetail.front.vllm_groups import IMAGES, Group
    from dovetail.front.vllm_structured import structured_of_vllm
    from dovetail.registry.models import weights_bytes
    from dovetail.registry.registry import AUTO, Registry
    from dovetail.registry.resolved import ResolvedComponent
    from dovetail.registry.route_making import NotServing, make_routes, paths_of
    from dovetail.registry.selection import PluginSelection

_HOMES = {
    "ARGUMENTS": "front.vllm_args",
    "AUTO": "registry.registry",
    "Admission": "front.admission",
    "AnswerRule": "front.grammars",
    "Assembly": "front.assembly",
    "ChatFrontEnd": "front.chat",
    "ChatOptions": "front.chat",
    "CheckedRequest": "front.admission",
    "ComponentTokenizer": "front.component_tokenizer",
    "Constraint": "engine.constraint",
    "Delivery": "engine.flight",
    "ENABLE": "front.intake",
    "EngineCore": "engine.core",
    "EngineOutput": "front.outputs",
    "Entered": "front.intake",
    "FIELD_KEYS": "cli.prompts",
    "Finish": "engine.finish",
    "Group": "front.vllm_groups",
    "ImagePrompt": "front.media.prompts",
    "ImagePrompts": "front.media.prompts",
    "ImageSource": "front.media.sources",
    "IncrementalText": "front.detokenizer",
    "Intake": "front.intake",
    "IntakeFacts": "front.intake_facts",
    "JsonBounds": "base.bounded_json",
    "Limits": "config.limits",
    "LiveRequest": "engine.live_request",
    "MediaFacts": "front.media.facts",
    "MediaPrompt": "front.media.prompts",
    "NotServing": "registry.route_making",
    "OutputBuilder": "front.outputs",
    "OutputError": "cli.streams",
    "PARAMS_KEYS": "cli.prompts",
    "PROMPT_COST": "front.prompts",
    "PluginSelection": "registry.selection",
    "PoolingIntake": "front.pooling",
    "Prompt": "front.prompts",
    "PromptSource": "front.prompts",
    "Registry": "registry.registry",
    "RequestGroup": "front.outputs",
    "RequestedAdapter": "front.adapters",
    "RequiredSource": "cli.settings",
    "RequiredSources": "cli.settings",
    "ResolvedComponent": "registry.resolved",
    "ScorePlan": "front.pooling",
    "Settings": "cli.settings",
    "IMAGES": "front.vllm_groups",
    "IMAGES_AT_ONCE": "front.media.facts",
    "TierStats": "engine.tiers.stats",
    "TokenWatcher": "engine.finish",
    "TokenizedText": "front.tokenizer",
    "Tokenizer": "front.tokenizer",
    "Unread": "front.engine_thread",
    "Where": "base.where",
    "WrongJsonError": "base.bounded_json",
    "among": "base.checks",
    "assemble": "front.assembly",
    "at_most": "front.request_checks",
    "by_sample": "front.outputs",
    "byte_pieces": "front.detokenizer",
    "check_counts": "front.request_checks",
    "check_name": "front.request_checks",
    "check_prompt_chars": "front.request_checks",
    "check_template_chars": "front.request_checks",
    "content_of": "front.prompts",
    "cuts": "front.prompts",
    "did_you_mean": "base.checks",
    "discard": "cli.streams",
    "excess_of": "base.bounded_json",
    "explain": "base.where",
    "fields_of": "cli.prompts",
    "flag_of": "front.engine_args",
    "flag_value": "front.engine_args",
    "groups_in_words": "front.engine_info",
    "image_of_base64": "front.media.sources",
    "image_of_text": "front.media.sources",
    "is_given": "front.vllm_args",
    "load_config": "cli.settings",
    "make_params": "cli.prompts",
    "make_routes": "registry.route_making",
    "paths_of": "registry.route_making",
    "paired": "front.pooling",
    "parse_json": "cli.prompts",
    "parse_yaml": "base.yaml_source",
    "ranks_in_words": "front.engine_info",
    "read_json": "base.bounded_json",
    "read_settings": "base.yaml_source",
    "read_text": "cli.streams",
    "speller": "front.token_texts",
    "structured_of_vllm": "front.vllm_structured",
    "texts_of_prompt": "front.token_texts",
    "translated": "front.vllm_args",
    "unicode_error": "base.checks",
    "unknown_key": "base.where",
    "unwritten": "front.token_texts",
    "weights_bytes": "registry.models",
}

__all__ = [
    "ARGUMENTS",
    "AUTO",
    "Admission",
    "AnswerRule",
    "Assembly",
    "ChatFrontEnd",
    "ChatOptions",
    "CheckedRequest",
    "ComponentTokenizer",
    "Constraint",
    "Delivery",
    "ENABLE",
    "EngineCore",
    "EngineOutput",
    "Entered",
    "FIELD_KEYS",
    "Finish",
    "Group",
    "ImagePrompt",
    "ImagePrompts",
    "ImageSource",
    "IncrementalText",
    "Intake",
    "IntakeFacts",
    "JsonBounds",
    "Limits",
    "LiveRequest",
    "MediaFacts",
    "MediaPrompt",
    "NotServing",
    "OutputBuilder",
    "OutputError",
    "PARAMS_KEYS",
    "PROMPT_COST",
    "PluginSelection",
    "PoolingIntake",
    "Prompt",
    "PromptSource",
    "Registry",
    "RequestGroup",
    "RequestedAdapter",
    "RequiredSource",
    "RequiredSources",
    "ResolvedComponent",
    "ScorePlan",
    "Settings",
    "IMAGES",
    "IMAGES_AT_ONCE",
    "TierStats",
    "TokenWatcher",
    "TokenizedText",
    "Tokenizer",
    "Unread",
    "Where",
    "WrongJsonError",
    "among",
    "assemble",
    "at_most",
    "by_sample",
    "byte_pieces",
    "check_counts",
    "check_name",
    "check_prompt_chars",
    "check_template_chars",
    "content_of",
    "cuts",
    "did_you_mean",
    "discard",
    "excess_of",
    "explain",
    "fields_of",
    "flag_of",
    "flag_value",
    "groups_in_words",
    "image_of_base64",
    "image_of_text",
    "is_given",
    "load_config",
    "make_params",
    "make_routes",
    "paths_of",
    "paired",
    "parse_json",
    "parse_yaml",
    "ranks_in_words",
    "read_json",
    "read_settings",
    "read_text",
    "speller",
    "structured_of_vllm",
    "texts_of_prompt",
    "translated",
    "unicode_error",
    "unknown_key",
    "unwritten",
    "weights_bytes",
]

__getattr__ = lazy_names("dovetail.serving", _HOMES, "dovetail")
