"""Whether vLLM's own protocol classes take the legs that the router makes of every request of the suite.

``python -m kvrelay.testing.differential.accepting`` prints what they refuse, one line each, and how many it looked at.
A request that vLLM takes must be taken as a prefill leg and as a decode leg; one that it refuses, on D, too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvrelay.router.core.legs import ClientBody, Endpoint, parse_fields
from kvrelay.testing.differential.api_page import SPECS
from kvrelay.testing.differential.cases import cases

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFILL, DECODE = b'{"do_remote_decode":true}', b'{"do_remote_prefill":true}'


def refused() -> Iterator[str]:
    """What is refused; then, as the last line, the number of requests looked at."""
    classes = _classes()
    looked = 0
    for case in cases(SPECS, "m"):
        if case.spec.path not in classes:
            continue
        protocol = classes[Endpoint(case.spec.path)]
        looked += 1
        body = ClientBody(Endpoint(case.spec.path), parse_fields(json.dumps(case.body).encode()))
        problem = _problem(protocol, case.body)
        prefill = _problem(protocol, json.loads(body.prefill(PREFILL)))
        decode = _problem(protocol, json.loads(body.decode(DECODE, "resp_1")))
        if problem is None and prefill is not None:
            yield f"{case.name}: prefill leg: {prefill}"
        if (problem is None) is not (decode is None):
            yield f"{case.name}: decode leg: {decode}, not {problem}"
    yield str(looked)


def _classes() -> dict[Endpoint, Any]:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    return {
        Endpoint.COMPLETIONS: CompletionRequest,
        Endpoint.CHAT: ChatCompletionRequest,
        Endpoint.RESPONSES: ResponsesRequest,
        Endpoint.MESSAGES: AnthropicMessagesRequest,
    }


def _problem(protocol: Any, body: dict[str, Any]) -> str | None:
    from pydantic import ValidationError
    from vllm.exceptions import VLLMValidationError

    try:
        protocol.model_validate(json.loads(json.dumps(body)))  # validators write into what they are given
    except (ValidationError, VLLMValidationError) as error:
        return str(error)[:200].replace("\n", " ")
    return None


if __name__ == "__main__":
    for line in refused():
        print(line)  # noqa: T201  its only output
