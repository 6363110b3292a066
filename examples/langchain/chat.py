"""A LangChain chat whose model remembers.

After ``pip install -r requirements.txt``:

    python chat.py --user maya --remember "My dog is called Pixel." "What is my dog called?"

Questions that follow belong to the same chat.
"""

from __future__ import annotations

import argparse
import os
import secrets

from inferscale_langchain import InferScaleMemory, InferScaleRetriever, memory_model
from langchain_core.chat_history import InMemoryChatMessageHistory


def main() -> int:
    """Writes the given facts, then asks the given questions in one chat."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--user", required=True)
    parser.add_argument("--remember", action="append", default=[], metavar="FACT")
    parser.add_argument("--max-tokens", type=int, default=200, help="longest answer")
    parser.add_argument("questions", nargs="+")
    arguments = parser.parse_args()
    key = os.environ.get("INFERSCALE_API_KEY", "none")

    memory = InferScaleMemory(arguments.url, arguments.user, key)
    if arguments.remember:
        memory.remember(*arguments.remember)
    found = InferScaleRetriever(memory=memory, k=3).invoke(arguments.questions[0])
    print("nearest facts:", *(f"- {document.page_content}" for document in found), sep="\n")

    session = secrets.token_hex(8)
    model = memory_model(
        arguments.url,
        arguments.user,
        key=key,
        session=session,
        max_completion_tokens=arguments.max_tokens,
    )
    history = InMemoryChatMessageHistory()
    for question in arguments.questions:
        history.add_user_message(question)
        answer = model.invoke(history.messages)
        history.add_message(answer)
        print(f"> {question}\n{answer.text}")
        print(f"[memory: {answer.response_metadata['token_usage']['memory']['mode']}]")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
