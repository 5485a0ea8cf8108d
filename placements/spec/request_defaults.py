"""The defaults that a model, or one of its names, gives to the requests that are sent to it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, StrictInt, model_serializer

from placements.spec.notation import Frozen, Reported, in_words

MOST = 2**31 - 1
Variable = Annotated[bool | StrictInt | float | str, Reported("a text, a number, true or false")]


class RequestDefaults(Frozen):
    """Values of request fields, each used where a request does not have the field. Unset: as without defaults."""

    wanted = "a mapping, like {temperature: 0.2, max_tokens: 512}, or empty"
    system: Annotated[str, Field(min_length=1), Reported("a text that is not empty")] | None = None
    """A system prompt for chats that have none. Completions do not get it."""
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """The most tokens of an answer, at most the rest of `max_len`. Messages always have their own."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 takes the most probable token. This field and the next ones are those of [requests](api.md#request-fields)."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """As in requests."""
    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    """As in requests."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """As in requests."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """As in requests."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """As in requests."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """As in requests."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """As in requests."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1024), Reported("a text of 1 to 1024 characters")], ...],
        Field(max_length=16),
        Reported('a list of at most 16 texts, like ["</s>"]'),
    ] = Field((), strict=False, json_schema_extra=in_words("list of texts"))
    """Texts that end the answer."""
    chat_template_kwargs: Annotated[
        dict[str, Variable], Reported("a mapping from variables to texts, numbers, true or false")
    ] = Field({}, json_schema_extra=in_words("a mapping"))
    """Further variables of the chat template, such as `{enable_thinking: false}`. A request that has this field gets
    none of these."""

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Returns the fields that are set."""
        return {name: value for name, value in serialize(self).items() if getattr(self, name) not in (None, (), {})}

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are set, as JSON values."""
        return self.model_dump(mode="json")
