"""One round of speculative decoding on compressed KV: plan, draft, verify, and return SGLang's result."""
