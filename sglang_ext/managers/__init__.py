"""The parts that run in SGLang's scheduler process: they plan rounds, draft, verify and return output tokens."""
