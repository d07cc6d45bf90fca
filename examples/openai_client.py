"""Chat with the server through the OpenAI client, streaming the answer.

make serve                                         # in another terminal
.venv/bin/python examples/openai_client.py [URL]   # default http://127.0.0.1:30000
"""

import inspect
import sys
import textwrap

from openai import APIConnectionError, APIStatusError, OpenAI


def main(url: str = "http://127.0.0.1:30000") -> None:
    """Ask about some hundred tokens of source code: drafting starts at 128 tokens of context."""
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    try:
        model = client.models.list().data[0].id
    except APIConnectionError as error:
        sys.exit(f"no server answers at {url} ({error.__cause__}): start one with `make serve`, or pass the URL of another one")
    except APIStatusError as error:
        sys.exit(f"{url}/v1/models answers with status {error.status_code}: pass the URL of an SGLang server, without /v1")
    question = f"What does this Python module do?\n\n{inspect.getsource(textwrap)[:2000]}"
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:2])
