"""The routes of the gateway, from which routing, scopes and limits of keys, CORS, OpenAPI and docs follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from orchestrator.gateway import lmi
from orchestrator.gateway.anthropic import answers as anthropic_answers
from orchestrator.gateway.anthropic import requests as anthropic_requests
from orchestrator.gateway.app import Gateway
from orchestrator.gateway.encoding import requests as encoding
from orchestrator.gateway.openai import answers, body_reader, protocol, request_builder
from orchestrator.gateway.openapi import ANTHROPIC, GatewayRoute
from orchestrator.gateway.responses import answers as responses_answers
from orchestrator.gateway.responses import requests as responses_requests
from orchestrator.gateway.sagemaker import LoadedModel, LoadedModels, LoadRequest

_get = partial(GatewayRoute, "GET")
_post = partial(GatewayRoute, "POST")
_probe = partial(_get, scope=None, answer=None)
_inferring = partial(_post, scope="inference", charged=True, refusals=(404,))  # the model may be unknown


def _generating(
    path: str, summary: str, body: type, reads: Any, answer: type, writes: Any, **more: Any
) -> GatewayRoute:
    """Returns the route of an API that generates text, with its reader and its writer."""
    own = {"body": (body,), "reads": reads, "answer": answer, "writes": writes, "operation": "chat"}
    return _inferring(path, summary, Gateway.generate, **own | more, streams=True, queues=True)


def _encoding(path: str, summary: str, body: type[encoding.EncodingBody], answer: type, operation: str) -> GatewayRoute:
    own = {"body": (body,), "reads": partial(encoding.read_encoding, kind=body), "answer": answer}
    return _inferring(path, summary, Gateway.encode, **own, operation=operation, queues=True, forwards=True)


def _part(name: str, method: str) -> Callable[[Gateway, Any], Any]:
    """Returns the handler that a part of the gateway has."""
    return lambda gateway, exchange: getattr(getattr(gateway, name), method)(exchange)


ROUTES = (
    _generating(
        "/v1/chat/completions",
        "Answer a chat.",
        *(protocol.ChatRequest, body_reader.read_chat),
        *(answers.ChatCompletion, answers.openai_answer),
        forwards=True,
    ),
    _generating(
        "/v1/completions",
        "Continue a prompt.",
        *(protocol.CompletionRequest, body_reader.read_completion),
        *(answers.TextCompletion, answers.openai_answer),
        operation="text_completion",
        forwards=True,
    ),
    _generating(
        "/v1/messages",
        "Answer a chat in the shape of Anthropic's API.",
        *(anthropic_requests.MessagesRequest, anthropic_requests.read_messages),
        *(anthropic_answers.Message, anthropic_answers.messages_answer),
        errors=ANTHROPIC,
    ),
    _inferring(
        "/v1/messages/count_tokens",
        "Count the tokens of a chat's prompt.",
        Gateway.tokenize,
        body=(anthropic_requests.CountTokensRequest,),
        reads=anthropic_requests.read_count_tokens,
        answer=anthropic_answers.TokenCount,
        writes=request_builder.write_count,
        errors=ANTHROPIC,
    ),
    _generating(
        "/v1/responses",
        "Answer a chat in the shape of OpenAI's Responses API; nothing is kept.",
        *(responses_requests.ResponsesRequest, responses_requests.read_responses),
        *(responses_answers.Response, responses_answers.responses_answer),
    ),
    _encoding(
        "/v1/embeddings", "The vectors of texts.", encoding.EmbeddingRequest, answers.EmbeddingList, "embeddings"
    ),
    *(
        _encoding(path, summary, encoding.RerankRequest, answers.Ranking, "rerank")
        for path, summary in (
            ("/v1/rerank", "Documents in the order of their relevance to a query."),
            ("/v2/rerank", "As /v1/rerank."),
            ("/rerank", "As /v1/rerank."),
        )
    ),
    _encoding("/v1/score", "The scores of pairs of texts.", encoding.ScoreRequest, answers.ScoreList, "score"),
    _encoding("/score", "As /v1/score.", encoding.ScoreRequest, answers.ScoreList, "score"),
    _encoding("/classify", "The classes of texts.", encoding.ClassifyRequest, answers.ClassificationList, "classify"),
    _get(
        "/v1/models",
        "The models and their aliases.",
        _part("models", "list"),
        answer=answers.ModelList,
        to_anthropic=anthropic_answers.ModelPage,
        scope="inference",
    ),
    _get(
        "/v1/models/{model}",
        "One model.",
        _part("models", "get"),
        takes_rest=True,
        answer=answers.ModelCard,
        to_anthropic=anthropic_answers.ModelInfo,
        scope="inference",
        refusals=(404,),
    ),
    _inferring(
        "/tokenize",
        "The tokens of a prompt or of a chat.",
        Gateway.tokenize,
        body=(protocol.TokenizeTextRequest, protocol.TokenizeChatRequest),
        reads=body_reader.read_tokenize,
        answer=request_builder.Tokenized,
        writes=request_builder.write_tokenized,
        operation="tokenize",
        forwards=True,
    ),
    _inferring(
        "/detokenize",
        "The text of tokens.",
        Gateway.tokenize,
        body=(protocol.DetokenizeRequest,),
        reads=body_reader.read_detokenize,
        answer=request_builder.Detokenized,
        writes=request_builder.write_detokenized,
        operation="detokenize",
        forwards=True,
    ),
    _get("/version", "The version of corewright.", Gateway.version, answer=answers.VersionAnswer),
    _get("/metrics", "Metrics for Prometheus.", Gateway.metrics_page, answer=None),
    _get("/openapi.json", "This document.", Gateway.openapi),
    _probe("/livez", "Liveness of the gateway.", Gateway.livez),
    _probe("/readyz", "Readiness: every model has been ready.", Gateway.readyz),
    _probe("/health", "As /readyz.", Gateway.readyz),
    _probe("/ping", "As /readyz.", Gateway.readyz),
)

_invoking = partial(
    _inferring,
    handler=_part("sagemaker", "invoke"),
    body=(
        *(protocol.ChatRequest, protocol.CompletionRequest, encoding.EmbeddingRequest, encoding.RerankRequest),
        lmi.LmiRequest,
    ),
    reads=lmi.read_lmi,
    answer=object,
    writes=lmi.lmi_answer,
    operation="text_completion",
    streams=True,
    queues=True,
    invokes=True,
)
_invocations = _invoking(
    lmi.INVOCATIONS, "Answer a request by the fields of its body; without a model, by the only one."
)
OWN_ROUTES = (*ROUTES, dataclasses.replace(_invocations, listed=False))  # of a gateway elsewhere
CONTAINER_ROUTES = (  # in a container of SageMaker
    *ROUTES,
    _invocations,
    _get("/models", "The models that SageMaker has loaded.", _part("sagemaker", "list"), answer=LoadedModels),
    _post(
        "/models",
        "Load a model.",
        _part("sagemaker", "load"),
        body=(LoadRequest,),
        answer=LoadedModel,
        refusals=(409, 507),
        refusal_texts={409: "The model is loaded.", 507: "The model does not fit beside the others."},
    ),
    _get(
        "/models/{model}",
        "A model that SageMaker has loaded.",
        _part("sagemaker", "get"),
        answer=LoadedModel,
        refusals=(404,),
    ),
    GatewayRoute(
        "DELETE",
        "/models/{model}",
        "Unload a model, and drain its requests.",
        _part("sagemaker", "unload"),
        refusals=(404,),
    ),
    _invoking("/models/{model}/invoke", "As /invocations, for this model."),
)
