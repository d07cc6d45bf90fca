"""SGLang's frontend language for SGLang's router of prefill and decode servers.

    backend = sglang_ext.router_endpoint.RouterEndpoint("http://localhost:30000")
    state = program.run(backend=backend)

Stock's ``sgl.RuntimeEndpoint`` sends all choices of a ``select`` in one request. The router refuses a list of texts with status 422, but
accepts single requests.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.interpreter import StreamExecutor

# Concurrent requests of one ``select``.
MAX_CONCURRENT_REQUESTS = 16


class RouterEndpoint(RuntimeEndpoint):
    """As ``sgl.RuntimeEndpoint``, but with one request per prompt. It also works with a single server."""

    def _generate_http_request(self, s: StreamExecutor, data: dict[str, Any]) -> Any:
        """Return the response to a request to ``/generate``, or a list of responses, one for each prompt of a list."""
        ask = super()._generate_http_request
        prompts = "text" if "text" in data else "input_ids"
        given = data[prompts]
        if isinstance(given, str) or not given or isinstance(given[0], int):
            return ask(s, data)
        with ThreadPoolExecutor(min(len(given), MAX_CONCURRENT_REQUESTS)) as pool:
            return list(pool.map(lambda prompt: ask(s, {**data, prompts: prompt}), given))
