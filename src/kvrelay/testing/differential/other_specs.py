"""Parameters of `/v1/responses` and `/v1/messages`, and the endpoints that are passed on."""

from __future__ import annotations

from typing import Any

from kvrelay.testing.differential.cases import MODEL, OMIT, Fresh, How, Spec
from kvrelay.testing.differential.openai_specs import SCHEMA, USER, WARM

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FUNCTION = {"type": "function", "name": "look_up", "description": "Looks up.", "parameters": SCHEMA, "strict": False}
TOOL = {"name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}
LIMIT = {"max_output_tokens": 24}


def _response(name: str, *values: dict[str, Any], **more: Any) -> Spec:
    return Spec(path=RESPONSES, name=name, values=values, **more)


def _message(name: str, *values: dict[str, Any], **more: Any) -> Spec:
    return Spec(path=MESSAGES, name=name, values=values, **more)


OF_RESPONSES = (
    _response(
        "input: text", {}, {"input": "é ü 日本語 🙂"}, {"input": ""}, {"input": OMIT}, {"input": Fresh("text", 3000)}
    ),
    _response(
        "input: items",
        {"input": [USER]},
        {"input": [USER, {"role": "assistant", "content": "So the"}, USER]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": Fresh("text", 9)}]}]},
        {"input": [{"type": "odd"}]},
        {"input": []},
    ),
    _response("instructions", {"instructions": Fresh("text", 12)}),
    _response(
        "max_output_tokens",
        {"max_output_tokens": 1},
        {"max_output_tokens": 20},
        {"max_output_tokens": 0},
        {"max_output_tokens": 100_000},
    ),
    _response("max_tokens", {"max_tokens": 3}, note="no field of responses"),
    _response("temperature", WARM, {"temperature": -1}),
    _response("seed", {"temperature": 1.0, "seed": 5}),
    _response("top_p, top_k, min_p", {**WARM, "top_p": 0.6}, {**WARM, "top_k": 5}, {**WARM, "min_p": 0.2}),
    _response("penalties", {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3}),
    _response("logit_bias", {"logit_bias": {"100": 60}}),
    _response("stop", {"stop": ["e"]}, {"stop": "a"}, {"stop": ["e"], "include_stop_str_in_output": True}),
    _response("stop_token_ids", {"stop_token_ids": list(range(300, 900))}),
    _response("ignore_eos", {"ignore_eos": True}),
    _response(
        "include, top_logprobs",
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        streams=(False,),  # streamed, vLLM leaves out those of tokens without text, unless they come with others
    ),
    _response("top_logprobs", {"top_logprobs": 2}),
    _response(
        "text",
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, **LIMIT},
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "text"}}},
    ),
    _response(
        "structured_outputs",
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "[ab]{4}"}},
    ),
    _response(
        "tools, tool_choice",
        {"tools": [FUNCTION], "tool_choice": "none"},
        {"tools": [FUNCTION]},
        {"tools": [FUNCTION], "tool_choice": "required", **LIMIT},
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "look_up"}, **LIMIT},
        {"tool_choice": "required"},
    ),
    _response(
        "tools the engine runs",
        {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
        how=How.ALONE,
        reason="builtin_tools",
    ),
    _response("parallel_tool_calls, max_tool_calls", {"parallel_tool_calls": False, "max_tool_calls": 1}),
    _response("reasoning", {"reasoning": {"effort": "low"}}, {"include_reasoning": False}),
    _response("truncation", {"truncation": "auto"}, {"truncation": "disabled"}),
    _response("store", {"store": False}, {"store": True}),
    _response(
        "background",
        {"background": True},
        {"background": True, "store": False},
        how=How.ALONE,
        reason="background",
        streams=(False,),
        note="compared where engines do not store responses: the same error",
    ),
    _response(
        "previous_response_id", {"previous_response_id": "resp_unknown"}, how=How.ALONE, reason="previous_response"
    ),
    _response("previous_input_messages", {"previous_input_messages": [USER]}),
    _response("request_id", {"request_id": "resp_mine"}),
    _response("metadata, user, service_tier", {"metadata": {"a": "b"}, "user": "me", "service_tier": "auto"}),
    _response("prompt", {"prompt": {"id": "pmpt_1"}}),
    _response("prompt_cache_key, cache_salt", {"prompt_cache_key": "k", "cache_salt": "salt"}, {"cache_salt": ""}),
    _response("enable_response_messages", {"enable_response_messages": True}),
    _response("chat_template_kwargs", {"chat_template_kwargs": {"x": 1}}),
    _response("skip_special_tokens", {"skip_special_tokens": False, "ignore_eos": True}),
    _response("priority", {"priority": 0}, {"priority": 3}),
    _response(
        "vllm_xargs, kv_transfer_params",
        {"vllm_xargs": {"mine": 1}},
        {"kv_transfer_params": {"x": 1}},
        note="a client's own hand-over parameters are removed",
    ),
    _response("model", {"model": OMIT}, {"model": "nobody"}),
    _response("unknown fields", {"unheard_of": 1}),
)

