"""SGLang's frontend language behind SGLang's router of prefill and decode servers.

    backend = sglang_ext.router_endpoint.RouterEndpoint("http://localhost:30000")
    state = program.run(backend=backend)

Stock's ``sgl.RuntimeEndpoint`` asks for all choices of a ``select`` in one request, and the router refuses a list of texts with status
422. One by one it answers them.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.interpreter import StreamExecutor

# Requests under way of one ``select``.
MAX_CONCURRENT_REQUESTS = 16


class RouterEndpoint(RuntimeEndpoint):
    """As ``sgl.RuntimeEndpoint``, but that each prompt goes in a request of its own; before a single server it does the same.

    Args:
        base_url: of the router.
        api_key, verify, chat_template_name: as of ``sgl.RuntimeEndpoint``.
    """

    def _generate_http_request(self, s: StreamExecutor, data: dict[str, Any]) -> Any:
        """The answer to a request to ``/generate``, or those to each prompt of a list, in its order.

        Raises:
            RuntimeError: with what the router said of one that it did not answer.
        """
        ask = super()._generate_http_request
        prompts = "text" if "text" in data else "input_ids"
        given = data[prompts]
        if isinstance(given, str) or not given or isinstance(given[0], int):
            return ask(s, data)
        with ThreadPoolExecutor(min(len(given), MAX_CONCURRENT_REQUESTS)) as pool:
            return list(pool.map(lambda prompt: ask(s, {**data, prompts: prompt}), given))
