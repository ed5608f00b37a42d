"""Triton's interpreter without its most expensive habit; import this before anything that imports Triton.

It patches its language module anew on every call of a helper, which is three quarters of its time. Once per
kernel and module is enough.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch, _launch, _seen = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()


class _Nothing:
    def restore(self):
        """Undo nothing: the launch that patched restores."""


def _patch_once(function):
    key = id(function.__globals__)
    if key in _seen:
        return _Nothing()
    _seen.add(key)
    return _patch(function)


def _launch_afresh(self, *args, **kwargs):
    _seen.clear()
    return _launch(self, *args, **kwargs)


interpreter._patch_lang = _patch_once
interpreter.GridExecutor.__call__ = _launch_afresh
