"""A FastAPI application with an engine in it: `uvicorn fastapi_app:app`, then `curl -N 'http://127.0.0.1:8000/ask?question=Hi'`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

import pyspec


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # The engine has its own process, which is replaced if it fails
    with pyspec.Engine.load("demo", np=4, isolated=True) as engine:
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/ask")
async def ask(request: Request, question: str) -> StreamingResponse:
    """The answer as it comes. A client that leaves ends its request."""
    messages = [{"role": "user", "content": question}]

    async def answer() -> AsyncIterator[str]:
        async for delta in request.app.state.engine.achat_stream(
            messages, temperature=0, max_tokens=100
        ):
            yield delta.content

    return StreamingResponse(answer(), media_type="text/plain")
