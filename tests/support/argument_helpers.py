"""Server arguments whose flags are looked at before SGLang resolves them."""

import dataclasses

from sglang_ext.arguments import CheckedServerArgs


def arguments(**given: object) -> CheckedServerArgs:
    """Arguments as they are before anything is resolved."""
    args = CheckedServerArgs.__new__(CheckedServerArgs)
    for field in dataclasses.fields(CheckedServerArgs):
        made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        setattr(args, field.name, made if field.default is dataclasses.MISSING else field.default)
    vars(args).update({"model_path": "m", "kv_mode": "verified", **given})
    return args
