"""What runs in SGLang's scheduler: planning, drafting, verifying, emitting."""
