"""Parameters of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from kvrelay.testing.differential.cases import MODEL, OMIT, Fresh, How, Spec

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WARM = {"temperature": 0.8, "seed": 11}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
TOOL = {"name": "look_up", "description": "Looks a word up.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}, {"type": "function", "function": {**TOOL, "name": "other"}}]
NAMED = {"type": "function", "function": {"name": "other"}}
USER = {"role": "user", "content": Fresh("text", 30)}
BIG_IDS = list(range(300, 900))


def _spec(path: str, name: str, *values: dict[str, Any], **more: Any) -> Spec:
    return Spec(path=path, name=name, values=values, **more)


def _both(name: str, *values: dict[str, Any], **more: Any) -> list[Spec]:
    return [_spec(path, name, *values, **more) for path in (COMPLETIONS, CHAT)]


BOTH = [
    *_both("n", {"n": 1}, {"n": 3, **WARM}, {"n": 2}),
    *_both("best_of", {"best_of": 2}, note="vLLM 0.32 has no such field and ignores it"),
    *_both("stop", {"stop": "e"}, {"stop": ["e", " a"]}, {"stop": []}, {"stop": None}, {"stop": ["\n"]}),
    *_both("stop_token_ids", {"stop_token_ids": BIG_IDS}, {"stop_token_ids": []}),
    *_both("include_stop_str_in_output", {"include_stop_str_in_output": True, "stop": ["e", "a"]}),
    *_both("ignore_eos", {"ignore_eos": True, "max_tokens": 12}),
    *_both("min_tokens", {"min_tokens": 6, "stop": ["e"]}, {"min_tokens": 9}),
    *_both("max_tokens", {"max_tokens": 1}, {"max_tokens": 20}, {"max_tokens": 0}, {"max_tokens": 100_000}),
    *_both("max_completion_tokens", {"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 7}),
    *_both("temperature", {"temperature": 0.0}, WARM, {"temperature": -1}, {"temperature": "hot"}),
    *_both("seed", {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 2**40}, {"seed": "x"}),
    *_both("top_p", {**WARM, "top_p": 0.5}, {"top_p": 2}),
    *_both("top_k", {**WARM, "top_k": 5}, {"top_k": -2}),
    *_both("min_p", {**WARM, "min_p": 0.2}),
    *_both("presence_penalty", {"presence_penalty": 1.5}, {"presence_penalty": 3}),
    *_both("frequency_penalty", {"frequency_penalty": 1.5}),
    *_both("repetition_penalty", {"repetition_penalty": 1.3}),
    *_both("repetition_detection", {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}}),
    *_both(
        "logit_bias", {"logit_bias": {"100": 60.0}}, {"logit_bias": {"100": -100, "200": 30}}, {"logit_bias": {"x": 1}}
    ),
    *_both("allowed_token_ids", {"allowed_token_ids": [50, 60, 70]}, {"allowed_token_ids": []}),
    *_both("bad_words", {"bad_words": ["the", "e"]}),
    _spec(
        COMPLETIONS, "logprob_token_ids", {"logprob_token_ids": [50, 60], "logprobs": 1}, {"logprob_token_ids": [50]}
    ),
    _spec(CHAT, "logprob_token_ids", {"logprob_token_ids": [50, 60], "logprobs": True}, {"logprob_token_ids": [50]}),
    *_both(
        "response_format",
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "max_tokens": 24},
        {"response_format": {"type": "odd"}},
    ),
    *_both(
        "structured_outputs",
        {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}},
        {"structured_outputs": {"choice": ["yes", "no", "maybe"]}},
        {"structured_outputs": {"json": SCHEMA}, "max_tokens": 24},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": "a+", "choice": ["b"]}},
    ),
    *_both(
        "stream_options",
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    *_both("stream_interval", {"stream_interval": 3}, {"stream_interval": 0}),
    *_both("return_token_ids", {"return_token_ids": True}),
    *_both("return_token_offsets", {"return_token_offsets": True}),
    *_both(
        "truncate_prompt_tokens",
        {"truncate_prompt_tokens": 20},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": 5000},
    ),
    *_both(
        "truncation_side",
        {"truncate_prompt_tokens": 20, "truncation_side": "left"},
        {"truncate_prompt_tokens": 20, "truncation_side": "right"},
    ),
    *_both("add_special_tokens", {"add_special_tokens": False}, {"add_special_tokens": True}),
    *_both("skip_special_tokens", {"skip_special_tokens": False, "ignore_eos": True}),
    *_both("spaces_between_special_tokens", {"spaces_between_special_tokens": False}),
    *_both("cache_salt", {"cache_salt": "salt"}, {"cache_salt": ""}),
    *_both("priority", {"priority": 0}, {"priority": 5}),
    *_both("user", {"user": "somebody"}),
    *_both("request_id", {"request_id": "mine"}),
    *_both("session_id", {"session_id": "mine"}),
    *_both("thinking_token_budget", {"thinking_token_budget": 4}),
    *_both(
        "use_beam_search",
        {"use_beam_search": True, "n": 2},
        {"use_beam_search": True, "n": 2, "length_penalty": 2.0},
        note="vLLM makes engine requests of its own, which hand nothing over: the decode engine computes the prompt",
    ),
    *_both("vllm_xargs", {"vllm_xargs": {"mine": 1}}, {"vllm_xargs": {"mine": {"not": "flat"}}}),
    *_both(
        "kv_transfer_params", {"kv_transfer_params": {"do_remote_prefill": True}}, note="a client's own are removed"
    ),
    *_both("model", {"model": OMIT}, {"model": "nobody"}, {"model": None}),
    *_both("unknown fields", {"unheard_of": {"x": [1]}}),
    *_both(
        "prompt_logprobs",
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 3},
        how=How.ALONE,
        reason="prompt_logprobs",
        streams=(False,),
    ),
    *_both(
        "prompt_logprobs and stream", {"prompt_logprobs": 1}, how=How.ALONE, reason="prompt_logprobs", streams=(True,)
    ),
]

ONLY_COMPLETIONS = [
    _spec(COMPLETIONS, "prompt: text", {"prompt": Fresh("text", 25)}, {"prompt": "é ü 日本語 🙂"}, {"prompt": ""}),
    _spec(
        COMPLETIONS,
        "prompt: token ids",
        {"prompt": Fresh("ids", 64)},
        {"prompt": Fresh("ids", 1)},
        {"prompt": [5]},
        {"prompt": []},
        {"prompt": [99_999_999]},
        {"prompt": [-1]},
    ),
    _spec(
        COMPLETIONS,
        "prompt: a long one",
        {"prompt": Fresh("ids", 600)},
        {"prompt": Fresh("ids", 2040)},
        {"prompt": Fresh("ids", 2049)},
        {"prompt": Fresh("ids", 2010), "max_tokens": None},
    ),
    _spec(COMPLETIONS, "prompt: several texts", {"prompt": Fresh("texts", 20)}, {"prompt": ["one"]}),
    _spec(
        COMPLETIONS,
        "prompt: several lists of ids",
        {"prompt": Fresh("lists", 50)},
        {"prompt": [Fresh("ids", 9)]},
        {"prompt": Fresh("lists", 20), "n": 2, **WARM},
        {"prompt": [[1, 2], "x"]},
    ),
    _spec(COMPLETIONS, "prompt: missing", {"prompt": OMIT}, {"prompt": None}, {"prompt": 5}),
    _spec(
        COMPLETIONS,
        "prompt_embeds",
        {"prompt": OMIT, "prompt_embeds": "AAAA"},
        {"prompt_embeds": ["AAAA", "AAAA"]},
        note="vLLM takes them with `--enable-prompt-embeds`; the connector keys them by content",
    ),
    _spec(COMPLETIONS, "max_tokens: absent", {"max_tokens": OMIT}),
    _spec(COMPLETIONS, "suffix", {"suffix": "x"}),
    _spec(COMPLETIONS, "logprobs", {"logprobs": 0}, {"logprobs": 3}, {"logprobs": 500}, {"logprobs": -5}),
    _spec(COMPLETIONS, "return_tokens_as_token_ids", {"logprobs": 2, "return_tokens_as_token_ids": True}),
    _spec(
        COMPLETIONS,
        "echo",
        {"echo": True},
        {"echo": True, "prompt": Fresh("text", 20)},
        {"echo": True, "prompt": Fresh("texts", 10)},
    ),
    _spec(
        COMPLETIONS,
        "echo and logprobs",
        {"echo": True, "logprobs": 1},
        {"echo": True, "logprobs": 0, "max_tokens": 1},
        how=How.ALONE,
        reason="prompt_logprobs",
        streams=(False,),
    ),
]

ONLY_CHAT = [
    _spec(
        CHAT,
        "messages",
        {"messages": [{"role": "system", "content": Fresh("text", 20)}, USER]},
        {"messages": [USER, {"role": "assistant", "content": Fresh("text", 9)}, USER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": Fresh("text", 9)}]}]},
        {"messages": [{"role": "user", "content": "é ü 日本語 🙂", "name": "x"}]},
        {"messages": []},
        {"messages": OMIT},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "odd"}]}]},
    ),
    _spec(
        CHAT,
        "messages: a long one",
        {"messages": [{"role": "user", "content": Fresh("text", 400)}]},
        {"messages": [{"role": "user", "content": Fresh("text", 3000)}]},
    ),
    _spec(
        CHAT,
        "media",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
            ]
        },
        note="the tried model sees no images: the same error",
    ),
    _spec(
        CHAT,
        "max_completion_tokens alone",
        {"max_tokens": OMIT, "max_completion_tokens": 5},
        {"max_tokens": OMIT, "max_completion_tokens": 5, "min_tokens": 5},
        {"max_tokens": None, "max_completion_tokens": 6},
    ),
    _spec(CHAT, "logprobs", {"logprobs": True}, {"logprobs": True, "top_logprobs": 0}, {"logprobs": False}),
    _spec(
        CHAT,
        "top_logprobs",
        {"logprobs": True, "top_logprobs": 3},
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 90},
    ),
    _spec(
        CHAT, "return_tokens_as_token_ids", {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    ),
    _spec(CHAT, "return_prompt_text", {"return_prompt_text": True}),
    _spec(
        CHAT,
        "tools",
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "odd"}]},
    ),
    _spec(
        CHAT,
        "tool_choice",
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 24},
        {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 24},
        {"tool_choice": NAMED},
        {"tools": TOOLS, "tool_choice": "odd"},
    ),
    _spec(
        CHAT,
        "parallel_tool_calls",
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 24},
    ),
    _spec(CHAT, "reasoning_effort", {"reasoning_effort": "low"}),
    _spec(CHAT, "include_reasoning", {"include_reasoning": False}),
    _spec(CHAT, "documents", {"documents": [{"title": "a", "text": "b"}]}),
    _spec(
        CHAT,
        "chat_template",
        {"chat_template": "{{ messages[0]['content'] }}"},
        note="vLLM takes it with `--trust-request-chat-template`",
    ),
    _spec(CHAT, "chat_template_kwargs", {"chat_template_kwargs": {"x": True}}),
    _spec(CHAT, "add_generation_prompt", {"add_generation_prompt": False}, {"add_generation_prompt": True}),
    _spec(
        CHAT,
        "continue_final_message",
        {
            "messages": [USER, {"role": "assistant", "content": "So the"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {"continue_final_message": True, "add_generation_prompt": True},
    ),
    _spec(CHAT, "mm_processor_kwargs", {"mm_processor_kwargs": {}}),
    _spec(CHAT, "media_io_kwargs", {"media_io_kwargs": {}}),
    _spec(
        CHAT,
        "echo",
        {"echo": True, "messages": [USER, {"role": "assistant", "content": "So the"}]},
        how=How.ALONE,
        reason="prompt_logprobs",
        streams=(False,),
    ),
]

OPENAI = (*BOTH, *ONLY_COMPLETIONS, *ONLY_CHAT)
__all__ = ["CHAT", "COMPLETIONS", "MODEL", "OPENAI"]
