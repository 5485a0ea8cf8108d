"""The routes that a container of SageMaker has beside those of every gateway, for its OpenAPI document."""

from __future__ import annotations

import msgspec

from orchestrator.gateway.encoding.protocol import EmbeddingRequest, RerankRequest
from orchestrator.gateway.lmi import LmiRequest
from orchestrator.gateway.openai.openapi import ROUTES, GatewayRoute
from orchestrator.gateway.openai.protocol import ChatRequest, CompletionRequest
from orchestrator.gateway.sagemaker import LoadRequest

BODIES = (ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, LmiRequest)


class LoadedModel(msgspec.Struct, rename="camel"):
    """A model that SageMaker has loaded, and its folder."""

    model_name: str
    model_url: str


class LoadedModels(msgspec.Struct, rename="camel", omit_defaults=True):
    """A page; ``next_page_token`` if there are more."""

    models: list[LoadedModel]
    next_page_token: str | None = None


CONTAINER_ROUTES = (
    *ROUTES,
    GatewayRoute(
        "POST",
        "/invocations",
        "Answer a request by the fields of its body; without a model, by the only one.",
        object,
        BODIES,
        streams=True,
        of_a_model=True,
        invokes=True,
    ),
    GatewayRoute("GET", "/models", "The models that SageMaker has loaded.", LoadedModels),
    GatewayRoute(
        "POST",
        "/models",
        "Load a model.",
        LoadedModel,
        (LoadRequest,),
        refused=((409, "The model is loaded."), (507, "The model does not fit beside the others.")),
    ),
    GatewayRoute("GET", "/models/{model}", "A model that SageMaker has loaded.", LoadedModel, of_a_model=True),
    GatewayRoute("DELETE", "/models/{model}", "Unload a model, and drain its requests.", dict, of_a_model=True),
    GatewayRoute(
        "POST",
        "/models/{model}/invoke",
        "As /invocations, for this model.",
        object,
        BODIES,
        streams=True,
        of_a_model=True,
        invokes=True,
    ),
)
