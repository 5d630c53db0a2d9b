"""What all models share, and the shapes of pages and problems."""

from __future__ import annotations

from typing import Annotated, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")

#: Ids that the server issues.
ID_PATTERN: Final = "^[0-9a-f]{16}$"
ID_EXAMPLE: Final = "5f1c0d9ae2b34786"


class Model(BaseModel):
    """An answer: made from attributes of a value, numbers never NaN."""

    model_config = ConfigDict(from_attributes=True, ser_json_inf_nan="null", frozen=True)


class Question(BaseModel):
    """A request: what nobody knows is refused, not passed over."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PageModel(Model, Generic[Item]):
    """A part of a list."""

    items: list[Item] = Field(description="some of the list, in its order")
    next: str | None = Field(
        description="cursor of those that follow, null at the end", examples=["bzUw"]
    )


class ProblemDocument(Model):
    """What went wrong (RFC 9457), as `application/problem+json`."""

    type: str = Field(
        description="stable name of the problem", examples=["urn:smon:problem:not-found"]
    )
    title: str = Field(description="the same in words", examples=["There is no such thing"])
    status: int = Field(description="status code", examples=[404])
    detail: str = Field(
        description="expected, found, what to do", examples=["expected the id of a job"]
    )
    instance: str | None = Field(
        default=None,
        description="id of the request, as in the header X-Request-Id and the server's log",
        examples=["0f3b8c5e9a7d4c21"],
    )


Seconds = Annotated[float, Field(description="seconds", examples=[1.032])]
Time = Annotated[float, Field(description="unix time in seconds", examples=[1_790_000_000.25])]
Ratio = Annotated[float, Field(description="a ratio", examples=[1.128])]
Step = Annotated[int, Field(description="number of a step", examples=[1240])]
