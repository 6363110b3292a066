"""What the pods of `helm test` run, with the standard library only.

Asks the operator whether it is ready, or the model for an answer. The answer itself is not shown:
it may hold a memory.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

DEADLINE = time.monotonic() + float(os.environ["TIMEOUT_SECONDS"])
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url, body=None, user=None):
    """The text of a page; repeated until the time is over while nobody is ready to answer."""
    headers = {"content-type": "application/json"}
    if os.environ.get("API_KEY"):
        headers["authorization"] = "Bearer " + os.environ["API_KEY"]
    if user:
        # A router before the servers goes by it.
        headers["x-user-id"] = urllib.parse.quote(user)
    data = None if body is None else json.dumps(body).encode()
    while True:
        left = DEADLINE - time.monotonic()
        try:
            request = urllib.request.Request(url, data, headers)
            with OPENER.open(request, timeout=max(1.0, left)) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            problem = f"status {error.code}"
            if error.code < 500 and error.code != 429:
                sys.exit(f"{url}: {problem}")
        except OSError as error:
            problem = str(error)
        if DEADLINE - time.monotonic() <= 1:
            sys.exit(f"{url}: {problem}")
        time.sleep(1)


if os.environ.get("OPERATOR_URL"):
    print("operator:", fetch(os.environ["OPERATOR_URL"] + "/readyz").strip())
if os.environ.get("MODEL"):
    question = {
        "model": os.environ["MODEL"],
        "messages": [{"role": "user", "content": os.environ["QUESTION"]}],
        "max_tokens": 32,
    }
    if os.environ.get("MEMORY_USER"):
        question["memory"] = {"user": os.environ["MEMORY_USER"]}
    url = os.environ["MODEL_URL"] + "/v1/chat/completions"
    reply = json.loads(fetch(url, question, os.environ.get("MEMORY_USER")))
    if not reply["choices"][0]["message"]["content"]:
        sys.exit("the model answered with nothing")
    print("the model answered; tokens and memory:", json.dumps(reply.get("usage")))
