"""What of a request's path routes are found by."""

from __future__ import annotations

from starlette.types import Scope


def routed_path(scope: Scope) -> str:
    """The path without the root path that proxies may leave in front of it; a root path ends where a segment does.

    Exactly what Starlette's router makes of it: whoever guards a path has to guard the one that is routed.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    rest = path.removeprefix(root)
    return rest if rest != path and (not rest or rest.startswith("/")) else path
