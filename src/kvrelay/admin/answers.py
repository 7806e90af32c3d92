"""Errors of an admin API in one form, and its bearer token."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from kvrelay.errors import BadRequestError, KvRelayError, UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Callable

_SCHEME = HTTPBearer(auto_error=False)
_CODES = {404: "not_found", 405: "bad_request"}


class Model(BaseModel):
    """Unknown fields in a body are refused."""

    model_config = ConfigDict(extra="forbid")


class Problem(Model):
    """Why a request was not served."""

    code: str = Field(description="a code of the error table, such as not_found")
    message: str = Field(description="what was wrong, and what is legal")


class Refused(Model):
    """The body of every answer that is an error."""

    error: Problem


def bearer(token: str) -> Callable[..., None]:
    """What guards a route: only who presents ``token`` gets in, compared in constant time."""

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)]) -> None:
        if given is None or not hmac.compare_digest(given.credentials.encode(), token.encode()):
            what = "no bearer token" if given is None else "a wrong bearer token"
            raise UnauthorizedError(f"{what} was presented: send Authorization: Bearer with the admin token")

    return check


def tell_errors(app: FastAPI) -> None:
    """Have every error of ``app`` answered as `Refused`."""
    app.add_exception_handler(KvRelayError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_input)
    app.add_exception_handler(StarletteHTTPException, _refuse_http)


def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KvRelayError)
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, UnauthorizedError) else None
    return _answer(error.http_status, error.code, str(error), headers)


def _refuse_input(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    told = "; ".join(f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors())
    return _answer(422, BadRequestError.code, told)


def _refuse_http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    headers = dict(error.headers) if error.headers else None
    return _answer(error.status_code, _CODES.get(error.status_code, "unavailable"), str(error.detail), headers)


def _answer(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    refused = Refused(error=Problem(code=code, message=message))
    return JSONResponse(refused.model_dump(), status_code=status, headers=headers)
