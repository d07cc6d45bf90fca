"""Long answers from sparse attention: how long a token takes, what each part of a step takes, and what the choice of tokens costs."""
