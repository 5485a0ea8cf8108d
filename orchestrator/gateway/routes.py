"""The routes of the gateway, from which routing, scopes and limits of keys, CORS, OpenAPI and docs follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from orchestrator.gateway.anthropic.answer_types import Message, ModelInfo, ModelPage, TokenCount
from orchestrator.gateway.anthropic.answers import messages_answer
from orchestrator.gateway.anthropic.chat_request import read_count_tokens, read_messages
from orchestrator.gateway.anthropic.protocol import CountTokensRequest, MessagesRequest
from orchestrator.gateway.app import Gateway
from orchestrator.gateway.encoding.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    EncodingBody,
    RerankRequest,
    ScoreRequest,
    read_encoding,
)
from orchestrator.gateway.lmi import INVOCATIONS, LmiRequest, lmi_answer, read_lmi
from orchestrator.gateway.openai.answer_types import (
    ChatCompletion,
    ClassificationList,
    EmbeddingList,
    ModelCard,
    ModelList,
    Ranking,
    ScoreList,
    TextCompletion,
    VersionAnswer,
)
from orchestrator.gateway.openai.answers import openai_answer
from orchestrator.gateway.openai.body_reader import (
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from orchestrator.gateway.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from orchestrator.gateway.openai.tokenize import (
    Detokenized,
    Tokenized,
    write_count,
    write_detokenized,
    write_tokenized,
)
from orchestrator.gateway.openapi import ANTHROPIC, GatewayRoute
from orchestrator.gateway.responses.answer_types import Response
from orchestrator.gateway.responses.answers import responses_answer
from orchestrator.gateway.responses.chat_request import read_responses
from orchestrator.gateway.responses.protocol import ResponsesRequest
from orchestrator.gateway.sagemaker import LoadedModel, LoadedModels, LoadRequest

INFERENCE = "inference"  # the scope
OF_A_MODEL = (404,)  # the model may be unknown
_generating = partial(
    GatewayRoute,
    method="POST",
    handler=Gateway.generate,
    streams=True,
    queues=True,
    scope=INFERENCE,
    charged=True,
    refusals=OF_A_MODEL,
)
_tokenizing = partial(
    GatewayRoute, method="POST", handler=Gateway.tokenize, scope=INFERENCE, charged=True, refusals=OF_A_MODEL
)
_get = partial(GatewayRoute, method="GET")
_probe = partial(_get, scope=None, answer=None)


def _encoding(path: str, summary: str, answer: type, body: type[EncodingBody], operation: str) -> GatewayRoute:
    return GatewayRoute(
        method="POST",
        path=path,
        summary=summary,
        handler=Gateway.encode,
        body=(body,),
        reads=partial(read_encoding, kind=body),
        answer=answer,
        operation=operation,
        queues=True,
        forwards=True,
        scope=INFERENCE,
        charged=True,
        refusals=OF_A_MODEL,
    )


def _of(part: str, name: str) -> Callable[[Gateway, Any], Any]:
    """Returns the handler that a part of the gateway has."""
    return lambda gateway, exchange: getattr(getattr(gateway, part), name)(exchange)


ROUTES = (
    _generating(
        path="/v1/chat/completions",
        summary="Answer a chat.",
        body=(ChatRequest,),
        reads=read_chat,
        writes=openai_answer,
        answer=ChatCompletion,
        operation="chat",
        forwards=True,
    ),
    _generating(
        path="/v1/completions",
        summary="Continue a prompt.",
        body=(CompletionRequest,),
        reads=read_completion,
        writes=openai_answer,
        answer=TextCompletion,
        operation="text_completion",
        forwards=True,
    ),
    _generating(
        path="/v1/messages",
        summary="Answer a chat in the shape of Anthropic's API.",
        body=(MessagesRequest,),
        reads=read_messages,
        writes=messages_answer,
        answer=Message,
        operation="chat",
        errors=ANTHROPIC,
    ),
    _tokenizing(
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a chat's prompt.",
        body=(CountTokensRequest,),
        reads=read_count_tokens,
        writes=write_count,
        answer=TokenCount,
        errors=ANTHROPIC,
    ),
    _generating(
        path="/v1/responses",
        summary="Answer a chat in the shape of OpenAI's Responses API; nothing is kept.",
        body=(ResponsesRequest,),
        reads=read_responses,
        writes=responses_answer,
        answer=Response,
        operation="chat",
    ),
    _encoding("/v1/embeddings", "The vectors of texts.", EmbeddingList, EmbeddingRequest, "embeddings"),
    _encoding("/v1/rerank", "Documents in the order of their relevance to a query.", Ranking, RerankRequest, "rerank"),
    _encoding("/v2/rerank", "As /v1/rerank.", Ranking, RerankRequest, "rerank"),
    _encoding("/rerank", "As /v1/rerank.", Ranking, RerankRequest, "rerank"),
    _encoding("/v1/score", "The scores of pairs of texts.", ScoreList, ScoreRequest, "score"),
    _encoding("/score", "As /v1/score.", ScoreList, ScoreRequest, "score"),
    _encoding("/classify", "The classes of texts.", ClassificationList, ClassifyRequest, "classify"),
    _get(
        path="/v1/models",
        summary="The models and their aliases.",
        handler=_of("models", "list"),
        answer=ModelList,
        to_anthropic=ModelPage,
        scope=INFERENCE,
    ),
    _get(
        path="/v1/models/{model}",
        takes_rest=True,
        summary="One model.",
        handler=_of("models", "one"),
        answer=ModelCard,
        to_anthropic=ModelInfo,
        scope=INFERENCE,
        refusals=OF_A_MODEL,
    ),
    _tokenizing(
        path="/tokenize",
        summary="The tokens of a prompt or of a chat.",
        body=(TokenizeTextRequest, TokenizeChatRequest),
        reads=read_tokenize,
        writes=write_tokenized,
        answer=Tokenized,
        operation="tokenize",
        forwards=True,
    ),
    _tokenizing(
        path="/detokenize",
        summary="The text of tokens.",
        body=(DetokenizeRequest,),
        reads=read_detokenize,
        writes=write_detokenized,
        answer=Detokenized,
        operation="detokenize",
        forwards=True,
    ),
    _get(path="/version", summary="The version of corewright.", handler=Gateway.version, answer=VersionAnswer),
    _get(path="/metrics", summary="Metrics for Prometheus.", handler=Gateway.metrics_page, answer=None),
    _get(path="/openapi.json", summary="This document.", handler=Gateway.openapi),
    _probe(path="/livez", summary="Liveness of the gateway.", handler=Gateway.livez),
    _probe(path="/readyz", summary="Readiness: every model has been ready.", handler=Gateway.readyz),
    _probe(path="/health", summary="As /readyz.", handler=Gateway.readyz),
    _probe(path="/ping", summary="As /readyz.", handler=Gateway.readyz),
)

_invoking = partial(
    _generating,
    handler=_of("sagemaker", "invoke"),
    body=(ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, LmiRequest),
    reads=read_lmi,
    writes=lmi_answer,
    answer=object,
    operation="text_completion",
    invokes=True,
)
_invocations = _invoking(
    path=INVOCATIONS, summary="Answer a request by the fields of its body; without a model, by the only one."
)
OWN_ROUTES = (*ROUTES, dataclasses.replace(_invocations, listed=False))  # of a gateway elsewhere
CONTAINER_ROUTES = (  # in a container of SageMaker
    *ROUTES,
    _invocations,
    _get(
        path="/models",
        summary="The models that SageMaker has loaded.",
        handler=_of("sagemaker", "list"),
        answer=LoadedModels,
    ),
    GatewayRoute(
        method="POST",
        path="/models",
        summary="Load a model.",
        handler=_of("sagemaker", "load"),
        body=(LoadRequest,),
        answer=LoadedModel,
        refusals=(409, 507),
        refusal_texts={409: "The model is loaded.", 507: "The model does not fit beside the others."},
    ),
    _get(
        path="/models/{model}",
        summary="A model that SageMaker has loaded.",
        handler=_of("sagemaker", "get"),
        answer=LoadedModel,
        refusals=OF_A_MODEL,
    ),
    GatewayRoute(
        method="DELETE",
        path="/models/{model}",
        summary="Unload a model, and drain its requests.",
        handler=_of("sagemaker", "unload"),
        refusals=OF_A_MODEL,
    ),
    _invoking(path="/models/{model}/invoke", summary="As /invocations, for this model."),
)
