"""Lends one function to an agent for one turn.

OUBLIETTE_TOKEN=oub_… python examples/lend.py "Say hello with notify"
"""

import asyncio
import os
import sys

from oubliette_caller import Oubliette

address = os.environ.get("OUBLIETTE_URL", "http://127.0.0.1:8080")
lend = Oubliette(address, os.environ.get("OUBLIETTE_TOKEN", "")).lend("myapp")


@lend.tool
async def notify(message: str) -> str:
    """Show a note to the user."""
    print("note:", message)
    return "shown"


async def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Tell the user hello with your notify tool."
    async with lend.start(prompt) as session:
        print((await session.turn()).text)
        await session.end()


if __name__ == "__main__":
    asyncio.run(main())