OF_MESSAGES = (
    _message(
        "messages",
        {},
        {"messages": [USER, {"role": "assistant", "content": "So the"}, USER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": Fresh("text", 12)}]}]},
        {"messages": []},
        {"messages": OMIT},
        {"messages": [{"role": "odd", "content": "x"}]},
        {"messages": [{"role": "user", "content": Fresh("text", 3000)}]},
    ),
    _message(
        "messages: tool use",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "text", "text": "Well"}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "found"}]},
            ]
        },
    ),
    _message(
        "system",
        {"system": Fresh("text", 20)},
        {"system": [{"type": "text", "text": Fresh("text", 8)}]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    ),
    _message(
        "max_tokens",
        {"max_tokens": 1},
        {"max_tokens": 20},
        {"max_tokens": 0},
        {"max_tokens": OMIT},
        {"max_tokens": 100_000},
    ),
    _message(
        "stop_sequences",
        {"stop_sequences": ["e"]},
        {"stop_sequences": ["e", "a"], "max_tokens": 16},
        {"stop_sequences": []},
    ),
    _message("temperature", {"temperature": 0.0}, {"temperature": -1}),
    _message("top_k, top_p", {"temperature": 1.0, "top_k": 1}, {"top_p": 0.9}),
    _message(
        "tools, tool_choice",
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 24},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look_up"}, "max_tokens": 24},
        {"tools": [TOOL], "tool_choice": {"type": "tool"}},
    ),
    _message(
        "output_config",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 24},
        {"output_config": {"effort": "low"}},
    ),
    _message(
        "thinking",
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "enabled", "budget_tokens": 2}},
    ),
    _message("metadata", {"metadata": {"user_id": "me"}}),
    _message("cache_salt", {"cache_salt": "salt"}, {"cache_salt": ""}),
    _message("chat_template_kwargs", {"chat_template_kwargs": {"x": 1}}),
    _message(
        "vllm_xargs, kv_transfer_params",
        {"vllm_xargs": {"mine": 1}},
        {"kv_transfer_params": {"x": 1}},
        note="a client's own hand-over parameters are removed",
    ),
    _message("model", {"model": OMIT}, {"model": "nobody"}, {"model": ""}),
    _message("unknown fields", {"unheard_of": 1}),
)

_PROMPT, _CHAT = {"model": MODEL, "prompt": "some words"}, {"model": MODEL, "messages": [USER]}
_INPUT, _PAIR = {"model": MODEL, "input": "some words"}, {"model": MODEL, "query": "a", "documents": ["b"]}
_PASSED: dict[str, tuple[dict[str, Any], ...]] = {
    "/tokenize": (_PROMPT, _CHAT, {**_PROMPT, "return_token_strs": True}, {"model": "nobody", "prompt": "x"}, {}),
    "/detokenize": ({"model": MODEL, "tokens": [100, 200]}, {"model": MODEL, "tokens": ["x"]}),
    "/v1/messages/count_tokens": (_CHAT, {**_CHAT, "system": "s"}, {}),
    "/v1/completions/render": (_PROMPT,),
    "/v1/chat/completions/render": (_CHAT,),
    "/v1/messages/render": ({**_CHAT, "max_tokens": 4},),
    "/v1/responses/render": (_INPUT,),
    "/v1/chat/completions/batch": ({"model": MODEL, "messages": [[USER], [USER]], "max_tokens": 4, "temperature": 0},),
    "/v1/embeddings": (_INPUT,),
    "/v2/embed": (_INPUT,),
    "/pooling": (_INPUT,),
    "/classify": (_INPUT,),
    "/score": ({"model": MODEL, "text_1": "a", "text_2": "b"},),
    "/v1/score": ({"model": MODEL, "text_1": "a", "text_2": "b"},),
    "/rerank": (_PAIR,),
    "/v1/rerank": (_PAIR,),
    "/v2/rerank": (_PAIR,),
    "/generative_scoring": ({"model": MODEL},),
    "/v1/systemone": ({"model": MODEL},),
    "/cohere/v2/chat": ({**_CHAT, "max_tokens": 4, "temperature": 0},),
    "/v1/audio/transcriptions": ({},),
    "/v1/audio/translations": ({},),
    "/v1/chat/completions/derender": ({"model": MODEL},),
    "/v1/completions/derender": ({"model": MODEL},),
}
PASSED = tuple(
    Spec(path=path, name="all of it", values=values, how=How.PASSED, streams=(False,))
    for path, values in _PASSED.items()
)
OTHERS = (*OF_RESPONSES, *OF_MESSAGES, *PASSED)
