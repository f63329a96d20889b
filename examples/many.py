"""Many chats at once: as many run side by side as there are slots (np), the others wait their turn."""

import asyncio

import pyspec

QUESTIONS = [f"What is {n} x {n + 1}?" for n in range(2, 10)]


async def ask(engine: pyspec.Engine, question: str) -> None:
    answer = await engine.achat([{"role": "user", "content": question}], temperature=0, max_tokens=40)
    print(f"{question} {answer.content}")


async def main() -> None:
    with pyspec.Engine.load("demo", np=4) as engine:
        await asyncio.gather(*(ask(engine, question) for question in QUESTIONS))


asyncio.run(main())
